"""Dumps torch's flight recorder: the last calls of every group with their state, and what crossrank knows besides.

The file is JSON with the recorder's own fields; `read_flight_dump` of the tools, and every reader of
`_dump_fr_trace_json`, takes it. torch's JSON has no stack frames, so its pickle is taken and written as JSON: with
frames where torch has its compiler loaded, for only then are they free; the calls' own lines are always there. The
field `crossrank` adds what a hang is diagnosed from and the recorder does not know: when and why the dump was taken,
the members of the groups (lost on gloo), the last calls with their peers (gloo's P2P is not recorded by torch), and
where every thread of the process is.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import torch

from crossrank.instrument.gpu import cuda_is_in_use

_COMPILER = "torch._inductor.codecache"
_MOST_FRAMES = 64
_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OURS = "crossrank-"
"""How the names of our own threads begin."""


def dump(moment: dict[str, Any]) -> bytes | None:
    """The flight recorder of this process as JSON with `moment` in it; None where this torch has none.

    The CUDA build keeps NCCL's own recorder apart from the generic one that gloo fills.
    """
    c10d = torch._C._distributed_c10d
    names = ["_dump_fr_trace"]
    if cuda_is_in_use():
        names.insert(0, "_dump_nccl_trace")
    # To resolve stacks torch imports its compiler, which takes most of a second and keeps process groups alive. And it
    # makes the interpreter forget that a KeyboardInterrupt ends it: the process would exit with 1, not die of SIGINT.
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    with_stacks = _COMPILER in sys.modules and not interrupted
    content: dict[str, Any] | None = None
    for name in names:
        function: Callable[..., bytes] | None = getattr(c10d, name, None)
        if function is not None:
            # This process wrote the pickle a moment ago.
            content = pickle.loads(function(True, with_stacks, False))
            if content.get("entries"):
                break
    if content is None:
        return None
    return msgspec.json.encode(content | {"crossrank": moment})


def completed() -> int:
    """How many calls torch knows to be over, summed over the groups; it rises while communication goes on."""
    c10d = torch._C._distributed_c10d
    total = 0
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if cuda_is_in_use() else ("_dump_fr_trace_json",):
        function: Callable[..., bytes | str] | None = getattr(c10d, name, None)
        if function is not None:
            status = msgspec.json.decode(function(False, False)).get("pg_status", {})
            total += sum(int(progress["last_completed_collective"]) for progress in status.values())
    return total


def stacks() -> list[dict[str, Any]]:
    """Where every Python thread of this process is, innermost frame first; crossrank's own threads are left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        if name.startswith(_OURS):
            continue
        frames: list[dict[str, Any]] = []
        walk: FrameType | None = frame
        while walk is not None and walk.f_code.co_filename.startswith(_FOLDER):  # the thread that dumps is in here
            walk = walk.f_back
        while walk is not None and len(frames) < _MOST_FRAMES:
            code = walk.f_code
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": walk.f_lineno or 0})
            walk = walk.f_back
        found.append({"thread": name, "frames": frames})
    return found


def uncaught() -> str | None:
    """The exception that ends this process, where the interpreter has reported one."""
    error = getattr(sys, "last_value", None)
    return f"{type(error).__name__}: {error}"[:500] if error is not None else None
