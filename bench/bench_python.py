"""What a step costs in Python, from the rows of a claim to the parameters of a settle; the replies are at hand."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Generator, Mapping
from typing import Any, cast

import psycopg
import pytest
import uvloop

import cyclone
from bench import work
from bench.conftest import Meter, Round, Timed
from bench.server import Server
from cyclone import claim, db, metrics

_COUNT = 100_000
_FIRST = 1_000_000_000  # ids of steps that are in no database


class _Replies:
    """Stands where a connection would, for what claims and settles alone. The replies are made beforehand."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = rows
        self._at = 0
        self._reply: list[tuple[Any, ...]] = []
        self.settled = 0
        self.done = asyncio.Event()

    def cursor(self, binary: bool) -> _Replies:
        return self

    async def execute(self, query: bytes, params: Mapping[str, Any]) -> None:
        await asyncio.sleep(0)  # as any reply, this one comes when others have had their turn
        if (room := params.get("room")) is not None:
            rows = self._rows[self._at : self._at + room]
            self._at += len(rows)
            self._reply = [(len(rows), None, None, [row[4] for row in rows]), *rows]
        else:
            self._reply = []
            self.settled += len(params["ids"])
            if self.settled >= len(self._rows):
                self.done.set()

    async def fetchall(self) -> list[tuple[Any, ...]]:
        return self._reply


@pytest.mark.parametrize("step", [work.noop, work.echo], ids=["noop", "echo"])
def bench_python(meter: Meter, server: Server, step: cyclone.Step[work.Message, Any]) -> None:
    count = meter.size(_COUNT, quick=2_000)
    work.Crew([os.getpid()], lambda: True).go()

    def one_round() -> Round:
        with server.database() as dsn, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(_rows(dsn, step, count))
            cpu_s = yield from _run(runner, dsn, rows)
            return {"µs/step": cpu_s / count * 1e6}

    case = "no output" if step is work.noop else "100-byte outputs"
    meter.measure(case, one_round, bars=("µs/step",), goal=("µs/step", "<=", 8.0) if step is work.noop else None)


async def _rows(dsn: str, step: cyclone.Step[work.Message, Any], count: int) -> list[tuple[Any, ...]]:
    """What claims bring for so many steps: as for the one that is really claimed, with other ids and inputs."""
    async with cyclone.Client(dsn) as client, cyclone.Worker(dsn, work.handlers) as worker:
        await worker.ready.wait()
        await step.enqueue(client, work.message(0), queue="elsewhere")
        conn = await db.connect(dsn, application_name="cyclone bench")
        (found,), _ = await claim.Claimer(db.statements("public"), ["elsewhere"]).batch(conn, worker._keeper.life, 1)
        await conn.close()
    # Not the last, which claims do not bring.
    _, _, _, *rest = (getattr(found, name) for name in found.__struct_fields__[:-1])
    return [
        (None, None, None, None, _FIRST + n, _FIRST + n, *rest[:4], step.input_codec.encode(work.message(n)).decode(),
         *rest[5:])
        for n in range(count)
    ]  # fmt: skip


def _run(runner: asyncio.Runner, dsn: str, rows: list[tuple[Any, ...]]) -> Generator[Timed, float, float]:
    """CPU seconds of the loop's thread."""
    metrics.start(None)

    async def run() -> float:
        async with cyclone.Worker(dsn, work.handlers) as worker:
            await worker.ready.wait()
            replies = _Replies(rows)
            conn = cast("psycopg.AsyncConnection[tuple[Any, ...]]", replies)
            worker._settler._conn = conn
            begin = time.thread_time()
            claimer = worker._claimer
            take = claimer.batch

            async def batch(_: object, life: int, room: int) -> Any:
                return await take(conn, life, room)

            claimer.batch = batch  # type: ignore[method-assign, assignment]
            worker._news.nudge()
            await replies.done.wait()
            used = time.thread_time() - begin
            claimer.batch = take  # type: ignore[method-assign]
            worker._settler._conn = None
            return used

    used = 0.0

    def timed() -> None:
        nonlocal used
        used = runner.run(run())

    gc.collect()
    gc.freeze()  # a worker has no hundred thousand rows that the collector would visit again and again
    yield timed
    gc.unfreeze()
    return used
