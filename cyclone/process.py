"""The life of any child of a pool, from the fork to its exit.

One channel, a pair of sockets, joins each child with the supervisor. Orders come through it (`drain`, `stop`, and to
the sweeper `bury`), and its end tells the child that the supervisor is gone. Orders do not come as signals, because a
terminal's Ctrl-C and a service manager's TERM reach the whole group: a child would hear each of them twice and take
the second for "at once". A signal to a child is therefore somebody's own wish for that child, and counts for itself.

Until the loop runs a child has nothing in hand, and a signal simply ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, cast

import orjson

from . import board, config, errors, health, metrics, registry, sweep, wake, worker

log = logging.getLogger("cyclone")

EX_OK: Final = 0
EX_FAILED: Final = 1
EX_BOOT: Final = 70  # it cannot start, and another try would fail the same way: a target or a schema that is wrong
EX_REPLACE: Final = 75  # its life was lost or its loop stood still: another process must go on

# A death lists the steps that were executed, so a line on the channel can be as long as there are slots.
_MAX_LINE: Final = 1 << 24
_BEAT_S: Final = 1.0
_FOLD_S: Final = 60.0
_SWEEPER_SILENCE_S: Final = 20.0
_WIND_DOWN_S: Final = 2.0


@dataclass(kw_only=True)
class Spec:
    """What a child is told before the fork. `foreign` are descriptors that only the parent may keep open."""

    role: board.Role
    page: board.Page
    life: int
    channel: socket.socket
    target: str
    dsn: str
    schema: str
    options: config.WorkerOptions
    pipe: wake.Pipe
    procs: int
    alone: bool = False
    sweeps: bool = True
    pages: Sequence[board.Page] = ()
    listener: socket.socket | None = None
    metrics_dir: str | None = None
    foreign: list[int] = field(default_factory=list[int])


class Runnable(Protocol):
    """Whatever a child runs."""

    async def run(self) -> Any: ...


def enter(spec: Spec, main: Callable[[Spec], int]) -> NoReturn:
    """Everything a child does. The parent has blocked the signals, so that none is lost between fork and handlers."""
    code = EX_FAILED
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A reload is the supervisor's business. Not ignored, which programs that handlers start would inherit.
        signal.signal(signal.SIGHUP, _pass)
        for descriptor in spec.foreign:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        _name(f"cyclone-{spec.role.name.lower()}")
        configure_logging(spec.role.name.lower())
        spec.page.pid = os.getpid()
        spec.page.state = board.State.BOOTING
        spec.page.beat()
        code = main(spec)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else EX_FAILED
    except BaseException:
        log.exception("the %s failed", spec.role.name.lower())
    finally:
        # Not sys.exit: what the parent had in hand (its atexit functions, its frames) is not this process's to clean
        # up, and a thread that a handler left behind must not hold the exit.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def _leave(number: int, frame: object) -> None:
    os._exit(EX_OK)


def _pass(number: int, frame: object) -> None:
    pass


def _name(name: str) -> None:
    # What `ps` and `top` show; a convenience that may fail.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            pr_set_name = 15
            ctypes.CDLL(None).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)


class _Handler(logging.StreamHandler[Any]):
    """Lines on standard error. A pipe that was closed and a disk that is full lose the line, never the work."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {role}[%(process)d] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        # A program that set up logging of its own gets the record there, once.
        if not logging.root.handlers:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def configure_logging(role: str) -> None:
    """Lets the processes of a pool log to standard error."""
    for handler in log.handlers[:]:
        if isinstance(handler, _Handler):
            log.removeHandler(handler)
    log.addHandler(_Handler(role))
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def main(spec: Spec) -> int:
    """What a child of a pool does by its role; returns the exit code."""
    metrics.start(spec.metrics_dir)
    with contextlib.suppress(Exception):
        # After a segmentation fault the stack is on standard error, and the signal is still what ends the process.
        faulthandler.enable()
    if spec.role is board.Role.WORKER:
        metrics.slots(spec.options.concurrency)
        try:
            handlers = registry.load(spec.target)
        except (Exception, SystemExit) as exc:
            return cannot_boot(spec, exc)
        return _loop(_worker(spec, handlers))
    return _loop(_sweeper(spec))


def cannot_boot(spec: Spec, exc: BaseException) -> int:
    """Leaves the reason on the page, where the supervisor reads it; the first one of a row is told in full."""
    spec.page.note = str(exc) or repr(exc)
    if not spec.page.failing and exc.__cause__ is not None:
        log.error("%s", "".join(traceback.format_exception(exc)).rstrip())
    return EX_BOOT


def _loop(coroutine: Coroutine[Any, Any, int]) -> int:
    factory: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    # The runner is not closed: that would wait, without a limit, for threads that handlers do not let go of. The
    # process is about to end, and all that matters was ended by the coroutine.
    return asyncio.Runner(loop_factory=factory).run(coroutine)


async def _worker(spec: Spec, handlers: registry.Registry) -> int:
    try:
        working = worker.Worker(
            spec.dsn,
            handlers,
            options=spec.options,
            schema=spec.schema,
            page=spec.page,
            life=spec.life,
            # Without a sweeper in the pool nobody writes to the pipe: each worker then listens and polls by itself.
            pipe=spec.pipe if spec.sweeps else None,
            pooled=True,
            alone=spec.alone,
        )
    except errors.InvalidOptionError as exc:  # a handler that its process could not import
        return cannot_boot(spec, exc)
    async with orders(spec, lambda drain: working.stop(drain=drain)):
        try:
            await working.run()
        except errors.SchemaVersionError as exc:
            return cannot_boot(spec, exc)
        return EX_OK


async def _sweeper(spec: Spec) -> int:
    sweeping = (
        sweep.Sweeper(
            spec.dsn,
            schema=spec.schema,
            pipe=spec.pipe,
            listen=spec.options.notify,
            idle=lambda: board.any_idle(spec.pages),
        )
        if spec.sweeps
        else None
    )
    served = spec.listener and health.Server(
        spec.listener,
        spec.pages,
        stall_limit_s=spec.options.stall_after_s,
        sweeper_silence_s=_SWEEPER_SILENCE_S if spec.sweeps else None,
    )
    stopped = asyncio.Event()

    def stop(drain: bool) -> None:
        spec.page.state = board.State.DRAINING
        stopped.set()
        if sweeping:
            sweeping.stop()
        if served:
            served.stop()

    graves = Graves(sweeping.bury if sweeping else None)
    runs: list[Runnable] = [runnable for runnable in (sweeping, served) if runnable]
    async with orders(spec, stop, graves.take) as channel:
        if sweeping is not None:
            sweeping.on_isolated = lambda: _say(channel, {"alone": True})
        spec.page.state = board.State.READY
        try:
            async with background(graves.run(channel), _fold(), _beat(spec, sweeping)), asyncio.TaskGroup() as group:
                tasks = [group.create_task(runnable.run()) for runnable in runs]
                await stopped.wait()
                if tasks:
                    await asyncio.wait(tasks, timeout=_WIND_DOWN_S)
                for task in tasks:
                    task.cancel()  # the sweeper may be in a pause while the database is away
        except BaseExceptionGroup as problems:
            if (wrong := problems.subgroup(errors.SchemaVersionError)) is not None:
                return cannot_boot(spec, _first(wrong))
            raise
    return EX_OK


def _first(problem: BaseException) -> BaseException:
    while isinstance(problem, BaseExceptionGroup):
        problem = cast("BaseExceptionGroup[BaseException]", problem).exceptions[0]
    return problem


async def _beat(spec: Spec, sweeping: sweep.Sweeper | None) -> None:
    while True:
        spec.page.beat()
        if sweeping is not None:
            spec.page.reached = sweeping.reached
        await asyncio.sleep(_BEAT_S)


async def _fold() -> None:
    # Also without a death that was told: programs that handlers start may use the same directory.
    while True:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(metrics.fold)
        await asyncio.sleep(_FOLD_S)


@contextlib.asynccontextmanager
async def orders(
    spec: Spec, stop: Callable[[bool], object], bury: Callable[[dict[str, Any]], None] | None = None
) -> AsyncGenerator[asyncio.StreamWriter]:
    """Within the block signals and the supervisor's orders call `stop(drain)`. Yields the way to the supervisor."""
    loop = asyncio.get_running_loop()
    heard = 0

    def on_signal(number: int) -> None:
        nonlocal heard
        heard += 1
        log.info("%s: %s", signal.Signals(number).name, "draining" if heard == 1 else "stopping at once")
        stop(heard == 1)

    async def listen() -> None:
        # A supervisor that dies with something of ours unread resets the channel, where else it would only end.
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                order = orjson.loads(line)
                if order["do"] == "bury":
                    if bury is not None:
                        bury(order)
                else:
                    stop(order["do"] == "drain")
        log.warning("the supervisor is gone: draining")
        stop(True)

    reader, writer = await asyncio.open_unix_connection(sock=spec.channel, limit=_MAX_LINE)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    listening = asyncio.create_task(listen())
    try:
        yield writer
        with contextlib.suppress(OSError):
            await writer.drain()
    finally:
        # From here on the process only ends, and a signal must not turn that into a death.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


def _say(channel: asyncio.StreamWriter, words: Mapping[str, Any]) -> None:
    """Tells the supervisor something, if it is still there: its end is noticed elsewhere."""
    if not channel.is_closing():
        channel.write(orjson.dumps(words) + b"\n")


class Graves:
    """Ends the lives of processes that have died, one after the other, and tells the supervisor when it is done.

    The supervisor keeps what it knows of a death until then, so a failure here only has to be tried again.
    """

    def __init__(self, bury: Callable[[int, list[int] | None, str], Coroutine[Any, Any, Any]] | None) -> None:
        self._bury = bury
        self._deaths: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def take(self, death: dict[str, Any]) -> None:
        """Takes a message of the supervisor."""
        self._deaths.put_nowait(death)

    async def run(self, channel: asyncio.StreamWriter) -> None:
        """Buries until it is cancelled."""
        while True:
            death = await self._deaths.get()
            pause = 0.1
            while death["life"] and self._bury is not None:
                try:
                    await self._bury(death["life"], death["executing"], death["reason"])
                    break
                except Exception as exc:
                    log.warning("cannot end the life of process %d yet: %s", death["pid"], exc)
                    await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                    pause = min(pause * 2, 5.0)
            if death["restart"]:
                metrics.restarts(death["restart"])
            with contextlib.suppress(OSError):
                await asyncio.to_thread(metrics.fold)
            _say(channel, {"done": death["id"]})


@contextlib.asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Runs coroutines that never end beside a block. One that fails is logged and takes the block with it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
