"""Launches a rank's calls as a CUDA graph: captured once, launched as one in every pass.

The first pass makes the calls one by one, for a communicator is made by the first call that needs it, and that cannot
be captured; the calls of a pass that is checked are made one by one as well. The events that time each call are nodes
of the graph. A call that holds the host, or another thread, cannot be part of one.
"""

from __future__ import annotations

import time

import torch

from crossrank.errors import CrossrankError
from crossrank.replay.run.executor import CudaExecutor
from crossrank.replay.run.program import Program


class GraphExecutor(CudaExecutor):
    """Runs a program that was captured. Raises `CrossrankError` for one that cannot be."""

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
