"""Which handler: steps as they are declared, and the registries that a worker takes them from.

A step checks its options and its types when it is declared, so that a fault shows at import and not in the night. It
knows neither a client nor the database: whoever can enqueue (a client, a handler's context) offers
`__cyclone_enqueue__`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import types
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from . import codec, config, retry
from .errors import InvalidOptionError, InvalidOptionTypeError, TargetError

if TYPE_CHECKING:
    from .context import Context, ProcessContext, SyncContext
    from .handles import StepHandle, SyncStepHandle

In = TypeVar("In")
Out = TypeVar("Out")
UpgradeFn = TypeVar("UpgradeFn", bound=Callable[[Any], Any])
LifespanFn = Callable[["State"], AsyncIterator[None]]
RedactFn = Callable[[str], str]
Executor = Literal["auto", "async", "thread", "process"]

Delay = timedelta | float


class AsyncTx(Protocol):
    """A transaction of async code: a psycopg.AsyncConnection, or SQLAlchemy's AsyncConnection or AsyncSession.

    Which of them an object is, and whether it is in a transaction, is found out when it is used: this names what all of
    them have, so that neither library is needed for the types.
    """

    def commit(self) -> Awaitable[None]: ...

    def rollback(self) -> Awaitable[None]: ...


class SyncTx(Protocol):
    """A transaction of sync code: a psycopg.Connection, SQLAlchemy's Connection or Session, or Django's connection."""

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class CallOptions(TypedDict, total=False):
    """Options of a step that an enqueue may set too; the most specific wins."""

    max_attempts: int
    """Attempts allowed, at least 1 (default 5)."""
    timeout: Delay | None
    """The limit of one attempt, a timedelta or seconds (default none)."""
    queue: str
    """The queue (default "default")."""
    priority: int
    """From 0, the highest, to 9 (default 5)."""
    tags: Sequence[str] | None
    """Free labels."""
    metadata: Mapping[str, Any] | None
    """Free JSON that goes with the step."""


class CommonOptions(CallOptions, total=False):
    """Options of a step's declaration that hold wherever its handler runs."""

    backoff: retry.Backoff
    """The wait after a failed attempt (default `default_backoff`)."""
    grace: Delay
    """How long a handler may clean up after it was asked to stop (default 5 s)."""
    retry_on: tuple[type[BaseException], ...]
    """Exceptions that are retried although `permanent_on` names them."""
    permanent_on: tuple[type[BaseException], ...]
    """Exceptions that end the step as if they were `Permanent`."""
    max_snoozes: int | None
    """How often it may snooze (default None: without limit)."""
    max_reclaims: int | None
    """After how many deaths of its worker it is discarded as crashed (default 10; None: without limit)."""
    version: int
    """The version of the input's schema, from 1. Workers claim only versions that they declare or can upgrade."""


class StepOptions(CommonOptions, total=False):
    """Options of a step's declaration."""

    executor: Executor
    """Where the handler runs: `async def` in the loop, `def` in a thread; "auto" is right for both. "process" runs a
    `def` in a process that can be killed: at its timeout, at a cancel, when it takes too much memory."""
    memory_limit: str | int | None
    """Only with `executor="process"`: how much memory that process may allocate, as "512MiB", "1GiB" or bytes (default
    None: without limit)."""


OnDuplicate = Literal["raise", "return"]


class Unique(msgspec.Struct, frozen=True):
    """A unique key of an enqueue, and what happens if an active step of the same kind has it.

    `key` has 1 to 256 bytes; for `enqueue_many` it is a function that makes the key of an input.
    `on_duplicate="raise"` (the default) raises DuplicateError, and nothing is enqueued; `"return"` gives the handle
    of the step that has the key, with `created` false. A step has its key until it has ended.
    """

    key: str | Callable[[Any], str]
    on_duplicate: OnDuplicate = "raise"


class EnqueueBase(CallOptions, total=False):
    """Options of any enqueue."""

    delay: Delay | None
    """How long to wait before it becomes available, by the database's clock."""
    scheduled_at: datetime | None
    """When it becomes available: an aware datetime; a past one means at once. Not together with `delay`."""
    keep_for: Delay | None
    """How long to keep it after it has ended, in place of what the retention says."""


class EnqueueOptions(EnqueueBase, total=False):
    """Options of one enqueue."""

    unique: str | Unique | None
    """A key that only one active step of this kind may have; as text it stands for `Unique(key)`."""


class EnqueueManyOptions(EnqueueBase, total=False):
    """Options of one enqueue of many."""

    unique: Callable[[Any], str] | Unique | None
    """What makes the unique key of each input; a function stands for `Unique(function)`. With `on_duplicate="return"`
    the handles tell by `created` which steps are new. Two equal keys in one call keep the first.
    """

    method: Literal["auto", "insert", "copy"]
    """How the rows travel: one statement, or COPY; "auto" (the default) takes COPY above 1,000 inputs. The rows are the
    same. In the caller's transaction it is always one statement, and "copy" is refused."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of a step."""

    max_attempts: int = 5
    timeout_s: float | None = None
    queue: str = "default"
    priority: int = 5
    tags: list[str] | None = None
    metadata: str | None = None
    """As JSON."""
    backoff: retry.BoundBackoff | None = None
    """None: the default curve."""
    grace_s: float = 5.0
    retry_on: tuple[type[BaseException], ...] = ()
    permanent_on: tuple[type[BaseException], ...] = ()
    max_snoozes: int | None = None
    max_reclaims: int | None = 10
    version: int = 1
    memory_limit: int | None = None
    """In bytes."""


class AsyncSubmitter(Protocol):
    """Whatever enqueues for async code."""

    def __cyclone_enqueue__(
        self,
        step: Step[In, Out],
        inputs: Iterable[In],
        options: Any,
        tx: AsyncTx | None = None,
        /,
    ) -> Awaitable[list[StepHandle[Out]]]: ...


class SyncSubmitter(Protocol):
    """Whatever enqueues for sync code."""

    def __cyclone_enqueue__(
        self,
        step: Step[In, Out],
        inputs: Iterable[In],
        options: Any,
        tx: SyncTx | None = None,
        /,
    ) -> list[SyncStepHandle[Out]]: ...


class Step(Generic[In, Out]):
    """A declared step: a handler with a name, its types and its options.

    The methods that enqueue raise InvalidOptionError or InvalidInputError before any connection is taken. Given an
    async client, or the context of an async handler, they return an awaitable; given their sync counterparts, the
    value. The `_tx` forms take a connection of the caller's that is in a transaction (TransactionRequiredError
    otherwise, TypeError for another object): the step exists if and only if that transaction commits. All others commit
    by themselves.
    """

    name: str
    options: StepOptions
    """As they were given; `settings` holds them checked, with defaults."""
    input_type: Any
    output_type: Any
    is_async: bool
    action: bool
    """Whether it must return None, and its output stays SQL NULL."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None,
        options: StepOptions,
        *,
        action: bool = False,
        scope: Mapping[str, Any] | None = None,
    ) -> None:
        self.fn = fn
        self.name = config.name("the name of a step", default_name(fn) if name is None else name)
        if self.name == MAP:
            raise InvalidOptionError(f"the name {MAP!r} is the engine's own")
        self.action = action
        self.options = options
        self.settings = _settings(self.name, options)
        self.is_async = _is_async(self.name, fn, options)
        takes_input, self.input_type, self.output_type = _types(self.name, fn, scope or {})
        # Chosen once, as it is called for every step.
        self._call: Callable[[Any, Any], Any] = fn if takes_input else lambda ctx, _: fn(ctx)
        if action and self.output_type not in (None, Any):
            raise InvalidOptionError(f"action {self.name!r} must return None, not {self.output_type!r}; use @step")
        self.input_codec: codec.Codec[In] = _codec(self.name, "input", self.input_type)
        self.output_codec: codec.Codec[Out] = _codec(self.name, "output", self.output_type)
        self._upgrades: dict[int, Callable[[Any], Any]] = {}
        self.__doc__ = fn.__doc__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @overload
    def enqueue(
        self: Step[None, Out], client: AsyncSubmitter, input: None = None, **options: Unpack[EnqueueOptions]
    ) -> Awaitable[StepHandle[Out]]: ...
    @overload
    def enqueue(
        self: Step[None, Out], client: SyncSubmitter, input: None = None, **options: Unpack[EnqueueOptions]
    ) -> SyncStepHandle[Out]: ...
    @overload
    def enqueue(
        self, client: AsyncSubmitter, input: In, **options: Unpack[EnqueueOptions]
    ) -> Awaitable[StepHandle[Out]]: ...
    @overload
    def enqueue(self, client: SyncSubmitter, input: In, **options: Unpack[EnqueueOptions]) -> SyncStepHandle[Out]: ...
    def enqueue(self, client: Any, input: Any = None, **options: Unpack[EnqueueOptions]) -> Any:
        """Enqueues the step once, as a run of its own, and returns its handle."""
        return single(_enqueue(self, client, (input,), options))

    @overload
    def enqueue_tx(
        self: Step[None, Out],
        client: AsyncSubmitter,
        tx: AsyncTx,
        input: None = None,
        **options: Unpack[EnqueueOptions],
    ) -> Awaitable[StepHandle[Out]]: ...
    @overload
    def enqueue_tx(
        self: Step[None, Out],
        client: SyncSubmitter,
        tx: SyncTx,
        input: None = None,
        **options: Unpack[EnqueueOptions],
    ) -> SyncStepHandle[Out]: ...
    @overload
    def enqueue_tx(
        self, client: AsyncSubmitter, tx: AsyncTx, input: In, **options: Unpack[EnqueueOptions]
    ) -> Awaitable[StepHandle[Out]]: ...
    @overload
    def enqueue_tx(
        self, client: SyncSubmitter, tx: SyncTx, input: In, **options: Unpack[EnqueueOptions]
    ) -> SyncStepHandle[Out]: ...
    def enqueue_tx(self, client: Any, tx: Any, input: Any = None, **options: Unpack[EnqueueOptions]) -> Any:
        """As `enqueue`, in the caller's transaction. Nothing but SQL is sent on its connection."""
        return single(_enqueue(self, client, (input,), options, given(tx)))

    @overload
    def enqueue_many(
        self, client: AsyncSubmitter, inputs: Iterable[In], **options: Unpack[EnqueueManyOptions]
    ) -> Awaitable[list[StepHandle[Out]]]: ...
    @overload
    def enqueue_many(
        self, client: SyncSubmitter, inputs: Iterable[In], **options: Unpack[EnqueueManyOptions]
    ) -> list[SyncStepHandle[Out]]: ...
    def enqueue_many(self, client: Any, inputs: Iterable[In], **options: Unpack[EnqueueManyOptions]) -> Any:
        """Enqueues the step once for each input, all in one commit. The handles are in the order of the inputs."""
        return _enqueue(self, client, inputs, options)

    @overload
    def enqueue_many_tx(
        self, client: AsyncSubmitter, tx: AsyncTx, inputs: Iterable[In], **options: Unpack[EnqueueManyOptions]
    ) -> Awaitable[list[StepHandle[Out]]]: ...
    @overload
    def enqueue_many_tx(
        self, client: SyncSubmitter, tx: SyncTx, inputs: Iterable[In], **options: Unpack[EnqueueManyOptions]
    ) -> list[SyncStepHandle[Out]]: ...
    def enqueue_many_tx(self, client: Any, tx: Any, inputs: Iterable[In], **options: Unpack[EnqueueManyOptions]) -> Any:
        """As `enqueue_many`, in the caller's transaction."""
        return _enqueue(self, client, inputs, options, given(tx))

    def upgrade(self, from_version: int) -> Callable[[UpgradeFn], UpgradeFn]:
        """Declares how JSON of an older version of the input becomes JSON of the next one.

        The decorated function takes and returns decoded JSON. Steps enqueued under every version from which a chain of
        such functions leads to the current one are then accepted by workers. Raises InvalidOptionError if the version
        is not older than the step's, or was declared already.
        """
        config.count("from_version", from_version, 1, max(self.settings.version - 1, 1))
        if from_version >= self.settings.version or from_version in self._upgrades:
            fault = "is the current one" if from_version >= self.settings.version else "has an upgrade already"
            raise InvalidOptionError(f"step {self.name!r}: version {from_version} {fault}")

        def decorate(fn: UpgradeFn) -> UpgradeFn:
            self._upgrades[from_version] = fn
            return fn

        return decorate

    @property
    def versions(self) -> frozenset[int]:
        """The versions of the input that it accepts: its own, and older ones that it can upgrade."""
        oldest = self.settings.version
        while oldest - 1 in self._upgrades:
            oldest -= 1
        return frozenset(range(oldest, self.settings.version + 1))

    def decode_input(self, version: int, data: str | None) -> In:
        """A stored input as the handler's type, or `codec.DecodeError`."""
        if data is None:
            data = "null"
        if version == self.settings.version:
            return self.input_codec.decode(data)
        if version not in self.versions:
            raise codec.DecodeError(f"version {version} of the input is unknown to step {self.name!r}")
        value = msgspec.json.decode(data)
        for one in range(version, self.settings.version):
            try:
                value = self._upgrades[one](value)
            except Exception as exc:
                raise codec.DecodeError(f"the upgrade from version {one} raised {type(exc).__name__}: {exc}") from exc
        return self.input_codec.decode(msgspec.json.encode(value))


class AsyncStep(Step[In, Out]):
    """A step whose handler is an `async def` and takes a `Context`."""

    @overload
    def __call__(self: AsyncStep[None, Out], ctx: Context, input: None = None) -> Coroutine[Any, Any, Out]: ...
    @overload
    def __call__(self, ctx: Context, input: In) -> Coroutine[Any, Any, Out]: ...
    def __call__(self, ctx: Any, input: Any = None) -> Coroutine[Any, Any, Out]:
        """Calls the plain function, as in a unit test. Nothing is enqueued."""
        return cast("Coroutine[Any, Any, Out]", self._call(ctx, input))


class SyncStep(Step[In, Out]):
    """A step whose handler is a `def`, takes a `SyncContext` and runs in a thread."""

    @overload
    def __call__(self: SyncStep[None, Out], ctx: SyncContext, input: None = None) -> Out: ...
    @overload
    def __call__(self, ctx: SyncContext, input: In) -> Out: ...
    def __call__(self, ctx: Any, input: Any = None) -> Out:
        """Calls the plain function, as in a unit test. Nothing is enqueued."""
        return cast("Out", self._call(ctx, input))


class ProcessStep(Step[In, Out]):
    """A step whose handler is a `def`, takes a `ProcessContext` and runs in a process of its own."""

    @overload
    def __call__(self: ProcessStep[None, Out], ctx: ProcessContext, input: None = None) -> Out: ...
    @overload
    def __call__(self, ctx: ProcessContext, input: In) -> Out: ...
    def __call__(self, ctx: Any, input: Any = None) -> Out:
        """Calls the plain function, as in a unit test, in this process. Nothing is enqueued."""
        return cast("Out", self._call(ctx, input))


# Declaring


class StepDecorator(Protocol):
    """What `step(...)` returns."""

    @overload
    def __call__(self, fn: Callable[[Context, In], Coroutine[Any, Any, Out]], /) -> AsyncStep[In, Out]: ...
    @overload
    def __call__(self, fn: Callable[[Context], Coroutine[Any, Any, Out]], /) -> AsyncStep[None, Out]: ...
    @overload
    def __call__(self, fn: Callable[[SyncContext, In], Out], /) -> SyncStep[In, Out]: ...
    @overload
    def __call__(self, fn: Callable[[SyncContext], Out], /) -> SyncStep[None, Out]: ...


class ActionDecorator(Protocol):
    """What `action(...)` returns."""

    @overload
    def __call__(self, fn: Callable[[Context, In], Coroutine[Any, Any, None]], /) -> AsyncStep[In, None]: ...
    @overload
    def __call__(self, fn: Callable[[Context], Coroutine[Any, Any, None]], /) -> AsyncStep[None, None]: ...
    @overload
    def __call__(self, fn: Callable[[SyncContext, In], None], /) -> SyncStep[In, None]: ...
    @overload
    def __call__(self, fn: Callable[[SyncContext], None], /) -> SyncStep[None, None]: ...


class ProcessStepDecorator(Protocol):
    """What `step(..., executor="process")` returns."""

    @overload
    def __call__(self, fn: Callable[[ProcessContext, In], Out], /) -> ProcessStep[In, Out]: ...
    @overload
    def __call__(self, fn: Callable[[ProcessContext], Out], /) -> ProcessStep[None, Out]: ...


class ProcessActionDecorator(Protocol):
    """What `action(..., executor="process")` returns."""

    @overload
    def __call__(self, fn: Callable[[ProcessContext, In], None], /) -> ProcessStep[In, None]: ...
    @overload
    def __call__(self, fn: Callable[[ProcessContext], None], /) -> ProcessStep[None, None]: ...


@overload
def step(
    name: str | None = None,
    *,
    executor: Literal["process"],
    memory_limit: str | int | None = None,
    registry: Registry | None = None,
    **options: Unpack[CommonOptions],
) -> ProcessStepDecorator: ...
@overload
def step(
    name: str | None = None,
    *,
    executor: Literal["auto", "async", "thread"] = "auto",
    registry: Registry | None = None,
    **options: Unpack[CommonOptions],
) -> StepDecorator: ...
def step(name: str | None = None, *, registry: Registry | None = None, **options: Any) -> Any:
    """Declares a handler as a step. `name` defaults to `module.function`; the options are those of `StepOptions`.

    The handler is `async def f(ctx: Context, input: In) -> Out` or `def f(ctx: SyncContext, input: In) -> Out`; a step
    without input leaves the second parameter out. Both types are read from the annotations. A registry or a pool's
    module makes the step known to workers. Raises InvalidOptionError for bad options and for annotations that are
    missing, cannot be resolved or name a type without an encoding. A handler may be called more than once for one step.

    With `executor="process"` the handler is `def f(ctx: ProcessContext, input: In) -> Out`, declared where an import
    finds it: at the top of a module.
    """
    return _decorator(name, registry, cast("StepOptions", options), action=False)


@overload
def action(
    name: str | None = None,
    *,
    executor: Literal["process"],
    memory_limit: str | int | None = None,
    registry: Registry | None = None,
    **options: Unpack[CommonOptions],
) -> ProcessActionDecorator: ...
@overload
def action(
    name: str | None = None,
    *,
    executor: Literal["auto", "async", "thread"] = "auto",
    registry: Registry | None = None,
    **options: Unpack[CommonOptions],
) -> ActionDecorator: ...
def action(name: str | None = None, *, registry: Registry | None = None, **options: Any) -> Any:
    """As `step`, for a handler that returns None: its output stays SQL NULL, and a value returned is an error."""
    return _decorator(name, registry, cast("StepOptions", options), action=True)


def _decorator(
    name: str | None, registry: Registry | None, options: StepOptions, *, action: bool
) -> Callable[[Callable[..., Any]], Step[Any, Any]]:
    if callable(name):
        word = "action" if action else "step"
        raise InvalidOptionTypeError(f"write @{word}() with parentheses")

    def decorate(fn: Callable[..., Any]) -> Step[Any, Any]:
        # Types that are local to the function around the declaration are found in its frame.
        scope = sys._getframe(1).f_locals  # pyright: ignore[reportPrivateUsage]
        declared = _sort(fn, options)(fn, name, options, action=action, scope=scope)
        if registry is not None:
            registry.include(declared)
        return declared

    return decorate


def _sort(fn: Callable[..., Any], options: StepOptions) -> type[Step[Any, Any]]:
    if inspect.iscoroutinefunction(_function(fn)):
        return AsyncStep
    return ProcessStep if options.get("executor") == "process" else SyncStep


@overload
def enqueue(
    client: AsyncSubmitter, step: Step[None, Out], input: None = None, **options: Unpack[EnqueueOptions]
) -> Awaitable[StepHandle[Out]]: ...
@overload
def enqueue(
    client: SyncSubmitter, step: Step[None, Out], input: None = None, **options: Unpack[EnqueueOptions]
) -> SyncStepHandle[Out]: ...
@overload
def enqueue(
    client: AsyncSubmitter, step: Step[In, Out], input: In, **options: Unpack[EnqueueOptions]
) -> Awaitable[StepHandle[Out]]: ...
@overload
def enqueue(
    client: SyncSubmitter, step: Step[In, Out], input: In, **options: Unpack[EnqueueOptions]
) -> SyncStepHandle[Out]: ...
def enqueue(client: Any, step: Step[Any, Any], input: Any = None, **options: Unpack[EnqueueOptions]) -> Any:
    """The function form of `Step.enqueue`."""
    return cast("Any", step).enqueue(client, input, **options)


@overload
def enqueue_tx(
    client: AsyncSubmitter, tx: AsyncTx, step: Step[None, Out], input: None = None, **options: Unpack[EnqueueOptions]
) -> Awaitable[StepHandle[Out]]: ...
@overload
def enqueue_tx(
    client: SyncSubmitter, tx: SyncTx, step: Step[None, Out], input: None = None, **options: Unpack[EnqueueOptions]
) -> SyncStepHandle[Out]: ...
@overload
def enqueue_tx(
    client: AsyncSubmitter, tx: AsyncTx, step: Step[In, Out], input: In, **options: Unpack[EnqueueOptions]
) -> Awaitable[StepHandle[Out]]: ...
@overload
def enqueue_tx(
    client: SyncSubmitter, tx: SyncTx, step: Step[In, Out], input: In, **options: Unpack[EnqueueOptions]
) -> SyncStepHandle[Out]: ...
def enqueue_tx(client: Any, tx: Any, step: Step[Any, Any], input: Any = None, **options: Unpack[EnqueueOptions]) -> Any:
    """The function form of `Step.enqueue_tx`."""
    return cast("Any", step).enqueue_tx(client, tx, input, **options)


def door(client: Any, name: str) -> Callable[..., Any]:
    """What a client or a context offers under a name, or TypeError."""
    try:
        return cast("Callable[..., Any]", getattr(client, name))
    except AttributeError:
        raise TypeError(f"a Client, SyncClient or handler context is expected, not {type(client).__name__}") from None


def given(tx: Any) -> Any:
    """A caller's transaction; None, which to the one who submits would mean a commit of its own, is refused."""
    if tx is None:
        raise TypeError("a connection that is in a transaction is expected, not None")
    return tx


def then(found: Any, function: Callable[[Any], Any]) -> Any:
    """What a function makes of a value, or an awaitable of it where the value is to be awaited."""

    async def later() -> Any:
        return function(await found)

    return later() if inspect.isawaitable(found) else function(found)


def _enqueue(step: Step[Any, Any], client: Any, inputs: Iterable[Any], options: Any, tx: Any = None) -> Any:
    return door(client, "__cyclone_enqueue__")(step, inputs, options, tx)


def single(handles: Any) -> Any:
    """The only one of a list, or an awaitable of it."""
    return then(handles, lambda found: found[0])


# The checks of a declaration

_CALL_OPTIONS = frozenset(CallOptions.__annotations__)
_STEP_OPTIONS = frozenset(StepOptions.__annotations__)
ENQUEUE_OPTIONS = frozenset(EnqueueOptions.__annotations__)
_LEAST_MEMORY = 64 << 20
_METADATA: codec.Codec[Any] = codec.Codec(dict[str, Any])


def override(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """Settings with the call options among `options` in place of their own, checked."""
    changed: dict[str, Any] = {}
    for key in _CALL_OPTIONS & options.keys():
        value = options[key]
        match key:
            case "max_attempts":
                changed[key] = config.count(key, value)
            case "timeout":
                changed["timeout_s"] = None if value is None else config.seconds(key, value)
            case "queue":
                changed[key] = config.queue(key, value)
            case "priority":
                changed[key] = config.count(key, value, 0, 9)
            case "tags":
                changed[key] = None if value is None else config.tags(key, value)
            case _:
                changed[key] = None if value is None else _metadata(value)
    return msgspec.structs.replace(settings, **changed) if changed else settings


def _settings(name: str, options: StepOptions) -> Settings:
    try:
        config.known("option", options, _STEP_OPTIONS)
        settings = override(Settings(), options)
        changed: dict[str, Any] = {}
        if "backoff" in options:
            changed["backoff"] = retry.bind(options["backoff"])
        if "grace" in options:
            changed["grace_s"] = config.seconds("grace", options["grace"], zero=True)
        if "retry_on" in options:
            changed["retry_on"] = _exceptions("retry_on", options["retry_on"])
        if "permanent_on" in options:
            changed["permanent_on"] = _exceptions("permanent_on", options["permanent_on"])
        if "max_snoozes" in options:
            changed["max_snoozes"] = _limit("max_snoozes", options["max_snoozes"], 0)
        if "max_reclaims" in options:
            changed["max_reclaims"] = _limit("max_reclaims", options["max_reclaims"], 1)
        if "version" in options:
            changed["version"] = config.count("version", options["version"])
        if options.get("memory_limit") is not None:
            changed["memory_limit"] = _memory_limit(options)
        return msgspec.structs.replace(settings, **changed)
    except InvalidOptionError as exc:
        raise type(exc)(f"step {name!r}: {exc}") from exc.__cause__


def _memory_limit(options: StepOptions) -> int:
    value = options.get("memory_limit")
    if options.get("executor") != "process":
        raise InvalidOptionError('memory_limit needs executor="process": threads share the memory of their worker')
    if isinstance(value, str):
        value = config.parse_bytes("memory_limit", value)
    # Python itself with this package takes some 25 MiB.
    return config.count("memory_limit", value, _LEAST_MEMORY, 1 << 62)


def _limit(what: str, value: int | None, least: int) -> int | None:
    return None if value is None else config.count(what, value, least)


def _exceptions(what: str, value: object) -> tuple[type[BaseException], ...]:
    if not isinstance(value, tuple) or not all(
        isinstance(one, type) and issubclass(one, BaseException) for one in cast("tuple[object, ...]", value)
    ):
        raise InvalidOptionTypeError(f"{what} must be a tuple of exception classes, not {value!r}")
    return cast("tuple[type[BaseException], ...]", value)


def _metadata(value: object) -> str:
    if not isinstance(value, Mapping):
        raise InvalidOptionTypeError(f"metadata must be a mapping from str to JSON, not {type(value).__name__}")
    found = dict(cast("Mapping[object, object]", value))
    if not all(isinstance(key, str) for key in found):
        raise InvalidOptionTypeError("the keys of metadata must be str")
    try:
        return _METADATA.encode(found).decode()
    except codec.EncodeError as exc:
        raise InvalidOptionError(f"metadata cannot be stored: {exc}") from exc


def _function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What runs when `fn` is called: itself, or the `__call__` of an object."""
    known: Any = fn
    if inspect.isroutine(known) or isinstance(known, functools.partial):
        return fn
    called: Callable[..., Any] = type(known).__call__
    return called


def default_name(fn: Callable[..., Any]) -> str:
    """`module.function` of what is declared without a name."""
    name = getattr(fn, "__qualname__", None)
    if name is None:
        raise InvalidOptionError(f'{fn!r} has no name of its own; give one: @step("name")')
    # What stands before <locals> is where it was declared, not what it is.
    return f"{fn.__module__}.{name.rpartition('<locals>.')[2]}"


def _is_async(name: str, fn: Callable[..., Any], options: StepOptions) -> bool:
    executor: str = options.get("executor", "auto")
    function = _function(fn)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOptionError(f"step {name!r}: a handler returns its output and does not yield")
    is_async = inspect.iscoroutinefunction(function)
    if executor not in typing.get_args(Executor):
        raise InvalidOptionError(
            f"step {name!r}: executor must be 'auto', 'async', 'thread' or 'process', not {executor!r}"
        )
    if executor != "auto" and is_async != (executor == "async"):
        fault = f"runs in the event loop; for a {executor} write def" if is_async else "is a def; write async def"
        raise InvalidOptionError(f"step {name!r}: executor={executor!r}, but its handler {fault}")
    return is_async


def _types(name: str, fn: Callable[..., Any], scope: Mapping[str, Any]) -> tuple[bool, Any, Any]:
    """Whether the handler takes an input, and its input and output types (None for none, Any where nothing is said)."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as exc:
        raise InvalidOptionError(f"step {name!r}: the handler has no signature that can be read: {exc}") from exc
    fitting = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [
        p
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not fitting or len(needed) > 2 or any(p not in fitting[:2] for p in needed):
        raise InvalidOptionError(f"step {name!r}: a handler takes the context and at most one input, not {signature}")
    output_type = resolved(name, fn, "return", signature.return_annotation, scope)
    if output_type is signature.empty:
        output_type = Any
    if output_type in (NoReturn, typing.Never):
        output_type = None
    if len(fitting) < 2:
        return False, None, output_type
    parameter = fitting[1]
    input_type = resolved(name, fn, parameter.name, parameter.annotation, scope)
    if input_type is parameter.empty:
        raise InvalidOptionError(
            f"step {name!r}: the parameter {parameter.name!r} needs an annotation, which is the type of the input"
        )
    return True, input_type, output_type


def resolved(name: str, fn: Callable[..., Any], what: str, annotation: Any, scope: Mapping[str, Any]) -> Any:
    """One annotation of a function as a type, or InvalidOptionError."""
    # One annotation at a time: that of the context is often imported for type checkers only, and is not needed.
    if annotation is inspect.Signature.empty:
        return annotation
    function = inspect.unwrap(fn.func if isinstance(fn, functools.partial) else _function(fn))
    holder = types.SimpleNamespace(__annotations__={what: annotation})
    try:
        found = typing.get_type_hints(holder, getattr(function, "__globals__", {}), dict(scope), include_extras=True)[
            what
        ]
    except Exception as exc:
        raise InvalidOptionError(f"step {name!r}: the annotation of {what!r} cannot be resolved: {exc}") from exc
    return None if found is type(None) else found


def _codec(name: str, what: str, type_: Any) -> codec.Codec[Any]:
    try:
        return codec.Codec(type_)
    except Exception as exc:
        raise InvalidOptionError(f"step {name!r}: its {what} type {type_!r} has no encoding: {exc}") from exc


# Registries


class State(types.SimpleNamespace):
    """What a lifespan prepares and handlers read as `ctx.state`: any attribute may be set."""


class Lifespan:
    """A lifespan as declared; called with the state it gives the context manager that a worker enters."""

    def __init__(self, fn: LifespanFn) -> None:
        if not inspect.isasyncgenfunction(fn):
            raise InvalidOptionTypeError("a lifespan is an async generator function: async def with one yield")
        self.fn = fn

    def __call__(self, state: State) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.asynccontextmanager(self.fn)(state)


def lifespan(fn: LifespanFn) -> Lifespan:
    """Declares what a worker process prepares before its first step and clears up after its last.

    The function is an async generator that takes a `State`, sets attributes on it and yields once; it runs once per
    worker process, in its event loop. Handlers find the state as `ctx.state`.
    """
    return Lifespan(fn)


class Redaction:
    """A function as declared that takes secrets out of texts about failures."""

    def __init__(self, fn: RedactFn) -> None:
        if not callable(fn):
            raise InvalidOptionTypeError(f"redact must be a function from str to str, not {type(fn).__name__}")
        self.fn = fn

    def __call__(self, text: str) -> str:
        return self.fn(text)


def redact(fn: RedactFn) -> Redaction:
    """Declares what every error message and traceback passes through before it is stored or logged.

    The function takes the whole text and returns it without its secrets; what is then too long is cut. It is called in
    the worker, from its loop and from the threads of handlers. When it raises, or returns anything but a str, the text
    is replaced by a marker and the step's outcome stays what it was.
    """
    return Redaction(fn)


MAP = "cyclone.map"
"""The kind of the step that a map is until its items exist. Every worker knows it."""


class WorkflowBase:
    """What a registry knows of a workflow, which is declared a floor above."""

    name: str
    fn: Callable[..., Any]
    spec: Any
    steps: Mapping[str, Step[Any, Any]]


class Registry:
    """The steps, workflows, lifespans and redactions that a worker knows."""

    def __init__(self) -> None:
        self._steps: dict[str, Step[Any, Any]] = {}
        self._workflows: dict[str, WorkflowBase] = {}
        self._lifespans: list[Lifespan] = []
        self._redactions: list[Redaction] = []

    @property
    def steps(self) -> Mapping[str, Step[Any, Any]]:
        """The steps by name."""
        return MappingProxyType(self._steps)

    @property
    def workflows(self) -> Mapping[str, WorkflowBase]:
        """The workflows by name."""
        return MappingProxyType(self._workflows)

    @property
    def lifespans(self) -> Sequence[Lifespan]:
        """The lifespans in the order in which they are entered."""
        return tuple(self._lifespans)

    @property
    def redactions(self) -> Sequence[Redaction]:
        """The redactions in the order in which a text passes through them."""
        return tuple(self._redactions)

    def include(self, other: Registry | ModuleType | Step[Any, Any] | WorkflowBase) -> None:
        """Adds what another registry holds, or what a module has among its attributes, or one step, or one workflow
        with the steps of its nodes.

        Raises InvalidOptionError, and adds nothing, if two different steps or workflows have the same name.
        """
        if isinstance(other, Registry):
            values: list[object] = [
                *other._steps.values(), *other._workflows.values(), *other._lifespans, *other._redactions,
            ]  # fmt: skip
        elif isinstance(other, ModuleType):
            values = list(vars(other).values())
        elif isinstance(other, Step | WorkflowBase):  # pyright: ignore[reportUnnecessaryIsInstance]
            values = [other]
        else:
            raise TypeError(f"a Registry, a module, a step or a workflow is expected, not {type(other).__name__}")
        steps, workflows = dict(self._steps), dict(self._workflows)
        for value in values:
            if isinstance(value, Step):
                _add(steps, "step", cast("object", value))
            elif isinstance(value, WorkflowBase):
                _add(workflows, "workflow", value)
                for step in value.steps.values():
                    _add(steps, "step", step)
        self._steps, self._workflows = steps, workflows
        self._lifespans += [one for one in values if isinstance(one, Lifespan) and one not in self._lifespans]
        self._redactions += [one for one in values if isinstance(one, Redaction) and one not in self._redactions]

    def lifespan(self, fn: LifespanFn) -> Lifespan:
        """Declares a lifespan, as the function `lifespan` does, and adds it."""
        declared = Lifespan(fn)
        self._lifespans.append(declared)
        return declared

    def redact(self, fn: RedactFn) -> Redaction:
        """Declares a redaction, as the function `redact` does, and adds it."""
        declared = Redaction(fn)
        self._redactions.append(declared)
        return declared


def _add(known: dict[str, Any], what: str, one: Any) -> None:
    if known.setdefault(one.name, one) is not one:
        raise InvalidOptionError(
            f"two {what}s are named {one.name!r}: {_place(known[one.name].fn)} and {_place(one.fn)}"
        )


def _place(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def load(target: str) -> Registry:
    """The registry that a target names: `package.module` for what a module declares, or `package.module:registry`.

    The current directory is searched first, as `python -m` does. Raises TargetError, with what failed as its cause: the
    module or the name is missing, the import raised, two steps have one name, or there is no step.
    """
    module_name, colon, attribute = target.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or (colon and not attribute.isidentifier()):
        raise TargetError(f"{target!r} is no target; write package.module or package.module:registry")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and f"{module_name}.".startswith(f"{exc.name}."):
            raise TargetError(
                f"there is no module {exc.name!r}, in {here} or installed; the target is {target!r}"
            ) from exc
        raise TargetError(
            f"the import of {module_name!r} failed: it needs the module {exc.name!r}, which is missing"
        ) from exc
    except Exception as exc:
        raise TargetError(f"the import of {module_name!r} raised {type(exc).__name__}: {exc}") from exc
    found: object = module
    if colon:
        try:
            found = getattr(module, attribute)
        except AttributeError:
            raise TargetError(f"module {module_name!r} has no {attribute!r}; the target is {target!r}") from None
    if not isinstance(found, Registry | ModuleType):
        raise TargetError(f"{target!r} is a {type(found).__name__} and not a Registry")
    registry = Registry()
    try:
        registry.include(found)
    except InvalidOptionError as exc:
        raise TargetError(f"{target!r}: {exc}") from exc
    if not registry.steps:
        others = [name for name, value in vars(module).items() if isinstance(value, Registry)]
        hint = (
            f"did you mean {module_name}:{others[0]}?" if others and not colon else "declare one with @cyclone.step()"
        )
        raise TargetError(f"{target!r} declares no step; {hint}")
    return registry
