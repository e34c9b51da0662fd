"""Pools that are told to stop: nothing waits for a lease, no attempt is spent, nobody is blamed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from process import app, live
from process.live import eventually

import cyclone

Conn = psycopg.Connection[Any]

TERM, INT = signal.SIGTERM, signal.SIGINT
# What a crowded machine may add to the promises of the engine.
SLACK_S = 4.0

OUTCOMES = """SELECT state, attempts, reclaims, count(*)::int FROM cyclone_steps GROUP BY 1, 2, 3 ORDER BY 1, 2"""


def nothing_is_left(conn: Conn) -> None:
    """The pool holds nothing: no claim, no life, no connection."""
    assert live.value(conn, "SELECT count(*) FROM cyclone_lives WHERE ended_at IS NULL") == 0
    assert live.value(conn, "SELECT count(*) FROM cyclone_steps WHERE state = 'running'") == 0
    eventually(lambda: live.value(conn, ENGINE) == 0)


ENGINE = """SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name ~ '^cyclone .'"""


@pytest.mark.contract("F3", "F4", "FM-018", "FM-070", "FM-019")
def test_a_drain_under_load_finishes_what_runs_and_gives_back_the_rest(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=2, concurrency=10, threads=3, lease=60)
    app.work.enqueue_many(client, [app.Job(name="quick", sleep_s=0.02) for _ in range(400)])
    app.work_in_thread.enqueue_many(client, [app.Job(name="in a thread", sleep_s=0.02) for _ in range(400)])
    told.expect("entered", 60)
    told_to_stop = time.monotonic()
    assert pool.end() == 0
    assert time.monotonic() - told_to_stop < SLACK_S, "what ran took some hundredths of a second"
    nothing_is_left(conn)
    calls = len(told.seen("entered"))
    # Whoever was called has completed, once; whoever was not is as it was.
    assert 60 <= calls < 800
    assert live.rows(conn, OUTCOMES) == [("available", 0, 0, 800 - calls), ("completed", 1, 0, calls)]
    # The rest is claimed at once: nobody's lease is in the way.
    started = time.time()
    start_pool(procs=2, concurrency=50)
    assert told.expect("entered", calls + 1)[calls]["at"] - started < SLACK_S
    eventually(lambda: live.completed(conn, 800))
    assert len(told.seen("entered")) == 800
    assert live.rows(conn, OUTCOMES) == [("completed", 1, 0, 800)]


@pytest.mark.contract("F3", "F4", "FM-018")
def test_what_outlives_the_drain_is_cancelled_and_given_back(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    pool = start_pool(procs=2, lease=60, drain_timeout=0.5)
    app.work.enqueue_many(client, [app.Job(name=str(n), gate="go", ledger=True, fail_before=2) for n in range(4)])
    stubborn = app.stubborn.enqueue_many(client, [app.Job(name="stubborn", gate="go") for _ in range(2)])
    told.expect("written", 4)
    told.expect("entered", 2, name="stubborn")
    told_to_stop = time.monotonic()
    assert pool.end() == 0
    assert time.monotonic() - told_to_stop < 0.5 + 0.3 + SLACK_S
    assert len(told.seen("cancelled", lease_lost=False)) == 4
    nothing_is_left(conn)
    assert "is killed" not in pool.log
    assert live.rows(conn, OUTCOMES) == [("available", 1, 0, 2), ("available", 2, 0, 4)]
    assert live.value(conn, "SELECT count(*) FROM ledger") == 0
    # The same attempts are the ones that run again.
    told.open("go")
    again = start_pool(procs=1)
    eventually(lambda: live.completed(conn, 6))
    assert live.rows(conn, OUTCOMES) == [("completed", 1, 0, 2), ("completed", 2, 0, 4)]
    assert live.value(conn, "SELECT count(*) FROM ledger") == 4
    assert {live.step(conn, one.run_id, "state") for one in stubborn} == {"completed"}
    assert again.end() == 0


@pytest.mark.contract("F3", "FM-024")
@pytest.mark.parametrize("number", [TERM, INT], ids=["TERM", "INT"])
def test_a_second_signal_skips_the_wait(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn, number: int
) -> None:
    pool = start_pool(procs=2, lease=60, drain_timeout=60)
    app.work.enqueue_many(client, [app.Job(name=str(n), gate="never") for n in range(4)])
    told.expect("entered", 4)
    # As Ctrl-C in a terminal: the whole group hears it, and drains once.
    pool.signal_all(number) if number == INT else pool.signal(number)
    eventually(lambda: "draining; handlers may go on for 60 s" in pool.log)
    eventually(lambda: not pool.workers())
    assert pool.process.poll() is None and not told.seen("cancelled")
    second = time.monotonic()
    pool.signal_all(number) if number == INT else pool.signal(number)
    assert pool.wait() == 0
    assert time.monotonic() - second < SLACK_S
    assert len(told.seen("cancelled")) == 4
    nothing_is_left(conn)
    assert live.rows(conn, OUTCOMES) == [("available", 1, 0, 4)]


@pytest.mark.contract("FM-024")
def test_without_uvloop_the_signals_mean_the_same(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "uvloop.py").write_text("raise ImportError('it is not installed')\n")
    pool = start_pool(procs=2, path=[hidden])
    app.work.enqueue_many(client, [app.Job(name=str(n), gate="go") for n in range(4)])
    entered = told.expect("entered", 4)
    maps = Path(f"/proc/{entered[0]['pid']}/maps").read_text()
    assert "uvloop" not in maps
    pool.signal_all(INT)
    eventually(lambda: not pool.workers())
    told.open("go")
    assert pool.wait() == 0
    assert live.rows(conn, OUTCOMES) == [("completed", 1, 0, 4)] and len(told.seen("entered")) == 4
    nothing_is_left(conn)


RENEWED = (
    "SELECT lease_until > started_at + interval '5 seconds' FROM cyclone_lives WHERE pid = %s AND ended_at IS NULL"
)


@pytest.mark.contract("FM-024", "FM-026", "F3", "E10")
def test_one_worker_that_is_told_to_stop_drains_and_is_replaced(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=1, lease=1)
    (pid,) = pool.workers()
    first = app.work.enqueue(client, app.Job(name="first", gate="go"))
    told.expect("entered", name="first", pid=pid)
    os.kill(pid, TERM)
    eventually(lambda: pool.workers() == [])
    # It claims no more; it keeps what it has for as long as it takes, and a lease is one second.
    second = app.work.enqueue(client, app.Job(name="second"))
    eventually(lambda: live.value(conn, RENEWED, pid), log=lambda: pool.log)
    assert first.state() == "running" and second.state() == "available"
    told.open("go")
    assert first.wait(10) == "completed" and second.wait(20) == "completed"
    live.gone(pid)
    assert [one["pid"] == pid for one in told.seen("entered")] == [True, False]
    assert f"worker {pid} has drained on its own and will be replaced" in pool.log
    assert pool.ready().end() == 0
    assert live.rows(conn, OUTCOMES) == [("completed", 1, 0, 2)]


@pytest.mark.contract("FM-026", "E10", "F3")
def test_a_step_longer_than_several_leases_during_the_stop_runs_once(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    pool = start_pool(procs=1, lease=1, drain_timeout=30)
    app.work.enqueue_many(client, [app.Job(name=str(n), sleep_s=4, ledger=n % 2 == 0) for n in range(6)])
    told.expect("entered", 6)
    # Another pool is there to take whatever lapses.
    other = start_pool(procs=1, lease=1)
    pool.signal(TERM)
    assert pool.wait() == 0
    assert live.rows(conn, OUTCOMES) == [("completed", 1, 0, 6)] and len(told.seen("entered")) == 6
    assert live.value(conn, "SELECT count(*) FROM ledger") == 3
    assert "has expired" not in other.log and other.metric("cyclone_reclaims_total") == 0
    assert other.end() == 0


@pytest.mark.contract("FM-019", "F3")
def test_a_stop_at_any_moment_of_the_start_leaves_nothing(start_pool: live.Pools, conn: Conn) -> None:
    # From a supervisor that has barely begun to a pool that is at work.
    for pause_s in (0.15, 0.3, 0.45, 0.6, 0.9):
        pool = start_pool(procs=2, ready=False)
        deadline = time.monotonic() + pause_s
        eventually(lambda: time.monotonic() >= deadline)  # noqa: B023
        begun = "pool" in pool.log
        pool.signal(TERM)
        # Python dies by a signal that comes before anybody handles it.
        assert pool.wait(10) in ((0,) if begun else (0, -TERM))
        assert "is killed" not in pool.log and "Traceback" not in pool.log
    nothing_is_left(conn)


@pytest.mark.contract("F3", "F4", "E2")
def test_a_deployment_under_load_costs_nothing(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    # Leases far longer than the test: what is done was never waited for.
    pool = start_pool(procs=2, lease=600, concurrency=20)
    app.charge.enqueue_many(client, range(1, 1501))
    for _ in range(2):
        done = live.value(conn, "SELECT count(*) FROM ledger")
        eventually(lambda: live.value(conn, "SELECT count(*) FROM ledger") > done)  # noqa: B023
        successor = start_pool(procs=2, lease=600, concurrency=20, ready=False)
        pool.signal(TERM)
        assert pool.wait() == 0
        pool = successor
    pool.ready().signal(signal.SIGHUP)
    eventually(lambda: live.completed(conn, 1500), log=lambda: pool.log)
    live.exact(conn, 1500)
    assert live.value(conn, "SELECT sum(amount) FROM ledger") == 1500 * 1501 // 2
    assert live.rows(conn, OUTCOMES) == [("completed", 1, 0, 1500)]
    assert pool.end() == 0
