"""Control: people intervene. Every intervention is recorded with who made it, from where, when and why."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import NamedTuple

import msgspec

from . import config, db, events
from .errors import DuplicateError, InvalidStateError, NotFoundError
from .model import Event
from .plan import Mark, Plan, Run
from .states import RunState, StepState

_MOST_REASON = 10_000
_ROUND = 1000  # as many nodes of a run are ended in one transaction
_FAIL_RUN, _CANCEL_BRANCH = 0, 1  # as in cyclone_graph_nodes


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for a change and why, checked. Without an `actor` the database's user is recorded."""

    actor: str | None
    host: str
    reason: str | None
    additional_attempts: int = 1
    deadline_s: float | None = None
    deadline_at: datetime | None = None


class Reopened(msgspec.Struct, frozen=True):
    """The events of what was reopened, by the steps' ids, and whether a wake should follow the commit."""

    events: Sequence[Event]
    asleep: bool


def request(
    *,
    actor: str | None = None,
    reason: str | None = None,
    additional_attempts: int | None = None,
    deadline: datetime | timedelta | float | None = None,
) -> Request:
    """Checks what can be wrong with a request before any connection is taken: InvalidOptionError. The actor is
    `user@host` of this process unless given.
    """
    at = config.instant("deadline", deadline) if isinstance(deadline, datetime) else None
    seconds = None if deadline is None or isinstance(deadline, datetime) else config.seconds("deadline", deadline)
    user, host = _here()
    granted = 1 if additional_attempts is None else config.count("additional_attempts", additional_attempts)
    return Request(
        actor=user if actor is None else config.name("actor", actor),
        host=host,
        reason=None if reason is None else config.text("reason", reason, most_bytes=_MOST_REASON),
        additional_attempts=granted,
        deadline_s=seconds,
        deadline_at=at,
    )


@cache
def _here() -> tuple[str | None, str]:
    host = socket.gethostname()
    try:
        return f"{getpass.getuser()}@{host}", host
    except (KeyError, OSError, ImportError):  # in a container the user's number may have no name
        return None, host


def cancel_run(
    statements: db.Statements, run: int, asked: Request, *, now: datetime | None = None
) -> Plan[Sequence[Event] | None]:
    """Cancels a run, in whatever transaction is open: the events of what was running, or None if it had ended already.

    Of a large run only the first thousand nodes are ended at once; `end_rounds` ends the rest, or a sweeper. A run
    that is a standalone step is cancelled as that step. Raises NotFoundError if there is no such run.
    """
    locked = yield Run(statements["lock_run"], {"run_id": run, "now": now})
    if not locked:
        return (yield from _cancel_step(statements, run, None, asked, now))
    rows = yield Run(
        statements["cancel_run"],
        {"run_id": run, "reason": asked.reason or "cancelled", "actor": asked.actor, "host": asked.host, "now": now},
    )
    return [] if rows[0][0] else None


def end_rounds(statements: db.Statements, run: int, *, now: datetime | None = None) -> Plan[None]:
    """Ends what is left of a run that has ended early, a thousand nodes in each transaction."""
    while True:
        yield Mark.BEGIN
        ((ended,),) = yield Run(statements["end_round"], {"run_id": run, "now": now})
        yield Mark.COMMIT
        if ended < _ROUND:
            return


def cancel_step(
    statements: db.Statements, run: int, node: str, asked: Request, *, now: datetime | None = None
) -> Plan[Sequence[Event] | None]:
    """Cancels one step, in whatever transaction is open; None if it had ended already.

    A step that nobody runs is cancelled at once and never called. A running one is too: its worker is told to stop the
    handler, within two seconds, and whatever the handler still returns or writes in its completion transaction is
    refused. For a node of a run it counts as a failure: the graph says what follows. Raises NotFoundError if no such
    step is visible.
    """
    yield Run(statements["lock_run"], {"run_id": run, "now": now})
    return (yield from _cancel_step(statements, run, node, asked, now))


def _cancel_step(
    statements: db.Statements, run: int, node: str | None, asked: Request, now: datetime | None
) -> Plan[Sequence[Event] | None]:
    number, _, is_map = yield from _locked(statements, run, node)
    if is_map:
        yield Run(statements["lock_items"], {"id": number})
    rows = yield Run(
        statements["cancel_step"],
        {"id": number, "reason": asked.reason or "cancelled", "actor": asked.actor, "host": asked.host, "now": now},
    )
    if rows and number != run:
        yield Run(statements["nodes_failed"], {"id": number, "run_id": run, "host": asked.host, "now": now})
    return [events.read(row[0]) for row in rows] or None


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

    A run that had ended by it is running again, and what its failure had cancelled is restored. Raises NotFoundError if
    there is no such run or node, InvalidStateError if the node is not discarded, if the run was cancelled, or if its
    deadline has passed and no new one is given. With `notify` those who sleep are notified by the same transaction.
    """
    locked = yield Run(statements["lock_run"], {"run_id": run, "now": now})
    if locked:
        return (yield from _reopen_run(statements, run, node, asked, locked[0], notify, now))
    if asked.deadline_s is not None or asked.deadline_at is not None:
        raise InvalidStateError(f"run {run} is no run of a workflow, and has no deadline")
    if node is not None:
        number, state, _ = yield from _locked(statements, run, node)
        _must_be_discarded(run, node, state)
        ids = [number]
    else:
        ((ids, known),) = yield Run(statements["lock_discarded"], {"run_id": run})
        if not known:
            raise NotFoundError(f"run {run} is not visible")
    if not ids:
        return Reopened([], False)
    for holder, kind, key in (yield Run(statements["taken_keys"], {"ids": ids})):
        raise DuplicateError(holder, kind, key)
    return (yield from _reopen_steps(statements, ids, asked, notify, now))


def _reopen_steps(
    statements: db.Statements, ids: Sequence[int], asked: Request, notify: bool, now: datetime | None
) -> Plan[Reopened]:
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


def _reopen_run(
    statements: db.Statements,
    run: int,
    node: str | None,
    asked: Request,
    locked: tuple[str, str, str | None, bool | None],
    notify: bool,
    now: datetime | None,
) -> Plan[Reopened]:
    state, ending, result, late = locked
    new_deadline = asked.deadline_s is not None or asked.deadline_at is not None
    if state == RunState.CANCELLED:
        raise InvalidStateError(f"run {run} was cancelled; submit it again")
    while ending:  # what is restored below must have been ended first
        ((ended,),) = yield Run(statements["end_round"], {"run_id": run, "now": now})
        if ended < _ROUND:
            break
    rows = yield Run(statements["lock_nodes"], {"run_id": run})
    nodes = {row[0]: Node(*row) for row in rows}
    if node is None:
        ids = {one.id for one in nodes.values() if one.state == StepState.EXHAUSTED}
        if not ids and not (new_deadline and any(one.fate == "deadline" for one in nodes.values())):
            return Reopened([], False)
    else:
        found = [one for one in nodes.values() if one.name == node]
        if not found:
            raise NotFoundError(f"node {node!r} of run {run} is not visible")
        _must_be_discarded(run, node, found[0].state)
        ids = {found[0].id}
    if late and not new_deadline:
        raise InvalidStateError(f"the deadline of run {run} has passed; reopen it with a new one (deadline=)")
    fates = {"failure", "dependency", *(["deadline"] if new_deadline else [])}
    after = restored(nodes, ids, fates)
    changed = [one for one in after.values() if one != nodes[one.id] and one.id not in ids]
    reopened = Reopened([], False)
    if ids:
        reopened = yield from _reopen_steps(statements, sorted(ids), asked, notify, now)
    # The reopened ones too, for what they have become in the graph; they keep their new tickets.
    changed += [after[number] for number in sorted(ids)]
    yield Run(
        statements["restore_nodes"],
        {
            "run_id": run,
            "ids": [one.id for one in changed],
            "states": [str(one.state) for one in changed],
            "pending": [one.pending for one in changed],
            "fates": [one.fate for one in changed],
            "sinks": [one.sink for one in changed],
            "nexts": [one.map_next for one in changed],
            "open_sinks": sum(one.sink and one.map_step is None and not one.ended for one in after.values()),
            "lost": any(one.lost or (one.name == result and one.bad) for one in after.values() if one.map_step is None),
            "deadline_s": asked.deadline_s,
            "deadline_at": asked.deadline_at,
            "now": now,
        },
    )
    if not reopened.events and not notify:
        return Reopened([], True)
    return reopened


class Node(NamedTuple):
    """A node of a run as a reopening sees it, before and after."""

    id: int
    name: str
    state: str
    fate: str
    policy: int | None
    accept_skipped: bool | None
    contained: bool
    sink: bool
    map_step: int | None
    children: Sequence[int]
    parallel: int | None
    pending: int = 0
    map_next: int | None = None

    @property
    def ended(self) -> bool:
        return StepState(self.state).terminal

    @property
    def skipped(self) -> bool:
        return self.state == StepState.CANCELLED and self.fate == "skipped"

    @property
    def bad(self) -> bool:
        """Whether it ended in a way that those which depend on it count as a failure."""
        return self.ended and self.state != StepState.COMPLETED and not self.skipped

    @property
    def lost(self) -> bool:
        """Whether its end means that the run cannot end well."""
        return self.bad and self.fate != "dependency" and not self.contained


def restored(nodes: Mapping[int, Node], reopened: Iterable[int], fates: Iterable[str]) -> dict[int, Node]:
    """What each node of a run is after some of its discarded nodes are reopened; by id, in the order of `nodes`.

    Counters are computed anew from the states of the parents and never added to. Cancelled nodes with one of these
    `fates` are restored, as far as what they depend on allows it now: one whose parent is still lost stays as it is.
    """
    reopened, fates = set(reopened), set[str](fates)
    after = dict(nodes)
    items: dict[int, list[int]] = {}
    parents: dict[int, list[int]] = {number: [] for number in nodes}
    for one in nodes.values():
        if one.map_step is not None:
            items.setdefault(one.map_step, []).append(one.id)
        else:
            for child in one.children:
                parents[child].append(one.id)
    # Items first: a map depends on them, and they on nothing, since they exist.
    for number, own in items.items():
        live, last = 0, 0
        for item in own:
            one = nodes[item]
            if item in reopened or (one.state == StepState.CANCELLED and one.fate in fates):
                full = nodes[number].parallel is not None and live >= (nodes[number].parallel or 0)
                state = StepState.PENDING if full and item not in reopened else StepState.AVAILABLE
                one = after[item] = one._replace(state=state, fate="")
            if one.state != StepState.PENDING:
                last = item
                live += not one.ended
        if nodes[number].parallel is not None:
            after[number] = after[number]._replace(map_next=last or None)
    for number, one in nodes.items():  # a parent's id is below its children's
        if one.map_step is None:
            after[number] = _restored(after, after[number], parents[number], items.get(number), reopened, fates)
    # Whatever is open again with nothing open behind it must itself end the run.
    for number in sorted(after, reverse=True):
        one = after[number]
        if one.map_step is None and not one.ended and all(after[child].ended for child in one.children):
            after[number] = one._replace(sink=True)
    for own in items.values():
        for item in own:
            one = after[item]
            after[item] = one._replace(sink=after[one.map_step].sink if one.map_step is not None else one.sink)
    return after


def _restored(
    after: Mapping[int, Node],
    one: Node,
    parents: list[int],
    items: list[int] | None,
    reopened: set[int],
    fates: set[str],
) -> Node:
    if one.id in reopened:
        return one._replace(state=StepState.AVAILABLE, fate="", pending=0)
    cancelled = one.state == StepState.CANCELLED and one.fate in fates
    if not cancelled and one.state not in (StepState.PENDING, StepState.WAITING):
        return one
    before = [after[number] for number in (parents if items is None else items)]
    open_ = sum(not parent.ended for parent in before)
    failed = any(parent.bad for parent in before)
    if items is not None:
        fate = "dependency" if failed else ""
        if open_:
            return one._replace(state=StepState.WAITING, pending=open_, fate=fate)
        return one if failed else one._replace(state=StepState.COMPLETED, pending=0, fate="")
    if failed and one.policy == _FAIL_RUN:
        return one
    doomed = failed and one.policy == _CANCEL_BRANCH
    skipped = any(parent.skipped for parent in before) and not one.accept_skipped
    fate = "dependency" if doomed else "skipped" if skipped else ""
    if open_:
        return one._replace(state=StepState.PENDING, pending=open_, fate=fate)
    if fate:
        return one if one.fate == fate else one._replace(fate=fate)
    return one._replace(state=StepState.AVAILABLE, pending=0, fate="")


def _must_be_discarded(run: int, node: str, state: str) -> None:
    if state != StepState.EXHAUSTED:
        raise InvalidStateError(f"node {node!r} of run {run} is {state}; only a discarded one can be reopened")


def _locked(statements: db.Statements, run: int, node: str | None) -> Plan[tuple[int, str, bool]]:
    rows = yield Run(statements["lock_step"], {"run_id": run, "node": node})
    if not rows:
        what = f"run {run}" if node is None else f"node {node!r} of run {run}"
        raise NotFoundError(f"{what} is not visible")
    number, state, is_map = rows[0]
    return number, state, bool(is_map)
