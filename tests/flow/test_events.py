"""Events: what is recorded, and that whoever reads it as a stream misses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, deliver, engine, fire, read, take, until

import cyclone
from cyclone import Client, Context, Cursor, EventKind, InvalidOptionError, NotFoundError, SyncClient, sweep, views
from cyclone.model import Failure, Outcome, Verb
from cyclone.plan import Plan
from cyclone.states import ErrorKind

Conn = psycopg.Connection[Any]

FAILURE = Failure(ErrorKind.RETRYABLE, "boom", "Traceback: boom")


def recorded(conn: Conn, *steps: int | factories.Made) -> list[tuple[str, int, dict[str, Any] | None]]:
    """(kind, attempt, detail) of all events, or of those of some steps, in the order of their ids."""
    ids = [one.id if isinstance(one, factories.Made) else one for one in steps]
    query = """SELECT kind, attempt, detail FROM cyclone_events
               WHERE %(ids)s::bigint[] = '{}' OR step = ANY(%(ids)s) ORDER BY id"""
    return conn.execute(query, {"ids": ids}).fetchall()


def insert(conn: Conn, count: int, *, kind: str = "snoozed", run_id: int = 1) -> None:
    conn.execute(
        """INSERT INTO cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, detail)
           SELECT now(), %s, %s, %s, 'n', 'k', 'q', n, '{}' FROM generate_series(1, %s) AS n""",
        (kind, run_id, run_id, count),
    )


async def readable(conn: Conn) -> None:
    """Waits until nobody on the server holds a transaction that would keep back what is committed now."""
    row = conn.execute("SELECT pg_current_xact_id()").fetchone()
    assert row is not None
    query = "SELECT pg_snapshot_xmin(pg_current_snapshot()) > %s::xid8"
    await until(lambda: conn.execute(query, (str(row[0]),)).fetchone() == (True,))


# What is recorded


@pytest.mark.contract("V3", "V6")
async def test_what_a_settle_records(dsn: str, conn: Conn) -> None:
    factories.steps(conn, 7)
    async with engine(dsn) as own:
        steps = await take(own, factories.life(conn))
    retried, retried_now, discarded, snoozed, released, unstarted, completed = steps
    outcomes = [
        Outcome(retried, Verb.RETRY, delay_s=60.0, failure=FAILURE),
        Outcome(retried_now, Verb.RETRY, delay_s=0.0, failure=FAILURE),
        Outcome(discarded, Verb.DISCARD, failure=Failure(ErrorKind.PERMANENT, "x" * 5000, "")),
        Outcome(snoozed, Verb.SNOOZE, delay_s=30.0),
        Outcome(released, Verb.RELEASE),
        Outcome(unstarted, Verb.RELEASE, called=False),
        Outcome(completed, Verb.COMPLETE, "1"),
    ]
    await deliver(dsn, *outcomes)
    failed = {"error_kind": "retryable", "error": "boom"}
    expected = {
        retried.id: ("retry_scheduled", 1, {"delay_s": 60, **failed}),
        retried_now.id: ("retry_scheduled", 1, {"delay_s": 0, **failed}),
        discarded.id: ("discarded", 1, {"error_kind": "permanent", "error": "x" * 1000}),
        snoozed.id: ("snoozed", 1, {"delay_s": 30, "snoozes": 1}),
        released.id: ("released", 1, {}),
    }
    rows = conn.execute("SELECT step, kind, attempt, detail, run_id, node, step_kind, queue, host FROM cyclone_events")
    found = {row[0]: row[1:] for row in rows}
    assert {step: row[:3] for step, row in found.items()} == expected
    for step, row in found.items():
        assert row[3:] == (step, "noop", "noop", "default", found[retried.id][-1])
    # Sent once more, as after a commit whose answer was lost.
    await deliver(dsn, *outcomes)
    assert len(recorded(conn)) == len(expected)


async def test_what_is_refused_is_not_recorded(dsn: str, conn: Conn) -> None:
    factories.steps(conn, 4)
    async with engine(dsn) as own:
        steps = await take(own, factories.life(conn))
        conn.execute("UPDATE cyclone_steps SET state = 'completed', finished_at = now()")
        verbs = (Verb.RETRY, Verb.DISCARD, Verb.SNOOZE, Verb.RELEASE)
        await deliver(dsn, *(Outcome(one, verb, failure=FAILURE) for one, verb in zip(steps, verbs, strict=True)))
    assert recorded(conn) == []


@pytest.mark.contract("V3", "E13")
async def test_what_a_sweep_records(dsn: str, conn: Conn) -> None:
    conn.execute(
        """INSERT INTO cyclone_kinds (kind, version, action, max_attempts, max_reclaims, queue, priority)
           VALUES ('noop', 1, false, 5, 3, 'default', 5)"""
    )
    held = factories.life(conn)
    executed, unstarted, crashed = (factories.step(conn, state="running", life=held, reclaims=n) for n in (0, 0, 2))
    factories.end_life(conn, held, [executed.id, crashed.id], "SIGKILL")
    async with engine(dsn) as own:
        await sweep.once(own, SQL)
    assert recorded(conn, executed) == [("reclaimed", 1, {"reason": "SIGKILL", "reclaims": 1})]
    assert recorded(conn, unstarted) == []
    ((kind, attempt, detail),) = recorded(conn, crashed)
    assert (kind, attempt) == ("discarded", 1)
    assert detail == {
        "reason": "SIGKILL", "reclaims": 3, "error_kind": "crashed", "error": read(conn, crashed, "error"),
    }  # fmt: skip
    assert conn.execute("SELECT DISTINCT host FROM cyclone_events").fetchall() == [("test",)]


@pytest.mark.contract("V3", "B6")
async def test_what_a_cancel_records(dsn: str, conn: Conn) -> None:
    ready, held, done = (factories.step(conn, state=one) for one in ("available", "running", "completed"))
    async with Client(dsn) as client:
        assert await client.cancel_step(ready.run_id, "noop", reason="no need", actor="ann")
        assert await client.cancel_step(held.run_id, "noop")
        assert not await client.cancel_step(done.run_id, "noop")
        assert not await client.cancel_step(ready.run_id, "noop", reason="again")
    assert recorded(conn) == [("cancelled", 0, {"reason": "no need"}), ("cancelled", 1, {"reason": "cancelled"})]
    assert conn.execute("SELECT actor = 'ann', actor LIKE '%@%' FROM cyclone_events ORDER BY id").fetchall() == [
        (True, False), (False, True),
    ]  # fmt: skip


@pytest.mark.contract("V6")
async def test_a_success_records_nothing(dsn: str, conn: Conn) -> None:
    factories.steps(conn, 50)
    async with factories.worker(dsn, factories.noop()):
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 50)
    assert recorded(conn) == []


@pytest.mark.contract("V3")
async def test_an_event_belongs_to_the_transaction_of_its_change(dsn: str, conn: Conn) -> None:
    made = factories.step(conn)
    async with engine(dsn) as own:
        (got,) = await take(own, factories.life(conn))
    with psycopg.connect(dsn) as tx:
        tx.execute("SELECT FROM cyclone_steps FOR UPDATE")
        factories.cancel(tx, made)
        assert len(recorded(tx)) == 1
        tx.rollback()
    assert recorded(conn) == []
    await deliver(dsn, Outcome(got, Verb.COMPLETE, "1"))


# A stream


@cyclone.step("sleepy", max_attempts=1)
async def sleepy(ctx: Context, times: int) -> int:
    if ctx.snoozes < times:
        raise cyclone.Snooze(60)
    return ctx.snoozes


@pytest.mark.contract("R26", "V2")
async def test_each_snooze_is_an_event(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, factories.worker(dsn, sleepy):
        handle = await sleepy.enqueue(client, 3)
        made = int(handle.run_id)
        for n in (1, 2, 3):
            await until(lambda n=n: read(conn, made, "state", "snoozes") == ("scheduled", n))
            await fire(dsn)
        assert await handle.result(10) == 3
        await readable(conn)
        found = [event async for event in client.events(run_id=handle.run_id)]
    assert [(event.kind, event.attempt, event.detail) for event in found] == [
        (EventKind.SNOOZED, 1, {"delay_s": 60, "snoozes": n}) for n in (1, 2, 3)
    ]
    assert {(event.run_id, event.node, event.queue, event.actor) for event in found} == {
        (handle.run_id, "sleepy", "default", None)
    }


@pytest.mark.contract("V5")
async def test_no_event_is_missed_when_transactions_commit_in_another_order(dsn: str, conn: Conn) -> None:
    early, late, later = (factories.step(conn) for _ in range(3))
    async with Client(dsn) as client:
        with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
            factories.cancel(first, early)  # the older transaction, with the lower number
            factories.cancel(second, late)
            second.commit()
            factories.cancel(conn, later)
            seen = [event async for event in client.events()]
            assert seen == []  # nothing can be said yet of what comes before them
            # What the run's own history shows does not wait.
            assert [kind for kind, *_ in recorded(conn)] == ["cancelled", "cancelled"]
            first.commit()
        await readable(conn)
        found = [event async for event in client.events()]
        assert [event.run_id for event in found] == [early.run_id, late.run_id, later.run_id]
        # Whoever goes on from any of them has the same.
        for n, event in enumerate(found):
            assert [one async for one in client.events(after=event.cursor)] == found[n + 1 :]


@pytest.mark.contract("V5")
async def test_writers_in_any_order_and_a_reader_who_never_looks_back(dsn: str, conn: Conn) -> None:
    steps = factories.steps(conn, 60)
    connections = [psycopg.connect(dsn) for _ in range(6)]
    had: list[str] = []
    cursor: Cursor | None = None
    async with Client(dsn) as client:

        async def look() -> None:
            nonlocal cursor
            async for event in client.events(after=cursor):
                assert event.run_id is not None
                had.append(event.run_id)
                cursor = event.cursor

        for n, step in enumerate(steps):
            own = connections[n % 6]
            factories.cancel(own, step)
            if n % 4 == 3:
                connections[(n * 5 + 1) % 6].commit()
            await look()
        for own in connections:
            own.commit()
            own.close()
        await readable(conn)
        await look()
    assert sorted(had, key=int) == [str(step) for step in steps]


@pytest.mark.contract("V5")
@pytest.mark.parametrize("count", [0, 1, 499, 500, 501, 1203])
async def test_pages(dsn: str, conn: Conn, count: int) -> None:
    insert(conn, count)
    await readable(conn)
    async with Client(dsn) as client:
        found = [event.attempt async for event in client.events()]
    with SyncClient(dsn) as sync_client:
        assert [event.attempt for event in sync_client.events()] == found
    assert found == list(range(1, count + 1))


@pytest.mark.contract("V2")
async def test_what_is_chosen(dsn: str, conn: Conn) -> None:
    for kind, run_id in itertools.product(("snoozed", "released", "some_later_kind"), (1, 2)):
        insert(conn, 2, kind=kind, run_id=run_id)
    await readable(conn)
    async with Client(dsn) as client:

        async def count(**choice: Any) -> int:
            return len([event async for event in client.events(**choice)])

        assert await count() == 8  # a kind that this release does not know is not given
        assert await count(run_id="2") == 4
        assert await count(kinds=["released"]) == 4
        assert await count(kinds=[EventKind.RELEASED, "snoozed"], run_id="1") == 4
        assert await count(kinds=[EventKind.CANCELLED]) == await count(kinds=[]) == await count(run_id="3") == 0


@pytest.mark.parametrize("after", ["", "1", "1:", ":1", "a:b", "1:2:3", "-1:2", "1" * 30 + ":1", "٣:1", 3])
async def test_what_is_no_cursor(dsn: str, after: Any) -> None:
    with pytest.raises(InvalidOptionError, match="cursor"):
        Client(dsn).events(after=after)
    with pytest.raises(InvalidOptionError, match="cursor"):
        SyncClient(dsn).events(after=after)


async def test_what_can_never_come_is_refused(dsn: str) -> None:
    client = SyncClient(dsn)
    for kinds in ("snoozed", ["completed"], ["gap"], ["nonsense"], [3]):
        for call in (client.events, client.subscribe):
            with pytest.raises(InvalidOptionError):
                call(kinds=kinds)  # type: ignore[arg-type]
    for buffer in (0, -1, 1.5, True, "3"):
        with pytest.raises(InvalidOptionError):
            client.subscribe(buffer=buffer)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        client.events(run_id="x")


# As it happens


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a subscription has settled where it begins: what is committed from then on must come."""
    begun = threading.Event()
    skip = views.Feed.skip

    def noted(feed: views.Feed) -> Plan[None]:
        yield from skip(feed)
        begun.set()

    monkeypatch.setattr(views.Feed, "skip", noted)
    return begun


@pytest.mark.contract("R28", "V2")
async def test_subscribers_see_a_snooze(dsn: str, conn: Conn, begun: threading.Event) -> None:
    async with Client(dsn) as client, factories.worker(dsn, sleepy):
        async with contextlib.aclosing(client.subscribe()) as subscription:
            coming = asyncio.ensure_future(anext(subscription))
            await until(begun.is_set)
            handle = await sleepy.enqueue(client, 2)
            event = await coming
            assert (event.kind, event.run_id, event.detail["snoozes"]) == (EventKind.SNOOZED, handle.run_id, 1)
            await fire(dsn)
            event = await anext(subscription)
            assert (event.kind, event.detail["snoozes"]) == (EventKind.SNOOZED, 2)
            await handle.cancel()
            async for event in subscription:
                assert event.kind is EventKind.CANCELLED
                break


@pytest.mark.contract("V5")
async def test_a_subscription_begins_now_and_takes_what_was_chosen(
    dsn: str, conn: Conn, begun: threading.Event
) -> None:
    insert(conn, 5, run_id=2)
    await readable(conn)
    async with Client(dsn) as client:
        subscription = client.subscribe(kinds=["released"], run_id="2")
        coming = asyncio.ensure_future(anext(subscription))
        await until(begun.is_set)
        insert(conn, 1, kind="released", run_id=1)
        insert(conn, 1, kind="snoozed", run_id=2)
        insert(conn, 1, kind="released", run_id=2)
        event = await coming
        assert (event.kind, event.run_id) == (EventKind.RELEASED, "2")
        await subscription.aclose()


@pytest.mark.contract("V5")
@pytest.mark.parametrize(
    ("buffer", "count", "lost"), [(3, 10, 7), (3, 3, 0), (1, 2, 1), (1, 1, 0), (600, 600, 0), (600, 1203, 603)]
)
async def test_a_slow_reader_sees_a_gap(
    dsn: str, conn: Conn, begun: threading.Event, buffer: int, count: int, lost: int
) -> None:
    async with Client(dsn) as client:
        subscription = client.subscribe(buffer=buffer)
        coming = asyncio.ensure_future(anext(subscription))
        await until(begun.is_set)
        insert(conn, 1, run_id=7)
        assert (await coming).run_id == "7"
        # It stops reading for a while.
        insert(conn, count)
        await readable(conn)
        had: list[int | None] = []
        if lost:
            gap = await anext(subscription)
            assert (gap.kind, gap.detail, gap.run_id, gap.node) == (EventKind.GAP, {"count": lost}, None, None)
            # A gap stands where the last of the lost ones was.
            kept = [event async for event in client.events(after=gap.cursor)]
            assert [event.attempt for event in kept] == list(range(lost + 1, count + 1))
        while len(had) < count - lost:
            had.append((await anext(subscription)).attempt)
        assert had == list(range(lost + 1, count + 1))
        # From then on nothing is missing, and events() has all there ever were.
        insert(conn, 1, run_id=8)
        event = await anext(subscription)
        assert (event.kind, event.run_id) == (EventKind.SNOOZED, "8")
        assert len([event async for event in client.events()]) == count + 2
        await subscription.aclose()


@pytest.mark.contract("R28", "I1")
async def test_the_same_for_sync_code(dsn: str, conn: Conn, begun: threading.Event) -> None:
    with SyncClient(dsn) as client:
        subscription = client.subscribe(buffer=2)
        coming = asyncio.ensure_future(asyncio.to_thread(next, subscription))
        await until(begun.is_set)
        insert(conn, 1)
        assert (await coming).kind is EventKind.SNOOZED
        insert(conn, 5)
        await readable(conn)
        found = [await asyncio.to_thread(next, subscription) for _ in range(3)]
        assert [event.kind.value for event in found] == ["gap", "snoozed", "snoozed"]
        subscription.close()


async def test_a_task_that_follows_can_be_cancelled(dsn: str, begun: threading.Event) -> None:
    async with Client(dsn) as client:

        async def follow() -> None:
            async for _ in client.subscribe():
                raise AssertionError

        task = asyncio.create_task(follow())
        await until(begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
