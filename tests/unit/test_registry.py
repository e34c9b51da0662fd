"""Declaring steps, and finding them again by a pool's target."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import pytest

import cyclone
from cyclone import InvalidOptionError, InvalidOptionTypeError, TargetError, codec, registry

if TYPE_CHECKING:
    from cyclone import Context, SyncContext


class Order(msgspec.Struct):
    id: str


@cyclone.step("charge", max_attempts=3, timeout=timedelta(minutes=1), tags=["money"], metadata={"team": "é"})
async def charge(ctx: Context, order: Order) -> int:
    """Charges."""
    return len(order.id)


@cyclone.action()
def tidy(ctx: SyncContext) -> None:
    ctx.state.tidied = True


def test_a_step_is_what_was_declared() -> None:
    assert (charge.name, charge.input_type, charge.output_type) == ("charge", Order, int)
    assert charge.is_async and not charge.action and isinstance(charge, cyclone.AsyncStep)
    assert charge.__doc__ == "Charges."
    settings = charge.settings
    assert (settings.max_attempts, settings.timeout_s, settings.tags) == (3, 60.0, ["money"])
    assert settings.metadata == '{"team":"é"}'
    assert (settings.queue, settings.priority, settings.grace_s, settings.max_reclaims) == ("default", 5, 5.0, 10)
    assert charge.options["max_attempts"] == 3


@pytest.mark.contract("R2")
def test_defaults() -> None:
    assert tidy.name.endswith("test_registry.tidy")
    assert tidy.settings == registry.Settings()
    assert tidy.settings.max_attempts == 5
    assert (tidy.input_type, tidy.output_type, tidy.action, tidy.is_async) == (None, None, True, False)


async def test_calling_a_step_calls_the_function() -> None:
    ctx: Any = type("Ctx", (), {"state": cyclone.State()})()
    assert await charge(ctx, Order("abc")) == 3
    tidy(ctx)
    tidy(ctx, None)
    assert ctx.state.tidied


def declare(**options: Any) -> None:
    @cyclone.step("bad", **options)
    async def bad(ctx: Context, order: Order) -> None: ...


@pytest.mark.contract("R13")
@pytest.mark.parametrize("limit", [0, -1, 2**31])
def test_a_bad_limit_fails_at_once(limit: int) -> None:
    for declaring in (cyclone.step, cyclone.action):
        with pytest.raises(InvalidOptionError, match=r"'bad'.*max_attempts") as caught:
            declaring("bad", max_attempts=limit)(lambda ctx: None)
        assert isinstance(caught.value, ValueError)


@pytest.mark.contract("R16")
@pytest.mark.parametrize("limit", [True, 3.0, "3", None])
def test_a_limit_of_another_type_is_a_type_error(limit: Any) -> None:
    with pytest.raises(TypeError) as caught:
        declare(max_attempts=limit)
    assert isinstance(caught.value, InvalidOptionError)


@pytest.mark.parametrize(
    "options",
    [
        {"backoff": 3},
        {"backoff": lambda: timedelta(1)},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"grace": -1},
        {"retry_on": ValueError},
        {"permanent_on": (ValueError, 3)},
        {"max_snoozes": -1},
        {"max_reclaims": 0},
        {"max_reclaims": True},
        {"queue": "?x"},
        {"queue": ""},
        {"priority": 10},
        {"priority": -1},
        {"executor": "process"},
        {"executor": "thread"},
        {"version": 0},
        {"tags": "money"},
        {"metadata": {"a": "\0"}},
        {"metadata": {1: 2}},
        {"metadata": [1]},
        {"metadata": {"a": float("inf")}},
        {"max_atempts": 3},
        {"unique": "x"},
    ],
)
def test_bad_options_name_the_step(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="'bad'"):
        declare(**options)


def test_limits_may_be_absent() -> None:
    declared = cyclone.step("s", max_reclaims=None, max_snoozes=0, grace=0)(lambda ctx: None)
    assert (declared.settings.max_reclaims, declared.settings.max_snoozes, declared.settings.grace_s) == (None, 0, 0)


def test_types_may_be_local_or_imported_for_checkers_only() -> None:
    class Local(msgspec.Struct):
        n: int

    @cyclone.step()
    def local(ctx: Unknown, one: Local) -> list[Local]:  # type: ignore[name-defined]  # noqa: F821
        return [one]

    assert local.input_type is Local
    assert local.output_type == list[Local]


def test_what_a_handler_may_look_like() -> None:
    class Callable_:
        async def __call__(self, ctx: Any, order: Order) -> int:
            return 1

        def method(self, ctx: Any, order: Order, *, extra: int = 3) -> Any: ...

    assert cyclone.step("a")(Callable_()).is_async
    assert cyclone.step("b")(Callable_().method).input_type is Order

    def never(ctx: Any) -> NoReturn:
        raise cyclone.Permanent

    assert cyclone.action("c")(never).output_type is None


async def generator(ctx: Any) -> AsyncIterator[None]:
    yield


def no_annotation(ctx: Any, order) -> None: ...  # type: ignore[no-untyped-def]


def unknown_type(ctx: Any, order: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def no_codec(ctx: Any, order: threading) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def three(ctx: Any, order: Order, more: Order) -> None: ...


def keyword(ctx: Any, *, order: Order) -> None: ...


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (generator, "does not yield"),
        (no_annotation, "'order' needs an annotation"),
        (unknown_type, "'order' cannot be resolved"),
        (no_codec, "'order'"),
        (three, "at most one input"),
        (keyword, "at most one input"),
        (nothing, "at most one input"),
    ],
)
def test_handlers_refused(handler: Any, text: str) -> None:
    with pytest.raises(InvalidOptionError, match=rf"'bad'.*{text}"):
        cyclone.step("bad")(handler)


def test_an_action_returns_none() -> None:
    with pytest.raises(InvalidOptionError, match="must return None"):
        cyclone.action("bad")(charge.fn)


def test_parentheses_are_needed() -> None:
    with pytest.raises(InvalidOptionTypeError, match="@step\\(\\)"):
        cyclone.step(charge.fn)  # type: ignore[arg-type]


def test_upgrades_lead_from_version_to_version() -> None:
    @cyclone.step("v", version=3)
    def step(ctx: Any, order: Order) -> None: ...

    assert step.versions == {3}

    @step.upgrade(2)
    def two(value: Any) -> Any:
        return {"id": value["name"]}

    @step.upgrade(1)
    def one(value: Any) -> Any:
        return {"name": value}

    assert step.versions == {1, 2, 3}
    assert step.decode_input(3, b'{"id": "a"}') == Order("a")
    assert step.decode_input(1, b'"a"') == Order("a")
    for version, data in ((4, b"{}"), (2, b"{}"), (1, b"3"), (3, b'{"id": 3}')):
        with pytest.raises(codec.DecodeError):
            step.decode_input(version, data)
    for wrong in (0, 3, 2):
        with pytest.raises(InvalidOptionError):
            step.upgrade(wrong)


def test_an_upgrade_without_a_chain_is_not_used() -> None:
    @cyclone.step("v", version=3)
    def step(ctx: Any, order: Order) -> None: ...

    step.upgrade(1)(lambda value: value)
    assert step.versions == {3}


async def test_a_registry_holds_steps_and_lifespans() -> None:
    mine = cyclone.Registry()

    @cyclone.step("one", registry=mine)
    def one(ctx: Any) -> None: ...

    @mine.lifespan
    async def life(state: cyclone.State) -> AsyncIterator[None]:
        state.events = ["up"]
        yield
        state.events.append("down")

    both = cyclone.Registry()
    both.include(mine)
    both.include(mine)
    both.include(sys.modules[__name__])
    assert set(both.steps) == {"one", "charge", tidy.name}
    assert both.lifespans == (life,)
    state = cyclone.State()
    async with both.lifespans[0](state):
        assert state.events == ["up"]
    assert state.events == ["up", "down"]
    with pytest.raises(InvalidOptionError, match="two steps are named 'one'"):
        cyclone.step("one", registry=both)(lambda ctx: None)
    with pytest.raises(TypeError):
        both.include("jobs")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionTypeError):
        cyclone.lifespan(charge.fn)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


JOBS = """
import cyclone
registry = cyclone.Registry()
@cyclone.step("a")
def a(ctx) -> None: ...
@cyclone.step("b", registry=registry)
def b(ctx) -> None: ...
@cyclone.lifespan
async def life(state):
    yield
@cyclone.redact
def mask(text):
    return text.replace("secret", "***")
"""


def test_load_a_module_or_a_registry(package: Path) -> None:
    (package / "jobs.py").write_text(JOBS)
    whole = registry.load("shop.jobs")
    assert set(whole.steps) == {"a", "b"}
    assert len(whole.lifespans) == 1
    assert [one("a secret") for one in whole.redactions] == ["a ***"]
    assert set(registry.load("shop.jobs:registry").steps) == {"b"}


@pytest.mark.parametrize(
    ("target", "source", "text"),
    [
        ("nowhere.jobs", "", "there is no module 'nowhere'"),
        ("shop.nothing", "", "there is no module 'shop.nothing'"),
        ("shop.jobs", "import not_installed", "needs the module 'not_installed'"),
        ("shop.jobs", "1 / 0", "raised ZeroDivisionError"),
        ("shop.jobs", "def", "raised SyntaxError"),
        ("shop.jobs", "", "declares no step"),
        ("shop.jobs", "import cyclone\nwork = cyclone.Registry()", "did you mean shop.jobs:work"),
        ("shop.jobs:missing", JOBS, "has no 'missing'"),
        ("shop.jobs:a", JOBS, "is a SyncStep and not a Registry"),
        ("shop.jobs", JOBS + "c = cyclone.step('a')(lambda ctx: None)", "two steps are named 'a'"),
        ("shop/jobs.py", "", "is no target"),
        ("shop.jobs:", "", "is no target"),
        ("", "", "is no target"),
    ],
)
def test_load_names_what_failed(package: Path, target: str, source: str, text: str) -> None:
    (package / "jobs.py").write_text(source)
    with pytest.raises(TargetError, match=text) as caught:
        registry.load(target)
    if "raised" in text or "needs" in text:
        assert caught.value.__cause__ is not None


def test_public_names() -> None:
    for name in cyclone.__all__:
        assert getattr(cyclone, name) is not None
    assert not hasattr(cyclone, "schedule")
    assert len(cyclone.__all__) == len(set(cyclone.__all__))


def test_every_step_option_has_its_setting() -> None:
    declared = cyclone.step(
        "all",
        max_attempts=1,
        timeout=1,
        queue="q",
        priority=0,
        tags=["t"],
        metadata={},
        backoff=cyclone.fixed(1),
        grace=1,
        retry_on=(OSError,),
        permanent_on=(ValueError,),
        max_snoozes=1,
        max_reclaims=1,
        executor="process",
        memory_limit="1GiB",
        version=2,
    )(lambda ctx: None)
    assert set(declared.options) == set(registry.StepOptions.__annotations__)
    default = registry.Settings()
    same = [name for name in default.__struct_fields__ if getattr(declared.settings, name) == getattr(default, name)]
    assert same == []
