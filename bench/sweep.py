"""`python -m bench.sweep`: which settings of a pool work off waiting steps the fastest, on this machine."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cyclone
from bench import drains, report
from bench.conftest import Figures, bar, medians
from bench.server import Server, costs
from cyclone import config

Setting = dict[str, str]
"""Values as they stand on the command line, by option."""

_HERE = Path(__file__).parent
# What is tried unless the command line says otherwise, and how one value is read.
_AXES: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "procs": (f"{os.cpu_count() or 1},{2 * (os.cpu_count() or 1)}", config.parse_count),
    "concurrency": ("100", config.parse_count),
    "claim_batch": ("auto,200", config.parse_batch),
    "settle_batch": ("100,500", config.parse_batch),
    "settle_linger": ("0,2ms,5ms", config.parse_seconds),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweep", description="Drains with each combination of settings; see bench/README.md."
    )
    for name, (default, _) in _AXES.items():
        parser.add_argument(option(name), default=default, metavar="LIST", help=f"default {default}")
    parser.add_argument("--count", type=int, default=50_000, help="steps of each drain (default 50000)")
    parser.add_argument("--rounds", type=int, default=2, help="drains with each combination (default 2)")
    parser.add_argument("--json", action="store_true", help="write the result to standard output instead of a table")
    args = parser.parse_args()
    tried = settings({name: config.parse_list(name, getattr(args, name)) for name in _AXES})
    try:
        for one in tried:
            cyclone.Pool("bench.work:handlers", dsn="", **options(one))
    except ValueError as exc:
        parser.error(str(exc))
    if args.count < 1 or args.rounds < 1:
        parser.error("--count and --rounds must be at least 1")

    cases = sweep(tried, args.count, args.rounds)
    folder = _HERE / "results" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-sweep"
    folder.mkdir(parents=True)
    result = json.dumps({"best": best(cases)["setting"], "count": args.count, "cases": cases}, indent=2)
    (folder / "result.json").write_text(result)
    (folder / "sweep.svg").write_text(report.bars("sweep", cases))
    if args.json:
        print(result)
    else:
        console = report.console()
        console.print(report.table("sweep", cases))
        line = " ".join(f"{option(name)} {value}" for name, value in best(cases)["setting"].items())
        console.print(f"The best: {line}", highlight=False)
        console.print(f"Results and plot are in {os.path.relpath(folder)}", highlight=False)
    return 0


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def settings(lists: dict[str, list[str]]) -> list[Setting]:
    """Every combination."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def options(setting: Setting) -> dict[str, Any]:
    """A setting as arguments of a pool."""
    return {name: _AXES[name][1](option(name), value) for name, value in setting.items()}


def sweep(tried: list[Setting], count: int, rounds: int) -> list[report.Case]:
    """A case for each setting, the fastest first. Rounds go through them in an order of chance, so that a machine that
    grows slower meanwhile favours none.
    """
    found: list[list[Figures]] = [[] for _ in tried]
    names = named(tried)
    with Server.start() as server, bar() as progress:
        shown = progress.add_task("", total=len(tried) * rounds)
        for _ in range(rounds):
            for n in random.sample(range(len(tried)), len(tried)):
                progress.update(shown, description=names[n], refresh=True)
                with drains.pool(server, count, **options(tried[n])).ready() as drain:
                    with server.counting(drain.crew.pids) as used:
                        rate = drain.rate(lambda _: progress.refresh())
                    found[n].append({"steps/s": rate, **costs(used, count, "workers")})
                progress.update(shown, advance=1, refresh=True)
    return ranked([case(*one) for one in zip(names, tried, found, strict=True)])


def case(name: str, setting: Setting, rounds: list[Figures]) -> report.Case:
    return {
        "case": name, "setting": setting, "against": "", "goal": None, "rounds": rounds, "figures": medians(rounds),
        "bars": ["steps/s"],
    }  # fmt: skip


def ranked(cases: list[report.Case]) -> list[report.Case]:
    return sorted(cases, key=lambda one: one["figures"]["steps/s"], reverse=True)


def best(cases: list[report.Case]) -> report.Case:
    return ranked(cases)[0]


def named(tried: list[Setting]) -> list[str]:
    """Each setting by what differs between them."""
    differ = [name for name in tried[0] if len({one[name] for one in tried}) > 1]
    return [", ".join(f"{name} {one[name]}" for name in differ) or "as given" for one in tried]


if __name__ == "__main__":
    sys.exit(main())
