"""Views only read: a step as it is stored, what a run ended in, and what was recorded of its way there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from . import db, events
from .errors import InvalidOptionTypeError, NotFoundError
from .model import Cursor, Event, StepError, StepInfo
from .plan import Plan, Run
from .states import ErrorKind, EventKind, StepState

_ERRORS = msgspec.json.Decoder(list[StepError])
_FIELDS = StepInfo.__struct_fields__
_PAGE = 500


class Result(msgspec.Struct, frozen=True):
    """What a step has come to. `output` is JSON, or None for SQL NULL."""

    state: StepState
    output: str | None
    kind: ErrorKind | None
    error: str | None


def result(statements: db.Statements, run_id: str, node: str) -> Plan[Result]:
    """The state and the end of one step. Raises NotFoundError if none is visible."""
    rows = yield Run(statements["view_result"], {"run_id": run_number(run_id), "node": node})
    if not rows:
        raise missing(run_id, node)
    state, output, kind, error = rows[0]
    return Result(StepState(state), output, None if kind is None else ErrorKind(kind), error)


def step(statements: db.Statements, run_id: str, node: str) -> Plan[StepInfo]:
    """One step as it is stored. Raises NotFoundError if none is visible."""
    rows = yield Run(statements["view_steps"], {"run_id": run_number(run_id), "node": node})
    if not rows:
        raise missing(run_id, node)
    return _info(rows[0])


def steps(statements: db.Statements, run_id: str) -> Plan[list[StepInfo]]:
    """The steps of a run, oldest first. Raises NotFoundError if no such run is visible."""
    rows = yield Run(statements["view_steps"], {"run_id": run_number(run_id), "node": None})
    if not rows:
        raise missing(run_id)
    return [_info(row) for row in rows]


def _info(row: tuple[Any, ...]) -> StepInfo:
    fields = dict(zip(_FIELDS, row, strict=True))
    for name in ("input", "output", "metadata"):
        fields[name] = None if fields[name] is None else msgspec.json.decode(fields[name])
    fields["errors"] = [] if fields["errors"] is None else _ERRORS.decode(fields["errors"])
    fields["tags"] = fields["tags"] or []
    fields["state"] = StepState(fields["state"])
    fields["error_kind"] = None if fields["error_kind"] is None else ErrorKind(fields["error_kind"])
    return StepInfo(**fields)


def history(statements: db.Statements, run_id: str) -> Plan[list[Event]]:
    """The recorded events of a run, as far as they are committed now."""
    rows = yield Run(statements["view_history"], {"run_id": run_number(run_id)})
    return [events.read(row[0]) for row in rows]


class Feed:
    """The recorded events from a place on, page by page, none of them skipped. It remembers how far it has come.

    Events are given once every transaction that began before theirs has ended, since only then is it sure what comes
    before them. `after` is the cursor of the event before the first; `kinds` and `run_id` choose. Raises
    InvalidOptionError for a bad cursor or kind, NotFoundError for a text that is no run's id.
    """

    def __init__(
        self,
        statements: db.Statements,
        *,
        after: Cursor | None = None,
        kinds: Iterable[EventKind | str] | None = None,
        run_id: str | None = None,
    ) -> None:
        self._statements = statements
        self._txid, self._id = ("0", 0) if after is None else events.place(after)
        self._choice = {
            "kinds": list(events.recorded(kinds)),
            "run_id": None if run_id is None else run_number(run_id),
        }

    def skip(self) -> Plan[None]:
        """Goes to where the events of now begin. Some that were committed a moment ago may lie behind it."""
        yield from self._read(0)

    def page(self, most: int | None = None) -> Plan[list[Event]]:
        """The next events; empty when there are none now. If more than `most` wait, the oldest are left out, and a
        `gap` that counts them comes first.
        """
        limit = _PAGE if most is None else min(most, _PAGE)
        before = self._txid, self._id
        found = yield from self._read(limit)
        if most is None or len(found) < limit:
            return found
        after = self._txid, self._id
        self._txid, self._id = before
        ((behind,),) = yield Run(self._statements["view_lag"], {**self._choice, "txid": self._txid, "id": self._id})
        lost = behind - most
        if lost <= 0:
            self._txid, self._id = after
            return found
        last, *kept = yield from self._read(limit + 1, lost - 1)
        return [Event(kind=EventKind.GAP, at=last.at, cursor=last.cursor, detail={"count": lost}), *kept]

    def _read(self, limit: int, skip: int = 0) -> Plan[list[Event]]:
        rows = yield Run(
            self._statements["view_events"],
            {**self._choice, "txid": self._txid, "id": self._id, "limit": limit, "skip": skip},
        )
        found = [events.read(row[1]) for row in rows if row[1] is not None]
        if len(found) < limit or not limit:
            self._txid, self._id = rows[0][0], 0
        elif (cursor := found[-1].cursor) is not None:
            self._txid, self._id = events.place(cursor)
        return found


def run_number(run_id: object) -> int:
    """A run's id as the database has it. What cannot be one names no run: NotFoundError."""
    if not isinstance(run_id, str):
        raise InvalidOptionTypeError(f"run_id must be a str, not {type(run_id).__name__}")
    if not (run_id.isascii() and run_id.isdecimal() and len(run_id) < 19):
        raise missing(run_id)
    return int(run_id)


def missing(run_id: str, node: str | None = None) -> NotFoundError:
    """The error for a run, or a node of it, that is not visible."""
    what = f"run {run_id!r}" if node is None else f"node {node!r} of run {run_id!r}"
    return NotFoundError(f"{what} is not visible: there is none, or the transaction that made it has not committed")
