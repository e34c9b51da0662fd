"""When again: how long a step waits after a failed attempt."""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections.abc import Callable
from datetime import timedelta
from typing import cast

from .errors import InvalidOptionError, InvalidOptionTypeError

Backoff = Callable[[int], timedelta] | Callable[[int, Exception], timedelta]
"""What `backoff=` takes: the failed attempt's number, counted from 1, and perhaps its exception give the wait."""

BoundBackoff = Callable[[int, BaseException], object]
"""A backoff as `bind` returns it: always called with two arguments."""

LONGEST_S = 10 * 365 * 86400.0
"""The longest wait before another attempt, so that no due time leaves the range of a timestamp."""


def default_backoff(attempt: int) -> timedelta:
    """The wait after failed attempt number `attempt`: `attempt**4 + 2` seconds, at most an hour, then ±10 %."""
    # From the 8th attempt on it is the hour; no power of a larger number is ever computed.
    return timedelta(seconds=_spread(min(3600.0, float(min(attempt, 8) ** 4 + 2)), 0.1))


def exponential(
    base: timedelta | float = 2,
    factor: float = 2,
    cap: timedelta | float = timedelta(hours=1),
    jitter: float = 0.0,
) -> Callable[[int], timedelta]:
    """A backoff that waits `base`, `base * factor`, `base * factor**2`, ... and never more than `cap`.

    `base` and `cap` are timedeltas or seconds. `jitter` (0 to 1, default none) spreads each wait, also the cap, by that
    share to both sides. Raises InvalidOptionError if `factor` is below 1 or another argument is out of range.
    """
    base_s = _wait("base", base)
    cap_s = _wait("cap", cap)
    if not 1 <= factor < math.inf:
        raise InvalidOptionError(f"factor must be at least 1, not {factor!r}")
    _check_jitter(jitter)
    # The exponent at which the cap is reached: a larger one is never computed, so nothing can overflow.
    last = math.ceil(math.log(cap_s / base_s, factor)) if cap_s > base_s and factor > 1 else 0

    def backoff(attempt: int) -> timedelta:
        return timedelta(seconds=_spread(min(cap_s, base_s * factor ** min(attempt - 1, last)), jitter))

    return backoff


def fixed(delay: timedelta | float, jitter: float = 0.0) -> Callable[[int], timedelta]:
    """A backoff that always waits `delay` (a timedelta or seconds), spread by `jitter` as in `exponential`."""
    delay_s = _wait("delay", delay)
    _check_jitter(jitter)

    def backoff(attempt: int) -> timedelta:
        return timedelta(seconds=_spread(delay_s, jitter))

    return backoff


def linear(
    step: timedelta | float, cap: timedelta | float = timedelta(hours=1), jitter: float = 0.0
) -> Callable[[int], timedelta]:
    """A backoff that waits `step`, twice `step`, three times `step`, ... and never more than `cap`.

    `step` and `cap` are timedeltas or seconds; `jitter` is as in `exponential`.
    """
    step_s = _wait("step", step)
    cap_s = _wait("cap", cap)
    _check_jitter(jitter)

    def backoff(attempt: int) -> timedelta:
        return timedelta(seconds=_spread(min(cap_s, step_s * attempt), jitter))

    return backoff


def bind(backoff: Backoff) -> BoundBackoff:
    """Any backoff in its two-argument form. Which form it has is decided here, once, by its signature.

    A second argument that has a default is no place for the exception: it may well mean something else. Raises
    InvalidOptionError for a function that can be called with neither.
    """
    if not callable(backoff):
        raise InvalidOptionTypeError(f"backoff must be a function, not {type(backoff).__name__}")
    call = cast("Callable[..., object]", backoff)
    try:
        signature = inspect.signature(call)
    except ValueError:  # a built-in that does not tell
        return lambda attempt, exc: call(attempt)
    for arguments in ((1,), (1, Exception())):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return call if len(arguments) == 2 else lambda attempt, exc: call(attempt)
    raise InvalidOptionError("backoff must take the attempt, or the attempt and the exception")


def delay_s(
    backoff: BoundBackoff | None,
    attempt: int,
    exc: BaseException,
    log: logging.Logger | logging.LoggerAdapter[logging.Logger] | None = None,
) -> float:
    """The wait in seconds that a bound backoff (None: the default) gives after failed attempt `attempt`; never raises.

    Negative counts as zero and ten years is the most. What raises, or gives anything but a timedelta, is logged, and
    the default curve takes its place: a faulty backoff must not lose the step.
    """
    if backoff is None:
        return default_backoff(attempt).total_seconds()
    try:
        wait = backoff(attempt, exc)
        if isinstance(wait, timedelta):
            return min(max(wait.total_seconds(), 0.0), LONGEST_S)
        fault = f"returned {type(wait).__name__}, not timedelta"
        cause: BaseException | None = None
    except BaseException as raised:  # SystemExit too: it is called in the worker's loop, which would end with it
        fault = f"raised {type(raised).__name__}"
        cause = raised
    if log is not None:
        log.error("backoff %s after attempt %d; the default is used", fault, attempt, exc_info=cause)
    return default_backoff(attempt).total_seconds()


def _spread(wait_s: float, jitter: float) -> float:
    return wait_s * random.uniform(1 - jitter, 1 + jitter) if jitter else wait_s


def _wait(name: str, value: object) -> float:
    wait_s = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float):
        raise InvalidOptionTypeError(f"{name} must be a timedelta or seconds, not {type(value).__name__}")
    if not 1e-6 <= wait_s <= LONGEST_S:
        raise InvalidOptionError(f"{name} must be between a microsecond and ten years, not {value!r}")
    return float(wait_s)


def _check_jitter(jitter: float) -> None:
    if not 0 <= jitter <= 1:
        raise InvalidOptionError(f"jitter must be between 0 and 1, not {jitter!r}")
