"""Inputs and outputs to JSON that PostgreSQL can hold, and back into the declared type.

A `jsonb` refuses what JSON allows (a NUL in text), and an encoder may quietly turn what JSON lacks into something else
(a NaN into null). Both are found here, before anything is sent, because in a batch one such value would cost the others
their statement.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

# A backslash that is itself escaped does not start an escape: `\\u0000` is text, `\u0000` is a NUL.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_PATH = re.compile(r" - at `(?:key` in `)?(\$[^`]*)`$")


class EncodeError(ValueError):
    """A value that JSON or PostgreSQL cannot hold. The text names no value."""


class DecodeError(ValueError):
    """JSON that is no value of the type. `path` tells where, as in `$.items[0].id`; the text too, without any value."""

    def __init__(self, message: str, path: str = "$") -> None:
        super().__init__(message)
        self.path = path


class Codec(Generic[T]):
    """The way of one type to JSON and back: msgspec's types (also dataclass and TypedDict), or pydantic's.

    Raises TypeError if the type has no such way.
    """

    def __init__(self, type_: Any) -> None:
        self.type = type_
        self._adapter = _pydantic_adapter(type_)
        self._none = type_ is None or type_ is type(None)
        if self._adapter is None:
            info = inspect.type_info(type_)
            self._floats = _holds(info, (inspect.FloatType, inspect.AnyType, inspect.CustomType))
            if _holds(info, (inspect.RawType,)):
                raise TypeError("msgspec.Raw is not accepted: what it holds is not known to be valid")
            self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type_, dec_hook=_decode_custom)
        else:
            self._floats = True

    def encode(self, value: T) -> bytes:
        """The value as JSON. EncodeError: NUL or a lone surrogate in text, NaN, an infinity, too deep, no encoding."""
        if self._none and value is not None:
            raise EncodeError(f"None is expected, not {type(value).__name__}")
        try:
            data = self._dump(value)
        except RecursionError:
            raise EncodeError("the value is nested too deep, or contains itself") from None
        except UnicodeEncodeError as exc:
            raise EncodeError("text with a lone surrogate is not valid UTF-8") from exc
        except Exception as exc:  # the value's own code runs here, so anything can be raised
            raise EncodeError(f"{type(exc).__name__}: {exc}") from exc
        if b"\\u0000" in data and _NUL.search(data):
            raise EncodeError("text must not contain NUL")
        # Encoders write NaN as null. So only where there is a null, and where a float can be, is the value searched.
        if self._floats and b"null" in data and _unbounded(self._builtins(value)):
            raise EncodeError("NaN and infinities are not JSON")
        return data

    def encode_many(self, values: Sequence[T]) -> list[bytes] | None:
        """Values as JSON that can be read back, all at once; None when one of them cannot, or has to be asked alone."""
        if self._adapter is not None or self._none:
            return None
        try:
            lines = _encoder.encode_lines(values)  # which it ends with a line break, and there is no other
            self._decoder.decode_lines(lines)
        except Exception:  # which value, and how to say it, shows when it is asked alone
            return None
        if b"\\u0000" in lines and _NUL.search(lines):
            return None
        if self._floats and b"null" in lines and _unbounded(self._builtins(values)):
            return None
        return lines.split(b"\n")[:-1]

    def decode(self, data: bytes | str) -> T:
        """The value that JSON text stands for, or DecodeError."""
        try:
            if self._adapter is not None:
                return typing.cast("T", self._adapter.validate_json(data))
            return typing.cast("T", self._decoder.decode(data))
        except RecursionError:
            raise DecodeError("nested too deep") from None
        except msgspec.MsgspecError as exc:
            found = _PATH.search(str(exc))
            raise DecodeError(str(exc), found[1] if found else "$") from exc
        except ValueError as exc:
            if self._adapter is None:
                raise DecodeError(f"{type(exc).__name__}: {exc}") from exc
            raise _pydantic_error(exc) from None  # its own text would show the value

    def _dump(self, value: T) -> bytes:
        if self._adapter is not None:
            # By alias, as that is what validation reads. A value of another type is found when it is read back.
            return typing.cast("bytes", self._adapter.dump_json(value, by_alias=True, warnings="none"))
        return _encoder.encode(value)

    def _builtins(self, value: T | Sequence[T]) -> object:
        if self._adapter is not None:
            return self._adapter.dump_python(value, warnings="none")
        return msgspec.to_builtins(value, enc_hook=encode_custom)


def check_builtins(value: object) -> None:
    """Refuses what jsonb cannot hold among built-in types: EncodeError, as `Codec.encode` does."""
    if _unbounded(value):
        raise EncodeError("NaN and infinities are not JSON")
    try:
        data = _encoder.encode(value)
    except UnicodeEncodeError as exc:
        raise EncodeError("text with a lone surrogate is not valid UTF-8") from exc
    if b"\\u0000" in data and _NUL.search(data):
        raise EncodeError("text must not contain NUL")


def encode_custom(value: Any) -> object:
    """What msgspec asks for the encoding of a type that it does not know."""
    # A pydantic model inside a type of msgspec's: pydantic is asked through the model, so it need not be imported here.
    if hasattr(value, "__pydantic_validator__") and hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"an object of type {type(value).__name__} has no encoding")


def _decode_custom(type_: Any, value: Any) -> object:
    if hasattr(type_, "__pydantic_validator__") and hasattr(type_, "model_validate_json"):
        try:
            return type_.model_validate_json(_encoder.encode(value))
        except ValueError as exc:
            raise ValueError(str(_pydantic_error(exc))) from None
    raise NotImplementedError(f"type {type_!r} has no decoding")


_encoder = msgspec.json.Encoder(enc_hook=encode_custom)


def _pydantic_adapter(type_: Any) -> Any:
    """pydantic's adapter if the type mentions one of its models, else None. Only then is pydantic imported."""
    if not _any_argument(type_, lambda part: hasattr(part, "__pydantic_validator__")):
        return None
    import pydantic

    return pydantic.TypeAdapter(type_)


def _any_argument(type_: Any, test: Callable[[Any], bool]) -> bool:
    return test(type_) or any(_any_argument(part, test) for part in typing.get_args(type_))


def _pydantic_error(exc: Any) -> DecodeError:
    if not hasattr(exc, "errors"):
        return DecodeError(f"{type(exc).__name__}: {exc}")
    first = exc.errors(include_input=False, include_context=False, include_url=False)[0]
    path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    return DecodeError(f"{first['msg']} - at `{path}`", path)


def _holds(node: object, kinds: tuple[type, ...]) -> bool:
    """Whether a description of a type contains a node of one of these kinds. Types may refer to themselves."""
    seen: set[int] = set()
    rest: list[object] = [node]
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, kinds):
            return True
        if isinstance(one, tuple):
            rest.extend(typing.cast("tuple[object, ...]", one))
        elif isinstance(one, inspect.Type | inspect.Field):
            rest.extend(getattr(one, name) for name in one.__struct_fields__)
    return False


def _unbounded(value: object) -> bool:
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, float):
            if not math.isfinite(one):
                return True
        elif isinstance(one, dict):
            rest.extend(typing.cast("dict[object, object]", one).values())
        elif isinstance(one, list | tuple | set | frozenset):
            rest.extend(typing.cast("list[object]", one))
    return False


_MOST_DIFFERENCES = 100


def differences(old: bytes | str, new: bytes | str) -> list[str]:
    """Where two JSON texts differ as values of jsonb, as JSON pointers; none when they are equal. At most 100."""
    found: list[str] = []
    rest: list[tuple[str, Any, Any]] = [("", msgspec.json.decode(old), msgspec.json.decode(new))]
    while rest and len(found) < _MOST_DIFFERENCES:
        path, one, other = rest.pop()
        left, right = _members(one), _members(other)
        if left is not None and right is not None and type(one) is type(other):
            keys = sorted(left.keys() | right.keys(), key=lambda key: (len(key) if key.isdecimal() else 0, key))
            rest += [(f"{path}/{key}", left.get(key, _MISSING), right.get(key, _MISSING)) for key in reversed(keys)]
        # True equals 1 in Python, and does not in JSON.
        elif one is _MISSING or other is _MISSING or isinstance(one, bool) != isinstance(other, bool) or one != other:
            found.append(path)
    return found


def _members(value: Any) -> dict[str, Any] | None:
    """What an object or a list holds, by the steps of a JSON pointer."""
    if isinstance(value, dict):
        known = typing.cast("dict[str, Any]", value)
        return {key.replace("~", "~0").replace("/", "~1"): one for key, one in known.items()}
    if isinstance(value, list):
        return {str(n): one for n, one in enumerate(typing.cast("typing.Sequence[Any]", value))}
    return None


_MISSING = object()
