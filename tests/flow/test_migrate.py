"""Installing, upgrading and recognising the schema."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

import cyclone
from cyclone import context, db, doctor, errors, migrate, registry

EVIL = """it's %s; "DROP" \\ 🌀 $$"""


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def role(empty: psycopg.Connection) -> Iterator[str]:
    name = f"test_role_{os.getpid()}"
    empty.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    empty.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def names(conn: psycopg.Connection, schema: str) -> set[str]:
    return {name for (name,) in conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,))}


def test_it_installs_once_and_says_what_it_did(empty_dsn: str, empty: psycopg.Connection) -> None:
    todo = [str(migration) for migration in migrate.migrations()]
    assert migrate.up(empty_dsn) == todo
    assert migrate.up(empty_dsn) == []
    assert migrate.check(empty_dsn) == migrate.LATEST
    assert {"cyclone_steps", "cyclone_runs", "cyclone_ready", "cyclone_migrations"} <= names(empty, "public")


@pytest.mark.contract("D1", "D3", "D4", "D11", "D13")
def test_the_names_and_constraints_that_the_contract_promises(conn: psycopg.Connection) -> None:
    index = conn.execute(
        "SELECT tablename, indexdef FROM pg_indexes WHERE indexname = 'idx_runs_submit_key'"
    ).fetchone()
    assert index is not None and index[0] == "cyclone_runs" and "UNIQUE" in index[1]
    assert conn.execute("SELECT to_regclass('cyclone_all_runs')::text").fetchone() == ("cyclone_all_runs",)

    run = "INSERT INTO cyclone_runs (id, workflow, submit_key, input) VALUES (%s, 'checkout', 'order:1', '{}')"
    conn.execute(run, (1,))
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute(run, (2,))
    step = """INSERT INTO cyclone_steps (id, run_id, state, node, kind, input, max_attempts)
              VALUES (%s, 1, 'pending', 'charge', 'charge', '{}', %s)"""
    conn.execute(step, (3, 1))
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute(step, (4, 1))
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute("UPDATE cyclone_steps SET max_attempts = 0")


@pytest.mark.contract("D12")
@pytest.mark.parametrize("schema", ["jobs", EVIL])
def test_a_schema_of_its_own_whatever_its_name(empty_dsn: str, empty: psycopg.Connection, schema: str) -> None:
    migrate.up(empty_dsn, schema)
    assert migrate.check(empty_dsn, schema) == migrate.LATEST
    assert names(empty, "public") == set()
    assert "cyclone_steps" in names(empty, schema)
    # Defaults that name the sequence work too.
    quoted = db.quote_schema(schema)
    empty.execute(
        f"""INSERT INTO {quoted}.cyclone_errors (step, attempt, at, kind, message, traceback)
            VALUES (1, 1, now(), '', '', '')""".encode()
    )
    with pytest.raises(errors.SchemaVersionError, match='"public" holds no Cyclone tables'):
        migrate.check(empty_dsn)


@pytest.mark.parametrize("schema", ["", "a\0b", "x" * 64])
def test_names_that_postgres_cannot_hold_are_refused(empty_dsn: str, schema: str) -> None:
    with pytest.raises(errors.InvalidOptionError, match="schema"):
        migrate.up(empty_dsn, schema)


def test_reserved_names_are_refused(empty_dsn: str) -> None:
    with pytest.raises(errors.InvalidOptionError, match="pg_jobs"):
        migrate.up(empty_dsn, "pg_jobs")


@pytest.mark.contract("FM-074")
def test_many_first_starts_at_once_install_it_once(empty_dsn: str, empty: psycopg.Connection) -> None:
    together = threading.Barrier(12)

    def start(_: int) -> list[str]:
        together.wait()
        return migrate.up(empty_dsn, "jobs")

    with ThreadPoolExecutor(12) as pool:
        done = [name for names in pool.map(start, range(12)) for name in names]
    assert sorted(done) == [str(migration) for migration in migrate.migrations()]
    assert empty.execute("SELECT count(*) FROM jobs.cyclone_migrations").fetchone() == (len(migrate.migrations()),)


@pytest.mark.contract("FM-074")
def test_waiting_for_another_migrator_is_bounded(empty_dsn: str, empty: psycopg.Connection) -> None:
    empty.execute("SELECT pg_advisory_lock(hashtextextended('cyclone migrate jobs', 0))")
    with pytest.raises(errors.ConflictError, match=r"0001_init .*jobs.* within 0\.1 s: another migration"):
        migrate.up(empty_dsn, "jobs", lock_timeout=0.1)
    empty.execute("SELECT pg_advisory_unlock_all()")
    assert migrate.up(empty_dsn, "jobs", lock_timeout=0.1)


@pytest.mark.parametrize("lock_timeout", [0, -1, float("nan")])
def test_a_wait_without_length_is_refused(empty_dsn: str, lock_timeout: float) -> None:
    with pytest.raises(errors.InvalidOptionError, match="lock_timeout"):
        migrate.up(empty_dsn, lock_timeout=lock_timeout)


def test_a_failed_migration_leaves_nothing(empty_dsn: str, empty: psycopg.Connection) -> None:
    empty.execute("CREATE TABLE cyclone_lanes ()")
    with pytest.raises(errors.SchemaVersionError, match="cyclone_lanes.*--schema"):
        migrate.up(empty_dsn)
    assert names(empty, "public") == {"cyclone_lanes"}


def extra(text: str, *, transaction: bool, breaking: bool = False) -> migrate.Migration:
    version = migrate.LATEST + 1
    return migrate.Migration(version=version, name="more", text=text, transaction=transaction, breaking=breaking)


def with_extra(monkeypatch: pytest.MonkeyPatch, migration: migrate.Migration) -> None:
    all_of_them = (*migrate.migrations(), migration)
    monkeypatch.setattr(migrate, "migrations", lambda: all_of_them)


@pytest.mark.parametrize("transaction", [True, False])
def test_an_upgrade_applies_what_is_new(dsn: str, monkeypatch: pytest.MonkeyPatch, transaction: bool) -> None:
    word = "" if transaction else "CONCURRENTLY"
    text = f"""
        -- An index; with a semicolon.
        CREATE INDEX {word} more_one ON {{schema}}.cyclone_runs (state);
        CREATE INDEX {word} more_two ON {{schema}}.cyclone_runs (created_at);
    """
    with_extra(monkeypatch, extra(text, transaction=transaction))
    assert migrate.up(dsn) == [f"{migrate.LATEST + 1:04d}_more"]
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT count(*) FROM pg_indexes WHERE indexname ~ '^more_'").fetchone() == (2,)


def test_an_interrupted_upgrade_without_transaction_can_be_repeated(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "CREATE INDEX CONCURRENTLY IF NOT EXISTS more_one ON {schema}.cyclone_runs (state);\nSELECT 1/0;\n"
    before = migrate.migrations()
    with_extra(monkeypatch, extra(text, transaction=False))
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate.up(dsn)
    monkeypatch.setattr(migrate, "migrations", lambda: before)
    assert migrate.up(dsn) == [], "the version is recorded only at the end"
    with_extra(monkeypatch, extra(text.replace("/0", "/1"), transaction=False))
    assert len(migrate.up(dsn)) == 1


def test_a_table_in_use_is_waited_for_in_short_turns(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "_TABLE_LOCK", "20ms")
    with_extra(monkeypatch, extra("ALTER TABLE {schema}.cyclone_runs ADD more integer;", transaction=True))
    with conn.transaction():
        conn.execute("SELECT FROM cyclone_runs")
        with pytest.raises(errors.ConflictError, match=r"more.*within 0\.2 s.*lock timeout"):
            migrate.up(dsn, lock_timeout=0.2)
    assert migrate.up(dsn) == [f"{migrate.LATEST + 1:04d}_more"]


@pytest.mark.contract("FM-075")
def test_a_missing_right_is_named(empty_dsn: str, empty: psycopg.Connection, role: str) -> None:
    dsn = conninfo.make_conninfo(empty_dsn, user=role)
    empty.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with pytest.raises(errors.SchemaVersionError, match=f'GRANT USAGE, CREATE ON SCHEMA "public" TO "{role}"'):
        migrate.up(dsn)
    with pytest.raises(errors.SchemaVersionError, match=f'CREATE SCHEMA "jobs" AUTHORIZATION "{role}"'):
        migrate.up(dsn, "jobs")
    empty.execute(f"CREATE SCHEMA jobs AUTHORIZATION {role}")
    assert migrate.up(dsn, "jobs"), "no superuser and no extension is needed"

    migrate.up(empty_dsn, "other")
    with pytest.raises(errors.SchemaVersionError, match="permission denied for schema other"):
        migrate.check(dsn, "other")


@pytest.mark.contract("FM-092")
def test_no_message_shows_the_password(empty_dsn: str) -> None:
    dsn = conninfo.make_conninfo(empty_dsn, dbname="no_such_database", password="hunter2")
    with pytest.raises(errors.ConnectError) as failed:
        migrate.up(dsn)
    assert "no_such_database" in str(failed.value) and "hunter2" not in str(failed.value)


def test_an_encoding_that_cannot_hold_text_is_refused(empty_dsn: str, empty: psycopg.Connection) -> None:
    name = f"test_latin_{os.getpid()}"
    empty.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        with pytest.raises(errors.SchemaVersionError, match="LATIN1"):
            migrate.up(conninfo.make_conninfo(empty_dsn, dbname=name))
    finally:
        empty.execute(f"DROP DATABASE {name}")


# Versions


@pytest.mark.parametrize(
    ("version", "way_out"),
    [
        (None, "cyclone migrate up --schema jobs"),
        (0, "cyclone migrate up --schema jobs"),
        (migrate.LATEST + 1, "pip install -U"),
    ],
)
def test_a_wrong_version_comes_with_the_way_out(version: int | None, way_out: str) -> None:
    with pytest.raises(errors.SchemaVersionError, match=way_out):
        migrate.require(version, "jobs")


@pytest.mark.contract("F8")
def test_a_newer_schema_is_refused_only_where_it_breaks_this_release(conn: psycopg.Connection) -> None:
    newer = "INSERT INTO cyclone_migrations (version, name, breaking) VALUES (%s, 'more', %s)"
    conn.execute(newer, (migrate.LATEST + 1, False))
    assert migrate.read_version(conn, "public") == migrate.LATEST
    conn.execute(newer, (migrate.LATEST + 2, True))
    assert migrate.read_version(conn, "public") == migrate.LATEST + 2


async def test_the_version_is_read_alike_by_async_code(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        assert await migrate.read_version_async(conn, "public") == migrate.LATEST
        assert await migrate.read_version_async(conn, EVIL) is None


def test_status_lists_what_is_done_and_what_is_to_do(empty_dsn: str) -> None:
    before = migrate.status(empty_dsn, "jobs")
    assert (before.version, before.latest) == (None, migrate.LATEST)
    assert [m.applied_at for m in before.migrations] == [None] * len(migrate.migrations())
    migrate.up(empty_dsn, "jobs")
    after = migrate.status(empty_dsn, "jobs")
    assert after.version == migrate.LATEST
    assert all(m.applied_at for m in after.migrations)


@pytest.mark.parametrize("schema", ["public", EVIL])
def test_the_script_installs_the_same(empty_dsn: str, empty: psycopg.Connection, schema: str) -> None:
    with empty.transaction():
        empty.execute(migrate.sql(schema).encode())
    assert migrate.up(empty_dsn, schema) == []
    assert doctor.check(empty, schema) == []


def test_the_script_can_start_behind_a_version(empty_dsn: str) -> None:
    assert "CREATE TABLE" not in migrate.sql(after=migrate.LATEST)
    with pytest.raises(errors.InvalidOptionError, match="after"):
        migrate.sql(after=migrate.LATEST + 1)


def test_a_file_must_say_how_it_is_run() -> None:
    with pytest.raises(errors.CycloneError, match="0002_more.sql must say `-- transaction: yes`"):
        migrate._header("CREATE TABLE x ();", "transaction", "0002_more.sql")


def test_versions_count_without_gaps() -> None:
    assert [m.version for m in migrate.migrations()] == list(range(1, migrate.LATEST + 1))


# Kinds


def a_registry(**options: int) -> registry.Registry:
    found = registry.Registry()

    @registry.step("resize", registry=found, **options)
    async def resize(ctx: context.Context, path: str) -> str:
        return path

    @registry.action("mail", registry=found, queue="mail")
    async def mail(ctx: context.Context, to: str) -> None: ...

    return found


def kinds(conn: psycopg.Connection) -> list[tuple[object, ...]]:
    return conn.execute(
        "SELECT kind, version, action, max_attempts, queue, xmin FROM cyclone_kinds ORDER BY 1"
    ).fetchall()


def test_registering_writes_only_what_changed(dsn: str, conn: psycopg.Connection) -> None:
    migrate.register(dsn, "public", a_registry())
    mail, resize = kinds(conn)
    assert mail[:5] == ("mail", 1, True, 5, "mail")
    assert resize[:5] == ("resize", 1, False, 5, "default")

    async def again() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            await migrate.register_async(conn, "public", a_registry(max_attempts=3))

    asyncio.run(again())
    assert kinds(conn)[0] == mail, "an unchanged kind is not written again"
    assert kinds(conn)[1][:5] == ("resize", 1, False, 3, "default")


def test_registering_needs_the_schema(empty_dsn: str) -> None:
    with pytest.raises(errors.SchemaVersionError, match="migrate up"):
        migrate.register(empty_dsn, "public", a_registry())


def test_the_wheel_carries_the_migrations() -> None:
    folder = Path(cyclone.__file__).parent / "migrations"
    assert {file.name for file in folder.glob("*.sql")} == {f"{m}.sql" for m in migrate.migrations()}
