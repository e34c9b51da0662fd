"""Whether a load that never ends is carried as well after minutes as at the beginning, and what grows meanwhile."""

from __future__ import annotations

import bisect
import time
from typing import Any

import psycopg
import pytest

from bench import drains, work
from bench.conftest import Meter, Round
from bench.server import Server, costs, percentile

_LOAD = 0.7
_TABLES = ("cyclone_steps", "cyclone_ready", "cyclone_claims")
_LOOK = """\
SELECT relname, n_dead_tup, pg_total_relation_size(relid) FROM pg_stat_user_tables WHERE relname = ANY(%s)
"""


def bench_steady(meter: Meter, server: Server, pytestconfig: pytest.Config) -> None:
    seconds = 10.0 if meter.quick else pytestconfig.getoption("--minutes") * 60
    fifth, every = seconds / 5, seconds / 100
    plots: dict[str, dict[str, Any]] = {}

    def one_round() -> Round:
        with drains.pool(server, meter.size(drains.COUNT, quick=drains.QUICK)).ready() as drain:
            rate = drain.rate(lambda part: meter.show(part / 50))
        per_second = rate * _LOAD
        count = int(per_second * seconds)
        done: list[tuple[float, int]] = [(0.0, 0)]
        dead: dict[str, list[tuple[float, float]]] = {name: [] for name in _TABLES}
        size: dict[str, list[tuple[float, float]]] = {name: [] for name in _TABLES}
        with (
            server.database() as dsn,
            psycopg.connect(dsn, autocommit=True) as conn,
            work.pool(dsn, stamps=count) as crew,
        ):
            crew.go()
            time.sleep(1)

            def load() -> None:
                with work.producer(dsn, per_second, count):
                    begin = time.perf_counter()
                    while (now := time.perf_counter() - begin) < seconds:
                        for name, tuples, size_bytes in conn.execute(_LOOK, (list(_TABLES),)):
                            dead[name].append((now, tuples))
                            size[name].append((now, size_bytes / 1e6))
                        time.sleep(every)
                        done.append((time.perf_counter() - begin, work.executed()))
                        meter.show(now / seconds)
                    # Long enough for twice the load that the machine can carry, so that it is seen and not an error.
                    crew.wait(count, lambda _: None, timeout_s=60.0 + seconds)

            with server.counting(crew.pids) as used:
                yield load

        def window(number: int) -> tuple[float, list[float]]:
            """Steps a second, and latencies, of a fifth of the time."""
            lower, upper = (bisect.bisect(done, (fifth * n, count)) for n in (number, number + 1))
            (begin, less), (end, more) = done[lower - 1], done[upper - 1]
            return (more - less) / (end - begin), work.picked_up(count * number // 5, count * (number + 1) // 5)[1]

        second, last = window(1), window(4)
        plots["steps a second"] = {"x": "s", "y": "steps/s", "executed": _rates(done)}
        plots["pick-up from call"] = {"x": "s", "y": "ms"} | {
            f"p{percent}": _waits(percent, every, per_second, count) for percent in (99, 50)
        }
        plots["dead tuples"] = {"x": "s", "y": "tuples"} | dead
        plots["tables with indexes"] = {"x": "s", "y": "MB"} | size
        return {
            "steps/s": last[0],
            "yardstick/s": second[0],
            "ratio": last[0] / second[0],
            "drain/s": rate,
            "p50 ms": percentile(last[1], 50),
            "p99 ms": percentile(last[1], 99),
            "p50 ms, second": percentile(second[1], 50),
            "p99 ms, second": percentile(second[1], 99),
            "left at the end": count - done[-1][1],
            "dead tuples": max(tuples for _, tuples in dead["cyclone_steps"]),
            "ready MB": max(megabytes for _, megabytes in size["cyclone_ready"]),
            **costs(used, count, "workers"),
        }

    meter.measure(
        f"{seconds:g} s at {_LOAD:.0%}",
        one_round,
        bars=("steps/s", "yardstick/s"),
        plots=plots,
        against="second fifth",
        rounds=1,
    )


def _rates(done: list[tuple[float, int]]) -> list[tuple[float, float]]:
    return [(end, (more - less) / (end - begin)) for (begin, less), (end, more) in zip(done, done[1:], strict=False)]


def _waits(percent: float, every: float, per_second: float, count: int) -> list[tuple[float, float]]:
    each = max(int(every * per_second), 1)
    return [
        (end / per_second, percentile(work.picked_up(end - each, end)[1], percent)) for end in range(each, count, each)
    ]
