"""One logic for async and sync: a plan says what to run, a driver runs it.

A plan is a generator that yields statements, is sent their rows, and returns its result. It holds everything that could
be wrong (which statements, in which order, what their rows mean) and exists once. The drivers hold only what differs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]


in_handler: ContextVar[bool] = ContextVar("in_handler", default=False)
"""Whether this task or thread runs a handler, which must not wait without a limit for what may need its slot."""


class Run(NamedTuple):
    """A statement; its rows are sent to the plan."""

    query: bytes
    params: Mapping[str, Any]


class Copy(NamedTuple):
    """A COPY from the client, with its data. Without parameters, but written as if it had some: `%%` stands for `%`."""

    query: bytes
    blocks: Iterable[bytes]


class Mark(Enum):
    """Where a transaction of several statements begins and ends. A plan that needs neither runs as its caller's
    connection is: in its transaction, or each statement by itself."""

    BEGIN = "begin"
    COMMIT = "commit"


Plan: TypeAlias = Generator["Run | Copy | Mark", Rows, T]


# A cursor of psycopg's own class with plain rows, and nothing prepared: the connection may be a caller's, with
# factories of its own, or lead through a pooler. An error of the database goes into the plan, at the statement that had
# it.


async def drive(conn: psycopg.AsyncConnection[Any], plan: Plan[T]) -> T:
    """Runs a plan on an async connection. If it fails, whoever has the connection ends the transaction it had begun."""
    cursor = psycopg.AsyncCursor(conn, row_factory=tuple_row)
    try:
        what = next(plan)
        while True:
            rows: Rows = []
            try:
                match what:
                    case Run(query, params):
                        await cursor.execute(query, params, prepare=False)
                        rows = await cursor.fetchall()
                    case Copy(query, blocks):
                        async with cursor.copy(query.replace(b"%%", b"%")) as copy:
                            for block in blocks:
                                await copy.write(block)
                    case Mark.BEGIN:
                        if conn.autocommit:
                            await cursor.execute("BEGIN", prepare=False)
                    case Mark.COMMIT:
                        if conn.pgconn.transaction_status != TransactionStatus.IDLE:
                            await conn.commit()
            except psycopg.Error as exc:
                what = plan.throw(exc)
            else:
                what = plan.send(rows)
    except StopIteration as end:
        return cast("T", end.value)


def drive_sync(conn: psycopg.Connection[Any], plan: Plan[T]) -> T:
    """Runs a plan on a sync connection, as `drive` does."""
    cursor = psycopg.Cursor(conn, row_factory=tuple_row)
    try:
        what = next(plan)
        while True:
            rows: Rows = []
            try:
                match what:
                    case Run(query, params):
                        cursor.execute(query, params, prepare=False)
                        rows = cursor.fetchall()
                    case Copy(query, blocks):
                        with cursor.copy(query.replace(b"%%", b"%")) as copy:
                            for block in blocks:
                                copy.write(block)
                    case Mark.BEGIN:
                        if conn.autocommit:
                            cursor.execute("BEGIN", prepare=False)
                    case Mark.COMMIT:
                        if conn.pgconn.transaction_status != TransactionStatus.IDLE:
                            conn.commit()
            except psycopg.Error as exc:
                what = plan.throw(exc)
            else:
                what = plan.send(rows)
    except StopIteration as end:
        return cast("T", end.value)
