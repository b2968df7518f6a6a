"""Makes one rank's calls in each pass, and notes when each was launched, issued and completed.

On the CPU, a call ends when its wait returns. If the rank continues meanwhile, it ends when its future completes. On
CUDA, the host launches without waiting, and events on the device show the start and end of each call:

* Start: an event on the launching stream, or the end of the previous call in its lane.
* End: an event on a side stream that waits for the Work. The launching stream waits only at recorded waits. With a
  priority of their own, side streams are never streams that a communicator uses.
* A wait for a barrier blocks the host on every stream (`WorkNCCL::wait`). So an asynchronous barrier is waited for at
  its recorded wait, and its end noted there. An event that the host has waited for maps events to its clock.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from contextlib import nullcontext
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
"""Progress of a rank between passes."""

_POLL_S = 0.0002

Hook = Callable[[int], None]
Clock = list[int]


class CpuExecutor:
    """Runs a program whose Works complete on the host. `progress[0]` is the index of the current call, for the
    watch."""

    def __init__(self, program: Program, pacer: Pacer | None = None, compute: ComputeProgram | None = None) -> None:
        """`pacer` fills the gaps between launches; `compute` runs operations between them."""
        self.progress = [IDLE, 0]
        """The second item counts operations."""
        self.waited_ns = 0
        """Time in which the host waited for communication in the last pass."""
        self._program = program
        self._pacer = pacer
        self._compute = compute
        self._check_lock = threading.Lock()
        """Only one thread at a time fills and checks tensors."""
        self._made: dict[int, threading.Event] = {}
        """Launches before which a launch of another thread must wait."""
        count = len(program.last_waits)
        positions: list[list[int]] = [[] for _ in range(count)]
        for position, bound in enumerate(program.bound):
            positions[bound.thread].append(position)
        self._thread_work = list(zip(range(count), positions, program.last_waits, strict=True))
        # This thread is one of them.
        self._threads = futures.ThreadPoolExecutor(count, "crossrank-replay", self._set_device) if count > 1 else None
        if compute is not None:
            compute.join(program, self.launch, self.wait, self.progress)

    def run(
        self, before: Hook | None = None, after: Hook | None = None, *, trial: bool = False, clock: Clock | None = None
    ) -> Pass:
        """Run one pass: before each launch, first its gap, then its waits. Checks get the position of each launch:
        `before` is called before it, `after` when it has ended. For computation, a `trial` finds the operations that
        cannot run, and `clock` gets the time around each operation."""
        program, now = self._program, time.monotonic_ns
        self._before, self._after = before, after
        launched, issued = self._launched, self._issued = self._empty_columns()
        self._works: list[Any] = [None] * len(program.bound)
        self._begin_pass()
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
        self._finish_pass()
        end = now()
        self.progress[0] = IDLE
        ready, completed = self._read_times(start, launched)

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
            self._run_thread(0, range(len(program.bound)), program.last_waits[0] if program.last_waits else ())
            return
        self._made = {bound.follows: threading.Event() for bound in program.bound if bound.follows >= 0}
        running = [self._threads.submit(self._run_thread, *one) for one in self._thread_work]
        for one in futures.wait(running, return_when=futures.FIRST_EXCEPTION).done:
            one.result()

    def _run_thread(self, number: int, positions: Iterable[int], last_waits: Sequence[int]) -> None:
        """Make the launches and waits of thread `number` in a pass."""
        pacer = self._pacer
        for position in positions:
            bound = self._program.bound[position]
            if pacer is not None:
                pacer.pace(position, bound.recorded_thread, bound.thread)
            if bound.waits:
                self.wait(bound.waits)
            self.launch(position)
            if pacer is not None:
                pacer.returned(bound.recorded_thread, bound.thread)
        self.wait(last_waits)

    def launch(self, position: int) -> None:
        """Make a launch, and wait for it if it is blocking."""
        bound = self._program.bound[position]
        if bound.follows >= 0 and self._made:
            self._made[bound.follows].wait()
        if self._before is not None:
            self._finish_stream()
            with self._check_lock:
                self._before(position)
        self.progress[0] = bound.calls[0]
        if bound.barrier is not None:
            bound.barrier().wait()
        self._note_launch(position)
        self._launched[position] = time.monotonic_ns()
        work = self._works[position] = bound.launch()
        self._issued[position] = time.monotonic_ns()
        made = self._made.get(position)
        if made is not None and bound.barrier is None:
            made.set()
        if bound.blocking:
            self.wait((position,))
        else:
            self._watch_end(position, work)
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
            self._wait_for(position, work)
            if self._after is not None:
                self._finish_stream()
                with self._check_lock:
                    self._after(position)
        self.waited_ns += time.monotonic_ns() - began

    def close(self) -> None:
        """Free what would block the destruction of process groups."""

    def _set_device(self) -> None:
        """Run first in every thread except the main one."""
        if self._program.device.type == "cuda":
            torch.cuda.set_device(self._program.device)

    def _empty_columns(self) -> tuple[array[int], array[int]]:
        empty = bytes(8 * len(self._program.bound))
        return array("q", empty), array("q", empty)

    def _begin_pass(self) -> None:
        self._waited, self._signalled = self._empty_columns()

    def _finish_stream(self) -> None:
        """Wait for the calls that this thread has waited for, before a check uses their tensors. A check would wait for
        them too, but with the lock: then a thread of another rank could wait for a call of a thread without it."""

    def _note_launch(self, position: int) -> None:
        """Called right before a launch."""

    def _wait_for(self, position: int, work: Any) -> None:
        if work is not None:
            work.wait()
        self._waited[position] = time.monotonic_ns()

    def _watch_end(self, position: int, work: Any) -> None:
        """Note the end of a launch that runs while the rank continues."""
        signalled = self._signalled
        if work is not None and self._program.bound[position].has_future:
            work.get_future().add_done_callback(lambda _: signalled.__setitem__(position, time.monotonic_ns()))

    def _finish_pass(self) -> None:
        """Wait for the device."""

    def _read_times(self, start: int, launched: array[int]) -> tuple[array[int], array[int]]:
        """Return when the device reached each launch, and when each ended."""
        ends = zip(self._waited, self._signalled, strict=True)
        return launched, array("q", (min(waited, signalled or waited) for waited, signalled in ends))


def begins(program: Program, launched: array[int], completed: array[int]) -> array[int]:
    """Return when each launch could start: not before an earlier launch of its lane ended, if the lane was full."""
    lane_ends: dict[str, list[int]] = {}
    began = array("q", launched)
    for position, bound in enumerate(program.bound):
        ends = lane_ends.setdefault(bound.lane, [0] * program.width)
        began[position] = min(max(launched[position], ends[0]), completed[position])
        heapreplace(ends, completed[position])
    return began


class CudaExecutor(CpuExecutor):
    """Runs a program on one GPU. Its events are created once, and every pass uses them. The first thread uses the
    current stream, every other thread a stream of its own."""

    _external_events = False
    """The events are nodes of a graph."""

    def __init__(self, program: Program, pacer: Pacer | None = None, compute: ComputeProgram | None = None) -> None:
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
            raise CrossrankError("TORCH_NCCL_BLOCKING_WAIT=1 makes every wait block the host; unset it for a replay")
        super().__init__(program, pacer, compute)
        external = {"external": True} if self._external_events else {}
        self._began = [torch.cuda.Event(enable_timing=True, **external) for _ in program.bound]
        self._ended = [torch.cuda.Event(enable_timing=True, **external) for _ in program.bound]
        self._base = torch.cuda.Event(enable_timing=True)
        self._side = {bound.lane: torch.cuda.Stream(program.device, priority=-1) for bound in program.bound}
        # With a priority of their own, they are no side streams, and never streams that a communicator uses.
        self._more_streams = [torch.cuda.Stream(program.device, priority=-2) for _ in program.last_waits[1:]]

    def _begin_pass(self) -> None:
        self._stream = torch.cuda.current_stream(self._program.device)
        self._stream.synchronize()
        self._base.record(self._stream)
        self._base.synchronize()

    def _run_thread(self, number: int, positions: Iterable[int], last_waits: Sequence[int]) -> None:
        with torch.cuda.stream(self._more_streams[number - 1]) if number else nullcontext():
            super()._run_thread(number, positions, last_waits)

    def _note_launch(self, position: int) -> None:
        self._began[position].record(self._current_stream())

    def _finish_stream(self) -> None:
        if self._more_streams:
            self._current_stream().synchronize()

    def _current_stream(self) -> torch.cuda.Stream:
        """Return the stream of the next launch."""
        several = bool(self._more_streams) or (self._compute is not None and self._compute.streams is not None)
        return torch.cuda.current_stream(self._program.device) if several else self._stream

    def _wait_for(self, position: int, work: Any) -> None:
        bound = self._program.bound[position]
        if work is not None:
            work.wait()
        if bound.blocking or (bound.holds_host and work is not None):
            self._ended[position].record(self._current_stream())

    def _watch_end(self, position: int, work: Any) -> None:
        bound = self._program.bound[position]
        if work is None:
            self._ended[position].record(self._current_stream())
        elif not bound.holds_host:
            side = self._side[bound.lane]
            with torch.cuda.stream(side):
                work.wait()
                self._ended[position].record(side)

    def _finish_pass(self) -> None:
        for bound, ended in zip(self._program.bound, self._ended, strict=True):
            # The watch needs progress: a single synchronization of a host far ahead of its GPU would show none.
            self.progress[0] = bound.calls[0]
            while not ended.query():
                time.sleep(_POLL_S)
        torch.cuda.synchronize(self._program.device)

    def _read_times(self, start: int, launched: array[int]) -> tuple[array[int], array[int]]:
        return event_times(
            start,
            (earlier.elapsed_time(later) for earlier, later in pairwise([self._base, *self._began])),
            (began.elapsed_time(ended) for began, ended in zip(self._began, self._ended, strict=True)),
        )


class GraphExecutor(CudaExecutor):
    """Launches a rank's calls as a CUDA graph, captured once. Its nodes include the events that time each call.

    The first pass makes the calls one by one: the first call of a group creates its communicator, which cannot be
    captured. So do passes that are checked. Raises `CrossrankError` if the program cannot be captured: calls of several
    threads, or a call that blocks the host.
    """

    _external_events = True

    def __init__(self, program: Program) -> None:
        if any(bound.holds_host for bound in program.bound):
            raise CrossrankError("--graph: a barrier blocks the host and cannot be captured; use --drop barrier")
        if len(program.last_waits) > 1:
            raise CrossrankError("--graph: calls of several threads cannot be captured as one; remove --graph")
        super().__init__(program)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._has_run = False

    def _make_calls(self) -> None:
        if self._before is not None or not self._has_run:
            super()._make_calls()
            self._has_run = True
            return
        if self._graph is None:
            self._graph = self._capture()
            self._begin_pass()
        launched = time.monotonic_ns()
        self._graph.replay()
        # Each call's share of the one launch.
        each = (time.monotonic_ns() - launched) // max(len(self._program.bound), 1)
        for position in range(len(self._program.bound)):
            self._launched[position], self._issued[position] = launched, launched + each

    def close(self) -> None:
        # A communicator cannot be destroyed while a graph captured from it exists.
        if self._graph is not None:
            torch.cuda.synchronize(self._program.device)
            self._graph.reset()
            self._graph = None

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, outer = torch.cuda.CUDAGraph(), self._stream
        # Meanwhile, the thread of torch's NCCL watchdog queries the driver.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._stream = torch.cuda.current_stream(self._program.device)
            super()._make_calls()
            for lane in {bound.lane for bound in self._program.bound if not bound.blocking}:
                self._stream.wait_stream(self._side[lane])
        self._stream = outer
        return graph


def event_times(start: int, after_ms: Iterable[float], took_ms: Iterable[float]) -> tuple[array[int], array[int]]:
    """Return (starts, ends) in ns of launches. Each began `after_ms` after the previous one, the first after `start`,
    and took `took_ms`.

    CUDA returns the time between two events as a float32 in ms. Between neighbours it is exact to a ns; from the start
    of a pass of one minute, only to a µs.
    """
    began = array("q", (start + round(ms * 1e6) for ms in accumulate(after_ms)))
    return began, array("q", (begin + round(ms * 1e6) for begin, ms in zip(began, took_ms, strict=True)))
