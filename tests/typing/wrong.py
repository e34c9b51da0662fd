"""Uses that strict type checkers must refuse, each on the line that says so. Checked by test_typing.py, never run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from django.db import connection
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

import cyclone
from cyclone import Context, Graph, Node, SyncContext
from cyclone.ext.sqlalchemy import bind


@dataclass
class Order:
    id: str


@dataclass
class Receipt:
    charge_id: str


@cyclone.step("charge")
async def charge(ctx: Context, order: Order) -> Receipt:
    return Receipt(ctx.key(1))  # error: a part of a key is text


@cyclone.step("tick")
async def tick(ctx: Context) -> int:
    return ctx.idempotency_key  # error: an int is declared


@cyclone.step("in_thread")
def in_thread(ctx: SyncContext, n: int) -> int:
    return n


# Declaring


@cyclone.step("a", max_attempts="5")  # error: a number
async def declared_a(ctx: Context) -> None: ...


@cyclone.step("b", retries=5)  # error: there is no such option
async def declared_b(ctx: Context) -> None: ...


@cyclone.step("c", timeout=datetime.max)  # error: a timedelta or seconds
async def declared_c(ctx: Context) -> None: ...


@cyclone.step("d", backoff=lambda attempt: "soon")  # error: a delay
async def declared_d(ctx: Context) -> None: ...


@cyclone.step("e", permanent_on=ValueError)  # error: a tuple
async def declared_e(ctx: Context) -> None: ...


@cyclone.action("f")  # error: an action returns nothing
async def declared_f(ctx: Context) -> int:
    return 1


@cyclone.step("g")  # error: at most one input
async def declared_g(ctx: Context, a: int, b: int) -> int:
    return a + b


@cyclone.step("h")  # error: a def takes a SyncContext
def declared_h(ctx: Context, n: int) -> int:
    return n


@cyclone.step("i", executor="process")  # error: in a process it takes a ProcessContext
def declared_i(ctx: SyncContext, n: int) -> int:
    return n


@cyclone.step("j", memory_limit="1GiB")  # error: only with executor="process"
def declared_j(ctx: SyncContext, n: int) -> int:
    return n


@cyclone.redact  # error: from str to str
def mask(text: str) -> bytes:
    return text.encode()


# Enqueueing


async def enqueueing(
    client: cyclone.Client, sync: cyclone.SyncClient, conn: psycopg.AsyncConnection, sync_conn: psycopg.Connection
) -> None:
    order = Order("o-1")
    await charge.enqueue(client, Receipt("c-1"))  # error: an Order
    await charge.enqueue(client, "o-1")  # error: an Order
    await charge.enqueue(client)  # error: the input is missing
    await charge.enqueue(order, client)  # error: the client comes first
    await charge.enqueue(client, order, priority="high")  # error: a number
    await charge.enqueue(client, order, delay="3s")  # error: a timedelta or seconds
    await charge.enqueue(client, order, scheduled_at=3)  # error: a datetime
    await charge.enqueue(client, order, uniq="o-1")  # error: there is no such option
    await charge.enqueue(client, order, backoff=cyclone.fixed(1))  # error: an option of the declaration only
    await charge.enqueue(client, order, method="copy")  # error: an option of enqueue_many only
    await charge.enqueue_many(client, [Receipt("c-1")])  # error: Orders
    await charge.enqueue_many(client, order)  # error: a list
    await charge.enqueue_many(client, [order], method="fast")  # error: no such method
    await charge.enqueue_tx(client, sync_conn, order)  # error: an async connection
    charge.enqueue_tx(sync, conn, order)  # error: a sync connection
    await charge.enqueue_tx(client, order)  # error: the connection is missing
    await charge.enqueue(sync, order)  # error: a SyncClient returns the handle
    await tick.enqueue(client, 1)  # error: it takes no input
    await in_thread.enqueue(client, "1")  # error: an int
    await cyclone.enqueue(client, charge, "o-1")  # error: an Order
    await cyclone.enqueue_tx(client, conn, charge, "o-1")  # error: an Order
    sync_n: int = charge.enqueue(sync, order).result()  # error: a Receipt
    n: int = await (await charge.enqueue(client, order)).result()  # error: a Receipt
    handle: cyclone.StepHandle[int] = await charge.enqueue(client, order)  # error: of a Receipt
    await (await charge.enqueue(client, order)).wait("3s")  # error: a timedelta or seconds
    await client.get_step(1, "charge")  # error: the id of a run is text
    client.list_steps("1").append(n)  # error: not awaited
    print(sync_n, handle)


# Workflows


@cyclone.step("price")
async def price(ctx: Context, cents: int) -> int:
    return cents


@cyclone.workflow("checkout")
def checkout(g: Graph[Order]) -> Node[Receipt]:
    g.run(charge, g.input.id)  # error: an Order
    g.run(price, g.input.cents)  # error: an Order has none
    g.run(charge, g.input, max_atempts=3)  # error: a misspelt option
    paid = g.run(charge, g.input)
    g.run(charge, Order(id=g.run(price, 3).output))  # error: an id is text
    g.run(price, paid.output)  # error: an int
    g.run(price)  # error: it takes an input
    g.run(tick, 3)  # error: it takes none
    g.map(price, paid.output)  # error: a list
    g.map(price, [paid.output])  # error: of int
    g.run(tick, after="paid")  # error: a node
    g.run(tick, on_dep_failure="ignore")  # error: no such policy
    return g.run(price, 3)  # error: a Receipt


async def workflows(client: cyclone.Client, sync: cyclone.SyncClient, conn: psycopg.AsyncConnection) -> None:
    await checkout.submit(client, "o-1")  # error: an Order
    await checkout.submit(client)  # error: its input is missing
    await checkout.submit(client, Order("o-1"), unique="k")  # error: for steps only
    await checkout.submit_once(client, Order("o-1"))  # error: a key
    await checkout.submit_once(client, "k", Order("o-1"), compare="loose")  # error: no such choice
    checkout.submit_tx(sync, conn, Order("o-1"))  # error: a sync connection
    await cyclone.submit(client, checkout, 3)  # error: an Order
    n: int = await (await checkout.submit(client, Order("o-1"))).result()  # error: a Receipt
    sync_n: int = checkout.submit(sync, Order("o-1")).result()  # error: a Receipt
    await charge.enqueue_many(client, [Order("o-1")], unique="k")  # error: a function
    print(n, sync_n)


# In the caller's transaction


async def joining(
    client: cyclone.Client,
    sync: cyclone.SyncClient,
    tx: AsyncConnection,
    orm: AsyncSession,
    sync_tx: Connection,
    sync_orm: Session,
    ctx: Context,
    sync_ctx: SyncContext,
) -> None:
    order = Order("o-1")
    await charge.enqueue_tx(client, "postgresql://", order)  # error: a connection
    charge.enqueue_tx(sync, "postgresql://", order)  # error: a connection
    charge.enqueue_tx(sync, tx, order)  # error: a sync connection
    charge.enqueue_tx(sync, orm, order)  # error: a sync session
    charge.enqueue_many_tx(sync, orm, [order])  # error: a sync session
    await charge.enqueue_tx(client, sync_tx, order)  # error: an async connection
    await charge.enqueue_tx(client, sync_orm, order)  # error: an async session
    await charge.enqueue_tx(client, connection, order)  # error: Django's connection is sync
    charge.enqueue_tx(sync, sync_tx.engine, order)  # error: a connection and not what makes them
    charge.enqueue_tx(sync, sync_orm, Receipt("c-1"))  # error: an Order
    await client.retry_tx(sync_orm, "1", "charge")  # error: an async session
    sync.retry_all_tx(orm, "1")  # error: a sync session
    await ctx.complete_in(connection)  # error: an async connection
    sync_ctx.complete_in(orm)  # error: a sync session
    bind(sync_ctx)  # error: a Context


# Calling, and what handlers are given


async def calling(ctx: Context, sync_ctx: SyncContext, work: Callable[[], Any]) -> None:
    await charge(ctx, "o-1")  # error: an Order
    await charge(sync_ctx, Order("o-1"))  # error: a Context
    await tick(ctx, 1)  # error: it takes no input
    in_thread(ctx, 1)  # error: a SyncContext
    tx = ctx.completion_tx()
    tx.execute("SELECT 1")  # error: not awaited
    sync_ctx.completion_tx().execut("SELECT 1")  # error: no such method
    await ctx.once("ask", lambda: 1)  # error: an async function
    await ctx.once("ask", work, on_unknown="retry")  # error: no such choice
    ctx.attempt = 3  # error: not to be set
    raise cyclone.Snooze("3s")  # error: a timedelta or seconds


def processes(dsn: str, registry: cyclone.Registry) -> None:
    cyclone.Worker(dsn, registry, lease="60s")  # error: a timedelta or seconds
    cyclone.Worker(dsn, registry, concurency=5)  # error: a misspelt option
    cyclone.Worker(dsn, registry, redact=len)  # error: from str to str
    cyclone.Worker(dsn, [charge])  # error: a registry or a module
    cyclone.Pool("shop.jobs", metrics_port="9464")  # error: a number
    cyclone.Client(dsn, timeout=3)  # error: there is no such option
    registry.include("shop.jobs")  # error: a registry, a module or a step
