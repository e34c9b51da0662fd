"""The dashboard asks for figures that exist, in PromQL that parses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest

DASHBOARD = json.loads((Path(__file__).parents[2] / "grafana" / "cyclone-pool.json").read_text())

# Every function that measures, once, in a process of its own: what it makes is made for good.
MEASURE_ALL = """
from cyclone import metrics as m
m.start(None)
m.claimed(1, 2, 0.1, [("default", 0.1)])
m.ran({("default", "resize"): [0.1]})
m.settled({("default", "resize", "completed"): 1}, {("default", "resize", "timeout"): 1}, 1, 0.1)
m.statement("claim_steps", 0.1)
m.refused("gone", 1)
m.reclaimed("expired", 1)
m.lease_lost()
m.isolated(1)
m.tx_waited(0.1)
m.tx_held(0.1)
m.running(1)
m.slots(1)
m.depth({"default": (1, 1)})
m.scheduled(1)
m.unclaimable({("resize", 1): 1})
m.workers({"ready": 1})
m.restarts("crash")
print(m.scrape().decode())
"""


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target


EXPRESSIONS = [pytest.param(target["expr"], id=f"{title} {target['refId']}") for title, target in targets()]


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    match node:
        case promql.VectorSelector():
            yield node
        case promql.MatrixSelector():
            yield from selectors(node.vector_selector)
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql.AggregateExpr() | promql.ParenExpr():
            yield from selectors(node.expr)
        case promql.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)


def grouped(node: Any) -> Iterator[tuple[Any, list[str]]]:
    match node:
        case promql.AggregateExpr():
            yield node.expr, list(node.modifier.labels) if node.modifier else []
            yield from grouped(node.expr)
        case promql.Call():
            for argument in node.args:
                yield from grouped(argument)
        case promql.BinaryExpr():
            yield from grouped(node.lhs)
            yield from grouped(node.rhs)


def parsed(expression: str) -> Any:
    return promql.parse(expression.replace("$__rate_interval", "1m"))


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The labels of every series by its name."""
    done = subprocess.run([sys.executable, "-c", MEASURE_ALL], capture_output=True, text=True, check=True)
    return series(done.stdout)


def series(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        match = re.match(r"(\w+)(?:\{(.*)\})? ", line)
        if match and not line.startswith("#"):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_expression_asks_for_what_is_exposed(expression: str, exposed: dict[str, set[str]]) -> None:
    tree = parsed(expression)
    asked = list(selectors(tree))
    assert asked
    for selector in asked:
        assert selector.name in exposed, f"there is no metric {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= exposed[selector.name], f"{selector.name} lacks {labels - exposed[selector.name]}"
    for inner, labels in grouped(tree):
        for selector in selectors(inner):
            assert set(labels) <= exposed[selector.name]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_are_read_as_rates_and_gauges_are_not(expression: str, exposed: dict[str, set[str]]) -> None:
    for name, suffix in re.findall(r"\b(cyclone_\w+?(_total|_bucket|_sum|_count)?)\b[{\[)]", expression):
        ranged = re.search(rf"(?:rate|increase)\({name}(?:{{[^}}]*}})?\[\$__rate_interval\]\)", expression)
        assert bool(suffix) == bool(ranged), name


def test_legends_name_labels_that_remain() -> None:
    for title, target in targets():
        used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        remaining = {label for _, labels in grouped(parsed(target["expr"])) for label in labels}
        assert used == remaining - {"le"}, title


def test_every_metric_of_steps_and_workers_is_shown(exposed: dict[str, set[str]]) -> None:
    shown = {selector.name for _, target in targets() for selector in selectors(parsed(target["expr"]))}
    unshown = {
        name for name in exposed if name.startswith("cyclone_") and not name.endswith(("_created", "_count", "_sum"))
    }
    # The time of single statements and of hooks is for a closer look than a dashboard's.
    unshown = {
        name
        for name in unshown - shown
        if not name.startswith(("cyclone_statement", "cyclone_hook", "cyclone_settle_size"))
    }
    assert unshown == set()


def test_panels_have_places_and_the_data_source_of_the_variable() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(DASHBOARD["panels"]))) == set(variables)


def test_the_queues_to_choose_from_are_labels_that_exist(exposed: dict[str, set[str]]) -> None:
    (queue,) = (variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "queue")
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", queue["definition"]).groups()  # type: ignore[union-attr]
    assert label in exposed[name]
