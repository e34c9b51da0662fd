"""Unique keys of enqueues: one active step for each key of a kind, and what a second one is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import factories
import psycopg
import pytest
from factories import state, until

import cyclone
from cyclone import Client, Context, DuplicateError, InvalidKeyError, InvalidOptionError, SyncClient, Unique, cli

Conn = psycopg.Connection[Any]


@cyclone.step("mail")
async def mail(ctx: Context, to: str) -> str:
    return to


@cyclone.step("sms")
async def sms(ctx: Context, to: str) -> str:
    return to


@pytest.fixture
def client(dsn: str) -> Iterator[SyncClient]:
    with SyncClient(dsn) as found:
        yield found


def stored(conn: Conn) -> int:
    return factories.count(conn, "cyclone_steps")


@pytest.mark.contract("Q2", "Q4", "Q5")
def test_a_second_one_is_told_who_has_the_key(client: SyncClient, conn: Conn) -> None:
    first = mail.enqueue(client, "a", unique="k")
    assert first.created
    with pytest.raises(DuplicateError) as caught:
        mail.enqueue(client, "b", unique="k")
    assert (caught.value.run_id, caught.value.kind, caught.value.key) == (first.run_id, "mail", "k")
    assert isinstance(caught.value, cyclone.ConflictError)
    sms.enqueue(client, "a", unique="k")  # another kind
    mail.enqueue(client, "a", unique="K")
    assert stored(conn) == 3
    assert client.get_step(first.run_id, "mail").unique_key == "k"


@pytest.mark.contract("Q3")
async def test_the_end_frees_the_key(dsn: str, client: SyncClient, conn: Conn) -> None:
    first = mail.enqueue(client, "a", unique="k")
    async with factories.worker(dsn, mail):
        await until(lambda: state(conn, int(first.run_id)) == "completed")
    second = mail.enqueue(client, "a", unique="k")
    assert second.cancel()
    assert mail.enqueue(client, "a", unique="k").created


@pytest.mark.contract("Q6", "FM-056")
@pytest.mark.parametrize("active", ["scheduled", "available", "running"])
def test_every_active_state_holds_the_key(client: SyncClient, conn: Conn, active: str) -> None:
    made = factories.step(conn, "mail", active, unique_key="k")
    with pytest.raises(DuplicateError) as caught:
        mail.enqueue(client, "a", unique="k")
    assert caught.value.run_id == made.run_id


@pytest.mark.parametrize("over", ["completed", "discarded", "cancelled"])
def test_no_state_that_is_over_holds_it(client: SyncClient, conn: Conn, over: str) -> None:
    factories.step(conn, "mail", over, unique_key="k")
    assert mail.enqueue(client, "a", unique="k").created


@pytest.mark.contract("Q7")
def test_the_holder_can_be_returned_instead(client: SyncClient, conn: Conn) -> None:
    first = mail.enqueue(client, "a", unique="k")
    second = mail.enqueue(client, "b", unique=Unique("k", on_duplicate="return"))
    assert (second.run_id, second.created) == (first.run_id, False)
    assert stored(conn) == 1


@pytest.mark.contract("Q8")
def test_a_step_whose_key_is_taken_is_not_reopened(client: SyncClient, dsn: str, conn: Conn) -> None:
    old = factories.step(conn, "mail", "discarded", unique_key="k")
    holder = mail.enqueue(client, "a", unique="k")
    with pytest.raises(DuplicateError) as caught:
        client.retry(old.run_id, "mail")
    assert caught.value.run_id == holder.run_id
    with psycopg.connect(dsn) as tx:
        with pytest.raises(DuplicateError):
            client.retry_all_tx(tx, old.run_id)
        assert tx.execute("SELECT 1").fetchone() == (1,)
    assert state(conn, old) == "discarded"
    holder.cancel()
    client.retry(old.run_id, "mail")
    with pytest.raises(DuplicateError):
        mail.enqueue(client, "a", unique="k")


@pytest.mark.contract("Q9", "FM-057")
def test_many_at_once(client: SyncClient, conn: Conn) -> None:
    held = mail.enqueue(client, "b", unique="b")
    with pytest.raises(DuplicateError) as caught:
        mail.enqueue_many(client, ["a", "b", "c"], unique=str)
    assert (caught.value.run_id, caught.value.key) == (held.run_id, "b")
    assert stored(conn) == 1
    found = mail.enqueue_many(client, ["c", "b", "a", "c"], unique=Unique(str, on_duplicate="return"))
    assert [one.created for one in found] == [True, False, True, False]
    assert found[1].run_id == held.run_id and found[3].run_id == found[0].run_id
    assert [client.get_step(one.run_id, "mail").input for one in found] == ["c", "b", "a", "c"]
    assert factories.count(conn, "cyclone_ready") == 3
    # Two equal keys in one call are no duplicate of anybody: the first is kept.
    found = mail.enqueue_many(client, ["x", "x"], unique=str)
    assert [one.created for one in found] == [True, False] and found[0].run_id == found[1].run_id


@pytest.mark.contract("Q10", "U11")
def test_in_the_caller_s_transaction(client: SyncClient, dsn: str, conn: Conn) -> None:
    mail.enqueue(client, "a", unique="a")
    with psycopg.connect(dsn) as tx:
        with pytest.raises(DuplicateError):
            mail.enqueue_many_tx(client, tx, ["b", "a"], unique=str)
        first = mail.enqueue_tx(client, tx, "b", unique="b")
        with pytest.raises(DuplicateError) as caught:
            mail.enqueue_tx(client, tx, "b", unique="b")
        assert caught.value.run_id == first.run_id
        tx.rollback()
    assert mail.enqueue(client, "b", unique="b").created
    assert stored(conn) == 2


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_key_that_is_not_committed_is_waited_for(client: SyncClient, dsn: str, conn: Conn, ends: str) -> None:
    found: list[Any] = []

    def enqueue() -> None:
        try:
            found.append(mail.enqueue(client, "b", unique="k").created)
        except DuplicateError as exc:
            found.append(exc.run_id)

    with psycopg.connect(dsn) as tx:
        first = mail.enqueue_tx(client, tx, "a", unique="k")
        other = threading.Thread(target=enqueue)
        other.start()
        _wait_for_lock(conn)
        assert not found
        getattr(tx, ends)()
        other.join(10)
    assert found == ([first.run_id] if ends == "commit" else [True])


def test_an_end_that_is_not_committed_is_waited_for(client: SyncClient, dsn: str, conn: Conn) -> None:
    first = mail.enqueue(client, "a", unique="k")
    with psycopg.connect(dsn) as tx, ThreadPoolExecutor(1) as pool:
        factories.cancel(tx, int(first.run_id))
        second = pool.submit(mail.enqueue, client, "b", unique="k")
        _wait_for_lock(conn)
        tx.commit()
        assert second.result(10).created


def _wait_for_lock(conn: Conn) -> None:
    query = "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while not factories.count(conn, query):
        pass


@pytest.mark.contract("U16")
def test_under_repeatable_read_the_server_says_so(client: SyncClient, dsn: str) -> None:
    with psycopg.connect(dsn) as tx:
        tx.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        tx.execute("SELECT 1 FROM cyclone_steps")
        mail.enqueue(client, "a", unique="k")
        with pytest.raises(psycopg.errors.SerializationFailure):
            mail.enqueue_tx(client, tx, "a", unique="k")


def test_of_many_at_the_same_moment_one_is_new(client: SyncClient, conn: Conn) -> None:
    def enqueue(n: int) -> bool:
        return mail.enqueue(client, str(n), unique=Unique("k", on_duplicate="return")).created

    with ThreadPoolExecutor(32) as pool:
        assert sorted(pool.map(enqueue, range(32))) == [False] * 31 + [True]
    assert stored(conn) == 1


@pytest.mark.contract("FM-055")
@pytest.mark.parametrize("commits", [0, 1, 5])
def test_transactions_of_which_some_roll_back_leave_one_at_most(
    client: SyncClient, dsn: str, conn: Conn, commits: int
) -> None:
    start = threading.Barrier(16)

    def enqueue(n: int) -> str:
        with psycopg.connect(dsn) as tx:
            start.wait(30)
            try:
                mail.enqueue_tx(client, tx, str(n), unique="k")
            except DuplicateError:
                return "duplicate"
            tx.commit() if n < commits else tx.rollback()
            return "committed" if n < commits else "rolled back"

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(enqueue, range(16)))
    assert found.count("committed") == stored(conn) <= 1
    # Who commits may have found the key taken by one that did as well, and by no other.
    assert stored(conn) == (commits > 0)


def test_calls_with_the_same_keys_in_another_order_do_not_block_each_other(client: SyncClient) -> None:
    keys = [str(n) for n in range(50)]

    def enqueue(n: int) -> int:
        order = keys if n % 2 else keys[::-1]
        return sum(one.created for one in mail.enqueue_many(client, order, unique=Unique(str, on_duplicate="return")))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(enqueue, range(16))) == 50


async def test_from_a_handler_it_joins_the_completion(dsn: str, conn: Conn) -> None:
    seen: list[str] = []

    @cyclone.step("parent")
    async def parent(ctx: Context) -> None:
        with pytest.raises(DuplicateError) as caught:
            await parent.enqueue(ctx, unique="self")
        seen.append(caught.value.run_id)
        await mail.enqueue(ctx, "a", unique="k")

    async with Client(dsn) as client, factories.worker(dsn, parent):
        handle = await parent.enqueue(client, unique="self")
        await handle.result(10)
        assert seen == [handle.run_id]
        with pytest.raises(DuplicateError):
            await mail.enqueue(client, "a", unique="k")


@pytest.mark.contract("U32", "U33", "U34", "U35")
@pytest.mark.parametrize(
    ("key", "good"),
    [
        ("é" * 128, True),
        ("é" * 129, False),
        ("", False),
        ("a\0", False),
        ("\ud800", False),
        ("x" * 256, True),
        (3, False),
    ],
)
async def test_rules_of_keys_hold_before_anything_is_connected(key: Any, good: bool) -> None:
    closed = SyncClient("postgresql://nobody@127.0.0.1:1/none")
    many = cyclone.Unique(lambda _: key)
    for call in (
        lambda: mail.enqueue(closed, "a", unique=key),
        lambda: mail.enqueue_many(closed, ["a"], unique=many),
        lambda: cyclone.enqueue(closed, mail, "a", unique=key),
    ):
        with pytest.raises(cyclone.CycloneError) as caught:
            call()
        wrong = InvalidOptionError if isinstance(key, int) else InvalidKeyError
        assert isinstance(caught.value, wrong) is not good
        assert not isinstance(key, int) or isinstance(caught.value, TypeError)
    await asyncio.sleep(0)


def test_wrong_options_are_refused(client: SyncClient) -> None:
    with pytest.raises(InvalidOptionError, match="a function"):
        mail.enqueue_many(client, ["a", "b"], unique="k")  # type: ignore[call-overload]
    with pytest.raises(InvalidOptionError, match="on_duplicate"):
        mail.enqueue(client, "a", unique=Unique("k", on_duplicate="ignore"))  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="copy"):
        mail.enqueue_many(client, ["a"], unique=str, method="copy")


def test_keys_are_compared_byte_for_byte(client: SyncClient) -> None:
    for key in ("é", "e\u0301", " k", "k", "K"):
        assert mail.enqueue(client, "a", unique=key).created


@pytest.mark.contract("B4")
def test_the_command(dsn: str, conn: Conn, capsys: pytest.CaptureFixture[str]) -> None:
    conn.execute(
        "INSERT INTO cyclone_kinds (kind, version, action, max_attempts, queue, priority)"
        " VALUES ('mail', 1, false, 5, 'default', 5)"
    )

    def run(*args: str) -> tuple[int, str]:
        code = cli.run(cli.app, ["enqueue", "mail", '"a"', "--unique", "k", *args, "--dsn", dsn])
        return code, capsys.readouterr().out.strip()

    code, first = run()
    assert code == 0
    assert run()[0] == 4
    code, out = run("--on-duplicate", "return", "--json")
    assert (code, json.loads(out)) == (0, {"step": "mail", "run_id": first, "created": False})
    assert run("--on-duplicate", "ignore")[0] == 2
