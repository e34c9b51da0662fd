"""What a handler is given: who the step is, the completion transaction, and whether it should stop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

import msgspec

from . import caller, codec, completion, db, records
from .errors import Cancelled, CompletionTxError, LeaseLostError, NotFoundError
from .model import Claimed, RunID, StepError
from .plan import Plan, Run, drive, drive_sync
from .registry import AsyncTx, SyncTx

_log = logging.getLogger("cyclone.handler")

T = TypeVar("T")


def _refuse_tx(tx: object) -> None:
    if tx is not None:
        raise TypeError("a handler's context joins its completion transaction; give a client to join another one")


def _node_name(node: Any) -> str:
    name = getattr(node, "name", node)
    if not isinstance(name, str):
        raise TypeError(f"a step or the name of a node is expected, not {type(node).__name__}")
    return name


def _check_ancestor(known: bool | None, name: str) -> None:
    if known is None:
        raise NotFoundError("a step that was enqueued by itself has no other nodes")
    if not known:
        raise NotFoundError(f"no node {name!r} comes before this one in its graph")


def _load_output(statements: db.Statements, step: Claimed, name: str) -> Plan[bytes | None]:
    rows = yield Run(statements["load_outputs"], {"runs": [step.run_id], "nodes": [name]})
    return bytes(rows[0][1]) if rows and rows[0][1] is not None else None


def _output(node: Any, data: bytes | None) -> Any:
    if data is None:
        return None
    kind = getattr(node, "output_codec", None)
    return msgspec.json.decode(data) if kind is None else kind.decode(data)


class StepLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records carry run, node and attempt."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        fields: Mapping[str, object] = self.extra or {}
        kwargs["extra"] = {**fields, **(kwargs.get("extra") or {})}
        return f"{msg} [run {fields['run_id']} node {fields['node']} attempt {fields['attempt']}]", kwargs


@dataclass(frozen=True, slots=True)
class AsyncDoors:
    """A worker's ways to the database for its async handlers."""

    completions: completion.AsyncCompletions
    records: records.AsyncRecords
    enqueue: Callable[..., Awaitable[list[Any]]]
    """Stores steps on a connection: (connection, step, inputs, options) -> handles."""
    submissions: Any
    """Submits workflows on a connection."""
    ancestor: Callable[[Claimed, str], bool | None]
    """Whether a node of this name comes before the step in its graph; None: the step has no graph."""
    encode: Callable[[Claimed, Any], str | None]
    """An output of the step as JSON to be stored; raises when it cannot be."""


@dataclass(frozen=True, slots=True)
class SyncDoors:
    """The same for handlers in threads."""

    completions: completion.SyncCompletions
    records: records.SyncRecords
    enqueue: Callable[..., list[Any]]
    submissions: Any
    ancestor: Callable[[Claimed, str], bool | None]
    encode: Callable[[Claimed, Any], str | None]


class _About:
    """Which step this is, and which execution of it."""

    # Class attributes are the defaults, here and below: most handlers ask for little, and each store costs every step.
    _log: StepLog | None = None

    def __init__(self, claimed: Claimed) -> None:
        self._claimed = claimed

    @property
    def run_id(self) -> RunID:
        """The id of the run: decimal digits. With `node` it stays the same for the life of the step."""
        return RunID(str(self._claimed.run_id))

    @property
    def node(self) -> str:
        """The name of the node in its run; the step's own name when it was enqueued by itself."""
        return self._claimed.node

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. It grows after a failed attempt only; do not make it part of a key."""
        return self._claimed.attempt

    @property
    def max_attempts(self) -> int:
        """The attempts allowed for this step."""
        return self._claimed.max_attempts

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure of this attempt discards the step."""
        return self._claimed.attempt >= self._claimed.max_attempts

    @property
    def idempotency_key(self) -> str:
        """`"<run_id>:<node>"`: the same in every execution of this step."""
        return f"{self._claimed.run_id}:{self._claimed.node}"

    def key(self, *parts: str) -> str:
        """A further key, for one of several effects in one handler: the idempotency key with the parts appended."""
        return ":".join((self.idempotency_key, *parts))

    @property
    def reclaims(self) -> int:
        """How often a worker was lost while it executed this step."""
        return self._claimed.reclaims

    @property
    def snoozes(self) -> int:
        """How often this step was snoozed."""
        return self._claimed.snoozes

    @property
    def queue(self) -> str:
        """The queue the step came from."""
        return self._claimed.queue

    @property
    def tags(self) -> Sequence[str]:
        """The step's tags."""
        return self._claimed.tags or ()

    @property
    def metadata(self) -> Any:
        """The step's metadata, as JSON built-ins."""
        data = self._claimed.metadata
        return None if data is None else msgspec.json.decode(data)

    @property
    def enqueued_at(self) -> datetime:
        """When the step was enqueued, by the database's clock."""
        return self._claimed.enqueued_at

    @property
    def deadline(self) -> datetime | None:
        """When the run must have ended, if it has a deadline."""
        return self._claimed.deadline_at

    @property
    def failed_dependencies(self) -> Sequence[StepError]:
        """For a node that is declared RUN_ANYWAY: how the nodes failed that it depends on. Empty for all others."""
        return self._claimed.failed_dependencies

    @property
    def log(self) -> StepLog:
        """A logger whose records carry run, node and attempt."""
        if self._log is None:
            fields = {"run_id": self.run_id, "node": self.node, "attempt": self.attempt}
            self._log = StepLog(_log, fields)
        return self._log


class ProcessContext(_About):
    """The context of a `def` handler that runs in a process of its own.

    There is no completion transaction and no `state` of a lifespan: both belong to the worker's process. Such a handler
    returns an output, or makes its effects safe by keys. When it should stop, `Cancelled` is raised in it; let it pass.
    """


class _Shared(_About):
    """What async handlers and those in threads see alike."""

    state: Any
    """What the lifespan put there, once per worker process."""
    _completed_in = False
    _ending = False
    _lost = False
    _done = False
    _conn: Any = None  # of the completion transaction, while it is there
    _held_since = 0.0

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: its time is up, somebody cancelled the step, or the worker is stopping."""
        return self._ending

    @property
    def lease_lost(self) -> bool:
        """Whether the worker has lost the step: nothing that this execution still does will count."""
        return self._lost

    def check_cancelled(self) -> None:
        """Raises Cancelled when the handler should stop."""
        if self._ending:
            raise Cancelled(self.idempotency_key)

    def _complete_in(self, doors: AsyncDoors | SyncDoors | None, has_tx: bool, output: Any) -> Plan[None]:
        if doors is None:
            raise CompletionTxError("no step can be completed outside a worker")
        if has_tx:
            raise CompletionTxError("this execution has begun its completion transaction, and completes in that")
        if self._completed_in:
            raise CompletionTxError("complete_in was called before in this execution")
        step = self._claimed
        run = None if step.graph is None else step.run_id
        fence = {"id": step.id, "claim": step.claim, "run": run}
        sql = doors.records.statements["complete_in"]
        ((done,),) = yield Run(sql, {**fence, "output": doors.encode(step, output), "now": None})
        if not done:
            raise LeaseLostError("the lease of this step was lost; roll the transaction back")
        self._completed_in = True

    def _order_end(self, *, lost: bool) -> None:
        self._ending = True
        self._lost = self._lost or lost

    @property
    def _has_tx(self) -> bool:
        return self._conn is not None

    def _close(self) -> bool:
        """The handler has ended. Whether it has a completion transaction to give back."""
        self._done = True
        return self._conn is not None


class Context(_Shared):
    """The context of an `async def` handler.

    A handler may be called more than once for one step: what it does is either written on the completion transaction or
    safe to do again, by the idempotency key.
    """

    _begin: asyncio.Lock | None = None
    _tx: completion.CompletionTx | None = None

    def __init__(self, claimed: Claimed, state: Any, doors: AsyncDoors | None) -> None:
        self._claimed = claimed
        self.state = state
        self._doors = doors

    async def completion_tx(self) -> completion.CompletionTx:
        """The transaction that commits together with this step, or not at all.

        Begun at the first call of an execution, at READ COMMITTED on the worker's database; later calls return the
        same object. Ask late: the pool of such connections is small. Raises PoolTimeoutError when none becomes free
        in time; let it pass, and the step is given back without spending an attempt.
        """
        if self._tx is not None:
            return self._tx
        if self._doors is None:
            raise CompletionTxError("there is no completion transaction outside a worker")
        if self._done:
            raise CompletionTxError("this execution has ended: its completion transaction can no longer be begun")
        if self._lost:
            raise LeaseLostError("the lease of this step was lost")
        if self._begin is None:
            self._begin = asyncio.Lock()
        async with self._begin:
            if self._tx is None:
                completions = self._doors.completions
                conn = await completions.begin(self._claimed)
                if self._done:  # the execution was given up while this waited
                    await completions.end(conn, time.perf_counter())
                    raise CompletionTxError(
                        "this execution has ended: its completion transaction can no longer be begun"
                    )
                self._conn = conn
                self._held_since = time.perf_counter()
                self._tx = completion.CompletionTx(conn)
        return self._tx

    async def __cyclone_enqueue__(self, step: Any, inputs: Iterable[Any], options: Any, tx: Any = None, /) -> list[Any]:
        doors = self._open(tx)
        return await doors.enqueue((await self.completion_tx()).connection, step, inputs, options)

    async def __cyclone_submit__(
        self, workflow: Any, inputs: Iterable[Any], options: Any, tx: Any = None, /
    ) -> list[Any]:
        doors = self._open(tx)
        conn = (await self.completion_tx()).connection
        return cast("list[Any]", await doors.submissions.submit(workflow, inputs, options, conn))

    async def __cyclone_submit_once__(
        self, workflow: Any, items: Iterable[Any], options: Any, compare: Any, tx: Any = None, /
    ) -> list[Any]:
        doors = self._open(tx)
        conn = (await self.completion_tx()).connection
        return cast("list[Any]", await doors.submissions.submit_once(workflow, items, options, compare, conn))

    async def __cyclone_find__(self, workflow: Any, key: str, /) -> Any:
        return await self._open().submissions.find(workflow, key)

    def __cyclone_run__(self, workflow: Any, run_id: str, /) -> Any:
        return self._open().submissions.get(workflow, run_id)

    async def output_of(self, node: Any) -> Any:
        """The output of a node that this one depends on, directly or not; None of one that gave none.

        `node` is its step, if only one node of the graph executes that, or its name. Typed by the step's output; JSON
        built-ins by name. Raises NotFoundError for a node that is none of those.
        """
        name = _node_name(node)
        _check_ancestor(self._open().ancestor(self._claimed, name), name)
        return _output(node, await self._store().run(_load_output(self._store().statements, self._claimed, name)))

    def _open(self, tx: object = None) -> AsyncDoors:
        _refuse_tx(tx)
        if self._doors is None:
            raise CompletionTxError("nothing can be submitted outside a worker")
        return self._doors

    async def complete_in(self, conn: AsyncTx, output: Any = None) -> None:
        """Completes this step in a transaction of the handler's own, on the worker's database.

        `conn` is a connection (of psycopg, SQLAlchemy or Django) in a transaction that the handler commits, after
        this and before it returns; what it wrote there and the completion exist together or not at all. `output` is
        the step's output; what the handler returns is then ignored. If the transaction is rolled back the attempt has
        failed, as an ordinary error. Raises LeaseLostError when the step is no longer ours (the transaction must then
        be rolled back), TypeError for another kind of connection and TransactionRequiredError for one that is in no
        transaction.
        """
        own = await caller.connection(conn, "Context")
        await drive(own, self._complete_in(self._doors, self._tx is not None, output))

    async def once(self, name: str, fn: Callable[[], Awaitable[T]], *, on_unknown: records.OnUnknown = "call") -> T:
        """Makes an outside call and keeps its answer: a later execution of this step gets the answer and calls no more.

        The answer is stored as JSON in a commit of its own before this returns, and read back into the type that `fn`
        is annotated to return (JSON built-ins without an annotation). When an earlier execution began the call and
        left no answer, `on_unknown="call"` (the default) calls again and `"raise"` raises OutcomeUnknown. What `fn`
        raises passes through and leaves the call begun. Raises LeaseLostError when the step is no longer ours.
        """
        records.check(name, on_unknown)
        store = self._store()
        kind = records.answer_codec(fn)
        known = await store.run(records.begin_call(store.statements, self._claimed, name, on_unknown))
        if known is None:
            known = records.encode(kind, name, await fn())
            await store.run(records.save(store.statements, self._claimed, "once", name, known))
        return cast("T", kind.decode(known))

    async def checkpoint(self, name: str, value: Any = records.MISSING) -> Any:
        """Small durable state of this step that survives retries and crashes.

        With a `value` stores it as JSON, in a commit of its own, and returns it; without, returns what was stored
        last, as JSON built-ins, or None. Raises LeaseLostError when the step is no longer ours.
        """
        records.check(name)
        store = self._store()
        if value is records.MISSING:
            data = await store.run(records.load(store.statements, self._claimed, name))
            return None if data is None else msgspec.json.decode(data)
        encoded = records.encode(codec.Codec(Any), name, value)
        await store.run(records.save(store.statements, self._claimed, "checkpoint", name, encoded))
        return value

    def _store(self) -> records.AsyncRecords:
        if self._doors is None:
            raise CompletionTxError("nothing can be recorded outside a worker")
        return self._doors.records

    async def _commit(self, output: str | None) -> None:
        if self._doors is None or self._conn is None:
            raise CompletionTxError("no completion transaction was begun")
        await self._doors.completions.commit(self._conn, self._claimed, output)

    async def _end(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None and self._doors is not None:
            await self._doors.completions.end(conn, self._held_since)


class SyncContext(_Shared):
    """The context of a `def` handler, which runs in a thread, and may be called more than once as any other."""

    _tx: completion.SyncCompletionTx | None = None

    def __init__(self, claimed: Claimed, state: Any, doors: SyncDoors | None) -> None:
        self._claimed = claimed
        self.state = state
        self._doors = doors
        self._begin = threading.Lock()

    def completion_tx(self) -> completion.SyncCompletionTx:
        """As Context.completion_tx, blocking."""
        if self._tx is not None:
            return self._tx
        if self._doors is None:
            raise CompletionTxError("there is no completion transaction outside a worker")
        if self._done:
            raise CompletionTxError("this execution has ended: its completion transaction can no longer be begun")
        if self._lost:
            raise LeaseLostError("the lease of this step was lost")
        with self._begin:
            if self._tx is None:
                conn = self._doors.completions.begin(self._claimed)
                self._conn = conn
                self._held_since = time.perf_counter()
                self._tx = completion.SyncCompletionTx(conn)
        return self._tx

    def __cyclone_enqueue__(self, step: Any, inputs: Iterable[Any], options: Any, tx: Any = None, /) -> list[Any]:
        return self._open(tx).enqueue(self.completion_tx().connection, step, inputs, options)

    def __cyclone_submit__(self, workflow: Any, inputs: Iterable[Any], options: Any, tx: Any = None, /) -> list[Any]:
        doors = self._open(tx)
        return cast("list[Any]", doors.submissions.submit(workflow, inputs, options, self.completion_tx().connection))

    def __cyclone_submit_once__(
        self, workflow: Any, items: Iterable[Any], options: Any, compare: Any, tx: Any = None, /
    ) -> list[Any]:
        doors = self._open(tx)
        conn = self.completion_tx().connection
        return cast("list[Any]", doors.submissions.submit_once(workflow, items, options, compare, conn))

    def __cyclone_find__(self, workflow: Any, key: str, /) -> Any:
        return self._open().submissions.find(workflow, key)

    def __cyclone_run__(self, workflow: Any, run_id: str, /) -> Any:
        return self._open().submissions.get(workflow, run_id)

    def output_of(self, node: Any) -> Any:
        """As Context.output_of, blocking."""
        name = _node_name(node)
        _check_ancestor(self._open().ancestor(self._claimed, name), name)
        return _output(node, self._store().run(_load_output(self._store().statements, self._claimed, name)))

    def _open(self, tx: object = None) -> SyncDoors:
        _refuse_tx(tx)
        if self._doors is None:
            raise CompletionTxError("nothing can be submitted outside a worker")
        return self._doors

    def complete_in(self, conn: SyncTx, output: Any = None) -> None:
        """As Context.complete_in."""
        own = caller.connection_sync(conn, "SyncContext")
        drive_sync(own, self._complete_in(self._doors, self._tx is not None, output))

    def once(self, name: str, fn: Callable[[], T], *, on_unknown: records.OnUnknown = "call") -> T:
        """As Context.once, blocking."""
        records.check(name, on_unknown)
        store = self._store()
        kind = records.answer_codec(fn)
        known = store.run(records.begin_call(store.statements, self._claimed, name, on_unknown))
        if known is None:
            known = records.encode(kind, name, fn())
            store.run(records.save(store.statements, self._claimed, "once", name, known))
        return cast("T", kind.decode(known))

    def checkpoint(self, name: str, value: Any = records.MISSING) -> Any:
        """As Context.checkpoint, blocking."""
        records.check(name)
        store = self._store()
        if value is records.MISSING:
            data = store.run(records.load(store.statements, self._claimed, name))
            return None if data is None else msgspec.json.decode(data)
        encoded = records.encode(codec.Codec(Any), name, value)
        store.run(records.save(store.statements, self._claimed, "checkpoint", name, encoded))
        return value

    def _store(self) -> records.SyncRecords:
        if self._doors is None:
            raise CompletionTxError("nothing can be recorded outside a worker")
        return self._doors.records

    def _commit(self, output: str | None) -> None:
        if self._doors is None or self._conn is None:
            raise CompletionTxError("no completion transaction was begun")
        self._doors.completions.commit(self._conn, self._claimed, output)

    def _end(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None and self._doors is not None:
            self._doors.completions.end(conn, self._held_since)
