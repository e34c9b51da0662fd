"""How soon a step that was just enqueued is begun: by an idle worker, and by a pool that has other things to do."""

from __future__ import annotations

import time
from typing import Any

import cyclone
from bench import drains, work
from bench.conftest import Figures, Meter, Round
from bench.server import Server, costs, percentile

_EVERY_S = 0.020
_BARS = tuple(f"p{percent} ms {of}" for of in ("from commit", "from call") for percent in (50, 95, 99))


def bench_latency(meter: Meter, server: Server) -> None:
    count = meter.size(500, quick=50)
    lines: dict[str, Any] = {"x": "% of steps", "y": "ms"}

    def one_round() -> Round:
        with server.database() as dsn, work.workers(dsn, procs=1, stamps=count) as crew:
            crew.go()
            time.sleep(meter.size(2, quick=1))  # until it has connected, looked around and gone to sleep
            called: list[float] = []
            committed: list[float] = []
            with cyclone.SyncClient(dsn) as client:

                def enqueue() -> None:
                    begin = time.monotonic()
                    for seq in range(count):
                        time.sleep(max(begin + seq * _EVERY_S - time.monotonic(), 0.0))
                        called.append(time.monotonic())
                        work.stamp.enqueue(client, work.message(seq))
                        committed.append(time.monotonic())
                        meter.show(seq / count)
                    crew.wait(count, lambda done: None, timeout_s=30.0)

                yield enqueue
            starts = work.starts(count)
            after_commit = [(start - end) * 1e3 for start, end in zip(starts, committed, strict=True)]
            after_call = [(start - begin) * 1e3 for start, begin in zip(starts, called, strict=True)]
            lines["from commit"] = _curve(after_commit)
            lines["from call"] = _curve(after_call)
            return _figures(after_commit, after_call)

    case = "idle, a step every 20 ms"
    meter.measure(case, one_round, bars=_BARS, plots={case: lines})


def bench_half(meter: Meter, server: Server) -> None:
    lines: dict[str, Any] = {"x": "% of steps", "y": "ms"}
    seconds = meter.size(10, quick=1)

    def one_round() -> Round:
        with drains.pool(server, meter.size(drains.COUNT, quick=drains.QUICK)).ready() as drain:
            rate = drain.rate(lambda part: meter.show(part / 2))
        count = int(rate / 2 * seconds)
        with server.database() as dsn, work.pool(dsn, stamps=count) as crew:
            crew.go()
            time.sleep(1)  # until it has connected and gone to sleep

            def enqueue() -> None:
                with work.producer(dsn, rate / 2, count):
                    crew.wait(count, lambda done: meter.show(0.5 + done / count / 2))

            with server.counting(crew.pids) as used:
                took = yield enqueue
            after_commit, after_call = work.picked_up(0, count)
            lines["from commit"] = _curve(after_commit)
            lines["from call"] = _curve(after_call)
            return {
                **_figures(after_commit, after_call),
                "steps/s": count / took,
                "drain/s": rate,
                **costs(used, count, "workers"),
            }

    case = "half of what a pool can do"
    meter.measure(
        case,
        one_round,
        bars=_BARS,
        plots={case: lines},
        goal=("p99 ms from commit", "<=", 50.0),
    )


def _figures(after_commit: list[float], after_call: list[float]) -> Figures:
    return {
        f"p{percent} ms {of}": percentile(values, percent)
        for of, values in (("from commit", after_commit), ("from call", after_call))
        for percent in (50, 95, 99)
    }


def _curve(values: list[float]) -> list[tuple[float, float]]:
    """Every percent, and of the last one every tenth."""
    shares = [*range(1, 99), *(99 + tenth / 10 for tenth in range(11))]
    return [(share, percentile(values, share)) for share in shares]
