"""What is stored as JSON, and what is refused because PostgreSQL could not hold it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from cyclone.codec import Codec, DecodeError, EncodeError


class Item(msgspec.Struct):
    id: str
    n: int = 0
    parts: list[Item] = []


class Price(msgspec.Struct):
    value: float | None


@dataclass
class Point:
    x: int
    y: int


class Movie(TypedDict):
    title: str
    year: int


class Model(pydantic.BaseModel):
    id: int = pydantic.Field(alias="ID")
    weight: float | None = None


class Holder(msgspec.Struct):
    model: Model


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (Item, Item("a", 3, [Item("b")])),
        (Point, Point(1, 2)),
        (Movie, {"title": "é\u2028😀", "year": 1999}),
        (list[Item], [Item("a")]),
        (dict[str, int], {"a'%": 2**63}),
        (int | str | None, None),
        (Any, {"a": [1, 1.5, None, True, "x"]}),
        (datetime, datetime(2026, 1, 2, tzinfo=UTC)),
        (int, 10**400),
        (None, None),
        (Model, Model(ID=3)),
        (list[Model], [Model(ID=3, weight=0.5)]),
        (Model | None, None),
        (Holder, Holder(Model(ID=3))),
    ],
)
def test_there_and_back(type_: Any, value: Any) -> None:
    codec = Codec[Any](type_)
    assert codec.decode(codec.encode(value)) == value
    assert codec.encode_many([value, value]) in ([codec.encode(value)] * 2, None)


@pytest.mark.parametrize("text", ["\0", "a\0b", "\\\0", '"\0', "\0\\u0000"])
@pytest.mark.contract("S5")
def test_nul_is_refused(text: str) -> None:
    for codec, value in ((Codec[Any](str), text), (Codec[Any](Any), {"k": [text]}), (Codec[Any](Any), {text: 1})):
        with pytest.raises(EncodeError, match="NUL"):
            codec.encode(value)
        assert codec.encode_many([value]) is None


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "u0000", "\\\\\\u0000x"])
def test_text_that_only_looks_like_nul_is_not(text: str) -> None:
    codec = Codec[str](str)
    assert codec.decode(codec.encode(text)) == text
    assert codec.encode_many([text, "\n"]) == [codec.encode(text), rb'"\n"']


def deep() -> object:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def loop() -> object:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    ["\ud800", {"\ud800": 1}, object(), {1, object()}, deep(), loop(), 10**5000, {(1, 2): 3}, float("nan")],
    ids=["surrogate", "surrogate key", "object", "set", "deep", "loop", "huge", "tuple key", "nan"],
)
def test_what_json_cannot_hold(value: object) -> None:
    with pytest.raises(EncodeError):
        Codec[Any](Any).encode(value)
    assert Codec[Any](Any).encode_many([1, value]) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinities_never_become_null(number: float) -> None:
    cases: list[tuple[Any, Any]] = [
        (float, number),
        (Price, Price(number)),
        (list[float | None], [None, 1.0, number]),
        (dict[str, Any], {"a": {"b": (number,)}}),
        (Model, Model(ID=1, weight=number)),
        (Holder, Holder(Model(ID=1, weight=number))),
    ]
    for type_, value in cases:
        with pytest.raises(EncodeError, match="NaN"):
            Codec[Any](type_).encode(value)
        assert Codec[Any](type_).encode_many([value]) is None
    assert Codec[Any](Price).encode_many([Price(None), Price(1.5)]) == [b'{"value":null}', b'{"value":1.5}']
    assert Codec[Any](Price).encode_many([Price(1.5), Item("a")]) is None
    assert Codec[Any](Price).encode(Price(None)) == b'{"value":null}'


def test_none_takes_nothing_else() -> None:
    assert Codec(None).encode(None) == b"null"
    with pytest.raises(EncodeError):
        Codec[Any](None).encode({})
    with pytest.raises(DecodeError):
        Codec(None).decode(b"3")


@pytest.mark.contract("E16")
@pytest.mark.parametrize(
    ("type_", "data", "path"),
    [
        (Item, '{"id": "a", "parts": [{"id": 3}]}', "$.parts[0].id"),
        (Item, "[]", "$"),
        (Item, '{"id": "a"', "$"),
        (list[Model], '[{"ID": 1}, {"ID": "secret"}]', "$[1].ID"),
        (Model, "{", "$"),
    ],
)
def test_decoding_names_the_path_and_no_value(type_: Any, data: str, path: str) -> None:
    with pytest.raises(DecodeError) as caught:
        Codec[Any](type_).decode(data.encode())
    assert caught.value.path == path
    assert "secret" not in str(caught.value)


def test_decoding_what_is_nested_too_deep() -> None:
    with pytest.raises(DecodeError):
        Codec[Any](Any).decode(b"[" * 100_000 + b"]" * 100_000)


def test_a_value_of_another_pydantic_model_is_refused_when_read_back() -> None:
    codec = Codec[Any](Model)
    with pytest.raises(DecodeError):
        codec.decode(codec.encode({"id": 1}))


@pytest.mark.parametrize("type_", [msgspec.Raw, list[msgspec.Raw], list[int] | set[int]])
def test_types_without_a_codec(type_: Any) -> None:
    with pytest.raises(TypeError):
        Codec[Any](type_)


def test_importing_the_package_brings_neither_pydantic_nor_metrics_nor_the_environment() -> None:
    script = (
        "import os, sys; os.environ['CYCLONE_NONSENSE'] = '1'; import cyclone;"
        "print([m for m in sys.modules if m.split('.')[0] in ('pydantic', 'prometheus_client', 'typer')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
