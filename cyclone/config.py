"""Which settings hold: the checks of every option, the options of a worker, and where they come from.

Every function that checks takes the option's public name first, for the message, and returns the value in the unit that
the engine uses (seconds, bytes). Checks run before anything is written or connected. A value that is out of range
raises InvalidOptionError, one of the wrong type InvalidOptionTypeError, which is a TypeError too.

Sources, strongest first: an argument, a variable `CYCLONE_*`, `[tool.cyclone]` in pyproject.toml. The environment and
the file are read only when `settings` is called, never at import; an empty variable counts as unset.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict, cast

import msgspec

from .errors import InvalidKeyError, InvalidOptionError, InvalidOptionTypeError

log = logging.getLogger("cyclone")

# The longest duration: no due time may leave the range of a timestamp.
_LONGEST_S = 100 * 365 * 86400
_MOST_NAME_BYTES = 200
_MOST_INT = 2**31 - 1

# Checks


def seconds(name: str, value: object, *, zero: bool = False, negative: bool = False, least: float = 0.0) -> float:
    """A duration (a timedelta, or a number of seconds) in seconds: at least `least`, at most 100 years.

    Zero and negative ones are refused unless allowed; NaN and infinities always are.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidOptionTypeError(f"{name} must be a timedelta or a number of seconds, not {_kind(value)}")
    # NaN fails every comparison. A huge int is compared before it is converted, which could overflow.
    lowest = -_LONGEST_S if negative else 0
    if not lowest <= value <= _LONGEST_S or (value == 0 and not (zero or negative)):
        limits = "between -100 and 100 years" if negative else f"{'0' if zero else 'more than 0'} to 100 years"
        raise InvalidOptionError(f"{name} must be {limits}, not {_short(value)}")
    if value < least and not negative:
        raise InvalidOptionError(f"{name} must be at least {least:g} s, not {_short(value)}")
    return float(value)


def instant(name: str, value: object) -> datetime:
    """A point in time: an aware datetime. A naive one is refused, since nobody could say which time it means."""
    if not isinstance(value, datetime):
        raise InvalidOptionTypeError(f"{name} must be an aware datetime, not {_kind(value)}")
    if value.utcoffset() is None:
        raise InvalidOptionError(f"{name} must be an aware datetime; {value!r} has no time zone")
    return value


def count(name: str, value: object, least: int = 1, most: int = _MOST_INT) -> int:
    """A whole number within limits; neither a bool nor 3.0 nor "3"."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOptionTypeError(f"{name} must be an int, not {_kind(value)}")
    if not least <= value <= most:
        limits = f"at least {least}" if most == _MOST_INT and value < least else f"between {least} and {most}"
        raise InvalidOptionError(f"{name} must be {limits}, not {_short(value)}")
    return value


def flag(name: str, value: object) -> bool:
    """True or False, and no other value."""
    if not isinstance(value, bool):
        raise InvalidOptionTypeError(f"{name} must be True or False, not {_kind(value)}")
    return value


def text(name: str, value: object, most_bytes: int = _MOST_NAME_BYTES) -> str:
    """Text of at most `most_bytes` in UTF-8, without NUL and lone surrogates, which no database could hold."""
    if not isinstance(value, str):
        raise InvalidOptionTypeError(f"{name} must be a str, not {_kind(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidOptionError(f"{name} contains a lone surrogate") from None
    if "\0" in value:
        raise InvalidOptionError(f"{name} contains NUL")
    if size > most_bytes:
        raise InvalidOptionError(f"{name} is {size} bytes long; the limit is {most_bytes}")
    return value


def name(what: str, value: object) -> str:
    """The name of a step, a queue or a tag: not empty, at most 200 bytes, no control characters. All else is data."""
    value = text(what, value)
    if not value:
        raise InvalidOptionError(f"{what} must not be empty")
    if any(unicodedata.category(char) == "Cc" for char in value):
        raise InvalidOptionError(f"{what} must not contain control characters: {value!r}")
    return value


_MOST_KEY = 256


def key(what: str, value: object) -> str:
    """A submit key or a unique key: not empty, at most 256 bytes of UTF-8, no NUL. It is taken byte for byte: nothing
    is trimmed, folded or normalized. Raises InvalidKeyError, and InvalidOptionTypeError for what is no str.
    """
    if not isinstance(value, str):
        raise InvalidOptionTypeError(f"{what} must be a str, not {_kind(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidKeyError(f"{what} has a lone surrogate and is no valid UTF-8") from None
    if not value or "\0" in value or size > _MOST_KEY:
        fault = "is empty" if not value else "contains NUL" if "\0" in value else f"is {size} bytes long"
        raise InvalidKeyError(f"{what} {fault}; a key has 1 to {_MOST_KEY} bytes and no NUL")
    return value


def queue(what: str, value: object) -> str:
    """The name of a queue, which must not begin with `?` or `!`: such lanes are the engine's own."""
    value = name(what, value)
    if value[0] in "?!":
        raise InvalidOptionError(f"{what} must not begin with {value[0]!r}: {value!r}")
    return value


def queues(what: str, value: object) -> tuple[str, ...]:
    """One or more names of queues, each once."""
    found = tuple(queue(what, one) for one in _listed(what, value))
    if not found:
        raise InvalidOptionError(f"{what} must name at least one queue")
    if len(set(found)) < len(found):
        raise InvalidOptionError(f"{what} names a queue twice: {', '.join(found)}")
    return found


def tags(what: str, value: object) -> list[str]:
    """Free labels: a list of names."""
    return [name(what, one) for one in _listed(what, value)]


def known(what: str, given: Iterable[str], names: Collection[str]) -> None:
    """Refuses names that are not among the known ones, and proposes the one that was perhaps meant."""
    for one in given:
        if one not in names:
            raise InvalidOptionTypeError(f"{what} {one!r} is unknown{_meant(one, names)}")


def _listed(what: str, value: object) -> Sequence[object]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidOptionTypeError(f"{what} must be a list of str, not {_kind(value)}")
    return cast("Sequence[object]", value)


def _meant(one: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(one, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _kind(value: object) -> str:
    return type(value).__name__


def _short(value: float) -> str:
    # Python refuses to print an int of more than some thousand digits.
    return repr(value) if isinstance(value, float) or abs(value) < 10**30 else "a number of more than 30 digits"


# The options of a worker


class WorkerArguments(TypedDict, total=False):
    """The options of a worker under their public names; `WorkerOptions` tells the defaults."""

    queues: Sequence[str]
    concurrency: int
    threads: int
    lease: timedelta | float
    poll_interval: timedelta | float
    notify: bool
    claim_batch: int | str | None
    settle_batch: int | str | None
    settle_linger: timedelta | float
    completion_pool_size: int
    completion_pool_timeout: timedelta | float
    drain_timeout: timedelta | float
    stall_limit: timedelta | float | None
    max_output_bytes: int
    max_error_bytes: int


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of one worker process."""

    queues: tuple[str, ...] = ("default",)
    """The queues it takes steps from."""
    concurrency: int = 100
    """How many handlers run at the same time."""
    threads: int = 32
    """How many of them may be sync handlers, each in a thread."""
    lease_s: float = 60.0
    """How long its steps stay its own without renewal; renewed at a third of it."""
    poll_interval_s: float = 1.0
    """How often an idle worker looks for work when nothing notifies it."""
    notify: bool = True
    """Whether it listens for notifications. Off behind a pooler in transaction mode, where it only polls."""
    claim_batch: int | None = None
    """The most steps it claims at once; None: as many as it has room for."""
    settle_batch: int | None = None
    """The most outcomes it records in one transaction; None: 500."""
    settle_linger_s: float = 0.002
    """How long the first outcome waits for others to share its transaction."""
    completion_pool_size: int = 8
    """The most connections that completion transactions use at once."""
    completion_pool_timeout_s: float = 30.0
    """How long a handler waits for one of them; then its step is given back without spending an attempt."""
    drain_timeout_s: float = 30.0
    """How long running handlers may go on after a stop; then they are cancelled and their steps given back."""
    stall_limit_s: float | None = None
    """How long a handler may block the event loop before the process is replaced; None: five leases."""
    max_output_bytes: int = 1 << 20
    """The largest encoded output; a larger one fails its step as permanent."""
    max_error_bytes: int = 16 << 10
    """At which size a stored error and its traceback are cut."""

    @property
    def stall_after_s(self) -> float:
        """How long the event loop may stand still, with the default put in."""
        return self.stall_limit_s or self.lease_s * 5


def worker_options(**given: Any) -> WorkerOptions:
    """The options of a worker from their public names (`WorkerArguments`), all checked.

    Durations are timedeltas or seconds; sizes are bytes. A lease below one second is refused: it could not be renewed
    in time. An unknown name raises InvalidOptionTypeError.
    """
    known("worker option", given, _WORKER)
    return WorkerOptions(**{_WORKER[key].field: _WORKER[key].check(key, value) for key, value in given.items()})


# Sources


class _Setting(msgspec.Struct, frozen=True):
    field: str
    parse: Callable[[str, str], object]
    check: Callable[[str, Any], Any]


def settings(
    given: Mapping[str, object],
    *,
    env: Mapping[str, str] | None = None,
    pyproject: Path | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Any]:
    """The settings that hold, by public name: those given, else from the environment, else from the file.

    `given` takes None for unset, as the command line does. `env` defaults to the process's environment. `pyproject` is
    a file that `find_pyproject` found; without one, no file is read. `names` limits this to some settings; others are
    not checked. What no source sets is absent. Raises InvalidOptionError for an unknown name or a bad value, naming its
    source; an unknown variable is only logged, for the environment is shared with others.
    """
    known("setting", given, _SETTINGS)
    variables = _from_environment(os.environ if env is None else env)
    table = {} if pyproject is None else _from_file(pyproject)
    found: dict[str, object] = {}
    for key in _SETTINGS if names is None else names:
        if given.get(key) is not None:
            found[key] = _taken(key, key, given[key])
        elif key in variables:
            found[key] = _taken(f"CYCLONE_{key.upper()}", key, variables[key])
        elif key in table:
            found[key] = _taken(f"{key} in [tool.cyclone] of {pyproject}", key, table[key])
    return found


def find_pyproject(start: Path) -> Path | None:
    """The nearest pyproject.toml in a directory or above it."""
    for folder in (start, *start.parents):
        if (path := folder / "pyproject.toml").is_file():
            return path
    return None


def _taken(source: str, key: str, value: object) -> object:
    """A value as the setting's own check accepts it (and not converted: whoever takes it checks it again)."""
    setting = _SETTINGS[key]
    if isinstance(value, str):
        value = setting.parse(source, value)
    setting.check(source, value)
    return value


def _from_environment(env: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable, value in env.items():
        if not variable.startswith("CYCLONE_") or variable.startswith(("CYCLONE_TEST_", "CYCLONE_BENCH_")):
            continue
        key = variable.removeprefix("CYCLONE_").lower()
        if key not in _SETTINGS:
            log.warning("the variable %s is unknown and ignored%s", variable, _meant(key, _SETTINGS))
        elif value:
            found[key] = value
    return found


def _from_file(path: Path) -> dict[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InvalidOptionError(f"{path} cannot be read: {exc}") from exc
    table: object = content.get("tool", {}).get("cyclone", {})
    if not isinstance(table, dict):
        raise InvalidOptionTypeError(f"[tool.cyclone] of {path} must be a table")
    found = cast("dict[str, object]", table)
    known(f"in [tool.cyclone] of {path}, the key", found, _SETTINGS)
    return found


# Texts, as they stand in a variable, in the file or on the command line

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|d|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB|)")
_UNITS_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def parse_seconds(source: str, value: str) -> float:
    """A duration from text: a number, in seconds unless `ms`, `s`, `m`, `h` or `d` follows."""
    match = _DURATION.fullmatch(value.strip())
    if match is None or len(match[1]) > 20:
        raise InvalidOptionError(f"{source}: {value!r} is no duration; write 30, 1.5s, 200ms, 5m, 2h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_bytes(source: str, value: str) -> int:
    """A size from text: a whole number, in bytes unless `KiB`, `MiB` or `GiB` follows."""
    match = _SIZE.fullmatch(value.strip())
    if match is None or len(match[1]) > 20:
        raise InvalidOptionError(f"{source}: {value!r} is no size; write 65536, 64KiB or 1MiB")
    return int(match[1]) * _UNITS_BYTES[match[2]]


def parse_count(source: str, value: str) -> int:
    """A whole number from text."""
    if re.fullmatch(r"[+-]?[0-9]{1,20}", value.strip()) is None:
        raise InvalidOptionTypeError(f"{source}: {value!r} is no whole number")
    return int(value)


def parse_flag(source: str, value: str) -> bool:
    """true or false from text: also yes and no, on and off, 1 and 0."""
    try:
        return _FLAGS[value.strip().lower()]
    except KeyError:
        raise InvalidOptionTypeError(f"{source}: {value!r} is neither true nor false") from None


def parse_list(source: str, value: str) -> list[str]:
    """Names from text, separated by commas."""
    return [part.strip() for part in value.split(",")]


def parse_batch(source: str, value: str) -> int | None:
    """A whole number, or None for `auto`."""
    return None if value.strip() == "auto" else parse_count(source, value)


def _parse_text(source: str, value: str) -> str:
    return value


def _batch(what: str, value: object) -> int | None:
    return None if value is None or value == "auto" else count(what, value, 1, 10_000)


def _stall_limit(what: str, value: object) -> float | None:
    return None if value is None else seconds(what, value)


def _lease(what: str, value: object) -> float:
    return seconds(what, value, least=1.0)


def _poll_interval(what: str, value: object) -> float:
    return seconds(what, value, least=0.01)


def _zero_seconds(what: str, value: object) -> float:
    return seconds(what, value, zero=True)


def _dsn(what: str, value: object) -> str:
    return text(what, value, most_bytes=10_000)


def _procs(what: str, value: object) -> int:
    return count(what, value, 0, 10_000)


def _port(what: str, value: object) -> int:
    return count(what, value, 0, 65535)


_WORKER: dict[str, _Setting] = {
    "queues": _Setting("queues", parse_list, queues),
    "concurrency": _Setting("concurrency", parse_count, count),
    "threads": _Setting("threads", parse_count, count),
    "lease": _Setting("lease_s", parse_seconds, _lease),
    "poll_interval": _Setting("poll_interval_s", parse_seconds, _poll_interval),
    "notify": _Setting("notify", parse_flag, flag),
    "claim_batch": _Setting("claim_batch", parse_batch, _batch),
    "settle_batch": _Setting("settle_batch", parse_batch, _batch),
    "settle_linger": _Setting("settle_linger_s", parse_seconds, _zero_seconds),
    "completion_pool_size": _Setting("completion_pool_size", parse_count, count),
    "completion_pool_timeout": _Setting("completion_pool_timeout_s", parse_seconds, seconds),
    "drain_timeout": _Setting("drain_timeout_s", parse_seconds, _zero_seconds),
    "stall_limit": _Setting("stall_limit_s", parse_seconds, _stall_limit),
    "max_output_bytes": _Setting("max_output_bytes", parse_bytes, count),
    "max_error_bytes": _Setting("max_error_bytes", parse_bytes, count),
}
_SETTINGS: dict[str, _Setting] = {
    **_WORKER,
    "dsn": _Setting("dsn", _parse_text, _dsn),
    "schema": _Setting("schema", _parse_text, name),
    "procs": _Setting("procs", parse_count, _procs),
    "sweeper": _Setting("sweeper", parse_flag, flag),
    "metrics_port": _Setting("metrics_port", parse_count, _port),
    "metrics_host": _Setting("metrics_host", _parse_text, text),
    "recycle_after": _Setting("recycle_after", parse_count, count),
}
WORKER_NAMES: Collection[str] = _WORKER.keys()
"""The public names of a worker's options."""
