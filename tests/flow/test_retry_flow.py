"""Retries: how often a step is tried, how long it waits in between, and what a snooze is."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, errors, read, state, until

from cyclone import retry, sweep
from cyclone.client import Client, SyncClient
from cyclone.context import Context, SyncContext
from cyclone.errors import InvalidOptionError, Permanent, RetryAfter, Snooze
from cyclone.registry import Step, action, enqueue, step

Conn = psycopg.Connection[Any]


async def run(dsn: str, conn: Conn, handler: Step[Any, Any], *, rounds: int = 200, **columns: Any) -> factories.Made:
    """Runs a step to its end; what it waits for comes at once."""
    made = factories.step(conn, handler.name, **{"max_attempts": handler.settings.max_attempts, **columns})
    async with factories.worker(dsn, handler, poll_interval=0.02), factories.engine(dsn) as own:
        for _ in range(rounds):
            await until(lambda: state(conn, made) not in ("available", "running"))
            if state(conn, made) != "scheduled":
                return made
            await sweep.fire(own, SQL, now=await factories.later(own, factories.FAR))
    raise AssertionError("it did not come to an end")


async def once(dsn: str, conn: Conn, handler: Step[Any, Any], **columns: Any) -> factories.Made:
    """Runs one attempt of a step."""
    made = factories.step(conn, handler.name, **{"max_attempts": handler.settings.max_attempts, **columns})
    async with factories.worker(dsn, handler):
        await until(lambda: state(conn, made) not in ("available", "running"))
    return made


def wait_s(conn: Conn, made: factories.Made) -> float:
    """From the failure to the due time, as the database keeps them."""
    row = conn.execute(
        "SELECT extract(epoch FROM s.due_at - e.at)::float8 FROM cyclone_steps s JOIN cyclone_errors e ON e.step = s.id"
        " WHERE s.id = %s ORDER BY e.id DESC LIMIT 1",
        (made.id,),
    ).fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


# How often


@pytest.mark.contract("R1", "R2", "R5", "R6", "R41", "D6", "D10", "FM-044", "K2")
async def test_a_handler_that_always_fails_is_called_five_times(dsn: str, conn: Conn) -> None:
    seen: list[tuple[int, bool, str]] = []

    @step("fail")
    async def handler(ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.is_last_attempt, ctx.idempotency_key))
        raise RuntimeError(f"boom {ctx.attempt}")

    made = await run(dsn, conn, handler)
    key = f"{made.id}:fail"
    assert seen == [(1, False, key), (2, False, key), (3, False, key), (4, False, key), (5, True, key)]
    assert read(conn, made, "state", "attempts", "error_kind") == ("discarded", 5, "retryable")
    assert read(conn, made, "error") == "RuntimeError: boom 5"
    assert errors(conn, made) == [(n, "retryable", f"RuntimeError: boom {n}") for n in range(1, 6)]


@pytest.mark.contract("R1", "M6")
async def test_a_later_attempt_can_make_it_good(dsn: str, conn: Conn) -> None:
    @step("second")
    async def handler(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise RuntimeError("not yet")
        return ctx.attempt

    made = await run(dsn, conn, handler)
    assert read(conn, made, "state", "output", "error", "error_kind", "attempts") == ("completed", 2, None, None, 2)
    assert len(errors(conn, made)) == 1


@pytest.mark.contract("R8", "R9", "R10", "R12", "D5")
@pytest.mark.parametrize(("declared", "enqueued", "calls"), [(5, 3, 3), (2, None, 2), (1, None, 1), (3, 1, 1)])
async def test_the_limit_of_the_step_holds_unless_the_enqueue_has_its_own(
    dsn: str, conn: Conn, declared: int, enqueued: int | None, calls: int
) -> None:
    count = 0

    @action("fail", max_attempts=declared, backoff=retry.fixed(0.001))
    async def handler(ctx: Context) -> None:
        nonlocal count
        count += 1
        raise RuntimeError

    options: Any = {} if enqueued is None else {"max_attempts": enqueued}
    async with Client(dsn) as client, factories.worker(dsn, handler), factories.sweeper(dsn):
        handle = await handler.enqueue(client, **options)
        await handle.wait(10)
        by_function = await enqueue(client, handler, None, **options)
        await by_function.wait(10)
    assert count == 2 * calls
    for one in (handle, by_function):
        assert read(conn, int(one.run_id), "state", "attempts", "max_attempts") == ("discarded", calls, calls)


@pytest.mark.contract("R11", "R13", "R16")
@pytest.mark.parametrize("limit", [0, -1, True, 3.0, "3", None])
def test_a_bad_limit_fails_the_declaration(limit: Any) -> None:
    for declare in (step, action):
        with pytest.raises(InvalidOptionError, match="max_attempts") as caught:
            declare("bad", max_attempts=limit)(_handler)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, TypeError) == (type(limit) is not int)


async def _handler(ctx: Context) -> None:
    pass


@pytest.mark.contract("R11", "R15", "R16")
@pytest.mark.parametrize("limit", [0, -1, True, 3.0, "3", None])
async def test_a_bad_limit_of_an_enqueue_is_refused_before_anything_is_sent(dsn: str, conn: Conn, limit: Any) -> None:
    declared = action("fine")(_handler)
    options: Any = {"max_attempts": limit}
    async with Client(dsn) as client:
        with psycopg.connect(dsn) as other:  # the table is locked, so whatever was sent would hang
            other.execute("LOCK cyclone_steps")
            async with asyncio.timeout(5):
                with pytest.raises(InvalidOptionError):
                    await declared.enqueue(client, **options)
                with pytest.raises(InvalidOptionError):
                    await declared.enqueue_many(client, [None, None], **options)
                with pytest.raises(InvalidOptionError):
                    await enqueue(client, declared, None, **options)
                async with await psycopg.AsyncConnection.connect(dsn) as tx:
                    with pytest.raises(InvalidOptionError):
                        await declared.enqueue_tx(client, tx, **options)
    with SyncClient(dsn) as sync:
        with pytest.raises(InvalidOptionError):
            declared.enqueue(sync, **options)
    assert factories.count(conn, "cyclone_steps") == 0


# How long


@pytest.mark.contract("R3", "R4")
async def test_a_failed_attempt_waits_a_few_seconds_at_first(dsn: str, conn: Conn) -> None:
    @step("fail")
    async def handler(ctx: Context) -> None:
        raise RuntimeError

    made = await once(dsn, conn, handler)
    assert 2 <= wait_s(conn, made) <= 5
    assert state(conn, made) == "scheduled"
    assert await factories.sweep_all(dsn) == 0
    assert await factories.sweep_all(dsn, ahead=timedelta(seconds=1.5)) == 0
    assert await factories.sweep_all(dsn, ahead=timedelta(seconds=6)) == 1
    assert read(conn, made, "state", "due_at") == ("available", None)


@pytest.mark.contract("R4")
def test_the_default_wait_grows_to_about_an_hour_and_has_jitter() -> None:
    waits = [[retry.default_backoff(n).total_seconds() for _ in range(200)] for n in range(1, 21)]
    medians = [statistics.median(draws) for draws in waits]
    assert all(2 <= draw <= 5 for draw in waits[0])
    # Non-decreasing but for the spread of the draws once the hour is reached.
    assert all(later >= earlier * 0.97 for earlier, later in zip(medians, medians[1:], strict=False))
    assert max(max(draws) for draws in waits) <= 66 * 60
    assert 55 * 60 <= medians[-1] <= 65 * 60
    assert all(len(set(draws)) > 1 for draws in waits)


@pytest.mark.contract("R17", "R19")
async def test_a_backoff_gets_the_number_of_the_failed_attempt_and_its_wait_is_exact(dsn: str, conn: Conn) -> None:
    asked: list[int] = []

    def backoff(attempt: int) -> timedelta:
        asked.append(attempt)
        return timedelta(seconds=30 * attempt)

    @step("fail", max_attempts=3, backoff=backoff)
    async def handler(ctx: Context) -> None:
        raise RuntimeError

    made = await once(dsn, conn, handler)
    assert (asked, wait_s(conn, made)) == ([1], 30.0)
    made = await once(dsn, conn, handler, attempts=1)
    assert (asked, wait_s(conn, made)) == ([1, 2], 60.0)
    await once(dsn, conn, handler, attempts=2)
    assert asked in ([1, 2], [1, 2, 3])  # nobody waits after the last


@pytest.mark.contract("R18", "FM-043")
def test_a_capped_exponential() -> None:
    backoff = retry.exponential(base=2, cap=timedelta(minutes=5))
    assert [backoff(n).total_seconds() for n in range(1, 11)] == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.contract("FM-043", "R18")
async def test_at_attempt_1100_the_wait_is_the_cap(dsn: str, conn: Conn) -> None:
    @step("fail", max_attempts=2000, backoff=retry.exponential(base=1, factor=10, cap=timedelta(hours=1)))
    async def handler(ctx: Context) -> None:
        raise RuntimeError

    made = await once(dsn, conn, handler, attempts=1099)
    assert read(conn, made, "attempts") == 1100
    assert wait_s(conn, made) == 3600.0


@pytest.mark.contract("FM-043")
async def test_no_wait_is_too_long_for_the_calendar(dsn: str, conn: Conn) -> None:
    @step("fail", backoff=lambda attempt: timedelta.max)
    async def forever(ctx: Context) -> None:
        raise RuntimeError

    @step("snooze")
    async def snooze(ctx: Context) -> None:
        raise Snooze(timedelta(days=36_000))

    for handler in (forever, snooze):
        made = await once(dsn, conn, handler)
        assert state(conn, made) == "scheduled"
        assert read(conn, made, "due_at > now() + interval '9 years'")


def _raises(attempt: int) -> timedelta:
    raise ZeroDivisionError


def _exits(attempt: int) -> timedelta:
    raise SystemExit


@pytest.mark.contract("R20")
@pytest.mark.parametrize(
    "backoff", [_raises, lambda attempt: 5, lambda attempt: None], ids=["raises", "number", "none"]
)
async def test_a_faulty_backoff_is_logged_and_the_default_takes_its_place(
    dsn: str, conn: Conn, backoff: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    @step("fail", backoff=backoff)
    async def handler(ctx: Context) -> None:
        raise RuntimeError("boom")

    made = await once(dsn, conn, handler)
    assert 2 <= wait_s(conn, made) <= 5
    assert "backoff" in caplog.text
    assert read(conn, made, "error") == "RuntimeError: boom"


@pytest.mark.contract("R20", "M7")
async def test_a_backoff_that_would_leave_the_program_loses_no_step(dsn: str, conn: Conn) -> None:
    @step("fail", backoff=_exits)
    async def handler(ctx: Context) -> None:
        raise RuntimeError("boom")

    made = await once(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind") == ("scheduled", "retryable")


@pytest.mark.contract("R20", "FM-049")
@pytest.mark.parametrize("wait", [timedelta(0), timedelta(seconds=-5)])
async def test_a_wait_of_nothing_or_less_is_no_wait(dsn: str, conn: Conn, wait: timedelta) -> None:
    attempts: list[int] = []

    @step("fail", max_attempts=3, backoff=lambda attempt: wait)
    async def handler(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        raise RuntimeError

    # No sweeper is needed for it.
    await once(dsn, conn, handler)
    assert attempts == [1, 2, 3]


@pytest.mark.contract("R21")
async def test_a_backoff_may_take_the_exception(dsn: str, conn: Conn) -> None:
    asked: list[tuple[int, str]] = []

    def backoff(attempt: int, exc: Exception) -> timedelta:
        asked.append((attempt, repr(exc)))
        return timedelta(seconds=60)

    @step("fail", backoff=backoff, timeout=0.1)
    async def handler(ctx: Context, input: bool) -> None:
        if input:
            await asyncio.sleep(10)
        raise RuntimeError("boom")

    await once(dsn, conn, handler, input=False)
    made = await once(dsn, conn, handler, input=True)
    assert asked[0] == (1, "RuntimeError('boom')")
    assert asked[1][1].startswith("TimeoutError")
    assert wait_s(conn, made) == 60.0


@pytest.mark.contract("FM-049")
async def test_short_waits_are_never_early_and_hardly_late(dsn: str, conn: Conn) -> None:
    starts: dict[str, list[float]] = {"retry": [], "snooze": []}
    loop = asyncio.get_running_loop()

    @step("short", backoff=retry.fixed(0.2))
    async def handler(ctx: Context, input: str) -> None:
        starts[input].append(loop.time())
        if len(starts[input]) == 1:
            raise RuntimeError if input == "retry" else Snooze(0.2)

    made = [factories.step(conn, "short", input=input) for input in starts]
    delayed = factories.step(conn, "noop", "scheduled", due_at="now")
    conn.execute("UPDATE cyclone_steps SET due_at = clock_timestamp() + interval '200 ms' WHERE id = %s", (delayed.id,))
    async with (
        factories.worker(dsn, handler, factories.noop(), poll_interval=0.1),
        factories.sweeper(dsn, interval=1),
    ):
        await until(lambda: {state(conn, one) for one in (*made, delayed)} == {"completed"})
    for first, second in starts.values():
        assert 0.2 <= second - first <= 1.2
    assert read(conn, delayed, "started_at - enqueued_at BETWEEN interval '200 ms' AND interval '1200 ms'")


# Snoozes


@pytest.mark.contract("R22", "R23")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_a_snooze_comes_back_after_its_delay_with_the_same_attempt(dsn: str, conn: Conn, sort: str) -> None:
    @step("snooze")
    async def async_snooze(ctx: Context) -> None:
        raise Snooze(timedelta(seconds=30))

    @step("snooze")
    def sync_snooze(ctx: SyncContext) -> None:
        raise Snooze(timedelta(seconds=30))

    made = await once(dsn, conn, async_snooze if sort == "async" else sync_snooze)
    assert read(conn, made, "state", "snoozes", "error", "error_kind") == ("scheduled", 1, None, None)
    assert read(conn, made, "due_at - now() BETWEEN interval '25 seconds' AND interval '30 seconds'")
    assert await factories.sweep_all(dsn, ahead=timedelta(seconds=20)) == 0
    assert await factories.sweep_all(dsn, ahead=timedelta(seconds=31)) == 1
    assert errors(conn, made) == []


@pytest.mark.contract("R23", "R12", "K2")
async def test_a_hundred_snoozes_spend_no_attempt(dsn: str, conn: Conn) -> None:
    seen: list[tuple[int, int, str]] = []

    @step("snooze", max_attempts=1)
    async def handler(ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.snoozes, ctx.idempotency_key))
        if ctx.snoozes < 100:
            raise Snooze(0.001)

    made = await run(dsn, conn, handler)
    assert seen == [(1, n, f"{made.id}:snooze") for n in range(101)]
    assert read(conn, made, "state", "attempts", "snoozes") == ("completed", 1, 100)


@pytest.mark.contract("R23")
async def test_after_a_snooze_a_failure_spends_the_attempt_that_was_repeated(dsn: str, conn: Conn) -> None:
    seen: list[int] = []

    @step("mixed", max_attempts=3)
    async def handler(ctx: Context) -> None:
        seen.append(ctx.attempt)
        if len(seen) in (1, 3, 4):
            raise Snooze(1)
        raise RuntimeError

    made = await run(dsn, conn, handler)
    assert seen == [1, 1, 2, 2, 2, 3]
    assert read(conn, made, "state", "attempts", "snoozes") == ("discarded", 3, 3)


@pytest.mark.contract("R24", "R25")
@pytest.mark.parametrize("delay", [0, timedelta(0), -1, timedelta(seconds=-1), "soon", None, float("nan")])
async def test_a_snooze_that_is_no_delay_is_a_permanent_failure(dsn: str, conn: Conn, delay: Any) -> None:
    @step("snooze")
    async def handler(ctx: Context) -> None:
        raise Snooze(delay)

    made = await once(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind", "snoozes", "attempts") == ("discarded", "permanent", 0, 1)
    assert read(conn, made, "error")


@pytest.mark.contract("R29")
async def test_more_snoozes_than_declared_are_a_permanent_failure(dsn: str, conn: Conn) -> None:
    calls = 0

    @step("snooze", max_snoozes=3)
    async def handler(ctx: Context) -> None:
        nonlocal calls
        calls += 1
        raise Snooze(1)

    made = await run(dsn, conn, handler)
    assert calls == 4
    assert read(conn, made, "state", "error_kind", "snoozes") == ("discarded", "permanent", 3)
    assert "max_snoozes" in read(conn, made, "error")


# Which errors


@pytest.mark.contract("R31", "R48")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_a_permanent_error_is_not_retried(dsn: str, conn: Conn, sort: str) -> None:
    @step("fail")
    async def async_fail(ctx: Context) -> None:
        raise Permanent("email is required") from KeyError("email")

    @step("fail")
    def sync_fail(ctx: SyncContext) -> None:
        raise Permanent("email is required") from KeyError("email")

    made = await once(dsn, conn, async_fail if sort == "async" else sync_fail)
    assert read(conn, made, "state", "error_kind", "error", "attempts", "max_attempts") == (
        "discarded", "permanent", "email is required", 1, 5,
    )  # fmt: skip
    ((trace,),) = conn.execute("SELECT traceback FROM cyclone_errors WHERE step = %s", (made.id,)).fetchall()
    assert "KeyError: 'email'" in trace


class NotFound(LookupError):
    pass


@pytest.mark.contract("R32")
@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (LookupError("no"), ("discarded", "permanent")),
        (NotFound("no"), ("scheduled", "retryable")),  # retry_on makes an exception of permanent_on
        (ValueError("no"), ("scheduled", "retryable")),
        (Permanent("no"), ("discarded", "permanent")),
        (Snooze(60), ("scheduled", None)),
        (RetryAfter(60), ("scheduled", "retryable")),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_classes_of_exceptions_can_be_mapped(
    dsn: str, conn: Conn, raised: Exception, becomes: tuple[str, str | None]
) -> None:
    @step("mapped", permanent_on=(LookupError, Snooze, RetryAfter), retry_on=(NotFound, Permanent))
    async def handler(ctx: Context) -> None:
        raise raised

    made = await once(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind") == becomes


@pytest.mark.contract("R33", "FM-045", "FM-044")
async def test_retry_after_is_bound_by_the_limit(dsn: str, conn: Conn) -> None:
    seen: list[int] = []

    @step("later", max_attempts=3)
    async def handler(ctx: Context) -> None:
        seen.append(ctx.attempt)
        raise RetryAfter(timedelta(seconds=60))

    made = await run(dsn, conn, handler)
    assert seen == [1, 2, 3]
    assert read(conn, made, "state", "error_kind", "attempts") == ("discarded", "retryable", 3)
    made = await once(dsn, conn, handler)
    assert wait_s(conn, made) == 60.0


@pytest.mark.contract("R33")
@pytest.mark.parametrize("delay", ["soon", None, float("inf")])
async def test_retry_after_without_a_delay_is_a_permanent_failure(dsn: str, conn: Conn, delay: Any) -> None:
    @step("later")
    async def handler(ctx: Context) -> None:
        raise RetryAfter(delay)

    made = await once(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind") == ("discarded", "permanent")


@pytest.mark.contract("R7", "E7", "FM-007", "FM-044")
async def test_a_lost_worker_in_the_last_attempt_repeats_it(dsn: str, conn: Conn) -> None:
    seen: list[tuple[int, bool, int]] = []

    @step("last", max_attempts=2)
    async def handler(ctx: Context) -> int:
        seen.append((ctx.attempt, ctx.is_last_attempt, ctx.reclaims))
        return ctx.attempt

    made = factories.step(conn, "last", "running", life="ended", attempts=2, max_attempts=2)
    async with factories.worker(dsn, handler):
        await factories.sweep_all(dsn)
        await until(lambda: state(conn, made) == "completed")
    assert seen == [(2, True, 1)]
    assert read(conn, made, "attempts", "reclaims", "output") == (2, 1, 2)
