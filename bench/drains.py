"""Waiting steps that are worked off: one drain, and two of them in turns."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Unpack

import psycopg

from bench import work
from bench.conftest import Meter, Round
from bench.server import Counters, Server, by_cpu, costs
from cyclone.config import WorkerArguments

COUNT = 100_000
QUICK = 2_000

# A claim may outlive its steps until a sweeper comes by, so what counts is whether a step of it still runs.
_BUSY = """\
SELECT EXISTS (
    SELECT FROM cyclone_claims c, unnest(c.steps) AS claimed(id) JOIN cyclone_steps s ON s.id = claimed.id
    WHERE s.state = 'running')
"""


@dataclass
class Side:
    """Who works off how many steps of which database. A round makes it anew."""

    name: str
    count: int
    database: Callable[[], AbstractContextManager[str]]
    crew: Callable[[str], AbstractContextManager[work.Crew]]

    @contextlib.contextmanager
    def ready(self) -> Generator[Drain]:
        """The steps wait, and the processes are at the gate."""
        with self.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn, self.crew(dsn) as crew:
            conn.execute("SET enable_seqscan = off")  # a look must not cost more than what it looks at
            yield Drain(self.count, dsn, crew, conn)


@dataclass
class Drain:
    count: int
    dsn: str
    crew: work.Crew
    conn: psycopg.Connection[tuple[Any, ...]]

    def run(self, show: Callable[[float], None]) -> list[tuple[float, int]]:
        """Returns when every handler was called and every outcome is committed, with the steps over the time."""
        self.crew.go()
        line = self.crew.wait(self.count, lambda done: show(done / self.count))
        for _ in range(5_000):
            if self.conn.execute(_BUSY).fetchone() == (False,):
                return line
            time.sleep(0.002)
        raise RuntimeError("all steps were executed, but some are still running in the database")

    def rate(self, show: Callable[[float], None]) -> float:
        """Runs, checks, and returns steps a second."""
        begin = time.perf_counter()
        self.run(show)
        seconds = time.perf_counter() - begin
        self.check()
        return self.count / seconds

    def check(self) -> None:
        with psycopg.connect(self.dsn) as conn:
            states = conn.execute("SELECT state, count(*) FROM cyclone_steps GROUP BY 1").fetchall()
        if states != [("completed", self.count)] or work.executed() != self.count:
            raise RuntimeError(
                f"{self.count} steps should be completed, but {states}; handlers were called {work.executed()} times"
            )

    def hot(self) -> float | None:
        """The share of updates of steps that stayed on their page."""
        with psycopg.connect(self.dsn) as conn:
            row = conn.execute(
                "SELECT 100.0 * n_tup_hot_upd / nullif(n_tup_upd, 0)"
                " FROM pg_stat_user_tables WHERE relname = 'cyclone_steps'"
            ).fetchone()
        return None if row is None or row[0] is None else float(row[0])


def pool(server: Server, count: int, procs: int = work.PROCS, **options: Unpack[WorkerArguments]) -> Side:
    """Steps that do nothing, for a pool."""
    return Side(
        f"pool of {procs}",
        count,
        lambda: server.database(work.noop, count),
        lambda dsn: work.pool(dsn, procs, **options),
    )


def compare(
    meter: Meter, server: Server, case: str, mine: Side, yardstick: Side, *, at_least: float | None = None
) -> None:
    """A case whose rounds work off the steps of both sides: the yardstick's first, in every other round last, so that
    a machine that grows slower meanwhile favours neither.
    """
    lines: dict[str, Any] = {"x": "s", "y": "steps"}
    number = itertools.count()

    def run_yardstick() -> tuple[float, Counters]:
        with yardstick.ready() as drain:
            with server.counting(drain.crew.pids) as used:
                begin = time.perf_counter()
                lines[yardstick.name] = drain.run(lambda part: meter.show(part / 2))
                rate = yardstick.count / (time.perf_counter() - begin)
            drain.check()
        return rate, used

    def one_round() -> Round:
        first = next(number) % 2 == 0
        if first:
            rate, by_yardstick = run_yardstick()
        with mine.ready() as drain:
            with server.counting(drain.crew.pids) as used:

                def run() -> None:
                    lines[mine.name] = drain.run(lambda part: meter.show(0.5 + part / 2))

                seconds = yield run
            drain.check()
            hot = drain.hot()
        if not first:
            rate, by_yardstick = run_yardstick()
        return {
            "steps/s": mine.count / seconds,
            "yardstick/s": rate,
            "ratio": mine.count / seconds / rate,
            "by CPU": by_cpu(used, mine.count, by_yardstick, yardstick.count),
            **costs(used, mine.count, "workers"),
            "HOT %": hot,
        }

    meter.measure(
        case,
        one_round,
        bars=("steps/s", "yardstick/s"),
        plots={case: lines},
        against=yardstick.name,
        goal=None if at_least is None else ("ratio", ">=", at_least),
    )
