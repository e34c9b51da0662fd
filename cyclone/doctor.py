"""Is this database healthy: quick checks, each with its remedy, and a deep one of what foreign keys would promise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

import msgspec
import psycopg
from psycopg.pq import TransactionStatus
from psycopg.sql import Identifier

from . import db, migrate
from .errors import InvalidOptionError, SchemaVersionError

Conn: TypeAlias = psycopg.Connection[Any]
Severity: TypeAlias = Literal["error", "warning", "note"]

# No count goes further: a look at a table with millions of rows must stay a look.
_COUNTED = 10_000


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be, and what to do about it.

    An error stops or slows work; a warning may come to that; a note says what could not be seen.
    """

    name: str
    severity: Severity
    text: str
    remedy: str


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """From where on something is worth a finding."""

    transaction_s: float = 300
    notify_usage: float = 0.2
    clock_skew_s: float = 2
    late_s: float = 30


def check(conn: Conn, schema: str = "public", *, limits: Limits | None = None) -> list[Finding]:
    """What is wrong with the database, errors first. Reads catalogs and short indexes only; writes nothing."""
    db.quote_schema(schema)
    try:
        migrate.require(migrate.read_version(conn, schema), schema)
    except SchemaVersionError as exc:
        return [Finding(name="schema version", severity="error", text=str(exc), remedy="see the message")]
    found = list(_missing_tables(conn, schema))
    if not found:
        limits = limits or Limits()
        found = [
            *_indexes(conn, schema),
            *_autovacuum(conn, schema),
            *_snapshots(conn, limits),
            *_notify_queue(conn, limits),
            *_clock(conn, limits),
            *_lives(conn, schema, limits),
            *_due(conn, schema, limits),
            *_without_worker(conn, schema),
        ]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _missing_tables(conn: Conn, schema: str) -> Iterator[Finding]:
    names = _named(r"CREATE (?:UNLOGGED )?TABLE \{schema\}\.(\w+)")
    have = _column(conn, "SELECT relname FROM pg_class WHERE relnamespace = %(schema)s::regnamespace", schema)
    for name in names:
        if name not in have:
            yield Finding(
                name="missing table",
                severity="error",
                text=f"table {name} does not exist in schema {schema!r}",
                remedy="restore it from a backup; `cyclone migrate sql` prints how it was made",
            )


def _indexes(conn: Conn, schema: str) -> Iterator[Finding]:
    quoted = db.quote_schema(schema)
    made = {
        match["name"]: " ".join(match[0].split())
        for migration in migrate.migrations()
        for match in re.finditer(r"CREATE (?:UNIQUE )?INDEX (?P<name>\w+)\s[^;]+", migration.text)
    }
    have = _column(
        conn,
        """SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
           WHERE c.relnamespace = %(schema)s::regnamespace AND i.indisvalid AND i.indisready""",
        schema,
    )
    broken = _column(
        conn,
        """SELECT c.relname FROM pg_index i
           JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid
           WHERE c.relnamespace = %(schema)s::regnamespace AND t.relname ~ '^cyclone_'
             AND NOT (i.indisvalid AND i.indisready)""",
        schema,
    )
    for name in sorted(broken):
        yield Finding(
            name="invalid index",
            severity="error",
            text=f"index {name} is invalid, so no query uses it (a concurrent build was interrupted)",
            remedy=f"REINDEX INDEX CONCURRENTLY {quoted}.{Identifier(name).as_string(None)}",
        )
    for name in sorted(made.keys() - have - broken):
        statement = made[name].replace("INDEX", "INDEX CONCURRENTLY", 1).replace("{schema}", quoted)
        yield Finding(
            name="missing index", severity="error", text=f"index {name} does not exist", remedy=statement.rstrip()
        )
    for table, key in (
        ("cyclone_steps", "cyclone_steps_pkey"),
        ("cyclone_steps", "cyclone_steps_run_node"),
        ("cyclone_ready", "cyclone_ready_pkey"),
        ("cyclone_claims", "cyclone_claims_pkey"),
        ("cyclone_lives", "cyclone_lives_pkey"),
    ):
        if key not in have | broken:
            yield Finding(
                name="missing index",
                severity="error",
                text=f"the unique constraint {key} of table {table} does not exist",
                remedy="add it as `cyclone migrate sql` prints it, with ALTER TABLE … ADD CONSTRAINT",
            )


def _autovacuum(conn: Conn, schema: str) -> Iterator[Finding]:
    for name in ("autovacuum", "track_counts"):
        if _value(conn, f"SELECT current_setting('{name}')") != "on":
            yield Finding(
                name="autovacuum",
                severity="error",
                text=f"the setting {name} is off, so tables grow and claims slow down",
                remedy=f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()",
            )
    tables = _column(
        conn,
        """SELECT c.relname FROM pg_class c, unnest(c.reloptions) AS o(text)
           WHERE c.relnamespace = %(schema)s::regnamespace AND c.relname ~ '^cyclone_'
             AND o.text ~ '^autovacuum_enabled=' AND NOT split_part(o.text, '=', 2)::boolean""",
        schema,
    )
    for name in sorted(tables):
        yield Finding(
            name="autovacuum",
            severity="error",
            text=f"autovacuum is off for table {name}, so it grows and claims slow down",
            remedy=f"ALTER TABLE {db.quote_schema(schema)}.{name} RESET (autovacuum_enabled)",
        )


def _snapshots(conn: Conn, limits: Limits) -> Iterator[Finding]:
    user, sees_all = _rows(conn, "SELECT current_user, pg_has_role('pg_read_all_stats', 'USAGE')")[0]
    if not sees_all:
        yield Finding(
            name="old transaction",
            severity="note",
            text=f"role {user!r} sees only transactions of its own",
            remedy=f"GRANT pg_read_all_stats TO {Identifier(user).as_string(None)}",
        )
    # What somebody runs is left out: it may hold what is nobody's business here.
    rows = conn.execute(
        """SELECT pid, coalesce(usename, '?'), coalesce(application_name, ''), coalesce(state, '?'),
                  backend_xid IS NOT NULL, date_trunc('second', clock_timestamp() - xact_start)::text
           FROM pg_stat_activity
           WHERE pid <> pg_backend_pid() AND (datname = current_database() OR datname IS NULL)
             AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND backend_type <> 'autovacuum worker'
             AND clock_timestamp() - xact_start >= make_interval(secs => %s)
           ORDER BY xact_start LIMIT 5""",
        (limits.transaction_s,),
    ).fetchall()
    for pid, user, application, state, writes, age in rows:
        yield Finding(
            name="old transaction",
            severity="warning",
            text=f"process {pid} (role {user}, application {application!r}, {state}) has held a"
            f" {'writing transaction' if writes else 'snapshot'} for {age}; what was deleted since cannot be removed",
            remedy=f"end it where it was begun, or SELECT pg_terminate_backend({pid})",
        )
    rows = conn.execute(
        """SELECT gid, date_trunc('second', clock_timestamp() - prepared)::text FROM pg_prepared_xacts
           WHERE database = current_database() AND clock_timestamp() - prepared >= make_interval(secs => %s)
           ORDER BY prepared LIMIT 5""",
        (limits.transaction_s,),
    ).fetchall()
    for gid, age in rows:
        yield Finding(
            name="old transaction",
            severity="warning",
            text=f"the prepared transaction {gid!r} has waited for its end for {age}",
            remedy="COMMIT PREPARED or ROLLBACK PREPARED it",
        )
    for name in _column(
        conn,
        """SELECT slot_name FROM pg_replication_slots
           WHERE NOT active AND (xmin IS NOT NULL OR catalog_xmin IS NOT NULL)""",
    ):
        yield Finding(
            name="old transaction",
            severity="warning",
            text=f"nobody reads the replication slot {name!r}, which keeps the server from cleaning up",
            remedy="start its reader, or pg_drop_replication_slot it",
        )


def _notify_queue(conn: Conn, limits: Limits) -> Iterator[Finding]:
    usage = _value(conn, "SELECT pg_notification_queue_usage()")
    if usage >= limits.notify_usage:
        yield Finding(
            name="notification queue",
            severity="warning",
            text=f"the queue of notifications is {usage:.0%} full; when it is full, commits that notify fail",
            remedy="end the session that listens inside a long transaction; it is the oldest one with LISTEN in"
            " pg_stat_activity",
        )


def _clock(conn: Conn, limits: Limits) -> Iterator[Finding]:
    before = datetime.now(UTC)
    database = _value(conn, "SELECT clock_timestamp()")
    after = datetime.now(UTC)
    # The true difference is known only up to the round trip, which is taken in favour of the clocks.
    skew = max(database - after, before - database, timedelta(0)).total_seconds()
    if skew >= limits.clock_skew_s:
        ahead = "ahead of" if database > after else "behind"
        yield Finding(
            name="clock skew",
            severity="warning",
            text=f"the database's clock is {skew:.1f} s {ahead} this machine's; Cyclone goes by it, logs do not",
            remedy="synchronise both with NTP",
        )


def _lives(conn: Conn, schema: str, limits: Limits) -> Iterator[Finding]:
    rows = _rows(
        conn,
        """SELECT host, pid, date_trunc('second', now() - lease_until)::text FROM {schema}.cyclone_lives
           WHERE ended_at IS NULL AND lease_until < now() - make_interval(secs => %(late)s)
           ORDER BY lease_until LIMIT 5""",
        schema,
        late=limits.late_s,
    )
    for host, pid, age in rows:
        yield Finding(
            name="stuck lease",
            severity="error",
            text=f"the lease of worker {pid} on {host} expired {age} ago and nobody has taken its steps back",
            remedy="start a sweeper: cyclone-pool has one, or run cyclone-sweeper",
        )
    count = _value(
        conn,
        """SELECT count(*) FROM (
               SELECT FROM {schema}.cyclone_claims c LEFT JOIN {schema}.cyclone_lives l ON l.id = c.life
               WHERE (l.id IS NULL OR l.ended_at < now() - make_interval(secs => %(late)s))
                 AND EXISTS (SELECT FROM {schema}.cyclone_steps s
                             WHERE s.id = ANY(c.steps) AND s.claim = c.id AND s.state = 'running') LIMIT %(most)s) c""",
        schema,
        late=limits.late_s,
    )
    if count:
        yield Finding(
            name="stuck lease",
            severity="error",
            text=f"{_many(count)} claims of workers that have ended still hold running steps",
            remedy="start a sweeper: cyclone-pool has one, or run cyclone-sweeper",
        )


def _due(conn: Conn, schema: str, limits: Limits) -> Iterator[Finding]:
    count = _value(
        conn,
        """SELECT count(*) FROM (
               SELECT FROM {schema}.cyclone_steps
               WHERE due_at IS NOT NULL AND due_at < now() - make_interval(secs => %(late)s) LIMIT %(most)s) s""",
        schema,
        late=limits.late_s,
    )
    if count:
        yield Finding(
            name="overdue steps",
            severity="error",
            text=f"{_many(count)} scheduled steps have been due for more than {limits.late_s:g} s",
            remedy="start a sweeper: cyclone-pool has one, or run cyclone-sweeper",
        )


def _without_worker(conn: Conn, schema: str) -> Iterator[Finding]:
    # Lanes are found by a walk along the key of the ready table, one probe a lane, however many tickets a lane holds.
    rows = _rows(
        conn,
        """WITH RECURSIVE lanes(lane) AS (
               (SELECT lane FROM {schema}.cyclone_ready ORDER BY lane LIMIT 1)
               UNION ALL
               SELECT (SELECT r.lane FROM {schema}.cyclone_ready r WHERE r.lane > l.lane ORDER BY r.lane LIMIT 1)
               FROM lanes l WHERE l.lane IS NOT NULL
           ), live AS MATERIALIZED (
               SELECT queues, kinds, versions FROM {schema}.cyclone_lives
               WHERE ended_at IS NULL AND lease_until >= now()
           ), known AS MATERIALIZED (
               SELECT q.queue, k.kind, k.version
               FROM live, unnest(live.queues) AS q(queue), unnest(live.kinds, live.versions) AS k(kind, version)
           ), waiting AS (
               SELECT ltrim(l.queue, '!') AS queue, l.kind, l.version, c.n, 'available' AS state
               FROM lanes p JOIN {schema}.cyclone_lanes l ON l.lane = p.lane
               CROSS JOIN LATERAL (SELECT count(*) AS n FROM (
                   SELECT FROM {schema}.cyclone_ready r WHERE r.lane = p.lane LIMIT %(most)s) t) c
               UNION ALL
               SELECT s.queue, s.kind, s.version, count(*), 'scheduled' FROM (
                   SELECT queue, kind, version FROM {schema}.cyclone_steps
                   WHERE due_at IS NOT NULL ORDER BY due_at LIMIT %(most)s) s
               GROUP BY 1, 2, 3
           )
           SELECT w.kind, w.version, w.queue, w.n, w.state FROM waiting w
           WHERE NOT EXISTS (SELECT FROM known k WHERE k.queue = w.queue AND k.kind = w.kind AND k.version = w.version)
           UNION ALL
           SELECT NULL, NULL, p.lane, c.n, 'available' FROM lanes p
           CROSS JOIN LATERAL (SELECT count(*) AS n FROM (
               SELECT FROM {schema}.cyclone_ready r WHERE r.lane = p.lane LIMIT %(most)s) t) c
           WHERE p.lane !~ '^[?!]' AND NOT EXISTS (SELECT FROM live WHERE p.lane = ANY(live.queues))
           ORDER BY 3, 1, 2, 5""",
        schema,
    )
    for kind, version, queue, count, state in rows:
        if kind is None:
            yield Finding(
                name="no worker for queue",
                severity="warning",
                text=f"no live worker serves queue {queue!r}, where {_many(count)} steps wait",
                remedy="start a pool with --queues that names it",
            )
        else:
            yield Finding(
                name="no worker for kind",
                severity="warning",
                text=f"no live worker knows kind {kind!r} version {version} in queue {queue!r};"
                f" {_many(count)} steps are {state}",
                remedy="start a pool whose target declares it and whose --queues name the queue, or cancel the steps",
            )


# The deep check


# The lane where a step's ticket belongs: its queue's, or that of its queue's isolated steps; and the one where it is
# put aside from there while the workers that see it do not know its kind.
_HOME = "(CASE WHEN s.isolated THEN '!' || s.queue ELSE s.queue END)"
_STRANGE = f"('?' || {_HOME} || chr(31) || s.kind || chr(31) || s.version)"

# What is said of a step, and the steps of which it is true.
_DEEP: Mapping[str, str] = {
    "is available without a ticket": """
        SELECT s.id FROM {schema}.cyclone_steps s WHERE s.state = 'available'
          AND NOT EXISTS (SELECT FROM {schema}.cyclone_ready r WHERE r.step = s.id AND r.ord = s.ord)""",
    "is available, but its ticket is in another lane or rank than its queue and priority say": """
        SELECT s.id FROM {schema}.cyclone_steps s WHERE s.state = 'available'
          AND EXISTS (SELECT FROM {schema}.cyclone_ready r WHERE r.step = s.id AND r.ord = s.ord)
          AND NOT EXISTS (
              SELECT FROM {schema}.cyclone_ready r WHERE r.step = s.id AND r.ord = s.ord
                AND r.rank IN (2 * s.priority, 2 * s.priority + 1)
                AND r.lane IN ({home}, {strange}))""",
    "is available, but the lane of its ticket is not listed": """
        SELECT s.id FROM {schema}.cyclone_steps s JOIN {schema}.cyclone_ready r ON r.step = s.id AND r.ord = s.ord
        WHERE s.state = 'available' AND r.lane = {strange}
          AND NOT EXISTS (SELECT FROM {schema}.cyclone_lanes l WHERE l.lane = r.lane AND l.queue = {home}
                          AND l.kind = s.kind AND l.version = s.version)""",
    "is running under a claim that does not exist": """
        SELECT s.id FROM {schema}.cyclone_steps s WHERE s.state = 'running'
          AND NOT EXISTS (SELECT FROM {schema}.cyclone_claims c WHERE c.id = s.claim)""",
    "is running under a claim that does not list it": """
        SELECT s.id FROM {schema}.cyclone_steps s JOIN {schema}.cyclone_claims c ON c.id = s.claim
        WHERE s.state = 'running' AND NOT s.id = ANY(c.steps)""",
    "is running under a claim whose worker life does not exist": """
        SELECT s.id FROM {schema}.cyclone_steps s JOIN {schema}.cyclone_claims c ON c.id = s.claim
        WHERE s.state = 'running' AND NOT EXISTS (SELECT FROM {schema}.cyclone_lives l WHERE l.id = c.life)""",
    "is scheduled without a due time": """
        SELECT id FROM {schema}.cyclone_steps WHERE state = 'scheduled' AND due_at IS NULL""",
    "is not scheduled and has a due time": """
        SELECT id FROM {schema}.cyclone_steps WHERE state <> 'scheduled' AND due_at IS NOT NULL""",
    "has ended without a time, or has a time without having ended": """
        SELECT id FROM {schema}.cyclone_steps
        WHERE (state IN ('completed', 'discarded', 'cancelled')) IS DISTINCT FROM (finished_at IS NOT NULL)""",
    "belongs to a run that does not exist": """
        SELECT s.id FROM {schema}.cyclone_steps s
        WHERE s.run_id <> s.id AND NOT EXISTS (SELECT FROM {schema}.cyclone_runs r WHERE r.id = s.run_id)""",
    "has the id of a workflow's run": """
        SELECT s.id FROM {schema}.cyclone_steps s
        WHERE s.run_id = s.id AND EXISTS (SELECT FROM {schema}.cyclone_runs r WHERE r.id = s.id)""",
    "waits for another number of nodes than have not ended": """
        SELECT s.id FROM {schema}.cyclone_steps s LEFT JOIN (
            SELECT c.child, count(*) AS n FROM {schema}.cyclone_steps p, unnest(p.children) AS c(child)
            WHERE p.state NOT IN ('completed', 'discarded', 'cancelled') GROUP BY c.child) o ON o.child = s.id
        WHERE (s.state = 'pending' AND s.map_step IS NULL OR s.state = 'waiting') AND s.pending <> coalesce(o.n, 0)""",
    "waits for nothing": """
        SELECT id FROM {schema}.cyclone_steps
        WHERE (state = 'pending' AND map_step IS NULL OR state = 'waiting') AND pending = 0""",
    "is a run that counts another number of open ends than it has": """
        SELECT r.id FROM {schema}.cyclone_runs r WHERE r.state = 'running' AND r.graph IS NOT NULL AND r.open_sinks <> (
            SELECT count(*) FROM {schema}.cyclone_steps s
            WHERE s.run_id = r.id AND s.sink AND s.map_step IS NULL
              AND s.state NOT IN ('completed', 'discarded', 'cancelled'))""",
    "is a run that goes on with nothing left to do": """
        SELECT r.id FROM {schema}.cyclone_runs r WHERE r.state = 'running' AND r.graph IS NOT NULL AND NOT EXISTS (
            SELECT FROM {schema}.cyclone_steps s
            WHERE s.run_id = r.id AND s.state NOT IN ('completed', 'discarded', 'cancelled'))""",
    "is a run that has ended, with steps that go on": """
        SELECT r.id FROM {schema}.cyclone_runs r WHERE r.state <> 'running' AND r.ending IS NULL AND EXISTS (
            SELECT FROM {schema}.cyclone_steps s
            WHERE s.run_id = r.id AND s.state NOT IN ('completed', 'discarded', 'cancelled'))""",
    "counts less than nothing": """
        SELECT id FROM {schema}.cyclone_steps WHERE attempts < 0 OR snoozes < 0 OR reclaims < 0""",
    "is listed with an error, but does not exist": """
        SELECT DISTINCT e.step FROM {schema}.cyclone_errors e
        WHERE NOT EXISTS (SELECT FROM {schema}.cyclone_steps s WHERE s.id = e.step)""",
    "has an error of an attempt that never was": """
        SELECT DISTINCT s.id FROM {schema}.cyclone_errors e JOIN {schema}.cyclone_steps s ON s.id = e.step
        WHERE e.attempt < 0 OR e.attempt > greatest(s.attempts, 1)""",
}
_SHOWN = 10


def deep(conn: Conn, schema: str = "public") -> list[str]:
    """What is damaged, in words; empty if nothing is. Reads whole tables, in one snapshot, so it may run under load."""
    if conn.info.transaction_status is not TransactionStatus.IDLE:
        raise InvalidOptionError("the deep check needs a connection that is not in a transaction")
    found: list[str] = []
    quoted = db.quote_schema(schema)
    with conn.transaction():
        conn.execute(b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        conn.execute(b"SET LOCAL statement_timeout = 0")
        # Cyclone's own sessions keep away from whole tables; this is the one place that wants them.
        conn.execute(b"SET LOCAL enable_seqscan = on")
        for what, query in _DEEP.items():
            query = query.replace("{home}", _HOME).replace("{strange}", _STRANGE)
            text = f"SELECT id, count(*) OVER () FROM ({query}) f(id) ORDER BY id LIMIT {_SHOWN}"
            rows = conn.execute(text.replace("{schema}", quoted).encode()).fetchall()
            found += [f"step {step} {what}" for step, _ in rows]
            if rows and rows[0][1] > len(rows):
                found.append(f"… and {rows[0][1] - len(rows)} more steps: {what}")
    return found


# Helpers


def _named(pattern: str) -> list[str]:
    return [name for migration in migrate.migrations() for name in re.findall(pattern, migration.text)]


def _rows(conn: Conn, query: str, schema: str = "public", **params: object) -> list[tuple[Any, ...]]:
    text = query.replace("{schema}", db.quote_schema(schema).replace("%", "%%"))
    return conn.execute(text.encode(), {"most": _COUNTED, "schema": db.quote_schema(schema), **params}).fetchall()


def _column(conn: Conn, query: str, schema: str = "public") -> set[str]:
    return {row[0] for row in _rows(conn, query, schema)}


def _value(conn: Conn, query: str, schema: str = "public", **params: object) -> Any:
    return _rows(conn, query, schema, **params)[0][0]


def _many(count: int) -> str:
    return f"{count:,}" if count < _COUNTED else f"{_COUNTED:,} or more"
