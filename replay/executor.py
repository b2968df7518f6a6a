"""Makes one rank's calls, over and over, and notes when each was launched, issued and over.

On the CPU a call is over when its Work says so: when the wait for it returns, or, for a call that runs while the rank
goes on, when its future completes. For CUDA see `cuda_executor`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol

from crossrank.replay.pace import Pacer
from crossrank.replay.program import Program
from crossrank.replay.results import Times

IDLE = -1
"""Progress of a rank that is between passes."""

Hook = Callable[[int], None]


class Executor(Protocol):
    """Runs a program. `progress[0]` is the index of the call that the rank is in, for whoever watches."""

    progress: list[int]

    def run(self, before: Hook | None = None, after: Hook | None = None) -> Times:
        """One pass. `before` is called before each launch with its position, `after` once it is over, for checks."""


def make_executor(program: Program, pacer: Pacer | None = None) -> Executor:
    """The executor for the device of `program`. With a `pacer` it leaves gaps between the launches."""
    if program.device.type == "cuda":
        from crossrank.replay.cuda_executor import CudaExecutor

        return CudaExecutor(program, pacer)
    return CpuExecutor(program, pacer)


class CpuExecutor:
    """An `Executor` whose Works complete on the host."""

    def __init__(self, program: Program, pacer: Pacer | None = None) -> None:
        self.program = program
        self.progress = [IDLE]
        self._pacer = pacer

    def run(self, before: Hook | None = None, after: Hook | None = None) -> Times:
        count = len(self.program.bound)
        launched, issued, waited = _zeros(count), _zeros(count), _zeros(count)
        signalled = _zeros(count)
        works: list[Any] = [None] * count
        progress, pacer, now = self.progress, self._pacer, time.monotonic_ns
        start = now()
        for position, bound in enumerate(self.program.bound):
            if pacer is not None:
                pacer.pace(position)
            if before is not None:
                before(position)
            progress[0] = bound.first
            launched[position] = now()
            work = bound.launch()
            issued[position] = now()
            if bound.is_async:
                works[position] = work
                if bound.has_future and work is not None:
                    _note_end(work, signalled, position)
            elif work is not None:
                work.wait()
                waited[position] = now()
            else:
                waited[position] = issued[position]
            for other in bound.waits:
                work = works[other]
                if work is not None:
                    works[other] = None
                    work.wait()
                    waited[other] = now()
            if pacer is not None:
                pacer.returned(now())
            if after is not None:
                for other in bound.waits:
                    after(other)
        end = now()
        progress[0] = IDLE
        completed = array(
            "q",
            (
                min(by_signal or by_wait, by_wait or by_signal)
                for by_signal, by_wait in zip(signalled, waited, strict=True)
            ),
        )
        launched, issued, completed = (self._by_call(column) for column in (launched, issued, completed))
        return Times(launched, issued, launched, completed, start, end)

    def _by_call(self, by_launch: array[int]) -> array[int]:
        return array(
            "q", (value for value, bound in zip(by_launch, self.program.bound, strict=True) for _ in range(bound.count))
        )


def _zeros(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def _note_end(work: Any, signalled: array[int], position: int) -> None:
    def note(_: Any) -> None:
        signalled[position] = time.monotonic_ns()

    work.get_future().add_done_callback(note)
