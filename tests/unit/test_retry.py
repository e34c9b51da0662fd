"""When a failed step runs again."""

from __future__ import annotations

import logging
import statistics
from datetime import timedelta
from typing import Any

import pytest

from cyclone import InvalidOptionError, InvalidOptionTypeError, default_backoff, exponential, fixed, linear, retry

log = logging.getLogger("cyclone.test")
BOOM = RuntimeError("boom")


def seconds(backoff: Any, attempt: int) -> float:
    return retry.delay_s(retry.bind(backoff), attempt, BOOM, log)


@pytest.mark.contract("R4")
def test_default_curve() -> None:
    draws = {attempt: [default_backoff(attempt).total_seconds() for _ in range(200)] for attempt in range(1, 21)}
    assert all(2 <= wait <= 5 for wait in draws[1])
    medians = [statistics.median(draws[attempt]) for attempt in range(1, 8)]
    assert medians == sorted(medians)
    assert all(0.9 * 3600 <= wait <= 66 * 60 for attempt in range(8, 21) for wait in draws[attempt])
    assert len(set(draws[1])) > 1
    assert default_backoff(10**400).total_seconds() <= 66 * 60


@pytest.mark.contract("R18", "R19")
def test_exponential_doubles_up_to_its_cap() -> None:
    backoff = exponential(base=2, cap=timedelta(minutes=5))
    assert [seconds(backoff, n) for n in range(1, 12)] == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


@pytest.mark.parametrize("factor", [10, 10.0, 1e300])
def test_exponential_is_capped_before_it_can_overflow(factor: float) -> None:
    assert seconds(exponential(factor=factor, cap=3600), 1100) == 3600
    assert seconds(exponential(base=1e-6, factor=factor, cap=timedelta(days=3650)), 10**9) == 3650 * 86400


def test_exponential_of_one_and_a_base_above_the_cap() -> None:
    assert seconds(exponential(base=3, factor=1), 50) == 3
    assert seconds(exponential(base=30, cap=10), 4) == 10


def test_fixed_and_linear() -> None:
    assert [seconds(fixed(timedelta(seconds=30)), n) for n in (1, 9)] == [30, 30]
    assert [seconds(linear(10, cap=25), n) for n in (1, 2, 3, 99)] == [10, 20, 25, 25]


@pytest.mark.contract("R19")
def test_jitter_is_asked_for() -> None:
    waits = {seconds(exponential(base=100, jitter=0.2), 1) for _ in range(100)}
    assert len(waits) > 1
    assert all(80 <= wait <= 120 for wait in waits)


@pytest.mark.parametrize(
    "make",
    [
        lambda: exponential(base=0),
        lambda: exponential(factor=0.5),
        lambda: exponential(factor=float("nan")),
        lambda: exponential(jitter=2),
        lambda: exponential(cap=-1),
        lambda: fixed(timedelta(seconds=-1)),
        lambda: linear(float("inf")),
    ],
)
def test_helpers_refuse_nonsense(make: Any) -> None:
    with pytest.raises(InvalidOptionError):
        make()


def test_helpers_refuse_other_types() -> None:
    with pytest.raises(TypeError):
        fixed(True)
    with pytest.raises(TypeError):
        fixed("3")  # type: ignore[arg-type]


@pytest.mark.contract("R20")
@pytest.mark.parametrize(
    "backoff",
    [lambda attempt: 30, lambda attempt: None, lambda attempt: 1 / 0, lambda attempt: timedelta(days=10**9)],
)
def test_a_faulty_backoff_is_logged_and_the_default_used(backoff: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert 2 <= seconds(backoff, 1) <= 5
    assert "the default is used" in caplog.text


@pytest.mark.contract("R20")
def test_negative_is_zero_and_huge_is_capped() -> None:
    assert seconds(lambda attempt: timedelta(seconds=-5), 1) == 0
    assert seconds(lambda attempt: timedelta.max, 1) == retry.LONGEST_S


@pytest.mark.contract("R17", "R21")
def test_one_or_two_arguments() -> None:
    seen: list[object] = []

    def both(attempt: int, exc: Exception) -> timedelta:
        seen.extend((attempt, exc))
        return timedelta(seconds=7)

    def tuned(attempt: int, factor: int = 3) -> timedelta:
        return timedelta(seconds=attempt * factor)

    assert seconds(both, 4) == 7
    assert seen == [4, BOOM]
    assert seconds(tuned, 4) == 12
    assert retry.delay_s(None, 1, BOOM) <= 5


def test_bind_refuses_what_cannot_be_called() -> None:
    with pytest.raises(InvalidOptionError):
        retry.bind(lambda: timedelta(0))  # type: ignore[arg-type,misc]
    with pytest.raises(InvalidOptionTypeError):
        retry.bind(timedelta(seconds=3))  # type: ignore[arg-type]
