"""One logic for async and sync: a plan says what to run, a driver runs it.

A plan is a generator that yields statements, is sent their rows, and returns its result. It holds everything that could
be wrong (which statements, in which order, what their rows mean) and exists once. The drivers hold only what differs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import tuple_row

from . import waiting

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]


in_handler: ContextVar[bool] = ContextVar("in_handler", default=False)
"""Whether this task or thread runs a handler, which must not wait without a limit for what may need its slot."""


class Run(NamedTuple):
    """A statement; its rows are sent to the plan."""

    query: bytes
    params: Mapping[str, Any]


class Ask(NamedTuple):
    """A statement that answers with one row of one text. A client's own connection has a short way for it."""

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


Plan: TypeAlias = Generator["Run | Ask | Copy | Mark", Rows, T]


# The short way. A cursor costs more than all else that a small call does in Python (measured for an enqueue, the least
# of 25 runs: 241 us of the client's CPU with it, 178 without; async 310 and 239), and of the server's work only the
# commit costs more than parsing the statement anew (a call takes 800 us with that, 600 without). So an Ask goes
# straight to libpq, and from the fifth on prepared, unless a pooler is between, where what is prepared might not be
# found again.

_PREPARE_AT = 5


class _Remembered:
    """What a client's own connection remembers."""

    asked = 0
    stays: bool | None = None
    """Whether what is prepared stays; None: not known yet."""
    prepared: frozenset[bytes] = frozenset()


class AsyncOwn(_Remembered, waiting.AsyncConnection):
    """A connection of an async client's own: in autocommit, and never in pipeline mode."""


class Own(_Remembered, psycopg.Connection[Any]):
    """A connection of a sync client's own: in autocommit, and never in pipeline mode."""


def _text(value: str) -> bytes:
    data = value.encode()
    if b"\0" in data:
        raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return data


_AS_TEXT: dict[type, Callable[[Any], bytes | None]] = {
    type(None): lambda value: None,
    bool: lambda value: b"t" if value else b"f",
    int: lambda value: b"%d" % value,
    float: lambda value: repr(value).encode(),
    str: _text,
    datetime: lambda value: value.isoformat().encode(),
}


@cache
def _positional(query: bytes) -> tuple[bytes, bytes, list[str]]:
    """A statement with parameters as libpq takes them, a name to prepare it under, and the names of its parameters."""
    names: list[str] = []

    def number(found: re.Match[bytes]) -> bytes:
        if found[0] == b"%%":
            return b"%"
        if (name := found[1].decode()) not in names:
            names.append(name)
        return b"$%d" % (names.index(name) + 1)

    text = re.sub(rb"%%|%\((\w+)\)[sb]", number, query)
    return text, b"cyclone_" + hashlib.sha256(text).hexdigest()[:32].encode(), names


def _values(conn: AsyncOwn | Own, what: Ask) -> list[bytes | None] | None:
    """Parameters as text; None if the short way is not for them."""
    if conn.pgconn.parameter_status(b"client_encoding") != b"UTF8":
        return None
    try:
        return [_AS_TEXT[type(value)](value) for value in map(what.params.__getitem__, _positional(what.query)[2])]
    except KeyError:
        return None


def _ask(conn: AsyncOwn | Own, what: Ask, values: list[bytes | None]) -> PQGen[Rows]:
    pgconn = conn.pgconn
    text, name, _ = _positional(what.query)
    conn.asked += 1
    if name not in conn.prepared and conn.asked >= _PREPARE_AT and conn.stays is not False:
        # A pooler hands out process numbers of its own.
        pgconn.send_query(b"SELECT pg_backend_pid()")
        conn.stays = _only((yield from execute(pgconn))) == str(conn.info.backend_pid)
        if conn.stays:
            pgconn.send_prepare(name, text)
            _check((yield from execute(pgconn)))
            conn.prepared |= {name}
    if name in conn.prepared:
        pgconn.send_query_prepared(name, values)
    else:
        pgconn.send_query_params(text, values)
    return [(_only((yield from execute(pgconn))),)]


def _only(results: list[PGresult]) -> str | None:
    data = _check(results).get_value(0, 0)
    return None if data is None else data.decode()


def _check(results: list[PGresult]) -> PGresult:
    if results[-1].status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        raise error_from_result(results[-1], encoding="utf-8")
    return results[-1]


# A cursor of psycopg's own class with plain rows, and nothing prepared: the connection may be a caller's, with
# factories of its own, or lead through a pooler. An error of the database goes into the plan, at the statement that had
# it.


async def drive(conn: psycopg.AsyncConnection[Any], plan: Plan[T]) -> T:
    """Runs a plan on an async connection. If it fails, whoever has the connection ends the transaction it had begun."""
    try:
        what = next(plan)
        while True:
            rows: Rows = []
            try:
                match what:
                    case Ask() if isinstance(conn, AsyncOwn) and (values := _values(conn, what)) is not None:
                        async with conn.lock:
                            rows = await conn.wait(_ask(conn, what, values))
                    case Run(query, params) | Ask(query, params):
                        cursor = psycopg.AsyncCursor(conn, row_factory=tuple_row)
                        await cursor.execute(query, params, prepare=False)
                        rows = await cursor.fetchall()
                    case Copy(query, blocks):
                        cursor = psycopg.AsyncCursor(conn, row_factory=tuple_row)
                        async with cursor.copy(query.replace(b"%%", b"%")) as copy:
                            for block in blocks:
                                await copy.write(block)
                    case Mark.BEGIN:
                        if conn.autocommit:
                            await psycopg.AsyncCursor(conn).execute("BEGIN", prepare=False)
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
    try:
        what = next(plan)
        while True:
            rows: Rows = []
            try:
                match what:
                    case Ask() if isinstance(conn, Own) and (values := _values(conn, what)) is not None:
                        with conn.lock:
                            rows = conn.wait(_ask(conn, what, values))
                    case Run(query, params) | Ask(query, params):
                        cursor = psycopg.Cursor(conn, row_factory=tuple_row)
                        cursor.execute(query, params, prepare=False)
                        rows = cursor.fetchall()
                    case Copy(query, blocks):
                        cursor = psycopg.Cursor(conn, row_factory=tuple_row)
                        with cursor.copy(query.replace(b"%%", b"%")) as copy:
                            for block in blocks:
                                copy.write(block)
                    case Mark.BEGIN:
                        if conn.autocommit:
                            psycopg.Cursor(conn).execute("BEGIN", prepare=False)
                    case Mark.COMMIT:
                        if conn.pgconn.transaction_status != TransactionStatus.IDLE:
                            conn.commit()
            except psycopg.Error as exc:
                what = plan.throw(exc)
            else:
                what = plan.send(rows)
    except StopIteration as end:
        return cast("T", end.value)
