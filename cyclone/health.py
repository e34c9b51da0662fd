"""The pool's small HTTP server: /metrics, /healthz and /readyz.

The supervisor binds the socket and the sweeper process serves it, so a port that is taken shows before anything was
forked, and callers wait in the socket's backlog while a sweeper is being replaced.

Whoever can reach the port can send anything. A request therefore has a few seconds to arrive and a few kilobytes to say
what it wants; one connection carries one request; and only so many are open at once, the next one being closed unread.

`/healthz` answers whether restarting the pool could help: the loops turn, and no process dies again and again. A
database that is away is no reason, since a restart would only add to the load of its return; that is for `/readyz`,
which answers whether work is being done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson

from . import metrics
from .board import Page, Role, State

_MAX_HEAD: Final = 8192
_MAX_OPEN: Final = 64
_READ_S: Final = 5.0
_WRITE_S: Final = 10.0

# A place whose processes died so many times in a row, none of them having been ready for a while, is a crash loop.
CRASH_LOOP: Final = 5

Answer = tuple[HTTPStatus, str, bytes]


class Server:
    """Serves a listening socket until it is stopped. `limits` are what `/healthz` and `/readyz` hold the pages to."""

    def __init__(
        self, listener: socket.socket, pages: Sequence[Page], *, stall_limit_s: float, sweeper_silence_s: float | None
    ) -> None:
        self._listener = listener
        self._pages = pages
        self._stall_limit_s = stall_limit_s
        self._sweeper_silence_s = sweeper_silence_s
        self._open: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._routes: Mapping[str, Callable[[], Awaitable[Answer]]] = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._ready,
        }

    def stop(self) -> None:
        """Ends `run`; an answer that is being written is finished within its time."""
        self._stopping.set()

    async def run(self) -> None:
        """Serves until `stop`."""
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=_MAX_HEAD)
        try:
            await self._stopping.wait()
        finally:
            server.close()
            tasks = list(self._open)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) <= _MAX_OPEN:
                answer, with_body = await self._answer(reader)
                async with asyncio.timeout(_WRITE_S):
                    writer.write(_encode(answer, with_body))
                    await writer.drain()
                    writer.write_eof()
                    # What is unread when a socket closes makes the kernel reset it, and the answer may be lost.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            while await reader.read(_MAX_HEAD):
                                pass
        except (OSError, TimeoutError):
            pass  # it is the caller who went away or is too slow
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[Answer, bool]:
        try:
            async with asyncio.timeout(_READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long"), True
        except asyncio.IncompleteReadError:
            return _text(HTTPStatus.BAD_REQUEST, "the request ends within its head"), True
        except TimeoutError:
            return _text(HTTPStatus.REQUEST_TIMEOUT, "the request took too long to arrive"), True
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _text(HTTPStatus.BAD_REQUEST, "this is no HTTP/1 request"), True
        if words[0] not in (b"GET", b"HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD"), True
        with_body = words[0] == b"GET"
        route = self._routes.get(words[1].split(b"?", 1)[0].decode("latin-1"))
        if route is None:
            return _text(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz and /readyz"), with_body
        return await route(), with_body

    async def _metrics(self) -> Answer:
        metrics.workers(self._states())
        # In a thread: adding up many processes takes tens of milliseconds, and this loop wakes workers.
        return HTTPStatus.OK, metrics.CONTENT_TYPE, await asyncio.to_thread(metrics.scrape)

    def _states(self) -> dict[str, int]:
        states = dict.fromkeys((state.name.lower() for state in State if state is not State.GONE), 0)
        for page in self._workers():
            if page.state is not State.GONE:
                states[page.state.name.lower()] += 1
        return states

    def _workers(self) -> list[Page]:
        return [page for page in self._pages if page.role is Role.WORKER]

    async def _health(self) -> Answer:
        now = time.monotonic()
        problems: list[str] = []
        children: list[dict[str, Any]] = []
        for page in self._pages:
            if page.role is Role.NONE:
                continue
            name, tick_age = f"{page.role.name.lower()} {page.pid or '(none)'}", None
            if page.state in (State.READY, State.DRAINING):
                tick_age = round(now - page.tick, 3)
                if tick_age > self._stall_limit_s:
                    problems.append(f"the loop of {name} has not turned for {tick_age:.1f} s")
            if page.failing >= CRASH_LOOP:
                note = f": {page.note}" if page.note else ""
                problems.append(f"{name} died {page.failing} times in a row soon after its start{note}")
            children.append(
                {
                    "role": page.role.name.lower(),
                    "pid": page.pid,
                    "state": page.state.name.lower(),
                    "tick_age_s": tick_age,
                    "restarts": page.restarts,
                    "running": page.running,
                    "slots": page.slots,
                    "note": page.note or None,
                }
            )
        body = {"status": "failing" if problems else "ok", "problems": problems, "children": children}
        return _json(HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK, body)

    async def _ready(self) -> Answer:
        reasons: list[str] = []
        workers = self._workers()
        if workers and not any(page.state is State.READY for page in workers):
            notes = sorted({page.note for page in workers if page.note})
            reasons.append("no worker is ready" + "".join(f"; {note}" for note in notes))
        if self._sweeper_silence_s is not None:
            reached = max((page.reached for page in self._pages if page.role is Role.SWEEPER), default=0.0)
            silence = time.monotonic() - reached
            if not reached:
                reasons.append("the sweeper does not reach the database")
            elif silence > self._sweeper_silence_s:
                reasons.append(f"the sweeper has not reached the database for {silence:.0f} s")
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _json(status, {"status": "not ready" if reasons else "ready", "reasons": reasons})


def _json(status: HTTPStatus, body: Mapping[str, Any]) -> Answer:
    return status, "application/json", orjson.dumps(body) + b"\n"


def _text(status: HTTPStatus, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


def _encode(answer: Answer, with_body: bool) -> bytes:
    status, kind, body = answer
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
