"""Clients and handles: opening, looking, waiting, cancelling."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import psycopg_pool
import pytest

import cyclone
from cyclone import (
    Client,
    ConnectError,
    CycloneError,
    ErrorKind,
    InvalidOptionError,
    NotFoundError,
    ResultError,
    RunCancelledError,
    RunFailedError,
    SchemaVersionError,
    StepHandle,
    StepState,
    SyncClient,
    SyncStepHandle,
)


class Total(msgspec.Struct):
    cents: int


@cyclone.step("add", tags=["t"], metadata={"m": [1]}, timeout=9)
def add(ctx: cyclone.SyncContext, numbers: list[int]) -> Total:
    return Total(sum(numbers))


@cyclone.action("note")
async def note(ctx: cyclone.Context) -> None: ...


@pytest.fixture
def client(dsn: str) -> Iterator[SyncClient]:
    with SyncClient(dsn) as client:
        yield client


def claim(conn: psycopg.Connection[Any], run_id: str) -> None:
    """Makes a step running, under claim 900 of life 800."""
    conn.execute(
        """INSERT INTO cyclone_lives (id, host, pid, queues, kinds, versions, lease_until)
           VALUES (800, 'h', 1, '{}', '{}', '{}', now() + interval '1 hour')"""
    )
    conn.execute("INSERT INTO cyclone_claims (id, life, steps) VALUES (900, 800, ARRAY[%s::bigint])", (run_id,))
    conn.execute(
        "UPDATE cyclone_steps SET state = 'running', claim = 900, attempts = 1, started_at = now() WHERE id = %s",
        (run_id,),
    )
    conn.execute("DELETE FROM cyclone_ready WHERE step = %s", (run_id,))


def end(conn: psycopg.Connection[Any], run_id: str, state: str, **columns: Any) -> None:
    sets = "".join(f", {name} = %({name})s" for name in columns)
    query = f"UPDATE cyclone_steps SET state = %(state)s, finished_at = now(){sets} WHERE id = %(id)s"
    conn.execute(query.encode(), {"state": state, "id": run_id, **columns})


def fail(conn: psycopg.Connection[Any], run_id: str) -> None:
    conn.execute(
        """INSERT INTO cyclone_errors (step, attempt, at, kind, message, traceback)
           VALUES (%(id)s, 1, now(), 'timeout', 'first "\\', 't1'), (%(id)s, 2, now(), 'permanent', 'second', 't2')""",
        {"id": run_id},
    )
    end(conn, run_id, "discarded", error_kind="permanent", error="second", attempts=2)


# Opening


async def test_an_unreachable_database_is_named_without_its_password() -> None:
    dsn = "postgresql://me:s3cret@127.0.0.1:1/shop"
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1, port 1, database shop") as caught:
        await Client(dsn).open()
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConnectError) as caught, SyncClient(dsn):
        pass
    assert "s3cret" not in str(caught.value) + repr(SyncClient(dsn)) + repr(Client(dsn))


async def test_a_missing_schema_is_named_with_the_way_out(empty_dsn: str) -> None:
    with pytest.raises(SchemaVersionError, match="cyclone migrate up"):
        await Client(empty_dsn).open()
    with pytest.raises(SchemaVersionError, match="--schema jobs"):
        SyncClient(empty_dsn, schema="jobs").open()


async def test_where_the_settings_come_from(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYCLONE_DSN", raising=False)
    with pytest.raises(InvalidOptionError, match="CYCLONE_DSN"):
        Client()
    monkeypatch.setenv("CYCLONE_DSN", dsn)
    async with Client() as client:
        assert (await note.enqueue(client)).run_id.isdigit()
    monkeypatch.setenv("CYCLONE_SCHEMA", "elsewhere")
    with pytest.raises(SchemaVersionError, match="elsewhere"):
        SyncClient().open()
    with SyncClient(schema="public"):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"max_input_bytes": 0},
        {"schema": ""},
        {"statement_timeout": 0},
        {"application_name": "a\0"},
        {"max_input_bytes": "1"},
    ],
)
def test_bad_client_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        Client("postgresql:///x", **options)


async def test_a_client_must_be_open(dsn: str) -> None:
    client, sync_client = Client(dsn), SyncClient(dsn)
    with pytest.raises(CycloneError, match="not open"):
        await note.enqueue(client)
    with pytest.raises(CycloneError, match="not open"):
        add.enqueue(sync_client, [1])
    for _ in range(2):  # also again, and twice
        await client.open()
        await client.open()
        await note.enqueue(client)
        await client.close()
        await client.close()
    with pytest.raises(CycloneError, match="not open"):
        await note.enqueue(client)


@pytest.mark.parametrize("autocommit", [True, False])
async def test_a_given_pool_stays_the_callers(dsn: str, conn: psycopg.Connection, autocommit: bool) -> None:
    kwargs = {"autocommit": autocommit, "prepare_threshold": 0, "row_factory": psycopg.rows.dict_row}
    async with psycopg_pool.AsyncConnectionPool(dsn, kwargs=kwargs, min_size=1, max_size=1, open=False) as pool:
        async with Client(pool=pool) as client:
            handles = [await note.enqueue(client), *await note.enqueue_many(client, [None] * 1500)]  # type: ignore[call-overload]
            assert await handles[0].state() is StepState.AVAILABLE
            assert await handles[0].cancel()
            assert (await client.get_step(handles[1].run_id, "note")).queue == "default"
        async with pool.connection() as one:
            cursor = await one.execute("SELECT count(*) AS n FROM pg_prepared_statements", prepare=False)
            assert await cursor.fetchone() == {"n": 0}
    assert conn.execute("SELECT count(*) FROM cyclone_steps").fetchone() == (1501,)
    with psycopg_pool.ConnectionPool(dsn, kwargs=kwargs, min_size=1, max_size=1, open=True) as sync_pool:
        with SyncClient(pool=sync_pool) as sync_client:
            add.enqueue(sync_client, [1]).cancel()
        with pytest.raises(InvalidOptionError):
            SyncClient(dsn, pool=sync_pool)
        with pytest.raises(InvalidOptionError):
            SyncClient(pool=sync_pool, statement_timeout=3)
    assert conn.execute("SELECT state FROM cyclone_steps ORDER BY id DESC LIMIT 1").fetchone() == ("cancelled",)


def test_a_statement_timeout_is_kept(dsn: str, conn: psycopg.Connection) -> None:
    with SyncClient(dsn, statement_timeout=timedelta(milliseconds=50)) as client:
        handle = note.enqueue(client)
        with conn.transaction():
            conn.execute("SELECT FROM cyclone_steps FOR UPDATE")
            with pytest.raises(psycopg.errors.QueryCanceled):
                handle.cancel()
        assert handle.cancel()


KILL = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'victim'"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_connections_that_the_server_closed_are_replaced(dsn: str, conn: psycopg.Connection) -> None:
    async with Client(dsn, application_name="victim") as client:
        await asyncio.gather(*(note.enqueue(client) for _ in range(30)))
        for _ in range(3):
            assert conn.execute(KILL).rowcount > 0
            await note.enqueue(client)
    with SyncClient(dsn, application_name="victim") as sync_client:
        note.enqueue(sync_client)
        assert conn.execute(KILL).rowcount > 0
        note.enqueue(sync_client)


@pytest.mark.contract("I1")
def test_both_clients_have_the_same_names() -> None:
    for one, other in ((Client, SyncClient), (StepHandle, SyncStepHandle)):
        first: dict[str, Any] = {name: value for name, value in inspect.getmembers(one) if not name.startswith("_")}
        second: dict[str, Any] = {name: value for name, value in inspect.getmembers(other) if not name.startswith("_")}
        assert first.keys() == second.keys()
        for name, value in first.items():
            if inspect.isfunction(value):
                assert list(inspect.signature(value).parameters) == list(inspect.signature(second[name]).parameters)
                streams = str(inspect.signature(value).return_annotation).startswith("AsyncGenerator")
                assert streams or inspect.iscoroutinefunction(value)
                assert not inspect.iscoroutinefunction(second[name])
    assert list(inspect.signature(Client).parameters) == list(inspect.signature(SyncClient).parameters)


# Looking


@pytest.mark.contract("D10", "R40")
def test_a_step_as_it_is_stored(client: SyncClient, conn: psycopg.Connection) -> None:
    handle = add.enqueue(client, [1, 2], queue="q'", priority=2)
    info = client.get_step(handle.run_id, "add")
    assert (info.run_id, info.node, info.kind, info.version, info.queue) == (handle.run_id, "add", "add", 1, "q'")
    assert (info.priority, info.state, info.input, info.output) == (2, StepState.AVAILABLE, [1, 2], None)
    assert (info.attempts, info.max_attempts, info.timeout_s, info.tags, info.metadata) == (
        0,
        5,
        9.0,
        ["t"],
        {"m": [1]},
    )
    assert (info.errors, info.error, info.error_kind, info.started_at, info.due_at) == ([], None, None, None, None)
    assert info.enqueued_at == info.ready_at
    fail(conn, handle.run_id)
    info = client.get_step(handle.run_id, "add")
    assert (info.state, info.error_kind, info.error) == (StepState.EXHAUSTED, ErrorKind.PERMANENT, "second")
    assert [(e.attempt, e.kind, e.message, e.traceback) for e in info.errors] == [
        (1, ErrorKind.TIMEOUT, 'first "\\', "t1"),
        (2, ErrorKind.PERMANENT, "second", "t2"),
    ]
    assert info.errors[0].at == info.errors[1].at and info.errors[0].at.tzinfo is not None
    assert client.list_steps(handle.run_id) == [info]


async def test_what_is_not_there(dsn: str) -> None:
    async with Client(dsn) as client:
        handle = await note.enqueue(client)
        for run_id in ("1", "x", "", "-1", "٣", "9" * 30, "1; DROP TABLE cyclone_steps"):
            if run_id != handle.run_id:
                with pytest.raises(NotFoundError):
                    await client.list_steps(run_id)
            with pytest.raises(NotFoundError):
                await client.get_step(run_id, "other")
            with pytest.raises(NotFoundError):
                await client.cancel_step(run_id, "other'")
        with pytest.raises(TypeError):
            await client.get_step(1, "note")  # type: ignore[arg-type]
        assert await handle.state() is StepState.AVAILABLE


# Waiting


@pytest.mark.contract("U15")
async def test_waiting_before_the_commit_is_an_error_at_once(dsn: str) -> None:
    async with Client(dsn) as client, await psycopg.AsyncConnection.connect(dsn) as tx:
        handle = await add.enqueue_tx(client, tx, [1])
        for call in (handle.state, handle.wait, handle.result, handle.cancel):
            with pytest.raises(NotFoundError, match="not visible"):
                await call()
        await tx.commit()
        assert await handle.state() is StepState.AVAILABLE


@pytest.mark.contract("U7", "C8")
def test_results(client: SyncClient, conn: psycopg.Connection) -> None:
    done, failed, cancelled, odd = (add.enqueue(client, [n]) for n in range(4))
    action = note.enqueue(client)
    end(conn, done.run_id, "completed", output='{"cents": 7}')
    end(conn, action.run_id, "completed")
    end(conn, odd.run_id, "completed", output='{"cents": "x"}')
    fail(conn, failed.run_id)
    assert cancelled.cancel("no need")
    assert done.result() == Total(7)
    assert done.wait() is StepState.COMPLETED
    assert action.result() is None
    with pytest.raises(RunFailedError, match="second") as caught:
        failed.result()
    assert (caught.value.run_id, caught.value.node) == (failed.run_id, "add")
    assert (caught.value.error, caught.value.kind) == ("second", "permanent")
    with pytest.raises(RunCancelledError, match="no need") as stopped:
        cancelled.result()
    assert stopped.value.reason == "no need"
    with pytest.raises(ResultError, match=r"\$\.cents"):
        odd.result()
    assert [handle.wait() for handle in (failed, cancelled)] == [StepState.EXHAUSTED, StepState.CANCELLED]


async def test_waiting_ends_with_the_step(dsn: str, conn: psycopg.Connection) -> None:
    async with Client(dsn) as client:
        handle = await add.enqueue(client, [1])
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(handle.result(timeout=60))
            looked = group.create_task(handle.state())
            await looked
            end(conn, handle.run_id, "completed", output='{"cents": 1}')
        assert waiting.result() == Total(1)


async def test_waiting_is_bounded(dsn: str) -> None:
    async with Client(dsn) as client:
        handle = await add.enqueue(client, [1])
        for timeout in (0, 0.05, timedelta(milliseconds=20)):
            with pytest.raises(TimeoutError, match=handle.run_id):
                await handle.wait(timeout)
        for wrong in (-1, float("nan"), "3"):
            with pytest.raises(InvalidOptionError):
                await handle.result(timeout=wrong)  # type: ignore[arg-type]
    with SyncClient(dsn) as sync_client, pytest.raises(TimeoutError):
        add.enqueue(sync_client, [1]).result(timeout=0.01)


# Cancelling


@pytest.mark.parametrize("delay", [None, 60])
def test_a_step_that_nobody_runs_is_cancelled_at_once(
    client: SyncClient, conn: psycopg.Connection, delay: float | None
) -> None:
    handle = add.enqueue(client, [1], delay=delay)
    tickets = conn.execute("SELECT count(*) FROM cyclone_ready").fetchone()
    assert client.cancel_step(handle.run_id, handle.node, reason=None) is True
    info = client.get_step(handle.run_id, handle.node)
    assert (info.state, info.error_kind, info.error) == (StepState.CANCELLED, ErrorKind.CANCELLED, "cancelled")
    assert info.due_at is None and info.finished_at is not None
    assert client.cancel_step(handle.run_id, handle.node, reason="again") is False
    assert client.get_step(handle.run_id, handle.node) == info
    assert conn.execute("SELECT count(*) FROM cyclone_orders").fetchone() == (0,)
    assert conn.execute("SELECT count(*) FROM cyclone_ready").fetchone() == tickets


def test_the_worker_of_a_running_step_gets_an_order(client: SyncClient, conn: psycopg.Connection) -> None:
    handle = add.enqueue(client, [1])
    claim(conn, handle.run_id)
    assert handle.cancel("it's off") is True
    assert handle.cancel() is False
    assert conn.execute("SELECT life, step, claim, reason FROM cyclone_orders").fetchall() == [
        (800, int(handle.run_id), 900, "it's off")
    ]
    conn.execute("DELETE FROM cyclone_claims")


async def _somebody_waits(conn: psycopg.Connection[Any]) -> None:
    while conn.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is None:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_cancel_waits_for_whoever_holds_the_step_and_then_sees_what_became_of_it(
    dsn: str, conn: psycopg.Connection
) -> None:
    async with Client(dsn) as client:
        handle = await add.enqueue(client, [1])
        with conn.transaction():
            claim(conn, handle.run_id)  # inserts the claim that the order is addressed by
            cancelling = asyncio.create_task(handle.cancel())
            with psycopg.connect(dsn, autocommit=True) as other:
                await _somebody_waits(other)
        assert await cancelling is True
    assert conn.execute("SELECT life, claim FROM cyclone_orders").fetchall() == [(800, 900)]
    conn.execute("DELETE FROM cyclone_claims")


def test_a_bad_reason_is_refused_before_anything(client: SyncClient) -> None:
    handle = add.enqueue(client, [1])
    for reason in ("a\0b", "\ud800", "x" * 10_001, 3):
        with pytest.raises(InvalidOptionError):
            handle.cancel(reason)  # type: ignore[arg-type]
    assert handle.state() is StepState.AVAILABLE
