"""Lease: keeps one life of a worker alive, from a thread with a connection of its own.

A blocked event loop does not stop it, so a handler that blocks the loop does not cost its neighbours their leases. A
stopped process does stop it, and then the lease ends as it should. The same thread reads the orders for the life and
watches the loop: one without a tick for `stall_limit` is reported with the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from . import db, metrics
from .board import Page
from .errors import ConnectError

log = logging.getLogger("cyclone")

ORDERS_S = 1.0


class Keeper:
    """The thread that holds the lease.

    All callbacks run in the thread: `on_began` when a life has begun, `on_lost` when the lease is gone, `on_orders`
    with (step id, claim id, reason), and `on_stall` when the loop has stood still for `stall_limit_s`.
    """

    def __init__(
        self,
        dsn: str,
        statements: db.Statements,
        *,
        life: int,
        lease_s: float,
        queues: list[str],
        kinds: list[str],
        versions: list[int],
        page: Page,
        stall_limit_s: float,
        on_began: Callable[[], None],
        on_lost: Callable[[], None],
        on_orders: Callable[[list[tuple[int, int, str]]], None],
        on_stall: Callable[[], None],
        new_life: Callable[[], int],
        pooler: bool = False,
    ) -> None:
        self._dsn = dsn
        self._sql = statements
        self.life = life
        self._lease_s = lease_s
        self._about: Mapping[str, object] = {
            "host": socket.gethostname(), "pid": os.getpid(), "queues": queues, "kinds": kinds, "versions": versions,
        }  # fmt: skip
        self._page = page
        self._stall_limit_s = stall_limit_s
        self._on_began = on_began
        self._on_lost = on_lost
        self._on_orders = on_orders
        self._on_stall = on_stall
        self._new_life = new_life
        self._pooler = pooler
        self.valid_until = 0.0
        """By the monotonic clock, until when the lease surely holds: started or sent work may still count. A tenth of
        the lease is kept as a margin."""
        self.calm = False
        """Whether nothing runs, so that there can be no orders and the loop beats slowly."""
        self._stop = threading.Event()
        self._bell = threading.Event()
        self._stalled = False
        self._renew_now = False
        self.began = threading.Event()
        self.end_reason = "stopped"
        self._thread = threading.Thread(target=self._run, name="cyclone-lease", daemon=True)

    @property
    def holds(self) -> bool:
        """Whether the lease surely holds now."""
        return time.monotonic() < self.valid_until

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the life in the database and the thread."""
        self._stop.set()
        self._bell.set()

    def rouse(self) -> None:
        """Steps are about to be executed: orders may come again."""
        self.calm = False
        self._bell.set()

    def abandon(self) -> None:
        """Ends the life although the loop stands still; a new one begins with the next renewal."""
        self.valid_until = 0.0
        self._renew_now = True

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        pause = 0.1
        while not self._stop.is_set():
            try:
                # A connection whose packets vanish must not cost the lease: it is given up in time for another renewal.
                conn = db.connect_sync(
                    self._dsn, application_name="cyclone lease", pooler=self._pooler, silence_s=self._lease_s / 3
                )
                held_since = time.monotonic()
                try:
                    self._hold(conn)
                finally:
                    conn.close()
                    if (
                        time.monotonic() - held_since > 5.0
                    ):  # it worked: a server that only refuses keeps the long pause
                        pause = 0.1
                return
            except (psycopg.Error, ConnectError, OSError) as exc:
                log.warning("the lease cannot be renewed now and is tried again: %s", db.brief(exc))
            except Exception:
                # Whatever it is: without this thread the worker would neither work nor end.
                log.exception("the thread of the lease failed and goes on")
            self._watch()
            self._stop.wait(min(pause, self._lease_s / 6) * random.uniform(0.8, 1.2))
            pause = min(pause * 2, 5.0)

    def _hold(self, conn: psycopg.Connection[tuple[Any, ...]]) -> None:
        renew_every = self._lease_s / 3
        next_renewal = 0.0
        next_orders = 0.0
        while True:
            now = time.monotonic()
            if self._stop.is_set():
                conn.execute(
                    self._sql["end_life"],
                    {"life": self.life, "reason": self.end_reason, "executing": self._page.executing(), "now": None},
                )
                return
            if now >= next_renewal or self._renew_now:
                self._renew_now = False
                self._renew(conn, now)
                next_renewal = now + renew_every * random.uniform(0.9, 1.0)
            if now >= next_orders and self._page.running:
                rows = conn.execute(self._sql["take_orders"], {"life": self.life}).fetchall()
                self._page.reach()
                next_orders = now + ORDERS_S
                if rows:
                    self._on_orders(rows)
            self._watch()
            wait = min(next_renewal - time.monotonic(), self._stall_limit_s / 4, math.inf if self.calm else ORDERS_S)
            self._bell.wait(max(wait, 0.01))
            self._bell.clear()

    def _renew(self, conn: psycopg.Connection[tuple[Any, ...]], sent: float) -> None:
        """Begins the life at first, renews it from then on. The validity counts from before the sending."""
        params = {"life": self.life, "lease_s": self._lease_s, "now": None}
        if self.began.is_set() and not self.holds:
            # Lapsed while the database could not be reached. Outcomes have been dropped since, so nothing can be
            # built on what the database still believes: end this life, and let the sweeper give back what it held.
            end = {"life": self.life, "reason": "lease lapsed", "executing": self._page.executing(), "now": None}
            conn.execute(self._sql["end_life"], end)
            self._lose(conn)
            return
        if not self.began.is_set():
            conn.execute(self._sql["begin_life"], {**params, **self._about})
        renewed = conn.execute(self._sql["renew_life"], params).fetchone()
        self._page.reach()
        if renewed is None:
            self._lose(conn)
            return
        self.valid_until = sent + self._lease_s * 0.9
        if not self.began.is_set():
            self.began.set()
            self._on_began()

    def _lose(self, conn: psycopg.Connection[tuple[Any, ...]]) -> None:
        """The life has ended: it is never revived. What it held is lost; work goes on under a new one."""
        log.error("the lease of life %d was lost: its steps are given up, work goes on under a new one", self.life)
        metrics.lease_lost()
        self.valid_until = 0.0
        self.began.clear()
        self._on_lost()
        self.life = self._page.life = self._new_life()
        self._renew(conn, time.monotonic())

    def _watch(self) -> None:
        """Reports a loop that stands still."""
        if not self._page.tick:
            return
        still = time.monotonic() - self._page.tick
        if still < self._stall_limit_s:
            self._stalled = False
        elif not self._stalled:
            self._stalled = True
            log.critical(
                "the event loop has stood still for %.1f s (stall_limit is %.1f s)", still, self._stall_limit_s
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
            self._on_stall()
