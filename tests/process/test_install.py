"""Any number of processes that begin at once find or make the same schema."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from process import live

from cyclone import migrate

Conn = psycopg.Connection[Any]

JOBS = """
import cyclone
from cyclone import Context

@cyclone.step("echo")
async def echo(ctx: Context, n: int) -> int:
    return n
"""


@pytest.mark.contract("FM-074")
def test_processes_that_migrate_and_work_at_once_on_an_empty_database_all_succeed(
    empty_dsn: str, tmp_path: Path
) -> None:
    """As the containers of a service do that start together: each migrates, and then works."""
    (tmp_path / "install_jobs.py").write_text(JOBS)
    env = {**os.environ, "CYCLONE_DSN": empty_dsn}
    bin = Path(sys.executable).parent
    script = f"{bin}/cyclone migrate up --json && exec {bin}/cyclone-pool install_jobs --procs 1 --metrics-port none"
    log = tmp_path / "log"
    with log.open("ab") as out:
        pools = [
            subprocess.Popen(
                ["sh", "-c", script], cwd=tmp_path, env=env, stdout=out, stderr=out, start_new_session=True
            )
            for _ in range(4)
        ]
    try:
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            lives = "SELECT count(*) FROM cyclone_lives WHERE ended_at IS NULL"
            live.eventually(
                lambda: (
                    live.value(conn, "SELECT to_regclass('cyclone_lives') IS NOT NULL") and live.value(conn, lives) == 4
                ),
                log=log.read_text,
            )
            done = live.rows(conn, "SELECT version, name FROM cyclone_migrations ORDER BY 1")
            assert done == [(one.version, one.name) for one in migrate.migrations()]
            assert live.rows(conn, "SELECT kind, version FROM cyclone_kinds") == [("echo", 1)]
            # The last installed nothing, whoever it was, and none has failed.
            for pool in pools:
                pool.terminate()
            assert [pool.wait(live.LIMIT_S) for pool in pools] == [0] * 4, log.read_text()
    finally:
        for pool in pools:
            pool.kill()
            pool.wait()
    text = log.read_text()
    assert text.count("0001_init") == 1 and "Traceback" not in text


@pytest.mark.contract("FM-074")
@pytest.mark.parametrize("transaction", [True, False])
def test_an_old_schema_that_many_upgrade_at_once_is_upgraded_once(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, transaction: bool
) -> None:
    text = "CREATE INDEX more ON {schema}.cyclone_runs (state);\n"
    text = text if transaction else text.replace("INDEX", "INDEX CONCURRENTLY IF NOT EXISTS")
    more = migrate.Migration(
        version=migrate.LATEST + 1, name="more", text=text, transaction=transaction, breaking=False
    )
    everything = (*migrate.migrations(), more)
    monkeypatch.setattr(migrate, "migrations", lambda: everything)
    together = threading.Barrier(8)

    def start(_: int) -> list[str]:
        together.wait()
        return migrate.up(dsn, lock_timeout=20)

    with ThreadPoolExecutor(8) as pool:
        done = [name for names in pool.map(start, range(8)) for name in names]
    assert done == [str(more)]
    assert live.value(conn, "SELECT count(*) FROM cyclone_migrations WHERE name = 'more'") == 1
    assert live.value(conn, "SELECT bool_and(indisvalid) FROM pg_index WHERE indexrelid = 'more'::regclass")
