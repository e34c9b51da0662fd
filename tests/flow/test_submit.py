"""Submitting steps: what is checked first, what is stored, and in whose transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from factories import until
from psycopg import conninfo
from psycopg.rows import dict_row

import cyclone
from cyclone import (
    Client,
    InvalidInputError,
    InvalidOptionError,
    SyncClient,
    TransactionRequiredError,
    db,
    migrate,
    plan,
    store,
    wake,
)

EVIL = 'it\'s 100%s; "DROP" \\ 😀 $$'
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=1"


class Mail(msgspec.Struct):
    to: str
    n: int = 0


@cyclone.action("send_mail", max_attempts=5, queue="mail", priority=3, tags=["a"], metadata={"k": 1}, timeout=30)
async def send_mail(ctx: cyclone.Context, mail: Mail) -> None: ...


@cyclone.step("tick")
def tick(ctx: cyclone.SyncContext) -> int:
    return 1


@cyclone.step(EVIL)
def evil(ctx: cyclone.SyncContext, text: str) -> str:
    return text


@cyclone.step("weigh")
def weigh(ctx: cyclone.SyncContext, weight: float | None) -> None: ...


@pytest.fixture
def client(dsn: str) -> Iterator[SyncClient]:
    with SyncClient(dsn) as client:
        yield client


@asynccontextmanager
async def connected(dsn: str, **options: Any) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with await psycopg.AsyncConnection.connect(dsn, **options) as conn:
        yield conn


def count(conn: psycopg.Connection[Any]) -> int:
    (found,) = conn.execute("SELECT count(*) FROM cyclone_steps").fetchone() or (None,)
    assert isinstance(found, int)
    return found


# What is stored


@pytest.mark.contract("S1", "D3", "K8", "K9", "D5")
async def test_each_enqueue_is_a_run_of_its_own(dsn: str, conn: psycopg.Connection) -> None:
    async with Client(dsn) as client:
        first = await send_mail.enqueue(client, Mail("a"), max_attempts=3)
        second = await send_mail.enqueue(client, Mail("a"))
    assert first.run_id != second.run_id
    assert isinstance(first.run_id, str) and first.run_id.isdigit()
    assert first.node == "send_mail"
    rows = conn.execute("SELECT id, type, name, state FROM cyclone_all_runs ORDER BY id").fetchall()
    assert rows == [(int(h.run_id), "step", "send_mail", "running") for h in (first, second)]
    assert conn.execute("SELECT max_attempts FROM cyclone_steps ORDER BY id").fetchall() == [(3,), (5,)]
    assert conn.execute("SELECT count(*) FROM cyclone_runs").fetchone() == (0,)


@pytest.mark.contract("S10", "R9", "R10")
async def test_the_function_forms_have_the_same_effect(dsn: str, conn: psycopg.Connection) -> None:
    async with Client(dsn) as client, connected(dsn, autocommit=True) as tx:
        await cyclone.enqueue(client, send_mail, Mail("a"), max_attempts=3)
        async with tx.transaction():
            await cyclone.enqueue_tx(client, tx, send_mail, Mail("a"), max_attempts=3)
        await cyclone.enqueue(client, tick)
    with SyncClient(dsn) as sync_client:
        cyclone.enqueue(sync_client, send_mail, Mail("a"), max_attempts=3)
    rows = conn.execute("SELECT kind, max_attempts, input FROM cyclone_steps ORDER BY id").fetchall()
    mail = ("send_mail", 3, {"to": "a", "n": 0})
    assert rows == [mail, mail, ("tick", 5, None), mail]


SETTINGS: list[tuple[str, Any, str, Any]] = [
    ("max_attempts", 9, "max_attempts", 9),
    ("timeout", timedelta(minutes=2), "timeout_s", 120.0),
    ("timeout", None, "timeout_s", None),
    ("queue", EVIL, "queue", EVIL),
    ("priority", 0, "priority", 0),
    ("tags", ['b"', "\\,{}"], "tags", ['b"', "\\,{}"]),
    ("tags", None, "tags", None),
    ("metadata", {"é": ["\\", None]}, "metadata", {"é": ["\\", None]}),
    ("keep_for", timedelta(days=30), "keep_for", timedelta(days=30)),
]


@pytest.mark.contract("R46", "S4")
@pytest.mark.parametrize("method", ["insert", "copy"])
def test_the_most_specific_option_wins(client: SyncClient, conn: psycopg.Connection, method: Any) -> None:
    columns = "max_attempts, timeout_s, queue, priority, tags, metadata, keep_for"
    declared = (5, 30.0, "mail", 3, ["a"], {"k": 1}, None)
    for option, value, column, stored in SETTINGS:
        options: Any = {option: value}
        (handle,) = send_mail.enqueue_many(client, [Mail("a")], method=method, **options)
        row = conn.execute(
            f"SELECT {columns} FROM cyclone_steps WHERE id = %s".encode(), (int(handle.run_id),)
        ).fetchone()
        wanted = {**dict(zip(columns.split(", "), declared, strict=True)), column: stored}
        assert row == tuple(wanted.values()), option


def test_a_fresh_step_has_its_ticket(client: SyncClient, conn: psycopg.Connection) -> None:
    handles = send_mail.enqueue_many(client, [Mail("a"), Mail("b")])
    later = send_mail.enqueue(client, Mail("c"), delay=60)
    tickets = conn.execute("SELECT lane, rank, ord, step FROM cyclone_ready ORDER BY ord").fetchall()
    assert tickets == [("mail", 7, int(h.run_id), int(h.run_id)) for h in handles]
    rows = conn.execute("SELECT id, run_id, ord, state FROM cyclone_steps ORDER BY id").fetchall()
    ids = [int(h.run_id) for h in (*handles, later)]
    assert rows == [(ids[0],) * 3 + ("available",), (ids[1],) * 3 + ("available",), (ids[2],) * 2 + (None, "scheduled")]


@pytest.mark.contract("S8")
@pytest.mark.parametrize("method", ["insert", "copy"])
def test_delays_are_by_the_clock_of_the_database(client: SyncClient, conn: psycopg.Connection, method: Any) -> None:
    far = datetime(2100, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    for options in (
        {"delay": timedelta(hours=1)},
        {"scheduled_at": far},
        {"delay": 0},
        {"scheduled_at": datetime(2000, 1, 1, tzinfo=UTC)},
    ):
        send_mail.enqueue_many(client, [Mail("a")], method=method, **options)  # type: ignore[arg-type]
    rows = conn.execute(
        """SELECT state, due_at - enqueued_at = interval '1 hour', due_at, ready_at = enqueued_at
           FROM cyclone_steps ORDER BY id"""
    ).fetchall()
    assert rows[0][:2] == ("scheduled", True)
    assert (rows[1][0], rows[1][2]) == ("scheduled", far)
    assert rows[2] == rows[3] == ("available", None, None, True)


def test_every_statement_takes_its_time(dsn: str) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    batch = store.prepare(tick, [None], {"delay": 90}, max_input_bytes=99)
    with psycopg.connect(dsn, autocommit=True) as conn:
        for copy in (False, True):
            some = msgspec.structs.replace(batch, copy=copy)
            plan.drive_sync(conn, store.enqueue(db.statements("public"), some, now=now))
        rows = conn.execute("SELECT enqueued_at, due_at FROM cyclone_steps").fetchall()
    assert rows == [(now, now + timedelta(seconds=90))] * 2


@pytest.mark.contract("S6", "S7")
@pytest.mark.parametrize("method", ["auto", "insert", "copy"])
def test_ten_thousand_in_one_commit(client: SyncClient, conn: psycopg.Connection, method: Any) -> None:
    texts = [f"{n}\t\n\r\\\\{n}\\n{EVIL}" for n in range(10_000)]
    handles = evil.enqueue_many(client, texts, method=method)
    ids = [int(handle.run_id) for handle in handles]
    assert ids == sorted(ids)
    rows = conn.execute("SELECT id, input FROM cyclone_steps ORDER BY id").fetchall()
    assert rows == list(zip(ids, texts, strict=True))
    assert conn.execute("SELECT count(DISTINCT xmin::text) FROM cyclone_steps").fetchone() == (1,)
    assert conn.execute("SELECT array_agg(step ORDER BY ord) FROM cyclone_ready").fetchone() == (ids,)


@pytest.mark.contract("S7")
def test_the_rows_are_the_same_either_way(client: SyncClient, conn: psycopg.Connection) -> None:
    options: dict[str, Any] = {
        "queue": EVIL,
        "tags": [EVIL, 'x","y', "{}"],
        "metadata": {EVIL: EVIL},
        "keep_for": 1.5,
        "timeout": 0.1,
    }
    for delay in (None, timedelta(days=400, microseconds=1)):
        for method in ("insert", "copy"):
            evil.enqueue_many(client, [EVIL], method=method, delay=delay, **options)
    rows = conn.execute(
        """SELECT to_jsonb(s) - '{id, run_id, ord, enqueued_at, ready_at, due_at}'::text[], s.ord = s.id,
                  s.run_id = s.id, s.ready_at = s.enqueued_at, s.due_at - s.enqueued_at
           FROM cyclone_steps s ORDER BY id"""
    ).fetchall()
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    assert rows[0][0]["kind"] == rows[0][0]["node"] == EVIL


@pytest.mark.parametrize("method", ["insert", "copy"])
def test_a_client_may_speak_another_encoding(dsn: str, conn: psycopg.Connection, method: Any) -> None:
    with SyncClient(conninfo.make_conninfo(dsn, client_encoding="latin1")) as client:
        send_mail.enqueue_many(client, [Mail("é"), Mail("ß\n")], method=method, queue="é", tags=["é"])
        assert client._pool is not None
        with client._pool.connection() as own:
            assert own.execute("SHOW client_encoding").fetchone() == ("LATIN1",)
    rows = conn.execute("SELECT input ->> 'to', queue, tags FROM cyclone_steps ORDER BY id").fetchall()
    assert rows == [("é", "é", ["é"]), ("ß\n", "é", ["é"])]
    assert conn.execute("SELECT DISTINCT lane FROM cyclone_ready").fetchall() == [("é",)]


def test_nothing_to_enqueue(client: SyncClient) -> None:
    assert send_mail.enqueue_many(client, []) == []
    assert send_mail.enqueue_many(client, iter(())) == []


async def test_inputs_may_come_from_a_generator(dsn: str, conn: psycopg.Connection) -> None:
    async with Client(dsn) as client:
        assert len(await send_mail.enqueue_many(client, (Mail(str(n)) for n in range(3)))) == 3
    assert count(conn) == 3


@pytest.mark.contract("D12")
def test_schemas_do_not_see_each_other(empty_dsn: str) -> None:
    schemas = ["public", EVIL, "x" * 63]
    for schema in schemas:
        migrate.up(empty_dsn, schema=schema)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        for n, schema in enumerate(schemas, 1):
            table = db.quote_schema(schema)
            conn.execute(
                f"INSERT INTO {table}.cyclone_sleepers (id, until) VALUES (1, now() + interval '1 minute')".encode()
            )
            with SyncClient(empty_dsn, schema=schema) as client:
                for method in ("insert", "copy"):
                    tick.enqueue_many(client, [None] * n, method=method)  # type: ignore[call-overload]
                with conn.transaction():
                    tick.enqueue_tx(client, conn)
        for n, schema in enumerate(schemas, 1):
            found = conn.execute(f"SELECT count(*) FROM {db.quote_schema(schema)}.cyclone_ready".encode()).fetchone()
            assert found == (2 * n + 1,)


# What is refused, before a connection is taken


def bad_inputs() -> list[tuple[Any, Any, str]]:
    return [
        (send_mail, Mail("a\0b"), "NUL"),
        (send_mail, Mail("\ud800"), "surrogate"),
        (send_mail, Mail(3), r"\$\.to"),  # type: ignore[arg-type]
        (send_mail, {"to": 3}, r"\$\.to"),
        (send_mail, {}, "to"),
        (send_mail, None, "'send_mail'"),
        (send_mail, object(), "'send_mail'"),
        (send_mail, Mail("x" * 2000), "max_input_bytes is 1000"),
        (weigh, float("nan"), "NaN"),
        (weigh, float("inf"), "NaN"),
        (tick, 3, "None is expected"),
    ]


@pytest.mark.contract("S5")
@pytest.mark.parametrize("number", range(len(bad_inputs())))
async def test_bad_inputs_are_refused_with_the_database_stopped(number: int) -> None:
    step, value, text = bad_inputs()[number]
    client, sync_client = Client(NOWHERE, max_input_bytes=1000), SyncClient(NOWHERE, max_input_bytes=1000)
    tx: Any = object()
    with pytest.raises(InvalidInputError, match=text):
        await step.enqueue(client, value)
    with pytest.raises(InvalidInputError, match=text):
        await step.enqueue_tx(client, tx, value)
    with pytest.raises(InvalidInputError, match=text):
        step.enqueue_many(sync_client, [value])


@pytest.mark.parametrize("bad", [Mail("a\0b"), Mail(3), Mail("x" * 2000)])  # type: ignore[arg-type]
def test_the_bad_one_of_many_is_named(bad: Mail) -> None:
    client = SyncClient(NOWHERE, max_input_bytes=1000)
    inputs = [Mail(str(n)) for n in range(1200)]
    inputs[777] = bad
    with pytest.raises(InvalidInputError, match=r"^input 777 of step 'send_mail' "):
        send_mail.enqueue_many(client, iter(inputs))


def bad_options() -> list[dict[str, Any]]:
    now = datetime.now(UTC)
    return [
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": True},
        {"max_attempts": 3.0},
        {"max_attempts": "3"},
        {"timeout": 0},
        {"queue": "!x"},
        {"queue": "a\0"},
        {"priority": 10},
        {"tags": "x"},
        {"metadata": {"a": object()}},
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": timedelta.max},
        {"delay": 1, "scheduled_at": now},
        {"scheduled_at": now.replace(tzinfo=None)},
        {"scheduled_at": 3},
        {"keep_for": 0},
        {"max_atempts": 3},
        {"backoff": cyclone.default_backoff},
        {"unique": ""},
        {"unike": "key"},
    ]


@pytest.mark.contract("R15", "R16")
@pytest.mark.parametrize("number", range(len(bad_options())))
async def test_bad_options_are_refused_with_the_database_stopped(number: int) -> None:
    options = bad_options()[number]
    client, sync_client = Client(NOWHERE), SyncClient(NOWHERE)
    tx: Any = object()
    step: Any = send_mail
    mail = Mail("a")
    for call in (step.enqueue, step.enqueue_many):
        with pytest.raises(InvalidOptionError):
            await call(client, [mail] if call == step.enqueue_many else mail, **options)
        with pytest.raises(InvalidOptionError):
            call(sync_client, [mail] if call == step.enqueue_many else mail, **options)
    for call in (step.enqueue_tx, step.enqueue_many_tx):
        with pytest.raises(InvalidOptionError):
            await call(client, tx, [mail] if call == step.enqueue_many_tx else mail, **options)
    with pytest.raises(InvalidOptionError):
        cyclone.enqueue(sync_client, step, mail, **options)


def test_methods() -> None:
    client: Any = SyncClient(NOWHERE)
    with pytest.raises(InvalidOptionError, match="method"):
        send_mail.enqueue_many(client, [Mail("a")], method="fast")  # type: ignore[call-overload]
    with pytest.raises(InvalidOptionError, match="caller's transaction"):
        send_mail.enqueue_many_tx(client, client, [Mail("a")], method="copy")
    with pytest.raises(TypeError, match="a Client, SyncClient or handler context"):
        send_mail.enqueue("client", Mail("a"))  # type: ignore[call-overload]


# In the caller's transaction


@pytest.mark.contract("S3", "U10", "U11", "X10")
async def test_a_step_exists_only_if_the_transaction_commits(dsn: str, conn: psycopg.Connection) -> None:
    client = Client(dsn)  # not open: the caller's connection is the only one
    async with connected(dsn) as tx:
        handle = await send_mail.enqueue_tx(client, tx, Mail("a"))
        assert count(conn) == 0
        await tx.commit()
        assert count(conn) == 1
        await send_mail.enqueue_many_tx(client, tx, [Mail("b")] * 2000)
        await tx.rollback()
        assert count(conn) == 1
        async with tx.transaction():
            with pytest.raises(ZeroDivisionError):
                async with tx.transaction():
                    await send_mail.enqueue_tx(client, tx, Mail("c"))
                    raise ZeroDivisionError
            await tick.enqueue_tx(client, tx)
    assert conn.execute("SELECT kind FROM cyclone_steps ORDER BY id").fetchall() == [("send_mail",), ("tick",)]
    assert handle.run_id.isdigit()


@pytest.mark.contract("U41")
async def test_a_transaction_is_required(dsn: str, conn: psycopg.Connection) -> None:
    with pytest.raises(TransactionRequiredError, match="autocommit"):
        send_mail.enqueue_tx(SyncClient(dsn), conn, Mail("a"))
    async with connected(dsn, autocommit=True) as tx:
        with pytest.raises(TransactionRequiredError):
            await send_mail.enqueue_many_tx(Client(dsn), tx, [Mail("a")])
    assert count(conn) == 0


@pytest.mark.contract("I3")
async def test_another_object_is_no_transaction(dsn: str, conn: psycopg.Connection) -> None:
    step: Any = send_mail
    for tx in (object(), dsn, conn, None.__class__):
        with pytest.raises(TypeError, match=r"psycopg\.AsyncConnection"):
            await step.enqueue_tx(Client(dsn), tx, Mail("a"))
    for call in (step.enqueue_tx, step.enqueue_many_tx):
        with pytest.raises(TypeError, match="not None"):
            call(SyncClient(dsn), None, [])
    with pytest.raises(TypeError, match=r"psycopg\.Connection"):
        step.enqueue_tx(SyncClient(dsn), object(), Mail("a"))


# A session that has called a function knows that language's settings, which were not there to be seen before.
STATE = """SELECT (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors),
    (SELECT md5(string_agg(name || '=' || coalesce(setting, ''), ',' ORDER BY name)) FROM pg_settings
     WHERE name NOT LIKE 'plpgsql.%'),
    (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')"""


@pytest.mark.contract("I4")
@pytest.mark.parametrize("autocommit", [True, False])
def test_the_connection_is_left_as_it_was(dsn: str, client: SyncClient, autocommit: bool) -> None:
    with psycopg.connect(dsn, autocommit=autocommit, row_factory=dict_row, prepare_threshold=0) as conn:
        conn.prepare_threshold = 0
        conn.adapters.register_loader("text", psycopg.types.string.TextBinaryLoader)
        with conn.transaction():
            before = conn.execute(STATE, prepare=False).fetchone()
            for _ in range(3):
                send_mail.enqueue_tx(client, conn, Mail("a"))
            send_mail.enqueue_many_tx(client, conn, [Mail("a")] * 2)
            assert conn.execute(STATE, prepare=False).fetchone() == before
            assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert (conn.autocommit, conn.row_factory, conn.prepare_threshold) == (autocommit, dict_row, 0)


@pytest.mark.contract("I4")
def test_a_refused_call_does_not_break_the_transaction(client: SyncClient, conn: psycopg.Connection) -> None:
    with conn.transaction():
        with pytest.raises(InvalidInputError):
            send_mail.enqueue_tx(client, conn, Mail("\0"))
        send_mail.enqueue_tx(client, conn, Mail("a"))
    assert count(conn) == 1


def test_plain_cursors_and_pipelines_will_do(dsn: str, client: SyncClient) -> None:
    with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor) as conn, conn.pipeline():
        send_mail.enqueue_tx(client, conn, Mail("a"))
        send_mail.enqueue_tx(client, conn, Mail("b"))
        conn.commit()
        assert count(conn) == 2


# Waking those who sleep


def sleep(conn: psycopg.Connection[Any], notified: str = "-infinity") -> None:
    conn.execute(
        "INSERT INTO cyclone_sleepers (id, until, notified_at) VALUES (1, now() + interval '1 minute', %s)", (notified,)
    )


def notifications(conn: psycopg.Connection[Any]) -> int:
    """How many were sent so far; the one that is sent here comes last."""
    conn.execute("NOTIFY done")
    found = 0
    for one in conn.notifies(timeout=10):
        if one.channel == "done":
            return found
        found += 1
    raise AssertionError("no notification came")


@pytest.fixture
def listener(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f'LISTEN "{db.statements("public").channel}"'.encode())
        conn.execute("LISTEN done")
        yield conn


@pytest.mark.parametrize("method", ["insert", "copy"])
def test_a_sleeper_is_notified_once(
    client: SyncClient, conn: psycopg.Connection, listener: psycopg.Connection[Any], method: Any
) -> None:
    send_mail.enqueue_many(client, [Mail("a")], method=method)
    assert notifications(listener) == 0, "nobody sleeps"
    sleep(conn)
    send_mail.enqueue_many(client, [Mail("a")], method=method, delay=60)
    assert notifications(listener) == 0, "nothing to do yet"
    send_mail.enqueue_many(client, [Mail("a")], method=method)
    assert notifications(listener) == 1
    assert conn.execute("SELECT notified_at > '-infinity' FROM cyclone_sleepers").fetchone() == (True,)
    conn.execute("UPDATE cyclone_sleepers SET notified_at = clock_timestamp() + interval '1 minute'")
    send_mail.enqueue_many(client, [Mail("a")], method=method)
    assert notifications(listener) == 0, "it was notified a moment ago"


def test_of_those_that_come_at_the_same_moment_one_owes_the_notification(dsn: str, conn: psycopg.Connection) -> None:
    statements = db.statements("public")
    batch = store.prepare(send_mail, [Mail("a")], {}, max_input_bytes=99)
    sleep(conn)
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as other:
        assert plan.drive_sync(one, store.store(statements, batch, notify=None)).asleep
        assert not plan.drive_sync(other, store.store(statements, batch, notify=None)).asleep, "nor does it wait"
        other.commit()
        one.rollback()  # it never came to notify, so the next one does
        assert plan.drive_sync(other, store.store(statements, batch, notify=None)).asleep
    assert count(conn) == 2


@pytest.mark.contract("U10")
def test_in_the_callers_transaction_the_notification_comes_with_the_commit(
    client: SyncClient, conn: psycopg.Connection, listener: psycopg.Connection[Any]
) -> None:
    sleep(conn)
    with conn.transaction():
        for _ in range(3):
            send_mail.enqueue_tx(client, conn, Mail("a"))
        assert notifications(listener) == 0
        listener.execute("UPDATE cyclone_sleepers SET until = until")  # nobody has locked it
    assert notifications(listener) == 1
    with pytest.raises(ZeroDivisionError), conn.transaction():
        send_mail.enqueue_tx(client, conn, Mail("a"))
        raise ZeroDivisionError
    assert notifications(listener) == 0


def test_a_lost_notification_does_not_fail_what_is_committed(
    client: SyncClient, conn: psycopg.Connection, listener: psycopg.Connection[Any]
) -> None:
    sleep(conn)
    conn.execute(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON cyclone_sleepers FOR EACH ROW EXECUTE FUNCTION refuse()"""
    )
    assert send_mail.enqueue(client, Mail("a")).run_id.isdigit()
    assert count(conn) == 1


def test_waking_leaves_the_session_durable(dsn: str, conn: psycopg.Connection) -> None:
    sleep(conn)
    plan.drive_sync(conn, wake.sleepers(db.statements("public")))
    assert conn.execute("SHOW synchronous_commit").fetchone() == ("on",)


async def test_an_error_of_the_database_comes_as_psycopg_raises_it(dsn: str, conn: psycopg.Connection) -> None:
    async with Client(dsn) as client:
        with SyncClient(dsn) as sync_client:
            for _ in range(6):  # from the fifth on the statement stays prepared
                await send_mail.enqueue(client, Mail("a"))
                send_mail.enqueue(sync_client, Mail("a"))
            conn.execute(
                """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no é'; END $$;
                CREATE TRIGGER refuse BEFORE INSERT ON cyclone_steps FOR EACH ROW EXECUTE FUNCTION refuse()"""
            )
            with pytest.raises(psycopg.errors.RaiseException, match="no é") as caught:
                await send_mail.enqueue(client, Mail("a"))
            assert caught.value.diag.context is not None and "cyclone_store" in caught.value.diag.context
            with pytest.raises(psycopg.errors.RaiseException, match="no é"):
                send_mail.enqueue(sync_client, Mail("a"))
            conn.execute("DROP TRIGGER refuse ON cyclone_steps")
            await send_mail.enqueue(client, Mail("a"))
            send_mail.enqueue(sync_client, Mail("a"))
    assert count(conn) == 14


async def test_a_call_that_is_cancelled_leaves_its_connection_usable(dsn: str, conn: psycopg.Connection) -> None:
    async with Client(dsn) as client:
        for prepared in range(8):
            with conn.transaction():
                conn.execute("LOCK TABLE cyclone_steps")
                call = asyncio.ensure_future(send_mail.enqueue(client, Mail("a")))
                await until(lambda: blocked(conn))
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            await send_mail.enqueue(client, Mail(str(prepared)))
    assert count(conn) == 8


def blocked(conn: psycopg.Connection) -> bool:
    row = conn.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)").fetchone()
    return row == (True,)
