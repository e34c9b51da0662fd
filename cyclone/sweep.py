"""Sweep: repairs what was lost and fires what is due, by standing queries. Any number of sweepers may run.

Each look works in bounded batches with SKIP LOCKED, so sweepers share the work and nobody waits. What one look misses
(a dead worker's last statement that commits late, a row that somebody has locked) the next one finds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg

from . import config, db, events, metrics, migrate, wake
from .errors import ConnectError

log = logging.getLogger("cyclone")

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

_CLAIMS = 20  # dead claims reclaimed in one transaction
_DUE = 1000  # due steps fired in one transaction
_TIDY_S = 30.0
_LOOK_S = 5.0
_DEPTH_CAP = 100_000


async def end_lives(conn: Connection, statements: db.Statements, *, now: object = None) -> int:
    """Ends lives whose lease has run out. A commit of its own: reclaiming comes after it."""
    rows = await (await conn.execute(statements["end_expired_lives"], {"now": now})).fetchall()
    for life, host, pid in rows:
        log.warning("the lease of worker %s:%s (life %s) has expired; its steps are reclaimed", host, pid, life)
    return len(rows)


async def bury(
    conn: Connection, statements: db.Statements, life: int, executing: Sequence[int] | None, reason: str
) -> None:
    """Ends the life of a worker that is known to be dead. `executing` is what it was running; None when nobody can
    tell.
    """
    steps = None if executing is None else list(executing)
    await conn.execute(statements["end_life"], {"life": life, "executing": steps, "reason": reason, "now": None})


async def reclaim(
    conn: Connection, statements: db.Statements, *, now: object = None, hook: events.Hook | None = None
) -> int:
    """Gives back what ended lives hold, until nothing is left; returns how many steps are available again."""
    total = 0
    while True:
        rows = await (await conn.execute(statements["reclaim_steps"], {"claims": _CLAIMS, "now": now})).fetchall()
        reasons: Counter[str] = Counter()
        if hook is not None:
            hook.tell([events.read(row[-1]) for row in rows if row[-1] is not None])
        for _, _, step, run, node, kind, state, attempts, reclaims, executed, reason, _ in rows:
            if step is None:
                continue
            total += 1
            if executed:
                reasons[_label(reason)] += 1
                log.warning(
                    "step %s (run %s, %s) was lost in attempt %s (%s): it is %s now, %s reclaims so far",
                    step, run, node, attempts, reason, state, reclaims, extra={"kind": kind},
                )  # fmt: skip
            else:
                reasons["not started"] += 1
        for reason, n in reasons.items():
            metrics.reclaimed(reason, n)
        if rows[0][1] and await discard_crashed(conn, statements, now=now):
            continue  # their claims can be closed now
        if rows[0][0] < _CLAIMS:
            return total


async def discard_crashed(conn: Connection, statements: db.Statements, *, now: object = None) -> int:
    """Discards nodes of runs that dead workers were executing at the limit of their kind. Returns how many."""
    count = 0
    rows = await (await conn.execute(statements["crashed_nodes"])).fetchall()
    for step, claim, run, kind, deaths, reason in rows:
        text = f"the worker died {deaths} times while it ran this step; the last time: {reason}"
        params = {
            "ids": [step], "claims": [claim], "verbs": ["discard"], "kinds": ["crashed"], "messages": [text],
            "tracebacks": [""], "called": [True], "runs": [run], "host": events.HOST, "step_over": False, "now": now,
        }  # fmt: skip
        try:
            async with conn.pipeline():
                await conn.execute(statements["fail_nodes"], params)
                await conn.execute(statements["count_crash"], {"id": step, "claim": claim, "reason": reason})
        except psycopg.Error as exc:
            if exc.sqlstate not in db.LOCKED:  # the next look finds it again
                raise
        else:
            count += 1
            metrics.reclaimed(_label(reason), 1)
            log.warning("step %s (run %s) is discarded: %s", step, run, text, extra={"kind": kind})
    return count


def _label(reason: str) -> str:
    """A reason with few values, for a metric."""
    return "lease" if reason.startswith("lease") else "crash"


async def fire(conn: Connection, statements: db.Statements, *, now: object = None) -> int:
    """Makes due steps available, until none is left."""
    total = 0
    while True:
        row: Any = await (await conn.execute(statements["fire_due"], {"batch": _DUE, "now": now})).fetchone()
        fired: int = row[0]
        total += fired
        if fired < _DUE:
            return total


async def end_runs(conn: Connection, statements: db.Statements, *, now: object = None) -> None:
    """Ends runs whose deadline has passed, and what is left of runs that have ended early, until there are none."""
    while await _value(conn, statements["end_due_runs"], {"host": events.HOST, "now": now}):
        pass
    while await _value(conn, statements["end_steps"], {"now": now}) is not None:
        pass


async def _value(conn: Connection, query: bytes, params: Mapping[str, object]) -> Any:
    row = await (await conn.execute(query, params)).fetchone()
    return None if row is None else row[0]


async def tidy(conn: Connection, statements: db.Statements, *, now: object = None) -> None:
    """Removes what nobody needs any more and repairs the list of lanes."""
    for name in ("close_claims", "close_tickets"):
        await conn.execute(statements[name], {"batch": 1000, "now": now})
    for name in ("close_lives", "close_orders", "close_sleepers", "close_lanes", "open_lanes"):
        await conn.execute(statements[name], {"now": now})


async def look(conn: Connection, statements: db.Statements) -> None:
    """Measures queues for the metrics: counters up to a cap, never scans of finished work. One round trip."""
    async with conn.pipeline():
        depths = await conn.execute(statements["queue_depths"], {"cap": _DEPTH_CAP, "now": None})
        strange = await conn.execute(statements["unclaimable"], {"cap": _DEPTH_CAP})
        scheduled = await conn.execute(statements["scheduled_count"], {"cap": _DEPTH_CAP})
    metrics.depth({queue: (n, oldest) for queue, n, oldest in await depths.fetchall()})
    rows = await strange.fetchall()
    for kind, version, n in rows:
        if n:
            log.warning("%d steps wait and there is no worker for kind %s (version %s)", n, kind, version)
    metrics.unclaimable({(kind, version): n for kind, version, n in rows})
    row = await scheduled.fetchone()
    assert row is not None
    metrics.scheduled(row[0])


async def once(
    conn: Connection, statements: db.Statements, *, now: object = None, hook: events.Hook | None = None
) -> int:
    """One round: lives, claims, runs, timers. Returns how many steps became available."""
    await end_lives(conn, statements, now=now)
    await end_runs(conn, statements, now=now)
    return await reclaim(conn, statements, now=now, hook=hook) + await fire(conn, statements, now=now)


class _Seen(NamedTuple):
    """What there is to do, for one round."""

    expired: bool
    dead: bool
    ending: bool
    due_s: float
    ready: bool
    isolated: bool


class Sweeper:
    """Reclaims lost leases, fires timers and tidies up; in a pool it also listens for all workers and wakes them.

    `dsn` names the database; `interval` is the longest pause between two rounds (a timedelta or seconds, default 1
    s). It sleeps less when a step is due earlier. Any number of sweepers may run side by side.

    `on_step_event(event)` is told, as by `Worker`, of steps that this sweeper took back from lost workers: `reclaimed`,
    or `discarded` at the crash limit.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "public",
        interval: object = 1.0,
        pipe: wake.Pipe | None = None,
        listen: bool = True,
        idle: Callable[[], bool] = lambda: True,
        on_step_event: events.OnStepEvent | None = None,
    ) -> None:
        self._hook = None if on_step_event is None else events.Hook(on_step_event)
        self._dsn = dsn
        self._statements = db.statements(schema)
        self._interval_s = config.seconds("interval", interval, least=0.01)
        self._pipe = pipe
        self._listen = listen and pipe is not None
        self._pooler = not listen  # and no wish for settings of the session, which keep a role's short limits away
        self._idle = idle
        self._stopping = False
        self.on_isolated: Callable[[], object] = lambda: None
        """Called in each round in which steps wait to be run alone; a pool then starts a worker for them."""
        self.reached = 0.0
        """When the database last answered a round, by the monotonic clock; 0.0: never, or it cannot be reached now."""
        self._news = asyncio.Event()
        self._graves: asyncio.Queue[tuple[int, Sequence[int] | None, str, asyncio.Future[None]]] = asyncio.Queue()

    def stop(self) -> None:
        """Ends `run` after the round in hand. May be called twice, or early."""
        self._stopping = True
        self._news.set()

    async def bury(self, life: int, executing: Sequence[int] | None, reason: str) -> None:
        """Ends the life of a dead worker and gives back its steps at once; returns when that is committed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._graves.put_nowait((life, executing, reason, done))
        self._news.set()
        await done

    async def run(self) -> None:
        """Sweeps until stopped. A database that is away is waited for, with growing pauses."""
        listener = None
        task: asyncio.Task[None] | None = None
        if self._listen and self._pipe is not None:
            pipe = self._pipe
            listener = wake.Listener(
                self._dsn,
                self._statements,
                random.getrandbits(62),
                pipe.wake_one,
                idle=self._idle,
                refresh_s=self._interval_s * 2,
            )
            task = asyncio.create_task(listener.run(), name="cyclone listener")
        pause = 0.1
        try:
            while not self._stopping:
                try:
                    conn = await db.connect(self._dsn, application_name="cyclone sweeper", pooler=self._pooler)
                    try:
                        migrate.require(
                            await migrate.read_version_async(conn, self._statements.schema), self._statements.schema
                        )
                        before = self.reached
                        try:
                            await self._rounds(conn)
                        finally:
                            if (
                                self.reached != before
                            ):  # it had worked; a server that is read-only only lets one connect
                                pause = 0.1
                    finally:
                        await conn.close()
                except (psycopg.Error, ConnectError, OSError, TimeoutError) as exc:
                    if isinstance(exc, ConnectError):
                        self.reached = 0.0  # known at once, and not only by a long silence
                    log.warning("sweeping was interrupted and goes on in %.1f s: %s", pause, db.brief(exc))
                    await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                    pause = min(pause * 2, 5.0)
        finally:
            if listener is not None and task is not None:
                listener.stop()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if self._hook is not None:
                await asyncio.to_thread(self._hook.close)

    async def _rounds(self, conn: Connection) -> None:
        tidied = looked = 0.0
        while not self._stopping:
            made = 0
            while not self._graves.empty():
                life, executing, reason, done = self._graves.get_nowait()
                try:
                    await bury(conn, self._statements, life, executing, reason)
                    made += await reclaim(conn, self._statements, hook=self._hook)
                except BaseException:
                    self._graves.put_nowait((life, executing, reason, done))  # kept for the next connection
                    raise
                if not done.done():
                    done.set_result(None)
            seen = await self._look_around(conn)
            if seen.expired or seen.dead or seen.ending or seen.due_s <= 0:
                made += await once(conn, self._statements, hook=self._hook)
                seen = await self._look_around(conn)
            now = time.monotonic()
            if now - tidied > _TIDY_S:
                tidied = now
                await tidy(conn, self._statements)
            if now - looked > _LOOK_S:
                looked = now
                await look(conn, self._statements)
            if self._pipe is not None and (made or seen.ready):
                self._pipe.wake_one()
            if self._pipe is not None and seen.isolated:
                self.on_isolated()
            self.reached = time.monotonic()
            await self._sleep(max(min(seen.due_s, self._interval_s * random.uniform(0.8, 1.0)), 0.002))

    async def _look_around(self, conn: Connection) -> _Seen:
        row = await (await conn.execute(self._statements["look_around"], {"now": None})).fetchone()
        assert row is not None
        expired, dead, ending, step_due_s, run_due_s, ready, isolated = row
        due = [due_s for due_s in (step_due_s, run_due_s) if due_s is not None]
        return _Seen(expired, dead, ending, min(due, default=self._interval_s), ready, isolated)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()
