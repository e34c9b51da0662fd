"""The door to PostgreSQL: named statements, connections, and how an error of the database is to be taken."""

from __future__ import annotations

import hashlib
import logging
import re
import struct
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import psycopg
from psycopg import conninfo, sql
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format

from . import waiting
from .errors import ConnectError, InvalidOptionError

log = logging.getLogger("cyclone")

_STAGES = ("claim", "resolve", "settle", "store", "lease", "sweep", "views", "control", "records")
_NAME = re.compile(r"^-- name: (\w+)$", re.M)


class Statements:
    """Every statement of `sql/`, by name, for one schema. The schema is put in here, once; no text varies
    afterwards.
    """

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.quoted = quote_schema(schema)
        self.channel = _channel(schema)
        self._texts: dict[str, bytes] = {}
        quoted = self.quoted.replace("%", "%%")
        for stage in _STAGES:
            for name, text in _load(stage).items():
                self._texts[name] = put_schema(text, quoted).encode()

    def __getitem__(self, name: str) -> bytes:
        return self._texts[name]


def put_schema(text: str, quoted: str) -> str:
    """A text of SQL for one schema. In one pass, since a name may hold what is looked for."""
    # Inside a literal, as in nextval('{schema}.…'), an apostrophe of the name is doubled.
    literal = "'" + quoted.replace("'", "''") + "."
    return re.sub(r"'\{schema\}\.|\{schema\}", lambda found: literal if found[0][0] == "'" else quoted, text)


def _channel(schema: str) -> str:
    """The channel of a schema's notifications: PostgreSQL takes names of up to 63 bytes."""
    name = f"cyclone:{schema}"
    return name if len(name.encode()) <= 63 else f"cyclone:{hashlib.sha256(schema.encode()).hexdigest()[:32]}"


@cache
def statements(schema: str) -> Statements:
    """The statements for a schema, loaded once per process."""
    return Statements(schema)


@cache
def _load(stage: str) -> Mapping[str, str]:
    text = resources.files("cyclone").joinpath("sql", f"{stage}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    out: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        # Comments stay in the file: they would only travel to the server with every statement.
        out[name] = "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
    return out


def quote_schema(schema: str) -> str:
    """The schema's name as an SQL identifier, or InvalidOptionError."""
    if not schema or "\0" in schema or len(schema.encode("utf-8", "replace")) > 63:
        raise InvalidOptionError(f"schema must be a name of 1 to 63 bytes, not {schema!r}")
    return sql.Identifier(schema).as_string(None)


class JsonbBytes(Loader):
    """jsonb as the bytes of its text: the driver's own loader costs 9 µs a row, and the typed decoder wants bytes
    anyway.
    """

    format = Format.BINARY

    def load(self, data: Buffer) -> bytes:
        return bytes(data[1:])  # the first byte is the version of the binary format


class JsonbTextBytes(Loader):
    """The same for results in text format."""

    format = Format.TEXT

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


class Bigints(list[int]):
    """A list that is sent as `bigint[]`. The driver would go through it in Python, at 0.5 µs for each number."""


class Texts(list[str | None]):
    """The same for `text[]`."""


class BigintsDumper(Dumper):
    format = Format.BINARY
    oid = 1016

    def dump(self, obj: Bigints) -> bytes:
        count = len(obj)
        words = [8] * (2 * count)  # each number after its length
        words[1::2] = obj
        return _array_head(20, count, False) + struct.pack(f">{'iq' * count}", *words)


class TextsDumper(Dumper):
    format = Format.BINARY
    oid = 1009

    def dump(self, obj: Texts) -> bytes:
        parts = [_array_head(25, len(obj), None in obj)]
        for text in obj:
            if text is None:
                parts.append(_NULL)
            else:
                data = text.encode()
                parts += (len(data).to_bytes(4, "big"), data)
        return b"".join(parts)


_NULL = (-1).to_bytes(4, "big", signed=True)


def _array_head(element: int, count: int, nulls: bool) -> bytes:
    return struct.pack(">iiiii", 1, nulls, element, count, 1) if count else struct.pack(">iii", 0, 0, element)


def adapt(context: AdaptContext) -> None:
    """Makes a connection or cursor return jsonb as bytes, and send `Bigints` and `Texts`."""
    context.adapters.register_loader("jsonb", JsonbBytes)
    context.adapters.register_loader("jsonb", JsonbTextBytes)
    context.adapters.register_dumper(Bigints, BigintsDumper)
    context.adapters.register_dumper(Texts, TextsDumper)


def where(dsn: str) -> str:
    """Host, port and database of a DSN, for messages: never the password."""
    try:
        parts = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "a DSN that cannot be parsed"
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    return f"{host}, port {parts.get('port') or 5432}, database {parts.get('dbname') or parts.get('user') or 'default'}"


# Settings of Cyclone's own sessions. A role may carry short limits for people; the engine's work must not fall to them.
# Keepalives make the server end the session of a vanished host within a minute, and its locks with it.
_SESSION = {
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # Under a stricter level each row that somebody has just changed would be an error instead of one to pass over.
    "default_transaction_isolation": "read committed",
    "tcp_keepalives_idle": "20",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    # Prepared statements are planned when tables may still be tiny; the plan that reads all of them must not be kept.
    "enable_seqscan": "off",
    # Compiling takes longer than any statement of the engine's runs.
    "jit": "off",
}
# The same towards the server: a connection whose packets vanish is noticed within a minute, also with a reply
# outstanding.
CONNECT: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 45000,
}


def connect_options(dsn: str, application_name: str) -> dict[str, Any]:
    """Keyword arguments for a connection of the engine's own; what the DSN says itself wins."""
    try:
        given = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's own text quotes the part that it could not read, which may be the password.
        raise InvalidOptionError("the DSN cannot be parsed; write it as postgresql://user@host:port/database") from None
    options = {key: value for key, value in CONNECT.items() if key not in given}
    options.setdefault("application_name", application_name)
    return options


SESSION_SQL = (
    "SELECT pg_backend_pid(), "
    + ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SESSION.items())
).encode()


async def connect(dsn: str, *, application_name: str, pooler: bool = False) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """A connection of the engine's own, in autocommit, jsonb as bytes.

    With `pooler` it sets nothing and prepares nothing, so that it can go through a pooler in transaction mode.
    """
    try:
        conn = await waiting.AsyncConnection.connect(dsn, autocommit=True, **connect_options(dsn, application_name))
    except psycopg.OperationalError as exc:
        raise unreachable(dsn, exc) from exc
    adapt(conn)
    if pooler:
        conn.prepare_threshold = None
    else:
        conn.prepare_threshold = 0
        _check_pooler(dsn, conn, await (await conn.execute(SESSION_SQL, prepare=False)).fetchone())
    return conn


def connect_sync(
    dsn: str, *, application_name: str, pooler: bool = False, silence_s: float | None = None
) -> psycopg.Connection[tuple[Any, ...]]:
    """As `connect`, for a thread. `silence_s`: how long what was sent may stay unanswered by the network, if shorter
    than otherwise.
    """
    options = connect_options(dsn, application_name)
    if silence_s is not None and "tcp_user_timeout" in options:
        options["tcp_user_timeout"] = min(options["tcp_user_timeout"], int(silence_s * 1000))
    try:
        conn = psycopg.Connection.connect(dsn, autocommit=True, **options)
    except psycopg.OperationalError as exc:
        raise unreachable(dsn, exc) from exc
    adapt(conn)
    if pooler:
        conn.prepare_threshold = None
    else:
        conn.prepare_threshold = 0
        _check_pooler(dsn, conn, conn.execute(SESSION_SQL, prepare=False).fetchone())
    return conn


_warned = False


def _check_pooler(dsn: str, conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], row: Any) -> None:
    """Says once what a pooler needs. One that is in between hands out process numbers of its own; whether it is in
    transaction mode cannot be asked, and shows soon enough in errors that nobody would understand.
    """
    global _warned
    if row[0] != conn.info.backend_pid and not _warned:
        _warned = True
        log.warning(
            "the database at %s is reached through a pooler; if that is in transaction mode, set notify=False "
            "(--notify no, CYCLONE_NOTIFY=no), since notifications and prepared statements do not work there",
            where(dsn),
        )


def brief(exc: BaseException) -> str:
    """The message of an error on one line, for a log; libpq's has several."""
    return " ".join(str(exc).split()) or type(exc).__name__


def unreachable(dsn: str, exc: BaseException) -> ConnectError:
    """The error for a database that does not answer; libpq's own text can name the user, but never the password."""
    text = " ".join(str(exc).split())
    return ConnectError(f"cannot reach the database at {where(dsn)}: {scrub(dsn, text)}")


def scrub(dsn: str, text: str) -> str:
    """`text` without the DSN's password, should it occur."""
    try:
        password = conninfo.conninfo_to_dict(dsn).get("password")
    except psycopg.ProgrammingError:
        password = None
    return text.replace(str(password), "***") if password else text


# Which SQLSTATEs blame a step (its data), by class; every other error blames the server and is worth sending again.
# 22 data, 23 integrity, 54 a limit (an output nested too deep), P0 and CY a raised refusal.
_STEP_CLASSES = frozenset({"22", "23", "54", "P0", "CY"})
# A lock that was not given in time, or a deadlock: both pass.
LOCKED = ("55P03", "40P01")
LEASE_LOST = "CY001"
TX_ENDED = "CY002"
RUNS_NOT_LOCKED = "CY003"


def blames_step(exc: BaseException) -> bool:
    """Whether an error of the database is the fault of one step's data rather than of the server or the connection."""
    state = getattr(exc, "sqlstate", None)
    if state is None:
        return isinstance(exc, psycopg.DataError)  # the driver's own: a value that it cannot send
    return state[:2] in _STEP_CLASSES
