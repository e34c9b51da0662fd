"""The plans of the hot statements: which index they use, and that they read no more than they take.

Each is looked at as it is planned for its values and as it is planned for any values, which a session comes to after
some executions; and both when the tables have never been analysed (a fresh installation) and when they have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, until
from psycopg import sql

from cyclone import claim, db, settle
from cyclone.registry import step

Conn = psycopg.Connection[Any]

BACKLOG = 20_000
ROOM = 100

both_modes = pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
both_states = pytest.mark.parametrize("analysed", [False, True], ids=["fresh", "analysed"])


@pytest.fixture
def session(dsn: str) -> Iterator[Conn]:
    """A connection with the engine's settings, in a transaction that is rolled back."""
    conn = db.connect_sync(dsn, application_name="test plans")
    with conn.transaction(force_rollback=True):
        yield conn
    conn.close()


class Node:
    """One node of an executed plan."""

    def __init__(self, plan: Mapping[str, Any], parent: str) -> None:
        self.kind: str = plan["Node Type"]
        self.table: str | None = plan.get("Relation Name")
        self.index: str | None = plan.get("Index Name")
        self.loops: float = plan["Actual Loops"]
        self.rows: float = plan["Actual Rows"] * self.loops
        self.removed: float = plan.get("Rows Removed by Filter", 0) * self.loops
        self.parent = parent

    def __repr__(self) -> str:
        return f"{self.kind} {self.table or ''} {self.index or ''} rows={self.rows:g} removed={self.removed:g}"


SESSIONS = {"claim_steps": claim.SESSION, "complete_steps": settle.SESSION, "return_steps": settle.SESSION}
"""The settings of the connections that send them."""


def explain(conn: Conn, name: str, mode: str, **params: Any) -> list[Node]:
    """Executes a statement and returns the nodes of its plan. It stays prepared, and a generic plan is made once."""
    order: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        if match[1] not in order:
            order.append(match[1])
        return f"${order.index(match[1]) + 1}"

    text = re.sub(r"%%|%\((\w+)\)[sb]", number, SQL[name].decode())
    # What is not given here decides about nothing that is read.
    values = sql.SQL(", ").join(sql.Literal(params.get(one)) for one in order)
    for setting in ("nestloop", "hashjoin", "mergejoin", "bitmapscan"):
        conn.execute(f"RESET enable_{setting}".encode())
    if mode == "force_generic_plan":  # through a pooler nothing is prepared, and no session has settings
        conn.execute(SESSIONS.get(name, b"SELECT"))
    conn.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
    if not conn.execute("SELECT FROM pg_prepared_statements WHERE name = %s", (name,), prepare=False).rowcount:
        conn.execute(f"PREPARE {name} AS {text}".encode(), prepare=False)
    call = sql.SQL(name + " ({})").format(values) if order else sql.SQL(name)
    cur = conn.execute(sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF) EXECUTE {}").format(call), prepare=False)
    (found,) = cur.fetchone() or (None,)
    nodes: list[Node] = []

    def walk(plan: Mapping[str, Any], parent: str) -> None:
        nodes.append(Node(plan, parent))
        for child in plan.get("Plans", ()):
            walk(child, plan["Node Type"])

    walk(found[0]["Plan"], "")
    return nodes


LARGE = ("cyclone_steps", "cyclone_ready", "cyclone_claims")


def on(nodes: list[Node], table: str) -> list[Node]:
    """The nodes that read a table; those that change it name it too, but read nothing themselves."""
    return [one for one in nodes if one.table == table and one.kind != "ModifyTable"]


def indexes(nodes: list[Node], table: str) -> set[str]:
    """The indexes of a table that were used; the node of a bitmap names no table."""
    return {one.index for one in nodes if one.index and one.index.startswith(table) and one.loops}


def reads_little(nodes: list[Node], most: float) -> None:
    """No node reads a table from end to end or sorts more than was taken, and none throws away what it has read."""
    for one in nodes:
        if one.table in LARGE:
            assert one.kind != "Seq Scan" or one.loops == 0, nodes
            assert one.rows + one.removed <= most, nodes
        if one.kind in ("Sort", "Incremental Sort"):
            assert one.rows <= most, nodes


def prepare(conn: Conn, analysed: bool) -> int:
    factories.steps(conn, BACKLOG, input={"text": "x" * 100})
    if analysed:
        conn.execute("ANALYZE cyclone_steps, cyclone_ready, cyclone_claims, cyclone_lives, cyclone_lanes")
    return factories.life(conn)


@both_modes
@both_states
def test_a_claim_follows_the_key_of_the_tickets_and_stops_when_it_has_enough(
    conn: Conn, session: Conn, mode: str, analysed: bool
) -> None:
    life = prepare(conn, analysed)
    params = {
        "life": life,
        "claim": 1,
        "queues": ["default", "empty"],
        "ranks": list(range(20)),
        "floors": '{"default 11": 0}',
        "floor": "0",
        "room": ROOM,
        "now": None,
    }
    nodes = explain(session, "claim_steps", mode, **params)
    tickets = on(nodes, "cyclone_ready")
    assert {one.index for one in tickets if one.kind == "Index Scan"} == {"cyclone_ready_pkey"}, tickets
    assert {one.kind for one in tickets} <= {"Index Scan", "Tid Scan"}, tickets
    assert indexes(nodes, "cyclone_steps") == {"cyclone_steps_pkey"}, nodes
    reads_little(nodes, ROOM + 1)  # the first row is about the look
    assert factories.count(session, "cyclone_steps WHERE state = 'running'") == ROOM


def test_a_claim_reads_as_little_from_many_queues(conn: Conn, session: Conn) -> None:
    queues = [f"q{n}" for n in range(8)]
    kinds = [f"kind{n}" for n in range(200)]
    for n, queue in enumerate(queues):
        factories.steps(conn, BACKLOG // 8, queue=queue, kind=kinds[n])
    conn.execute("ANALYZE cyclone_steps, cyclone_ready")
    params = {"life": factories.life(conn, kinds=kinds), "claim": 1, "queues": queues, "ranks": list(range(20))}
    session.execute("SET LOCAL enable_seqscan = on")  # as behind a pooler
    nodes = explain(session, "claim_steps", "force_custom_plan", **params, floors="{}", floor="0", room=30, now=None)
    reads_little(nodes, 8 * 20)  # the places are sorted too
    assert factories.count(session, "cyclone_steps WHERE state = 'running'") == 30


@both_modes
def test_a_claim_passes_over_what_others_hold_without_reading_further_than_it_must(
    dsn: str, conn: Conn, session: Conn, mode: str
) -> None:
    life = prepare(conn, True)
    params = {"life": life, "claim": 1, "queues": ["default"], "ranks": list(range(20)), "room": ROOM, "now": None}
    params |= {"floors": "{}", "floor": "0"}
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM cyclone_ready ORDER BY lane, rank, ord LIMIT 300 FOR UPDATE")
        nodes = explain(session, "claim_steps", mode, **params)
    reads_little(nodes, ROOM + 300)


@both_modes
@both_states
@pytest.mark.parametrize("step_over", [False, True])
def test_a_settle_finds_its_steps_by_their_key(
    conn: Conn, session: Conn, mode: str, analysed: bool, step_over: bool
) -> None:
    life = prepare(conn, analysed)
    ids = _take(session, life, mode)
    params = {"outputs": ['{"a": 1}'] * ROOM, "closed": [1], "step_over": step_over, "now": None}
    nodes = explain(session, "complete_steps", mode, ids=ids, claims=[1] * ROOM, **params)
    assert indexes(nodes, "cyclone_steps") == {"cyclone_steps_pkey"}, nodes
    # Twice: the update, and the look for what was left out.
    reads_little(nodes, 2 * ROOM)
    assert factories.count(session, "cyclone_steps WHERE state = 'completed'") == ROOM


@both_modes
@both_states
def test_a_return_finds_its_steps_by_their_key(conn: Conn, session: Conn, mode: str, analysed: bool) -> None:
    life = prepare(conn, analysed)
    ids = _take(session, life, mode)
    same = {"verbs": "retry", "states": "scheduled", "delays": 5.0, "called": True}
    same |= {"kinds": "retryable", "messages": "boom", "tracebacks": "trace"}
    params = {name: [value] * ROOM for name, value in same.items()}
    nodes = explain(session, "return_steps", mode, ids=ids, claims=[1] * ROOM, now=None, **params)
    assert indexes(nodes, "cyclone_steps") == {"cyclone_steps_pkey"}, nodes
    reads_little(nodes, 2 * ROOM)


@both_modes
@both_states
def test_a_reclaim_reads_only_what_the_dead_held(conn: Conn, session: Conn, mode: str, analysed: bool) -> None:
    life = prepare(conn, analysed)
    _take(session, life, mode)
    factories.end_life(session, life)
    nodes = explain(session, "reclaim_steps", mode, claims=20, now=None)
    assert indexes(nodes, "cyclone_steps") == {"cyclone_steps_pkey"}, nodes
    reads_little(nodes, 2 * ROOM)


@both_modes
@both_states
@pytest.mark.contract("G12")
def test_timers_are_found_by_their_due_time(conn: Conn, session: Conn, mode: str, analysed: bool) -> None:
    conn.execute(
        "INSERT INTO cyclone_steps (id, run_id, node, kind, state, max_attempts, input, due_at)"
        " SELECT n, n, 'noop', 'noop', 'scheduled', 5, 'null', now() + n * interval '1 second' - interval '50 seconds'"
        " FROM generate_series(1, %s) n",
        (BACKLOG,),
    )
    if analysed:
        conn.execute("ANALYZE cyclone_steps")
    nodes = explain(session, "fire_due", mode, batch=1000, now=None)
    assert "cyclone_steps_due_at" in indexes(nodes, "cyclone_steps"), nodes
    reads_little(nodes, ROOM)
    nodes = explain(session, "look_around", mode, now=None)
    reads_little(nodes, ROOM)


@both_modes
def test_a_poll_for_work_reads_one_ticket(conn: Conn, session: Conn, mode: str) -> None:
    prepare(conn, False)
    reads_little(explain(session, "look_around", mode, now=None), 1)


@pytest.mark.contract("FM-067")
@pytest.mark.parametrize("foreign", ["reads", "writes", "ended"])
async def test_a_claim_costs_no_more_for_a_transaction_that_stays_open(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    # All but the first look begin at the floors: how often one begins elsewhere is bounded by time.
    monkeypatch.setattr(claim, "_PAUSE", math.inf)
    life = factories.life(conn)
    claimer = claim.Claimer(SQL, ["default"])
    with psycopg.connect(dsn) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT FROM cyclone_ready")
        if foreign == "writes":
            other.execute("CREATE TEMPORARY TABLE own ()")
        async with factories.engine(dsn) as own:
            factories.steps(conn, 3000)
            assert len((await claimer.batch(own, life, 2000))[0]) == 2000
            before = await blocks(own, claimer, life)
            factories.steps(conn, 2 * BACKLOG)
            for _ in range(2 * BACKLOG // 1000):
                assert len((await claimer.batch(own, life, 1000))[0]) == 1000
            if foreign == "ended":
                other.rollback()
                conn.execute("VACUUM cyclone_ready")  # as the server does by itself within a minute
                claimer = claim.Claimer(SQL, ["default"])
            assert await blocks(own, claimer, life) < 2 * before


async def blocks(own: psycopg.AsyncConnection[Any], claimer: claim.Claimer, life: int) -> int:
    """How many blocks of tickets and of their index the second of two claims of ten looks at."""
    found = []
    for _ in range(2):
        assert len((await claimer.batch(own, life, 10))[0]) == 10
        await own.execute("SELECT pg_stat_force_next_flush()")
        cur = await own.execute(
            "SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read FROM pg_statio_user_tables"
            " WHERE relname = 'cyclone_ready'"
        )
        found += [row[0] for row in await cur.fetchall()]
    return int(found[1] - found[0])


@pytest.mark.contract("FM-067")
def test_a_plan_made_while_the_tables_were_empty_reads_no_more_when_they_are_full(conn: Conn, session: Conn) -> None:
    """A worker that starts with an empty schema keeps its plans for days."""
    conn.execute(
        "VACUUM ANALYZE cyclone_steps, cyclone_ready, cyclone_claims"
    )  # the server is sure that they are empty
    life, mode = factories.life(conn), "force_generic_plan"
    settled = {"outputs": ['{"a": 1}'] * ROOM, "closed": [1], "step_over": False, "now": None}
    same = {"verbs": "retry", "states": "scheduled", "delays": 5.0, "called": True}
    same |= {"kinds": "retryable", "messages": "boom", "tracebacks": "trace"}
    returned: dict[str, Any] = {name: [value] * ROOM for name, value in same.items()} | {"now": None}

    def each(ids: list[int]) -> Iterator[list[Node]]:
        half = len(ids) // 2
        claims = [1] * ROOM
        yield explain(session, "complete_steps", mode, ids=ids[:half], claims=claims[:half], **settled)
        yield explain(session, "return_steps", mode, ids=ids[half:], claims=claims[half:], **returned)
        yield explain(session, "reclaim_steps", mode, claims=20, now=None)
        yield explain(session, "fire_due", mode, batch=1000, now=None)
        yield explain(session, "look_around", mode, now=None)

    for _ in each(_take(session, life, mode)):
        pass
    factories.steps(conn, BACKLOG, input={"text": "x" * 100})
    ids = _take(session, life, mode)
    assert len(ids) == ROOM
    for nodes in each(ids):
        reads_little(nodes, 2 * ROOM)


async def test_draining_five_thousand_steps_stays_on_their_pages(dsn: str, conn: Conn) -> None:
    @step("noop")
    async def handler(ctx: Any, input: Any) -> Any:
        return {"ok": True, "text": "x" * 50}

    count = 5000
    factories.steps(conn, count, input={"text": "x" * 100})
    async with factories.worker(dsn, handler, concurrency=500):
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == count, 30)

    def hot() -> float | None:
        # Each session reports when it ends.
        conn.execute("SELECT pg_stat_clear_snapshot()")
        updates, hot = conn.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'cyclone_steps'"
        ).fetchall()[0]
        return float(hot / updates) if updates >= 2 * count else None

    assert await until(hot) >= 0.85


def _take(session: Conn, life: int, mode: str) -> list[int]:
    params = {"life": life, "claim": 1, "queues": ["default"], "ranks": list(range(20)), "room": ROOM, "now": None}
    params |= {"floors": "{}", "floor": "0"}
    reads_little(explain(session, "claim_steps", mode, **params), ROOM + 1)
    return [row[0] for row in session.execute("SELECT id FROM cyclone_steps WHERE state = 'running' ORDER BY id")]
