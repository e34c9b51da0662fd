"""Workflows: graphs run to their end, whatever becomes of their nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import factories
import msgspec
import psycopg
import pytest
from factories import until

import cyclone
from cyclone import (
    CANCEL_BRANCH,
    RUN_ANYWAY,
    Client,
    Context,
    Graph,
    InvalidStateError,
    Node,
    NoOutputError,
    NotFoundError,
    Permanent,
    RunCancelledError,
    RunFailedError,
    RunState,
    StepState,
    SyncClient,
    SyncContext,
)

Conn = psycopg.Connection[Any]
calls: list[str] = []
gates: dict[str, asyncio.Event] = {}
broken: set[str] = set()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    calls.clear()
    gates.clear()
    broken.clear()
    yield


class Pair(msgspec.Struct):
    left: int
    right: int | None


@cyclone.step("add")
async def add(ctx: Context, x: int) -> int:
    calls.append(ctx.node)
    return x + 1


@cyclone.step("both")
def both(ctx: SyncContext, pair: Pair) -> int:
    calls.append(ctx.node)
    return pair.left + (pair.right or 0)


@cyclone.step("sum")
async def total(ctx: Context, xs: list[int | None]) -> int:
    return sum(x or 0 for x in xs)


@cyclone.step("numbers")
async def numbers(ctx: Context, n: int) -> list[int]:
    return list(range(n))


@cyclone.step("fragile", max_attempts=1)
async def fragile(ctx: Context, x: int) -> int:
    calls.append(ctx.node)
    if ctx.node in broken:
        raise Permanent(f"{ctx.node} is broken")
    return x


@cyclone.step("held")
async def held(ctx: Context, x: int) -> int:
    calls.append(ctx.node)
    await gates.setdefault(ctx.node, asyncio.Event()).wait()
    return x


@cyclone.action("note")
async def note(ctx: Context, x: int) -> None:
    calls.append(f"{ctx.node} {[one.node for one in ctx.failed_dependencies]}")


@cyclone.step("is_even")
async def is_even(ctx: Context, x: int) -> bool:
    return x % 2 == 0


STEPS = (add, both, total, numbers, fragile, held, note, is_even)


def release(node: str) -> None:
    gates.setdefault(node, asyncio.Event()).set()


@contextlib.asynccontextmanager
async def engine(dsn: str) -> AsyncIterator[Client]:
    """A client, a worker and a sweeper."""
    async with Client(dsn) as client, factories.worker(dsn, *STEPS), factories.sweeper(dsn):
        yield client


async def nodes(run: Any) -> dict[str, str]:
    """What each node is, with why it was cancelled."""
    return {s.node: f"{s.state.value}{f' {s.fate}' if s.fate else ''}" for s in await run.steps()}


async def running(run: Any, *names: str) -> None:
    async def all_run() -> bool:
        found = await nodes(run)
        return all(found.get(name) == "running" for name in names)

    await until(all_run)


@cyclone.workflow("chain")
def chain(g: Graph[int]) -> Node[int]:
    first = g.run(add, g.input)
    second = g.run(add, first.output)
    return g.run(add, second.output)


@cyclone.workflow("diamond")
def diamond(g: Graph[int]) -> Node[int]:
    top = g.run(add, g.input, name="top")
    left = g.run(add, top.output, name="left")
    right = g.run(add, top.output, name="right")
    return g.run(both, Pair(left=left.output, right=right.output), name="join")


@pytest.mark.contract("W1", "C1", "C2", "C4", "U7")
async def test_a_chain_hands_on_its_outputs(dsn: str) -> None:
    async with engine(dsn) as client:
        run = await chain.submit(client, 1)
        assert await run.result(10) == 4
        assert calls == ["add", "add_2", "add_3"]
        assert await nodes(run) == dict.fromkeys(calls, "completed")
        info = await run.info()
        assert (info.state, info.name, info.result_node, info.input) == (RunState.COMPLETED, "chain", "add_3", 1)
        assert await client.get_run(run.id) == info


async def test_diamonds_join_once(dsn: str, conn: Conn) -> None:
    async with engine(dsn) as client:
        runs = await diamond.submit_many(client, range(200))
        assert [await run.result(20) for run in runs] == [2 * (n + 2) for n in range(200)]
    assert len(calls) == 800
    assert factories.count(conn, "cyclone_steps WHERE attempts <> 1 OR state <> 'completed'") == 0


@pytest.mark.contract("W1", "U9")
async def test_a_workflow_without_a_result(dsn: str) -> None:
    @cyclone.workflow("plain")
    def plain(g: Graph[int]) -> None:
        g.run(note, g.input)

    @cyclone.workflow("plain")
    def typed(g: Graph[int]) -> Node[int]:
        return g.run(add, g.input)

    async with engine(dsn) as client:
        run = await plain.submit(client, 1)
        assert not hasattr(run, "result")
        assert await run.wait(10) is RunState.COMPLETED
        with pytest.raises(NoOutputError):
            await typed.get(client, run.id).result(1)


@pytest.mark.contract("W8")
async def test_a_node_reads_what_comes_before_it(dsn: str) -> None:
    found: list[Any] = []

    @cyclone.step("reader")
    async def reader(ctx: Context, x: int) -> int:
        found.append(await ctx.output_of(add))
        found.append(await ctx.output_of("numbers"))
        with pytest.raises(NotFoundError):
            await ctx.output_of("aside")
        return x

    @cyclone.step("sync_reader")
    def sync_reader(ctx: SyncContext, x: int) -> int:
        found.append(ctx.output_of("add"))
        return x

    @cyclone.workflow("reading")
    def reading(g: Graph[int]) -> Node[int]:
        g.run(add, g.input, name="aside")
        first = g.run(add, g.input)
        listed = g.run(numbers, first.output)
        read = g.run(reader, g.input, after=listed)
        return g.run(sync_reader, read.output)

    async with Client(dsn) as client, factories.worker(dsn, *STEPS, reader, sync_reader):
        assert await (await reading.submit(client, 2)).result(10) == 2
    assert found == [3, [0, 1, 2], 3]


# Maps


@cyclone.workflow("fan")
def fan(g: Graph[int]) -> Node[int]:
    listed = g.run(numbers, g.input)
    mapped = g.map(add, listed.output)
    return g.run(total, mapped.output)


@cyclone.workflow("narrow")
def narrow(g: Graph[int]) -> Node[list[int]]:
    listed = g.run(numbers, g.input)
    return g.map(held, listed.output, max_parallel=2)


@pytest.mark.contract("W9")
@pytest.mark.parametrize("n", [0, 1, 1000])
async def test_a_map_has_a_node_for_each_item(dsn: str, n: int) -> None:
    async with engine(dsn) as client:
        run = await fan.submit(client, n)
        assert await run.result(30) == n * (n + 1) // 2
        found = await run.steps()
        assert [s.node for s in found[3:]] == [f"add[{i}]" for i in range(n)]
        assert [s.output for s in found[3:]] == [i + 1 for i in range(n)]


@pytest.mark.contract("W9")
async def test_max_parallel_bounds_what_is_under_way(dsn: str) -> None:
    async with engine(dsn) as client:
        run = await narrow.submit(client, 5)
        for n in range(4):
            await running(run, f"held[{n}]", f"held[{n + 1}]")
            found = await nodes(run)
            assert list(found.values()).count("available") == 0
            assert sum(state == "pending" for state in found.values()) == 3 - n
            release(f"held[{n}]")
        release("held[4]")
        assert await run.result(10) == [0, 1, 2, 3, 4]


@pytest.mark.contract("W9")
async def test_a_list_that_is_too_long_fails_the_map(dsn: str) -> None:
    @cyclone.workflow("short")
    def short(g: Graph[int]) -> Node[list[int]]:
        return g.map(add, g.run(numbers, g.input).output, max_items=3)

    @cyclone.workflow("wrong")
    def wrong(g: Graph[Any]) -> Node[list[int]]:
        return g.map(add, g.input)

    async with engine(dsn) as client:
        with pytest.raises(RunFailedError, match="its max_items is 3"):
            await (await short.submit(client, 4)).result(10)
        with pytest.raises(RunFailedError, match="no list"):
            await (await wrong.submit(client, {"a": 1})).result(10)


@pytest.mark.contract("W9", "O11")
async def test_an_item_that_failed_is_reopened_in_place(dsn: str) -> None:
    @cyclone.workflow("items")
    def items(g: Graph[int]) -> Node[list[int]]:
        return g.map(fragile, g.run(numbers, g.input).output)

    broken.add("fragile[1]")
    async with engine(dsn) as client:
        run = await items.submit(client, 3)
        with pytest.raises(RunFailedError) as caught:
            await run.result(10)
        assert caught.value.node == "fragile[1]"
        before = [s.node for s in await run.steps()]
        broken.clear()
        assert await run.retry_all() == 1
        assert await run.result(10) == [0, 1, 2]
        assert [s.node for s in await run.steps()] == before


# Conditions


@cyclone.workflow("maybe")
def maybe(g: Graph[int]) -> Node[int]:
    even = g.run(is_even, g.input)
    extra = g.run(add, g.input, name="extra", when=even.output)
    g.run(note, extra.output, name="strict")
    return g.run(both, Pair(left=g.input, right=extra.output), name="join", accept_skipped=True)


@pytest.mark.contract("W10")
async def test_a_node_is_skipped_when_its_condition_does_not_hold(dsn: str) -> None:
    async with engine(dsn) as client:
        run = await maybe.submit(client, 2)
        assert await run.result(10) == 5
        assert set((await nodes(run)).values()) == {"completed"}
        run = await maybe.submit(client, 3)
        assert await run.result(10) == 3
        assert await nodes(run) == {
            "is_even": "completed", "extra": "cancelled skipped", "strict": "cancelled skipped", "join": "completed",
        }  # fmt: skip
        assert (await run.info()).discarded == []


async def test_a_skipped_result_is_no_output(dsn: str) -> None:
    @cyclone.workflow("skipped")
    def skipped(g: Graph[int]) -> Node[int]:
        return g.run(add, g.input, when=g.run(is_even, g.input).output)

    async with engine(dsn) as client:
        run = await skipped.submit(client, 1)
        with pytest.raises(NoOutputError, match="skipped"):
            await run.result(10)
        assert await run.state() is RunState.COMPLETED


# Failures


@cyclone.workflow("wide")
def wide(g: Graph[int]) -> Node[int]:
    g.run(held, g.input, name="busy")
    g.run(add, g.run(held, g.input, name="other").output, name="later")
    return g.run(fragile, g.input, name="bad")


@pytest.mark.contract("R34", "R35", "R36", "O11", "U19", "U20", "FM-061")
async def test_a_failure_fails_the_run_and_reopening_restores_it(dsn: str) -> None:
    broken.add("bad")
    async with engine(dsn) as client:
        run = await wide.submit(client, 1)
        with pytest.raises(RunFailedError, match="bad is broken") as caught:
            await run.result(10)
        assert (caught.value.node, caught.value.kind, caught.value.run_id) == ("bad", "permanent", run.id)
        assert await nodes(run) == {
            "busy": "cancelled failure", "other": "cancelled failure", "later": "cancelled failure", "bad": "discarded",
        }  # fmt: skip
        info = await run.info()
        assert (info.state, info.node, info.discarded) == (RunState.FAILED, "bad", ["bad"])
        broken.clear()
        calls.clear()
        assert await run.retry_all(reason="mended") == 1
        await running(run, "busy", "other")
        assert await run.state() is RunState.RUNNING
        release("busy")
        release("other")
        assert await run.result(10) == 1
        assert set((await nodes(run)).values()) == {"completed"}
        assert (await run.info()).node is None
        kinds = [event.kind.value async for event in run.events(follow=False)]
        assert kinds[:2] == ["discarded", "run_failed"] and kinds[-1] == "reopened"


@pytest.mark.contract("O11", "W14")
async def test_what_somebody_cancelled_alone_is_not_restored(dsn: str) -> None:
    @cyclone.workflow("partly")
    def partly(g: Graph[int]) -> Node[int]:
        g.run(held, g.input, name="alone", optional=True)
        g.run(held, g.input, name="busy")
        return g.run(fragile, g.run(held, g.input, name="gate").output, name="bad")

    broken.add("bad")
    async with engine(dsn) as client:
        run = await partly.submit(client, 1)
        await running(run, "alone", "busy", "gate")
        assert await client.cancel_step(run.id, "alone", reason="not needed")
        assert (await nodes(run))["alone"] == "cancelled alone"
        assert await run.state() is RunState.RUNNING
        release("gate")
        assert await run.wait(10) is RunState.FAILED
        broken.clear()
        await run.retry("bad")
        release("busy")
        assert await run.result(10) == 1
        assert (await nodes(run))["alone"] == "cancelled alone"


@pytest.mark.contract("R37", "R39", "W13")
async def test_a_failure_stays_in_its_branch(dsn: str) -> None:
    @cyclone.workflow("contained")
    def contained(g: Graph[int]) -> Node[int]:
        bad = g.run(fragile, g.input, name="bad")
        gone = g.run(add, bad.output, name="gone", on_dep_failure=CANCEL_BRANCH)
        g.run(add, gone.output, name="gone_too", on_dep_failure=CANCEL_BRANCH)
        g.run(note, g.input, name="anyway", after=bad, on_dep_failure=RUN_ANYWAY)
        g.run(note, g.input, name="anyway_late", after=gone, on_dep_failure=RUN_ANYWAY)
        return g.run(add, g.input, name="good")

    broken.add("bad")
    async with engine(dsn) as client:
        run = await contained.submit(client, 1)
        assert await run.result(10) == 2
        assert await nodes(run) == {
            "bad": "discarded", "gone": "cancelled dependency", "gone_too": "cancelled dependency",
            "anyway": "completed", "anyway_late": "completed", "good": "completed",
        }  # fmt: skip
        assert (await run.info()).discarded == ["bad"]
        assert {"anyway ['bad']", "anyway_late ['gone']"} <= set(calls)
        # Reopening brings the branch back, and the run with it; what ran anyway does not run again.
        broken.clear()
        calls.clear()
        await run.retry("bad")
        assert await run.wait(10) is RunState.COMPLETED
        assert set((await nodes(run)).values()) == {"completed"}
        assert sorted(calls) == ["bad", "gone", "gone_too"]


@pytest.mark.contract("W13")
async def test_the_items_of_a_map_that_runs_anyway_read_what_failed_before_it(dsn: str) -> None:
    @cyclone.workflow("anyway")
    def anyway(g: Graph[int]) -> Node[int]:
        bad = g.run(fragile, g.input, name="bad")
        g.map(note, [1, 2], name="each", after=bad, on_dep_failure=RUN_ANYWAY)
        return g.run(add, g.input)

    broken.add("bad")
    async with engine(dsn) as client:
        run = await anyway.submit(client, 1)
        assert await run.wait(10) is RunState.COMPLETED
    assert {"each[0] ['bad']", "each[1] ['bad']"} <= set(calls)


@pytest.mark.contract("R38")
async def test_an_optional_node_may_fail_at_the_end(dsn: str) -> None:
    @cyclone.workflow("optional")
    def with_optional(g: Graph[int]) -> Node[int]:
        g.run(fragile, g.input, name="bad", optional=True)
        return g.run(add, g.input)

    broken.add("bad")
    async with engine(dsn) as client:
        run = await with_optional.submit(client, 1)
        assert await run.result(10) == 2
        await run.wait(10)
        assert (await run.info()).discarded == ["bad"]


@pytest.mark.contract("R39")
async def test_a_run_whose_result_is_lost_has_failed(dsn: str) -> None:
    @cyclone.workflow("lost")
    def lost(g: Graph[int]) -> Node[int]:
        bad = g.run(fragile, g.input, name="bad")
        g.run(held, g.input, name="busy")
        return g.run(add, bad.output, name="result", on_dep_failure=CANCEL_BRANCH)

    broken.add("bad")
    async with engine(dsn) as client:
        run = await lost.submit(client, 1)
        await running(run, "busy")
        await until(lambda: _is(run, "result", "cancelled dependency"))
        assert await run.state() is RunState.RUNNING  # the failure is contained, so what goes on may end
        release("busy")
        with pytest.raises(RunFailedError, match="bad is broken") as caught:
            await run.result(10)
        assert caught.value.node == "bad"
        assert (await nodes(run))["busy"] == "completed"
        broken.clear()
        await run.retry_all()
        assert await run.result(10) == 2


async def _is(run: Any, node: str, state: str) -> bool:
    return (await nodes(run))[node] == state


async def test_a_join_of_a_failed_and_a_slow_parent_is_cancelled_when_both_have_ended(dsn: str) -> None:
    """The node is doomed at once, and nothing knows beforehand that the slow parent's end will cancel it."""

    @cyclone.workflow("doomed")
    def doomed(g: Graph[int]) -> Node[int]:
        bad = g.run(fragile, g.input, name="bad")
        slow = g.run(held, g.input, name="slow")
        joined = g.run(both, Pair(left=bad.output, right=slow.output), name="join", on_dep_failure=CANCEL_BRANCH)
        g.run(note, joined.output, name="after", on_dep_failure=CANCEL_BRANCH)
        return g.run(add, g.input)

    broken.add("bad")
    async with engine(dsn) as client:
        run = await doomed.submit(client, 1)
        await running(run, "slow")
        await until(lambda: _is(run, "bad", "discarded"))
        assert (await nodes(run))["join"] == "pending dependency"
        release("slow")
        assert await run.result(10) == 2
        assert (await nodes(run))["after"] == "cancelled dependency"


@pytest.mark.contract("W13")
async def test_cancelling_one_node_counts_as_its_failure(dsn: str) -> None:
    async with engine(dsn) as client:
        run = await wide.submit(client, 1)
        await running(run, "busy", "other")
        assert await client.cancel_step(run.id, "busy", reason="too slow")
        with pytest.raises(RunFailedError, match="too slow") as caught:
            await run.result(10)
        assert (caught.value.node, caught.value.kind) == ("busy", "cancelled")


async def test_cancelling_a_map_ends_its_items(dsn: str) -> None:
    @cyclone.workflow("mapped")
    def mapped(g: Graph[int]) -> Node[int]:
        g.map(held, g.run(numbers, g.input).output, optional=True)
        return g.run(add, g.input)

    async with engine(dsn) as client:
        run = await mapped.submit(client, 3)
        await until(lambda: _is(run, "held", "waiting"))
        assert await client.cancel_step(run.id, "held")
        assert await run.result(10) == 4
        found = await nodes(run)
        assert [found[f"held[{n}]"] for n in range(3)] == ["cancelled alone"] * 3


# Cancelling and deadlines


@pytest.mark.contract("W14")
async def test_a_cancelled_run_stops(dsn: str) -> None:
    stopped = asyncio.Event()

    @cyclone.step("stoppable")
    async def stoppable(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    @cyclone.workflow("stopping")
    def stopping(g: Graph[None]) -> Node[int]:
        first = g.run(stoppable)
        return g.run(add, 1, after=first)

    async with Client(dsn) as client, factories.worker(dsn, *STEPS, stoppable):
        run = await stopping.submit(client)
        await running(run, "stoppable")
        assert await run.cancel("changed my mind")
        assert await nodes(run) == {"stoppable": "cancelled cancel", "add": "cancelled cancel"}
        await asyncio.wait_for(stopped.wait(), 5)
        assert not await run.cancel("again")
        with pytest.raises(RunCancelledError, match="changed my mind"):
            await run.result(1)
        with pytest.raises(InvalidStateError, match="was cancelled"):
            await run.retry_all()
        assert "changed my mind" == (await run.info()).error


@pytest.mark.contract("W14")
async def test_a_run_of_thousands_of_nodes_is_cancelled_whole(dsn: str, conn: Conn) -> None:
    @cyclone.workflow("large")
    def large(g: Graph[int]) -> None:
        first = g.run(held, g.input)
        for _ in range(2500):
            g.run(add, first.output)

    async with Client(dsn) as client:
        run = await large.submit(client, 1)
        assert await run.cancel()
        assert factories.count(conn, "cyclone_steps WHERE state = 'cancelled'") == 2501
        # In the caller's transaction only the first thousand follow at once; a sweeper ends the rest.
        run = await large.submit(client, 1)
        async with await psycopg.AsyncConnection.connect(dsn) as tx:
            assert await client.cancel_tx(tx, run.id)
        assert await run.state() is RunState.CANCELLED
        assert factories.count(conn, "cyclone_runs WHERE ending = 'cancel'") == 1
        await factories.sweep_all(dsn)
        assert factories.count(conn, "cyclone_steps WHERE state = 'cancelled'") == 5002
        assert factories.count(conn, "cyclone_runs WHERE ending IS NOT NULL") == 0


@pytest.mark.contract("W14")
async def test_a_handler_cancels_its_run(dsn: str, conn: Conn) -> None:
    factories.ledger(conn)

    @cyclone.step("gives_up")
    async def gives_up(ctx: Context, x: int) -> None:
        tx = await ctx.completion_tx()
        await tx.execute("INSERT INTO ledger (run_id) VALUES (%s)", (ctx.run_id,))
        raise cyclone.CancelRun("nothing to do")

    @cyclone.workflow("giving_up")
    def giving_up(g: Graph[int]) -> None:
        g.run(add, g.run(held, g.input).output)
        g.run(gives_up, g.input)

    async with Client(dsn) as client, factories.worker(dsn, *STEPS, gives_up):
        run = await giving_up.submit(client, 1)
        assert await run.wait(10) is RunState.CANCELLED
        assert set((await nodes(run)).values()) == {"cancelled cancel"}
        assert (await run.info()).error == "nothing to do"
        step = await gives_up.enqueue(client, 1)
        assert await step.wait(10) is StepState.CANCELLED
    assert factories.count(conn, "ledger") == 0


@pytest.mark.contract("W12", "S9", "R30")
async def test_a_run_ends_at_its_deadline(dsn: str) -> None:
    @cyclone.step("sleepy")
    async def sleepy(ctx: Context, x: int) -> None:
        assert ctx.deadline is not None
        raise cyclone.Snooze(timedelta(hours=1))

    @cyclone.workflow("timed", deadline=timedelta(hours=1))
    def timed(g: Graph[int]) -> Node[int]:
        g.run(sleepy, g.input)
        return g.run(held, g.input)

    async with Client(dsn) as client, factories.worker(dsn, *STEPS, sleepy), factories.sweeper(dsn):
        run = await timed.submit(client, 1)
        info = await run.info()
        assert info.deadline is not None and info.deadline - info.created_at == timedelta(hours=1)
        await run.cancel()
        run = await timed.submit(client, 1, deadline=0.3)
        await until(lambda: _is(run, "sleepy", "scheduled"))
        with pytest.raises(RunFailedError) as caught:
            await run.result(10)
        assert caught.value.kind == "deadline"
        assert await nodes(run) == {"sleepy": "cancelled deadline", "held": "cancelled deadline"}
        # Its time is over, so it needs a new one; then all that the deadline took comes back.
        assert await run.retry_all() == 0
        assert await run.state() is RunState.FAILED
        assert await run.retry_all(deadline=datetime.now(UTC) + timedelta(hours=1)) == 0
        assert await run.state() is RunState.RUNNING
        await running(run, "held")
        release("held")
        await until(lambda: _is(run, "held", "completed"))
        assert await run.cancel()


@pytest.mark.contract("O11", "O12")
async def test_a_discarded_node_of_a_late_run_needs_a_new_deadline(dsn: str, conn: Conn) -> None:
    broken.add("bad")
    async with engine(dsn) as client:
        run = await wide.submit(client, 1, deadline=timedelta(hours=1))
        assert await run.wait(10) is RunState.FAILED
        conn.execute("UPDATE cyclone_runs SET deadline_at = now() - interval '1 second'")  # as if it were later
        with pytest.raises(InvalidStateError, match="has passed"):
            await run.retry("bad")
        broken.clear()
        await run.retry("bad", deadline=timedelta(minutes=5))
        release("busy")
        release("other")
        assert await run.result(10) == 1


# Submitting and looking


@pytest.mark.contract("S1", "S2", "S3", "S4", "S8", "Q1")
async def test_options_of_a_submission(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client:
        options: dict[str, Any] = {"priority": 2, "queue": "mail", "tags": ["x"], "metadata": {"a": 1}, "keep_for": 60}
        run = await cyclone.submit(client, chain, 1, delay=3600, **options)
        other = await chain.submit(client, 1, scheduled_at=datetime.now(UTC) - timedelta(days=1))
        assert run != other
        info = await run.info()
        assert (info.tags, info.metadata, info.keep_for_s) == (["x"], {"a": 1}, 60)
        first, second, _ = await run.steps()
        assert (first.state, first.queue, first.priority) == (StepState.SCHEDULED, "mail", 2)
        assert first.due_at is not None and first.due_at - info.created_at == timedelta(hours=1)
        assert (second.state, second.due_at) == (StepState.PENDING, None)
        assert (await other.steps())[0].state is StepState.AVAILABLE
        assert [one.id for one in (await client.list_runs(tag="x")).items] == [run.id]
        async with await psycopg.AsyncConnection.connect(dsn) as tx:
            hidden = await cyclone.submit_tx(client, tx, chain, 1)
            with pytest.raises(NotFoundError):
                await hidden.result(1)
            await tx.rollback()
        assert factories.count(conn, "cyclone_runs") == 2
        with pytest.raises(cyclone.InvalidOptionError, match="unique"):
            await chain.submit(client, 1, unique="a")  # type: ignore[call-overload]
        with pytest.raises(cyclone.InvalidInputError):
            await chain.submit(client, "x")  # type: ignore[call-overload]


@pytest.mark.contract("R46")
async def test_the_most_specific_option_of_a_node_wins(dsn: str) -> None:
    @cyclone.step("tuned", max_attempts=2, queue="step", priority=1, timeout=9)
    async def tuned(ctx: Context) -> None: ...

    @cyclone.workflow("tuning", queue="workflow")
    def tuning(g: Graph[None]) -> None:
        g.run(tuned, name="plain")
        g.run(tuned, name="own", queue="node", priority=2, max_attempts=7, timeout=3)

    async with Client(dsn) as client:
        for options, plain in (({}, ("workflow", 1)), ({"queue": "submit", "priority": 3}, ("submit", 3))):
            run = await tuning.submit(client, **options)  # type: ignore[arg-type]
            found = {s.node: (s.queue, s.priority, s.max_attempts, s.timeout_s) for s in await run.steps()}
            assert found == {"plain": (*plain, 2, 9), "own": ("node", 2, 7, 3)}


@pytest.mark.contract("W5")
async def test_a_deploy_does_not_change_a_run_that_is_under_way(dsn: str, conn: Conn) -> None:
    @cyclone.workflow("shop")
    def old(g: Graph[int]) -> Node[int]:
        return g.run(both, Pair(left=g.run(held, g.input).output, right=g.input), name="end")

    @cyclone.workflow("shop")
    def new(g: Graph[int]) -> Node[int]:
        return g.run(add, g.run(held, g.input).output, name="end")

    async with engine(dsn) as client:
        run = await old.submit(client, 5)
        await running(run, "held")
        later = await new.submit(client, 5)
        release("held")
        assert (await run.result(10), await later.result(10)) == (10, 6)
        await old.submit(client, 1)
    assert factories.count(conn, "cyclone_graphs") == 2


async def test_runs_are_listed_in_pages_that_do_not_shift(dsn: str) -> None:
    async with Client(dsn) as client:
        runs = await chain.submit_many(client, range(10))
        await diamond.submit(client, 1)
        await runs[3].cancel()
        page = await client.list_runs(workflow=chain, limit=4)
        await chain.submit(client, 99)
        seen = list(page.items)
        while page.next is not None:
            page = await client.list_runs(workflow="chain", limit=4, after=page.next)
            seen += page.items
        assert [one.id for one in seen] == [run.id for run in reversed(runs)]
        cancelled = await client.list_runs(state=RunState.CANCELLED)
        assert [one.id for one in cancelled.items] == [runs[3].id]
        first = (await runs[0].info()).created_at
        assert (await client.list_runs(created_before=first)).items == []
        assert len((await client.list_runs(created_after=first)).items) == 12
        for wrong in ({"state": "gone"}, {"limit": 0}, {"after": "x"}):
            with pytest.raises(cyclone.InvalidOptionError):
                await client.list_runs(**wrong)  # type: ignore[arg-type]


@pytest.mark.contract("I1", "U6")
async def test_sync_clients_and_handlers_have_the_same(dsn: str) -> None:
    started: list[str] = []

    @cyclone.step("starter")
    def starter(ctx: SyncContext, n: int) -> str:
        run = chain.submit(ctx, n)
        started.append(run.id)
        with pytest.raises(cyclone.InvalidOptionError, match="timeout"):
            run.result()
        other, created = chain.submit_once(ctx, f"child:{n}", n)
        assert created and chain.submit_once(ctx, f"child:{n}", n) == (other, False)
        assert chain.find(ctx, "nothing") is None
        return other.id

    def use() -> None:
        with SyncClient(dsn) as client:
            run = chain.submit(client, 1)
            assert run.result(10) == 4
            assert run.state() is RunState.COMPLETED and len(run.steps()) == 3 and run.info().name == "chain"
            assert list(run.events(follow=False)) == []
            assert not run.cancel()
            assert run.retry_all() == 0
            found = chain.get(client, starter.enqueue(client, 5).result(10))
            assert found.result(10) == 8
            assert chain.get(client, started[0]).result(10) == 8
            assert client.list_runs(key="child:5").items[0].id == found.id
            assert client.get_run(found.id).key == "child:5"

    async with factories.worker(dsn, *STEPS, starter):
        await asyncio.to_thread(use)


@pytest.mark.contract("X10")
async def test_a_run_that_a_handler_submits_exists_only_with_its_completion(dsn: str, conn: Conn) -> None:
    @cyclone.step("parent", max_attempts=1)
    async def parent(ctx: Context, fail: bool) -> None:
        await chain.submit(ctx, 1)
        if fail:
            raise Permanent("no")

    async with Client(dsn) as client, factories.worker(dsn, *STEPS, parent):
        for fail in (True, False):
            await (await parent.enqueue(client, fail)).wait(10)
            assert factories.count(conn, "cyclone_runs") == (not fail)


@pytest.mark.contract("C5", "X1")
async def test_what_a_node_wrote_and_what_follows_from_it_commit_together(dsn: str, conn: Conn) -> None:
    factories.ledger(conn)

    @cyclone.step("pay", max_attempts=1)
    async def pay(ctx: Context, x: int) -> int:
        tx = await ctx.completion_tx()
        await tx.execute("INSERT INTO ledger (run_id, node) VALUES (%s, %s)", (ctx.run_id, ctx.node))
        return x

    @cyclone.workflow("paying")
    def paying(g: Graph[int]) -> Node[int]:
        return g.run(pay, g.run(pay, g.input).output)

    async with Client(dsn) as client, factories.worker(dsn, *STEPS, pay):
        assert await (await paying.submit(client, 7)).result(10) == 7
        assert factories.count(conn, "ledger") == 2
        # The child cannot be made available: so the parent is not completed, and its row is not there.
        conn.execute(
            "ALTER TABLE cyclone_steps ADD CONSTRAINT no_child CHECK (NOT (node = 'pay_2' AND state = 'available'))"
            " NOT VALID"
        )
        run = await paying.submit(client, 8)
        with pytest.raises(RunFailedError, match="no_child"):
            await run.result(10)
        assert factories.count(conn, "ledger") == 2
        assert await nodes(run) == {"pay": "discarded", "pay_2": "cancelled failure"}
        conn.execute("ALTER TABLE cyclone_steps DROP CONSTRAINT no_child")


@pytest.mark.contract("C3", "C4")
async def test_no_moment_shows_half_a_transition(dsn: str, conn: Conn) -> None:
    half = """
        SELECT count(*) FROM cyclone_runs r WHERE r.state = 'running' AND NOT EXISTS (
            SELECT FROM cyclone_steps s
            WHERE s.run_id = r.id AND s.state NOT IN ('completed', 'discarded', 'cancelled'))
        UNION ALL SELECT count(*) FROM cyclone_steps c WHERE c.state = 'pending' AND NOT EXISTS (
            SELECT FROM cyclone_steps p WHERE c.id = ANY(p.children) AND p.state <> 'completed')"""
    async with engine(dsn) as client:
        runs = await diamond.submit_many(client, range(100))
        looks = 0
        while factories.count(conn, "cyclone_runs WHERE state = 'running'"):
            assert conn.execute(half).fetchall() == [(0,), (0,)]
            looks += 1
            await asyncio.sleep(0)
        assert looks
        assert all([await run.state() is RunState.COMPLETED for run in runs])


@pytest.mark.contract("E12")
async def test_a_node_that_takes_its_workers_down_fails_its_run(dsn: str, conn: Conn) -> None:
    @cyclone.workflow("crashing")
    def crashing(g: Graph[int]) -> Node[int]:
        return g.run(add, g.run(held, g.input).output)

    async with Client(dsn) as client:
        run = await crashing.submit(client, 1)
        conn.execute(
            "INSERT INTO cyclone_kinds (kind, version, action, max_attempts, max_reclaims, queue, priority)"
            " VALUES ('held', 1, false, 5, 2, 'default', 5)"
        )
        for deaths in (1, 2):
            life = factories.life(conn, kinds=["held"])
            async with factories.engine(dsn) as claiming:
                queue = ("default",) if deaths == 1 else ("default", "!default")
                (step,) = await factories.take(claiming, life, queues=queue)
            factories.end_life(conn, life, [step.id])
            await factories.sweep_all(dsn)
        with pytest.raises(RunFailedError, match="died 2 times") as caught:
            await run.result(1)
        assert (caught.value.node, caught.value.kind) == ("held", "crashed")
        found = {s.node: (s.state.value, s.reclaims) for s in await run.steps()}
        assert found == {"held": ("discarded", 2), "add": ("cancelled", 0)}
    assert factories.count(conn, "cyclone_claims") == 0
