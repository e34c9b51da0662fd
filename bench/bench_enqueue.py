"""How fast steps are stored: many at once against a bare COPY, one by one against pgbench with the same inserts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator

import psycopg
import pytest
import uvloop

import cyclone
from bench import work
from bench.conftest import Meter, Round, Timed
from bench.server import Server, costs

_CLIENTS = 32
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

    meter.measure(f"{count:,} in one call", one_round, bars=("steps/s", "yardstick/s"), against="COPY")


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

    meter.measure(f"one by one, {client} client", one_round, bars=("steps/s", "yardstick/s"), against="pgbench")


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


def bench_notify(meter: Meter, server: Server) -> None:
    """Notifying costs a lock for the whole server through the commit, so many clients at once feel it most."""
    each = meter.size(200, quick=10)

    async def enqueue(clients: list[cyclone.Client]) -> None:
        async def one(client: cyclone.Client, number: int) -> None:
            for seq in range(each):
                await work.noop.enqueue(client, work.message(number * each + seq))

        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(one(client, number))

    def one_round() -> Round:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, server.database() as dsn:
            clients = [cyclone.Client(dsn) for _ in range(_CLIENTS)]  # each has its own connection and its own quiet
            for client in clients:
                runner.run(client.open())

            def quiet() -> float:
                with work.listener(dsn, asleep=False):
                    begin = time.perf_counter()
                    runner.run(enqueue(clients))
                    return time.perf_counter() - begin

            runner.run(enqueue(clients[:1]))
            # Before and after, so that a machine that grows slower or faster meanwhile does not count.
            before = quiet()
            meter.show(0.4)
            with work.listener(dsn, asleep=True), server.counting([os.getpid()]) as used:
                seconds = yield lambda: runner.run(enqueue(clients))
                heard = work.executed()
            meter.show(0.7)
            rate = _CLIENTS * each * 2 / (before + quiet())
            for client in clients:
                runner.run(client.close())
            _check(dsn, _CLIENTS * each * 3 + each)
            return {
                "steps/s": _CLIENTS * each / seconds,
                "yardstick/s": rate,
                "ratio": _CLIENTS * each / seconds / rate,
                **costs(used, _CLIENTS * each, "client"),
                "notifications/s": heard / seconds,
            }

    meter.measure(
        f"{_CLIENTS} clients, notifying",
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
