"""The decided points of the protocol, each with two connections and an explicit order, and the accidents of a network.

Claim, settle, reclaim and cancel meet at the step's row. Whoever commits first has decided; the other finds zero rows,
changes nothing, and neither waits long nor fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, cancel, deliver, end_life, engine, read, state, sweep_all, take, until
from proxy import Proxy

import cyclone.worker
from cyclone import sweep
from cyclone.client import Client
from cyclone.context import Context
from cyclone.model import Claimed, Failure, Outcome, Verb
from cyclone.registry import step
from cyclone.retry import fixed
from cyclone.states import ErrorKind

Conn = psycopg.Connection[Any]

FAILURE = Failure(ErrorKind.RETRYABLE, "boom", "Traceback: boom")


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as proxy:
        yield proxy


async def complete(conn: factories.AsyncConn, one: Claimed, output: str = "1") -> list[Any]:
    """The completion as the settler sends it, on a connection of the test's; returns what was not completed."""
    params = {
        "ids": [one.id],
        "claims": [one.claim],
        "outputs": [output],
        "closed": [],
        "step_over": False,
        "now": None,
    }
    return await (await conn.execute(SQL["complete_steps"], params)).fetchall()


# Claim × cancel of an available step


@pytest.mark.contract("FM-003", "FM-062")
async def test_cancel_then_claim(dsn: str, conn: Conn) -> None:
    made, other = factories.step(conn), factories.step(conn)
    cancel(conn, made)
    async with engine(dsn) as own:
        assert [one.id for one in await take(own, factories.life(conn))] == [other.id]
    assert read(conn, made, "state", "attempts") == ("cancelled", 0)
    assert factories.count(conn, "cyclone_orders") == 0


@pytest.mark.contract("FM-003", "FM-062", "FM-063")
async def test_claim_then_cancel(dsn: str, conn: Conn) -> None:
    made = factories.step(conn)
    life = factories.life(conn)
    async with engine(dsn) as own:
        (got,) = await take(own, life)
        assert cancel(conn, made, "changed my mind")
        assert conn.execute("SELECT life, step, claim, reason FROM cyclone_orders").fetchall() == [
            (life, made.id, got.claim, "changed my mind")
        ]
        await deliver(dsn, Outcome(got, Verb.COMPLETE, "1"))
    assert read(conn, made, "state", "output") == ("cancelled", None)
    assert not cancel(conn, made)


@pytest.mark.contract("FM-003", "FM-062")
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_claim_passes_over_a_step_whose_cancel_is_not_committed(dsn: str, conn: Conn, end: str) -> None:
    made, other = factories.step(conn), factories.step(conn)
    life = factories.life(conn)
    async with engine(dsn) as own:
        await own.execute("SET lock_timeout = 1")
        conn.execute("BEGIN")
        cancel(conn, made)
        assert [one.id for one in await take(own, life)] == [other.id]
        conn.execute(end.encode())
        assert [one.id for one in await take(own, life)] == ([made.id] if end == "ROLLBACK" else [])
    assert state(conn, made) == ("running" if end == "ROLLBACK" else "cancelled")
    assert factories.count(conn, "cyclone_ready") == 0


@pytest.mark.contract("FM-062", "FM-063")
async def test_a_cancel_waits_for_a_claim_that_is_not_committed_and_then_finds_the_life_that_has_it(
    dsn: str, conn: Conn
) -> None:
    made = factories.step(conn)
    life = factories.life(conn)
    async with Client(dsn) as client, engine(dsn) as own:
        await own.execute("BEGIN")
        (got,) = await take(own, life)
        cancelling = asyncio.create_task(client.cancel_step(made.run_id, "noop", reason="late"))
        await until(
            lambda: factories.count(
                conn, "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
        await own.execute("COMMIT")
        assert await cancelling
    assert conn.execute("SELECT life, claim FROM cyclone_orders").fetchall() == [(life, got.claim)]
    assert state(conn, made) == "cancelled"


# Settle × reclaim


async def _held(conn: Conn, own: factories.AsyncConn) -> tuple[Claimed, int]:
    factories.step(conn)
    life = factories.life(conn)
    (got,) = await take(own, life)
    return got, life


@pytest.mark.contract("FM-003", "FM-015", "E9")
async def test_settle_then_reclaim(dsn: str, conn: Conn) -> None:
    async with engine(dsn) as own, engine(dsn) as sweeper:
        got, life = await _held(conn, own)
        end_life(conn, life)
        await own.execute("BEGIN")
        assert await complete(own, got) == []
        await sweeper.execute("SET lock_timeout = 1")
        assert await sweep.reclaim(sweeper, SQL) == 0
        await own.execute("COMMIT")
        assert await sweep.reclaim(sweeper, SQL) == 0
    assert read(conn, got.id, "state", "output", "reclaims") == ("completed", 1, 0)
    assert factories.count(conn, "cyclone_claims") == 0
    assert factories.count(conn, "cyclone_ready") == 0


@pytest.mark.contract("FM-003", "FM-015", "E9")
async def test_a_settle_that_is_rolled_back_leaves_the_step_to_the_reclaim(dsn: str, conn: Conn) -> None:
    async with engine(dsn) as own, engine(dsn) as sweeper:
        got, life = await _held(conn, own)
        end_life(conn, life)
        await own.execute("BEGIN")
        await complete(own, got)
        assert await sweep.reclaim(sweeper, SQL) == 0
        await own.execute("ROLLBACK")
        assert await sweep.reclaim(sweeper, SQL) == 1
    assert read(conn, got.id, "state", "output", "reclaims") == ("available", None, 1)


@pytest.mark.contract("FM-003", "FM-015", "E9")
async def test_reclaim_then_settle(dsn: str, conn: Conn) -> None:
    async with engine(dsn) as own, engine(dsn) as sweeper:
        got, life = await _held(conn, own)
        end_life(conn, life)
        await sweeper.execute("BEGIN")
        assert await sweep.reclaim(sweeper, SQL) == 1
        settling = asyncio.create_task(complete(own, got))
        await until(
            lambda: factories.count(
                conn, "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
        await sweeper.execute("COMMIT")
        # It waited for the lock, found another state, and changed nothing. Its view is from before the wait: whoever
        # reads "still mine" from it sends again, and is refused then.
        assert [row[0] for row in await settling] == [got.id]
        assert await deliver(dsn, Outcome(got, Verb.COMPLETE, "1"))
    assert read(conn, got.id, "state", "output", "reclaims", "attempts") == ("available", None, 1, 1)


@pytest.mark.contract("FM-003", "FM-015", "E9", "FM-073")
@pytest.mark.parametrize("verb", [Verb.COMPLETE, Verb.RETRY, Verb.RELEASE])
async def test_a_batch_that_meets_a_reclaim_is_settled_without_an_error(
    dsn: str, conn: Conn, verb: Verb, caplog: pytest.LogCaptureFixture
) -> None:
    lost, kept = factories.life(conn), factories.life(conn)
    factories.steps(conn, 10)
    async with engine(dsn) as own, engine(dsn) as sweeper:
        steps = await take(own, lost, room=5) + await take(own, kept, room=5)
        end_life(conn, lost)
        await sweeper.execute("BEGIN")
        assert await sweep.reclaim(sweeper, SQL) == 5
        outcomes = [
            Outcome(one, verb, "1", delay_s=60.0, failure=FAILURE if verb == Verb.RETRY else None) for one in steps
        ]
        settling = asyncio.create_task(deliver(dsn, *outcomes))
        done = "completed" if verb == Verb.COMPLETE else "scheduled"
        await until(lambda: {state(conn, one.id) for one in steps[5:]} == {done})
        assert not settling.done()
        await sweeper.execute("COMMIT")
        assert {certain for _, certain in await settling} == {True}
    assert {read(conn, one.id, "state", "reclaims") for one in steps[:5]} == {("available", 1)}
    assert "tried again" not in caplog.text


# Settle × cancel


@pytest.mark.contract("FM-062", "FM-003")
async def test_settle_then_cancel(dsn: str, conn: Conn) -> None:
    async with engine(dsn) as own:
        got, _ = await _held(conn, own)
        await own.execute("BEGIN")
        await complete(own, got)
        with psycopg.connect(dsn, autocommit=True) as other:
            cancelling = asyncio.create_task(asyncio.to_thread(_cancel_in_transaction, other, got.id))
            await until(
                lambda: factories.count(
                    conn, "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
                )
            )
            await own.execute("COMMIT")
            assert not await cancelling
    assert read(conn, got.id, "state", "output", "error_kind") == ("completed", 1, None)
    assert factories.count(conn, "cyclone_orders") == 0


def _cancel_in_transaction(conn: Conn, number: int) -> bool:
    with conn.transaction():
        return cancel(conn, number)


@pytest.mark.contract("FM-062", "FM-003")
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_cancel_then_settle(dsn: str, conn: Conn, end: str) -> None:
    async with engine(dsn) as own:
        got, _ = await _held(conn, own)
        conn.execute("BEGIN")
        cancel(conn, got.id)
        settling = asyncio.create_task(deliver(dsn, Outcome(got, Verb.COMPLETE, "1")))
        await asyncio.sleep(0.15)  # past the settler's patience with a lock
        conn.execute(end.encode())
        assert [certain for _, certain in await settling] == [True]
    assert state(conn, got.id) == ("cancelled" if end == "COMMIT" else "completed")


@pytest.mark.contract("FM-062", "X1", "X8")
async def test_cancel_then_the_commit_of_a_completion_transaction(dsn: str, conn: Conn) -> None:
    factories.ledger(conn)
    entered, release = asyncio.Event(), asyncio.Event()

    @step("charge")
    async def handler(ctx: Context) -> int:
        await (await ctx.completion_tx()).execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        entered.set()
        await release.wait()
        return 1

    made = factories.step(conn, "charge")
    async with factories.worker(dsn, handler):
        await entered.wait()
        with conn.transaction():
            cancel(conn, made)
            release.set()
            # The completion waits for the row, with the handler's write behind it.
            with psycopg.connect(dsn, autocommit=True) as other:
                await until(
                    lambda: factories.count(
                        other, "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
                    )
                )
        await until(lambda: not factories.count(conn, "cyclone_claims"))
    assert read(conn, made, "state", "output") == ("cancelled", None)
    assert factories.count(conn, "ledger") == 0


# Reclaim × cancel


@pytest.mark.contract("FM-003", "FM-062")
async def test_a_cancel_and_a_reclaim_of_the_same_step_in_both_orders(dsn: str, conn: Conn) -> None:
    async with engine(dsn) as own, engine(dsn) as sweeper:
        first, life = await _held(conn, own)
        end_life(conn, life)
        with conn.transaction():
            cancel(conn, first.id)
            assert await sweep.reclaim(sweeper, SQL) == 0
        assert await sweep.reclaim(sweeper, SQL) == 0
        second, life = await _held(conn, own)
        end_life(conn, life)
        assert await sweep.reclaim(sweeper, SQL) == 1
        assert cancel(conn, second.id)
    assert [read(conn, one.id, "state", "reclaims") for one in (first, second)] == [("cancelled", 0), ("cancelled", 1)]
    assert factories.count(conn, "cyclone_claims") == 0


# Lost replies


@pytest.mark.contract("E1", "E2", "FM-031", "M9")
async def test_when_the_reply_of_a_claim_is_lost_the_worker_gives_the_steps_back_and_each_runs_once(
    dsn: str, conn: Conn, proxy: Proxy
) -> None:
    calls: Counter[str] = Counter()
    attempts: set[int] = set()

    @step("count")
    async def handler(ctx: Context) -> None:
        calls[ctx.run_id] += 1
        attempts.add(ctx.attempt)

    async with factories.worker(proxy.dsn, handler) as worker:
        dropped = proxy.drop_next_reply_after(
            b"UPDATE " + SQL.quoted.encode() + b".cyclone_steps s\n    SET state = 'running'"
        )
        with conn.transaction():
            made = [factories.step(conn, "count") for _ in range(20)]
        await until(dropped.is_set)
        # Not after the lease: the life goes on.
        await until(lambda: {state(conn, one) for one in made} == {"completed"}, 8)
        await until(lambda: not factories.count(conn, "cyclone_steps WHERE state = 'running'"))
        assert conn.execute("SELECT id, ended_at FROM cyclone_lives").fetchall() == [(worker._keeper.life, None)]
    assert set(calls.values()) == {1} and len(calls) == 20
    # No handler had been called, so no attempt was spent and nothing counts as a reclaim.
    assert attempts == {1}
    assert {read(conn, one, "attempts", "reclaims") for one in made} == {(1, 0)}


@pytest.mark.contract("E1", "E2", "FM-031")
async def test_a_lost_claim_that_commits_after_the_worker_has_looked_is_given_back_too(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cyclone.worker, "_RECONCILE_S", 0.3)
    calls: Counter[str] = Counter()

    @step("count")
    async def handler(ctx: Context) -> None:
        calls[ctx.run_id] += 1

    async with factories.worker(dsn, handler) as worker, engine(dsn) as late:
        # What the worker's broken connection had sent: a claim of its life that it knows nothing of.
        await late.execute("BEGIN")
        with conn.transaction():
            # Uncommitted until the late claim has it, so that the worker cannot take it first.
            made = factories.step(conn, "count", state="scheduled")
        held = 4711
        await late.execute(
            "UPDATE cyclone_steps SET state = 'running', due_at = NULL, claim = %s, attempts = 1 WHERE id = %s",
            (held, made.id),
        )
        await late.execute(
            "INSERT INTO cyclone_claims (id, life, steps) VALUES (%s, %s, %s)", (held, worker._keeper.life, [made.id])
        )
        await late.execute("COMMIT")
        await until(lambda: state(conn, made) == "completed", 8)
    assert calls == {made.run_id: 1}
    assert read(conn, made, "attempts", "reclaims") == (1, 0)


@pytest.mark.contract("FM-031", "C1", "E2", "M8")
async def test_when_the_reply_of_a_settle_is_lost_the_batch_is_recorded_once(
    dsn: str, conn: Conn, proxy: Proxy
) -> None:
    calls: Counter[str] = Counter()

    @step("count", backoff=fixed(3600))
    async def handler(ctx: Context, input: int) -> int:
        calls[ctx.run_id] += 1
        if input % 2:
            raise ValueError(input)
        return input

    async with factories.worker(proxy.dsn, handler):
        dropped = proxy.drop_next_reply_after(b"SET state = 'completed'")
        with conn.transaction():
            made = [factories.step(conn, "count", input=n) for n in range(20)]
        await until(dropped.is_set)
        await until(lambda: [state(conn, one) for one in made] == ["completed", "scheduled"] * 10)
        await until(lambda: not factories.count(conn, "cyclone_claims"))
    assert set(calls.values()) == {1}
    assert [read(conn, one, "output") for one in made[::2]] == list(range(0, 20, 2))
    assert factories.count(conn, "cyclone_errors") == 10


@pytest.mark.contract("M9", "FM-028", "FM-031", "E1")
async def test_a_worker_whose_connections_are_cut_again_and_again_runs_everything_and_keeps_its_life(
    dsn: str, conn: Conn, proxy: Proxy
) -> None:
    calls: Counter[str] = Counter()

    @step("count")
    async def handler(ctx: Context) -> None:
        calls[ctx.run_id] += 1
        await asyncio.sleep(0.005)

    made = factories.steps(conn, 400, "count")
    async with factories.worker(proxy.dsn, handler, concurrency=20) as worker:
        life = worker._keeper.life
        for part in range(1, 5):
            await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") >= 80 * part)  # noqa: B023
            proxy.cut()
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == len(made), 30)
        assert worker._keeper.life == life
    assert len(calls) == 400 and set(calls.values()) == {1}


@pytest.mark.contract("M9", "FM-028", "FM-040", "F5")
async def test_after_the_end_of_all_connections_work_is_heard_of_at_once_again(dsn: str, conn: Conn) -> None:
    @step("hear")
    async def handler(ctx: Context) -> None:
        pass

    async with Client(dsn) as client, factories.worker(dsn, handler, poll_interval=60):
        await (await handler.enqueue(client)).wait(5)
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'cyclone %'"
        )
        listening = "pg_stat_activity WHERE datname = current_database() AND application_name = 'cyclone listen'"
        await until(lambda: factories.count(conn, listening + " AND query ILIKE '%%cyclone_sleepers%%'"))
        for _ in range(3):
            await (await handler.enqueue(client)).wait(2)


@pytest.mark.contract("M8", "M9")
async def test_a_database_that_is_away_while_handlers_return_gets_their_results_when_it_is_back(
    dsn: str, conn: Conn, proxy: Proxy
) -> None:
    calls: Counter[str] = Counter()
    entered, release = asyncio.Event(), asyncio.Event()

    @step("count")
    async def handler(ctx: Context) -> str:
        calls[ctx.run_id] += 1
        entered.set()
        await release.wait()
        return "kept"

    made = factories.step(conn, "count")
    async with factories.worker(proxy.dsn, handler):
        await entered.wait()
        proxy.freeze()
        release.set()
        await asyncio.sleep(0.3)
        assert state(conn, made) == "running"
        proxy.cut()  # and away it stays: new connections are accepted and hear nothing
        await asyncio.sleep(0.3)
        proxy.thaw()
        await until(lambda: state(conn, made) == "completed")
    assert calls == {made.run_id: 1}
    assert read(conn, made, "output", "attempts") == ("kept", 1)


@pytest.mark.contract("M8", "FM-008", "E9", "FM-015")
async def test_a_worker_that_cannot_renew_for_longer_than_its_lease_starts_nothing_and_goes_on_under_a_new_life(
    dsn: str, conn: Conn, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    factories.ledger(conn)
    calls: list[tuple[str, int]] = []
    entered, told = asyncio.Event(), asyncio.Event()

    @step("work")
    async def handler(ctx: Context, input: str) -> str:
        calls.append((input, ctx.attempt))
        if len(calls) == 1:
            tx = await ctx.completion_tx()
            await tx.execute("INSERT INTO ledger (note) VALUES ('first')")
            entered.set()
            try:
                await asyncio.sleep(60)
            finally:
                assert ctx.lease_lost
                told.set()
        return "done"

    made = factories.step(conn, "work", input="long")
    async with factories.worker(proxy.dsn, handler, lease=1) as worker, factories.sweeper(dsn):
        life = worker._keeper.life
        await entered.wait()
        proxy.freeze()
        waiting = factories.step(conn, "work", input="later")
        # The sweeper, which still reaches the database, gives the step to whoever comes.
        await until(lambda: state(conn, made) == "available")
        assert not worker._keeper.holds
        assert calls == [("long", 1)]
        # The handler hears of it although nothing reaches the worker.
        async with asyncio.timeout(2):
            await told.wait()
        proxy.cut()
        proxy.thaw()
        await until(lambda: {state(conn, one) for one in (made, waiting)} == {"completed"})
        assert worker._keeper.life != life
    assert sorted(calls) == [("later", 1), ("long", 1), ("long", 1)]
    assert read(conn, made, "attempts", "reclaims") == (1, 1)
    assert factories.count(conn, "ledger") == 0
    assert "was lost" in caplog.text


# A life that ends under its worker


@pytest.mark.contract("E9", "FM-008", "FM-015")
async def test_a_life_that_is_ended_gets_no_claims_its_renewals_are_refused_and_its_worker_takes_another(
    dsn: str, conn: Conn
) -> None:
    calls: list[str] = []
    release = asyncio.Event()

    @step("work")
    async def handler(ctx: Context) -> str:
        calls.append(ctx.run_id)
        if len(calls) == 1:
            await release.wait()
        return "done"

    made = factories.step(conn, "work")
    async with factories.worker(dsn, handler, lease=1) as worker:
        await until(lambda: calls)
        life = worker._keeper.life
        end_life(conn, life, executing=[made.id], reason="killed")
        later = factories.step(conn, "work")
        await until(lambda: worker._keeper.life != life)
        await until(lambda: state(conn, later) == "completed")
        assert await sweep_all(dsn) == 1
        await until(lambda: state(conn, made) == "completed")
        release.set()
    assert calls.count(made.run_id) == 2 and calls.count(later.run_id) == 1
    assert conn.execute("SELECT end_reason FROM cyclone_lives WHERE id = %s", (life,)).fetchone() == ("killed",)
    assert read(conn, made, "reclaims", "attempts") == (1, 1)


# Draining


@pytest.mark.contract("F3", "F4", "FM-018")
async def test_a_worker_that_stops_gives_back_what_it_has_and_spends_nothing(dsn: str, conn: Conn) -> None:
    entered: list[int] = []

    @step("long", grace=0.5)
    async def handler(ctx: Context) -> None:
        entered.append(ctx.attempt)
        await asyncio.sleep(60)

    made = [factories.step(conn, "long", attempts=1) for _ in range(10)]
    async with factories.worker(dsn, handler, concurrency=3, drain_timeout=0.1):
        await until(lambda: len(entered) == 3)
    assert {read(conn, one, "state", "reclaims", "error") for one in made} == {("available", 0, None)}
    # Three were called and will repeat their attempt; the others are as they were.
    assert Counter(read(conn, one, "attempts", "resume") for one in made) == {(2, True): 3, (1, False): 7}
    assert factories.count(conn, "cyclone_claims") == 0
    async with engine(dsn) as own:
        assert {one.attempt for one in await take(own, factories.life(conn, kinds=["long"]))} == {2}


@pytest.mark.contract("F3", "FM-026")
async def test_a_worker_that_stops_lets_its_handlers_finish_and_renews_its_lease_meanwhile(
    dsn: str, conn: Conn
) -> None:
    calls = 0
    release = asyncio.Event()

    @step("long")
    async def handler(ctx: Context) -> int:
        nonlocal calls
        calls += 1
        await release.wait()
        return calls

    made = factories.step(conn, "long")
    async with factories.worker(dsn, handler, lease=1) as worker, factories.sweeper(dsn):
        await until(lambda: calls)
        worker.stop()
        late = factories.step(conn, "long")
        await until(lambda: read(conn, late, "enqueued_at < clock_timestamp() - interval '2.5 seconds'"))
        release.set()
    assert read(conn, made, "state", "output", "reclaims") == ("completed", 1, 0)
    assert state(conn, late) == "available"


@pytest.mark.contract("F3", "FM-018")
async def test_a_worker_can_stop_although_somebody_holds_a_step_of_its_in_an_open_transaction(
    dsn: str, conn: Conn
) -> None:
    @step("done")
    async def handler(ctx: Context) -> int:
        held.execute("SELECT FROM cyclone_steps WHERE id = %s FOR UPDATE", (ctx.run_id,))
        return 1

    made = factories.step(conn, "done")
    with psycopg.connect(dsn) as held:
        async with asyncio.timeout(8):
            async with factories.worker(dsn, handler, drain_timeout=0.1):
                await until(
                    lambda: factories.count(
                        conn, "pg_locks WHERE mode = 'RowShareLock' AND pid = %s", held.info.backend_pid
                    )
                )
        assert state(conn, made) == "running"
    assert await sweep_all(dsn) == 1
    # Its handler had returned, so it did not die of the step; the same attempt is called again.
    assert read(conn, made, "state", "reclaims") == ("available", 0)
    async with engine(dsn) as own:
        assert [one.attempt for one in await take(own, factories.life(conn, kinds=["done"]))] == [1]


# What the database was told by its owner


@pytest.mark.contract("FM-037")
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_stricter_isolation_of_the_database_is_not_the_engines(
    dsn: str, conn: Conn, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    conn.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'".encode())
    calls: Counter[str] = Counter()

    @step("count")
    async def handler(ctx: Context) -> None:
        calls[ctx.run_id] += 1

    factories.steps(conn, 600, "count")
    async with (
        factories.worker(dsn, handler, claim_batch=20),
        factories.worker(dsn, handler, claim_batch=20),
        factories.worker(dsn, handler, claim_batch=20),
    ):
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 600, 20)
    assert set(calls.values()) == {1}
    assert "could not serialize" not in caplog.text


# Deadlocks


@pytest.mark.contract("FM-073", "FM-062")
async def test_claims_settles_cancels_reclaims_and_sweeps_at_once_end_in_one_state_each_and_no_error(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    calls: Counter[str] = Counter()

    @step("busy", max_attempts=100, max_reclaims=None, backoff=fixed(0.001))
    async def handler(ctx: Context, input: int) -> int:
        calls[ctx.run_id] += 1
        if input % 3 == 0 and ctx.attempt == 1:
            raise ValueError
        await asyncio.sleep(0.002)
        return input

    made = [factories.step(conn, "busy", input=n, max_attempts=100) for n in range(300)]
    cancelled = made[::7]

    def cancel_some() -> list[bool]:
        with psycopg.connect(dsn, autocommit=True) as other:
            return [_cancel_in_transaction(other, one.id) for one in reversed(cancelled)]

    async with (
        factories.worker(dsn, handler, concurrency=30) as one,
        factories.worker(dsn, handler, concurrency=30),
        factories.sweeper(dsn, interval=0.01),
        factories.sweeper(dsn, interval=0.01),
    ):
        cancelling = asyncio.create_task(asyncio.to_thread(cancel_some))
        await until(lambda: len(calls) > 100)
        end_life(conn, one._keeper.life)
        changed = await cancelling
        await until(
            lambda: factories.count(conn, "cyclone_steps WHERE state IN ('completed', 'cancelled')") == len(made), 40
        )
    ends = Counter(state(conn, one) for one in made)
    assert ends["cancelled"] == sum(changed)
    assert {state(conn, one) for one, done in zip(reversed(cancelled), changed, strict=True) if done} <= {"cancelled"}
    assert "deadlock" not in caplog.text
    assert "tried again" not in caplog.text
