"""`cyclone submit`, `runs`, `show` and `cancel`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import factories
import psycopg
import pytest

import cyclone
from cyclone import Context, Graph, Node, SyncClient, cli, migrate

Conn = psycopg.Connection[Any]
Run = Callable[..., tuple[int, str, str]]


@cyclone.step("double", max_attempts=1)
async def double(ctx: Context, n: int) -> int:
    if n < 0:
        raise cyclone.Permanent("less than nothing")
    return 2 * n


@cyclone.step("count")
async def count(ctx: Context, n: int) -> list[int]:
    return list(range(n))


@cyclone.workflow("doubling", deadline=3600)
def doubling(g: Graph[int]) -> Node[list[int]]:
    first = g.run(double, g.input)
    return g.map(double, g.run(count, first.output).output, name="each")


@pytest.fixture
def run(dsn: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    handlers = cyclone.Registry()
    handlers.include(doubling)
    migrate.register(dsn, "public", handlers)

    def call(*args: str) -> tuple[int, str, str]:
        code = cli.run(cli.app, [*args, "--dsn", dsn])
        found = capsys.readouterr()
        return code, found.out, found.err

    yield call


async def test_submit_and_show(dsn: str, run: Run) -> None:
    code, out, _ = run("submit", "doubling", "1")
    assert code == 0
    number = out.strip()
    async with factories.worker(dsn, double, count):
        with SyncClient(dsn) as client:
            await factories.until(lambda: client.get_run(number).state.terminal)
    code, out, _ = run("show", number)
    assert code == 0
    for text in (
        "doubling (completed)",
        "double completed",
        "└── each completed",
        "2 of 2 items completed",
        "= result",
        "each[1]",
    ):
        assert text in out
    code, out, _ = run("show", number, "--json")
    found = json.loads(out)
    assert (found["name"], found["state"], len(found["steps"])) == ("doubling", "completed", 5)
    assert [node["name"] for node in found["graph"]["nodes"]] == ["double", "count", "each"]
    assert found["deadline"] is not None


def test_submit_once(run: Run) -> None:
    code, out, _ = run("submit", "doubling", "1", "--once", "k", "--json")
    assert code == 0
    first = json.loads(out)
    assert first["created"]
    code, out, _ = run("submit", "doubling", "1", "--once", "k", "--json")
    assert json.loads(out) == {**first, "created": False}
    code, _, err = run("submit", "doubling", "2", "--once", "k")
    assert code == 4 and first["run_id"] in err
    assert run("submit", "doubling", "2", "--once", "")[0] == 2
    code, _, err = run("submit", "dubling", "1")
    assert code == 3 and "did you mean 'doubling'" in err
    code, _, err = run("submit", "doubling", "{")
    assert code == 2 and "JSON" in err
    assert run("submit", "doubling", "1", "--priority", "10")[0] == 2


async def test_runs_and_cancel(dsn: str, run: Run) -> None:
    with SyncClient(dsn) as client:
        runs = doubling.submit_many(client, [1, 2, 3], tags=["t"])
        bad = doubling.submit(client, -1)
        async with factories.worker(dsn, double, count):
            await factories.until(lambda: bad.state().terminal)
            await factories.until(lambda: all(one.state().terminal for one in runs))
        waiting = doubling.submit(client, 1)
    code, out, _ = run("runs", "--json", "--limit", "2")
    page = json.loads(out)
    assert code == 0 and [one["id"] for one in page["runs"]] == [waiting.id, bad.id] and page["next"] == bad.id
    code, out, _ = run("runs", "--after", bad.id, "--workflow", "doubling", "--tag", "t", "--since", "1h", "--json")
    assert [one["id"] for one in json.loads(out)["runs"]] == [one.id for one in reversed(runs)]
    code, out, _ = run("runs", "--state", "failed")
    assert "double permanent: less than nothing" in out and waiting.id not in out.split()
    assert run("runs", "--state", "gone")[0] == 2
    assert json.loads(run("runs", "--since", "2999-01-01T00:00:00+00:00", "--json")[1])["runs"] == []
    code, out, _ = run("cancel", waiting.id, "count", "--reason", "no")
    assert (code, out) == (0, f"cancelled node 'count' of run {waiting.id}\n")
    code, _, err = run("cancel", waiting.id)
    assert code == 4 and "had ended already" in err  # by the failure of its node
    assert run("cancel", "999999")[0] == 3
    with SyncClient(dsn) as client:
        assert doubling.get(client, waiting.id).info().node == "count"
        again = doubling.submit(client, 1)
    assert run("cancel", again.id)[:2] == (0, f"cancelled run {again.id}\n")
