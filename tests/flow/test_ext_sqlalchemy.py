"""Sessions of SQLAlchemy on the completion transaction of a handler."""

from __future__ import annotations

import contextlib
from typing import Any

import factories
import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import cyclone
from cyclone import CompletionTxError, Context, SyncContext
from cyclone.ext import sqlalchemy as bridge

Conn = psycopg.Connection[Any]


class Base(DeclarativeBase): ...


class Ledger(Base):
    __tablename__ = "ledger"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str | None]
    node: Mapped[str | None]
    note: Mapped[str | None]


@cyclone.step("note")
async def note(ctx: Context, text: str) -> str:
    return text


@pytest.fixture(autouse=True)
def ledger(conn: Conn) -> None:
    factories.ledger(conn)


def inputs(conn: Conn) -> list[str]:
    return [row[0] for row in conn.execute("SELECT input FROM cyclone_steps WHERE kind = 'note' ORDER BY id")]


def notes(conn: Conn) -> list[str]:
    return [row[0] for row in conn.execute("SELECT note FROM ledger ORDER BY id")]


@pytest.mark.contract("X1")
async def test_what_a_session_writes_commits_with_the_step(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="sqlalchemy")  # where its handlers of notices write

    @cyclone.action("async")
    async def by_async(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        tx.connection.row_factory = dict_row  # for the handler's own statements
        before = await (await tx.execute(factories.SESSION_STATE)).fetchone(), factories.driver_state(tx.connection)
        async with bridge.bind(ctx) as orm:
            orm.add(Ledger(run_id=ctx.run_id, node=ctx.node, note="flushed"))
            await orm.flush()
            orm.add(Ledger(note="committed"))
            await orm.commit()
            orm.add(Ledger(note="rolled back"))
            await orm.flush()
            await orm.rollback()
            assert await orm.scalar(sa.select(sa.func.count(Ledger.id))) == 2
            orm.add(Ledger(note="left to the end of the block"))
        with contextlib.suppress(ZeroDivisionError):
            async with bridge.bind(ctx, expire_on_commit=False) as orm:
                orm.add(Ledger(note="in a block that failed"))
                await orm.flush()
                raise ZeroDivisionError
        await tx.execute("INSERT INTO ledger (note) VALUES ('by hand')")
        await tx.execute("DO $$ BEGIN RAISE NOTICE 'heard'; END $$")
        after = await (await tx.execute(factories.SESSION_STATE)).fetchone(), factories.driver_state(tx.connection)
        assert after == before

    @cyclone.action("sync")
    def by_sync(ctx: SyncContext) -> None:
        tx = ctx.completion_tx()
        tx.connection.row_factory = dict_row
        before = tx.execute(factories.SESSION_STATE).fetchone(), factories.driver_state(tx.connection)
        with bridge.bind_sync(ctx) as orm:
            orm.add(Ledger(run_id=ctx.run_id, node=ctx.node, note="flushed"))
            orm.flush()
            orm.add(Ledger(note="committed"))
            orm.commit()
            orm.add(Ledger(note="rolled back"))
            orm.flush()
            orm.rollback()
            assert orm.scalar(sa.select(sa.func.count(Ledger.id))) == 2
            orm.add(Ledger(note="left to the end of the block"))
        with contextlib.suppress(ZeroDivisionError), bridge.bind_sync(ctx, expire_on_commit=False) as orm:
            orm.add(Ledger(note="in a block that failed"))
            orm.flush()
            raise ZeroDivisionError
        tx.execute("INSERT INTO ledger (note) VALUES ('by hand')")
        tx.execute("DO $$ BEGIN RAISE NOTICE 'heard'; END $$")
        after = tx.execute(factories.SESSION_STATE).fetchone(), factories.driver_state(tx.connection)
        assert after == before

    # SQLAlchemy looks around on the first connection of an engine.
    bridge._engine.cache_clear()
    bridge._async_engine.cache_clear()
    for handler in (by_async, by_sync, by_async, by_sync):
        made = await factories.alone(dsn, conn, handler)
        assert factories.read(conn, made, "state", "error") == ("completed", None)
        assert notes(conn) == ["flushed", "committed", "left to the end of the block", "by hand"]
        conn.execute("DELETE FROM ledger")
    assert "heard" not in caplog.text


@pytest.mark.contract("X1")
async def test_what_a_session_wrote_is_gone_with_a_failed_attempt(dsn: str, conn: Conn) -> None:
    @cyclone.action("async")
    async def by_async(ctx: Context) -> None:
        async with bridge.bind(ctx) as orm:
            orm.add(Ledger(note="lost"))
            await orm.commit()
        raise ZeroDivisionError

    @cyclone.action("sync")
    def by_sync(ctx: SyncContext) -> None:
        with bridge.bind_sync(ctx) as orm:
            orm.add(Ledger(note="lost"))
            orm.commit()
            raise ZeroDivisionError

    for handler in (by_async, by_sync):
        assert factories.state(conn, await factories.alone(dsn, conn, handler, max_attempts=1)) == "discarded"
    assert notes(conn) == []


@pytest.mark.contract("X7")
@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
async def test_no_session_can_end_the_completion_transaction(dsn: str, conn: Conn, end: str) -> None:
    seen: list[BaseException] = []

    @cyclone.action("async")
    async def by_async(ctx: Context) -> None:
        try:
            async with bridge.bind(ctx) as orm:
                orm.add(Ledger(note="lost"))
                await orm.flush()
                await getattr(await orm.connection(), end)()
        except BaseException as exc:
            seen.append(exc)
            raise

    @cyclone.action("sync")
    def by_sync(ctx: SyncContext) -> None:
        try:
            with bridge.bind_sync(ctx) as orm:
                orm.add(Ledger(note="lost"))
                orm.flush()
                getattr(orm.connection(), end)()
        except BaseException as exc:
            seen.append(exc)
            raise

    for handler in (by_async, by_sync):
        assert factories.state(conn, await factories.alone(dsn, conn, handler, max_attempts=1)) == "discarded"
    assert [type(exc) for exc in seen] == [CompletionTxError] * 2
    assert notes(conn) == []


@pytest.mark.contract("X1", "X10")
async def test_a_client_may_enqueue_in_such_a_session(dsn: str, conn: Conn) -> None:
    @cyclone.step("async")
    async def by_async(ctx: Context, fail: bool) -> None:
        async with bridge.bind(ctx) as orm:
            await note.enqueue_tx(cyclone.Client(dsn), orm, "async")
        if fail:
            raise ZeroDivisionError

    @cyclone.step("sync")
    def by_sync(ctx: SyncContext, fail: bool) -> None:
        with bridge.bind_sync(ctx) as orm:
            note.enqueue_tx(cyclone.SyncClient(dsn), orm, "sync")
            if fail:
                raise ZeroDivisionError

    for fail in (False, True):
        for handler in (by_async, by_sync):
            await factories.alone(dsn, conn, handler, fail, max_attempts=1)
    assert inputs(conn) == ["async", "sync"]


async def test_a_cancelled_statement_of_a_session_fails_the_attempt_and_nothing_else(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    @cyclone.action("slow")
    async def slow(ctx: Context) -> None:
        async with bridge.bind(ctx) as orm:
            orm.add(Ledger(note="lost"))
            await orm.execute(sa.text("SELECT pg_sleep(30)"))

    made = await factories.alone(dsn, conn, slow, max_attempts=1, timeout_s=0.3)
    assert factories.read(conn, made, "state", "error_kind") == ("discarded", "timeout")
    assert notes(conn) == []
    assert not [record for record in caplog.records if record.name.startswith("sqlalchemy")]
