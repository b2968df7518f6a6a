"""Counts the training steps from 0, and opens and closes windows between them.

If the loop does not call `crossrank.step()`, optimizer steps mark the end of a training step. torch calls a hook after
every optimizer step. In this module "iteration" is a training step, and "step" an optimizer step. Steps are grouped
twice:

* Steps without a backward pass between them are one update: several optimizers in turn (Muon + Adam), one optimizer per
  parameter group (DeepSpeed's ZeRO), or one per parameter inside the backward pass.
* Updates with backward passes between them are one iteration until an optimizer steps again: discriminator and
  generator, each after its own backward pass.

An iteration ends with its last step, but only the next step shows that. So the expected length of an iteration is the
shorter length of the two iterations before it (one step at first). Later steps of the iteration do not count. An
iteration that is shorter than expected is counted when the next one starts. So the sum is exact, but the first
iteration of a new pattern may end too early or too late.

If one optimizer steps more often than another, each time after a backward pass, there are two meanings: two critic
steps in one iteration, or a generator step in every second iteration. The second is assumed, and `on_doubt` is called.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from crossrank.errors import one_line
from crossrank.instrument.facts import Recording
from crossrank.instrument.hooks import signals
from crossrank.instrument.hooks.optimizer import take_backward_began
from crossrank.instrument.log import log
from crossrank.instrument.record.recorder import Recorder
from crossrank.instrument.script_errors import raised_by_script
from crossrank.instrument.write.comms_writer import CommsWriter

_LOOK_EVERY = 1_000_000_000
"""ns between two checks whether signals still reach crossrank."""
_REPEATS_WITHOUT_BACKWARD = 2
"""Repeats of an update, beyond twice the earlier maximum, after which backward passes count as hidden."""


class Iterating(Recording, Protocol):
    """The part of a session that counting steps uses."""

    recorder: Recorder
    writer: CommsWriter | None


class Iterations:
    """Counts the training steps of one session, by optimizer steps or by `crossrank.step()`."""

    def __init__(self, session: Iterating, pass_edge: Callable[[int], None]) -> None:
        """`pass_edge` is called with the number of each training step that has ended."""
        self._session = session
        self._pass_edge = pass_edge
        self._boundaries = StepBoundaries(self._warn_of_uneven_steps)
        self._explicit = False
        self._warned = False
        self._look_at = 0

    def step(self) -> None:
        """End a training step. From now on only calls of this method count."""
        with self._session.failures.reported("a step was not counted"):
            if not self._explicit:
                self._explicit = True
                self._session.recorder.step = 0  # forget the optimizer steps before it
            self._pass_edge(self._advance())

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer, _: Any, keywords: dict[str, Any]) -> None:
        """torch's hook after `optimizer.step()`; `keywords` are those of that call."""
        session = self._session
        # After a step the CPU caches are cold, and each line here costs microseconds: no context manager.
        try:
            if self._explicit or session.closing:
                return
            parameter = first_parameter(optimizer.param_groups)
            for _iteration in range(self._boundaries.count(optimizer, parameter, after_backward=take_backward_began())):
                ended = self._advance()
                if session.facts.config.window is not None or session.recorder.window_open:
                    # torch calls its hooks inside a profiler range of the optimizer, which an edge must not cross. The
                    # dictionary dies at the end of `step`, after that range.
                    keywords["crossrank"] = _AtDeath(functools.partial(self._pass_edge, ended))
        except Exception as error:
            if raised_by_script(error):
                raise
            session.failures.report("a step was not counted", error)

    def _advance(self) -> int:
        """End the current training step; return its number."""
        session, now = self._session, time.monotonic_ns()
        ended = session.recorder.step
        session.recorder.step = ended + 1
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            signals.keep_watching()
        if (writer := session.writer) is not None:
            writer.line("step", lambda: {"step": ended + 1, "t": now})
        return ended

    def _warn_of_uneven_steps(self) -> None:
        if not self._warned and self._session.facts.rank <= 0:
            log.warning(
                "crossrank: one optimizer steps more often than another, each time after a backward pass; each step "
                "of the one that steps most is counted as an iteration: where that is wrong (several critic steps "
                "for one of the generator), call crossrank.step() at the end of every iteration"
            )
        self._warned = True


class _AtDeath:
    """Runs `action` when its last reference is dropped."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        try:
            self._action()
        except Exception as error:
            log.warning("crossrank: a window is incomplete: %s", one_line(error))


# Optimizer steps without a backward pass between them: their number by (optimizer, part of its parameters).
_Update = Counter[tuple[int, int]]


class StepBoundaries:
    """Decides which optimizer steps end an iteration."""

    def __init__(self, on_doubt: Callable[[], None] = lambda: None) -> None:
        self._on_doubt = on_doubt
        # Optimizers get numbers: a new optimizer may have the address of a deleted one.
        self._numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._next_number = itertools.count()
        self._updates: list[_Update] = []  # of the current iteration, the latest last
        self._counted = False  # whether the current iteration is counted
        self._previous: set[int] = set()  # optimizers of the iteration before it
        self._known: set[int] = set()  # those of all finished iterations
        self._lengths: deque[int] = deque(maxlen=2)  # steps of the finished iterations
        self._most_repeats = 1
        self._backward_is_hidden = False
        self._steady: tuple[weakref.ref[object], int] | None = None
        """(optimizer, part) whose steps, one after each backward pass, are iterations."""

    def count(self, optimizer: object, part: int = 0, *, after_backward: bool = True) -> int:
        """Return how many iterations this step has ended: mostly 0 or 1, more if earlier ones were missed.

        `part` identifies the updated parameters, if the optimizer does not update all of them at once.
        `after_backward`: whether a backward pass has started since the last call.

        >>> class Optimizer: pass
        >>> discriminator, generator = Optimizer(), Optimizer()
        >>> gan = StepBoundaries()
        >>> [gan.count(optimizer) for optimizer in (discriminator, generator) * 3]
        [1, 0, 0, 1, 0, 1]
        """
        steady, self._steady = self._steady, None
        if after_backward and steady is not None and steady[1] == part and steady[0]() is optimizer:
            self._steady = steady  # the code below would change nothing
            return 1
        ended = 0
        number = self._numbers.setdefault(optimizer, next(self._next_number))
        if after_backward or self._backward_is_hidden or not self._updates:
            self._updates.append(Counter())
        elif self._updates[-1][number, part] >= 2 * self._most_repeats + _REPEATS_WITHOUT_BACKWARD:
            ended += self._uncover_backwards()
        self._updates[-1][number, part] += 1
        if self._begins_iteration(number):
            ended += self._finish_iteration()
        if not self._counted and _length(self._updates) >= min(self._lengths, default=1):
            self._counted = True
            ended += 1
        alone = self._updates == [{(number, part): 1}] and self._previous == {number}
        if ended == 1 and alone and list(self._lengths) == [1, 1]:
            self._steady = weakref.ref(optimizer), part
        return ended

    def _begins_iteration(self, optimizer: int) -> bool:
        earlier = _optimizers(self._updates[:-1])
        # If all earlier optimizers are deleted, a new training phase has started.
        return optimizer in earlier or (bool(earlier) and earlier.isdisjoint(self._numbers.values()))

    def _finish_iteration(self) -> int:
        """Close the iteration before the latest update. Return the number of iterations not counted until now."""
        *finished, latest = self._updates
        self._updates = [latest]
        missed = 0 if self._counted else 1
        self._counted = False
        newcomer = self._newcomer(finished)
        if newcomer and not self._known.isdisjoint(_optimizers([finished[newcomer]])):
            self._on_doubt()
        if newcomer and not _optimizers([latest]).isdisjoint(_optimizers(finished[newcomer:])):
            # It started a new iteration, as the next phase of a training does.
            missed += 1
            finished = finished[newcomer:]
        self._lengths.append(_length(finished))
        self._previous = _optimizers(finished)
        self._known |= self._previous
        self._most_repeats = max(self._most_repeats, *(max(update.values()) for update in finished))
        return missed

    def _newcomer(self, finished: list[_Update]) -> int:
        """Return the index of the first update whose optimizers are not in the iteration before; 0 if none."""
        strangers = (i for i, one in enumerate(finished) if i and self._previous.isdisjoint(_optimizers([one])))
        return next(strangers, 0) if self._previous else 0

    def _uncover_backwards(self) -> int:
        """Count each repeat of an update as an iteration: backward passes are hidden, as in a CUDA graph."""
        self._backward_is_hidden = True
        update = self._updates.pop()
        self._updates += [Counter(update.keys()), Counter()]
        return max(update.values()) - 1


def first_parameter(param_groups: Iterable[Mapping[str, Any]]) -> int:
    """Return the id of the first parameter of an optimizer with these groups, 0 if there is none.

    DeepSpeed's ZeRO calls its inner optimizer once per group or sub-group, with only the parameters of that group.
    """
    for group in param_groups:
        for parameter in group["params"]:
            return id(parameter)
    return 0


def _length(updates: list[_Update]) -> int:
    return sum(update.total() for update in updates)


def _optimizers(updates: list[_Update]) -> set[int]:
    return {optimizer for update in updates for optimizer, _ in update}
