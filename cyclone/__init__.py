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
    CancelRun,
    CompletionTxError,
    ConflictError,
    ConnectError,
    CycloneError,
    DuplicateError,
    InvalidInputError,
    InvalidKeyError,
    InvalidOptionError,
    InvalidOptionTypeError,
    InvalidStateError,
    LeaseLostError,
    NoOutputError,
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
    SubmitConflictError,
    TargetError,
    TransactionRequiredError,
    WorkflowDefinitionError,
)
from .graph import (
    CANCEL_BRANCH,
    FAIL_RUN,
    RUN_ANYWAY,
    Graph,
    MapOptions,
    Node,
    NodeOptions,
    OnDepFailure,
    ResultWorkflow,
    SubmitOptions,
    Workflow,
    submit,
    submit_once,
    submit_once_tx,
    submit_tx,
    workflow,
)
from .handles import StepHandle, SyncStepHandle
from .model import Cursor, Event, Page, RunID, RunInfo, StepError, StepInfo
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
    Unique,
    action,
    enqueue,
    enqueue_tx,
    lifespan,
    redact,
    step,
)
from .retry import default_backoff, exponential, fixed, linear
from .runs import OnceResult, ResultRun, Run, SyncResultRun, SyncRun
from .states import ErrorKind, EventKind, RunState, StepState

if TYPE_CHECKING:
    from .completion import CompletionTx, SyncCompletionTx
    from .context import Context, ProcessContext, SyncContext
    from .supervisor import Pool
    from .sweep import Sweeper
    from .worker import Worker

__all__ = [
    "AsyncStep",
    "CANCEL_BRANCH",
    "CallOptions",
    "CancelRun",
    "Cancelled",
    "Client",
    "CompletionTx",
    "CompletionTxError",
    "ConflictError",
    "ConnectError",
    "Context",
    "Cursor",
    "CycloneError",
    "DuplicateError",
    "EnqueueManyOptions",
    "EnqueueOptions",
    "ErrorKind",
    "Event",
    "EventKind",
    "FAIL_RUN",
    "Graph",
    "InvalidInputError",
    "InvalidKeyError",
    "InvalidOptionError",
    "InvalidOptionTypeError",
    "InvalidStateError",
    "LeaseLostError",
    "MapOptions",
    "NoOutputError",
    "Node",
    "NodeOptions",
    "NotFoundError",
    "OnDepFailure",
    "OnceResult",
    "OutputEncodingError",
    "OutputTooLargeError",
    "Page",
    "Permanent",
    "Pool",
    "PoolTimeoutError",
    "ProcessContext",
    "ProcessStep",
    "RUN_ANYWAY",
    "Redaction",
    "Registry",
    "ResultError",
    "ResultRun",
    "ResultWorkflow",
    "RetryAfter",
    "Run",
    "RunCancelledError",
    "RunFailedError",
    "RunID",
    "RunInfo",
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
    "SubmitConflictError",
    "SubmitOptions",
    "Sweeper",
    "SyncClient",
    "SyncCompletionTx",
    "SyncContext",
    "SyncResultRun",
    "SyncRun",
    "SyncStep",
    "SyncStepHandle",
    "TargetError",
    "TransactionRequiredError",
    "Unique",
    "Worker",
    "Workflow",
    "WorkflowDefinitionError",
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
    "submit",
    "submit_once",
    "submit_once_tx",
    "submit_tx",
    "workflow",
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
