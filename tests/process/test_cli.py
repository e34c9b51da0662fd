"""The command line: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from cyclone import cli, config, migrate

EVIL = """it's %s; "DROP" \\ 🌀 [bold]"""

JOBS = f"""
import cyclone.registry as cyclone
from cyclone.context import Context

@cyclone.step("resize", max_attempts=3, queue="pictures", priority=2, timeout=90)
async def resize(ctx: Context, path: str) -> str:
    return path

@cyclone.step("greet")
async def greet(ctx: Context, name: str) -> str:
    return "hello " + name

@cyclone.step({EVIL!r})
async def evil(ctx: Context, path: str) -> str:
    return path
"""


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `cyclone` in a folder that holds the module `cli_jobs`, on the test's database."""
    (tmp_path / "cli_jobs.py").write_text(JOBS)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CYCLONE_DSN", dsn)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*args: str, stdin: bytes | None = None, app: Any = cli.app) -> Result:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = cli.run(app, args)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    yield run
    sys.modules.pop("cli_jobs", None)


@pytest.fixture
def registered(run: Run) -> None:
    assert run("migrate", "register", "cli_jobs").code == 0


def steps(conn: psycopg.Connection, columns: str = "input") -> list[Any]:
    return conn.execute(f"SELECT {columns} FROM cyclone_steps ORDER BY id".encode()).fetchall()


# What every command has in common


@pytest.mark.contract("B4")
@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["nonsense"], cli.USAGE, "nonsense"),
        (["steps"], cli.USAGE, "RUN"),
        (["steps", "--wrong", "1"], cli.USAGE, "--wrong"),
        (["steps", "12345"], cli.NOT_FOUND, "'12345'"),
        (["steps", "x'; DROP"], cli.NOT_FOUND, "DROP"),
        (["show", "12345"], cli.NOT_FOUND, "'12345'"),
        (["steps", "1", "--schema", "jobs"], cli.FAILED, "cyclone migrate up --schema jobs"),
        (["steps", "1", "--schema", ""], cli.USAGE, "schema"),
        (
            ["steps", "1", "--dsn", "host=127.0.0.1 port=1"],
            cli.FAILED,
            "cannot reach the database at 127.0.0.1, port 1",
        ),
        (["steps", "1", "--dsn", "nonsense"], cli.USAGE, "DSN"),
        (["enqueue", "resize"], cli.USAGE, "--jsonl"),
        (["enqueue", "resize", "1", "--jsonl", "-"], cli.USAGE, "--jsonl"),
        (["enqueue", "resize", "1", "--priority", "10"], cli.USAGE, "priority"),
        (["enqueue", "resize", "1", "--priority", "high"], cli.USAGE, "--priority"),
        (["enqueue", "resize", "1", "--delay", "soon"], cli.USAGE, "--delay"),
        (["enqueue", "resize", "1", "--max-attempts", "0"], cli.USAGE, "max_attempts"),
        (["enqueue", "resize", "1", "--queue", "?x"], cli.USAGE, "queue"),
        (["enqueue", "resize", "1", "--scheduled-at", "2030-01-01T00:00:00"], cli.USAGE, "no time zone"),
        (["enqueue", "resize", "1", "--scheduled-at", "soon"], cli.USAGE, "--scheduled-at"),
        (["enqueue", "resize", "1", "--metadata", "[1]"], cli.USAGE, "--metadata"),
        (["enqueue", "resize", "--jsonl", "no_such_file"], cli.USAGE, "no_such_file cannot be read"),
        (["migrate", "sql", "--after", "999"], cli.USAGE, "after"),
        (["migrate", "register", "no_such_module"], cli.USAGE, "no_such_module"),
        (["migrate", "up", "--lock-timeout", "0s"], cli.USAGE, "lock_timeout"),
        (["worker", "cli_jobs", "--concurrency", "none"], cli.USAGE, "concurrency"),
        (["worker", "no_such_module"], cli.USAGE, "no_such_module"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(run: Run, args: list[str], code: int, says: str) -> None:
    result = run(*args)
    assert (result.code, result.out) == (code, "")
    assert says in result.err and "Traceback" not in result.err
    if "Usage" not in result.err:
        assert result.err.count("\n") == 1


@pytest.mark.contract("B4")
def test_errors_are_json_too(run: Run) -> None:
    result = run("steps", "12345", "--json")
    assert json.loads(result.err)["error"] == "NotFoundError"
    assert (result.code, result.out) == (cli.NOT_FOUND, "")


def test_without_a_database_the_way_out_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYCLONE_DSN")
    result = run("doctor")
    assert result.code == cli.USAGE and "--dsn" in result.err and "CYCLONE_DSN" in result.err


@pytest.mark.contract("FM-089")
def test_settings_come_from_the_option_then_the_environment_then_the_file(
    run: Run, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.cyclone]\nschema = "from_file"\n')
    assert '"from_file"' in run("migrate", "check").err
    monkeypatch.setenv("CYCLONE_SCHEMA", "from_env")
    assert '"from_env"' in run("migrate", "check").err
    assert '"from_option"' in run("migrate", "check", "--schema", "from_option").err
    assert run("migrate", "check", "--schema", "public").code == 0


@pytest.mark.contract("FM-092")
@pytest.mark.parametrize("command", [["steps", "1"], ["doctor"], ["migrate", "up"], ["enqueue", "resize", "1"]])
def test_no_command_shows_the_password(run: Run, dsn: str, command: list[str]) -> None:
    missing = conninfo.make_conninfo(dsn, dbname="no_such_database", password="hunter2")
    result = run(*command, "--dsn", missing)
    assert result.code == cli.FAILED
    assert "no_such_database" in result.err and "hunter2" not in result.out + result.err


def test_an_error_of_the_database_is_one_line(run: Run, conn: psycopg.Connection, registered: None) -> None:
    conn.execute("ALTER TABLE cyclone_steps ADD CHECK (priority <> 7)")
    result = run("enqueue", "resize", '"a"', "--priority", "7")
    assert result.code == cli.FAILED and result.err.count("\n") == 1 and "check constraint" in result.err


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_database", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("doctor")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from cyclone import cli; cli.run(cli.app, ['--help']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for module in ("rich.console", "uvloop", "prometheus_client", "cyclone.worker", "cyclone.supervisor"):
        assert f"'{module}'" not in out


def test_the_version(run: Run) -> None:
    assert run("--version").out.startswith("cyclone 0.")


# migrate


def test_migrating(run: Run, conn: psycopg.Connection) -> None:
    assert "applied 0001_init" in run("migrate", "up", "--schema", "jobs").out
    again = run("migrate", "up", "--schema", "jobs", "--json")
    assert again.json == {"schema": "jobs", "version": migrate.LATEST, "applied": []}
    assert run("migrate", "check", "--schema", "jobs").code == 0
    assert run("migrate", "check", "--schema", "jobs", "--json").json["version"] == migrate.LATEST
    assert "0001" not in run("migrate", "status", "--schema", "other").out
    assert "not yet" in run("migrate", "status", "--schema", "other").out
    assert run("migrate", "status", "--schema", "jobs", "--json").json["version"] == migrate.LATEST


def test_two_migrators_at_once_are_a_conflict_after_a_while(run: Run, conn: psycopg.Connection) -> None:
    conn.execute("SELECT pg_advisory_lock(hashtextextended('cyclone migrate jobs', 0))")
    result = run("migrate", "up", "--schema", "jobs", "--lock-timeout", "50ms")
    assert result.code == cli.CONFLICT and "another migration" in result.err


def test_the_script_is_printed_without_a_database(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CYCLONE_DSN")
    assert run("migrate", "sql").out == migrate.sql()
    assert run("migrate", "sql", "--schema", EVIL, "--json").json["sql"] == migrate.sql(EVIL)


def test_registering(run: Run, conn: psycopg.Connection) -> None:
    assert "registered 3 steps" in run("migrate", "register", "cli_jobs").out
    assert run("migrate", "register", "cli_jobs", "--json").json["steps"] == sorted(["resize", "greet", EVIL])
    assert conn.execute("SELECT count(*) FROM cyclone_kinds").fetchone() == (3,)


# enqueue


@pytest.mark.contract("B4", "D5")
def test_a_step_is_enqueued_as_it_was_declared(run: Run, conn: psycopg.Connection, registered: None) -> None:
    result = run("enqueue", "resize", '"a.png"')
    assert result.code == 0
    columns = "run_id::text, kind, input, max_attempts, queue, priority, timeout_s, version, state"
    assert steps(conn, columns) == [(result.out.strip(), "resize", "a.png", 3, "pictures", 2, 90.0, 1, "available")]
    assert run("enqueue", "resize", '"b.png"', "--json").json.keys() == {"step", "run_id"}


def test_options_win_over_the_declaration(run: Run, conn: psycopg.Connection, registered: None) -> None:
    result = run(
        *("enqueue", "resize", "null", "--max-attempts", "7", "--queue", "slow", "--priority", "9", "--timeout", "2m"),
        *("--delay", "1h", "--keep-for", "7d", "--tag", "a", "--tag", "b", "--metadata", '{"by": "me"}'),
    )
    assert result.code == 0
    columns = "max_attempts, queue, priority, timeout_s, state, keep_for::text, tags, metadata, due_at > now()"
    assert steps(conn, columns) == [(7, "slow", 9, 120.0, "scheduled", "168:00:00", ["a", "b"], {"by": "me"}, True)]
    assert run("enqueue", "resize", "1", "--scheduled-at", "2000-01-01T00:00:00Z").code == 0
    assert steps(conn, "state")[-1] == ("available",), "a time that has passed means at once"


@pytest.mark.contract("FM-091")
@pytest.mark.parametrize("schema", ["jobs", EVIL])
def test_names_are_data(run: Run, conn: psycopg.Connection, schema: str) -> None:
    assert run("migrate", "up", "--schema", schema).code == 0
    assert run("migrate", "register", "cli_jobs", "--schema", schema).code == 0
    result = run("enqueue", EVIL, '"%s"', "--queue", "a'b%", "--schema", schema)
    assert result.code == 0, result.err
    assert steps(conn) == []
    shown = run("show", result.out.strip(), "--schema", schema)
    assert EVIL in shown.out and "a'b%" in shown.out
    assert EVIL in run("steps", result.out.strip(), "--schema", schema).out
    assert run("doctor", "--deep", "--schema", schema).code == 0


def test_an_unknown_step_is_refused_with_what_was_perhaps_meant(
    run: Run, conn: psycopg.Connection, registered: None
) -> None:
    result = run("enqueue", "resise", "1")
    assert result.code == cli.NOT_FOUND and "did you mean 'resize'?" in result.err
    assert steps(conn) == []


def test_an_empty_list_of_kinds_says_how_to_fill_it(run: Run) -> None:
    result = run("enqueue", "resize", "1")
    assert result.code == cli.NOT_FOUND and "cyclone migrate register TARGET" in result.err


@pytest.mark.parametrize("bad", ["{", "NaN", "'a'", "", '"\\u0000"', '"\\ud800"', "1 2", '"' + "x" * (1 << 20) + '"'])
def test_bad_json_is_refused(run: Run, conn: psycopg.Connection, registered: None, bad: str) -> None:
    result = run("enqueue", "resize", bad)
    assert result.code == cli.USAGE and result.err.startswith("cyclone: JSON:")
    assert steps(conn) == []


def test_lines_of_a_file(run: Run, conn: psycopg.Connection, registered: None, tmp_path: Path) -> None:
    lines = [json.dumps(f"{number} ü") for number in range(2_500)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:3], "", *lines[3:]]))
    assert run("enqueue", "resize", "--jsonl", "in.jsonl", "--queue", "bulk").out == "enqueued 2,500 steps\n"
    assert steps(conn) == [(f"{number} ü",) for number in range(2_500)]
    assert conn.execute("SELECT count(*) FROM cyclone_ready WHERE lane = 'bulk'").fetchone() == (2_500,)


def test_lines_of_standard_input(run: Run, conn: psycopg.Connection, registered: None) -> None:
    assert run("enqueue", "resize", "--jsonl", "-", "--json", stdin=b'1\n{"a": [2]}\n').json["enqueued"] == 2
    assert steps(conn) == [(1,), ({"a": [2]},)]
    assert run("enqueue", "resize", "--jsonl", "-", stdin=b"").out == "enqueued 0 steps\n"


@pytest.mark.parametrize("bad", [b"{", b'"\xff"', b'"' + b"x" * (1 << 21) + b'"'])
def test_a_bad_line_is_named_and_nothing_is_enqueued(
    run: Run, conn: psycopg.Connection, registered: None, bad: bytes
) -> None:
    result = run("enqueue", "resize", "--jsonl", "-", stdin=b"1\n" * 1_500 + bad + b"\n1\n")
    assert result.code == cli.USAGE
    assert "standard input, line 1501: " in result.err and result.err.endswith("; nothing was enqueued\n")
    assert steps(conn) == []


# steps, show


@pytest.mark.contract("B2", "D9", "D10")
def test_looking_at_a_run(run: Run, conn: psycopg.Connection, registered: None) -> None:
    run_id = run("enqueue", "resize", '{"secret": "x\\u001b[31m"}').out.strip()
    conn.execute(
        """UPDATE cyclone_steps SET state = 'discarded', finished_at = now(), attempts = 2, error_kind = 'permanent',
           error = 'no [red]such[/red] file'"""
    )
    for attempt, message in ((1, "first"), (2, "no such file")):
        conn.execute(
            """INSERT INTO cyclone_errors (step, attempt, at, kind, message, traceback)
               VALUES (%s, %s, now(), 'retryable', %s, 'Traceback …\n  boom')""",
            (run_id, attempt, message),
        )
    listed = run("steps", run_id)
    assert "discarded" in listed.out and "permanent: no [red]such[/red] file" in listed.out
    assert "secret" not in listed.out + run("steps", run_id, "--json").out
    assert run("steps", run_id, "--json").json[0]["state"] == "discarded"

    shown = run("show", run_id)
    assert "secret" in shown.out and "\x1b" not in shown.out
    assert shown.out.index("first") < shown.out.index("boom") < shown.out.index("attempt 2")
    (step,) = run("show", run_id, "--json").json
    assert [error["message"] for error in step["errors"]] == ["first", "no such file"]
    assert step["input"] == {"secret": "x\x1b[31m"}


# doctor


@pytest.mark.contract("B8")
def test_the_doctor(run: Run, conn: psycopg.Connection) -> None:
    assert run("doctor").out == "nothing is wrong\n"
    assert run("doctor", "--deep", "--json").json == {"findings": [], "damages": []}
    conn.execute("DROP INDEX cyclone_steps_due_at")
    result = run("doctor")
    assert result.code == cli.FAILED
    assert result.out.startswith("error: index cyclone_steps_due_at does not exist\n    CREATE INDEX CONCURRENTLY")
    assert run("doctor", "--json").json["findings"][0]["severity"] == "error"
    assert run("doctor", "--schema", "jobs").code == cli.FAILED


@pytest.mark.no_deep_check
def test_the_doctor_looks_deeper(run: Run, conn: psycopg.Connection, registered: None) -> None:
    run_id = run("enqueue", "resize", "1").out.strip()
    conn.execute("DELETE FROM cyclone_ready")
    assert run("doctor").code == 0
    result = run("doctor", "--deep")
    assert result.code == cli.FAILED and f"damage: step {run_id} is available without a ticket" in result.out


# Processes


@pytest.mark.contract("FM-090")
def test_every_option_of_a_worker_is_one_of_the_command_line() -> None:
    assert cli._WORKER_HELP.keys() == set(config.WORKER_NAMES)


class Started:
    """A command as a process of its own, whose lines on standard error can be waited for."""

    def __init__(self, *args: str, cwd: Path, dsn: str) -> None:
        env = {**os.environ, "CYCLONE_DSN": dsn}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from cyclone import cli; cli.{args[0]}()", *args[1:]],
            cwd=cwd,
            env=env,
            stderr=subprocess.PIPE,
        )
        self.said = b""

    def wait_for(self, text: str) -> None:
        assert self.process.stderr is not None
        while text.encode() not in self.said:
            ready, _, _ = select.select([self.process.stderr], [], [], 60)
            more = os.read(self.process.stderr.fileno(), 65536) if ready else b""
            assert more, f"{text!r} was not said: {self.said.decode()}"
            self.said += more

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def start(run: Run, dsn: str, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with contextlib.ExitStack() as stack:

        def start(*args: str) -> Started:
            started = Started(*args, cwd=tmp_path, dsn=dsn)
            stack.callback(started.process.wait)
            stack.callback(started.process.kill)
            if started.process.stderr is not None:
                stack.callback(started.process.stderr.close)
            return started

        yield start


def wait_until_completed(dsn: str, count: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        while conn.execute("SELECT count(*) FROM cyclone_steps WHERE state = 'completed'").fetchone() != (count,):
            conn.execute("SELECT pg_sleep(0.02)")


@pytest.mark.contract("B3")
def test_a_pool_works_what_the_command_line_enqueued(
    run: Run, dsn: str, start: Callable[..., Started], registered: None
) -> None:
    for name in ("a", "b"):
        assert run("enqueue", "greet", json.dumps(name)).code == 0
    assert run("enqueue", "resize", '"c"').code == 0
    pool = start(
        *("pool_main", "--procs", "2", "--queues", "default,pictures", "--metrics-port", "0", "--concurrency", "5"),
        "cli_jobs",
    )
    wait_until_completed(dsn, 3)
    assert pool.stop() == 0


def test_a_worker_and_a_sweeper_of_their_own(
    run: Run, dsn: str, start: Callable[..., Started], registered: None
) -> None:
    assert run("enqueue", "greet", '"a"', "--delay", "10ms").code == 0
    worker = start("main", "worker", "cli_jobs", "--threads", "2")
    sweeper = start("sweeper_main", "--interval", "50ms")
    wait_until_completed(dsn, 1)
    assert sweeper.stop(signal.SIGINT) == 0
    assert worker.stop() == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--procs", "-1", "cli_jobs"], "procs"),
        (["--lease", "10ms", "cli_jobs"], "lease"),
        (["--metrics-port", "http", "cli_jobs"], "metrics_port"),
        (["--recycle-after", "0", "cli_jobs"], "recycle_after"),
        ([], "TARGET"),
    ],
)
def test_wrong_options_of_a_pool(run: Run, args: list[str], says: str) -> None:
    result = run(*args, app=cli._pool_app)
    assert result.code == cli.USAGE and says in result.err + result.out
