"""`python -m bench.sweep`: which settings of a pool work off waiting steps the fastest, on this machine."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import drains, report
from bench.conftest import bar
from bench.server import Server
from cyclone import config

Setting = dict[str, Any]

_HERE = Path(__file__).parent
# In the order of the columns: what is tried unless the command line says otherwise, and how one value is read.
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
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, metavar="LIST", help=f"default {default}")
    parser.add_argument("--count", type=int, default=50_000, help="steps of each drain (default 50000)")
    parser.add_argument("--rounds", type=int, default=2, help="drains with each combination (default 2)")
    parser.add_argument("--json", action="store_true", help="write the result to standard output instead of a table")
    args = parser.parse_args()
    try:
        lists = {
            name: [parse(f"--{name}", one) for one in config.parse_list(name, getattr(args, name))]
            for name, (_, parse) in _AXES.items()
        }
        for one in settings(lists):
            config.worker_options(**{key: value for key, value in one.items() if key != "procs"})
    except (TypeError, ValueError) as exc:
        parser.error(str(exc))
    if args.count < 1 or args.rounds < 1:
        parser.error("--count and --rounds must be at least 1")

    cases = sweep(settings(lists), args.count, args.rounds)
    folder = _HERE / "results" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-sweep"
    folder.mkdir(parents=True)
    result = json.dumps({"best": best(cases)["setting"], "count": args.count, "cases": cases}, indent=2)
    (folder / "result.json").write_text(result)
    (folder / "sweep.svg").write_text(report.bars("sweep", cases))
    if args.json:
        print(result)
    else:
        console = Console()
        console.print(report.table("sweep", cases))
        console.print(f"The best: {named(best(cases)['setting'])}", highlight=False)
        console.print(f"Results and plot are in {os.path.relpath(folder)}", highlight=False)
    return 0


def settings(lists: dict[str, list[Any]]) -> list[Setting]:
    """Every combination."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def sweep(tried: list[Setting], count: int, rounds: int) -> list[report.Case]:
    """A case for each setting, the fastest first. Rounds go through them in an order of chance, so that a machine that
    grows slower meanwhile favours none.
    """
    rates: dict[int, list[float]] = {n: [] for n in range(len(tried))}
    with Server.start() as server, bar() as progress:
        shown = progress.add_task("", total=len(tried) * rounds)
        for _ in range(rounds):
            for n in random.sample(range(len(tried)), len(tried)):
                progress.update(shown, description=named(tried[n]), refresh=True)
                with drains.pool(server, count, **tried[n]).ready() as drain:
                    rates[n].append(drain.rate(lambda _: progress.refresh()))
                progress.update(shown, advance=1, refresh=True)
    return ranked([case(setting, rates[n]) for n, setting in enumerate(tried)])


def case(setting: Setting, rates: list[float]) -> report.Case:
    return {
        "case": named(setting),
        "setting": setting,
        "against": "",
        "goal": None,
        "figures": {"steps/s": statistics.median(rates)},
        "rounds": [{"steps/s": rate} for rate in rates],
        "bars": ["steps/s"],
    }


def ranked(cases: list[report.Case]) -> list[report.Case]:
    return sorted(cases, key=lambda one: one["figures"]["steps/s"], reverse=True)


def best(cases: list[report.Case]) -> report.Case:
    return ranked(cases)[0]


def named(setting: Setting) -> str:
    return ", ".join(f"{name} {'auto' if value is None else value}" for name, value in setting.items())


if __name__ == "__main__":
    sys.exit(main())
