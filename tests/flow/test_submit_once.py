"""Submit once: at most one run for each key of a workflow, whoever asks, and whenever."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import factories
import msgspec
import proxy
import psycopg
import pytest

import cyclone
from cyclone import (
    Client,
    Context,
    Graph,
    InvalidKeyError,
    InvalidOptionError,
    Node,
    NotFoundError,
    Permanent,
    RunState,
    SubmitConflictError,
    SyncClient,
    TransactionRequiredError,
)

Conn = psycopg.Connection[Any]


class Line(msgspec.Struct):
    sku: str
    qty: int


class Order(msgspec.Struct):
    id: str
    items: list[Line] = []


@cyclone.step("take", max_attempts=1)
async def take(ctx: Context, order: Order) -> str:
    if order.id == "bad":
        raise Permanent("bad")
    return order.id


@cyclone.workflow("order")
def order(g: Graph[Order]) -> Node[str]:
    return g.run(take, g.input)


@cyclone.workflow("order")
def without(g: Graph[Order]) -> None:
    g.run(take, g.input)


@cyclone.workflow("other")
def other(g: Graph[Order]) -> Node[str]:
    return g.run(take, g.input)


@pytest.fixture
def client(dsn: str) -> Iterator[SyncClient]:
    with SyncClient(dsn) as found:
        yield found


def runs(conn: Conn) -> int:
    return factories.count(conn, "cyclone_runs")


@pytest.mark.contract("U2", "U3", "U5", "U17", "U44")
def test_the_first_call_makes_the_run_and_others_find_it(client: SyncClient, conn: Conn) -> None:
    run, created = order.submit_once(client, "k", Order("a"))
    again, created_again = cyclone.submit_once(client, order, "k", Order("a"))
    assert (created, created_again) == (True, False)
    assert run == again and isinstance(again, cyclone.SyncResultRun)
    assert other.submit_once(client, "k", Order("a"))[1]
    assert order.submit_once(client, "K", Order("a"))[1]
    assert runs(conn) == 3
    assert run.info().key == "k"
    assert order.find(client, "k") == run
    assert order.find(client, "nothing") is None


def _submit(dsn: str, keys: list[str], result: Any) -> None:
    def one(key: str) -> tuple[str, bool]:
        run, created = order.submit_once(client, key, Order(key))
        return run.id, created

    with SyncClient(dsn) as client, ThreadPoolExecutor(8) as pool:
        result.put(list(pool.map(one, keys)))


@pytest.mark.contract("U1")
def test_sixty_four_callers_from_eight_processes(dsn: str, conn: Conn) -> None:
    fork = multiprocessing.get_context("fork")
    result = fork.Queue()
    processes = [fork.Process(target=_submit, args=(dsn, ["k"] * 8, result)) for _ in range(8)]
    for process in processes:
        process.start()
    found = [pair for _ in processes for pair in result.get(timeout=60)]
    for process in processes:
        process.join(10)
    assert len(found) == 64
    assert len({run for run, _ in found}) == 1
    assert sum(created for _, created in found) == 1
    assert runs(conn) == 1


@pytest.mark.contract("U4")
async def test_a_connection_that_breaks_after_the_commit(dsn: str, conn: Conn) -> None:
    """The reply is lost and the run is there: the same call finds it."""
    with proxy.Proxy(dsn) as way:
        async with Client(way.dsn) as broken, Client(dsn) as client:
            await order.submit_once(broken, "warm", Order("a"))
            dropped = way.drop_next_reply_after(b"cyclone_submit_runs(")
            with pytest.raises(psycopg.OperationalError):
                await order.submit_once(broken, "k", Order("a"))
            # The client may notice the cut connection before the proxy has closed its ends.
            assert await asyncio.to_thread(dropped.wait, 10) and runs(conn) == 2
            _, created = await order.submit_once(client, "k", Order("a"))
            assert not created
    assert runs(conn) == 2


@pytest.mark.contract("U7", "U8", "U9")
async def test_a_result_is_had_by_whoever_finds_the_run(dsn: str) -> None:
    async with Client(dsn) as client, factories.worker(dsn, take):
        await order.submit_once(client, "k", Order("a"))
        run, created = await order.submit_once(client, "k", Order("a"))
        assert not created and await run.result(10) == "a"
        plain, created = await without.submit_once(client, "k", Order("a"))
        assert not created and plain.id == run.id
        await without.submit_once(client, "plain", Order("a"))
        found, created = await order.submit_once(client, "plain", Order("a"))
        assert not created
        with pytest.raises(cyclone.NoOutputError):
            await found.result(10)


@pytest.mark.contract("U10", "U11", "U13", "U15", "S3")
def test_in_the_caller_s_transaction(client: SyncClient, dsn: str, conn: Conn) -> None:
    with psycopg.connect(dsn) as tx:
        run, created = order.submit_once_tx(client, tx, "k", Order("a"))
        assert created
        assert order.submit_once_tx(client, tx, "k", Order("a")) == (run, False)
        with pytest.raises(NotFoundError):
            run.result()
        assert runs(conn) == 0
        tx.rollback()
        run, created = order.submit_once_tx(client, tx, "k", Order("a"))
        assert created
        tx.commit()
    assert runs(conn) == 1
    assert cyclone.submit_once(client, order, "k", Order("a")) == (run, False)


@pytest.mark.contract("U12")
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_holder_that_has_not_committed_is_waited_for(client: SyncClient, dsn: str, conn: Conn, ends: str) -> None:
    with psycopg.connect(dsn) as tx, ThreadPoolExecutor(1) as pool:
        order.submit(client, Order("a"))  # the graph is there
        run, _ = order.submit_once_tx(client, tx, "k", Order("a"))
        second = pool.submit(order.submit_once, client, "k", Order("a"))
        query = "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        while not factories.count(conn, query):
            assert not second.done()
        getattr(tx, ends)()
        found, created = second.result(10)
    assert (found == run, created) == ((True, False) if ends == "commit" else (False, True))


@pytest.mark.contract("U14", "U23", "U24", "U25", "U26")
def test_another_input_is_a_conflict_and_no_more(client: SyncClient, dsn: str, conn: Conn) -> None:
    first, _ = order.submit_once(client, "k", Order("a", [Line("x", 1), Line("y", 2)]))
    with psycopg.connect(dsn) as tx:
        with pytest.raises(SubmitConflictError) as caught:
            order.submit_once_tx(client, tx, "k", Order("a", [Line("x", 3), Line("secret", 2)]))
        assert tx.execute("SELECT 1").fetchone() == (1,)
        order.submit_once_tx(client, tx, "other", Order("b"))
    error = caught.value
    assert (error.run_id, error.workflow, error.key) == (first.id, "order", "k")
    assert error.diff == ["/items/0/qty", "/items/1/sku"]
    assert "secret" not in str(error)
    assert isinstance(error, cyclone.ConflictError)
    assert runs(conn) == 2


@pytest.mark.contract("U16")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation_gives_the_server_s_own_error(client: SyncClient, dsn: str, level: str) -> None:
    order.submit(client, Order("a"))
    with psycopg.connect(dsn) as tx:
        tx.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        tx.execute("SELECT count(*) FROM cyclone_runs")
        order.submit_once(client, "k", Order("a"))
        with pytest.raises(psycopg.errors.SerializationFailure) as caught:
            order.submit_once_tx(client, tx, "k", Order("a"))
        assert caught.value.sqlstate == "40001"


@pytest.mark.contract("U18", "U19", "U20", "U37", "U40")
async def test_a_run_keeps_its_key_in_every_state(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client:
        running, _ = await order.submit_once(client, "running", Order("a"))
        cancelled, _ = await order.submit_once(client, "cancelled", Order("a"))
        await cancelled.cancel()
        await running.cancel()
        async with factories.worker(dsn, take):
            done, _ = await order.submit_once(client, "completed", Order("a"))
            failed, _ = await order.submit_once(client, "failed", Order("bad"))
            assert await done.wait(10) is RunState.COMPLETED
            assert await failed.wait(10) is RunState.FAILED
        for run, key, id in (
            (running, "running", "a"), (cancelled, "cancelled", "a"), (done, "completed", "a"),
            (failed, "failed", "bad"),
        ):  # fmt: skip
            assert await order.submit_once(client, key, Order(id)) == (run, False)
        assert await failed.state() is RunState.FAILED
        assert runs(conn) == 4
        assert await failed.retry_all() == 1
        assert await failed.state() is RunState.RUNNING


@pytest.mark.contract("U21")
def test_the_graph_takes_no_part(client: SyncClient) -> None:
    @cyclone.workflow("order")
    def newer(g: Graph[Order]) -> Node[str]:
        g.run(take, g.input)
        return g.run(take, g.input)

    run, _ = order.submit_once(client, "k", Order("a"))
    assert newer.submit_once(client, "k", Order("a")) == (run, False)
    assert len(run.steps()) == 1


@pytest.mark.contract("U22")
def test_inputs_are_compared_as_jsonb(client: SyncClient) -> None:
    @cyclone.step("any")
    async def anything(ctx: Context, value: Any) -> None: ...

    @cyclone.workflow("any")
    def flow(g: Graph[Any]) -> None:
        g.run(anything, g.input)

    flow.submit_once(client, "k", {"a": 1, "b": [1.0, None]})
    assert not flow.submit_once(client, "k", {"b": [1, None], "a": 1.0})[1]
    for different in ({"a": True, "b": [1, None]}, {"a": 1, "b": [1]}, {"a": 1}, {"a": 1, "b": [1, None], "c": None}):
        with pytest.raises(SubmitConflictError):
            flow.submit_once(client, "k", different)


@pytest.mark.contract("U27")
def test_options_take_no_part(client: SyncClient) -> None:
    run, _ = order.submit_once(client, "k", Order("a"), deadline=3600, tags=["one"])
    before = run.info()
    assert order.submit_once(client, "k", Order("a"), deadline=60, tags=["two"]) == (run, False)
    assert run.info() == before


@pytest.mark.contract("U28", "U29")
def test_a_new_field_with_a_default(client: SyncClient) -> None:
    class Newer(msgspec.Struct):
        id: str
        items: list[Line] = []
        express: bool = False

    @cyclone.step("take_newer")
    async def take_newer(ctx: Context, order: Newer) -> str:
        return order.id

    @cyclone.workflow("order")
    def newer(g: Graph[Newer]) -> Node[str]:
        return g.run(take_newer, g.input)

    run, _ = order.submit_once(client, "k", Order("a"))
    with pytest.raises(SubmitConflictError) as caught:
        newer.submit_once(client, "k", Newer("a"))
    assert caught.value.diff == ["/express"]
    assert newer.submit_once(client, "k", Newer("a"), compare="typed") == (run, False)
    with pytest.raises(SubmitConflictError) as caught:
        newer.submit_once(client, "k", Newer("a", express=True), compare="typed")
    assert caught.value.diff == ["/express"]
    with pytest.raises(InvalidOptionError, match="compare"):
        newer.submit_once(client, "k", Newer("a"), compare="loose")  # type: ignore[call-overload]


@pytest.mark.contract("U30", "U42")
def test_a_run_that_goes_away_meanwhile(client: SyncClient, dsn: str) -> None:
    """Whatever moment the run is deleted at, each call has a run, and none an error."""
    order.submit_once(client, "k", Order("a"))
    stop = threading.Event()

    def purge() -> int:
        gone = 0
        with psycopg.connect(dsn, autocommit=True) as own:
            while not stop.is_set():
                query = (
                    "WITH gone AS (DELETE FROM cyclone_runs RETURNING id)"
                    " DELETE FROM cyclone_steps s USING gone WHERE s.run_id = gone.id"
                )
                gone += own.execute(query).rowcount  # each has one step
        return gone

    with ThreadPoolExecutor(5) as pool:
        purged = pool.submit(purge)
        found = list(pool.map(lambda _: order.submit_once(client, "k", Order("a")), range(300)))
        stop.set()
        made = sum(created for _, created in found)
        assert purged.result(10) >= made - 1 > 10
    assert all(run.id for run, _ in found)


@pytest.mark.contract("U32", "U34", "U35")
@pytest.mark.parametrize("key", ["", "a\0", "\ud800", "x" * 257, "é" * 129, 7, None, b"k"])
def test_a_bad_key_is_refused_before_anything_is_connected(key: Any) -> None:
    closed = SyncClient("postgresql://nobody@127.0.0.1:1/none")
    wrong: type[Exception] = InvalidKeyError if isinstance(key, str) else TypeError
    for call in (
        lambda: order.submit_once(closed, key, Order("a")),
        lambda: order.submit_once_many(closed, [("good", Order("a")), (key, Order("a"))]),
        lambda: order.find(closed, key),
    ):
        with pytest.raises(wrong):
            call()


@pytest.mark.contract("U32")
def test_the_longest_key(client: SyncClient) -> None:
    assert order.submit_once(client, "é" * 128, Order("a"))[1]


@pytest.mark.contract("U41")
def test_a_connection_that_is_in_no_transaction(client: SyncClient, dsn: str, conn: Conn) -> None:
    with psycopg.connect(dsn, autocommit=True) as alone:
        with pytest.raises(TransactionRequiredError):
            order.submit_once_tx(client, alone, "k", Order("a"))
        with pytest.raises(TransactionRequiredError):
            order.submit_tx(client, alone, Order("a"))
        with alone.transaction():
            assert order.submit_once_tx(client, alone, "k", Order("a"))[1]
    assert runs(conn) == 1


@pytest.mark.contract("U43")
def test_many_at_once(client: SyncClient, conn: Conn) -> None:
    held, _ = order.submit_once(client, "b", Order("b"))
    items = [("c", Order("c")), ("b", Order("x")), ("a", Order("a")), ("c", Order("c")), ("b", Order("b"))]
    found = order.submit_once_many(client, items)
    assert [one.created for one in found] == [True, False, True, False, False]
    assert [one.error is not None for one in found] == [False, True, False, False, False]
    assert found[1].run == found[4].run == held and found[3].run == found[0].run
    assert isinstance(found[1].error, SubmitConflictError) and found[1].error.diff == ["/id"]
    assert runs(conn) == 3
    assert order.submit_once_many(client, []) == []
    with pytest.raises(TypeError, match="pairs"):
        order.submit_once_many(client, ["k"])  # type: ignore[call-overload]


@pytest.mark.contract("S6")
async def test_ten_thousand_in_one_commit(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client:
        found = await order.submit_many(client, (Order(str(n)) for n in range(10_000)))
    assert len(found) == 10_000
    query = "SELECT count(DISTINCT xmin::text), min((input->>'id')::int), bool_and(state = 'running') FROM cyclone_runs"
    assert conn.execute(query).fetchone() == (1, 0, True)
    inputs = dict(conn.execute("SELECT id::text, input->>'id' FROM cyclone_runs").fetchall())
    assert [inputs[run.id] for run in found] == [str(n) for n in range(10_000)]


@pytest.mark.contract("U38")
async def test_two_finders_submit_one_recovery(dsn: str, conn: Conn) -> None:
    @cyclone.step("undo")
    async def undo(ctx: Context, failed: str) -> None: ...

    @cyclone.workflow("undo")
    def recovery(g: Graph[str]) -> None:
        g.run(undo, g.input)

    async with Client(dsn) as client:
        async with factories.worker(dsn, take):
            failed = await order.submit(client, Order("bad"))
            await failed.wait(10)

        async def find() -> list[bool]:
            page = await client.list_runs(state=RunState.FAILED)
            return [(await recovery.submit_once(client, f"recover:{one.id}", one.id))[1] for one in page.items]

        assert sorted(sum(await asyncio.gather(find(), find()), [])) == [False, True]
        assert await failed.retry_all() == 1


def test_the_first_submission_of_a_graph_from_many_at_once(client: SyncClient, conn: Conn) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len({run.id for run in pool.map(lambda _: order.submit(client, Order("a")), range(32))}) == 32
    assert factories.count(conn, "cyclone_graphs") == 1
