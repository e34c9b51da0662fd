"""Cyclone as one of several job queues under a common harness: how to install, enqueue and work, nothing else.

The harness brings `common` (payloads, counters, the start signal) and calls this file with a command; see README.md. A
worker process is a program that embeds one `cyclone.Worker`, with the defaults of production.
"""

import asyncio

import common
import msgspec

import cyclone
from cyclone import migrate

CONCURRENCY = common.opt("concurrency", 100)


class Message(msgspec.Struct):
    seq: int
    to: str
    body: str


handlers = cyclone.Registry()


@cyclone.action("noop", registry=handlers)
async def noop(ctx: cyclone.Context, message: Message) -> None:
    common.hit(message.seq)


@cyclone.step("carry", registry=handlers)
async def carry(ctx: cyclone.Context, message: Message) -> Message:
    common.hit(message.seq)
    return message


@cyclone.workflow("abc", registry=handlers)
def abc(g: cyclone.Graph[Message]) -> cyclone.Node[Message]:
    first = g.run(carry, g.input)
    second = g.run(carry, first.output)
    return g.run(carry, second.output)


def payload(seq: int) -> Message:
    return Message(**common.payload(seq))


async def schema() -> None:
    await asyncio.to_thread(migrate.up, common.DSN)


async def bulk(n: int) -> float:
    async with cyclone.Client(common.DSN) as client:
        with common.stopwatch() as watch:
            await noop.enqueue_many(client, map(payload, range(n)))
    return watch.seconds


async def bulk_runs(n: int) -> float:
    async with cyclone.Client(common.DSN) as client:
        with common.stopwatch() as watch:
            await abc.submit_many(client, map(payload, range(n)))
    return watch.seconds


async def enqueuer():
    client = cyclone.Client(common.DSN)
    await client.open()

    async def enqueue_one(seq: int) -> None:
        await noop.enqueue(client, payload(seq))

    return enqueue_one


async def worker() -> None:
    await cyclone.Worker(common.DSN, handlers, concurrency=CONCURRENCY).run()


common.main(
    "cyclone-jobs",
    schema=schema,
    bulk=bulk,
    enqueuer=enqueuer,
    worker=worker,
    bulkwf=bulk_runs,
    workerwf=worker,
)
