"""What is measured. Every function here is called once a batch, never once a step, and does nothing before `start`.

prometheus-client settles on import whether it works for one process or for many, so it is imported in `start` and
nowhere else. For a pool it keeps each process's figures in small files of its own, which anybody can add up; here that
is the sweeper process, when it is scraped.

Two things about those files are not left to the library:

- It keeps the files of dead processes for ever, and reads them all on each scrape. `fold` adds those of dead processes
  into one file per type and removes them, so the directory and a scrape stay small however many workers were replaced.
- A histogram costs 2 µs for each value observed. `_Histogram.observe` sorts a batch and adds each bucket's share at
  once: about 0.1 µs a value from some hundred values on. For that it reaches for two attributes that are private to the
  library; should they be gone, values are observed one by one (tests/unit/test_metrics.py notices).

What a process that was killed had in hand is forgotten with it: gauges that describe a process are added up over the
living ones only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import operator
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import prometheus_client

log = logging.getLogger("cyclone")

# Steps wait and run anywhere between a millisecond and hours; what the engine does itself takes less than a second.
_LONG: Final = (0.001, 0.005, 0.02, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0, 300.0, 1800.0, 7200.0)
_SHORT: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_SIZES: Final = (1.0, 3.0, 10.0, 30.0, 100.0, 200.0, 500.0, 1000.0)

# Kinds and queues are the user's words, and a program that makes names up must not fill memory, directory and scrape:
# a metric has so many sets of labels per process, and whatever comes later is counted under this one word.
_MAX_SERIES: Final = 1000
_MAX_LABEL: Final = 128
_OTHER: Final = "(other)"

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Value(Protocol):
    def inc(self, amount: float) -> None: ...


T = TypeVar("T")


class _Series(Generic[T]):
    """The labelled children of one metric. The library's own lookup costs 1.5 µs and has no bound."""

    def __init__(self, make: Callable[..., T], width: int) -> None:
        self._make = make
        self._width = width
        self._children: dict[tuple[str, ...], T] = {}
        if not width:
            self.get(())

    def get(self, labels: tuple[str, ...]) -> T:
        child = self._children.get(labels)
        if child is None:
            labels = tuple(_fit(value) for value in labels)
            if len(self._children) >= _MAX_SERIES:
                labels = (_OTHER,) * self._width
            child = self._children.get(labels)
            if child is None:
                child = self._children[labels] = self._make(*labels)
        return child


def _fit(value: object) -> str:
    # A lone surrogate would break each scrape from then on.
    text = str(value)[:_MAX_LABEL]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class _Histogram:
    def __init__(self, child: prometheus_client.Histogram) -> None:
        inner = vars(child)
        self._child = child
        self._buckets: list[_Value] | None = inner.get("_buckets")
        self._sum: _Value | None = inner.get("_sum")
        self._bounds: list[float] = inner.get("_upper_bounds") or []

    def observe(self, values: Iterable[float]) -> None:
        ordered = sorted(values)
        if not ordered:
            return
        if self._buckets is None or self._sum is None or len(self._buckets) != len(self._bounds):
            for value in ordered:
                self._child.observe(value)
            return
        below = 0
        for bucket, bound in zip(self._buckets, self._bounds, strict=True):
            upto = bisect_right(ordered, bound, below)
            if upto > below:
                bucket.inc(upto - below)
                below = upto
                if below == len(ordered):
                    break
        self._sum.inc(sum(ordered))


class _Level:
    """A gauge of which each report is the whole truth: labels that are not in it any more go to zero."""

    def __init__(
        self,
        make: Callable[..., prometheus_client.Gauge],
        width: int,
        combine: Callable[[float, float], float] = operator.add,
    ) -> None:
        self._series = _Series(make, width)
        self._combine = combine
        self._shown: set[tuple[str, ...]] = set()

    def show(self, values: Mapping[tuple[str, ...], float]) -> None:
        fitted: dict[int, tuple[prometheus_client.Gauge, float]] = {}
        for labels, value in values.items():
            gauge = self._series.get(labels)
            shared = fitted.get(id(gauge))
            fitted[id(gauge)] = (gauge, value if shared is None else self._combine(shared[1], value))
        for labels in self._shown - values.keys():
            gauge = self._series.get(labels)
            fitted.setdefault(id(gauge), (gauge, 0.0))
        for gauge, value in fitted.values():
            gauge.set(value)
        # Bounded as well: labels past the bound share one gauge, which needs no reminder of its own.
        self._shown = set(list(values)[: _MAX_SERIES + 1])


class _Metrics:
    """All metrics, made once per process."""

    def __init__(self) -> None:
        import prometheus_client as prom

        def counter(name: str, text: str, *labels: str) -> _Series[prometheus_client.Counter]:
            metric = prom.Counter(name, text, labels)
            return _Series(metric.labels if labels else lambda: metric, len(labels))

        def histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> _Series[_Histogram]:
            metric = prom.Histogram(name, text, labels, buckets=bounds)
            return _Series(lambda *values: _Histogram(metric.labels(*values) if labels else metric), len(labels))

        def gauge(name: str, text: str, *labels: str, mode: Any = "livemostrecent") -> Callable[..., Any]:
            metric = prom.Gauge(name, text, labels, multiprocess_mode=mode)
            return metric.labels if labels else lambda: metric

        self.steps = counter("cyclone_steps_total", "Executions that were settled", "queue", "kind", "outcome")
        self.failures = counter("cyclone_step_failures_total", "Failed executions", "queue", "kind", "error_kind")
        self.wait = histogram("cyclone_step_wait_seconds", "From ready to claimed", _LONG, "queue")
        self.run = histogram("cyclone_step_run_seconds", "Time in the handler", _LONG, "queue", "kind")
        self.claims = counter("cyclone_claims_total", "Claims sent")
        self.asked = counter("cyclone_claim_asked_steps_total", "Steps that claims asked for")
        self.claimed = counter("cyclone_claimed_steps_total", "Steps that claims brought")
        self.claim_s = histogram("cyclone_claim_seconds", "Duration of a claim", _SHORT)
        self.settle_s = histogram("cyclone_settle_seconds", "Duration of a settle", _SHORT)
        self.settle_size = histogram("cyclone_settle_size", "Outcomes settled in one transaction", _SIZES)
        self.statement = histogram("cyclone_statement_seconds", "Duration of a named statement", _SHORT, "statement")
        self.refused = counter("cyclone_refused_total", "Results that came too late and changed nothing", "reason")
        self.reclaims = counter("cyclone_reclaims_total", "Steps taken from a worker that was lost", "reason")
        self.isolated = counter("cyclone_isolated_steps_total", "Steps run alone after deaths of their workers")
        self.leases_lost = counter("cyclone_leases_lost_total", "Lives that ended under a living worker")
        self.tx_wait = histogram("cyclone_completion_tx_wait_seconds", "Wait for a completion transaction", _SHORT)
        self.tx_held = histogram("cyclone_completion_tx_held_seconds", "A completion transaction was open", _LONG)
        self.restarts = counter("cyclone_worker_restarts_total", "Processes that were replaced", "reason")
        self.hooks = counter("cyclone_hook_failures_total", "Hooks of the program that raised an error")
        self.hook_drops = counter("cyclone_hook_dropped_events_total", "Events that a hook was too slow for")
        self.running = gauge("cyclone_steps_running", "Steps being executed", mode="livesum")()
        self.slots = gauge("cyclone_slots", "Steps that can be executed at once", mode="livesum")()
        self.scheduled = gauge("cyclone_steps_scheduled", "Steps that wait for their time")()
        self.depth = _Level(gauge("cyclone_queue_depth", "Steps ready to be claimed", "queue"), 1)
        self.oldest = _Level(gauge("cyclone_queue_oldest_seconds", "Age of the oldest ready step", "queue"), 1, max)
        self.unclaimable = _Level(
            gauge("cyclone_steps_unclaimable", "Ready steps that no worker knows how to run", "kind", "version"), 2
        )
        self.workers = _Level(gauge("cyclone_workers", "Worker processes", "state"), 1)


_metrics: _Metrics | None = None
_directory: Path | None = None
# A scrape and a fold both walk the directory; a scrape between the two halves of a fold would count twice.
_walk = threading.Lock()
_DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


def start(multiproc_dir: str | None) -> None:
    """Begins to measure; with a directory, together with the other processes that use it. A second call does nothing.

    Metrics that handlers declare with prometheus-client go the same way, if this comes before their import.
    """
    global _metrics, _directory
    if _metrics is not None:
        return
    if multiproc_dir is not None:
        os.environ[_DIRECTORY_VARIABLE] = multiproc_dir
        _directory = Path(multiproc_dir)
    values: Any = importlib.import_module("prometheus_client.values")
    if multiproc_dir is not None and not getattr(values.ValueClass, "_multiprocess", False):
        # The parent had imported it already, for itself.
        values.ValueClass = values.MultiProcessValue()
    _metrics = _Metrics()


def claimed(n: int, asked: int, seconds: float, waits: Iterable[tuple[str, float]]) -> None:
    """A claim brought `n` of `asked` steps, which had been ready so long, by queue."""
    if _metrics is None:
        return
    by_queue: dict[str, list[float]] = {}
    for queue, wait in waits:
        by_queue.setdefault(queue, []).append(wait)
    _metrics.claims.get(()).inc()
    _metrics.asked.get(()).inc(asked)
    _metrics.claimed.get(()).inc(n)
    _metrics.claim_s.get(()).observe((seconds,))
    for queue, values in by_queue.items():
        _metrics.wait.get((queue,)).observe(values)


def ran(times: Mapping[tuple[str, str], list[float]]) -> None:
    """Handlers ran so long, by (queue, kind)."""
    if _metrics is None:
        return
    for labels, values in times.items():
        _metrics.run.get(labels).observe(values)


def settled(
    counts: Mapping[tuple[str, str, str], int],
    failures: Mapping[tuple[str, str, str], int],
    size: int,
    seconds: float,
) -> None:
    """A settle committed: counts by (queue, kind, outcome), failures among them by (queue, kind, error kind)."""
    if _metrics is None:
        return
    for labels, n in counts.items():
        _metrics.steps.get(labels).inc(n)
    for labels, n in failures.items():
        _metrics.failures.get(labels).inc(n)
    _metrics.settle_size.get(()).observe((size,))
    _metrics.settle_s.get(()).observe((seconds,))


def statement(name: str, seconds: float) -> None:
    """A named statement took so long."""
    if _metrics is not None:
        _metrics.statement.get((name,)).observe((seconds,))


def refused(reason: str, n: int) -> None:
    """The fence refused so many results."""
    if _metrics is not None:
        _metrics.refused.get((reason,)).inc(n)


def reclaimed(reason: str, n: int) -> None:
    """So many steps were taken from a worker that was lost."""
    if _metrics is not None:
        _metrics.reclaims.get((reason,)).inc(n)


def isolated(n: int) -> None:
    """So many steps were run alone, since their workers had died before."""
    if _metrics is not None:
        _metrics.isolated.get(()).inc(n)


def lease_lost() -> None:
    """The life of this worker has ended although it lives."""
    if _metrics is not None:
        _metrics.leases_lost.get(()).inc()


def tx_waited(seconds: float) -> None:
    """A handler waited so long for its completion transaction."""
    if _metrics is not None:
        _metrics.tx_wait.get(()).observe((seconds,))


def tx_held(seconds: float) -> None:
    """A completion transaction was open so long."""
    if _metrics is not None:
        _metrics.tx_held.get(()).observe((seconds,))


def running(n: int) -> None:
    """This process executes so many steps now."""
    if _metrics is not None:
        _metrics.running.set(n)


def slots(n: int) -> None:
    """This process can execute so many steps at once; 0 once it drains."""
    if _metrics is not None:
        _metrics.slots.set(n)


def depth(queues: Mapping[str, tuple[float, float]]) -> None:
    """All queues with work: (steps ready, age of the oldest in seconds). A queue that is not named is empty."""
    if _metrics is not None:
        _metrics.depth.show({(queue,): count for queue, (count, _) in queues.items()})
        _metrics.oldest.show({(queue,): oldest for queue, (_, oldest) in queues.items()})


def scheduled(n: int) -> None:
    """So many steps wait for their time."""
    if _metrics is not None:
        _metrics.scheduled.set(n)


def unclaimable(kinds: Mapping[tuple[str, int], int]) -> None:
    """All kinds and versions with ready steps that no worker knows."""
    if _metrics is not None:
        _metrics.unclaimable.show({(kind, str(version)): n for (kind, version), n in kinds.items()})


def workers(states: Mapping[str, int]) -> None:
    """All worker processes, by state."""
    if _metrics is not None:
        _metrics.workers.show({(state,): n for state, n in states.items()})


def restarts(reason: str, n: int = 1) -> None:
    """So many processes were replaced."""
    if _metrics is not None:
        _metrics.restarts.get((reason,)).inc(n)


def hook_failed() -> None:
    """A hook of the program raised an error."""
    if _metrics is not None:
        _metrics.hooks.get(()).inc()


def hook_dropped(n: int) -> None:
    """A hook of the program was too slow for so many events."""
    if _metrics is not None:
        _metrics.hook_drops.get(()).inc(n)


# What can be read


class _Everything:
    """All processes of the pool added up, as a collector."""

    def collect(self) -> Iterable[prometheus_client.Metric]:
        assert _directory is not None
        library: Any = importlib.import_module("prometheus_client.multiprocess")
        merged: Iterable[prometheus_client.Metric] = library.MultiProcessCollector.merge(
            [str(path) for path in _files(_directory)], accumulate=True
        )
        return merged


def scrape() -> bytes:
    """The figures in Prometheus' text format: of all processes that share the directory, else of this one."""
    if _metrics is None:
        return b""
    from prometheus_client import CollectorRegistry, generate_latest

    if _directory is None:
        return generate_latest()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Everything())
    with _walk:
        return generate_latest(registry)


def _files(directory: Path) -> list[Path]:
    """The files that hold anything. One that was just created is empty for a moment, and the library trips over it."""
    files: list[Path] = []
    for path in sorted(directory.glob("*.db")):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size:
                files.append(path)
    return files


# Folding


def fold() -> int:
    """Adds the files of processes that have ended into those of the dead; returns how many files went away.

    For one process per directory, the one that is scraped. Killed in the middle it loses or doubles nothing: the plan
    of each step is in the journal before the first file is touched, and every part of it can be done twice.
    """
    if _directory is None:
        return 0
    with _walk:
        _finish(_directory)
        return _fold(_directory, _is_alive)


_DEAD: Final = "dead"
_JOURNAL: Final = "fold.json"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _fold(directory: Path, alive: Callable[[int], bool]) -> int:
    ended: dict[str, list[Path]] = {}
    for path in directory.glob("*_*.db"):
        prefix, _, pid = path.stem.rpartition("_")
        if pid.isdecimal() and not alive(int(pid)):
            ended.setdefault(prefix, []).append(path)
    for prefix, paths in ended.items():
        combine = _COMBINE.get(prefix)
        plan: dict[str, Any] = {"remove": [path.name for path in paths]}
        if combine is not None:
            target = directory / f"{prefix}_{_DEAD}.db"
            fresh = target.with_suffix(".new")
            _merge([*([target] if target.exists() else []), *paths], fresh, combine)
            plan["rename"] = [fresh.name, target.name]
        draft = directory / f"{_JOURNAL}.new"
        draft.write_text(json.dumps(plan))
        draft.replace(directory / _JOURNAL)
        _finish(directory)
    return sum(map(len, ended.values()))


def _finish(directory: Path) -> None:
    """Carries out what the journal says, if there is one."""
    journal = directory / _JOURNAL
    try:
        plan = json.loads(journal.read_text())
    except FileNotFoundError:
        return
    for name in plan["remove"]:
        (directory / name).unlink(missing_ok=True)
    if "rename" in plan:
        fresh, target = plan["rename"]
        with contextlib.suppress(FileNotFoundError):
            (directory / fresh).replace(directory / target)
    journal.unlink()


_Stamped = tuple[float, float]  # a value and when it was set, 0 if nobody says


def _add(old: _Stamped, new: _Stamped) -> _Stamped:
    return old[0] + new[0], 0.0


# Gauges that are about living processes or about one process each are missing here: they go with their process.
_COMBINE: Final[Mapping[str, Callable[[_Stamped, _Stamped], _Stamped]]] = {
    "counter": _add,
    "histogram": _add,
    "summary": _add,
    "gauge_sum": _add,
    "gauge_max": max,
    "gauge_min": min,
    "gauge_mostrecent": lambda old, new: max(old, new, key=lambda stamped: stamped[1]),
}


def _merge(paths: list[Path], into: Path, combine: Callable[[_Stamped, _Stamped], _Stamped]) -> None:
    library: Any = importlib.import_module("prometheus_client.mmap_dict")
    # By the raw keys: they hold name, labels in sorted order and help, so equal series have equal keys.
    values: dict[str, _Stamped] = {}
    for path in paths:
        if not path.stat().st_size:
            continue
        for key, value, stamp, _ in library.MmapedDict.read_all_values_from_file(str(path)):
            old = values.get(key)
            values[key] = (value, stamp) if old is None else combine(old, (value, stamp))
    into.unlink(missing_ok=True)
    merged = library.MmapedDict(str(into))
    for key, (value, stamp) in values.items():
        merged.write_value(key, value, stamp)
    merged.close()
