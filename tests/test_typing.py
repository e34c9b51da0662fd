"""What strict type checkers find: everything right is accepted, and every wrong use is an error on its line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FILES = Path(__file__).parent / "typing"
RIGHT, WRONG = FILES / "right.py", FILES / "wrong.py"
ROOT = Path(__file__).parents[1]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], capture_output=True, text=True, cwd=ROOT)


def mypy(tmp_path: Path) -> dict[str, set[int]]:
    """The lines with errors, by file name."""
    done = run("mypy", "--strict", "--show-absolute-path", str(RIGHT), str(WRONG))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return lines(re.findall(r"^(.*?):(\d+): error:", done.stdout, re.M))


def pyright(tmp_path: Path) -> dict[str, set[int]]:
    if run("pyright", "--version").returncode:
        pytest.skip("pyright cannot start: its Node.js is missing")
    # Files on its command line would be checked without the settings, and includes must be below these.
    for file in (RIGHT, WRONG):
        shutil.copy(file, tmp_path)
    settings = {"include": ["."], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = run("pyright", "--project", str(tmp_path), "--pythonpath", sys.executable, "--outputjson")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return lines((one["file"], one["range"]["start"]["line"] + 1) for one in found if one["severity"] == "error")


def lines(found: object) -> dict[str, set[int]]:
    by_file: dict[str, set[int]] = {RIGHT.name: set(), WRONG.name: set()}
    for path, line in found:  # type: ignore[attr-defined]
        assert Path(path).name in by_file, f"{path}:{line} has an error of its own"
        by_file[Path(path).name].add(int(line))
    return by_file


@pytest.mark.contract("I5")
@pytest.mark.parametrize("check", [mypy, pyright])
def test_right_uses_pass_and_wrong_ones_are_found_on_their_lines(
    check: Callable[[Path], dict[str, set[int]]], tmp_path: Path
) -> None:
    found = check(tmp_path)
    assert found[RIGHT.name] == set()
    wrong = WRONG.read_text().splitlines()
    expected = {number for number, line in enumerate(wrong, 1) if "  # error: " in line}
    assert len(expected) > 50
    assert found[WRONG.name] == expected, "what differs: " + "\n".join(
        f"{number}: {wrong[number - 1].strip()}" for number in sorted(found[WRONG.name] ^ expected)
    )


@pytest.mark.contract("I5")
def test_the_package_says_that_it_is_typed() -> None:
    import cyclone

    assert (Path(cyclone.__file__).parent / "py.typed").exists()
