"""The records that cross a border: what a claim hands out, what an execution ends in, what people see of a step.

Times are aware datetimes from the database's clock; durations carry their unit in the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from typing import Any, NewType

import msgspec

from .states import ErrorKind, EventKind, StepState

RunID = NewType("RunID", str)
"""The id of a run: decimal digits, never used twice in one schema."""

Cursor = NewType("Cursor", str)
"""A place in the recorded events of one server: text to keep and to hand back, nothing more."""


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
    input: bytes
    attempt: int
    max_attempts: int
    reclaims: int
    snoozes: int
    timeout_s: float | None
    resume: bool
    tags: list[str] | None
    metadata: bytes | None
    enqueued_at: datetime
    waited_s: float


class Verb(IntEnum):
    """What becomes of a step after an execution. The flow decides it once, in `execute.decide`."""

    COMPLETE = 0
    RETRY = 1
    DISCARD = 2
    SNOOZE = 3
    RELEASE = 4
    SETTLED = 5  # the completion transaction has already ended the step


class Failure(msgspec.Struct, frozen=True):
    """Why an execution failed, already cut and redacted."""

    kind: ErrorKind
    message: str
    traceback: str


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How one execution ended. `output` is encoded JSON, or None for SQL NULL; `delay_s` belongs to RETRY and
    SNOOZE.
    """

    step: Claimed
    verb: Verb
    output: str | None = None
    delay_s: float = 0.0
    failure: Failure | None = None
    unless_completed: bool = False  # the handler may have completed the step in a transaction of its own
    called: bool = True  # False: the handler was never entered, so the attempt is given back too


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of a step, also one that a later attempt made good."""

    attempt: int
    at: datetime
    kind: ErrorKind
    message: str
    traceback: str


class StepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One step as it is stored. `errors` lists every failure, newest last."""

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


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a step.

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
