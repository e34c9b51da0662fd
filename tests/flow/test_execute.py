"""Execute: what a handler is given, and what becomes of its step, whatever the handler does."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import factories
import msgspec
import psycopg
import pytest
from factories import alone, ended, errors, read, state, until

from cyclone.context import Context, SyncContext
from cyclone.errors import Cancelled, LeaseLostError, Permanent, RetryAfter, Snooze
from cyclone.registry import AsyncStep, Step, action, step
from cyclone.retry import fixed

Conn = psycopg.Connection[Any]

NEVER = fixed(timedelta(days=300))
"""A backoff that leaves a failed step where a test can look at it."""


# What a handler returns


@pytest.mark.contract("C1", "C2", "D2", "E2")
async def test_a_handler_that_returns_completes_its_step_and_its_output_is_stored(dsn: str, conn: Conn) -> None:
    calls: list[Any] = []

    @step("double")
    async def handler(ctx: Context, input: int) -> dict[str, int]:
        calls.append(input)
        return {"a": 2 * input}

    made = await alone(dsn, conn, handler, 21)
    assert read(conn, made, "state", "output", "error", "error_kind") == ("completed", {"a": 42}, None, None)
    assert read(conn, made, "finished_at >= started_at")
    assert calls == [21]
    assert factories.count(conn, "cyclone_claims") == 0


@pytest.mark.contract("C8", "W2")
async def test_an_action_stores_no_output_and_a_step_that_returns_none_stores_null(dsn: str, conn: Conn) -> None:
    @action("act")
    async def act(ctx: Context) -> None:
        pass

    @step("none")
    async def none(ctx: Context) -> int | None:
        return None

    acted, found_none = factories.step(conn, "act"), factories.step(conn, "none")
    async with factories.worker(dsn, act, none):
        await ended(conn, acted, found_none)
    assert read(conn, acted, "state", "output IS NULL") == ("completed", True)
    assert read(conn, found_none, "state", "output::text") == ("completed", "null")


@pytest.mark.contract("C8", "W2")
async def test_an_action_that_returns_something_has_failed(dsn: str, conn: Conn) -> None:
    @action("act")
    async def act(ctx: Context) -> Any:
        return 1

    made = await alone(dsn, conn, act)
    assert read(conn, made, "state", "error_kind") == ("discarded", "permanent")
    assert "an action returns None" in read(conn, made, "error")


@dataclass
class Point:
    x: int
    y: float


@pytest.mark.contract("I2")
async def test_async_and_sync_handlers_work_side_by_side(dsn: str, conn: Conn) -> None:
    threads: dict[str, str] = {}

    @step("async")
    async def one(ctx: Context, input: Point) -> Point:
        threads["async"] = threading.current_thread().name
        return Point(input.y.__int__(), input.x)

    @step("sync")
    def two(ctx: SyncContext, input: Point) -> Point:
        threads["sync"] = threading.current_thread().name
        return Point(input.y.__int__(), input.x)

    made = [factories.step(conn, kind, input={"x": 1, "y": 2.0}) for kind in ("async", "sync")]
    async with factories.worker(dsn, one, two):
        await ended(conn, *made)
    assert [read(conn, each, "state", "output") for each in made] == [("completed", {"x": 2, "y": 1})] * 2
    assert threads["async"] == threading.main_thread().name != threads["sync"]


@pytest.mark.contract("I2")
async def test_a_worker_runs_no_more_sync_handlers_at_once_than_it_has_threads_and_they_keep_nobody_else_waiting(
    dsn: str, conn: Conn
) -> None:
    release = threading.Event()
    running: list[str] = []

    @step("sync")
    def blocking(ctx: SyncContext) -> None:
        running.append(ctx.run_id)
        release.wait(20)

    @step("async")
    async def quick(ctx: Context) -> None:
        pass

    factories.steps(conn, 5, "sync")
    behind = factories.step(conn, "async", priority=9)
    async with factories.worker(dsn, blocking, quick, threads=2, concurrency=10):
        await ended(conn, behind)
        assert len(running) == 2
        release.set()
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 6)


# What a handler is given


@pytest.mark.contract("K1", "K3", "K4", "K5", "K8", "K9", "R5")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_the_context_says_which_step_this_is(dsn: str, conn: Conn, sort: str) -> None:
    seen: dict[str, Any] = {}

    def look(ctx: Context | SyncContext) -> None:
        for name in ("run_id", "node", "attempt", "max_attempts", "is_last_attempt", "idempotency_key", "reclaims"):
            seen[name] = getattr(ctx, name)
        for name in ("snoozes", "queue", "tags", "metadata", "enqueued_at", "cancelled", "lease_lost"):
            seen[name] = getattr(ctx, name)
        seen["key"] = ctx.key("receipt", "2")

    @step("who")
    async def async_handler(ctx: Context) -> None:
        look(ctx)

    @step("who")
    def sync_handler(ctx: SyncContext) -> None:
        look(ctx)

    handler: Step[Any, Any] = async_handler if sort == "async" else sync_handler
    made = await alone(
        dsn, conn, handler, attempts=3, max_attempts=4, snoozes=2, reclaims=1, tags=["t"], metadata={"m": 1}
    )
    assert type(seen["run_id"]) is str and seen["run_id"].isdigit() and int(seen["run_id"]) == made.id
    assert seen["node"] == "who" == handler.name
    assert (seen["attempt"], seen["max_attempts"], seen["is_last_attempt"]) == (4, 4, True)
    assert seen["idempotency_key"] == f"{made.id}:who"
    assert seen["key"] == f"{made.id}:who:receipt:2"
    assert (seen["reclaims"], seen["snoozes"], seen["queue"]) == (1, 2, "default")
    assert (list(seen["tags"]), seen["metadata"]) == (["t"], {"m": 1})
    assert isinstance(seen["enqueued_at"], datetime) and seen["enqueued_at"].tzinfo is not None
    assert (seen["cancelled"], seen["lease_lost"]) == (False, False)


# Input


class Order(msgspec.Struct):
    id: str
    cents: int


@pytest.mark.contract("E16", "FM-010", "D10")
async def test_input_that_is_none_fails_as_invalid_and_the_rest_of_the_batch_runs(dsn: str, conn: Conn) -> None:
    calls: list[Order] = []

    @step("order")
    async def handler(ctx: Context, input: Order) -> None:
        calls.append(input)

    good = [factories.step(conn, "order", input={"id": "1", "cents": 5}) for _ in range(3)]
    bad = factories.step(conn, "order", input={"id": "1", "cents": "five"})
    good += [factories.step(conn, "order", input={"id": "1", "cents": 5}) for _ in range(3)]
    async with factories.worker(dsn, handler):
        await ended(conn, bad, *good)
    assert read(conn, bad, "state", "error_kind", "attempts") == ("discarded", "invalid_input", 0)
    assert "$.cents" in read(conn, bad, "error")
    assert {state(conn, one) for one in good} == {"completed"}
    assert calls == [Order("1", 5)] * 6


@pytest.mark.contract("E16", "M7")
async def test_an_upgrade_that_would_leave_the_program_ends_only_its_step(dsn: str, conn: Conn) -> None:
    @step("order", version=2)
    async def handler(ctx: Context, input: Order) -> None:
        raise AssertionError

    @handler.upgrade(1)
    def _(input: Any) -> Any:
        raise SystemExit(3)

    made, after = factories.step(conn, "order", input={}, version=1), factories.step(conn)
    async with factories.worker(dsn, handler, factories.noop()):
        await ended(conn, made, after)
    assert read(conn, made, "state", "error_kind") == ("discarded", "invalid_input")
    assert state(conn, after) == "completed"


@pytest.mark.contract("E16")
async def test_an_upgrade_that_raises_is_invalid_input_too(dsn: str, conn: Conn) -> None:
    @step("order", version=2)
    async def handler(ctx: Context, input: Order) -> None:
        raise AssertionError

    @handler.upgrade(1)
    def _(input: Any) -> Any:
        return input["missing"]

    made = await alone(dsn, conn, handler, {}, version=1)
    assert read(conn, made, "state", "error_kind") == ("discarded", "invalid_input")
    assert "upgrade from version 1" in read(conn, made, "error")


# Whatever a handler raises


class Silent(Exception):
    pass


class Broken(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class VeryBroken(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


def _recurse() -> None:
    _recurse()


def _exceptions() -> dict[str, BaseException]:
    return {
        "RuntimeError": RuntimeError("boom"),
        "SystemExit": SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "MemoryError": MemoryError(),
        "CancelledError": asyncio.CancelledError(),
        "GeneratorExit": GeneratorExit(),
        "StopIteration": StopIteration(1),
        "StopAsyncIteration": StopAsyncIteration(),
        "TimeoutError": TimeoutError("its own"),
        "BaseExceptionGroup": BaseExceptionGroup("many", [KeyboardInterrupt(), ValueError("one")]),
        "Cancelled": Cancelled("a stray one"),
        "LeaseLostError": LeaseLostError("a handler's own"),
        "OperationalError": psycopg.OperationalError("a database of the handler's own is away"),
        "Silent": Silent(),
        "Broken": Broken(),
        "VeryBroken": VeryBroken(),
    }


@pytest.mark.contract("M6", "M7", "FM-046", "FM-047", "R1", "R41", "D10")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_anything_a_handler_raises_is_a_failed_attempt_and_the_worker_goes_on(
    dsn: str, conn: Conn, sort: str
) -> None:
    raised = _exceptions()

    @step("fail", backoff=NEVER)
    async def async_fail(ctx: Context, input: str) -> None:
        raise raised[input]

    @step("fail", backoff=NEVER)
    def sync_fail(ctx: SyncContext, input: str) -> None:
        raise raised[input]

    made = {name: factories.step(conn, "fail", input=name) for name in raised}
    after = factories.step(conn, "noop")
    handler: Step[Any, Any] = async_fail if sort == "async" else sync_fail
    async with factories.worker(dsn, handler, factories.noop(), concurrency=1):
        await ended(conn, after, *made.values())
    for name, one in made.items():
        assert (name, *read(conn, one, "state", "attempts", "error_kind")) == (name, "scheduled", 1, "retryable")
        assert name in read(conn, one, "error")
        ((attempt, kind, message, trace),) = conn.execute(
            "SELECT attempt, kind, message, traceback FROM cyclone_errors WHERE step = %s", (one.id,)
        ).fetchall()
        assert (attempt, kind) == (1, "retryable")
        assert name in message and name in trace
    assert state(conn, after) == "completed"


@pytest.mark.contract("M7", "FM-046")
async def test_a_recursion_without_end_is_a_failed_attempt(dsn: str, conn: Conn) -> None:
    @step("fail", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        _recurse()

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind") == ("scheduled", "retryable")
    assert "RecursionError" in read(conn, made, "error")


@pytest.mark.contract("M7", "FM-046")
async def test_a_handler_that_cancels_its_own_task_has_failed(dsn: str, conn: Conn) -> None:
    @step("fail", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(10)

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind", "attempts") == ("scheduled", "retryable", 1)


@pytest.mark.contract("M7", "FM-046", "X8")
async def test_a_cancellation_left_pending_does_not_reach_the_settling_of_the_step(dsn: str, conn: Conn) -> None:
    factories.ledger(conn)

    @step("leaves", backoff=NEVER)
    async def handler(ctx: Context, input: bool) -> int:
        if input:
            tx = await ctx.completion_tx()
            await tx.execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return 1

    plain, transactional = factories.step(conn, "leaves", input=False), factories.step(conn, "leaves", input=True)
    async with factories.worker(dsn, handler, concurrency=1):
        await ended(conn, plain, transactional)
    assert state(conn, plain) == "completed"
    # Whatever it is, it is one thing: completed with its write, or failed without.
    wrote = factories.count(conn, "ledger")
    assert (state(conn, transactional), wrote) in [("completed", 1), ("scheduled", 0)]


@pytest.mark.contract("FM-048", "R47")
async def test_errors_of_any_size_are_cut_with_a_marker(dsn: str, conn: Conn) -> None:
    @step("fail", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        raise RuntimeError("é" * 1_000_000)

    made = await alone(dsn, conn, handler, worker={"max_error_bytes": 1000})
    ((message, trace),) = conn.execute("SELECT message, traceback FROM cyclone_errors").fetchall()
    for text in (message, trace, read(conn, made, "error")):
        assert 900 < len(text.encode()) <= 1000
        assert "[cut]" in text


@pytest.mark.contract("FM-050", "FM-051")
async def test_text_that_the_database_cannot_hold_does_not_keep_an_error_from_being_stored(
    dsn: str, conn: Conn
) -> None:
    @step("fail", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        raise RuntimeError("nul \0 and \ud800 alone")

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error") == ("scheduled", r"RuntimeError: nul \x00 and \ud800 alone")


# Outputs


class Unencodable:
    pass


def _deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.contract("C7", "FM-050", "FM-051", "FM-052", "FM-053", "D10")
@pytest.mark.parametrize(
    "output",
    ["a\0b", {"k\0": 1}, "\ud800", float("nan"), [float("inf")], Unencodable(), {1, object()}, _deep(100_000)],
    ids=["nul", "nul in a key", "surrogate", "nan", "infinity", "object", "object in a set", "deep"],
)
async def test_an_output_that_cannot_be_stored_fails_the_step_for_good_and_undoes_its_writes(
    dsn: str, conn: Conn, output: Any
) -> None:
    factories.ledger(conn)

    @step("give")
    async def handler(ctx: Context, input: bool) -> Any:
        if input:
            await (await ctx.completion_tx()).execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        return output

    made = [factories.step(conn, "give", input=with_tx) for with_tx in (False, True)]
    after = factories.step(conn, "noop")
    async with factories.worker(dsn, handler, factories.noop()):
        await ended(conn, after, *made)
    for one in made:
        assert read(conn, one, "state", "error_kind", "output", "attempts") == ("discarded", "permanent", None, 1)
        assert read(conn, one, "error")
    assert factories.count(conn, "ledger") == 0
    assert state(conn, after) == "completed"


@pytest.mark.contract("C7", "FM-053")
async def test_an_output_that_only_the_server_refuses_is_a_failure_too(dsn: str, conn: Conn) -> None:
    @step("give", backoff=NEVER)
    async def handler(ctx: Context, input: bool) -> Any:
        if input:
            await ctx.completion_tx()
        # jsonb has a limit of its own on the depth of what it parses.
        return msgspec.Raw(b"[" * 50_000 + b"]" * 50_000)

    plain, transactional = (factories.step(conn, "give", input=with_tx) for with_tx in (False, True))
    async with factories.worker(dsn, handler):
        await ended(conn, plain, transactional)
    assert read(conn, plain, "state", "error_kind") == ("discarded", "permanent")
    # At a commit nobody can tell the output from the handler's own data, whose failures are retried (X9).
    assert read(conn, transactional, "state", "error_kind") == ("scheduled", "retryable")
    assert "stack depth" in read(conn, plain, "error") and "stack depth" in read(conn, transactional, "error")


@pytest.mark.contract("C7", "FM-054")
async def test_an_output_above_the_limit_fails_the_step_and_one_at_the_limit_does_not(dsn: str, conn: Conn) -> None:
    @step("give")
    async def handler(ctx: Context, input: int) -> str:
        return "x" * input

    over, at = factories.step(conn, "give", input=999), factories.step(conn, "give", input=998)
    async with factories.worker(dsn, handler, max_output_bytes=1000):
        await ended(conn, over, at)
    assert read(conn, over, "state", "error_kind", "output") == ("discarded", "permanent", None)
    assert "OutputTooLargeError" in read(conn, over, "error") and "max_output_bytes is 1000" in read(
        conn, over, "error"
    )
    assert read(conn, at, "state", "length(output::text)") == ("completed", 1000)


@pytest.mark.contract("C7", "FM-054")
async def test_two_mebibytes_are_too_much_by_default(dsn: str, conn: Conn) -> None:
    @step("give")
    async def handler(ctx: Context) -> str:
        return "x" * (2 << 20)

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind") == ("discarded", "permanent")


# Time limits


@pytest.mark.contract("R44", "FM-044")
async def test_an_async_handler_is_cancelled_at_its_timeout_and_may_clean_up(dsn: str, conn: Conn) -> None:
    seen: list[Any] = []

    @step("slow", timeout=0.1, backoff=NEVER)
    async def handler(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            seen.append(ctx.cancelled)
            raise

    made = await alone(dsn, conn, handler)
    assert seen == [True]
    assert read(conn, made, "state", "error_kind", "attempts") == ("scheduled", "timeout", 1)
    assert errors(conn, made) == [(1, "timeout", "the attempt took longer than its timeout of 0.1 s")]


@pytest.mark.contract("R44", "FM-044", "R2")
async def test_a_timeout_in_the_last_attempt_discards(dsn: str, conn: Conn) -> None:
    @step("slow", timeout=0.05)
    async def handler(ctx: Context) -> None:
        await asyncio.sleep(60)

    made = await alone(dsn, conn, handler, max_attempts=1)
    assert read(conn, made, "state", "error_kind", "attempts") == ("discarded", "timeout", 1)


@pytest.mark.contract("R44")
@pytest.mark.parametrize("ending", ["returns", "raises", "snoozes"])
async def test_whatever_a_handler_makes_of_its_timeout_the_attempt_has_failed(
    dsn: str, conn: Conn, ending: str
) -> None:
    factories.ledger(conn)

    @step("slow", timeout=0.1, backoff=NEVER)
    async def handler(ctx: Context) -> str:
        tx = await ctx.completion_tx()
        await tx.execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if ending == "raises":
                raise ValueError("while cleaning up") from None
            if ending == "snoozes":
                raise Snooze(timedelta(seconds=1)) from None
        return "too late"

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind", "output", "snoozes") == ("scheduled", "timeout", None, 0)
    assert factories.count(conn, "ledger") == 0


@pytest.mark.contract("R46")
async def test_the_timeout_of_the_row_wins_over_that_of_the_step(dsn: str, conn: Conn) -> None:
    @step("slow", timeout=60, backoff=NEVER)
    async def handler(ctx: Context) -> None:
        await asyncio.sleep(60)

    made = await alone(dsn, conn, handler, timeout_s=0.05)
    assert read(conn, made, "error_kind") == "timeout"


@pytest.mark.contract("R43", "E5", "E9", "FM-014", "FM-087")
async def test_a_sync_handler_that_ignores_its_timeout_has_failed_and_what_it_still_does_is_refused(
    dsn: str, conn: Conn
) -> None:
    factories.ledger(conn)
    release = threading.Event()
    calls: list[int] = []
    left: list[BaseException | None] = []

    @step("deaf", timeout=0.1, grace=0.05, backoff=fixed(0.001))
    def handler(ctx: SyncContext) -> str:
        calls.append(ctx.attempt)
        if ctx.attempt > 1:
            return "second"
        assert release.wait(20)
        try:
            ctx.completion_tx().execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        finally:
            left.append(None)
        return "first"

    made = factories.step(conn, "deaf")
    async with factories.worker(dsn, handler, concurrency=1, threads=1), factories.sweeper(dsn):
        # The next attempt begins while the old call still runs: its slot came back.
        await ended(conn, made)
        await until(lambda: state(conn, made) == "completed")
        assert (calls, left) == ([1, 2], [])
        release.set()
        await until(lambda: left)
    assert read(conn, made, "output", "attempts") == ("second", 2)
    assert [kind for _, kind, _ in errors(conn, made)] == ["timeout"]
    assert factories.count(conn, "ledger") == 0


@pytest.mark.contract("R43", "FM-014")
async def test_an_async_handler_that_ignores_its_timeout_has_failed_and_what_it_still_does_is_refused(
    dsn: str, conn: Conn
) -> None:
    factories.ledger(conn)
    release = asyncio.Event()
    left = asyncio.Event()

    @step("deaf", timeout=0.5, grace=0.05, backoff=NEVER)
    async def handler(ctx: Context) -> str:
        tx = await ctx.completion_tx()
        await tx.execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        left.set()
        return "first"

    made = factories.step(conn, "deaf")
    async with factories.worker(dsn, handler, concurrency=1):
        await ended(conn, made)
        release.set()
        await left.wait()
    assert read(conn, made, "state", "error_kind", "output") == ("scheduled", "timeout", None)
    assert factories.count(conn, "ledger") == 0


@pytest.mark.contract("FM-087", "R45")
async def test_slots_of_sync_handlers_that_never_end_come_back(dsn: str, conn: Conn) -> None:
    release = threading.Event()

    @step("deaf", timeout=0.05, grace=0, backoff=NEVER)
    def deaf(ctx: SyncContext) -> None:
        release.wait(30)

    @step("good")
    def good(ctx: SyncContext) -> int:
        return 1

    stuck = [factories.step(conn, "deaf") for _ in range(4)]
    behind = [factories.step(conn, "good") for _ in range(4)]
    async with factories.worker(dsn, deaf, good, concurrency=2, threads=2):
        await ended(conn, *stuck, *behind, limit=5)
        release.set()
    assert {read(conn, one, "state", "error_kind") for one in stuck} == {("scheduled", "timeout")}
    assert {state(conn, one) for one in behind} == {"completed"}


@pytest.mark.contract("R43", "FM-087")
async def test_a_slot_comes_back_after_timeout_and_grace_and_what_the_thread_then_does_changes_nothing(
    dsn: str, conn: Conn
) -> None:
    release = threading.Event()
    entered: list[float] = []
    after: list[float] = []
    left: list[str] = []

    @step("deaf", timeout=0.3, grace=0.3, backoff=NEVER)
    def deaf(ctx: SyncContext) -> str:
        entered.append(time.monotonic())
        release.wait(30)
        left.append(ctx.run_id)
        return "too late"

    @step("good")
    def good(ctx: SyncContext) -> None:
        after.append(time.monotonic())

    stuck, behind = factories.step(conn, "deaf"), factories.step(conn, "good", priority=9)
    async with factories.worker(dsn, deaf, good, concurrency=1, threads=1) as worker:
        await ended(conn, stuck, behind)
        assert 0.6 <= after[0] - entered[0] < 5
        assert worker._running == worker._thread_gate.running == 0
        before = read(conn, stuck, "state", "error_kind", "output", "due_at")
        release.set()
        await until(lambda: left)
        await ended(conn, factories.step(conn, "good"))  # the late return has been heard and passed over
    assert read(conn, stuck, "state", "error_kind", "output", "due_at") == before
    assert before[:3] == ("scheduled", "timeout", None)


@pytest.mark.contract("FM-087", "FM-046")
async def test_a_system_that_has_no_thread_to_give_costs_an_attempt_and_not_the_worker(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    @step("sync", backoff=NEVER)
    def handler(ctx: SyncContext) -> None: ...

    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("cyclone-step-"):
            raise RuntimeError("can't start new thread")
        start(self)

    async with factories.worker(dsn, handler, factories.noop(), concurrency=1):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            refused, other = factories.step(conn, "sync"), factories.step(conn, "noop")
            await ended(conn, refused, other)
        made = factories.step(conn, "sync")
        await ended(conn, made)
    assert read(conn, refused, "state", "error_kind") == ("scheduled", "retryable")
    assert "can't start new thread" in read(conn, refused, "error")
    assert (state(conn, other), state(conn, made)) == ("completed", "completed")


@pytest.mark.contract("R45")
async def test_a_sync_handler_can_see_that_its_time_is_up(dsn: str, conn: Conn) -> None:
    seen: list[bool] = []

    @step("polite", timeout=0.05, backoff=NEVER)
    def handler(ctx: SyncContext) -> None:
        try:
            while True:
                ctx.check_cancelled()
                time.sleep(0.005)
        finally:
            seen.append(ctx.cancelled)

    made = await alone(dsn, conn, handler)
    assert seen == [True]
    assert read(conn, made, "state", "error_kind") == ("scheduled", "timeout")


# Cancel of a running step


@pytest.mark.contract("FM-063", "R36", "X8", "FM-062")
@pytest.mark.parametrize("notify", [True, False])
async def test_a_cancel_reaches_a_running_handler_within_two_seconds(dsn: str, conn: Conn, notify: bool) -> None:
    factories.ledger(conn)
    entered, told = asyncio.Event(), asyncio.Event()

    @step("endless")
    async def handler(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        await tx.execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            told.set()

    made = factories.step(conn, "endless")
    # Every slot is busy and nothing is queued, so the worker has no reason of its own to look at the database.
    async with factories.worker(dsn, handler, concurrency=1, notify=notify, poll_interval=60):
        await asyncio.wait_for(entered.wait(), 5)
        factories.cancel(conn, made, "no longer wanted")
        async with asyncio.timeout(2):
            await told.wait()
    assert read(conn, made, "state", "error", "error_kind") == ("cancelled", "no longer wanted", "cancelled")
    assert factories.count(conn, "ledger") == 0
    assert factories.count(conn, "cyclone_orders") == 0


@pytest.mark.contract("FM-063")
async def test_a_cancel_reaches_a_running_sync_handler(dsn: str, conn: Conn) -> None:
    entered, told = threading.Event(), threading.Event()

    @step("endless")
    def handler(ctx: SyncContext) -> None:
        entered.set()
        try:
            while True:
                ctx.check_cancelled()
                time.sleep(0.01)
        finally:
            told.set()

    made = factories.step(conn, "endless")
    async with factories.worker(dsn, handler):
        await until(entered.is_set)
        factories.cancel(conn, made)
        await until(told.is_set, 2)
    assert state(conn, made) == "cancelled"


@pytest.mark.contract("FM-062", "FM-063")
async def test_a_step_that_is_cancelled_while_its_worker_keeps_it_for_later_is_never_called(
    dsn: str, conn: Conn
) -> None:
    entered, release = asyncio.Event(), asyncio.Event()
    called: list[str] = []

    @step("one")
    async def handler(ctx: Context) -> None:
        called.append(ctx.run_id)
        entered.set()
        await release.wait()

    first = factories.step(conn, "one")
    async with factories.worker(dsn, handler, concurrency=1, claim_batch=50) as worker:
        await entered.wait()
        # Held by the worker, as a batch is, behind the step that runs.
        waiting = factories.step(conn, "one", "running", life=worker._keeper.life)
        async with factories.engine(dsn) as own:
            await worker._take(own, worker._keeper.life, [await _claimed(own, waiting)])
        factories.cancel(conn, waiting)
        await until(lambda: not factories.count(conn, "cyclone_orders"), 3)
        await asyncio.sleep(0)
        release.set()
        await ended(conn, first)
        await until(lambda: not factories.count(conn, "cyclone_claims"))
    assert called == [first.run_id]
    assert state(conn, waiting) == "cancelled"


async def _claimed(conn: factories.AsyncConn, made: factories.Made) -> Any:
    from cyclone.model import Claimed

    cur = await conn.execute(
        "SELECT claim, id, run_id, node, kind, version, queue, input, attempts, max_attempts, reclaims, snoozes,"
        " timeout_s, resume, tags, metadata, enqueued_at, graph, pos, sink, deadline_at, 0.0::float8"
        " FROM cyclone_steps WHERE id = %s",
        (made.id,),
    )
    row = await cur.fetchone()
    assert row is not None
    return Claimed(*row)


@pytest.mark.contract("FM-063")
async def test_an_order_for_an_earlier_claim_of_a_step_does_not_end_a_later_one(dsn: str, conn: Conn) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    @step("one")
    async def handler(ctx: Context) -> None:
        entered.set()
        await release.wait()

    made = factories.step(conn, "one")
    async with factories.worker(dsn, handler) as worker:
        await entered.wait()
        conn.execute(
            "INSERT INTO cyclone_orders (life, step, claim, reason) VALUES (%s, %s, 1, 'late')",
            (worker._keeper.life, made.id),
        )
        await until(lambda: not factories.count(conn, "cyclone_orders"), 3)
        await asyncio.sleep(0.02)
        release.set()
        await ended(conn, made)
    assert state(conn, made) == "completed"


@pytest.mark.contract("FM-062")
async def test_steps_that_are_cancelled_while_they_finish_each_have_one_consistent_end(dsn: str, conn: Conn) -> None:
    factories.ledger(conn)
    entered = 0
    release = asyncio.Event()

    @step("race")
    async def handler(ctx: Context, input: bool) -> int:
        nonlocal entered
        if input:
            tx = await ctx.completion_tx()
            await tx.execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        entered += 1
        await release.wait()
        return 1

    made = [factories.step(conn, "race", input=n % 10 == 0) for n in range(60)]

    def cancel_all() -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            for one in made:
                factories.cancel(other, one)

    async with factories.worker(dsn, handler):
        await until(lambda: entered == len(made))
        release.set()
        await asyncio.to_thread(cancel_all)
        await ended(conn, *made)
    for one in made:
        found = read(conn, one, "state", "output IS NULL", "error_kind")
        assert found in [("completed", False, None), ("cancelled", True, "cancelled")]
    written = {int(run) for (run,) in conn.execute("SELECT run_id FROM ledger").fetchall()}
    transactional = {one.id for one in made if read(conn, one, "input") is True}
    assert written == {number for number in transactional if state(conn, number) == "completed"}


# Exactly once while nothing fails, and how long leases hold


@pytest.mark.contract("E2")
async def test_four_workers_enter_each_handler_once(dsn: str, conn: Conn) -> None:
    entered: list[int] = []

    @step("count")
    async def handler(ctx: Context) -> None:
        entered.append(int(ctx.run_id))

    made = factories.steps(conn, 3000, "count")
    async with (
        factories.worker(dsn, handler),
        factories.worker(dsn, handler),
        factories.worker(dsn, handler),
        factories.worker(dsn, handler),
    ):
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == len(made), 30)
    assert sorted(entered) == made


@pytest.mark.contract("E10", "FM-013")
async def test_a_handler_that_runs_for_many_leases_runs_once(dsn: str, conn: Conn) -> None:
    calls: list[str] = []
    stop = asyncio.Event()

    @step("long")
    async def handler(ctx: Context) -> None:
        calls.append(ctx.run_id)
        await stop.wait()

    made = [factories.step(conn, "long") for _ in range(64)]
    async with factories.worker(dsn, handler, lease=1), factories.sweeper(dsn):
        await until(lambda: len(calls) == len(made))
        # Three leases, by the database's clock.
        await until(lambda: read(conn, made[0], "started_at < clock_timestamp() - interval '3 seconds'"))
        stop.set()
        await ended(conn, *made)
    assert sorted(map(int, calls)) == [one.id for one in made]
    assert {read(conn, one, "state", "reclaims") for one in made} == {("completed", 0)}


@pytest.mark.contract("E11", "FM-084")
async def test_a_handler_that_blocks_the_loop_for_three_leases_costs_nobody_the_lease(dsn: str, conn: Conn) -> None:
    calls: list[str] = []

    @step("neighbour")
    async def neighbour(ctx: Context) -> None:
        calls.append(ctx.run_id)
        await blocked.wait()

    @step("blocks")
    async def blocks(ctx: Context) -> None:
        calls.append(ctx.run_id)
        await until(lambda: len(calls) == 6)
        time.sleep(3)  # noqa: ASYNC251
        blocked.set()

    blocked = asyncio.Event()
    made = [factories.step(conn, "neighbour") for _ in range(5)] + [factories.step(conn, "blocks")]
    reclaimed: list[int] = []
    done = threading.Event()

    def sweep_meanwhile() -> None:  # in a loop of its own, which is not blocked
        async def rounds() -> None:
            while not done.is_set():
                reclaimed.append(await factories.sweep_all(dsn))
                await asyncio.sleep(0.1)

        asyncio.run(rounds())

    sweeping = asyncio.create_task(asyncio.to_thread(sweep_meanwhile))
    async with factories.worker(dsn, neighbour, blocks, lease=1):
        await ended(conn, *made)
    done.set()
    await sweeping
    assert len(reclaimed) > 10 and sum(reclaimed) == 0
    assert len(calls) == 6
    assert {read(conn, one, "state", "reclaims") for one in made} == {("completed", 0)}


@pytest.mark.contract("E11", "FM-084")
async def test_a_loop_that_stands_still_past_the_stall_limit_costs_an_embedded_worker_its_life(
    dsn: str, conn: Conn, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    factories.ledger(conn)
    calls: list[int] = []

    @step("blocks")
    async def blocks(ctx: Context) -> None:
        calls.append(ctx.attempt)
        if len(calls) == 1:
            tx = await ctx.completion_tx()
            await tx.execute("INSERT INTO ledger (note) VALUES ('first')")
            time.sleep(1.5)  # noqa: ASYNC251
        else:
            await (await ctx.completion_tx()).execute("INSERT INTO ledger (note) VALUES ('second')")

    made = factories.step(conn, "blocks")
    sweeping = threading.Event()

    def sweep_meanwhile() -> None:
        async def rounds() -> None:
            while not sweeping.is_set():
                await factories.sweep_all(dsn)
                await asyncio.sleep(0.05)

        asyncio.run(rounds())

    task = asyncio.create_task(asyncio.to_thread(sweep_meanwhile))
    async with factories.worker(dsn, blocks, lease=10, stall_limit=0.5) as worker:
        first = worker._keeper.life
        await until(lambda: state(conn, made) == "completed")
        # The program goes on, and so does its worker, under a new life.
        assert worker._keeper.life != first
    sweeping.set()
    await task
    assert calls == [1, 1]
    assert read(conn, made, "reclaims") == 1
    assert conn.execute("SELECT note FROM ledger").fetchall() == [("second",)]
    assert "event loop has stood still" in caplog.text
    assert "in blocks" in capfd.readouterr().err  # the stacks of all threads
    assert conn.execute("SELECT end_reason IS NOT NULL FROM cyclone_lives WHERE id = %s", (first,)).fetchone() == (
        True,
    )


@pytest.mark.contract("E8", "E9", "M5")
async def test_a_handler_sees_that_its_lease_was_lost(dsn: str, conn: Conn) -> None:
    entered = asyncio.Event()
    seen: list[Any] = []

    @step("slow")
    async def handler(ctx: Context) -> None:
        if entered.is_set():
            return
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append((ctx.lease_lost, ctx.cancelled))
            with pytest.raises(LeaseLostError):
                await ctx.completion_tx()

    made = factories.step(conn, "slow")
    async with factories.worker(dsn, handler, lease=1) as worker, factories.sweeper(dsn):
        await entered.wait()
        factories.end_life(conn, worker._keeper.life)
        await until(lambda: seen)
        await until(lambda: state(conn, made) == "completed")
    assert seen == [(True, True)]
    assert read(conn, made, "attempts", "reclaims") == (1, 1)


# Outcomes a handler may raise


@pytest.mark.contract("R31", "R48", "R32", "D6")
async def test_permanent_discards_at_once_with_its_cause(dsn: str, conn: Conn) -> None:
    @step("fail")
    async def handler(ctx: Context) -> None:
        try:
            raise KeyError("email")
        except KeyError as exc:
            raise Permanent("email is required") from exc

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind", "error") == ("discarded", "permanent", "email is required")
    assert read(conn, made, "attempts < max_attempts")
    ((trace,),) = conn.execute("SELECT traceback FROM cyclone_errors").fetchall()
    assert "KeyError" in trace and "direct cause" in trace


@pytest.mark.contract("R33", "FM-045")
async def test_retry_after_waits_as_long_as_it_says_and_spends_an_attempt(dsn: str, conn: Conn) -> None:
    @step("later")
    async def handler(ctx: Context) -> None:
        raise RetryAfter(timedelta(hours=1), "busy")

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "attempts", "error_kind", "error") == ("scheduled", 1, "retryable", "busy")
    assert read(conn, made, "due_at - now() BETWEEN interval '59 minutes' AND interval '1 hour'")
    last = await alone(dsn, conn, handler, attempts=4)
    assert read(conn, last, "state", "attempts") == ("discarded", 5)


def test_handlers_are_plain_functions_for_unit_tests() -> None:
    @step("plain")
    async def handler(ctx: Context, input: int) -> int:
        return input + 1

    assert isinstance(handler, AsyncStep)
    assert asyncio.run(handler(None, 1)) == 2  # type: ignore[arg-type]
