"""Counts iterations from the optimizers' steps, where the training loop does not call `crossrank.step()`.

torch calls a hook after every `optimizer.step()`. With one optimizer that is the end of the iteration. With
several (GAN, Muon + Adam) the one that joined last ends it. An optimizer that then steps twice while that one
rests takes its place, so that one which steps every tenth iteration does not slow the count to a tenth.
"""

from __future__ import annotations


class StepBoundaries:
    """Tells which optimizer steps end an iteration."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._last: int | None = None  # the optimizer whose step ends the iteration
        self._since: set[int] = set()  # those that stepped since the last boundary

    def ends_iteration(self, optimizer: int) -> bool:
        """Whether the step just made by the optimizer of this id ends the iteration.

        >>> gan = StepBoundaries()
        >>> [gan.ends_iteration(optimizer) for optimizer in (1, 2, 1, 2, 1, 2)]
        [True, False, False, True, False, True]
        """
        if optimizer not in self._known:
            first = not self._known
            self._known.add(optimizer)
            self._last = optimizer
            if not first:  # its first iteration has been counted already, by the one that was last until now
                self._since.clear()
                return False
            return True
        if optimizer == self._last or optimizer in self._since:
            self._last = optimizer
            self._since.clear()
            return True
        self._since.add(optimizer)
        return False
