"""Record every collective of every rank of a PyTorch job, and turn the recording into answers.

    import crossrank
    crossrank.enable()          # TRACING=CROSSNODE|ALL|NONE decides what is emitted

From here on every collective and P2P call of this process is recorded, whoever makes it. `crossrank.step()` ends
an iteration (otherwise the optimizers' steps are counted), `with crossrank.window():` records execution trace and
Kineto of a block, `crossrank.disable()` finishes the files; leaving the process does so too.

The names below import torch when they are first used, so the offline tools start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossrank.instrument.api import disable, enable, enabled, step, window

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "enabled", "step", "window"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("crossrank.instrument.api"), name)
    raise AttributeError(f"module 'crossrank' has no attribute {name!r}")
