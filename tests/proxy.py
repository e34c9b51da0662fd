"""A TCP proxy before PostgreSQL, for making the accidents of a network on purpose.

It reads the protocol's messages instead of chunks of bytes, as only then "the reply to this statement" has a meaning:
a reply ends with ReadyForQuery, and there is exactly one for the start of a session and for each Query and Sync.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from psycopg import conninfo

_TIMEOUT_S = 10


class Proxy:
    """Listens on a port of its own and forwards to the server of ``target_dsn``; ``dsn`` leads through it."""

    def __init__(self, target_dsn: str) -> None:
        target = conninfo.conninfo_to_dict(target_dsn)
        self._target = (str(target.get("host") or "127.0.0.1"), int(target.get("port") or 5432))
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Without encryption, since the proxy reads along.
        self.dsn = conninfo.make_conninfo(
            target_dsn,
            host="127.0.0.1",
            port=self._listener.getsockname()[1],
            sslmode="disable",
            gssencmode="disable",
        )
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._thawed = threading.Event()
        self._thawed.set()
        self._lag_s = 0.0
        self._trap: tuple[bytes, threading.Event] | None = None
        self._closed = False
        self._spawn(self._accept)

    def cut(self) -> None:
        """Close all connections at once, frozen ones too; new ones are accepted."""
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.cut()

    def freeze(self) -> None:
        """From now on forward nothing, in either direction, while every connection stays open."""
        self._thawed.clear()

    def lag(self, round_trip_s: float) -> None:
        """From now on every reply comes later by so much, as from a server that is far away."""
        self._lag_s = round_trip_s / 2

    def thaw(self) -> None:
        """Forward again, first what was held back."""
        self._thawed.set()

    def drop_next_reply_after(self, match: bytes) -> threading.Event:
        """Let the next message with ``match`` in it reach the server, and cut its connection instead of the reply.

        ``match`` is looked for in statements and parameters, and in the text that a prepared statement was made of.
        The event is set when the server has answered in full, up to ReadyForQuery, and the connection is cut.
        """
        dropped = threading.Event()
        with self._lock:
            self._trap = (match, dropped)
        return dropped

    def close(self) -> None:
        self._closed = True
        # Closing alone does not end an accept() that has begun.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.thaw()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
            assert not thread.is_alive(), "a thread of the proxy did not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=_TIMEOUT_S)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            with self._lock:
                self._links.add(link)
                if self._closed:
                    link.cut()
            self._spawn(self._pump, self._requests, link)
            self._spawn(self._pump, self._replies, link)

    def _pump(self, direction: Callable[[_Link], None], link: _Link) -> None:
        with contextlib.suppress(OSError):
            direction(link)
        # The end of one direction is the end of both, as with any process that dies.
        link.cut()
        with self._lock:
            self._links.discard(link)
        link.leave()

    def _read(self, source: socket.socket) -> Iterator[bytes]:
        while chunk := source.recv(1 << 16):
            # What comes meanwhile is then read at once: it is late by less than twice as much.
            if self._lag_s:
                time.sleep(self._lag_s)
            yield chunk

    def _requests(self, link: _Link) -> None:
        statements: dict[bytes, bytes] = {}
        for kind, message in _messages(self._read(link.client), typed=False):
            text = message
            if kind == b"P":
                name, text, _ = message[5:].split(b"\0", 2)
                statements[name] = text
            elif kind == b"B":
                _, name, _ = message[5:].split(b"\0", 2)
                text = message + statements.get(name, b"")
            with self._lock:
                if self._trap is not None and kind and link.dropped is None and self._trap[0] in text:
                    link.drop_reply, link.dropped = link.asked + 1, self._trap[1]
                    self._trap = None
                if kind in (b"Q", b"S"):
                    link.asked += 1
            self._thawed.wait()
            link.server.sendall(message)

    def _replies(self, link: _Link) -> None:
        answered = 0
        for kind, message in _messages(self._read(link.server), typed=True):
            if kind == b"Z":
                answered += 1
            self._thawed.wait()
            with self._lock:
                # The messages of a reply come before the Z that counts it.
                withheld = link.dropped is not None and answered >= link.drop_reply - (kind != b"Z")
            if not withheld:
                link.client.sendall(message)
            elif kind == b"Z":
                return


class _Link:
    """The two ends of one connection, and how many replies the client has asked for; the session's start is one."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.asked = 1
        self.drop_reply = 0
        self.dropped: threading.Event | None = None
        self._pumps = threading.Semaphore(1)

    def cut(self) -> None:
        # Only shut down: closing here could hand the descriptor to another socket while a pump still uses it.
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Called by each pump at its end; the last one closes the sockets."""
        if self._pumps.acquire(blocking=False):
            return
        self.client.close()
        self.server.close()
        if self.dropped is not None:
            self.dropped.set()


def _messages(source: Iterator[bytes], *, typed: bool) -> Iterator[tuple[bytes, bytes]]:
    """Cut the stream into (type, whole message); a client's first message has no type."""
    buffer = b""
    for chunk in source:
        buffer += chunk
        at = 0
        while len(buffer) >= (body := at + typed) + 4:
            end = body + int.from_bytes(buffer[body : body + 4], "big")
            if len(buffer) < end:
                break
            yield buffer[at:body], buffer[at:end]
            at, typed = end, True
        buffer = buffer[at:]
