"""The demonstration: it must count what it claims to count, and end cleanly however it ends."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cyclone import demo

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(empty_dsn: str) -> Iterator[Start]:
    """Starts the demonstration on a database of the test's own."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, dsn: str = empty_dsn) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "cyclone.demo", *args],
            env={**os.environ, "CYCLONE_DSN": dsn},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def schemas(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as conn:
        return [name for (name,) in conn.execute("SELECT nspname FROM pg_namespace WHERE nspname ~ '^cyclone'")]


def wait_for_pool(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if "the pool serves http://" in line:
            return
    raise AssertionError("the pool did not start")


def test_each_file_gets_one_verdict_though_a_worker_is_killed(start: Start, empty_dsn: str) -> None:
    process = start("--json", "--tamper", "--limit", "300", "--steps", "1500")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert (report["files"], report["steps"], report["verdicts"]) == (300, 1500, 1500)
    assert report["exact"] and report["survived"]
    assert report["runs"] == report["distributions"] * 5 and 0 < report["intact"] <= report["distributions"]
    assert 750 <= report["killed_after"] < 1500
    # One file was tampered with. What else differs in this installation is no concern of this test.
    assert report["mismatched"] >= 5 and report["mismatched"] % 5 == 0
    assert any("cyclone-demo-" in path for path in report["mismatched_paths"])
    assert sum(report[verdict] for verdict in ("matched", "mismatched", "missing", "unreadable")) == 1500
    assert schemas(empty_dsn) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything(start: Start, empty_dsn: str, number: signal.Signals) -> None:
    process = start("--limit", "300", "--steps", "20000")
    wait_for_pool(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and out == "" and "Traceback" not in err
    assert schemas(empty_dsn) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_the_pool_does_not_outlive_it(start: Start) -> None:
    process = start("--limit", "300", "--steps", "20000")
    wait_for_pool(process)
    (pool,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    process.kill()
    process.wait(10)
    assert os.waitpid(pool, 0) == (pool, 0), "it drained and ended"


def test_what_is_wrong_is_said(start: Start) -> None:
    process = start(dsn="host=127.0.0.1 port=1 password=hunter2")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == ""
    assert "demo: cannot reach the database at 127.0.0.1, port 1" in err
    assert "Traceback" not in err and "hunter2" not in err


# The parts


def record(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("size", [0, 1_000, 1_000_000])
def test_the_verdict_on_a_file(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(content)

    def verdict(path: Path) -> str:
        return asyncio.run(demo._verdict(demo.File(str(path), "sha256", record(content), 1)))

    assert verdict(path) == "matched"
    path.write_bytes(content + b"x")
    assert verdict(path) == "mismatched"
    assert verdict(tmp_path / "other") == "missing"
    assert verdict(tmp_path) == "unreadable"


def test_the_files_of_what_is_installed() -> None:
    installed = demo._installed()
    assert sum(one.files for one in installed) > 1_000 and len({one.name for one in installed}) == len(installed)
    files = demo._files_of(importlib.metadata.distribution(installed[0].name))
    assert len(files) == installed[0].files and len({file.path for file in files}) == len(files)
    assert all(os.path.isabs(file.path) for file in files)
    some = demo._installed(installed[0].files + 1)
    assert [one.files for one in some] == [installed[0].files, 1]


@pytest.mark.parametrize(
    "damage",
    [
        "INSERT INTO demo_verdicts SELECT * FROM demo_verdicts WHERE run_id = 1",
        "DELETE FROM demo_verdicts WHERE run_id = 1",
        "UPDATE demo_verdicts SET run_id = 2 WHERE run_id = 1",
        "UPDATE demo_verdicts SET node = 'other' WHERE run_id = 1",
        "UPDATE cyclone_steps SET state = 'discarded' WHERE id = 1",
        "INSERT INTO demo_distributions SELECT * FROM demo_distributions",
        "DELETE FROM demo_distributions",
        "UPDATE cyclone_runs SET state = 'failed' WHERE id = 9",
    ],
)
def test_one_verdict_too_many_or_too_few_is_noticed(dsn: str, conn: psycopg.Connection, damage: str) -> None:
    conn.execute("CREATE TABLE demo_verdicts (run_id bigint, node text, round integer, path text, verdict text)")
    conn.execute(
        """INSERT INTO cyclone_steps (
               id, run_id, state, node, kind, input, max_attempts, started_at, ready_at, finished_at)
           SELECT i, i, 'completed', 'audit', 'audit', '1', 1, now(), now(), now() FROM generate_series(1, 4) i"""
    )
    conn.execute("INSERT INTO demo_verdicts SELECT id, node, 1, 'p', 'matched' FROM cyclone_steps")
    conn.execute("CREATE TABLE demo_distributions (run_id bigint, round integer, name text, intact boolean)")
    conn.execute(
        "INSERT INTO cyclone_runs (id, workflow, input, state, finished_at) VALUES (9, 'w', '1', 'completed', now())"
    )
    conn.execute("INSERT INTO demo_distributions VALUES (9, 1, 'd', true)")
    figures: dict[str, Any] = {
        "distributions": 1, "runs": 1, "files": 4, "total": 4, "killed_pid": 1, "killed_after": 2,
    }  # fmt: skip
    assert demo._report(conn, **figures).exact
    conn.execute(damage.encode())
    report = demo._report(conn, **figures)
    assert not report.exact and not report.survived
