"""Views only read: a step as it is stored, what a run ended in, and what was recorded of its way there."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from . import config, db, events
from .errors import InvalidOptionError, InvalidOptionTypeError, NotFoundError
from .model import Cursor, Event, Page, RunInfo, StepError, StepInfo
from .plan import Plan, Run
from .states import ErrorKind, EventKind, RunState, StepState

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


class RunResult(msgspec.Struct, frozen=True):
    """What a run has come to. `output` is JSON; `skipped` when the node that would give it was skipped."""

    state: RunState
    node: str | None
    skipped: bool
    output: str | None
    error_node: str | None
    error_kind: str | None
    error: str | None


def run_result(statements: db.Statements, run_id: str) -> Plan[RunResult]:
    """The state and the end of a run of a workflow. Raises NotFoundError if none is visible."""
    rows = yield Run(statements["view_run_result"], {"run_id": run_number(run_id)})
    if not rows:
        raise missing(run_id)
    state, node, error_node, kind, error, _, fate, output = rows[0]
    return RunResult(RunState(state), node, fate == "skipped", output, error_node, kind, error)


def run(statements: db.Statements, run_id: str) -> Plan[RunInfo]:
    """One run as it is stored. Raises NotFoundError if none is visible."""
    rows = yield Run(statements["view_run"], {"run_id": run_number(run_id)})
    if not rows:
        raise missing(run_id)
    return _run_info(rows[0])


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs a listing has, checked."""

    workflow: str | None = None
    state: str | None = None
    early: bool = False
    key: str | None = None
    tag: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    ago_s: float | None = None
    limit: int = 100
    after: int | None = None


def run_filter(
    *,
    workflow: object = None,
    state: RunState | str | None = None,
    key: str | None = None,
    tag: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    ago_s: float | None = None,
    limit: int = 100,
    after: str | None = None,
) -> RunFilter:
    """Checks what can be wrong with a listing before any connection is taken: InvalidOptionError."""
    try:
        wanted = None if state is None else RunState(state)
    except ValueError:
        raise InvalidOptionError(f"state must be one of {', '.join(RunState)}, not {state!r}") from None
    name = getattr(workflow, "name", workflow)
    if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 19):
        raise InvalidOptionError(f"after must be the `next` of a page, not {after[:50]!r}")
    return RunFilter(
        workflow=None if name is None else config.text("workflow", name),
        state=wanted,
        early=wanted in (RunState.FAILED, RunState.CANCELLED),
        key=None if key is None else config.key("key", key),
        tag=None if tag is None else config.text("tag", tag),
        created_after=None if created_after is None else config.instant("created_after", created_after),
        created_before=None if created_before is None else config.instant("created_before", created_before),
        ago_s=ago_s,
        limit=config.count("limit", limit, 1, 1000),
        after=None if after is None else int(after),
    )


def runs(statements: db.Statements, wanted: RunFilter) -> Plan[Page[RunInfo]]:
    """A page of the runs of workflows, newest first. Pages do not shift: a run that comes later is before all of
    them.
    """
    params = {**msgspec.structs.asdict(wanted), "limit": wanted.limit + 1}
    rows = yield Run(statements["view_runs"], params)
    found = [_run_info(row) for row in rows[: wanted.limit]]
    return Page(found, found[-1].id if len(rows) > wanted.limit else None)


def _run_info(row: tuple[Any, ...]) -> RunInfo:
    fields = dict(zip(RunInfo.__struct_fields__, row, strict=True))
    for name in ("input", "metadata"):
        fields[name] = None if fields[name] is None else msgspec.json.decode(fields[name])
    fields["tags"] = fields["tags"] or []
    fields["discarded"] = fields["discarded"] or []
    fields["state"] = RunState(fields["state"])
    fields["error_kind"] = None if fields["error_kind"] is None else ErrorKind(fields["error_kind"])
    return RunInfo(**fields)


def spec(statements: db.Statements, run_id: str) -> Plan[str | None]:
    """The graph of a run, as JSON; None for a standalone step."""
    rows = yield Run(statements["view_graph"], {"run_id": run_number(run_id)})
    return rows[0][0] if rows else None


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
