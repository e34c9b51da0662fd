"""Uses that strict type checkers must accept, with the types they must find. Checked by test_typing.py, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import assert_type

import psycopg
import psycopg_pool
from django.db import connection, connections
from psycopg.rows import DictRow
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import cyclone
from cyclone import Context, Graph, Node, ProcessContext, SyncContext
from cyclone.ext.sqlalchemy import bind, bind_sync


@dataclass
class Order:
    id: str
    cents: int


@dataclass
class Receipt:
    charge_id: str


@cyclone.step("charge", max_attempts=5, timeout=timedelta(seconds=30), permanent_on=(ValueError,))
async def charge(ctx: Context, order: Order) -> Receipt:
    tx = await ctx.completion_tx()
    await tx.execute("INSERT INTO ledger (run_id, cents) VALUES (%s, %s)", (ctx.run_id, order.cents))
    async with tx.savepoint():
        await tx.execute("SELECT 1")
    if order.cents < 0:
        raise cyclone.Permanent("negative")
    if not order.cents:
        raise cyclone.Snooze(timedelta(seconds=30))
    assert_type(ctx.run_id, cyclone.RunID)
    assert_type(ctx.idempotency_key, str)
    assert_type(await ctx.once("ask", ask), int)
    return Receipt(ctx.key("a", "b"))


async def ask() -> int:
    return 1


def ask_blocking() -> int:
    return 1


@cyclone.step("charge_in_thread", backoff=cyclone.exponential(base=2, cap=timedelta(minutes=5)))
def charge_in_thread(ctx: SyncContext, order: Order) -> Receipt:
    tx = ctx.completion_tx()
    tx.execute("SELECT 1")
    assert_type(ctx.once("ask", ask_blocking), int)
    ctx.check_cancelled()
    return Receipt(ctx.idempotency_key)


@cyclone.action("mail", backoff=lambda attempt: timedelta(seconds=attempt))
async def mail(ctx: Context, address: str) -> None:
    ctx.log.info("to %s", address)


@cyclone.step("tick", backoff=lambda attempt, exc: timedelta(seconds=30))
async def tick(ctx: Context) -> int:
    return ctx.attempt


@cyclone.action()
def tidy(ctx: SyncContext) -> None: ...


@cyclone.step("render", executor="process", memory_limit="512MiB", timeout=60)
def render(ctx: ProcessContext, order: Order) -> Receipt:
    return Receipt(ctx.key("pdf"))


@cyclone.action("shrink", executor="process")
def shrink(ctx: ProcessContext) -> None: ...


@cyclone.redact
def mask(text: str) -> str:
    return text.replace("secret", "***")


@charge.upgrade(from_version=1)
def _(old: dict[str, object]) -> dict[str, object]:
    return old


registry = cyclone.Registry()
registry.include(charge)


@registry.lifespan
async def lifespan(state: cyclone.State) -> AsyncIterator[None]:
    yield


@cyclone.step("registered", registry=registry)
async def registered(ctx: Context, n: int) -> int:
    return n


async def async_client(
    client: cyclone.Client, conn: psycopg.AsyncConnection, rows: psycopg.AsyncConnection[DictRow]
) -> None:
    order = Order("o-1", 4200)
    handle = await charge.enqueue(client, order)
    assert_type(handle, cyclone.StepHandle[Receipt])
    assert_type(await handle.result(timeout=timedelta(minutes=1)), Receipt)
    assert_type(await handle.wait(3.5), cyclone.StepState)
    assert_type(await handle.cancel("no need"), bool)
    assert_type(await charge.enqueue(client, order, max_attempts=3, queue="a", priority=0), cyclone.StepHandle[Receipt])
    await charge.enqueue(client, order, scheduled_at=datetime.now(UTC), tags=["a"], metadata={"a": [1]}, keep_for=60)
    assert_type(await cyclone.enqueue(client, charge, order, timeout=None), cyclone.StepHandle[Receipt])
    assert_type(await charge.enqueue_tx(client, conn, order), cyclone.StepHandle[Receipt])
    assert_type(await charge.enqueue_tx(client, rows, order), cyclone.StepHandle[Receipt])
    assert_type(await cyclone.enqueue_tx(client, conn, charge, order), cyclone.StepHandle[Receipt])
    assert_type(await charge.enqueue_many(client, [order], method="copy"), list[cyclone.StepHandle[Receipt]])
    assert_type(await charge.enqueue_many_tx(client, conn, (order,)), list[cyclone.StepHandle[Receipt]])
    # A handler that runs in a thread is enqueued like any other.
    assert_type(await (await charge_in_thread.enqueue(client, order)).result(), Receipt)
    # Without an input.
    assert_type(await (await tick.enqueue(client)).result(), int)
    await tidy.enqueue(client, delay=timedelta(hours=1))
    assert_type(await cyclone.enqueue(client, tick), cyclone.StepHandle[int])
    info = await client.get_step(handle.run_id, handle.node)
    assert_type(info.state, cyclone.StepState)
    assert_type(info.errors[0], cyclone.StepError)
    assert_type(await client.list_steps("1"), list[cyclone.StepInfo])
    assert_type(await client.cancel_step("1", "charge", reason="no need"), bool)


def sync_client(client: cyclone.SyncClient, conn: psycopg.Connection, rows: psycopg.Connection[DictRow]) -> None:
    order = Order("o-1", 4200)
    handle = charge.enqueue(client, order)
    assert_type(handle, cyclone.SyncStepHandle[Receipt])
    assert_type(handle.result(timeout=3), Receipt)
    assert_type(charge.enqueue_tx(client, conn, order), cyclone.SyncStepHandle[Receipt])
    assert_type(charge.enqueue_tx(client, rows, order), cyclone.SyncStepHandle[Receipt])
    assert_type(charge.enqueue_many(client, [order]), list[cyclone.SyncStepHandle[Receipt]])
    assert_type(cyclone.enqueue(client, charge, order), cyclone.SyncStepHandle[Receipt])
    assert_type(cyclone.enqueue_tx(client, conn, charge, order), cyclone.SyncStepHandle[Receipt])
    assert_type(tick.enqueue(client).result(), int)
    assert_type(client.get_step("1", "charge").run_id, cyclone.RunID)


@cyclone.step("total")
async def total(ctx: Context, cents: list[int]) -> int:
    return sum(cents)


@cyclone.step("price")
async def price(ctx: Context, order: Order) -> int:
    return order.cents


@cyclone.workflow("checkout", deadline=timedelta(hours=1))
def checkout(g: Graph[Order]) -> Node[Receipt]:
    assert_type(g.input, Order)
    paid = g.run(charge, g.input, max_attempts=3, name="paid")
    assert_type(paid, Node[Receipt])
    assert_type(paid.output, Receipt)
    first = g.run(price, Order(paid.output.charge_id, g.input.cents), after=[paid], optional=True)
    g.run(tick, on_dep_failure=cyclone.RUN_ANYWAY, when=first.output)
    g.run(charge, g.build(Order, id=g.input.id, cents=3))
    return paid


@cyclone.workflow("mapping")
def mapping(g: Graph[list[Order]]) -> Node[int]:
    prices = g.map(price, g.input, max_parallel=3)
    assert_type(prices, Node[list[int]])
    return g.run(total, prices.output)


@cyclone.workflow()
def nothing(g: Graph[None]) -> None:
    g.run(tick)


async def workflows(client: cyclone.Client, conn: psycopg.AsyncConnection, session: AsyncSession, ctx: Context) -> None:
    order = Order("o-1", 4200)
    run = await checkout.submit(client, order, deadline=timedelta(hours=1), tags=["a"])
    assert_type(run, cyclone.ResultRun[Receipt])
    assert_type(await run.result(timeout=3), Receipt)
    assert_type(
        await checkout.submit_once(client, "k", order, compare="typed"), tuple[cyclone.ResultRun[Receipt], bool]
    )
    assert_type(await checkout.submit_once_tx(client, conn, "k", order), tuple[cyclone.ResultRun[Receipt], bool])
    assert_type(await checkout.submit_tx(client, session, order), cyclone.ResultRun[Receipt])
    assert_type(await mapping.submit_many(client, [[order]]), list[cyclone.ResultRun[int]])
    results = await checkout.submit_once_many(client, [("k", order)])
    assert_type(results, list[cyclone.OnceResult[cyclone.ResultRun[Receipt]]])
    assert_type(await checkout.find(client, "k"), cyclone.ResultRun[Receipt] | None)
    assert_type(checkout.get(client, "1"), cyclone.ResultRun[Receipt])
    assert_type(await nothing.submit(client), cyclone.Run)
    assert_type(await cyclone.submit(client, mapping, [order]), cyclone.ResultRun[int])
    assert_type(await cyclone.submit(client, nothing, None), cyclone.Run)
    found = await cyclone.submit_once(client, checkout, "k", order)
    assert_type(found, tuple[cyclone.ResultRun[Receipt], bool])
    assert_type((await client.list_runs(workflow=checkout)).items[0], cyclone.RunInfo)
    assert_type(await charge.enqueue(client, order, unique=cyclone.Unique("k")), cyclone.StepHandle[Receipt])
    await charge.enqueue_many(client, [order], unique=lambda one: str(one.id))
    await charge.enqueue_tx(client, session, order)
    async with bind(ctx) as own:
        assert_type(own, AsyncSession)


def sync_workflows(
    client: cyclone.SyncClient, conn: psycopg.Connection, sql: Connection, session: Session, ctx: SyncContext
) -> None:
    order = Order("o-1", 4200)
    assert_type(checkout.submit(client, order).result(), Receipt)
    assert_type(checkout.submit_once_tx(client, sql, "k", order), tuple[cyclone.SyncResultRun[Receipt], bool])
    assert_type(checkout.submit_tx(client, session, order), cyclone.SyncResultRun[Receipt])
    assert_type(nothing.submit(ctx), cyclone.SyncRun)
    assert_type(cyclone.submit(client, checkout, order), cyclone.SyncResultRun[Receipt])
    assert_type(mapping.find(client, "k"), cyclone.SyncResultRun[int] | None)
    charge.enqueue_tx(client, conn, order, unique="k")
    assert_type(charge.enqueue_tx(client, connection, order), cyclone.SyncStepHandle[Receipt])
    assert_type(checkout.submit_tx(client, connections["jobs"], order), cyclone.SyncResultRun[Receipt])
    client.retry_tx(connection, "1", "charge")
    ctx.complete_in(connection)
    with bind_sync(ctx) as own:
        assert_type(own, Session)


async def unit_tests_of_handlers(ctx: Context, sync_ctx: SyncContext) -> None:
    assert_type(await charge(ctx, Order("o-1", 1)), Receipt)
    assert_type(charge_in_thread(sync_ctx, Order("o-1", 1)), Receipt)
    assert_type(await tick(ctx), int)
    tidy(sync_ctx)


async def processes(dsn: str, pool: psycopg_pool.AsyncConnectionPool) -> None:
    async with cyclone.Client(pool=pool), cyclone.Client(dsn, schema="jobs") as client:
        async with cyclone.Worker(client, registry, queues=["a"], lease=timedelta(seconds=60), notify=False):
            pass
    cyclone.Pool("shop.jobs", procs=2, dsn=dsn, drain_timeout=3).run()
    await cyclone.Sweeper(dsn, interval=timedelta(seconds=1)).run()


def outcomes(error: cyclone.CycloneError) -> str:
    match error:
        case cyclone.RunFailedError():
            assert_type(error.kind, str)
            return error.node
        case cyclone.RunCancelledError():
            return error.run_id
        case _:
            return str(error)
