"""What the recorder does when the user's profiler is about to start.

It ends our Kineto session: two sessions at the same time crash the process when the second one to stop exports its
trace.

It also has torch import what the first `record_function` imports. A profiler with stacks keeps the address of each
function's name without a reference to it, and reads the name when it stops. The name of a module's code is freed after
the import. So after an import while the profiler runs, it reads what was written there later. torch 2.13 imports
`torch.profiler._cupti_monitor` in this way. Without a recording the freed memory usually becomes another name. With
one it is often no valid text, and `key_averages` raises `UnicodeDecodeError`.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch.autograd.profiler as autograd_profiler

from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.torch_private import has
from crossrank.instrument.write.window import Windows


class Windowed(Protocol):
    """A session that may have a window open."""

    windows: Windows


_patches = Patches()
uninstall = _patches.undo


def install(session: Windowed) -> None:
    if not has("Kineto"):
        return
    original, windows = autograd_profiler._prepare_profiler, session.windows

    def _prepare_profiler(*args: Any, **kwargs: Any) -> Any:
        windows.make_way()
        if not windows.traces_execution:  # the range would be in our execution trace, whose steps have ranges anyway
            _import_early()
        return original(*args, **kwargs)

    _patches.replace(autograd_profiler, "_prepare_profiler", _prepare_profiler)


@functools.cache
def _import_early() -> None:
    """Have torch import what its first range needs, in any version."""
    with autograd_profiler.record_function("crossrank: a profiler starts"):
        pass
