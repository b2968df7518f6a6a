"""Where a coalesced launch begins and ends: two methods of ProcessGroup, which are no ops of the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.torch_private import has

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

_patches = Patches()
uninstall = _patches.undo


def install(session: Session) -> None:
    """Begin to follow coalesced launches, unless this torch has none."""
    if not has("coalescing"):
        return
    recorder, group_class = session.recorder, dist.ProcessGroup
    start, end = group_class._start_coalescing, group_class._end_coalescing

    def _start_coalescing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        result = start(group, *args, **kwargs)  # a backend that cannot coalesce raises here
        if recorder.active:
            recorder.start_coalescing()
        return result

    def _end_coalescing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        token = None
        if recorder.active:
            try:
                token = recorder.end_coalescing(group)
            except Exception as error:
                recorder.failed(error)
        try:
            return end(group, *args, **kwargs)
        finally:
            if token is not None:
                recorder.after(token)

    _patches.replace(group_class, "_start_coalescing", _start_coalescing)
    _patches.replace(group_class, "_end_coalescing", _end_coalescing)
