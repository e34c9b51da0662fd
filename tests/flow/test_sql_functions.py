"""Submitting from SQL: triggers, psql and other languages have the same rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import factories
import psycopg
import pytest
from factories import until

import cyclone
from cyclone import Context, Graph, Node, SyncClient, migrate

Conn = psycopg.Connection[Any]


@cyclone.step("greet", max_attempts=7, queue="mail", priority=2, timeout=9)
async def greet(ctx: Context, name: str) -> str:
    return f"hello {name}"


@cyclone.workflow("greeting")
def greeting(g: Graph[str]) -> Node[str]:
    return g.run(greet, g.input)


@pytest.fixture(autouse=True)
def known(dsn: str) -> None:
    handlers = cyclone.Registry()
    handlers.include(greeting)
    migrate.register(dsn, "public", handlers)


@pytest.fixture
def client(dsn: str) -> Iterator[SyncClient]:
    with SyncClient(dsn) as found:
        yield found


def one(conn: Conn, query: str, *params: Any) -> Any:
    row = conn.execute(query.encode(), params).fetchone()
    assert row is not None
    return row if len(row) > 1 else row[0]


async def test_a_trigger_submits(dsn: str, conn: Conn, client: SyncClient) -> None:
    conn.execute("CREATE TABLE people (id serial PRIMARY KEY, name text)")
    conn.execute("""
        CREATE FUNCTION greet_them() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM cyclone_submit_once('greeting', 'person:' || NEW.id, to_jsonb(NEW.name));
            RETURN NEW;
        END $$""")
    conn.execute("CREATE TRIGGER greet AFTER INSERT ON people FOR EACH ROW EXECUTE FUNCTION greet_them()")
    with conn.transaction(force_rollback=True):
        conn.execute("INSERT INTO people (name) VALUES ('nobody')")
    assert factories.count(conn, "cyclone_runs") == 0
    conn.execute("INSERT INTO people (name) VALUES ('ann')")
    run = greeting.find(client, "person:2")
    assert run is not None
    async with factories.worker(dsn, greet, queues=["mail"]):
        await until(lambda: run.state().terminal)
    assert run.result() == "hello ann"
    # The library finds it, and the same input is no conflict.
    assert greeting.submit_once(client, "person:2", "ann") == (run, False)


def test_options(conn: Conn, client: SyncClient) -> None:
    run = one(
        conn,
        "SELECT cyclone_submit('greeting', '\"x\"', queue => 'other', priority => 1, tags => ARRAY['t'],"
        " metadata => '{\"a\": 1}', keep_for => '1 day', delay => '1 hour', deadline => '2 hours')",
    )
    info = client.get_run(str(run))
    assert (info.tags, info.metadata, info.keep_for_s) == (["t"], {"a": 1}, 86400)
    assert info.deadline is not None and (info.deadline - info.created_at).total_seconds() == 7200
    (step,) = client.list_steps(str(run))
    assert (step.queue, step.priority, step.state.value, step.max_attempts) == ("other", 1, "scheduled", 7)
    number = one(conn, "SELECT cyclone_enqueue('greet', '\"y\"', tags => ARRAY['t'])")
    step = client.get_step(str(number), "greet")
    assert (step.queue, step.priority, step.max_attempts, step.timeout_s, step.input) == ("mail", 2, 7, 9.0, "y")
    number = one(
        conn, "SELECT cyclone_enqueue('greet', queue => 'q', priority => 9, max_attempts => 1, delay => '1 hour')"
    )
    step = client.get_step(str(number), "greet")
    assert (step.queue, step.priority, step.max_attempts, step.input) == ("q", 9, 1, None)


def test_conflicts_and_wrong_names(conn: Conn) -> None:
    run, created = one(conn, "SELECT * FROM cyclone_submit_once('greeting', 'k', '{\"a\": 1.0}')")
    assert created
    assert one(conn, "SELECT * FROM cyclone_submit_once('greeting', 'k', '{\"a\": 1}')") == (run, False)
    step = one(conn, "SELECT cyclone_enqueue('greet', '1', 'k')")
    for query, state, detail in (
        ("SELECT cyclone_submit_once('greeting', 'k', '2')", "CY012", str(run)),
        ("SELECT cyclone_enqueue('greet', '2', 'k')", "CY012", str(step)),
        ("SELECT cyclone_submit('greting', '2')", "CY010", None),
        ("SELECT cyclone_enqueue('gret', '2')", "CY010", None),
        ("SELECT cyclone_submit_once('greeting', '', '2')", "CY011", None),
        ("SELECT cyclone_enqueue('greet', '2', repeat('é', 129))", "CY011", None),
        ("SELECT cyclone_enqueue('greet', '2', max_attempts => 0)", "23514", None),
    ):
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(query.encode())
        assert caught.value.sqlstate == state
        assert state != "CY012" or caught.value.diag.message_detail == detail
    assert factories.count(conn, "cyclone_steps") == 2


def test_the_newest_graph_of_a_name_is_taken(dsn: str, conn: Conn) -> None:
    @cyclone.workflow("greeting")
    def longer(g: Graph[str]) -> Node[str]:
        return g.run(greet, g.run(greet, g.input).output)

    def nodes() -> int:
        run = one(conn, "SELECT cyclone_submit('greeting', '\"x\"')")
        return factories.count(conn, "cyclone_steps WHERE run_id = %s", run)

    assert nodes() == 1
    for workflow, count in ((longer, 2), (greeting, 1)):  # also when an older release is deployed again
        handlers = cyclone.Registry()
        handlers.include(workflow)
        migrate.register(dsn, "public", handlers)
        assert nodes() == count


def test_a_schema_with_a_long_name_has_the_same_channel(dsn: str, conn: Conn) -> None:
    from cyclone import db

    for schema in ("public", "x" * 63, "odd \"name'"):
        if schema != "public":
            migrate.up(dsn, schema=schema)
        statements = db.statements(schema)
        assert one(conn, f"SELECT {statements.quoted}.cyclone_channel()") == statements.channel


def test_the_workflow_s_own_deadline_holds(dsn: str, conn: Conn, client: SyncClient) -> None:
    @cyclone.workflow("greeting", deadline=3600, keep_for=60)
    def timed(g: Graph[str]) -> Node[str]:
        return g.run(greet, g.input)

    handlers = cyclone.Registry()
    handlers.include(timed)
    migrate.register(dsn, "public", handlers)
    for query in (
        "SELECT cyclone_submit('greeting', '1')",
        "SELECT run_id FROM cyclone_submit_once('greeting', 'k', '1')",
    ):
        info = client.get_run(str(one(conn, query)))
        assert info.deadline is not None and (info.deadline - info.created_at).total_seconds() == 3600
        assert info.keep_for_s == 60
