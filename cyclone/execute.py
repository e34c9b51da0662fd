"""Execute: runs one claimed step and turns whatever happens into one Outcome.

Look up the handler, decode the input, start the clock, call, and judge. `decide` is the only place that says what an
exception means. An execution ends exactly once: when its handler ends, or when it has outlived its time and grace; a
handler that goes on after that is ignored, and the fence refuses what it still tries to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import psycopg

from . import codec, config, context, retry, subprocesses
from .completion import CompletionAborted
from .errors import (
    Cancelled,
    CancelRun,
    CompletionTxError,
    InvalidOptionError,
    LeaseLostError,
    OutputEncodingError,
    OutputTooLargeError,
    Permanent,
    PoolTimeoutError,
    RetryAfter,
    Snooze,
)
from .model import Claimed, Failure, Outcome, Verb
from .plan import in_handler
from .registry import AsyncStep, ProcessStep, Step
from .states import ErrorKind

log = logging.getLogger("cyclone")

Why = Literal["timeout", "drain", "order", "lost"]
STEERING = (Permanent, Snooze, RetryAfter, CancelRun)
"""What a handler raises to say what becomes of its step."""
_SLICE_S = 0.005  # so long handlers that do not suspend may run on end
CUT = "\n… [cut]"
REDACTION_FAILED = "[redaction failed]"
# Shut down, starting, idle for too long; a lock that was not given; a server that has become read-only.
_SERVER_STATES = frozenset({"57P01", "57P02", "57P03", "57P05", "55P03", "25006"})


class Limits:
    """What an execution must keep to, in its output and in what is told of its failures.

    `redactions` are given every text about a failure, whole, before it is cut, stored or logged.
    """

    __slots__ = ("_redactions", "log", "max_error_bytes", "max_output_bytes")

    def __init__(
        self, *, max_output_bytes: int, max_error_bytes: int, redactions: Sequence[Callable[[str], object]] = ()
    ) -> None:
        self.max_output_bytes = max_output_bytes
        self.max_error_bytes = max_error_bytes
        self._redactions = redactions
        self.log: logging.LoggerAdapter[logging.Logger] = _FailureLog(log, self.redacted if redactions else None)
        """For lines that may show a part of what a handler raised."""

    def redacted(self, text: str) -> str:
        """A text that PostgreSQL can store, without what the redactions take out. It never fails."""
        text = _storable(text)
        for redaction in self._redactions:
            try:
                found = redaction(text)
            except BaseException as exc:  # nothing of it is shown: its message may well quote the text
                log.error("redact raised %s: the text is not stored", type(exc).__name__)
                return REDACTION_FAILED
            if not isinstance(found, str):
                log.error("redact returned %s and no str: the text is not stored", type(found).__name__)
                return REDACTION_FAILED
            text = _storable(found)
        return text

    def message(self, text: str) -> str:
        """A message as it is stored. When too long its end goes."""
        return clean(self.redacted(text), self.max_error_bytes)

    def traceback(self, text: str) -> str:
        """A traceback as it is stored. When too long its middle goes: the beginning tells where the handler was, also
        when the message is what makes it long, and the end what was raised last.
        """
        text = self.redacted(text)
        data = text.encode()
        if len(data) <= self.max_error_bytes:
            return text
        room = max(self.max_error_bytes - len(CUT.encode()) - 1, 0)
        head = room // 4
        tail = len(data) - (room - head)
        return f"{data[:head].decode(errors='ignore')}{CUT}\n{data[tail:].decode(errors='ignore')}"

    def trace(self, exc: BaseException) -> str:
        """The traceback of an exception as it is stored."""
        return self.traceback(format_traceback(exc))


class _FailureLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines and tracebacks are redacted."""

    def __init__(self, logger: logging.Logger, redact: Callable[[str], str] | None) -> None:
        super().__init__(logger)
        self._redact = redact

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self._redact is None:
            super().log(level, msg, *args, **kwargs)
        elif self.isEnabledFor(level):
            self.logger.log(level, "%s", self._redact(log_text(msg, args, kwargs)))


def log_text(msg: object, args: Sequence[object], options: Mapping[str, Any]) -> str:
    """What a logger would write, with the traceback that belongs to it."""
    text = str(msg) % tuple(args) if args else str(msg)
    exc = options.get("exc_info")
    if exc and not isinstance(exc, BaseException):
        exc = sys.exc_info()[1]
    return f"{text}\n{format_traceback(exc)}" if exc else text


@dataclass(slots=True, eq=False)
class Host:
    """What all executions of a worker share. `on_end` is called exactly once for each, in the loop's thread, with the
    outcome, or with None when the step is no longer ours and there is nothing to say.
    """

    loop: asyncio.AbstractEventLoop
    state: Any
    async_doors: context.AsyncDoors
    sync_doors: context.SyncDoors
    children: subprocesses.Children
    limits: Limits
    threads: Threads
    home: contextvars.Context
    """Handlers begin with a copy of it: what one sets in its context, none of the others sees."""
    on_end: Callable[[Execution, Outcome | None], None]


class Execution:
    """One execution of one step."""

    # Class attributes are the defaults, so that an execution without events of its own stores hardly any of them.
    why: Why | None = None
    committing = False
    over = False
    used_tx = False
    page_index = -1
    gate: Any = None
    started = 0.0
    _ctx: context.Context | context.SyncContext | None = None
    _child: subprocesses.Use | None = None
    _task: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _entered = False

    def __init__(self, claimed: Claimed, handler: Step[Any, Any], host: Host) -> None:
        self.claimed = claimed
        self.handler = handler
        self._host = host
        self._limits = host.limits

    def start(self) -> None:
        """Starts the handler: in a task of the loop, a thread, or a thread that has a process run it."""
        host, handler = self._host, self.handler
        if isinstance(handler, AsyncStep):
            coro = self.coroutine()
            if coro is not None:
                self._task = task(host, coro)
                self._start_clock()
            return
        try:
            value = handler.decode_input(self.claimed.version, self.claimed.input)
        except BaseException as exc:
            self._refuse_input(exc)
            return
        if isinstance(handler, ProcessStep):
            self._start_thread(self._run_process)
        else:
            self._start_clock()
            self._ctx = ctx = context.SyncContext(self.claimed, host.state, host.sync_doors)
            self._start_thread(lambda: self._run_sync(ctx, value))

    def coroutine(self) -> Coroutine[Any, Any, None] | None:
        """The execution of an async handler, still to be begun. None: it is over, as its input is none."""
        claimed, host = self.claimed, self._host
        try:
            value = self.handler.decode_input(claimed.version, claimed.input)
        except BaseException as exc:
            self._refuse_input(exc)
            return None
        self._ctx = ctx = context.Context(claimed, host.state, host.async_doors)
        return self._run(ctx, value)

    def suspend(self, owner: asyncio.Task[None]) -> None:
        """The handler waits for something, in a task that was not made for it alone but is its own from now on."""
        self._task = owner
        self._start_clock()

    def _refuse_input(self, exc: BaseException) -> None:
        # Whatever was raised, even SystemExit: an upgrade is the user's code, and must not end the loop.
        self._finish(invalid(exc, self.claimed, self.handler, self._limits))

    def _start_thread(self, job: Callable[[], None]) -> None:
        try:
            self._host.threads.start(job)
        except RuntimeError as exc:  # the system has no thread to give, and the worker has other steps
            self._finish(self._judge(exc))

    def _start_clock(self) -> None:
        timeout_s = self._timeout_s
        if timeout_s is not None and self.why is None and not self.over:
            self._timer = self._host.loop.call_later(timeout_s, self.end, "timeout")

    @property
    def _timeout_s(self) -> float | None:
        given = self.claimed.timeout_s
        return given if given is not None else self.handler.settings.timeout_s

    def end(self, why: Why) -> None:
        """Asks the handler to stop. It has its step's grace to do so; then the execution ends without it."""
        if self.over or self.committing or (self.why is not None and why != "lost"):
            return
        first = self.why is None
        self.why = why
        if self._ctx is not None:
            self._ctx._order_end(lost=why == "lost")  # pyright: ignore[reportPrivateUsage]
        if not first:
            return
        if self._child is not None:
            self._child.terminate()
        if self._task is not None:
            self._task.cancel()
            if not self._entered:  # a task cancelled before its first step never runs any of its code
                self._finish(Outcome(self.claimed, Verb.RELEASE, called=False) if why == "drain" else self._stopped())
                return
        if self._timer is not None:
            self._timer.cancel()
        grace_s = self.handler.settings.grace_s
        self._timer = self._host.loop.call_later(grace_s, self.give_up)

    def give_up(self) -> None:
        """Ends the execution although its handler goes on."""
        if self.over or self.committing:
            return
        fate = "it goes on unheeded"
        if self._child is not None:
            fate = "its process is killed"
            self._child.kill()
        log.warning(
            "step %s (%s) ignored the request to stop (%s); %s, attempt %d",
            self.claimed.id, self.handler.name, self.why, fate, self.claimed.attempt,
        )  # fmt: skip
        self._finish(self._stopped())

    def _finish(self, outcome: Outcome | None) -> None:
        if self.over:
            return
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._host.on_end(self, outcome)
        self._task = None  # which refers to this in turn: such a circle would be left to the garbage collector

    async def _run(self, ctx: context.Context, value: Any) -> None:
        self._entered = True
        outcome: Outcome | None
        try:
            result = await self.handler._call(ctx, value)  # pyright: ignore[reportPrivateUsage]
            outcome = self._returned(ctx, result)
            if outcome.verb == Verb.SETTLED:
                self.committing = self.used_tx = True
                await ctx._commit(outcome.output)  # pyright: ignore[reportPrivateUsage]
        except BaseException as exc:
            # SystemExit and KeyboardInterrupt too: out of a task they would stop the whole worker.
            outcome = self._judge(exc)
        outcome = self._unless_completed(ctx, outcome)
        self.committing = False
        if ctx._close():  # pyright: ignore[reportPrivateUsage]
            try:
                await ctx._end()  # pyright: ignore[reportPrivateUsage]
            except BaseException as exc:
                log.warning("could not give back the connection of step %s: %s", self.claimed.id, exc)
        self._finish(outcome)

    def _run_sync(self, ctx: context.SyncContext, value: Any) -> None:
        outcome: Outcome | None
        try:
            result = self.handler._call(ctx, value)  # pyright: ignore[reportPrivateUsage]
            outcome = self._returned(ctx, result)
            if outcome.verb == Verb.SETTLED:
                self.committing = self.used_tx = True
                ctx._commit(outcome.output)  # pyright: ignore[reportPrivateUsage]
        except BaseException as exc:
            outcome = self._judge(exc)
        outcome = self._unless_completed(ctx, outcome)
        self.committing = False
        if ctx._close():  # pyright: ignore[reportPrivateUsage]
            try:
                ctx._end()  # pyright: ignore[reportPrivateUsage]
            except BaseException as exc:
                log.warning("could not give back the connection of step %s: %s", self.claimed.id, exc)
        self._in_loop(self._finish, outcome)

    def _run_process(self) -> None:
        children = self._host.children
        outcome: Outcome | None
        try:
            with children.child(self.handler) as child:
                self._child = child
                if self.why is not None:  # while there was no child to be told
                    raise Cancelled
                call = children.call(self.claimed, self.handler, self._limits.max_output_bytes)
                # Not before: the time to start an interpreter and to import is no time of the handler's.
                reply = child.call(call, lambda: self._in_loop(self._start_clock))
            outcome = self._replied(reply)
        except BaseException as exc:
            if isinstance(exc, subprocesses.Died) and self.why is None:
                log.error("step %s (%s), attempt %d: %s", self.claimed.id, self.handler.name, self.claimed.attempt, exc)
            outcome = self._judge(exc)
        self._in_loop(self._finish, outcome)

    def _replied(self, reply: subprocesses.Reply) -> Outcome | None:
        """The outcome that a child has decided on, fit to be stored."""
        for level, text in reply.notes:
            self._limits.log.log(level, "%s", text)
        failure = reply.failure
        if failure is not None:
            texts = self._limits.message(failure.message), self._limits.traceback(failure.traceback)
            failure = Failure(failure.kind, *texts)
        if self.why == "timeout" or (self.why is not None and not reply.steered):
            return self._stopped(failure.traceback if failure is not None else "")
        return Outcome(self.claimed, reply.verb, reply.output, reply.delay_s, failure, reply.called)

    def _in_loop(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has stopped without this thread
            self._host.loop.call_soon_threadsafe(function, *args)

    def _returned(self, ctx: context.Context | context.SyncContext, result: Any) -> Outcome:
        """The outcome of a handler that has returned. SETTLED once its completion transaction is committed with it."""
        if self.why == "timeout":
            return self._timed_out()
        if ctx._completed_in:  # pyright: ignore[reportPrivateUsage]
            exc = CompletionAborted("the transaction that was given to complete_in was not committed")
            failure = Failure(ErrorKind.RETRYABLE, str(exc), "")
            delay_s = retry.delay_s(self.handler.settings.backoff, self.claimed.attempt, exc, self._limits.log)
            return failed(self.claimed, failure, delay_s)
        verb = Verb.SETTLED if ctx._has_tx else Verb.COMPLETE  # pyright: ignore[reportPrivateUsage]
        return Outcome(self.claimed, verb, self._encode(result))

    def _unless_completed(self, ctx: context.Context | context.SyncContext, outcome: Outcome | None) -> Outcome | None:
        """After complete_in only the database knows whether the step is completed: the outcome then holds for the case
        that it is not, and the fence tells."""
        if outcome is None or not ctx._completed_in:  # pyright: ignore[reportPrivateUsage]
            return outcome
        return msgspec.structs.replace(outcome, unless_completed=True)

    def _encode(self, result: Any) -> str | None:
        return encode(self.handler, result, self._limits)

    def _judge(self, exc: BaseException) -> Outcome | None:
        if self.why == "timeout" or (self.why is not None and not isinstance(exc, STEERING)):
            # Whatever a handler makes of being stopped, it was we who stopped it.
            return self._stopped("" if isinstance(exc, subprocesses.ProcessFailure) else self._limits.trace(exc))
        return judge(exc, self.claimed, self.handler, self._limits, committing=self.committing)

    def _stopped(self, trace: str = "") -> Outcome | None:
        """The outcome of an execution that was asked to stop."""
        if self.why == "timeout":
            return self._timed_out(trace)
        if self.why == "drain":
            return Outcome(self.claimed, Verb.RELEASE)
        return None  # cancelled by somebody, or lost: the step is no longer ours

    def _timed_out(self, trace: str = "") -> Outcome:
        text = f"the attempt took longer than its timeout of {self._timeout_s:g} s"
        failure = Failure(ErrorKind.TIMEOUT, text, trace)
        cause = TimeoutError(text)
        delay_s = retry.delay_s(self.handler.settings.backoff, self.claimed.attempt, cause, self._limits.log)
        return failed(self.claimed, failure, delay_s)


def invalid(exc: BaseException, claimed: Claimed, handler: Step[Any, Any], limits: Limits) -> Outcome:
    """The outcome of a step whose stored input is no input of its handler."""
    text = f"the stored input is no {handler.name!r} input: {describe(exc, plain=True)}"
    failure = Failure(ErrorKind.INVALID_INPUT, limits.message(text), limits.trace(exc))
    return Outcome(claimed, Verb.DISCARD, failure=failure, called=False)


def encode(handler: Step[Any, Any], result: Any, limits: Limits) -> str | None:
    """What a handler returned as JSON to be stored; an exception when it cannot be."""
    if handler.action:
        if result is not None:
            raise OutputEncodingError(
                f"action {handler.name!r} returned a {type(result).__name__}; an action returns None"
            )
        return None
    try:
        data = handler.output_codec.encode(result)
    except codec.EncodeError as exc:
        raise OutputEncodingError(f"the output of {handler.name!r} cannot be stored: {exc}") from exc
    if len(data) > limits.max_output_bytes:
        raise OutputTooLargeError(
            f"the output of {handler.name!r} takes {len(data)} bytes; max_output_bytes is {limits.max_output_bytes}"
        )
    return data.decode()


def judge(
    exc: BaseException, claimed: Claimed, handler: Step[Any, Any], limits: Limits, *, committing: bool = False
) -> Outcome | None:
    """As `decide`, and whatever that calls of the handler's own (a hook, a class) may fail: the step is not lost."""
    try:
        return decide(exc, claimed, handler, limits, committing=committing)
    except BaseException:
        limits.log.exception("could not judge the failure of step %s", claimed.id)
        failure = Failure(ErrorKind.RETRYABLE, f"{type(exc).__name__} (and judging it failed)", "")
        return failed(claimed, failure, retry.delay_s(None, claimed.attempt, exc, limits.log))


def decide(
    exc: BaseException, claimed: Claimed, handler: Step[Any, Any], limits: Limits, *, committing: bool = False
) -> Outcome | None:
    """What an exception of a handler means for its step; `committing` when the commit raised it and not the handler."""
    settings = handler.settings
    if isinstance(exc, subprocesses.ProcessFailure):
        # Nothing of the handler's was raised, so its classes of exceptions say nothing about it.
        of_process = Failure(exc.kind, limits.message(str(exc)), limits.traceback(exc.trace))
        return failed(claimed, of_process, retry.delay_s(settings.backoff, claimed.attempt, exc, limits.log))

    def failure(kind: ErrorKind, text: str) -> Failure:
        return Failure(kind, limits.message(text), limits.trace(exc))

    def discard(kind: ErrorKind, text: str) -> Outcome:
        return Outcome(claimed, Verb.DISCARD, failure=failure(kind, text))

    if committing and isinstance(exc, LeaseLostError):
        return None  # the fence refused; raised by the handler itself it proves nothing, and the step must not be lost
    if isinstance(exc, PoolTimeoutError):
        about = claimed.id, handler.name, claimed.attempt, describe(exc, plain=True)
        limits.log.warning("step %s (%s) is released, attempt %d: %s", *about)
        return Outcome(claimed, Verb.RELEASE)
    if isinstance(exc, Snooze):
        try:
            delay_s = config.seconds("Snooze delay", exc.delay, negative=True)
        except InvalidOptionError as wrong:
            return discard(ErrorKind.PERMANENT, str(wrong))
        if delay_s <= 0:
            return discard(ErrorKind.PERMANENT, f"snoozed for {delay_s:g} s: the delay must be positive")
        if settings.max_snoozes is not None and claimed.snoozes >= settings.max_snoozes:
            return discard(ErrorKind.PERMANENT, f"snoozed more often than max_snoozes, {settings.max_snoozes}")
        return Outcome(claimed, Verb.SNOOZE, delay_s=min(delay_s, retry.LONGEST_S))
    if isinstance(exc, CancelRun):
        reason = limits.message(describe(exc, plain=True)) if str(exc) else "cancelled by its handler"
        return Outcome(claimed, Verb.CANCEL_RUN, failure=Failure(ErrorKind.CANCELLED, reason, ""))
    if isinstance(exc, Permanent):
        return discard(ErrorKind.PERMANENT, describe(exc, plain=True))
    if isinstance(exc, RetryAfter):
        try:
            delay_s = config.seconds("RetryAfter delay", exc.delay, negative=True)
        except InvalidOptionError as wrong:
            return discard(ErrorKind.PERMANENT, str(wrong))
        found = failure(ErrorKind.RETRYABLE, describe(exc, plain=True))
        return failed(claimed, found, min(max(delay_s, 0.0), retry.LONGEST_S))
    if isinstance(exc, (CompletionTxError, OutputEncodingError, OutputTooLargeError)):
        return discard(ErrorKind.PERMANENT, describe(exc))
    if committing and isinstance(exc, psycopg.Error) and lost_connection(exc):
        # Nobody knows whether the commit went through. Only the release is sent: if it did, the step is no longer
        # running and the fence refuses it; a completion would complete the step without what the handler wrote.
        return Outcome(claimed, Verb.RELEASE)
    if isinstance(exc, settings.permanent_on) and not isinstance(exc, settings.retry_on):
        return discard(ErrorKind.PERMANENT, describe(exc))
    text = str(exc) if isinstance(exc, CompletionAborted) else describe(exc)
    delay_s = retry.delay_s(settings.backoff, claimed.attempt, exc, limits.log)
    return failed(claimed, failure(ErrorKind.RETRYABLE, text), delay_s)


def failed(claimed: Claimed, failure: Failure, delay_s: float) -> Outcome:
    """A failed attempt: retried after `delay_s`, or discarded when it was the last."""
    if claimed.attempt >= claimed.max_attempts:
        return Outcome(claimed, Verb.DISCARD, failure=failure)
    return Outcome(claimed, Verb.RETRY, delay_s=delay_s, failure=failure)


def lost_connection(exc: psycopg.Error) -> bool:
    """Whether the server or the way to it failed, rather than what was sent."""
    state = exc.sqlstate
    return state is None or state[:2] in ("08", "53", "58") or state in _SERVER_STATES


def describe(exc: BaseException, *, plain: bool = False) -> str:
    """The message of an exception; it never fails, whatever the exception's own `__str__` does."""
    try:
        text = str(exc)
    except BaseException as broken:
        text = f"<str() of it raised {type(broken).__name__}>"
    name = type(exc).__name__
    if plain:
        return text or name
    return f"{name}: {text}" if text else name


def format_traceback(exc: BaseException) -> str:
    """Type, message, chain and frames; it never fails."""
    try:
        return "".join(traceback.format_exception(exc))
    except BaseException as broken:
        return f"{type(exc).__name__} (its traceback could not be formatted: {type(broken).__name__})"


def clean(text: str, max_bytes: int) -> str:
    """A text that PostgreSQL can store, cut to a size with a marker."""
    text = _storable(text)
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    return data[: max(max_bytes - len(CUT.encode()), 0)].decode(errors="ignore") + CUT


def _storable(text: str) -> str:
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def task(host: Host, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task with a context that no handler has touched."""
    return host.loop.create_task(coro, context=host.home.copy())


class Runner:
    """Runs async handlers one after another in one task, for as long as they end without waiting for anything.

    For such a handler a task of its own would be most of the cost. The first that does wait keeps the task as its own,
    and the rest goes on in a new one. `turn` begins the next execution that is meant for the runner; `on_suspend` is
    told which one has kept the task, and `on_pause` is called before the rest of the loop has its turn.
    """

    def __init__(
        self,
        host: Host,
        turn: Callable[[], Execution | None],
        on_suspend: Callable[[Execution], None],
        on_pause: Callable[[], None],
    ) -> None:
        self._host = host
        self._turn = turn
        self._on_suspend = on_suspend
        self._on_pause = on_pause
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether it will take its next turn by itself."""
        return self._task is not None

    def wake(self) -> None:
        """Begins to take turns, soon, unless it does already."""
        if self._task is None:
            self._task = task(self._host, self._run())

    async def _run(self) -> None:
        own = self._task
        assert own is not None
        clean = contextvars.copy_context()
        until = time.monotonic() + _SLICE_S
        while (execution := self._turn()) is not None:
            coro = execution.coroutine()
            if coro is None:
                continue
            try:
                first = coro.send(None)
            except StopIteration:
                pass
            else:
                self._task = None
                execution.suspend(own)
                self._on_suspend(execution)
                await _resume(coro, first)
                return
            if contextvars.copy_context() != clean or own.cancelling():
                # The handler has left something in its context or its task, and the next must not find it.
                self._task = None
                self.wake()
                return
            if time.monotonic() > until:
                self._on_pause()
                await asyncio.sleep(0)  # claims, outcomes and orders
                until = time.monotonic() + _SLICE_S
        self._task = None


@types.coroutine
def _resume(coro: Coroutine[Any, Any, None], first: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was begun and waits for `first`."""
    awaited = first
    try:
        while True:
            try:
                value = yield awaited
            except GeneratorExit:
                coro.close()
                raise
            except BaseException as exc:
                awaited = coro.throw(exc)
            else:
                awaited = coro.send(value)
    except StopIteration:
        return


class Threads:
    """Threads for sync handlers, started on demand. The bound is kept by the worker, which starts no more handlers than
    there are threads; one that ignores its time limit does not count any more, so others can take its place."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def start(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                # Daemons: a handler that never returns must not keep the process from leaving.
                threading.Thread(target=self._work, name=f"cyclone-step-{self._count + 1}", daemon=True).start()
                self._count += 1
        self._jobs.put(job)

    def stop(self) -> None:
        """Lets idle threads end; busy ones end with their handler."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        in_handler.set(True)
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1
