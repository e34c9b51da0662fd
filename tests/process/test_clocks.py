"""Only the database's clock counts: those of the hosts may be wrong by an hour, and jump, and nothing changes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import factories
import psycopg
import pytest
from process import live

import cyclone
from cyclone import InvalidOptionError, cli

Conn = psycopg.Connection[Any]

JOBS = """
import asyncio
import cyclone
from cyclone import Context

@cyclone.step("plain")
async def plain(ctx: Context, n: int) -> int:
    return n

@cyclone.step("again")
async def again(ctx: Context, n: int) -> int:
    if ctx.attempt == 1:
        raise cyclone.RetryAfter(0.5)
    return n

@cyclone.step("sleepy")
async def sleepy(ctx: Context, n: int) -> int:
    if not ctx.snoozes:
        raise cyclone.Snooze(0.5)
    return n

@cyclone.step("endless", timeout=0.4, grace=0.1, max_attempts=1)
async def endless(ctx: Context, n: int) -> int:
    await asyncio.sleep(600)
    return n
"""

# The clocks of Python, in this process and all that it forks, are wrong by an hour, whose sign changes with
# every look. Not libfaketime: Python's own sleep fails under it.
PATCH = """
import datetime as _datetime, itertools as _itertools, sys as _sys, time as _time
from cyclone import cli, client, doctor, process, worker

_sign = _itertools.cycle((1, -1))
_real = _time.time
_time.time = lambda: _real() + 3600 * next(_sign)
_time.time_ns = lambda: int(_time.time() * 1e9)

class _Kind(type):
    def __instancecheck__(cls, value):
        return isinstance(value, _datetime.datetime)

class Wrong(_datetime.datetime, metaclass=_Kind):
    @classmethod
    def now(cls, tz=None):
        return _datetime.datetime.fromtimestamp(_time.time(), tz)

for _name, _module in list(_sys.modules.items()):
    if _name.startswith("cyclone") and getattr(_module, "datetime", None) is _datetime.datetime:
        _module.datetime = Wrong
"""

COMMAND = "import sys; from cyclone import cli; getattr(cli, sys.argv.pop(1))()"

SUBMIT = """
import json, os, sys, time
import cyclone, clock_jobs as jobs
from datetime import datetime, timedelta, timezone

with cyclone.SyncClient() as client:
    found = {
        "plain": jobs.plain.enqueue(client, 1),
        "delayed": jobs.plain.enqueue(client, 2, delay=timedelta(seconds=0.5)),
        "scheduled": jobs.plain.enqueue(client, 3, scheduled_at=datetime.fromisoformat(os.environ["DUE"])),
        "again": jobs.again.enqueue(client, 4),
        "sleepy": jobs.sleepy.enqueue(client, 5),
        "endless": jobs.endless.enqueue(client, 6),
        "far": jobs.plain.enqueue(client, 7, delay=1800),
    }
    began = time.monotonic()
    try:
        found["far"].wait(timeout=0.5)
    except TimeoutError:
        assert 0.45 < time.monotonic() - began < 5
    else:
        raise AssertionError("half an hour has not passed")
    print(json.dumps({name: handle.run_id for name, handle in found.items()}))
"""


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(dsn: str, tmp_path: Path) -> Iterator[Start]:
    """Starts Python on a host whose clock is wrong."""
    (tmp_path / "clock_jobs.py").write_text(JOBS)
    with contextlib.ExitStack() as stack:

        def start(code: str, *args: str, **env: str) -> subprocess.Popen[bytes]:
            env = {**os.environ, "CYCLONE_DSN": dsn, "TZ": "Asia/Kathmandu", **env}
            log = stack.enter_context((tmp_path / f"log{len(list(tmp_path.glob('log*')))}").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-c", PATCH + code, *args], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=log
            )
            assert process.stdout is not None
            stack.callback(process.wait)
            stack.callback(process.kill)
            stack.callback(process.stdout.close)
            return process

        yield start


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("log*"))


@pytest.mark.contract("FM-080", "S8")
def test_times_are_those_of_the_database_however_wrong_the_hosts(
    start: Start, dsn: str, conn: Conn, tmp_path: Path
) -> None:
    began = live.value(conn, "SELECT now()")
    start(COMMAND, "main", "worker", "clock_jobs", "--lease", "5s")
    start(COMMAND, "sweeper_main", "--interval", "50ms")
    live.eventually(lambda: live.value(conn, "SELECT count(*) FROM cyclone_lives"), log=lambda: logs(tmp_path))
    due = live.value(conn, "SELECT now() + interval '3 seconds'")
    submitting = start(SUBMIT, DUE=due.isoformat())
    assert submitting.stdout is not None
    said = submitting.stdout.read()
    assert submitting.wait() == 0, logs(tmp_path)
    ids = {name: int(run_id) for name, run_id in json.loads(said).items()}
    live.eventually(
        lambda: live.states(conn) == {"completed": 5, "discarded": 1, "scheduled": 1}, log=lambda: logs(tmp_path)
    )

    def seconds(name: str, what: str) -> float:
        query = f"SELECT extract(epoch FROM {what})::float8 FROM cyclone_steps WHERE id = %s"
        return float(live.value(conn, query, ids[name]))

    assert seconds("plain", "started_at - enqueued_at") < 3
    assert 0.5 <= seconds("delayed", "started_at - enqueued_at") < 3.5
    assert 0.5 <= seconds("sleepy", "started_at - enqueued_at") < 3.5
    failed = "(SELECT max(at) FROM cyclone_errors WHERE step = cyclone_steps.id)"
    assert 0.5 <= seconds("again", f"started_at - {failed}") < 3.5
    assert 0.4 <= seconds("endless", "finished_at - started_at") < 3.4
    assert factories.errors(conn, ids["endless"])[0][1] == "timeout"
    assert 1799 < seconds("far", "due_at - enqueued_at") < 1801
    query = "SELECT extract(epoch FROM started_at - %s)::float8 FROM cyclone_steps WHERE id = %s"
    assert 0 <= live.value(conn, query, due, ids["scheduled"]) < 3
    # The lease: never lost, never longer than it may be.
    lives = "SELECT ended_at, extract(epoch FROM lease_until - now())::float8 FROM cyclone_lives"
    ((ended, left),) = live.rows(conn, lives)
    assert ended is None and 0 < left <= 5
    assert live.value(conn, "SELECT sum(reclaims) FROM cyclone_steps") == 0
    # And nothing that was written is of another time.
    for table, columns in {
        "cyclone_steps": ("enqueued_at", "ready_at", "started_at", "finished_at"),
        "cyclone_errors": ("at",),
        "cyclone_lives": ("started_at",),
        "cyclone_kinds": ("registered_at",),
    }.items():
        for column in columns:
            low, high = live.rows(conn, f"SELECT min({column}), max({column}) FROM {table}")[0]
            assert began <= low <= high <= live.value(conn, "SELECT now()"), (table, column)


@pytest.mark.contract("FM-080")
def test_no_module_asks_the_clock_of_its_host() -> None:
    """Durations are measured by the monotonic clock. The doctor compares the host's with the database's, which is what
    it is for; and what a hook in the own process is told of bears the own time, but is recorded nowhere.
    """
    found = {
        path.name
        for path in Path(cli.__file__).parent.glob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|datetime\.(utc)?now\(|date\.today\(", path.read_text())
    }
    assert found <= {"doctor.py", "events.py", "client.py"}


# Time zones


@pytest.mark.contract("FM-083")
def test_naive_times_are_refused_and_aware_ones_mean_their_instant(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instant = datetime(2040, 3, 31, 1, 30, tzinfo=UTC)
    forms = [instant, *(instant.astimezone(timezone(timedelta(hours=hours))) for hours in (-9, 14))]
    (database,) = live.rows(conn, "SELECT current_database()")[0]
    noop = factories.noop()
    for zone in ("Pacific/Apia", "America/St_Johns"):
        monkeypatch.setenv("TZ", zone)
        monkeypatch.setenv("PGTZ", zone)
        conn.execute(f"ALTER DATABASE {database} SET timezone = '{zone}'".encode())
        with cyclone.SyncClient(dsn) as client:
            for form in forms:
                handle = noop.enqueue(client, None, scheduled_at=form)
                assert factories.read(conn, int(handle.run_id), "due_at") == instant
                assert client.get_step(handle.run_id, "noop").due_at == instant
            for many in noop.enqueue_many(client, [None] * 3, scheduled_at=forms[1], method="copy"):
                assert factories.read(conn, int(many.run_id), "due_at") == instant
            with pytest.raises(InvalidOptionError, match="no time zone"):
                noop.enqueue(client, None, scheduled_at=datetime(2040, 3, 31, 1, 30))
    conn.execute(
        "INSERT INTO cyclone_kinds (kind, version, action, max_attempts, queue, priority)"
        " VALUES ('noop', 1, false, 5, 'default', 5)"
    )
    for form in forms:
        capsys.readouterr()
        args = ["enqueue", "noop", "null", "--dsn", dsn, "--scheduled-at", form.isoformat()]
        assert cli.run(cli.app, args) == 0
        assert factories.read(conn, int(capsys.readouterr().out), "due_at") == instant
    naive = ["enqueue", "noop", "null", "--dsn", dsn, "--scheduled-at", "2040-03-31T01:30:00"]
    assert cli.run(cli.app, naive) == cli.USAGE
