"""Fixtures for tests that drive real pools from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process import live

import cyclone


@pytest.fixture
def told(tmp_path: Path) -> Iterator[live.Channel]:
    """What the handlers of `app` tell."""
    with live.channel(tmp_path) as channel:
        yield channel


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    item.stash[_failed] = report.failed
    return report


@pytest.fixture
def start_pool(request: pytest.FixtureRequest, dsn: str, tmp_path: Path, told: live.Channel) -> Iterator[live.Pools]:
    """Starts pools with the program of `app`; they are killed after the test. If it has failed, their logs say more."""
    with live.pools(dsn, tmp_path) as pools:
        yield pools
        if request.node.stash.get(_failed, False):
            print(pools.tails())


@pytest.fixture
def client(dsn: str) -> Iterator[cyclone.SyncClient]:
    """A client for the test's database."""
    with cyclone.SyncClient(dsn) as client:
        yield client
