"""While the database is away: calls fail within their limits, and neither producers nor workers pile anything up."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import factories
import psycopg
import psycopg_pool
import pytest
from factories import until
from proxy import Proxy
from psycopg import conninfo

import cyclone
from cyclone import Context, client, worker

Conn = psycopg.Connection[Any]

LIMIT_S = 1.0


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as proxy:
        yield proxy


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented half minute, shortened."""
    assert client._POOL_TIMEOUT_S == 30.0
    assert "30 s" in str(cyclone.Client.__doc__)
    monkeypatch.setattr(client, "_POOL_TIMEOUT_S", LIMIT_S)


def away(dsn: str) -> str:
    """The same database where nobody listens."""
    return conninfo.make_conninfo(dsn, port=1)


@pytest.mark.contract("FM-085")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_submitting_fails_in_time_and_leaves_nothing_behind(dsn: str, conn: Conn, short: None) -> None:
    proxy = Proxy(dsn)
    async with cyclone.Client(proxy.dsn) as submitting:
        await factories.noop().enqueue(submitting, None)
        proxy.close()  # and nobody listens there any more

        async def submit() -> float:
            began = time.monotonic()
            with pytest.raises((psycopg.OperationalError, psycopg_pool.PoolTimeout)):
                await factories.noop().enqueue(submitting, "x" * 10_000)
            return time.monotonic() - began

        # Debugging keeps a traceback of each task, which takes longer than all that is measured here.
        asyncio.get_running_loop().set_debug(False)
        tracemalloc.start()
        sizes: list[int] = []
        for _ in range(3):
            assert max(await asyncio.gather(*(submit() for _ in range(100)))) < LIMIT_S + 2.5
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        # 200 more calls of 10 kB each have come to nothing.
        assert sizes[-1] - sizes[0] < 500_000
        assert submitting._pool is not None
        assert not submitting._pool._waiting, "the library keeps waiters under another name now"
    assert factories.count(conn, "cyclone_steps") == 1


@pytest.mark.contract("FM-085")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_submitting_from_threads_fails_in_time(dsn: str, conn: Conn, short: None) -> None:
    proxy = Proxy(dsn)
    with cyclone.SyncClient(proxy.dsn) as submitting:
        factories.noop().enqueue(submitting, None)
        proxy.close()
        spent: list[float] = []

        def submit() -> None:
            began = time.monotonic()
            with pytest.raises((psycopg.OperationalError, psycopg_pool.PoolTimeout)):
                factories.noop().enqueue(submitting, None)
            spent.append(time.monotonic() - began)

        threads = [threading.Thread(target=submit) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert submitting._pool is not None and not submitting._pool._waiting
    assert len(spent) == 20 and max(spent) < LIMIT_S + 1.5
    with pytest.raises(cyclone.ConnectError), cyclone.SyncClient(away(dsn)):
        pass


@pytest.mark.contract("FM-085", "M9")
async def test_a_worker_holds_no_more_than_its_bound_while_outcomes_cannot_be_written(
    dsn: str, conn: Conn, proxy: Proxy
) -> None:
    gate = asyncio.Event()
    held: list[int] = []

    @cyclone.step("big")
    async def big(ctx: Context, n: int) -> str:
        await gate.wait()
        return "x" * 1000

    factories.steps(conn, 300, "big", input=1)
    async with factories.worker(proxy.dsn, big, concurrency=20) as working:
        await until(lambda: working._running == 20)
        proxy.freeze()  # nothing is answered, and nothing fails
        gate.set()
        for _ in range(10):
            await asyncio.sleep(0.1)
            held.append(working._unsettled)
        # What is in hand ends, and no more is claimed.
        assert max(held) <= 20 + worker._CLAIM_MOST and held[-1] == held[3]
        proxy.cut()
        proxy.thaw()
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 300, limit=60)
    assert conn.execute("SELECT max(attempts), sum(reclaims) FROM cyclone_steps").fetchall() == [(1, 0)]
