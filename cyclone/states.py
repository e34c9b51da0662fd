"""Which states a step and a run can be in, and which transitions exist.

                enqueue            claim               success
      (none) ──────────> available ─────> running ───────────────> completed
         │                ^  ^   ^          │ │ │
         │ delay          │  │   └──────────┘ │ └── last failure, Permanent, crash limit ──> discarded
         v       due      │  │  drain, reclaim│                                                  │
      scheduled ──────────┘  │                │                                          reopen │
         ^                   └────────────────┼──────────────────────────────────────────────────┘
         └──── backoff, snooze ───────────────┘          any state that is not terminal ── cancel ──> cancelled

`pending` (a dependency is not finished) and `waiting` (parked without a worker, as a map whose items run) are states of
nodes in a graph. What a failure had cancelled comes back when the failed node is reopened.
The table below is the only list of transitions; the statements in `sql/` name the state they expect, and the CHECK
constraints of the first migration tie the timestamps to the state.
"""

from __future__ import annotations

from enum import StrEnum


class StepState(StrEnum):
    """The state of a step as stored in `cyclone_steps.state`."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    EXHAUSTED = "discarded"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether a step in this state is finished (an operator may still reopen a discarded one)."""
        return self in _TERMINAL_STEPS


class RunState(StrEnum):
    """The state of a run as stored in `cyclone_runs.state`; a standalone step's run has the matching one."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether a run in this state is finished."""
        return self is not RunState.RUNNING


class ErrorKind(StrEnum):
    """Why a step failed, as stored in `cyclone_steps.error_kind`."""

    RETRYABLE = "retryable"
    PERMANENT = "permanent"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    INVALID_INPUT = "invalid_input"
    DEADLINE = "deadline"
    """Of a run only: its deadline has passed."""


class EventKind(StrEnum):
    """What happened to a step, as an event tells it.

    Those that `recorded` names are stored; the others only reach hooks. `gap` is what a subscriber gets in place of
    events that it was too slow for.
    """

    ENQUEUED = "enqueued"
    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"
    SNOOZED = "snoozed"
    RETRY_SCHEDULED = "retry_scheduled"
    DISCARDED = "discarded"
    RELEASED = "released"
    RECLAIMED = "reclaimed"
    CANCELLED = "cancelled"
    REOPENED = "reopened"
    RUN_STARTED = "run_started"
    RUN_FAILED = "run_failed"
    RUN_CANCELLED = "run_cancelled"
    GAP = "gap"

    @property
    def recorded(self) -> bool:
        """Whether events of this kind are stored in the step's history."""
        return self in _RECORDED


_RECORDED = frozenset(
    {
        EventKind.SNOOZED,
        EventKind.RETRY_SCHEDULED,
        EventKind.DISCARDED,
        EventKind.RELEASED,
        EventKind.RECLAIMED,
        EventKind.CANCELLED,
        EventKind.REOPENED,
        EventKind.RUN_FAILED,
        EventKind.RUN_CANCELLED,
    }
)

_TERMINAL_STEPS = frozenset({StepState.COMPLETED, StepState.EXHAUSTED, StepState.CANCELLED})

_S = StepState
TRANSITIONS: dict[StepState, frozenset[StepState]] = {
    _S.PENDING: frozenset({_S.AVAILABLE, _S.SCHEDULED, _S.WAITING, _S.CANCELLED}),
    _S.SCHEDULED: frozenset({_S.AVAILABLE, _S.CANCELLED}),
    _S.AVAILABLE: frozenset({_S.RUNNING, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.AVAILABLE, _S.SCHEDULED, _S.WAITING, _S.COMPLETED, _S.EXHAUSTED, _S.CANCELLED}),
    _S.WAITING: frozenset({_S.COMPLETED, _S.EXHAUSTED, _S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.EXHAUSTED: frozenset({_S.AVAILABLE}),
    _S.CANCELLED: frozenset({_S.PENDING, _S.AVAILABLE, _S.WAITING, _S.COMPLETED}),
}
