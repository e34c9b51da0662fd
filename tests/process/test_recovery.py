"""Workers that die, stand still or come back too late: what they held is run again, once, and blame is just."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import factories
import psycopg
import pytest
from process import app, live
from process.live import eventually
from proxy import Proxy

import cyclone

Conn = psycopg.Connection[Any]

LEASE_S = 2.0
SWEEP_S = 1.0
# What a crowded machine may add to the promises of the engine.
SLACK_S = 3.0


def outside(folder: Path) -> list[str]:
    path = folder / app.OUTSIDE
    return path.read_text().split() if path.exists() else []


def kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.time()


# A worker is killed at a known point


@pytest.mark.contract("E4", "E5", "E6", "E7", "X2", "M1", "M2", "M3", "FM-009", "FM-007")
@pytest.mark.parametrize(
    ("point", "job", "effects"),
    [
        ("entered", app.Job(name="m1", gate="go", gate_first=True, outside=True, ledger=True), 1),
        ("acted", app.Job(name="m2", gate="go", outside=True), 2),
        ("written", app.Job(name="m3", gate="go", outside=True, ledger=True), 2),
    ],
    ids=["M1", "M2", "M3"],
)
def test_a_killed_worker_costs_no_attempt_and_no_effect_inside(
    start_pool: live.Pools,
    told: live.Channel,
    client: cyclone.SyncClient,
    conn: Conn,
    tmp_path: Path,
    point: str,
    job: app.Job,
    effects: int,
) -> None:
    live.ledger(conn)
    pool = start_pool(procs=1)
    # Killed in its last attempt, which is not the first.
    job.fail_before = 3
    handle = app.work.enqueue(client, job, max_attempts=3)
    (reached,) = told.expect(point, attempt=3)
    assert live.step(conn, handle.run_id, "state") == "running"
    killed = kill(reached["pid"])
    again = told.expect("entered", 2, attempt=3)[1]
    assert again["reclaims"] == 1 and again["pid"] != reached["pid"]
    assert again["at"] - killed < 1 + SLACK_S
    if point != "entered":
        told.expect(point, 2)
    told.open("go")
    assert handle.wait(10) == "completed"
    assert len(outside(tmp_path)) == effects and set(outside(tmp_path)) == {f"{handle.run_id}:work"}
    assert live.value(conn, "SELECT count(*) FROM ledger") == (1 if job.ledger else 0)
    info = client.get_step(handle.run_id, "work")
    assert (info.attempts, info.reclaims, info.last_crash) == (3, 1, "killed by SIGKILL")
    assert [(error.attempt, error.kind) for error in info.errors] == [(1, "retryable"), (2, "retryable")]
    assert pool.end() == 0


@pytest.mark.contract("M4", "X3", "FM-016")
def test_a_worker_killed_after_the_commit_leaves_nothing_to_do(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    pool = start_pool(procs=1)
    handle = app.work.enqueue(client, app.Job(name="m4", gate="go", ledger=True))
    (reached,) = told.expect("written")
    told.open("go")
    while live.step(conn, handle.run_id, "state") != "completed":
        pass
    kill(reached["pid"])
    eventually(lambda: pool.metric("cyclone_worker_restarts_total", reason="SIGKILL") == 1)
    # Its successor works, so it has found nothing left of that step.
    assert app.add_one.enqueue(client, 1).result(20) == 2
    assert len(told.seen("entered")) == 1
    info = client.get_step(handle.run_id, "work")
    assert (info.state, info.attempts, info.reclaims, info.last_crash) == ("completed", 1, 0, None)
    assert live.value(conn, "SELECT count(*) FROM ledger") == 1
    assert pool.end() == 0


@pytest.mark.contract("E13", "FM-021", "FM-009")
def test_only_what_was_executed_is_blamed_and_all_of_it_is_free_at_once(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    # One thread a worker: nine of ten steps are held and not begun.
    pool = start_pool(procs=2, concurrency=10, threads=1, lease=60)
    app.work_in_thread.enqueue_many(client, [app.Job(name=str(n), gate="go") for n in range(20)])
    entered = told.expect("entered", 2)
    eventually(lambda: live.states(conn) == {"running": 20})
    victim = entered[0]
    killed = time.monotonic()
    kill(victim["pid"])
    found = eventually(lambda: (now := held(conn)) and now[0] == 10 and now)
    assert time.monotonic() - killed < 1.0
    assert found == (10, 1, 9, ["killed by SIGKILL"])
    told.open("go")
    eventually(lambda: live.completed(conn, 20), log=lambda: pool.log)
    calls = told.seen("entered")
    assert len(calls) == 21 and all(one["attempt"] == 1 for one in calls)
    assert live.rows(conn, "SELECT reclaims, count(*) FROM cyclone_steps GROUP BY 1 ORDER BY 1") == [(0, 19), (1, 1)]
    assert live.value(conn, "SELECT max(attempts) FROM cyclone_steps") == 1
    assert f"worker {victim['pid']} ended: killed by SIGKILL; it was executing 1 steps: {victim['run_id']}" in pool.log
    assert pool.end() == 0


def held(conn: Conn) -> tuple[Any, ...]:
    """What a death gave back: how many steps, how many of them blamed and with an attempt, how many as they were."""
    return live.rows(
        conn,
        """SELECT count(*), count(*) FILTER (WHERE reclaims = 1 AND attempts = 1 AND last_crash IS NOT NULL),
                  count(*) FILTER (WHERE reclaims = 0 AND attempts = 0 AND last_crash IS NULL),
                  array_agg(DISTINCT last_crash) FILTER (WHERE last_crash IS NOT NULL)
           FROM cyclone_steps WHERE state = 'available'""",
    )[0]


@pytest.mark.contract("FM-006", "Q6", "E4")
def test_a_key_whose_holder_is_lost_is_held_until_that_has_ended(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=1, lease=60)
    unique = cyclone.Unique("k", on_duplicate="return")
    holder = app.work.enqueue(client, app.Job(name="holder", gate="go"), unique=unique)
    (entered,) = told.expect("entered")
    kill(entered["pid"])
    told.expect("entered", reclaims=1)
    # It is the same step, however often it was lost: nobody else may begin in its place.
    second = app.work.enqueue(client, app.Job(name="second"), unique=unique)
    assert (second.run_id, second.created) == (holder.run_id, False)
    told.open("go")
    assert holder.wait(live.LIMIT_S) == "completed"
    third = app.work.enqueue(client, app.Job(name="third"), unique=unique)
    assert third.created and third.wait(live.LIMIT_S) == "completed"
    # Nor is the key kept by a holder that no worker survives.
    bad = app.exit_9.enqueue(client, app.Job(name="bad"), unique=unique)
    told.expect("entered", name="bad")
    assert not app.exit_9.enqueue(client, app.Job(name="bad"), unique=unique).created
    assert bad.wait(live.LIMIT_S) == "discarded"
    assert app.exit_9.enqueue(client, app.Job(name="another"), unique=unique, delay=600).created
    assert pool.ready().end() == 0


# Steps that kill their own process


@pytest.mark.contract("E12", "E13", "E14", "FM-022")
@pytest.mark.parametrize(
    ("bad", "limit", "crash", "label"),
    [
        (app.exit_9, 3, "exit status 9", "exit"),
        (app.exits, 10, "exit status 9", "exit"),
        (app.segfault, 3, "killed by SIGSEGV", "SIGSEGV"),
        (app.hog, 3, "killed by SIGKILL", "SIGKILL"),
    ],
    ids=["exits", "exits with the default limit", "segfaults", "is killed for its memory"],
)
def test_a_step_that_takes_its_process_down_is_discarded_and_its_company_is_not(
    start_pool: live.Pools,
    told: live.Channel,
    client: cyclone.SyncClient,
    conn: Conn,
    bad: cyclone.ActionStep[app.Job],
    limit: int,
    crash: str,
    label: str,
) -> None:
    pool = start_pool(procs=2, concurrency=20, threads=THREADS)
    good: list[cyclone.StepHandle[None]] = []
    for n in range(10):
        if n == 2:
            last = bad.enqueue(client, app.Job(name="bad"), priority=0)
        good += app.work.enqueue_many(client, [app.Job(name=f"good {n}", sleep_s=0.1)] * 60)
        good += app.work_in_thread.enqueue_many(client, [app.Job(name=f"good {n}", sleep_s=0.01)] * 40)
    assert len(good) == 1000
    if bad is app.hog:
        for n in range(limit):
            kill_for_its_memory(told.expect("entered", n + 1, name="bad")[n]["pid"])
    assert last.wait(live.LIMIT_S) == "discarded"
    eventually(lambda: live.states(conn) == {"completed": 1000, "discarded": 1}, log=lambda: pool.log)
    assert [one["reclaims"] for one in told.seen("entered", name="bad")] == list(range(limit))
    info = client.get_step(last.run_id, bad.name)
    assert (info.error_kind, info.reclaims, info.attempts, info.last_crash) == ("crashed", limit, 1, crash)
    assert crash in (info.error or "")
    assert [(error.attempt, error.kind) for error in info.errors] == [(1, "crashed")]
    # The good ran again at most for the two deaths that they were there for; from the third on it was alone.
    calls = Counter(one["run_id"] for one in told.seen("entered", attempt=1))
    assert calls.total() == len(told.seen("entered")) and len(calls) == 1001
    assert all(1 <= calls[one.run_id] <= 3 for one in good)
    # Blamed are those that were executed, and there were some; what was held behind them is not.
    blamed = dict(
        live.rows(conn, "SELECT kind, sum(reclaims)::int FROM cyclone_steps WHERE state <> 'discarded' GROUP BY 1")
    )
    assert 0 < blamed["work"] <= 2 * 20 and blamed["work_in_thread"] <= 2 * THREADS
    assert live.rows(conn, "SELECT max(reclaims) <= 2, max(attempts) FROM cyclone_steps WHERE state = 'completed'") == [
        (True, 1)
    ]
    assert pool.metric("cyclone_isolated_steps_total") >= limit - 2
    with pytest.raises(cyclone.RunFailedError, match=crash):
        last.result(1)
    # The pool has not given up, and is not thought to be in a crash loop.
    pool.ready()
    assert pool.get("/healthz")[0] == 200
    eventually(lambda: pool.metric("cyclone_worker_restarts_total", reason=label) == limit)
    assert pool.end() == 0


THREADS = 2


def kill_for_its_memory(pid: int) -> None:
    """As the kernel does to the largest process when there is none left."""
    eventually(lambda: live.resident_kib(pid) > app.HOG_MIB << 10)
    kill(pid)


@pytest.mark.contract("R45", "FM-022", "E13")
def test_a_step_that_takes_more_memory_than_its_process_may_have_is_alone_in_its_failure(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=2, concurrency=20)
    workers = pool.workers()
    bad = app.greedy.enqueue(client, app.Job(name="bad"), priority=0)
    app.work.enqueue_many(client, [app.Job(name="good", sleep_s=0.02)] * 1000)
    assert bad.wait(live.LIMIT_S) == "discarded"
    eventually(lambda: live.states(conn) == {"completed": 1000, "discarded": 1}, log=lambda: pool.log)
    info = client.get_step(bad.run_id, "greedy")
    assert (info.error_kind, info.attempts, info.reclaims, info.error) == ("retryable", 2, 0, "MemoryError")
    assert len(told.seen("entered", name="bad")) == 2 and len(told.seen("entered", name="good")) == 1000
    assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps WHERE kind = 'work'") == [(1, 0)]
    # Nobody was replaced for it.
    assert pool.workers() == workers and pool.metric("cyclone_worker_restarts_total") == 0
    assert pool.end() == 0


@pytest.mark.contract("FM-021", "E13")
def test_a_segmentation_fault_is_named_where_people_look(
    start_pool: live.Pools, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=1)
    (pid,) = pool.workers()
    handle = app.fault.enqueue(client, app.Job())
    assert handle.wait(live.LIMIT_S) == "discarded"
    info = client.get_step(handle.run_id, "fault")
    assert info.error_kind == "crashed" and "killed by SIGSEGV" in (info.error or "")
    assert info.last_crash == "killed by SIGSEGV"
    assert f"worker {pid} ended: killed by SIGSEGV; it was executing 1 steps: {handle.run_id}" in pool.log
    eventually(lambda: pool.metric("cyclone_worker_restarts_total", reason="SIGSEGV") == 1)
    assert pool.metric("cyclone_reclaims_total", reason="crash") == 1
    # Where it happened is in the log too.
    assert "Fatal Python error: Segmentation fault" in pool.log and "in fault" in pool.log
    assert pool.ready().end() == 0


# Hosts that are lost


@pytest.mark.contract("FM-001", "E4", "E7", "F1")
def test_a_whole_pool_that_is_lost_is_made_good_by_another(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    first = start_pool(procs=2, lease=LEASE_S)
    handles = app.work.enqueue_many(client, [app.Job(name=str(n), gate="go", fail_before=2) for n in range(10)])
    told.expect("entered", 10, attempt=2)
    second = start_pool(procs=1, lease=LEASE_S)
    first.signal_all(signal.SIGKILL)
    killed = time.time()
    again = told.expect("entered", 20, attempt=2)
    assert max(one["at"] for one in again) - killed < LEASE_S + SWEEP_S + SLACK_S
    assert {one["run_id"] for one in again[10:]} == {handle.run_id for handle in handles}
    assert all(one["reclaims"] == 1 for one in again[10:])
    told.open("go")
    eventually(lambda: live.completed(conn, 10), log=lambda: second.log)
    assert live.rows(conn, "SELECT DISTINCT attempts, reclaims, last_crash FROM cyclone_steps") == [
        (2, 1, "lease expired")
    ]
    assert second.end() == 0


@pytest.mark.contract("FM-017", "E2")
def test_many_pools_that_start_in_the_same_second_share_a_backlog(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    app.work.enqueue_many(client, [app.Job(name=str(n), gate="go") for n in range(500)])
    app.charge.enqueue_many(client, range(2000))
    pools = [start_pool(procs=1, concurrency=10, metrics_port="none", ready=False) for _ in range(6)]
    # Each has its share before any of it ends.
    told.expect("entered", 60)
    assert set(Counter(one["pid"] for one in told.seen("entered")).values()) == {10}
    told.open("go")
    eventually(lambda: live.completed(conn, 2500), log=lambda: logs(start_pool))
    assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps") == [(1, 0)]
    assert live.value(conn, "SELECT count(*) FROM ledger") == 2000
    calls = Counter(one["name"] for one in told.expect("entered", 500))
    assert len(calls) == 500 and set(calls.values()) == {1}
    assert [pool.begun().end() for pool in pools] == [0] * 6


@pytest.mark.contract("FM-002")
def test_a_new_life_with_the_same_host_and_process_keeps_no_old_one_alive(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=1, lease=LEASE_S)
    (pid,) = pool.workers()
    earlier = factories.life(conn, kinds=["work"])
    conn.execute(
        "UPDATE cyclone_lives SET host = %s, pid = %s, lease_until = now() + %s * interval '1 second' WHERE id = %s",
        (socket.gethostname(), pid, LEASE_S, earlier),
    )
    assert live.value(conn, "SELECT count(*) FROM cyclone_lives WHERE pid = %s AND ended_at IS NULL", pid) == 2
    expires = time.time() + LEASE_S
    job = {"name": "held", "told": True}
    held = factories.step(conn, "work", "running", input=job, life=earlier)
    (entered,) = told.expect("entered")
    assert entered["run_id"] == held.run_id and entered["reclaims"] == 1 and entered["attempt"] == 1
    assert -0.1 < entered["at"] - expires < SWEEP_S + SLACK_S
    eventually(lambda: live.completed(conn, 1))
    assert pool.end() == 0


@pytest.mark.contract("M10", "F1")
def test_another_sweeper_takes_over_and_meanwhile_work_goes_on(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    first = start_pool(procs=1, lease=LEASE_S, poll_interval=0.1)
    (worker,) = first.workers()
    stopped = first.sweeper()
    os.kill(stopped, signal.SIGSTOP)
    # Claims and completions need no sweeper. The workers poll for themselves, if rarely.
    app.add_one.enqueue(client, 1).result(20)
    handle = app.work.enqueue(client, app.Job(gate="go"))
    (entered,) = told.expect("entered", pid=worker)
    second = start_pool(procs=1, lease=LEASE_S)
    killed = kill(worker)
    (again,) = told.expect("entered", reclaims=1)
    assert again["run_id"] == entered["run_id"] and again["at"] - killed < LEASE_S + SWEEP_S + SLACK_S
    told.open("go")
    assert handle.wait(10) == "completed"
    assert live.step(conn, handle.run_id, "last_crash") == "lease expired"
    # One that has died is replaced.
    kill(stopped)
    eventually(lambda: first.sweeper() != stopped)
    assert first.end() == 0 and second.end() == 0


@pytest.mark.contract("F2")
def test_three_sweepers_beside_a_pool_reclaim_nothing_twice(
    start_pool: live.Pools, told: live.Channel, conn: Conn, dsn: str
) -> None:
    pool = start_pool(procs=2, concurrency=50)
    command = [str(live.COMMANDS / "cyclone-sweeper"), "--interval", "0.02s", "--dsn", dsn]
    sweepers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        eventually(lambda: live.value(conn, SWEEPERS) == 4)
        with conn.transaction():
            for n in range(300):
                job = {"name": str(n), "sleep_s": 0.001}
                factories.step(conn, "work", "running", input=job, life="expired" if n % 2 else "gone", attempts=2)
        eventually(lambda: live.completed(conn, 300), log=lambda: pool.log)
    finally:
        for sweeper in sweepers:
            sweeper.terminate()
        said = [sweeper.communicate(timeout=live.LIMIT_S)[1] for sweeper in sweepers]
    assert [sweeper.returncode for sweeper in sweepers] == [0, 0, 0]
    assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps") == [(2, 1)]
    calls = told.expect("entered", 300)
    assert len(calls) == 300 and {one["attempt"] for one in calls} == {2}
    # All of them were at it, and none met an error.
    lost = [text.count("was lost in attempt") for text in (*said, pool.log)]
    assert sum(lost) == 300 and not any("interrupted" in text or "Traceback" in text for text in said)
    assert pool.end() == 0


SWEEPERS = """SELECT count(*) FROM pg_stat_activity
              WHERE datname = current_database() AND application_name = 'cyclone sweeper'"""


@pytest.mark.contract("FM-025")
def test_workers_of_a_dead_supervisor_leave_and_its_successor_is_alone(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    first = start_pool(procs=2, drain_timeout=1)
    app.work.enqueue_many(client, [app.Job(name=str(n), gate="go") for n in range(4)])
    told.expect("entered", 4)
    children = [one["pid"] for one in first.children()]
    assert len(children) == 3
    first.signal(signal.SIGKILL)
    second = start_pool(procs=2, ready=False)
    for pid in children:
        live.gone(pid, 10)
    again = told.expect("entered", 8)[4:]
    assert not {one["pid"] for one in again} & set(children)
    # They were given back by a drain, so nobody is blamed.
    assert all(one["attempt"] == 1 and one["reclaims"] == 0 for one in again)
    told.open("go")
    eventually(lambda: live.completed(conn, 4))
    assert second.end() == 0


@pytest.mark.contract("FM-025")
def test_the_sweeper_leaves_too_when_its_last_words_were_not_read(start_pool: live.Pools, conn: Conn) -> None:
    pool = start_pool(procs=1)
    children = [one["pid"] for one in pool.children()]
    pool.signal(signal.SIGSTOP)
    # In each round it now tells the supervisor that a step waits to be run alone.
    with conn.transaction():
        made = factories.step(conn, "unknown", isolated=True)
        conn.execute("UPDATE cyclone_ready SET lane = '!default' WHERE step = %s", (made.id,))
    after = live.value(conn, "SELECT clock_timestamp() + interval '1.5 seconds'")
    eventually(lambda: live.value(conn, ROUND) > after)
    pool.signal(signal.SIGKILL)
    for pid in children:
        live.gone(pid, 10)
    assert pool.log.count("the supervisor is gone: draining") == 2 and "Traceback" not in pool.log


ROUND = """SELECT max(query_start) FROM pg_stat_activity
           WHERE datname = current_database() AND application_name = 'cyclone sweeper'"""


# Leases


@pytest.mark.contract("E9", "E11", "FM-015", "FM-078", "X8")
def test_a_worker_that_wakes_after_its_lease_changes_nothing(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    pool = start_pool(procs=2, lease=LEASE_S)
    # One finds its gate open when it wakes, and completes; one only finds that its lease is lost; one wrote nothing.
    jobs = [
        app.Job(name="completes", gate="open-{reclaims}", ledger=True),
        app.Job(name="waits", gate="shut-{reclaims}", ledger=True),
        app.Job(name="plain", gate="open-{reclaims}"),
        # And however else a call may end.
        app.Job(name="fails", gate="open-{reclaims}", first="fails"),
        app.Job(name="gives up", gate="open-{reclaims}", first="gives up"),
        app.Job(name="snoozes", gate="open-{reclaims}", first="snoozes"),
        app.Job(name="fails with a write", gate="open-{reclaims}", first="fails", ledger=True),
    ]
    handles = app.work.enqueue_many(client, jobs)
    entered = told.expect("entered", len(jobs))
    told.expect("written", 3)
    slow = {one["pid"] for one in entered}
    for pid in slow:
        os.kill(pid, signal.SIGSTOP)
    if len(slow) == 2:  # each worker had some of them: others must take over
        start_pool(procs=1, lease=LEASE_S)
    again = told.expect("entered", len(jobs), reclaims=1)
    assert not {one["pid"] for one in again} & slow and {one["attempt"] for one in again} == {1}
    for gate in ("open-1", "shut-1", "open-0"):
        told.open(gate)
    assert [handle.wait(20) for handle in handles] == ["completed"] * len(jobs)
    columns = "SELECT * FROM cyclone_steps WHERE kind = 'work' ORDER BY id"
    before = live.rows(conn, columns)
    for pid in slow:
        os.kill(pid, signal.SIGCONT)
    told.expect("cancelled", name="waits", lease_lost=True)
    eventually(lambda: pool.metric("cyclone_leases_lost_total") == len(slow))
    # It goes on as a new life, and works.
    pool.ready()
    assert all(handle.result(20) == n + 1 for n, handle in enumerate(app.add_one.enqueue_many(client, range(50))))
    assert live.rows(conn, "SELECT note, count(*) FROM ledger GROUP BY 1 ORDER BY 1") == [
        ("completes", 1),
        ("fails with a write", 1),
        ("waits", 1),
    ]
    assert live.rows(conn, columns) == before
    columns = "state, attempts, reclaims, snoozes"
    assert [live.step(conn, one.run_id, columns) for one in handles] == [("completed", 1, 1, 0)] * len(jobs)
    assert live.rows(conn, "SELECT * FROM cyclone_errors") == []
    # Each thing that happened is in the log, with the step, its handler, the attempt and the reason.
    late = [line for line in pool.log.splitlines() if re.search("came too late|was refused|are dropped", line)]
    for handle in handles:
        lost = f"step {handle.run_id} (run {handle.run_id}, work) was lost in attempt 1 (lease expired)"
        assert lost in logs(start_pool)
        assert sum(f"step {handle.run_id} (work, attempt 1)" in line for line in late) == 1, late
    assert pool.metric("cyclone_refused_total") == len(jobs)
    assert all(started.end() == 0 for started in start_pool.started)


def logs(pools: live.Pools) -> str:
    return "".join(pool.log for pool in pools.started)


@pytest.mark.contract("E10", "E11", "FM-084", "FM-013")
def test_neither_a_long_handler_nor_a_blocked_loop_loses_a_lease(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=1, lease=1, stall_limit=30)
    app.work.enqueue_many(client, [app.Job(name=f"long {n}", sleep_s=4.5) for n in range(10)])
    entered = told.expect("entered", 10)
    app.block.enqueue(client, app.Job(name="blocks", sleep_s=3.5))
    (blocked,) = told.expect("entered", name="blocks")
    assert blocked["pid"] in {one["pid"] for one in entered}, "it has neighbours"
    eventually(lambda: live.completed(conn, 11), log=lambda: pool.log)
    assert len(told.seen("entered")) == 11
    assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps") == [(1, 0)]
    assert pool.metric("cyclone_leases_lost_total") == 0
    assert pool.end() == 0


@pytest.mark.contract("FM-005", "E2", "E10", "FM-013")
def test_neither_does_a_server_that_is_far_away(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn, dsn: str
) -> None:
    live.ledger(conn)
    jobs = [app.Job(name=str(n), sleep_s=4.0, ledger=n % 8 == 0) for n in range(64)]
    app.work.enqueue_many(client, jobs)
    with Proxy(dsn) as proxy:
        proxy.lag(0.2)
        pool = start_pool(proxy.dsn, procs=1, concurrency=64, completion_pool_size=8, lease=1)
        # A sweeper that is near sees a late renewal at once.
        near = start_pool(procs=1, lease=1, queues="another")
        told.expect("entered", 64)
        eventually(lambda: live.completed(conn, 64), log=lambda: pool.log)
        assert len(told.seen("entered")) == 64
        assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps") == [(1, 0)]
        assert live.value(conn, "SELECT count(*) FROM ledger") == 8
        assert pool.metric("cyclone_leases_lost_total") == 0
        assert pool.end() == 0
    assert near.end() == 0


@pytest.mark.contract("E11", "FM-084", "FM-011")
def test_a_loop_that_stands_still_is_shown_and_its_process_is_replaced(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=1, lease=1, stall_limit=2)
    app.work.enqueue(client, app.Job(name="neighbour", gate="go"))
    told.expect("entered", name="neighbour")
    handle = app.block.enqueue(client, app.Job(name="blocks", gate="go"))
    (blocked,) = told.expect("entered", name="blocks")
    (again,) = told.expect("entered", name="blocks", reclaims=1)
    assert again["pid"] != blocked["pid"] and again["attempt"] == 1
    assert 1.5 < again["at"] - blocked["at"] < 2 + 1 + SLACK_S
    told.open("go")
    eventually(lambda: live.completed(conn, 2), log=lambda: pool.log)
    assert "the event loop has stood still for" in pool.log and "in block" in pool.log
    assert f"worker {blocked['pid']} ended: exit status 75; it was executing 2 steps" in pool.log
    assert live.step(conn, handle.run_id, "last_crash") == "exit status 75"
    assert pool.end() == 0


# Parts that fail for a reason that nobody thought of

BROKEN = """
import os
from pathlib import Path
from cyclone import {module}

folder = Path(os.environ["APP_FOLDER"])
whole = {module}.{owner}.{part}

{define} broken(*args, **given):
    if (folder / "break").exists():
        (folder / "break").rename(folder / "broke")
        raise RuntimeError("broken on purpose")
    return {call}

{module}.{owner}.{part} = broken
"""


@pytest.mark.contract("FM-011", "M10")
@pytest.mark.parametrize(
    ("module", "owner", "part", "coroutine"),
    [
        ("claim", "Claimer", "batch", True),
        ("settle", "Settler", "_settle", True),
        ("lease", "Keeper", "_renew", False),
        ("sweep", "Sweeper", "_look_around", True),
        ("wake", "Listener", "_listen", True),
    ],
    ids=["claim", "settle", "lease", "sweeper", "listener"],
)
def test_a_part_that_fails_is_made_good(
    start_pool: live.Pools,
    told: live.Channel,
    client: cyclone.SyncClient,
    conn: Conn,
    tmp_path: Path,
    module: str,
    owner: str,
    part: str,
    coroutine: bool,
) -> None:
    define, call = ("async def", "await whole(*args, **given)") if coroutine else ("def", "whole(*args, **given)")
    text = BROKEN.format(module=module, owner=owner, part=part, define=define, call=call)
    # The interpreter imports a module of this name before all others, so it is there in every process of the pool.
    (tmp_path / "sitecustomize.py").write_text(text)
    pool = start_pool(procs=1, path=[tmp_path], lease=LEASE_S)
    pids = sorted(one["pid"] for one in pool.children())
    held = app.work.enqueue(client, app.Job(name="held", gate="go-{reclaims}"))
    told.expect("entered", name="held")
    (tmp_path / "break").touch()
    # Something to do for every part.
    app.add_one.enqueue(client, 0)
    conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'cyclone listen'")
    eventually((tmp_path / "broke").exists, log=lambda: pool.log)
    # Not before the lease that there was is over: until then a worker without a renewal works.
    over = live.value(conn, "SELECT max(lease_until) FROM cyclone_lives")
    eventually(lambda: live.value(conn, "SELECT clock_timestamp() > %s", over))
    handles = app.add_one.enqueue_many(client, range(100))
    told.open("go-0")
    told.open("go-1")
    assert [handle.result(10 * LEASE_S) for handle in handles] == list(range(1, 101))
    assert held.wait(10 * LEASE_S) == "completed"
    # Somebody sweeps, and somebody listens.
    expired = factories.step(conn, "add_one", "running", input=1, life="expired")
    eventually(lambda: live.step(conn, expired.id, "state") == "completed", 10 * LEASE_S, log=lambda: pool.log)
    eventually(lambda: live.value(conn, ASLEEP), 10 * LEASE_S, log=lambda: pool.log)
    # It was done again in the same process, or the process was replaced, and what it was is told.
    assert "RuntimeError: broken on purpose" in pool.log
    pool.ready()
    now = sorted(one["pid"] for one in pool.children())
    assert now == pids or pool.log.count("ended: exit status 1") == len({*now} - {*pids}) == 1
    assert pool.end() == 0


ASLEEP = "SELECT count(*) FROM cyclone_sleepers WHERE until > now()"


# What can be seen from outside


@pytest.mark.contract("B3", "FM-077")
def test_one_scrape_shows_the_whole_pool_and_stays_true_after_a_kill(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=3, concurrency=20, lease=LEASE_S)
    app.add_one.enqueue_many(client, range(500))
    app.work.enqueue_many(client, [app.Job(fail_before=2) for _ in range(10)])
    eventually(lambda: live.completed(conn, 510))
    eventually(lambda: pool.metric("cyclone_steps_total", outcome="completed") == 510)
    by_outcome = {labels["outcome"]: value for labels, value in pool.series("cyclone_steps_total", kind="work")}
    assert by_outcome == {"completed": 10, "retried": 10}
    assert pool.metric("cyclone_steps_total", kind="add_one") == 500
    assert pool.metric("cyclone_step_failures_total", error_kind="retryable") == 10
    assert pool.metric("cyclone_claimed_steps_total") == 520
    assert pool.metric("cyclone_step_wait_seconds_count") == 520
    eventually(lambda: pool.metric("cyclone_step_run_seconds_count") == 520)
    app.work.enqueue_many(client, [app.Job(name=str(n), gate="go") for n in range(30)])
    entered = told.expect("entered", 50)[20:]
    eventually(lambda: pool.metric("cyclone_steps_running") == 30)
    assert pool.metric("cyclone_slots") == 60 and pool.metric("cyclone_workers", state="ready") == 3
    victim = entered[0]["pid"]
    lost = sum(one["pid"] == victim for one in entered)
    kill(victim)
    told.expect("entered", 50 + lost)
    killed = time.monotonic()
    eventually(lambda: gauges(pool) == (30, 60, 3))
    assert time.monotonic() - killed < LEASE_S + SLACK_S
    # And what was counted before is not lost with its process.
    assert pool.metric("cyclone_steps_total", outcome="completed") == 510
    assert pool.metric("cyclone_reclaims_total", reason="crash") == lost
    told.open("go")
    eventually(lambda: live.completed(conn, 540))
    eventually(lambda: gauges(pool) == (0, 60, 3))
    assert pool.metric("cyclone_steps_total", outcome="completed") == 540
    assert pool.end() == 0


def gauges(pool: live.Live) -> tuple[float, float, float]:
    return (
        pool.metric("cyclone_steps_running"),
        pool.metric("cyclone_slots"),
        pool.metric("cyclone_workers", state="ready"),
    )


@pytest.mark.contract("FM-078")
def test_what_goes_wrong_is_logged_with_step_handler_attempt_and_reason_and_counted(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    pool = start_pool(procs=1)
    late = app.late.enqueue(client, app.Job())
    cancelled = app.work.enqueue(client, app.Job(name="cancelled", gate="never"))
    lost = app.work.enqueue(client, app.Job(name="lost", gate="go-{reclaims}"))
    (entered,) = told.expect("entered", name="cancelled")
    told.expect("entered", name="lost")
    assert late.wait(10) == "discarded"
    assert cancelled.cancel("not wanted")
    told.expect("cancelled", name="cancelled")
    eventually(lambda: f"step {cancelled.run_id} (work, attempt 1) is cancelled while it runs: not wanted" in pool.log)
    eventually(lambda: pool.metric("cyclone_refused_total", reason="cancelled") == 1)
    kill(entered["pid"])
    told.open("go-1")
    assert lost.wait(live.LIMIT_S) == "completed"
    assert f"step {late.run_id} (late, attempt 1) timed out" in pool.log
    eventually(
        lambda: f"step {lost.run_id} (run {lost.run_id}, work) was lost in attempt 1 (killed by SIGKILL)" in pool.log
    )
    assert pool.metric("cyclone_step_failures_total", kind="late", error_kind="timeout") == 1
    assert pool.metric("cyclone_reclaims_total", reason="crash") == 1
    assert pool.metric("cyclone_worker_restarts_total", reason="SIGKILL") == 1
    assert pool.end() == 0
