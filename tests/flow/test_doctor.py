"""Each fault is made, and must be named with its remedy."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from cyclone import doctor

# Most tests here leave behind what the deep check is there to find.
pytestmark = pytest.mark.no_deep_check

US = "\x1f"
LIFE = 900


def step(conn: psycopg.Connection, id: int, *, ticket: str | None = None, rank: int = 11, **columns: Any) -> None:
    """A standalone step, available unless `columns` say otherwise, with a ticket in the lane `ticket`."""
    row: dict[str, Any] = {
        "id": id,
        "run_id": id,
        "ord": id,
        "state": "available",
        "node": "resize",
        "kind": "resize",
        "input": "1",
        "max_attempts": 5,
        **columns,
    }
    marks = ", ".join(f"%({name})s" for name in row)
    conn.execute(f"INSERT INTO cyclone_steps ({', '.join(row)}) VALUES ({marks})".encode(), row)
    if ticket is not None:
        conn.execute(
            "INSERT INTO cyclone_ready (lane, rank, ord, step) VALUES (%s, %s, %s, %s)", (ticket, rank, id, id)
        )


def life(conn: psycopg.Connection, *kinds: str, queues: tuple[str, ...] = ("default",), lease: str = "1 hour") -> None:
    conn.execute(
        """INSERT INTO cyclone_lives (id, host, pid, queues, kinds, versions, lease_until)
           VALUES (%s, 'box', 4711, %s, %s, %s, now() + %s::interval)""",
        (LIFE, list(queues), list(kinds), [1] * len(kinds), lease),
    )


def lane(conn: psycopg.Connection, kind: str, queue: str = "default") -> str:
    name = f"?{queue}{US}{kind}{US}1"
    conn.execute("INSERT INTO cyclone_lanes (lane, queue, kind, version) VALUES (%s, %s, %s, 1)", (name, queue, kind))
    return name


def found(conn: psycopg.Connection, name: str, schema: str = "public", **limits: float) -> list[doctor.Finding]:
    findings = [f for f in doctor.check(conn, schema, limits=doctor.Limits(**limits)) if f.name == name]
    assert all(f.text and f.remedy for f in findings)
    return findings


def test_a_healthy_database_has_no_findings(conn: psycopg.Connection) -> None:
    life(conn, "resize")
    step(conn, 1, ticket="default")
    step(conn, 2, state="completed", finished_at="now")
    assert doctor.check(conn) == []
    assert doctor.deep(conn) == []


# The quick look


@pytest.mark.contract("B8")
def test_a_missing_schema(conn: psycopg.Connection) -> None:
    (finding,) = doctor.check(conn, "jobs")
    assert finding.severity == "error" and "cyclone migrate up --schema jobs" in finding.text + finding.remedy


def test_a_missing_table(conn: psycopg.Connection) -> None:
    conn.execute("DROP TABLE cyclone_sleepers")
    (finding,) = found(conn, "missing table")
    assert "cyclone_sleepers" in finding.text


@pytest.mark.contract("B8")
def test_a_missing_index_comes_with_the_statement_that_makes_it(conn: psycopg.Connection) -> None:
    conn.execute("DROP INDEX cyclone_steps_due_at; DROP INDEX idx_runs_submit_key")
    due, submit = found(conn, "missing index")
    assert "cyclone_steps_due_at" in due.text and "idx_runs_submit_key" in submit.text
    conn.execute(due.remedy.encode())
    conn.execute(submit.remedy.encode())
    assert doctor.check(conn) == []


def test_a_missing_unique_constraint(conn: psycopg.Connection) -> None:
    conn.execute("ALTER TABLE cyclone_steps DROP CONSTRAINT cyclone_steps_run_node")
    (finding,) = found(conn, "missing index")
    assert "cyclone_steps_run_node" in finding.text


@pytest.mark.contract("B8")
def test_an_invalid_index(conn: psycopg.Connection) -> None:
    step(conn, 1, ticket="default")
    step(conn, 2, ticket="default")
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("CREATE UNIQUE INDEX CONCURRENTLY half_built ON cyclone_steps (kind)")
    (finding,) = found(conn, "invalid index")
    assert finding.remedy == 'REINDEX INDEX CONCURRENTLY "public"."half_built"'
    conn.execute("DROP INDEX half_built")


@pytest.mark.contract("B8")
def test_autovacuum_off_for_a_table(conn: psycopg.Connection) -> None:
    conn.execute("ALTER TABLE cyclone_ready SET (autovacuum_enabled = off)")
    (finding,) = found(conn, "autovacuum")
    assert "cyclone_ready" in finding.text
    conn.execute(finding.remedy.encode())
    assert found(conn, "autovacuum") == []


@pytest.mark.contract("B8")
def test_an_old_transaction_and_who_holds_it(dsn: str, conn: psycopg.Connection) -> None:
    with psycopg.connect(conninfo.make_conninfo(dsn, application_name="a report")) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        (reader,) = found(conn, "old transaction", transaction_s=0)
        assert "a report" in reader.text and str(other.info.backend_pid) in reader.remedy
        assert "a snapshot" in reader.text
        other.execute("SELECT pg_current_xact_id()")
        (writer,) = found(conn, "old transaction", transaction_s=0)
        assert "writing transaction" in writer.text
        assert found(conn, "old transaction", transaction_s=3600) == []


def test_a_role_that_cannot_see_others_is_told(conn: psycopg.Connection) -> None:
    conn.execute("GRANT USAGE ON SCHEMA public TO pg_monitor")
    conn.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO pg_signal_backend")
    conn.execute("SET ROLE pg_signal_backend")
    (finding,) = found(conn, "old transaction")
    assert finding.severity == "note" and "pg_read_all_stats" in finding.remedy
    conn.execute("RESET ROLE")


@pytest.mark.contract("B8")
def test_the_notification_queue(conn: psycopg.Connection) -> None:
    assert found(conn, "notification queue") == []
    (finding,) = found(conn, "notification queue", notify_usage=0)
    assert "% full" in finding.text


@pytest.mark.contract("B8")
def test_clocks_that_differ(conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime, timedelta

    class Late(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Late:
            return cls.fromtimestamp(datetime.now(UTC).timestamp() - 90, tz)

    monkeypatch.setattr(doctor, "datetime", Late)
    (finding,) = found(conn, "clock skew")
    assert "ahead of" in finding.text
    assert (
        timedelta(seconds=89)
        < timedelta(seconds=float(finding.text.split(" s ")[0].split()[-1]))
        < timedelta(minutes=2)
    )


@pytest.mark.contract("B8")
def test_an_expired_lease_that_nobody_ended(conn: psycopg.Connection) -> None:
    life(conn, "resize", lease="-1 minute")
    (finding,) = found(conn, "stuck lease")
    assert "4711 on box" in finding.text and "sweeper" in finding.remedy
    assert found(conn, "stuck lease", late_s=3600) == []


@pytest.mark.contract("B8")
def test_running_steps_of_a_life_that_ended(conn: psycopg.Connection) -> None:
    life(conn, "resize", lease="-1 minute")
    conn.execute("UPDATE cyclone_lives SET ended_at = now() - interval '1 minute', end_reason = 'expired'")
    step(conn, 1, state="running", claim=7)
    assert found(conn, "stuck lease") == []
    conn.execute("INSERT INTO cyclone_claims (id, life, steps) VALUES (7, %s, '{1}')", (LIFE,))
    (finding,) = found(conn, "stuck lease")
    assert finding.text.startswith("1 claims")


def test_overdue_steps(conn: psycopg.Connection) -> None:
    life(conn, "resize")
    step(conn, 1, state="scheduled", due_at="-infinity")
    step(conn, 2, state="scheduled", due_at="infinity")
    (finding,) = found(conn, "overdue steps")
    assert finding.text.startswith("1 scheduled")


@pytest.mark.contract("E15", "B8")
def test_kinds_that_no_live_worker_knows(conn: psycopg.Connection) -> None:
    life(conn, "resize")
    step(conn, 1, kind="strange", ticket=lane(conn, "strange"))
    step(conn, 2, kind="later", state="scheduled", due_at="infinity")
    step(conn, 3, state="scheduled", due_at="infinity")
    # Known, but by a worker of another queue.
    step(conn, 4, queue="mail", ticket=lane(conn, "resize", "mail"))
    later, strange, mail = found(conn, "no worker for kind")
    assert "'strange' version 1 in queue 'default'; 1 steps are available" in strange.text
    assert "'later' version 1 in queue 'default'; 1 steps are scheduled" in later.text
    assert "'resize' version 1 in queue 'mail'" in mail.text

    conn.execute(
        "UPDATE cyclone_lives SET kinds = '{resize,strange,later}', versions = '{1,1,1}', queues = '{default,mail}'"
    )
    assert found(conn, "no worker for kind") == []
    step(conn, 5, kind="strange", isolated=True, ticket=lane(conn, "strange", "!mail"))
    assert found(conn, "no worker for kind") == []
    conn.execute("UPDATE cyclone_lives SET lease_until = now() - interval '1 second'")
    assert len(found(conn, "no worker for kind")) == 5, "an expired life is none"


def test_a_queue_that_nobody_serves(conn: psycopg.Connection) -> None:
    life(conn, "resize")
    step(conn, 1, queue="mail", ticket="mail")
    step(conn, 2, ticket="default")
    (finding,) = found(conn, "no worker for queue")
    assert "'mail', where 1 steps" in finding.text


# The deep look


def deep(conn: psycopg.Connection) -> list[str]:
    for name in ("finished", "due", "ticket", "claim"):
        conn.execute(f"ALTER TABLE cyclone_steps DROP CONSTRAINT IF EXISTS cyclone_steps_{name}")
    return doctor.deep(conn)


DAMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "no ticket": ("available without a ticket", {}),
    "ticket in the wrong lane": ("another lane", {"ticket": "mail"}),
    "ticket in the wrong rank": ("another lane or rank", {"ticket": "default", "rank": 9}),
    "lane of another kind": ("another lane", {"ticket": f"?default{US}mail{US}1"}),
    "lane not listed": ("not listed", {"ticket": f"?default{US}resize{US}1"}),
    "isolated in the common lane": ("another lane", {"ticket": "default", "isolated": True}),
    "no claim": ("claim that does not exist", {"state": "running", "claim": 99}),
    "claim of others": ("does not list it", {"state": "running", "claim": 7}),
    "claim without life": ("life does not exist", {"state": "running", "claim": 8}),
    "scheduled for never": ("without a due time", {"state": "scheduled"}),
    "due after its end": ("has a due time", {"state": "completed", "finished_at": "now", "due_at": "now"}),
    "ended at no time": ("ended without a time", {"state": "completed"}),
    "time without end": ("without having ended", {"ticket": "default", "finished_at": "now"}),
    "no such run": ("run that does not exist", {"run_id": 77, "ticket": "default"}),
    "run and step with one id": ("id of a workflow's run", {"id": 50, "ticket": "default"}),
    "negative attempts": ("less than nothing", {"attempts": -1, "ticket": "default"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(conn: psycopg.Connection, damage: str) -> None:
    life(conn, "resize")
    conn.execute("INSERT INTO cyclone_claims (id, life, steps) VALUES (7, %s, '{4}'), (8, 12345, '{10}')", (LIFE,))
    conn.execute("INSERT INTO cyclone_runs (id, workflow, input) VALUES (50, 'checkout', '1')")
    assert deep(conn) == []
    says, columns = DAMAGES[damage]
    step(conn, **{"id": 10, **columns})
    (finding,) = deep(conn)
    assert finding.startswith(f"step {columns.get('id', 10)} ") and says in finding


@pytest.mark.parametrize(("attempt", "says"), [(2, "attempt that never was"), (-1, "attempt that never was")])
def test_damaged_errors_are_found(conn: psycopg.Connection, attempt: int, says: str) -> None:
    step(conn, 1, ticket="default", attempts=1)
    insert = """INSERT INTO cyclone_errors (step, attempt, at, kind, message, traceback)
                VALUES (%s, %s, now(), 'retryable', '', '')"""
    conn.execute(insert, (1, 1))
    assert doctor.deep(conn) == []
    conn.execute(insert, (1, attempt))
    (finding,) = doctor.deep(conn)
    assert says in finding
    conn.execute("DELETE FROM cyclone_errors")
    conn.execute(insert, (2, 1))
    assert doctor.deep(conn) == ["step 2 is listed with an error, but does not exist"]


def test_what_is_allowed_is_not_damage(conn: psycopg.Connection) -> None:
    life(conn, "resize")
    conn.execute("UPDATE cyclone_lives SET ended_at = now(), end_reason = 'expired'")
    conn.execute("INSERT INTO cyclone_claims (id, life, steps) VALUES (7, %s, '{1,2,3}'), (8, 5, '{9}')", (LIFE,))
    step(conn, 1, state="running", claim=7)
    step(conn, 2, state="completed", claim=7, finished_at="now", ticket="default")
    step(conn, 3, ticket=lane(conn, "resize"), rank=10)
    conn.execute("INSERT INTO cyclone_ready (lane, rank, ord, step) VALUES ('default', 11, 1, 3), ('gone', 0, 2, 404)")
    conn.execute("INSERT INTO cyclone_runs (id, workflow, input) VALUES (50, 'checkout', '1')")
    step(conn, 51, run_id=50, state="pending", ord=None)
    step(conn, 60, ticket="!default", isolated=True)
    step(conn, 61, ticket=lane(conn, "mail", "!default"), isolated=True, kind="mail")
    assert doctor.deep(conn) == []


def test_much_damage_is_counted_and_not_listed(conn: psycopg.Connection) -> None:
    for number in range(1, 31):
        step(conn, number)
    findings = doctor.deep(conn)
    assert findings[0] == "step 1 is available without a ticket"
    assert len(findings) == 11 and findings[-1] == "… and 20 more steps: is available without a ticket"


def test_it_reads_one_snapshot(dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim between two of its queries is not taken for damage."""
    life(conn, "resize")
    step(conn, 1, ticket="default")
    conn.execute("DELETE FROM cyclone_claims")
    with psycopg.connect(dsn, autocommit=True) as worker:
        queries = dict(doctor._DEEP)

        class Interrupted(dict[str, str]):
            def items(self) -> Any:
                for number, item in enumerate(queries.items()):
                    yield item
                    if number == 0:
                        worker.execute("DELETE FROM cyclone_ready")
                        worker.execute("UPDATE cyclone_steps SET state = 'running', claim = 7")

        monkeypatch.setattr(doctor, "_DEEP", Interrupted())
        assert doctor.deep(conn) == []
    monkeypatch.undo()
    assert doctor.deep(conn) == ["step 1 is running under a claim that does not exist"]


def test_it_needs_a_connection_outside_a_transaction(conn: psycopg.Connection) -> None:
    from cyclone import errors

    with conn.transaction(), pytest.raises(errors.InvalidOptionError, match="not in a transaction"):
        doctor.deep(conn)
