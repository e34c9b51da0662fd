"""Cyclone: durable steps on PostgreSQL.

Declare a step, enqueue it with a client, let a pool of workers run it. Importing this package reads no environment and
connects to nothing; what only workers need is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .client import Client, SyncClient
from .errors import (
    Cancelled,
    CompletionTxError,
    ConflictError,
    ConnectError,
    CycloneError,
    InvalidInputError,
    InvalidOptionError,
    InvalidOptionTypeError,
    InvalidStateError,
    LeaseLostError,
    NotFoundError,
    OutputEncodingError,
    OutputTooLargeError,
    Permanent,
    PoolTimeoutError,
    ResultError,
    RetryAfter,
    RunCancelledError,
    RunFailedError,
    SchemaVersionError,
    Snooze,
    TargetError,
    TransactionRequiredError,
)
from .handles import StepHandle, SyncStepHandle
from .model import Cursor, Event, RunID, StepError, StepInfo
from .registry import (
    AsyncStep,
    CallOptions,
    EnqueueManyOptions,
    EnqueueOptions,
    ProcessStep,
    Redaction,
    Registry,
    State,
    Step,
    StepOptions,
    SyncStep,
    action,
    enqueue,
    enqueue_tx,
    lifespan,
    redact,
    step,
)
from .retry import default_backoff, exponential, fixed, linear
from .states import ErrorKind, EventKind, RunState, StepState

if TYPE_CHECKING:
    from .completion import CompletionTx, SyncCompletionTx
    from .context import Context, ProcessContext, SyncContext
    from .supervisor import Pool
    from .sweep import Sweeper
    from .worker import Worker

__all__ = [
    "AsyncStep",
    "CallOptions",
    "Cancelled",
    "Client",
    "CompletionTx",
    "CompletionTxError",
    "ConflictError",
    "ConnectError",
    "Context",
    "Cursor",
    "CycloneError",
    "EnqueueManyOptions",
    "EnqueueOptions",
    "ErrorKind",
    "Event",
    "EventKind",
    "InvalidInputError",
    "InvalidOptionError",
    "InvalidOptionTypeError",
    "InvalidStateError",
    "LeaseLostError",
    "NotFoundError",
    "OutputEncodingError",
    "OutputTooLargeError",
    "Permanent",
    "Pool",
    "PoolTimeoutError",
    "ProcessContext",
    "ProcessStep",
    "Redaction",
    "Registry",
    "ResultError",
    "RetryAfter",
    "RunCancelledError",
    "RunFailedError",
    "RunID",
    "RunState",
    "SchemaVersionError",
    "Snooze",
    "State",
    "Step",
    "StepError",
    "StepHandle",
    "StepInfo",
    "StepOptions",
    "StepState",
    "Sweeper",
    "SyncClient",
    "SyncCompletionTx",
    "SyncContext",
    "SyncStep",
    "SyncStepHandle",
    "TargetError",
    "TransactionRequiredError",
    "Worker",
    "action",
    "default_backoff",
    "enqueue",
    "enqueue_tx",
    "exponential",
    "fixed",
    "lifespan",
    "linear",
    "redact",
    "step",
]

# Where names live that a program which only enqueues never needs: they bring the worker with its metrics.
_LATER = {
    "CompletionTx": "completion",
    "Context": "context",
    "Pool": "supervisor",
    "ProcessContext": "context",
    "Sweeper": "sweep",
    "SyncCompletionTx": "completion",
    "SyncContext": "context",
    "Worker": "worker",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = found
    return found
