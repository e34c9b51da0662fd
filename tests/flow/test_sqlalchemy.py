"""Work that is submitted in a transaction of SQLAlchemy's, and steps that are completed in one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import factories
import psycopg
import pytest
import sqlalchemy as sa
from factories import until
from psycopg import conninfo
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

import cyclone
from cyclone import (
    Client,
    Context,
    DuplicateError,
    Graph,
    NotFoundError,
    SubmitConflictError,
    SyncClient,
    SyncContext,
    TransactionRequiredError,
)

Conn = psycopg.Connection[Any]


class Base(orm.DeclarativeBase): ...


class Row(Base):
    __tablename__ = "business"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    note: orm.Mapped[str]


@cyclone.step("mail")
async def mail(ctx: Context, to: str) -> str:
    return to


@cyclone.workflow("mails")
def mails(g: Graph[str]) -> cyclone.Node[str]:
    return g.run(mail, g.input)


def url(dsn: str, driver: str = "psycopg") -> sa.URL:
    parts = conninfo.conninfo_to_dict(dsn)
    return sa.URL.create(
        f"postgresql+{driver}",
        str(parts["user"]),
        None,
        str(parts["host"]),
        int(str(parts["port"])),
        str(parts["dbname"]),
    )


@pytest.fixture
def engine(dsn: str, conn: Conn) -> Iterator[sa.Engine]:
    conn.execute("CREATE TABLE business (id serial PRIMARY KEY, note text NOT NULL)")
    found = sa.create_engine(url(dsn))
    yield found
    found.dispose()


@contextlib.asynccontextmanager
async def async_engine(dsn: str) -> AsyncIterator[sa_async.AsyncEngine]:
    found = sa_async.create_async_engine(url(dsn))
    try:
        yield found
    finally:
        await found.dispose()


def counts(conn: Conn) -> tuple[int, int, int]:
    return tuple(factories.count(conn, name) for name in ("business", "cyclone_steps", "cyclone_runs"))  # type: ignore[return-value]


def work(client: SyncClient, tx: Any) -> None:
    """Each of the forms; whatever is refused leaves the transaction as it was."""
    mail.enqueue_tx(client, tx, "a", unique="k")
    with pytest.raises(DuplicateError):
        mail.enqueue_tx(client, tx, "a", unique="k")
    mail.enqueue_many_tx(client, tx, ["b", "c"])
    mails.submit_tx(client, tx, "d")
    run, created = mails.submit_once_tx(client, tx, "key", "e")
    assert created
    with pytest.raises(SubmitConflictError):
        mails.submit_once_tx(client, tx, "key", "f")
    with pytest.raises(NotFoundError):
        client.retry_tx(tx, "1", "nothing")
    assert client.cancel_tx(tx, run.id)


async def work_async(client: Client, tx: Any) -> None:
    await mail.enqueue_tx(client, tx, "a", unique="k")
    with pytest.raises(DuplicateError):
        await mail.enqueue_tx(client, tx, "a", unique="k")
    await mail.enqueue_many_tx(client, tx, ["b", "c"])
    await mails.submit_tx(client, tx, "d")
    run, created = await mails.submit_once_tx(client, tx, "key", "e")
    assert created
    with pytest.raises(SubmitConflictError):
        await mails.submit_once_tx(client, tx, "key", "f")
    with pytest.raises(NotFoundError):
        await client.retry_tx(tx, "1", "nothing")
    assert await client.cancel_tx(tx, run.id)


@pytest.mark.contract("I3", "S3", "U10", "U11", "U14")
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("sort", ["connection", "session", "scoped"])
def test_sync(dsn: str, conn: Conn, engine: sa.Engine, sort: str, commit: bool) -> None:
    with SyncClient(dsn) as client, contextlib.ExitStack() as stack:
        tx: Any
        if sort == "connection":
            tx = stack.enter_context(engine.connect())
            tx.execute(sa.insert(Row).values(note="x"))
        else:
            tx = orm.Session(engine) if sort == "session" else orm.scoped_session(orm.sessionmaker(engine))
            stack.callback(tx.close)
            tx.add(Row(note="x"))
        work(client, tx)
        assert counts(conn) == (0, 0, 0)
        tx.commit() if commit else tx.rollback()
    assert counts(conn) == ((1, 5, 2) if commit else (0, 0, 0))


@pytest.mark.contract("I3", "S3", "U10", "U11", "U14")
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("sort", ["connection", "session"])
async def test_async(dsn: str, conn: Conn, engine: sa.Engine, sort: str, commit: bool) -> None:
    async with Client(dsn) as client, async_engine(dsn) as own, contextlib.AsyncExitStack() as stack:
        tx: Any
        if sort == "connection":
            tx = await stack.enter_async_context(own.connect())
            await tx.execute(sa.insert(Row).values(note="x"))
        else:
            tx = await stack.enter_async_context(sa_async.AsyncSession(own))
            tx.add(Row(note="x"))
        await work_async(client, tx)
        assert counts(conn) == (0, 0, 0)
        await (tx.commit() if commit else tx.rollback())
    assert counts(conn) == ((1, 5, 2) if commit else (0, 0, 0))


@pytest.mark.contract("I4")
def test_the_connection_is_as_it_was(dsn: str, engine: sa.Engine) -> None:
    def looks(driver: Any) -> list[object]:
        return [
            driver.autocommit, driver.row_factory, driver.cursor_factory, driver.prepare_threshold,
            driver.isolation_level,
            driver.info.transaction_status,
        ]  # fmt: skip

    with SyncClient(dsn) as client, engine.begin() as tx:
        query = sa.text("SELECT name, setting FROM pg_settings WHERE name !~ '^plpgsql' ORDER BY 1")
        settings = tx.execute(query).all()
        driver = tx.connection.driver_connection
        before = looks(driver)
        work(client, tx)
        assert looks(driver) == before
        assert tx.execute(query).all() == settings
        assert tx.execute(sa.text("SELECT count(*) FROM pg_prepared_statements")).scalar() == 0


@pytest.mark.contract("I3", "U41")
async def test_what_is_in_no_transaction_is_refused(dsn: str, conn: Conn, engine: sa.Engine) -> None:
    with SyncClient(dsn) as client:
        with engine.connect() as idle, pytest.raises(TransactionRequiredError, match="engine.begin"):
            mail.enqueue_tx(client, idle, "a")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as auto, auto.begin():
            with pytest.raises(TransactionRequiredError):
                mail.enqueue_tx(client, auto, "a")
        with orm.Session(engine) as session:  # a session begins by itself
            mail.enqueue_tx(client, session, "a")
            session.commit()
    async with Client(dsn) as client_too, async_engine(dsn) as own:
        async with own.connect() as idle_too:
            with pytest.raises(TransactionRequiredError, match="engine.begin"):
                await mail.enqueue_tx(client_too, idle_too, "a")
    assert counts(conn) == (0, 1, 0)


@pytest.mark.contract("I3")
async def test_what_is_none_of_them_is_refused(dsn: str, engine: sa.Engine) -> None:
    sqlite = sa.create_engine("sqlite://")
    wrong: list[Callable[[], Any]] = [lambda: engine, lambda: "x", lambda: engine.raw_connection()]
    with SyncClient(dsn) as client:
        for make in wrong:
            with pytest.raises(TypeError, match=r"psycopg.Connection.*SQLAlchemy.*Django"):
                mail.enqueue_tx(client, make(), "a")
        with sqlite.begin() as tx, pytest.raises(TypeError, match="over sqlite3.Connection"):
            mail.enqueue_tx(client, tx, "a")
    async with Client(dsn) as client_too, async_engine(dsn) as own:
        with engine.begin() as tx, pytest.raises(TypeError, match="AsyncSession"):
            await mail.enqueue_tx(client_too, tx, "a")  # type: ignore[call-overload]
        async with own.begin() as tx_too:
            with SyncClient(dsn) as client, pytest.raises(TypeError, match="Session"):
                mail.enqueue_tx(client, tx_too, "a")  # type: ignore[call-overload]
    sqlite.dispose()


@pytest.mark.contract("X11")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_handler_completes_its_step_in_its_own_transaction(
    dsn: str, conn: Conn, engine: sa.Engine, commit: bool
) -> None:
    @cyclone.step("sync", max_attempts=1)
    def sync(ctx: SyncContext) -> str:
        with orm.Session(engine) as session:
            session.add(Row(note=ctx.idempotency_key))
            ctx.complete_in(session, "done")
            session.commit() if commit else session.rollback()
        return "ignored"

    async with async_engine(dsn) as own:

        @cyclone.step("async", max_attempts=1)
        async def own_tx(ctx: Context) -> str:
            async with sa_async.AsyncSession(own) as session:
                session.add(Row(note=ctx.idempotency_key))
                await ctx.complete_in(session, "done")
                await (session.commit() if commit else session.rollback())
            return "ignored"

        async with Client(dsn) as client, factories.worker(dsn, sync, own_tx):
            for step in (sync, own_tx):
                handle = await step.enqueue(client)
                await handle.wait(10)
                found = await client.get_step(handle.run_id, handle.node)
                assert (found.state.value, found.output) == (("completed", "done") if commit else ("discarded", None))
    assert factories.count(conn, "business") == (2 if commit else 0)


@pytest.mark.contract("I3", "U41")
async def test_a_session_that_begins_nothing_by_itself(dsn: str, conn: Conn, engine: sa.Engine) -> None:
    with orm.Session(engine, autobegin=False) as session:
        with pytest.raises(TransactionRequiredError, match="begin"):
            mail.enqueue_tx(SyncClient(dsn), session, "a")
        assert not session.in_transaction()
        with session.begin():
            mail.enqueue_tx(SyncClient(dsn), session, "a")
    async with async_engine(dsn) as own, sa_async.AsyncSession(own, autobegin=False) as session_too:
        with pytest.raises(TransactionRequiredError, match="begin"):
            await mail.enqueue_tx(Client(dsn), session_too, "b")
        scoped = sa_async.async_scoped_session(lambda: session_too, scopefunc=lambda: 1)  # type: ignore[arg-type]
        async with session_too.begin():
            session_too.add(Row(note="x"))
            await mail.enqueue_tx(Client(dsn), scoped, "b")
            assert session_too.new  # nothing of it was flushed
    assert counts(conn) == (1, 2, 0)


@pytest.mark.contract("I4")
@pytest.mark.parametrize("level", [None, "SERIALIZABLE"])
def test_nothing_is_left_on_the_connection(dsn: str, engine: sa.Engine, conn: Conn, level: Any) -> None:
    with engine.execution_options(**({"isolation_level": level} if level else {})).connect() as tx:
        raw: Any = tx.connection.driver_connection
        tx.execute(sa.text("SET statement_timeout = '12345ms'"))
        tx.execute(sa.text("SET search_path = pg_catalog"))
        with tx.begin_nested() as savepoint:
            before = tx.exec_driver_sql(factories.SESSION_STATE).one(), factories.driver_state(raw)
            for count in (1, 3):
                mail.enqueue_many_tx(SyncClient(dsn), tx, ["a"] * count)
            assert (tx.exec_driver_sql(factories.SESSION_STATE).one(), factories.driver_state(raw)) == before
            assert tx.get_nested_transaction() is savepoint and savepoint.is_active
            with pytest.raises(sa.exc.OperationalError, match="savepoint"):
                with tx.begin_nested():
                    tx.exec_driver_sql("ROLLBACK TO SAVEPOINT cyclone")
        tx.commit()
        # And so it is after the commit.
        assert (tx.exec_driver_sql(factories.SESSION_STATE).one(), factories.driver_state(raw)) == before
    assert factories.count(conn, "cyclone_steps") == 4


@pytest.mark.contract("I4")
async def test_nothing_is_left_on_an_async_session(dsn: str, engine: sa.Engine, conn: Conn) -> None:
    async with async_engine(dsn) as own, sa_async.AsyncSession(own) as session:

        async def state() -> Any:
            tx = await session.connection()
            raw: Any = (await tx.get_raw_connection()).driver_connection
            return (await tx.exec_driver_sql(factories.SESSION_STATE)).one(), factories.driver_state(raw)

        await session.execute(sa.text("SET statement_timeout = '12345ms'"))
        before = await state()
        for count in (1, 3):
            await mail.enqueue_many_tx(Client(dsn), session, ["a"] * count)
        assert await state() == before
        await session.commit()
        assert await state() == before
    assert factories.count(conn, "cyclone_steps") == 4


@pytest.mark.contract("I3", "I4")
async def test_a_cancelled_call_leaves_a_session_that_can_go_on(dsn: str, engine: sa.Engine, conn: Conn) -> None:
    """Cancelled while its statement waits for a lock: the session is rolled back as after any error, and used again."""
    made, client = factories.step(conn, state="discarded"), Client(dsn)
    async with async_engine(dsn) as own, sa_async.AsyncSession(own) as session:
        with psycopg.connect(dsn) as other:
            other.execute("SELECT FROM cyclone_steps WHERE id = %s FOR UPDATE", (made.id,))
            session.add(Row(note="lost"))
            await session.flush()
            waiting = asyncio.create_task(client.retry_tx(session, made.run_id, "noop"))
            blocked = "pg_stat_activity WHERE wait_event_type = 'Lock'"
            await until(lambda: factories.count(conn, blocked))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: not factories.count(conn, blocked))
        await session.rollback()
        await client.retry_tx(session, made.run_id, "noop")
        await mail.enqueue_tx(client, session, "kept")
        await session.commit()
    assert factories.state(conn, made) == "available"
    assert (factories.count(conn, "business"), factories.count(conn, "cyclone_steps")) == (0, 2)


async def test_many_sessions_at_once(dsn: str, engine: sa.Engine, conn: Conn) -> None:
    client = Client(dsn)
    async with async_engine(dsn) as own:

        async def one(number: int) -> None:
            async with sa_async.AsyncSession(own) as session, session.begin():
                session.add(Row(note=str(number)))
                await session.flush()
                await mail.enqueue_tx(client, session, str(number))

        await asyncio.gather(*map(one, range(20)))
    assert counts(conn) == (20, 20, 0)
