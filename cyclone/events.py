"""Events: how they are read from their rows, and how a program's own function is told of them.

A function of the program's must not hold up what it watches: a worker that waits for it would stop settling and
claiming. So a hook gets its events in a thread of its own, in the order in which this process learned of them,
through a queue with a bound; what comes while the queue is full is dropped and counted. The price is that a hook
cannot rely on having seen everything: whoever needs that reads what was recorded.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from . import metrics
from .errors import InvalidOptionError, InvalidOptionTypeError
from .model import Cursor, Event, RunID
from .states import EventKind

log = logging.getLogger("cyclone")

HOST = socket.gethostname()
RECORDED = tuple(kind.value for kind in EventKind if kind.recorded)

# So many events may wait for a hook. One call, as that of an enqueue of many, is taken whole when there is room at all.
_MOST = 10_000
_CLOSE_S = 5.0

OnStepEvent = Callable[[Event], object]


class _Row(msgspec.Struct, frozen=True):
    """A row of cyclone_events, as row_to_json writes it."""

    txid: str
    id: int
    at: datetime
    kind: EventKind
    run_id: int
    node: str | None
    step_kind: str | None
    queue: str | None
    attempt: int | None
    detail: dict[str, Any] | None
    actor: str | None
    host: str | None


_ROW = msgspec.json.Decoder(_Row)


def read(text: str) -> Event:
    """A recorded event from its row as JSON, which no connection's own way of loading values can change."""
    row = _ROW.decode(text)
    return Event(
        kind=row.kind,
        at=row.at,
        run_id=RunID(str(row.run_id)),
        node=row.node,
        step_kind=row.step_kind,
        queue=row.queue,
        attempt=row.attempt,
        detail=row.detail or {},
        actor=row.actor,
        host=row.host,
        cursor=Cursor(f"{row.txid}:{row.id}"),
    )


def seen(
    kind: EventKind,
    run_id: int | str,
    node: str,
    step_kind: str,
    queue: str,
    attempt: int,
    detail: Mapping[str, Any] | None = None,
) -> Event:
    """An event that happened in this process, now."""
    return Event(
        kind=kind,
        at=datetime.now(UTC),
        run_id=RunID(str(run_id)),
        node=node,
        step_kind=step_kind,
        queue=queue,
        attempt=attempt,
        detail=detail or {},
        host=HOST,
    )


def seen_run(kind: EventKind, run_id: str, workflow: str) -> Event:
    """An event of a whole run that happened in this process, now."""
    return Event(kind=kind, at=datetime.now(UTC), run_id=RunID(run_id), detail={"workflow": workflow}, host=HOST)


def place(cursor: str) -> tuple[str, int]:
    """The place that a cursor names. Raises InvalidOptionError for what is none."""
    if not isinstance(cursor, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidOptionTypeError(f"after must be the cursor of an event, not {type(cursor).__name__}")
    txid, _, number = cursor.partition(":")
    if not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in (txid, number)):
        raise InvalidOptionError(f"after must be the cursor of an event, not {cursor[:50]!r}")
    return txid, int(number)


def recorded(kinds: Iterable[EventKind | str] | None) -> Sequence[str]:
    """Checked names of kinds that are recorded; all of them for None."""
    if kinds is None:
        return RECORDED
    if isinstance(kinds, str):
        raise InvalidOptionTypeError("kinds must be a list of event kinds, not a str")
    found = list(kinds)
    for kind in found:
        if kind not in RECORDED:
            raise InvalidOptionError(f"events of kind {str(kind)!r} are not recorded, but {', '.join(RECORDED)} are")
    return [EventKind(kind).value for kind in found]


class Hook:
    """Hands events to a function, one after the other, in a thread that begins with the first of them.

    Whatever the function raises is counted, and logged once for each type of exception. Raises InvalidOptionError if it
    is no plain function.
    """

    def __init__(self, function: OnStepEvent) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidOptionTypeError("on_step_event must be a plain function that takes an Event")
        self._function = function
        self._known: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def tell(self, events: Sequence[Event]) -> None:
        """Takes events and never waits for the function."""
        if not events:
            return
        if (
            self._pid != os.getpid()
        ):  # a fork leaves the thread behind, perhaps with the lock; its events are the parent's
            self._begin()
        with self._changed:
            full = len(self._events) >= _MOST
            if not full:
                self._events.extend(events)
            self._closing = False
            if self._thread is None:
                # A daemon: a function that never returns must not keep the process from leaving.
                self._thread = threading.Thread(target=self._work, name="cyclone-hook", daemon=True)
                self._thread.start()
            self._changed.notify()
        if full:
            metrics.hook_dropped(len(events))
            self._say_once("full", "on_step_event is too slow: events are dropped (this is said once, and counted)")

    def close(self) -> None:
        """Waits until the function has had all events, at most 5 s; what is left then is dropped. Told again, it goes
        on.
        """
        if self._pid != os.getpid():
            return
        with self._changed:
            thread = self._thread
            self._closing = True
            self._changed.notify()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CLOSE_S)
        with self._changed:
            left = len(self._events)
            self._events.clear()
        if left:
            metrics.hook_dropped(left)
            log.warning("on_step_event did not get its last %d events: it took too long", left)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._events:
                    if self._closing:
                        self._thread = None
                        return
                    self._changed.wait()
                event = self._events.popleft()
            try:
                self._function(event)
            except BaseException as exc:  # an exit that it asks for would only end this thread
                metrics.hook_failed()
                self._say_once(type(exc).__qualname__, "on_step_event failed (said once for each type of error)", exc)

    def _say_once(self, what: str, text: str, exc: BaseException | None = None) -> None:
        if what not in self._known:
            self._known.add(what)
            log.warning("%s", text, exc_info=exc)
