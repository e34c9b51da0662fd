"""Reopening: a discarded step goes on as the same step, and who wanted that is known."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, deliver, engine, errors, fire, read, state, take, until

import cyclone
from cyclone import (
    Client,
    Context,
    EventKind,
    InvalidOptionError,
    InvalidStateError,
    NotFoundError,
    StepState,
    SyncClient,
    TransactionRequiredError,
    cli,
    events,
    sweep,
)
from cyclone.model import Failure, Outcome, Verb
from cyclone.states import ErrorKind

Conn = psycopg.Connection[Any]

SCARS = {
    "attempts": 5, "reclaims": 3, "snoozes": 2, "isolated": True, "resume": True, "claim": 77,
    "error_kind": "crashed", "error": "the worker died", "last_crash": "SIGKILL",
}  # fmt: skip


def discarded(conn: Conn, kind: str = "noop", **columns: Any) -> factories.Made:
    """A discarded step with its error listed."""
    made = factories.step(conn, kind, "discarded", **{**SCARS, **columns})
    conn.execute(
        """INSERT INTO cyclone_errors (step, attempt, at, kind, message, traceback)
           VALUES (%s, %s, now(), 'crashed', 'the worker died', 'T')""",
        (made.id, read(conn, made, "attempts")),
    )
    return made


def workflow(conn: Conn, *states: str) -> tuple[str, list[factories.Made]]:
    """A run with a row of its own and one node for each state."""
    row = conn.execute(
        "INSERT INTO cyclone_runs (id, workflow, input) VALUES (nextval('cyclone_ids'), 'w', '{}') RETURNING id"
    ).fetchone()
    assert row is not None
    number: int = row[0]
    nodes = [factories.step(conn, state=one, run_id=number, node=f"n{n}") for n, one in enumerate(states)]
    return str(number), nodes


@pytest.fixture
def client(dsn: str) -> Iterator[SyncClient]:
    with SyncClient(dsn) as client:
        yield client


# In place


@pytest.mark.contract("O1", "O3", "D10")
def test_the_same_row_is_available_again(client: SyncClient, conn: Conn) -> None:
    made = discarded(conn, queue="mail", priority=2)
    kept = read(conn, made, "id", "run_id", "node", "input", "enqueued_at", "attempts")
    before = client.get_step(made.run_id, "noop").errors
    client.retry(made.run_id, "noop")
    assert read(conn, made, "id", "run_id", "node", "input", "enqueued_at", "attempts") == kept
    assert factories.count(conn, "cyclone_steps") == 1
    info = client.get_step(made.run_id, "noop")
    assert (info.state, info.finished_at, info.error_kind, info.error) == (StepState.AVAILABLE, None, None, None)
    assert (info.attempts, info.max_attempts, info.reclaims, info.snoozes, info.last_crash) == (5, 6, 0, 0, None)
    assert read(conn, made, "resume", "isolated", "ready_at > enqueued_at") == (False, False, True)
    assert info.errors == before and len(before) == 1
    ticket = conn.execute("SELECT lane, rank, ord, step FROM cyclone_ready").fetchall()
    assert ticket == [("mail", 5, read(conn, made, "ord"), made.id)]


@pytest.mark.contract("O4", "O5", "O10", "K2", "K6")
async def test_the_next_call_has_the_next_number_and_the_same_key(dsn: str, conn: Conn) -> None:
    factories.ledger(conn)
    conn.execute("CREATE UNIQUE INDEX ON ledger (run_id, node)")
    calls: list[tuple[int, str]] = []
    broken = True

    @cyclone.step("charge", max_attempts=5, backoff=cyclone.fixed(60))
    async def charge(ctx: Context) -> str:
        calls.append((ctx.attempt, ctx.idempotency_key))
        conn.execute("INSERT INTO ledger (run_id, node) VALUES (%s, %s) ON CONFLICT DO NOTHING", (ctx.run_id, ctx.node))
        if broken:
            raise RuntimeError("down")
        return "paid"

    async with Client(dsn) as client, factories.worker(dsn, charge):
        handle = await charge.enqueue(client)
        while await until(lambda: handle.state()) is not StepState.EXHAUSTED:
            await fire(dsn)
        await handle.retry()
        assert await handle.wait(10) is StepState.EXHAUSTED
        broken = False
        await handle.retry()
        assert await handle.result(10) == "paid"
    assert [attempt for attempt, _ in calls] == [1, 2, 3, 4, 5, 6, 7]
    assert {key for _, key in calls} == {f"{handle.run_id}:charge"}
    assert factories.count(conn, "ledger") == 1
    assert len(errors(conn, int(handle.run_id))) == 6


@pytest.mark.contract("O6", "O10")
@pytest.mark.parametrize(("given", "granted"), [(None, 1), (1, 1), (3, 3)])
async def test_so_many_attempts_are_granted(dsn: str, conn: Conn, given: int | None, granted: int) -> None:
    @cyclone.step("doomed", max_attempts=2, backoff=lambda attempt: timedelta(0))
    async def doomed(ctx: Context) -> None:
        raise RuntimeError("down")

    made = factories.step(conn, "doomed", "discarded", attempts=2, max_attempts=2)
    async with Client(dsn) as client, factories.worker(dsn, doomed):
        await client.retry(made.run_id, "doomed", additional_attempts=given)
        await until(lambda: state(conn, made) == "discarded")
    assert read(conn, made, "attempts", "max_attempts") == (2 + granted, 2 + granted)
    assert len(errors(conn, made)) == granted


async def test_a_permanent_failure_counts_as_an_attempt_that_was_never_called(dsn: str, conn: Conn) -> None:
    # An input that could not be decoded: no attempt was spent, and the next one is the first.
    made = discarded(conn, attempts=0, error_kind="invalid_input")
    async with Client(dsn) as client:
        await client.retry(made.run_id, "noop", additional_attempts=2**31 - 1)
        assert read(conn, made, "attempts", "max_attempts") == (0, 2**31 - 1)
        made = discarded(conn, attempts=9)
        await client.retry(made.run_id, "noop", additional_attempts=2**31 - 1)
        assert read(conn, made, "attempts", "max_attempts") == (9, 2**31 - 1)


@pytest.mark.contract("E12", "O4")
async def test_after_a_crash_limit_the_count_begins_anew(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, state="running", life="ended", reclaims=9, isolated=True)
    conn.execute(
        """INSERT INTO cyclone_kinds (kind, version, action, max_attempts, max_reclaims, queue, priority)
           VALUES ('noop', 1, false, 5, 10, 'default', 5)"""
    )
    async with Client(dsn) as client, engine(dsn) as own:
        await sweep.once(own, SQL)
        assert read(conn, made, "state", "error_kind", "attempts") == ("discarded", "crashed", 1)
        await client.retry(made.run_id, "noop")
        (got,) = await take(own, factories.life(conn))
        assert (got.id, got.attempt, got.max_attempts, got.reclaims) == (made.id, 2, 2, 0)
        await deliver(dsn, Outcome(got, Verb.COMPLETE, "1"))


@pytest.mark.contract("E9")
async def test_what_the_last_worker_still_sends_changes_nothing(dsn: str, conn: Conn) -> None:
    made = factories.step(conn)
    failure = Failure(ErrorKind.PERMANENT, "no", "")
    async with Client(dsn) as client, engine(dsn) as own:
        (got,) = await take(own, factories.life(conn))
        discard = Outcome(got, Verb.DISCARD, failure=failure)
        await deliver(dsn, discard)
        await client.retry(made.run_id, "noop")
        before = read(conn, made, "*")
        for again in (discard, Outcome(got, Verb.COMPLETE, "1"), Outcome(got, Verb.RELEASE)):
            await deliver(dsn, again)
    assert read(conn, made, "*") == before
    assert [kind for (kind,) in conn.execute("SELECT kind FROM cyclone_events ORDER BY id")] == [
        "discarded",
        "reopened",
    ]


# All of a run


@pytest.mark.contract("O2", "O3")
def test_all_discarded_nodes_of_a_run_in_one_commit(client: SyncClient, conn: Conn) -> None:
    run_id, nodes = workflow(conn, "discarded", "completed", "discarded", "scheduled", "cancelled", "running")
    other = discarded(conn)
    untouched = [read(conn, one, "*") for one in (*nodes[1::2], nodes[4], other)]
    assert client.retry_all(run_id, additional_attempts=2, reason="fixed") == 2
    assert [state(conn, one) for one in nodes] == [
        "available", "completed", "available", "scheduled", "cancelled", "running",
    ]  # fmt: skip
    assert [read(conn, one, "*") for one in (*nodes[1::2], nodes[4], other)] == untouched
    assert [read(conn, one, "max_attempts") for one in nodes[::2]] == [3, 3, 5]
    rows = conn.execute(
        "SELECT step, detail ->> 'reason', count(*) OVER (PARTITION BY txid) FROM cyclone_events"
    ).fetchall()
    assert sorted(rows) == [(nodes[0].id, "fixed", 2), (nodes[2].id, "fixed", 2)]


@pytest.mark.contract("O12")
def test_without_a_discarded_node_nothing_changes(client: SyncClient, conn: Conn) -> None:
    run_id, nodes = workflow(conn, "completed", "available", "scheduled", "cancelled", "running", "pending")
    before = [read(conn, one, "*") for one in nodes]
    assert client.retry_all(run_id) == 0
    assert [read(conn, one, "*") for one in nodes] == before
    assert factories.count(conn, "cyclone_events") == 0


# Refused


@pytest.mark.contract("O12")
@pytest.mark.parametrize("now", [one.value for one in StepState if one is not StepState.EXHAUSTED])
def test_only_a_discarded_node_can_be_reopened(client: SyncClient, conn: Conn, now: str) -> None:
    made = factories.step(conn, state=now)
    before = read(conn, made, "*")
    with pytest.raises(InvalidStateError, match=now):
        client.retry(made.run_id, "noop")
    assert read(conn, made, "*") == before
    assert factories.count(conn, "cyclone_events") == 0


@pytest.mark.contract("O12")
async def test_what_is_not_there(dsn: str, conn: Conn) -> None:
    made = discarded(conn)
    with SyncClient(dsn) as sync_client:
        async with Client(dsn) as client:
            for run_id in ("999999", "x", "", "-1", "9" * 30):
                with pytest.raises(NotFoundError):
                    await client.retry(run_id, "noop")
                with pytest.raises(NotFoundError):
                    sync_client.retry_all(run_id)
            with pytest.raises(NotFoundError, match="other"):
                await client.retry(made.run_id, "other")
    assert state(conn, made) == "discarded"


@pytest.mark.contract("O13")
@pytest.mark.parametrize(
    "wrong",
    [
        *({"additional_attempts": value} for value in (0, -1, 1.5, True, "3", 2**31)),
        *({"reason": value} for value in ("a\0b", "\ud800", "x" * 10_001, 3)),
        *({"actor": value} for value in ("", "a\nb", 3)),
    ],
    ids=str,
)
async def test_options_are_checked_before_anything(dsn: str, conn: Conn, wrong: dict[str, Any]) -> None:
    made = discarded(conn)
    closed, sync_closed = Client(dsn), SyncClient(dsn)  # not even open: no connection is asked for
    async with await psycopg.AsyncConnection.connect(dsn) as tx:
        for call in (
            closed.retry(made.run_id, "noop", **wrong),
            closed.retry_all(made.run_id, **wrong),
            closed.retry_tx(tx, made.run_id, "noop", **wrong),
            closed.retry_all_tx(tx, made.run_id, **wrong),
        ):
            with pytest.raises(InvalidOptionError):
                await call
    for name in ("retry", "retry_all"):
        with pytest.raises(InvalidOptionError):
            getattr(sync_closed, name)(made.run_id, *(["noop"] if name == "retry" else []), **wrong)
    assert state(conn, made) == "discarded"


# In a transaction of the caller


@pytest.mark.contract("O14", "I4")
async def test_a_repair_and_its_retry_commit_together(dsn: str, conn: Conn) -> None:
    made, other = discarded(conn), discarded(conn)
    conn.execute("CREATE TABLE repairs (n int)")
    async with Client(dsn) as client, await psycopg.AsyncConnection.connect(dsn) as tx:
        for end in (tx.rollback, tx.commit):
            await tx.execute("INSERT INTO repairs VALUES (1)")
            await client.retry_tx(tx, made.run_id, "noop", reason="repaired")
            assert await client.retry_all_tx(tx, other.run_id, additional_attempts=2) == 1
            assert await client.retry_all_tx(tx, other.run_id) == 0
            # What Cyclone refuses leaves the transaction as it is.
            with pytest.raises(InvalidStateError):
                await client.retry_tx(tx, made.run_id, "noop")
            with pytest.raises(NotFoundError):
                await client.retry_tx(tx, "999999", "noop")
            assert (state(conn, made), factories.count(conn, "repairs")) == ("discarded", 0)
            await end()
            undone = end == tx.rollback
            assert state(conn, made) == state(conn, other) == ("discarded" if undone else "available")
            assert (
                factories.count(conn, "repairs") == factories.count(conn, "cyclone_events") / 2 == (0 if undone else 1)
            )


@pytest.mark.contract("O14")
def test_the_same_for_sync_code(client: SyncClient, dsn: str, conn: Conn) -> None:
    made = discarded(conn)
    with psycopg.connect(dsn, autocommit=True) as tx:
        with pytest.raises(ZeroDivisionError), tx.transaction():
            client.retry_tx(tx, made.run_id, "noop")
            raise ZeroDivisionError
        assert state(conn, made) == "discarded"
        with tx.transaction():
            assert client.retry_all_tx(tx, made.run_id) == 1
        assert state(conn, made) == "available"
        with pytest.raises(TransactionRequiredError):
            client.retry_tx(tx, made.run_id, "noop")
    with pytest.raises(TypeError, match="psycopg"):
        client.retry_tx(object(), made.run_id, "noop")  # type: ignore[arg-type]


# At the same time


async def _somebody_waits(conn: Conn) -> None:
    await until(lambda: conn.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None)


@pytest.mark.contract("O12")
async def test_of_two_who_reopen_one_is_told(dsn: str, conn: Conn) -> None:
    made = discarded(conn)
    async with Client(dsn) as client, await psycopg.AsyncConnection.connect(dsn) as tx:
        await client.retry_tx(tx, made.run_id, "noop")
        second = asyncio.create_task(client.retry(made.run_id, "noop"))
        both = asyncio.create_task(client.retry_all(made.run_id))
        await _somebody_waits(conn)
        await tx.commit()
        with pytest.raises(InvalidStateError, match="available"):
            await second
        assert await both == 0
    assert read(conn, made, "max_attempts") == 6
    assert factories.count(conn, "cyclone_ready") == 1


async def test_whoever_sleeps_is_woken(dsn: str, conn: Conn) -> None:
    made, other = discarded(conn), discarded(conn)
    conn.execute("INSERT INTO cyclone_sleepers (id, until) VALUES (1, now() + interval '1 hour')")
    conn.execute('LISTEN "cyclone:public"')
    async with Client(dsn) as client:
        await client.retry(made.run_id, "noop")
        assert len(list(conn.notifies(timeout=10, stop_after=1))) == 1
        conn.execute("UPDATE cyclone_sleepers SET notified_at = '-infinity'")
        async with await psycopg.AsyncConnection.connect(dsn) as tx:
            await client.retry_tx(tx, other.run_id, "noop")
            assert list(conn.notifies(timeout=0.05)) == []
            await tx.commit()
        assert len(list(conn.notifies(timeout=10, stop_after=1))) == 1
    conn.execute("DELETE FROM cyclone_sleepers")


# Who and why


@pytest.mark.contract("O7", "B6")
async def test_who_reopened_it_and_why(dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    made = discarded(conn)
    with SyncClient(dsn) as client:
        client.retry(made.run_id, "noop", reason="SMTP provider recovered", actor="ann", additional_attempts=2)
        (event,) = await until(lambda: list(client.events(run_id=made.run_id)))
    assert (event.kind, event.run_id, event.node, event.step_kind) == (EventKind.REOPENED, made.run_id, "noop", "noop")
    assert (event.queue, event.attempt, event.actor, event.host) == ("default", 5, "ann", socket.gethostname())
    assert event.detail == {"reason": "SMTP provider recovered", "additional_attempts": 2}
    assert event.at.tzinfo is not None and event.at == read(conn, made, "ready_at")


@pytest.mark.contract("O7")
@pytest.mark.parametrize("named", [True, False])
def test_who_it_was_unless_that_is_said(dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    from cyclone import control

    def getuser() -> str:
        if not named:
            raise KeyError("this number has no name")
        return "bob"

    monkeypatch.setattr("getpass.getuser", getuser)
    control._here.cache_clear()
    made = discarded(conn)
    with SyncClient(dsn) as client:
        client.retry(made.run_id, "noop")
    control._here.cache_clear()
    (actor,), *rest = conn.execute("SELECT actor FROM cyclone_events").fetchall()
    user = conn.execute("SELECT session_user").fetchone()
    assert user is not None and rest == []
    assert actor == (f"bob@{socket.gethostname()}" if named else user[0])


# On the command line


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `cyclone retry`; returns the exit code and what was printed."""
    monkeypatch.setenv("CYCLONE_DSN", dsn)

    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run(cli.app, ["retry", *args])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.contract("O8", "B1", "B4")
def test_the_command(run: Callable[..., Any], conn: Conn) -> None:
    made = discarded(conn)
    asked = ("--attempts", "3", "--reason", "all is well", "--actor", "ann")
    assert run(made.run_id, "noop", *asked) == (0, "reopened noop\n", "")
    assert read(conn, made, "state", "max_attempts") == ("available", 8)
    assert conn.execute("SELECT actor, detail ->> 'reason' FROM cyclone_events").fetchall() == [("ann", "all is well")]
    code, out, err = run(made.run_id, "noop")
    assert (code, out) == (cli.CONFLICT, "") and "available" in err
    assert run(made.run_id, "--all") == (0, "nothing is discarded\n", "")
    run_id, nodes = workflow(conn, "discarded", "completed", "discarded")
    code, out, _ = run(run_id, "--all", "--json")
    assert (code, json.loads(out)) == (0, {"run_id": run_id, "nodes": ["n0", "n2"], "dry_run": False})
    assert [state(conn, one) for one in nodes] == ["available", "completed", "available"]


@pytest.mark.contract("O9", "B5")
def test_a_dry_run_changes_nothing(run: Callable[..., Any], conn: Conn) -> None:
    run_id, nodes = workflow(conn, "discarded", "completed", "discarded")
    before = [read(conn, one, "*") for one in nodes]
    assert run(run_id, "--all", "--dry-run") == (0, "would reopen n0\nwould reopen n2\n", "")
    assert run(run_id, "n0", "--dry-run") == (0, "would reopen n0\n", "")
    assert json.loads(run(run_id, "n0", "--dry-run", "--json")[1])["dry_run"] is True
    assert run(run_id, "n1", "--dry-run")[0] == cli.CONFLICT
    assert [read(conn, one, "*") for one in nodes] == before
    assert factories.count(conn, "cyclone_events") == factories.count(conn, "cyclone_ready") == 0


@pytest.mark.contract("O7", "B6")
def test_a_run_is_shown_with_its_history(
    run: Callable[..., Any], conn: Conn, capsys: pytest.CaptureFixture[str]
) -> None:
    made = discarded(conn)
    run(made.run_id, "noop", "--reason", "all \x1b is well", "--actor", "ann")
    capsys.readouterr()
    assert cli.run(cli.app, ["show", made.run_id]) == 0
    shown = capsys.readouterr().out
    assert "reopened" in shown and "ann" in shown and "is well" in shown and "\x1b" not in shown
    assert cli.run(cli.app, ["show", made.run_id, "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)
    (event,) = step["events"]
    assert (step["state"], event["kind"], event["actor"]) == ("available", "reopened", "ann")
    assert event["detail"] == {"reason": "all \x1b is well", "additional_attempts": 1}


@pytest.mark.contract("B4", "O13")
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["999999", "noop"], cli.NOT_FOUND),
        (["999999", "--all"], cli.NOT_FOUND),
        (["x", "--all"], cli.NOT_FOUND),
        (["1"], cli.USAGE),
        (["1", "noop", "--all"], cli.USAGE),
        (["1", "noop", "--attempts", "0"], cli.USAGE),
        (["1", "noop", "--attempts", "many"], cli.USAGE),
        (["1", "noop", "--actor", ""], cli.USAGE),
        ([], cli.USAGE),
    ],
)
def test_what_the_command_refuses(run: Callable[..., Any], args: list[str], code: int) -> None:
    found, out, err = run(*args)
    assert (found, out) == (code, "") and err


def test_recorded_is_what_the_kinds_say() -> None:
    assert set(events.RECORDED) == {kind.value for kind in EventKind if kind.recorded}
    assert not EventKind.GAP.recorded and not EventKind.COMPLETED.recorded
