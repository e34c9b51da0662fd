"""Where it is measured: the server, fresh databases on it, pgbench, and what the machine and the server counted."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo, sql

import cyclone
from bench import work
from cyclone import embedded, migrate

# As the servers of production are: nothing that was committed may be lost. Everything else is PostgreSQL's default.
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "8GB", "max_connections": "200"}
_LEDGER = "CREATE TABLE bench_ledger (run bigint NOT NULL, note text NOT NULL)"
# What enqueueing stores, by the server alone.
_FILL_STEPS = """\
INSERT INTO cyclone_steps (id, run_id, ord, input, ready_at, state, node, kind, queue, max_attempts)
SELECT n, n, n, %(input)s::jsonb, now(), 'available', k.kinds[1 + n %% cardinality(k.kinds)],
       k.kinds[1 + n %% cardinality(k.kinds)], k.queues[1 + n %% cardinality(k.queues)], 5
FROM generate_series(1, %(count)s::bigint) AS n, (SELECT %(kinds)s::text[] AS kinds, %(queues)s::text[] AS queues) k
"""
_FILL_READY = """\
INSERT INTO cyclone_ready (lane, rank, ord, step)
SELECT k.queues[1 + n %% cardinality(k.queues)], 11, n, n
FROM generate_series(1, %(count)s::bigint) AS n, (SELECT %(queues)s::text[] AS queues) k
"""


@dataclass
class Counters:
    """What was used up between two looks. CPU is None where this machine does not tell."""

    cpu_work_s: float | None
    cpu_server_s: float | None
    wal_bytes: int

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            _plus(self.cpu_work_s, other.cpu_work_s),
            _plus(self.cpu_server_s, other.cpu_server_s),
            self.wal_bytes + other.wal_bytes,
        )

    @property
    def cpu_s(self) -> float | None:
        return _plus(self.cpu_work_s, self.cpu_server_s)


class Server:
    """A server on which databases may be created: the embedded one, or the one of `CYCLONE_BENCH_DSN`."""

    def __init__(self, dsn: str, pgbench: str | None) -> None:
        self.dsn = dsn
        self.pgbench = pgbench
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._names = (f"cyclone_bench_{os.getpid()}_{number}" for number in itertools.count())
        self._loaded: dict[tuple[str, int], str] = {}
        self._postmaster = self._find_postmaster()

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Generator[Server]:
        with contextlib.ExitStack() as stack:
            dsn = os.environ.get("CYCLONE_BENCH_DSN")
            if dsn:
                pgbench = shutil.which("pgbench")
            else:
                here = stack.enter_context(embedded.Server(version=18, settings=SETTINGS))
                dsn, program = here.dsn(), here.bindir / "pgbench"
                pgbench = str(program) if program.exists() else None
            server = cls(dsn, pgbench)
            stack.callback(server.close)
            yield server

    def close(self) -> None:
        for name in self._loaded.values():
            self._drop(name)
        self._admin.close()

    @property
    def version(self) -> str:
        return self._admin.info.parameter_status("server_version") or "?"

    @contextlib.contextmanager
    def database(self, step: cyclone.Step[work.Message, Any] = work.noop, count: int = 0) -> Generator[str]:
        """The DSN of a fresh database in which so many steps wait. They were enqueued once, by the public API, and are
        copied; each copy is read into memory and the server's WAL is flushed, so all rounds begin alike.
        """
        if (step.name, count) not in self._loaded:
            self._loaded[step.name, count] = self._load(step, count)
        name = next(self._names)
        self._admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
                sql.Identifier(name), sql.Identifier(self._loaded[step.name, count])
            )
        )
        try:
            dsn = conninfo.make_conninfo(self.dsn, dbname=name)
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("SELECT count(*) FROM cyclone_steps")
                conn.execute("SELECT count(*) FROM cyclone_ready")
                conn.execute("CHECKPOINT")
            yield dsn
        finally:
            self._drop(name)

    @contextlib.contextmanager
    def filled(
        self, count: int, kinds: Sequence[str] = ("noop",), queues: Sequence[str] = ("default",)
    ) -> Generator[str]:
        """The same with steps that the server stores itself, so that there may be any number and none passes through
        this process: of kinds and queues in turn, all with the same input.
        """
        given = {
            "input": work.noop.input_codec.encode(work.message(0)).decode(),
            "count": count, "kinds": list(kinds), "queues": list(queues),
        }  # fmt: skip

        def run(query: str) -> None:
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(query.encode(), given)

        with self.database() as dsn:
            with ThreadPoolExecutor() as both:  # ten million take minutes
                list(both.map(run, (_FILL_STEPS, _FILL_READY)))
            for query in (
                "SELECT setval('cyclone_ids', %(count)s)",
                "VACUUM ANALYZE cyclone_ready, cyclone_steps",
                "CHECKPOINT",
            ):
                run(query)
            yield dsn

    def _load(self, step: cyclone.Step[work.Message, Any], count: int) -> str:
        name = next(self._names)
        self._admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        dsn = conninfo.make_conninfo(self.dsn, dbname=name)
        migrate.up(dsn)
        with cyclone.SyncClient(dsn) as client:
            step.enqueue_many(client, [work.message(seq) for seq in range(count)])
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(_LEDGER)
            conn.execute("VACUUM ANALYZE")
        return name

    def _drop(self, name: str) -> None:
        self._admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def run_pgbench(self, dsn: str, script: str, *, clients: int, seconds: int) -> float | None:
        """Transactions a second of a script, with prepared statements; None where there is no pgbench."""
        if self.pgbench is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "script.sql")
            file.write_text(script)
            done = subprocess.run(
                [self.pgbench, "-n", "-M", "prepared", "-c", str(clients), "-j", str(min(clients, work.PROCS)),
                 "-T", str(seconds), "-f", file, dsn],
                capture_output=True, text=True,
            )  # fmt: skip
        found = re.search(r"^tps = ([\d.]+)", done.stdout, re.M)
        if done.returncode or found is None:
            raise RuntimeError(f"pgbench failed: {done.stderr.strip()}")
        return float(found[1])

    @contextlib.contextmanager
    def counting(self, pids: Iterable[int]) -> Generator[Counters]:
        """What these processes and the server use up within the block."""
        pids = list(pids)
        server = [self._postmaster] if self._postmaster else []
        work_s, server_s, at = _cpu_s(pids), _cpu_s(server), self._wal()
        counters = Counters(None, None, 0)
        yield counters
        counters.wal_bytes = self._wal() - at
        counters.cpu_work_s = _less(_cpu_s(pids), work_s)
        counters.cpu_server_s = _less(_cpu_s(server), server_s)

    def _wal(self) -> int:
        return int(self.ask("SELECT pg_current_wal_insert_lsn() - '0/0'"))

    def ask(self, query: str, *params: object) -> float:
        """One number."""
        (number,) = self._admin.execute(query.encode(), params or None).fetchone() or (0,)
        return float(number)

    def _find_postmaster(self) -> int | None:
        """The server's first process, if it runs on this machine."""
        parent = _table().get(self._admin.info.backend_pid, (0, 0, ""))[0]
        return parent if _table().get(parent, (0, 0, ""))[2].startswith("postgres") else None


def costs(used: Counters, count: int, who: str) -> dict[str, float | None]:
    """Counters as figures of a case in which so many steps were worked on."""
    return {
        f"µs/step {who}": None if used.cpu_work_s is None else used.cpu_work_s / count * 1e6,
        "µs/step server": None if used.cpu_server_s is None else used.cpu_server_s / count * 1e6,
        "WAL B/step": used.wal_bytes / count,
    }


def by_cpu(used: Counters, count: int, yardstick: Counters, yardstick_count: int) -> float | None:
    """The ratio to a yardstick as it would be if only CPU mattered: what it used for a step, by what was used here."""
    if used.cpu_s is None or yardstick.cpu_s is None:
        return None
    return (yardstick.cpu_s / yardstick_count) / (used.cpu_s / count) if used.cpu_s else None


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


# CPU, as Linux tells it


def _table() -> dict[int, tuple[int, int, str]]:
    """Parent, clock ticks (with those of children that have ended) and name of each process."""
    found: dict[int, tuple[int, int, str]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            head, _, tail = file.read_text().rpartition(")")
            pid, _, name = head.partition(" (")
            fields = tail.split()
            found[int(pid)] = (int(fields[1]), sum(map(int, fields[11:15])), name)
    return found


def _cpu_s(roots: list[int]) -> float | None:
    """CPU of processes and all their descendants."""
    table = _table()
    if not roots or not table:
        return None
    todo, ticks = list(roots), 0
    while todo:
        pid = todo.pop()
        ticks += table.get(pid, (0, 0, ""))[1]
        todo += [child for child, (parent, _, _) in table.items() if parent == pid]
    return ticks / os.sysconf("SC_CLK_TCK")


def _plus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
