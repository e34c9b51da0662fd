"""How fast waiting steps are worked off, against the same SQL without handlers and against other loads, in turns."""

from __future__ import annotations

from typing import Any

import pytest

import cyclone
from bench import drains, work
from bench.conftest import Meter, Round
from bench.drains import Side
from bench.server import Server, costs

_OUTPUT = '{"seq":1,"to":"user0000001@example.com","body":"' + "x" * 51 + '"}'

# What a handler with one insert on its completion transaction commits, by hand.
_BOOK = """\
\\set id random(1, {count})
BEGIN;
INSERT INTO bench_ledger (run, note) VALUES (:id, repeat('x', 50));
UPDATE cyclone_steps SET state = 'completed', finished_at = now() WHERE id = :id;
COMMIT;
"""
_COMPLETION_CLIENTS = 8 * work.PROCS  # each worker has so many connections for completion transactions
_MANY_PROCS = 16
_MANY_PROCS_COUNT = 300_000  # that 48 connections are made is over soon


@pytest.fixture
def count(meter: Meter) -> int:
    return meter.size(drains.COUNT, quick=drains.QUICK)


def bench_noop(meter: Meter, server: Server, count: int) -> None:
    drains.compare(meter, server, "no-op", _workers(server, count), _sql(server, count), at_least=0.70)


def bench_pool(meter: Meter, server: Server, count: int) -> None:
    drains.compare(meter, server, "no-op, in a pool", drains.pool(server, count), _sql(server, count))


def bench_output(meter: Meter, server: Server, count: int) -> None:
    mine, yardstick = _workers(server, count, work.echo), _sql(server, count, work.echo, _OUTPUT)
    drains.compare(meter, server, "100-byte outputs", mine, yardstick)


def bench_output_by_noop(meter: Meter, server: Server, count: int) -> None:
    mine, yardstick = _workers(server, count, work.echo), _workers(server, count)
    drains.compare(meter, server, "100-byte outputs, by none", mine, yardstick, at_least=0.90)


def bench_procs(meter: Meter, server: Server) -> None:
    count = meter.size(_MANY_PROCS_COUNT, quick=drains.QUICK)
    mine, yardstick = drains.pool(server, count, _MANY_PROCS), drains.pool(server, count)
    drains.compare(meter, server, f"{_MANY_PROCS} workers, by {work.PROCS}", mine, yardstick, at_least=0.85)


def bench_kinds(meter: Meter, server: Server, count: int) -> None:
    mine = Side(
        f"{len(work.QUEUES)} queues, {len(work.KINDS)} kinds",
        count,
        lambda: server.filled(count, work.KINDS, work.QUEUES),
        lambda dsn: work.pool(dsn, target="bench.work:many", queues=work.QUEUES),
    )
    yardstick = Side("one queue and kind", count, lambda: server.filled(count), work.pool)
    drains.compare(meter, server, f"{mine.name}, by one", mine, yardstick, at_least=0.90)


def _workers(server: Server, count: int, step: cyclone.Step[Any, Any] = work.noop) -> Side:
    return Side(f"workers, {step.name}", count, lambda: server.database(step, count), work.workers)


def _sql(server: Server, count: int, step: cyclone.Step[Any, Any] = work.noop, output: str | None = None) -> Side:
    return Side(
        "SQL alone", count, lambda: server.database(step, count), lambda dsn: work.statements_alone(dsn, output)
    )


def bench_completion_tx(meter: Meter, server: Server) -> None:
    count = meter.size(20_000, quick=1_000)
    mine = _workers(server, count, work.book)

    def one_round() -> Round:
        with server.database(work.book, count) as dsn:
            rate = server.run_pgbench(
                dsn, _BOOK.format(count=count), clients=_COMPLETION_CLIENTS, seconds=meter.size(5, quick=1)
            )
        with mine.ready() as drain:
            with server.counting(drain.crew.pids) as used:
                seconds = yield lambda: drain.run(meter.show)
            drain.check()
            return {
                "steps/s": count / seconds,
                "yardstick/s": rate,
                "ratio": count / seconds / rate if rate else None,
                **costs(used, count, "workers"),
                "HOT %": drain.hot(),
            }

    meter.measure(
        "completion transactions",
        one_round,
        bars=("steps/s", "yardstick/s"),
        against="pgbench",
        goal=("ratio", ">=", 0.80),
    )
