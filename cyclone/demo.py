"""A demonstration on real work: checks every installed Python package, file by file, and kills a worker on the way.

Each distribution is a run of a workflow: list its files, a step for each of them, one verdict on the whole, and a
report, which is the typed result. A step hashes its file and writes the verdict on the completion transaction, so the
verdict commits with the step or not at all. Halfway through, a worker gets SIGKILL. If everything holds, there is
exactly one verdict for each file and for each distribution afterwards; the tables of verdicts have no unique
constraint that would hide a second one.

    python -m cyclone.demo             on an embedded PostgreSQL that is gone afterwards
    CYCLONE_DSN=… python -m cyclone.demo     in a schema of its own of that database, dropped afterwards
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
from psycopg.sql import SQL, Identifier

from . import client, config, db, embedded, graph, migrate, registry
from .errors import CycloneError

if TYPE_CHECKING:
    from .context import Context

PROCS = 4
_LEAST_STEPS = 20_000
# A file of this size is read and hashed faster than a thread is asked to do it.
_SMALL = 128 << 10
_LOOK_S = 0.05
_QUIET_S = 1.0
_STUCK_S = 120.0


class File(msgspec.Struct, frozen=True):
    """One file of one distribution, as its RECORD lists it."""

    path: str
    algorithm: str
    expected: str
    round: int


class Distribution(msgspec.Struct, frozen=True):
    """So many of the files of an installed distribution. `tampered` is a changed copy to take for the first of them."""

    name: str
    files: int
    round: int
    tampered: str | None = None


class Findings(msgspec.Struct, frozen=True):
    """The verdicts on all files of a distribution, in their order."""

    name: str
    round: int
    verdicts: list[str]


class Summary(msgspec.Struct, frozen=True):
    """The report on one distribution: the result of its run."""

    name: str
    intact: bool
    counts: dict[str, int]


@registry.step("list_files", max_attempts=3)
async def list_files(ctx: Context, distribution: Distribution) -> list[File]:
    """The files that a distribution lists with their hashes."""
    found = _files_of(importlib.metadata.distribution(distribution.name))[: distribution.files]
    found = [msgspec.structs.replace(file, round=distribution.round) for file in found]
    if distribution.tampered is not None:
        found[0] = msgspec.structs.replace(found[0], path=distribution.tampered)
    return found


@registry.step("judge", max_attempts=3)
async def judge(ctx: Context, findings: Findings) -> bool:
    """Whether a distribution is what it was when it was installed; written like the verdicts on its files."""
    intact = set(findings.verdicts) <= {"matched"}
    tx = await ctx.completion_tx()
    await tx.execute(ctx.state.judge, (int(ctx.run_id), findings.round, findings.name, intact))
    return intact


class Judged(msgspec.Struct, frozen=True):
    """What the report is made of."""

    findings: Findings
    intact: bool


@registry.step("report", max_attempts=3)
async def report(ctx: Context, judged: Judged) -> Summary:
    """The report on one distribution."""
    return Summary(judged.findings.name, judged.intact, dict(Counter(judged.findings.verdicts)))


@registry.step("audit", max_attempts=3)
async def audit(ctx: Context, file: File) -> str:
    """Hashes a file and writes the verdict, in the transaction that completes the step."""
    verdict = await _verdict(file)
    tx = await ctx.completion_tx()
    await tx.execute(ctx.state.insert, (int(ctx.run_id), ctx.node, file.round, file.path, verdict))
    return verdict


@graph.workflow("audit_distribution")
def audit_distribution(g: graph.Graph[Distribution]) -> graph.Node[Summary]:
    """List the files, judge each, judge the whole, report."""
    files = g.run(list_files, g.input)
    verdicts = g.map(audit, files.output, max_items=100_000)
    findings = Findings(g.input.name, g.input.round, verdicts.output)
    verdict = g.run(judge, findings)
    return g.run(report, Judged(findings, verdict.output))


@registry.lifespan
async def statements(state: registry.State) -> AsyncGenerator[None]:
    """What a worker prepares once: the statements, with the schema that the pool was started for."""
    schema = config.settings({}, names=("schema",)).get("schema", "public")
    state.insert = (
        SQL("INSERT INTO {}.demo_verdicts VALUES (%s, %s, %s, %s, %s)").format(Identifier(schema)).as_bytes(None)
    )
    state.judge = (
        SQL("INSERT INTO {}.demo_distributions VALUES (%s, %s, %s, %s)").format(Identifier(schema)).as_bytes(None)
    )
    yield


async def _verdict(file: File) -> str:
    try:
        small = os.stat(file.path).st_size <= _SMALL
        found = _hash(file) if small else await asyncio.to_thread(_hash, file)
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "unreadable"
    return "matched" if found == file.expected else "mismatched"


def _hash(file: File) -> str:
    with open(file.path, "rb") as opened:
        digest = hashlib.file_digest(opened, file.algorithm).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


# The run


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the demonstration found. `exact`: there is one verdict for each file and each distribution and no other."""

    distributions: int
    runs: int
    intact: int
    files: int
    steps: int
    verdicts: int
    exact: bool
    matched: int
    mismatched: int
    missing: int
    unreadable: int
    mismatched_paths: Sequence[str]
    steps_per_second: float
    wait_p50_s: float
    wait_p99_s: float
    killed_pid: int
    killed_after: int
    executed_again: int
    workers_started: int
    survived: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; 0 if every step has exactly one verdict and the crash was survived."""
    parser = argparse.ArgumentParser(prog="python -m cyclone.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--tamper", action="store_true", help="let one file differ from its record, to see it found")
    parser.add_argument("--steps", type=int, default=_LEAST_STEPS, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=None, metavar="N", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        report = _run(args.steps, args.limit, tamper=args.tamper)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    except (CycloneError, psycopg.Error) as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print(report)
    return 0 if report.exact and report.survived else 1


def _run(least_steps: int, limit: int | None, *, tamper: bool) -> Report:
    with contextlib.ExitStack() as stack:
        installed = _installed(limit)
        files = sum(one.files for one in installed)
        if not files:
            raise CycloneError("no installed distribution lists its files with hashes, so there is nothing to check")
        if tamper:
            copy = _tampered(stack, _files_of(importlib.metadata.distribution(installed[0].name))[0])
            installed[0] = msgspec.structs.replace(installed[0], tampered=copy.path)
        # Again from the first file, until there are enough.
        total = max(least_steps, files)
        runs: list[Distribution] = []
        for number in range(1, -(-total // files) + 1):
            runs += _first(installed, total - (number - 1) * files, number)
        dsn = config.settings({}, names=("dsn",)).get("dsn")
        if dsn is None:
            _say("starting an embedded PostgreSQL")
            dsn = stack.enter_context(embedded.Server()).dsn()
        schema = stack.enter_context(_schema(dsn))
        conn = stack.enter_context(db.connect_sync(dsn, application_name="cyclone demo"))
        conn.execute(f"SET search_path = {schema}".encode())
        conn.execute("CREATE TABLE demo_verdicts (run_id bigint, node text, round integer, path text, verdict text)")
        conn.execute("CREATE TABLE demo_distributions (run_id bigint, round integer, name text, intact boolean)")

        _say(f"submitting {len(runs):,} runs for {len(installed):,} distributions with {files:,} files")
        with client.SyncClient(dsn, schema=schema) as submitter:
            audit_distribution.submit_many(submitter, runs)

        pool = stack.enter_context(contextlib.closing(_Pool(dsn, schema)))
        killed_pid, killed_after = _watch(conn, pool, total)
        pool.stop()
        return _report(
            conn,
            distributions=len(installed),
            runs=len(runs),
            files=files,
            total=total,
            killed_pid=killed_pid,
            killed_after=killed_after,
        )


def _installed(limit: int | None = None) -> list[Distribution]:
    """What is installed and lists its files with hashes; with a limit no more files than that."""
    names = dict.fromkeys(one.metadata["Name"] for one in importlib.metadata.distributions())
    counted = [Distribution(name, len(_files_of(importlib.metadata.distribution(name))), 0) for name in names if name]
    found = [one for one in counted if one.files]
    return found if limit is None else _first(found, limit, 0)


def _first(installed: Sequence[Distribution], files: int, number: int) -> list[Distribution]:
    """The distributions that have the first so many files, for one round."""
    found: list[Distribution] = []
    for one in installed:
        if files > 0:
            found.append(msgspec.structs.replace(one, files=min(one.files, files), round=number))
        files -= one.files
    return found


def _files_of(distribution: importlib.metadata.Distribution) -> list[File]:
    found: dict[str, File] = {}
    for file in distribution.files or ():
        if file.hash is not None and file.hash.mode in hashlib.algorithms_available:
            path = os.path.normpath(str(distribution.locate_file(file)))
            found[path] = File(path, file.hash.mode, file.hash.value, 0)
    return list(found.values())


def _tampered(stack: contextlib.ExitStack, file: File) -> File:
    """The record of a file with the path of a changed copy; what is installed is not touched."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cyclone-demo-")))
    copy = Path(shutil.copy(file.path, folder))
    copy.chmod(0o600)
    with copy.open("ab") as opened:
        opened.write(b"tampered")
    return msgspec.structs.replace(file, path=str(copy))


@contextlib.contextmanager
def _schema(dsn: str) -> Generator[str]:
    """A migrated schema that is dropped afterwards, so that nothing of the database's owner is mixed up with it."""
    name = f"cyclone_demo_{os.getpid()}"
    migrate.up(dsn, name)
    try:
        yield name
    finally:
        with db.connect_sync(dsn, application_name="cyclone demo") as conn:
            conn.execute(f"DROP SCHEMA {name} CASCADE".encode())


# A pool must not outlive a demonstration that was killed: the database goes too, and it would wait for that for ever.
_START = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != {parent}:
        sys.exit(1)
from cyclone.cli import pool_main
pool_main()
"""


class _Pool:
    """`cyclone-pool` as a process of its own, as a service manager would start it."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.lines: deque[str] = deque(maxlen=20)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START.format(parent=os.getpid()),
                "--procs",
                str(PROCS),
                "--metrics-port",
                "0",
                "cyclone.demo",
            ],
            env={**os.environ, "CYCLONE_DSN": dsn, "CYCLONE_SCHEMA": schema},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            address = re.search(r"metrics and health at (\S+)", line)
            if address is not None:
                _say(f"the pool serves {address[1]}/metrics")

    def check(self) -> None:
        """Raises if the pool has ended on its own."""
        code = self.process.poll()
        if code is not None:
            self._reader.join(5)
            raise CycloneError("\n    ".join([f"the pool ended with code {code}; its last lines were", *self.lines]))

    def stop(self) -> None:
        """Lets it drain."""
        self.process.terminate()
        if self.process.wait(60) != 0:
            self.check()

    def close(self) -> None:
        """Ends it, whatever it does: a second signal tells it to hurry."""
        for end, patience_s in ((self.process.terminate, 5), (self.process.terminate, 10), (self.process.kill, 10)):
            if self.process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience_s)
        # Children see that their parent is gone and end too; they hold the pipe until then.
        self._reader.join(10)


def _watch(conn: psycopg.Connection[tuple[Any, ...]], pool: _Pool, total: int) -> tuple[int, int]:
    """Waits until all steps have ended, and kills a worker halfway: its pid, and how many verdicts there were."""
    killed: tuple[int, int] | None = None
    done, changed = 0, time.monotonic()
    with _progress(total) as advance:
        while True:
            before, done = done, _number(conn, "SELECT count(*) FROM demo_verdicts")
            advance(done)
            now = time.monotonic()
            changed = now if done != before else changed
            if killed is None and done >= total // 2:
                victim = _busiest(conn)
                if victim is not None:
                    os.kill(victim, signal.SIGKILL)
                    killed = victim, done
            # Steps without a verdict are no reason to wait once they have ended too; but to know costs a look at all.
            quiet = now - changed > _QUIET_S
            if (done >= total or quiet) and not _number(
                conn, "SELECT count(*) FROM cyclone_steps WHERE finished_at IS NULL"
            ):
                break
            pool.check()
            if now - changed > _STUCK_S:
                errors = conn.execute("SELECT error FROM cyclone_steps WHERE error IS NOT NULL LIMIT 1").fetchall()
                raise CycloneError(
                    f"no verdict came for {_STUCK_S:g} s; {done:,} of {total:,} are there"
                    + "".join(f"; a step has failed: {error}" for (error,) in errors)
                )
            time.sleep(_LOOK_S)
    if killed is None:
        raise CycloneError("the steps had ended before a worker could be killed; there must be more of them")
    return killed


def _busiest(conn: psycopg.Connection[tuple[Any, ...]]) -> int | None:
    """The process id of the worker that holds the most steps."""
    row = conn.execute(
        """SELECT l.pid FROM cyclone_claims c JOIN cyclone_lives l ON l.id = c.life WHERE l.ended_at IS NULL
           GROUP BY l.id ORDER BY sum(cardinality(c.steps)) DESC LIMIT 1"""
    ).fetchone()
    return row[0] if row else None


def _report(
    conn: psycopg.Connection[tuple[Any, ...]],
    *,
    distributions: int,
    runs: int,
    files: int,
    total: int,
    killed_pid: int,
    killed_after: int,
) -> Report:
    steps = _number(conn, "SELECT count(*) FROM cyclone_steps WHERE kind = 'audit'")
    verdicts = _number(conn, "SELECT count(*) FROM demo_verdicts")
    # Both ways: a verdict for each completed step, and neither a second one nor one of a step that did not complete.
    once = _number(
        conn,
        """SELECT count(*) FROM cyclone_steps s JOIN (
               SELECT run_id, node FROM demo_verdicts GROUP BY 1, 2 HAVING count(*) = 1) v USING (run_id, node)
           WHERE s.state = 'completed'""",
    )
    counts = dict(conn.execute("SELECT verdict, count(*) FROM demo_verdicts GROUP BY 1").fetchall())
    mismatched = conn.execute(
        "SELECT DISTINCT path FROM demo_verdicts WHERE verdict = 'mismatched' ORDER BY 1 LIMIT 20"
    ).fetchall()
    rate, p50, p99, again = conn.execute(
        """SELECT count(*) / greatest(extract(epoch FROM max(finished_at) - min(started_at)), 0.001)::float8,
                  percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - ready_at)::float8),
                  percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - ready_at)::float8),
                  count(*) FILTER (WHERE reclaims > 0)
           FROM cyclone_steps WHERE kind = 'audit'"""
    ).fetchall()[0]
    buried = _number(conn, "SELECT count(*) FROM cyclone_lives WHERE ended_at IS NOT NULL AND pid = %s", killed_pid)
    # A run that ended, and the one verdict on its distribution.
    ended = _number(
        conn,
        """SELECT count(*) FROM cyclone_runs r JOIN (
               SELECT run_id FROM demo_distributions GROUP BY 1 HAVING count(*) = 1) d ON d.run_id = r.id
           WHERE r.state = 'completed'""",
    )
    judged = _number(conn, "SELECT count(*) FROM demo_distributions")
    exact = steps == verdicts == once == total and ended == judged == runs
    return Report(
        distributions=distributions,
        runs=ended,
        intact=_number(conn, "SELECT count(DISTINCT name) FROM demo_distributions WHERE intact"),
        files=files,
        steps=steps,
        verdicts=verdicts,
        exact=exact,
        matched=counts.get("matched", 0),
        mismatched=counts.get("mismatched", 0),
        missing=counts.get("missing", 0),
        unreadable=counts.get("unreadable", 0),
        mismatched_paths=[path for (path,) in mismatched],
        steps_per_second=rate,
        wait_p50_s=p50,
        wait_p99_s=p99,
        killed_pid=killed_pid,
        killed_after=killed_after,
        executed_again=again,
        workers_started=_number(conn, "SELECT count(*) FROM cyclone_lives"),
        survived=exact and buried == 1,
    )


def _number(conn: psycopg.Connection[tuple[Any, ...]], query: str, *params: object) -> int:
    row = conn.execute(query.encode(), params or None).fetchone()
    assert row is not None
    number: int = row[0]
    return number


# What is seen


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(total: int) -> Generator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("verdicts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    crash = f"worker {report.killed_pid} got SIGKILL after {report.killed_after:,} verdicts: "
    crash += "survived" if report.survived else "NOT survived"
    again = f"{report.executed_again:,} steps were executed again; {report.workers_started} workers in all"
    for name, value in (
        ("distributions", f"{report.distributions:,}, {report.intact:,} of them intact"),
        ("runs", f"{report.runs:,} completed"),
        ("files", f"{report.files:,}"),
        ("steps", f"{report.steps:,}"),
        ("verdicts", f"{report.verdicts:,}: " + ("each file exactly one" if report.exact else "NOT one for each file")),
        ("matched", f"{report.matched:,}"),
        ("mismatched", f"{report.mismatched:,}"),
        ("missing", f"{report.missing:,}"),
        ("unreadable", f"{report.unreadable:,}"),
        ("steps per second", f"{report.steps_per_second:,.0f}"),
        ("time in queue", f"p50 {report.wait_p50_s:.2f} s, p99 {report.wait_p99_s:.2f} s (as the lists of files come)"),
        ("crash", crash),
        ("", again),
    ):
        table.add_row(name, Text(value))
    console.print(table)
    for path in report.mismatched_paths:
        console.print(Text(f"differs from its record: {path}"))


if __name__ == "__main__":
    sys.exit(main())
