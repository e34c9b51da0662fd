"""The workflows that the pools of these tests run."""

from __future__ import annotations

from process.app import add_one, charge

import cyclone
from cyclone import Context, Graph, Node


@cyclone.step("sum")
async def total(ctx: Context, numbers: list[int]) -> int:
    return sum(numbers)


@cyclone.step("numbers")
async def numbers(ctx: Context, n: int) -> list[int]:
    return list(range(n))


@cyclone.workflow("diamond")
def diamond(g: Graph[int]) -> Node[int]:
    top = g.run(add_one, g.input)
    return g.run(total, [g.run(add_one, top.output).output, g.run(add_one, top.output).output])


@cyclone.workflow("join")
def join(g: Graph[int]) -> Node[int]:
    return g.run(total, [g.run(add_one, g.input).output for _ in range(5000)])


def _chain(g: Graph[int], length: int) -> Node[int]:
    node = g.run(add_one, g.input)
    for _ in range(length - 1):
        node = g.run(add_one, node.output)
    return node


@cyclone.workflow("chain")
def chain(g: Graph[int]) -> Node[int]:
    return _chain(g, 500)


@cyclone.workflow("long_chain")
def long_chain(g: Graph[int]) -> Node[int]:
    return _chain(g, 10_000)


@cyclone.workflow("fan")
def fan(g: Graph[int]) -> Node[int]:
    return g.run(total, g.map(add_one, g.run(numbers, g.input).output).output)


@cyclone.workflow("paying")
def paying(g: Graph[int]) -> Node[int]:
    """Four effects, two of them of a map."""
    first = g.run(charge, g.input)
    mapped = g.map(charge, [first.output, 1])
    return g.run(charge, g.run(total, mapped.output).output, name="last")


__all__ = ["add_one", "chain", "charge", "diamond", "fan", "join", "long_chain", "paying"]
