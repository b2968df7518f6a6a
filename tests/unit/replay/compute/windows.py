"""Windows of one process without communication: real traces of small functions, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.replay.plan.compute.read_window import read_window
from crossrank.replay.run.compute_device import DeviceStreams
from crossrank.replay.run.compute_program import ComputeProgram
from crossrank.replay.run.host_time import profiled
from crossrank.tools.graph.linking.window_files import RankInput
from tests.unit.replay.ranks import program

CPU = torch.device("cpu")


def compute_of(function: Callable[[], object], folder: Path) -> ComputePlan:
    """What is read of a window in which `function` ran."""
    et, kineto = folder / "rank-0.et.json", folder / "rank-0.kineto.json"
    profiled(function, et, kineto)
    return read_window(RankInput(rank=0, window=1, et=str(et), kineto=str(kineto))).compute


def program_of(plan: ComputePlan, streams: DeviceStreams | None = None) -> ComputeProgram:
    """Its program, which launches nothing."""
    made = ComputeProgram(plan, CPU)
    made.streams = streams
    made.join(program(), lambda position: None, lambda positions: None, [0, 0])
    return made


def slot_of(plan: ComputePlan, *shape: int) -> int:
    """The one tensor of that shape that was there before the window."""
    (found,) = {number for number, one in enumerate(plan.slots) if one.block >= 0 and one.shape == list(shape)}
    return found
