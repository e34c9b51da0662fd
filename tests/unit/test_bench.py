"""The benchmark's own arithmetic and its report; the suites themselves run with `make bench`."""

import io
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from bench import report, sweep, work
from bench.bench_backlog import at, rates
from bench.conftest import medians
from bench.server import percentile

CASE = {
    "case": "no-op",
    "against": "SQL alone",
    "goal": ["ratio", ">=", 0.9],
    "figures": {"steps/s": 1200.0, "SQL alone/s": None, "ratio": 0.5},
    "rounds": [{"steps/s": 1000.0, "SQL alone/s": None}, {"steps/s": 1250.0, "SQL alone/s": None}],
    "bars": ["steps/s", "SQL alone/s"],
    "plots": {"no-op": {"x": "s", "y": "steps", "<Cyclone>": [[0.0, 0], [1.0, 100]]}},
}


def test_messages_have_100_bytes() -> None:
    assert {len(msgspec.json.encode(work.message(seq))) for seq in (0, 9, 99_999, 1_234_567)} == {100}


def test_percentile() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7


def test_median_is_missing_where_a_round_has_none() -> None:
    assert medians([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": None}]) == {"a": 2.0, "b": None}


@pytest.mark.parametrize("before", [(), [{**CASE, "figures": {"steps/s": 1000.0, "ratio": 0.5}}]])
def test_table_shows_medians_changes_and_spread(before: list[report.Case]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table("drain", [CASE], before))
    text = console.export_text()
    assert "1,200" in text and "–" in text and "20 %" in text and ">= 0.9 missed" in text
    assert ("(+20 %)" in text) == bool(before)


def test_plots_are_xml(tmp_path: Path) -> None:
    files = report.draw({"drain": [CASE]}, tmp_path)
    assert [file.name for file in files] == ["drain.svg", "drain-0.svg"]
    for file in files:
        ElementTree.parse(file)
    assert "&lt;Cyclone&gt;" in files[1].read_text()


def test_the_fastest_setting_by_its_median_is_the_best() -> None:
    tried = sweep.settings({"procs": ["1", "2"], "concurrency": ["100"], "claim_batch": ["auto", "200"]})
    assert sweep.options(tried[0]) == {"procs": 1, "concurrency": 100, "claim_batch": None}
    names = sweep.named(tried)
    assert names == [
        "procs 1, claim_batch auto",
        "procs 1, claim_batch 200",
        "procs 2, claim_batch auto",
        "procs 2, claim_batch 200",
    ]
    found = [[10.0, 10.0, 90.0], [20.0, 25.0, 21.0], [1.0, 2.0, 3.0], [20.0, 20.0, 20.0]]
    cases = [
        sweep.case(name, setting, [{"steps/s": rate} for rate in rates])
        for name, setting, rates in zip(names, tried, found, strict=True)
    ]
    assert sweep.best(cases)["case"] == "procs 1, claim_batch 200"
    assert [one["figures"]["steps/s"] for one in sweep.ranked(cases)] == [21, 20, 10, 2]
    ElementTree.fromstring(report.bars("sweep", cases))


def test_parts_of_a_drain() -> None:
    line = [(0.0, 0), (1.0, 100), (2.0, 300), (4.0, 400)]
    assert [at(line, n) for n in (50, 100, 200, 400)] == [0.5, 1, 1.5, 4]
    assert rates(line, 100) == [(100, 100), (200, 200), (300, 200), (400, 50)]
