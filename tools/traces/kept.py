"""Shares the results of readers between analyses: within `files_kept`, a file is read only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_kept: ContextVar[dict[Any, Any] | None] = ContextVar("kept", default=None)


@contextmanager
def files_kept() -> Iterator[None]:
    """Keep the results of `shared` readers until the block ends."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def shared(read: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a reader return its last result for equal arguments within `files_kept`. Copy a result to change it."""

    @wraps(read)
    def read_once(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        kept = _kept.get()
        if kept is None:
            return read(*arguments, **options)
        key = read, arguments, tuple(sorted(options.items()))
        if key not in kept:
            kept[key] = read(*arguments, **options)
        found: _Result = kept[key]
        return found

    return read_once
