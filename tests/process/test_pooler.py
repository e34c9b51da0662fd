"""A pooler in transaction mode between Cyclone and the database: real PgBouncer."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from process import app, live
from process.live import eventually
from psycopg import conninfo

import cyclone

Conn = psycopg.Connection[Any]

# Debian puts it where only root looks.
PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="there is no pgbouncer here: apt-get install pgbouncer")

SERVER_CONNECTIONS = 6

INI = """
[databases]
{dbname} = host={host} port={port} dbname={dbname} user={user} {password}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 200
admin_users = admin
# Nothing that a client sets may be cleaned up behind its back.
server_reset_query =
log_connections = 0
log_disconnections = 0
logfile =
"""


class Bouncer:
    def __init__(self, target_dsn: str, folder: Path) -> None:
        target = {key: str(value) for key, value in conninfo.conninfo_to_dict(target_dsn).items()}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._log = folder / "pgbouncer.log"
        ini = folder / "pgbouncer.ini"
        ini.write_text(
            INI.format(
                **{"host": "127.0.0.1", "port": "5432", "user": "postgres", **target}
                | {"password": f"password={target['password']}" if "password" in target else ""},
                listen_port=port,
                size=SERVER_CONNECTIONS,
            )
        )
        # It refuses to run as root.
        user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        if user is not None:
            for path in (folder, ini):
                os.chown(path, user.pw_uid, user.pw_gid)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [str(PGBOUNCER), str(ini)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                **({} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}),
            )
        self.dsn = conninfo.make_conninfo(target_dsn, host="127.0.0.1", port=port, sslmode="disable")
        self._admin = conninfo.make_conninfo("", host="127.0.0.1", port=port, user="admin", dbname="pgbouncer")
        eventually(self._answers, log=self._log.read_text)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            psycopg.connect(self.dsn).close()
        except psycopg.OperationalError:
            return False
        return True

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


@pytest.fixture
def bouncer(dsn: str) -> Iterator[Bouncer]:
    # Not in pytest's folder, which other users may not enter.
    with tempfile.TemporaryDirectory(prefix="cyclone-pgbouncer-") as folder:
        bouncer = Bouncer(dsn, Path(folder))
        try:
            yield bouncer
        finally:
            bouncer.close()


def behind(conn: Conn) -> list[tuple[int, str, str]]:
    """The pooler's connections to the server: process, state, last statement."""
    return live.rows(
        conn,
        """SELECT pid, state, left(query, 80) FROM pg_stat_activity
           WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'""",
    )


SETTINGS = ("lock_timeout", "statement_timeout", "synchronous_commit", "enable_seqscan", "application_name")


@pytest.mark.contract("F7")
def test_a_producer_prepares_nothing_behind_a_pooler(dsn: str, bouncer: Bouncer) -> None:
    for way, prepared in ((dsn, 1), (bouncer.dsn, 0)):
        with cyclone.SyncClient(way) as client:
            for n in range(10):
                app.charge.enqueue(client, n)
            assert client._pool is not None
            with client._pool.connection() as own:  # behind the pooler, the connection that was used last is used again
                assert live.value(own, "SELECT count(*) FROM pg_prepared_statements") == prepared


@pytest.mark.contract("F6", "F7", "FM-030")
def test_everything_works_through_a_pooler_in_transaction_mode(
    start_pool: live.Pools, told: live.Channel, conn: Conn, bouncer: Bouncer
) -> None:
    live.ledger(conn)
    with psycopg.connect(bouncer.dsn, autocommit=True) as other:
        before = [live.value(other, f"SHOW {name}") for name in SETTINGS[:-1]]
    pool = start_pool(bouncer.dsn, procs=2, notify=False, poll_interval=0.1, completion_pool_size=2, lease=3)
    with cyclone.SyncClient(bouncer.dsn) as client:
        # Producers, some of them at once, in every form.
        def submit() -> None:
            for n in range(40):
                app.charge.enqueue(client, n)

        threads = [threading.Thread(target=submit) for _ in range(5)]
        for thread in threads:
            thread.start()
        app.charge_in_thread.enqueue_many(client, range(100))
        app.add_one.enqueue_many(client, range(2500))  # by COPY
        app.add_one_in_thread.enqueue_many(client, range(100), method="insert")
        for thread in threads:
            thread.join()
        with psycopg.connect(bouncer.dsn) as tx:
            joined = app.charge.enqueue_tx(client, tx, 7)
        with psycopg.connect(bouncer.dsn) as tx:
            app.charge.enqueue_tx(client, tx, 8)
            tx.rollback()
        # What fails, is late, comes back, is cancelled and is locked by somebody else.
        failing = app.work.enqueue_many(client, [app.Job(fail_before=3, ledger=True) for _ in range(20)])
        late = app.late.enqueue(client, app.Job())
        snoozing = app.snooze_once.enqueue(client, 0.1)
        cancelled = app.work.enqueue(client, app.Job(name="cancelled", gate="never", ledger=True))
        locked = app.work.enqueue(client, app.Job(name="locked", gate="go"))
        told.expect("written", name="cancelled")
        told.expect("entered", name="locked")
        assert cancelled.cancel("not wanted")
        with conn.transaction():
            conn.execute("SELECT FROM cyclone_steps WHERE run_id = %s FOR UPDATE", (int(locked.run_id),))
            told.open("go")
            told.expect("left", name="locked")
            # It holds up nobody else.
            assert app.add_one.enqueue(client, 1).result(20) == 2
        assert locked.wait(20) == "completed"
        assert joined.result(20) == 7 and snoozing.wait(20) == "completed" and late.wait(20) == "discarded"
        assert all(handle.wait(20) == "completed" for handle in failing)
        # A worker dies in the middle of a transaction on a pooled connection.
        victim = app.work.enqueue(client, app.Job(name="killed", gate="again", ledger=True))
        (written,) = told.expect("written", name="killed")
        os.kill(written["pid"], signal.SIGKILL)
        told.expect("written", 2, name="killed")
        told.open("again")
        assert victim.wait(20) == "completed"
    total = 200 + 100 + 2500 + 100 + 1 + 20 + 1 + 1 + 1 + 1
    eventually(lambda: live.states(conn) == {"completed": total, "cancelled": 1, "discarded": 1}, log=lambda: pool.log)
    assert live.value(conn, "SELECT count(*) FROM ledger") == 200 + 100 + 1 + 20 + 1
    assert live.value(conn, "SELECT count(*) FROM (SELECT DISTINCT run_id FROM ledger) l") == 200 + 100 + 1 + 20 + 1
    assert pool.metric("cyclone_leases_lost_total") == 0
    # No pooled connection is left inside a transaction, nor with anything that somebody set.
    idle = eventually(lambda: (found := behind(conn)) and {state for _, state, _ in found} == {"idle"} and found)
    assert len(idle) <= SERVER_CONNECTIONS
    with psycopg.connect(bouncer.dsn) as other:
        seen: set[int] = set()
        others = [psycopg.connect(bouncer.dsn) for _ in range(len(idle))]
        try:
            for one in others:  # each in a transaction, so each on a connection of its own
                seen.add(live.value(one, "SELECT pg_backend_pid()"))
                assert [live.value(one, f"SHOW {name}") for name in SETTINGS[:-1]] == before
                assert live.value(one, "SELECT count(*) FROM pg_prepared_statements") == 0
        finally:
            for one in others:
                one.close()
        assert len(seen) == len(idle)
    for trouble in ("prepared statement", "was interrupted", "Traceback", "is aborted", "failed and is tried again"):
        assert trouble not in pool.log, pool.log
    assert pool.end() == 0


@pytest.mark.contract("FM-030")
def test_without_the_setting_the_start_says_so(
    start_pool: live.Pools, told: live.Channel, conn: Conn, bouncer: Bouncer
) -> None:
    pool = start_pool(bouncer.dsn, procs=1, ready=False)
    eventually(lambda: "pooler" in pool.log, log=lambda: pool.log)
    assert "notify=False" in pool.log and "CYCLONE_NOTIFY" in pool.log
    assert pool.end() == 0
