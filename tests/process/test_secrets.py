"""The password of the database and the inputs of steps are seen where they belong, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from process import live
from psycopg import conninfo

import cyclone
from cyclone import cli, db, registry

Conn = psycopg.Connection[Any]

PASSWORD = "hunter2 & s3cret/p@ss"
FORMS = (PASSWORD, quote(PASSWORD, safe=""), PASSWORD.replace(" ", "\\ "), "hunter2", "s3cret")
INPUT = "card-4111111111111111"

JOBS = """
import asyncio, os
import cyclone
from cyclone import Context, ProcessContext, SyncContext

@cyclone.step("good")
async def good(ctx: Context, card: str) -> str:
    tx = await ctx.completion_tx()
    await tx.execute("SELECT 1")
    return card

@cyclone.step("bad", max_attempts=1)
async def bad(ctx: Context, card: str) -> str:
    raise ValueError("no")

@cyclone.step("late", max_attempts=1, timeout=0.2, grace=0.1)
async def late(ctx: Context, card: str) -> str:
    await asyncio.sleep(60)
    return card

@cyclone.step("unfit", max_attempts=1)
async def unfit(ctx: Context, number: int) -> int:
    return number

@cyclone.step("apart", executor="process")
def apart(ctx: ProcessContext, card: str) -> str:
    with open("/proc/self/cmdline") as own, open("own", "w") as file:
        file.write(own.read())
    return card

@cyclone.step("deadly", max_reclaims=1)
def deadly(ctx: SyncContext, card: str) -> str:
    os._exit(9)
"""


@pytest.fixture
def secret_dsn(dsn: str, conn: Conn) -> Iterator[str]:
    """The test's database for a role with a password, as a URL."""
    name = f"test_secret_{os.getpid()}"
    conn.execute(f"CREATE ROLE {name} SUPERUSER LOGIN PASSWORD '{PASSWORD}'".encode())
    parts = conninfo.conninfo_to_dict(dsn)
    try:
        yield f"postgresql://{name}:{quote(PASSWORD, safe='')}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    finally:
        conn.execute(f"REASSIGN OWNED BY {name} TO CURRENT_USER; DROP OWNED BY {name}; DROP ROLE {name}".encode())


def command_lines() -> str:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(found)


def without(text: str, *secrets: str) -> None:
    for secret in secrets:
        at = text.find(secret)
        assert at < 0, f"{secret!r} was shown: …{text[max(at - 200, 0) : at + 100]}…"


def everything_stored(conn: Conn) -> str:
    tables = live.rows(conn, "SELECT relname FROM pg_class WHERE relname ~ '^cyclone_' AND relkind = 'r'")
    stored = [str(live.rows(conn, f"SELECT t::text FROM {name} t")) for (name,) in tables]
    return "\n".join(stored)


@pytest.mark.contract("FM-092")
def test_a_pool_that_meets_all_sorts_of_trouble_tells_no_secret(
    start_pool: live.Pools, tmp_path: Path, dsn: str, secret_dsn: str, conn: Conn
) -> None:
    (tmp_path / "secret_jobs.py").write_text(JOBS)
    pool = start_pool(secret_dsn, target="secret_jobs", path=[tmp_path], procs=1)
    insert = """
        WITH made AS (
            INSERT INTO cyclone_steps (id, run_id, ord, ready_at, node, kind, state, input, max_attempts)
            SELECT n, n, n, now(), kind, kind, 'available', to_jsonb(%s::text), 1
            FROM unnest(%s::text[]) kind, nextval('cyclone_ids') n RETURNING id, ord)
        INSERT INTO cyclone_ready (lane, rank, ord, step) SELECT 'default', 11, ord, id FROM made"""
    conn.execute(insert, (INPUT, ["good"]))
    conn.execute(insert, (INPUT, ["apart"]))
    for kind in ("bad", "late", "unfit", "deadly"):
        conn.execute(insert, (INPUT, [kind]))
    live.eventually(lambda: live.states(conn) == {"completed": 2, "discarded": 4}, log=lambda: pool.log)
    # Trouble with the database: its connections end, and it lets nobody in again for a while.
    seen = command_lines()
    (database,) = live.rows(conn, "SELECT current_database()")[0]
    with psycopg.connect(conninfo.make_conninfo(dsn, dbname="postgres"), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false".encode())
        try:
            ours = "datname = current_setting('x.db') AND usename ~ '^test_secret_'"
            admin.execute("SELECT set_config('x.db', %s, false)", (database,))
            admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}".encode())
            live.eventually(lambda: "not currently accepting connections" in pool.log, log=lambda: pool.log)
        finally:
            admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true".encode())
    live.eventually(lambda: pool.get("/readyz")[0] == 200, log=lambda: pool.log)
    os.kill(pool.workers()[0], signal.SIGABRT)
    live.eventually(lambda: "killed by SIGABRT" in pool.log)
    pool.ready()
    pages = "\n".join(pool.get(path)[1] for path in ("/metrics", "/healthz", "/readyz", "/", "/nothing"))
    seen += command_lines()
    queries = str(live.rows(conn, "SELECT query, application_name FROM pg_stat_activity"))
    assert pool.end() == 0
    without(pool.log, *FORMS, INPUT)
    without(pages, *FORMS, INPUT)
    without(seen, *FORMS, INPUT)
    own = (tmp_path / "own").read_text()
    assert own
    without(own, *FORMS, INPUT)
    without(everything_stored(conn), *FORMS)
    without(queries, *FORMS)


DSNS = [
    "postgresql://shop:{url}@127.0.0.1:1/shop",
    "postgresql://shop:{url}@no-such-host.invalid/shop",
    "postgresql://shop:{url}@127.0.0.1:port/shop",
    "postgresql://shop:{url}@127.0.0.1:1/shop?no_such_option={url}",
    "postgresql://shop:{url}@[::1/shop",
    "host=127.0.0.1 port=1 user=shop password='{text}'",
    "host=127.0.0.1 port=1 password={text}",
    "host=127.0.0.1 port=none password='{text}'",
    "password='{text}",
    "{text}",
]


@pytest.mark.contract("FM-092")
@pytest.mark.parametrize("template", DSNS)
@pytest.mark.parametrize(
    "command", [["steps", "1"], ["doctor"], ["migrate", "up"], ["enqueue", "a", "1"]], ids=" ".join
)
def test_no_error_of_a_command_shows_the_password(
    template: str, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = template.format(url=quote(PASSWORD, safe=""), text=PASSWORD)
    monkeypatch.setenv("CYCLONE_DSN", dsn)
    assert cli.run(cli.app, command) in (cli.FAILED, cli.USAGE)
    without("".join(capsys.readouterr()), *FORMS)


@pytest.mark.contract("FM-092")
@pytest.mark.parametrize("template", DSNS)
def test_no_error_of_the_package_shows_the_password(template: str, caplog: pytest.LogCaptureFixture) -> None:
    dsn = template.format(url=quote(PASSWORD, safe=""), text=PASSWORD)
    said = [db.where(dsn)]
    for make in (
        lambda: cyclone.SyncClient(dsn).open(),
        lambda: cyclone.Client(dsn),
        lambda: cyclone.Sweeper(dsn),
        lambda: cyclone.Pool("shop", dsn=dsn),
        lambda: cyclone.Worker(dsn, cyclone.Registry()),
    ):
        try:
            said.append(repr(make()))
        except Exception as exc:
            # Its causes are the driver's own, whose text is not ours; what we say ourselves is.
            said += [str(exc), repr(exc)]
    without("\n".join(said) + caplog.text, *FORMS)


@pytest.mark.contract("FM-092")
def test_commands_show_inputs_only_where_that_is_documented(
    dsn: str, conn: Conn, capsys: pytest.CaptureFixture[str]
) -> None:
    @registry.step("good")
    async def good(ctx: Any, card: str) -> str:
        return card

    with cyclone.SyncClient(dsn) as client:
        run_id = good.enqueue(client, INPUT).run_id
    for command in (["steps", run_id], ["steps", run_id, "--json"], ["runs"], ["doctor"], ["migrate", "status"]):
        assert cli.run(cli.app, [*command, "--dsn", dsn]) == 0
        without("".join(capsys.readouterr()), INPUT)
    assert cli.run(cli.app, ["show", run_id, "--dsn", dsn]) == 0
    assert INPUT in capsys.readouterr().out
    assert "with inputs, outputs" in (cli._show.__doc__ or "")
