"""The database goes away, comes back, cuts its connections, has no room: nobody dies of it, and work goes on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from process import app, live
from process.live import eventually

import cyclone
from cyclone import db, doctor, embedded, migrate

Conn = psycopg.Connection[Any]

SLOTS = 12

ENGINE = """SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name ~ '^cyclone .'"""
CUT = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name ~ '^cyclone .'"""


@pytest.fixture(scope="module")
def server() -> Iterator[embedded.Server]:
    """A server of these tests' own, which may be stopped, with few slots."""
    with live.server(max_connections=SLOTS, fsync=False) as server:
        migrate.up(server.dsn(), schema="public")
        yield server


@pytest.fixture
def small(server: embedded.Server, tmp_path: Path, told: live.Channel) -> Iterator[live.Pools]:
    """Starts pools on that server."""
    with live.pools(server.dsn(), tmp_path) as pools:
        yield pools
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        damages = doctor.deep(conn)
        conn.execute("DROP TABLE IF EXISTS ledger")
        conn.execute("TRUNCATE cyclone_steps, cyclone_ready, cyclone_claims, cyclone_lives, cyclone_errors")
    assert not damages


def connected(server: embedded.Server) -> Conn:
    return psycopg.connect(server.dsn(), autocommit=True)


# Connections that are cut


@pytest.mark.contract("FM-028", "M9", "F5", "FM-040", "X9", "FM-031")
def test_all_connections_are_cut_again_and_again(
    start_pool: live.Pools, told: live.Channel, client: cyclone.SyncClient, conn: Conn
) -> None:
    live.ledger(conn)
    pool = start_pool(procs=2, concurrency=20, lease=5)
    pids = sorted(one["pid"] for one in pool.children())
    # Connections that were used and are idle when they are cut: whoever gets one next must not fail for it.
    app.charge_once.enqueue_many(client, range(200))
    app.charge_in_thread.enqueue_many(client, range(50))
    eventually(lambda: live.completed(conn, 250), log=lambda: pool.log)
    assert live.value(conn, CUT) >= 8
    app.charge_once.enqueue_many(client, range(200))
    app.charge_in_thread.enqueue_many(client, range(50))
    eventually(lambda: live.completed(conn, 500), log=lambda: pool.log)
    assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps") == [(1, 0)]
    # And in the middle of everything.
    app.charge.enqueue_many(client, range(1500), max_attempts=20)
    app.add_one.enqueue_many(client, range(1500))
    for _ in range(5):
        done = live.states(conn)["completed"]
        eventually(lambda: live.states(conn)["completed"] > done + 50, log=lambda: pool.log)  # noqa: B023
        conn.execute(CUT.encode())
    eventually(lambda: live.completed(conn, 3500), log=lambda: pool.log)
    live_rows = live.value(conn, "SELECT count(*) FROM cyclone_steps WHERE kind <> 'add_one'")
    assert live.value(conn, "SELECT count(*) FROM ledger") == live_rows == 2000
    assert live.value(conn, "SELECT count(*) FROM (SELECT DISTINCT run_id FROM ledger) l") == 2000
    # A connection that is cut under the handler's own statement is a failure of that attempt, and the only one.
    assert (
        live.rows(
            conn,
            """SELECT s.id, s.attempts, s.reclaims, count(e.step) FROM cyclone_steps s
           LEFT JOIN cyclone_errors e ON e.step = s.id GROUP BY s.id
           HAVING s.attempts <> 1 + count(e.step) OR s.reclaims > 0""",
        )
        == []
    )
    messages = {text for (text,) in live.rows(conn, "SELECT DISTINCT message FROM cyclone_errors")}
    assert all(
        re.search("terminating connection|connection is closed|server closed|the connection", text) for text in messages
    )
    assert live.value(conn, "SELECT count(*) FROM cyclone_steps WHERE kind = 'add_one' AND attempts <> 1") == 0
    # All have come back by themselves, in the same processes, and hear of work at once.
    assert sorted(one["pid"] for one in pool.children()) == pids
    assert pool.metric("cyclone_leases_lost_total") == 0
    eventually(lambda: live.value(conn, ASLEEP) > 0)
    waits = []
    for _ in range(7):
        begun = time.time()
        handle = app.work.enqueue(client, app.Job())
        waits.append(told.expect("entered", run_id=handle.run_id)[0]["at"] - begun)
    assert statistics.median(waits) < 0.25
    assert pool.end() == 0


ASLEEP = "SELECT count(*) FROM cyclone_sleepers WHERE until > now()"


@pytest.mark.contract("M9", "FM-028", "FM-016", "X4")
def test_a_server_that_crashes_under_load_loses_nothing(
    small: live.Pools, told: live.Channel, server: embedded.Server
) -> None:
    with connected(server) as conn:
        live.ledger(conn)
        with cyclone.SyncClient(server.dsn()) as client:
            app.charge.enqueue_many(client, range(1200), max_attempts=20)
    pool = small(procs=1, completion_pool_size=2, concurrency=10, lease=60)
    (pid,) = pool.workers()
    for enough in (200, 500):
        with connected(server) as conn:
            eventually(lambda: live.value(conn, "SELECT count(*) FROM ledger") > enough, log=lambda: pool.log)  # noqa: B023
        server.restart("immediate")
    with connected(server) as conn:
        eventually(lambda: live.completed(conn, 1200), log=lambda: pool.log)
        live.exact(conn, 1200)
        assert live.value(conn, "SELECT sum(amount) FROM ledger") == 1199 * 1200 // 2
        assert live.value(conn, "SELECT max(reclaims) FROM cyclone_steps") == 0
    assert pool.workers() == [pid] and pool.end() == 0


@pytest.mark.contract("FM-035", "M8", "M9", "FM-008")
def test_an_outage_is_sat_out(small: live.Pools, told: live.Channel, server: embedded.Server) -> None:
    pool = small(procs=1, lease=60)
    with cyclone.SyncClient(server.dsn()) as client:
        held = app.work.enqueue(client, app.Job(name="held", gate="go", outside=True))
        told.expect("acted")
    pids = sorted(one["pid"] for one in pool.children())
    eventually(lambda: pool.get("/readyz")[0] == 200)
    server.stop()
    stopped = time.monotonic()
    try:
        status, why = eventually(lambda: (found := pool.get("/readyz"))[0] == 503 and found, log=lambda: pool.log)
        assert time.monotonic() - stopped < 8 and "does not reach the database" in why
        assert pool.get("/healthz")[0] == 200, "to restart the pool would not help"
        told.open("go")  # it ends while its outcome cannot be written
        told.expect("left", name="held")
        # Long enough for the pauses to have grown as far as they do.
        eventually(lambda: "goes on in 5.0 s" in pool.log, log=lambda: pool.log)
        assert pool.process.poll() is None and pool.get("/metrics")[0] == 200
        assert sorted(one["pid"] for one in pool.children()) == pids
        lines = pool.log.count("\n")
        assert lines < 100, pool.log
    finally:
        server.start()
    back = time.monotonic()
    with cyclone.SyncClient(server.dsn()) as client:
        assert app.add_one.enqueue(client, 1).result(30) == 2
        eventually(lambda: pool.get("/readyz")[0] == 200, log=lambda: pool.log)
        assert held.run_id and client.get_step(held.run_id, "work").state in ("running", "completed")
        eventually(lambda: client.get_step(held.run_id, "work").state == "completed")
        # Its lease had held all the time, so the outcome was written when the server was back, and nothing ran twice.
        info = client.get_step(held.run_id, "work")
        assert (info.attempts, info.reclaims) == (1, 0) and len(told.seen("entered", name="held")) == 1
    assert time.monotonic() - back < 30
    assert sorted(one["pid"] for one in pool.children()) == pids
    assert all(one["restarts"] == 0 for one in pool.children())
    assert pool.end() == 0


@pytest.mark.contract("FM-008", "FM-015", "M8")
def test_an_outage_longer_than_the_lease_gives_everything_up(
    small: live.Pools, told: live.Channel, server: embedded.Server
) -> None:
    pool = small(procs=1, lease=1)
    (pid,) = pool.workers()
    with connected(server) as conn:
        live.ledger(conn)
    with cyclone.SyncClient(server.dsn()) as client:
        handles = app.work.enqueue_many(
            client,
            [app.Job(name="waits", gate="go-{reclaims}"), app.Job(name="writes", gate="go-{reclaims}", ledger=True)],
        )
        told.expect("entered", 2)
        told.expect("written")
        server.stop("immediate")
        told.open("go-0")  # both end, and their outcomes cannot be written while the lease holds
        eventually(lambda: "outcomes are dropped" in pool.log, log=lambda: pool.log)
        server.start()
        told.expect("entered", 4)
        told.open("go-1")
        told.open("go-2")
        assert [handle.wait(20) for handle in handles] == ["completed"] * 2
    with connected(server) as conn:
        assert live.value(conn, "SELECT count(*) FROM ledger") == 1
        # Nobody died, and an attempt failed only where a handler lost its own transaction.
        assert live.step(conn, handles[0].run_id, "attempts") == 1
    assert pool.workers() == [pid]
    assert pool.metric("cyclone_leases_lost_total") >= 1
    assert pool.end() == 0


@pytest.mark.contract("FM-029", "M9", "FM-028")
def test_a_server_that_turns_read_only_is_left_until_one_can_write_again(
    small: live.Pools, told: live.Channel, server: embedded.Server
) -> None:
    pool = small(procs=1, lease=60)
    pids = sorted(one["pid"] for one in pool.children())
    with connected(server) as conn, cyclone.SyncClient(server.dsn()) as client:
        live.ledger(conn)
        jobs = [app.Job(name="plain", gate="go"), app.Job(name="writes", gate="go-{reclaims}", ledger=True)]
        handles = app.work.enqueue_many(client, jobs)
        told.expect("written")
        told.expect("entered", 2)
        turn(conn, "on")
        try:
            told.open("go")
            told.expect("left", name="plain")
            # Long enough for the pauses to have grown, so that nobody turns in a hot loop.
            eventually(lambda: "goes on in 3.2 s" in pool.log, log=lambda: pool.log)
            assert "read-only" in pool.log and pool.log.count("\n") < 100, pool.log
            assert live.states(conn) == {"running": 2}
        finally:
            turn(conn, "off")
        # What had ended was kept and is recorded now; a transaction of a handler that goes on is none the worse.
        assert handles[0].wait(live.LIMIT_S) == "completed"
        told.open("go-0")
        assert handles[1].wait(live.LIMIT_S) == "completed"
        assert app.add_one.enqueue(client, 1).result(live.LIMIT_S) == 2
        assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps") == [(1, 0)]
        assert len(told.seen("entered")) == 2 and live.value(conn, "SELECT count(*) FROM ledger") == 1
    assert sorted(one["pid"] for one in pool.children()) == pids
    assert pool.end() == 0


def turn(conn: Conn, read_only: str) -> None:
    """Makes the server one that only reads, as a standby is, or one that writes again."""
    conn.execute("SET default_transaction_read_only = off")
    conn.execute(f"ALTER SYSTEM SET default_transaction_read_only = {read_only}".encode())
    conn.execute("SELECT pg_reload_conf()")


# Too few slots


@pytest.mark.contract("FM-034")
def test_surplus_workers_wait_for_a_slot_and_come_up_later(
    small: live.Pools, told: live.Channel, server: embedded.Server
) -> None:
    taken = [psycopg.connect(server.dsn()) for _ in range(SLOTS - 5)]
    try:
        pool = small(procs=3, ready=False, completion_pool_size=1)
        eventually(lambda: "too many clients" in pool.log, log=lambda: pool.log)
        assert "up to 14 database connections" in pool.log
        eventually(lambda: pool.log.count("too many clients") > 6, log=lambda: pool.log)
        # Nobody dies of it.
        pids = {one["pid"]: one["restarts"] for one in pool.children()}
        assert pool.process.poll() is None and len(pids) == 4 and set(pids.values()) == {0}
        assert len(pool.workers()) < 3 and "ended" not in pool.log
    finally:
        for one in taken:
            one.close()
    pool.ready()
    assert {one["pid"]: one["restarts"] for one in pool.children()} == pids
    with cyclone.SyncClient(server.dsn()) as client:
        assert app.add_one.enqueue(client, 1).result(20) == 2
    assert pool.end() == 0


# Connections and forks

IMPORTS_A_POOL = """
import os
import psycopg_pool
import cyclone

pool = psycopg_pool.ConnectionPool(os.environ["CYCLONE_DSN"], min_size=2, max_size=4, open=True)
pool.wait()

@cyclone.step("whose")
def whose(ctx, n: int) -> list[int]:
    with pool.connection() as conn:
        (backend,) = conn.execute("SELECT pg_backend_pid()").fetchone()
        (echo,) = conn.execute("SELECT %s::int", (n,)).fetchone()
    assert echo == n
    tx = ctx.completion_tx()
    (own,) = tx.execute("SELECT pg_backend_pid()").fetchone()
    return [os.getpid(), backend, own]

def run():
    import sys
    sys.exit(cyclone.Pool("forky", procs=3, metrics_port=0, threads=4).run())

if __name__ == "__main__":
    run()
"""


@pytest.mark.contract("FM-033")
def test_a_pool_opened_at_import_belongs_to_one_process(
    start_pool: live.Pools, client: cyclone.SyncClient, conn: Conn, tmp_path: Path
) -> None:
    (tmp_path / "forky.py").write_text(IMPORTS_A_POOL)
    pool = start_pool(procs=3, target="forky", threads=4)
    # The supervisor has imported none of it, and has no connection to inherit.
    assert not sockets_to(conn, pool.pid)

    @cyclone.step("whose")
    def whose(ctx: cyclone.SyncContext, n: int) -> list[int]:
        raise AssertionError

    answers: list[list[int]] = []

    def ask() -> bool:
        answers.extend(handle.result(20) for handle in whose.enqueue_many(client, range(300)))
        return len({pid for pid, _, _ in answers}) == 3

    eventually(ask)
    owners: dict[int, set[int]] = {}
    for pid, *backends in answers:
        for backend in backends:
            owners.setdefault(backend, set()).add(pid)
    assert all(len(pids) == 1 for pids in owners.values())
    # A worker that is killed takes none of another's connections with it.
    victim = pool.workers()[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in pool.workers() and len(pool.workers()) == 3)
    assert all(handle.result(20) for handle in whose.enqueue_many(client, range(100)))
    assert live.value(conn, "SELECT count(*) FROM cyclone_errors") == 0
    assert "Traceback" not in pool.log and pool.end() == 0


@pytest.mark.contract("FM-033")
def test_a_pool_opened_before_the_fork_is_warned_of(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "forky.py").write_text(IMPORTS_A_POOL)
    done = subprocess.Popen(
        [sys.executable, "-c", "import forky; forky.run()"],
        cwd=tmp_path,
        env={**os.environ, "CYCLONE_DSN": dsn},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert done.stderr is not None
        line = next(line for line in done.stderr if "other threads" in line)
        assert "WARNING" in line and "has opened nothing" in line
    finally:
        done.terminate()
        done.communicate(timeout=live.LIMIT_S)


def sockets_to(conn: Conn, pid: int) -> set[str]:
    """The sockets of a process that lead to the server."""
    port = f":{conn.info.port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    leading = {f"socket:[{line[9]}]" for line in lines if line[2].endswith(port)}
    found: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        found.add(os.readlink(descriptor))
    return found & leading


# Packets that vanish


@pytest.mark.contract("FM-036")
async def test_a_connection_that_carries_nothing_is_noticed_within_a_minute(dsn: str) -> None:
    conn = await db.connect(dsn, application_name="test")
    thread = await asyncio.to_thread(db.connect_sync, dsn, application_name="test")
    try:
        for one in (conn, thread):
            end = socket.socket(fileno=os.dup(one.fileno()))
            try:
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle, interval, count = (
                    end.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                # Nothing is sent: keepalives. Something was: its acknowledgement is missed.
                assert idle + interval * count <= 60
                assert 0 < end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
            finally:
                end.close()
        # And the server notices when the client is gone, so that its locks do not stay.
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
        cur = await conn.execute("SELECT " + ", ".join(f"current_setting('{name}')::int" for name in names))
        row = await cur.fetchone()
        assert row is not None and row[0] + row[1] * row[2] <= 60
    finally:
        await conn.close()
        thread.close()
