"""Work that is submitted in a transaction of Django's, and steps that are completed in one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import django
import factories
import psycopg
import pytest
from django import db as django_db
from django.conf import settings
from django.db import models, transaction
from psycopg import conninfo

import cyclone
from cyclone import Graph, SubmitConflictError, SyncClient, SyncContext, TransactionRequiredError

Conn = psycopg.Connection[Any]

settings.configure(USE_TZ=True, INSTALLED_APPS=[], DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}})
django.setup()


class Business(models.Model):
    note = models.TextField()

    class Meta:
        app_label = "shop"
        db_table = "business"


@cyclone.step("post")
def post(ctx: SyncContext, to: str) -> str:
    return to


@cyclone.workflow("posts")
def posts(g: Graph[str]) -> cyclone.Node[str]:
    return g.run(post, g.input)


@pytest.fixture
def connection(dsn: str, conn: Conn) -> Iterator[Any]:
    """What programs import as `django.db.connection`, led to the test's database."""
    conn.execute("CREATE TABLE business (id bigserial PRIMARY KEY, note text NOT NULL)")
    parts = conninfo.conninfo_to_dict(dsn)
    django_db.connection.close()
    django_db.connection.settings_dict.update(
        NAME=parts["dbname"], USER=parts["user"], HOST=parts["host"], PORT=parts["port"]
    )
    yield django_db.connection
    django_db.connection.close()


def counts(conn: Conn) -> tuple[int, int, int]:
    return tuple(factories.count(conn, name) for name in ("business", "cyclone_steps", "cyclone_runs"))  # type: ignore[return-value]


class Undo(Exception): ...


@pytest.mark.contract("I3", "S3", "U10", "U11", "U14")
def test_it_commits_and_rolls_back_with_the_rows(dsn: str, conn: Conn, connection: Any) -> None:
    def work(client: SyncClient) -> None:
        Business.objects.create(note="x")
        post.enqueue_tx(client, connection, "a", unique="k", metadata={"a": 1}, delay=60)
        post.enqueue_many_tx(client, connection, ["b", "c"])
        posts.submit_tx(client, connection, "d")
        run, created = posts.submit_once_tx(client, connection, "key", "e")
        assert created
        with pytest.raises(SubmitConflictError):
            posts.submit_once_tx(client, connection, "key", "f")
        with pytest.raises(cyclone.DuplicateError):
            post.enqueue_tx(client, connection, "a", unique="k")
        with pytest.raises(cyclone.NotFoundError):
            client.retry_all_tx(connection, "999999")
        assert client.cancel_tx(connection, run.id)
        assert Business.objects.count() == 1  # the transaction goes on

    with SyncClient(dsn) as client:
        with pytest.raises(Undo), transaction.atomic():
            work(client)
            raise Undo
        assert counts(conn) == (0, 0, 0)
        with transaction.atomic():
            work(client)
            assert counts(conn) == (0, 0, 0)
        assert counts(conn) == (1, 5, 2)


def test_a_nested_block_that_fails_takes_its_work_with_it(dsn: str, conn: Conn, connection: Any) -> None:
    with SyncClient(dsn) as client, transaction.atomic():
        post.enqueue_tx(client, connection, "a")
        with pytest.raises(Undo), transaction.atomic():
            post.enqueue_tx(client, connection, "b")
            raise Undo
        post.enqueue_tx(client, django_db.connections["default"], "c")
    found = conn.execute("SELECT input FROM cyclone_steps ORDER BY id").fetchall()
    assert found == [("a",), ("c",)]


@pytest.mark.contract("I3", "U41")
def test_outside_a_block_it_is_refused(dsn: str, conn: Conn, connection: Any) -> None:
    with SyncClient(dsn) as client, pytest.raises(TransactionRequiredError, match="atomic"):
        post.enqueue_tx(client, connection, "a")
    assert counts(conn) == (0, 0, 0)


@pytest.mark.contract("I4")
def test_the_connection_is_as_it_was(dsn: str, connection: Any) -> None:
    def looks() -> list[object]:
        driver = connection.connection
        return [
            driver.autocommit, driver.row_factory, driver.cursor_factory, driver.prepare_threshold,
            driver.isolation_level,
            driver.info.transaction_status, connection.savepoint_ids, connection.needs_rollback,
        ]  # fmt: skip

    with SyncClient(dsn) as client, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT name, setting FROM pg_settings WHERE name !~ '^plpgsql' ORDER BY 1")
        rows = cursor.fetchall()
        before = looks()
        posts.submit_once_tx(client, connection, "key", "e")
        post.enqueue_many_tx(client, connection, ["b", "c"])
        assert looks() == before
        cursor.execute("SELECT name, setting FROM pg_settings WHERE name !~ '^plpgsql' ORDER BY 1")
        assert cursor.fetchall() == rows


@pytest.mark.contract("X11")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_handler_completes_its_step_in_its_own_transaction(
    dsn: str, conn: Conn, connection: Any, commit: bool
) -> None:
    target = dict(connection.settings_dict)

    @cyclone.step("own", max_attempts=1)
    def own(ctx: SyncContext) -> str:
        django_db.connection.settings_dict.update(target)  # each thread has a connection of its own
        try:
            with transaction.atomic():
                Business.objects.create(note=ctx.idempotency_key)
                ctx.complete_in(django_db.connection, "done")
                if not commit:
                    raise Undo
        finally:
            django_db.connection.close()
        return "ignored"

    async with cyclone.Client(dsn) as client, factories.worker(dsn, own):
        handle = await own.enqueue(client)
        await handle.wait(10)
        found = await client.get_step(handle.run_id, handle.node)
    assert (found.state.value, found.output) == (("completed", "done") if commit else ("discarded", None))
    assert factories.count(conn, "business") == commit


@pytest.mark.contract("I3")
def test_what_django_says_against_its_use_passes_through(dsn: str, conn: Conn, connection: Any) -> None:
    client = SyncClient(dsn)
    with transaction.atomic():
        with pytest.raises(Undo), transaction.atomic(savepoint=False):
            raise Undo
        # It will be rolled back in silence, whatever comes.
        with pytest.raises(transaction.TransactionManagementError):
            post.enqueue_tx(client, connection, "a")
    seen: list[BaseException] = []

    def elsewhere(tx: Any) -> None:
        try:
            post.enqueue_tx(client, tx, "a")
        except django_db.DatabaseError as exc:
            seen.append(exc)

    with transaction.atomic():
        thread = threading.Thread(target=elsewhere, args=(django_db.connections["default"],))
        thread.start()
        thread.join()
    assert "same thread" in str(seen[0])
    assert counts(conn) == (0, 0, 0)


@pytest.mark.contract("I3")
def test_an_async_client_refuses_it(dsn: str, connection: Any) -> None:
    step: Any = post
    with pytest.raises(TypeError, match=r"a Client takes a psycopg.AsyncConnection, .* not ConnectionProxy"):
        asyncio.run(step.enqueue_tx(cyclone.Client(dsn), connection, "a"))


def test_transactions_by_hand(dsn: str, conn: Conn, connection: Any) -> None:
    """Whoever takes autocommit away ends each transaction."""
    transaction.set_autocommit(False)
    post.enqueue_tx(SyncClient(dsn), connection, "a")
    transaction.rollback()
    post.enqueue_tx(SyncClient(dsn), connection, "b")
    transaction.commit()
    transaction.set_autocommit(True)
    assert counts(conn) == (0, 1, 0)


OPTIONS: list[dict[str, Any]] = [
    {"server_side_binding": True},
    {"isolation_level": psycopg.IsolationLevel.SERIALIZABLE},
    {"pool": {"min_size": 1, "max_size": 2}},
]


@pytest.mark.contract("I3", "I4")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_nothing_is_left_on_the_connection(dsn: str, conn: Conn, connection: Any, options: dict[str, Any]) -> None:
    def state() -> Any:
        with connection.cursor() as cursor:
            cursor.execute(factories.SESSION_STATE)
            row = cursor.fetchone()
        block = connection.in_atomic_block, connection.savepoint_ids[:], connection.needs_rollback
        return row, block, connection.autocommit, factories.driver_state(connection.connection)

    connection.settings_dict["OPTIONS"] = options
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET statement_timeout = '12345ms'")
            cursor.execute("SET search_path = pg_catalog, public")
        outside = state()
        with transaction.atomic(), transaction.atomic():
            before = state()
            for count in (1, 3):
                post.enqueue_many_tx(SyncClient(dsn), connection, ["a"] * count)
            assert state() == before
            Business.objects.create(note="x")
        assert state() == outside
    finally:
        connection.close()
        connection.close_pool()
        connection.settings_dict["OPTIONS"] = {}
    assert counts(conn) == (1, 4, 0)
