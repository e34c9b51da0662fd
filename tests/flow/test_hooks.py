"""Hooks: a function of the program's hears of what happened here, and cannot disturb it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import factories
import psycopg
import pytest
from factories import deliver, engine, fire, state, take, until

import cyclone
from cyclone import (
    Client,
    Context,
    Event,
    EventKind,
    InvalidOptionError,
    Permanent,
    SyncClient,
    Worker,
    events,
    metrics,
)
from cyclone.model import Outcome, Verb
from cyclone.sweep import Sweeper

Conn = psycopg.Connection[Any]


@cyclone.step("tick")
async def tick(ctx: Context, n: int = 0) -> int:
    return n


class Heard(list[Event]):
    """A hook that keeps what it is told."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind.value for event in self]

    def of(self, made: factories.Made) -> list[str]:
        return [event.kind.value for event in self if event.run_id == made.run_id]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """What the metrics of hooks would show."""
    found = {"failed": 0, "dropped": 0}

    def failed() -> None:
        found["failed"] += 1

    def dropped(n: int) -> None:
        found["dropped"] += n

    monkeypatch.setattr(metrics, "hook_failed", failed)
    monkeypatch.setattr(metrics, "hook_dropped", dropped)
    yield found


def hooks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cyclone-hook"]


# What is heard


@pytest.mark.contract("V1", "V3")
async def test_what_a_client_tells(dsn: str, conn: Conn) -> None:
    heard = Heard()
    lost = factories.step(conn, "tick", "discarded", attempts=5)
    async with Client(dsn, on_step_event=heard) as client:
        now = await tick.enqueue(client, 1, queue="mail")
        (later,) = await tick.enqueue_many(client, [1], delay=60)
        await tick.enqueue(client, 1, scheduled_at=datetime.now(UTC) + timedelta(hours=1))
        await tick.enqueue(client, 1, scheduled_at=datetime(2020, 1, 1, tzinfo=UTC))
        assert await now.cancel("no need")
        assert not await now.cancel()
        assert await client.cancel_step(later.run_id, "tick", actor="ann")
        await client.retry(lost.run_id, "tick", reason="fixed")
        assert await client.retry_all(lost.run_id) == 0
    assert heard.kinds == ["enqueued", "scheduled", "scheduled", "enqueued", "cancelled", "cancelled", "reopened"]
    first, *_, cancelled, _, reopened = heard
    assert (first.run_id, first.node, first.step_kind, first.queue, first.attempt) == (
        now.run_id, "tick", "tick", "mail", 0,
    )  # fmt: skip
    assert first.cursor is None and first.at.tzinfo is not None
    assert (cancelled.run_id, cancelled.detail) == (now.run_id, {"reason": "no need"})
    # What was recorded is told as it was recorded.
    with SyncClient(dsn) as reader:
        recorded = await until(lambda: len(found := list(reader.events())) == 3 and found)
    assert heard[-3:] == recorded
    assert (reopened.detail["reason"], reopened.attempt) == ("fixed", 5)


@pytest.mark.contract("V1")
def test_the_same_for_sync_code(dsn: str, conn: Conn) -> None:
    heard = Heard()
    lost = factories.step(conn, "tick", "discarded")
    with SyncClient(dsn, on_step_event=heard) as client:
        handle = tick.enqueue(client, 1)
        handle.cancel()
        client.retry(lost.run_id, "tick")
        client.cancel_step(lost.run_id, "tick")
    assert heard.kinds == ["enqueued", "cancelled", "reopened", "cancelled"]
    with client:  # told again after a close
        tick.enqueue_many(client, [1, 2], delay=1)
    assert heard.kinds[4:] == ["scheduled"] * 2
    assert hooks() == []


@pytest.mark.contract("V1")
async def test_what_is_not_committed_here_is_not_told(dsn: str, conn: Conn) -> None:
    heard = Heard()
    lost = factories.step(conn, "tick", "discarded")
    async with Client(dsn, on_step_event=heard) as client, await psycopg.AsyncConnection.connect(dsn) as tx:
        await tick.enqueue_tx(client, tx, 1)
        await client.retry_tx(tx, lost.run_id, "tick")
        await tx.commit()
        with pytest.raises(cyclone.InvalidStateError):
            await client.retry(lost.run_id, "tick")
        with pytest.raises(cyclone.NotFoundError):
            await client.cancel_step("999999", "tick")
    assert heard == []


def faulty(conn: Conn) -> tuple[list[cyclone.Step[Any, Any]], dict[str, factories.Made]]:
    """A step for each way in which an execution can end."""

    @cyclone.step("good")
    async def good(ctx: Context) -> int:
        return 1

    @cyclone.step("tx")
    async def tx(ctx: Context) -> int:
        await ctx.completion_tx()
        return 1

    @cyclone.step("thread")
    def thread(ctx: cyclone.SyncContext) -> int:
        return 1

    @cyclone.step("again", backoff=cyclone.fixed(60))
    async def again(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise RuntimeError("boom")
        return 1

    @cyclone.step("bad")
    async def bad(ctx: Context) -> None:
        raise Permanent("no")

    @cyclone.step("sleepy")
    async def sleepy(ctx: Context) -> int:
        if not ctx.snoozes:
            raise cyclone.Snooze(60)
        return 1

    @cyclone.step("wrong")
    async def wrong(ctx: Context, n: int) -> None: ...

    steps: list[cyclone.Step[Any, Any]] = [good, tx, thread, again, bad, sleepy, wrong]
    return steps, {one.name: factories.step(conn, one.name, input="x" if one is wrong else None) for one in steps}


EXPECTED = {
    "good": ["started", "completed"],
    "tx": ["started", "completed"],
    "thread": ["started", "completed"],
    "again": ["started", "retry_scheduled", "started", "completed"],
    "bad": ["started", "discarded"],
    "sleepy": ["started", "snoozed", "started", "completed"],
    "wrong": ["started", "discarded"],
}


def over(conn: Conn) -> bool:
    return factories.count(conn, "cyclone_steps WHERE state IN ('available', 'running', 'scheduled')") == 0


@pytest.mark.contract("V1", "V3", "R27")
async def test_what_a_worker_tells(dsn: str, conn: Conn) -> None:
    heard = Heard()
    steps, made = faulty(conn)
    async with factories.worker(dsn, *steps, on_step_event=heard):
        await until(lambda: state(conn, made["sleepy"]) == state(conn, made["again"]) == "scheduled")
        await fire(dsn)
        await until(lambda: over(conn))
    assert {name: heard.of(one) for name, one in made.items()} == EXPECTED
    details = {(event.node, event.kind): event for event in heard}
    failed = details["again", EventKind.RETRY_SCHEDULED]
    assert (failed.attempt, failed.detail["error_kind"]) == (1, "retryable")
    assert failed.detail["error"] == "RuntimeError: boom" and failed.detail["delay_s"] == 60
    assert details["again", EventKind.COMPLETED].attempt == 2
    assert details["sleepy", EventKind.SNOOZED].detail == {"delay_s": 60, "snoozes": 1}
    assert details["wrong", EventKind.DISCARDED].attempt == 0
    # The hook and the history say the same.
    rows = conn.execute("SELECT node, kind, attempt, detail FROM cyclone_events").fetchall()
    assert sorted((node, kind) for node, kind, *_ in rows) == sorted(
        (event.node, event.kind) for event in heard if event.kind.recorded
    )
    for node, kind, attempt, detail in rows:
        event = details[node, EventKind(kind)]
        assert (event.attempt, event.detail) == (attempt, detail)


@pytest.mark.contract("V1", "V3")
async def test_a_release_is_told_when_the_handler_had_been_called(dsn: str, conn: Conn) -> None:
    heard = Heard()
    inside = asyncio.Event()

    @cyclone.step("long")
    async def long(ctx: Context) -> None:
        inside.set()
        await asyncio.Event().wait()

    made = [factories.step(conn, "long") for _ in range(3)]
    options = {"concurrency": 1, "claim_batch": 3, "drain_timeout": 0.01, "on_step_event": heard}
    async with factories.worker(dsn, long, **options):
        await asyncio.wait_for(inside.wait(), 10)
    assert [heard.of(one) for one in made] == [["started", "released"], [], []]
    assert [state(conn, one) for one in made] == ["available"] * 3
    assert factories.count(conn, "cyclone_events WHERE kind = 'released'") == 1


async def test_a_refused_outcome_is_not_told(dsn: str, conn: Conn) -> None:
    heard = Heard()
    first, second = factories.step(conn), factories.step(conn)
    async with engine(dsn) as own:
        steps = await take(own, factories.life(conn))
    factories.cancel(conn, first)
    hook = events.Hook(heard)
    settled = await deliver(dsn, *(Outcome(one, Verb.COMPLETE, "1") for one in steps), hook=hook)
    hook.close()
    assert len(settled) == 2
    assert (heard.of(first), heard.of(second)) == ([], ["completed"])


@pytest.mark.contract("V1", "V3")
async def test_what_a_sweeper_tells(dsn: str, conn: Conn) -> None:
    heard = Heard()
    conn.execute(
        """INSERT INTO cyclone_kinds (kind, version, action, max_attempts, max_reclaims, queue, priority)
           VALUES ('noop', 1, false, 5, 3, 'default', 5)"""
    )
    held = factories.life(conn, "ended", executing=None)
    lost, crashed = (factories.step(conn, state="running", life=held, reclaims=n) for n in (0, 2))
    sweeper = Sweeper(dsn, interval=0.05, on_step_event=heard)
    running = asyncio.create_task(sweeper.run())
    await until(lambda: state(conn, crashed) == "discarded" and state(conn, lost) == "available")
    sweeper.stop()
    await running
    assert (heard.of(lost), heard.of(crashed)) == (["reclaimed"], ["discarded"])
    assert all(event.cursor for event in heard)


# What a hook cannot do


@pytest.mark.contract("V4")
async def test_a_hook_that_raises_changes_nothing(
    dsn: str, conn: Conn, counted: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    def hook(event: Event) -> None:
        heard(event)
        raise (ValueError if len(heard) % 2 else SystemExit)("broken")

    heard = Heard()
    steps, made = faulty(conn)
    with caplog.at_level(logging.WARNING, "cyclone"):
        async with factories.worker(dsn, *steps, on_step_event=hook):
            await until(lambda: state(conn, made["sleepy"]) == state(conn, made["again"]) == "scheduled")
            await fire(dsn)
            await until(lambda: over(conn))
    assert {name: heard.of(one) for name, one in made.items()} == EXPECTED
    assert [state(conn, made[name]) for name in ("good", "again", "bad")] == ["completed", "completed", "discarded"]
    assert counted == {"failed": len(heard), "dropped": 0}
    said = [record for record in caplog.records if "on_step_event" in record.message]
    assert len(said) == 2 and all(record.exc_info for record in said)


@pytest.mark.contract("V4")
async def test_a_hook_that_is_slow_holds_nothing_up(
    dsn: str, conn: Conn, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "_MOST", 20)
    monkeypatch.setattr(events, "_CLOSE_S", 0.05)
    go_on = threading.Event()
    heard = Heard()

    def hook(event: Event) -> None:
        heard(event)
        go_on.wait(60)

    factories.steps(conn, 300, "noop")
    async with factories.worker(dsn, factories.noop(), on_step_event=hook):
        await until(lambda: over(conn))
        assert len(heard) == 1  # still the first
    assert counted["dropped"] >= 600 - 20 - 2 * 500 and counted["dropped"] > 0
    assert sum("too slow" in record.message for record in caplog.records) == 1
    assert sum("last" in record.message for record in caplog.records) == 1
    assert len(heard) + counted["dropped"] == 600
    (thread,) = hooks()
    go_on.set()
    thread.join(10)
    assert hooks() == [] and len(heard) == 1


async def test_a_call_of_many_is_told_whole(dsn: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST", 5)
    heard = Heard()
    async with Client(dsn, on_step_event=heard) as client:
        await tick.enqueue_many(client, range(1500))
    assert len(heard) == 1500 and counted["dropped"] == 0


@pytest.mark.parametrize("make", [Client, SyncClient, lambda dsn, **o: Worker(dsn, cyclone.Registry(), **o), Sweeper])
def test_a_hook_is_a_plain_function(make: Callable[..., Any]) -> None:
    async def later(event: Event) -> None: ...

    for wrong in (later, "print", 3):
        with pytest.raises(InvalidOptionError, match="on_step_event"):
            make("postgresql:///x", on_step_event=wrong)


async def test_without_a_hook_there_is_no_thread(dsn: str, conn: Conn) -> None:
    factories.steps(conn, 10)
    async with Client(dsn) as client, factories.worker(dsn, factories.noop(), tick):
        assert await (await tick.enqueue(client, 7)).result(10) == 7
        assert hooks() == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_begins_with_a_thread_of_its_own() -> None:
    heard = Heard()
    hook = events.Hook(heard)
    event = events.seen(EventKind.STARTED, 1, "n", "k", "q", 1)
    hook.tell([event])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            heard.clear()
            hook.tell([event, event])
            hook.close()
            code = 0 if len(heard) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    hook.close()
    assert heard == [event]
