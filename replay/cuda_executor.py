"""A pass on CUDA: the host launches without waiting, and events on the device say when each call began and ended.

The begin of a call is an event on the stream that launches it. Its end is an event on a side stream of its group that
waits for the Work: the launching stream itself would have to wait, which only the recorded waits may make it do.
Events are put on the host's clock by one that the host has waited for.
"""

from __future__ import annotations

import time
from array import array
from typing import Any

import torch

from crossrank.replay.executor import IDLE, Hook
from crossrank.replay.pace import Pacer
from crossrank.replay.program import Program
from crossrank.replay.results import Times


class CudaExecutor:
    """An `Executor` on one GPU. Its events are made once and used by every pass."""

    def __init__(self, program: Program, pacer: Pacer | None = None) -> None:
        self._program = program
        self._pacer = pacer
        self.progress = [IDLE]
        self._began = [torch.cuda.Event(enable_timing=True) for _ in program.bound]
        self._ended = [torch.cuda.Event(enable_timing=True) for _ in program.bound]
        self._base = torch.cuda.Event(enable_timing=True)
        self._side = {name: torch.cuda.Stream(program.device) for name in program.groups}

    def run(self, before: Hook | None = None, after: Hook | None = None) -> Times:
        progress, pacer = self.progress, self._pacer
        program, now = self._program, time.monotonic_ns
        stream = torch.cuda.current_stream(program.device)
        launched_at: list[int] = []
        issued_at: list[int] = []
        works: list[Any] = [None] * len(program.bound)
        stream.synchronize()
        self._base.record(stream)
        self._base.synchronize()
        start = now()
        for position, bound in enumerate(program.bound):
            if pacer is not None:
                pacer.pace(position)
            if before is not None:
                before(position)
            progress[0] = bound.first
            launched_at.append(now())
            self._began[position].record(stream)
            work = works[position] = bound.launch()
            issued_at.append(now())
            if not bound.is_async:
                if work is not None:
                    work.wait()
                self._ended[position].record(stream)
            elif work is not None:
                side = self._side[program.calls[bound.first].record.pg]
                with torch.cuda.stream(side):
                    work.wait()
                    self._ended[position].record(side)
            for other in bound.waits:
                if other != position and works[other] is not None:
                    works[other].wait()
                works[other] = None
            if pacer is not None:
                pacer.returned(now())
            if after is not None:
                for other in bound.waits:
                    after(other)
        torch.cuda.synchronize(program.device)
        end = now()
        progress[0] = IDLE
        launched, issued, began, completed = array("q"), array("q"), array("q"), array("q")
        for position, bound in enumerate(program.bound):
            first = start + round(self._base.elapsed_time(self._began[position]) * 1e6)
            last = start + round(self._base.elapsed_time(self._ended[position]) * 1e6)
            for _ in range(bound.count):
                launched.append(launched_at[position])
                issued.append(issued_at[position])
                began.append(first)
                completed.append(last)
        return Times(launched, issued, began, completed, start, end)
