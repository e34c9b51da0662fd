"""Control: people intervene. Every intervention is recorded with who made it, from where, when and why."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from datetime import datetime
from functools import cache

import msgspec

from . import config, db, events
from .errors import InvalidStateError, NotFoundError
from .model import Event
from .plan import Mark, Plan, Run
from .states import StepState

_MOST_REASON = 10_000


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for a change and why, checked. Without an `actor` the database's user is recorded."""

    actor: str | None
    host: str
    reason: str | None
    additional_attempts: int = 1


class Reopened(msgspec.Struct, frozen=True):
    """The events of what was reopened, by the steps' ids, and whether a wake should follow the commit."""

    events: Sequence[Event]
    asleep: bool


def request(*, actor: str | None = None, reason: str | None = None, additional_attempts: int | None = None) -> Request:
    """Checks what can be wrong with a request before any connection is taken: InvalidOptionError. The actor is
    `user@host` of this process unless given.
    """
    user, host = _here()
    granted = 1 if additional_attempts is None else config.count("additional_attempts", additional_attempts)
    return Request(
        actor=user if actor is None else config.name("actor", actor),
        host=host,
        reason=None if reason is None else config.text("reason", reason, most_bytes=_MOST_REASON),
        additional_attempts=granted,
    )


@cache
def _here() -> tuple[str | None, str]:
    host = socket.gethostname()
    try:
        return f"{getpass.getuser()}@{host}", host
    except (KeyError, OSError, ImportError):  # in a container the user's number may have no name
        return None, host


def cancel_step(
    statements: db.Statements, run: int, node: str, asked: Request, *, now: datetime | None = None
) -> Plan[Event | None]:
    """Cancels one step, in a transaction of its own; None if it had ended already.

    A step that nobody runs is cancelled at once and never called. A running one is too: its worker is told to stop the
    handler, within two seconds, and whatever the handler still returns or writes in its completion transaction is
    refused. Raises NotFoundError if no such step is visible.
    """
    yield Mark.BEGIN
    number, state = yield from _locked(statements, run, node)
    rows = yield Run(
        statements["cancel_step"],
        {
            "id": number,
            "running": state == StepState.RUNNING,
            "reason": asked.reason or "cancelled",
            "actor": asked.actor,
            "host": asked.host,
            "now": now,
        },
    )
    yield Mark.COMMIT
    return events.read(rows[0][0]) if rows else None


def reopen(
    statements: db.Statements,
    run: int,
    node: str | None,
    asked: Request,
    *,
    notify: bool,
    now: datetime | None = None,
) -> Plan[Reopened]:
    """Reopens one node, or with None every discarded node of a run, in whatever transaction is open.

    Raises NotFoundError if there is no such run or node, InvalidStateError if the node is not discarded. With `notify`
    those who sleep are notified by the same transaction.
    """
    if node is not None:
        number, state = yield from _locked(statements, run, node)
        if state != StepState.EXHAUSTED:
            raise InvalidStateError(f"node {node!r} of run {run} is {state}; only a discarded one can be reopened")
        ids = [number]
    else:
        ((ids, known),) = yield Run(statements["lock_discarded"], {"run_id": run})
        if not known:
            raise NotFoundError(f"run {run} is not visible")
    if not ids:
        return Reopened([], False)
    rows = yield Run(
        statements["reopen_steps"],
        {
            "ids": ids,
            "additional_attempts": asked.additional_attempts,
            "actor": asked.actor,
            "host": asked.host,
            "reason": asked.reason,
            "channel": statements.channel,
            "notify": notify,
            "now": now,
        },
    )
    return Reopened([events.read(row[0]) for row in rows], bool(rows) and bool(rows[0][1]) and not notify)


def _locked(statements: db.Statements, run: int, node: str) -> Plan[tuple[int, str]]:
    rows = yield Run(statements["lock_step"], {"run_id": run, "node": node})
    if not rows:
        raise NotFoundError(f"node {node!r} of run {run} is not visible")
    number, state = rows[0]
    return number, state
