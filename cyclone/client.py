"""The door for programs: clients, async and sync with the same names, and the handles of what they enqueued.

What a call checks, sends and makes of the rows is in the flow modules, once; here async and sync differ only by
`await`. A client needs neither LISTEN nor prepared statements nor settings of the session, so it works through a pooler
in transaction mode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import psycopg
import psycopg_pool
from psycopg import conninfo
from psycopg.rows import tuple_row

from . import caller, config, control, db, graph, handles, migrate, runs, store, views, wake
from .errors import (
    CycloneError,
    InvalidOptionError,
)
from .events import Hook, OnStepEvent, seen, seen_run
from .handles import StepHandle, SyncStepHandle
from .model import Cursor, Event, Page, RunID, RunInfo, StepInfo
from .plan import AsyncOwn, Own, Plan, drive, drive_sync
from .registry import AsyncTx, Step, SyncTx
from .states import EventKind, RunState

T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")

# A pool of a client's own: small, since each of its calls holds a connection for one short transaction.
_MIN_SIZE, _MAX_SIZE = 1, 10
_POOL_TIMEOUT_S = 30.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.010, 0.500
_FIRST_POLL_S = 0.020


# The pools of the library keep whoever has waited in vain until a connection comes back: while the database is away,
# every call would leave its waiter behind, with an error and the frames that it names. Whoever gives up therefore
# removes those that have. For that we reach for an attribute that is private to the library; should it be gone, no call
# fails (tests/flow/test_away.py notices).


class _Pool(psycopg_pool.AsyncConnectionPool[psycopg.AsyncConnection[Any]]):
    async def getconn(self, timeout: float | None = None) -> psycopg.AsyncConnection[Any]:
        try:
            return await super().getconn(timeout)
        except BaseException:
            _forget(vars(self).get("_waiting"))
            raise


class _SyncPool(psycopg_pool.ConnectionPool[psycopg.Connection[Any]]):
    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]:
        try:
            return super().getconn(timeout)
        except BaseException:
            with self._lock:
                _forget(vars(self).get("_waiting"))
            raise


def _forget(waiting: Any) -> None:
    # They give up about in the order in which they came.
    while waiting and waiting[0].error is not None:
        waiting.popleft()


class _ClientBase:
    """What both clients share: their settings, and what their calls mean."""

    def __init__(
        self,
        dsn: str | None,
        given_pool: bool,
        schema: str | None,
        max_input_bytes: int,
        application_name: str,
        statement_timeout: timedelta | float | None,
        on_step_event: OnStepEvent | None,
    ) -> None:
        self._hook = None if on_step_event is None else Hook(on_step_event)
        given = {"schema": schema} if given_pool else {"dsn": dsn, "schema": schema}
        found = config.settings(given, names=("dsn", "schema"))
        if given_pool and (dsn is not None or statement_timeout is not None):
            raise InvalidOptionError("a given pool has its own dsn and statement_timeout; set them there")
        if not given_pool and "dsn" not in found:
            raise InvalidOptionError("no database was named: give dsn=, pool= or the variable CYCLONE_DSN")
        self._statements = db.statements(found.get("schema", "public"))
        self._quiet = wake.Quiet()
        self._max_input_bytes = config.count("max_input_bytes", max_input_bytes)
        self._application_name = config.text("application_name", application_name)
        self._dsn = "" if given_pool else str(found["dsn"])
        self._connect: dict[str, Any] = {}
        if not given_pool:
            self._connect = db.connect_options(self._dsn, application_name)
            self._connect |= {"autocommit": True, "prepare_threshold": None}
            if statement_timeout is not None:
                limit_ms = max(round(config.seconds("statement_timeout", statement_timeout) * 1000), 1)
                given_options = conninfo.conninfo_to_dict(self._dsn).get("options") or ""
                self._connect["options"] = f"{given_options} -c statement_timeout={limit_ms}".lstrip()

    def __repr__(self) -> str:
        place = db.where(self._dsn) if self._dsn else "a given pool"
        return f"<{type(self).__name__} {place}, schema {self._statements.schema}>"

    def _tell_submitted(self, hook: Hook, batch: store.Runs, found: Sequence[store.Submitted]) -> None:
        hook.tell([seen_run(EventKind.RUN_STARTED, one.run_id, batch.workflow.name) for one in found if one.created])

    def _prepared(
        self, step: Step[Any, Any], inputs: Iterable[Any], options: Mapping[str, Any], *, in_tx: bool
    ) -> store.Batch:
        return store.prepare(step, inputs, options, max_input_bytes=self._max_input_bytes, in_tx=in_tx)

    def _tell_enqueued(self, hook: Hook, batch: store.Batch, stored: store.Stored) -> None:
        later = batch.scheduled_at is not None and batch.scheduled_at > datetime.now(UTC)
        kind = EventKind.SCHEDULED if batch.delay_s or later else EventKind.ENQUEUED
        hook.tell(
            [
                seen(kind, run_id, batch.kind, batch.kind, batch.settings.queue, 0)
                for run_id, new in stored.pairs()
                if new
            ]
        )

    def _feed(
        self,
        after: Cursor | None = None,
        kinds: Iterable[EventKind | str] | None = None,
        run_id: str | None = None,
    ) -> views.Feed:
        return views.Feed(self._statements, after=after, kinds=kinds, run_id=run_id)


class Client(_ClientBase):
    """A client for async code. Open it with `async with`, or `open()` and `close()`.

    `dsn` names the database (default: the variable CYCLONE_DSN); or give a psycopg `pool`, which stays the caller's to
    open and close and may be in autocommit or not. `schema` is where Cyclone was installed (default: the variable
    CYCLONE_SCHEMA, else "public"). An encoded input may take `max_input_bytes` (default 1 MiB). `statement_timeout`, a
    timedelta or seconds, limits each statement (default: as the role has it); it is asked for when connecting, which a
    pooler in transaction mode may refuse.

    `on_step_event(event)` is called with what this client and its handles did to steps, once it is committed:
    `enqueued`, `scheduled`, `cancelled`, `reopened`; not for the `_tx` forms, whose commit is the caller's. It must be
    a plain function. It runs in a thread of its own, so it holds nobody up; when it is slower than what happens, events
    are dropped and counted past a bound of 10,000. What it raises is logged and counted, and changes nothing. `close`
    waits for it up to 5 s.

    Each call commits by itself, but for the `_tx` forms. A call waits at most 30 s for one of 10 connections of the
    client's own pool (then `psycopg_pool.PoolTimeout`); a server that answers nothing any more is given up after 45 s.
    Errors of the database pass through as psycopg raised them.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: psycopg_pool.AsyncConnectionPool[Any] | None = None,
        schema: str | None = None,
        max_input_bytes: int = 1 << 20,
        application_name: str = "cyclone",
        statement_timeout: timedelta | float | None = None,
        on_step_event: OnStepEvent | None = None,
    ) -> None:
        super().__init__(
            dsn, pool is not None, schema, max_input_bytes, application_name, statement_timeout, on_step_event
        )
        self._given = pool
        self._pool = pool
        self._submissions = runs.AsyncSubmissions(
            runs.Door(self._statements, self._run, self._hook), self._store_runs, self._max_input_bytes
        )

    async def open(self) -> None:
        """Connects and looks at the schema; harmless when open. Raises ConnectError or SchemaVersionError."""
        if self._given is not None:
            async with self._given.connection() as conn:
                await self._check(conn)
        elif self._pool is None:
            # Not through the pool, which would go on trying and tell nothing but that the time was up.
            conn = await db.connect(self._dsn, application_name=self._application_name, pooler=True)
            async with conn:
                await self._check(conn)
            pool = _Pool(
                self._dsn,
                connection_class=AsyncOwn,
                kwargs=self._connect,
                min_size=_MIN_SIZE,
                max_size=_MAX_SIZE,
                timeout=_POOL_TIMEOUT_S,
                name=self._application_name,
                open=False,
            )
            # Whoever finds it empty makes it grow, and then calls take turns on connections that each have to warm up.
            await pool.open(wait=True)
            self._pool = pool

    async def close(self) -> None:
        """Closes the client's own connections; a given pool stays as it is."""
        pool, self._pool = self._pool, self._given
        if pool is not None and pool is not self._given:
            await pool.close()
        if self._hook is not None:
            await asyncio.to_thread(self._hook.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get_run(self, run_id: str) -> RunInfo:
        """One run as it is stored: of a workflow, or a step that was enqueued by itself. Raises NotFoundError if none
        is visible.
        """
        return await self._run(views.run(self._statements, run_id))

    async def list_runs(
        self,
        *,
        workflow: str | graph.AnyWorkflow | None = None,
        state: RunState | str | None = None,
        key: str | None = None,
        tag: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[RunInfo]:
        """Runs of workflows that match all that is given, newest first, at most `limit` (up to 1,000).

        `after` is the `next` of the page before: pages do not shift while runs come and go. `key` is a submit key,
        `tag` one of the run's tags, times are aware datetimes. Raises InvalidOptionError before any connection is
        taken.
        """
        wanted = views.run_filter(
            workflow=workflow, state=state, key=key, tag=tag, created_after=created_after,
            created_before=created_before, limit=limit, after=after,
        )  # fmt: skip
        return await self._run(views.runs(self._statements, wanted))

    async def cancel(self, run_id: str, *, reason: str | None = None, actor: str | None = None) -> bool:
        """Cancels a run; False if it had ended already, and then nothing is changed.

        Its nodes that have not ended become `cancelled`; handlers that run are told to stop within two seconds, and
        what they still return or write on their completion transactions is refused. `reason` is kept with the run,
        and with `actor` (default: `user@host` of this process) in the event `run_cancelled`. A step that was enqueued
        by itself is cancelled as by `cancel_step`. Waits while another transaction holds the run. Raises
        NotFoundError if no such run is visible.
        """
        asked = control.request(actor=actor, reason=reason)
        return await self._run(handles.cancel_run(self._statements, self._hook, run_id, asked))

    async def cancel_tx(self, tx: AsyncTx, run_id: str, *, reason: str | None = None, actor: str | None = None) -> bool:
        """As `cancel`, in the caller's transaction, which holds the run and what it ended until its end. Of a run with
        more than 1,000 open nodes the rest is ended by a sweeper after the commit.
        """
        asked = control.request(actor=actor, reason=reason)
        conn = await caller.connection(tx, "Client")
        return await drive(conn, control.cancel_run(self._statements, views.run_number(run_id), asked)) is not None

    async def get_step(self, run_id: str, node: str) -> StepInfo:
        """One step as it is stored. Raises NotFoundError if none is visible."""
        return await self._run(views.step(self._statements, run_id, node))

    async def list_steps(self, run_id: str) -> list[StepInfo]:
        """The steps of a run, oldest first; a step that was enqueued by itself is the only one of its run.

        Raises NotFoundError if the run is not visible.
        """
        return await self._run(views.steps(self._statements, run_id))

    async def cancel_step(self, run_id: str, node: str, *, reason: str | None = None, actor: str | None = None) -> bool:
        """Cancels one step; False if it had ended already.

        A step that nobody runs is never called any more. A running handler is told to stop within two seconds; what it
        still returns, or writes on its completion transaction, is refused. `reason` is kept as the step's error and
        with `actor` (default: `user@host` of this process) in the event `cancelled`. Waits while another transaction
        holds the step. Raises NotFoundError if no such step is visible.
        """
        asked = control.request(actor=actor, reason=reason)
        return await self._run(handles.cancel(self._statements, self._hook, run_id, node, asked))

    async def retry(
        self,
        run_id: str,
        node: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> None:
        """Reopens one discarded node in place: the same step becomes available again and its attempts go on counting.

        It may fail `additional_attempts` times more (default 1); deaths of workers and snoozes are counted anew; the
        list of its errors stays. `reason`, up to 10,000 bytes, and `actor` (default: `user@host` of this process) are
        recorded in the event `reopened`. Commits by itself.

        A run of a workflow that had ended is running again, and the nodes that were cancelled because of that failure
        come back; those that somebody cancelled do not. A run whose deadline has passed needs a new `deadline`: an
        aware datetime, or a timedelta or seconds from now.

        Raises InvalidOptionError before any connection is taken, NotFoundError if no such node is visible, and
        InvalidStateError if it is not discarded, if the run was cancelled, or if it needs a new deadline. Waits while
        another transaction holds the step or its run.
        """
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        await self._run(handles.reopen(self._statements, self._hook, run_id, node, asked))

    async def retry_all(
        self,
        run_id: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> int:
        """Reopens every discarded node of a run, as `retry` does, in one commit; returns how many there were.

        0 when none is discarded, and then nothing is changed; but a new `deadline` also brings back a run that had run
        out of time. Raises NotFoundError if no such run is visible.
        """
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        return await self._run(handles.reopen(self._statements, self._hook, run_id, None, asked))

    async def retry_tx(
        self,
        tx: AsyncTx,
        run_id: str,
        node: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> None:
        """As `retry`, in the caller's transaction: a repair and the retry that needs it commit together, or neither.

        `tx` is a psycopg connection in a transaction (else TransactionRequiredError; TypeError for another object). The
        step stays locked until it ends. After an error of Cyclone's own the transaction goes on.
        """
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        conn = await caller.connection(tx, "Client")
        await drive(conn, _reopen_in(self._statements, run_id, node, asked))

    async def retry_all_tx(
        self,
        tx: AsyncTx,
        run_id: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> int:
        """As `retry_all`, in the caller's transaction, as `retry_tx`."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        conn = await caller.connection(tx, "Client")
        return await drive(conn, _reopen_in(self._statements, run_id, None, asked))

    def events(
        self,
        *,
        after: Cursor | None = None,
        kinds: Iterable[EventKind | str] | None = None,
        run_id: str | None = None,
    ) -> AsyncGenerator[Event]:
        """The recorded events from a place to the end of now, in an order that never changes and with none left out.

        `after` is the `cursor` of the last event that was had (default: from the beginning); whoever stores it can go
        on there at any time, on the same server. `kinds` are those to have (default: all that are recorded), `run_id`
        the run. An event is given once every transaction that was open before it has ended: a program that keeps a
        writing transaction open holds up those that read here, and `cyclone doctor` names it. Each page of 500 is a
        call of its own. Raises InvalidOptionError for a bad cursor and for kinds that are never recorded, at once;
        NotFoundError for a text that is no run's id.
        """
        return self._events(self._feed(after, kinds, run_id))

    async def _events(self, feed: views.Feed) -> AsyncGenerator[Event]:
        while page := await self._run(feed.page()):
            for event in page:
                yield event

    def subscribe(
        self,
        *,
        kinds: Iterable[EventKind | str] | None = None,
        run_id: str | None = None,
        buffer: int = 1000,
    ) -> AsyncGenerator[Event]:
        """Events as they are recorded, from when the first is asked for on, without an end; otherwise as `events`.

        It polls, every 20 ms while there is something and down to twice a second while there is not. More than `buffer`
        events that wait for a slow reader are a `gap`: one event of that kind, with their `count` in its `detail`,
        takes the place of the oldest. Whoever needs those reads `events(after=cursor)` from the last one that was had.
        An error of the database ends it.
        """
        return self._subscribe(self._feed(kinds=kinds, run_id=run_id), config.count("buffer", buffer))

    async def _subscribe(self, feed: views.Feed, buffer: int) -> AsyncGenerator[Event]:
        await self._run(feed.skip())
        pauses = handles.pauses(None, _FIRST_POLL_S)
        while True:
            if page := await self._run(feed.page(buffer)):
                pauses = handles.pauses(None, _FIRST_POLL_S)
            for event in page:
                yield event
            await asyncio.sleep(next(pauses))

    async def __cyclone_enqueue__(
        self,
        step: Step[In, Out],
        inputs: Iterable[In],
        options: Mapping[str, Any],
        tx: AsyncTx | None = None,
        /,
    ) -> list[StepHandle[Out]]:
        batch = self._prepared(step, inputs, options, in_tx=tx is not None)
        conn = None if tx is None else await caller.connection(tx, "Client")
        if not batch.inputs:
            return []
        if conn is not None:
            stored = await drive(conn, store.store(self._statements, batch, notify=True))
        else:
            stored = await self._run(store.enqueue(self._statements, batch, quiet=self._quiet))
            if self._hook is not None:
                self._tell_enqueued(self._hook, batch, stored)
        statements, hook, run = self._statements, self._hook, self._run
        return [StepHandle(statements, step, RunID(run_id), hook, new, run) for run_id, new in stored.pairs()]

    async def __cyclone_submit__(
        self, workflow: graph.AnyWorkflow, inputs: Iterable[Any], options: graph.SubmitOptions, tx: Any = None, /
    ) -> list[Any]:
        return await self._submissions.submit(workflow, inputs, options, tx)

    async def __cyclone_submit_once__(
        self,
        workflow: graph.AnyWorkflow,
        items: Iterable[tuple[str, Any]],
        options: graph.SubmitOptions,
        compare: object,
        tx: Any = None,
        /,
    ) -> list[runs.OnceResult[Any]]:
        return await self._submissions.submit_once(workflow, items, options, compare, tx)

    async def __cyclone_find__(self, workflow: graph.AnyWorkflow, key: str, /) -> Any:
        return await self._submissions.find(workflow, key)

    def __cyclone_run__(self, workflow: graph.AnyWorkflow, run_id: str, /) -> Any:
        return self._submissions.get(workflow, run_id)

    async def _store_runs(self, batch: store.Runs, tx: Any) -> list[store.Submitted]:
        if tx is not None:
            conn = await caller.connection(tx, "Client")
            return (await drive(conn, store.store_runs(self._statements, batch, notify=True)))[0]
        found = await self._run(store.submit(self._statements, batch, quiet=self._quiet))
        if self._hook is not None:
            self._tell_submitted(self._hook, batch, found)
        return found

    async def _check(self, conn: psycopg.AsyncConnection[Any]) -> None:
        with _plain(conn):
            version = await migrate.read_version_async(conn, self._statements.schema)
        migrate.require(version, self._statements.schema)

    async def _run(self, plan: Plan[T], /) -> T:
        if self._pool is None:
            raise _closed("async with Client(...) as client")
        dead = 0
        while True:
            async with self._pool.connection() as conn:
                if dead < _MAX_SIZE and _ended(conn):
                    dead += 1
                    await conn.close()
                    continue
                return await drive(conn, plan)


class SyncClient(_ClientBase):
    """A client for sync code, with the names of `Client`, whose description holds here too. Threads may share it."""

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: psycopg_pool.ConnectionPool[Any] | None = None,
        schema: str | None = None,
        max_input_bytes: int = 1 << 20,
        application_name: str = "cyclone",
        statement_timeout: timedelta | float | None = None,
        on_step_event: OnStepEvent | None = None,
    ) -> None:
        super().__init__(
            dsn, pool is not None, schema, max_input_bytes, application_name, statement_timeout, on_step_event
        )
        self._given = pool
        self._pool = pool
        self._submissions = runs.SyncSubmissions(
            runs.Door(self._statements, self._run, self._hook), self._store_runs, self._max_input_bytes
        )

    def open(self) -> None:
        """As Client.open."""
        if self._given is not None:
            with self._given.connection() as conn:
                self._check(conn)
        elif self._pool is None:
            with db.connect_sync(self._dsn, application_name=self._application_name, pooler=True) as conn:
                self._check(conn)
            pool = _SyncPool(
                self._dsn,
                connection_class=Own,
                kwargs=self._connect,
                min_size=_MIN_SIZE,
                max_size=_MAX_SIZE,
                timeout=_POOL_TIMEOUT_S,
                name=self._application_name,
                open=False,
            )
            pool.open(wait=True)
            self._pool = pool

    def close(self) -> None:
        """As Client.close."""
        pool, self._pool = self._pool, self._given
        if pool is not None and pool is not self._given:
            pool.close()
        if self._hook is not None:
            self._hook.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_run(self, run_id: str) -> RunInfo:
        """As Client.get_run."""
        return self._run(views.run(self._statements, run_id))

    def list_runs(
        self,
        *,
        workflow: str | graph.AnyWorkflow | None = None,
        state: RunState | str | None = None,
        key: str | None = None,
        tag: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page[RunInfo]:
        """As Client.list_runs."""
        wanted = views.run_filter(
            workflow=workflow, state=state, key=key, tag=tag, created_after=created_after,
            created_before=created_before, limit=limit, after=after,
        )  # fmt: skip
        return self._run(views.runs(self._statements, wanted))

    def cancel(self, run_id: str, *, reason: str | None = None, actor: str | None = None) -> bool:
        """As Client.cancel."""
        asked = control.request(actor=actor, reason=reason)
        return self._run(handles.cancel_run(self._statements, self._hook, run_id, asked))

    def cancel_tx(self, tx: SyncTx, run_id: str, *, reason: str | None = None, actor: str | None = None) -> bool:
        """As Client.cancel_tx."""
        asked = control.request(actor=actor, reason=reason)
        conn = caller.connection_sync(tx, "SyncClient")
        return drive_sync(conn, control.cancel_run(self._statements, views.run_number(run_id), asked)) is not None

    def get_step(self, run_id: str, node: str) -> StepInfo:
        """As Client.get_step."""
        return self._run(views.step(self._statements, run_id, node))

    def list_steps(self, run_id: str) -> list[StepInfo]:
        """As Client.list_steps."""
        return self._run(views.steps(self._statements, run_id))

    def cancel_step(self, run_id: str, node: str, *, reason: str | None = None, actor: str | None = None) -> bool:
        """As Client.cancel_step."""
        asked = control.request(actor=actor, reason=reason)
        return self._run(handles.cancel(self._statements, self._hook, run_id, node, asked))

    def retry(
        self,
        run_id: str,
        node: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> None:
        """As Client.retry."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        self._run(handles.reopen(self._statements, self._hook, run_id, node, asked))

    def retry_all(
        self,
        run_id: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> int:
        """As Client.retry_all."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        return self._run(handles.reopen(self._statements, self._hook, run_id, None, asked))

    def retry_tx(
        self,
        tx: SyncTx,
        run_id: str,
        node: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> None:
        """As Client.retry_tx."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        conn = caller.connection_sync(tx, "SyncClient")
        drive_sync(conn, _reopen_in(self._statements, run_id, node, asked))

    def retry_all_tx(
        self,
        tx: SyncTx,
        run_id: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> int:
        """As Client.retry_all_tx."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        conn = caller.connection_sync(tx, "SyncClient")
        return drive_sync(conn, _reopen_in(self._statements, run_id, None, asked))

    def events(
        self,
        *,
        after: Cursor | None = None,
        kinds: Iterable[EventKind | str] | None = None,
        run_id: str | None = None,
    ) -> Generator[Event]:
        """As Client.events, blocking."""
        return self._events(self._feed(after, kinds, run_id))

    def _events(self, feed: views.Feed) -> Generator[Event]:
        while page := self._run(feed.page()):
            yield from page

    def subscribe(
        self,
        *,
        kinds: Iterable[EventKind | str] | None = None,
        run_id: str | None = None,
        buffer: int = 1000,
    ) -> Generator[Event]:
        """As Client.subscribe, blocking."""
        return self._subscribe(self._feed(kinds=kinds, run_id=run_id), config.count("buffer", buffer))

    def _subscribe(self, feed: views.Feed, buffer: int) -> Generator[Event]:
        self._run(feed.skip())
        pauses = handles.pauses(None, _FIRST_POLL_S)
        while True:
            if page := self._run(feed.page(buffer)):
                pauses = handles.pauses(None, _FIRST_POLL_S)
            yield from page
            time.sleep(next(pauses))

    def __cyclone_enqueue__(
        self,
        step: Step[In, Out],
        inputs: Iterable[In],
        options: Mapping[str, Any],
        tx: SyncTx | None = None,
        /,
    ) -> list[SyncStepHandle[Out]]:
        batch = self._prepared(step, inputs, options, in_tx=tx is not None)
        conn = None if tx is None else caller.connection_sync(tx, "SyncClient")
        if not batch.inputs:
            return []
        if conn is not None:
            stored = drive_sync(conn, store.store(self._statements, batch, notify=True))
        else:
            stored = self._run(store.enqueue(self._statements, batch, quiet=self._quiet))
            if self._hook is not None:
                self._tell_enqueued(self._hook, batch, stored)
        statements, hook, run = self._statements, self._hook, self._run
        return [SyncStepHandle(statements, step, RunID(run_id), hook, new, run) for run_id, new in stored.pairs()]

    def __cyclone_submit__(
        self, workflow: graph.AnyWorkflow, inputs: Iterable[Any], options: graph.SubmitOptions, tx: Any = None, /
    ) -> list[Any]:
        return self._submissions.submit(workflow, inputs, options, tx)

    def __cyclone_submit_once__(
        self,
        workflow: graph.AnyWorkflow,
        items: Iterable[tuple[str, Any]],
        options: graph.SubmitOptions,
        compare: object,
        tx: Any = None,
        /,
    ) -> list[runs.OnceResult[Any]]:
        return self._submissions.submit_once(workflow, items, options, compare, tx)

    def __cyclone_find__(self, workflow: graph.AnyWorkflow, key: str, /) -> Any:
        return self._submissions.find(workflow, key)

    def __cyclone_run__(self, workflow: graph.AnyWorkflow, run_id: str, /) -> Any:
        return self._submissions.get(workflow, run_id)

    def _store_runs(self, batch: store.Runs, tx: Any) -> list[store.Submitted]:
        if tx is not None:
            conn = caller.connection_sync(tx, "SyncClient")
            return drive_sync(conn, store.store_runs(self._statements, batch, notify=True))[0]
        found = self._run(store.submit(self._statements, batch, quiet=self._quiet))
        if self._hook is not None:
            self._tell_submitted(self._hook, batch, found)
        return found

    def _check(self, conn: psycopg.Connection[Any]) -> None:
        with _plain(conn):
            version = migrate.read_version(conn, self._statements.schema)
        migrate.require(version, self._statements.schema)

    def _run(self, plan: Plan[T], /) -> T:
        if self._pool is None:
            raise _closed("with SyncClient(...) as client")
        dead = 0
        while True:
            with self._pool.connection() as conn:
                if dead < _MAX_SIZE and _ended(conn):
                    dead += 1
                    conn.close()
                    continue
                return drive_sync(conn, plan)


def _reopen_in(statements: db.Statements, run_id: str, node: str | None, asked: control.Request) -> Plan[int]:
    done = yield from control.reopen(statements, views.run_number(run_id), node, asked, notify=True)
    return len(done.events)


@contextmanager
def _plain(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> Generator[None]:
    """Rows as tuples, and nothing prepared, for a while: whatever the pool that was given has set."""
    factory, threshold = conn.row_factory, conn.prepare_threshold
    conn.row_factory, conn.prepare_threshold = cast("Any", tuple_row), None
    try:
        yield
    finally:
        conn.row_factory, conn.prepare_threshold = cast("Any", factory), threshold


def _ended(conn: psycopg.BaseConnection[Any]) -> bool:
    """Whether the server has closed a pooled connection, which shows at its socket after what the server said last.

    A statement to find out would double the cost of a small call; and the check of the pool itself pauses longer after
    each dead connection, so that a restart of the server would hold up a call for many seconds.
    """
    try:
        conn.pgconn.consume_input()
        conn.pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return False


def _closed(how: str) -> CycloneError:
    return CycloneError(f"the client is not open; use `{how}` or call open()")
