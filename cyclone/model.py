"""The records that cross a border: what a claim hands out, what an execution ends in, what people see of a step.

Times are aware datetimes from the database's clock; durations carry their unit in the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from typing import Any, Generic, NewType, TypeVar

import msgspec

from .states import ErrorKind, EventKind, RunState, StepState

T = TypeVar("T")

RunID = NewType("RunID", str)
"""The id of a run: decimal digits, never used twice in one schema."""

Cursor = NewType("Cursor", str)
"""A place in the recorded events of one server: text to keep and to hand back, nothing more."""


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of a step, also one that a later attempt made good. `node` is only there where several nodes are."""

    attempt: int
    at: datetime
    kind: ErrorKind
    message: str
    traceback: str
    node: str | None = None


class Claimed(msgspec.Struct, frozen=True, kw_only=False, gc=False):
    """One step as a claim hands it to a worker. (id, claim) is its fence. The order of fields is that of
    `claim_steps`.
    """

    claim: int
    id: int
    run_id: int
    node: str
    kind: str
    version: int
    queue: str
    input: str | None  # JSON; None: of a node, to be composed
    attempt: int
    max_attempts: int
    reclaims: int
    snoozes: int
    timeout_s: float | None
    resume: bool
    tags: list[str] | None
    metadata: bytes | None
    enqueued_at: datetime
    graph: int | None  # of its run; None for a standalone step, as the next two
    pos: int | None
    sink: bool | None  # its end may end the run
    deadline_at: datetime | None
    waited_s: float
    failed_dependencies: Sequence[StepError] = ()


class Verb(IntEnum):
    """What becomes of a step after an execution. The flow decides it once, in `execute.decide`."""

    COMPLETE = 0
    RETRY = 1
    DISCARD = 2
    SNOOZE = 3
    RELEASE = 4
    SETTLED = 5  # the completion transaction has already ended the step
    SKIP = 6  # the condition of a node does not hold
    EXPAND = 7  # a map has its list
    CANCEL_RUN = 8


class Failure(msgspec.Struct, frozen=True):
    """Why an execution failed, already cut and redacted."""

    kind: ErrorKind
    message: str
    traceback: str


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How one execution ended. `output` is encoded JSON, or None for SQL NULL; of EXPAND it is the list. `delay_s`
    belongs to RETRY and SNOOZE.
    """

    step: Claimed
    verb: Verb
    output: str | None = None
    delay_s: float = 0.0
    failure: Failure | None = None
    unless_completed: bool = False  # the handler may have completed the step in a transaction of its own
    called: bool = True  # False: the handler was never entered, so the attempt is given back too


class StepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One step as it is stored. `errors` lists every failure, newest last.

    `input` of a node of a run is None: it is composed when the node is executed. `fate` says why a node was or will be
    cancelled: `dependency`, `skipped`, `failure`, `deadline`, `cancel` (of the run) or `alone`.
    """

    run_id: RunID
    node: str
    kind: str
    version: int
    queue: str
    priority: int
    state: StepState
    input: Any
    output: Any
    attempts: int
    max_attempts: int
    snoozes: int
    reclaims: int
    error_kind: ErrorKind | None
    error: str | None
    errors: Sequence[StepError]
    last_crash: str | None
    timeout_s: float | None
    enqueued_at: datetime
    ready_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    due_at: datetime | None
    tags: Sequence[str]
    metadata: Any
    fate: str | None
    unique_key: str | None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One run as it is stored: of a workflow, or a step that was enqueued by itself (`type` says which, `name` of
    what).

    `node`, `error_kind` and `error` tell where and why it failed, was cancelled, or ran out of time (kind `deadline`).
    `discarded` lists the nodes that were discarded, also those whose failure the graph contained.
    """

    id: RunID
    type: str
    name: str
    version: int | None
    key: str | None
    state: RunState
    input: Any
    created_at: datetime
    finished_at: datetime | None
    deadline: datetime | None
    result_node: str | None
    node: str | None
    error_kind: ErrorKind | None
    error: str | None
    discarded: Sequence[str]
    tags: Sequence[str]
    metadata: Any
    keep_for_s: float | None


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A part of a listing. `next` is what to give as `after` for the following part; None: there is none."""

    items: Sequence[T]
    next: str | None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a step, or to a run of a workflow (then it names no step but what decided it).

    `at` is by the database's clock for an event that was recorded, and by that of the process for one that only a hook
    gets; `cursor` is there for recorded ones only. `attempt` is the number of the attempt that it happened in, 0 before
    the first. `actor` is who asked for it (`user@host`), None when nobody did; `host` is where that was, or where the
    worker is. A `gap` names no step.

    What `detail` holds: `delay_s` (snoozed, retry_scheduled), `snoozes` (snoozed),
    `error_kind` and the beginning of `error` (retry_scheduled, discarded), `reason` (reclaimed, cancelled, reopened),
    `reclaims` (reclaimed), `additional_attempts` (reopened), `count` (gap).
    """

    kind: EventKind
    at: datetime
    run_id: RunID | None = None
    node: str | None = None
    step_kind: str | None = None
    queue: str | None = None
    attempt: int | None = None
    detail: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    actor: str | None = None
    host: str | None = None
    cursor: Cursor | None = None
