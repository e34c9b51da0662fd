"""How fast nodes of workflows are worked off, against plain steps with the same outputs, in turns; and submitting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

import cyclone
from bench import work
from bench.conftest import Meter, Round
from bench.server import Server, costs

_WIDTH = 1_000


def bench_chains(meter: Meter, server: Server) -> None:
    runs = meter.size(5_000, quick=200)

    def submit(client: cyclone.SyncClient) -> None:
        work.chain.submit_many(client, [work.message(seq) for seq in range(runs)])

    _drain(meter, server, "chains of three", submit, runs * 3)


def bench_fan(meter: Meter, server: Server) -> None:
    runs = meter.size(15, quick=1)

    def submit(client: cyclone.SyncClient) -> None:
        work.fan.submit_many(client, [_WIDTH] * runs)

    _drain(meter, server, f"fan-out and join of {_WIDTH}", submit, runs * (_WIDTH + 2))


def _drain(meter: Meter, server: Server, case: str, submit: Callable[[cyclone.SyncClient], None], count: int) -> None:
    lines: dict[str, Any] = {"x": "s", "y": "steps"}

    def one_round() -> Round:
        with server.database(work.echo, count) as dsn, work.workers(dsn) as crew:
            begin = time.perf_counter()
            crew.go()
            lines["plain steps"] = crew.wait(count, lambda done: meter.show(done / count / 2))
            _wait(dsn, "SELECT EXISTS (SELECT FROM cyclone_claims)")
            plain = count / (time.perf_counter() - begin)
        with server.database() as dsn:
            with cyclone.SyncClient(dsn) as client:
                begin = time.perf_counter()
                submit(client)
                submitting = time.perf_counter() - begin
            with work.workers(dsn) as crew, server.counting(crew.pids) as used:

                def drain() -> None:
                    crew.go()
                    lines["nodes"] = crew.wait(count, lambda done: meter.show(0.5 + done / count / 2))
                    _wait(dsn, "SELECT EXISTS (SELECT FROM cyclone_runs WHERE state = 'running')")

                seconds = yield drain
            _check(dsn)
            return {
                "nodes/s": count / seconds,
                "yardstick/s": plain,
                "ratio": count / seconds / plain,
                "submitted nodes/s": count / submitting,
                **costs(used, count, "workers"),
            }

    meter.measure(case, one_round, bars=("nodes/s", "yardstick/s"), plots={case: lines}, against="plain steps")


def bench_submit_once(meter: Meter, server: Server) -> None:
    count = meter.size(2_000, quick=100)

    def one_round() -> Round:
        with server.database() as dsn, cyclone.SyncClient(dsn) as client:
            work.chain.submit(client, work.message(0))  # the graph is there
            begin = time.perf_counter()
            for seq in range(count):
                work.chain.submit(client, work.message(seq))
                meter.show(seq / count / 2)
            plain = count / (time.perf_counter() - begin)

            def submit() -> None:
                for seq in range(count):
                    work.chain.submit_once(client, f"key:{seq}", work.message(seq))
                    meter.show(0.5 + seq / count / 2)

            seconds = yield submit
            begin = time.perf_counter()
            for seq in range(count):
                work.chain.submit_once(client, f"key:{seq}", work.message(seq))
            again = count / (time.perf_counter() - begin)
            return {
                "submit_once/s": count / seconds,
                "yardstick/s": plain,
                "ratio": count / seconds / plain,
                "of keys that are there/s": again,
            }

    meter.measure("one after the other", one_round, bars=("submit_once/s", "yardstick/s"), against="submit")


def _wait(dsn: str, query: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SET enable_seqscan = off")
        for _ in range(10_000):
            if conn.execute(query.encode()).fetchone() == (False,):
                return
            time.sleep(0.002)
    raise RuntimeError("all steps were executed, but they are not settled")


def _check(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        states = conn.execute("SELECT DISTINCT state FROM cyclone_runs").fetchall()
    if states != [("completed",)]:
        raise RuntimeError(f"all runs should be completed, but there are {states}")
