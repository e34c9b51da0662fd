"""The program that the pools of these tests run: handlers that tell the test where they are, and wait for its word.

A handler tells by a line on a named pipe, and waits for a file to appear; both lie in the folder that APP_FOLDER names.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

import cyclone
from cyclone import Context, ProcessContext, SyncContext

FOLDER = Path(os.environ.get("APP_FOLDER", "."))
CHANNEL = "channel"
OUTSIDE = "outside"
"""A file that no transaction protects: a line in it is an effect outside the database."""


def tell(what: str, **facts: Any) -> None:
    """Tells the test something. A short line on a pipe arrives whole, and nobody waits for it to be read."""
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **facts}).encode() + b"\n"
    channel = os.open(FOLDER / CHANNEL, os.O_WRONLY)
    try:
        os.write(channel, line)
    finally:
        os.close(channel)


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """What a handler is to do. A gate is opened by the test; `{reclaims}` in its name stands for their number."""

    name: str = ""
    sleep_s: float = 0.0
    gate: str | None = None
    gate_first: bool = False
    """Waits before it has any effect, and not after."""
    told: bool = True
    ledger: bool = False
    """Writes a row on the completion transaction."""
    outside: bool = False
    """Writes a line to the file outside."""
    fail_before: int = 1
    """Attempts below this one fail."""
    first: Literal["returns", "fails", "gives up", "snoozes"] = "returns"
    """How a call ends that no lost lease came before."""


def facts(ctx: Context | SyncContext | ProcessContext, job: Job) -> dict[str, Any]:
    return {"name": job.name, "run_id": ctx.run_id, "attempt": ctx.attempt, "reclaims": ctx.reclaims}


def gate(ctx: Context | SyncContext, job: Job) -> Path | None:
    return None if job.gate is None else FOLDER / job.gate.format(reclaims=ctx.reclaims)


async def opened(ctx: Context, job: Job) -> None:
    path = gate(ctx, job)
    while path is not None and not path.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@cyclone.action("work", backoff=cyclone.fixed(0.05))
async def work(ctx: Context, job: Job) -> None:
    if job.told:
        tell("entered", **facts(ctx, job))
    if ctx.attempt < job.fail_before:
        raise ValueError(f"attempt {ctx.attempt} is to fail")
    try:
        if job.gate_first:
            await opened(ctx, job)
        if job.outside:
            with (FOLDER / OUTSIDE).open("a") as file:
                file.write(ctx.idempotency_key + "\n")
            tell("acted", **facts(ctx, job))
        if job.ledger:
            tx = await ctx.completion_tx()
            await tx.execute(
                "INSERT INTO ledger (run_id, node, note) VALUES (%s, %s, %s)", (ctx.run_id, ctx.node, job.name)
            )
            tell("written", **facts(ctx, job))
        if job.sleep_s:
            await asyncio.sleep(job.sleep_s)
        if not job.gate_first:
            await opened(ctx, job)
    except asyncio.CancelledError:
        tell("cancelled", lease_lost=ctx.lease_lost, **facts(ctx, job))
        raise
    if job.told:
        tell("left", **facts(ctx, job))
    if not ctx.reclaims:
        match job.first:
            case "fails":
                raise ValueError("too late")
            case "gives up":
                raise cyclone.Permanent("too late")
            case "snoozes":
                raise cyclone.Snooze(600)
            case "returns":
                pass


@cyclone.action("work_in_thread")
def work_in_thread(ctx: SyncContext, job: Job) -> None:
    if job.told:
        tell("entered", **facts(ctx, job))
    if job.ledger:
        tx = ctx.completion_tx()
        tx.execute("INSERT INTO ledger (run_id, node, note) VALUES (%s, %s, %s)", (ctx.run_id, ctx.node, job.name))
        tell("written", **facts(ctx, job))
    time.sleep(job.sleep_s)
    path = gate(ctx, job)
    while path is not None and not path.exists():
        time.sleep(0.01)


@cyclone.step("charge", backoff=cyclone.fixed(0.05))
async def charge(ctx: Context, amount: int) -> int:
    """Writes one row of the ledger. The table takes as many for one step as there are, so that a second one shows."""
    tx = await ctx.completion_tx()
    await tx.execute("INSERT INTO ledger (run_id, node, amount) VALUES (%s, %s, %s)", (ctx.run_id, ctx.node, amount))
    return amount


@cyclone.step("charge_once", max_attempts=1)
async def charge_once(ctx: Context, amount: int) -> int:
    tx = await ctx.completion_tx()
    await tx.execute("INSERT INTO ledger (run_id, node, amount) VALUES (%s, %s, %s)", (ctx.run_id, ctx.node, amount))
    return amount


@cyclone.step("charge_in_thread")
def charge_in_thread(ctx: SyncContext, amount: int) -> int:
    tx = ctx.completion_tx()
    tx.execute("INSERT INTO ledger (run_id, node, amount) VALUES (%s, %s, %s)", (ctx.run_id, ctx.node, amount))
    return amount


@cyclone.step("add_one")
async def add_one(ctx: Context, n: int) -> int:
    return n + 1


@cyclone.step("add_one_in_thread")
def add_one_in_thread(ctx: SyncContext, n: int) -> int:
    return n + 1


@cyclone.action("exit_9", max_reclaims=3)
async def exit_9(ctx: Context, job: Job) -> None:
    tell("entered", **facts(ctx, job))
    os._exit(9)


@cyclone.action("exits")
async def exits(ctx: Context, job: Job) -> None:
    """With the limit that is there by default."""
    tell("entered", **facts(ctx, job))
    os._exit(9)


@cyclone.action("segfault", max_reclaims=3)
async def segfault(ctx: Context, job: Job) -> None:
    tell("entered", **facts(ctx, job))
    ctypes.string_at(0)


@cyclone.action("hog", max_reclaims=3)
def hog(ctx: SyncContext, job: Job) -> None:
    """Takes memory until somebody puts an end to it."""
    tell("entered", **facts(ctx, job))
    taken: list[bytes] = []
    while True:
        if len(taken) < HOG_MIB:
            taken.append(b"x" * (1 << 20))
        time.sleep(0.002)


HOG_MIB = 100


@cyclone.action("greedy", executor="process", memory_limit="256MiB", max_attempts=2, backoff=cyclone.fixed(0.05))
def greedy(ctx: ProcessContext, job: Job) -> None:
    """Takes more memory than it may."""
    tell("entered", **facts(ctx, job))
    taken: list[bytes] = []
    while True:
        taken.append(b"x" * (1 << 20))


@cyclone.action("fault", max_reclaims=1)
async def fault(ctx: Context, job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    await asyncio.sleep(60)


@cyclone.action("block")
async def block(ctx: Context, job: Job) -> None:
    """Keeps the event loop from turning, as no coroutine should."""
    tell("entered", **facts(ctx, job))
    time.sleep(job.sleep_s)  # noqa: ASYNC251
    path = gate(ctx, job)
    while path is not None and not path.exists():
        time.sleep(0.01)  # noqa: ASYNC251
    tell("left", **facts(ctx, job))


@cyclone.action("stubborn", grace=0.3)
def stubborn(ctx: SyncContext, job: Job) -> None:
    """Takes no notice of being stopped."""
    tell("entered", **facts(ctx, job))
    path = gate(ctx, job)
    while path is None or not path.exists():
        time.sleep(0.01)
    tell("left", **facts(ctx, job))


@cyclone.action("late", timeout=0.2, grace=0.1, max_attempts=1)
async def late(ctx: Context, job: Job) -> None:
    await asyncio.sleep(60)


@cyclone.action("snooze_once")
async def snooze_once(ctx: Context, delay_s: float) -> None:
    tell("snoozing" if not ctx.snoozes else "woke", run_id=ctx.run_id)
    if not ctx.snoozes:
        raise cyclone.Snooze(delay_s)


@cyclone.action("retry_once")
async def retry_once(ctx: Context, delay_s: float) -> None:
    tell("failing" if ctx.attempt == 1 else "again", run_id=ctx.run_id)
    if ctx.attempt == 1:
        raise cyclone.RetryAfter(delay_s)
