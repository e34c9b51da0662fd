"""Claim: takes ready steps for one worker life, in batches, without ever waiting for anybody.

Where a look begins
-------------------
A claim takes the tickets of a place (a lane and a rank) in the order of their `ord`, and what it took is dead index
entries from then on. As long as anybody holds an old snapshot (pg_dump, a forgotten transaction) they stay, and each
look from the beginning steps over all of them. So a claimer begins a little below the last `ord` that it took from a
place; and after a claim that came short, for all places, a little below the newest number that had been drawn before.

New tickets have higher numbers, so nothing new is missed. Below such a floor can be what committed long after it drew
its number, what somebody had locked, and what a claim that was rolled back had taken. The little below finds those as
long as no more than `_WINDOW` numbers were drawn meanwhile, and keeps their order. For the rest a look begins at the
very beginning, as often as such looks take no more than a twentieth of the time: so a straggler waits for about twenty
times what one takes, or a quarter of a second if that is more; with a million dead entries three seconds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
import psycopg

from . import db, metrics
from .model import Claimed

_wait_of = attrgetter("queue", "waited_s")
_RANKS = list(range(20))
_RANKS_BACKWARDS = _RANKS[::-1]
# Every so many claims the ranks are gone through backwards: this bounds the wait of the lowest priority while more
# urgent work never ends.
_BACKWARDS_EVERY = 16
# So far below the last number taken a look begins: dead entries that it steps over each time, at 0.15 µs each.
_WINDOW = 1000
# The time between two looks from the very beginning, in multiples of what the last one took.
_PAUSE = 20
_RECHECK_S = 0.25

SESSION = b"""\
SELECT set_config('plan_cache_mode', 'force_generic_plan', false), set_config('enable_hashjoin', 'off', false),
       set_config('enable_mergejoin', 'off', false), set_config('enable_bitmapscan', 'off', false)"""
"""Settings of a connection that only claims. The server would plan the statement anew each time, since it believes a
plan for the numbers at hand to be better: 1.3 ms, a quarter of what a claim of 500 takes. But there is just one good
plan, of nested loops along indexes, and what the server knows of the tables must not lead it to another."""


class Claimer:
    """Asks for steps on one connection, one claim at a time."""

    def __init__(self, statements: db.Statements, queues: Sequence[str]) -> None:
        self._sql = statements["claim_steps"]
        self._queues = list(queues)
        self._count = 0
        self._of: tuple[object, int] | None = None  # the connection and the life that the floors are of
        self._floors: dict[str, int] = {}
        self._floor = 0
        self._whole_at = 0.0
        self._sure = True

    async def batch(
        self,
        conn: psycopg.AsyncConnection[tuple[Any, ...]],
        life: int,
        room: int,
        *,
        whole: bool = False,
        now: object = None,
    ) -> tuple[list[Claimed], int]:
        """Claims up to `room` steps; returns them in the order in which they should start, and how many tickets were
        taken. With `whole` the look begins at the very beginning.

        Tickets that were taken without a step in return were stale or of kinds this life does not know, so a short
        list is no proof that nothing is ready, but a count below `room` is one that nothing unlocked was left, unless
        it is a straggler (see `recheck_s`).
        """
        self._count += 1
        queues = self._queues
        if len(queues) > 1:  # each claim starts at another queue, so that none is always last
            turn = self._count % len(queues)
            queues = queues[turn:] + queues[:turn]
        claim = random.getrandbits(62)
        start = time.perf_counter()
        if self._of != (conn, life):
            # After a failover the server may have forgotten what was taken, and count from a lower number.
            self._of, self._floors, self._floor, whole = (conn, life), {}, 0, True
        whole = whole or start >= self._whole_at
        cur = conn.cursor(binary=True)
        await cur.execute(
            self._sql,
            {
                "life": life,
                "claim": claim,
                "queues": queues,
                "ranks": _RANKS_BACKWARDS if self._count % _BACKWARDS_EVERY == 0 else _RANKS,
                # As text: the driver's type of a number follows its size, and each would be a statement of its own.
                "floors": "{}" if whole else self._written(),
                "floor": "0" if whole else str(self._floor),
                "room": room,
                "now": now,
            },
        )
        (taken, drawn, last, order, *_), *rows = await cur.fetchall()
        steps = [Claimed(claim, *row[4:]) for row in rows]
        places = dict(zip(order, range(taken), strict=True))
        steps.sort(key=lambda step: places[step.id])
        end = time.perf_counter()
        if whole:
            self._whole_at = end + _PAUSE * (end - start)
        self._remember(taken < room, drawn, last)
        self._sure = whole or taken >= room
        metrics.claimed(len(steps), room, end - start, map(_wait_of, steps))
        return steps, taken

    def recheck_s(self) -> float:
        """In how many seconds to look again without news, since the last look left out what is below the floors."""
        return math.inf if self._sure else max(self._whole_at - time.perf_counter(), _RECHECK_S)

    def _written(self) -> str:
        return msgspec.json.encode(self._floors).decode() if self._floors else "{}"

    def _remember(self, short: bool, drawn: int | None, last: bytes | None) -> None:
        if short:  # everything was seen, in every place
            self._floors = {}
            if drawn is not None:
                self._floor = max(drawn - _WINDOW, 0)
        elif last is not None:
            for place, number in msgspec.json.decode(last, type=dict[str, int]).items():
                self._floors[place] = number - _WINDOW
