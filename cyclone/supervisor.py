"""The parent of a pool: forks workers and one sweeper, replaces those that end, and carries signals on.

It opens no database connection, imports none of the program's code, and starts no thread and no loop, so each child
begins as a copy of something simple, and a reload needs nothing but new children. Signal handlers only note the signal;
one loop acts: it hears, reaps, looks at the pages, starts, presses, and waits.

    start ──> BOOTING ──> READY ──drain──> (exit 0) ──> replaced, if nobody wanted the place empty
                 │           └── dies ──> death is told to the sweeper ──> replaced after a pause
                 └── exit 70: cannot start. Three in a row before any worker was ever ready: the pool gives up

What is known of a death (which steps were being executed, and how the process ended) is kept here until the sweeper
says that the database has it, and is told again to the next sweeper otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Unpack

import orjson

from . import board, config, process, wake
from .board import Role, State
from .errors import InvalidOptionError

log = logging.getLogger("cyclone")

# A child that was ready for so long was no part of a crash loop.
_STABLE_S: Final = 10.0
# Pauses before a replacement: a first and a longest one. A child that was ready has died by what it executed, and the
# crash limit of that step ends the matter; one that never got ready will meet the same again.
_AFTER_READY: Final = (0.1, 5.0)
_AFTER_BOOT: Final = (0.5, 30.0)
_BOOT_FAILURES: Final = 3

_CANCEL_S: Final = 15.0  # what a drain may take beyond its limit: handlers clean up, steps are given back
_STOP_S: Final = 5.0
_LAST_DEATHS_S: Final = 5.0
_LOOK_S: Final = 1.0
_LOOK_SOON_S: Final = 0.1
_LISTED: Final = 20


class _Phase(IntEnum):
    RUNNING = 0
    DRAINING = 1
    STOPPING = 2


@dataclass(kw_only=True, eq=False)
class Child:
    """A place of the pool with a role, and the process that fills it now, if any."""

    role: Role
    page: board.Page
    pid: int = 0
    life: int = 0
    channel: socket.socket | None = None
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    ready_at: float | None = None
    alone: bool = False  # a worker for isolated steps: started when some wait, ends by itself, is not replaced
    asked: str | None = None  # why the supervisor asked it to end
    kill_at: float = float("inf")
    start_at: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role.name.lower()} {self.pid}"


class Pool:
    """A supervisor with `procs` workers for the steps of `target`, and a sweeper. `run` returns the exit code.

    `metrics_port` serves /metrics, /healthz and /readyz for the whole pool; 0 takes a free one, None serves nothing.
    Whoever can reach the port can read names of kinds and queues, so it is this host only unless `metrics_host` says
    otherwise. `recycle_after` replaces a worker when it has executed so many steps. `dsn` and `schema` fall back to the
    variables CYCLONE_DSN and CYCLONE_SCHEMA. The other options are a worker's.
    """

    def __init__(
        self,
        target: str,
        *,
        procs: int | None = None,
        sweeper: bool = True,
        metrics_port: int | None = 9464,
        metrics_host: str = "127.0.0.1",
        dsn: str | None = None,
        schema: str | None = None,
        recycle_after: int | None = None,
        main: Callable[[process.Spec], int] = process.main,
        **options: Unpack[config.WorkerArguments],
    ) -> None:
        self.target = config.text("target", target)
        self.procs = config.count("procs", (os.cpu_count() or 1) if procs is None else procs, 0, 10_000)
        self.options = config.worker_options(**options)
        self.metrics_address: tuple[str, int] | None = None
        found = config.settings({"dsn": dsn, "schema": schema}, names=("dsn", "schema"))
        if "dsn" not in found:
            raise InvalidOptionError("no database is named: give dsn or set CYCLONE_DSN")
        self._dsn: str = found["dsn"]
        self._schema: str = found.get("schema", "public")
        self._sweeps = config.flag("sweeper", sweeper)
        self._port = None if metrics_port is None else config.count("metrics_port", metrics_port, 0, 65535)
        self._host = config.text("metrics_host", metrics_host)
        self._recycle_after = None if recycle_after is None else config.count("recycle_after", recycle_after)
        self._main = main
        self._noted: deque[int] = deque()
        self._phase = _Phase.RUNNING
        self._code = 0
        self._children: list[Child] = []
        self._spare: list[board.Page] = []
        self._roll: deque[tuple[Child, str]] = deque()
        self._rolling: tuple[Child, Child] | None = None  # an old worker and its successor
        self._deaths: dict[int, bytes] = {}  # those the sweeper has not dealt with
        self._told = 0
        self._ever_ready = False
        self._ending_since: float | None = None
        self._last_note = ""
        self._recycle_at = 0.0
        self._alone_at = 0.0

    # What runs

    def stop(self) -> None:
        """As SIGTERM does: the first call drains, the second stops at once."""
        self._noted.append(signal.SIGTERM)

    def run(self) -> int:
        """Runs the pool until it is told to stop; for the main thread, as it handles signals. Returns the exit code."""
        process.configure_logging("pool")
        if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
            # Most of all a connection pool that was opened on import: each worker would write to the same sockets.
            log.warning(
                "this process has %d other threads (%s): no worker has them, but each inherits the connections that "
                "they serve; start the pool from a program that has opened nothing",
                len(others),
                ", ".join(others[:5]),
            )
        with contextlib.ExitStack() as stack:
            try:
                self._listener = self._listen(stack)
            except OSError as exc:
                log.error("cannot serve metrics at %s, port %s: %s", self._host, self._port, exc.strerror or exc)
                return process.EX_FAILED
            self._metrics_dir = _directory(stack)
            self._pipe = wake.Pipe()
            stack.callback(self._pipe.close)
            # Two pages more than processes: a successor is ready before the worker that it replaces ends, and a worker
            # for isolated steps comes and goes.
            self._board = board.Board(self.procs + 3, self.options.concurrency)
            pages = iter(self._board.pages)
            self._spare = [next(pages), next(pages)]
            if self._sweeps or self._listener is not None:
                self._children.append(Child(role=Role.SWEEPER, page=next(pages)))
            self._children += [Child(role=Role.WORKER, page=next(pages)) for _ in range(self.procs)]
            self._wakeup = self._signals(stack)
            stack.callback(self._kill_all)
            self._greet()
            while self._turn():
                pass
            if not self._code:
                log.info("the pool has ended")
            return self._code

    def _turn(self) -> bool:
        self._hear()
        self._reap()
        self._look()
        self._replace()
        self._press()
        if self._phase is not _Phase.RUNNING and self._end():
            return False
        self._wait()
        return True

    def _listen(self, stack: contextlib.ExitStack) -> socket.socket | None:
        if self._port is None:
            return None
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self._port), family=family, backlog=64)
        stack.enter_context(listener)
        self.metrics_address = listener.getsockname()[:2]
        return listener

    def _signals(self, stack: contextlib.ExitStack) -> socket.socket:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
            stack.enter_context(end)
        self._wakeup_writer = writer
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before)
        for number in process.HANDLED:
            stack.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
            signal.signal(number, lambda number, frame: self._noted.append(number))
        return reader

    def _greet(self) -> None:
        connections = self.procs * (3 + self.options.completion_pool_size) + (2 if self._sweeps else 0)
        log.info(
            "pool %d: %d workers for %s; up to %d database connections (%d more while a worker is replaced)",
            os.getpid(),
            self.procs,
            self.target,
            connections,
            3 + self.options.completion_pool_size,
        )
        if self.metrics_address is not None:
            host, port = self.metrics_address
            log.info("metrics and health at http://%s:%d", f"[{host}]" if ":" in host else host, port)

    # Signals

    def _hear(self) -> None:
        while self._noted:
            number = self._noted.popleft()
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(signal.Signals(number).name)
            elif number == signal.SIGHUP and self._phase is _Phase.RUNNING:
                log.info("SIGHUP: replacing the workers one by one")
                self._roll = deque(
                    (child, "reload") for child in self._workers() if child.asked is None and not child.alone
                )

    def _stop(self, why: str) -> None:
        now = time.monotonic()
        if self._phase is _Phase.RUNNING:
            self._phase = _Phase.DRAINING
            log.info("%s: draining; handlers may go on for %g s", why, self.options.drain_timeout_s)
            for child in self._workers():
                self._ask(child, "drain", why, self.options.drain_timeout_s + _CANCEL_S)
        elif self._phase is _Phase.DRAINING:
            self._phase = _Phase.STOPPING
            log.info("%s: stopping at once", why)
            for child in self._workers():
                self._ask(child, "stop", why, _STOP_S)
        else:
            for child in self._children:
                child.kill_at = now

    def _ask(self, child: Child, order: str, why: str, limit_s: float) -> None:
        child.asked = child.asked or why
        if not child.pid:
            return
        child.kill_at = min(child.kill_at, time.monotonic() + limit_s)
        self._send(child, orjson.dumps({"do": order}) + b"\n")
        if child.page.state in (State.GONE, State.BOOTING) or child.channel is None:
            # It does not read its channel yet, and it has nothing in hand. Or it has closed it, with all it had open.
            _kill(child.pid, signal.SIGTERM)

    # Ends

    def _reap(self) -> None:
        for child in self._children[:]:
            if child.pid:
                try:
                    pid, status = os.waitpid(child.pid, os.WNOHANG)
                except ChildProcessError:
                    pid, status = child.pid, -1  # somebody else took the status
                if pid:
                    self._ended(child, status)

    def _ended(self, child: Child, status: int) -> None:
        now = time.monotonic()
        page, name = child.page, child.name
        self._look_ready(child, now)  # it may have been so between two looks
        reason, label = describe(status)
        executing = page.executing()
        clean = status == 0
        booted = os.waitstatus_to_exitcode(status) != process.EX_BOOT if status >= 0 else True
        if not booted:
            self._tell_note(child)
        elif not clean:
            text = ", ".join(map(str, executing[:_LISTED])) + ("…" if len(executing) > _LISTED else "")
            log.error(
                "%s ended: %s; %s",
                name,
                reason,
                f"it was executing {len(executing)} steps: {text}" if executing else "it was executing no step",
            )
        elif child.asked is None and self._phase is _Phase.RUNNING:
            log.info("%s has drained on its own and will be replaced", name)
        restart: str | None = child.asked if clean and child.asked else label
        if self._phase is not _Phase.RUNNING or (child.alone and clean):
            restart = None  # a worker for isolated steps comes and goes, but its death counts as any other
        self._tell_death(child, [] if clean else executing, reason, restart)
        if child.channel is not None:
            child.channel.close()
            child.channel = None
        stable = child.ready_at is not None and now - child.ready_at >= _STABLE_S
        first, longest = _AFTER_READY if child.ready_at is not None else _AFTER_BOOT
        page.state, page.pid, page.running, page.slots = State.GONE, 0, 0, 0
        if child.alone:
            # Its death is its step's, and the crash limit ends that. A pause, so that a fault of ours is no fork loop.
            child.pid = 0
            self._retire(child)
            self._alone_at = now + (0.0 if clean else _AFTER_READY[0])
            return
        page.restarts += 1
        child.pid, child.kill_at = 0, float("inf")
        if child.asked and clean:
            pause = 0.0
        elif stable:
            page.failing, pause = 0, first
        else:
            page.failing += 1
            pause = min(first * 2 ** min(page.failing - 1, 20), longest)
        child.start_at = now + pause * random.uniform(0.75, 1.25)
        if self._phase is not _Phase.RUNNING:
            return
        self._go_on_rolling(child, reason)
        if not booted and child.role is Role.WORKER and not self._ever_ready and page.failing >= _BOOT_FAILURES:
            log.error("giving up: no worker can start: %s", page.note)
            self._code = process.EX_FAILED
            self._phase = _Phase.DRAINING
            self._stop("no worker can start")

    def _tell_note(self, child: Child) -> None:
        # Every place fails for the same reason as a rule: it is told once, and again when it changes.
        if child.page.note != self._last_note:
            log.error("%s cannot start: %s", child.name, child.page.note)
            self._last_note = child.page.note

    def _tell_death(self, child: Child, executing: list[int], reason: str, restart: str | None) -> None:
        if not any(other.role is Role.SWEEPER for other in self._children):
            return
        self._told += 1
        death = {
            "do": "bury",
            "id": self._told,
            "pid": child.pid,
            "life": child.page.life if child.role is Role.WORKER else 0,
            "executing": executing,
            "reason": reason,
            "restart": restart,
        }
        line = orjson.dumps(death) + b"\n"
        self._deaths[self._told] = line
        for sweeper in self._sweepers():
            if sweeper is not child and sweeper.pid:
                self._send(sweeper, line)

    # Replacement

    def _look(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if not child.pid:
                continue
            self._look_ready(child, now)
            if child.page.failing and child.ready_at is not None and now - child.ready_at >= _STABLE_S:
                child.page.failing = 0
            if (
                self._recycle_after is not None
                and child.role is Role.WORKER
                and not child.alone
                and child.asked is None
                and now >= self._recycle_at
                and child.page.done >= self._recycle_after
                and all(child is not old for old, _ in self._roll)
            ):
                self._roll.append((child, "recycled"))

    def _look_ready(self, child: Child, now: float) -> None:
        if child.ready_at is None and child.page.state in (State.READY, State.DRAINING):
            child.ready_at = now
            if child.role is Role.WORKER:
                self._ever_ready = True
                self._last_note = ""

    def _replace(self) -> None:
        now = time.monotonic()
        for child in self._children[:]:
            if not child.pid and child.start_at <= now and self._wanted(child):
                self._start(child)
        if self._phase is not _Phase.RUNNING:
            return
        while self._rolling is None and self._roll:
            old, _ = self._roll[0]
            if old.pid and old.asked is None and old in self._children:
                new = Child(role=Role.WORKER, page=self._spare.pop())
                self._rolling = (old, new)
                self._children.append(new)
                self._start(new)
            else:
                self._roll.popleft()  # what replaces it is new in any case
        if self._rolling is not None:
            old, new = self._rolling
            if old.asked is None and new.page.state is State.READY:
                _, why = self._roll.popleft() if self._roll and self._roll[0][0] is old else (old, "reload")
                self._ask(old, "drain", why, self.options.drain_timeout_s + _CANCEL_S)

    def _work_alone(self) -> None:
        """Isolated steps wait: a worker with one slot runs them, so that each has a process for itself."""
        if (
            self._phase is _Phase.RUNNING
            and self.procs
            and not any(child.alone for child in self._children)
            and time.monotonic() >= self._alone_at
        ):
            child = Child(role=Role.WORKER, page=self._spare.pop(), alone=True)
            self._children.append(child)
            self._start(child)
            if not child.pid:
                self._retire(child)

    def _go_on_rolling(self, ended: Child, reason: str) -> None:
        if self._rolling is None:
            return
        old, new = self._rolling
        if ended is old:
            self._retire(old)
            self._rolling = None
        elif ended is new and old.asked is None:
            # New code that cannot start must not take the place of old code that works.
            log.error("the successor of %s did not get ready (%s): the workers stay as they are", old.name, reason)
            self._retire(new)
            self._rolling = None
            self._roll.clear()
            self._recycle_at = time.monotonic() + _AFTER_BOOT[1]

    def _retire(self, child: Child) -> None:
        self._children.remove(child)
        child.page.clear()
        child.page.role, child.page.failing, child.page.restarts = Role.NONE, 0, 0
        self._spare.append(child.page)

    def _wanted(self, child: Child) -> bool:
        if self._phase is _Phase.RUNNING:
            return True
        # Somebody must take note of the deaths that the draining brings.
        return child.role is Role.SWEEPER and self._phase is _Phase.DRAINING and self._ending_since is None

    def _start(self, child: Child) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        page = child.page
        page.clear()
        page.role = child.role
        child.life = page.life = secrets.randbelow(2**62 - 1) + 1 if child.role is Role.WORKER else 0
        child.ready_at, child.asked, child.kill_at = None, None, float("inf")
        child.unsent.clear()
        child.unread.clear()
        channels = [other.channel.fileno() for other in self._children if other.channel is not None]
        foreign = [ours.fileno(), *channels, self._wakeup.fileno(), self._wakeup_writer.fileno()]
        if self._listener is not None and child.role is not Role.SWEEPER:
            foreign.append(self._listener.fileno())
        spec = process.Spec(
            role=child.role,
            page=page,
            life=child.life,
            channel=theirs,
            target=self.target,
            dsn=self._dsn,
            schema=self._schema,
            options=self.options,
            pipe=self._pipe,
            procs=self.procs,
            alone=child.alone,
            sweeps=self._sweeps,
            pages=self._board.pages,
            listener=self._listener,
            metrics_dir=self._metrics_dir,
            foreign=foreign,
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # else the child would write the same text again
        # A signal that comes between the fork and the child's own handlers waits until it has them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, process.HANDLED)
        try:
            pid = os.fork()
            if pid == 0:
                process.enter(spec, self._main)
        except OSError as exc:
            ours.close()
            page.failing += 1
            child.start_at = time.monotonic() + min(2 ** min(page.failing, 20), _AFTER_BOOT[1])
            log.error("cannot start a %s: %s", child.role.name.lower(), exc)
            if self._rolling is not None and self._rolling[1] is child:
                self._go_on_rolling(child, str(exc))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        child.pid, child.channel = pid, ours
        log.info("%s started", child.name)
        if child.role is Role.SWEEPER:
            for line in self._deaths.values():
                self._send(child, line)

    # The end

    def _press(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.pid and child.kill_at <= now:
                log.error("%s has not ended in time and is killed", child.name)
                _kill(child.pid, signal.SIGKILL)
                child.kill_at = float("inf")

    def _end(self) -> bool:
        """Whether all is over. The sweeper goes last, when it has dealt with the deaths of the others."""
        if any(child.pid for child in self._workers()):
            return False
        now = time.monotonic()
        self._ending_since = self._ending_since or now
        for child in self._sweepers():
            if child.pid and child.asked is None:
                limit_s = _LAST_DEATHS_S if self._phase is _Phase.DRAINING else _LAST_DEATHS_S / 3
                if now - child.page.reached > 2 * _LAST_DEATHS_S and child.page.state is State.READY:
                    limit_s = 0.0  # the database is away, and whoever finds it again reclaims after the lease
                if not self._deaths or now - self._ending_since >= limit_s:
                    self._ask(child, "drain", "the pool ends", _STOP_S)
        return not any(child.pid for child in self._children)

    def _kill_all(self) -> None:
        # Only after an error in this very loop: no child outlives it.
        for child in self._children:
            if child.pid:
                _kill(child.pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)
            if child.channel is not None:
                child.channel.close()

    # The loop's ears

    def _wait(self) -> None:
        now = time.monotonic()
        pause = _LOOK_S
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        by_fd: dict[int, Child] = {}
        for child in self._children:
            if child.channel is not None:
                by_fd[child.channel.fileno()] = child
                wants_read = select.POLLIN if child.role is Role.SWEEPER else 0
                poll.register(child.channel, wants_read | (select.POLLOUT if child.unsent else 0))
            if child.pid:
                pause = min(pause, child.kill_at - now)
                if child.ready_at is None:
                    pause = min(pause, _LOOK_SOON_S)
            elif self._wanted(child):
                pause = min(pause, child.start_at - now)
        if self._noted:
            pause = 0.0
        # Rounded up: a pause cut to zero would be turned again and again until its time has come.
        for descriptor, events in poll.poll(max(pause, 0.0) * 1000 + 1):
            if descriptor == self._wakeup.fileno():
                with contextlib.suppress(BlockingIOError):
                    while self._wakeup.recv(4096):
                        pass
                continue
            child = by_fd[descriptor]
            if events & select.POLLOUT:
                self._send(child, b"")
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read(child)

    def _read(self, child: Child) -> None:
        assert child.channel is not None
        try:
            data = child.channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # It has closed its end, so it is about to end; a channel at its end would keep the loop awake until then.
            child.channel.close()
            child.channel = None
            return
        child.unread += data
        *lines, rest = child.unread.split(b"\n")
        child.unread = bytearray(rest)
        for line in lines:
            answer: dict[str, Any] = orjson.loads(line)
            if answer.get("alone"):
                self._work_alone()
            else:
                self._deaths.pop(answer["done"], None)

    def _send(self, child: Child, data: bytes) -> None:
        child.unsent += data
        if child.channel is None:
            return
        try:
            while child.unsent:
                del child.unsent[: child.channel.send(child.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            child.unsent.clear()  # it is gone; whatever matters is told to the next one

    def _workers(self) -> list[Child]:
        return [child for child in self._children if child.role is Role.WORKER]

    def _sweepers(self) -> list[Child]:
        return [child for child in self._children if child.role is Role.SWEEPER]


def describe(status: int) -> tuple[str, str]:
    """How a process ended, for people and as the label of a counter."""
    if status < 0:
        return "its exit status was lost", "unknown"
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}", name
    labels = {process.EX_OK: "drained", process.EX_BOOT: "boot", process.EX_REPLACE: "lost"}
    return f"exit status {code}", labels.get(code, "exit")


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


_PREFIX: Final = "cyclone-metrics-"


def _directory(stack: contextlib.ExitStack) -> str:
    """A directory for the figures of this pool's processes, locked as long as one of them lives.

    In memory if there is such a place: the files are mapped, and where a disk is full the next store to a new part of
    one would kill the process with SIGBUS. A pool that was killed leaves its directory; whoever comes next removes it.
    """
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Children keep the descriptor, and with it the lock; a program that one of them executes does not. Another pool
        # may have come between the two lines, and have taken this for one that was left.
        with contextlib.suppress(OSError):
            stack.enter_context(_locked(path))
            path.stat()
            break
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return str(path)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
