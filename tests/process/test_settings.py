"""Settings: one order of sources for every one of them, and the same effect from Python and from the command line."""

from __future__ import annotations

import inspect
import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import factories
import psycopg
import pytest
from process import live

import cyclone
from cyclone import cli, config, migrate, registry, supervisor, worker

Conn = psycopg.Connection[Any]

# For each setting three values, as they stand in the file, in a variable and on the command line, each with what it
# must come to.
VALUES: dict[str, list[tuple[Any, Any]]] = {
    "queues": [(["a"], ("a",)), ("b,c", ("b", "c")), ("d", ("d",))],
    "concurrency": [(11, 11), ("12", 12), ("13", 13)],
    "threads": [(1, 1), ("2", 2), ("3", 3)],
    "lease": [("1m", 60.0), ("90s", 90.0), ("2m", 120.0)],
    "poll_interval": [(2, 2.0), ("3s", 3.0), ("400ms", 0.4)],
    "notify": [(False, False), ("yes", True), ("off", False)],
    "claim_batch": [(5, 5), ("auto", None), ("7", 7)],
    "settle_batch": [("auto", None), ("6", 6), ("7", 7)],
    "settle_linger": [("1ms", 0.001), ("0", 0.0), ("3ms", 0.003)],
    "completion_pool_size": [(1, 1), ("2", 2), ("3", 3)],
    "completion_pool_timeout": [("1s", 1.0), ("2s", 2.0), ("3s", 3.0)],
    "drain_timeout": [("1s", 1.0), ("0", 0.0), ("3s", 3.0)],
    "stall_limit": [("1m", 60.0), ("2m", 120.0), ("3m", 180.0)],
    "max_output_bytes": [("1KiB", 1024), ("2KiB", 2048), ("3000", 3000)],
    "max_error_bytes": [("1KiB", 1024), ("2KiB", 2048), ("3000", 3000)],
    "dsn": [("host=file", "host=file"), ("host=variable", "host=variable"), ("host=option", "host=option")],
    "schema": [("file", "file"), ("variable", "variable"), ("option", "option")],
    "procs": [(1, 1), ("2", 2), ("3", 3)],
    "sweeper": [(False, False), ("on", True), (None, False)],
    "metrics_port": [(1, 1), ("2", 2), ("3", 3)],
    "metrics_host": [("127.0.0.2", "127.0.0.2"), ("127.0.0.3", "127.0.0.3"), ("127.0.0.4", "127.0.0.4")],
    "recycle_after": [(10, 10), ("20", 20), ("30", 30)],
}
WHERE = {
    "dsn": "_dsn",
    "schema": "_schema",
    "procs": "procs",
    "sweeper": "_sweeps",
    "metrics_port": "_port",
    "metrics_host": "_host",
    "recycle_after": "_recycle_after",
}


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `cyclone-pool` up to where it would begin, and returns what it would have begun with."""
    made: list[supervisor.Pool] = []
    monkeypatch.setattr(supervisor.Pool, "run", lambda self: made.append(self) or 0)
    monkeypatch.chdir(tmp_path)
    for key in config._SETTINGS:
        monkeypatch.delenv(f"CYCLONE_{key.upper()}", raising=False)
    monkeypatch.setenv("CYCLONE_DSN", "host=default")

    def run(*args: str) -> supervisor.Pool:
        made.clear()
        assert cli.run(cli._pool_app, ["shop.jobs", *args]) == 0
        (pool,) = made
        return pool

    return run


def value(pool: supervisor.Pool, key: str) -> Any:
    if key in WHERE:
        return getattr(pool, WHERE[key])
    return getattr(pool.options, config._WORKER[key].field)


def option(key: str, text: str | None) -> list[str]:
    name = key.replace("_", "-")
    return [f"--no-{name}"] if text is None else [f"--{name}", text]


@pytest.mark.contract("FM-089", "FM-090")
@pytest.mark.parametrize("key", sorted(config._SETTINGS))
def test_every_setting_is_taken_from_option_variable_and_file_in_this_order(
    key: str, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_file, from_file), (in_variable, from_variable), (given, from_option) = VALUES[key]
    variable = f"CYCLONE_{key.upper()}"
    monkeypatch.setenv(variable, "")  # an empty one is none
    monkeypatch.setenv("CYCLONE_DSN", "" if key == "dsn" else "host=default")
    (tmp_path / "pyproject.toml").write_text(f"[tool.cyclone]\n{key} = {json.dumps(in_file)}\n")
    assert value(pool(), key) == from_file
    monkeypatch.setenv(variable, in_variable)
    assert value(pool(), key) == from_variable
    assert value(pool(*option(key, given)), key) == from_option
    # Beside any other that is set, what is not set keeps its own source.
    other = "threads" if key != "threads" else "concurrency"
    assert value(pool(*option(other, "9")), key) == from_variable
    monkeypatch.delenv(variable)
    if key != "dsn":
        assert value(pool(*option(other, "9")), key) == from_file


@pytest.mark.contract("FM-089")
def test_names_that_do_not_exist_are_errors(
    pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], dsn: str
) -> None:
    assert cli.run(cli._pool_app, ["shop.jobs", "--concurency", "3"]) == cli.USAGE
    (tmp_path / "pyproject.toml").write_text("[tool.cyclone]\nconcurency = 3\n")
    assert cli.run(cli._pool_app, ["shop.jobs"]) == cli.USAGE
    assert "'concurency' is unknown; did you mean 'concurrency'?" in capsys.readouterr().err
    with pytest.raises(cyclone.InvalidOptionError, match="did you mean 'concurrency'"):
        cyclone.Worker(dsn, cyclone.Registry(), concurency=3)  # type: ignore[call-arg]
    with pytest.raises(cyclone.InvalidOptionError, match="did you mean 'priority'"):
        factories.noop().enqueue(cyclone.SyncClient(dsn), None, priorty=3)  # type: ignore[call-overload]


@pytest.mark.contract("FM-089", "D12")
def test_python_takes_arguments_and_the_variables_that_are_documented(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.cyclone]\nconcurrency = 7\nschema = "file"\ndsn = "host=file"\n')
    monkeypatch.setenv("CYCLONE_DSN", "host=variable")
    monkeypatch.setenv("CYCLONE_SCHEMA", "variable")
    monkeypatch.setenv("CYCLONE_CONCURRENCY", "8")
    pool, given = supervisor.Pool("shop"), supervisor.Pool("shop", dsn="host=argument", schema="argument")
    assert [(one._dsn, one._schema) for one in (pool, given)] == [
        ("host=variable", "variable"),
        ("host=argument", "argument"),
    ]
    assert pool.options.concurrency == 100
    for client in (cyclone.Client(), cyclone.SyncClient()):
        assert (client._dsn, client._statements.schema) == ("host=variable", "variable")
    assert cyclone.Client("host=argument", schema="argument")._statements.schema == "argument"


@pytest.mark.contract("FM-090", "R15")
def test_every_option_of_an_enqueue_has_the_same_effect_from_the_command_line(
    dsn: str, conn: Conn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, tuple[Any, list[str]]] = {
        "max_attempts": (7, ["--max-attempts", "7"]),
        "timeout": (timedelta(seconds=90), ["--timeout", "90s"]),
        "queue": ("q", ["--queue", "q"]),
        "priority": (2, ["--priority", "2"]),
        "tags": (["a", "b"], ["--tag", "a", "--tag", "b"]),
        "metadata": ({"m": [1]}, ["--metadata", '{"m": [1]}']),
        "delay": (timedelta(hours=1), ["--delay", "1h"]),
        "keep_for": (timedelta(days=3), ["--keep-for", "3d"]),
        "scheduled_at": (
            datetime.fromisoformat("2040-01-01T00:00:00+02:00"),
            ["--scheduled-at", "2040-01-01T00:00:00+02:00"],
        ),
    }
    # How rows travel is the command's own business (--jsonl), and shows in nothing.
    # A unique key cannot be given twice; test_unique.py has its command.
    assert {*options, "unique"} == registry.ENQUEUE_OPTIONS
    migrate.register(dsn, "public", factories.registered(factories.noop()))
    columns = """kind, node, version, queue, priority, max_attempts, timeout_s, tags, metadata, keep_for, state, input,
                 round(extract(epoch FROM due_at - CASE WHEN due_at < now() + interval '1 year' THEN enqueued_at
                                                         ELSE 'epoch' END), 3)"""

    def rows(count: int) -> list[Any]:
        return live.rows(conn, f"SELECT {columns} FROM cyclone_steps ORDER BY id DESC LIMIT {count}")

    with cyclone.SyncClient(dsn) as client:
        together = {key: given for key, (given, _) in options.items() if key != "scheduled_at"}
        cases = [*({key: given} for key, (given, _) in options.items()), together, {}]
        for case in cases:
            factories.noop().enqueue(client, {"n": 1}, **case)
            args = [arg for key in case for arg in options[key][1]]
            assert cli.run(cli.app, ["enqueue", "noop", '{"n": 1}', "--dsn", dsn, *args]) == 0
            by_command, by_python = rows(2)
            assert by_command == by_python, case
    capsys.readouterr()
    assert cli.run(cli.app, ["enqueue", "noop", "1", "--dsn", dsn, "--method", "copy"]) == cli.USAGE


@pytest.mark.contract("FM-090")
def test_every_option_of_workers_pools_and_sweepers_is_one_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a pool or a worker gets from the code around it (`main`, `page`, `pipe` …) is no option of a user's."""
    ours = {"self", "target", "client_or_dsn", "handlers", "options", "given"}
    ours |= {"main", "page", "life", "pipe", "pooled", "alone", "listen", "idle"}
    ours |= {"redact", "on_step_event"}  # functions, which only a program can give
    for cls, app, command in (
        (supervisor.Pool, cli._pool_app, []),
        (worker.Worker, cli.app, ["worker"]),
        (cyclone.Sweeper, cli._sweeper_app, []),
    ):
        capsys.readouterr()
        assert cli.run(app, [*command, "--help"]) == 0
        shown = {one.replace("-", "_") for one in re.findall(r"--([a-z][a-z-]+)", capsys.readouterr().out)}
        parameters = set(inspect.signature(cls.__init__).parameters)
        assert parameters - ours <= shown
        if "given" in parameters or "options" in parameters:
            assert set(config.WORKER_NAMES) <= shown
