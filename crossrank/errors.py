"""The one error type that crossrank shows to a user.

A message says on one line what happened, with which value, and what to do next:

>>> raise CrossrankError("TRACING='SOME' is not one of CROSSNODE, ALL, NONE")
Traceback (most recent call last):
...
crossrank.errors.CrossrankError: TRACING='SOME' is not one of CROSSNODE, ALL, NONE
"""

from __future__ import annotations

import os
import traceback

import msgspec

BROKEN = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, ArithmeticError)
"""Errors of decoding or converting untrusted content. ValueError: text that is not UTF-8 or has lone surrogates,
numbers out of range. ArithmeticError: such numbers, malformed decimals. TypeError: content of the wrong type."""


class CrossrankError(Exception):
    """A condition that the user can act on. Its text is the complete message."""


def one_line(error: BaseException) -> str:
    """Return `error` as one line, with its type unless it is a `CrossrankError`.

    >>> one_line(KeyError("dtype"))
    "KeyError: 'dtype'"
    """
    if isinstance(error, CrossrankError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unforeseen(error: BaseException) -> CrossrankError:
    """Return the message for an unexpected error: what it is and where it was raised, so that users can report it."""
    if isinstance(error, MemoryError):
        return CrossrankError("not enough memory; try --jobs 1, or a larger machine")
    if isinstance(error, RecursionError):
        return CrossrankError("its content is nested too deeply; give a real file")
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) != "crossrank":
        extra = "cluster" if missing in ("dask", "distributed") else "tools"
        package = "protobuf" if missing == "google" else missing
        return CrossrankError(f"{package} is not installed; run: pip install 'crossrank[{extra}]'")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return CrossrankError(f"stopped by an unexpected error ({one_line(error)}{place}); please report it")
