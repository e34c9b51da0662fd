"""Whether the rate holds with ten million steps waiting, and while somebody keeps a snapshot open."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psycopg
import pytest

from bench import drains, work
from bench.conftest import Meter, Round
from bench.server import Counters, Server, by_cpu, costs

_SMALL = 100_000


def bench_waiting(meter: Meter, server: Server) -> None:
    small, large = meter.size(_SMALL, quick=5_000), meter.size(10_000_000, quick=200_000)
    count = small * 9 // 10  # the end of a backlog is another matter
    lines: dict[str, Any] = {"x": "s", "y": "steps"}

    def one_round() -> Round:
        with server.filled(small) as dsn, work.pool(dsn) as crew, server.counting(crew.pids) as by_yardstick:
            begin = time.perf_counter()
            crew.go()
            lines[f"of {small:,}"] = crew.wait(count, lambda done: meter.show(done / count / 10))
            rate = count / (time.perf_counter() - begin)
        with server.filled(large) as dsn, work.pool(dsn) as crew:

            def run() -> None:
                crew.go()
                lines[f"of {large:,}"] = crew.wait(count, lambda done: meter.show(0.9 + done / count / 10))

            with server.counting(crew.pids) as used:
                seconds = yield run
            return {
                "steps/s": count / seconds,
                "yardstick/s": rate,
                "ratio": count / seconds / rate,
                "by CPU": by_cpu(used, count, by_yardstick, count),
                **costs(used, count, "workers"),
            }

    case = f"{large:,} waiting"
    meter.measure(
        case,
        one_round,
        bars=("steps/s", "yardstick/s"),
        plots={case: lines},
        against=f"{small:,} waiting",
        goal=("ratio", ">=", 0.90),
        rounds=1,
    )


def bench_snapshot(meter: Meter, server: Server, pytestconfig: pytest.Config) -> None:
    count = meter.size(pytestconfig.getoption("--held"), quick=30_000)
    part = min(_SMALL, count // 3)
    lines: dict[str, Any] = {"x": "steps", "y": "steps/s"}

    def one_round() -> Round:
        with drains.pool(server, count).ready() as drain, psycopg.connect(drain.dsn) as foreign:
            foreign.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            foreign.execute("SELECT 1")
            line: list[tuple[float, int]] = []
            head, tail = contextlib.ExitStack(), contextlib.ExitStack()
            counted: list[Counters] = []

            def show(share: float) -> None:
                meter.show(share)
                if share * count >= part:
                    head.close()
                if share * count >= count - part and len(counted) == 1:
                    counted.append(tail.enter_context(server.counting(drain.crew.pids)))

            with tail, head:
                counted.append(head.enter_context(server.counting(drain.crew.pids)))
                seconds = yield lambda: line.extend(drain.run(show))
            drain.check()
            first = part / at(line, part)
            last = part / (line[-1][0] - at(line, count - part))
            lines["a snapshot is held"] = rates(line, part // 5)
            return {
                "steps/s": last,
                "yardstick/s": first,
                "ratio": last / first,
                "by CPU": by_cpu(counted[1], part, counted[0], part),
                **costs(counted[1], part, "workers"),
                "all steps/s": count / seconds,
            }

    case = f"{count:,} under a snapshot, the last {part:,}"
    meter.measure(
        case,
        one_round,
        bars=("steps/s", "yardstick/s"),
        plots={case: lines},
        against=f"the first {part:,}",
        goal=("ratio", ">=", 0.80),
    )


def at(line: list[tuple[float, int]], count: int) -> float:
    """After how many seconds so many steps were done."""
    (before, less), (after, more) = next(
        (one, two) for one, two in zip([(0.0, 0), *line], line, strict=False) if two[1] >= count
    )
    return before + (after - before) * (count - less) / max(more - less, 1)


def rates(line: list[tuple[float, int]], each: int) -> list[tuple[float, float]]:
    """Steps a second over the steps, each so many."""
    marks = range(0, line[-1][1] - each + 1, each)
    return [(n + each, each / (at(line, n + each) - (at(line, n) if n else 0.0))) for n in marks]
