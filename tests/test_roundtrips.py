"""What the hot path costs in round trips: how often a claim, a settle or a completion waits for the server.

Read from libpq's own trace of a connection: each Query and each Sync that a client sends is answered by one
ReadyForQuery, and that answer is what it waits for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, state, until
from psycopg.pq import Trace
from psycopg_pool import ConnectionPool

from cyclone import Client, SyncClient, claim, db, settle
from cyclone.context import Context
from cyclone.model import Failure, Outcome, Verb
from cyclone.registry import step
from cyclone.states import ErrorKind

Conn = psycopg.Connection[Any]


@step("charge")
async def charge(ctx: Context) -> None: ...


class Traced:
    """The messages of a connection, from when tracing began."""

    def __init__(self, path: Path, conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        self._file = path.open("w+")
        self._conn = conn
        conn.pgconn.trace(self._file.fileno())
        conn.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS | Trace.REGRESS_MODE)

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Counts the messages that are sent in the block, by their type; ready once it has ended."""
        before = self._sent()
        found: Counter[str] = Counter()
        yield found
        found.update(self._sent() - before)

    def _sent(self) -> Counter[str]:
        self._file.seek(0)
        lines = (line.rstrip("\n").split("\t") for line in self._file)
        return Counter(line[2] for line in lines if line[0] == "F" and len(line) > 2)

    def close(self) -> None:
        if not self._conn.closed:
            self._conn.pgconn.untrace()
        self._file.close()


def round_trips(sent: Counter[str]) -> int:
    return sent["Sync"] + sent["Query"]


async def test_a_claim_costs_one_round_trip_whatever_it_takes(dsn: str, conn: Conn, tmp_path: Path) -> None:
    life = factories.life(conn)
    async with factories.engine(dsn) as own:
        claimer = claim.Claimer(SQL, ["default", "another"])
        await claimer.batch(own, life, 10)  # prepares the statement, once per connection
        traced = Traced(tmp_path / "trace", own)
        for ready in (0, 1, 500):
            factories.steps(conn, ready)
            with traced.counted() as sent:
                steps, _ = await claimer.batch(own, life, 500)
            assert len(steps) == ready
            assert (round_trips(sent), sent["Parse"]) == (1, 0), sent
        traced.close()


@pytest.mark.contract("C6")
async def test_a_settle_costs_one_round_trip_for_the_whole_batch(dsn: str, conn: Conn, tmp_path: Path) -> None:
    settled: list[Outcome] = []
    traced: list[Traced] = []

    async def connect() -> Any:
        own = await db.connect(dsn, application_name="test settle")
        traced.append(Traced(tmp_path / "trace", own))
        return own

    settler = settle.Settler(
        SQL, connect, batch=500, linger_s=0, holds_lease=lambda: True,
        on_settled=lambda outcomes, certain: settled.extend(outcomes),
    )  # fmt: skip
    running = asyncio.create_task(settler.run())

    async def deliver(*verbs: Verb) -> Counter[str]:
        failure = Failure(ErrorKind.RETRYABLE, "boom", "trace")
        factories.steps(conn, len(verbs))
        async with factories.engine(dsn) as own:
            steps = await factories.take(own, factories.life(conn), room=len(verbs))
        settled.clear()
        with traced[0].counted() if traced else _nothing() as sent:
            for one, verb in zip(steps, verbs, strict=True):
                output, delay_s = ("1", 0.0) if verb == Verb.COMPLETE else (None, 60.0)
                settler.add(Outcome(one, verb, output, delay_s, failure if verb == Verb.RETRY else None))
            settler.close_claim(steps[0].claim)
            await until(lambda: len(settled) == len(verbs) and settler.idle)
        return sent

    mixed = [Verb.COMPLETE, Verb.RETRY, Verb.SNOOZE, Verb.RELEASE] * 50
    await deliver(*mixed)  # connects, and prepares its statements
    await deliver(Verb.COMPLETE)
    sent = await deliver(*[Verb.COMPLETE] * 300)
    assert (round_trips(sent), sent["Parse"]) == (1, 0), sent
    sent = await deliver(*mixed)
    # The second removes the claim's row, which a batch of mixed outcomes leaves to the next.
    assert (round_trips(sent), sent["Parse"]) == (1, 0), sent
    settler.stop()
    await running
    (only,) = traced
    only.close()


@contextmanager
def _nothing() -> Iterator[Counter[str]]:
    yield Counter()


@pytest.mark.contract("X6")
@pytest.mark.parametrize("statements", [0, 3])
async def test_a_completion_transaction_costs_one_round_trip_to_begin_and_one_to_end(
    dsn: str, conn: Conn, tmp_path: Path, statements: int
) -> None:
    traced: list[Traced] = []

    @step("charge")
    async def handler(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        if not traced:
            traced.append(Traced(tmp_path / "trace", tx.connection))
        for _ in range(statements):
            await tx.connection.execute("SELECT 1", prepare=False)

    first = factories.step(conn, "charge")
    async with factories.worker(dsn, handler, completion_pool_size=1):
        await until(lambda: state(conn, first) == "completed")
        with traced[0].counted() as sent:
            second = factories.step(conn, "charge")
            await until(lambda: state(conn, second) == "completed")
            await until(lambda: not factories.count(conn, "cyclone_claims"))
        traced[0].close()
    assert round_trips(sent) == 2 + statements, sent


@pytest.mark.contract("E10")
async def test_a_renewal_is_one_statement_for_all_that_a_worker_holds(dsn: str, conn: Conn) -> None:
    release = asyncio.Event()
    entered = 0

    @step("hold")
    async def handler(ctx: Context) -> None:
        nonlocal entered
        entered += 1
        await release.wait()

    factories.steps(conn, 200, "hold")
    async with factories.worker(dsn, handler, lease=3, concurrency=200):
        await until(lambda: entered == 200)
        leases = {conn.execute("SELECT lease_until FROM cyclone_lives").fetchone()}
        before = conn.execute("SELECT sum(xmin::text::bigint) FROM cyclone_steps").fetchone()
        for _ in range(2):
            await until(lambda: conn.execute("SELECT lease_until FROM cyclone_lives").fetchone() not in leases)
            leases.add(conn.execute("SELECT lease_until FROM cyclone_lives").fetchone())
        assert factories.count(conn, "cyclone_lives WHERE lease_until > clock_timestamp()") == 1
        # Not one of the steps was touched.
        assert conn.execute("SELECT sum(xmin::text::bigint) FROM cyclone_steps").fetchone() == before
        release.set()
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 200)


@pytest.mark.contract("F7")
async def test_an_enqueue_costs_one_round_trip(dsn: str, conn: Conn, tmp_path: Path) -> None:
    async with Client(dsn) as client:
        for _ in range(10):
            await charge.enqueue(client)
        assert client._pool is not None
        async with client._pool.connection() as own:
            traced = Traced(tmp_path / "trace", own)
        with traced.counted() as sent:
            await charge.enqueue(client)
        assert (round_trips(sent), sent["Parse"]) == (1, 0), sent
        traced.close()


def test_an_enqueue_costs_one_round_trip_in_a_thread_too(dsn: str, conn: Conn, tmp_path: Path) -> None:
    with SyncClient(dsn) as client:
        for _ in range(10):
            charge.enqueue(client)
        assert client._pool is not None
        with client._pool.connection() as own:
            traced = Traced(tmp_path / "trace", own)
        with traced.counted() as sent:
            charge.enqueue(client)
        assert (round_trips(sent), sent["Parse"]) == (1, 0), sent
        traced.close()


@pytest.mark.contract("F7")
@pytest.mark.parametrize("autocommit", [True, False])
def test_on_connections_of_others_nothing_is_prepared(dsn: str, conn: Conn, autocommit: bool) -> None:
    with ConnectionPool(dsn, kwargs={"autocommit": autocommit}, min_size=1, max_size=1) as pool:
        client = SyncClient(pool=pool)
        for _ in range(10):
            charge.enqueue(client)
        with pool.connection() as own, own.transaction():
            for _ in range(10):
                charge.enqueue_tx(client, own)
            assert own.execute("SELECT name FROM pg_prepared_statements").fetchall() == []
