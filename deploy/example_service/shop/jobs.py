"""The steps of the shop: the target of `cyclone-pool shop.jobs`."""

from __future__ import annotations

from datetime import timedelta

import msgspec

import cyclone
from cyclone import Context


class Order(msgspec.Struct):
    id: str
    email: str
    cents: int


@cyclone.step("charge", max_attempts=5, timeout=timedelta(seconds=30))
async def charge(ctx: Context, order: Order) -> str:
    """Writes a ledger entry and orders the receipt, both in the transaction that completes this step."""
    if order.cents <= 0:
        raise cyclone.Permanent("the amount must be positive")
    tx = await ctx.completion_tx()
    await tx.execute(
        "INSERT INTO shop_ledger (charge, order_id, cents) VALUES (%s, %s, %s)",
        (ctx.idempotency_key, order.id, order.cents),
    )
    return ctx.idempotency_key


@cyclone.action("send_receipt", queue="mail")
async def send_receipt(ctx: Context, order: Order) -> None:
    """A real shop would hand this to a mail service, with the key, so that a repetition is recognised there."""
    ctx.log.info("receipt for order %s, key %s", order.id, ctx.idempotency_key)
