"""Fixtures and the run itself: the server, rounds, and what pytest-benchmark is told."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.server import Server

Figures = dict[str, float | None]
Timed = Callable[[], object]
Round = Generator[Timed, float, Figures]
"""One round: prepares, yields what is timed, is sent the seconds, returns figures."""

_postgres = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true")
    parser.addoption("--rounds", type=int, default=3)
    parser.addoption("--held", type=int, default=300_000)
    parser.addoption("--minutes", type=float, default=5.0)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    # The progress bar says it.
    return ("passed" if report.when == "call" else "", "", "") if report.passed else None


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # results are shown around, and the name of a machine is nobody's business
    machine_info["postgres"] = config.stash.get(_postgres, "?")
    machine_info["load"] = os.getloadavg()[0]


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Generator[Server]:
    with Server.start() as server:
        pytestconfig.stash[_postgres] = server.version
        yield server


@pytest.fixture(scope="session")
def _progress() -> Generator[Progress]:
    with bar() as progress:
        yield progress


def bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    # No refreshing thread: this process forks.
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)


class Meter:
    """One case: runs its rounds and gives their figures to pytest-benchmark."""

    def __init__(self, benchmark: BenchmarkFixture, progress: Progress, *, quick: bool, rounds: int) -> None:
        self.quick = quick
        self._benchmark = benchmark
        self._progress = progress
        self._rounds = 1 if quick else rounds

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def show(self, part: float) -> None:
        """How much of the round is done."""
        self._progress.update(self._bar, completed=part, refresh=True)

    def measure(
        self,
        case: str,
        one_round: Callable[[], Round],
        *,
        bars: Sequence[str],
        plots: dict[str, dict[str, Any]] | None = None,
        against: str = "",
        goal: tuple[str, str, float] | None = None,
        rounds: int | None = None,
    ) -> None:
        """`bars` are the figures to plot; `plots`, of lines by title, may be filled by the rounds and show the last.
        `against` names the yardstick; `goal` is a figure that should be ">=" or "<=" a limit. `rounds` is for a case
        that takes too long for as many as the others.
        """
        most = min(rounds or self._rounds, self._rounds)
        found: list[Figures] = []
        running: list[Round] = []
        seconds = 0.0
        self._bar = self._progress.add_task("", total=1.0)

        def setup() -> tuple[tuple[Timed], dict[str, object]]:
            self._progress.update(self._bar, description=f"{case}, round {len(found) + 1} of {most}")
            self.show(0.0)
            running.append(one_round())
            return (next(running[-1]),), {}

        def timed(run: Timed) -> None:
            nonlocal seconds
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin

        def teardown(run: Timed) -> None:
            try:
                running[-1].send(seconds)
            except StopIteration as end:
                found.append(end.value)

        try:
            self._benchmark.pedantic(timed, setup=setup, teardown=teardown, rounds=most)
        finally:
            self._progress.remove_task(self._bar)
            for one in running:
                one.close()
        self._benchmark.extra_info.update(
            case=case,
            against=against,
            goal=None if self.quick else goal,
            rounds=found,
            figures=medians(found),
            bars=bars,
            plots=plots or {},
        )


def medians(rounds: list[Figures]) -> Figures:
    """The median of each figure; None where a round has none."""
    found: Figures = {}
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        found[name] = None if None in values else statistics.median(v for v in values if v is not None)
    return found


@pytest.fixture
def meter(request: pytest.FixtureRequest, benchmark: BenchmarkFixture, _progress: Progress) -> Meter:
    option = request.config.getoption
    return Meter(benchmark, _progress, quick=option("--quick"), rounds=option("--rounds"))
