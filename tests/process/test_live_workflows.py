"""Workflows on real pools: wide, long and many, and with workers killed meanwhile."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import psycopg
import pytest
from process import flows, live
from process.live import eventually

import cyclone

Conn = psycopg.Connection[Any]
TARGET = "process.flows"
UNEVEN = "SELECT count(*) FROM cyclone_steps WHERE attempts <> 1 OR reclaims <> 0 OR state <> 'completed'"
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


@pytest.mark.contract("C9", "E2", "FM-060")
@pytest.mark.timeout(240)
def test_many_wide_and_long_runs_on_eight_processes(
    start_pool: live.Pools, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=8, concurrency=50, target=TARGET, ready=False)
    runs: list[Any] = flows.diamond.submit_many(client, range(1000))
    joined = flows.join.submit(client, 1)
    fanned = flows.fan.submit(client, 10_000)
    chained = flows.chain.submit(client, 0)
    eventually(lambda: live.value(conn, "SELECT count(*) FROM cyclone_runs WHERE state = 'running'") == 0, 100)
    assert [run.result(1) for run in runs[:5]] == [4, 6, 8, 10, 12]
    assert joined.result(1) == 10_000
    assert fanned.result(1) == sum(range(1, 10_001))
    assert chained.result(1) == 500
    assert live.value(conn, UNEVEN) == 0
    assert pool.end() == 0
    assert live.value(conn, DEADLOCKS) == 0


@pytest.mark.contract("FM-064")
@pytest.mark.skipif(
    os.environ.get("CYCLONE_TEST_PG", "18") != "18", reason="it takes long, and nothing in it depends on the version"
)
@pytest.mark.timeout(300)
def test_a_chain_of_ten_thousand(start_pool: live.Pools, client: cyclone.SyncClient, conn: Conn) -> None:
    pool = start_pool(procs=1, target=TARGET)
    run = flows.long_chain.submit(client, 0)
    eventually(lambda: run.state().terminal, 250, log=lambda: pool.log)
    assert run.result(1) == 10_000
    assert live.value(conn, UNEVEN) == 0
    assert pool.end() == 0


@pytest.mark.contract("C5", "E1", "X4", "C9")
@pytest.mark.timeout(240)
def test_effects_of_nodes_happen_once_whatever_is_killed(
    start_pool: live.Pools, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    count = 150
    pool = start_pool(procs=3, concurrency=20, lease=3, completion_pool_size=4, target=TARGET)
    runs = flows.paying.submit_many(client, range(count))
    chance = random.Random(7)
    seen = 0
    while seen < count * 2:
        seen += 150
        eventually(lambda: live.value(conn, "SELECT count(*) FROM ledger") >= seen, 100, log=lambda: pool.log)  # noqa: B023
        os.kill(chance.choice(eventually(pool.workers)), signal.SIGKILL)
    eventually(
        lambda: live.value(conn, "SELECT count(*) FROM cyclone_runs WHERE state = 'completed'") == count, 100,
        log=lambda: f"{live.states(conn)}\n{pool.log}",
    )  # fmt: skip
    assert [run.result(1) for run in runs] == [n + 1 for n in range(count)]
    live.exact(conn, count * 4)
    assert live.value(conn, "SELECT count(*) FROM (SELECT DISTINCT run_id, node FROM ledger) l") == count * 4
    assert live.value(conn, "SELECT sum(reclaims) FROM cyclone_steps") > 0
    assert pool.end() == 0
