"""Rows in any status in one line, workers that run in the test's own loop, and `until`, which waits for what is seen.

A step that is made here has what its state needs: a ticket, a claim that lists it, a life that holds the claim. So the
deep check after each test holds for these rows as it does for the engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeVar, cast

import psycopg
from psycopg.types.json import Jsonb

from cyclone import claim, control, db, events, registry, settle, sweep
from cyclone.model import Claimed, Outcome
from cyclone.plan import Run
from cyclone.registry import Registry, Step
from cyclone.worker import Worker

T = TypeVar("T")
Life = Literal["alive", "expired", "ended", "gone"]
Conn = psycopg.Connection[Any]
AsyncConn = psycopg.AsyncConnection[Any]

SQL = db.statements("public")
FAR = timedelta(days=3650)
"""Past every delay: `sweep.fire(conn, SQL, now=await later(conn, FAR))` fires all that is scheduled."""


class Made(NamedTuple):
    """A step that was made, with the claim and the life that hold it."""

    id: int
    claim: int
    life: int

    @property
    def run_id(self) -> str:
        return str(self.id)


def life(conn: Conn, state: Life = "alive", *, kinds: Sequence[str] = ("noop",), **columns: Any) -> int:
    """A life of a worker that serves the queue `default` and knows version 1 of some kinds."""
    number = random.getrandbits(62)
    if state != "gone":
        found = {
            "queues": ["default"],
            "versions": [1] * len(kinds),
            "lease_until": "infinity" if state == "alive" else "-infinity",
            "ended_at": "now" if state == "ended" else None,
            "end_reason": "killed" if state == "ended" else None,
            **columns,
        }
        _insert(conn, "cyclone_lives", id=number, host="test", pid=1, kinds=list(kinds), **found)
    return number


def step(
    conn: Conn,
    kind: str = "noop",
    state: str = "available",
    *,
    input: Any = None,
    life: int | Life = "alive",
    **columns: Any,
) -> Made:
    """One standalone step. `life` belongs to a running one; `columns` are those of its row."""
    with conn.transaction():
        number = _next(conn)
        held, owner = 0, 0
        found: dict[str, Any] = {
            "run_id": number, "node": kind, "kind": kind, "state": state, "max_attempts": 5, "input": Jsonb(input),
        }  # fmt: skip
        match state:
            case "available":
                found |= {"ord": number, "ready_at": "now"}
            case "scheduled":
                found |= {"due_at": "tomorrow"}
            case "running":
                owner = globals()["life"](conn, life, kinds=[kind]) if isinstance(life, str) else life
                held = random.getrandbits(62)
                found |= {"claim": held, "attempts": 1, "ready_at": "now", "started_at": "now"}
            case "completed" | "discarded" | "cancelled":
                found |= {"finished_at": "now", "attempts": 1}
        if columns.get("run_id", number) != number:  # a node of a run, with nothing behind it
            found |= {"policy": 0, "accept_skipped": False, "contained": False, "sink": True}
        found |= columns
        found["key_held"] = "unique_key" in columns and state not in ("completed", "discarded", "cancelled")
        _insert(conn, "cyclone_steps", id=number, **found)
        if state == "available":
            lane, rank = found.get("queue", "default"), found.get("priority", 5) * 2 + 1
            _insert(conn, "cyclone_ready", lane=lane, rank=rank, ord=found["ord"], step=number)
        if held:
            _insert(conn, "cyclone_claims", id=held, life=owner, steps=[number])
    return Made(number, held, owner)


def steps(conn: Conn, count: int, kind: str = "noop", *, input: Any = None, **columns: Any) -> list[int]:
    """Many available steps at once."""
    columns = {"max_attempts": 5, **columns}
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", %({name})s" for name in columns)
    text = f"""
        WITH made AS (
            INSERT INTO cyclone_steps (id, run_id, ord, ready_at, node, kind, state, input{names})
            SELECT id, id, id, now(), %(_kind)s, %(_kind)s, 'available', %(_input)s{values}
            FROM (SELECT nextval('cyclone_ids') AS id FROM generate_series(1, %(_count)s)) n
            RETURNING id, queue, priority
        ), tickets AS (
            INSERT INTO cyclone_ready (lane, rank, ord, step)
            SELECT queue, priority * 2 + 1, id, id FROM made ORDER BY id
        )
        SELECT id FROM made ORDER BY id"""
    rows = conn.execute(text.encode(), {"_kind": kind, "_input": Jsonb(input), "_count": count, **columns})
    return [row[0] for row in rows]


def read(conn: Conn, step: int | Made, *columns: str) -> Any:
    """Columns of a step: a tuple of them, or the value of a single one."""
    number = step.id if isinstance(step, Made) else step
    row = conn.execute(f"SELECT {', '.join(columns)} FROM cyclone_steps WHERE id = %s".encode(), (number,)).fetchone()
    if row is None:
        return None
    return row[0] if len(columns) == 1 else tuple(row)


def state(conn: Conn, step: int | Made) -> str | None:
    return cast("str | None", read(conn, step, "state"))


def errors(conn: Conn, step: int | Made) -> list[tuple[int, str, str]]:
    """(attempt, kind, message) of each failure, oldest first."""
    number = step.id if isinstance(step, Made) else step
    return conn.execute(
        "SELECT attempt, kind, message FROM cyclone_errors WHERE step = %s ORDER BY id", (number,)
    ).fetchall()


def count(conn: Conn, what: str, *params: Any) -> int:
    """`count(conn, "cyclone_steps WHERE state = 'running'")`"""
    row = conn.execute(f"SELECT count(*) FROM {what}".encode(), params).fetchone()
    assert row is not None
    return cast("int", row[0])


def ledger(conn: Conn) -> None:
    """A table of the handlers' own; it takes two rows for one step, so that a second effect shows."""
    conn.execute("CREATE TABLE ledger (id serial PRIMARY KEY, run_id text, node text, note text)")


def cancel(conn: Conn, step: int | Made, reason: str | None = None) -> bool:
    """Cancels one step as a client does, but in whatever transaction of the connection is open."""
    number = step.id if isinstance(step, Made) else step
    plan = control.cancel_step(SQL, number, read(conn, number, "node"), control.request(reason=reason))
    rows: Any = None
    try:
        while True:
            what = plan.send(rows)
            # Begin and commit are for the test to decide.
            rows = conn.execute(what.query, what.params).fetchall() if isinstance(what, Run) else []
    except StopIteration as end:
        return bool(end.value)


def end_life(conn: Conn, number: int, executing: Sequence[int] | None = None, reason: str = "killed") -> bool:
    """Ends a life, as the sweeper does with a dead worker's."""
    ids = None if executing is None else list(executing)
    params = {"life": number, "executing": ids, "reason": reason, "now": None}
    return conn.execute(SQL["end_life"], params).fetchone() is not None


# Asynchronous: connections, claims and settles of the engine's own


@contextlib.asynccontextmanager
async def engine(dsn: str, name: str = "test") -> AsyncIterator[AsyncConn]:
    """A connection as the engine has it."""
    conn = await db.connect(dsn, application_name=name)
    try:
        yield conn
    finally:
        await conn.close()


async def take(conn: AsyncConn, life: int, room: int = 100, queues: Sequence[str] = ("default",)) -> list[Claimed]:
    """One claim."""
    steps, _ = await claim.Claimer(SQL, queues).batch(conn, life, room)
    return steps


# All that a session may have been changed in, as one row. The settings of plpgsql appear with its first use.
SESSION_STATE = """
SELECT (SELECT json_object_agg(name, setting ORDER BY name)::text FROM pg_settings
        WHERE name !~ '^(plpgsql[.]|transaction_)') AS settings,
       (SELECT count(*) FROM pg_prepared_statements) AS prepared,
       (SELECT count(*) FROM pg_cursors) AS cursors,
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory') AS locks,
       (SELECT count(*) FROM pg_listening_channels()) AS channels,
       (SELECT count(*) FROM pg_class WHERE relpersistence = 't') AS temporary
"""


def driver_state(conn: Conn | AsyncConn) -> dict[str, Any]:
    """All that a connection may have been changed in on our side."""
    return {
        "autocommit": conn.autocommit,
        "row_factory": conn.row_factory,
        "cursor_factory": conn.cursor_factory,
        "isolation_level": conn.isolation_level,
        "read_only": conn.read_only,
        "deferrable": conn.deferrable,
        "prepare_threshold": conn.prepare_threshold,
        "loaders": [
            conn.adapters.get_loader(psycopg.adapters.types[name].oid, format)
            for name in ("jsonb", "timestamptz", "text", "int8")
            for format in (psycopg.pq.Format.TEXT, psycopg.pq.Format.BINARY)
        ],
        "status": conn.info.transaction_status,
        "encoding": conn.info.encoding,
    }


async def deliver(
    dsn: str, *outcomes: Outcome, batch: int = 500, hook: events.Hook | None = None
) -> list[tuple[Outcome, bool]]:
    """Settles outcomes as a worker with a good lease does; returns what was settled, and whether with certainty."""
    settled: list[tuple[Outcome, bool]] = []
    settler = settle.Settler(
        SQL,
        lambda: db.connect(dsn, application_name="test settle"),
        batch=batch,
        linger_s=0,
        holds_lease=lambda: True,
        on_settled=lambda outcomes, certain: settled.extend((one, certain) for one in outcomes),
        hook=hook,
    )
    for outcome in outcomes:
        settler.add(outcome)
    settler.stop()
    await settler.run()
    return settled


async def sweep_all(dsn: str, *, ahead: timedelta | None = None) -> int:
    """One round of a sweeper, `ahead` of the database's clock."""
    async with engine(dsn, "test sweep") as conn:
        now = None if ahead is None else await later(conn, ahead)
        return await sweep.once(conn, SQL, now=now)


async def later(conn: AsyncConn, ahead: timedelta) -> datetime:
    row = await (await conn.execute("SELECT clock_timestamp() + %s", (ahead,))).fetchone()
    assert row is not None
    return cast("datetime", row[0])


async def fire(dsn: str) -> None:
    """Makes everything that is scheduled available, whatever its due time, and leaves all else alone."""
    async with engine(dsn, "test sweep") as conn:
        await sweep.fire(conn, SQL, now=await later(conn, FAR))


@contextlib.asynccontextmanager
async def worker(dsn: str, *steps: Step[Any, Any], **options: Any) -> AsyncIterator[Worker]:
    """A worker of these steps in the test's loop. It polls often, so that no test waits for a poll."""
    async with Worker(dsn, registered(*steps), **{"poll_interval": 0.05, "drain_timeout": 5, **options}) as running:
        yield running


async def ended(conn: Conn, *made: Made, limit: float = 10.0) -> None:
    """Waits until no worker has anything to do with the steps any more."""
    ids = [one.id for one in made]
    rows = "cyclone_steps WHERE id = ANY(%s) AND state IN ('available', 'running')"
    await until(lambda: not count(conn, rows, ids), limit)


async def alone(
    dsn: str, conn: Conn, handler: Step[Any, Any], input: Any = None, *, limit: float = 10.0, **columns: Any
) -> Made:
    """Runs one step of this handler on a worker until it has ended, and returns it."""
    options = columns.pop("worker", {})
    made = step(conn, handler.name, input=input, **columns)
    async with worker(dsn, handler, **options):
        await ended(conn, made, limit=limit)
    return made


@contextlib.asynccontextmanager
async def sweeper(dsn: str, interval: float = 0.05) -> AsyncIterator[sweep.Sweeper]:
    """A sweeper in the test's loop."""
    running = sweep.Sweeper(dsn, interval=interval)
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        running.stop()
        await task


def registered(*steps: Step[Any, Any]) -> Registry:
    handlers = Registry()
    for one in steps:
        handlers.include(one)
    return handlers


@functools.cache
def noop() -> Step[Any, Any]:
    @registry.step("noop")
    async def noop(ctx: Any, input: Any) -> Any:
        return None

    return noop


async def until(what: Callable[[], T | Awaitable[T]], limit: float = 10.0) -> T:
    """Waits until `what` gives something true, and returns it."""
    deadline = time.monotonic() + limit
    for pause in itertools.chain((0.0, 0.002, 0.005, 0.01), itertools.repeat(0.02)):
        found = what()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return cast("T", found)
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit} s")
        await asyncio.sleep(pause)
    raise AssertionError


def _next(conn: Conn) -> int:
    row = conn.execute("SELECT nextval('cyclone_ids')").fetchone()
    assert row is not None
    return cast("int", row[0])


def _insert(conn: Conn, table: str, **columns: Any) -> None:
    found = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in columns.items()}
    names, values = ", ".join(found), ", ".join(f"%({name})s" for name in found)
    conn.execute(f"INSERT INTO {table} ({names}) VALUES ({values})".encode(), found)
