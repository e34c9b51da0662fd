"""SQLAlchemy on the completion transaction: sessions whose writes commit with the step, or not at all.

One engine per process, without a pool, hands SQLAlchemy the connection that a handler was given. SQLAlchemy takes such
a connection for its own: it would begin, end and close it, and look around on it the first time. What it gets is
therefore a guest's view, on which statements pass and nothing can end the transaction. A session works within a
savepoint of its own; so a failed block takes back what it wrote and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from cyclone.context import Context, SyncContext


@asynccontextmanager
async def bind(ctx: Context, **options: Any) -> AsyncGenerator[AsyncSession]:
    """An AsyncSession on the completion transaction of a handler; `options` are those of AsyncSession.

    What it writes commits together with the step. At the end of the block it is flushed; a block that raises is rolled
    back alone. Its `commit()` and `rollback()` end a savepoint and the next statement begins another; only Cyclone ends
    the transaction, so `commit()` on its connection raises CompletionTxError.
    """
    guest = _AsyncGuest((await ctx.completion_tx()).connection)
    token = _guest.set(guest)
    try:
        conn = await _async_engine().connect()
    finally:
        _guest.reset(token)
    async with aclosing(conn), conn.begin():
        guest.watched = True
        try:
            async with AsyncSession(conn, join_transaction_mode="create_savepoint", **options) as session:
                yield session
                await session.commit()
        finally:
            guest.watched = False


@contextmanager
def bind_sync(ctx: SyncContext, **options: Any) -> Generator[Session]:
    """As `bind`, for handlers in threads: a Session."""
    guest = _SyncGuest(ctx.completion_tx().connection)
    token = _guest.set(guest)
    try:
        conn = _engine().connect()
    finally:
        _guest.reset(token)
    with conn, conn.begin():
        guest.watched = True
        try:
            with Session(conn, join_transaction_mode="create_savepoint", **options) as session:
                yield session
                session.commit()
        finally:
            guest.watched = False


class _Guest:
    """A connection as SQLAlchemy sees it."""

    __slots__ = ("__cyclone_connection__", "watched")

    def __init__(self, conn: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> None:
        self.__cyclone_connection__: Any = conn
        self.watched = False
        """Whether the handler has it. Only then is it a fault to end it; what SQLAlchemy does before and after on its
        own account is passed over."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__cyclone_connection__, name)

    def cursor(self, name: str = "") -> Any:
        # The handler may have chosen other rows for itself.
        return self.__cyclone_connection__.cursor(name, row_factory=tuple_row)

    def add_notice_handler(self, handler: object) -> None:
        """Passed over: the connection outlives this guest, and would gather a handler from each."""


class _AsyncGuest(_Guest):
    __slots__ = ()

    async def commit(self) -> None:
        if self.watched:
            await self.__cyclone_connection__.commit()  # which refuses

    async def rollback(self) -> None:
        if self.watched:
            await self.__cyclone_connection__.rollback()

    async def close(self) -> None:
        """Passed over: SQLAlchemy closes what it gives up, as after a statement that was cancelled."""


class _SyncGuest(_Guest):
    __slots__ = ()

    def commit(self) -> None:
        if self.watched:
            self.__cyclone_connection__.commit()  # which refuses

    def rollback(self) -> None:
        if self.watched:
            self.__cyclone_connection__.rollback()

    def close(self) -> None:
        """Passed over, as in async."""


# Whom the engine connects next, in this task or thread.
_guest: ContextVar[Any] = ContextVar("guest")

# The types of hstore would be looked up by the driver, which knows only connections of its own.
_OPTIONS: dict[str, Any] = {"poolclass": NullPool, "pool_reset_on_return": None, "use_native_hstore": False}


@cache
def _engine() -> Engine:
    return create_engine("postgresql+psycopg://", creator=_guest.get, **_OPTIONS)


@cache
def _async_engine() -> AsyncEngine:
    async def creator() -> Any:
        return _guest.get()

    return create_async_engine("postgresql+psycopg://", async_creator=creator, **_OPTIONS)
