"""The work that is measured: handlers, the processes that run them, and the same SQL without any handler.

Processes are forked, as those of a pool are, and share a page of counters with their parent, which therefore sees the
end without asking the database meanwhile. They connect, wait at a gate, and begin together.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import mmap
import multiprocessing
import os
import random
import signal
import time
from array import array
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from multiprocessing.context import ForkProcess
from typing import Unpack

import msgspec
import psycopg
import uvloop

import cyclone
from cyclone import claim as cyclone_claim
from cyclone import db, settle, wake
from cyclone.config import WorkerArguments

BATCH = 500
"""How many steps the SQL alone claims and settles at once: what a worker settles at once."""
PROCS = 2
QUEUES = tuple(f"queue_{n}" for n in range(8))
KINDS = tuple(f"noop_{n}" for n in range(200))
_SLOTS = 64
_TICK_S = 0.010

_fork = multiprocessing.get_context("fork")


def _times(count: int) -> memoryview[float]:
    return memoryview(mmap.mmap(-1, 8 * max(count, 1))).cast("d")


# Made before any fork, so all processes see the same pages; those of times by each crew for as many steps as it asks.
_counts = memoryview(mmap.mmap(-1, 8 * _SLOTS)).cast("q")
_called = _committed = _started = _times(0)
_places = _fork.Value(ctypes.c_int, 0)
_waiting = _fork.Semaphore(0)
_gate = _fork.Event()
_slot = 0


class Message(msgspec.Struct):
    """An input, and where one is stored an output, of exactly 100 bytes."""

    seq: int
    to: str
    body: str


def message(seq: int) -> Message:
    to = f"user{seq:07d}@example.com"
    head = len(json.dumps({"seq": seq, "to": to, "body": ""}, separators=(",", ":")))
    return Message(seq, to, "x" * (100 - head))


# Handlers

handlers = cyclone.Registry()


@cyclone.action("noop", registry=handlers)
async def noop(ctx: cyclone.Context, got: Message) -> None:
    _counts[_slot] += 1


@cyclone.step("echo", registry=handlers)
async def echo(ctx: cyclone.Context, got: Message) -> Message:
    _counts[_slot] += 1
    return got


@cyclone.action("book", registry=handlers)
async def book(ctx: cyclone.Context, got: Message) -> None:
    tx = await ctx.completion_tx()
    await tx.execute("INSERT INTO bench_ledger (run, note) VALUES (%s, %s)", (int(ctx.run_id), got.body))
    _counts[_slot] += 1


@cyclone.action("stamp", registry=handlers)
async def stamp(ctx: cyclone.Context, got: Message) -> None:
    _started[got.seq] = time.monotonic()
    _counts[_slot] += 1


@cyclone.step("gather", registry=handlers)
async def gather(ctx: cyclone.Context, got: list[Message]) -> int:
    _counts[_slot] += 1
    return len(got)


@cyclone.step("list", registry=handlers)
async def listed(ctx: cyclone.Context, count: int) -> list[Message]:
    _counts[_slot] += 1
    return [message(seq) for seq in range(count)]


@cyclone.workflow("chain", registry=handlers)
def chain(g: cyclone.Graph[Message]) -> cyclone.Node[Message]:
    """Three steps, each with the output of the one before."""
    first = g.run(echo, g.input)
    second = g.run(echo, first.output)
    return g.run(echo, second.output)


@cyclone.workflow("fan", registry=handlers)
def fan(g: cyclone.Graph[int]) -> cyclone.Node[int]:
    """A step for each item of a list, and one for all of their outputs."""
    items = g.run(listed, g.input)
    return g.run(gather, g.map(echo, items.output).output)


many = cyclone.Registry()
"""As `noop`, under as many names as a large program has."""
for _kind in KINDS:
    cyclone.action(_kind, registry=many)(noop.fn)


async def begin_together(state: cyclone.State) -> AsyncIterator[None]:
    _take_slot()
    _waiting.release()
    await asyncio.to_thread(_gate.wait)
    yield


for _registry in (handlers, many):
    _registry.lifespan(begin_together)


def _take_slot() -> None:
    global _slot
    with _places.get_lock():
        _slot, _places.value = _places.value, _places.value + 1


# Processes


class Crew:
    """Processes at the gate. `go` lets them through."""

    def __init__(self, pids: list[int], alive: Callable[[], bool]) -> None:
        self.pids = pids
        self._alive = alive

    def wait_for_one(self) -> None:
        """Returns when one more process is at the gate."""
        until = time.monotonic() + 60
        while not _waiting.acquire(timeout=0.1):
            if time.monotonic() > until or not self._alive():
                raise RuntimeError("the processes did not start")

    def go(self) -> None:
        _gate.set()

    def wait(self, count: int, on_progress: Callable[[int], None], timeout_s: float = 300.0) -> list[tuple[float, int]]:
        """Returns when `count` steps were executed, with how many there were after how many seconds."""
        begin = time.perf_counter()
        series: list[tuple[float, int]] = []
        while True:
            now, done = time.perf_counter() - begin, sum(_counts)
            if not series or now - series[-1][0] >= 0.05 or done >= count:
                series.append((now, done))
                on_progress(done)
            if done >= count:
                return series
            if now > timeout_s or not self._alive():
                died = "" if self._alive() else "; a process has ended"
                raise RuntimeError(f"only {done} of {count} steps were executed after {now:.0f} s{died}")
            time.sleep(0.002)


def starts(count: int) -> list[float]:
    """When `stamp` was called for each of the first inputs, by the monotonic clock that all processes share."""
    return _started[:count].tolist()


def picked_up(first: int, last: int) -> tuple[list[float], list[float]]:
    """How many ms after its commit, and after the call that enqueued it, each of these steps of `producer` began."""
    begun = _started[first:last].tolist()
    return (
        [(begin - at) * 1e3 for begin, at in zip(begun, _committed[first:last].tolist(), strict=True)],
        [(begin - at) * 1e3 for begin, at in zip(begun, _called[first:last].tolist(), strict=True)],
    )


def executed() -> int:
    """How often handlers were called since the crew was made."""
    return sum(_counts)


@contextlib.contextmanager
def workers(dsn: str, procs: int = PROCS, *, stamps: int = 0) -> Generator[Crew]:
    """Processes with a `cyclone.Worker` each, as a program embeds it. `stamps`: how many steps note when they begin."""
    with _crew(procs, _work, dsn, stamps=stamps) as crew:
        yield crew


@contextlib.contextmanager
def pool(
    dsn: str,
    procs: int = PROCS,
    *,
    target: str = "bench.work:handlers",
    stamps: int = 0,
    **options: Unpack[WorkerArguments],
) -> Generator[Crew]:
    """What `cyclone-pool` runs: a supervisor, its workers and a sweeper."""
    with _crew(1, _supervise, dsn, procs, target, options, waiting=procs, stamps=stamps) as crew:
        yield crew


@contextlib.contextmanager
def producer(dsn: str, per_second: float, count: int) -> Generator[None]:
    """A process that enqueues `stamp` at an even rate, every 10 ms what is due, and notes when it did."""
    with _processes([_fork.Process(target=_produce, args=(dsn, per_second, count))]):
        yield


@contextlib.contextmanager
def listener(dsn: str, *, asleep: bool) -> Generator[None]:
    """A process that listens as an idle worker does; `executed` counts what it hears. When it is not asleep, it does
    not ask to be notified, as a worker with enough to do.
    """
    with _crew(1, _listen, dsn, asleep):
        yield
    with psycopg.connect(dsn) as conn:
        conn.execute("DELETE FROM cyclone_sleepers")  # what it asked for would outlive it by seconds


@contextlib.contextmanager
def statements_alone(dsn: str, output: str | None, procs: int = PROCS) -> Generator[Crew]:
    """The yardstick: processes that send a worker's own claim and settle statements, and call no handler."""
    with _crew(procs, _claim_and_settle, dsn, output) as crew:
        yield crew


@contextlib.contextmanager
def _crew(
    procs: int, target: Callable[..., None], *args: object, waiting: int | None = None, stamps: int = 0
) -> Generator[Crew]:
    global _called, _committed, _started
    _counts[:] = memoryview(bytes(8 * _SLOTS)).cast("q")
    _called, _committed, _started = _times(stamps), _times(stamps), _times(stamps)
    _places.value = 0
    _gate.clear()
    processes = [_fork.Process(target=target, args=args) for _ in range(procs)]
    with _processes(processes):
        crew = Crew([p.pid for p in processes if p.pid], lambda: all(p.is_alive() for p in processes))
        for _ in range(waiting or procs):
            crew.wait_for_one()
        yield crew


@contextlib.contextmanager
def _processes(processes: list[ForkProcess]) -> Generator[None]:
    """Starts processes and ends them."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        _gate.set()  # who still waits there could not hear the signal
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(60)
            process.kill()


def _work(dsn: str) -> None:
    async def main() -> None:
        worker = cyclone.Worker(dsn, handlers)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()

    uvloop.run(main())


def _supervise(dsn: str, procs: int, target: str, options: WorkerArguments) -> None:
    logging.getLogger("cyclone").setLevel(logging.WARNING)  # starts and ends of processes belong to no result
    os._exit(cyclone.Pool(target, dsn=dsn, procs=procs, metrics_port=0, **options).run())


def _produce(dsn: str, per_second: float, count: int) -> None:
    sent = 0
    with cyclone.SyncClient(dsn) as client:
        begin = time.monotonic()
        while sent < count:
            now = time.monotonic()
            due = min(int((now - begin) * per_second) + 1, count)
            stamp.enqueue_many(client, [message(seq) for seq in range(sent, due)])
            for times, at in ((_called, now), (_committed, time.monotonic())):
                times[sent:due] = array("d", [at]) * (due - sent)
            sent = due
            time.sleep(max(now + _TICK_S - time.monotonic(), 0.0))


def _listen(dsn: str, asleep: bool) -> None:
    _take_slot()

    def on_news() -> None:
        _counts[_slot] += 1

    async def main() -> None:
        ear = wake.Listener(dsn, db.statements("public"), random.getrandbits(62), on_news, idle=lambda: asleep)
        listening = asyncio.create_task(ear.run())
        await ear.connected.wait()
        _waiting.release()
        await listening

    uvloop.run(main())


def _claim_and_settle(dsn: str, output: str | None) -> None:
    _take_slot()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sql = db.statements("public")
    claims, settles = (db.connect_sync(dsn, application_name="cyclone bench") for _ in range(2))
    claims.execute(cyclone_claim.SESSION)
    settles.execute(settle.SESSION)
    life = random.getrandbits(62)
    kinds = sorted(handlers.steps)
    claims.execute(
        sql["begin_life"],
        {
            "life": life, "host": "bench", "pid": os.getpid(), "queues": ["default"],
            "kinds": kinds, "versions": [1] * len(kinds), "now": None, "lease_s": 3600.0,
        },
    )  # fmt: skip
    claim = {"life": life, "queues": ["default"], "ranks": list(range(20)), "room": BATCH, "now": None}
    claim |= {"floors": "{}", "floor": "0"}
    _waiting.release()
    _gate.wait()
    while rows := _run(claims, sql["claim_steps"], claim | {"claim": (number := random.getrandbits(62))}):
        if not rows[0][0]:
            break
        ids = [row[4] for row in rows[1:]]
        refused = _run(
            settles,
            sql["complete_steps"],
            {
                "ids": db.Bigints(ids), "claims": db.Bigints([number] * len(ids)),
                "outputs": db.Texts([output] * len(ids)), "closed": [number], "step_over": False, "now": None,
            },
        )  # fmt: skip
        if refused:
            raise RuntimeError(f"{len(refused)} steps were not completed")
        _counts[_slot] += len(ids)
    signal.pause()


def _run(
    conn: psycopg.Connection[tuple[object, ...]], query: bytes, params: Mapping[str, object]
) -> list[tuple[object, ...]]:
    cursor = conn.cursor(binary=True)
    cursor.execute(query, params)
    return cursor.fetchall()
