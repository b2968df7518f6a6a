"""Makes one rank's calls, over and over, and notes when each was launched, issued and over.

On the CPU a call is over when its Work says so: when the wait for it returns, or, for a call that runs while the rank
goes on, when its future completes.

On CUDA the host launches without waiting, and events on the device say when each call began and ended. The begin is an
event on the stream that launches it, or the end of the call before it in its lane. The end is an event on a side stream
that waits for the Work: the launching stream itself would have to wait, which only the recorded waits may make it do.
Side streams have a priority of their own, so that torch does not give out one that a communicator uses. A wait for a
barrier holds the host on whatever stream it is made (`WorkNCCL::wait`), so that of an asynchronous one is made where it
was recorded, and its end noted there. Events are put on the host's clock by one that the host has waited for.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heapreplace
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, Protocol

import torch

from crossrank.errors import CrossrankError
from crossrank.replay.results.measure import Pass
from crossrank.replay.run.pacing import Pacer
from crossrank.replay.run.program import Program

IDLE = -1
"""Progress of a rank that is between passes."""

_POLL_S = 0.0002

Hook = Callable[[int], None]


class Executor(Protocol):
    """Runs a program. `progress[0]` is the index of the call that the rank is in, for whoever watches."""

    progress: list[int]

    def run(self, before: Hook | None = None, after: Hook | None = None) -> Pass:
        """One pass: before each launch its gap passes, then comes what is waited for before it. For checks, `before`
        is called before each launch with its position, `after` once it is over."""


def make_executor(program: Program, pacer: Pacer | None = None) -> Executor:
    """The executor for the device of `program`. With a `pacer` it leaves gaps between the launches."""
    return (CudaExecutor if program.device.type == "cuda" else CpuExecutor)(program, pacer)


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

        def note_end(position: int, _: Any) -> None:
            signalled[position] = now()

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
                work.get_future().add_done_callback(partial(note_end, position))
            if pacer is not None:
                pacer.returned(now())
        wait(program.last_waits)
        end = now()
        progress[0] = IDLE
        completed = array("q", (min(wait, signal or wait) for wait, signal in zip(waited, signalled, strict=True)))
        return make_pass(program, start, end, launched, issued, completed)


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


class CudaExecutor:
    """An `Executor` on one GPU. Its events are made once and used by every pass."""

    def __init__(self, program: Program, pacer: Pacer | None = None) -> None:
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
            raise CrossrankError("TORCH_NCCL_BLOCKING_WAIT=1 makes every wait block the host; unset it for a replay")
        self.progress = [IDLE]
        self._program = program
        self._pacer = pacer
        self._began = [torch.cuda.Event(enable_timing=True) for _ in program.bound]
        self._ended = [torch.cuda.Event(enable_timing=True) for _ in program.bound]
        self._base = torch.cuda.Event(enable_timing=True)
        self._side = {bound.lane: torch.cuda.Stream(program.device, priority=-1) for bound in program.bound}

    def run(self, before: Hook | None = None, after: Hook | None = None) -> Pass:
        program, progress, pacer, now = self._program, self.progress, self._pacer, time.monotonic_ns
        stream = torch.cuda.current_stream(program.device)
        launched_at, issued_at = array("q"), array("q")
        works: list[Any] = [None] * len(program.bound)

        def wait(others: Sequence[int]) -> None:
            for other in others:
                work, works[other] = works[other], None
                if work is not None:
                    bound = program.bound[other]
                    if bound.holds_host:
                        progress[0] = bound.first
                    work.wait()
                    if bound.holds_host:
                        self._ended[other].record(stream)
                if after is not None:
                    after(other)

        stream.synchronize()
        self._base.record(stream)
        self._base.synchronize()
        start = now()
        for position, bound in enumerate(program.bound):
            if pacer is not None:
                pacer.pace(position)
            wait(bound.waits)
            if before is not None:
                before(position)
            progress[0] = bound.first
            self._began[position].record(stream)
            launched_at.append(now())
            work = works[position] = bound.launch()
            issued_at.append(now())
            if bound.blocking or work is None:
                works[position] = None
                if work is not None:
                    work.wait()
                self._ended[position].record(stream)
                if bound.blocking and after is not None:
                    after(position)
            elif not bound.holds_host:
                side = self._side[bound.lane]
                with torch.cuda.stream(side):
                    work.wait()
                    self._ended[position].record(side)
            if pacer is not None:
                pacer.returned(now())
        wait(program.last_waits)
        for position, bound in enumerate(program.bound):
            # Seen by the watch: a host that is ahead of its GPU would make no progress in one synchronisation.
            progress[0] = bound.first
            while not self._ended[position].query():
                time.sleep(_POLL_S)
        torch.cuda.synchronize(program.device)
        end = now()
        progress[0] = IDLE
        ready, completed = event_times(
            start,
            (earlier.elapsed_time(later) for earlier, later in pairwise([self._base, *self._began])),
            (began.elapsed_time(ended) for began, ended in zip(self._began, self._ended, strict=True)),
        )
        return make_pass(program, start, end, launched_at, issued_at, completed, ready)


def event_times(start: int, after_ms: Iterable[float], took_ms: Iterable[float]) -> tuple[array[int], array[int]]:
    """(begins, ends) in ns of launches that each began `after_ms` after the one before, the first so long after
    `start`, and took `took_ms`.

    CUDA gives the time between two events as a float32 of ms: between neighbours that is exact to ns, from the start
    of a pass of a minute to us.
    """
    began = array("q", (start + round(ms * 1e6) for ms in accumulate(after_ms)))
    return began, array("q", (begin + round(ms * 1e6) for begin, ms in zip(began, took_ms, strict=True)))
