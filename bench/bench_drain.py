"""How fast waiting steps are worked off, against the same SQL without handlers, in turns."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

import cyclone
from bench import work
from bench.conftest import Meter, Round
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


@pytest.mark.parametrize("form", ["workers", "pool"])
def bench_noop(meter: Meter, server: Server, form: str) -> None:
    _drain(meter, server, "no-op" if form == "workers" else "no-op, in a pool", work.noop, None, pool=form == "pool")


def bench_output(meter: Meter, server: Server) -> None:
    _drain(meter, server, "100-byte outputs", work.echo, _OUTPUT)


def _drain(
    meter: Meter, server: Server, case: str, step: cyclone.Step[Any, Any], output: str | None, *, pool: bool = False
) -> None:
    count = meter.size(100_000, quick=2_000)
    lines: dict[str, Any] = {"x": "s", "y": "steps"}

    def one_round() -> Round:
        with server.database(step, count) as dsn, work.statements_alone(dsn, output) as crew:
            begin = time.perf_counter()
            crew.go()
            lines["SQL alone"] = crew.wait(count, lambda done: meter.show(done / count / 2))
            yardstick = count / (time.perf_counter() - begin)
            _check(dsn, count)
        with server.database(step, count) as dsn:
            with (
                _look(dsn) as conn,
                (work.pool if pool else work.workers)(dsn) as crew,
                server.counting(crew.pids) as used,
            ):

                def drain() -> None:
                    crew.go()
                    lines["Cyclone"] = crew.wait(count, lambda done: meter.show(0.5 + done / count / 2))
                    _wait_for_commits(conn)

                seconds = yield drain
            _check(dsn, count)
            return {
                "steps/s": count / seconds,
                "SQL alone/s": yardstick,
                "ratio": count / seconds / yardstick,
                **costs(used, count, "workers"),
                "HOT %": _hot(dsn),
            }

    meter.measure(case, one_round, bars=("steps/s", "SQL alone/s"), lines=lines)


def bench_completion_tx(meter: Meter, server: Server) -> None:
    count = meter.size(20_000, quick=1_000)

    def one_round() -> Round:
        with server.database(work.book, count) as dsn:
            yardstick = server.run_pgbench(
                dsn, _BOOK.format(count=count), clients=_COMPLETION_CLIENTS, seconds=meter.size(5, quick=1)
            )
        with server.database(work.book, count) as dsn:
            with _look(dsn) as conn, work.workers(dsn) as crew, server.counting(crew.pids) as used:

                def drain() -> None:
                    crew.go()
                    crew.wait(count, lambda done: meter.show(done / count))
                    _wait_for_commits(conn)

                seconds = yield drain
            _check(dsn, count)
            return {
                "steps/s": count / seconds,
                "pgbench/s": yardstick,
                "ratio": count / seconds / yardstick if yardstick else None,
                **costs(used, count, "workers"),
                "HOT %": _hot(dsn),
            }

    meter.measure("completion transactions", one_round, bars=("steps/s", "pgbench/s"))


# A claim may outlive its steps until a sweeper comes by, so what counts is whether a step of it still runs.
_BUSY = """\
SELECT EXISTS (
    SELECT FROM cyclone_claims c, unnest(c.steps) AS claimed(id) JOIN cyclone_steps s ON s.id = claimed.id
    WHERE s.state = 'running')
"""


def _look(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    conn = psycopg.connect(dsn, autocommit=True)
    conn.execute("SET enable_seqscan = off")  # a look must not cost more than what it looks at
    return conn


def _wait_for_commits(conn: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Every handler was called; now their outcomes must be committed."""
    for _ in range(5_000):
        if conn.execute(_BUSY).fetchone() == (False,):
            return
        time.sleep(0.002)
    raise RuntimeError("all steps were executed, but some are still running in the database")


def _check(dsn: str, count: int) -> None:
    with psycopg.connect(dsn) as conn:
        states = conn.execute("SELECT state, count(*) FROM cyclone_steps GROUP BY 1").fetchall()
    if states != [("completed", count)] or work.executed() != count:
        raise RuntimeError(
            f"{count} steps should be completed, but {states}; handlers were called {work.executed()} times"
        )


def _hot(dsn: str) -> float | None:
    """The share of updates of steps that stayed on their page."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "SELECT 100.0 * n_tup_hot_upd / nullif(n_tup_upd, 0)"
            " FROM pg_stat_user_tables WHERE relname = 'cyclone_steps'"
        ).fetchone()
    return None if row is None or row[0] is None else float(row[0])
