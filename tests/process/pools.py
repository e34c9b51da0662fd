"""Pools whose children do as a test says: real forks and real signals, no database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cyclone import board, process, supervisor

LIMIT_S = 30.0

_told, _tell = os.pipe()


def tell(event: str, **facts: Any) -> None:
    """Tells the test something, from any process. Short lines on a pipe arrive whole."""
    os.write(_tell, json.dumps({"event": event, "pid": os.getpid(), "at": time.monotonic(), **facts}).encode() + b"\n")


Script = Callable[[process.Spec], int]


def looping(on_order: Callable[[process.Spec, bool, asyncio.Event], None] | None = None) -> Script:
    """A worker that is idle until an order comes; or orders go to `on_order`, and it ends when that sets the event."""

    def script(spec: process.Spec) -> int:
        async def work() -> int:
            end = asyncio.Event()

            def stop(drain: bool) -> None:
                spec.page.state = board.State.DRAINING
                tell("order", drain=drain)
                if on_order is None:
                    end.set()
                else:
                    on_order(spec, drain, end)

            async with process.orders(spec, stop):
                spec.page.state = board.State.READY
                tell("ready", life=spec.page.life)
                await end.wait()
            return 0

        tell("boot", role="worker")
        return process._loop(work())

    return script


def sweeper(acknowledge: Callable[[], bool] = lambda: True) -> Script:
    """A sweeper that tells the test of deaths."""

    def script(spec: process.Spec) -> int:
        async def bury(life: int, executing: list[int] | None, reason: str) -> None:
            tell("buried", life=life, executing=executing, reason=reason)
            if not acknowledge():
                await asyncio.Event().wait()

        async def sweep() -> int:
            end = asyncio.Event()
            graves = process.Graves(bury)
            async with process.orders(spec, lambda drain: end.set(), graves.take) as channel:
                async with process.background(graves.run(channel)):
                    spec.page.state = board.State.READY
                    spec.page.reach()
                    tell("sweeper ready")
                    await end.wait()
            tell("sweeper ends")
            return 0

        tell("boot", role="sweeper")
        return process._loop(sweep())

    return script


class Running:
    """A pool in a process of its own."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.events: list[dict[str, Any]] = []
        self._unread = b""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def expect(self, event: str, count: int = 1, **facts: Any) -> list[dict[str, Any]]:
        """Waits until so many events of this kind, with these facts, have come since the pool started."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = self.seen(event, **facts)
            if len(found) >= count:
                return found
            if not select.select([_told], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {count} × {event} {facts}; there were {self.events}\n{self.log.read_text()}")
            self._read()

    def seen(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event and facts.items() <= one.items()]

    def _read(self) -> None:
        *lines, self._unread = (self._unread + os.read(_told, 65536)).split(b"\n")
        self.events += map(json.loads, lines)

    def end(self) -> int:
        """Waits for the pool's own end; its exit code, negative for a signal."""
        descriptor = os.pidfd_open(self.pid)
        try:
            if not select.select([descriptor], [], [], LIMIT_S)[0]:
                raise AssertionError(f"the pool has not ended\n{self.log.read_text()}")
        finally:
            os.close(descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        while select.select([_told], [], [], 0)[0]:
            self._read()
        return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def running(
    tmp_path: Path, worker: Script, sweeping: Script | None = None, *, stderr: int | None = None, **options: Any
) -> Iterator[Running]:
    """Starts a pool. It is to be ended within the block."""
    options = {"metrics_port": None, "procs": 2, "dsn": "postgresql://nowhere", "drain_timeout": 20.0, **options}
    sweeping = sweeping or sweeper()
    log = tmp_path / "pool.log"

    def main(spec: process.Spec) -> int:
        return (worker if spec.role is board.Role.WORKER else sweeping)(spec)

    while select.select([_told], [], [], 0)[0]:
        os.read(_told, 65536)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if stderr is None else stderr
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.setpgid(0, 0)
            with open(2, "w", buffering=1, closefd=False) as stream:
                import sys

                sys.stdout = sys.stderr = stream
                import logging

                logging.root.handlers.clear()  # those of pytest
                pool = supervisor.Pool("nothing", main=main, **options)
                code = pool.run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    pool = Running(pid, log)
    try:
        yield pool
    finally:
        if pool.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pool.pid, signal.SIGKILL)
            os.waitpid(pool.pid, 0)
