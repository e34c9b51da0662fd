"""Claim: which steps are handed out, in which order, to whom, and that nobody ever waits."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, deliver, end_life, engine, read, state, take, until

from cyclone import claim, sweep
from cyclone.context import Context
from cyclone.model import Outcome, Verb
from cyclone.registry import step

Conn = psycopg.Connection[Any]


@pytest.mark.contract("E2")
async def test_eight_claimers_at_once_share_the_backlog_and_no_step_is_handed_out_twice(dsn: str, conn: Conn) -> None:
    made = factories.steps(conn, 2000)
    lives = [factories.life(conn) for _ in range(8)]

    async def drain(life: int) -> list[int]:
        found: list[int] = []
        async with engine(dsn) as own:
            claimer = claim.Claimer(SQL, ["default"])
            while True:
                steps, taken = await claimer.batch(own, life, 37)
                found += [one.id for one in steps]
                if not taken:
                    return found

    shares = await asyncio.gather(*map(drain, lives))
    assert sorted(number for share in shares for number in share) == made
    assert factories.count(conn, "cyclone_ready") == 0
    owners = conn.execute(
        "SELECT c.life, count(*) FROM cyclone_steps s JOIN cyclone_claims c ON c.id = s.claim AND s.id = ANY(c.steps)"
        " WHERE s.state = 'running' GROUP BY 1"
    ).fetchall()
    assert dict(owners) == {life: len(share) for life, share in zip(lives, shares, strict=True) if share}


@pytest.mark.contract("E3", "D8")
async def test_a_claimed_step_is_running_for_everybody_to_see(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, input={"a": [1, "é"]}, tags=["red"], metadata={"x": 1}, timeout_s=7.5)
    life = factories.life(conn)
    async with engine(dsn) as own:
        (got,) = await take(own, life)
    assert read(conn, made, "state", "claim", "attempts") == ("running", got.claim, 1)
    assert read(conn, made, "started_at") is not None
    assert conn.execute("SELECT id, life, steps FROM cyclone_claims").fetchall() == [(got.claim, life, [made.id])]
    assert (got.id, got.run_id, got.node, got.kind, got.queue) == (made.id, made.id, "noop", "noop", "default")
    assert (got.attempt, got.max_attempts, got.reclaims, got.snoozes, got.timeout_s) == (1, 5, 0, 0, 7.5)
    assert (got.input, got.tags, got.metadata) == ('{"a": [1, "é"]}', ["red"], b'{"x": 1}')


async def test_a_claim_takes_no_more_than_it_has_room_for(dsn: str, conn: Conn) -> None:
    made = factories.steps(conn, 10)
    life = factories.life(conn)
    async with engine(dsn) as own:
        claimer = claim.Claimer(SQL, ["default"])
        steps, taken = await claimer.batch(own, life, 7)
        assert ([one.id for one in steps], taken) == (made[:7], 7)
        # Fewer than asked for: nothing that is not locked is left.
        steps, taken = await claimer.batch(own, life, 7)
        assert ([one.id for one in steps], taken) == (made[7:], 3)
        assert await claimer.batch(own, life, 7) == ([], 0)


# Order


@pytest.mark.contract("L2")
async def test_urgent_work_goes_first_and_then_what_became_available_first(dsn: str, conn: Conn) -> None:
    made = {(priority, n): factories.step(conn, priority=priority).id for n in range(2) for priority in (5, 0, 9, 3)}
    life = factories.life(conn)
    async with engine(dsn) as own:
        order = [(await take(own, life, room=1))[0].id for _ in made]
    assert order == [made[key] for key in sorted(made)]


@pytest.mark.contract("L2")
async def test_one_batch_comes_in_the_same_order(dsn: str, conn: Conn) -> None:
    made = {(priority, n): factories.step(conn, priority=priority).id for n in range(2) for priority in (5, 0, 9, 3)}
    life = factories.life(conn)
    async with engine(dsn) as own:
        assert [one.id for one in await take(own, life)] == [made[key] for key in sorted(made)]


@pytest.mark.contract("L2")
async def test_work_given_back_goes_first_within_its_priority_and_no_further(dsn: str, conn: Conn) -> None:
    urgent = factories.step(conn, priority=0)
    reclaimed, released = factories.step(conn), factories.step(conn)
    first, second = factories.life(conn), factories.life(conn)
    async with engine(dsn) as own:
        assert [one.id for one in await take(own, first, room=2)] == [urgent.id, reclaimed.id]
        (given_back,) = await take(own, second)
        waiting, urgent_too = factories.step(conn), factories.step(conn, priority=0)
        end_life(conn, first)
        await sweep.reclaim(own, SQL)
        await deliver(dsn, Outcome(given_back, Verb.RELEASE))
        order = [one.id for one in await take(own, factories.life(conn))]
    assert order == [urgent.id, urgent_too.id, reclaimed.id, released.id, waiting.id]


@pytest.mark.contract("FM-068")
async def test_every_sixteenth_claim_begins_with_the_lowest_priority(dsn: str, conn: Conn) -> None:
    factories.steps(conn, 40, priority=0)
    low = factories.step(conn, priority=9)
    life = factories.life(conn)
    async with engine(dsn) as own:
        claimer = claim.Claimer(SQL, ["default"])
        claimed = [(await claimer.batch(own, life, 1))[0][0].id for _ in range(16)]
    assert claimed.index(low.id) == 15


@pytest.mark.contract("L1")
async def test_only_chosen_queues_are_served_and_each_takes_its_turn_at_being_first(dsn: str, conn: Conn) -> None:
    for queue in ("a", "b", "other"):
        factories.steps(conn, 10, queue=queue)
    life = factories.life(conn)
    async with engine(dsn) as own:
        claimer = claim.Claimer(SQL, ["a", "b"])
        queues = [(await claimer.batch(own, life, 1))[0][0].queue for _ in range(6)]
    assert sorted(queues) == ["a", "a", "a", "b", "b", "b"]
    assert factories.count(conn, "cyclone_steps WHERE queue = 'other' AND state = 'available'") == 10


# Who gets nothing


@pytest.mark.contract("E9")
@pytest.mark.parametrize("life", ["ended", "expired", "gone"])
async def test_a_life_that_is_over_gets_nothing(dsn: str, conn: Conn, life: factories.Life) -> None:
    made = factories.step(conn)
    number = factories.life(conn, life)
    async with engine(dsn) as own:
        assert await claim.Claimer(SQL, ["default"]).batch(own, number, 10) == ([], 0)
        assert state(conn, made) == "available"
        assert [one.id for one in await take(own, factories.life(conn))] == [made.id]


@pytest.mark.contract("E15", "FM-004", "FM-088")
async def test_steps_that_no_worker_knows_wait_untouched_and_cost_those_behind_them_nothing(
    dsn: str, conn: Conn
) -> None:
    unknown = factories.steps(conn, 5000, kind="unknown")
    newer = factories.step(conn, "known", version=2)
    known = factories.steps(conn, 200, kind="known")
    seen: list[int] = []

    @step("known")
    async def handler(ctx: Context) -> None:
        seen.append(int(ctx.run_id))

    async with factories.worker(dsn, handler):
        await until(lambda: len(seen) == len(known))
        assert sorted(seen) == known
        await until(
            lambda: factories.count(conn, "cyclone_steps WHERE kind = 'known' AND state = 'completed'") == len(known)
        )
    rows = "cyclone_steps WHERE (kind = 'unknown' OR id = %s) AND state = 'available' AND attempts = 0"
    assert factories.count(conn, rows, newer.id) == len(unknown) + 1
    assert factories.count(conn, "cyclone_errors") == 0
    # Put aside, so that nobody meets them again; and reported.
    assert factories.count(conn, "cyclone_ready WHERE lane = 'default'") == 0
    waiting = conn.execute(SQL["unclaimable"], {"cap": 10_000}).fetchall()
    assert sorted(waiting) == [("known", 2, 1), ("unknown", 1, 5000)]


@pytest.mark.contract("E15", "FM-088")
async def test_a_worker_that_knows_the_kind_runs_what_was_put_aside(dsn: str, conn: Conn) -> None:
    made = factories.steps(conn, 20, kind="later")
    newer = factories.step(conn, "later", version=2)
    async with engine(dsn) as own:
        assert await take(own, factories.life(conn)) == []
        assert {state(conn, one) for one in made} == {"available"}

        @step("later", version=2)
        async def handler(ctx: Context) -> int:
            return ctx.attempt

        @handler.upgrade(1)
        def _(input: Any) -> Any:
            return input

        async with factories.worker(dsn, handler):
            await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 21)
    assert read(conn, newer, "output") == 1
    assert conn.execute("SELECT DISTINCT attempts FROM cyclone_steps").fetchall() == [(1,)]


async def test_strangers_keep_their_order_and_priority(dsn: str, conn: Conn) -> None:
    made = {(priority, n): factories.step(conn, "odd", priority=priority).id for n in range(2) for priority in (5, 0)}
    async with engine(dsn) as own:
        assert await take(own, factories.life(conn)) == []
        assert [one.id for one in await take(own, factories.life(conn, kinds=["odd"]))] == [
            made[key] for key in sorted(made)
        ]


async def test_a_lane_that_lost_its_row_is_found_again_by_the_sweeper(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, "odd")
    async with engine(dsn) as own:
        await take(own, factories.life(conn))
        conn.execute("DELETE FROM cyclone_lanes")
        await sweep.tidy(own, SQL)
        assert [one.id for one in await take(own, factories.life(conn, kinds=["odd"]))] == [made.id]


# Tickets may be stale


@pytest.mark.contract("FM-003")
async def test_a_ticket_whose_step_was_cancelled_is_stale(dsn: str, conn: Conn) -> None:
    made, other = factories.step(conn), factories.step(conn)
    factories.cancel(conn, made)
    async with engine(dsn) as own:
        steps, taken = await claim.Claimer(SQL, ["default"]).batch(own, factories.life(conn), 10)
        assert ([one.id for one in steps], taken) == ([other.id], 2)
    assert read(conn, made, "state", "attempts", "claim") == ("cancelled", 0, None)
    assert factories.count(conn, "cyclone_ready") == 0


async def test_an_older_ticket_of_a_step_is_stale_and_the_one_it_names_counts(dsn: str, conn: Conn) -> None:
    made = factories.step(conn)
    # Rescheduled, and due again before anybody met the first ticket.
    conn.execute("UPDATE cyclone_steps SET state = 'scheduled', due_at = now() WHERE id = %s", (made.id,))
    async with engine(dsn) as own:
        assert await sweep.fire(own, SQL) == 1
        assert factories.count(conn, "cyclone_ready") == 2
        steps, taken = await claim.Claimer(SQL, ["default"]).batch(own, factories.life(conn), 1)
        assert (steps, taken) == ([], 1)
        assert [one.id for one in await take(own, factories.life(conn))] == [made.id]
    assert read(conn, made, "attempts") == 1


async def test_a_ticket_whose_step_was_deleted_harms_nobody_and_is_swept_away(dsn: str, conn: Conn) -> None:
    made, other = factories.step(conn), factories.step(conn)
    conn.execute("DELETE FROM cyclone_steps WHERE id = %s", (made.id,))
    async with engine(dsn) as own:
        assert [one.id for one in await take(own, factories.life(conn))] == [other.id]
        await sweep.tidy(own, SQL)
    assert factories.count(conn, "cyclone_ready") == 0


async def test_a_ticket_of_a_step_that_runs_already_is_stale(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, state="running", ord=1)
    conn.execute("INSERT INTO cyclone_ready (lane, rank, ord, step) VALUES ('default', 11, 1, %s)", (made.id,))
    async with engine(dsn) as own:
        assert await take(own, factories.life(conn)) == []
    assert read(conn, made, "state", "claim", "attempts") == ("running", made.claim, 1)


# Nobody waits


@pytest.mark.contract("FM-003")
@pytest.mark.parametrize("table", ["cyclone_ready WHERE step = %s", "cyclone_steps WHERE id = %s"])
async def test_what_somebody_has_locked_is_passed_over_and_found_later(dsn: str, conn: Conn, table: str) -> None:
    locked, free = factories.step(conn), factories.step(conn)
    life = factories.life(conn)
    async with engine(dsn) as own:
        await own.execute("SET lock_timeout = 1")
        with conn.transaction():
            conn.execute(f"SELECT FROM {table} FOR UPDATE".encode(), (locked.id,))
            assert [one.id for one in await take(own, life)] == [free.id]
        assert [one.id for one in await take(own, life)] == [locked.id]


async def test_an_uncommitted_step_is_not_handed_out(dsn: str, conn: Conn) -> None:
    life = factories.life(conn)
    async with engine(dsn) as own:
        await own.execute("SET lock_timeout = 1")
        with conn.transaction():
            made = factories.step(conn)
            assert await take(own, life) == []
        assert [one.id for one in await take(own, life)] == [made.id]


# Attempts


@pytest.mark.contract("E7", "R5", "R6", "R7")
async def test_a_claim_begins_a_new_attempt_unless_the_step_repeats_one(dsn: str, conn: Conn) -> None:
    fresh = factories.step(conn)
    failed_twice = factories.step(conn, attempts=2)
    repeats = factories.step(conn, attempts=2, resume=True, reclaims=3)
    async with engine(dsn) as own:
        got = {one.id: one for one in await take(own, factories.life(conn))}
    assert (got[fresh.id].attempt, got[failed_twice.id].attempt, got[repeats.id].attempt) == (1, 3, 2)
    assert [read(conn, one, "attempts") for one in (fresh, failed_twice, repeats)] == [1, 3, 2]
    assert got[repeats.id].reclaims == 3


# Where a look begins: a claimer begins a little below what it took last, and only now and then at the very beginning


Ids = list[int]


@pytest.fixture
def never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first look a claimer never begins at the very beginning."""
    monkeypatch.setattr(claim, "_PAUSE", math.inf)


async def took(claimer: claim.Claimer, conn: psycopg.AsyncConnection[Any], life: int, room: int = 500) -> Ids:
    steps, _ = await claimer.batch(conn, life, room)
    return [one.id for one in steps]


async def drain(claimer: claim.Claimer, conn: psycopg.AsyncConnection[Any], life: int) -> Ids:
    found: Ids = []
    while more := await took(claimer, conn, life):
        found += more
    return found


@pytest.mark.contract("L2")
@pytest.mark.usefixtures("never_whole")
async def test_a_step_that_commits_a_little_late_keeps_its_turn(dsn: str, conn: Conn) -> None:
    life, claimer = factories.life(conn), claim.Claimer(SQL, ["default"])
    async with engine(dsn) as own:
        with psycopg.connect(dsn) as late, late.transaction():
            straggler = factories.step(late)
            first = factories.steps(conn, 700)
            assert await drain(claimer, own, life) == first
        newer = factories.steps(conn, 10)
        assert await drain(claimer, own, life) == [straggler.id, *newer]


async def test_a_step_that_commits_long_after_newer_ones_is_soon_found_while_other_work_flows(
    dsn: str, conn: Conn
) -> None:
    life, claimer = factories.life(conn), claim.Claimer(SQL, ["default"])
    loop = asyncio.get_running_loop()
    async with engine(dsn) as own:
        with psycopg.connect(dsn) as late, late.transaction():
            straggler = factories.step(late)
            made = factories.steps(conn, 5000)
            assert await drain(claimer, own, life) == made
        committed, found = loop.time(), []
        while straggler.id not in found:
            assert loop.time() < committed + 2
            factories.steps(conn, 3)
            found += await took(claimer, own, life, 2)
    assert factories.count(conn, "cyclone_steps WHERE attempts > 1") == 0


async def until_found(claimer: claim.Claimer, conn: psycopg.AsyncConnection[Any], life: int) -> Ids:
    """Claims as a worker does that hears no news."""
    while not (found := await took(claimer, conn, life)):
        assert claimer.recheck_s() < 2
        await asyncio.sleep(claimer.recheck_s())
    return found


async def test_a_look_that_left_something_out_is_soon_followed_by_one_that_does_not(dsn: str, conn: Conn) -> None:
    life, claimer = factories.life(conn), claim.Claimer(SQL, ["default"])
    async with engine(dsn) as own:
        with psycopg.connect(dsn) as late, late.transaction():
            straggler = factories.step(late)
            factories.steps(conn, 5000)
            await drain(claimer, own, life)
        assert await until_found(claimer, own, life) == [straggler.id]
        # Once the queue is seen to be empty from the beginning, there is nothing to look for.
        assert (await claimer.batch(own, life, 1, whole=True)) == ([], 0)
        assert claimer.recheck_s() == math.inf


@pytest.mark.contract("L2")
async def test_many_that_committed_late_are_taken_in_their_order(dsn: str, conn: Conn) -> None:
    life, claimer = factories.life(conn), claim.Claimer(SQL, ["default"])
    async with engine(dsn) as own:
        with psycopg.connect(dsn) as late, late.transaction():
            stragglers = factories.steps(late, 3000)
            factories.steps(conn, 3000)
            await drain(claimer, own, life)
        newer = factories.steps(conn, 1000)
        steps, _ = await claimer.batch(own, life, 500, whole=True)
        assert [one.id for one in steps] + await drain(claimer, own, life) == stragglers + newer


@pytest.mark.contract("L1", "L2")
@pytest.mark.usefixtures("never_whole")
async def test_what_was_taken_from_one_place_says_nothing_of_the_others(dsn: str, conn: Conn) -> None:
    life, claimer = factories.life(conn), claim.Claimer(SQL, ["a", "b"])
    async with engine(dsn) as own:
        assert await took(claimer, own, life) == []
        waiting = {
            (queue, priority): factories.steps(conn, 5, queue=queue, priority=priority)
            for queue in ("a", "b")
            for priority in (9, 5)
        }
        urgent = factories.steps(conn, 4000, queue="a", priority=0)
        for _ in range(8):
            # No claim comes short, so nothing tells that the other places are empty; every second begins with b.
            found = await took(claimer, own, life)
            assert len(found) == 500
            waiting = {place: ids for place, ids in waiting.items() if not set(ids) & set(found)}
            urgent = [one for one in urgent if one not in found]
        rest = await drain(claimer, own, life)
        assert sorted(rest) == sorted([*urgent, *sum(waiting.values(), [])])
    assert factories.count(conn, "cyclone_ready") == 0


@pytest.mark.contract("L2")
@pytest.mark.usefixtures("never_whole")
async def test_work_given_back_and_work_of_a_higher_priority_is_above_every_floor(dsn: str, conn: Conn) -> None:
    life, claimer = factories.life(conn), claim.Claimer(SQL, ["default"])
    dead = factories.life(conn)
    async with engine(dsn) as own:
        given_back = await took(claim.Claimer(SQL, ["default"]), own, life)
        factories.steps(conn, 1)
        (released,), _ = await claimer.batch(own, life, 1)
        factories.steps(conn, 1)
        reclaimed = await took(claimer, own, dead)
        factories.steps(conn, 5000)
        await drain(claimer, own, life)
        waiting, urgent = factories.step(conn), factories.step(conn, priority=0)
        end_life(conn, dead)
        await sweep.reclaim(own, SQL)
        await deliver(dsn, Outcome(released, Verb.RELEASE))
        assert given_back == []
        assert await took(claimer, own, life) == [urgent.id, *reclaimed, released.id, waiting.id]


@pytest.mark.contract("E15")
async def test_a_step_put_aside_late_is_found_by_a_worker_that_knows_it(dsn: str, conn: Conn) -> None:
    knows, claimer = factories.life(conn, kinds=["noop", "odd"]), claim.Claimer(SQL, ["default"])
    async with engine(dsn) as own:
        with psycopg.connect(dsn) as late, late.transaction():
            straggler = factories.step(late, "odd")
            factories.steps(conn, 3000)
            await drain(claimer, own, knows)
        assert await took(claim.Claimer(SQL, ["default"]), own, factories.life(conn)) == []
        assert factories.count(conn, "cyclone_ready WHERE lane <> 'default'") == 1
        found = await until_found(claimer, own, knows)
        assert found == [straggler.id]
        # And those that follow it in that lane, and were put aside with higher numbers.
        more = factories.steps(conn, 3, kind="odd")
        await took(claim.Claimer(SQL, ["default"]), own, factories.life(conn))
        assert await until_found(claimer, own, knows) == more


@pytest.mark.usefixtures("never_whole")
@pytest.mark.parametrize("new", ["connection", "life"])
async def test_a_new_connection_or_life_begins_at_the_very_beginning(dsn: str, conn: Conn, new: str) -> None:
    life, claimer = factories.life(conn), claim.Claimer(SQL, ["default"])
    async with engine(dsn) as own, engine(dsn) as other:
        with psycopg.connect(dsn) as late, late.transaction():
            straggler = factories.step(late)
            factories.steps(conn, 5000)
            await drain(claimer, own, life)
        assert await took(claimer, own, life) == []
        if new == "life":
            assert await took(claimer, own, factories.life(conn)) == [straggler.id]
        else:
            assert await took(claimer, other, life) == [straggler.id]


async def test_a_worker_finds_what_committed_late_without_being_told(dsn: str, conn: Conn) -> None:
    @step("noop")
    async def handler(ctx: Context) -> None: ...

    async with factories.worker(dsn, handler, poll_interval=60, concurrency=100):
        with psycopg.connect(dsn) as late, late.transaction():
            straggler = factories.step(late)
            made = factories.steps(conn, 2000)
            conn.execute("SELECT pg_notify(%s, '')", (SQL.channel,))
            await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == len(made), 20)
        # Its own notification does not come; that of another step does.
        factories.step(conn)
        conn.execute("SELECT pg_notify(%s, '')", (SQL.channel,))
        await until(lambda: state(conn, straggler) == "completed", 5)
