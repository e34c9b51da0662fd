"""Handlers that run in processes of their own: they stand in a module, because a process finds them by import."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

import cyclone
from cyclone import Cancelled, ProcessContext
from cyclone.retry import fixed

NEVER = fixed(timedelta(days=300))
"""A backoff that leaves a failed step where a test can look at it."""


class Order(msgspec.Struct):
    id: str
    cents: int


@cyclone.step("double", executor="process", backoff=NEVER)
def double(ctx: ProcessContext, order: Order) -> Order:
    return Order(order.id, 2 * order.cents)


@cyclone.action("act", executor="process", backoff=NEVER)
def act(ctx: ProcessContext, path: str | None) -> None:
    if path is not None:
        Path(path).write_text(str(os.getpid()))


@cyclone.step("who", executor="process", backoff=NEVER)
def who(ctx: ProcessContext) -> dict[str, Any]:
    names = ("run_id", "node", "attempt", "max_attempts", "is_last_attempt", "idempotency_key", "reclaims", "snoozes")
    seen = {name: getattr(ctx, name) for name in (*names, "queue", "tags", "metadata")}
    ctx.log.info("seen")
    return {
        **seen,
        "key": ctx.key("receipt", "2"),
        "aware": ctx.enqueued_at.tzinfo is not None,
        "has_tx": hasattr(ctx, "completion_tx"),
    }


@cyclone.step("pid", executor="process", backoff=NEVER)
def pid(ctx: ProcessContext) -> int:
    return os.getpid()


@cyclone.step("pid_limited", executor="process", memory_limit="512MiB", backoff=NEVER)
def pid_limited(ctx: ProcessContext) -> int:
    return os.getpid()


class Silent(Exception):
    pass


class Broken(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Mapped(Exception):
    pass


def _recurse() -> None:
    _recurse()


@cyclone.step("fail", executor="process", backoff=NEVER, permanent_on=(Mapped,))
def fail(ctx: ProcessContext, what: str) -> Any:
    match what:
        case "recursion":
            _recurse()
        case "huge":
            raise RuntimeError("é" * 3_000_000)
        case "text":
            raise RuntimeError("nul \0 and \ud800 alone")
        case "output":
            return "\ud800"
        case "large output":
            return "x" * (2 << 20)
        case "group":
            raise ExceptionGroup("many", [ValueError("one"), KeyError("two")])
        case "permanent":
            raise cyclone.Permanent("no use") from ValueError("the cause")
        case "snooze":
            raise cyclone.Snooze(timedelta(days=1))
        case "retry after":
            raise cyclone.RetryAfter(timedelta(days=2), "later")
    raise {
        "RuntimeError": RuntimeError("boom"),
        "SystemExit": SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "MemoryError": MemoryError(),
        "CancelledError": asyncio.CancelledError(),
        "GeneratorExit": GeneratorExit(),
        "Cancelled": Cancelled("a stray one"),
        "Silent": Silent(),
        "Broken": Broken(),
        "Mapped": Mapped("by its class"),
    }[what]


def _odd_backoff(attempt: int, exc: Exception) -> timedelta:
    if "broken" in str(exc):
        raise ValueError(f"no wait for {exc}")
    return timedelta(days=10 if isinstance(exc, LookupError) else 1)


@cyclone.step("odd", executor="process", backoff=_odd_backoff)
def odd(ctx: ProcessContext, text: str) -> None:
    raise LookupError(text)


@cyclone.step("die", executor="process", backoff=NEVER)
def die(ctx: ProcessContext, how: str) -> None:
    match how:
        case "segfault":
            import ctypes

            ctypes.string_at(0)
        case "exit":
            os._exit(9)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "closed":
            os.closerange(3, 256)
            _sleep_for_ever()
        case "garbage":
            for number in range(3, 256):
                with contextlib.suppress(OSError):
                    socket.socket(fileno=os.dup(number)).sendall(b"\0\0\0\5hello")
            _sleep_for_ever()


def _sleep_for_ever() -> None:
    while True:
        time.sleep(60)


@cyclone.step("spin", executor="process", timeout=1, grace=5, backoff=NEVER)
def spin(ctx: ProcessContext, path: str | None) -> None:
    if path is not None:
        Path(path).write_text(str(os.getpid()))
    while True:
        pass


@cyclone.step("deaf", executor="process", timeout=0.2, grace=0.1, backoff=NEVER)
def deaf(ctx: ProcessContext, path: str) -> None:
    """Ignores that it should stop, and so does what it has started."""
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    started = subprocess.Popen([sys.executable, "-c", script])
    Path(path).write_text(f"{os.getpid()} {started.pid}")
    while True:
        with contextlib.suppress(BaseException):
            while True:
                time.sleep(0.01)


@cyclone.step("polite", executor="process", grace=10, backoff=NEVER)
def polite(ctx: ProcessContext, path: str) -> str:
    """Waits until it is stopped, and tells whether it was; or until the file `go` is beside its own."""
    own = Path(path)
    _tell(own, str(os.getpid()))
    try:
        while not own.with_name("go").exists():
            time.sleep(0.005)
        return "went"
    except Cancelled:
        _tell(own.with_name("stopped"), ctx.run_id)
        raise


@cyclone.step("stays", executor="process", timeout=0.2, grace=10, backoff=NEVER)
def stays(ctx: ProcessContext) -> str:
    try:
        _sleep_for_ever()
    except Cancelled:
        pass
    return "too late"


def _tell(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


@cyclone.step("eat", executor="process", memory_limit="256MiB", backoff=NEVER)
def eat(ctx: ProcessContext, mebibytes: int) -> int:
    held = bytearray(mebibytes << 20)
    return len(held)


@cyclone.step("nibble", executor="process", memory_limit="128MiB", backoff=NEVER)
def nibble(ctx: ProcessContext) -> None:
    held: list[bytes] = []
    while True:
        held.append(bytes(1000))


@cyclone.step("look", executor="process", backoff=NEVER)
def look(ctx: ProcessContext, marker: int | None) -> dict[str, Any]:
    """What came along from the worker."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
    program = "import os; print(len([n for n in os.listdir('/proc/self/fd') if int(n) > 2]) - 1)"
    below = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {"descriptors": descriptors, "below": int(below), "path": sys.path, "argv": sys.argv}


@cyclone.step("fork", executor="process", timeout=20, backoff=NEVER)
def fork(ctx: ProcessContext, how: str) -> int | None:
    """Leaves copies of this process behind: they must not hold the channel open, nor answer for it."""
    context = multiprocessing.get_context("fork")
    if how == "returns":
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return os.getpid()
    started = context.Process(target=time.sleep, args=(600,))
    started.start()
    if how == "terminates":
        started.terminate()
        started.join()
        return started.exitcode
    os._exit(3)


def _telling_backoff(attempt: int, exc: Exception) -> timedelta:
    raise ValueError(f"no wait for {exc}")


@cyclone.step("secret", executor="process", backoff=_telling_backoff)
def secret(ctx: ProcessContext) -> None:
    raise LookupError("the token is hunter2")
