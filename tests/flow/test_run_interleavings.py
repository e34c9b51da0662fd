"""Two that touch one run at the same moment, each order of events made on purpose."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, deliver, take, until

import cyclone
from cyclone import CANCEL_BRANCH, Client, Context, Graph, Node, RunState, SyncClient
from cyclone.model import Claimed, Failure, Outcome, Verb
from cyclone.states import ErrorKind

Conn = psycopg.Connection[Any]
BROKEN = Failure(ErrorKind.PERMANENT, "broken", "")


@cyclone.step("leaf")
async def leaf(ctx: Context, n: Any) -> int:
    return 1


@cyclone.step("list")
async def listed(ctx: Context, n: Any) -> list[int]:
    return [1, 2]


@cyclone.workflow("leaves")
def leaves(g: Graph[int]) -> None:
    g.run(leaf, g.input, name="a")
    g.run(leaf, g.input, name="b")


@cyclone.workflow("joined")
def joined(g: Graph[int]) -> Node[int]:
    first, second = g.run(leaf, g.input, name="a"), g.run(leaf, g.input, name="b")
    return g.run(leaf, g.input, name="join", after=[first, second])


@cyclone.workflow("mapped")
def mapped(g: Graph[list[int]]) -> Node[list[int]]:
    return g.map(leaf, g.input, name="each")


@cyclone.workflow("branch")
def branch(g: Graph[int]) -> Node[int]:
    bad, slow = g.run(leaf, g.input, name="bad"), g.run(leaf, g.input, name="slow")
    g.run(leaf, g.input, name="doomed", after=[bad, slow], on_dep_failure=CANCEL_BRANCH)
    return g.run(leaf, g.input, name="result")


def complete(step: Claimed) -> Outcome:
    return Outcome(step, Verb.COMPLETE, "1")


def discard(step: Claimed) -> Outcome:
    return Outcome(step, Verb.DISCARD, failure=BROKEN)


@contextlib.asynccontextmanager
async def claiming(dsn: str, conn: Conn) -> AsyncIterator[Any]:
    """What claims steps by their node."""
    life = factories.life(conn, kinds=["leaf", "list", "cyclone.map"])
    async with factories.engine(dsn, "claim") as own:

        async def claimed(many: Any = None) -> Any:
            """The steps by node, or all of several runs."""
            steps = await take(own, life)
            return {step.node: step for step in steps} if many is None else steps

        yield claimed


async def settle_in(conn: factories.AsyncConn, step: Claimed) -> None:
    """Completes a node in whatever transaction is open, as a settle does."""
    params = {
        "ids": [step.id], "claims": [step.claim], "outputs": ["1"], "closed": [], "runs": [step.run_id],
        "step_over": False, "now": None,
    }  # fmt: skip
    await conn.execute(SQL["complete_nodes"], params)


async def blocked(conn: Conn) -> None:
    query = "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    await until(lambda: factories.count(conn, query))


def deadlocks(conn: Conn) -> int:
    return factories.count(conn, "pg_stat_database WHERE datname = current_database() AND deadlocks > 0")


@pytest.mark.contract("C4")
async def test_two_last_leaves_on_two_workers_end_the_run(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed, factories.engine(dsn) as first:
        run = await leaves.submit(client, 1)
        steps = await claimed()
        await first.execute("BEGIN")
        await settle_in(first, steps["a"])
        other = asyncio.create_task(deliver(dsn, complete(steps["b"])))
        await blocked(conn)
        assert await run.state() is RunState.RUNNING
        await first.execute("COMMIT")
        await other
        assert await run.state() is RunState.COMPLETED


@pytest.mark.contract("C9", "FM-060")
async def test_two_parents_at_the_same_moment_make_their_child_available_once(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed, factories.engine(dsn) as first:
        run = await joined.submit(client, 1)
        steps = await claimed()
        await first.execute("BEGIN")
        await settle_in(first, steps["a"])
        other = asyncio.create_task(deliver(dsn, complete(steps["b"])))
        await blocked(conn)
        await first.execute("COMMIT")
        await other
        assert factories.count(conn, "cyclone_ready") == 1
        assert list(await claimed()) == ["join"]
        assert (await run.steps())[2].state.value == "running"


async def test_a_map_that_expands_before_its_run_is_cancelled(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed, factories.engine(dsn) as first:
        run = await mapped.submit(client, [1, 2, 3])
        step = (await claimed())["each"]
        await first.execute("BEGIN")
        params = {"id": step.id, "claim": step.claim, "run": step.run_id, "items": "[1, 2, 3]", "now": None}
        await first.execute(SQL["expand_map"], params)
        cancel = asyncio.create_task(run.cancel())
        await blocked(conn)
        await first.execute("COMMIT")
        assert await cancel
        assert [s.state.value for s in await run.steps()] == ["cancelled"] * 4


async def test_a_map_does_not_expand_after_its_run_was_cancelled(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed:
        run = await mapped.submit(client, [1, 2, 3])
        step = (await claimed())["each"]
        with psycopg.connect(dsn) as tx, SyncClient(dsn) as sync:
            assert sync.cancel_tx(tx, run.id)
            expand = asyncio.create_task(deliver(dsn, Outcome(step, Verb.EXPAND, "[1, 2, 3]")))
            await blocked(conn)
            tx.commit()
        await expand
        assert [s.state.value for s in await run.steps()] == ["cancelled"]


async def test_workers_that_end_each_other_s_runs_do_not_block_each_other(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed:
        for turn in range(20):
            runs = await leaves.submit_many(client, range(20))
            # Each batch fails the runs that the other one completes a node of, in the opposite order.
            one: list[Outcome] = []
            other: list[Outcome] = []
            for step in await claimed(list):
                bad = step.node == "a"
                (one if bad == (step.run_id % 2 == 0) else other).append((discard if bad else complete)(step))
            await asyncio.gather(deliver(dsn, *one), deliver(dsn, *reversed(other)))
            assert {await run.state() for run in runs} == {RunState.FAILED}, turn
    assert not deadlocks(conn)


async def test_a_transaction_that_holds_a_run_holds_up_no_other(dsn: str, conn: Conn) -> None:
    """A settle steps around what somebody has locked; the rest of its batch is written at once, and it later."""
    async with Client(dsn) as client, claiming(dsn, conn) as claimed:
        held = await leaves.submit(client, 1)
        held_steps = await claimed()
        free = await leaves.submit(client, 2)
        free_steps = await claimed()
        with psycopg.connect(dsn) as tx:
            tx.execute("SELECT FROM cyclone_runs WHERE id = %s FOR UPDATE", (int(held.id),))
            batch = [complete(step) for step in (*held_steps.values(), *free_steps.values())]
            task = asyncio.create_task(deliver(dsn, *batch))
            await until(lambda: _ended(free))
            assert not await _ended(held)
            tx.rollback()
        await task
        assert await held.state() is RunState.COMPLETED


async def _ended(run: Any) -> bool:
    return bool((await run.state()).terminal)


async def test_a_child_that_somebody_has_locked_holds_up_only_its_parents(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed:
        held = await joined.submit(client, 1)
        held_steps = await claimed()
        free = await leaves.submit(client, 2)
        free_steps = await claimed()
        with psycopg.connect(dsn) as tx:
            tx.execute("SELECT FROM cyclone_steps WHERE node = 'join' FOR UPDATE")
            batch = [complete(step) for step in (*held_steps.values(), *free_steps.values())]
            task = asyncio.create_task(deliver(dsn, *batch))
            await until(lambda: _ended(free))
            assert factories.count(conn, "cyclone_steps WHERE run_id = %s AND state = 'running'", int(held.id)) == 2
            tx.rollback()
        await task
        assert factories.count(conn, "cyclone_ready") == 1


@pytest.mark.contract("E9")
async def test_a_cancel_and_a_completion_of_its_last_node(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed:
        run = await leaves.submit(client, 1)
        steps = await claimed()
        await deliver(dsn, complete(steps["a"]))
        with psycopg.connect(dsn) as tx, SyncClient(dsn) as sync:
            assert sync.cancel_tx(tx, run.id)
            late = asyncio.create_task(deliver(dsn, complete(steps["b"])))
            await blocked(conn)
            tx.commit()
        await late
        assert await run.state() is RunState.CANCELLED
        assert [s.state.value for s in await run.steps()] == ["completed", "cancelled"]


async def test_what_dooms_a_node_and_what_ends_it_come_from_two_workers(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed, factories.engine(dsn) as first:
        run = await branch.submit(client, 1)
        steps = await claimed()
        await first.execute("BEGIN")
        await settle_in(first, steps["slow"])  # counts down a node that nobody has doomed yet
        failing = asyncio.create_task(deliver(dsn, discard(steps["bad"])))
        await blocked(conn)
        await first.execute("COMMIT")
        await failing
        found = {s.node: s.state.value for s in await run.steps()}
        assert found == {"bad": "discarded", "slow": "completed", "doomed": "cancelled", "result": "running"}
        await deliver(dsn, complete(steps["result"]))
        assert await run.state() is RunState.COMPLETED


async def test_reopening_and_a_settle_of_the_same_run(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed:
        run = await branch.submit(client, 1)
        steps = await claimed()
        await deliver(dsn, discard(steps["bad"]))
        with psycopg.connect(dsn) as tx, SyncClient(dsn) as sync:
            sync.retry_tx(tx, run.id, "bad")
            other = asyncio.create_task(deliver(dsn, complete(steps["slow"]), complete(steps["result"])))
            await blocked(conn)
            tx.commit()
        await other
        found = {s.node: (s.state.value, s.fate) for s in await run.steps()}
        assert found["doomed"] == ("pending", None)
        again = await claimed()
        await deliver(dsn, complete(again["bad"]))
        assert {s.node: s.state.value for s in await run.steps()}["doomed"] == "available"


async def test_a_settle_that_is_sent_again_counts_once(dsn: str, conn: Conn) -> None:
    async with Client(dsn) as client, claiming(dsn, conn) as claimed:
        run = await joined.submit(client, 1)
        steps = await claimed()
        for _ in range(3):
            await deliver(dsn, complete(steps["a"]))
        assert factories.count(conn, "cyclone_steps WHERE node = 'join' AND pending = 1") == 1
        await deliver(dsn, complete(steps["b"]))
        assert (await run.steps())[2].state.value == "available"
