"""What a scrape, a round of the sweeper and a look at the database cost does not grow with what is finished."""

from __future__ import annotations

import json
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, until

from cyclone import cli, db, doctor, sweep

Conn = psycopg.Connection[Any]

FINISHED = 300_000
_MOST_MS = 50.0

FINISH = """
INSERT INTO cyclone_steps
    (id, run_id, ord, claim, node, kind, state, input, output, max_attempts, attempts, finished_at)
SELECT n, n, n, n, 'noop', 'noop', (ARRAY['completed', 'completed', 'discarded', 'cancelled'])[mod(n, 4) + 1],
       '{}', '1', 5, 1, now() - n * interval '1 second'
FROM (SELECT nextval('cyclone_ids') AS n FROM generate_series(1, %s)) g
"""

# What a sweeper asks in each round, and what it asks for the figures.
STATEMENTS: dict[str, dict[str, Any]] = {
    "queue_depths": {"cap": sweep._DEPTH_CAP, "now": None},
    "unclaimable": {"cap": sweep._DEPTH_CAP},
    "scheduled_count": {"cap": sweep._DEPTH_CAP},
    "look_around": {"now": None},
    "end_due_runs": {"host": "here", "now": None},
    "end_steps": {"now": None},
    "end_expired_lives": {"now": None},
    "reclaim_steps": {"claims": sweep._CLAIMS, "now": None},
    "fire_due": {"batch": sweep._DUE, "now": None},
}


@pytest.fixture
def full(conn: Conn) -> list[int]:
    """A database with much that is finished, and a little of everything else. The ids of steps that run."""
    conn.execute(FINISH.encode(), (FINISHED,))
    for priority in range(10):
        factories.steps(conn, 100, priority=priority)
    for _ in range(50):
        factories.step(conn, state="scheduled")
    life = factories.life(conn)
    running = [factories.step(conn, state="running", life=life).id for _ in range(50)]
    conn.execute("VACUUM ANALYZE")
    return running


def read(node: dict[str, Any]) -> int:
    """The rows of steps that a plan has read, also those that it has thrown away."""
    own = 0
    if node.get("Relation Name") == "cyclone_steps" and node["Node Type"] != "ModifyTable":
        kept = (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        )
        own = round(kept * node["Actual Loops"])
    return own + sum(read(child) for child in node.get("Plans", ()))


def touched(conn: Conn) -> int:
    """How many rows of steps were read since the beginning, as far as sessions have told: they do at their end."""
    columns = "coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::bigint"
    query = f"SELECT {columns} FROM pg_stat_user_tables WHERE relname = 'cyclone_steps'"
    ((found,),) = conn.execute(query.encode()).fetchall()
    return int(found)


@pytest.mark.contract("FM-079")
@pytest.mark.no_deep_check
async def test_with_300000_finished_rows_figures_and_commands_cost_no_more(
    dsn: str, conn: Conn, full: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with db.connect_sync(dsn, application_name="as the sweeper has it") as own:
        totals: list[float] = []
        # The fastest of some: the first fills memory, and others may have the processor meanwhile.
        for _ in range(5):
            spent: dict[str, float] = {}
            rows: dict[str, int] = {}
            for name, params in STATEMENTS.items():
                with own.transaction(force_rollback=True):
                    explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + SQL[name]
                    (found,) = own.execute(explain, params, prepare=False).fetchone() or ()
                plan = found if isinstance(found, list) else json.loads(found)
                spent[name] = plan[0]["Planning Time"] + plan[0]["Execution Time"]
                rows[name] = read(plan[0]["Plan"])
            totals.append(sum(spent.values()))
    assert min(totals) < _MOST_MS, spent  # measured: 10 ms
    # 100 of each queue and priority to find the oldest, and those that wait for their time.
    assert sum(rows.values()) <= 1000 + 4 * 50, rows

    # And whatever people ask for how things are.
    before = -1
    while before != (before := touched(conn)):
        conn.execute("SELECT pg_sleep(0.3)")
    assert cli.run(cli.app, ["doctor", "--dsn", dsn]) == 0
    assert cli.run(cli.app, ["steps", str(full[0]), "--dsn", dsn]) == 0
    assert "running" in capsys.readouterr().out
    async with factories.engine(dsn) as own_too:
        await sweep.look(own_too, SQL)
    with psycopg.connect(dsn, autocommit=True) as other:
        doctor.check(other)
    await until(lambda: touched(conn) > before)
    conn.execute("SELECT pg_sleep(0.3)")
    assert touched(conn) - before < 10_000
