"""Ends our Kineto session when the user's profiler starts.

Two sessions at the same time crash the process when the second one to stop exports its trace.
"""

from __future__ import annotations

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
        return original(*args, **kwargs)

    _patches.replace(autograd_profiler, "_prepare_profiler", _prepare_profiler)
