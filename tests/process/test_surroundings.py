"""What surrounds a pool may be hostile: signals in its first moments, streams that take nothing, programs that stay."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from process import live

import cyclone

JOBS = """
import asyncio, os, subprocess
import cyclone
from cyclone import Context, SyncContext

@cyclone.action("talk")
async def talk(ctx: Context, n: int) -> None:
    ctx.log.warning("step %d says %s", n, "x" * 2000)

@cyclone.step("start")
def start(ctx: SyncContext) -> int:
    return subprocess.Popen(["sleep", "600"]).pid

@cyclone.step("start_async")
async def start_async(ctx: Context) -> int:
    return (await asyncio.create_subprocess_exec("sleep", "600")).pid

@cyclone.step("fork_and_stay")
def fork_and_stay(ctx: SyncContext) -> int:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    child.wait()
    return 0
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    (tmp_path / "surrounded_jobs.py").write_text(JOBS)
    return tmp_path


def declared(folder: Path) -> Any:
    """The steps of the pool, to be enqueued."""
    spec = importlib.util.spec_from_file_location("surrounded_jobs", folder / "surrounded_jobs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def begin(dsn: str, folder: Path, *options: str, out: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(live.COMMANDS / "cyclone-pool"), "surrounded_jobs", "--metrics-port", "none", *options],
        cwd=folder,
        env={**os.environ, "CYCLONE_DSN": dsn},
        stdout=out,
        stderr=out,
        start_new_session=True,
    )


@contextlib.contextmanager
def ended(pool: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield pool
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pool.pid, signal.SIGKILL)
        pool.wait()


def group(pid: int) -> list[int]:
    """The living processes of a group."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(")")
            state, _, pgrp = tail.split()[:3]
            if int(pgrp) == pid and state != "Z":
                found.append(int(head.partition(" ")[0]))
    return found


# Signals at any moment


@pytest.mark.contract("FM-019")
@pytest.mark.parametrize("number", [signal.SIGINT])
def test_a_stop_at_any_moment_of_the_start_leaves_nothing(dsn: str, jobs: Path, number: int) -> None:
    for delay_s in (0.0, 0.15, 0.3, 0.45, 0.6, 0.9):
        log = jobs / f"log-{delay_s}"
        with log.open("wb") as out, ended(begin(dsn, jobs, "--procs", "2", out=out)) as pool:
            select.select([], [], [], delay_s)
            asked = time.monotonic()
            pool.send_signal(number)
            code = pool.wait(live.LIMIT_S)
            # Before there are handlers, and so before there are children, the signal itself ends the process.
            assert code in (0, -number, 130), log.read_text()
            assert time.monotonic() - asked < 20
            assert group(pool.pid) == [], (delay_s, log.read_text())


@pytest.mark.contract("FM-019")
def test_a_stop_at_any_moment_of_a_workers_start_only_replaces_it(
    dsn: str, jobs: Path, conn: psycopg.Connection[Any]
) -> None:
    log = jobs / "log"
    with log.open("wb") as out, ended(begin(dsn, jobs, "--procs", "1", "--no-sweeper", out=out)) as pool:
        children = Path(f"/proc/{pool.pid}/task/{pool.pid}/children")
        stopped: set[int] = set()
        for delay_s in (0.0, 0.01, 0.15):
            pid = live.eventually(
                lambda: next((int(one) for one in children.read_text().split() if int(one) not in stopped), 0),
                log=log.read_text,
            )
            select.select([], [], [], delay_s)
            os.kill(pid, signal.SIGTERM)
            live.gone(pid)
            stopped.add(pid)
        live.eventually(lambda: live.value(conn, "SELECT count(*) FROM cyclone_lives WHERE ended_at IS NULL"))
        pool.send_signal(signal.SIGTERM)
        assert pool.wait(live.LIMIT_S) == 0
        assert group(pool.pid) == []
    text = log.read_text()
    assert "Traceback" not in text and "ERROR" not in text, text


# Programs that handlers start


@pytest.mark.contract("FM-023")
def test_programs_that_handlers_start_hold_nothing_of_ours_and_delay_no_stop(
    dsn: str, jobs: Path, client: cyclone.SyncClient
) -> None:
    program = declared(jobs)
    log = jobs / "log"
    started: list[int] = []
    try:
        with log.open("wb") as out, ended(begin(dsn, jobs, "--procs", "1", "--drain-timeout", "0.5s", out=out)) as pool:
            started += [
                program.start.enqueue(client).result(timeout=live.LIMIT_S),
                program.start_async.enqueue(client).result(timeout=live.LIMIT_S),
            ]
            for pid in started:
                # The standard streams, of which uvloop gives a program copies; no socket, no pipe, no board.
                opened = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
                assert opened <= {"/dev/null", str(log)}
            # And one that its handler waits for without an end.
            staying = program.fork_and_stay.enqueue(client)
            live.eventually(lambda: staying.state() is cyclone.StepState.RUNNING)
            asked = time.monotonic()
            pool.send_signal(signal.SIGTERM)
            assert pool.wait(live.LIMIT_S) == 0, log.read_text()
            assert time.monotonic() - asked < 0.5 + 15, "the grace period, and what a drain may take beyond it"
            assert staying.state() is cyclone.StepState.AVAILABLE
            assert set(group(pool.pid)) <= set(started)
    finally:
        # They are the handlers' to end; here, where nobody does, ours.
        for stat in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                pid = int(stat.parent.name)
                if stat.read_bytes() == b"sleep\x00600\x00" and _is_ours(pid):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _is_ours(pid: int) -> bool:
    # Orphans become children of the test run (see conftest).
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()


# Streams that take nothing


@pytest.mark.contract("FM-027")
@pytest.mark.parametrize("stream", ["full disk", "closed pipe"])
def test_streams_that_take_nothing_cost_no_step_and_no_process(
    dsn: str, jobs: Path, conn: psycopg.Connection[Any], stream: str
) -> None:
    if stream == "full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    program = declared(jobs)
    with cyclone.SyncClient(dsn) as client:
        program.talk.enqueue_many(client, list(range(200)))
        with ended(begin(dsn, jobs, "--procs", "2", out=out)) as pool:
            os.close(out)
            live.eventually(lambda: live.states(conn) == {"completed": 200})
            # A death is told to the same streams.
            (victim,) = live.rows(conn, "SELECT pid FROM cyclone_lives WHERE ended_at IS NULL ORDER BY id LIMIT 1")[0]
            os.kill(victim, signal.SIGKILL)
            live.eventually(lambda: live.value(conn, "SELECT count(*) FROM cyclone_lives") == 3)
            program.talk.enqueue_many(client, list(range(200)))
            live.eventually(lambda: live.states(conn) == {"completed": 400})
            pool.send_signal(signal.SIGTERM)
            assert pool.wait(live.LIMIT_S) == 0
    assert live.value(conn, "SELECT count(*) FROM cyclone_lives") == 3
    assert live.rows(conn, "SELECT DISTINCT attempts, reclaims FROM cyclone_steps") == [(1, 0)]
