"""Dumps torch's flight recorder as JSON: the last calls of every group with their state, made for hangs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from crossrank.instrument.gpu import cuda_is_in_use


def dump() -> bytes | None:
    """The flight recorder of this process as JSON; None where this torch has none.

    The CUDA build keeps NCCL's own recorder apart from the generic one that gloo fills.
    """
    c10d = torch._C._distributed_c10d
    names = ["_dump_fr_trace_json"]
    if cuda_is_in_use():
        names.insert(0, "_dump_nccl_trace_json")
    content: bytes | None = None
    for name in names:
        function: Callable[..., bytes | str] | None = getattr(c10d, name, None)
        if function is not None:
            found = function(True, False)
            content = found.encode() if isinstance(found, str) else found
            if b'"entries"' in content:
                return content
    return content
