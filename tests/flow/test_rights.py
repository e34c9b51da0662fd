"""What a role needs: the grants of deploy/README.md are enough, and a missing one is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import factories
import psycopg
import pytest
from factories import until
from psycopg import conninfo

import cyclone
from cyclone import Context, SyncContext, cli, db, migrate, sweep
from cyclone.errors import SchemaVersionError

Conn = psycopg.Connection[Any]

README = (Path(__file__).parents[2] / "deploy" / "README.md").read_text()
WORKER_GRANTS, SUBMITTER_GRANTS, MORE_GRANTS = re.findall(r"^```sql\n(.*?)^```$", README, re.M | re.S)


@cyclone.step("add")
async def add(ctx: Context, n: int) -> int:
    tx = await ctx.completion_tx()
    await tx.execute("INSERT INTO app.ledger (run_id, node, note) VALUES (%s, %s, 'x')", (ctx.run_id, ctx.node))
    await ctx.checkpoint("seen", n)
    return n + 1


@cyclone.step("add_in_thread", backoff=cyclone.fixed(0.01))
def add_in_thread(ctx: SyncContext, n: int) -> int:
    if ctx.attempt == 1:
        raise ValueError("again")
    return ctx.once("add", lambda: n + 1)


class Roles:
    def __init__(self, dsn: str, owner: Conn) -> None:
        self.owner = owner
        self.names = {name: f"test_{name}_{os.getpid()}" for name in ("migrator", "worker", "submitter")}
        self._dsn = dsn

    def dsn(self, name: str) -> str:
        return conninfo.make_conninfo(self._dsn, user=self.names[name], password="secret")

    def run(self, text: str) -> None:
        """Runs a script in which roles have their short names."""
        for name, real in self.names.items():
            text = re.sub(rf"\b{name}\b", real, text)
        self.owner.execute(text.encode())

    def without(self, script: str, line: str) -> None:
        """Grants all of a script but what is in one line."""
        self.run("".join(one + "\n" for one in script.splitlines() if line not in one))


@pytest.fixture
def roles(empty_dsn: str) -> Iterator[Roles]:
    with psycopg.connect(empty_dsn, autocommit=True) as owner:
        roles = Roles(empty_dsn, owner)
        for real in roles.names.values():
            owner.execute(f"CREATE ROLE {real} LOGIN PASSWORD 'secret' NOSUPERUSER NOCREATEDB NOCREATEROLE".encode())
        try:
            # As careful as a database can be: nobody has what they were not given.
            owner.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
            roles.run("CREATE SCHEMA jobs AUTHORIZATION migrator")
            roles.run("ALTER DEFAULT PRIVILEGES FOR ROLE migrator REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
            roles.run("CREATE SCHEMA app; CREATE TABLE app.ledger (run_id text, node text, note text)")
            roles.run("GRANT USAGE ON SCHEMA app TO worker; GRANT INSERT ON app.ledger TO worker")
            migrate.up(roles.dsn("migrator"), "jobs")
            yield roles
        finally:
            for real in roles.names.values():
                owner.execute(f"DROP OWNED BY {real} CASCADE".encode())
                owner.execute(f"DROP ROLE {real}".encode())


@contextlib.asynccontextmanager
async def running(sweeper: sweep.Sweeper) -> AsyncIterator[None]:
    task = asyncio.create_task(sweeper.run())
    try:
        yield
    finally:
        sweeper.stop()
        await task


def in_schema(roles: Roles, what: str) -> int:
    return factories.count(roles.owner, f"jobs.{what}")


@cyclone.workflow("adding")
def adding(g: cyclone.Graph[int]) -> cyclone.Node[int]:
    return g.run(add_in_thread, g.input)


@pytest.mark.contract("FM-075")
async def test_unique_keys_and_workflows_need_the_grants_that_are_documented_for_them(roles: Roles) -> None:
    roles.run(WORKER_GRANTS)
    roles.run(SUBMITTER_GRANTS)
    async with cyclone.Client(roles.dsn("submitter"), schema="jobs") as client:
        for call in (lambda: add.enqueue(client, 1, unique="k"), lambda: adding.submit(client, 1)):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="cyclone_"):
                await call()
        roles.run(MORE_GRANTS)
        assert (await add.enqueue(client, 1, unique="k")).created
        with pytest.raises(cyclone.DuplicateError):
            await add.enqueue(client, 1, unique="k")
        run = await adding.submit(client, 1)
        once, created = await adding.submit_once(client, "key", 1)
        assert created and await adding.submit_once(client, "key", 1) == (once, False)
        assert await adding.find(client, "key") == once
        handlers = factories.registered(add_in_thread)
        handlers.include(adding)
        async with (
            running(sweep.Sweeper(roles.dsn("worker"), schema="jobs", interval=0.05)),
            cyclone.Worker(roles.dsn("worker"), handlers, schema="jobs", poll_interval=0.05),
        ):
            assert [await one.result(20) for one in (run, once)] == [2, 2]


@pytest.mark.contract("FM-075", "D12")
async def test_each_role_can_do_its_part_with_the_documented_grants_and_no_more(roles: Roles) -> None:
    roles.run(WORKER_GRANTS)
    roles.run(SUBMITTER_GRANTS)
    migrate.register(roles.dsn("worker"), "jobs", factories.registered(add, add_in_thread))
    async with cyclone.Client(roles.dsn("submitter"), schema="jobs") as client:
        handles = [await add.enqueue(client, 1), *await add.enqueue_many(client, [1] * 20, method="copy")]
        handles += [await add_in_thread.enqueue(client, 1, delay=timedelta(milliseconds=10))]
        async with await psycopg.AsyncConnection.connect(roles.dsn("submitter")) as tx:
            handles += [await add.enqueue_tx(client, tx, 1)]
        assert cli.run(cli.app, ["enqueue", "add", "1", "--schema", "jobs", "--dsn", roles.dsn("submitter")]) == 0
        sweeper = sweep.Sweeper(roles.dsn("worker"), schema="jobs", interval=0.05)
        async with running(sweeper):
            async with cyclone.Worker(
                roles.dsn("worker"), factories.registered(add, add_in_thread), schema="jobs", poll_interval=0.05
            ):
                for handle in handles:
                    assert await handle.result(timeout=20) == 2
                await until(lambda: in_schema(roles, "cyclone_steps WHERE state = 'completed'") == 24)
        # What the sweeper does only now and then.
        async with await psycopg.AsyncConnection.connect(roles.dsn("worker"), autocommit=True) as conn:
            statements = db.statements("jobs")
            await sweep.tidy(conn, statements)
            await sweep.look(conn, statements)
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="cyclone_"):
            await handles[0].cancel()
    with psycopg.connect(roles.dsn("submitter"), autocommit=True) as conn:
        for text in (
            "UPDATE jobs.cyclone_steps SET state = 'cancelled'",
            "DELETE FROM jobs.cyclone_steps",
            "DELETE FROM jobs.cyclone_ready",
            "SELECT FROM jobs.cyclone_lives",
            "SELECT FROM jobs.cyclone_claims",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(text.encode())
    with psycopg.connect(roles.dsn("worker"), autocommit=True) as conn:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("DROP TABLE jobs.cyclone_ready")


@pytest.mark.contract("FM-075")
async def test_without_the_right_to_read_steps_a_service_can_still_submit(roles: Roles) -> None:
    roles.without(SUBMITTER_GRANTS, "to wait for results")
    async with cyclone.Client(roles.dsn("submitter"), schema="jobs") as client:
        handle = await add.enqueue(client, 1)
        await add.enqueue_many(client, [1] * 5, method="copy")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="cyclone_steps"):
            await handle.state()
    assert in_schema(roles, "cyclone_steps") == 6


@pytest.mark.contract("FM-075")
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("USAGE ON SCHEMA", "schema jobs"),
        ("INSERT ON jobs.cyclone_steps", "cyclone_"),
        ("SEQUENCES", "cyclone_ids"),
    ],
)
def test_a_right_that_a_service_lacks_is_named(roles: Roles, line: str, named: str) -> None:
    roles.without(SUBMITTER_GRANTS, line)
    with pytest.raises((psycopg.errors.InsufficientPrivilege, SchemaVersionError), match=f"permission denied.*{named}"):
        with cyclone.SyncClient(roles.dsn("submitter"), schema="jobs") as client:
            add.enqueue(client, 1)
    assert in_schema(roles, "cyclone_steps") == 0


@pytest.mark.contract("FM-075")
@pytest.mark.parametrize(("line", "named"), [("USAGE ON SCHEMA", "schema jobs"), ("ON ALL TABLES", "cyclone_")])
def test_a_pool_whose_role_lacks_a_right_ends_and_names_it(roles: Roles, tmp_path: Path, line: str, named: str) -> None:
    """Another try would fail the same way, so it is no crash loop."""
    roles.without(WORKER_GRANTS, line)
    (tmp_path / "jobs_of_few_rights.py").write_text(
        "import cyclone\n\n\n@cyclone.step('a')\nasync def a(ctx: cyclone.Context, n: int) -> int:\n    return n\n"
    )
    options = ["--procs", "1", "--metrics-port", "none", "--schema", "jobs"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "cyclone-pool"), "jobs_of_few_rights", *options],
        cwd=tmp_path,
        env={**os.environ, "CYCLONE_DSN": roles.dsn("worker")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert re.search(f"giving up: no worker can start: .*permission denied.*{named}", done.stderr), done.stderr
