"""Connections whose waits are cheap: what the loop watches goes with them."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import psycopg
import pytest
from factories import until

from cyclone.waiting import AsyncConnection

Conn = psycopg.Connection[Any]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux shows them")
async def test_a_closed_connection_leaves_nothing_open(dsn: str) -> None:
    before = descriptors()
    conn = await AsyncConnection.connect(dsn, autocommit=True)
    assert await (await conn.execute("SELECT 1")).fetchone() == (1,)
    assert descriptors() > before + 1  # the driver's and ours
    await conn.close()
    assert descriptors() == before


@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
async def test_a_forgotten_connection_is_not_kept_by_the_loop(dsn: str) -> None:
    conn = await AsyncConnection.connect(dsn, autocommit=True)
    await conn.execute("SELECT 1")
    forgotten = weakref.ref(conn)
    del conn
    gc.collect()
    assert forgotten() is None


def test_a_connection_outlives_its_loop(dsn: str) -> None:
    async def connect() -> AsyncConnection:
        conn = await AsyncConnection.connect(dsn, autocommit=True)
        await conn.execute("SELECT 1")
        return conn

    conn = asyncio.run(connect())

    async def use() -> None:
        assert await (await conn.execute("SELECT 2")).fetchone() == (2,)
        await conn.close()

    asyncio.run(use())


async def test_a_connection_that_breaks_in_a_pipeline_says_so_once(dsn: str, conn: Conn) -> None:
    broken = await AsyncConnection.connect(dsn, autocommit=True)
    with pytest.raises(psycopg.OperationalError):
        async with broken.pipeline():
            await broken.execute("SELECT 1")
            conn.execute("SELECT pg_terminate_backend(%s)", (broken.info.backend_pid,))
            await broken.execute("SELECT pg_sleep(10)")
    gc.collect()  # what had been left over would raise now
    await broken.close()


async def test_a_wait_that_is_cancelled_ends_the_statement(dsn: str, conn: Conn) -> None:
    slow = await AsyncConnection.connect(dsn, autocommit=True)
    task = asyncio.create_task(slow.execute("SELECT pg_sleep(60)"))
    sleeps = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'"
    await until(lambda: conn.execute(sleeps, (slow.info.backend_pid,)).fetchone() == (1,))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await (await slow.execute("SELECT 3")).fetchone() == (3,)
    await slow.close()
