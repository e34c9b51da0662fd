"""The pool's HTTP server: what it answers, and that nobody can hurt it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from cyclone import health
from cyclone.board import Page, Role, State

Address = tuple[str, int]


@contextlib.asynccontextmanager
async def serving(pages: Sequence[Page] = (), *, silence_s: float | None = 10.0) -> AsyncGenerator[Address]:
    listener = socket.create_server(("127.0.0.1", 0))
    address: Address = listener.getsockname()
    server = health.Server(listener, pages, stall_limit_s=5.0, sweeper_silence_s=silence_s)
    task = asyncio.create_task(server.run())
    try:
        yield address
    finally:
        server.stop()
        await task


async def send(address: Address, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return (int(head.split()[1]) if head else 0), body


async def get(address: Address, path: str) -> tuple[int, Any]:
    status, body = await send(address, f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    return status, json.loads(body)


def page(role: Role, state: State = State.READY) -> Page:
    one = Page.private(10)
    one.role, one.state, one.pid, one.slots = role, state, 4711, 10
    one.beat()
    one.reach()
    return one


async def test_a_pool_whose_loops_turn_is_healthy_and_shows_its_children() -> None:
    worker = page(Role.WORKER)
    worker.running, worker.restarts = 3, 2
    async with serving([Page.private(10), page(Role.SWEEPER), worker]) as address:
        status, body = await get(address, "/healthz?verbose=1")
    assert (status, body["status"], body["problems"]) == (200, "ok", [])
    assert [child["role"] for child in body["children"]] == ["sweeper", "worker"]
    child = body["children"][1]
    assert (child["pid"], child["state"], child["running"], child["slots"]) == (4711, "ready", 3, 10)
    assert child["restarts"] == 2 and 0 <= child["tick_age_s"] < 5


async def test_a_loop_that_stands_still_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, booting = page(Role.WORKER), page(Role.WORKER, State.BOOTING)
    later = time.monotonic() + 6.0
    monkeypatch.setattr(time, "monotonic", lambda: later)  # booting takes as long as the imports of the program
    async with serving([worker, booting]) as address:
        status, body = await get(address, "/healthz")
    assert status == 503 and len(body["problems"]) == 1
    assert body["problems"][0].startswith("the loop of worker 4711 has not turned for 6")


@pytest.mark.contract("FM-020")
async def test_a_crash_loop_is_unhealthy_and_tells_why() -> None:
    worker = page(Role.WORKER, State.GONE)
    worker.pid, worker.failing, worker.note = 0, health.CRASH_LOOP, "there is no module 'shop'"
    async with serving([worker]) as address:
        status, body = await get(address, "/healthz")
    assert status == 503
    assert body["problems"] == [
        f"worker (none) died {health.CRASH_LOOP} times in a row soon after its start: there is no module 'shop'"
    ]


async def test_ready_means_a_worker_is_ready_and_the_sweeper_reaches_the_database() -> None:
    worker, sweeper = page(Role.WORKER), page(Role.SWEEPER)
    async with serving([worker, sweeper]) as address:
        assert (await get(address, "/readyz"))[0] == 200
        sweeper.reached = time.monotonic() - 60
        status, body = await get(address, "/readyz")
        assert status == 503 and body["reasons"] == ["the sweeper has not reached the database for 60 s"]
        sweeper.reached = 0.0
        worker.state, worker.note = State.BOOTING, "too many connections"
        status, body = await get(address, "/readyz")
        assert status == 503
        assert body["reasons"] == [
            "no worker is ready; too many connections",
            "the sweeper does not reach the database",
        ]
    async with serving([page(Role.SWEEPER)], silence_s=None) as address:  # a pool without workers
        assert (await get(address, "/readyz"))[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /healthz/x HTTP/1.1\r\n\r\n", 404),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"GET /healthz\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /\xff\xfe\0 HTTP/1.1\r\n\r\n", 404),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"G" * 1_000_000, 431),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
    ],
)
async def test_each_request_gets_its_answer(request_: bytes, status: int) -> None:
    async with serving() as address:
        assert (await send(address, request_))[0] == status
        assert (await get(address, "/healthz"))[0] == 200


async def test_head_answers_without_a_body() -> None:
    async with serving() as address:
        assert await send(address, b"HEAD /healthz HTTP/1.1\r\n\r\n") == (200, b"")


async def test_a_client_that_is_slow_or_leaves_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_READ_S", 0.05)
    async with serving() as address:
        assert (await send(address, b"GET /healthz HTTP/1.1\r\n"))[0] == 408
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /met")
        writer.transport.abort()
        assert (await get(address, "/healthz"))[0] == 200


async def test_only_so_many_connections_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MAX_OPEN", 3)
    async with serving() as address:
        held = [await asyncio.open_connection(*address) for _ in range(3)]
        for _, writer in held:
            writer.write(b"GET /healthz")
        with contextlib.suppress(ConnectionResetError):
            assert (await send(address, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 0
        for reader, writer in held:
            writer.write(b" HTTP/1.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
        assert (await get(address, "/healthz"))[0] == 200
