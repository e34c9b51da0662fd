"""How fast steps are stored: many at once against a bare COPY, one by one against pgbench with the same inserts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator
from typing import Any

import psycopg
import psycopg_pool
import pytest
import uvloop

import cyclone
from bench import work
from bench.conftest import Meter, Round, Timed
from bench.server import Counters, Server, by_cpu, costs

_CONNECTIONS = 32
# Whether somebody sleeps. Many turns, since commits take as long as the disk just then lets them.
_TURNS = (False, True, True, False) * 3
_COLUMNS = "id, run_id, ord, input, ready_at, state, node, kind, max_attempts"
_ONE = f"""\
\\set seq random(1, 1000000)
WITH step AS (
    INSERT INTO cyclone_steps ({_COLUMNS})
    SELECT id, id, id, jsonb_build_object('seq', :seq::int, 'to', 'user0000001@example.com', 'body', repeat('x', 50)),
           now(), 'available', 'noop', 'noop', 5
    FROM nextval('cyclone_ids') AS id
    RETURNING id
)
INSERT INTO cyclone_ready (lane, rank, ord, step) SELECT 'default', 11, id, id FROM step;
"""


def bench_many(meter: Meter, server: Server) -> None:
    count = meter.size(100_000, quick=2_000)
    messages = [work.message(seq) for seq in range(count)]

    def one_round() -> Round:
        with server.database() as dsn:
            yardstick = count / _copy(dsn, messages)
        meter.show(0.5)
        with server.database() as dsn:
            with cyclone.SyncClient(dsn) as client, server.counting([os.getpid()]) as used:
                seconds = yield lambda: work.noop.enqueue_many(client, messages)
            _check(dsn, count)
            return {
                "steps/s": count / seconds,
                "yardstick/s": yardstick,
                "ratio": count / seconds / yardstick,
                **costs(used, count, "client"),
            }

    meter.measure(
        f"{count:,} in one call",
        one_round,
        bars=("steps/s", "yardstick/s"),
        against="COPY",
        goal=("ratio", ">=", 0.60),
    )


def _copy(dsn: str, messages: list[work.Message]) -> float:
    """The seconds that COPY takes for the same rows, made ready beforehand, in one transaction."""
    inputs = map(work.noop.input_codec.encode, messages)
    same = b"2000-01-01\tavailable\tnoop\tnoop\t5\n"
    steps = b"".join(b"%d\t%d\t%d\t%b\t%b" % (n, n, n, data, same) for n, data in enumerate(inputs))
    tickets = b"".join(b"default\t11\t%d\t%d\n" % (n, n) for n in range(len(messages)))
    with psycopg.connect(dsn) as conn:
        begin = time.perf_counter()
        for target, data in ((f"cyclone_steps ({_COLUMNS})", steps), ("cyclone_ready", tickets)):
            with conn.cursor().copy(f"COPY {target} FROM STDIN".encode()) as copy:
                copy.write(data)
        conn.commit()
        return time.perf_counter() - begin


@pytest.mark.parametrize("client", ["async", "sync"])
def bench_single(meter: Meter, server: Server, client: str) -> None:
    count = meter.size(2_000, quick=100)
    messages = [work.message(seq) for seq in range(count)]

    def one_round() -> Round:
        with server.database() as dsn:
            yardstick = server.run_pgbench(dsn, _ONE, clients=1, seconds=meter.size(5, quick=1))
        meter.show(0.5)
        with server.database() as dsn:
            with server.counting([os.getpid()]) as used:
                seconds = yield from (_one_by_one_sync if client == "sync" else _one_by_one)(dsn, messages)
            _check(dsn, count)
            return {
                "steps/s": count / seconds,
                "yardstick/s": yardstick,
                "ratio": count / seconds / yardstick if yardstick else None,
                **costs(used, count, "client"),
            }

    meter.measure(
        f"one by one, {client} client",
        one_round,
        bars=("steps/s", "yardstick/s"),
        against="pgbench",
        goal=("ratio", ">=", 0.70),
    )


def _one_by_one(dsn: str, messages: list[work.Message]) -> Generator[Timed, float, float]:
    async def enqueue(client: cyclone.Client) -> None:
        for message in messages:
            await work.noop.enqueue(client, message)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = cyclone.Client(dsn)
        runner.run(client.open())
        seconds = yield lambda: runner.run(enqueue(client))
        runner.run(client.close())
        return seconds


def _one_by_one_sync(dsn: str, messages: list[work.Message]) -> Generator[Timed, float, float]:
    def enqueue() -> None:
        for message in messages:
            work.noop.enqueue(client, message)

    with cyclone.SyncClient(dsn) as client:
        return (yield enqueue)


@pytest.mark.parametrize("alone", [True, False], ids=["clients", "tasks"])
def bench_notify(meter: Meter, server: Server, alone: bool) -> None:
    """Notifying takes a lock of the whole server through the commit, so many clients at once feel it most: as many
    programs do, each of which looks for itself whether to notify, and as the tasks of one do.
    """
    each = meter.size(50, quick=5)

    async def enqueue(clients: list[cyclone.Client]) -> None:
        async def one(client: cyclone.Client) -> None:
            for seq in range(each):
                await work.noop.enqueue(client, work.message(seq))

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(one(client))

    def one_round() -> Round:
        seconds = {False: 0.0, True: 0.0}
        used = {False: Counters(0.0, 0.0, 0), True: Counters(0.0, 0.0, 0)}
        heard = 0

        def take_turns() -> None:
            nonlocal heard
            for number, asleep in enumerate(_TURNS):
                meter.show(number / len(_TURNS))
                with work.listener(dsn, asleep=asleep):
                    with server.counting([os.getpid()]) as counters:
                        begin = time.perf_counter()
                        runner.run(enqueue(clients))
                        seconds[asleep] += time.perf_counter() - begin
                    used[asleep] += counters
                    heard += work.executed() if asleep else 0

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, server.database() as dsn:
            pool = psycopg_pool.AsyncConnectionPool[psycopg.AsyncConnection[Any]](
                dsn, kwargs={"autocommit": True, "prepare_threshold": None}, open=False,
                min_size=_CONNECTIONS, max_size=_CONNECTIONS,
            )  # fmt: skip
            if alone:
                clients = [cyclone.Client(dsn) for _ in range(_CONNECTIONS)]
            else:
                runner.run(pool.open(wait=True))
                clients = [cyclone.Client(pool=pool)] * _CONNECTIONS
            for client in clients:
                runner.run(client.open())
            runner.run(enqueue(clients))
            yield take_turns
            for client in clients:
                runner.run(client.close())
            runner.run(pool.close())
            _check(dsn, _CONNECTIONS * each * (1 + len(_TURNS)))
        count = _CONNECTIONS * each * len(_TURNS) // 2
        return {
            "steps/s": count / seconds[True],
            "yardstick/s": count / seconds[False],
            "ratio": seconds[False] / seconds[True],
            "by CPU": by_cpu(used[True], count, used[False], count),
            **costs(used[True], count, "client"),
            "notifications/s": heard / seconds[True],
        }

    meter.measure(
        f"{_CONNECTIONS} clients, notifying" if alone else f"{_CONNECTIONS} tasks of a client, notifying",
        one_round,
        bars=("steps/s", "yardstick/s"),
        against="nobody asleep",
        goal=("ratio", ">=", 0.95),
    )


def _check(dsn: str, count: int) -> None:
    with psycopg.connect(dsn) as conn:
        found = conn.execute(
            "SELECT (SELECT count(*) FROM cyclone_steps), (SELECT count(*) FROM cyclone_ready)"
        ).fetchone()
    if found != (count, count):
        raise RuntimeError(f"{count} steps with tickets should be stored, not {found}")
