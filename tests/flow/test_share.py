"""A worker claims no more than it can start soon, and gives back what it claimed too early."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import factories
import psycopg
import pytest
from factories import until

import cyclone
from cyclone import Context
from cyclone.worker import Worker

Conn = psycopg.Connection[Any]


class Work:
    """Steps that end when the test says so, and that tell which worker had them."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.running: Counter[str] = Counter()

    def step(self, worker: str) -> cyclone.Step[Any, Any]:
        @cyclone.step("long")
        async def long(ctx: Context) -> None:
            self.running[worker] += 1
            await self.gate.wait()

        return long


def make_hasty(worker: Worker) -> None:
    """Lets it believe that a thousand steps end each second, as after many short ones: then it claims ahead."""
    worker._rate = 1000.0


@pytest.mark.contract("FM-070")
async def test_long_steps_go_to_the_workers_that_are_free(dsn: str, conn: Conn) -> None:
    work = Work()
    async with factories.worker(dsn, work.step("busy"), concurrency=5) as busy:
        make_hasty(busy)
        factories.steps(conn, 10, "long")
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'running'") == 10)
        await until(lambda: work.running == {"busy": 5})
        async with factories.worker(dsn, work.step("idle"), concurrency=5):
            await until(lambda: work.running["idle"] == 5)
            assert work.running == {"busy": 5, "idle": 5}
            work.gate.set()
            await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 10)
    assert conn.execute("SELECT DISTINCT attempts, reclaims FROM cyclone_steps").fetchall() == [(1, 0)]


@pytest.mark.contract("FM-070", "F3", "F4")
async def test_what_was_claimed_and_not_started_is_given_back_at_the_stop(dsn: str, conn: Conn) -> None:
    work = Work()
    async with factories.worker(dsn, work.step("only"), concurrency=3, drain_timeout=0) as only:
        make_hasty(only)
        factories.steps(conn, 50, "long")
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'running'") > 3)
    assert work.running == {"only": 3}
    # Three were called, and repeat their attempt; the others are as if nobody had ever had them.
    found = conn.execute(
        "SELECT state, attempts, resume, reclaims, count(*) FROM cyclone_steps GROUP BY 1, 2, 3, 4 ORDER BY 2"
    ).fetchall()
    assert found == [("available", 0, False, 0, 47), ("available", 1, True, 0, 3)]


@pytest.mark.contract("FM-066")
async def test_a_handler_does_not_wait_for_what_it_has_just_enqueued_and_nobody_can_see(dsn: str, conn: Conn) -> None:
    @cyclone.step("child")
    async def child(ctx: Context) -> int:
        return 1

    @cyclone.step("parent")
    async def parent(ctx: Context) -> int:
        return await (await child.enqueue(ctx)).result(timeout=5)

    made = await factories.alone(dsn, conn, parent, max_attempts=1, worker={"concurrency": 1})
    assert factories.read(conn, made, "state") == "discarded"
    assert "'child' of run" in factories.read(conn, made, "error") and "is not visible" in factories.read(
        conn, made, "error"
    )
    assert factories.count(conn, "cyclone_steps WHERE kind = 'child'") == 0


@pytest.mark.contract("FM-066")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_handlers_that_fill_a_queue_and_wait_for_it_are_refused(dsn: str, conn: Conn, sort: str) -> None:
    @cyclone.step("child")
    async def child(ctx: Context) -> int:
        return 1

    async with cyclone.Client(dsn) as client:
        with cyclone.SyncClient(dsn) as sync_client:

            @cyclone.step("parent")
            async def parent(ctx: Context) -> int:
                return await (await child.enqueue(client)).result()

            @cyclone.step("parent")
            def sync_parent(ctx: cyclone.SyncContext) -> int:
                return child.enqueue(sync_client).result()

            handler: cyclone.Step[Any, Any] = parent if sort == "async" else sync_parent
            made = [factories.step(conn, "parent", max_attempts=1) for _ in range(2)]
            async with factories.worker(dsn, child, handler, concurrency=2):
                await factories.ended(conn, *made)
    for one in made:
        assert "InvalidOptionError" in factories.read(conn, one, "error")
