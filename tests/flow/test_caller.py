"""Submitting on a connection of the caller's: the step follows its transaction, and the connection stays as it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import factories
import psycopg
import pytest
from factories import until
from psycopg.rows import dict_row

import cyclone
from cyclone import Context, SyncContext

Conn = psycopg.Connection[Any]


def settings(conn: Conn) -> dict[str, Any]:
    """All that a connection may have been changed in, on both sides."""
    row = conn.execute(factories.SESSION_STATE).fetchone()
    return {**row, **factories.driver_state(conn)}


@pytest.mark.contract("FM-058", "I4", "U11")
async def test_a_step_starts_within_a_second_of_the_commit_and_never_before_or_without_it(dsn: str) -> None:
    calls: list[tuple[str, float]] = []

    @cyclone.step("note")
    async def note(ctx: Context, name: str) -> None:
        calls.append((name, time.monotonic()))

    # Between two polls lies a minute: what starts soon was told by the commit.
    async with (
        cyclone.Client(dsn) as client,
        factories.worker(dsn, note, poll_interval=60),
        await psycopg.AsyncConnection.connect(dsn) as tx,
    ):
        await asyncio.sleep(0.1)  # it sleeps now, and is told
        for _ in range(3):
            calls.clear()
            await note.enqueue_tx(client, tx, "committed")
            async with tx.transaction():
                await note.enqueue_tx(client, tx, "released")
            with pytest.raises(ZeroDivisionError):
                async with tx.transaction():
                    await note.enqueue_tx(client, tx, "rolled back to a savepoint")
                    raise ZeroDivisionError
            # A moment in which a worker could start what it must not see.
            other = await note.enqueue(client, "another's")
            await other.result(timeout=10)
            await asyncio.sleep(0.2)
            assert [name for name, _ in calls] == ["another's"]
            committed = time.monotonic()
            await tx.commit()
            await until(lambda: len(calls) == 3)
            assert max(at for _, at in calls) - committed < 1.0
            assert {name for name, _ in calls} == {"another's", "committed", "released"}
            await note.enqueue_tx(client, tx, "rolled back")
            await tx.rollback()
        await (await note.enqueue(client, "last")).result(timeout=10)
    assert "rolled back" not in {name for name, _ in calls}
    with psycopg.connect(dsn) as conn:
        assert factories.count(conn, "cyclone_steps WHERE state <> 'completed'") == 0


def savepoints(conn: Conn, act: Callable[[], object]) -> None:
    with conn.transaction(), conn.transaction():
        act()


@pytest.mark.contract("FM-058", "I4")
@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("isolation", [None, psycopg.IsolationLevel.SERIALIZABLE])
def test_the_connection_is_left_as_it_was(
    dsn: str, conn: Conn, autocommit: bool, isolation: psycopg.IsolationLevel | None
) -> None:
    client = cyclone.SyncClient(dsn)  # not open: the caller's connection is the only one
    with psycopg.connect(dsn, autocommit=autocommit, row_factory=dict_row, prepare_threshold=0) as tx:
        tx.isolation_level = isolation
        tx.execute("SET statement_timeout = '12345ms'", prepare=False)
        tx.execute("SET search_path = pg_catalog", prepare=False)
        tx.prepare_threshold = None
        if not autocommit:
            tx.commit()
        before = settings(tx)
        if not autocommit:
            tx.commit()
        for count in (1, 3):
            savepoints(tx, lambda count=count: factories.noop().enqueue_many_tx(client, tx, [None] * count))  # type: ignore[misc]
        assert settings(tx) == before
        # No savepoint of ours is left open inside the caller's transaction.
        with tx.transaction():
            factories.noop().enqueue_tx(client, tx, None)
            with pytest.raises(psycopg.errors.InvalidSavepointSpecification):
                with tx.transaction():
                    tx.execute("ROLLBACK TO SAVEPOINT cyclone")
    assert factories.count(conn, "cyclone_steps") == 5


@pytest.mark.contract("X10")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_what_a_handler_enqueues_exists_only_if_its_step_completes(dsn: str, conn: Conn, sort: str) -> None:
    @cyclone.step("receipt")
    async def receipt(ctx: Context, n: int) -> int:
        return n

    @cyclone.step("async", max_attempts=1)
    async def by_async(ctx: Context, fail: bool) -> str:
        enqueue: Any = receipt.enqueue
        handle = await enqueue(ctx, 1)
        if fail:
            raise ValueError
        return str(handle.run_id)

    @cyclone.step("sync", max_attempts=1)
    def by_sync(ctx: SyncContext, fail: bool) -> str:
        enqueue: Any = receipt.enqueue
        handle = enqueue(ctx, 1)
        if fail:
            raise ValueError
        return str(handle.run_id)

    charge = by_async if sort == "async" else by_sync
    async with cyclone.Client(dsn) as client, factories.worker(dsn, by_async, by_sync, receipt):
        run_id = await (await charge.enqueue(client, False)).result(timeout=10)
        await until(lambda: factories.state(conn, int(run_id)) == "completed")
        await (await charge.enqueue(client, True)).wait(timeout=10)
    assert factories.count(conn, "cyclone_steps WHERE kind = 'receipt'") == 1
