"""Record every collective of every rank of a PyTorch job, and turn the recording into answers.

    import crossrank
    crossrank.enable()          # TRACING=CROSSNODE|ALL|NONE decides what is emitted

From here on every collective and P2P call of this process is recorded, whoever makes it. `crossrank.step()` ends
an iteration (otherwise the optimizers' steps are counted), `with crossrank.window():` records execution trace and
Kineto of a block, `with crossrank.expect_pause():` keeps the ranks that wait for this one meanwhile from reporting a
hang, `crossrank.disable()` finishes the files; leaving the process does so too.

    job = crossrank.load("/data/run1")      # in a notebook: tables of calls, collectives, steps, and answers

The names below import what they need when they are first used, torch or the offline tools: neither needs the other.
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
        except Exception as error:  # a requirement that is missing or broken, no descriptor left to read a file with
            globals().update(vars(off.names(error)))  # it is not tried again at each step
            return globals()[name]
    raise AttributeError(f"module 'crossrank' has no attribute {name!r}")
