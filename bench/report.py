"""Results as a table in the terminal and as plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Case = dict[str, Any]
Line = list[tuple[float, float]]

_COLOURS = ("#2563eb", "#94a3b8", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6")


def read(file: Path) -> dict[str, list[Case]]:
    """The cases of a result by suite, in the order in which they ran."""
    suites: dict[str, list[Case]] = {}
    for one in json.loads(file.read_text())["benchmarks"]:
        suite = Path(one["fullname"].partition("::")[0]).stem.removeprefix("bench_")
        suites.setdefault(suite, []).append(one["extra_info"])
    return suites


# Tables


def console() -> Console:
    found = Console()
    if not found.is_terminal:
        found.width = 150  # in a file nothing needs to fit a window
    return found


def table(suite: str, cases: Sequence[Case], before: Sequence[Case] = ()) -> Table:
    """Medians of each case, with the change since `before` and whether the goal is met; and how much the rounds differ
    in the first figure. A row is a case, or of three and less a column.
    """
    found = Table(title=suite, title_justify="left", title_style="bold")
    earlier = {case["case"]: case["figures"] for case in before}
    names = list(dict.fromkeys(name for case in cases for name in case["figures"]))
    grid = [["", *names, "spread"]]
    for case in cases:
        new, old = case["figures"], earlier.get(case["case"], {})
        cells = [_number(new.get(name)) + _change(new.get(name), old.get(name)) + _goal(case, name) for name in names]
        against = f"\n  against {case['against']}" if case["against"] else ""
        grid.append([case["case"] + against, *cells, _spread(case)])
    head, *rows = list(zip(*grid, strict=True)) if len(cases) <= 3 else grid
    for number, text in enumerate(head):
        found.add_column(text, justify="right" if number else "left")
    for row in rows:
        found.add_row(*row)
    return found


def _goal(case: Case, name: str) -> str:
    if not case["goal"] or case["goal"][0] != name or case["figures"][name] is None:
        return ""
    _, sign, limit = case["goal"]
    met = case["figures"][name] >= limit if sign == ">=" else case["figures"][name] <= limit
    return f"\n{sign} {limit:g} {'met' if met else 'missed'}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _change(new: float | None, old: float | None) -> str:
    return "" if not old or new is None else f" ({(new / old - 1) * 100:+.0f} %)"


def _spread(case: Case) -> str:
    first = next(iter(case["figures"]))
    values = [one[first] for one in case["rounds"]]
    if len(values) < 2 or None in values or not max(values):
        return "–"
    return f"{(max(values) - min(values)) / max(values) * 100:.0f} %"


# Plots


def draw(suites: dict[str, list[Case]], folder: Path) -> list[Path]:
    """One SVG of bars a suite, and one of lines for each case that has some."""
    drawn: list[Path] = []
    for suite, cases in suites.items():
        plots = {suite: bars(suite, cases)}
        drawings = [(title, found) for case in cases for title, found in case["plots"].items()]
        for number, (title, found) in enumerate(drawings):
            if len(found) > 2:
                plots[f"{suite}-{number}"] = lines(f"{suite}: {title}", found)
        for name, text in plots.items():
            drawn.append(folder / f"{name}.svg")
            drawn[-1].write_text(text)
    return drawn


def bars(title: str, cases: Sequence[Case]) -> str:
    """A bar for the median of each figure that a case wants plotted, and a dot for each round."""
    rows: list[tuple[str, float, list[float], str]] = []
    for case in cases:
        for name, colour in zip(case["bars"], _COLOURS, strict=False):
            if case["figures"][name] is not None:
                values = [one[name] for one in case["rounds"]]
                label = case["against"] if name == "yardstick/s" else f"{case['case']}: {name}"
                rows.append((label, case["figures"][name], values, colour))
    most = max((max(values) for _, _, values, _ in rows), default=0) or 1
    left = 20 + max((len(label) for label, *_ in rows), default=0) * 6.5
    body: list[str] = []
    for n, (label, value, values, colour) in enumerate(rows):
        y = 40 + n * 26
        body.append(_text(left, y + 14, label, "end"))
        width = max(value, 0) / most * 380
        body.append(f'<rect x="{left + 10:.0f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
        body += (
            f'<circle cx="{left + 10 + max(one, 0) / most * 380:.1f}" cy="{y + 9}" r="2.5" fill="#0f172a"/>'
            for one in values
        )
        body.append(_text(left + 402, y + 14, _number(value)))
    return _svg(title, int(left) + 470, 50 + 26 * len(rows), body)


def lines(title: str, found: dict[str, Any]) -> str:
    """Lines over a common x; `found` has the names of the axes as `x` and `y`, and the points of each line."""
    series: dict[str, Line] = {name: points for name, points in found.items() if name not in ("x", "y")}
    right = max(x for points in series.values() for x, _ in points) or 1
    top = max(y for points in series.values() for _, y in points) or 1
    low = min(0.0, min(y for points in series.values() for _, y in points))
    body = [
        '<path d="M70 40V320H690" fill="none" stroke="#64748b"/>',
        _text(64, 50, _number(top), "end"), _text(64, 320, _number(low), "end"), _text(64, 185, found["y"], "end"),
        _text(690, 338, f"{_number(right)} {found['x']}", "end"),
    ]  # fmt: skip
    for n, ((name, points), colour) in enumerate(zip(series.items(), _COLOURS, strict=False)):
        path = " ".join(f"{70 + x / right * 620:.1f},{320 - (y - low) / (top - low) * 280:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body.append(_text(84, 56 + 18 * n, name, colour=colour))
    return _svg(title, 720, 350, body)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#0f172a") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _svg(title: str, width: int, height: int, body: Iterable[str]) -> str:
    space = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    head = f'<svg {space} font-family="sans-serif" font-size="12">'
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, _text(10, 22, title), *body, "</svg>\n"])
