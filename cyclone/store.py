"""Store: what is submitted, steps and runs, is checked and encoded, then stored with its tickets.

Everything that can be wrong with a call is found by `prepare`, before a connection is taken. What the database then
does is one statement, or COPY in a transaction above a size. Measured on two cores with inputs of 100 bytes, tickets
included, 100,000 by COPY take 1.1 to 1.2 times as long as a bare COPY of the same rows. Up to a few thousand, the
statement's single round trip is worth more than what COPY saves, as the server is mostly not on the same machine.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import msgspec
import psycopg

from . import codec, config, db, graph, registry, wake
from .errors import DuplicateError, InvalidInputError, InvalidOptionError, SubmitConflictError
from .plan import Ask, Copy, Mark, Plan, Run

_COPY_FROM = 1_000
_BLOCK = 500  # rows of a COPY that are sent at once
_KNOWN = registry.ENQUEUE_OPTIONS
_KNOWN_MANY = _KNOWN | {"method"}


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one kind, ready to be stored: options checked, inputs encoded as JSON."""

    kind: str
    settings: registry.Settings
    inputs: Sequence[bytes]
    delay_s: float | None
    scheduled_at: datetime | None
    keep_for_s: float | None
    copy: bool
    keys: Sequence[str] | None = None
    strict: bool = True
    """Whether a duplicate of a key is an error."""


class Stored(msgspec.Struct, frozen=True):
    """The ids of what was stored, in the order of the inputs, and whether `wake` should follow the commit. `created`
    says which are new; None: all.
    """

    ids: Sequence[str]
    asleep: bool
    created: Sequence[bool] | None = None

    def pairs(self) -> Iterator[tuple[str, bool]]:
        """Each id with whether it is new."""
        return zip(self.ids, self.created or itertools.repeat(True), strict=False)


def prepare(
    step: registry.Step[Any, Any],
    inputs: Iterable[Any],
    options: Mapping[str, Any],
    *,
    max_input_bytes: int,
    in_tx: bool = False,
) -> Batch:
    """The batch of a call, without a look at the database. Raises InvalidOptionError or InvalidInputError."""
    config.known("option", options, _KNOWN_MANY)
    settings = registry.override(step.settings, options)
    delay = options.get("delay")
    at = options.get("scheduled_at")
    keep_for = options.get("keep_for")
    if delay is not None and at is not None:
        raise InvalidOptionError("delay and scheduled_at exclude each other")
    keys: list[str] | None = None
    unique = options.get("unique")
    strict = True
    if unique is not None:
        inputs = list(inputs)
        keys, strict = _keys(unique, inputs)
    encoded = _encoded(f"step {step.name!r}", step.input_codec, inputs, max_input_bytes)
    return Batch(
        keys=keys,
        strict=strict,
        kind=step.name,
        settings=settings,
        inputs=encoded,
        delay_s=None if delay is None else config.seconds("delay", delay, zero=True),
        scheduled_at=None if at is None else config.instant("scheduled_at", at),
        keep_for_s=None if keep_for is None else config.seconds("keep_for", keep_for),
        copy=_copies(options.get("method", "auto"), len(encoded), in_tx, keys is not None),
    )


def _keys(unique: object, inputs: Sequence[Any]) -> tuple[list[str], bool]:
    """The key of each input, and whether a duplicate is an error."""
    found = unique if isinstance(unique, registry.Unique) else registry.Unique(cast("Any", unique))
    if found.on_duplicate not in ("raise", "return"):
        raise InvalidOptionError(f"on_duplicate must be 'raise' or 'return', not {found.on_duplicate!r}")
    key = found.key
    if callable(key):
        keys = [key(value) for value in inputs]
    elif len(inputs) == 1:
        keys = [key]
    else:
        config.key("unique", key)
        raise InvalidOptionError("unique must be a function that makes the key of each input, as there are many")
    return [config.key("unique", one) for one in keys], found.on_duplicate == "raise"


def _copies(method: object, count: int, in_tx: bool, keyed: bool) -> bool:
    if method not in ("auto", "insert", "copy"):
        raise InvalidOptionError(f"method must be 'auto', 'insert' or 'copy', not {method!r}")
    if method == "copy" and in_tx:
        raise InvalidOptionError("method='copy' is not available in the caller's transaction")
    if method == "copy" and keyed:
        raise InvalidOptionError("method='copy' is not available with unique keys, which are looked up one by one")
    return not in_tx and not keyed and (method == "copy" or (method == "auto" and count > _COPY_FROM))


def _encoded(what: str, way: codec.Codec[Any], inputs: Iterable[Any], max_bytes: int) -> list[bytes]:
    found: list[bytes] = []
    rest = iter(inputs)
    while some := list(itertools.islice(rest, _BLOCK)):
        # A tenth of the time that they take alone, but it does not say which of them is wrong, and what is.
        block = way.encode_many(some)
        if block is None or len(max(block, key=len)) > max_bytes:
            for value in some:
                found.append(_encoded_one(f"input {len(found)} of {what}", way, value, max_bytes))
        else:
            found += block
    return found


def _encoded_one(what: str, way: codec.Codec[Any], value: Any, max_bytes: int) -> bytes:
    try:
        data = way.encode(value)
        # Encoders do not check: a value of another type, or a field of one, shows only when it is read back.
        way.decode(data)
    except (codec.EncodeError, codec.DecodeError) as exc:
        raise InvalidInputError(f"{what} cannot be taken: {exc}") from exc
    if len(data) > max_bytes:
        raise InvalidInputError(f"{what} takes {len(data)} bytes; max_input_bytes is {max_bytes}")
    return data


def enqueue(
    statements: db.Statements, batch: Batch, *, quiet: wake.Quiet | None = None, now: datetime | None = None
) -> Plan[Stored]:
    """Stores a batch and commits; then notifies those who sleep."""
    if batch.copy:
        yield Mark.BEGIN
        stored = yield from _store_by_copy(statements, batch, now)
    else:
        stored = yield from store(statements, batch, notify=None if batch.keys is None else False, now=now)
    yield Mark.COMMIT
    if not stored.asleep:
        return stored
    if batch.keys is None and not batch.copy:
        yield from wake.tell(statements)
    # A COPY has not asked whether anybody sleeps: it takes long enough to do so each time, and must not make it quiet.
    elif batch.copy or quiet is None or quiet.broken():
        yield from wake.sleepers(statements, now=now)
    return stored


def store(statements: db.Statements, batch: Batch, *, notify: bool | None, now: datetime | None = None) -> Plan[Stored]:
    """Stores a batch by one statement, in whatever transaction is open; with `notify` it notifies too. None, without
    keys: it may take over to notify, which is due at once after the commit. Raises DuplicateError when a unique key is
    taken, and then nothing is stored; the transaction can go on.
    """
    params = _params(batch, now)
    params |= {"inputs": _lines(batch.inputs), "channel": statements.channel, "notify": notify}
    if batch.keys is None:
        ((told,),) = yield Ask(statements["enqueue_steps"], params)
        ids = told.split(",")
        asleep = not ids[-1]
        if asleep:
            ids.pop()
        return Stored(ids, asleep)
    rows = yield Run(statements["enqueue_unique"], {**params, "keys": list(batch.keys), "strict": batch.strict})
    created = [bool(row[1]) for row in rows]
    if batch.strict:
        seen: set[str] = set()
        for key, (run_id, new, _) in zip(batch.keys, rows, strict=True):
            if not new and run_id is not None and key not in seen:
                raise DuplicateError(run_id, batch.kind, key)
            seen.add(key)
    return Stored([row[0] for row in rows], bool(rows[0][2]) and not notify, created)


def _store_by_copy(statements: db.Statements, batch: Batch, now: datetime | None) -> Plan[Stored]:
    """Stores the same rows by COPY. Needs a transaction, as it takes several statements."""
    ((drawn, ready, step, ticket),) = yield Run(
        statements["draw_ids"], {**_params(batch, now), "count": len(batch.inputs)}
    )
    ids = drawn.split(",")
    yield Copy(statements["copy_steps"], _steps(ids, batch.inputs, bool(ready), _fields(step)))
    if ready:
        yield Copy(statements["copy_tickets"], _tickets(ids, _fields(ticket)))
    return Stored(ids, bool(ready))  # the statement that wakes looks whether somebody sleeps


def _params(batch: Batch, now: datetime | None) -> dict[str, Any]:
    settings = batch.settings
    return {
        "kind": batch.kind,
        "queue": settings.queue,
        "priority": settings.priority,
        "rank": settings.priority * 2 + 1,  # two for each priority; the lower one is for work that a worker gave back
        "version": settings.version,
        "max_attempts": settings.max_attempts,
        "timeout_s": settings.timeout_s,
        "tags": settings.tags,
        "metadata": settings.metadata,
        "keep_for_s": batch.keep_for_s,
        "scheduled_at": batch.scheduled_at,
        "delay_s": batch.delay_s,
        "now": now,
    }


def _lines(inputs: Sequence[bytes]) -> str:
    return b"\n".join(inputs).decode()


# Runs of workflows


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Submissions of one workflow, ready to be stored: options checked, inputs encoded as JSON."""

    workflow: graph.AnyWorkflow
    inputs: Sequence[bytes]
    keys: Sequence[str] | None
    typed: bool
    params: dict[str, Any]


class Submitted(msgspec.Struct, frozen=True):
    """One submission: its run, whether it is new, and what is wrong with the input if the run has another."""

    run_id: str
    created: bool
    error: SubmitConflictError | None


def prepare_runs(
    workflow: graph.AnyWorkflow,
    inputs: Iterable[Any],
    options: graph.SubmitOptions,
    *,
    max_input_bytes: int,
    keys: Sequence[str] | None = None,
    compare: object = "json",
) -> Runs:
    """The submissions of a call, without a look at the database. Raises InvalidOptionError or InvalidInputError."""
    config.known("option", options, graph.SUBMIT_OPTIONS)
    if compare not in ("json", "typed"):
        raise InvalidOptionError(f"compare must be 'json' or 'typed', not {compare!r}")
    settings = registry.override(registry.Settings(), options)
    delay, at = options.get("delay"), options.get("scheduled_at")
    if delay is not None and at is not None:
        raise InvalidOptionError("delay and scheduled_at exclude each other")
    deadline = options.get("deadline", workflow.spec.deadline_s)
    moment = isinstance(deadline, datetime)
    keep_for = options.get("keep_for", workflow.spec.keep_for_s)
    params: dict[str, Any] = {
        "hash": workflow.spec.hash,
        "keys": None if keys is None else [config.key("key", key) for key in keys],
        "queue": settings.queue if "queue" in options else None,
        "priority": settings.priority if "priority" in options else None,
        "tags": settings.tags,
        "metadata": settings.metadata,
        "keep_for_s": None if keep_for is None else config.seconds("keep_for", keep_for),
        "scheduled_at": None if at is None else config.instant("scheduled_at", at),
        "delay_s": None if delay is None else config.seconds("delay", delay, zero=True),
        "deadline_s": None if deadline is None or moment else config.seconds("deadline", deadline),
        "deadline_at": config.instant("deadline", deadline) if moment else None,
    }
    encoded = _encoded(f"workflow {workflow.name!r}", workflow.input_codec, inputs, max_input_bytes)
    return Runs(workflow=workflow, inputs=encoded, keys=params["keys"], typed=compare == "typed", params=params)


def submit(
    statements: db.Statements, runs: Runs, *, quiet: wake.Quiet | None = None, now: datetime | None = None
) -> Plan[list[Submitted]]:
    """Stores submissions and commits; then notifies those who sleep. Returns what came of each, in their order."""
    found, asleep = yield from store_runs(statements, runs, notify=False, now=now)
    yield Mark.COMMIT
    if asleep and (quiet is None or quiet.broken()):
        yield from wake.sleepers(statements, now=now)
    return found


def store_runs(
    statements: db.Statements, runs: Runs, *, notify: bool, now: datetime | None = None
) -> Plan[tuple[list[Submitted], bool]]:
    """Stores submissions in whatever transaction is open, with `notify` it notifies too. The graph goes along with the
    first submission that the database sees of it.
    """
    what = Run(
        statements["submit_runs"],
        {
            **runs.params,
            "inputs": _lines(runs.inputs),
            "channel": statements.channel,
            "notify": notify,
            "now": now,
        },
    )
    rows = yield what
    if not rows:
        spec = runs.workflow.spec
        yield Run(statements["register_graph"], {"hash": spec.hash, "spec": spec.encode().decode(), "newest": False})
        rows = yield what
        if not rows:  # committed by another transaction after the snapshot of this one
            raise psycopg.errors.SerializationFailure(
                "the graph of the workflow was stored by a concurrent transaction"
            )
    found: list[Submitted] = []
    for n, (run_id, created, differs, _) in enumerate(rows):
        error = None
        if differs is not None and runs.keys is not None:
            diff = _differences(runs, differs, runs.inputs[n])
            if diff:
                error = SubmitConflictError(run_id, runs.workflow.name, runs.keys[n], diff)
        found.append(Submitted(run_id, bool(created), error))
    return found, bool(rows[0][3]) and not notify


def _differences(runs: Runs, stored: str, new: bytes) -> list[str]:
    if runs.typed:
        # As the type of today reads it: members that it has got since then have their defaults.
        with contextlib.suppress(codec.DecodeError, codec.EncodeError):
            stored = runs.workflow.input_codec.encode(runs.workflow.input_codec.decode(stored)).decode()
        return codec.differences(stored, new)
    # The server has found them different; where it is finer than this, the whole is named.
    return codec.differences(stored, new) or [""]


def find_run(statements: db.Statements, workflow: str, key: str) -> Plan[str | None]:
    """The id of the run that has a submit key."""
    rows = yield Run(statements["find_run"], {"workflow": workflow, "key": key})
    return rows[0][0] if rows else None


# The binary format of COPY, built by hand: psycopg's own formatting costs more than all the rest of a row, and in text
# the server reads the same times and numbers anew in every row (measured: 9.3 us of its CPU a step, against 6.2).

_BEGIN, _END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_bigint = struct.Struct("!iq").pack


def _fields(values: Iterable[bytes | None]) -> bytes:
    return b"".join(_NULL if data is None else len(data).to_bytes(4) + data for data in values)


def _steps(ids: Sequence[str], inputs: Sequence[bytes], ready: bool, same: bytes) -> Iterator[bytes]:
    yield _BEGIN
    for start in range(0, len(ids), _BLOCK):
        rows: list[bytes] = []
        for run_id, data in zip(ids[start : start + _BLOCK], inputs[start : start + _BLOCK], strict=True):
            key = _bigint(8, int(run_id))
            # id, run_id, ord, and input as jsonb of version 1
            rows += (b"\0\x12", key, key, key if ready else _NULL, (len(data) + 1).to_bytes(4), b"\x01", data, same)
        yield b"".join(rows)
    yield _END


def _tickets(ids: Sequence[str], same: bytes) -> Iterator[bytes]:
    yield _BEGIN
    for start in range(0, len(ids), _BLOCK):
        keys = [_bigint(8, int(run_id)) for run_id in ids[start : start + _BLOCK]]
        yield b"".join([b"\0\x04" + key + key + same for key in keys])  # ord and step
    yield _END
