"""Handles: what a caller holds of a step that was enqueued, for looking, waiting and changing.

The same for a client and for a handler's context; what differs is who runs the plans.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from . import codec, config, control, db, views, wake
from .errors import InvalidOptionError, ResultError, RunCancelledError, RunFailedError
from .events import Hook
from .model import RunID
from .plan import Mark, Plan, in_handler
from .registry import Step
from .states import ErrorKind, StepState

T = TypeVar("T")
Out = TypeVar("Out")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.010, 0.500


class Runner(Protocol):
    """Runs a plan for async code."""

    async def __call__(self, plan: Plan[T], /) -> T: ...


class SyncRunner(Protocol):
    """Runs a plan for sync code."""

    def __call__(self, plan: Plan[T], /) -> T: ...


class HandleBase(msgspec.Struct, Generic[Out], eq=False, gc=False):
    # A structure of msgspec's, and not tracked by the garbage collector: it can be in no cycle, and of 100,000 that a
    # call returns their making took 60 ms to 260 ms otherwise (measured: 11 ms so).
    _statements: db.Statements
    _step: Step[Any, Out]
    run_id: RunID
    """The id of the run that the step is."""
    _hook: Hook | None
    created: bool
    """Whether this call enqueued it; False: it is the active step that has the unique key."""

    @property
    def node(self) -> str:
        """The name of the node: that of the step."""
        return self._step.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.node!r}, run {self.run_id}>"

    def _look(self) -> Plan[views.Result]:
        return views.result(self._statements, self.run_id, self.node)

    def _cancel(self, reason: str | None) -> Plan[bool]:
        return cancel(self._statements, self._hook, self.run_id, self.node, control.request(reason=reason))

    def _retry(self, asked: control.Request) -> Plan[int]:
        return reopen(self._statements, self._hook, self.run_id, self.node, asked)

    def _output(self, found: views.Result) -> Out:
        if found.state is StepState.EXHAUSTED:
            raise RunFailedError(self.run_id, self.node, found.error or "", found.kind or ErrorKind.RETRYABLE)
        if found.state is StepState.CANCELLED:
            raise RunCancelledError(self.run_id, found.error)
        if found.output is None:  # an action's
            return cast("Out", None)
        try:
            return self._step.output_codec.decode(found.output)
        except codec.DecodeError as exc:
            raise ResultError(f"run {self.run_id} completed, but its output is no {self.node!r} output: {exc}") from exc


class StepHandle(HandleBase[Out]):
    """A step that was enqueued by an async client, or from an async handler.

    Every call raises NotFoundError if the step is not visible, in particular before the transaction that it joined has
    committed. Errors of the database pass through as psycopg raised them.
    """

    _run: Runner

    async def state(self) -> StepState:
        """The state it is in now."""
        return (await self._run(self._look())).state

    async def wait(self, timeout: timedelta | float | None = None) -> StepState:
        """Waits until it has ended, and returns the state it ended in.

        It looks at growing intervals, from 10 ms to half a second. `timeout` is a timedelta or seconds (default: no
        limit; in a handler one must be given, else InvalidOptionError); past it the built-in TimeoutError is raised,
        after at least one look.
        """
        return (await self._ended(timeout)).state

    async def result(self, timeout: timedelta | float | None = None) -> Out:
        """Waits as `wait` does, and returns the output.

        Raises RunFailedError if it failed, RunCancelledError if it was cancelled, ResultError if the stored output is
        none of the declared type, TimeoutError if it has not ended in time.
        """
        return self._output(await self._ended(timeout))

    async def cancel(self, reason: str | None = None) -> bool:
        """Cancels it, as `Client.cancel_step` does; False if it had ended already."""
        return await self._run(self._cancel(reason))

    async def retry(
        self, *, additional_attempts: int | None = None, reason: str | None = None, actor: str | None = None
    ) -> None:
        """Reopens it after it was discarded, as `Client.retry` does."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts)
        await self._run(self._retry(asked))

    async def _ended(self, timeout: timedelta | float | None) -> views.Result:
        for pause_s in waiting(timeout):
            found = await self._run(self._look())
            if found.state.terminal:
                return found
            await asyncio.sleep(pause_s)
        raise _late(self)


class SyncStepHandle(HandleBase[Out]):
    """As StepHandle, for a step that was enqueued by a sync client, or from a sync handler."""

    _run: SyncRunner

    def state(self) -> StepState:
        """As StepHandle.state."""
        return self._run(self._look()).state

    def wait(self, timeout: timedelta | float | None = None) -> StepState:
        """As StepHandle.wait, blocking."""
        return self._ended(timeout).state

    def result(self, timeout: timedelta | float | None = None) -> Out:
        """As StepHandle.result, blocking."""
        return self._output(self._ended(timeout))

    def cancel(self, reason: str | None = None) -> bool:
        """As StepHandle.cancel."""
        return self._run(self._cancel(reason))

    def retry(
        self, *, additional_attempts: int | None = None, reason: str | None = None, actor: str | None = None
    ) -> None:
        """As StepHandle.retry."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts)
        self._run(self._retry(asked))

    def _ended(self, timeout: timedelta | float | None) -> views.Result:
        for pause_s in waiting(timeout):
            found = self._run(self._look())
            if found.state.terminal:
                return found
            time.sleep(pause_s)
        raise _late(self)


def cancel(statements: db.Statements, hook: Hook | None, run_id: str, node: str, asked: control.Request) -> Plan[bool]:
    """Cancels one step in a commit of its own, then tells those who wait for it."""
    number = views.run_number(run_id)
    yield Mark.BEGIN
    done = yield from control.cancel_step(statements, number, node, asked)
    yield Mark.COMMIT
    if hook is not None:
        hook.tell(done or [])
    return done is not None


def cancel_run(statements: db.Statements, hook: Hook | None, run_id: str, asked: control.Request) -> Plan[bool]:
    """Cancels a run, the last of its nodes included."""
    number = views.run_number(run_id)
    yield Mark.BEGIN
    done = yield from control.cancel_run(statements, number, asked)
    yield Mark.COMMIT
    if done is None:
        return False
    if hook is not None:
        hook.tell(done)
    yield from control.end_rounds(statements, number)
    return True


def reopen(
    statements: db.Statements, hook: Hook | None, run_id: str, node: str | None, asked: control.Request
) -> Plan[int]:
    """Reopens in a commit of its own, then tells those who wait for it."""
    number = views.run_number(run_id)
    yield Mark.BEGIN
    done = yield from control.reopen(statements, number, node, asked, notify=False)
    yield Mark.COMMIT
    if hook is not None:
        hook.tell(done.events)
    if done.asleep:
        yield from wake.sleepers(statements)
    return len(done.events)


def waiting(timeout: timedelta | float | None) -> Iterator[float]:
    """The pauses of who waits for an end. A full queue of handlers that do so without a limit would stand still for
    ever: InvalidOptionError.
    """
    if timeout is None and in_handler.get():
        raise InvalidOptionError(
            "a handler that waits without a limit can keep the slot that what it waits for needs; give timeout="
        )
    return pauses(timeout)


def pauses(timeout: timedelta | float | None, first_s: float = _FIRST_PAUSE_S) -> Iterator[float]:
    """How long to sleep after each look; the last look comes when the time is up."""
    deadline = None if timeout is None else time.monotonic() + config.seconds("timeout", timeout, zero=True)
    pause_s = first_s
    while True:
        # Jitter, so that many who wait for one thing do not look in step.
        sleep_s = pause_s * random.uniform(0.75, 1.25)
        if deadline is not None:
            left_s = deadline - time.monotonic()
            yield max(min(sleep_s, left_s), 0.0)
            if left_s <= 0:
                return
        else:
            yield sleep_s
        pause_s = min(pause_s * 1.5, _LAST_PAUSE_S)


def _late(handle: HandleBase[Any]) -> TimeoutError:
    return TimeoutError(f"run {handle.run_id} ({handle.node}) has not ended yet")
