"""Settle: writes the outcomes of executions, many in one short transaction, each fenced by its claim.

One flusher per worker. Nothing is ever concluded by reading after an unknown commit: the same fenced batch is sent
again, and a step that is terminal under our own claim shows that the first send had gone through. A failure that
blames one step is found by halving the batch; every other failure blames the server, and the batch is kept and sent
again for as long as the lease holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import psycopg

from . import db, events, metrics, wake
from .errors import ConnectError
from .model import Event, Failure, Outcome, Verb
from .plan import drive
from .states import ErrorKind, EventKind

log = logging.getLogger("cyclone")

_NAMES = {
    Verb.COMPLETE: "completed",
    Verb.SETTLED: "completed",
    Verb.RETRY: "retried",
    Verb.DISCARD: "discarded",
    Verb.SNOOZE: "snoozed",
    Verb.RELEASE: "released",
    Verb.SKIP: "skipped",
    Verb.EXPAND: "expanded",
    Verb.CANCEL_RUN: "cancelled",
}
_label = attrgetter("step.queue", "step.kind", "verb")
_id_of = attrgetter("step.id")
_output_of = attrgetter("output")
claim_of = attrgetter("step.claim")
_LISTED = 20
_EVENTS = {
    Verb.COMPLETE: EventKind.COMPLETED,
    Verb.SETTLED: EventKind.COMPLETED,
    Verb.RETRY: EventKind.RETRY_SCHEDULED,
    Verb.DISCARD: EventKind.DISCARDED,
    Verb.SNOOZE: EventKind.SNOOZED,
    Verb.RELEASE: EventKind.RELEASED,
    Verb.SKIP: EventKind.CANCELLED,
    Verb.CANCEL_RUN: EventKind.CANCELLED,
}
_BUSY_S = 0.005
_BUSY_MOST_S = 2.0
SESSION = b"""\
SELECT set_config('lock_timeout', '100ms', false), set_config('enable_nestloop', 'off', false),
       set_config('enable_mergejoin', 'off', false)"""
"""Settings of a connection that only settles; see the statements for both."""

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Left = dict[int, tuple[str | None, int | None]]
"""The steps of a batch that were not written, each with its state and claim of now."""


class Settler:
    """Collects outcomes and flushes them.

    `connect` gives a fresh connection; `holds_lease` says whether sending still makes sense; `on_settled` is called
    with outcomes that need no more care, and whether it is certain that their steps no longer run under our claim: they
    were written or refused, and not dropped. `closes` tells which claims have no other steps left than those of these
    outcomes. `on_ready` is called when it made steps available. `expects`
    says whether more outcomes may come soon; only then is it worth to linger. `hook` is told of what was written.
    With `pooler` nothing is set on the session; locked steps are then stepped over in every batch.
    """

    def __init__(
        self,
        statements: db.Statements,
        connect: Callable[[], Any],
        *,
        batch: int,
        linger_s: float,
        holds_lease: Callable[[], bool],
        on_settled: Callable[[Sequence[Outcome], bool], None],
        closes: Callable[[Sequence[Outcome]], list[int]] = lambda _: [],
        on_ready: Callable[[], None] = lambda: None,
        expects: Callable[[], bool] = lambda: True,
        edit: Callable[[str], str] = str,
        hook: events.Hook | None = None,
        pooler: bool = False,
    ) -> None:
        self._sql = statements
        self._connect = connect
        self._batch = batch
        self._linger_s = linger_s
        self._holds_lease = holds_lease
        self._on_settled = on_settled
        self._closes = closes
        self._on_ready = on_ready
        self._expects = expects
        self._edit = edit
        self._hook = hook
        self._pooler = pooler
        self._queue: deque[Outcome] = deque()
        self._closed: list[int] = []
        self._gone: set[int] = set()  # claims that were closed together with their last steps
        self._news = asyncio.Event()
        self._stopping = False
        self._waiting = 0  # outcomes that wait for a lock of somebody else
        self._tries: dict[int, int] = {}
        self._conn: Connection | None = None
        self._quiet = wake.Quiet()

    def add(self, outcome: Outcome) -> None:
        """Hands over one outcome."""
        self._queue.append(outcome)
        self._news.set()

    def close_claim(self, claim: int) -> None:
        """The last step of a claim is settled: its row can go, unless it went with that step."""
        if claim in self._gone:
            self._gone.discard(claim)
            return
        self._closed.append(claim)
        self._news.set()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to write."""
        return not self._queue and not self._closed and not self._waiting

    def stop(self) -> None:
        """Lets `run` end once everything is written."""
        self._stopping = True
        self._news.set()

    def forget(self) -> None:
        """Drops everything: the life has ended, and the fence would refuse it all."""
        dropped = list(self._queue)
        self._queue.clear()
        self._closed.clear()
        self._drop(dropped, "the lease was lost before they could be written")

    def _drop(self, outcomes: Sequence[Outcome], why: str) -> None:
        if outcomes:
            steps = [f"step {o.step.id} ({o.step.kind}, attempt {o.step.attempt})" for o in outcomes]
            named = ", ".join(steps[:_LISTED]) + (", …" if len(steps) > _LISTED else "")
            log.warning("%d outcomes are dropped: %s: %s", len(outcomes), why, named)
            metrics.refused("lease lost", len(outcomes))
            self._on_settled(outcomes, False)

    async def run(self) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                few = self._queue and len(self._queue) < self._batch
                if few and self._linger_s and not self._stopping and self._expects():
                    await asyncio.sleep(self._linger_s)
                while self._queue or self._closed:
                    queue, size = self._queue, min(len(self._queue), self._batch)
                    await self._deliver([queue.popleft() for _ in range(size)])
                if self._stopping and self.idle:
                    return
        finally:
            if self._conn is not None:
                await self._conn.close()

    async def _deliver(self, outcomes: list[Outcome]) -> None:
        """Sends a batch until it is settled or the lease is gone. What a part of it came to is told once: after an
        interruption only the rest is sent again.
        """
        pause = 0.1
        todo = [outcomes]
        while todo:
            try:
                await self._settle(todo)
            except (psycopg.Error, ConnectError, OSError, TimeoutError) as exc:
                if self._conn is not None:
                    await self._conn.close()
                    self._conn = None
                rest = [outcome for part in reversed(todo) for outcome in part]
                if not self._holds_lease():
                    self._closed.clear()  # the sweeper removes the rows; kept here, they would be sent again at once
                    self._drop(rest, "the database could not be reached while the lease held")
                    return
                log.warning(
                    "settling %d outcomes failed and is tried again in %.1f s: %s", len(rest), pause, db.brief(exc)
                )
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, 5.0)

    async def _settle(self, todo: list[list[Outcome]]) -> None:
        """One transaction for the last part of `todo`, which is halved when one of its steps is to blame."""
        start = time.perf_counter()
        outcomes = todo[-1]
        closed, self._closed = self._closed, []
        try:
            left = await self._send(outcomes, closed)
        except BaseException as exc:
            self._closed = closed + self._closed
            if not isinstance(exc, psycopg.Error) or not outcomes:
                raise
            locked = exc.sqlstate in db.LOCKED  # further down the run than what is stepped over
            if not locked and not db.blames_step(exc):
                raise
            todo.pop()
            if len(outcomes) > 1:
                half = len(outcomes) // 2
                todo += [outcomes[half:], outcomes[:half]]
            elif locked:
                self._again(outcomes[0])
            else:
                self._blame(outcomes[0], exc)
            return
        todo.pop()
        self._book(outcomes, closed, left, time.perf_counter() - start)

    async def _send(self, outcomes: list[Outcome], closed: list[int]) -> Left:
        """The transaction. Again when something is locked, around it; and when nodes that nobody could foresee turn
        out to be cancelled by it, with all of their runs locked.
        """
        step_over, all_runs = self._pooler, False
        while True:
            try:
                return await self._transact(outcomes, closed, step_over=step_over, all_runs=all_runs)
            except psycopg.Error as exc:
                if exc.sqlstate == db.RUNS_NOT_LOCKED and not all_runs:
                    all_runs = True
                elif exc.sqlstate in db.LOCKED and not step_over:
                    step_over = True
                else:
                    raise

    async def _transact(self, outcomes: list[Outcome], closed: list[int], *, step_over: bool, all_runs: bool) -> Left:
        if not closed and all(outcome.verb == Verb.SETTLED for outcome in outcomes):
            return {}  # they are committed: a statement for nothing took as long as a third of their transactions
        conn = self._conn
        if conn is None:
            conn = self._conn = await self._connect()
            if not self._pooler:  # a setting of the session would stay on a connection that others use
                await conn.execute(SESSION, prepare=False)
        steps: list[Outcome] = []
        nodes: list[Outcome] = []
        failed: list[Outcome] = []
        expanded: list[Outcome] = []
        others: list[Outcome] = []
        for outcome in outcomes:
            of_run = outcome.step.graph is not None
            match outcome.verb:
                case Verb.COMPLETE:
                    (nodes if of_run else steps).append(outcome)
                case Verb.DISCARD | Verb.SKIP | Verb.CANCEL_RUN:
                    (failed if of_run else others).append(outcome)
                case Verb.EXPAND:
                    expanded.append(outcome)
                case Verb.SETTLED:
                    pass
                case _:
                    others.append(outcome)
        sinks = {o.step.run_id for o in nodes if all_runs or o.step.sink}
        if not (failed or expanded or others or (steps and nodes)):
            # One statement, which closes claims only when it wrote all of its steps.
            last = self._closes(outcomes)
            left: Left = {}
            cur = conn.cursor(binary=True)
            if nodes:
                params = {**_complete(nodes, closed + last, step_over), "runs": sorted(sinks)}
                await cur.execute(self._sql["complete_nodes"], params)
                await self._read(conn, await cur.fetchall(), left)
            else:
                await cur.execute(self._sql["complete_steps"], _complete(steps, closed + last, step_over))
                left = {row[0]: (row[1], row[2]) for row in await cur.fetchall()}
            if not left:
                self._gone.update(last)
            return left
        runs = sinks.union(o.step.run_id for o in failed).union(o.step.run_id for o in expanded)
        cursors: list[psycopg.AsyncCursor[tuple[Any, ...]]] = []

        async def send(name: str, params: Mapping[str, object]) -> None:
            cur = conn.cursor(binary=True)
            cursors.append(cur)
            await cur.execute(self._sql[name], params)

        # What is sent in one pipeline up to its sync is one transaction.
        async with conn.pipeline():
            if not step_over and len(runs) > len(sinks):  # those of `nodes` alone are locked by their function
                await conn.execute(self._sql["lock_runs"], {"runs": sorted(runs)})
            if others:
                await send("return_steps", _return(others))
            if steps or closed:
                await send("complete_steps", _complete(steps, closed, step_over))
            plain = len(cursors)
            if nodes:
                await send("complete_nodes", {**_complete(nodes, [], step_over), "runs": sorted(sinks)})
            if failed:
                ended = {o.step.run_id for o in failed}
                await send("fail_nodes", {**_return(failed), "runs": sorted(ended), "step_over": step_over})
            for outcome in expanded:
                await send("expand_map", _expand(outcome))
        # Not inside: to fetch there would wait for the rows first and only then send the sync, a round trip more.
        left = {}
        rows: list[tuple[Any, ...]] = []
        for n, cur in enumerate(cursors):
            found = await cur.fetchall()
            if n < plain:
                left |= {row[0]: (row[1], row[2]) for row in found}
            else:
                rows += found
        await self._read(conn, rows, left)
        return left

    async def _read(self, conn: Connection, rows: list[tuple[Any, ...]], left: Left) -> None:
        """What the functions for nodes answer: how many steps they made available, and which were not written."""
        made = 0
        for more, step, state, claim in rows:
            if step is None:
                made += more
            else:
                left[step] = state, claim
        if made:
            self._on_ready()
            if made > 1 and self._quiet.broken():  # one this worker takes itself; others may be idle
                await drive(conn, wake.sleepers(self._sql))

    def _book(self, outcomes: list[Outcome], closed: list[int], left: Left, seconds: float) -> None:
        """Tells what came of each outcome."""
        written: Sequence[Outcome] = outcomes
        busy = False
        if left:
            written = []
            for outcome in outcomes:
                now = left.get(outcome.step.id) if outcome.verb != Verb.SETTLED else None
                if now is None:
                    written.append(outcome)
                elif now == ("running", outcome.step.claim):
                    busy = True
                    self._again(outcome)
                elif now[1] == outcome.step.claim and _is_ours(outcome, now[0]):
                    written.append(outcome)
                elif now == ("completed", outcome.step.claim) and outcome.unless_completed:
                    written.append(Outcome(outcome.step, Verb.COMPLETE, unless_completed=True))
                else:
                    self._refuse(outcome, now[0])
        if self._tries:
            for outcome in written:
                self._tries.pop(outcome.step.id, None)
        if busy and closed:  # the statement closed nothing
            self._closed = closed + self._closed
        if not outcomes:
            return
        self._on_settled(written, True)
        if self._hook is not None:
            self._hook.tell([_event(o) for o in written if o.verb in _EVENTS and (o.called or o.failure)])
        counts = {
            (queue, kind, _NAMES[verb]): count for (queue, kind, verb), count in Counter(map(_label, written)).items()
        }
        failures = Counter((o.step.queue, o.step.kind, o.failure.kind.value) for o in written if o.failure is not None)
        metrics.settled(counts, failures, len(outcomes), seconds)

    def _refuse(self, outcome: Outcome, state: str | None) -> None:
        """The fence did not let it through."""
        step = outcome.step
        reason = "gone" if state is None else state
        log.warning(
            "the %s of step %s (%s, attempt %d) was refused: it is %s now",
            _NAMES[outcome.verb], step.id, step.kind, step.attempt, reason,
        )  # fmt: skip
        metrics.refused(reason, 1)
        self._tries.pop(step.id, None)
        self._on_settled([outcome], True)

    def _again(self, outcome: Outcome) -> None:
        """Somebody has the step locked: tried again, soon and then less often."""
        tries = self._tries[outcome.step.id] = self._tries.get(outcome.step.id, 0) + 1
        self._waiting += 1

        def retry() -> None:
            self._waiting -= 1
            if self._holds_lease():
                self.add(outcome)
            else:
                self._drop([outcome], "the lease was lost while somebody had the step locked")
                self._news.set()

        asyncio.get_running_loop().call_later(min(_BUSY_S * 2 ** min(tries, 10), _BUSY_MOST_S), retry)

    def _blame(self, outcome: Outcome, exc: psycopg.Error) -> None:
        """The server refused this one outcome for its data."""
        # The server may quote what it refuses.
        text = self._edit(f"the outcome cannot be stored: {db.brief(exc)}")
        log.error("step %s (%s): %s", outcome.step.id, outcome.step.kind, text)
        failure = Failure(ErrorKind.PERMANENT, text, "")
        refused = Outcome(outcome.step, Verb.DISCARD, failure=failure)
        if outcome.verb == Verb.DISCARD and outcome.failure == failure:
            self._again(refused)  # even the plain discard is refused, as by a trigger: a person must look
        else:
            self.add(refused)


def _is_ours(outcome: Outcome, state: str | None) -> bool:
    """Whether the step is where this outcome would have put it: then an earlier send had been committed."""
    match outcome.verb:
        case Verb.COMPLETE | Verb.SETTLED:
            return state == "completed"
        case Verb.DISCARD:
            return state == "discarded"
        case Verb.SKIP | Verb.CANCEL_RUN:
            return state == "cancelled"
        case Verb.EXPAND:
            return state in ("waiting", "completed")
        case _:
            return state in ("scheduled", "available")


def _complete(outcomes: Sequence[Outcome], closed: list[int], step_over: bool) -> dict[str, object]:
    return {
        "ids": db.Bigints(map(_id_of, outcomes)),
        "claims": db.Bigints(map(claim_of, outcomes)),
        "outputs": db.Texts(map(_output_of, outcomes)),
        "closed": closed,
        "step_over": step_over,
        "now": None,
    }


def _state(outcome: Outcome) -> str:
    if outcome.verb == Verb.DISCARD:
        return "discarded"
    if outcome.verb == Verb.CANCEL_RUN:
        return "cancelled"
    return "scheduled" if outcome.delay_s > 0 else "available"


def _return(outcomes: Sequence[Outcome]) -> dict[str, object]:
    failures = [o.failure for o in outcomes]
    return {
        "ids": [o.step.id for o in outcomes],
        "claims": [o.step.claim for o in outcomes],
        "verbs": [o.verb.name.lower() for o in outcomes],
        "states": [_state(o) for o in outcomes],
        "delays": [o.delay_s for o in outcomes],
        "called": [o.called for o in outcomes],
        "kinds": [f.kind.value if f else None for f in failures],
        "messages": [f.message if f else None for f in failures],
        "tracebacks": [f.traceback if f else None for f in failures],
        "host": events.HOST,
        "now": None,
    }


def _expand(outcome: Outcome) -> dict[str, object]:
    step = outcome.step
    return {"id": step.id, "claim": step.claim, "run": step.run_id, "items": outcome.output, "now": None}


def _event(outcome: Outcome) -> Event:
    """What the statement records of it too, if anything."""
    step = outcome.step
    detail: dict[str, Any] = {}
    if outcome.verb in (Verb.RETRY, Verb.SNOOZE):
        detail["delay_s"] = outcome.delay_s
    if outcome.verb == Verb.SNOOZE:
        detail["snoozes"] = step.snoozes + 1
    if outcome.failure is not None:
        detail |= {"error_kind": outcome.failure.kind.value, "error": outcome.failure.message[:1000]}
    # An attempt whose handler was never called is given back.
    attempt = step.attempt - (not outcome.called and not step.resume)
    return events.seen(_EVENTS[outcome.verb], step.run_id, step.node, step.kind, step.queue, attempt, detail)
