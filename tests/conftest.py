"""PostgreSQL for every test, and the checks that a test leaves nothing behind.

The server is ``CYCLONE_TEST_DSN`` (a user who may create databases) if set, else a container if a Docker engine
answers, else the embedded one, in version ``CYCLONE_TEST_PG`` (18). Each test gets a database of its own, cloned from
one that was migrated once: NOTIFY channels and locks belong to a database, so nothing needs cleaning.

``async def`` tests run on uvloop in asyncio's debug mode. A task that is pending at the end fails the test; so does
a process that the test started, directly or not: on Linux orphans become children of the test run, which therefore
sees them, and which can wait for them with ``os.waitpid`` (``os.kill(pid, 0)`` succeeds until somebody does).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import itertools
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import uvloop
from psycopg import conninfo, sql

from cyclone import embedded

PG = int(os.environ.get("CYCLONE_TEST_PG", "18"))

# A test's crash is one of a process and never of the machine, so nothing is lost without fsync.
SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": 300, "max_wal_size": "1GB"}

_names = (f"test_{os.getpid()}_{number}" for number in itertools.count())
_children = pytest.StashKey[set[int]]()


@pytest.fixture(scope="session")
def admin_dsn() -> Iterator[str]:
    """A DSN that may create databases."""
    with contextlib.ExitStack() as stack:
        dsn = os.environ.get("CYCLONE_TEST_DSN") or _container(stack)
        yield dsn or stack.enter_context(embedded.Server(PG, SETTINGS, _memory())).dsn()


def _memory() -> Path | None:
    """A folder in memory, if there is one large enough: there a clone takes 12 ms instead of up to 300."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30 else None


def _docker_answers() -> bool:
    import docker

    try:
        docker.from_env(timeout=2).close()
    except docker.errors.DockerException:
        return False
    return True


def _container(stack: contextlib.ExitStack) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = _docker_answers()
        # A failed look leaves its socket open; collected later, it would fail the test that runs then.
        gc.collect()
        if not answers:
            return None
        from testcontainers.community.postgres import PostgresContainer

        container = PostgresContainer(f"postgres:{PG}", driver=None)
        container.with_command(
            ["postgres", *itertools.chain.from_iterable(("-c", f"{name}={value}") for name, value in SETTINGS.items())]
        )
        url: str = stack.enter_context(container).get_connection_url()
        return url


@pytest.fixture(scope="session")
def _admin(admin_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(admin_dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture(scope="session")
def template_db(admin_dsn: str, _admin: psycopg.Connection) -> Iterator[str]:
    """The name of a migrated database that nobody is connected to."""
    from cyclone import migrate

    with _database(_admin) as name:
        migrate.up(conninfo.make_conninfo(admin_dsn, dbname=name), schema="public")
        yield name


@pytest.fixture
def dsn(request: pytest.FixtureRequest, admin_dsn: str, _admin: psycopg.Connection, template_db: str) -> Iterator[str]:
    """A migrated database of the test's own, checked in depth afterwards unless marked ``no_deep_check``."""
    with _database(_admin, template_db) as name:
        dsn = conninfo.make_conninfo(admin_dsn, dbname=name)
        yield dsn
        if request.node.get_closest_marker("no_deep_check") is None:
            _check_deeply(dsn)


@pytest.fixture
def empty_dsn(admin_dsn: str, _admin: psycopg.Connection) -> Iterator[str]:
    """A database of the test's own with nothing in it."""
    with _database(_admin) as name:
        yield conninfo.make_conninfo(admin_dsn, dbname=name)


@pytest.fixture
def conn(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection to ``dsn`` in autocommit."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


@contextlib.contextmanager
def _database(admin: psycopg.Connection, template: str = "template0") -> Iterator[str]:
    name = next(_names)
    admin.execute(
        sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
            sql.Identifier(name), sql.Identifier(template)
        )
    )
    try:
        yield name
    finally:
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _check_deeply(dsn: str) -> None:
    from cyclone import doctor

    with psycopg.connect(dsn, autocommit=True) as conn:
        findings = doctor.deep(conn)
    if findings:
        pytest.fail("the database is damaged:\n" + "\n".join(findings), pytrace=False)


# Asynchronous tests


@pytest.hookimpl
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    kwargs = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    with asyncio.Runner(debug=True, loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_in_time(pyfuncitem, pyfuncitem.obj(**kwargs)))
        # Asked between two runs, when every task there is is one that nobody awaited; the runner cancels them later.
        leaked = asyncio.all_tasks(runner.get_loop())
        if leaked:
            pytest.fail("pending tasks are left:\n" + "\n".join(map(repr, leaked)), pytrace=False)
    return True


async def _in_time(item: pytest.Function, test: Coroutine[Any, Any, None]) -> None:
    """Hold the limit of pytest-timeout, whose alarm cannot raise out of an idle uvloop."""
    given = item.config.getoption("timeout")
    limit = float(item.config.getini("timeout") if given is None else given)
    if marker := item.get_closest_marker("timeout"):
        limit = float(marker.args[0])
    # Zero is the plugin's word for no limit.
    async with asyncio.timeout(limit or None):
        await test


# Processes left behind


def pytest_sessionstart() -> None:
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    # What fixtures started before now is theirs to end.
    item.stash[_children] = set(_living_children())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
    result = yield
    before = item.stash.get(_children, None)
    if before is not None:
        killed: dict[int, str] = {}
        # Again until there are none, since the children of the killed become ours.
        while leaked := {pid: name for pid, name in _living_children().items() if pid not in before}:
            for pid in leaked:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            killed |= leaked
        if killed:
            pytest.fail(f"processes were left, now killed: {killed}", pytrace=False)
    return result


def _living_children() -> dict[int, str]:
    """The children of this process with their names; those that have ended are reaped."""
    living: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # Processes come and go while we look.
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(")")
            state, parent = tail.split()[:2]
            pid, _, name = head.partition(" (")
            if int(parent) != os.getpid():
                continue
            if state == "Z":
                os.waitpid(int(pid), os.WNOHANG)
            elif name != "postgres":
                # A restarted server is not new; one that was never closed is told by the shell that watches it.
                living[int(pid)] = name
    return living
