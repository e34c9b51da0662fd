"""Real pools for the tests: `cyclone-pool` with the program of `app`, seen and driven from outside only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
from process import app

from cyclone import embedded

TESTS = Path(__file__).parents[1]
COMMANDS = Path(sys.executable).parent
LIMIT_S = 40.0

Conn = psycopg.Connection[Any]


def eventually(look: Callable[[], Any], limit_s: float = LIMIT_S, *, log: Callable[[], str] = str) -> Any:
    """Asks again until the answer is true: for what can only be asked from outside."""
    deadline = time.monotonic() + limit_s
    while not (answer := look()):
        assert time.monotonic() < deadline, f"it did not come true in {limit_s} s: {answer!r}\n{log()}"
        select.select([], [], [], 0.02)
    return answer


def gone(pid: int, limit_s: float = LIMIT_S) -> None:
    """Waits for the end of a process, whoever's child it is."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], limit_s)[0], f"process {pid} is still there"
    finally:
        os.close(descriptor)


def resident_kib(pid: int) -> int:
    """The memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


class Channel:
    """What handlers tell, and the gates that they wait for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / app.CHANNEL
        os.mkfifo(self._path)
        self._heard: list[dict[str, Any]] = []
        self._news = threading.Condition()
        # A thread, since a handler that tells something blocks its loop while the pipe is full.
        self._thread = threading.Thread(target=self._listen, name="channel")
        self._thread.start()
        self._write(b"")

    def open(self, gate: str) -> None:
        (self.folder / gate).touch()

    def expect(self, what: str, count: int = 1, limit_s: float = LIMIT_S, **facts: Any) -> list[dict[str, Any]]:
        """Waits until so many messages of this kind, with these facts, have come since the test began."""
        with self._news:
            done = self._news.wait_for(lambda: len(self._seen(what, facts)) >= count, limit_s)
            assert done, f"no {count} × {what!r} with {facts} in {limit_s} s, but {self._heard}"
            return self._seen(what, facts)

    def seen(self, what: str, **facts: Any) -> list[dict[str, Any]]:
        """The messages of this kind, with these facts, that have come until now."""
        with self._news:
            return self._seen(what, facts)

    def _seen(self, what: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in self._heard if one["what"] == what and facts.items() <= one.items()]

    def _listen(self) -> None:
        # Open for writing too, so that it does not end when the last handler has closed it.
        with os.fdopen(os.open(self._path, os.O_RDWR), "rb") as lines:
            for line in lines:
                if line == _END:
                    return
                with self._news:
                    self._heard.append(json.loads(line))
                    self._news.notify_all()

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY)
        os.write(descriptor, line)
        os.close(descriptor)

    def close(self) -> None:
        self._write(_END)
        self._thread.join()


_END = b"end\n"


class Live:
    """A pool in a process of its own, in a session of its own."""

    def __init__(
        self,
        dsn: str,
        folder: Path,
        *,
        target: str = "process.app",
        env: dict[str, str] | None = None,
        path: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        options = {"procs": 2, "metrics_port": 0, "drain_timeout": 20, **options}
        args = [str(COMMANDS / "cyclone-pool"), target]
        for name, value in options.items():
            dashed = name.replace("_", "-")
            if name == "sweeper":
                args.append("--sweeper" if value else "--no-sweeper")
            else:
                args += [f"--{dashed}", str(value).lower()]
        self.dsn = dsn
        self.options = options
        number = len(list(folder.glob("pool-*.log")))
        self.log_path = folder / f"pool-{number}.log"
        with self.log_path.open("w") as out:
            self.process = subprocess.Popen(
                args,
                cwd=folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={
                    **os.environ,
                    "CYCLONE_DSN": dsn,
                    "APP_FOLDER": str(folder),
                    "PYTHONPATH": os.pathsep.join(map(str, (*path, TESTS))),
                    **(env or {}),
                },
            )
        self.pid = self.process.pid
        self.url = ""

    # What it says

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def address(self) -> str:
        """Where it serves figures; waits until it says so."""
        if not self.url:
            eventually(self._find_address, log=lambda: self.log)
        return self.url

    def _find_address(self) -> bool:
        assert self.process.poll() is None, self.log
        _, _, tail = self.log.partition("metrics and health at ")
        self.url = tail.split("\n")[0] if "\n" in tail else ""
        return bool(self.url)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.address() + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.read().decode()
        except (urllib.error.URLError, ConnectionError, TimeoutError) as exc:
            return 0, repr(exc)  # the process that serves is being replaced

    def metric(self, name: str, **labels: str) -> float:
        """A figure, added up over the labels that are not given."""
        return sum(value for _, value in self.series(name, **labels))

    def series(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        found: list[tuple[dict[str, str], float]] = []
        for line in self.get("/metrics")[1].splitlines():
            head, _, value = line.rpartition(" ")
            series, _, rest = head.partition("{")
            if series == name:
                pairs = (pair.partition("=") for pair in rest.rstrip("}").split(",") if pair)
                have = {key: text.strip('"') for key, _, text in pairs}
                if labels.items() <= have.items():
                    found.append((have, float(value)))
        return found

    def children(self) -> list[dict[str, Any]]:
        status, body = self.get("/healthz")
        return json.loads(body)["children"] if status else []

    def workers(self) -> list[int]:
        """The workers that are ready."""
        return [one["pid"] for one in self.children() if one["role"] == "worker" and one["state"] == "ready"]

    def sweeper(self) -> int:
        """The process of the sweeper."""
        return eventually(
            lambda: next((one["pid"] for one in self.children() if one["role"] == "sweeper" and one["pid"]), 0)
        )

    def begun(self) -> Live:
        """Waits until the supervisor is there to hear signals."""
        eventually(lambda: self._alive() and " workers for " in self.log, log=self._describe)
        return self

    def _describe(self) -> str:
        proc = Path(f"/proc/{self.pid}")
        with contextlib.suppress(OSError):
            return f"{(proc / 'status').read_text()}waits in {(proc / 'wchan').read_text()}\n{self.log}"
        return self.log

    def ready(self) -> Live:
        """Waits until all its workers are."""
        eventually(lambda: self._alive() and len(self.workers()) == self.options["procs"], log=lambda: self.log)
        return self

    def _alive(self) -> bool:
        assert self.process.poll() is None, self.log
        return True

    # What is done to it

    def signal(self, number: int) -> None:
        """To the supervisor alone."""
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To the supervisor and all its children, as a terminal does."""
        os.killpg(self.pid, number)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code, once it has ended."""
        gone(self.pid, limit_s)
        return self.process.wait()

    def end(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """Ends whatever is left of it by force."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal_all(signal.SIGKILL)
            self.process.wait()
        # Once it is waited for, its number may be another's: of its group only those are ours that became our children
        # when it died (see the root conftest).
        for pid in self._orphans():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _orphans(self) -> list[int]:
        found: list[int] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _, parent, group = stat.read_text().rpartition(")")[2].split()[:3]
                if (int(parent), int(group)) == (os.getpid(), self.pid):
                    found.append(int(stat.parent.name))
        return found


class Pools:
    """Starts pools for a test, and ends them after it."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.started: list[Live] = []

    def __call__(self, dsn: str | None = None, *, ready: bool = True, **options: Any) -> Live:
        pool = Live(dsn or self.dsn, self.folder, **options)
        self.started.append(pool)
        return pool.ready() if ready else pool

    def tails(self, lines: int = 40) -> str:
        """The ends of all logs, of the last pool last."""
        return "\n".join(
            f"--- {pool.log_path.name}, process {pool.pid}\n" + "\n".join(pool.log.splitlines()[-lines:])
            for pool in self.started
        )

    def close(self) -> None:
        for pool in self.started:
            pool.close()


@contextlib.contextmanager
def server(**settings: object) -> Iterator[embedded.Server]:
    """A server that a test may stop. In memory where there is room, since no disk is a part of what is tested."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30 else None
    found = {"max_wal_size": "256MB", **settings}
    with embedded.Server(int(os.environ.get("CYCLONE_TEST_PG", "18")), found, folder) as started:
        yield started


@contextlib.contextmanager
def pools(dsn: str, folder: Path) -> Iterator[Pools]:
    starting = Pools(dsn, folder)
    try:
        yield starting
    finally:
        starting.close()


@contextlib.contextmanager
def channel(folder: Path) -> Iterator[Channel]:
    found = Channel(folder)
    try:
        yield found
    finally:
        found.close()


# What the database says


def ledger(conn: Conn) -> None:
    """A table of the handlers' own, without anything that would hide a second row for a step."""
    conn.execute("CREATE TABLE ledger (run_id bigint NOT NULL, node text NOT NULL, amount bigint, note text)")


def rows(conn: Conn, what: str, *params: Any) -> list[tuple[Any, ...]]:
    return conn.execute(what.encode(), params or None).fetchall()


def value(conn: Conn, what: str, *params: Any) -> Any:
    return rows(conn, what, *params)[0][0]


def states(conn: Conn) -> dict[str, int]:
    return dict(rows(conn, "SELECT state, count(*) FROM cyclone_steps GROUP BY 1"))


def step(conn: Conn, run_id: str | int, columns: str) -> Any:
    """Columns of one step: a tuple of them, or the value of a single one."""
    (row,) = rows(conn, f"SELECT {columns} FROM cyclone_steps WHERE run_id = %s", int(run_id))
    return row if len(row) > 1 else row[0]


def completed(conn: Conn, count: int) -> bool:
    return states(conn) == {"completed": count}


def exact(conn: Conn, count: int) -> None:
    """Each of so many steps has exactly one row in the ledger, which is its own."""
    assert value(conn, "SELECT count(*) FROM ledger") == count
    assert (
        value(
            conn,
            "SELECT count(*) FROM (SELECT DISTINCT run_id, node FROM ledger) l JOIN cyclone_steps USING (run_id, node)",
        )
        == count
    )
