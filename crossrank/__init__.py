"""Record every collective of every rank of a PyTorch job, and turn the recording into answers.

    import crossrank
    crossrank.enable()          # TRACING=CROSSNODE|ALL|NONE decides what is emitted

From then on, crossrank records every collective and P2P call of this rank. `crossrank.step()` ends a training step;
without it, crossrank counts the steps of the optimizers. `with crossrank.window():` records the execution trace and
the Kineto trace of a block. Within `with crossrank.expect_pause():`, ranks that wait for this rank report no hang.
`crossrank.disable()` finishes the files, and so does the end of the process.

    job = crossrank.load("/data/run1")      # in a notebook: tables of calls, collectives, steps, and answers

Each name below imports torch or the offline tools at its first use. The tools do not need torch, nor torch the tools.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crossrank import off

if TYPE_CHECKING:
    from crossrank.instrument.api import disable, enable, enabled, expect_pause, step, window
    from crossrank.tools.api import load

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "enabled", "expect_pause", "load", "step", "window"]


def __getattr__(name: str) -> Any:
    if name == "load":
        try:
            return import_module("crossrank.tools.api").load
        except ModuleNotFoundError as error:
            raise ImportError(f"{error.name} is not installed; run: pip install 'crossrank[tools]'") from error
    if name in __all__:
        try:
            return getattr(import_module("crossrank.instrument.api"), name)
        except Exception as error:  # a missing or broken requirement, or no file descriptor left
            globals().update(vars(off.names(error)))  # so that no later step tries the import again
            return globals()[name]
    raise AttributeError(f"module 'crossrank' has no attribute {name!r}")
