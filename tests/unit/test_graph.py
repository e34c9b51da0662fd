"""Graphs as they are declared: what is refused, what is stored, and what a template comes to."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NewType, TypedDict

import msgspec
import pydantic
import pydantic.dataclasses
import pytest

import cyclone
from cyclone import CANCEL_BRANCH, FAIL_RUN, RUN_ANYWAY, Context, Graph, Node, WorkflowDefinitionError, codec, graph


class Item(msgspec.Struct):
    sku: str
    qty: int


class Order(msgspec.Struct, rename="camel"):
    order_id: str
    items: list[Item]
    note: str | None = None
    express: bool = False
    extra: dict[str, int] = {}


@dataclasses.dataclass
class Parcel:
    to: str
    weight: float


class Label(TypedDict):
    to: str
    lines: list[str]


class Card(pydantic.BaseModel):
    holder: str = pydantic.Field(alias="cardHolder", min_length=2)
    cents: int


class Point(msgspec.Struct, array_like=True):
    x: int
    y: int


class Span(NamedTuple):
    first: int
    last: Point


class Box(msgspec.Struct, tag="box", rename="upper"):
    size: int = 1


class Pair(msgspec.Struct, array_like=True, tag="pair"):
    left: str
    right: list[int] = []


@pydantic.dataclasses.dataclass
class Owner:
    name: str


class Batch(pydantic.RootModel[list[int]]): ...


class Sum(pydantic.BaseModel):
    cents: int
    model_config = pydantic.ConfigDict(extra="allow")

    @pydantic.computed_field
    def euros(self) -> int:
        return self.cents // 100


Known = NewType("Known", Item)


class Priced(msgspec.Struct, tag="priced"):
    price: int


class Everything(msgspec.Struct):
    span: Span
    known: Known
    owner: Owner
    batch: Batch
    total: Sum
    two: tuple[str, Item]
    many: tuple[Item, ...]
    by_id: dict[int, Item]
    one_of: Box | Priced | None
    whatever: Any
    note: str


class Brief(msgspec.Struct, omit_defaults=True):
    sure: bool = True
    items: list[Item] = []
    size: int | msgspec.UnsetType = msgspec.UNSET
    id: str = msgspec.field(default_factory=lambda: os.urandom(8).hex())


class Flags(pydantic.BaseModel):
    sure: bool = True


class Model(pydantic.BaseModel):
    flags: Flags = Flags(sure=False)
    cents: int = pydantic.Field(5, alias="c")
    need: int


@dataclasses.dataclass
class Top:
    brief: Brief
    model: Model
    last: float = 1.5


@cyclone.step("take")
async def take(ctx: Context, order: Order) -> Order:
    return order


@cyclone.step("item")
async def item(ctx: Context, one: Item) -> int:
    return one.qty


@cyclone.step("ship")
async def ship(ctx: Context, parcel: Parcel) -> Label:
    return {"to": parcel.to, "lines": []}


@cyclone.step("pay")
async def pay(ctx: Context, card: Card) -> Card:
    return card


@cyclone.step("anything")
async def anything(ctx: Context, value: Any) -> Any:
    return value


@cyclone.step("point")
async def point(ctx: Context) -> Point:
    return Point(1, 2)


@cyclone.step("tick")
async def tick(ctx: Context) -> None: ...


@cyclone.step("item[0]")
async def bracketed(ctx: Context) -> None: ...


@cyclone.step("l" * 199)
async def long_named(ctx: Context) -> None: ...


def built(fn: Callable[[Graph[Any]], object], input_type: Any = Order) -> graph.GraphSpec:
    def flow(g: Any) -> Any:
        found = fn(g)
        return found if isinstance(found, Node) else None

    flow.__annotations__["g"] = Graph[input_type]
    return cyclone.workflow("flow")(flow).spec


def refused(fn: Callable[[Graph[Any]], object], input_type: Any = Order) -> str:
    with pytest.raises(WorkflowDefinitionError) as caught:
        built(fn, input_type)
    return str(caught.value)


# What is refused


@pytest.mark.contract("W3", "FM-064")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda g: (g.run(tick, name="a"), g.run(tick, name="a")), "two nodes have this name"),
        (lambda g: g.run(tick, name="a[0]"), "brackets"),
        (lambda g: g.run(bracketed), "give it another with name="),
        (lambda g: (g.run(long_named), g.run(long_named)), "give it another with name="),
        (lambda g: g.run(tick, name=""), "must not be empty"),
        (lambda g: g.run(tick, name=3), "must be a str"),
        (lambda g: None, "it has no node"),
        (lambda g: g.run(tick, after="a"), "after= takes nodes"),
        (lambda g: g.run(tick, after=3), "after= takes nodes"),
        (lambda g: g.run(tick, after=g.input), "after= takes nodes"),
        (lambda g: g.run(anything), "takes an input"),
        (lambda g: g.run(tick, queu="mail"), "did you mean 'queue'"),
        (lambda g: g.run(tick, 1), "takes no input"),
        (lambda g: g.run(item, {"sku": "a"}), "this is no input of step 'item'"),
        (lambda g: g.run(item, take), "cannot be stored"),
        (lambda g: g.run(anything, float("nan")), "NaN"),
        (lambda g: g.run(anything, "\0"), "NUL"),
        (lambda g: g.run(anything, {g.input.order_id: 1}), "cannot be compared"),
        (lambda g: g.run(anything, g.run(tick)), "output is expected, not the node"),
        (lambda g: g.run(lambda ctx: None), "a step is expected"),
        (lambda g: g.run(tick, when=True), "when= takes a placeholder"),
        (lambda g: g.run(tick, on_dep_failure="ignore"), "on_dep_failure must be one of"),
        (lambda g: g.run(tick, optional=1), "optional must be a bool"),
        (lambda g: g.map(item, 3), "is a list"),
        (lambda g: g.map(item, {"a": g.input.items[0]}), "is a list"),
        (lambda g: g.map(item, [{"sku": "a"}]), "this is no input of step 'item'"),
        (lambda g: g.map(item, [g.input.items[0], {"sku": "a"}]), "this is no input of step 'item'"),
        (lambda g: g.map(anything, [1, 2, 3], max_items=2), "it has 3 items; its max_items is 2"),
        (lambda g: g.build(Card, cents=g.input.note), "the field 'holder' is missing"),
        (lambda g: g.build(Card, cents=3, holder="ab", owner="a"), "there is no field 'owner'"),
        (lambda g: g.build(Card, 3), "by name"),
        (lambda g: g.build(Label, frm=g.input.note), "there is no field 'frm'"),
        (lambda g: g.build(Parcel, weight=1.0), "missing a required argument"),
        (lambda g: g.build(lambda **fields: fields, a=1), "cannot be told"),
        (lambda g: g.map(item, g.input.items, max_parallel=0), "max_parallel"),
        (lambda g: g.map(item, g.input.items, max_items=10**6), "max_items"),
    ],
)
def test_what_cannot_be_a_graph_is_refused_when_declared(wrong: Callable[[Any], object], says: str) -> None:
    assert says in refused(wrong)


@pytest.mark.contract("R14")
@pytest.mark.parametrize("option", [{"max_attempts": 0}, {"max_attempts": True}, {"timeout": -1}, {"priority": 10}])
def test_a_bad_option_of_a_node_is_an_error_of_its_graph(option: Any) -> None:
    assert next(iter(option)) in refused(lambda g: g.run(tick, **option))


@pytest.mark.contract("W3")
def test_nodes_of_another_graph_are_refused() -> None:
    kept: list[Any] = []
    built(lambda g: kept.extend([g, g.run(tick)]))
    other, node = kept
    assert "belongs to another graph" in refused(lambda g: g.run(tick, after=node))
    assert "belongs to another graph" in refused(lambda g: g.run(anything, node.output))
    with pytest.raises(WorkflowDefinitionError, match="is built"):
        other.run(tick)
    with pytest.raises(WorkflowDefinitionError, match="is built"):
        other.build(Parcel, "a", 1.0)

    def foreign(g: Graph[Order]) -> Node[None]:
        g.run(tick)
        return node  # type: ignore[no-any-return]

    with pytest.raises(WorkflowDefinitionError, match="belongs to another graph"):
        cyclone.workflow("flow")(foreign)


@pytest.mark.contract("W3")
def test_the_function_of_a_workflow_takes_a_typed_graph() -> None:
    def bare(g) -> None: ...  # type: ignore[no-untyped-def]

    def two(g: Graph[int], more: int) -> None: ...

    async def later(g: Graph[int]) -> None: ...

    def number(g: Graph[int]) -> int:
        g.run(tick)
        return 3

    for wrong in (bare, two, later, number):
        with pytest.raises(WorkflowDefinitionError):
            cyclone.workflow("flow")(wrong)  # type: ignore[arg-type]
    with pytest.raises(WorkflowDefinitionError, match="parentheses"):
        cyclone.workflow(bare)  # type: ignore[arg-type]


@pytest.mark.contract("W4")
@pytest.mark.parametrize(
    "use",
    [
        lambda ref: bool(ref), lambda ref: not ref, lambda ref: ref == 1, lambda ref: ref != 1, lambda ref: ref < 1,
        lambda ref: list(ref), lambda ref: len(ref), lambda ref: 1 in ref, lambda ref: ref(), lambda ref: ref + 1,
        lambda ref: f"{ref}", lambda ref: str(ref), lambda ref: int(ref), lambda ref: {ref}, lambda ref: 2 * ref,
        lambda ref: setattr(ref, "qty", 3), lambda ref: ref.__setitem__(0, 1), lambda ref: ref**2, lambda ref: 2 // ref,
        lambda ref: round(ref), lambda ref: ref | 1, lambda ref: +ref, lambda ref: divmod(ref, 2),
    ],
)  # fmt: skip
def test_a_placeholder_has_no_value_yet(use: Callable[[Any], object]) -> None:
    assert "the input.items[0].qty" in refused(lambda g: use(g.input.items[0].qty))


@pytest.mark.contract("W4")
@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.input.orderId, lambda g: g.input.items[0].price, lambda g: g.input.items["a"],
        lambda g: g.input["items"], lambda g: g.run(ship, Parcel("a", 1.0)).output["from"],
        lambda g: g.run(ship, Parcel("a", 1.0)).output.to, lambda g: g.run(pay, g.input.note).output.owner,
        lambda g: g.input.order_id.upper, lambda g: g.input.items[True],
    ],
)  # fmt: skip
def test_a_field_that_the_type_has_not_is_refused(use: Callable[[Any], object]) -> None:
    refused(use)


@pytest.mark.contract("W4")
@pytest.mark.parametrize(
    "use",
    [
        lambda a: a.span.middle, lambda a: a.span[2], lambda a: a.owner.age, lambda a: a.batch.sum, lambda a: a.two[2],
        lambda a: a.two[0].sku, lambda a: a.by_id["a"], lambda a: a.one_of.weight, lambda a: a.total.pounds,
        lambda a: a.known.price, lambda a: a.many["a"],
    ],
)  # fmt: skip
def test_a_part_that_the_type_has_not_is_refused(use: Callable[[Any], object]) -> None:
    assert "which has no" in refused(lambda g: use(g.input), Everything)


# What is stored

NOTE = ["note", None]  # its part of a path, with its default


@pytest.mark.contract("W4")
@pytest.mark.parametrize(
    ("use", "path"),
    [
        (lambda a: a.span.last.y, ["span", 1, 1]),
        (lambda a: a.span[-1].x, ["span", -1, 0]),
        (lambda a: a.known.sku, ["known", "sku"]),
        (lambda a: a.owner.name, ["owner", "name"]),
        (lambda a: a.batch.root[3], ["batch", 3]),
        (lambda a: a.total.euros, ["total", "euros"]),
        (lambda a: a.two[1].qty, ["two", 1, "qty"]),
        (lambda a: a.many[7].qty, ["many", 7, "qty"]),
        (lambda a: a.by_id[7].qty, ["by_id", "7", "qty"]),
        (lambda a: a.one_of.price, ["one_of", "price"]),
        (lambda a: a.whatever.x["y"][0], ["whatever", "x", "y", 0]),
    ],
)
def test_a_path_is_that_of_the_json(use: Callable[[Any], object], path: list[Any]) -> None:
    spec = built(lambda g: g.run(anything, use(g.input)), Everything)
    assert spec.nodes[0].input == {"r": [-1, *path]}


def test_a_path_finds_what_the_codec_writes() -> None:
    qty = Item("a", 3)
    value = Everything(
        Span(1, Point(2, 3)), qty, Owner("o"), Batch([1, 2, 3, 4]), Sum(cents=300), ("a", qty), (qty,),
        {7: qty}, Priced(5), None, "n",
    )  # fmt: skip
    data = codec.Codec[Any](Everything).encode(value)
    uses: list[tuple[Callable[[Any], object], int]] = [
        (lambda a: a.span.last.y, 3), (lambda a: a.batch.root[3], 4), (lambda a: a.total.euros, 3),
        (lambda a: a.by_id[7].qty, 3), (lambda a: a.one_of.price, 5), (lambda a: a.two[1].qty, 3),
    ]  # fmt: skip
    for use, wanted in uses:
        template = built(lambda g, use=use: g.run(anything, use(g.input)), Everything).nodes[0].input
        assert template is not None and graph.compose(template, {-1: data}) == str(wanted).encode()


@pytest.mark.contract("W4")
@pytest.mark.parametrize(
    ("cls", "fields", "template"),
    [
        (Box, {"size": "n"}, {"o": {"type": {"v": "box"}, "SIZE": "n"}}),
        (Pair, {"left": "n"}, {"a": [{"v": "pair"}, "n", {"v": []}]}),
        (Label, {"to": "n", "lines": []}, {"o": {"to": "n", "lines": {"v": []}}}),
        (Owner, {"name": "n"}, {"o": {"name": "n"}}),
        (Sum, {"cents": 1, "more": "n"}, {"o": {"cents": {"v": 1}, "more": "n"}}),
    ],
)
def test_what_is_built_is_what_its_type_is_read_from(cls: Any, fields: dict[str, Any], template: Any) -> None:
    """In the templates, "n" is the reference."""

    def flow(g: Graph[Any]) -> object:
        note = g.input.note
        return g.run(anything, g.build(cls, **{name: note if one == "n" else one for name, one in fields.items()}))

    reference = {"r": [-1, "note"]}
    text = json.dumps(template).replace('"n"', json.dumps(reference))
    found = built(flow, Everything).nodes[0].input
    assert found == json.loads(text) and found is not None
    codec.Codec[Any](cls).decode(graph.compose(found, {-1: b'{"note": 1}' if cls is Box else b'{"note": "a"}'}))


@pytest.mark.contract("W4")
@pytest.mark.parametrize(
    ("value", "template"),
    [
        (lambda g: g.input, {"r": [-1]}),
        (lambda g: g.input.order_id, {"r": [-1, "orderId"]}),
        (lambda g: g.input.items[0].qty, {"r": [-1, "items", 0, "qty"]}),
        (lambda g: g.input.extra["a"], {"r": [-1, ["extra", {}], "a"]}),
        (lambda g: {"a": [1, {"b": None}]}, {"v": {"a": [1, {"b": None}]}}),
        (lambda g: [1, g.input.note], {"a": [{"v": 1}, {"r": [-1, NOTE]}]}),
        (lambda g: Order(g.input.note, []), None),
        (lambda g: {"r": [-1]}, {"v": {"r": [-1]}}),
        (lambda g: {"$ref": ["input"], "x": g.input.note}, {"o": {"$ref": {"v": ["input"]}, "x": {"r": [-1, NOTE]}}}),
        (lambda g: g.run(point).output.y, {"r": [0, 1]}),
        (lambda g: g.run(pay, Card(cardHolder="ab", cents=1)).output.holder, {"r": [0, "cardHolder"]}),
        (lambda g: g.run(ship, Parcel("a", 1.0)).output["lines"][0], {"r": [0, "lines", 0]}),
        (lambda g: g.run(anything, 1).output.a["b"][3].c, {"r": [0, "a", "b", 3, "c"]}),
        (
            lambda g: g.build(Card, holder=g.input.note, cents=3),
            {"o": {"cardHolder": {"r": [-1, NOTE]}, "cents": {"v": 3}}},
        ),
        (lambda g: g.build(Parcel, g.input.note, weight=2.0), {"o": {"to": {"r": [-1, NOTE]}, "weight": {"v": 2.0}}}),
        (lambda g: Parcel(g.input.note, 1.0), {"o": {"to": {"r": [-1, NOTE]}, "weight": {"v": 1.0}}}),
    ],
)  # fmt: skip
def test_an_input_is_a_template(value: Callable[[Any], object], template: object) -> None:
    node = built(lambda g: g.run(anything, value(g))).nodes[-1]
    if template is None:
        assert node.input is not None and node.input["o"]["orderId"] == {"r": [-1, NOTE]}
    else:
        assert node.input == template


class Case(NamedTuple):
    template: dict[str, Any]
    sources: dict[int, Any]
    result: Any


@pytest.mark.parametrize(
    "case",
    [
        Case({"v": {"r": [-1]}}, {}, {"r": [-1]}),
        Case({"r": [-1]}, {-1: {"a": 1}}, {"a": 1}),
        Case({"r": [0, "a", 1]}, {0: {"a": [1, 2]}}, 2),
        Case({"r": [0, "a", 1]}, {0: None}, None),
        Case({"r": [0, "a", 1]}, {0: {"a": None}}, None),
        Case({"o": {"x": {"r": [0]}, "y": {"v": 1}}}, {0: {"v": 5}}, {"x": {"v": 5}, "y": 1}),
        Case({"r": [0, ["a", 3]]}, {0: {}}, 3),
        Case({"r": [0, ["a", 3]]}, {0: {"a": None}}, None),
        Case({"r": [0, ["a", {"b": 2}], "b"]}, {0: {}}, 2),
        Case({"r": [0, ["a", {}], ["b", 4]]}, {0: {}}, 4),
        Case({"r": [0, ["a", {"b": 2}], ["b", 4]]}, {0: {"a": {}}}, 4),
        Case({"r": [0, [1, 5]]}, {0: [1]}, 5),
        Case({"a": [{"r": [-1]}, {"r": [0]}]}, {-1: 1, 0: [2]}, [1, [2]]),
    ],
)
def test_templates_are_composed(case: Case) -> None:
    sources = {place: json.dumps(value).encode() for place, value in case.sources.items()}
    assert json.loads(graph.compose(case.template, sources)) == case.result


@pytest.mark.parametrize(
    ("path", "says"),
    [(["a"], "no a"), (["b", 2], r"no b\[2\]"), (["b", "x"], "no b.x"), ([["b", 1], ["x", 1]], "no b.x")],
)
def test_what_is_not_there_is_named_without_values(path: list[Any], says: str) -> None:
    with pytest.raises(graph.ComposeError, match=says) as caught:
        graph.compose({"r": [0, *path]}, {0: b'{"b": ["secret"]}'})
    assert "secret" not in str(caught.value)


@pytest.mark.contract("W4")
def test_what_json_leaves_out_is_as_the_type_has_it() -> None:
    def template(use: Callable[[Any], object]) -> Any:
        return built(lambda g: g.run(anything, use(g.input)), Top).nodes[0].input

    sources = {-1: b'{"brief": {}, "model": {"need": 1}}'}
    for use, found in (
        (lambda a: a.brief.sure, True),
        (lambda a: a.brief.items, []),
        (lambda a: a.model.flags.sure, False),
        (lambda a: a.model.cents, 5),
        (lambda a: a.last, 1.5),
    ):
        assert json.loads(graph.compose(template(use), sources)) == found
    assert graph.holds(template(lambda a: a.brief.sure), sources)
    for use in (lambda a: a.brief.size, lambda a: a.brief.id, lambda a: a.brief.items[0]):
        with pytest.raises(graph.ComposeError):
            graph.compose(template(use), sources)
    with pytest.raises(graph.ComposeError, match=r"no model\.need"):
        graph.compose(template(lambda a: a.model.need), {-1: b'{"model": {}}'})


@pytest.mark.contract("W6", "W7")
def test_names_and_dependencies() -> None:
    def flow(g: Graph[Order]) -> None:
        first = g.run(take, g.input)
        g.run(take, first.output)
        third = g.run(take, g.input, name="last", after=first)
        g.run(tick, after=[first, third], when=third.output.express)
        g.map(item, third.output.items)

    spec = built(flow)
    assert [node.name for node in spec.nodes] == ["take", "take_2", "last", "tick", "item"]
    assert [node.parents for node in spec.nodes] == [[], [0], [0], [0, 2], [2]]
    assert [node.children for node in spec.nodes] == [[1, 2, 3], [], [3, 4], [], []]
    assert [node.sources for node in spec.nodes] == [[-1], [0], [-1], [2], [2]]
    assert [node.sink for node in spec.nodes] == [False, True, False, True, True]
    assert spec.nodes[4].map and spec.nodes[4].max_items == 10_000


@pytest.mark.contract("W6")
def test_a_default_name_steps_aside_for_a_given_one() -> None:
    def flow(g: Graph[Any]) -> None:
        g.run(tick, name="tick_2")
        for _ in range(3):
            g.run(tick, when=None)

    assert [node.name for node in built(flow).nodes] == ["tick_2", "tick", "tick_3", "tick_4"]


@pytest.mark.contract("R37", "R38", "W13")
@pytest.mark.parametrize(
    ("children", "optional", "contained"),
    [
        ([], False, False),
        ([], True, True),
        ([FAIL_RUN], False, False),
        ([CANCEL_BRANCH], False, True),
        ([RUN_ANYWAY], False, True),
        ([CANCEL_BRANCH, RUN_ANYWAY], False, True),
        ([CANCEL_BRANCH, FAIL_RUN], False, False),
        ([[CANCEL_BRANCH, FAIL_RUN]], False, False),
        ([[CANCEL_BRANCH, CANCEL_BRANCH]], False, True),
        ([[CANCEL_BRANCH, RUN_ANYWAY]], False, True),
        ([[RUN_ANYWAY, FAIL_RUN]], False, True),
        ([[CANCEL_BRANCH, CANCEL_BRANCH, FAIL_RUN]], False, False),
        ([CANCEL_BRANCH], True, True),
    ],
)
def test_whether_a_failure_is_contained(children: list[Any], optional: bool, contained: bool) -> None:
    def flow(g: Graph[Order]) -> None:
        first = g.run(tick, optional=optional)
        for branch in children:
            before: Node[Any] = first
            for policy in branch if isinstance(branch, list) else [branch]:
                before = g.run(tick, after=before, on_dep_failure=policy)

    assert built(flow).nodes[0].contained is contained


@pytest.mark.contract("R38")
def test_an_optional_node_cannot_have_what_fails_the_run_behind_it() -> None:
    def flow(g: Graph[Order]) -> None:
        first = g.run(tick, optional=True)
        g.run(tick, after=first)

    assert "it is optional" in refused(flow)


@pytest.mark.contract("W1", "W2")
def test_a_workflow_has_a_result_or_none() -> None:
    @cyclone.workflow("with")
    def with_result(g: Graph[Order]) -> Node[list[int]]:
        return g.map(item, g.input.items)

    @cyclone.workflow()
    def without(g: Graph[None]) -> None:
        g.run(tick)

    assert isinstance(with_result, cyclone.ResultWorkflow) and with_result.spec.result == 0
    assert with_result.result_codec is not None and with_result.result_codec.decode(b"[1]") == [1]
    assert isinstance(without, cyclone.Workflow) and without.spec.result is None
    assert without.name == f"{__name__}.without" and without.input_type is None


def test_the_engine_s_own_kind_is_no_name_for_a_step() -> None:
    with pytest.raises(cyclone.InvalidOptionError, match="engine's own"):
        cyclone.step("cyclone.map")(lambda ctx: None)


def test_a_registry_has_the_steps_of_its_workflows() -> None:
    handlers = cyclone.Registry()

    def flow(g: Graph[Order]) -> None:
        g.run(take, g.input)

    declared = cyclone.workflow("flow", registry=handlers)(flow)
    assert handlers.workflows == {"flow": declared} and handlers.steps == {"take": take}
    handlers.include(declared)
    with pytest.raises(cyclone.InvalidOptionError, match="two workflows are named 'flow'"):
        handlers.include(cyclone.workflow("flow")(flow))


def test_a_graph_has_the_same_hash_in_every_process() -> None:
    text = "import sys; sys.path.insert(0, {0!r}); import test_graph as t; print(t.built(t.wide).hash)"
    found = {
        subprocess.run(
            [sys.executable, "-c", text.format(os.path.dirname(__file__))],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {built(wide).hash}


def wide(g: Graph[Order]) -> None:
    nodes = [g.run(tick, tags=["a", "b"], metadata={"x": 1, "a": 2}) for _ in range(20)]
    g.run(anything, {"a": g.input.order_id, "b": [1, 2], "c": {"x", "y", "z"}, 4: None}, after=nodes)


def test_a_graph_is_drawn() -> None:
    def flow(g: Graph[Order]) -> Node[list[int]]:
        first = g.run(take, g.input)
        g.run(tick, when=first.output.express, on_dep_failure=CANCEL_BRANCH)
        return g.map(item, first.output.items)

    declared = cyclone.workflow("drawn")(flow)
    assert declared.diagram().splitlines() == [
        "flowchart TD",
        '  n0["take"]',
        '  n1["tick"]',
        "  n0 -.->|when, cancel branch| n1",
        '  n2["item · for each · result"]',
        "  n0 --> n2",
    ]
    assert 'n0 -> n1 [label="when, cancel branch" style="dashed"]' in declared.diagram("dot")
    with pytest.raises(cyclone.InvalidOptionError):
        declared.diagram("png")  # type: ignore[arg-type]


def test_a_drawing_stands_any_name() -> None:
    def flow(g: Graph[Order]) -> None:
        g.run(tick, name='a "b" \\')

    declared = cyclone.workflow('d "e"')(flow)
    assert declared.diagram().splitlines()[1] == r"""  n0["a 'b' \: tick"]"""
    assert declared.diagram("dot").splitlines()[:2] == [
        """digraph "d 'e'" {""",
        r"""  n0 [label="a 'b' \\: tick"];""",
    ]
