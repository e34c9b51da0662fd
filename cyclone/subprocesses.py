"""Processes for handlers that must be killed when they do not end: `executor="process"`.

Each worker keeps a few children, started when they are needed and used again. A child is a fresh interpreter and no
fork: a worker has threads, connections and an event loop, and none of them survives a fork in order. It finds the
handler by import, so what an import cannot find is refused when the worker starts.

A pair of sockets joins worker and child; it carries length-prefixed messages, one execution at a time:

    worker -> child   a Call, or the empty message: stop
    child -> worker   the empty message: the handler begins; then the Reply

To stop a handler, the worker sends the empty message and SIGTERM, which raises Cancelled in it; after its grace it is
SIGKILL, for the child and all that it started in its process group. A SIGTERM without that message comes from somebody
else, as a service manager sends it to every process of a service; the child passes over it, because the worker hears it
too and lets handlers finish. A child that was told to stop, or whose handler ran out of memory, is not used again.

The end of the socket tells each side that the other is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec

from .errors import InvalidOptionError
from .model import Claimed, Failure, Verb
from .registry import ProcessStep, Step
from .states import ErrorKind

# An import of the handler's module that takes longer is as good as one that hangs.
START_S = 120.0
_END_S = 5.0
_LENGTH = struct.Struct("!I")
_STOP = _LENGTH.pack(0)
# Not -m, which would import from the current directory first: whatever the worker can import, and nothing else, the
# child can.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from cyclone import subprocess_main as m; m.main(int(sys.argv[1]))"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One execution for a child: the step, and where its handler is."""

    claimed: Claimed
    module: str
    attribute: str
    memory_limit: int | None
    max_output_bytes: int


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How an execution ended in a child: an Outcome, whose texts are neither redacted nor cut yet."""

    verb: Verb
    output: str | None = None
    delay_s: float = 0.0
    failure: Failure | None = None
    called: bool = True
    loaded: bool = True
    """False: the handler could not be imported; `failure` tells why."""
    steered: bool = False
    """Whether the handler returned, or raised Permanent, Snooze or RetryAfter: then that counts, also after a stop."""
    worn: bool = False
    """Whether the child had better not be used again."""
    notes: list[tuple[int, str]] = []
    """What is to be logged, by level."""


class ProcessFailure(Exception):
    """An execution failed with its process rather than in its handler."""

    kind = ErrorKind.RETRYABLE

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


class Died(ProcessFailure):
    """The process of a handler has ended by itself.

    An ordinary failed attempt, retried after the backoff, and no reclaim as at the death of a worker: here it is known
    whose fault it is. Its kind is `crashed`, which tells it from an exception.
    """

    kind = ErrorKind.CRASHED


class NotStarted(ProcessFailure):
    """There was no process to run the handler in, or no handler in it."""


def send(channel: socket.socket, data: bytes) -> None:
    """Sends one message."""
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> bytes | None:
    """Waits for one message; None when the other side is gone."""
    head = _exactly(channel, _LENGTH.size)
    return None if head is None else _exactly(channel, _LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def locate(step: Step[Any, Any]) -> tuple[str, str]:
    """The module and the name in it under which an import finds a step. InvalidOptionError when there is none."""
    own = getattr(step.fn, "__module__", None)
    # Nearly always where its function is; else wherever a module has it.
    for name in (own, *sys.modules):
        module = sys.modules.get(name or "")
        # The program itself has more names than one there.
        if name and module is not sys.modules["__main__"] and getattr(module, "__spec__", None) is not None:
            for key, value in list(vars(module).items()):
                if value is step:
                    return name, key
    fault = (
        "it is declared in the program that was started, which is no module to import"
        if own == "__main__"
        else "no imported module has it among its attributes, as when it is declared inside a function"
    )
    raise InvalidOptionError(
        f"step {step.name!r} has executor='process', but its process could not import it: {fault}. "
        "Declare it at the top of a module of its own"
    )


class Child:
    """One process and the channel to it, used for one execution at a time. `terminate` and `kill` are for any thread.

    On Linux it is killed when the thread that started it ends, and so with the worker.
    """

    def __init__(self, memory_limit: int | None) -> None:
        self.memory_limit = memory_limit
        self.spent = False
        self._sending = threading.Lock()
        self._channel, theirs = socket.socketpair()
        try:
            path = [one for one in sys.path if isinstance(one, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), *path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A group of its own: Ctrl-C is for the worker, and what the handler starts can be killed with it.
                process_group=0,
            )
        except BaseException as exc:
            self._channel.close()
            raise NotStarted(f"the handler's process cannot be started: {type(exc).__name__}: {exc}") from exc
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be used."""
        return not self.spent and self._process.poll() is None

    def call(self, call: Call, begun: Callable[[], object]) -> Reply:
        """Has a handler executed, and waits. `begun` is called when the handler itself begins."""
        data: bytes | None = None
        try:
            self._channel.settimeout(START_S)
            with self._sending:
                send(self._channel, msgspec.msgpack.encode(call))
            data = receive(self._channel)
            if data == b"":
                self._channel.settimeout(None)
                begun()
                data = receive(self._channel)
        except TimeoutError:
            self.kill()
            raise NotStarted(
                f"the handler's process was not ready within {START_S:g} s: importing {call.module!r} takes too long"
            ) from None
        except OSError:
            pass  # it broke off while it was sent to, which is an end as good as any
        if data is None:
            raise Died(f"the handler's process {self.pid} died: {self._how()}")
        try:
            reply = msgspec.msgpack.decode(data, type=Reply)
        except msgspec.MsgspecError:
            self.kill()
            raise Died(f"the handler's process {self.pid} sent what is no reply and was killed") from None
        if reply.worn:
            self.spent = True
        if not reply.loaded:
            text, trace = (reply.failure.message, reply.failure.traceback) if reply.failure else ("", "")
            raise NotStarted(f"the handler's process cannot import {call.module!r}: {text}", trace)
        return reply

    def terminate(self) -> None:
        """Asks the handler to stop, without waiting for anything."""
        self.spent = True
        if not self._sending.acquire(blocking=False):
            self.kill()  # the call is still on its way: nothing of the handler's has begun
            return
        try:
            # Not through the socket object, which would wait as long as its time limit allows.
            os.write(self._channel.fileno(), _STOP)
            self._process.send_signal(signal.SIGTERM)
        except OSError:
            self.kill()
        finally:
            self._sending.release()

    def kill(self) -> None:
        """Kills it, and what it started in its group. On a process that is ending anyway it changes nothing."""
        self.spent = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Waits a while for the end of a process that was killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def end(self) -> None:
        """Kills it and clears up. Only for whoever uses it, or when nobody does."""
        self.kill()
        self.wait()
        self._channel.close()

    def _how(self) -> str:
        # The channel has ended, so the process is ending, with a status that no further signal changes. One that only
        # closed the channel is of no use any more.
        self.kill()
        self.wait()
        code = self._process.returncode
        if code is None:
            return "it does not end"
        if code >= 0:
            return f"it left with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}" + (", as the system does when memory runs out" if -code == signal.SIGKILL else "")


class Use:
    """A child in the hands of one execution. After its end nobody stops through it what runs in the child next."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._lock = threading.Lock()
        self._over = False

    def call(self, call: Call, begun: Callable[[], object]) -> Reply:
        """As `Child.call`."""
        return self._child.call(call, begun)

    def terminate(self) -> None:
        """As `Child.terminate`."""
        with self._lock:
            if not self._over:
                self._child.terminate()

    def kill(self) -> None:
        """As `Child.kill`."""
        with self._lock:
            if not self._over:
                self._child.kill()

    def end(self) -> None:
        """The child is given back."""
        with self._lock:
            self._over = True


class Children:
    """The children of one worker. The worker starts no more executions at once than `most`; a process that does not
    die at once is not counted.
    """

    def __init__(self, steps: Iterable[Step[Any, Any]], most: int) -> None:
        self._places = {step.name: locate(step) for step in steps if isinstance(step, ProcessStep)}
        self._most = most
        self._lock = threading.Lock()
        self._all: set[Child] = set()
        self._idle: list[Child] = []
        self._closed = False

    @contextlib.contextmanager
    def child(self, step: Step[Any, Any]) -> Generator[Use]:
        """A child for one execution of a step, a new one if no idle one has its memory limit. NotStarted if there is
        none to be had.
        """
        child = self._take(step.settings.memory_limit)
        use = Use(child)
        try:
            yield use
        finally:
            use.end()
            self._give_back(child)

    def call(self, claimed: Claimed, step: Step[Any, Any], max_output_bytes: int) -> Call:
        """The message that has a step executed."""
        module, attribute = self._places[step.name]
        limit = step.settings.memory_limit
        return Call(
            claimed=claimed, module=module, attribute=attribute, memory_limit=limit, max_output_bytes=max_output_bytes
        )

    def close(self) -> None:
        """Kills all children and waits for their end. None is started any more."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy, self._all = self._all - set(idle), set()
        for child in (*busy, *idle):
            child.kill()
        for child in busy:
            child.wait()  # the thread that uses it clears up
        for child in idle:
            child.end()

    def _take(self, memory_limit: int | None) -> Child:
        over: list[Child] = []
        try:
            with self._lock:
                if self._closed:
                    raise NotStarted("the worker has stopped")
                # What a handler with a limit left in memory would count against another limit.
                fitting = [child for child in self._idle if child.memory_limit == memory_limit]
                while fitting:
                    child = fitting.pop()  # the one used last: its memory is in the caches
                    self._idle.remove(child)
                    if child.alive:
                        return child
                    over.append(child)
                    self._all.discard(child)
                if len(self._all) >= self._most and self._idle:
                    over.append(self._idle.pop(0))
                    self._all.discard(over[-1])
        finally:
            for child in over:
                child.end()
        child = Child(memory_limit)
        with self._lock:
            if not self._closed:
                self._all.add(child)
                return child
        child.end()
        raise NotStarted("the worker has stopped")

    def _give_back(self, child: Child) -> None:
        with self._lock:
            if child.alive and not self._closed:
                self._idle.append(child)
                return
            self._all.discard(child)
        child.end()
