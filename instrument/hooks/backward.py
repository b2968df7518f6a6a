"""Knows whether a backward pass has begun since it was last asked.

Every backward pass that Python starts goes through one attribute, `torch.autograd.Variable._execution_engine`:
`Tensor.backward`, `torch.autograd.grad`, pipeline schedules, compiled autograd, and code that calls the engine
itself, as Megatron does. While this is installed, the engine there is one of a derived class, so what looks at its
type (torch.compile) finds what it knows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.autograd import Variable

from crossrank.instrument.torch_private import has


class BackwardWatch:
    """Watches for backward passes of this process, on whatever thread."""

    def __init__(self) -> None:
        self._began = False
        self._original: Any = None
        self._ours: Any = None

    def install(self) -> None:
        """Begin to watch, unless this torch lacks the engine there."""
        if not has("backward passes"):
            return
        original: Any = Variable._execution_engine
        engine: Any = type(original)
        ours = _watched(engine)()
        ours.watch = self
        self._original, self._ours = original, ours
        Variable._execution_engine = ours

    def uninstall(self) -> None:
        """Put back what was there, unless somebody has put something else in place since."""
        if self._ours is not None and Variable._execution_engine is self._ours:
            Variable._execution_engine = self._original
        self._original = self._ours = None

    def began(self) -> bool:
        """Whether a backward pass has begun since the last call of this; always true where it cannot be seen."""
        began, self._began = self._began, False
        return began or self._ours is None

    def note(self) -> None:
        self._began = True


@cache
def _watched(engine: Any) -> Any:
    class WatchedEngine(engine):  # type: ignore[misc]
        watch: BackwardWatch

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            self.watch.note()
            return super().run_backward(*args, **kwargs)

    return WatchedEngine
