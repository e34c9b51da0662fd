"""What a handler keeps: answers of outside calls, checkpoints, and completion in a transaction of its own."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import factories
import msgspec
import psycopg
import pytest
from factories import errors, read, until

from cyclone.context import Context, SyncContext
from cyclone.errors import (
    CompletionTxError,
    InvalidInputError,
    InvalidOptionError,
    LeaseLostError,
    OutcomeUnknown,
    TransactionRequiredError,
)
from cyclone.registry import Step, action, step
from cyclone.retry import fixed

Conn = psycopg.Connection[Any]

SOON = fixed(timedelta(milliseconds=1))
NEVER = fixed(timedelta(days=300))


class Answer(msgspec.Struct):
    id: str
    cents: int


async def run(dsn: str, conn: Conn, handler: Step[Any, Any], *, state: str = "completed", **columns: Any) -> Any:
    """Runs one step of a handler until it is in a state."""
    made = factories.step(conn, handler.name, **columns)
    async with factories.sweeper(dsn), factories.worker(dsn, handler):
        await until(lambda: read(conn, made, "state") == state)
    return made


# Answers of outside calls


@pytest.mark.contract("K10")
async def test_an_answer_is_stored_and_a_later_execution_does_not_call_again(dsn: str, conn: Conn) -> None:
    calls: list[str] = []
    answers: list[Answer] = []

    async def charge() -> Answer:
        calls.append("charge")
        return Answer("ch_1", 42)

    @action("pay", backoff=SOON)
    async def pay(ctx: Context) -> None:
        answers.append(await ctx.once("charge", charge))
        if ctx.attempt < 3:
            raise RuntimeError("after the call")

    await run(dsn, conn, pay)
    assert calls == ["charge"]
    assert answers == [Answer("ch_1", 42)] * 3  # of the annotated type, stored or not


@pytest.mark.contract("K10")
async def test_a_sync_handler_has_the_same(dsn: str, conn: Conn) -> None:
    calls: list[str] = []
    answers: list[Any] = []

    @action("pay", backoff=SOON)
    def pay(ctx: SyncContext) -> None:
        answers.append(ctx.once("charge", lambda: calls.append("charge") or {"id": "ch_1"}))
        ctx.checkpoint("place", ctx.attempt)
        if ctx.attempt < 2:
            raise RuntimeError("after the call")

    made = await run(dsn, conn, pay)
    assert (calls, answers) == (["charge"], [{"id": "ch_1"}] * 2)
    assert factories.count(conn, "cyclone_records WHERE step = %s", made.id) == 2


@pytest.mark.contract("K10")
@pytest.mark.parametrize(("on_unknown", "called"), [("raise", 1), ("call", 2)])
async def test_a_call_that_was_begun_and_left_no_answer(dsn: str, conn: Conn, on_unknown: Any, called: int) -> None:
    calls: list[int] = []

    async def charge() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionResetError("the answer was lost")
        return "ch_1"

    @action("pay", max_attempts=2, backoff=SOON)
    async def pay(ctx: Context) -> None:
        await ctx.once("charge", charge, on_unknown=on_unknown)

    made = await run(dsn, conn, pay, state="discarded" if on_unknown == "raise" else "completed")
    assert len(calls) == called
    if on_unknown == "raise":
        assert OutcomeUnknown.__name__ in errors(conn, made)[-1][2]


@pytest.mark.contract("K10", "E9")
async def test_a_worker_that_lost_its_lease_begins_no_call_and_stores_no_answer(dsn: str, conn: Conn) -> None:
    calls: list[int] = []
    seen: list[BaseException] = []
    lost = asyncio.Event()
    entered = asyncio.Event()

    async def charge() -> str:
        calls.append(1)
        return "ch_1"

    @action("pay")
    async def pay(ctx: Context) -> None:
        entered.set()
        await lost.wait()
        for attempt in (ctx.once("charge", charge), ctx.checkpoint("place", 1)):
            try:
                await attempt
            except LeaseLostError as exc:
                seen.append(exc)

    made = factories.step(conn, "pay")
    async with factories.worker(dsn, pay):
        await entered.wait()
        factories.cancel(conn, made)
        lost.set()
        await until(lambda: len(seen) == 2)
    assert calls == []
    assert factories.count(conn, "cyclone_records") == 0


@pytest.mark.contract("K10")
async def test_wrong_names_options_and_values_are_refused(dsn: str, conn: Conn) -> None:
    seen: list[type[BaseException]] = []

    async def answer() -> Any:
        return object()

    @action("pay")
    async def pay(ctx: Context) -> None:
        for attempt in (
            lambda: ctx.once("", answer),
            lambda: ctx.once("a\0b", answer),
            lambda: ctx.once("a", answer, on_unknown="guess"),  # type: ignore[arg-type]
            lambda: ctx.once("a", answer),
            lambda: ctx.checkpoint("a", float("nan")),
        ):
            try:
                await attempt()
            except (InvalidOptionError, InvalidInputError) as exc:
                seen.append(type(exc))

    await run(dsn, conn, pay)
    assert len(seen) == 5


@pytest.mark.contract("K10")
async def test_a_checkpoint_survives_retries(dsn: str, conn: Conn) -> None:
    seen: list[Any] = []

    @action("copy", backoff=SOON)
    async def copy(ctx: Context) -> None:
        seen.append(await ctx.checkpoint("place"))
        await ctx.checkpoint("place", {"row": ctx.attempt})
        if ctx.attempt < 3:
            raise RuntimeError("again")

    await run(dsn, conn, copy)
    assert seen == [None, {"row": 1}, {"row": 2}]


# Completion in a transaction of the handler's own


@pytest.fixture
def ledger(conn: Conn) -> None:
    factories.ledger(conn)


@pytest.mark.contract("X11")
async def test_a_handlers_own_transaction_completes_the_step(dsn: str, conn: Conn, ledger: None) -> None:
    @step("own")
    async def own(ctx: Context) -> dict[str, int]:
        async with await psycopg.AsyncConnection.connect(dsn) as mine:
            await mine.execute("INSERT INTO ledger (run_id, node) VALUES (%s, %s)", (ctx.run_id, ctx.node))
            await ctx.complete_in(mine, {"a": 1})
        return {"ignored": 1}

    made = await run(dsn, conn, own)
    assert read(conn, made, "output", "attempts", "error") == ({"a": 1}, 1, None)
    assert factories.count(conn, "ledger") == 1
    await until(lambda: not factories.count(conn, "cyclone_claims"))


@pytest.mark.contract("X11")
async def test_rolled_back_the_attempt_has_failed(dsn: str, conn: Conn, ledger: None) -> None:
    @step("own", backoff=NEVER)
    def own(ctx: SyncContext) -> int:
        with psycopg.connect(dsn) as mine:
            mine.execute("INSERT INTO ledger (run_id, node) VALUES (%s, %s)", (ctx.run_id, ctx.node))
            ctx.complete_in(mine, 1)
            mine.rollback()
        return 1

    made = await run(dsn, conn, own, state="scheduled")
    assert read(conn, made, "output", "attempts", "error_kind") == (None, 1, "retryable")
    assert factories.count(conn, "ledger") == 0


@pytest.mark.contract("X11")
async def test_what_is_raised_after_the_commit_changes_nothing(dsn: str, conn: Conn) -> None:
    @action("own")
    async def own(ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as mine:
            await ctx.complete_in(mine)
        raise RuntimeError("too late")

    made = await run(dsn, conn, own)
    await until(lambda: not factories.count(conn, "cyclone_claims"))
    assert read(conn, made, "state", "error") == ("completed", None)
    assert errors(conn, made) == []


@pytest.mark.contract("X11")
async def test_a_transaction_still_open_when_the_handler_returns_decides_when_it_ends(dsn: str, conn: Conn) -> None:
    returned = asyncio.Event()
    mine = await psycopg.AsyncConnection.connect(dsn)

    @action("own")
    async def own(ctx: Context) -> None:
        await ctx.complete_in(mine)
        returned.set()

    made = factories.step(conn, "own")
    async with factories.worker(dsn, own):
        await returned.wait()
        assert read(conn, made, "state") == "running"
        await mine.commit()
        await until(lambda: not factories.count(conn, "cyclone_claims"))
    await mine.close()
    assert read(conn, made, "state", "attempts") == ("completed", 1)


@pytest.mark.contract("X11", "E9")
async def test_a_lost_lease_raises_and_the_handlers_transaction_rolls_back(dsn: str, conn: Conn, ledger: None) -> None:
    entered, lost = asyncio.Event(), asyncio.Event()
    seen: list[BaseException] = []

    @action("own")
    async def own(ctx: Context) -> None:
        entered.set()
        await lost.wait()
        try:
            async with await psycopg.AsyncConnection.connect(dsn) as mine:
                await mine.execute("INSERT INTO ledger (run_id, node) VALUES (%s, %s)", (ctx.run_id, ctx.node))
                await ctx.complete_in(mine)
        except LeaseLostError as exc:
            seen.append(exc)
            raise

    made = factories.step(conn, "own")
    async with factories.worker(dsn, own):
        await entered.wait()
        factories.cancel(conn, made)
        lost.set()
        await until(lambda: seen)
    assert read(conn, made, "state") == "cancelled"
    assert factories.count(conn, "ledger") == 0


@pytest.mark.contract("X11")
async def test_what_cannot_complete_a_step_is_refused(dsn: str, conn: Conn) -> None:
    seen: list[type[BaseException]] = []

    @action("own")
    async def own(ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as idle:
            for wrong in (lambda: ctx.complete_in(idle), lambda: ctx.complete_in("connection")):  # type: ignore[arg-type]
                try:
                    await wrong()
                except (TypeError, TransactionRequiredError) as exc:
                    seen.append(type(exc))
            await ctx.completion_tx()
            try:
                async with idle.transaction():
                    await ctx.complete_in(idle)
            except CompletionTxError as exc:
                seen.append(type(exc))

    await run(dsn, conn, own)
    assert seen == [TransactionRequiredError, TypeError, CompletionTxError]
