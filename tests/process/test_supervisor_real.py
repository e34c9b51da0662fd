"""A whole pool: real workers, sweeper and database, over HTTP and by its signals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

LIMIT_S = 30.0

JOBS = """
import asyncio, os, sys, time
from cyclone import registry

@registry.step("quick")
async def quick(ctx, n: int) -> int:
    return n + 1

@registry.step("slow")
async def slow(ctx, path: str) -> None:
    with open(path, "w") as fifo:      # opens when the test reads: the handler runs
        fifo.write(str(os.getpid()))
    await asyncio.sleep(600)

@registry.step("stuck")
def stuck(ctx, path: str) -> None:
    with open(path, "w") as fifo:
        fifo.write(str(os.getpid()))
    while True:
        time.sleep(600)                # takes no notice of anything
"""

POOL = """
import sys
from cyclone import supervisor
sys.exit(supervisor.Pool("pool_jobs", procs=2, metrics_port=0, dsn=sys.argv[1], lease=60, drain_timeout=0.5).run())
"""

ENQUEUE = """
import asyncio, sys, json
import pool_jobs
from cyclone import client
async def main():
    async with client.Client(sys.argv[1]) as c:
        handle = await getattr(pool_jobs, sys.argv[2]).enqueue(c, json.loads(sys.argv[3]))
        print(handle.run_id)
asyncio.run(main())
"""


def eventually(look: Callable[[], Any]) -> Any:
    """Asks again until the answer is true: for what can only be asked from outside."""
    deadline = time.monotonic() + LIMIT_S
    while not (answer := look()):
        assert time.monotonic() < deadline, f"it never came true: {answer!r}"
        select.select([], [], [], 0.02)
    return answer


class RealPool:
    def __init__(self, dsn: str, folder: Path) -> None:
        (folder / "pool_jobs.py").write_text(JOBS)
        self.dsn = dsn
        self.folder = folder
        self.log = folder / "log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", POOL, dsn], cwd=folder, stdout=out, stderr=out, start_new_session=True
            )
        self.url = ""
        eventually(self._address)

    def _address(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        head, found, tail = self.log.read_text().partition("metrics and health at ")
        self.url = tail.split("\n")[0] if "\n" in tail else ""
        return bool(self.url)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.read().decode()

    def metric(self, name: str) -> float:
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.get("/readyz")[0] == 200

    def enqueue(self, step: str, value: object) -> int:
        done = subprocess.run(
            [sys.executable, "-c", ENQUEUE, self.dsn, step, json.dumps(value)],
            cwd=self.folder, capture_output=True, text=True,
        )  # fmt: skip
        assert not done.returncode, done.stderr
        return int(done.stdout)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def pool(dsn: str, tmp_path: Path) -> Any:
    pool = RealPool(dsn, tmp_path)
    try:
        yield pool
    finally:
        pool.kill()


def state(conn: psycopg.Connection[Any], step: int) -> tuple[Any, ...]:
    row = conn.execute(
        "SELECT state, attempts, reclaims, last_crash FROM cyclone_steps WHERE id = %s", [step]
    ).fetchone()
    assert row is not None
    return row


@pytest.mark.contract("B3")
def test_one_port_shows_the_whole_pool(pool: RealPool, conn: psycopg.Connection[Any]) -> None:
    eventually(pool.ready)
    steps = [pool.enqueue("quick", n) for n in range(2)]
    eventually(lambda: all(state(conn, step)[0] == "completed" for step in steps))
    status, body = pool.get("/healthz")
    assert status == 200
    assert sorted(child["role"] for child in json.loads(body)["children"]) == ["sweeper", "worker", "worker"]
    eventually(lambda: pool.metric("cyclone_slots") == 200)
    counted = 'cyclone_steps_total{kind="quick",outcome="completed",queue="default"}'
    eventually(lambda: pool.metric(counted) == 2)
    assert pool.metric('cyclone_workers{state="ready"}') == 2
    assert pool.end() == 0


@pytest.mark.contract("E13")
def test_a_worker_that_is_killed_is_named_counted_and_replaced(
    pool: RealPool, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    eventually(pool.ready)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    step = pool.enqueue("slow", str(fifo))
    pid = int(fifo.read_text())
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert int(fifo.read_text()) != pid  # it runs again
    assert time.monotonic() - killed < 10.0  # measured: 0.02 s; its lease would have held it for a minute
    assert state(conn, step) == ("running", 1, 1, "killed by SIGKILL")
    assert pool.metric('cyclone_worker_restarts_total{reason="SIGKILL"}') == 1
    eventually(lambda: pool.metric("cyclone_slots") == 200)
    assert f"worker {pid} ended: killed by SIGKILL; it was executing 1 steps: {step}" in pool.log.read_text()
    assert pool.end() == 0
    # Given back by the drain: nothing is blamed, and it is still the first attempt that runs again.
    assert state(conn, step)[:3] == ("available", 1, 1)


def test_a_target_that_cannot_be_imported_ends_the_pool_with_the_reason(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "pool_jobs.py").write_text("import there_is_no_such_module\n")
    done = subprocess.run(
        [sys.executable, "-c", POOL, dsn], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 1
    assert "giving up: no worker can start" in done.stderr and "there_is_no_such_module" in done.stderr


def test_a_handler_that_takes_no_notice_does_not_hold_the_end(
    pool: RealPool, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    eventually(pool.ready)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    step = pool.enqueue("stuck", str(fifo))
    fifo.read_text()
    assert pool.end() == 0
    assert "is killed" not in pool.log.read_text()
    assert state(conn, step)[0] == "available"


def test_all_leave_when_the_supervisor_is_killed_and_give_back_what_they_hold(
    pool: RealPool, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    eventually(pool.ready)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    step = pool.enqueue("slow", str(fifo))
    fifo.read_text()
    children = [child["pid"] for child in json.loads(pool.get("/healthz")[1])["children"]]
    assert len(children) == 3
    pool.process.kill()
    pool.process.wait()
    for pid in children:
        descriptor = os.pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], LIMIT_S)[0]
        finally:
            os.close(descriptor)
    assert state(conn, step) == ("available", 1, 0, None)  # and that attempt is the one that runs again


def test_a_pool_waits_for_a_database_that_is_away_and_says_so(tmp_path: Path) -> None:
    pool = RealPool("postgresql://127.0.0.1:1/nowhere", tmp_path)
    try:
        status, body = eventually(lambda: (found := pool.get("/readyz"))[0] == 503 and found)
        assert "no worker is ready" in body
        assert pool.get("/healthz")[0] == 200
        assert all(child["restarts"] == 0 for child in json.loads(pool.get("/healthz")[1])["children"])
        assert pool.end() == 0
    finally:
        pool.kill()


def test_a_database_without_the_schema_ends_the_pool_with_the_reason(empty_dsn: str, tmp_path: Path) -> None:
    (tmp_path / "pool_jobs.py").write_text(JOBS)
    done = subprocess.run(
        [sys.executable, "-c", POOL, empty_dsn], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 1
    assert "giving up: no worker can start" in done.stderr and "cyclone migrate up" in done.stderr
