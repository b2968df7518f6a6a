"""The start of a profiler of the user's: a Kineto session of ours ends there.

Two sessions at once end in a crash when the second one to stop exports its trace: that must never be the user's, and
must not be ours either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.autograd.profiler as autograd_profiler

from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.torch_private import has

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

_patches = Patches()
uninstall = _patches.undo


def install(session: Session) -> None:
    if not has("Kineto"):
        return
    original, windows = autograd_profiler._prepare_profiler, session.windows

    def _prepare_profiler(*args: Any, **kwargs: Any) -> Any:
        windows.make_way()
        return original(*args, **kwargs)

    _patches.replace(autograd_profiler, "_prepare_profiler", _prepare_profiler)
