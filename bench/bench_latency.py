"""How soon an idle worker begins with a step that was just enqueued."""

from __future__ import annotations

import time
from typing import Any

import cyclone
from bench import work
from bench.conftest import Meter, Round
from bench.server import Server, percentile

_EVERY_S = 0.020


def bench_latency(meter: Meter, server: Server) -> None:
    count = meter.size(500, quick=50)
    lines: dict[str, Any] = {"x": "% of steps", "y": "ms"}

    def one_round() -> Round:
        with server.database() as dsn, work.workers(dsn, procs=1) as crew:
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
            return {
                f"p{percent} ms {of}": percentile(values, percent)
                for of, values in (("from commit", after_commit), ("from call", after_call))
                for percent in (50, 95, 99)
            }

    meter.measure(
        "a step every 20 ms",
        one_round,
        bars=[f"p{percent} ms {of}" for of in ("from commit", "from call") for percent in (50, 95, 99)],
        lines=lines,
    )


def _curve(values: list[float]) -> list[tuple[float, float]]:
    return [(100 * n / len(values), value) for n, value in enumerate(sorted(values), 1)]
