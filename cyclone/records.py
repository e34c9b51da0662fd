"""Records: small durable facts that a handler keeps while it runs, each in a commit of its own.

The answer of an outside call is stored before the handler goes on, so that a later execution of the same step does
not make the call again. One connection per worker serves all of its handlers: they take turns, and what a turn costs
is one commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Literal, get_type_hints

import psycopg

from . import codec, config, db
from .errors import InvalidInputError, InvalidOptionError, LeaseLostError, OutcomeUnknown
from .model import Claimed
from .plan import Plan, Run, drive, drive_sync

OnUnknown = Literal["call", "raise"]
MISSING: Any = object()
"""No value: a checkpoint is asked for and not set."""


def begin_call(statements: db.Statements, step: Claimed, name: str, on_unknown: OnUnknown) -> Plan[bytes | None]:
    """Notes that a call is about to be made; returns the answer of an earlier one instead, if there is one."""
    rows = yield Run(statements["begin_call"], {"step": step.id, "claim": step.claim, "name": name})
    if not rows:
        raise LeaseLostError("the lease of this step was lost")
    claim, value = rows[0]
    if value is None and claim is not None and claim != step.claim and on_unknown == "raise":
        raise OutcomeUnknown(
            f"an earlier execution began {name!r} and its outcome is not known; find out with the other system, "
            "or use on_unknown='call' if calling again does no harm"
        )
    return None if value is None else bytes(value)


def save(statements: db.Statements, step: Claimed, sort: str, name: str, value: bytes) -> Plan[None]:
    """Stores a value. Raises LeaseLostError when the step is no longer ours."""
    params = {"step": step.id, "claim": step.claim, "sort": sort, "name": name, "value": value.decode()}
    rows = yield Run(statements["save_record"], params)
    if not rows:
        raise LeaseLostError("the lease of this step was lost")


def load(statements: db.Statements, step: Claimed, name: str) -> Plan[bytes | None]:
    """The value of a checkpoint, or None."""
    params = {"step": step.id, "sort": "checkpoint", "name": name}
    rows = yield Run(statements["load_record"], params)
    return bytes(rows[0][0]) if rows else None


def check(name: str, on_unknown: object = "call") -> None:
    """Refuses a wrong name or option before anything is written."""
    config.name("name", name)
    if on_unknown not in ("call", "raise"):
        raise InvalidOptionError(f"on_unknown must be 'call' or 'raise', not {on_unknown!r}")


def answer_codec(fn: Callable[..., Any]) -> codec.Codec[Any]:
    """The codec of what a function returns by its annotation; JSON built-ins without one.

    The first caller gets the value by way of its stored form too, so that both see the same.
    """
    try:
        hint = get_type_hints(fn).get("return", Any)
    except (TypeError, NameError):
        hint = Any
    return codec.Codec(hint)


def encode(kind: codec.Codec[Any], name: str, value: Any) -> bytes:
    """The JSON of a value, or InvalidInputError."""
    try:
        return kind.encode(value)
    except codec.EncodeError as exc:
        raise InvalidInputError(f"the value of {name!r} cannot be stored: {exc}") from exc


class AsyncRecords:
    """Runs the plans above for a worker's async handlers."""

    def __init__(self, dsn: str, statements: db.Statements, pooler: bool) -> None:
        self.statements = statements
        self._dsn = dsn
        self._pooler = pooler
        self._lock = asyncio.Lock()
        self._conn: psycopg.AsyncConnection[Any] | None = None

    async def run(self, plan: Plan[Any]) -> Any:
        async with self._lock:
            if self._conn is None or self._conn.closed:
                self._conn = await db.connect(self._dsn, application_name="cyclone records", pooler=self._pooler)
            return await drive(self._conn, plan)

    async def close(self) -> None:
        if self._conn is not None:
            await self._conn.close()


class SyncRecords:
    """The same for handlers in threads."""

    def __init__(self, dsn: str, statements: db.Statements, pooler: bool) -> None:
        self.statements = statements
        self._dsn = dsn
        self._pooler = pooler
        self._lock = threading.Lock()
        self._conn: psycopg.Connection[Any] | None = None

    def run(self, plan: Plan[Any]) -> Any:
        with self._lock:
            if self._conn is None or self._conn.closed:
                self._conn = db.connect_sync(self._dsn, application_name="cyclone records", pooler=self._pooler)
            return drive_sync(self._conn, plan)

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()
