"""Claim: takes ready steps for one worker life, in batches, without ever waiting for anybody."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import psycopg

from . import db, metrics
from .model import Claimed

_RANKS = list(range(20))
_RANKS_BACKWARDS = _RANKS[::-1]
# Every so many claims the ranks are gone through backwards: this bounds the wait of the lowest priority while more
# urgent work never ends.
_BACKWARDS_EVERY = 16


class Claimer:
    """Asks for steps on one connection, one claim at a time."""

    def __init__(self, statements: db.Statements, queues: Sequence[str]) -> None:
        self._sql = statements["claim_steps"]
        self._queues = list(queues)
        self._count = 0

    async def batch(
        self, conn: psycopg.AsyncConnection[tuple[Any, ...]], life: int, room: int, *, now: object = None
    ) -> tuple[list[Claimed], int]:
        """Claims up to `room` steps; returns them in the order in which they should start, and how many tickets were
        taken.

        Tickets that were taken without a step in return were stale or of kinds this life does not know, so a short
        list is no proof that nothing is ready, but a count below `room` is one that nothing unlocked was left.
        """
        self._count += 1
        queues = self._queues
        if len(queues) > 1:  # each claim starts at another queue, so that none is always last
            turn = self._count % len(queues)
            queues = queues[turn:] + queues[:turn]
        claim = random.getrandbits(62)
        start = time.perf_counter()
        cur = conn.cursor(binary=True)
        await cur.execute(
            self._sql,
            {
                "life": life,
                "claim": claim,
                "queues": queues,
                "ranks": _RANKS_BACKWARDS if self._count % _BACKWARDS_EVERY == 0 else _RANKS,
                "room": room,
                "now": now,
            },
        )
        rows = await cur.fetchall()
        taken: int = rows[0][0]
        steps = [Claimed(claim, *row[1:]) for row in rows] if rows[0][1] is not None else []
        waits: dict[str, list[float]] = {}
        for step in steps:
            waits.setdefault(step.queue, []).append(step.waited_s)
        metrics.claimed(len(steps), room, time.perf_counter() - start, waits)
        return steps, taken
