"""What can go wrong, as one tree.

    CycloneError
    ├── InvalidOptionError (ValueError)      an option is wrong; raised before any write
    │   ├── InvalidOptionTypeError (TypeError)   … because its type is
    │   ├── InvalidKeyError                  a key breaks the key rules
    │   └── InvalidInputError                an input cannot be encoded or is no value of the input type
    ├── WorkflowDefinitionError              a graph is wrong; raised when it is declared
    ├── ConflictError
    │   ├── SubmitConflictError              .run_id .workflow .key .diff
    │   └── DuplicateError                   .run_id .kind .key
    ├── NotFoundError                        no such run, step or kind
    ├── InvalidStateError                    the step is in a state that does not allow this
    ├── TransactionRequiredError             a *_tx call on a connection that is not in a transaction
    ├── SchemaVersionError                   the database's schema is missing, too old or too new
    ├── ConnectError                         the database cannot be reached
    ├── TargetError                          a pool's target cannot be imported or holds no handlers
    ├── ResultError
    │   ├── RunFailedError                   .run_id .node .error .kind
    │   ├── RunCancelledError                .run_id .reason
    │   └── NoOutputError                    the run has no result
    └── LeaseLostError, CompletionTxError, PoolTimeoutError, OutputTooLargeError, OutputEncodingError,
        OutcomeUnknown                       worker side

    Outcomes a handler raises to steer its step, which are not errors: Permanent, Snooze, RetryAfter, CancelRun.
    Cancelled (BaseException): raised in sync handlers by ctx.check_cancelled().

Database errors pass through as psycopg raised them; waiting raises the built-in TimeoutError.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta


class CycloneError(Exception):
    """Base of every error that Cyclone raises itself."""


class InvalidOptionError(CycloneError, ValueError):
    """An option has a value that is not allowed. Raised before anything is written."""


class InvalidOptionTypeError(InvalidOptionError, TypeError):
    """An option has a value of the wrong type. Raised before anything is written."""


class InvalidKeyError(InvalidOptionError):
    """A key is empty, longer than 256 bytes, or no valid UTF-8 text without NUL."""


class InvalidInputError(InvalidOptionError):
    """An input cannot be stored: JSON cannot hold it, it is too large, or it is no value of the handler's input
    type.
    """


class WorkflowDefinitionError(CycloneError):
    """A graph that cannot be: raised while the workflow is declared, at import."""


class ConflictError(CycloneError):
    """Something else already holds what was asked for."""


class SubmitConflictError(ConflictError):
    """The run of a submit key has another input. The text names where they differ, and no value."""

    def __init__(self, run_id: str, workflow: str, key: str, diff: Sequence[str]) -> None:
        where = ", ".join(diff[:5]) + (", …" if len(diff) > 5 else "")
        super().__init__(
            f"run {run_id} of {workflow!r} has the key {key!r} already, and another input: it differs at {where}"
        )
        self.run_id = run_id
        self.workflow = workflow
        self.key = key
        self.diff = diff
        """JSON pointers to where the inputs differ, as in "/items/0/qty"; "" is the whole."""


class DuplicateError(ConflictError):
    """An active run already holds the unique key of an enqueue."""

    def __init__(self, run_id: str, kind: str, key: str) -> None:
        super().__init__(f"an active run ({run_id}) of {kind!r} already holds the key {key!r}")
        self.run_id = run_id
        self.kind = kind
        self.key = key


class NotFoundError(CycloneError):
    """No run, step or kind of that name is visible."""


class InvalidStateError(CycloneError):
    """The step or run is in a state that does not allow this change."""


class TransactionRequiredError(CycloneError):
    """A call that joins the caller's transaction was given a connection that is not in one."""


class SchemaVersionError(CycloneError):
    """The schema in the database is missing, or older or newer than this release can work with."""


class ConnectError(CycloneError):
    """The database cannot be reached. The message names host and port, never the password."""


class TargetError(CycloneError):
    """The target of a pool (`package.module` or `package.module:registry`) cannot be imported or declares no step."""


class ResultError(CycloneError):
    """A run ended without the result that was waited for."""


class RunFailedError(ResultError):
    """The run failed; the fields tell where and why."""

    def __init__(self, run_id: str, node: str, error: str, kind: str) -> None:
        super().__init__(f"run {run_id} failed at {node!r} ({kind}): {error}")
        self.run_id = run_id
        self.node = node
        self.error = error
        self.kind = kind


class RunCancelledError(ResultError):
    """The run was cancelled."""

    def __init__(self, run_id: str, reason: str | None) -> None:
        super().__init__(f"run {run_id} was cancelled" + (f": {reason}" if reason else ""))
        self.run_id = run_id
        self.reason = reason


class NoOutputError(ResultError):
    """The run has no result: its workflow declares none, or the node that would give it was skipped."""


class LeaseLostError(CycloneError):
    """The worker no longer holds the step: what this execution does changes nothing any more."""


class CompletionTxError(CycloneError):
    """The completion transaction was used in a way that only Cyclone may: it was ended by the handler."""


class PoolTimeoutError(CycloneError):
    """No connection for the completion transaction became free within `completion_pool_timeout`."""


class OutputTooLargeError(CycloneError):
    """The encoded output is larger than `max_output_bytes`."""


class OutputEncodingError(CycloneError):
    """The output cannot be stored: JSON or PostgreSQL cannot hold it."""


class OutcomeUnknown(CycloneError):
    """An earlier execution began the outside call of `ctx.once`, and nobody knows how it ended."""


class Permanent(Exception):
    """Raise it to end the step at once: another attempt cannot help. `raise Permanent("why") from cause` keeps the
    cause.
    """

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)


class Snooze(Exception):
    """Raise it to run the step again after `delay` without spending an attempt.

    `delay` is a timedelta or seconds. Zero or less is accepted here and turned into a permanent failure by the worker.
    """

    def __init__(self, delay: timedelta | float) -> None:
        super().__init__(delay)
        self.delay = delay


class CancelRun(Exception):
    """Raise it to cancel the whole run, as `Client.cancel` does: its own step ends cancelled too, and what it wrote
    on the completion transaction is rolled back. A standalone step is its own run.
    """

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)


class RetryAfter(Exception):
    """Raise it to fail this attempt and wait `delay` (a timedelta or seconds) before the next one, in place of the
    backoff.
    """

    def __init__(self, delay: timedelta | float, reason: object = "") -> None:
        super().__init__(reason or f"retry after {delay}")
        self.delay = delay


class Cancelled(BaseException):
    """Raised in a sync handler by `ctx.check_cancelled()` when the handler should stop. Let it pass through."""
