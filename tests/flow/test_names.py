"""Names are data: whatever they look like, they go everywhere as they are, or are refused before anything happens."""

from __future__ import annotations

import json
from typing import Any

import factories
import psycopg
import pytest
from factories import errors, until
from psycopg import conninfo

import cyclone
from cyclone import Context, cli, config, doctor, migrate
from cyclone.errors import InvalidOptionError

Conn = psycopg.Connection[Any]

NAMES = [
    "it's",
    'say "x"',
    "100 %",
    "%s %(kind)s %%",
    "a; DROP TABLE cyclone_steps; --",
    "back\\slash\\n",
    "🌀 ﷽ é",
    "{schema} $1 $$ :name",
    "[bold]x[/bold] <b>",
    "-x --json",
    "*",
    "é" * 100,
]
REFUSED = ["", "a\0b", "a\nb", "a\x1bb", "\ud800", "é" * 101]


def declared(name: str) -> cyclone.Step[Any, Any]:
    @cyclone.step(name, queue=name, tags=[name], backoff=cyclone.fixed(0.01))
    async def echo(ctx: Context, value: str) -> list[Any]:
        if ctx.attempt == 1:
            raise ValueError(value)
        return [ctx.node, ctx.queue, list(ctx.tags), ctx.idempotency_key, value]

    return echo


@pytest.mark.contract("FM-091")
async def test_names_of_steps_queues_and_tags_are_data(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [declared(name) for name in NAMES]
    monkeypatch.setenv("CYCLONE_DSN", dsn)
    async with cyclone.Client(dsn) as client, factories.sweeper(dsn):
        async with factories.worker(dsn, *steps, queues=NAMES):
            handles = [await step.enqueue(client, step.name) for step in steps]
            handles += [(await step.enqueue_many(client, [step.name], method="copy"))[0] for step in steps]
            for handle, name in zip(handles, NAMES * 2, strict=True):
                key = f"{handle.run_id}:{name}"
                assert await handle.result(timeout=20) == [name, name, [name], key, name]
                info = await client.get_step(handle.run_id, name)
                assert (info.kind, info.queue, info.tags, info.error) == (name, name, [name], None)
                assert errors(conn, int(handle.run_id)) == [(1, "retryable", f"ValueError: {name}")]
            # The same from the command line, which knows the names from the worker.
            for name in NAMES:
                capsys.readouterr()
                assert cli.run(cli.app, ["enqueue", "--json", "--tag", name, "--", name, json.dumps(name)]) == 0
                run_id = json.loads(capsys.readouterr().out)["run_id"]
                await until(lambda run_id=run_id: factories.state(conn, int(run_id)) == "completed")  # type: ignore[misc]
                assert cli.run(cli.app, ["steps", run_id]) == 0
                # A narrow table may wrap, and never does here: there is no terminal.
                assert name in capsys.readouterr().out
    assert [finding for finding in doctor.check(conn) if finding.severity == "error"] == []


@pytest.mark.contract("FM-091")
def test_names_in_the_environment_and_the_file_are_data(tmp_path: Any) -> None:
    listed = [name for name in NAMES if "," not in name]
    found = config.settings({}, env={"CYCLONE_QUEUES": ",".join(listed)}, names={"queues"})
    assert found["queues"] == listed
    (tmp_path / "pyproject.toml").write_text(f"[tool.cyclone]\nqueues = {json.dumps(NAMES, ensure_ascii=False)}\n")
    found = config.settings({}, env={}, pyproject=tmp_path / "pyproject.toml", names={"queues"})
    assert found["queues"] == NAMES


@pytest.mark.contract("FM-091")
@pytest.mark.parametrize("name", REFUSED, ids=ascii)
def test_what_no_name_can_be_is_refused_everywhere(dsn: str, conn: Conn, name: str) -> None:
    with pytest.raises(InvalidOptionError):
        declared(name)
    with cyclone.SyncClient(dsn) as client:
        for options in ({"queue": name}, {"tags": [name]}):
            with pytest.raises(InvalidOptionError):
                factories.noop().enqueue(client, None, **options)  # type: ignore[call-overload]
    with pytest.raises(InvalidOptionError):
        cyclone.Worker(dsn, cyclone.Registry(), queues=[name])
    with pytest.raises(InvalidOptionError):
        cyclone.Pool("shop", dsn=dsn, queues=[name])
    if "\0" not in name and name.isprintable():
        assert cli.run(cli.app, ["enqueue", "noop", "--dsn", dsn, "--queue", name, "1"]) in (cli.USAGE, cli.NOT_FOUND)
    assert factories.count(conn, "cyclone_steps") == 0


@pytest.mark.contract("FM-039")
@pytest.mark.parametrize("schema", ["public", '"it\'s" %s; {schema} 🌀' + "x" * 39])
async def test_no_size_of_anything_makes_a_wake_up_fail(empty_dsn: str, schema: str) -> None:
    """A notification takes 8000 bytes and 63 of a channel's name. Ours holds nothing, however much it is about."""
    assert len(schema.encode()) in (6, 63)
    migrate.up(empty_dsn, schema)
    longest = "é" * 97 + "%04d"

    @cyclone.step("é" * 100, tags=["é" * 100] * 20, metadata={"m": "x" * 10_000}, max_attempts=1)
    async def fails(ctx: Context, value: str) -> str:
        raise ValueError(value)

    @cyclone.step("returns")
    async def returns(ctx: Context, value: str) -> str:
        return value

    dsn = conninfo.make_conninfo(empty_dsn, application_name="sizes")
    queues = [longest % n for n in range(300)]
    async with cyclone.Client(dsn, schema=schema) as client:
        handlers = factories.registered(fails, returns)
        # Polling would not find anything within the time of this test.
        async with cyclone.Worker(dsn, handlers, schema=schema, queues=["a", *queues], poll_interval=300):
            big = await returns.enqueue(client, "x" * 1_000_000, queue="a")
            assert len(await big.result(timeout=20)) == 1_000_000
            async with await psycopg.AsyncConnection.connect(dsn) as tx:
                handles = [await returns.enqueue_tx(client, tx, "x", queue=queue) for queue in queues]
                await fails.enqueue_tx(client, tx, "x" * 1_000_000, queue="a")
            for handle in handles:
                assert await handle.result(timeout=20) == "x"
            failed = await fails.enqueue(client, "y" * 1_000_000, queue="a")
            assert await failed.wait(timeout=20) is cyclone.StepState.EXHAUSTED
