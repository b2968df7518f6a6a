"""Functions that dump torch's flight recorders: one has the calls of gloo, another those of NCCL.

From torch 2.15 on, "nccl" makes a `ProcessGroupNCCL2`, unless TORCH_DIST_USE_NCCL2=0. A third recorder has its calls.

To dump NCCL calls, torch queries the CUDA event of each call. While any thread captures a CUDA graph, such a query
fails and breaks the capture, unless the querying thread has relaxed its capture mode. Each dump here does so
(`cuThreadExchangeStreamCaptureMode` of NVIDIA's CUDA Driver API).
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
    """Return whether this torch makes the newer process group of NCCL. `flight.h` has the same check."""
    is_there = hasattr(_c10d(), "ProcessGroupNCCL2")
    return is_there and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"


@contextlib.contextmanager
def _allow_captures() -> Iterator[None]:
    """A block in which this thread can query events without breaking the capture of a CUDA graph."""
    exchange = _exchange_capture_mode() if cuda_is_in_use() else None
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # writes the previous mode to `mode`
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # a GPU of another vendor
        return None


def nccl_dump() -> Callable[[bool, bool], bytes] | None:
    """Return the function that dumps the NCCL recorder as JSON, or None. Its arguments: include the calls, only
    unfinished calls."""
    if uses_nccl2():
        return _allow_captures()(functools.partial(_c10d()._dump_fr_trace_json, backend=_NCCL2))
    dump: Callable[[bool, bool], bytes] | None = getattr(_c10d(), "_dump_nccl_trace_json", None)
    return None if dump is None else _allow_captures()(dump)


def every_dump() -> list[Callable[[bool, bool, bool], bytes]]:
    """Return the functions that dump, as a pickle, each recorder that this process may have filled; NCCL's come first.
    Their arguments: include the calls, include stacks, only unfinished calls."""
    generic = getattr(_c10d(), "_dump_fr_trace", None)
    found = []
    if cuda_is_in_use():
        found = [getattr(_c10d(), "_dump_nccl_trace", None)]
        if uses_nccl2():
            found.insert(0, functools.partial(_c10d()._dump_fr_trace, backend=_NCCL2))
    return [_allow_captures()(dump) for dump in (*found, generic) if dump is not None]
