"""Runs: what a caller holds of a workflow that was submitted, for looking, waiting and changing.

The same for a client and for a handler's context; what differs is who runs the plans. Whoever has only the id makes a
handle with `workflow.get(client, run_id)`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

import msgspec

from . import codec, config, control, db, graph, handles, store, views
from .errors import (
    NoOutputError,
    ResultError,
    RunCancelledError,
    RunFailedError,
    SubmitConflictError,
)
from .events import Hook
from .handles import Runner, SyncRunner
from .model import Event, RunID, RunInfo, StepInfo
from .states import ErrorKind, RunState

Out = TypeVar("Out")
R = TypeVar("R")

_FIRST_POLL_S = 0.020


class Door(msgspec.Struct, frozen=True):
    """What handles need of whoever made them."""

    statements: db.Statements
    run: Any
    hook: Hook | None = None


class OnceResult(msgspec.Struct, Generic[R], frozen=True):
    """What came of one item of `submit_once_many`.

    `created` is true only where this call made the run; `error` is there when the key's run has another input. `run` is
    the key's run in any case.
    """

    run: R
    created: bool
    error: SubmitConflictError | None = None


class _RunBase:
    __slots__ = ("_door", "_result", "id", "workflow")

    def __init__(self, door: Door, workflow: str, run_id: RunID, result: codec.Codec[Any] | None = None) -> None:
        self.id = run_id
        """The id of the run: decimal digits."""
        self.workflow = workflow
        """The name of the workflow."""
        self._door = door
        self._result = result

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.workflow!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RunBase) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def _late(self) -> TimeoutError:
        return TimeoutError(f"run {self.id} ({self.workflow}) has not ended yet")

    def _output(self, found: views.RunResult) -> Any:
        if found.state is RunState.FAILED:
            kind = found.error_kind or ErrorKind.RETRYABLE
            raise RunFailedError(self.id, found.error_node or "", found.error or "", kind)
        if found.state is RunState.CANCELLED:
            raise RunCancelledError(self.id, found.error)
        if found.node is None or self._result is None:
            raise NoOutputError(f"run {self.id} has no result: its workflow was declared without one")
        if found.skipped:
            raise NoOutputError(f"run {self.id} has no result: node {found.node!r} was skipped")
        if found.output is None:  # an action's
            return None
        try:
            return self._result.decode(found.output)
        except codec.DecodeError as exc:
            raise ResultError(
                f"run {self.id} completed, but its output is no result of {self.workflow!r}: {exc}"
            ) from exc


class _AsyncRun(_RunBase):
    __slots__ = ()

    @property
    def _run(self) -> Runner:
        return self._door.run  # type: ignore[no-any-return]

    async def info(self) -> RunInfo:
        """The run as it is stored now. Raises NotFoundError if it is not visible, as before its transaction commits."""
        return await self._run(views.run(self._door.statements, self.id))

    async def state(self) -> RunState:
        """The state it is in now. Raises NotFoundError as `info` does."""
        return (await self._look()).state

    async def wait(self, timeout: timedelta | float | None = None) -> RunState:
        """Waits until it has ended, and returns the state it ended in.

        It looks at growing intervals, from 10 ms to half a second. `timeout` is a timedelta or seconds (default: no
        limit; in a handler one must be given, else InvalidOptionError); past it the built-in TimeoutError is raised,
        after at least one look. Raises NotFoundError at once if the run is not visible.
        """
        return (await self._ended(timeout)).state

    async def steps(self) -> list[StepInfo]:
        """Its nodes as they are stored, in the order of the graph; the items of maps last."""
        return await self._run(views.steps(self._door.statements, self.id))

    async def events(self, *, follow: bool = True) -> AsyncGenerator[Event]:
        """What was recorded of it, oldest first; with `follow` also what comes, until the run has ended."""
        feed = views.Feed(self._door.statements, run_id=self.id)
        pauses = handles.pauses(None, _FIRST_POLL_S)
        while True:
            over = not follow or (await self._look()).state.terminal
            while page := await self._run(feed.page()):
                for event in page:
                    yield event
                pauses = handles.pauses(None, _FIRST_POLL_S)
            if over:
                return
            await asyncio.sleep(next(pauses))

    async def retry(
        self,
        node: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> None:
        """Reopens one discarded node, as `Client.retry` does."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        await self._run(handles.reopen(self._door.statements, self._door.hook, self.id, node, asked))

    async def retry_all(
        self,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> int:
        """Reopens every discarded node, as `Client.retry_all` does; returns how many there were."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        return await self._run(handles.reopen(self._door.statements, self._door.hook, self.id, None, asked))

    async def cancel(self, reason: str | None = None) -> bool:
        """Cancels it, as `Client.cancel` does; False if it had ended already."""
        asked = control.request(reason=reason)
        return await self._run(handles.cancel_run(self._door.statements, self._door.hook, self.id, asked))

    async def _look(self) -> views.RunResult:
        return await self._run(views.run_result(self._door.statements, self.id))

    async def _ended(self, timeout: timedelta | float | None) -> views.RunResult:
        for pause_s in handles.waiting(timeout):
            found = await self._look()
            if found.state.terminal:
                return found
            await asyncio.sleep(pause_s)
        raise self._late()


class Run(_AsyncRun):
    """A run of a workflow without a result, had from an async client or in an async handler."""

    __slots__ = ()


class ResultRun(_AsyncRun, Generic[Out]):
    """A run of a workflow with a typed result, had from an async client or in an async handler."""

    __slots__ = ()

    async def result(self, timeout: timedelta | float | None = None) -> Out:
        """Waits as `wait` does, and returns the result.

        Raises RunFailedError if it failed, RunCancelledError if it was cancelled, NoOutputError if the run has no
        result (it was submitted by a workflow without one, or the node was skipped), ResultError if what is stored is
        no value of the type, TimeoutError if it has not ended in time.
        """
        return self._output(await self._ended(timeout))  # type: ignore[no-any-return]


class _SyncRun(_RunBase):
    __slots__ = ()

    @property
    def _run(self) -> SyncRunner:
        return self._door.run  # type: ignore[no-any-return]

    def info(self) -> RunInfo:
        """As Run.info."""
        return self._run(views.run(self._door.statements, self.id))

    def state(self) -> RunState:
        """As Run.state."""
        return self._look().state

    def wait(self, timeout: timedelta | float | None = None) -> RunState:
        """As Run.wait, blocking."""
        return self._ended(timeout).state

    def steps(self) -> list[StepInfo]:
        """As Run.steps."""
        return self._run(views.steps(self._door.statements, self.id))

    def events(self, *, follow: bool = True) -> Generator[Event]:
        """As Run.events, blocking."""
        feed = views.Feed(self._door.statements, run_id=self.id)
        pauses = handles.pauses(None, _FIRST_POLL_S)
        while True:
            over = not follow or self._look().state.terminal
            while page := self._run(feed.page()):
                yield from page
                pauses = handles.pauses(None, _FIRST_POLL_S)
            if over:
                return
            time.sleep(next(pauses))

    def retry(
        self,
        node: str,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> None:
        """As Run.retry."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        self._run(handles.reopen(self._door.statements, self._door.hook, self.id, node, asked))

    def retry_all(
        self,
        *,
        additional_attempts: int | None = None,
        deadline: datetime | timedelta | float | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> int:
        """As Run.retry_all."""
        asked = control.request(actor=actor, reason=reason, additional_attempts=additional_attempts, deadline=deadline)
        return self._run(handles.reopen(self._door.statements, self._door.hook, self.id, None, asked))

    def cancel(self, reason: str | None = None) -> bool:
        """As Run.cancel."""
        asked = control.request(reason=reason)
        return self._run(handles.cancel_run(self._door.statements, self._door.hook, self.id, asked))

    def _look(self) -> views.RunResult:
        return self._run(views.run_result(self._door.statements, self.id))

    def _ended(self, timeout: timedelta | float | None) -> views.RunResult:
        for pause_s in handles.waiting(timeout):
            found = self._look()
            if found.state.terminal:
                return found
            time.sleep(pause_s)
        raise self._late()


class SyncRun(_SyncRun):
    """As Run, had from a sync client or in a sync handler."""

    __slots__ = ()


class SyncResultRun(_SyncRun, Generic[Out]):
    """As ResultRun, had from a sync client or in a sync handler."""

    __slots__ = ()

    def result(self, timeout: timedelta | float | None = None) -> Out:
        """As ResultRun.result, blocking."""
        return self._output(self._ended(timeout))  # type: ignore[no-any-return]


# Submitting: the same for a client and for a handler's context, which differ in how a batch is stored.


def _parts(items: Iterable[tuple[str, Any]]) -> tuple[list[str], list[Any]]:
    keys: list[str] = []
    inputs: list[Any] = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"items are pairs of a key and an input, not {type(item).__name__}")
        keys.append(item[0])
        inputs.append(item[1])
    return keys, inputs


class AsyncSubmissions:
    """Submits workflows for async code. `store` writes a batch in the transaction that it is given, or for None in
    one of its own, and returns what came of each.
    """

    def __init__(
        self,
        door: Door,
        store: Callable[[store.Runs, Any], Awaitable[list[store.Submitted]]],
        max_input_bytes: int,
    ) -> None:
        self._door = door
        self._store = store
        self._max_input_bytes = max_input_bytes

    def get(self, workflow: graph.AnyWorkflow, run_id: str) -> Any:
        """The handle of a run, without a look at the database."""
        views.run_number(run_id)
        kind: Any = Run if workflow.result_codec is None else ResultRun
        return kind(self._door, workflow.name, RunID(run_id), workflow.result_codec)

    async def submit(
        self, workflow: graph.AnyWorkflow, inputs: Iterable[Any], options: graph.SubmitOptions, tx: Any = None
    ) -> list[Any]:
        """A new run for each input."""
        batch = store.prepare_runs(workflow, inputs, options, max_input_bytes=self._max_input_bytes)
        found = await self._store(batch, tx) if batch.inputs else []
        return [self.get(workflow, one.run_id) for one in found]

    async def submit_once(
        self,
        workflow: graph.AnyWorkflow,
        items: Iterable[tuple[str, Any]],
        options: graph.SubmitOptions,
        compare: object,
        tx: Any = None,
    ) -> list[OnceResult[Any]]:
        """At most one run for each key."""
        keys, inputs = _parts(items)
        batch = store.prepare_runs(
            workflow, inputs, options, max_input_bytes=self._max_input_bytes, keys=keys, compare=compare
        )
        found = await self._store(batch, tx) if batch.inputs else []
        return [OnceResult(self.get(workflow, one.run_id), one.created, one.error) for one in found]

    async def find(self, workflow: graph.AnyWorkflow, key: str) -> Any:
        """The handle of the run that has a key, or None."""
        plan = store.find_run(self._door.statements, workflow.name, config.key("key", key))
        found = await self._door.run(plan)
        return None if found is None else self.get(workflow, found)


class SyncSubmissions:
    """The same for sync code."""

    def __init__(
        self, door: Door, store: Callable[[store.Runs, Any], list[store.Submitted]], max_input_bytes: int
    ) -> None:
        self._door = door
        self._store = store
        self._max_input_bytes = max_input_bytes

    def get(self, workflow: graph.AnyWorkflow, run_id: str) -> Any:
        """As AsyncSubmissions.get."""
        views.run_number(run_id)
        kind: Any = SyncRun if workflow.result_codec is None else SyncResultRun
        return kind(self._door, workflow.name, RunID(run_id), workflow.result_codec)

    def submit(
        self, workflow: graph.AnyWorkflow, inputs: Iterable[Any], options: graph.SubmitOptions, tx: Any = None
    ) -> list[Any]:
        """As AsyncSubmissions.submit."""
        batch = store.prepare_runs(workflow, inputs, options, max_input_bytes=self._max_input_bytes)
        found = self._store(batch, tx) if batch.inputs else []
        return [self.get(workflow, one.run_id) for one in found]

    def submit_once(
        self,
        workflow: graph.AnyWorkflow,
        items: Iterable[tuple[str, Any]],
        options: graph.SubmitOptions,
        compare: object,
        tx: Any = None,
    ) -> list[OnceResult[Any]]:
        """As AsyncSubmissions.submit_once."""
        keys, inputs = _parts(items)
        batch = store.prepare_runs(
            workflow, inputs, options, max_input_bytes=self._max_input_bytes, keys=keys, compare=compare
        )
        found = self._store(batch, tx) if batch.inputs else []
        return [OnceResult(self.get(workflow, one.run_id), one.created, one.error) for one in found]

    def find(self, workflow: graph.AnyWorkflow, key: str) -> Any:
        """As AsyncSubmissions.find."""
        plan = store.find_run(self._door.statements, workflow.name, config.key("key", key))
        found = self._door.run(plan)
        return None if found is None else self.get(workflow, found)
