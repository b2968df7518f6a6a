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
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from heapq import heapreplace
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

import torch

from crossrank.errors import CrossrankError
from crossrank.replay.run.compute_program import ComputeProgram
from crossrank.replay.run.messages import Pass
from crossrank.replay.run.pacing import Pacer
from crossrank.replay.run.program import Program

IDLE = -1
"""Progress of a rank that is between passes."""

_POLL_S = 0.0002

Hook = Callable[[int], None]
Clock = list[int]


class CpuExecutor:
    """Runs a program whose Works complete on the host. `progress[0]` is the index of the call that the rank is in, for
    whoever watches."""

    def __init__(self, program: Program, pacer: Pacer | None = None, compute: ComputeProgram | None = None) -> None:
        """With a `pacer` it leaves gaps between the launches; `compute` runs operations between them."""
        self.progress = [IDLE, 0]
        """The second counts operations."""
        self.waited_ns = 0
        """How long the host waited for communication in the last pass."""
        self._program = program
        self._pacer = pacer
        self._compute = compute
        self._check_lock = threading.Lock()
        """One thread at a time fills and checks."""
        self._made: dict[int, threading.Event] = {}
        """Launches that one of another thread follows."""
        count = len(program.last_waits)
        positions: list[list[int]] = [[] for _ in range(count)]
        for position, bound in enumerate(program.bound):
            positions[bound.thread].append(position)
        self._of_threads = list(zip(positions, program.last_waits, strict=True))
        # One thread is this one.
        self._threads = futures.ThreadPoolExecutor(count, "crossrank-replay", self._begin_thread) if count > 1 else None
        if compute is not None:
            compute.join(program, self.launch, self.wait, self.progress)

    def run(
        self, before: Hook | None = None, after: Hook | None = None, *, trial: bool = False, clock: Clock | None = None
    ) -> Pass:
        """One pass: before each launch its gap passes, then comes what is waited for before it. For checks, `before`
        is called before each launch with its position, `after` once it is over. Of computation, a `trial` finds what
        cannot run, and `clock` takes the time before each operation."""
        program, now = self._program, time.monotonic_ns
        self._before, self._after = before, after
        launched, issued = self._launched, self._issued = self._columns()
        self._works: list[Any] = [None] * len(program.bound)
        self._begin()
        self.waited_ns = 0
        if self._pacer is not None:
            self._pacer.begin()
        if self._compute is not None:
            self._compute.reset()
        start = now()
        if self._compute is not None:
            self._compute.run_pass(trial=trial, clock=clock)
        else:
            self._make_calls()
        self._finish()
        end = now()
        self.progress[0] = IDLE
        ready, completed = self._times(start, launched)

        def by_call(column: array[int]) -> bytes:
            spread = (repeat(value, len(bound.calls)) for value, bound in zip(column, program.bound, strict=True))
            return array("q", chain.from_iterable(spread)).tobytes()

        return Pass(
            launched=by_call(launched),
            issued=by_call(issued),
            began=by_call(begins(program, ready, completed)),
            completed=by_call(completed),
            start=start,
            end=end,
            waited=self.waited_ns,
            steps=list(self._compute.marks) if self._compute is not None else [],
        )

    def _make_calls(self) -> None:
        """Make the calls of a pass without computation."""
        program = self._program
        if self._threads is None:
            self._run_thread(range(len(program.bound)), program.last_waits[0] if program.last_waits else ())
            return
        self._made = {bound.follows: threading.Event() for bound in program.bound if bound.follows >= 0}
        running = [self._threads.submit(self._run_thread, *one) for one in self._of_threads]
        for one in futures.wait(running, return_when=futures.FIRST_EXCEPTION).done:
            one.result()

    def _run_thread(self, positions: Iterable[int], last_waits: Sequence[int]) -> None:
        """What one thread does in a pass."""
        pacer = self._pacer
        for position in positions:
            bound = self._program.bound[position]
            if pacer is not None:
                pacer.pace(position, bound.thread)
            if bound.waits:
                self.wait(bound.waits)
            self.launch(position)
            if pacer is not None:
                pacer.returned(time.monotonic_ns(), bound.thread)
        self.wait(last_waits)

    def launch(self, position: int) -> None:
        """Make a launch, and wait for it where the rank did before it went on."""
        bound = self._program.bound[position]
        if bound.follows >= 0 and self._made:
            self._made[bound.follows].wait()
        if self._before is not None:
            with self._check_lock:
                self._before(position)
        self.progress[0] = bound.calls[0]
        if bound.barrier is not None:
            bound.barrier().wait()
        self._launch(position)
        self._launched[position] = time.monotonic_ns()
        work = self._works[position] = bound.launch()
        self._issued[position] = time.monotonic_ns()
        made = self._made.get(position)
        if made is not None and bound.barrier is None:
            made.set()
        if bound.blocking:
            self.wait((position,))
        else:
            self._follow(position, work)
        if bound.barrier is not None:
            bound.barrier().wait()
            if made is not None:
                made.set()

    def wait(self, positions: Sequence[int]) -> None:
        """Wait for launches."""
        began = time.monotonic_ns()
        for position in positions:
            self.progress[0] = self._program.bound[position].calls[0]
            work, self._works[position] = self._works[position], None
            self._wait(position, work)
            if self._after is not None:
                with self._check_lock:
                    self._after(position)
        self.waited_ns += time.monotonic_ns() - began

    def close(self) -> None:
        """Let go of what process groups wait for when they are destroyed."""

    def _begin_thread(self) -> None:
        """Runs first in every thread but the main one."""
        if self._program.device.type == "cuda":
            torch.cuda.set_device(self._program.device)

    def _columns(self) -> tuple[array[int], array[int]]:
        empty = bytes(8 * len(self._program.bound))
        return array("q", empty), array("q", empty)

    def _begin(self) -> None:
        self._waited, self._signalled = self._columns()

    def _launch(self, position: int) -> None:
        """Is about to launch."""

    def _wait(self, position: int, work: Any) -> None:
        if work is not None:
            work.wait()
        self._waited[position] = time.monotonic_ns()

    def _follow(self, position: int, work: Any) -> None:
        """See to it that the end of a launch is noted that runs while the rank goes on."""
        signalled = self._signalled
        if work is not None and self._program.bound[position].has_future:
            work.get_future().add_done_callback(lambda _: signalled.__setitem__(position, time.monotonic_ns()))

    def _finish(self) -> None:
        """Let the device come to its end."""

    def _times(self, start: int, launched: array[int]) -> tuple[array[int], array[int]]:
        """When the device came to each launch, and when each was over."""
        ends = zip(self._waited, self._signalled, strict=True)
        return launched, array("q", (min(waited, signalled or waited) for waited, signalled in ends))


def begins(program: Program, launched: array[int], completed: array[int]) -> array[int]:
    """When each launch could run: not before one of its lane was over, where as many as run at once were under way."""
    free: dict[str, list[int]] = {}
    began = array("q", launched)
    for position, bound in enumerate(program.bound):
        ends = free.setdefault(bound.lane, [0] * program.width)
        began[position] = min(max(launched[position], ends[0]), completed[position])
        heapreplace(ends, completed[position])
    return began


class CudaExecutor(CpuExecutor):
    """Runs a program on one GPU. Its events are made once and used by every pass."""

    _external_events = False
    """They are nodes of a graph."""

    def __init__(self, program: Program, pacer: Pacer | None = None, compute: ComputeProgram | None = None) -> None:
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
            raise CrossrankError("TORCH_NCCL_BLOCKING_WAIT=1 makes every wait block the host; unset it for a replay")
        super().__init__(program, pacer, compute)
        external = {"external": True} if self._external_events else {}
        self._began = [torch.cuda.Event(enable_timing=True, **external) for _ in program.bound]
        self._ended = [torch.cuda.Event(enable_timing=True, **external) for _ in program.bound]
        self._base = torch.cuda.Event(enable_timing=True)
        self._side = {bound.lane: torch.cuda.Stream(program.device, priority=-1) for bound in program.bound}

    def _begin(self) -> None:
        self._stream = torch.cuda.current_stream(self._program.device)
        self._stream.synchronize()
        self._base.record(self._stream)
        self._base.synchronize()

    def _launch(self, position: int) -> None:
        self._began[position].record(self._current())

    def _current(self) -> torch.cuda.Stream:
        """The stream that what is launched now goes to."""
        several = self._compute is not None and self._compute.streams is not None
        return torch.cuda.current_stream(self._program.device) if several else self._stream

    def _wait(self, position: int, work: Any) -> None:
        bound = self._program.bound[position]
        if work is not None:
            work.wait()
        if bound.blocking or (bound.holds_host and work is not None):
            self._ended[position].record(self._current())

    def _follow(self, position: int, work: Any) -> None:
        bound = self._program.bound[position]
        if work is None:
            self._ended[position].record(self._current())
        elif not bound.holds_host:
            side = self._side[bound.lane]
            with torch.cuda.stream(side):
                work.wait()
                self._ended[position].record(side)

    def _finish(self) -> None:
        for bound, ended in zip(self._program.bound, self._ended, strict=True):
            # Seen by the watch: a host that is ahead of its GPU would make no progress in one synchronisation.
            self.progress[0] = bound.calls[0]
            while not ended.query():
                time.sleep(_POLL_S)
        torch.cuda.synchronize(self._program.device)

    def _times(self, start: int, launched: array[int]) -> tuple[array[int], array[int]]:
        return event_times(
            start,
            (earlier.elapsed_time(later) for earlier, later in pairwise([self._base, *self._began])),
            (began.elapsed_time(ended) for began, ended in zip(self._began, self._ended, strict=True)),
        )


class GraphExecutor(CudaExecutor):
    """Launches a rank's calls as a CUDA graph: captured once, launched as one in every pass. Raises `CrossrankError`
    for a program that cannot be captured: a call that holds the host, or another thread, cannot be part of a graph.

    The first pass makes the calls one by one, for a communicator is made by the first call that needs it, and that
    cannot be captured; the calls of a pass that is checked are made one by one as well. The events that time each call
    are nodes of the graph.
    """

    _external_events = True

    def __init__(self, program: Program) -> None:
        if any(bound.holds_host for bound in program.bound):
            raise CrossrankError(
                "--graph: a barrier holds the host and cannot be captured; leave it out: --drop barrier"
            )
        if len(program.last_waits) > 1:
            raise CrossrankError("--graph: calls of several threads cannot be captured as one; leave --graph out")
        super().__init__(program)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._has_run = False

    def _make_calls(self) -> None:
        if self._before is not None or not self._has_run:
            super()._make_calls()
            self._has_run = True
            return
        if self._graph is None:
            self._graph = self._captured()
            self._begin()
        launched = time.monotonic_ns()
        self._graph.replay()
        # Each call's share of the one launch.
        each = (time.monotonic_ns() - launched) // max(len(self._program.bound), 1)
        for position in range(len(self._program.bound)):
            self._launched[position], self._issued[position] = launched, launched + each

    def close(self) -> None:
        # A communicator is not destroyed while a graph that was captured from it is there.
        if self._graph is not None:
            torch.cuda.synchronize(self._program.device)
            self._graph.reset()
            self._graph = None

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph, outer = torch.cuda.CUDAGraph(), self._stream
        # Torch's watchdog of NCCL asks the driver meanwhile, on a thread of its own.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._stream = torch.cuda.current_stream(self._program.device)
            super()._make_calls()
            for lane in {bound.lane for bound in self._program.bound if not bound.blocking}:
                self._stream.wait_stream(self._side[lane])
        self._stream = outer
        return graph


def event_times(start: int, after_ms: Iterable[float], took_ms: Iterable[float]) -> tuple[array[int], array[int]]:
    """(begins, ends) in ns of launches that each began `after_ms` after the one before, the first so long after
    `start`, and took `took_ms`.

    CUDA gives the time between two events as a float32 of ms: between neighbours that is exact to ns, from the start
    of a pass of a minute to us.
    """
    began = array("q", (start + round(ms * 1e6) for ms in accumulate(after_ms)))
    return began, array("q", (begin + round(ms * 1e6) for begin, ms in zip(began, took_ms, strict=True)))
