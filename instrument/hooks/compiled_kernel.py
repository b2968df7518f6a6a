"""The compiled recorders at torch's dispatcher, and our operations through which they call Python.

These operations are defined once and stay: a call may be inside one of them while a session ends. They use the recorder
of the latest session. `crossrank.instrument.compiled.recorder` documents each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from crossrank.instrument.compiled.recorder import CompiledRecorder, layout
from crossrank.instrument.record.op_schema import Reader
from crossrank.instrument.record.recorder import BATCH_CODE, Token
from crossrank.instrument.unpatched import threading

_NAMESPACE = "crossrank"
_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"

_getframe: Callable[[int], FrameType] = sys._getframe

_recorder: CompiledRecorder | None = None  # the latest
_library: torch.library.Library | None = None
_opened = threading.local()
"""`stack`: the tokens that `open` has opened on this thread, with their recorders."""


def install(recorder: CompiledRecorder, readers: Sequence[Reader], functional: Sequence[str]) -> Callable[[], None]:
    """Install the kernels for `recorder`; return the function that removes them."""
    native = recorder.native
    _define_operations()
    requests = BATCH_CODE.co_varnames.index("reqs") if "reqs" in BATCH_CODE.co_varnames else -1
    native.install(tuple(map(layout, readers)), tuple(functional), _describe, BATCH_CODE, requests)
    record_to(recorder, readers)
    uninstall: Callable[[], None] = native.uninstall
    return uninstall


def record_to(recorder: CompiledRecorder, readers: Sequence[Reader]) -> None:
    """Make the kernels use this recorder."""
    global _recorder
    _recorder = recorder
    recorder.begin(readers)


def _define_operations() -> None:
    global _library
    if _library is not None:
        return
    library = torch.library.Library(_NAMESPACE, "DEF")
    for schema, function in (
        (f"group({_GROUP} group) -> int", lambda group: _guarded(lambda to: to.group(group), -1)),
        ("site(int op, str? device) -> int", _site),
        ("mark(int kind) -> int", lambda kind: _guarded(lambda to: to.mark(kind), 0)),
        ("open(int kind, int id) -> int", lambda kind, record_id: _guarded(lambda to: _open(to, kind, record_id), 0)),
        ("close() -> int", _close),
    ):
        library.impl(library.define(schema), function, "BackendSelect")
    _library = library


def _guarded(work: Callable[[CompiledRecorder], int], otherwise: int) -> int:
    """Return the result of `work`, or `otherwise` if the recorder fails. The failure is counted."""
    recorder = _recorder
    if recorder is None:
        return otherwise
    try:
        return work(recorder)
    except Exception as error:
        recorder.failed(error)
        return otherwise


def _site(op: int, device: str | None) -> int:
    try:
        frame = _getframe(1)
    except ValueError:  # a thread of C++
        frame = None
    return _guarded(lambda to: to.site(op, device, frame), -1)


def _open(recorder: CompiledRecorder, kind: int, record_id: int) -> int:
    token = recorder.open(kind, record_id)
    if token is None:
        return 0
    stack: list[tuple[CompiledRecorder, Token]] | None = getattr(_opened, "stack", None)
    if stack is None:
        stack = _opened.stack = []
    stack.append((recorder, token))
    return 1


def _close() -> int:
    recorder, token = _opened.stack.pop()
    recorder.after(token)
    return 0


def _describe(*call: Any) -> object:
    return _recorder.describe(*call) if _recorder is not None else None
