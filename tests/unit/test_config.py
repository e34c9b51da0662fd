"""Which values are options, and which source wins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cyclone import InvalidOptionError, InvalidOptionTypeError, config

INF, NAN = float("inf"), float("nan")


def refuses(check: Callable[..., object], value: object, **flags: Any) -> None:
    with pytest.raises(InvalidOptionError, match="option"):
        check("option", value, **flags)


@pytest.mark.parametrize(("value", "wanted"), [(timedelta(minutes=1), 60.0), (3, 3.0), (0.25, 0.25)])
def test_seconds(value: object, wanted: float) -> None:
    assert config.seconds("option", value) == wanted


@pytest.mark.parametrize("value", [True, "3", None, 0, -1, INF, -INF, NAN, 10**4000, timedelta.max, timedelta(0)])
def test_seconds_refuses(value: object) -> None:
    refuses(config.seconds, value)


def test_seconds_with_flags() -> None:
    assert config.seconds("option", 0, zero=True) == 0
    assert config.seconds("option", -3, negative=True) == -3
    refuses(config.seconds, -1, zero=True)
    refuses(config.seconds, 0.5, least=1)
    refuses(config.seconds, NAN, negative=True)


@pytest.mark.contract("FM-083")
def test_instant_needs_a_time_zone() -> None:
    now = datetime.now(UTC)
    assert config.instant("option", now) is now
    refuses(config.instant, now.replace(tzinfo=None))
    refuses(config.instant, now.isoformat())


@pytest.mark.contract("R16")
@pytest.mark.parametrize("value", [True, 3.0, "3", None])
def test_count_refuses_other_types_as_type_errors(value: object) -> None:
    with pytest.raises(InvalidOptionTypeError) as caught:
        config.count("option", value)
    assert isinstance(caught.value, TypeError | ValueError)


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**4000])
def test_count_refuses_what_is_out_of_range(value: int) -> None:
    refuses(config.count, value)


@pytest.mark.contract("FM-091")
@pytest.mark.parametrize("name", ["a'b\"c", "100%s", "a;b", "back\\slash", "😀", "x" * 200, "é" * 100, " "])
def test_names_are_plain_data(name: str) -> None:
    assert config.name("option", name) == name
    assert config.queue("option", name) == name


@pytest.mark.contract("FM-091")
@pytest.mark.parametrize(
    "name", ["", "x" * 201, "é" * 101, "a\0b", "a\nb", "a\x1fb", "a\x7fb", "a\x85b", "\ud800", 3, None, b"a"]
)
def test_names_refused(name: object) -> None:
    refuses(config.name, name)


def test_queues() -> None:
    refuses(config.queue, "?mail")
    refuses(config.queue, "!mail")
    assert config.queues("option", ["a", "b"]) == ("a", "b")
    for wrong in ("a", [], ["a", "a"], ["a", ""], {"a"}):
        refuses(config.queues, wrong)


def test_tags() -> None:
    assert config.tags("option", ("a", "b%")) == ["a", "b%"]
    for wrong in ("ab", ["a", 3], ["\0"]):
        refuses(config.tags, wrong)


def test_worker_defaults() -> None:
    options = config.worker_options()
    assert options == config.WorkerOptions()
    assert options.queues == ("default",)


def test_worker_options_have_public_names() -> None:
    options = config.worker_options(
        queues=["a"], lease=timedelta(seconds=10), claim_batch="auto", settle_batch=5, settle_linger=0, stall_limit=None
    )
    assert (options.queues, options.lease_s, options.claim_batch, options.settle_batch) == (("a",), 10.0, None, 5)


# A lease that could not be renewed in time is one of them.
@pytest.mark.contract("FM-005")
@pytest.mark.parametrize(
    "given",
    [
        {"lease": 0.5},
        {"lease": True},
        {"concurrency": 0},
        {"notify": 1},
        {"claim_batch": "many"},
        {"claim_batch": 0},
        {"poll_interval": 0},
        {"max_output_bytes": 0},
        {"drain_timeout": -1},
        {"queues": "default"},
    ],
)
def test_worker_options_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(given))):
        config.worker_options(**given)


def test_an_unknown_worker_option_names_the_likely_one() -> None:
    with pytest.raises(InvalidOptionError, match="did you mean 'concurrency'"):
        config.worker_options(concurency=3)


@pytest.fixture
def pyproject(tmp_path: Path) -> Path:
    path = tmp_path / "pyproject.toml"
    path.write_text('[tool.cyclone]\nlease = "2m"\nconcurrency = 7\nqueues = ["a", "b"]\nnotify = false\n')
    return path


@pytest.mark.contract("FM-089")
def test_sources_in_order(pyproject: Path) -> None:
    env = {"CYCLONE_CONCURRENCY": "8", "CYCLONE_LEASE": "30s", "CYCLONE_QUEUES": "", "PATH": "/bin"}
    found = config.settings({"lease": 5, "concurrency": None}, env=env, pyproject=pyproject)
    assert found == {"lease": 5, "concurrency": 8, "queues": ["a", "b"], "notify": False}
    assert config.worker_options(**found).lease_s == 5
    assert config.settings({}, env={}) == {}
    assert config.settings({}, env=env, pyproject=pyproject, names=("dsn", "lease")) == {"lease": 30.0}


def test_the_environment_is_parsed_from_text() -> None:
    env = {
        "CYCLONE_QUEUES": "mail, default",
        "CYCLONE_SETTLE_LINGER": "5ms",
        "CYCLONE_MAX_OUTPUT_BYTES": "64KiB",
        "CYCLONE_CLAIM_BATCH": "auto",
        "CYCLONE_NOTIFY": "off",
        "CYCLONE_DSN": "postgresql:///x?options=" + "y" * 300,
    }
    found = config.settings({}, env=env)
    assert found.pop("dsn").startswith("postgresql:///x")
    options = config.worker_options(**found)
    assert options.queues == ("mail", "default")
    assert (options.settle_linger_s, options.max_output_bytes, options.notify) == (0.005, 65536, False)


@pytest.mark.parametrize(
    ("key", "text"), [("LEASE", "0"), ("LEASE", "nan"), ("LEASE", "1e3"), ("CONCURRENCY", "3.0"), ("NOTIFY", "maybe")]
)
def test_a_bad_variable_is_named(key: str, text: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"CYCLONE_{key}"):
        config.settings({}, env={f"CYCLONE_{key}": text})


@pytest.mark.contract("FM-089")
def test_unknown_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("[tool.cyclone]\nconcurency = 3\n")
    with pytest.raises(InvalidOptionError, match=r"'concurency' is unknown; did you mean 'concurrency'"):
        config.settings({}, env={}, pyproject=path)
    with pytest.raises(InvalidOptionError, match="'leese'"):
        config.settings({"leese": 3}, env={})
    with caplog.at_level(logging.WARNING):
        assert config.settings({}, env={"CYCLONE_LEESE": "3", "CYCLONE_TEST_DSN": "x", "CYCLONE_BENCH_N": "1"}) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "the variable CYCLONE_LEESE is unknown and ignored; did you mean 'lease'?"
    ]


def test_an_unreadable_pyproject_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("[tool")
    with pytest.raises(InvalidOptionError, match=r"pyproject\.toml cannot be read"):
        config.settings({}, env={}, pyproject=path)
    path.write_text("[tool]\ncyclone = 3\n")
    with pytest.raises(InvalidOptionError, match="must be a table"):
        config.settings({}, env={}, pyproject=path)


def test_pyproject_is_found_upwards(pyproject: Path) -> None:
    below = pyproject.parent / "a" / "b"
    below.mkdir(parents=True)
    assert config.find_pyproject(below) == pyproject


@pytest.mark.parametrize(
    ("text", "wanted"), [("30", 30), ("1.5s", 1.5), ("200ms", 0.2), ("5m", 300), ("2 h", 7200), ("7d", 604800)]
)
def test_parse_seconds(text: str, wanted: float) -> None:
    assert config.parse_seconds("option", text) == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["", "-3", "inf", "5 weeks", "1" * 400])
def test_parse_seconds_refuses(text: str) -> None:
    refuses(config.parse_seconds, text)


def test_parse_bytes() -> None:
    assert [config.parse_bytes("option", text) for text in ("7", "2KiB", "1MiB")] == [7, 2048, 1 << 20]
    refuses(config.parse_bytes, "1MB")
