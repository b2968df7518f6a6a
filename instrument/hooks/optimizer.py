"""Detects the end of every `optimizer.step()`, by torch's own hook, and the start of backward passes.

Every backward pass that Python starts goes through one attribute, `torch.autograd.Variable._execution_engine`:
`Tensor.backward`, `torch.autograd.grad`, pipeline schedules, compiled autograd, and code that calls the engine
itself, as Megatron does. While this is installed, the engine there has a derived class, so code that checks its type
(torch.compile) still accepts it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

from torch.autograd import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.record.recorder import Recorder
from crossrank.instrument.torch_private import has


class Stepping(Protocol):
    """A session that counts optimizer steps and records the calls of backward passes."""

    recorder: Recorder

    def on_optimizer_step(self, optimizer: Optimizer, arguments: Any, keywords: dict[str, Any], /) -> None: ...


_remove: list[Callable[[], None]] = []
_patches = Patches()
_watching = False
_began = False


def install(session: Stepping) -> None:
    _remove.append(register_optimizer_step_post_hook(session.on_optimizer_step).remove)
    if (code := watch_backward()) is not None:
        session.recorder.watch_backward(code)


def watch_backward() -> CodeType | None:
    """Watch backward passes; return the code object in which each runs, None if this torch lacks the engine."""
    global _watching, _began
    if not has("backward passes"):
        return None
    engine: Any = type(Variable._execution_engine)

    class WatchedEngine(engine):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            global _began
            _began = True
            return super().run_backward(*args, **kwargs)

    _patches.replace(Variable, "_execution_engine", WatchedEngine())
    _watching, _began = True, False
    return WatchedEngine.run_backward.__code__


def uninstall() -> None:
    global _watching
    while _remove:
        _remove.pop()()
    _patches.undo()
    _watching = False


def take_backward_began() -> bool:
    """Return whether a backward pass has started since the last call; always True if they are not watched."""
    global _began
    result, _began = _began, False
    return result or not _watching
