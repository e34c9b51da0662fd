"""The loop that joins the stages: wait for room or news, claim, start, collect outcomes, hand them to settle.

One worker is one life with one lease. It has three connections (claim, settle, lease), one more when it listens
itself, and those that completion transactions need now. Each part that loops is restarted by the loop itself when the
database is away; one that fails for another reason ends the worker, and whoever started it hears why.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import ModuleType, TracebackType
from typing import Any, Self, Unpack

import psycopg

from . import (
    claim,
    config,
    context,
    db,
    events,
    execute,
    handles,
    lease,
    metrics,
    migrate,
    registry,
    resolve,
    runs,
    settle,
    store,
    subprocesses,
    wake,
)
from .board import Page, State
from .completion import AsyncCompletions, SyncCompletions
from .errors import ConnectError, InvalidOptionTypeError
from .model import Claimed, Outcome, RunID, Verb
from .plan import drive, drive_sync, in_handler
from .records import AsyncRecords, SyncRecords
from .states import EventKind

log = logging.getLogger("cyclone")

EX_STALLED = 75
_BEAT_S = 0.5
# After so many beats with nothing to do a worker dozes: it looks after itself only every so often, since many workers
# that wake twice a second take a core's percent or two for nothing.
_CALM_BEATS = 10
_DOZE_S = 5.0
_PACE_S = 0.05
_RECONCILE_S = 5.0
_DOUBT_S = 60.0  # so long after a connection broke or outcomes were dropped something may still be on its way
_CLAIM_MOST = 1000
_SETTLE_BATCH = 500
_MAX_INPUT_BYTES = 1 << 20  # of what handlers enqueue; a client has its own limit
_CANCELLED_MOST = 10_000


class _Gate:
    """A bound on handlers of one sort: those in threads, or those that use the completion transaction. Steps that it
    keeps out wait here, and do not keep others from starting.
    """

    __slots__ = ("limit", "running", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.waiting: deque[Claimed] = deque()


class _Route:
    """How steps of one kind and version are started."""

    __slots__ = ("gate", "handler", "quick")

    def __init__(self, handler: registry.Step[Any, Any], gate: _Gate | None) -> None:
        self.handler = handler
        self.gate = gate
        self.quick = isinstance(handler, registry.AsyncStep)
        """It goes to the runner, because no execution of it has been seen to wait for anything."""


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Ended:
    """Awaitable, but nothing that has to be awaited."""

    __slots__ = ("_event",)

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._event.wait().__await__()


class Worker:
    """Runs the handlers of a registry, in the event loop that awaits `run()` or enters it as an async context manager.

    `client_or_dsn` is a DSN, or a client whose DSN and schema are taken; `handlers` is a registry or a module.
    Options are those of `WorkerOptions`, durations as timedelta or seconds. Raises InvalidOptionError for a wrong
    option, SchemaVersionError when the schema is missing or of another version. A database that is away is waited
    for.

    `redact` is given the text of every failure, and returns it as it may be stored and logged; it comes after those of
    the registry (see `cyclone.redact`).

    `on_step_event(event)` is called with what this worker did to steps, once it is committed: `started`, `completed`,
    `retry_scheduled`, `snoozed`, `discarded`, and `released` when the handler had been called. It must be a plain
    function. It runs in a thread of its own, since a slow one in the loop would hold up settling and claiming; past a
    bound of 10,000 waiting events they are dropped and counted. What it raises is logged and counted, and changes
    nothing. The end of `run` waits for it up to 5 s. A pool has no such option: read `Client.subscribe` beside it.
    """

    def __init__(
        self,
        client_or_dsn: Any,
        handlers: registry.Registry | ModuleType,
        *,
        schema: str | None = None,
        options: config.WorkerOptions | None = None,
        page: Page | None = None,
        life: int | None = None,
        pipe: wake.Pipe | None = None,
        pooled: bool = False,
        alone: bool = False,
        redact: registry.RedactFn | None = None,
        on_step_event: events.OnStepEvent | None = None,
        **given: Unpack[config.WorkerArguments],
    ) -> None:
        self.options = options if options is not None else config.worker_options(**given)
        dsn = client_or_dsn if isinstance(client_or_dsn, str) else getattr(client_or_dsn, "_dsn", None)
        if not isinstance(handlers, registry.Registry):
            module, handlers = handlers, registry.Registry()
            handlers.include(module)
        if not isinstance(dsn, str) or not dsn:
            raise InvalidOptionTypeError(
                f"a worker needs a DSN or a client that was made from one, not {type(client_or_dsn).__name__}"
            )
        self._dsn = dsn
        statements = getattr(client_or_dsn, "_statements", None)
        self.schema = schema or (statements.schema if isinstance(statements, db.Statements) else "public")
        self._sql = db.statements(self.schema)
        self._registry = handlers
        self._resolver = resolve.Resolver(self._sql)
        self._handlers = {(name, version): step for name, step in handlers.steps.items() for version in step.versions}
        redactions = (*handlers.redactions, *([] if redact is None else [registry.Redaction(redact)]))
        self._limits = execute.Limits(
            max_output_bytes=self.options.max_output_bytes,
            max_error_bytes=self.options.max_error_bytes,
            redactions=redactions,
        )
        self._hook = None if on_step_event is None else events.Hook(on_step_event)
        self._page = page if page is not None else Page.private(self.options.concurrency)
        self._page.slots = 1 if alone else self.options.concurrency
        self._pooled = pooled
        self._alone = alone  # a pool's worker for isolated steps: one slot, and it ends when none waits
        self._alone_now = alone  # this worker has an isolated step in hand, or is about to look for one
        self._pipe = pipe
        self._first_life = life if life is not None else random.getrandbits(62)
        self._page.life = self._first_life
        self._pooler = not self.options.notify

        self._queue: deque[Claimed] = deque()
        self._executions: dict[int, execute.Execution] = {}
        self._running = 0
        self._shown = False  # that anything runs is on the page
        self._unsettled = 0
        self._taken_at = 0.0
        self._open_claims: Counter[int] = Counter()
        self._times: dict[tuple[str, str], list[float]] = {}
        self._ended_lately = 0
        self._ended_since = 0
        self._paced_at = 0.0
        self._rate = 0.0
        self._calm = 0
        self._doubt_until = 0.0
        self._thread_gate = _Gate(self.options.threads)
        self._tx_gate = _Gate(self.options.completion_pool_size)
        # What must be killed when it does not end computes, as a rule: more of them than cores would only take memory.
        self._process_gate = _Gate(min(self.options.concurrency, _cores()))
        self._gates = (self._thread_gate, self._tx_gate, self._process_gate)
        self._children = subprocesses.Children(handlers.steps.values(), self._process_gate.limit)
        self._routes = {key: _Route(handler, self._gate(handler)) for key, handler in self._handlers.items()}
        self._dropped_from: set[int] = set()
        self._starting = False
        self._cancelled: dict[tuple[int, int], None] = {}

        self._drain: bool | None = None
        self._stopping = asyncio.Event()
        self._room = asyncio.Event()
        self._began = asyncio.Event()
        self._news = wake.News(pipe)
        self.ready = asyncio.Event()
        """Set once the worker claims steps."""
        self._ended_event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- start and stop

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name="cyclone worker")
        ready = asyncio.create_task(self.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await self._task  # raises why it could not start
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        assert self._task is not None
        await self._task

    def stop(self, drain: bool = True) -> Awaitable[None]:
        """Stops claiming at once. With `drain` running handlers may finish for `drain_timeout`; then, or at once
        without it, they are cancelled, and what is not finished is given back with its attempt unchanged. May be
        called twice, or early.
        """
        self._drain = drain if self._drain is None else self._drain and drain
        self._stopping.set()
        self._began.set()
        self._room.set()
        self._news.nudge()
        return _Ended(self._ended_event)

    async def run(self) -> None:
        """Works until stopped."""
        loop = self._loop = asyncio.get_running_loop()
        options = self.options
        self._threads = execute.Threads()
        sql = self._sql
        records, sync_records = AsyncRecords(self._dsn, sql, self._pooler), SyncRecords(self._dsn, sql, self._pooler)

        async def enqueue(conn: Any, step: Any, inputs: Any, given: Any) -> list[Any]:
            batch = store.prepare(step, inputs, given, max_input_bytes=_MAX_INPUT_BYTES, in_tx=True)
            found = (await drive(conn, store.store(sql, batch, notify=True))).pairs() if batch.inputs else ()
            return [handles.StepHandle(sql, step, RunID(run), None, new, records.run) for run, new in found]

        def enqueue_sync(conn: Any, step: Any, inputs: Any, given: Any) -> list[Any]:
            batch = store.prepare(step, inputs, given, max_input_bytes=_MAX_INPUT_BYTES, in_tx=True)
            found = drive_sync(conn, store.store(sql, batch, notify=True)).pairs() if batch.inputs else ()
            return [handles.SyncStepHandle(sql, step, RunID(run), None, new, sync_records.run) for run, new in found]

        async def store_runs(batch: store.Runs, conn: Any) -> list[store.Submitted]:
            return (await drive(conn, store.store_runs(sql, batch, notify=True)))[0]

        def store_runs_sync(batch: store.Runs, conn: Any) -> list[store.Submitted]:
            return drive_sync(conn, store.store_runs(sql, batch, notify=True))[0]

        door, sync_door = (runs.Door(sql, one.run) for one in (records, sync_records))

        def encode(step: Claimed, output: Any) -> str | None:
            return execute.encode(self._handlers[step.kind, step.version], output, self._limits)

        self._async_doors = context.AsyncDoors(
            AsyncCompletions(self._dsn, sql, options), records, enqueue,
            runs.AsyncSubmissions(door, store_runs, _MAX_INPUT_BYTES), self._resolver.precedes, encode,
        )  # fmt: skip
        self._sync_doors = context.SyncDoors(
            SyncCompletions(self._dsn, sql, options), sync_records, enqueue_sync,
            runs.SyncSubmissions(sync_door, store_runs_sync, _MAX_INPUT_BYTES), self._resolver.precedes, encode,
        )  # fmt: skip
        home = contextvars.copy_context()
        home.run(in_handler.set, True)
        self._host = execute.Host(
            loop, registry.State(), self._async_doors, self._sync_doors, self._children, self._limits, self._threads,
            home, self._ended,
        )  # fmt: skip
        self._runner = execute.Runner(self._host, self._turn, self._suspended, self._offer_room)
        self._keeper = self._make_keeper(loop)
        self._settler = settle.Settler(
            self._sql,
            lambda: db.connect(self._dsn, application_name="cyclone settle", pooler=self._pooler),
            batch=options.settle_batch or _SETTLE_BATCH,
            linger_s=options.settle_linger_s,
            holds_lease=lambda: self._keeper.holds,
            on_settled=self._told,
            closes=self._closes,
            on_ready=self._news.nudge,
            expects=lambda: self._running > 0 or self._runner.busy,
            hook=self._hook,
            edit=self._limits.message,
            pooler=self._pooler,
        )
        isolated = [f"!{queue}" for queue in options.queues]
        self._claimer = claim.Claimer(self._sql, options.queues)
        self._isolated = claim.Claimer(self._sql, isolated)
        self._beat(loop)
        try:
            if await self._boot():
                async with contextlib.AsyncExitStack() as stack:
                    for lifespan in self._registry.lifespans:
                        await stack.enter_async_context(lifespan(self._host.state))
                    await self._work()
        finally:
            self._heart.cancel()
            await asyncio.to_thread(self._children.close)
            self._threads.stop()
            await self._async_doors.completions.close()
            await self._async_doors.records.close()
            await asyncio.to_thread(self._sync_doors.completions.close)
            self._sync_doors.records.close()
            if self._hook is not None:
                await asyncio.to_thread(self._hook.close)
            self._ended_event.set()

    async def _boot(self) -> bool:
        """Waits for the database, checks the schema and makes the kinds known. False when it was stopped meanwhile."""
        pause = 0.1
        while not self._stopping.is_set():
            try:
                conn = await db.connect(self._dsn, application_name="cyclone boot", pooler=True)
                try:
                    migrate.require(await migrate.read_version_async(conn, self.schema), self.schema)
                    await migrate.register_async(conn, self.schema, self._registry)
                    return True
                finally:
                    await conn.close()
            except (psycopg.OperationalError, ConnectError, OSError) as exc:
                log.warning("cannot start yet, tried again in %.1f s: %s", pause, db.brief(exc))
                await self._rest(pause)
                pause = min(pause * 2, 10.0)
        return False

    async def _rest(self, pause_s: float) -> None:
        """About so long, but no longer than until the worker is told to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s * random.uniform(0.8, 1.2)):
                await self._stopping.wait()

    def _make_keeper(self, loop: asyncio.AbstractEventLoop) -> lease.Keeper:
        pairs = sorted([*self._handlers, (registry.MAP, resolve.MAP_VERSION)])

        def soon(function: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(function, *args)

            return call

        return lease.Keeper(
            self._dsn,
            self._sql,
            life=self._first_life,
            lease_s=self.options.lease_s,
            queues=list(self.options.queues),
            kinds=[kind for kind, _ in pairs],
            versions=[version for _, version in pairs],
            page=self._page,
            stall_limit_s=self.options.stall_after_s,
            on_began=soon(self._began.set),
            on_lost=soon(self._lose_everything),
            on_orders=soon(self._obey),
            on_stall=self._stalled,
            new_life=lambda: random.getrandbits(62),
            pooler=self._pooler,
        )

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Shows that the loop turns, and how fast steps are ending."""
        self._page.beat()
        if self._executions and self._keeper.began.is_set() and not self._keeper.holds:
            # The lease thread may wait for minutes for a connection that is dead. What runs is treated as lost now.
            self._lose_everything()
        self._page.running = self._running
        self._shown = self._running > 0
        self._page.done += self._ended_lately
        metrics.running(self._running)
        if self._times:
            self._flush_times()
        pace = self._ended_lately / _BEAT_S
        # A pace that is over must not be believed: what goes back would be claimed ahead again, once a beat.
        over = self._give_back(pace) or not self._ended_lately
        self._rate = pace if over else (self._rate + pace) / 2
        self._calm = 0 if self._unsettled or self._ended_lately else self._calm + 1
        self._ended_lately = 0
        self._keeper.calm = dozes = self._calm >= _CALM_BEATS
        self._heart = loop.call_later(
            min(_DOZE_S, self.options.stall_after_s / 4) if dozes else _BEAT_S, self._beat, loop
        )

    def _rouse(self) -> None:
        self._calm = 0
        self._heart.cancel()
        self._heart = self._loop.call_later(_BEAT_S, self._beat, self._loop)
        self._keeper.rouse()

    def _give_back(self, pace: float) -> bool:
        """What was claimed ahead of a pace that has fallen since would wait behind handlers that may take hours, while
        other workers are free: beyond about one second's worth it goes back. Returns whether anything did.
        """
        if self._stopping.is_set() or time.monotonic() - self._taken_at < _BEAT_S or len(self._queue) <= pace:
            return False
        while len(self._queue) > pace:
            self._settler.add(Outcome(self._queue.pop(), Verb.RELEASE, called=False))
        return True

    def _stalled(self) -> None:
        """The loop stands still. In a pool the process is replaced; a program that embeds the worker is not ended,
        only the life is, and the fence refuses what the blocked handlers still write.
        """
        if self._pooled:
            os._exit(EX_STALLED)
        self._keeper.abandon()

    # --- the loop

    async def _work(self) -> None:
        self._keeper.start()
        settling = asyncio.create_task(self._settler.run(), name="cyclone settle")
        claiming = asyncio.create_task(self._claim(), name="cyclone claim")
        tasks: set[asyncio.Task[Any]] = {settling, claiming}
        listener = None
        if self.options.notify and self._pipe is None:
            listener = wake.Listener(
                self._dsn, self._sql, random.getrandbits(62), self._news.ring,
                idle=lambda: self._running < self.options.concurrency, refresh_s=self.options.poll_interval_s,
            )  # fmt: skip
            tasks.add(asyncio.create_task(listener.run(), name="cyclone listener"))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
                    raise failure
            await claiming
            await self._wind_down(settling)
        finally:
            if listener is not None:
                listener.stop()
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            self._keeper.stop()
            await asyncio.to_thread(self._keeper.join, 5.0)

    async def _claim(self) -> None:
        """The main loop. A claim is worth its round trip when there is room for half a batch, or when nothing is
        held.
        """
        conn: psycopg.AsyncConnection[tuple[Any, ...]] | None = None
        pause = 0.1
        reconciled = time.monotonic()
        await self._began.wait()
        try:
            while not self._stopping.is_set():
                try:
                    if conn is None:
                        conn = await db.connect(self._dsn, application_name="cyclone claim", pooler=self._pooler)
                        if not self._pooler:
                            await conn.execute(claim.SESSION, prepare=False)
                        await self._reconcile(conn)
                        self._page.state = State.READY
                        self.ready.set()
                    if time.monotonic() - reconciled > self._reconcile_s():
                        reconciled = time.monotonic()
                        await self._reconcile(conn)
                        if self._pipe is None and not self._alone_now:
                            waiting = await (await conn.execute(self._sql["isolated_waiting"])).fetchone()
                            self._alone_now = waiting is not None and bool(waiting[0])
                    room = self._room_for()
                    if room <= 0 or not self._keeper.holds:
                        await self._wait_for_room()
                        continue
                    if self._alone_now:
                        await self._claim_alone(conn)
                        continue
                    life = self._keeper.life
                    steps, taken = await self._claimer.batch(conn, life, room)
                    self._page.reach()
                    pause = 0.1  # not before: a server that has become read-only lets connections succeed
                    await self._take(conn, life, steps)
                    if taken >= room:
                        self._news.pass_on()
                    else:  # nothing unlocked was left that this look could see
                        await self._news.wait(min(self._poll_s(), self._claimer.recheck_s()))
                except (psycopg.Error, ConnectError, OSError) as exc:
                    log.warning("claiming was interrupted and goes on in %.1f s: %s", pause, db.brief(exc))
                    self._doubt()
                    if conn is not None:
                        await conn.close()
                        conn = None
                    await self._rest(pause)
                    pause = min(pause * 2, 5.0)
        finally:
            if conn is not None:
                await conn.close()

    async def _claim_alone(self, conn: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        """Claims one isolated step, while nothing else is held. In a pool a worker of its own does this and ends when
        none is left; a worker in a program of its own does it between its other work.
        """
        life = self._keeper.life
        steps, taken = await self._isolated.batch(conn, life, 1, whole=True)
        if steps:
            log.info("step %s (%s) is run alone", steps[0].id, steps[0].kind)
            metrics.isolated(1)
            await self._take(conn, life, steps)
        elif taken:
            pass  # a stale ticket: there may be more
        elif self._alone:
            self._stopping.set()
        else:
            self._alone_now = False

    def _room_for(self) -> int:
        """How many steps to ask for: the free slots and about what ends in a tenth of a second."""
        if self._alone_now:
            return 0 if self._unsettled else 1
        elapsed_s = time.monotonic() - self._paced_at
        if elapsed_s >= _PACE_S:  # a pace that rises is followed at once, one that falls with the beat
            self._rate = max(self._rate, self._ended_since / elapsed_s)
            self._ended_since, self._paced_at = 0, self._paced_at + elapsed_s
        target = self.options.concurrency + min(int(self._rate * 0.1), _CLAIM_MOST)
        held = len(self._queue) + self._running + sum(len(gate.waiting) for gate in self._gates)
        room = min(target - held, self.options.claim_batch or _CLAIM_MOST)
        # What is not settled counts as well, else a slow database would let outcomes pile up without a bound.
        if self._unsettled - held > 4 * _CLAIM_MOST:
            return 0
        worth = min(target, self.options.claim_batch or _CLAIM_MOST) // 2
        return room if held < self.options.concurrency or room >= worth else 0

    async def _wait_for_room(self) -> None:
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await self._room.wait()

    def _poll_s(self) -> float:
        """In a pool the sweeper polls for all; a worker's own poll is only for the case that nobody does."""
        spread = random.uniform(0.8, 1.2)
        return self.options.poll_interval_s * spread * (20.0 if self._pipe is not None else 1.0)

    def _reconcile_s(self) -> float:
        """How often to compare claims with the database. Rarely in a pool that is idle, unless there is a doubt: there
        may be many workers, and a sweeper looks after isolated steps.
        """
        calm = self._pipe is not None and not self._open_claims and time.monotonic() > self._doubt_until
        return _RECONCILE_S * (12.0 if calm else 1.0)

    def _doubt(self) -> None:
        self._doubt_until = time.monotonic() + _DOUBT_S

    async def _reconcile(self, conn: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        """Gives back claims under our life that we do not hold: their replies were lost, or outcomes of theirs were
        dropped.

        Runs in the loop that claims, between two claims, so none of ours is on its way. Repeated, because a statement
        whose connection broke may still commit long after this has looked."""
        life = self._keeper.life
        rows = await (await conn.execute(self._sql["list_claims"], {"life": life})).fetchall()
        strange = [row[0] for row in rows if row[0] not in self._open_claims]
        if strange:
            row = await (
                await conn.execute(self._sql["release_claims"], {"claims": strange, "life": life, "now": None})
            ).fetchone()
            if row is not None and row[0]:
                log.warning("%d steps are given back: the reply that handed them out was lost", row[0])

    # --- steps

    async def _take(self, conn: psycopg.AsyncConnection[tuple[Any, ...]], life: int, steps: list[Claimed]) -> None:
        if not steps:
            return
        # Should this fail, the claim is one that we do not hold, and `_reconcile` gives it back.
        ready, decided = await self._resolver.resolve(conn, steps)
        if life != self._keeper.life:
            return  # lost meanwhile, before these were known as ours; the sweeper has them
        if self._calm >= _CALM_BEATS:
            self._rouse()
        self._open_claims[steps[0].claim] += len(steps)
        self._unsettled += len(steps)
        for outcome in decided:
            self._settler.add(outcome)
        self._queue.extend(ready)
        self._taken_at = time.monotonic()
        self._start()

    def _start(self) -> None:
        """Starts what fits into the slots; a gate that is full keeps its own steps back and no others."""
        if self._starting or self._runner.busy or self._stopping.is_set():
            return  # the loop below goes on by itself, also when a handler that ended at once calls this from inside
        self._starting = True
        try:
            self._fill(None)
        finally:
            self._starting = False

    def _turn(self) -> execute.Execution | None:
        """As `_start`, up to the next step that the runner shall run."""
        if self._stopping.is_set():
            return None
        if (execution := self._fill(self._runner)) is None:
            self._offer_room()
        return execution

    def _fill(self, runner: execute.Runner | None) -> execute.Execution | None:
        concurrency, queue, routes = self.options.concurrency, self._queue, self._routes
        for full in self._gates:
            while full.waiting and full.running < full.limit and self._running < concurrency:
                self._launch(full.waiting.popleft(), full)
        while queue and self._running < concurrency:
            step = queue[0]
            route = routes[step.kind, step.version]
            gate = route.gate
            if route.quick and gate is None:
                if runner is None:
                    self._runner.wake()
                    return None
                queue.popleft()
                if (execution := self._begin(step, route.handler, None)) is not None:
                    return execution
                continue
            queue.popleft()
            if gate is not None and gate.running >= gate.limit:
                gate.waiting.append(step)
            else:
                self._launch(step, gate)
        return None

    def _gate(self, handler: registry.Step[Any, Any]) -> _Gate | None:
        if isinstance(handler, registry.ProcessStep):
            return self._process_gate
        return None if handler.is_async else self._thread_gate

    def _launch(self, step: Claimed, gate: _Gate | None) -> None:
        execution = self._begin(step, self._handlers[step.kind, step.version], gate)
        if execution is not None:
            self._executions[step.id] = execution
            execution.start()

    def _begin(self, step: Claimed, handler: registry.Step[Any, Any], gate: _Gate | None) -> execute.Execution | None:
        now = time.monotonic()
        if now >= self._keeper.valid_until:  # nothing is started that may already be somebody else's
            self._settler.add(Outcome(step, Verb.RELEASE, called=False))
            return None
        if self._cancelled and (step.id, step.claim) in self._cancelled:
            del self._cancelled[step.id, step.claim]
            self._settled(step.claim, 1, certain=True)
            return None
        execution = execute.Execution(step, handler, self._host)
        execution.started = now
        execution.page_index = self._page.begin(step.id)
        self._running += 1
        if gate is not None:
            execution.gate = gate
            gate.running += 1
        if not self._shown:
            self._shown = True
            self._page.running = self._running
        if self._hook is not None:
            self._hook.tell(
                [events.seen(EventKind.STARTED, step.run_id, step.node, step.kind, step.queue, step.attempt)]
            )
        return execution

    def _suspended(self, execution: execute.Execution) -> None:
        """A handler waits for something, and has kept the runner's task: from now on its kind gets tasks of its own."""
        step = execution.claimed
        self._executions[step.id] = execution
        self._routes[step.kind, step.version].quick = False
        self._start()

    def _ended(self, execution: execute.Execution, outcome: Outcome | None) -> None:
        """An execution is over: its slot is free, its outcome goes to be settled."""
        step = execution.claimed
        self._page.end(execution.page_index)
        self._running -= 1
        self._ended_lately += 1
        self._ended_since += 1
        self._executions.pop(step.id, None)
        if execution.gate is not None:
            execution.gate.running -= 1
        if execution.used_tx:
            for (kind, _), route in self._routes.items():
                if kind == step.kind:
                    route.gate = self._tx_gate
        key = (step.queue, step.kind)
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = []
        times.append(time.monotonic() - execution.started)
        if len(times) >= 256:
            self._flush_times()
        if outcome is not None:
            if execution.why == "timeout" and outcome.failure is not None:
                log.warning(
                    "step %s (%s, attempt %d) timed out: %s", step.id, step.kind, step.attempt, outcome.failure.message
                )
            self._settler.add(outcome)
        else:
            if execution.why == "order":
                metrics.refused("cancelled", 1)
            else:  # told by the lease thread, or by the fence when it committed
                log.warning(
                    "step %s (%s, attempt %d) came too late and changes nothing: its lease was lost",
                    step.id, step.kind, step.attempt,
                )  # fmt: skip
                metrics.refused("lease lost", 1)
            self._settled(step.claim, 1, certain=execution.why != "lost")
        if not self._runner.busy:  # which does both by itself
            self._start()
            self._offer_room()

    def _offer_room(self) -> None:
        """Lets the next claim begin when it is worth its round trip."""
        if self._stopping.is_set() or self._room_for() > 0:
            self._room.set()

    def _flush_times(self) -> None:
        metrics.ran(self._times)
        self._times = {}

    def _told(self, outcomes: Sequence[Outcome], certain: bool) -> None:
        for claim_id, count in Counter(map(settle.claim_of, outcomes)).items():
            self._settled(claim_id, count, certain)
        for outcome in outcomes:
            if (outcome.verb == Verb.SETTLED or outcome.unless_completed) and outcome.step.graph is not None:
                self._news.nudge()  # its transaction may have made steps available
                break

    def _closes(self, outcomes: Sequence[Outcome]) -> list[int]:
        """The claims whose last steps these are."""
        counts = Counter(map(settle.claim_of, outcomes))
        return [
            claim_id
            for claim_id, count in counts.items()
            if self._open_claims[claim_id] == count and claim_id not in self._dropped_from
        ]

    def _settled(self, claim_id: int, count: int, certain: bool) -> None:
        """So many steps of a claim need no more care. A claim is closed with its last step, but not when one of them
        was dropped and may still be running in the database: then `_reconcile` or the sweeper gives it back, and both
        need the claim's row.
        """
        self._unsettled -= count
        if not certain:
            self._dropped_from.add(claim_id)
            self._doubt()
        self._open_claims[claim_id] -= count
        if self._open_claims[claim_id] <= 0:
            del self._open_claims[claim_id]
            if claim_id in self._dropped_from:
                self._dropped_from.discard(claim_id)
            else:
                self._settler.close_claim(claim_id)
        if self._alone_now:
            self._room.set()

    def _obey(self, orders: list[tuple[int, int, str]]) -> None:
        """Somebody cancelled steps that we hold: the database has already moved on, the handler is told. One that has
        not begun, or whose claim's reply is still on its way, is remembered and never begun. An order names the claim,
        because the step may have come back to us under another.
        """
        for step, claim_id, reason in orders:
            execution = self._executions.get(step)
            if execution is not None and execution.claimed.claim == claim_id:
                found = execution.claimed
                log.info(
                    "step %s (%s, attempt %d) is cancelled while it runs: %s", step, found.kind, found.attempt, reason
                )
                execution.end("order")
            else:
                self._cancelled[step, claim_id] = None
                if len(self._cancelled) > _CANCELLED_MOST:  # orders that came too late are never asked for
                    del self._cancelled[next(iter(self._cancelled))]

    def _lose_everything(self) -> None:
        """The life has ended. What waits is dropped, what runs is told; the sweeper gives all of it back."""
        for step in self._give_up_waiting():
            self._settled(step.claim, 1, certain=False)
        self._settler.forget()
        for execution in list(self._executions.values()):
            execution.end("lost")

    def _give_up_waiting(self) -> list[Claimed]:
        """Everything that is held and has not begun, which is held no more."""
        waiting = [*self._queue, *(step for gate in self._gates for step in gate.waiting)]
        self._queue.clear()
        for gate in self._gates:
            gate.waiting.clear()
        return waiting

    # --- the end

    async def _wind_down(self, settling: asyncio.Task[None]) -> None:
        """Gives back what was not started, lets handlers finish for a while, gives back the rest. The lease is renewed
        until the last outcome is written."""
        self._page.state = State.DRAINING
        metrics.slots(0)
        for step in self._give_up_waiting():
            self._settler.add(Outcome(step, Verb.RELEASE, called=False))
        deadline = time.monotonic() + self.options.drain_timeout_s
        while self._executions and self._drain and time.monotonic() < deadline:
            await self._wait_for_room()
        for execution in list(self._executions.values()):
            execution.end("drain")
        give_up = time.monotonic() + (5.0 if self._drain else 1.0)
        while self._executions and time.monotonic() < give_up:
            await self._wait_for_room()
        for execution in list(self._executions.values()):
            execution.give_up()
        self._flush_times()
        self._settler.stop()
        # Somebody may hold a step in a transaction of his own, or the database be away: a stop must end all the same.
        await asyncio.wait({settling}, timeout=max(deadline - time.monotonic(), 5.0) if self._drain else 1.0)
        if settling.done():
            settling.result()
        else:
            log.warning("the last outcomes could not be written in time; a sweeper gives their steps back")
