"""What dumps torch's flight recorders: one holds gloo's calls, another NCCL's.

From torch 2.15 on "nccl" makes a `ProcessGroupNCCL2`, unless TORCH_DIST_USE_NCCL2=0. The calls of that one are in a
third recorder, which goes by the name of the backend.

To write out calls with NCCL torch asks each event whether it is over. While a CUDA graph is captured, on whichever
thread, that is refused and the capture is broken, unless the thread that asks has said otherwise before: each dump here
does (NVIDIA's CUDA Driver API, `cuThreadExchangeStreamCaptureMode`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from crossrank.instrument.identity.gpu import cuda_is_in_use

_NCCL2 = "nccl2"
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of cuda.h."""


def _c10d() -> Any:
    return torch._C._distributed_c10d


def uses_nccl2() -> bool:
    """Whether this torch makes the newer process group of NCCL; the compiled kernel asks the same (`flight.h`)."""
    is_there = hasattr(_c10d(), "ProcessGroupNCCL2")
    return is_there and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """What this thread asks of events meanwhile breaks no CUDA graph that is captured."""
    exchange = _exchange_capture_mode() if cuda_is_in_use() else None
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # which leaves the mode in it that was
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # another maker's GPU
        return None


def nccl_dump() -> Callable[[bool, bool], bytes] | None:
    """What gives the recorder of NCCL's calls as JSON: with or without them, all or the open ones. None where torch has
    none."""
    if uses_nccl2():
        return _beside_captures()(functools.partial(_c10d()._dump_fr_trace_json, backend=_NCCL2))
    dump: Callable[[bool, bool], bytes] | None = getattr(_c10d(), "_dump_nccl_trace_json", None)
    return None if dump is None else _beside_captures()(dump)


def every_dump() -> list[Callable[[bool, bool, bool], bytes]]:
    """What gives each recorder that this process may have filled as a pickle: with or without calls, with or without
    stacks, all calls or the open ones. NCCL's come first."""
    generic = getattr(_c10d(), "_dump_fr_trace", None)
    found = []
    if cuda_is_in_use():
        found = [getattr(_c10d(), "_dump_nccl_trace", None)]
        if uses_nccl2():
            found.insert(0, functools.partial(_c10d()._dump_fr_trace, backend=_NCCL2))
    return [_beside_captures()(dump) for dump in (*found, generic) if dump is not None]
