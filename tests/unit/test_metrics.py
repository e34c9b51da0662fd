"""Metrics: batches, many processes, and a directory that stays small. Each test measures in a process of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import timeit
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cyclone import metrics


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Runs something in a process of its own; it must end well by the end of the block."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        assert ended(pid) in (0, -signal.SIGKILL)


def ended(pid: int) -> int:
    """The exit code of a child once it has ended, 0 if somebody has asked before."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def alone(work: Callable[[], object]) -> None:
    with forked(work):
        pass


def figures(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def everything(n: int = 1) -> None:
    """One call of each kind."""
    metrics.claimed(n, 2 * n, 0.01, [("default", 0.5)] * n)
    metrics.ran({("default", "charge"): [0.01] * n})
    metrics.settled({("default", "charge", "completed"): n}, {("default", "charge", "timeout"): n}, n, 0.002)
    metrics.statement("claim_steps", 0.003)
    metrics.refused("lease lost", n)
    metrics.reclaimed("crash", n)
    metrics.lease_lost()
    metrics.tx_waited(0.1)
    metrics.tx_held(0.1)
    metrics.running(n)
    metrics.slots(100)
    metrics.depth({"default": (n, 3.5)})
    metrics.scheduled(n)
    metrics.unclaimable({("mail", 2): n})
    metrics.workers({"ready": n})
    metrics.restarts("SIGKILL", n)
    metrics.hook_failed()
    metrics.hook_dropped(n)


def test_nothing_happens_before_start() -> None:
    def work() -> None:
        everything()
        assert metrics.scrape() == b"" and metrics.fold() == 0

    alone(work)


@pytest.mark.parametrize("many", [False, True])
def test_every_metric_is_shown(tmp_path: Path, many: bool) -> None:
    def work() -> None:
        metrics.start(str(tmp_path) if many else None)
        metrics.start(None)  # a second call changes nothing
        everything(3)
        shown = figures(metrics.scrape())
        for name, value in {
            'cyclone_steps_total{kind="charge",outcome="completed",queue="default"}': 3,
            'cyclone_step_failures_total{error_kind="timeout",kind="charge",queue="default"}': 3,
            'cyclone_step_wait_seconds_count{queue="default"}': 3,
            'cyclone_step_wait_seconds_bucket{le="0.25",queue="default"}': 0,
            'cyclone_step_wait_seconds_bucket{le="1.0",queue="default"}': 3,
            'cyclone_step_run_seconds_sum{kind="charge",queue="default"}': 0.03,
            "cyclone_claims_total": 1,
            "cyclone_claimed_steps_total": 3,
            "cyclone_claim_seconds_count": 1,
            "cyclone_settle_seconds_count": 1,
            "cyclone_settle_size_sum": 3,
            'cyclone_statement_seconds_count{statement="claim_steps"}': 1,
            'cyclone_refused_total{reason="lease lost"}': 3,
            'cyclone_reclaims_total{reason="crash"}': 3,
            "cyclone_leases_lost_total": 1,
            "cyclone_completion_tx_wait_seconds_count": 1,
            "cyclone_completion_tx_held_seconds_count": 1,
            "cyclone_steps_running": 3,
            "cyclone_slots": 100,
            'cyclone_queue_depth{queue="default"}': 3,
            'cyclone_queue_oldest_seconds{queue="default"}': 3.5,
            "cyclone_steps_scheduled": 3,
            'cyclone_steps_unclaimable{kind="mail",version="2"}': 3,
            'cyclone_workers{state="ready"}': 3,
            'cyclone_worker_restarts_total{reason="SIGKILL"}': 3,
        }.items():
            assert shown[name] == pytest.approx(value), name

    alone(work)


def test_a_batch_is_observed_as_its_values_one_by_one() -> None:
    def work() -> None:
        import prometheus_client as prom

        registry = prom.CollectorRegistry()
        bounds = (0.1, 1.0, 10.0)
        one = prom.Histogram("one", "one", buckets=bounds, registry=registry)
        bulk = prom.Histogram("bulk", "bulk", buckets=bounds, registry=registry)
        batch = metrics._Histogram(bulk)
        assert batch._buckets is not None and batch._sum is not None, "the library's insides have changed"
        for size in (0, 1, 2, 50):
            values = [random.choice((0.0, 0.1, 0.5, 1.0, 9.9, 10.0, 11.0, 1e9)) for _ in range(size)]
            batch.observe(values)
            for value in values:
                one.observe(value)
        shown = figures(prom.generate_latest(registry))
        for name, value in shown.items():
            if name.startswith("one") and "created" not in name:
                assert shown["bulk" + name.removeprefix("one")] == pytest.approx(value)
        batch._buckets = None  # as if they had changed: slower, and the same
        batch.observe([0.5])
        assert figures(prom.generate_latest(registry))["bulk_count"] == shown["bulk_count"] + 1

    alone(work)


def test_a_step_costs_little_to_measure(tmp_path: Path) -> None:
    def work() -> None:
        metrics.start(str(tmp_path))
        times = {("default", "charge"): [random.expovariate(20) for _ in range(200)]}
        step_s = min(timeit.repeat(lambda: metrics.ran(times), number=20, repeat=10)) / 20 / 200
        assert step_s < 1e-6, step_s  # measured: 0.15 µs

    alone(work)


def test_labels_are_bounded_and_a_scrape_survives_them() -> None:
    def work() -> None:
        metrics.start(None)
        for number in range(metrics._MAX_SERIES + 500):
            metrics.settled({("default", f"kind {number}", "completed"): 1}, {}, 1, 0.0)
        metrics.ran({("q" * 500, 'a "quoted"\nname\\ \udcff ü'): [0.1]})
        text = metrics.scrape()
        shown = figures(text)
        assert shown['cyclone_steps_total{kind="(other)",outcome="(other)",queue="(other)"}'] == 500
        assert sum(name.startswith("cyclone_steps_total") for name in shown) == metrics._MAX_SERIES + 1
        assert b'a \\"quoted\\"\\nname\\\\ ? ' in text and b"q" * 129 not in text

    alone(work)


def test_a_queue_that_is_empty_again_goes_to_zero() -> None:
    def work() -> None:
        metrics.start(None)
        metrics.depth({"a": (5, 1.0), "b": (6, 2.0)})
        metrics.depth({"b": (7, 3.0)})
        shown = figures(metrics.scrape())
        assert shown['cyclone_queue_depth{queue="a"}'] == shown['cyclone_queue_oldest_seconds{queue="a"}'] == 0
        assert shown['cyclone_queue_depth{queue="b"}'] == 7
        metrics.depth({f"q{number}": (1, float(number)) for number in range(metrics._MAX_SERIES + 100)})
        shown = figures(metrics.scrape())
        others = [name for name in shown if "(other)" in name]
        assert shown['cyclone_queue_depth{queue="(other)"}'] == 102 and len(others) == 2
        assert shown['cyclone_queue_oldest_seconds{queue="(other)"}'] == metrics._MAX_SERIES + 99

    alone(work)


@pytest.mark.contract("FM-077")
def test_the_dead_are_counted_and_their_gauges_are_not(tmp_path: Path) -> None:
    def work() -> None:
        for n in (1, 2):
            alone(lambda n=n: (metrics.start(str(tmp_path)), everything(n)))
        ready, told = os.pipe()

        def living() -> None:
            metrics.start(str(tmp_path))
            everything(10)
            os.write(told, b"\0")
            signal.pause()

        with forked(living) as pid:
            os.read(ready, 1)
            metrics.start(str(tmp_path))
            for _ in range(2):
                shown = figures(metrics.scrape())
                assert shown["cyclone_claimed_steps_total"] == 13
                assert shown['cyclone_step_run_seconds_count{kind="charge",queue="default"}'] == 13
                removed = metrics.fold()
            assert removed == 0
            assert shown["cyclone_steps_running"] == 10 and shown["cyclone_slots"] == 100
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) == -signal.SIGKILL
            metrics.fold()
            shown = figures(metrics.scrape())
            assert shown["cyclone_claimed_steps_total"] == 13
            assert shown["cyclone_steps_running"] == shown["cyclone_slots"] == 0

    alone(work)


def test_a_fold_that_was_killed_is_finished_and_doubles_nothing(tmp_path: Path) -> None:
    left_behind, own = tmp_path / "left", tmp_path / "own"
    left_behind.mkdir()
    own.mkdir()

    def work() -> None:
        alone(lambda: (metrics.start(str(left_behind)), everything(4)))
        metrics.start(str(own))

        class Killed(Exception):
            pass

        # Killed before each change that a fold makes to the directory, and then begun anew.
        left = 0

        def mortal(change: Callable[..., Any]) -> Callable[..., Any]:
            def changing(path: Path, *args: Any, **options: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return change(path, *args, **options)

            return changing

        for survived in range(60):
            left = survived
            directory = tmp_path / f"copy{survived}"
            shutil.copytree(left_behind, directory)
            metrics._directory = directory
            with pytest.MonkeyPatch.context() as patch:
                for name in ("unlink", "replace", "write_text"):
                    patch.setattr(Path, name, mortal(getattr(Path, name)))
                try:
                    metrics.fold()
                    done = True
                except Killed:
                    done = False
            metrics.fold()
            assert figures(metrics.scrape())["cyclone_claimed_steps_total"] == 4
            assert {path.name for path in directory.iterdir()} == {"counter_dead.db", "histogram_dead.db"}
            if done:
                break
        assert done and survived > 5

    alone(work)


@pytest.mark.contract("FM-076")
def test_after_2000_replacements_the_directory_is_small_and_a_scrape_fast(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "pool").mkdir()

    def work() -> None:
        def busy() -> None:
            metrics.start(str(kept))
            for kind in range(20):
                metrics.ran({("default", f"kind {kind}"): [0.01, 0.1]})
                metrics.settled({("default", f"kind {kind}", "completed"): 1}, {}, 1, 0.01)
                metrics.claimed(1, 1, 0.01, [(f"queue {kind}", 1.0)])
            metrics.running(1)

        alone(busy)
        left = {path: path.stem.rpartition("_")[0] for path in kept.iterdir()}
        metrics.start(str(tmp_path / "pool"))
        for generation in range(20):
            for number in range(100):  # as if so many had come and gone, under numbers that no process has
                for path, prefix in left.items():
                    os.link(path, tmp_path / "pool" / f"{prefix}_{50_000_000 + generation * 100 + number}.db")
            metrics.fold()
        assert len(list((tmp_path / "pool").iterdir())) == 2 + len(left)  # those of the dead, and our own
        for number in range(17):  # and those that live
            for path, prefix in left.items():
                os.link(path, tmp_path / "pool" / f"{prefix}_living{number}.db")
        text = b""

        def scrape() -> None:
            nonlocal text
            text = metrics.scrape()

        scrape_s = min(timeit.repeat(scrape, number=1, repeat=20))
        assert scrape_s < 0.2, scrape_s
        assert figures(text)['cyclone_steps_total{kind="kind 3",outcome="completed",queue="default"}'] == 2000 + 17

    alone(work)


def test_a_file_that_was_only_just_created_is_no_error(tmp_path: Path) -> None:
    def work() -> None:
        metrics.start(str(tmp_path))
        everything()
        (tmp_path / "counter_50000001.db").touch()
        assert figures(metrics.scrape())["cyclone_claims_total"] == 1
        metrics.fold()
        assert not (tmp_path / "counter_50000001.db").exists()
        assert figures(metrics.scrape())["cyclone_claims_total"] == 1

    alone(work)


def test_measuring_together_works_although_the_library_was_imported_before(tmp_path: Path) -> None:
    def work() -> None:
        import prometheus_client  # noqa: F401

        def child() -> None:
            metrics.start(str(tmp_path))
            everything()

        alone(child)
        metrics.start(str(tmp_path))
        assert figures(metrics.scrape())["cyclone_claims_total"] == 1

    alone(work)
