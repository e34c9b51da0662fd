"""Is this graph sound: workflows as they are declared, and the data that they are stored as.

The function of a workflow is called once, when it is declared, with placeholders for what will only be known at run
time. What it wires is written down as data, a template for each input, and stored with the first run. So no deploy
changes a run that is under way, and whatever is wrong with a graph shows at import.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from . import codec, config, registry
from .errors import InvalidOptionError, WorkflowDefinitionError
from .registry import AsyncStep, AsyncTx, CallOptions, Delay, ProcessStep, Step, SyncStep, SyncTx

if TYPE_CHECKING:
    from .runs import OnceResult, ResultRun, Run, SyncResultRun, SyncRun

T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")

_RUN_INPUT = -1
_MOST_ITEMS = 100_000


class OnDepFailure(StrEnum):
    """What becomes of a node when one that it depends on fails."""

    FAIL_RUN = "fail_run"
    CANCEL_BRANCH = "cancel_branch"
    RUN_ANYWAY = "run_anyway"


FAIL_RUN = OnDepFailure.FAIL_RUN
CANCEL_BRANCH = OnDepFailure.CANCEL_BRANCH
RUN_ANYWAY = OnDepFailure.RUN_ANYWAY


# Templates: an input as data, with references in place of what is not known yet. Each value is wrapped in an object
# that says what it is, so that no data of a user's, whatever it looks like, is ever taken for a reference.
#
#     {"v": literal}   {"r": [source, path…]}   {"o": {key: template}}   {"a": [template…]}
#
# A source is the position of a node, or -1 for the input of the run; a path are keys and indexes of JSON. In place of
# one, [key, default] says what a member that is missing stands for: an encoder may leave out what is as its type's
# default, and who writes JSON by hand does too, and a step that is given the whole would not see the difference.

Template = dict[str, Any]
Part = str | int | list[Any]


class ComposeError(ValueError):
    """What a run has does not have what a template refers to. The text names the path, and no value."""


def compose(template: Template, sources: Mapping[int, bytes]) -> bytes:
    """The JSON that a template stands for. Whatever a null leads to is null: a node that was skipped has no output."""
    if "r" in template and len(template["r"]) == 1:
        return sources[template["r"][0]]
    return msgspec.json.encode(_value(template, {}, sources))


def holds(template: Template, sources: Mapping[int, bytes]) -> bool:
    """Whether the value of a template is true, as Python has it of JSON."""
    return bool(_value(template, {}, sources))


def _value(template: Template, decoded: dict[int, Any], sources: Mapping[int, bytes]) -> Any:
    ((sort, content),) = template.items()
    match sort:
        case "v":
            return content
        case "o":
            return {key: _value(one, decoded, sources) for key, one in content.items()}
        case "a":
            return [_value(one, decoded, sources) for one in content]
        case _:
            source, *path = content
            if source not in decoded:
                decoded[source] = msgspec.json.decode(sources[source])
            found = decoded[source]
            for n, part in enumerate(path):
                if found is None:
                    return None
                key = _key(part)
                try:
                    found = found[key]
                except (KeyError, IndexError, TypeError) as exc:
                    if key is part or isinstance(exc, TypeError):
                        raise ComposeError(f"there is no {_dotted(path[: n + 1]).lstrip('.')} in it") from None
                    found = part[1]
            return found


def _key(part: Part) -> str | int:
    return part[0] if isinstance(part, list) else part


def _dotted(path: Iterable[Part]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in map(_key, path))


# The stored graph


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node as it is stored. Positions are those in `GraphSpec.nodes`; a parent's is below its children's."""

    name: str
    kind: str
    """The step; of a map, that of its items."""
    version: int
    max_attempts: int
    timeout_s: float | None
    queue: str | None
    """Only what the node itself says: a submission and the workflow come before the step's `default_queue`."""
    priority: int | None
    default_queue: str
    default_priority: int
    tags: list[str] | None
    metadata: Any
    parents: list[int]
    children: list[int]
    sources: list[int]
    """What the templates refer to; -1 is the input of the run."""
    input: Template | None
    """Of a map, what it goes over. None: the step takes no input."""
    when: Template | None
    map: bool
    max_parallel: int | None
    max_items: int | None
    policy: int
    """When one that it depends on fails: 0 the run fails, 1 it is cancelled, 2 it runs anyway."""
    accept_skipped: bool
    optional: bool
    contained: bool
    """Its failure does not fail the run."""
    sink: bool
    """Nothing is downstream."""


class GraphSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A graph as it is stored, once for each version of it."""

    workflow: str
    version: int
    queue: str | None
    deadline_s: float | None
    keep_for_s: float | None
    result: int | None
    nodes: list[NodeSpec]

    def encode(self) -> bytes:
        """As JSON, the same in every process."""
        return msgspec.json.encode(self)

    @functools.cached_property  # each submission asks for it
    def hash(self) -> str:
        """What the graph is known by in the database."""
        return hashlib.sha256(self.encode()).hexdigest()

    @classmethod
    def decode(cls, data: bytes | str) -> GraphSpec:
        """A stored graph."""
        return msgspec.json.decode(data, type=cls)


_POLICIES = (OnDepFailure.FAIL_RUN, OnDepFailure.CANCEL_BRANCH, OnDepFailure.RUN_ANYWAY)


# Placeholders


class _Place:
    """What a placeholder stands for: a source, the way into it, and the type that is found there."""

    __slots__ = ("graph", "path", "source", "type")

    def __init__(self, graph: Graph[Any], source: int, path: tuple[Part, ...], type_: Any) -> None:
        self.graph = graph
        self.source = source
        self.path = path
        self.type = type_

    def __str__(self) -> str:
        name = "the input" if self.source == _RUN_INPUT else f"the output of {self.graph._name_of(self.source)!r}"  # pyright: ignore[reportPrivateUsage]
        return name + _dotted(self.path)


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any) -> NoReturn:
        raise WorkflowDefinitionError(
            f"{_place(self)} is not known while the graph is built, and {what}; pass it on to a step that does this"
        )

    return refuse


_COMPUTED = "cannot be computed with"


class _Ref:
    """A placeholder. Its attributes and items are placeholders again; whatever asks for its value raises."""

    __slots__ = ("_cyclone",)

    def __init__(self, place: _Place) -> None:
        object.__setattr__(self, "_cyclone", place)

    def __getattr__(self, name: str) -> _Ref:
        if name.startswith("__"):
            raise AttributeError(name)
        place = _place(self)
        found = _member(place.type, name)
        if found is None:
            raise WorkflowDefinitionError(f"{place} is a {_named(place.type)}, which has no field {name!r}")
        return _Ref(_Place(place.graph, place.source, (*place.path, *found[0]), found[1]))

    def __getitem__(self, key: object) -> _Ref:
        place = _place(self)
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise WorkflowDefinitionError(f"{place}: an index is an int or a str, not {type(key).__name__}")
        found = _item(place.type, key)
        if found is None:
            raise WorkflowDefinitionError(f"{place} is a {_named(place.type)}, which has no item {key!r}")
        return _Ref(_Place(place.graph, place.source, (*place.path, found[0]), found[1]))

    def __repr__(self) -> str:
        return f"<{_place(self)}>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise WorkflowDefinitionError(f"{_place(self)} cannot be changed")

    __delattr__ = __setitem__ = __delitem__ = _refused("cannot be changed")
    __bool__ = _refused("cannot be tested; a node takes a condition as when=")
    __iter__ = __len__ = __contains__ = __reversed__ = _refused(
        "cannot be gone over; use g.map for a node for each item"
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refused("cannot be compared")
    __call__ = _refused("cannot be called")
    __str__ = __format__ = __bytes__ = _refused("cannot be made a text")
    __int__ = __float__ = __index__ = __complex__ = _refused("cannot be made a number")
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refused(_COMPUTED)
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refused(_COMPUTED)
    __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refused(_COMPUTED)
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refused(_COMPUTED)
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refused(_COMPUTED)
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refused(_COMPUTED)


def _place(ref: _Ref) -> _Place:
    return cast("_Place", object.__getattribute__(ref, "_cyclone"))


class _Built:
    """What `Graph.build` stands for: an object or array of JSON, whose type validates it when it is read."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any] | list[Any]) -> None:
        self.fields = fields


def _origin(type_: Any) -> Any:
    return typing.get_origin(type_) or type_


def _is(type_: Any, cls: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, cls)


def _plain(type_: Any) -> list[Any]:
    """The types that a value of this one can have, apart from None."""
    if type(type_).__name__ == "TypeAliasType":  # `type X = …` of Python 3.12
        return _plain(type_.__value__)
    if isinstance(type_, typing.NewType):
        return _plain(type_.__supertype__)
    origin = typing.get_origin(type_)
    if origin is typing.Annotated:
        return _plain(typing.get_args(type_)[0])
    if origin in (typing.Union, types.UnionType):
        return [found for one in typing.get_args(type_) if one is not type(None) for found in _plain(one)]
    if isinstance(type_, TypeVar):
        return [Any]
    return [type_]


def _member(type_: Any, name: str) -> tuple[tuple[Part, ...], Any] | None:
    """The way to a field in JSON, and its type, or None."""
    for one in _plain(type_):
        if one is Any:
            return (name,), Any
        known = _origin(one)
        if _is(known, msgspec.Struct):
            settings = known.__struct_config__
            for n, field in enumerate(msgspec.structs.fields(one)):
                if field.name == name:
                    key = n + (settings.tag is not None) if settings.array_like else field.encode_name
                    return (_part(key, field),), field.type
        elif hasattr(known, "__pydantic_validator__"):
            fields = _pydantic_fields(known)
            computed: Mapping[str, Any] = getattr(known, "model_computed_fields", {})
            if name in fields:
                if getattr(known, "__pydantic_root_model__", False):
                    return (), fields[name].annotation  # in JSON it is its root
                key = fields[name].serialization_alias or fields[name].alias or name
                return (_part(key, fields[name]),), fields[name].annotation
            if name in computed:
                return (computed[name].alias or name,), computed[name].return_type
        elif dataclasses.is_dataclass(known):
            for one_field in dataclasses.fields(known):
                if one_field.name == name:
                    return (_part(name, one_field),), _hints(known).get(name, Any)
        elif (names := _names_of(known)) and name in names:
            return (names.index(name),), _hints(known).get(name, Any)
    return None


def _item(type_: Any, key: str | int) -> tuple[str | int, Any] | None:
    """The key of an item in JSON, and its type, or None."""
    for one in _plain(type_):
        if one is Any:
            return key, Any
        known = _origin(one)
        args = typing.get_args(one)
        if typing.is_typeddict(known):
            hints = _hints(known)
            if isinstance(key, str) and key in hints:
                return key, hints[key]
        elif _is(known, Mapping):
            if isinstance(key, int) == (bool(args) and args[0] is int):
                return str(key), args[1] if len(args) == 2 else Any
        elif _is(known, Sequence | set | frozenset) and known not in (str, bytes):
            items = args
            if names := _names_of(known):
                items = tuple(_hints(known).get(name, Any) for name in names)
            fixed = bool(names) or (known is tuple and bool(args) and args[-1] is not Ellipsis)
            if isinstance(key, int) and (not fixed or -len(items) <= key < len(items)):
                return key, items[key if fixed else 0] if items else Any
    return None


def _part(key: str | int, field: Any) -> Part:
    """A field's part of a path: with its default, unless that is none of JSON, or made anew each time."""
    empty = field.default_factory in (list, dict, set)
    try:
        default = msgspec.to_builtins(
            field.default_factory() if empty else field.default,
            str_keys=True,
            order="deterministic",
            enc_hook=codec.encode_custom,
        )
        codec.check_builtins(default)
    except Exception:  # also for a field without a default, which has a mark in its place
        return key
    return [key, default]


def _pydantic_fields(cls: Any) -> Mapping[str, Any]:
    """Those of a model, or of a dataclass of pydantic's."""
    return cast("Mapping[str, Any]", getattr(cls, "model_fields", None) or getattr(cls, "__pydantic_fields__", {}))


def _names_of(type_: Any) -> tuple[str, ...]:
    """The fields of a NamedTuple, which in JSON is an array; of any other type none."""
    return getattr(type_, "_fields", ()) if _is(type_, tuple) else ()


def _hints(type_: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(type_)
    except (NameError, TypeError):  # a name that only type checkers know
        return dict.fromkeys(getattr(type_, "__annotations__", {}), Any)


def _named(type_: Any) -> str:
    return getattr(type_, "__name__", None) or str(type_)


# Building


class NodeOptions(CallOptions, total=False):
    """Options of a node, in place of those of its step, and what belongs to its place in the graph."""

    name: str
    """Unique in the graph (default: the step's name, with `_2`, `_3`, … when it is repeated)."""
    after: Node[Any] | Sequence[Node[Any]]
    """Nodes that must have ended before, though nothing of theirs is used."""
    when: object
    """A placeholder: if its value is not true at run time, the node is skipped (cancelled, but no failure). None: no
    condition."""
    optional: bool
    """Its failure does not fail the run, although nothing is downstream (default False)."""
    on_dep_failure: OnDepFailure
    """FAIL_RUN (default): a failure of a node that this depends on fails the run. CANCEL_BRANCH: it cancels this node
    and what depends on it. RUN_ANYWAY: this node runs all the same, and reads `ctx.failed_dependencies`.
    """
    accept_skipped: bool
    """Runs although a node that it depends on was skipped, whose output is then null (default False)."""


class MapOptions(NodeOptions, total=False):
    """Options of a map."""

    max_parallel: int | None
    """How many of its items may be under way at a time (default None: all)."""
    max_items: int
    """The longest list that it goes over (default 10,000, at most 100,000); a longer one fails the map."""


_OPTIONS = frozenset(NodeOptions.__annotations__) | frozenset(CallOptions.__annotations__)
_MAP_OPTIONS = _OPTIONS | frozenset(MapOptions.__annotations__)


class Node(Generic[Out]):
    """One node of a graph, while it is built."""

    __slots__ = ("graph", "name", "output", "pos")

    def __init__(self, graph: Graph[Any], pos: int, name: str, output_type: Any) -> None:
        self.graph = graph
        self.pos = pos
        self.name = name
        """Its name in the graph, and in every run of it."""
        self.output: Out = cast("Out", _Ref(_Place(graph, pos, (), output_type)))
        """A placeholder for what its step will return. Attributes and items of it are placeholders too."""

    def __repr__(self) -> str:
        return f"<Node {self.name!r}>"


class Graph(Generic[In]):
    """What the function of a workflow is given, to wire steps with. It is done when the function returns."""

    def __init__(self, workflow: str, input_type: Any) -> None:
        self.input: In = cast("In", _Ref(_Place(self, _RUN_INPUT, (), input_type)))
        """A placeholder for the input of the run."""
        self._workflow = workflow
        self._nodes: list[_Draft] = []
        self._names: set[str] = set()
        self._repeated: dict[str, int] = {}
        self._done = False

    @overload
    def run(self, step: Step[None, Out], input: None = None, **options: Unpack[NodeOptions]) -> Node[Out]: ...
    @overload
    def run(self, step: Step[T, Out], input: T, **options: Unpack[NodeOptions]) -> Node[Out]: ...
    def run(self, step: Step[Any, Out], input: Any = msgspec.UNSET, **options: Unpack[NodeOptions]) -> Node[Out]:
        """A node that executes a step. `input` is a value in which placeholders may stand for values, at any depth;
        each of them also makes a dependency. Raises WorkflowDefinitionError for whatever is wrong with it.
        """
        config_of = self._begin(step, options, _OPTIONS)
        draft = self._draft(step, config_of, dict(options))
        draft.takes_input = step.input_type is not None
        self._set_input(draft, step, input)
        return self._add(draft, step.output_type)

    def map(self, step: Step[T, Out], over: Sequence[T], **options: Unpack[MapOptions]) -> Node[list[Out]]:
        """One node for each item of a list that is known only at run time, named `name[0]`, `name[1]`, …; the output is
        the list of theirs, in the order of the items. An empty list gives an empty list at once. If an item fails, the
        map has failed. Raises WorkflowDefinitionError for whatever is wrong with it.
        """
        config_of = self._begin(step, options, _MAP_OPTIONS)
        draft = self._draft(step, config_of, dict(options))
        draft.map = True
        try:
            if options.get("max_parallel") is not None:
                draft.max_parallel = config.count("max_parallel", options.get("max_parallel"))
            draft.max_items = config.count("max_items", options.get("max_items", 10_000), 1, _MOST_ITEMS)
        except InvalidOptionError as exc:
            raise self._error(draft.name, str(exc)) from exc
        draft.input = template = self._template(draft, over)
        if "r" not in template:
            items = template.get("a", template.get("v"))
            if not isinstance(items, list | tuple):
                raise self._error(draft.name, "what a map goes over is a list")
            known = cast("Sequence[Any]", items)
            if len(known) > draft.max_items:
                raise self._error(draft.name, f"it has {len(known)} items; its max_items is {draft.max_items}")
            for one in known:
                self._check(draft, one if "a" in template else {"v": one})
        return self._add(draft, types.GenericAlias(list, (step.output_type,)))

    def build(self, cls: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """An object of a class that validates when it is built (as pydantic's do), with placeholders among its
        fields. It is built, and validated, at run time.
        """
        self._check_open()
        return cast("T", _Built(_fields(cls, args, kwargs)))

    def _check_open(self) -> None:
        if self._done:
            raise WorkflowDefinitionError(f"the graph of {self._workflow!r} is built; nothing can be added to it")

    def _begin(self, step: Any, options: Mapping[str, Any], known: frozenset[str]) -> registry.Settings:
        self._check_open()
        if not isinstance(step, AsyncStep | SyncStep | ProcessStep):
            raise self._error(None, f"a step is expected, not {type(step).__name__}; declare it with @cyclone.step()")
        try:
            config.known("option", options, known)
            return registry.override(cast("Step[Any, Any]", step).settings, options)
        except InvalidOptionError as exc:
            raise self._error(options.get("name", step.name), str(exc)) from exc

    def _draft(self, step: Step[Any, Any], settings: registry.Settings, options: dict[str, Any]) -> _Draft:
        draft = _Draft(self._named(step.name, options.get("name")), step, settings, options)
        policy = options.get("on_dep_failure", FAIL_RUN)
        if policy not in _POLICIES:
            raise self._error(draft.name, f"on_dep_failure must be one of {', '.join(_POLICIES)}, not {policy!r}")
        draft.policy = _POLICIES.index(policy)
        for name in ("optional", "accept_skipped"):
            if not isinstance(options.get(name, False), bool):
                raise self._error(draft.name, f"{name} must be a bool, not {type(options[name]).__name__}")
        after: Any = options.get("after", ())
        for one in _listed(after):
            if not isinstance(one, Node):
                raise self._error(draft.name, f"after= takes nodes, not {type(one).__name__}")
            if one.graph is not self:
                raise self._error(draft.name, f"node {one.name!r} belongs to another graph")
            draft.parents.add(one.pos)
        if options.get("when") is not None:
            if not isinstance(options["when"], _Ref):
                raise self._error(draft.name, "when= takes a placeholder, as in when=check.output.needs_review")
            draft.when = self._template(draft, options["when"])
        return draft

    def _named(self, step: str, given: str | None) -> str:
        name: str = step if given is None else given
        if given is None:
            n = self._repeated.get(step, 0)
            while n == 0 or name in self._names:
                n += 1
                name = step if n == 1 else f"{step}_{n}"
            self._repeated[step] = n
        hint = "" if given is not None else "; give it another with name="
        try:
            config.name("the name of a node", name)
        except InvalidOptionError as exc:
            raise self._error(None, f"{exc}{hint}") from exc
        if "[" in name or "]" in name:
            raise self._error(name, f"brackets in a name are for the items of maps{hint}")
        if name in self._names:
            raise self._error(name, "two nodes have this name")
        return name

    def _set_input(self, draft: _Draft, step: Step[Any, Any], value: Any) -> None:
        given = value is not msgspec.UNSET
        if not draft.takes_input:
            if given and value is not None:
                raise self._error(draft.name, f"step {step.name!r} takes no input")
            return
        if not given:
            raise self._error(draft.name, f"step {step.name!r} takes an input")
        draft.input = self._template(draft, value)
        self._check(draft, draft.input)

    def _check(self, draft: _Draft, template: Template) -> None:
        """That a constant is an input of the step, as nothing of it can change any more."""
        step = draft.step
        if "v" in template:
            try:
                step.input_codec.encode(step.input_codec.decode(msgspec.json.encode(template["v"])))
            except (codec.DecodeError, codec.EncodeError) as exc:
                raise self._error(draft.name, f"this is no input of step {step.name!r}: {exc}") from exc

    def _template(self, draft: _Draft, value: Any) -> Template:
        """A value as a template; what it refers to becomes a dependency."""
        refs: dict[str, _Place] = {}
        # What stands for a reference until the value is built-in types: no data can hold this.
        nonce = os.urandom(16).hex()

        def hook(one: Any) -> object:
            if isinstance(one, _Ref):
                place = _place(one)
                if place.graph is not self:
                    raise self._error(draft.name, f"{place} belongs to another graph")
                token = f"{nonce}:{len(refs)}"
                refs[token] = place
                return token
            if isinstance(one, _Built):
                return one.fields
            if isinstance(one, Node):
                raise self._error(draft.name, f"{one.name}.output is expected, not the node itself")
            return codec.encode_custom(one)

        try:
            # In order, since that of a set differs between processes, and the hash of the graph must not.
            found = msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=hook)
        except WorkflowDefinitionError:
            raise
        except Exception as exc:
            raise self._error(draft.name, f"its input cannot be stored: {exc}") from exc
        try:
            codec.check_builtins(found)
        except codec.EncodeError as exc:
            raise self._error(draft.name, f"its input cannot be stored: {exc}") from exc
        for place in refs.values():
            draft.sources.add(place.source)
            if place.source != _RUN_INPUT:
                draft.parents.add(place.source)
        return _folded(found, refs)

    def _add(self, draft: _Draft, output_type: Any) -> Node[Any]:
        self._names.add(draft.name)
        self._nodes.append(draft)
        return Node(self, len(self._nodes) - 1, draft.name, output_type)

    def _name_of(self, pos: int) -> str:
        return self._nodes[pos].name

    def _error(self, node: str | None, text: str) -> WorkflowDefinitionError:
        where = f"workflow {self._workflow!r}" if node is None else f"workflow {self._workflow!r}, node {node!r}"
        return WorkflowDefinitionError(f"{where}: {text}")

    def _finish(
        self, result: Any, version: int, queue: str | None, deadline_s: float | None, keep_for_s: float | None
    ) -> GraphSpec:
        """The graph as data. No check for cycles: a node can refer only to nodes that were there before it."""
        self._done = True
        if not self._nodes:
            raise self._error(None, "it has no node")
        if result is not None and not isinstance(result, Node):
            raise self._error(None, f"its function must return a node or None, not {type(result).__name__}")
        if isinstance(result, Node) and result.graph is not self:
            raise self._error(None, "the node that it returns belongs to another graph")
        children: list[list[int]] = [[] for _ in self._nodes]
        for pos, draft in enumerate(self._nodes):
            for parent in draft.parents:
                children[parent].append(pos)
        branches = [False] * len(self._nodes)  # whether what depends on a node stands its failure
        for pos in reversed(range(len(self._nodes))):
            branches[pos] = all(
                self._nodes[child].policy == 2 or (self._nodes[child].policy == 1 and branches[child])
                for child in children[pos]
            )
        for pos, draft in enumerate(self._nodes):
            if draft.options.get("optional") and not branches[pos]:
                raise self._error(
                    draft.name,
                    "it is optional, but a node that depends on it would fail the run; declare on_dep_failure there",
                )
        return GraphSpec(
            workflow=self._workflow,
            version=version,
            queue=queue,
            deadline_s=deadline_s,
            keep_for_s=keep_for_s,
            result=None if result is None else result.pos,
            nodes=[
                draft.spec(
                    children[pos], branches[pos] and (bool(children[pos]) or bool(draft.options.get("optional")))
                )
                for pos, draft in enumerate(self._nodes)
            ],
        )


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, Node | _Ref) or not hasattr(given, "__iter__") else list(given)


class _Draft:
    """A node that is being built."""

    def __init__(self, name: str, step: Step[Any, Any], settings: registry.Settings, options: dict[str, Any]) -> None:
        self.name = name
        self.step = step
        self.settings = settings
        self.options = options
        self.parents: set[int] = set()
        self.sources: set[int] = set()
        self.takes_input = True
        self.input: Template | None = None
        self.when: Template | None = None
        self.map = False
        self.max_parallel: int | None = None
        self.max_items: int | None = None
        self.policy = 0

    def spec(self, children: list[int], contained: bool) -> NodeSpec:
        settings, options = self.settings, self.options
        metadata = settings.metadata
        return NodeSpec(
            name=self.name,
            kind=self.step.name,
            version=settings.version,
            max_attempts=settings.max_attempts,
            timeout_s=settings.timeout_s,
            queue=settings.queue if "queue" in options else None,
            priority=settings.priority if "priority" in options else None,
            default_queue=self.step.settings.queue,
            default_priority=self.step.settings.priority,
            tags=settings.tags,
            metadata=None if metadata is None else msgspec.json.decode(metadata),
            parents=sorted(self.parents),
            children=sorted(children),
            sources=sorted(self.sources),
            input=self.input,
            when=self.when,
            map=self.map,
            max_parallel=self.max_parallel,
            max_items=self.max_items,
            policy=self.policy,
            accept_skipped=bool(options.get("accept_skipped", False)),
            optional=bool(options.get("optional", False)),
            contained=contained,
            sink=not children,
        )


def _folded(value: Any, refs: Mapping[str, _Place]) -> Template:
    """Built-in types as a template. What holds no reference stays as it is."""
    if isinstance(value, str) and value in refs:
        return {"r": [refs[value].source, *refs[value].path]}
    if isinstance(value, dict):
        members = {key: _folded(one, refs) for key, one in cast("dict[str, Any]", value).items()}
        if any(key in refs for key in members):
            raise WorkflowDefinitionError("a placeholder cannot be the key of an object")
        return {"v": value} if all("v" in one for one in members.values()) else {"o": members}
    if isinstance(value, list | tuple):
        items = [_folded(one, refs) for one in cast("Sequence[Any]", value)]
        return {"v": value} if all("v" in one for one in items) else {"a": items}
    return {"v": value}


def _fields(cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | list[Any]:
    """The JSON that an object built from these arguments is read from."""
    known: Any = _origin(cls)

    def wrong(why: object) -> WorkflowDefinitionError:
        return WorkflowDefinitionError(f"g.build({_named(cls)}, …): {why}")

    if hasattr(known, "model_fields") and hasattr(known, "__pydantic_validator__"):
        if args:
            raise wrong("it takes the fields of a model by name")
        return _model_fields(known, kwargs, wrong)
    if typing.is_typeddict(known):
        if args:
            raise wrong("it takes the fields by name")
        if unknown := kwargs.keys() - _hints(known).keys():
            raise wrong(f"there is no field {min(unknown)!r}")
        return kwargs
    try:
        bound = inspect.signature(known).bind(*args, **kwargs)
    except (TypeError, ValueError) as exc:
        raise wrong(exc) from exc
    for parameter in bound.signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name in bound.arguments:
            raise wrong(f"it cannot be told which fields {parameter} are")
    return _struct_fields(known, bound.arguments) if _is(known, msgspec.Struct) else dict(bound.arguments)


def _model_fields(
    cls: Any, kwargs: dict[str, Any], wrong: Callable[[object], WorkflowDefinitionError]
) -> dict[str, Any]:
    fields = _pydantic_fields(cls)
    known: dict[str, str] = {}
    for name, field in fields.items():
        alias = field.validation_alias if isinstance(field.validation_alias, str) else None
        known[name] = known[alias or field.alias or name] = alias or field.alias or name
    for name in kwargs:
        if name not in known and cls.model_config.get("extra") != "allow":
            raise wrong(f"there is no field {name!r}")
    given = {known.get(name, name): value for name, value in kwargs.items()}
    for name, field in fields.items():
        if field.is_required() and known[name] not in given:
            raise wrong(f"the field {name!r} is missing")
    return given


def _struct_fields(cls: type[msgspec.Struct], given: Mapping[str, Any]) -> dict[str, Any] | list[Any]:
    settings = cls.__struct_config__
    fields = msgspec.structs.fields(cls)
    if not settings.array_like:
        tag = {} if settings.tag is None else {settings.tag_field or "type": settings.tag}
        return tag | {field.encode_name: given[field.name] for field in fields if field.name in given}
    items: list[Any] = [] if settings.tag is None else [settings.tag]
    for field in fields:  # an array has no room for what is left out
        if field.name in given or field.required:  # what is required is given, or its signature would not fit
            items.append(given[field.name])
        else:
            factory: Any = field.default_factory
            items.append(field.default if factory is msgspec.NODEFAULT else factory())
    return items


# Workflows


class SubmitOptions(TypedDict, total=False):
    """Options of one submission."""

    deadline: Delay | datetime | None
    """When the run fails unless it has ended: a timedelta or seconds from now, or an aware datetime (default: as the
    workflow says)."""
    delay: Delay | None
    """How long to wait before its first nodes become available, by the database's clock."""
    scheduled_at: datetime | None
    """When they become available: an aware datetime; a past one means at once. Not together with `delay`."""
    priority: int
    """From 0, the highest, to 9, for nodes that do not say themselves (default: as their steps say)."""
    queue: str
    """The queue of nodes that do not say themselves (default: as the workflow, then their steps say)."""
    tags: Sequence[str] | None
    """Free labels of the run."""
    metadata: Mapping[str, Any] | None
    """Free JSON that goes with the run."""
    keep_for: Delay | None
    """How long to keep it after it has ended, in place of what the retention says."""


SUBMIT_OPTIONS = frozenset(SubmitOptions.__annotations__)
Compare = typing.Literal["json", "typed"]


class AsyncSubmitter(typing.Protocol):
    """Whatever submits workflows for async code."""

    def __cyclone_submit__(
        self, workflow: AnyWorkflow, inputs: Iterable[Any], options: SubmitOptions, tx: Any = None, /
    ) -> Awaitable[list[Any]]: ...

    def __cyclone_submit_once__(
        self,
        workflow: AnyWorkflow,
        items: Iterable[tuple[str, Any]],
        options: SubmitOptions,
        compare: Compare,
        tx: Any = None,
        /,
    ) -> Awaitable[list[Any]]: ...

    def __cyclone_find__(self, workflow: AnyWorkflow, key: str, /) -> Awaitable[Any]: ...

    def __cyclone_run__(self, workflow: AnyWorkflow, run_id: str, /) -> Any: ...


class SyncSubmitter(typing.Protocol):
    """Whatever submits workflows for sync code."""

    def __cyclone_submit__(
        self, workflow: AnyWorkflow, inputs: Iterable[Any], options: SubmitOptions, tx: Any = None, /
    ) -> list[Any]: ...

    def __cyclone_submit_once__(
        self,
        workflow: AnyWorkflow,
        items: Iterable[tuple[str, Any]],
        options: SubmitOptions,
        compare: Compare,
        tx: Any = None,
        /,
    ) -> list[Any]: ...

    def __cyclone_find__(self, workflow: AnyWorkflow, key: str, /) -> Any: ...

    def __cyclone_run__(self, workflow: AnyWorkflow, run_id: str, /) -> Any: ...


class AnyWorkflow(registry.WorkflowBase):
    """What workflows with a result and those without one have in common.

    The methods that submit raise InvalidOptionError (InvalidInputError, InvalidKeyError) before any connection is
    taken. Given an async client, or the context of an async handler, they return an awaitable; given their sync
    counterparts, the value. The `_tx` forms take a connection of the caller's that is in a transaction
    (TransactionRequiredError otherwise, TypeError for another object): the run exists if and only if that transaction
    commits. All others commit by themselves.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        name: str,
        spec: GraphSpec,
        steps: Mapping[str, Step[Any, Any]],
        input_type: Any,
        result_type: Any,
    ) -> None:
        self.fn = fn
        self.name = name
        self.version = spec.version
        self.spec = spec
        """The graph as it is stored."""
        self.steps = steps
        """The steps that its nodes execute, by name."""
        self.input_type = input_type
        self.input_codec: codec.Codec[Any] = _codec(name, "input", input_type)
        self.result_codec: codec.Codec[Any] | None = (
            None if spec.result is None else _codec(name, "result", result_type)
        )
        self.__doc__ = fn.__doc__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def diagram(self, format: typing.Literal["mermaid", "dot"] = "mermaid") -> str:
        """The graph as a text that mermaid or Graphviz draws."""
        return diagram(self.spec, format)


class Stored(AnyWorkflow):
    """A workflow of which only the graph is known, as it was registered: for the command line."""

    def __init__(self, spec: GraphSpec, input_codec: codec.Codec[Any]) -> None:
        self.name = spec.workflow
        self.version = spec.version
        self.spec = spec
        self.steps = {}
        self.input_codec = input_codec
        self.result_codec = None


def diagram(spec: GraphSpec, format: str = "mermaid") -> str:
    """A stored graph as a text that mermaid or Graphviz draws."""
    if format not in ("mermaid", "dot"):
        raise InvalidOptionError(f"format must be 'mermaid' or 'dot', not {format!r}")
    lines: list[str] = []
    for pos, node in enumerate(spec.nodes):
        marks = [node.name if node.name == node.kind else f"{node.name}: {node.kind}"]
        marks += ["for each"] if node.map else []
        marks += ["result"] if pos == spec.result else []
        marks += ["optional"] if node.optional else []
        label = _quotable(" · ".join(marks), format)
        lines.append(f'  n{pos}["{label}"]' if format == "mermaid" else f'  n{pos} [label="{label}"];')
        conditions = set(_places(node.when)) if node.when is not None else set[int]()
        for parent in node.parents:
            notes = ["when"] if parent in conditions else []
            notes += [_POLICIES[node.policy].value.replace("_", " ")] if node.policy else []
            note = ", ".join(notes)
            if format == "mermaid":
                arrow = "-.->" if parent in conditions else "-->"
                lines.append(f"  n{parent} {arrow}{f'|{note}|' if note else ''} n{pos}")
            else:
                style = ' style="dashed"' if parent in conditions else ""
                lines.append(f'  n{parent} -> n{pos} [label="{note}"{style}];' if note else f"  n{parent} -> n{pos};")
    if format == "mermaid":
        return "\n".join(["flowchart TD", *lines])
    return "\n".join([f'digraph "{_quotable(spec.workflow, format)}" {{', *lines, "}"])


def _quotable(text: str, format: str) -> str:
    return (text if format == "mermaid" else text.replace("\\", "\\\\")).replace('"', "'")


def _places(template: Template) -> Iterable[int]:
    ((sort, content),) = template.items()
    if sort == "r":
        yield content[0]
    elif sort != "v":
        for one in content.values() if sort == "o" else content:
            yield from _places(one)


class Workflow(AnyWorkflow, Generic[In]):
    """A workflow without a result."""

    @overload
    def submit(
        self: Workflow[None], client: AsyncSubmitter, input: None = None, **options: Unpack[SubmitOptions]
    ) -> Awaitable[Run]: ...
    @overload
    def submit(
        self: Workflow[None], client: SyncSubmitter, input: None = None, **options: Unpack[SubmitOptions]
    ) -> SyncRun: ...
    @overload
    def submit(self, client: AsyncSubmitter, input: In, **options: Unpack[SubmitOptions]) -> Awaitable[Run]: ...
    @overload
    def submit(self, client: SyncSubmitter, input: In, **options: Unpack[SubmitOptions]) -> SyncRun: ...
    def submit(self, client: Any, input: Any = None, **options: Unpack[SubmitOptions]) -> Any:
        """Makes a new run, each time."""
        return _submit(self, client, input, options)

    @overload
    def submit_tx(
        self, client: AsyncSubmitter, tx: AsyncTx, input: In, **options: Unpack[SubmitOptions]
    ) -> Awaitable[Run]: ...
    @overload
    def submit_tx(self, client: SyncSubmitter, tx: SyncTx, input: In, **options: Unpack[SubmitOptions]) -> SyncRun: ...
    def submit_tx(self, client: Any, tx: Any, input: Any, **options: Unpack[SubmitOptions]) -> Any:
        """As `submit`, in the caller's transaction. Nothing but SQL is sent on its connection."""
        return _submit(self, client, input, options, registry.given(tx))

    @overload
    def submit_many(
        self, client: AsyncSubmitter, inputs: Iterable[In], **options: Unpack[SubmitOptions]
    ) -> Awaitable[list[Run]]: ...
    @overload
    def submit_many(
        self, client: SyncSubmitter, inputs: Iterable[In], **options: Unpack[SubmitOptions]
    ) -> list[SyncRun]: ...
    def submit_many(self, client: Any, inputs: Iterable[In], **options: Unpack[SubmitOptions]) -> Any:
        """A new run for each input, all in one commit. The handles are in the order of the inputs."""
        return registry.door(client, "__cyclone_submit__")(self, inputs, options)

    @overload
    def submit_once(
        self,
        client: AsyncSubmitter,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Awaitable[tuple[Run, bool]]: ...
    @overload
    def submit_once(
        self,
        client: SyncSubmitter,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> tuple[SyncRun, bool]: ...
    def submit_once(
        self, client: Any, key: str, input: Any, *, compare: Compare = "json", **options: Unpack[SubmitOptions]
    ) -> Any:
        """At most one run for each key of this workflow, whatever state it is in: the run, and whether this call made
        it.

        The key has 1 to 256 bytes. Another input than the run's raises SubmitConflictError, which names where they
        differ; options take no part. `compare="typed"` first reads the stored input with the type of today, so that
        a member which has been added with a default makes no difference. While another transaction has the key and has
        not committed, the call waits for it. An error does not prove that there is no run: the same call finds it or
        makes it. Under REPEATABLE READ a run that was committed since raises psycopg's SerializationFailure.
        """
        return _submit_once(self, client, key, input, compare, options)

    @overload
    def submit_once_tx(
        self,
        client: AsyncSubmitter,
        tx: AsyncTx,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Awaitable[tuple[Run, bool]]: ...
    @overload
    def submit_once_tx(
        self,
        client: SyncSubmitter,
        tx: SyncTx,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> tuple[SyncRun, bool]: ...
    def submit_once_tx(
        self, client: Any, tx: Any, key: str, input: Any, *, compare: Compare = "json", **options: Unpack[SubmitOptions]
    ) -> Any:
        """As `submit_once`, in the caller's transaction, which goes on after a conflict. Others that submit the key
        wait for its end, so it should be short.
        """
        return _submit_once(self, client, key, input, compare, options, registry.given(tx))

    @overload
    def submit_once_many(
        self,
        client: AsyncSubmitter,
        items: Iterable[tuple[str, In]],
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Awaitable[list[OnceResult[Run]]]: ...
    @overload
    def submit_once_many(
        self,
        client: SyncSubmitter,
        items: Iterable[tuple[str, In]],
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> list[OnceResult[SyncRun]]: ...
    def submit_once_many(
        self,
        client: Any,
        items: Iterable[tuple[str, Any]],
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Any:
        """As `submit_once` for each pair of a key and an input, in one commit. A conflict is in its own result and does
        not fail the others. The results are in the order of the items.
        """
        return registry.door(client, "__cyclone_submit_once__")(self, items, options, compare)

    @overload
    def find(self, client: AsyncSubmitter, key: str) -> Awaitable[Run | None]: ...
    @overload
    def find(self, client: SyncSubmitter, key: str) -> SyncRun | None: ...
    def find(self, client: Any, key: str) -> Any:
        """The run that has a key, or None."""
        return registry.door(client, "__cyclone_find__")(self, key)

    @overload
    def get(self, client: AsyncSubmitter, run_id: str) -> Run: ...
    @overload
    def get(self, client: SyncSubmitter, run_id: str) -> SyncRun: ...
    def get(self, client: Any, run_id: str) -> Any:
        """A handle of a run from its id, without a look at the database. Raises NotFoundError for what is no id."""
        return registry.door(client, "__cyclone_run__")(self, run_id)


class ResultWorkflow(AnyWorkflow, Generic[In, Out]):
    """A workflow with a typed result. Its methods are those of Workflow."""

    @overload
    def submit(
        self: ResultWorkflow[None, Out], client: AsyncSubmitter, input: None = None, **options: Unpack[SubmitOptions]
    ) -> Awaitable[ResultRun[Out]]: ...
    @overload
    def submit(
        self: ResultWorkflow[None, Out], client: SyncSubmitter, input: None = None, **options: Unpack[SubmitOptions]
    ) -> SyncResultRun[Out]: ...
    @overload
    def submit(
        self, client: AsyncSubmitter, input: In, **options: Unpack[SubmitOptions]
    ) -> Awaitable[ResultRun[Out]]: ...
    @overload
    def submit(self, client: SyncSubmitter, input: In, **options: Unpack[SubmitOptions]) -> SyncResultRun[Out]: ...
    def submit(self, client: Any, input: Any = None, **options: Unpack[SubmitOptions]) -> Any:
        """As Workflow.submit."""
        return _submit(self, client, input, options)

    @overload
    def submit_tx(
        self, client: AsyncSubmitter, tx: AsyncTx, input: In, **options: Unpack[SubmitOptions]
    ) -> Awaitable[ResultRun[Out]]: ...
    @overload
    def submit_tx(
        self, client: SyncSubmitter, tx: SyncTx, input: In, **options: Unpack[SubmitOptions]
    ) -> SyncResultRun[Out]: ...
    def submit_tx(self, client: Any, tx: Any, input: Any, **options: Unpack[SubmitOptions]) -> Any:
        """As Workflow.submit_tx."""
        return _submit(self, client, input, options, registry.given(tx))

    @overload
    def submit_many(
        self, client: AsyncSubmitter, inputs: Iterable[In], **options: Unpack[SubmitOptions]
    ) -> Awaitable[list[ResultRun[Out]]]: ...
    @overload
    def submit_many(
        self, client: SyncSubmitter, inputs: Iterable[In], **options: Unpack[SubmitOptions]
    ) -> list[SyncResultRun[Out]]: ...
    def submit_many(self, client: Any, inputs: Iterable[In], **options: Unpack[SubmitOptions]) -> Any:
        """As Workflow.submit_many."""
        return registry.door(client, "__cyclone_submit__")(self, inputs, options)

    @overload
    def submit_once(
        self,
        client: AsyncSubmitter,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Awaitable[tuple[ResultRun[Out], bool]]: ...
    @overload
    def submit_once(
        self,
        client: SyncSubmitter,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> tuple[SyncResultRun[Out], bool]: ...
    def submit_once(
        self, client: Any, key: str, input: Any, *, compare: Compare = "json", **options: Unpack[SubmitOptions]
    ) -> Any:
        """As Workflow.submit_once."""
        return _submit_once(self, client, key, input, compare, options)

    @overload
    def submit_once_tx(
        self,
        client: AsyncSubmitter,
        tx: AsyncTx,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Awaitable[tuple[ResultRun[Out], bool]]: ...
    @overload
    def submit_once_tx(
        self,
        client: SyncSubmitter,
        tx: SyncTx,
        key: str,
        input: In,
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> tuple[SyncResultRun[Out], bool]: ...
    def submit_once_tx(
        self, client: Any, tx: Any, key: str, input: Any, *, compare: Compare = "json", **options: Unpack[SubmitOptions]
    ) -> Any:
        """As Workflow.submit_once_tx."""
        return _submit_once(self, client, key, input, compare, options, registry.given(tx))

    @overload
    def submit_once_many(
        self,
        client: AsyncSubmitter,
        items: Iterable[tuple[str, In]],
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Awaitable[list[OnceResult[ResultRun[Out]]]]: ...
    @overload
    def submit_once_many(
        self,
        client: SyncSubmitter,
        items: Iterable[tuple[str, In]],
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> list[OnceResult[SyncResultRun[Out]]]: ...
    def submit_once_many(
        self,
        client: Any,
        items: Iterable[tuple[str, Any]],
        *,
        compare: Compare = "json",
        **options: Unpack[SubmitOptions],
    ) -> Any:
        """As Workflow.submit_once_many."""
        return registry.door(client, "__cyclone_submit_once__")(self, items, options, compare)

    @overload
    def find(self, client: AsyncSubmitter, key: str) -> Awaitable[ResultRun[Out] | None]: ...
    @overload
    def find(self, client: SyncSubmitter, key: str) -> SyncResultRun[Out] | None: ...
    def find(self, client: Any, key: str) -> Any:
        """As Workflow.find."""
        return registry.door(client, "__cyclone_find__")(self, key)

    @overload
    def get(self, client: AsyncSubmitter, run_id: str) -> ResultRun[Out]: ...
    @overload
    def get(self, client: SyncSubmitter, run_id: str) -> SyncResultRun[Out]: ...
    def get(self, client: Any, run_id: str) -> Any:
        """As Workflow.get."""
        return registry.door(client, "__cyclone_run__")(self, run_id)


def _submit(workflow: AnyWorkflow, client: Any, input: Any, options: SubmitOptions, tx: Any = None) -> Any:
    return registry.single(registry.door(client, "__cyclone_submit__")(workflow, (input,), options, tx))


def _submit_once(
    workflow: AnyWorkflow, client: Any, key: str, input: Any, compare: Compare, options: SubmitOptions, tx: Any = None
) -> Any:
    def only(found: list[OnceResult[Any]]) -> tuple[Any, bool]:
        if found[0].error is not None:
            raise found[0].error
        return found[0].run, found[0].created

    door = registry.door(client, "__cyclone_submit_once__")
    return registry.then(door(workflow, ((key, input),), options, compare, tx), only)


# Declaring


class WorkflowDecorator(typing.Protocol):
    """What `workflow(...)` returns."""

    @overload
    def __call__(self, fn: Callable[[Graph[In]], Node[Out]], /) -> ResultWorkflow[In, Out]: ...
    @overload
    def __call__(self, fn: Callable[[Graph[In]], None], /) -> Workflow[In]: ...


def workflow(
    name: str | None = None,
    *,
    version: int = 1,
    deadline: Delay | None = None,
    keep_for: Delay | None = None,
    queue: str | None = None,
    registry: registry.Registry | None = None,
) -> WorkflowDecorator:
    """Declares a function `def f(g: Graph[In]) -> Node[Out]` as a workflow with a typed result, or one that returns
    None as a workflow without.

    The function is called once, now. `name` defaults to `module.function`; submit keys belong to the name. `version`
    is for people: what decides is the graph itself, and a run keeps the graph it was submitted with. `deadline` (from
    submission) and `keep_for` are the defaults of its runs, `queue` that of its nodes. A registry or a pool's module
    makes it known to workers. Raises WorkflowDefinitionError for whatever is wrong with the graph.
    """
    if callable(name):
        raise WorkflowDefinitionError("write @workflow() with parentheses")

    def decorate(fn: Callable[[Any], Any]) -> Any:
        scope = sys._getframe(1).f_locals  # pyright: ignore[reportPrivateUsage]
        declared = _declare(fn, name, version, deadline, keep_for, queue, scope)
        if registry is not None:
            registry.include(declared)
        return declared

    return cast("WorkflowDecorator", decorate)


def _declare(
    fn: Callable[[Any], Any],
    name: str | None,
    version: int,
    deadline: Delay | None,
    keep_for: Delay | None,
    queue: str | None,
    scope: Mapping[str, Any],
) -> AnyWorkflow:
    try:
        found = config.name("the name of a workflow", registry.default_name(fn) if name is None else name)
        number = config.count("version", version)
        lane = None if queue is None else config.queue("queue", queue)
        deadline_s = None if deadline is None else config.seconds("deadline", deadline)
        keep_for_s = None if keep_for is None else config.seconds("keep_for", keep_for)
    except InvalidOptionError as exc:
        raise WorkflowDefinitionError(f"workflow {name or fn!r}: {exc}") from exc
    input_type = _input_type(found, fn, scope)
    graph: Graph[Any] = Graph(found, input_type)
    result: Any = fn(graph)
    spec = graph._finish(  # pyright: ignore[reportPrivateUsage]
        result, number, lane, deadline_s, keep_for_s
    )
    steps: dict[str, Step[Any, Any]] = {}
    for draft in graph._nodes:  # pyright: ignore[reportPrivateUsage]
        if steps.setdefault(draft.step.name, draft.step) is not draft.step:
            raise WorkflowDefinitionError(f"workflow {found!r}: two different steps are named {draft.step.name!r}")
    kind: Any = Workflow if result is None else ResultWorkflow
    output_type = None if result is None else _place(result.output).type
    made: AnyWorkflow = kind(fn, found, spec, steps, input_type, output_type)
    return made


def _input_type(name: str, fn: Callable[..., Any], scope: Mapping[str, Any]) -> Any:
    def wrong(why: str) -> WorkflowDefinitionError:
        return WorkflowDefinitionError(f"workflow {name!r}: {why}; write def f(g: Graph[Input]) -> Node[Output]")

    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as exc:
        raise wrong(f"it has no signature: {exc}") from exc
    if len(parameters) != 1 or inspect.iscoroutinefunction(fn):
        raise wrong("its function takes the graph and nothing else")
    try:
        annotation = registry.resolved(name, fn, parameters[0].name, parameters[0].annotation, scope)
    except InvalidOptionError as exc:
        raise wrong(str(exc)) from exc
    if typing.get_origin(annotation) is not Graph:
        raise wrong("the parameter needs the type of the input in its annotation")
    found = typing.get_args(annotation)[0]
    return None if found is type(None) else found


def _codec(name: str, what: str, type_: Any) -> codec.Codec[Any]:
    try:
        return codec.Codec(type_)
    except TypeError as exc:
        raise WorkflowDefinitionError(f"workflow {name!r}: the {what} type {type_!r} has no encoding: {exc}") from exc


# Function forms. The types are those of the methods.


@overload
def submit(
    client: AsyncSubmitter, workflow: ResultWorkflow[In, Out], input: In, **options: Unpack[SubmitOptions]
) -> Awaitable[ResultRun[Out]]: ...
@overload
def submit(
    client: SyncSubmitter, workflow: ResultWorkflow[In, Out], input: In, **options: Unpack[SubmitOptions]
) -> SyncResultRun[Out]: ...
@overload
def submit(
    client: AsyncSubmitter, workflow: Workflow[In], input: In, **options: Unpack[SubmitOptions]
) -> Awaitable[Run]: ...
@overload
def submit(client: SyncSubmitter, workflow: Workflow[In], input: In, **options: Unpack[SubmitOptions]) -> SyncRun: ...
def submit(client: Any, workflow: Any, input: Any = None, **options: Unpack[SubmitOptions]) -> Any:
    """The function form of `Workflow.submit`."""
    return workflow.submit(client, input, **options)


@overload
def submit_tx(
    client: AsyncSubmitter, tx: AsyncTx, workflow: ResultWorkflow[In, Out], input: In, **options: Unpack[SubmitOptions]
) -> Awaitable[ResultRun[Out]]: ...
@overload
def submit_tx(
    client: SyncSubmitter, tx: SyncTx, workflow: ResultWorkflow[In, Out], input: In, **options: Unpack[SubmitOptions]
) -> SyncResultRun[Out]: ...
@overload
def submit_tx(
    client: AsyncSubmitter, tx: AsyncTx, workflow: Workflow[In], input: In, **options: Unpack[SubmitOptions]
) -> Awaitable[Run]: ...
@overload
def submit_tx(
    client: SyncSubmitter, tx: SyncTx, workflow: Workflow[In], input: In, **options: Unpack[SubmitOptions]
) -> SyncRun: ...
def submit_tx(client: Any, tx: Any, workflow: Any, input: Any, **options: Unpack[SubmitOptions]) -> Any:
    """The function form of `Workflow.submit_tx`."""
    return workflow.submit_tx(client, tx, input, **options)


@overload
def submit_once(
    client: AsyncSubmitter,
    workflow: ResultWorkflow[In, Out],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> Awaitable[tuple[ResultRun[Out], bool]]: ...
@overload
def submit_once(
    client: SyncSubmitter,
    workflow: ResultWorkflow[In, Out],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> tuple[SyncResultRun[Out], bool]: ...
@overload
def submit_once(
    client: AsyncSubmitter,
    workflow: Workflow[In],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> Awaitable[tuple[Run, bool]]: ...
@overload
def submit_once(
    client: SyncSubmitter,
    workflow: Workflow[In],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> tuple[SyncRun, bool]: ...
def submit_once(
    client: Any, workflow: Any, key: str, input: Any, *, compare: Compare = "json", **options: Unpack[SubmitOptions]
) -> Any:
    """The function form of `Workflow.submit_once`."""
    return workflow.submit_once(client, key, input, compare=compare, **options)


@overload
def submit_once_tx(
    client: AsyncSubmitter,
    tx: AsyncTx,
    workflow: ResultWorkflow[In, Out],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> Awaitable[tuple[ResultRun[Out], bool]]: ...
@overload
def submit_once_tx(
    client: SyncSubmitter,
    tx: SyncTx,
    workflow: ResultWorkflow[In, Out],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> tuple[SyncResultRun[Out], bool]: ...
@overload
def submit_once_tx(
    client: AsyncSubmitter,
    tx: AsyncTx,
    workflow: Workflow[In],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> Awaitable[tuple[Run, bool]]: ...
@overload
def submit_once_tx(
    client: SyncSubmitter,
    tx: SyncTx,
    workflow: Workflow[In],
    key: str,
    input: In,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> tuple[SyncRun, bool]: ...
def submit_once_tx(
    client: Any,
    tx: Any,
    workflow: Any,
    key: str,
    input: Any,
    *,
    compare: Compare = "json",
    **options: Unpack[SubmitOptions],
) -> Any:
    """The function form of `Workflow.submit_once_tx`."""
    return workflow.submit_once_tx(client, tx, key, input, compare=compare, **options)
