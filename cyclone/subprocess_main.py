"""What runs in a child of a worker, where handlers with `executor="process"` are called; see `subprocesses`.

The handler runs in the main thread, because only there does Python handle signals. A second thread waits for the end of
the channel, which is the end of the worker.

A memory limit is RLIMIT_DATA on Linux: what the process allocates for itself (heap, anonymous private mappings, stacks
of threads), with the interpreter and the imported modules, without the code of libraries and without memory that is
only reserved. RLIMIT_AS, used elsewhere, counts these too and so would say little about use. Memory shared with other
processes is not counted; each process that a handler starts has the same limit for itself. It holds while the handler
runs: what happens to an exception, or to an output, must not fail for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Generator
from enum import Enum
from typing import Any, NoReturn

import msgspec

from . import context, execute, subprocesses
from .errors import Cancelled
from .model import Failure, Outcome, Verb
from .registry import ProcessStep
from .states import ErrorKind
from .subprocesses import Call, Reply

# Texts go to the worker nearly whole, because what they must not show is taken out there, before they are cut.
_MOST_TEXT_BYTES = 4 << 20
_MEMORY = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS


class _Phase(Enum):
    IDLE = 0
    LOADING = 1
    CALLING = 2
    ANSWERING = 3


def main(descriptor: int) -> NoReturn:
    """Serves the worker at the other end of a socket until it is gone."""
    code = 1
    try:
        del sys.argv[1:]
        os.set_inheritable(descriptor, False)
        _configure_logging()
        _Server(socket.socket(fileno=descriptor)).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)  # a thread that a handler left behind must not hold the exit


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._phase = _Phase.IDLE

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # that of the thread in the worker came along
        # Held back meanwhile: a signal that reaches a copy before it has its own disposition would be lost.
        term = (signal.SIGTERM,)
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, term),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, term),
            after_in_child=self._forked,
        )
        _die_with_worker()
        threading.Thread(target=self._watch, name="cyclone-watch", daemon=True).start()
        while data := subprocesses.receive(self._channel):
            reply = self._answer(msgspec.msgpack.decode(data, type=Call))
            subprocesses.send(self._channel, msgspec.msgpack.encode(reply))
            self._phase = _Phase.IDLE
            _flush()

    def _answer(self, call: Call) -> Reply:
        claimed = call.claimed
        limits = execute.Limits(max_output_bytes=call.max_output_bytes, max_error_bytes=_MOST_TEXT_BYTES)
        limits.log = notes = _Notes(execute.log)
        self._phase = _Phase.LOADING
        try:
            handler = _load(call)
        except BaseException as exc:
            failure = Failure(ErrorKind.RETRYABLE, execute.describe(exc), limits.trace(exc))
            return Reply(verb=Verb.RETRY, failure=failure, loaded=False, worn=True)
        try:
            value = handler.decode_input(claimed.version, claimed.input)
        except BaseException as exc:
            return _reply(execute.invalid(exc, claimed, handler, limits), notes)
        ctx = context.ProcessContext(claimed)
        subprocesses.send(self._channel, b"")
        try:
            with _limited(call.memory_limit):
                try:
                    self._phase = _Phase.CALLING
                    result = handler(ctx, value)
                finally:
                    self._phase = _Phase.ANSWERING  # from here on no signal raises anything
            output = execute.encode(handler, result, limits)
            return _reply(Outcome(claimed, Verb.COMPLETE, output), notes, steered=True)
        except BaseException as exc:
            outcome = execute.judge(exc, claimed, handler, limits)
            assert outcome is not None  # that is for commits
            steered, worn = isinstance(exc, execute.STEERING), isinstance(exc, MemoryError)
            return _reply(outcome, notes, steered=steered, worn=worn)

    def _on_term(self, number: int, frame: object) -> None:
        if self._phase not in (_Phase.LOADING, _Phase.CALLING) or not self._told_to_stop():
            return
        if self._phase is _Phase.LOADING:
            os._exit(0)
        self._phase = _Phase.ANSWERING
        raise Cancelled("the handler was told to stop")

    def _told_to_stop(self) -> bool:
        try:
            self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a handler closed what is not its own
        return True

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        poll = select.poll()
        poll.register(self._channel, select.POLLHUP)
        while not poll.poll(1000):
            pass  # looked at again, as while it waits it would not hear that a handler has closed the channel
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _forked(self) -> None:
        # A copy of this process that a handler makes has no part in the talk with the worker, and signals end it.
        self._channel.close()
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


class _Notes(logging.LoggerAdapter[logging.Logger]):
    """Keeps what would be logged about a failure: the worker does that, for it can take out what nobody may read."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self.kept: list[tuple[int, str]] = []

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        self.kept.append((level, execute.log_text(msg, args, kwargs)))


def _reply(outcome: Outcome, notes: _Notes, *, steered: bool = False, worn: bool = False) -> Reply:
    return Reply(
        verb=outcome.verb,
        output=outcome.output,
        delay_s=outcome.delay_s,
        failure=outcome.failure,
        called=outcome.called,
        steered=steered,
        worn=worn,
        notes=notes.kept,
    )


def _load(call: Call) -> ProcessStep[Any, Any]:
    found: object = getattr(importlib.import_module(call.module), call.attribute)
    if not isinstance(found, ProcessStep) or found.name != call.claimed.kind:
        raise LookupError(f"{call.module}.{call.attribute} is no longer the step {call.claimed.kind!r}")
    return found  # pyright: ignore[reportUnknownVariableType]


@contextlib.contextmanager
def _limited(limit: int | None) -> Generator[None]:
    if limit is None:
        yield
        return
    soft, hard = resource.getrlimit(_MEMORY)
    resource.setrlimit(_MEMORY, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(_MEMORY, (soft, hard))


def _die_with_worker() -> None:
    # For a handler in native code that never lets the watching thread run.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            pr_set_pdeathsig, pr_set_name = 1, 15
            prctl = ctypes.CDLL(None).prctl
            prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
            prctl(pr_set_name, b"cyclone-handler", 0, 0, 0)


class _Handler(logging.StreamHandler[Any]):
    """Lines on standard error, unless the handler's module set up logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def _configure_logging() -> None:
    handler = _Handler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s handler[%(process)d] %(message)s"))
    execute.log.addHandler(handler)
    execute.log.setLevel(logging.INFO)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
