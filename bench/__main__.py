"""`python -m bench [SUITE ...]`: runs suites with pytest-benchmark, then shows, stores and draws the figures."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench import report

_HERE = Path(__file__).parent
_SUITES = sorted(file.stem.removeprefix("bench_") for file in _HERE.glob("bench_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Cyclone; see bench/README.md.")
    # `make bench SUITE=drain` hands the name on in the environment.
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=os.environ.get("SUITE", "").split())
    parser.add_argument("-k", default="", metavar="NAME", help="only cases whose function has this in its name")
    parser.add_argument("--quick", action="store_true", help="one small round each: whether it works, not how fast")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case; medians are shown (default 3)")
    parser.add_argument("--skip", action="append", default=[], metavar="SUITE", help="a suite to leave out")
    parser.add_argument("--held", type=int, default=300_000, help="steps under a held snapshot (default 300000)")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the steady load lasts (default 5)")
    parser.add_argument("--json", action="store_true", help="write the result to standard output instead of tables")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier result, to show the changes since")
    args = parser.parse_args()
    if unknown := sorted({*args.suites, *args.skip} - set(_SUITES)):
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(_SUITES)}")
    if args.rounds < 1 or args.held < 3 or args.minutes <= 0:
        parser.error("--rounds must be at least 1, --held at least 3, --minutes above 0")
    before = report.read(args.against) if args.against else {}

    folder = _HERE / "results" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    file = folder / "result.json"
    options = [
        *(str(_HERE / f"bench_{suite}.py") for suite in args.suites or _SUITES if suite not in args.skip),
        "-o", "python_files=bench_*.py", "-o", "python_functions=bench_*",
        # Those of the project are for tests.
        "-o", "timeout=0", "-o", "filterwarnings=default", "-p", "no:cacheprovider",
        "-q", "-s", "--no-header", "--benchmark-quiet", f"--benchmark-json={file}", f"--rounds={args.rounds}",
        "-k", args.k, f"--held={args.held}", f"--minutes={args.minutes}",
    ]  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        code = int(pytest.main(options + ["--quick"] * args.quick))
    if not file.exists() or not file.stat().st_size:
        return code or 1
    suites = report.read(file)
    report.draw(suites, folder)
    if args.json:
        print(file.read_text())
    else:
        console = report.console()
        for suite, cases in suites.items():
            console.print(report.table(suite, cases, before.get(suite, ())))
        console.print(f"Results and plots are in {os.path.relpath(folder)}", highlight=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
