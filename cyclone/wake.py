"""Who must hear of new work. A wake-up is a hint: polling covers every one that is lost.

Within a pool one process listens to PostgreSQL and wakes one idle worker through a pipe that all workers share; a
worker whose claim came back full wakes the next. A worker in a program of its own listens itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from . import db
from .errors import ConnectError
from .plan import Ask, Plan, Run

log = logging.getLogger("cyclone")

# A producer keeps quiet when somebody was notified within this time, so that a flood of commits does not queue for
# the lock that NOTIFY takes through its commit. Whoever is woken therefore looks once more after it.
QUIET_S = 0.010
ANSWER_S = 5.0
_BUSY_S = 0.1


class Quiet:
    """Lets one submission notify and those that follow within a moment keep quiet, as the one who is woken looks once
    more after that.

    The database has the same rule for all producers together, but whoever asks it pays a round trip: of eight
    submissions at a time, half asked, and were told to keep quiet (measured: 790 submits/s, against 1,520 with nobody
    asleep).
    """

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = 0.0

    def broken(self) -> bool:
        """Whether to notify now; from then on it is quiet again."""
        now = time.monotonic()
        if now < self._until:
            return False
        self._until = now + QUIET_S
        return True


def sleepers(statements: db.Statements, *, now: datetime | None = None) -> Plan[None]:
    """Notifies those who sleep, unless they were notified a moment ago. A statement of its own, after the commit."""
    try:
        yield Run(statements["wake_sleepers"], {"channel": statements.channel, "now": now})
    except psycopg.Error as exc:  # what was committed stays, and whoever sleeps will find it without this
        log.debug("could not notify: %s", exc)


def tell(statements: db.Statements) -> Plan[None]:
    """Notifies those for whom a submission has taken that over. A statement of its own, after the commit."""
    try:
        yield Ask(statements["notify"], {"channel": statements.channel})
    except psycopg.Error as exc:  # as above
        log.debug("could not notify: %s", exc)


class Pipe:
    """A pipe shared by the workers of a pool, made before the fork. One byte wakes one idle worker."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)

    def wake_one(self) -> None:
        try:
            os.write(self.writer, b"\0")
        except BlockingIOError:
            pass  # full: more wake-ups are waiting than there are workers

    def take(self) -> bool:
        """Takes the wake-ups that are there, as one; False when another worker was faster.

        One worker is enough for all of them: if its claim comes back full, it wakes the next. Left in the pipe, those
        of a long backlog would wake idle workers thousands of times after it."""
        try:
            return bool(os.read(self.reader, 65536))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class Listener:
    """Listens for notifications on a connection of its own and says that it wants them.

    `on_news` is called for every notification, and once after every (re)connect, because whatever was committed in
    between was not heard. While `idle()` is false it does not ask to be notified: workers that are busy claim again
    by themselves.
    """

    def __init__(
        self,
        dsn: str,
        statements: db.Statements,
        sleeper: int,
        on_news: Callable[[], None],
        *,
        idle: Callable[[], bool] = lambda: True,
        refresh_s: float = 1.0,
    ) -> None:
        self._dsn = dsn
        self._statements = statements
        self._sleeper = sleeper
        self._on_news = on_news
        self._idle = idle
        self._refresh_s = refresh_s
        self._stopped = False
        self.connected = asyncio.Event()

    def stop(self) -> None:
        self._stopped = True

    async def run(self) -> None:
        listen = sql.SQL("LISTEN {}").format(sql.Identifier(self._statements.channel))
        pause = 0.1
        while not self._stopped:
            try:
                conn = await db.connect(self._dsn, application_name="cyclone listen")
                try:
                    await conn.execute(listen, prepare=False)
                    await self._listen(conn)
                finally:
                    if self.connected.is_set():  # it had worked; a server that is read-only only lets one connect
                        pause = 0.1
                    self.connected.clear()
                    await conn.close()
            except Exception as exc:
                if self._stopped:
                    return
                # Whatever it is, the loop goes on: an end of it would be seen only by those whose steps start late.
                foreseen = isinstance(exc, psycopg.Error | ConnectError | OSError | TimeoutError)
                log.warning("listening was interrupted, polling goes on: %s", exc, exc_info=not foreseen)
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, 5.0)

    async def _listen(self, conn: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        told: bool | None = None  # what the server knows
        due = 0.0
        while not self._stopped:
            idle, now = self._idle(), time.monotonic()
            if idle is not told or now >= due:
                # The answer also proves that the connection still carries: a dead one is noticed within seconds.
                sleeper = {"sleeper": self._sleeper}
                async with asyncio.timeout(ANSWER_S):
                    if idle:
                        await conn.execute(
                            self._statements["sleep_until"], {**sleeper, "seconds": self._refresh_s * 3, "now": None}
                        )
                    else:
                        await conn.execute(self._statements["sleep_no_more"], sleeper)
                due = now + self._refresh_s
                if told is None:
                    self.connected.set()
                    self._on_news()
                told = idle
            # Until somebody has heard that there are idle workers again, new work waits for the next poll.
            pause = due - now if idle else min(due - now, _BUSY_S)
            async for _ in conn.notifies(timeout=pause, stop_after=1):
                self._on_news()


class News:
    """What one worker waits on when it has room and found nothing: a wake-up, or the next poll."""

    def __init__(self, pipe: Pipe | None) -> None:
        self._pipe = pipe
        self._event = asyncio.Event()
        self._echo: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        """Wakes the worker, and once more a moment later: producers keep quiet for that long after a notification."""
        self._event.set()
        if self._echo is None:
            self._echo = asyncio.get_running_loop().call_later(QUIET_S * 1.5, self._ring_again)

    def nudge(self) -> None:
        """Ends the wait that is on, or the next one."""
        self._event.set()

    def _ring_again(self) -> None:
        self._echo = None
        self._event.set()

    def pass_on(self) -> None:
        """Wakes the next worker of the pool, after a claim that came back full."""
        if self._pipe is not None:
            self._pipe.wake_one()

    async def wait(self, timeout_s: float) -> None:
        """Waits for a wake-up or until the time is up. The pipe is only watched meanwhile, so a worker that is busy
        does not swallow a wake-up that an idle one should have.
        """
        loop = asyncio.get_running_loop()
        pipe = self._pipe
        if pipe is not None:

            def on_readable() -> None:
                if pipe.take():
                    self.ring()

            loop.add_reader(pipe.reader, on_readable)
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
        finally:
            self._event.clear()
            if pipe is not None:
                loop.remove_reader(pipe.reader)
