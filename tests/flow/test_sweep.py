"""Sweep: what dead workers held comes back, what is due fires, and any number of sweepers may do it at once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, deliver, end_life, engine, read, state, sweep_all, take, until

import cyclone.worker
from cyclone import sweep
from cyclone.context import Context
from cyclone.model import Outcome, Verb
from cyclone.registry import step

Conn = psycopg.Connection[Any]


# What dead workers held


@pytest.mark.contract("E4", "E7", "R7", "F1", "M1")
@pytest.mark.parametrize("life", ["expired", "ended", "gone"])
async def test_what_a_dead_life_holds_is_available_again_with_the_same_attempt(
    dsn: str, conn: Conn, life: factories.Life
) -> None:
    made = factories.step(conn, state="running", life=life, attempts=2)
    assert await sweep_all(dsn) == 1
    assert read(conn, made, "state", "attempts", "resume", "reclaims") == ("available", 2, True, 1)
    assert (
        read(conn, made, "last_crash") == {"expired": "lease expired", "ended": "killed", "gone": "life unknown"}[life]
    )
    assert factories.count(conn, "cyclone_claims") == 0
    async with engine(dsn) as own:
        (got,) = await take(own, factories.life(conn))
    assert (got.attempt, got.reclaims) == (2, 1)


@pytest.mark.contract("FM-013", "E10")
async def test_what_a_living_life_holds_stays_however_long_it_runs(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, state="running", started_at="2001-01-01")
    assert await sweep_all(dsn, ahead=factories.FAR) == 0
    assert read(conn, made, "state", "claim") == ("running", made.claim)


@pytest.mark.contract("FM-013", "FM-080")
async def test_a_lease_is_judged_by_the_clock_of_the_database(dsn: str, conn: Conn) -> None:
    life = factories.life(conn, lease_until="now")
    conn.execute("UPDATE cyclone_lives SET lease_until = clock_timestamp() + interval '60 seconds'")
    made = factories.step(conn, state="running", life=life)
    assert await sweep_all(dsn, ahead=timedelta(seconds=55)) == 0
    assert await sweep_all(dsn, ahead=timedelta(seconds=61)) == 1
    assert state(conn, made) == "available"


@pytest.mark.contract("E9", "FM-008")
async def test_a_life_that_ended_is_never_renewed(dsn: str, conn: Conn) -> None:
    life = factories.life(conn, "expired")
    await sweep_all(dsn)
    assert conn.execute("SELECT end_reason FROM cyclone_lives").fetchall() == [("lease expired",)]
    assert conn.execute(SQL["renew_life"], {"life": life, "lease_s": 60.0, "now": None}).fetchone() is None
    params = {"host": "h", "pid": 1, "queues": ["default"], "kinds": ["noop"], "versions": [1]}
    conn.execute(SQL["begin_life"], {"life": life, "lease_s": 60.0, "now": None, **params})
    assert conn.execute(SQL["renew_life"], {"life": life, "lease_s": 60.0, "now": None}).fetchone() is None
    # The first word on how it ended is believed.
    assert not end_life(conn, life, reason="another")


@pytest.mark.contract("FM-002")
async def test_another_life_of_the_same_host_and_process_id_keeps_nothing_of_an_earlier_one(
    dsn: str, conn: Conn
) -> None:
    made = factories.step(conn, state="running", life="expired")
    host, pid = conn.execute("SELECT host, pid FROM cyclone_lives").fetchall()[0]
    params = {"life": 1, "lease_s": 60.0, "now": None, "host": host, "pid": pid}
    conn.execute(SQL["begin_life"], {**params, "queues": ["default"], "kinds": ["noop"], "versions": [1]})
    assert conn.execute(SQL["renew_life"], params).fetchone() == (1,)
    assert await sweep_all(dsn) == 1
    assert read(conn, made, "state", "last_crash") == ("available", "lease expired")


@pytest.mark.contract("E9")
async def test_a_life_that_expired_and_was_not_ended_may_still_be_renewed(dsn: str, conn: Conn) -> None:
    life = factories.life(conn, "expired")
    assert conn.execute(SQL["renew_life"], {"life": life, "lease_s": 60.0, "now": None}).fetchone() == (life,)
    made = factories.step(conn, state="running", life=life)
    assert await sweep_all(dsn) == 0
    assert state(conn, made) == "running"


@pytest.mark.contract("E13", "F4")
async def test_only_what_was_being_executed_counts_a_reclaim(dsn: str, conn: Conn) -> None:
    factories.steps(conn, 3)
    life = factories.life(conn)
    async with engine(dsn) as own:
        executed, first, second = await take(own, life)
        await sweep.bury(own, SQL, life, [executed.id], "signal 9")
        assert await sweep.reclaim(own, SQL) == 3
    assert read(conn, executed.id, "state", "attempts", "resume", "reclaims", "last_crash") == (
        "available", 1, True, 1, "signal 9",
    )  # fmt: skip
    for one in (first, second):
        assert read(conn, one.id, "state", "attempts", "resume", "reclaims", "last_crash") == (
            "available", 0, False, 0, None,
        )  # fmt: skip


@pytest.mark.contract("E13")
async def test_an_unstarted_step_that_repeated_an_attempt_still_does(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, attempts=2, resume=True, reclaims=1)
    life = factories.life(conn)
    async with engine(dsn) as own:
        await take(own, life)
        await sweep.bury(own, SQL, life, [], "signal 9")
        await sweep.reclaim(own, SQL)
    assert read(conn, made, "state", "attempts", "resume", "reclaims") == ("available", 2, True, 1)


@pytest.mark.contract("E12", "D10")
async def test_at_the_crash_limit_of_its_kind_a_step_is_discarded(dsn: str, conn: Conn) -> None:
    @step("fragile", max_reclaims=3)
    async def fragile(ctx: Context) -> None:
        pass

    async with factories.worker(dsn, fragile):  # makes the kind known
        pass
    under, at = (
        factories.step(conn, "fragile", "running", life="ended", attempts=2, reclaims=reclaims) for reclaims in (1, 2)
    )
    unstarted = factories.step(conn, "fragile", "running", attempts=1, reclaims=2)
    end_life(conn, unstarted.life, executing=[])
    await sweep_all(dsn)
    assert read(conn, under, "state", "reclaims") == ("available", 2)
    assert read(conn, at, "state", "reclaims", "attempts", "error_kind") == ("discarded", 3, 2, "crashed")
    assert "3 times" in read(conn, at, "error") and "killed" in read(conn, at, "error")
    assert factories.errors(conn, at) == [(2, "crashed", read(conn, at, "error"))]
    assert read(conn, unstarted, "state", "reclaims", "error_kind") == ("available", 2, None)


@pytest.mark.contract("E12")
async def test_a_step_is_lost_ten_times_by_default_and_then_discarded(dsn: str, conn: Conn) -> None:
    made = factories.step(conn)
    async with factories.worker(dsn, factories.noop(), queues=["another"]):  # makes the kind known
        pass
    async with engine(dsn) as own:
        claimer_queues = ["default", "!default"]
        for lost in range(1, 11):
            life = factories.life(conn)
            (got,) = await take(own, life, queues=claimer_queues)
            assert (got.attempt, got.reclaims) == (1, lost - 1)
            end_life(conn, life)
            await sweep.reclaim(own, SQL)
    assert read(conn, made, "state", "reclaims", "attempts", "error_kind") == ("discarded", 10, 1, "crashed")


@pytest.mark.contract("E12")
async def test_a_kind_without_a_limit_and_one_that_nobody_knows_are_never_discarded(dsn: str, conn: Conn) -> None:
    @step("endless", max_reclaims=None)
    async def endless(ctx: Context) -> None:
        pass

    async with factories.worker(dsn, endless):
        pass
    made = [factories.step(conn, kind, "running", life="ended", reclaims=1000) for kind in ("endless", "unknown")]
    await sweep_all(dsn)
    assert {read(conn, one, "state", "reclaims") for one in made} == {("available", 1001)}


@pytest.mark.contract("E14")
async def test_what_was_executed_at_two_deaths_is_set_apart_and_still_run(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cyclone.worker, "_RECONCILE_S", 0.3)
    made = [factories.step(conn, "noop", "running", reclaims=reclaims) for reclaims in (0, 1)]
    unattributed = factories.step(conn, "noop", "running", reclaims=1)
    for one in made:
        end_life(conn, one.life, executing=[one.id])
    end_life(conn, unattributed.life, executing=None)
    await sweep_all(dsn)
    assert [read(conn, one, "isolated") for one in (*made, unattributed)] == [False, True, False]
    lanes = dict(conn.execute("SELECT step, lane FROM cyclone_ready").fetchall())
    assert lanes == {made[0].id: "default", made[1].id: "!default", unattributed.id: "default"}
    async with factories.worker(dsn, factories.noop()):
        await until(lambda: {state(conn, one) for one in (*made, unattributed)} == {"completed"}, 12)


@pytest.mark.contract("FM-004", "FM-088")
async def test_a_sweeper_that_knows_no_handler_gives_back_whatever_it_is(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, "never heard of", "running", life="ended")
    assert await sweep_all(dsn) == 1
    assert read(conn, made, "state", "error") == ("available", None)


@pytest.mark.contract("FM-003", "FM-012")
async def test_steps_that_ended_under_a_dead_claim_stay_as_they_are(dsn: str, conn: Conn) -> None:
    life = factories.life(conn)
    factories.steps(conn, 5)
    async with engine(dsn) as own:
        done, failed, snoozed, gone, held = await take(own, life)
        await deliver(
            dsn,
            Outcome(done, Verb.COMPLETE, "1"),
            Outcome(failed, Verb.RETRY, delay_s=60.0),
            Outcome(snoozed, Verb.SNOOZE, delay_s=60.0),
        )
        conn.execute("DELETE FROM cyclone_steps WHERE id = %s", (gone.id,))
        before = [read(conn, one.id, "*") for one in (done, failed, snoozed)]
        end_life(conn, life)
        assert await sweep.reclaim(own, SQL) == 1
    assert [read(conn, one.id, "*") for one in (done, failed, snoozed)] == before
    assert state(conn, held.id) == "available"
    assert factories.count(conn, "cyclone_claims") == 0


@pytest.mark.contract("FM-003")
async def test_a_newer_claim_is_not_revoked_with_an_older_one(dsn: str, conn: Conn) -> None:
    first, second = factories.life(conn), factories.life(conn)
    made = factories.step(conn)
    async with engine(dsn) as own:
        (old,) = await take(own, first)
        await deliver(dsn, Outcome(old, Verb.RELEASE))
        (new,) = await take(own, second)
        end_life(conn, first)
        assert await sweep.reclaim(own, SQL) == 0
    assert read(conn, made, "state", "claim", "reclaims") == ("running", new.claim, 0)


async def test_more_dead_claims_than_one_transaction_takes(dsn: str, conn: Conn) -> None:
    life = factories.life(conn)
    made = [factories.step(conn, state="running", life=life) for _ in range(2 * sweep._CLAIMS + 3)]
    end_life(conn, life)
    assert await sweep_all(dsn) == len(made)
    assert factories.count(conn, "cyclone_claims") == 0


# Several sweepers, and locks of others


@pytest.mark.contract("F2", "FM-073", "M10")
async def test_three_sweepers_at_once_reclaim_and_fire_each_step_once(dsn: str, conn: Conn) -> None:
    life = factories.life(conn)
    held = [factories.step(conn, state="running", life=life) for _ in range(100)]
    due = [factories.step(conn, state="scheduled", due_at="yesterday") for _ in range(100)]
    end_life(conn, life)
    counts = await asyncio.gather(*(sweep_all(dsn) for _ in range(3)))
    assert sum(counts) == 200
    assert {read(conn, one, "state", "reclaims") for one in held} == {("available", 1)}
    assert {state(conn, one) for one in due} == {"available"}
    assert factories.count(conn, "cyclone_ready") == 200


@pytest.mark.contract("F2", "FM-003")
async def test_two_sweepers_on_the_same_claim(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, state="running", life="ended")
    async with engine(dsn) as first, engine(dsn) as second:
        await second.execute("SET lock_timeout = 1")
        await first.execute("BEGIN")
        assert await sweep.reclaim(first, SQL) == 1
        assert await sweep.once(second, SQL) == 0  # passes it over, and does not wait
        await first.execute("COMMIT")
        assert await sweep.once(second, SQL) == 0
    assert read(conn, made, "state", "reclaims") == ("available", 1)
    assert factories.count(conn, "cyclone_ready") == 1


@pytest.mark.contract("FM-003", "FM-073", "E1")
async def test_a_step_that_somebody_has_locked_is_passed_over_and_found_by_the_next_look(dsn: str, conn: Conn) -> None:
    life = factories.life(conn)
    factories.steps(conn, 3)
    async with engine(dsn) as own:
        first, locked, last = await take(own, life)
        end_life(conn, life)
        await own.execute("SET lock_timeout = 1")
        with conn.transaction():
            conn.execute("SELECT FROM cyclone_steps WHERE id = %s FOR UPDATE", (locked.id,))
            assert await sweep.once(own, SQL) == 2
            # The claim stays, or nobody would ever find the one that is left.
            assert factories.count(conn, "cyclone_claims") == 1
        assert [state(conn, one.id) for one in (first, locked, last)] == ["available", "running", "available"]
        assert await sweep.once(own, SQL) == 1
    assert read(conn, locked.id, "state", "reclaims") == ("available", 1)
    assert factories.count(conn, "cyclone_claims") == 0


@pytest.mark.contract("FM-073")
async def test_a_life_and_a_timer_that_somebody_has_locked_are_passed_over(dsn: str, conn: Conn) -> None:
    life = factories.life(conn, "expired")
    due = factories.step(conn, state="scheduled", due_at="yesterday")
    async with engine(dsn) as own:
        await own.execute("SET lock_timeout = 1")
        with conn.transaction():
            conn.execute("SELECT FROM cyclone_lives FOR UPDATE")
            conn.execute("SELECT FROM cyclone_steps FOR UPDATE")
            assert await sweep.end_lives(own, SQL) == 0
            assert await sweep.fire(own, SQL) == 0
        assert await sweep.end_lives(own, SQL) == 1
        assert await sweep.fire(own, SQL) == 1
    assert state(conn, due) == "available"
    assert not end_life(conn, life)


@pytest.mark.contract("FM-003", "E1")
async def test_a_dead_workers_last_claim_that_commits_late_is_found_too(dsn: str, conn: Conn) -> None:
    life = factories.life(conn)
    made = factories.step(conn)
    async with engine(dsn) as late, engine(dsn) as own:
        await late.execute("BEGIN")
        assert len(await take(late, life)) == 1
        end_life(conn, life)
        assert await sweep.once(own, SQL) == 0
        await late.execute("COMMIT")
        assert state(conn, made) == "running"
        assert await sweep.once(own, SQL) == 1
    assert state(conn, made) == "available"


# Timers


@pytest.mark.contract("S8", "FM-049", "FM-080")
async def test_what_is_due_fires_once_in_the_order_of_its_due_times(dsn: str, conn: Conn) -> None:
    later = factories.step(conn, state="scheduled", due_at="2001-01-02")
    sooner = factories.step(conn, state="scheduled", due_at="2001-01-01")
    not_yet = factories.step(conn, state="scheduled", due_at="tomorrow")
    urgent = factories.step(conn, state="scheduled", due_at="2001-01-03", priority=0)
    assert await sweep_all(dsn) == 3
    assert await sweep_all(dsn) == 0
    assert read(conn, sooner, "state", "due_at") == ("available", None)
    assert read(conn, not_yet, "state", "ord") == ("scheduled", None)
    async with engine(dsn) as own:
        assert [one.id for one in await take(own, factories.life(conn))] == [urgent.id, sooner.id, later.id]


@pytest.mark.contract("FM-041", "FM-049")
async def test_more_due_at_once_than_one_transaction_fires(dsn: str, conn: Conn) -> None:
    conn.execute(
        "INSERT INTO cyclone_steps (id, run_id, node, kind, state, max_attempts, input, due_at)"
        " SELECT n, n, 'noop', 'noop', 'scheduled', 5, 'null', now() FROM generate_series(1, 2500) n"
    )
    assert await sweep_all(dsn) == 2500


@pytest.mark.contract("FM-003", "FM-062")
async def test_a_cancel_that_commits_first_is_not_undone_by_the_timer(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, state="scheduled", due_at="yesterday")
    async with engine(dsn) as own:
        with conn.transaction():
            factories.cancel(conn, made)
            assert await sweep.fire(own, SQL) == 0
        assert await sweep.fire(own, SQL) == 0
    assert state(conn, made) == "cancelled"


@pytest.mark.contract("FM-049")
async def test_a_sweeper_wakes_for_a_due_time_that_comes_before_its_next_round(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, state="scheduled")
    conn.execute("UPDATE cyclone_steps SET due_at = clock_timestamp() + interval '300 ms' WHERE id = %s", (made.id,))
    async with factories.sweeper(dsn, interval=30):
        await until(lambda: state(conn, made) == "available", 2)
    assert read(conn, made, "ready_at >= enqueued_at + interval '300 ms'")


# Tidying, and a sweeper that runs


async def test_old_rows_that_nobody_needs_are_removed_and_the_others_stay(dsn: str, conn: Conn) -> None:
    alive = factories.life(conn)
    recent = factories.life(conn, "ended")
    old = factories.life(conn, "ended", ended_at="2001-01-01")
    holds = factories.step(conn, state="running", life="ended")
    conn.execute("UPDATE cyclone_lives SET ended_at = '2001-01-01' WHERE id = %s", (holds.life,))
    conn.execute(
        "INSERT INTO cyclone_orders (life, step, claim, reason, ordered_at) VALUES (1, 1, 1, 'old', '2001-01-01'),"
        " (1, 2, 2, 'new', now())"
    )
    conn.execute("INSERT INTO cyclone_sleepers (id, until) VALUES (1, '2001-01-01'), (2, 'infinity')")
    conn.execute(
        "INSERT INTO cyclone_lanes (lane, queue, kind, version, created_at)"
        " VALUES ('?a' || chr(31) || 'b' || chr(31) || '1', 'a', 'b', 1, '2001-01-01')"
    )
    async with engine(dsn) as own:
        await sweep.tidy(own, SQL)
    assert {row[0] for row in conn.execute("SELECT id FROM cyclone_lives")} == {alive, recent, holds.life}
    assert old not in {alive, recent}
    assert conn.execute("SELECT reason FROM cyclone_orders").fetchall() == [("new",)]
    assert conn.execute("SELECT id FROM cyclone_sleepers").fetchall() == [(2,)]
    assert factories.count(conn, "cyclone_lanes") == 0
    assert factories.count(conn, "cyclone_claims") == 1


@pytest.mark.contract("E4", "E13", "F1", "M1")
async def test_a_running_sweeper_buries_on_request_and_tells_when_it_is_done(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, state="running")
    async with factories.sweeper(dsn, interval=30) as sweeper:
        async with asyncio.timeout(5):
            await sweeper.bury(made.life, [made.id], "signal 11")
    assert read(conn, made, "state", "reclaims", "last_crash") == ("available", 1, "signal 11")


@pytest.mark.contract("M9")
async def test_a_sweeper_survives_the_end_of_its_connection(dsn: str, conn: Conn) -> None:
    async with factories.sweeper(dsn, interval=0.05) as sweeper:
        await until(lambda: sweeper.reached)
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE application_name = 'cyclone sweeper' AND datname = current_database()"
        )
        made = factories.step(conn, state="running", life="expired")
        await until(lambda: state(conn, made) == "available")


@pytest.mark.contract("E8", "E5", "M5", "E9")
async def test_a_slow_but_living_worker_loses_its_step_and_both_calls_overlap(dsn: str, conn: Conn) -> None:
    inside: list[str] = []
    release = asyncio.Event()

    @step("slow", grace=0.05)
    async def slow(ctx: Context) -> str:
        me = "first" if not inside else "second"
        inside.append(me)
        while me == "first" and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return me

    made = factories.step(conn, "slow")
    async with factories.worker(dsn, slow) as first:
        await until(lambda: inside)
        # As if its renewals had not arrived for the length of a lease.
        conn.execute("UPDATE cyclone_lives SET lease_until = '-infinity' WHERE id = %s", (first._keeper.life,))
        first.stop()
        async with factories.worker(dsn, slow):
            await sweep_all(dsn)
            await until(lambda: state(conn, made) == "completed")
            assert inside == ["first", "second"]
            release.set()
    assert read(conn, made, "output", "attempts", "reclaims") == ("second", 1, 1)
