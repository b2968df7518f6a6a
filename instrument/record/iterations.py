"""The iterations of a training loop: their number, counted from 0, and what happens where one ends."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from crossrank.errors import one_line
from crossrank.instrument.hooks import backward, signals
from crossrank.instrument.record.steps import StepBoundaries, first_parameter

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

log = logging.getLogger("crossrank")


class Iterations:
    """Counts the iterations of one session, by the optimizers' steps or by the script's own word."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._boundaries = StepBoundaries(self._warn_of_uneven_steps)
        self._explicit = False
        self._warned = False

    def step(self) -> None:
        """The training loop says that an iteration has ended. From now on only these calls count."""
        with self._session.failures.reported("an iteration was not counted"):
            if not self._explicit:
                self._explicit = True
                self._session.recorder.step = 0  # whatever the optimizers' steps have come to in the first iteration
            self._session.windows.pass_edge(self._advance())

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer, _: Any, keywords: dict[str, Any]) -> None:
        """torch's hook after `optimizer.step()`; `keywords` are those of that call."""
        session = self._session
        if self._explicit or session.closing:
            return
        with session.failures.reported("an iteration was not counted"):
            parameter = first_parameter(optimizer.param_groups)
            for _iteration in range(self._boundaries.count(optimizer, parameter, after_backward=backward.began())):
                ended = self._advance()
                if session.config.window is not None or session.recorder.window_open:
                    # torch calls its hooks within a range of the optimizer's, which no edge must cross. The dictionary
                    # dies with the call of `step`, when that range has ended.
                    keywords["crossrank"] = _AtDeath(functools.partial(session.windows.pass_edge, ended))

    def _advance(self) -> int:
        """An iteration ends; returns its number."""
        session, ended = self._session, self._session.recorder.step
        signals.keep_watching()
        session.recorder.step += 1
        if session.writer is not None:
            session.writer.line("step", {"step": session.recorder.step, "t": time.monotonic_ns()})
        return ended

    def _warn_of_uneven_steps(self) -> None:
        if not self._warned and self._session.rank <= 0:
            log.warning(
                "crossrank: one optimizer steps more often than another, each time after a backward pass; each step "
                "of the one that steps most is counted as an iteration: where that is wrong (several critic steps "
                "for one of the generator), call crossrank.step() at the end of every iteration"
            )
        self._warned = True


class _AtDeath:
    """Does `action` when the last reference to it goes."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        try:
            self._action()
        except Exception as error:
            log.warning("crossrank: a window is incomplete: %s", one_line(error))
