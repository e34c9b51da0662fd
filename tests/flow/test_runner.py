"""The runner: handlers share a task for as long as they wait for nothing, and none notices the others."""

from __future__ import annotations

import asyncio
import contextvars
import time
from datetime import timedelta
from typing import Any

import factories
import psycopg
import pytest
from factories import ended, read, state, until

from cyclone.context import Context
from cyclone.registry import action, step
from cyclone.retry import fixed

Conn = psycopg.Connection[Any]

_who: contextvars.ContextVar[str] = contextvars.ContextVar("_who", default="nobody")


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after waiting"])
async def test_what_a_handler_sets_in_its_context_no_other_sees(dsn: str, conn: Conn, waits: bool) -> None:
    seen: list[str] = []

    @action("mark")
    async def mark(ctx: Context, input: str) -> None:
        seen.append(_who.get())
        _who.set(input)
        if waits:
            await asyncio.sleep(0)
        assert _who.get() == input

    made = [factories.step(conn, "mark", input=f"step {n}") for n in range(20)]
    _who.set("the program")
    async with factories.worker(dsn, mark):
        await ended(conn, *made)
    assert seen == ["the program"] * 20
    assert {state(conn, one) for one in made} == {"completed"}


async def test_a_time_limit_of_a_handlers_own_ends_that_handler_alone(dsn: str, conn: Conn) -> None:
    """Each that waits has a task of its own: what cancels the current task cancels nobody else."""
    tasks: dict[str, asyncio.Task[Any] | None] = {}
    both = asyncio.Barrier(2)

    @step("short", backoff=fixed(timedelta(days=1)))
    async def short(ctx: Context) -> None:
        tasks["short"] = asyncio.current_task()
        async with asyncio.timeout(0.2):
            await both.wait()
            await asyncio.Event().wait()

    @step("long")
    async def long(ctx: Context) -> str:
        tasks["long"] = asyncio.current_task()
        await both.wait()
        await asyncio.wait({task for name, task in tasks.items() if name == "short" and task})
        return "undisturbed"

    made = [factories.step(conn, "short"), factories.step(conn, "long")]
    async with factories.worker(dsn, short, long):
        await ended(conn, made[1])
        await until(lambda: state(conn, made[0]) == "scheduled")
    assert read(conn, made[1], "output") == "undisturbed"
    assert read(conn, made[0], "error").startswith("TimeoutError")
    assert tasks["short"] is not tasks["long"]


async def test_a_handler_that_cancels_the_task_it_ran_in_does_not_cancel_the_next(dsn: str, conn: Conn) -> None:
    @action("rude")
    async def rude(ctx: Context) -> None:
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        task.cancel()

    made = [factories.step(conn, "rude") for _ in range(20)]
    async with factories.worker(dsn, rude):
        await ended(conn, *made)
    assert {read(conn, one, "state", "attempts") for one in made} == {("completed", 1)}


async def test_handlers_that_compute_leave_the_loop_its_turns(dsn: str, conn: Conn) -> None:
    """A hundred steps of 3 ms each, all claimed at once: the loop must turn between them."""
    longest = last = 0.0

    def tick() -> None:
        nonlocal longest, last
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if not done:
            loop.call_soon(tick)

    @action("compute")
    async def compute(ctx: Context) -> None:
        until = time.thread_time() + 0.003
        while time.thread_time() < until:
            pass

    done: list[bool] = []
    loop = asyncio.get_running_loop()
    made = [factories.step(conn, "compute") for _ in range(100)]
    async with factories.worker(dsn, compute):
        last = time.monotonic()
        tick()
        await ended(conn, *made)
        done.append(True)
    assert longest < 0.15, f"the loop stood still for {longest:.3f} s of about 0.3"


async def test_one_handler_that_waits_holds_up_no_other(dsn: str, conn: Conn) -> None:
    release = asyncio.Event()
    order: list[str] = []

    @action("mixed")
    async def mixed(ctx: Context, input: int) -> None:
        if input == 0:
            await release.wait()
        order.append(str(input))

    @action("quick")
    async def quick(ctx: Context) -> None:
        order.append("quick")

    first = factories.step(conn, "mixed", input=0)
    others = [factories.step(conn, "mixed", input=n) for n in (1, 2)]
    others += [factories.step(conn, "quick")]
    async with factories.worker(dsn, mixed, quick):
        await ended(conn, *others)
        assert state(conn, first) == "running"
        release.set()
        await ended(conn, first)
    assert sorted(order[:3]) == ["1", "2", "quick"]
    assert order[3] == "0"


async def test_a_stop_waits_for_a_handler_that_kept_the_runners_task(dsn: str, conn: Conn) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    @step("slow")
    async def slow(ctx: Context) -> str:
        entered.set()
        await release.wait()
        return "finished"

    made = factories.step(conn, "slow")
    async with factories.worker(dsn, slow) as worker:
        await entered.wait()
        stopped = worker.stop()
        release.set()
        await stopped
    assert read(conn, made, "state", "output") == ("completed", "finished")
