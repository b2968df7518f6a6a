"""Makes one rank's calls, over and over, and notes when each was launched, issued and over.

On the CPU a call is over when its Work says so: when the wait for it returns, or, for a call that runs while the rank
goes on, when its future completes. For CUDA see `cuda`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from heapq import heapreplace
from itertools import chain, repeat
from typing import Any, Protocol

from crossrank.replay.results.measure import Pass
from crossrank.replay.run.pacing import Pacer
from crossrank.replay.run.program import Program

IDLE = -1
"""Progress of a rank that is between passes."""

Hook = Callable[[int], None]


class Executor(Protocol):
    """Runs a program. `progress[0]` is the index of the call that the rank is in, for whoever watches."""

    progress: list[int]

    def run(self, before: Hook | None = None, after: Hook | None = None) -> Pass:
        """One pass: before each launch its gap passes, then comes what is waited for before it. For checks, `before`
        is called before each launch with its position, `after` once it is over."""


def make_executor(program: Program, pacer: Pacer | None = None) -> Executor:
    """The executor for the device of `program`. With a `pacer` it leaves gaps between the launches."""
    if program.device.type == "cuda":
        from crossrank.replay.run.cuda import CudaExecutor

        return CudaExecutor(program, pacer)
    return CpuExecutor(program, pacer)


class CpuExecutor:
    """An `Executor` whose Works complete on the host."""

    def __init__(self, program: Program, pacer: Pacer | None = None) -> None:
        self.program = program
        self.progress = [IDLE]
        self._pacer = pacer

    def run(self, before: Hook | None = None, after: Hook | None = None) -> Pass:
        program = self.program
        count = len(program.bound)
        launched, issued, waited, signalled = (array("q", bytes(8 * count)) for _ in range(4))
        works: list[Any] = [None] * count
        progress, pacer, now = self.progress, self._pacer, time.monotonic_ns

        def wait(others: Sequence[int]) -> None:
            for other in others:
                progress[0] = program.bound[other].first
                work, works[other] = works[other], None
                if work is not None:
                    work.wait()
                waited[other] = now()
                if after is not None:
                    after(other)

        start = now()
        for position, bound in enumerate(program.bound):
            if pacer is not None:
                pacer.pace(position)
            if bound.waits:
                wait(bound.waits)
            if before is not None:
                before(position)
            progress[0] = bound.first
            launched[position] = now()
            work = works[position] = bound.launch()
            issued[position] = now()
            if bound.blocking:
                wait((position,))
            elif bound.has_future and work is not None:
                _note_end(work, signalled, position)
            if pacer is not None:
                pacer.returned(now())
        wait(program.last_waits)
        end = now()
        progress[0] = IDLE
        completed = array("q", map(_earlier, waited, signalled))
        return make_pass(program, start, end, launched, issued, completed)


def _earlier(by_wait: int, by_signal: int) -> int:
    return min(by_wait, by_signal or by_wait)


def make_pass(
    program: Program,
    start: int,
    end: int,
    launched: array[int],
    issued: array[int],
    completed: array[int],
    ready: array[int] | None = None,
) -> Pass:
    """A pass from columns by launch; `ready`: when the device came to each, where that is not when it was launched."""

    def by_call(column: array[int]) -> bytes:
        spread = (repeat(value, bound.count) for value, bound in zip(column, program.bound, strict=True))
        return array("q", chain.from_iterable(spread)).tobytes()

    return Pass(
        launched=by_call(launched),
        issued=by_call(issued),
        began=by_call(begins(program, launched if ready is None else ready, completed)),
        completed=by_call(completed),
        start=start,
        end=end,
    )


def begins(program: Program, launched: array[int], completed: array[int]) -> array[int]:
    """When each launch could run: not before one of its lane was over, where as many as run at once were under way."""
    free: dict[str, list[int]] = {}
    began = array("q", launched)
    for position, bound in enumerate(program.bound):
        ends = free.setdefault(bound.lane, [0] * program.width)
        began[position] = min(max(launched[position], ends[0]), completed[position])
        heapreplace(ends, completed[position])
    return began


def _note_end(work: Any, signalled: array[int], position: int) -> None:
    def note(_: Any) -> None:
        signalled[position] = time.monotonic_ns()

    work.get_future().add_done_callback(note)
