"""Results of workers as data: JSON made of dataclasses, Structs and containers, and checked against a type when read.

A part comes from another machine. Nothing that stands in it names a function or a module, and a class only to tell
the members of a union apart: what it is read into is said by the type that the worker's function returns.

| value | JSON |
|---|---|
| None, bool, int, float, str | itself |
| list, tuple, set | list |
| dict, Counter | `{"": [[key, value], …]}` |
| dataclass, Struct | `{"NAME OF THE CLASS": [fields in their order]}` |
| array | `{"array": [type code, base64]}` |
| bytearray, msgspec.Raw | base64 |
"""

from __future__ import annotations

import base64
import dataclasses
import json
import types
from array import array
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_CODES = "iIqQ"
"""Type codes of the arrays that results have."""
_CONTAINERS: dict[Any, Callable[[Any], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    dict: dict,
    Counter: Counter,
}


def encode(value: object) -> bytes:
    """`value` as JSON. Raises `TypeError` for what no worker returns."""
    return json.dumps(_data(value), separators=(",", ":")).encode()


def decode(content: bytes, kind: Any) -> Any:
    """The value in `content`, of the type `kind`. Raises one of `BROKEN` where it holds another."""
    return _read(json.loads(content), kind)


def _data(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind: Any = type(value)
    if _is_ours(kind):
        return {kind.__name__: [_data(getattr(value, name)) for name in _fields(kind)]}
    if isinstance(value, array):
        return {"array": [value.typecode, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, bytearray | msgspec.Raw):
        return base64.b64encode(bytes(value)).decode()
    if isinstance(value, dict):
        return {"": [[_data(key), _data(one)] for key, one in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        return [_data(one) for one in value]
    raise TypeError(f"{type(value).__name__} has no place in a part")


def _is_ours(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct))


class _Array:
    """Stands for `array[int]` in annotations, which Python before 3.12 cannot evaluate."""

    def __class_getitem__(cls, item: object) -> type[_Array]:
        return cls


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Name -> type of the fields of a dataclass or Struct."""
    hints = get_type_hints(kind, localns={"array": _Array})
    names = (
        kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [one.name for one in dataclasses.fields(kind)]
    )
    return {name: hints[name] for name in names}


def _read(data: Any, kind: Any) -> Any:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return _free(data)
    if origin in (Union, types.UnionType):
        return _read(data, next((one for one in inner if _may_be(data, one)), None))
    if origin is Literal:
        return _checked(data, isinstance(data, str | int) and data in inner, kind)
    if kind in (None, type(None)):
        return _checked(data, data is None, kind)
    if kind is float:
        return float(_checked(data, type(data) in (int, float), kind))
    if kind in (bool, int, str):
        return _checked(data, type(data) is kind, kind)
    if kind in (bytearray, msgspec.Raw):
        return kind(base64.b64decode(_read(data, str), validate=True))
    if _is_ours(kind):
        values = _only(data, kind.__name__)
        names = _fields(kind)
        return kind(**{name: _read(one, names[name]) for name, one in zip(names, values, strict=True)})
    if kind is _Array:
        code, content = _only(data, "array")
        _checked(code, code in tuple(_CODES), kind)
        return array(code, base64.b64decode(_read(content, str), validate=True))
    make = _CONTAINERS[origin]
    if make in (dict, Counter):
        of_key, of_value = inner if len(inner) == 2 else (*inner, int)
        return make({_read(key, of_key): _read(one, of_value) for key, one in _only(data, "")})
    _checked(data, type(data) is list, kind)
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(_read(one, of) for one, of in zip(data, inner, strict=True))
    return make(_read(one, inner[0]) for one in data)


def _free(data: Any) -> Any:
    """What a field of any type holds: JSON that a file had there."""
    if isinstance(data, dict):
        return {_read(key, str): _free(one) for key, one in _only(data, "")}
    return [_free(one) for one in data] if isinstance(data, list) else data


def _may_be(data: Any, kind: Any) -> bool:
    """Whether `data` is of the member `kind` of a union, by its outermost form."""
    kind = get_origin(kind) or kind
    if _is_ours(kind):
        return isinstance(data, dict) and kind.__name__ in data
    if kind in (dict, Counter):
        return isinstance(data, dict) and "" in data
    if kind in (list, tuple, set, frozenset):
        return isinstance(data, list)
    if kind is float:
        return type(data) in (int, float)
    return data is None if kind is type(None) else type(data) is kind


def _only(data: Any, key: str) -> Any:
    """The list under the only key of an object."""
    _checked(data, isinstance(data, dict) and list(data) == [key] and isinstance(data[key], list), key or "dict")
    return data[key]


def _checked(data: Any, fits: bool, kind: Any) -> Any:
    if not fits:
        raise TypeError(f"{str(data)[:40]!r} stands where {getattr(kind, '__name__', kind)} belongs")
    return data
