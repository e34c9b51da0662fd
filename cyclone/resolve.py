"""Resolve: what a claimed node needs of its run, before it is executed.

The input of a node is a template over the run's input and the outputs of other nodes; it is composed here, from what
the run has, and stored nowhere. Two things are decided without any handler: a condition that does not hold skips the
node, and a map becomes the list that it goes over. One look at the database serves a whole claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import psycopg

from . import db, graph
from .model import Claimed, Failure, Outcome, StepError, Verb
from .registry import MAP
from .states import ErrorKind

MAP_VERSION = 1

_RUN_INPUT = -1
_RUN_ANYWAY = 2
_KEPT = 1000  # graphs; each is a few kilobytes, and a schema rarely has so many
_LIST = msgspec.json.Decoder(list[msgspec.Raw])

Connection = psycopg.AsyncConnection[tuple[Any, ...]]


class Resolver:
    """Composes inputs. Graphs never change, so each is read once."""

    def __init__(self, statements: db.Statements) -> None:
        self._sql = statements
        self._graphs: dict[int, graph.GraphSpec] = {}

    def node(self, step: Claimed) -> graph.NodeSpec:
        """The node that a step executes. Of a graph that was loaded."""
        assert step.graph is not None and step.pos is not None
        return self._graphs[step.graph].nodes[step.pos]

    def precedes(self, step: Claimed, name: str) -> bool | None:
        """Whether the step's node depends on a node of this name, directly or not; None: it is no node."""
        if step.graph is None or step.pos is None:
            return None
        nodes = self._graphs[step.graph].nodes
        seen: set[int] = set()
        rest = list(nodes[step.pos].parents)
        while rest:
            if (pos := rest.pop()) not in seen:
                if nodes[pos].name == name:
                    return True
                seen.add(pos)
                rest += nodes[pos].parents
        return False

    async def resolve(self, conn: Connection, steps: list[Claimed]) -> tuple[list[Claimed], list[Outcome]]:
        """The steps with their inputs, in their order, and the outcomes of those that need no handler."""
        nodes = [step for step in steps if step.graph is not None]
        if not nodes:
            return steps, []
        await self._load(conn, nodes)
        sources, failures = await self._read(conn, nodes)
        ready: list[Claimed] = []
        decided: list[Outcome] = []
        for step in steps:
            if step.graph is None:
                ready.append(step)
                continue
            found = self._judge(step, sources, failures.get(step.id, []))
            if isinstance(found, Outcome):
                decided.append(found)
            else:
                ready.append(found)
        return ready, decided

    async def _load(self, conn: Connection, steps: list[Claimed]) -> None:
        missing = {step.graph for step in steps if step.graph not in self._graphs}
        if not missing:
            return
        cur = await conn.execute(self._sql["load_graphs"], {"ids": list(missing)})
        found = {number: graph.GraphSpec.decode(spec.encode()) for number, spec in await cur.fetchall()}
        if len(self._graphs) + len(found) > _KEPT:
            needed = {step.graph for step in steps}
            self._graphs = {number: spec for number, spec in self._graphs.items() if number in needed}
        self._graphs |= found

    async def _read(
        self, conn: Connection, steps: list[Claimed]
    ) -> tuple[dict[tuple[int, int], bytes], dict[int, list[StepError]]]:
        """What the templates refer to, by run and position (the run's input under -1), and the failures that nodes
        which run anyway are told of, by step.
        """
        runs: dict[int, None] = {}
        places: dict[tuple[int, int], str] = {}
        parents: list[tuple[int, int, str]] = []
        for step in steps:
            node = self.node(step)
            nodes = self._graphs[step.graph].nodes if step.graph is not None else ()
            if step.input is None:  # an item of a map has its own
                for pos in node.sources:
                    if pos == _RUN_INPUT:
                        runs[step.run_id] = None
                    else:
                        places[step.run_id, pos] = nodes[pos].name
            if node.policy == _RUN_ANYWAY:
                parents += [(step.id, step.run_id, nodes[pos].name) for pos in node.parents]
        found: dict[tuple[int, int], bytes] = {}
        failures: dict[int, list[StepError]] = {}
        # Each on a cursor of its own, so that all of them travel at once.
        inputs, outputs, failed = (conn.cursor(binary=True) for _ in range(3))
        keys = list(places)
        async with conn.pipeline():
            if runs:
                await inputs.execute(self._sql["load_inputs"], {"runs": list(runs)})
            if places:
                params = {"runs": [run for run, _ in keys], "nodes": list(places.values())}
                await outputs.execute(self._sql["load_outputs"], params)
            if parents:
                params = {"runs": [run for _, run, _ in parents], "nodes": [name for _, _, name in parents]}
                await failed.execute(self._sql["load_failures"], params)
        if runs:
            for run, data in await inputs.fetchall():
                found[run, _RUN_INPUT] = data
        if places:
            for n, data in await outputs.fetchall():
                found[keys[n - 1]] = b"null" if data is None else data
        if parents:
            for row in await failed.fetchall():
                of, attempt, at, kind, message, trace = row
                n = int(of)
                step_id, name = parents[n - 1][0], parents[n - 1][2]
                failure = StepError(
                    attempt=attempt, at=at, kind=ErrorKind(kind), message=message, traceback=trace, node=name
                )
                failures.setdefault(step_id, []).append(failure)
        return found, failures

    def _judge(
        self, step: Claimed, found: Mapping[tuple[int, int], bytes], failures: list[StepError]
    ) -> Claimed | Outcome:
        node = self.node(step)
        if step.input is not None:  # an item of a map, which depends on what the map does
            return msgspec.structs.replace(step, failed_dependencies=failures) if failures else step
        sources = {pos: found.get((step.run_id, pos), b"null") for pos in node.sources}
        try:
            if node.when is not None and not graph.holds(node.when, sources):
                return Outcome(step, Verb.SKIP, called=False)
            data = b"null" if node.input is None else graph.compose(node.input, sources)
            if step.kind == MAP:
                return _expanded(step, node, data)
        except graph.ComposeError as exc:
            return _refused(step, f"the input of node {step.node!r} cannot be composed: {exc}")
        return msgspec.structs.replace(step, input=data.decode(), failed_dependencies=failures)


def _expanded(step: Claimed, node: graph.NodeSpec, data: bytes) -> Outcome:
    try:
        items = _LIST.decode(data)
    except msgspec.DecodeError:
        return _refused(step, f"what map {step.node!r} goes over is no list")
    if node.max_items is not None and len(items) > node.max_items:
        return _refused(step, f"map {step.node!r} has {len(items)} items; its max_items is {node.max_items}")
    return Outcome(step, Verb.EXPAND, output=data.decode())


def _refused(step: Claimed, text: str) -> Outcome:
    return Outcome(step, Verb.DISCARD, failure=Failure(ErrorKind.INVALID_INPUT, text, ""), called=False)
