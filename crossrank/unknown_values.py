"""Decodes files that a newer version of crossrank wrote: a value that this version does not know is unknown.

A field with a default may have such a value. It gets its default, or what `instead` says, and is counted. A field
without both must have a known value: without it nothing is left to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from crossrank.text import plural

T = TypeVar("T")
_MOST_NAMED = 5


class Decoder(Generic[T]):
    """Decodes JSON as `kind`. What it does not know is in `unknown`: name of the field -> number of values."""

    def __init__(
        self,
        kind: type[T],
        unknown: Counter[str],
        instead: Mapping[str, object] | None = None,
        needed: Collection[str] = (),
        *,
        strict: bool = True,
    ) -> None:
        """`instead`: what a field gets for an unknown value, if that is not its default. `needed`: fields with
        a default that must have a known value all the same. `strict` is as in `msgspec`."""
        self._kind, self.unknown, self._instead, self._needed = kind, unknown, instead or {}, needed
        self._strict = strict
        self._decode = msgspec.json.Decoder(kind, strict=strict).decode

    def decode(self, data: bytes) -> T:
        """Return what the JSON says. Raises what `msgspec` raises if it is broken, or lacks what it must have."""
        try:
            return self._decode(data)
        except msgspec.ValidationError as error:
            try:
                made: T = self._fitted(self._kind, msgspec.json.decode(data), "")
            except msgspec.ValidationError:
                raise error from None  # it has the place
            return made

    def _fitted(self, kind: Any, value: object, name: str) -> Any:
        """Return `value` as `kind`, without the values in it that are unknown."""
        try:
            return msgspec.convert(value, kind, strict=self._strict)
        except msgspec.ValidationError:
            kind = _without_none(kind)
            if kind is msgspec.Raw:
                return msgspec.Raw(msgspec.json.encode(value))
            if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                return self._fitted_struct(kind, value, name)
            if isinstance(value, dict) and get_origin(kind) is dict:
                return self._fitted_dict(kind, value, name)
            raise

    def _fitted_struct(self, kind: type[msgspec.Struct], value: Mapping[str, object], name: str) -> msgspec.Struct:
        known = {}
        for one in msgspec.structs.fields(kind):
            if one.encode_name not in value:
                if one.required:
                    raise msgspec.ValidationError(f"Object missing required field `{one.encode_name}`")
                continue
            path = f"{name}.{one.encode_name}".lstrip(".")
            try:
                known[one.name] = self._fitted(one.type, value[one.encode_name], path)
            except msgspec.ValidationError:
                if (one.required and path not in self._instead) or path in self._needed:
                    raise
                self.unknown[path] += 1
                if path in self._instead:
                    known[one.name] = self._instead[path]
        return kind(**known)

    def _fitted_dict(self, kind: Any, value: Mapping[str, object], name: str) -> dict[Any, Any]:
        of_keys, of_values = get_args(kind)
        known = {}
        for key, one in value.items():
            try:
                # The key of a line is its kind, and is in the names of its fields.
                known[msgspec.convert(key, of_keys)] = self._fitted(of_values, one, f"{name}.{key}".lstrip("."))
            except msgspec.ValidationError:
                if not name:
                    raise
                self.unknown[f"{name}.{key}"] += 1
        return known


def _without_none(kind: Any) -> Any:
    """Return `kind` without annotations, and without None where it is optional."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        others = [one for one in get_args(kind) if one is not type(None)]
        return _without_none(others[0]) if len(others) == 1 else kind
    return kind


def unknown_text(unknown: Counter[str]) -> str:
    """Return what is unknown, and of how many values.

    >>> unknown_text(Counter({"wait.in": 2, "locality": 1}))
    '3 values that this version of crossrank does not know are unknown here (wait.in 2, locality 1)'
    """
    named = ", ".join(f"{name} {count:,}" for name, count in unknown.most_common(_MOST_NAMED))
    more = ", …" if len(unknown) > _MOST_NAMED else ""
    is_one = unknown.total() == 1
    return (
        f"{plural(unknown.total(), 'value')} that this version of crossrank does not know "
        f"{'is' if is_one else 'are'} unknown here ({named}{more})"
    )
