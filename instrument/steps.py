"""Counts iterations from the optimizers' steps, where the training loop does not call `crossrank.step()`.

torch calls a hook after every `optimizer.step()`. With one optimizer that is the end of the iteration. With
several in the first iteration (GAN, Muon + Adam) the one that joined last ends it. One that joins later (the
next training phase, a generator after its warm-up) ends the iteration that it joins. An optimizer that steps
twice while the ending one rests takes its place, so one which steps every tenth iteration does not slow the
count to a tenth. Loops that step one optimizer several times an iteration need `crossrank.step()`.
"""

from __future__ import annotations


class StepBoundaries:
    """Tells which optimizer steps end an iteration."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._last: int | None = None  # the optimizer whose step ends the iteration
        self._since: set[int] = set()  # those that stepped since the last boundary
        self._first_iteration = True

    def ends_iteration(self, optimizer: int) -> bool:
        """Whether the step just made by the optimizer of this id ends the iteration.

        >>> gan = StepBoundaries()
        >>> [gan.ends_iteration(optimizer) for optimizer in (1, 2, 1, 2, 1, 2)]
        [True, False, False, True, False, True]
        """
        is_new = optimizer not in self._known
        self._known.add(optimizer)
        if is_new and self._last is not None and self._first_iteration:
            # The iteration has been counted already, when the optimizer before this one stepped.
            self._last = optimizer
            return False
        if is_new or optimizer == self._last or optimizer in self._since:
            self._first_iteration = self._last is None
            self._last = optimizer
            self._since.clear()
            return True
        # With a second optimizer under way the first iteration is over.
        self._first_iteration = False
        self._since.add(optimizer)
        return False
