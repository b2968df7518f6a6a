"""Dumps torch's flight recorder as JSON: the last calls of every group with their state, made for hangs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def dump() -> bytes | None:
    """The flight recorder of this process as JSON; None where this torch has none.

    The CUDA build keeps NCCL's own recorder apart from the generic one that gloo fills.
    """
    c10d = torch._C._distributed_c10d
    names = ["_dump_fr_trace_json"]
    if torch.cuda.is_available():
        names.insert(0, "_dump_nccl_trace_json")
    for name in names:
        function: Callable[..., bytes | str] | None = getattr(c10d, name, None)
        if function is not None:
            found = function(True, False)
            return found.encode() if isinstance(found, str) else found
    return None
