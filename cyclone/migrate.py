"""Which schema is this: installs it, upgrades it, and tells whether this release can work with it.

Migrations are the files `migrations/NNNN_name.sql`, forward only. Their header says what the runner must know:

    -- transaction: yes    one transaction, the version row first. With `no` it goes statement by statement, each
                           ending with a semicolon at the end of a line, and each harmless when it is run again
    -- breaking: yes       a release that does not know this migration cannot work with the schema any more

Any number of processes may migrate at once. They take turns by an advisory lock, which is tried and not waited for: a
session that waits inside a statement holds a snapshot, and a CREATE INDEX CONCURRENTLY of the lock's holder would wait
for that snapshot. The version row is the second guard, for scripts that know nothing of the lock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import psycopg
from psycopg import errors as pg
from psycopg.sql import Identifier

from . import db
from .errors import ConflictError, CycloneError, InvalidOptionError, SchemaVersionError

if TYPE_CHECKING:
    from .registry import Registry

OLDEST_SERVER = 15

# A table lock is asked for briefly and again: while a migration waits for one, every worker queues behind it.
_TABLE_LOCK = "2s"
_PAUSE_S = 0.05

Conn: TypeAlias = psycopg.Connection[Any]
AsyncConn: TypeAlias = psycopg.AsyncConnection[Any]


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One file of `migrations/`."""

    version: int
    name: str
    text: str
    transaction: bool
    breaking: bool

    def __str__(self) -> str:
        return f"{self.version:04d}_{self.name}"


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A migration as `status` shows it; `applied_at` is None while it is still to do."""

    version: int
    name: str
    applied_at: datetime | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a schema has and what this release has for it."""

    schema: str
    version: int | None
    latest: int
    migrations: Sequence[Applied]


@cache
def migrations() -> tuple[Migration, ...]:
    """The migrations of this release, oldest first."""
    found: list[Migration] = []
    for file in resources.files("cyclone").joinpath("migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name)
        if match:
            text = file.read_text(encoding="utf-8")
            found.append(
                Migration(
                    version=int(match[1]),
                    name=match[2],
                    text=text,
                    transaction=_header(text, "transaction", file.name),
                    breaking=_header(text, "breaking", file.name, default="no"),
                )
            )
    return tuple(sorted(found, key=lambda migration: migration.version))


def _header(text: str, name: str, file: str, default: str | None = None) -> bool:
    match = re.search(rf"^-- {name}: (\w+)", text, re.M)
    value = match[1] if match else default
    if value not in ("yes", "no"):
        raise CycloneError(f"the header of {file} must say `-- {name}: yes` or `no`")
    return value == "yes"


LATEST = migrations()[-1].version


# Reading


def read_version(conn: Conn, schema: str) -> int | None:
    """The newest migration that matters to this release, or None where nothing is installed.

    Newer ones that are not breaking do not matter: a release must go on working while its successor is rolled out.
    """
    with _explained(schema):
        found = conn.execute("SELECT to_regclass(%s)", (_table(schema),), binary=False).fetchone()
        if not found or found[0] is None:
            return None
        row = conn.execute(_version_query(schema)).fetchone()
        return row[0] if row else None


async def read_version_async(conn: AsyncConn, schema: str) -> int | None:
    """As `read_version`."""
    with _explained(schema):
        found = await (await conn.execute("SELECT to_regclass(%s)", (_table(schema),), binary=False)).fetchone()
        if not found or found[0] is None:
            return None
        row = await (await conn.execute(_version_query(schema))).fetchone()
        return row[0] if row else None


def require(version: int | None, schema: str) -> None:
    """Raises SchemaVersionError unless this release can work with a schema of that version."""
    option = "" if schema == "public" else f" --schema {schema}"
    if version is None:
        raise SchemaVersionError(
            f'schema "{schema}" holds no Cyclone tables; install them with `cyclone migrate up{option}`'
        )
    if version < LATEST:
        raise SchemaVersionError(
            f'schema "{schema}" is at version {version} and this release needs {LATEST};'
            f" upgrade it with `cyclone migrate up{option}`"
        )
    if version > LATEST:
        raise SchemaVersionError(
            f'schema "{schema}" is at version {version}, which this release cannot work with (it knows {LATEST});'
            " upgrade the package: pip install -U cyclone-jobs"
        )


def check(dsn: str, schema: str = "public") -> int:
    """The version of a schema that this release can work with, else SchemaVersionError."""
    db.quote_schema(schema)
    with _connect(dsn) as conn:
        version = read_version(conn, schema)
    require(version, schema)
    assert version is not None
    return version


def status(dsn: str, schema: str = "public") -> Status:
    """Which migrations a schema has, and which are still to do."""
    db.quote_schema(schema)
    with _connect(dsn) as conn:
        rows = [] if read_version(conn, schema) is None else _applied(conn, schema)
    listed = [Applied(version=number, name=name, applied_at=at) for number, name, at in rows]
    have = {applied.version for applied in listed}
    listed += [Applied(version=m.version, name=m.name, applied_at=None) for m in migrations() if m.version not in have]
    return Status(schema=schema, version=max(have, default=None), latest=LATEST, migrations=listed)


def sql(schema: str = "public", *, after: int = 0) -> str:
    """The migrations behind version `after` as one script, for Alembic, Django or a DBA; to be run in one transaction.

    It contains no BEGIN and COMMIT, because these tools bring their own.
    """
    if not 0 <= after <= LATEST:
        raise InvalidOptionError(f"after must be a version from 0 to {LATEST}, not {after}")
    parts = [f"-- Cyclone, schema {LATEST}. Run it in one transaction: psql -1 -v ON_ERROR_STOP=1 -f FILE"]
    if after == 0:
        parts += [f"CREATE SCHEMA IF NOT EXISTS {db.quote_schema(schema)};", _bookkeeping(schema) + ";"]
    for migration in migrations():
        if migration.version > after:
            text = _render(migration.text, schema)
            if not migration.transaction:
                # A script for one transaction cannot build an index concurrently; it holds the lock instead.
                text = text.replace(" CONCURRENTLY", "")
            parts += [f"-- {migration}", _record(migration, schema) + ";", text.rstrip()]
    return "\n\n".join(parts) + "\n"


# Installing and upgrading


def up(dsn: str, schema: str = "public", *, lock_timeout: float | timedelta = 60) -> list[str]:
    """Installs the schema or brings it to this release; the names of the migrations that this call applied.

    `lock_timeout` (seconds or a timedelta) bounds the wait for another migrator and for the locks of tables in use.
    """
    db.quote_schema(schema)
    wait_s = lock_timeout.total_seconds() if isinstance(lock_timeout, timedelta) else float(lock_timeout)
    if not wait_s > 0:
        raise InvalidOptionError(f"lock_timeout must be more than 0 seconds, not {wait_s:g}")
    deadline = time.monotonic() + wait_s
    done: list[str] = []
    with _connect(dsn) as conn:
        _check_server(conn)
        while True:
            have = None if read_version(conn, schema) is None else {row[0] for row in _applied(conn, schema)}
            todo = [m for m in migrations() if m.version not in (have or ())]
            if not todo:
                return done
            try:
                with _explained(schema):
                    applied = _apply(conn, schema, todo[0], fresh=have is None)
            except (pg.LockNotAvailable, pg.DeadlockDetected, pg.UniqueViolation) as exc:
                # A table in use, or somebody whose version row or schema was there first: look again.
                table = exc.diag.table_name or ""
                if (
                    isinstance(exc, pg.UniqueViolation)
                    and table != "cyclone_migrations"
                    and not table.startswith("pg_")
                ):
                    raise
                applied, reason = False, exc.diag.message_primary or str(exc)
            else:
                reason = "another migration of this schema is still running"
            if applied:
                done.append(str(todo[0]))
            elif time.monotonic() >= deadline:
                raise ConflictError(
                    f'migration {todo[0]} of schema "{schema}" could not start within {wait_s:g} s: {reason};'
                    " see who holds the lock with `cyclone doctor`, then run it again"
                )
            else:
                time.sleep(_PAUSE_S)


def _apply(conn: Conn, schema: str, migration: Migration, *, fresh: bool) -> bool:
    """Applies one migration; False if somebody else is migrating."""
    if migration.transaction:
        with conn.transaction():
            if not _lock(conn, schema, "pg_try_advisory_xact_lock"):
                return False
            conn.execute(f"SET LOCAL lock_timeout = '{_TABLE_LOCK}'; SET LOCAL statement_timeout = 0".encode())
            if fresh:
                _create_schema(conn, schema)
            # First, so that a migrator without the lock collides here and not halfway through the tables. It also
            # waits here for one that has not committed yet.
            conn.execute(_record(migration, schema).encode())
            conn.execute(_render(migration.text, schema).encode())
        return True
    if not _lock(conn, schema, "pg_try_advisory_lock"):
        return False
    try:
        conn.execute(f"SET lock_timeout = '{_TABLE_LOCK}'".encode())
        conn.execute(b"SET statement_timeout = 0")
        for statement in _statements(_render(migration.text, schema)):
            conn.execute(statement.encode())
        conn.execute(_record(migration, schema).encode())
    finally:
        _lock(conn, schema, "pg_advisory_unlock")
    return True


def _lock(conn: Conn, schema: str, function: str) -> bool:
    row = conn.execute(
        f"SELECT {function}(hashtextextended(%s, 0))".encode(), (f"cyclone migrate {schema}",)
    ).fetchone()
    return bool(row and row[0])


def _create_schema(conn: Conn, schema: str) -> None:
    # The rights are asked for beforehand: an error of CREATE would name the object, but not what to grant.
    row = conn.execute(
        b"""SELECT current_user, current_database(), n.oid IS NOT NULL,
                   CASE WHEN n.oid IS NULL THEN has_database_privilege(current_database(), 'CREATE')
                        ELSE has_schema_privilege(n.oid, 'CREATE') AND has_schema_privilege(n.oid, 'USAGE') END
            FROM (SELECT) one LEFT JOIN pg_namespace n ON n.nspname = %s""",
        (schema,),
    ).fetchone()
    assert row is not None
    user, database = Identifier(row[0]).as_string(None), Identifier(row[1]).as_string(None)
    exists, allowed = row[2:]
    if not allowed and exists:
        raise SchemaVersionError(
            f"role {user} lacks the right CREATE on schema {db.quote_schema(schema)} of database {database};"
            f" its owner can give it: GRANT USAGE, CREATE ON SCHEMA {db.quote_schema(schema)} TO {user}"
        )
    if not allowed:
        raise SchemaVersionError(
            f"role {user} lacks the right CREATE on database {database}, so it cannot make schema"
            f" {db.quote_schema(schema)}; the owner can give it (GRANT CREATE ON DATABASE {database} TO {user}) or make"
            f" the schema: CREATE SCHEMA {db.quote_schema(schema)} AUTHORIZATION {user}"
        )
    if not exists:
        conn.execute(f"CREATE SCHEMA {db.quote_schema(schema)}".encode())
    conn.execute(_bookkeeping(schema).encode())


def _check_server(conn: Conn) -> None:
    version, encoding = conn.info.server_version, conn.info.parameter_status("server_encoding")
    if version < OLDEST_SERVER * 10000:
        raise SchemaVersionError(f"the server is PostgreSQL {version // 10000}; Cyclone needs {OLDEST_SERVER} or newer")
    if encoding != "UTF8":
        raise SchemaVersionError(
            f'the database "{conn.info.dbname}" is encoded as {encoding}; Cyclone needs one that was created with'
            " ENCODING 'UTF8' TEMPLATE template0"
        )


# What this process can run


def register(dsn: str, schema: str, registry: Registry) -> None:
    """Writes the kinds of a registry with their options and the graphs of its workflows, for SQL and the command
    line, as a starting worker does.
    """
    with _connect(dsn) as conn:
        require(read_version(conn, schema), schema)
        conn.execute(_register_query(schema), _kinds(registry))
        for graph in _graphs(registry):
            conn.execute(db.statements(schema)["register_graph"], graph)


async def register_async(conn: AsyncConn, schema: str, registry: Registry) -> None:
    """As `register`, on a connection in autocommit."""
    await conn.execute(_register_query(schema), _kinds(registry))
    for graph in _graphs(registry):
        await conn.execute(db.statements(schema)["register_graph"], graph)


_KIND_COLUMNS = {
    "kind": "text",
    "version": "integer",
    "action": "boolean",
    "max_attempts": "integer",
    "max_reclaims": "integer",
    "timeout_s": "double precision",
    "queue": "text",
    "priority": "smallint",
}


def _graphs(registry: Registry) -> list[dict[str, Any]]:
    # In sorted order, as the kinds. The newest graph of a name is what SQL and the command line submit.
    found = sorted(registry.workflows.items())
    return [{"hash": one.spec.hash, "spec": one.spec.encode().decode(), "newest": True} for _, one in found]


@cache
def _register_query(schema: str) -> bytes:
    # One statement is one transaction; in sorted order, so that processes starting together cannot deadlock; and only
    # rows that differ, because an update that changes nothing locks its row too, and a pool's workers start together.
    names = list(_KIND_COLUMNS)
    table = f"{db.quote_schema(schema)}.cyclone_kinds".replace("%", "%%")
    arrays = ", ".join(f"%({name})s::{kind}[]" for name, kind in _KIND_COLUMNS.items())
    new = ", ".join(f"n.{name}" for name in names)
    old = ", ".join(f"k.{name}" for name in names)
    return f"""
        INSERT INTO {table} AS k ({", ".join(names)})
        SELECT {new} FROM unnest({arrays}) AS n({", ".join(names)})
        WHERE NOT EXISTS (SELECT FROM {table} k WHERE ({old}) IS NOT DISTINCT FROM ({new}))
        ORDER BY n.kind COLLATE "C", n.version
        ON CONFLICT (kind, version) DO UPDATE
        SET {", ".join(f"{name} = excluded.{name}" for name in names[2:])}, registered_at = now()
    """.encode()


# Helpers


def _connect(dsn: str) -> Conn:
    # As through a pooler: a script of many statements cannot be prepared, and settings are made where they are needed.
    return db.connect_sync(dsn, application_name="cyclone migrate", pooler=True)


def _applied(conn: Conn, schema: str) -> list[tuple[int, str, datetime]]:
    query = f"SELECT version, name, applied_at FROM {_table(schema)} ORDER BY version"
    return conn.execute(query.encode()).fetchall()


def _table(schema: str) -> str:
    return f"{db.quote_schema(schema)}.cyclone_migrations"


@cache
def _version_query(schema: str) -> bytes:
    return f"SELECT max(version) FROM {_table(schema)} WHERE version <= {LATEST} OR breaking".encode()


def _bookkeeping(schema: str) -> str:
    return f"""CREATE TABLE IF NOT EXISTS {_table(schema)} (
    version     integer PRIMARY KEY,
    name        text NOT NULL,
    breaking    boolean NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT now()
)"""


def _record(migration: Migration, schema: str) -> str:
    breaking = str(migration.breaking).lower()
    values = f"{migration.version}, '{migration.name}', {breaking}"
    return f"INSERT INTO {_table(schema)} (version, name, breaking) VALUES ({values})"


def _render(text: str, schema: str) -> str:
    return db.put_schema(text, db.quote_schema(schema))


def _statements(text: str) -> list[str]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    return [statement for statement in re.split(r";[ \t]*(?:\n|$)", lines) if statement.strip()]


@contextmanager
def _explained(schema: str) -> Generator[None]:
    """Turns what PostgreSQL says about rights and names into errors that say the way out."""
    try:
        yield
    except pg.InsufficientPrivilege as exc:
        raise SchemaVersionError(
            f'schema "{schema}": {exc.diag.message_primary}; connect as the owner of the tables or have the right given'
        ) from exc
    except (pg.DuplicateTable, pg.DuplicateObject, pg.DuplicateFunction) as exc:
        raise SchemaVersionError(
            f'schema "{schema}" already holds something under a name that Cyclone needs ({exc.diag.message_primary});'
            " give it a schema of its own with --schema"
        ) from exc
    except pg.ReservedName as exc:
        raise InvalidOptionError(f'schema "{schema}": {exc.diag.message_primary}') from exc


def _kinds(registry: Registry) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in _KIND_COLUMNS}
    for step in registry.steps.values():
        for version in step.versions:
            settings = step.settings
            row: dict[str, Any] = {
                "kind": step.name,
                "version": version,
                "action": step.action,
                "max_attempts": settings.max_attempts,
                "max_reclaims": settings.max_reclaims,
                "timeout_s": settings.timeout_s,
                "queue": settings.queue,
                "priority": settings.priority,
            }
            for name, values in columns.items():
                values.append(row[name])
    return columns
