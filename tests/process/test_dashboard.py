"""What the dashboard asks for is what a pool serves while it works, fails and loses a worker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psycopg

DASHBOARD = json.loads((Path(__file__).parents[2] / "grafana" / "cyclone-pool.json").read_text())

# Shown when a result comes too late, which a test would have to go to lengths for.
RARE = {"cyclone_refused_total"}

JOBS = """
import asyncio
import cyclone
from cyclone import Context

@cyclone.step("good")
async def good(ctx: Context) -> None:
    await ctx.completion_tx()

@cyclone.step("bad", max_attempts=1)
async def bad(ctx: Context) -> None:
    raise ValueError("no")

@cyclone.step("endless")
async def endless(ctx: Context) -> None:
    await asyncio.Event().wait()

@cyclone.step("unknown", queue="default")
async def unknown(ctx: Context) -> None: ...

known = cyclone.Registry()
for step in (good, bad, endless):
    known.include(step)
"""


def asked_for() -> set[str]:
    text = json.dumps([target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())])
    return set(re.findall(r"\bcyclone_\w+", text))


def test_a_pool_serves_what_the_dashboard_shows(dsn: str, conn: psycopg.Connection, tmp_path: Path) -> None:
    (tmp_path / "dashboard_jobs.py").write_text(JOBS)
    env = {**os.environ, "CYCLONE_DSN": dsn}
    command = [sys.executable, "-c", "from cyclone import cli; cli.main()"]
    subprocess.run([*command, "migrate", "register", "dashboard_jobs"], cwd=tmp_path, env=env, check=True)
    for step in ("good", "bad", "endless", "unknown"):
        subprocess.run([*command, "enqueue", step, "null"], cwd=tmp_path, env=env, check=True)
    pool = subprocess.Popen(
        [
            *(sys.executable, "-c", "from cyclone import cli; cli.pool_main()", "--procs", "1", "--metrics-port", "0"),
            *("--drain-timeout", "0s", "dashboard_jobs:known"),
        ],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert pool.stderr is not None
        address = next(found[1] for line in pool.stderr if (found := re.search(r"(http://\S+)", line)))
        ended = "SELECT count(*) FROM cyclone_steps WHERE finished_at IS NOT NULL OR state = 'running'"
        while conn.execute(ended).fetchone() != (3,):
            conn.execute("SELECT pg_sleep(0.02)")
        (pid,) = conn.execute("SELECT pid FROM cyclone_lives WHERE ended_at IS NULL").fetchall()[0]
        os.kill(pid, signal.SIGKILL)
        missing = asked_for()
        while missing - RARE:
            with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
                served = set(re.findall(r"^(\w+)[{ ]", answer.read().decode(), re.M))
            missing = asked_for() - served
            conn.execute("SELECT pg_sleep(0.05)")
    finally:
        pool.terminate()
        pool.communicate(timeout=60)
