"""Finds the windows of all ranks that are replayed with their computation, and makes the plan of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, KINETO, LINKED, is_folder
from crossrank.replay.plan.build_plan import build
from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.replay.plan.compute.read_window import RankWindow, read_window
from crossrank.replay.plan.one_trace import spread
from crossrank.replay.plan.plan import Plan
from crossrank.text import rank_ranges
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import WHAT, FoundFile, discover, files_by_rank


@dataclass(frozen=True, kw_only=True)
class FoundWindows:
    """One window of all ranks."""

    inputs: list[RankInput]
    notes: list[str]


def find_windows(path: str, number: int | None = None, *, one_trace: bool = False) -> FoundWindows:
    """The files of window `number` at `path`, the first where it is None. Raises `CrossrankError` where there is none.

    What is linked already is read as it is where its execution trace is gone.
    """
    files = discover([path])
    usable = [file for file in files if not file.problem]
    numbers = sorted({file.window for file in usable if file.kind in (EXECUTION_TRACE, LINKED)})
    if not numbers:
        raise CrossrankError(f"{path}: {_lacks(path, files)}")
    chosen = numbers[0] if number is None else number
    if chosen not in numbers:
        raise CrossrankError(f"{path}: has no window {chosen}; it has {', '.join(map(str, numbers))}")
    inputs, half = [], []
    for rank, kinds in files_by_rank(files, (COMMS, LINKED, EXECUTION_TRACE, KINETO)).items():
        own = {kind: file.path for kind, found in kinds.items() for file in found if file.window == chosen}
        comms = kinds[COMMS][0].path if COMMS in kinds else None
        et, kineto = own.get(EXECUTION_TRACE, ""), own.get(KINETO, "")
        linked = None if et and kineto else own.get(LINKED)
        if linked or (et and kineto):
            inputs.append(RankInput(rank=rank, window=chosen, et=et, kineto=kineto, comms=comms, linked=linked))
        elif rank is not None and (own or comms):
            half.append(rank)
    if not inputs or (half and not one_trace):
        who = f"rank {rank_ranges(half)}" if half else path
        raise CrossrankError(
            f"{who}: has no execution trace with its Kineto trace in window {chosen}; record a window on all ranks "
            "(TRACING_WINDOW=START:STOP), or let one rank's stand for all (--one-trace)"
        )
    notes = [f"{len(numbers)} windows are there, and window {chosen} is replayed; --window chooses another"]
    return FoundWindows(inputs=inputs, notes=notes[: len(numbers) > 1])


def _lacks(path: str, files: list[FoundFile]) -> str:
    problems = [f"{file.path}: {file.problem}" for file in files if file.problem]
    holds = Counter(WHAT[file.kind] for file in files if not file.problem)
    has = f"{', '.join(sorted(holds))} alone" if holds else "; ".join(problems[:3]) or "nothing"
    what = "" if is_folder(path) else "name the folder that holds all its files; "
    return f"no window with an execution trace is in it ({has}); {what}record one with TRACING_WINDOW=START:STOP"


def read_windows(
    found: FoundWindows,
    path: str,
    fleet: Fleet,
    *,
    one_trace: bool = False,
    world_size: int | None = None,
    partial: bool = False,
) -> Plan:
    """The plan of a window, computation and communication. Raises `CrossrankError` where its files do not make one."""
    windows: list[RankWindow] = map_ranks(read_window, found.inputs[: 1 if one_trace else None], fleet)
    traces = [one.trace for one in windows]
    if one_trace:
        traces = spread(traces[0], world_size)
    plan = build(traces, path, LINKED, world_size=world_size, partial=partial, may_be_silent=True)
    computes = {one.trace.rank or 0: one.compute for one in windows}
    for rank in plan.ranks:
        # A rank without files is one that did nothing.
        nothing = ComputePlan(operations=[], schemas=[], slots=[], blocks=[])
        rank.compute = windows[0].compute if one_trace else computes.get(rank.rank, nothing)
    if one_trace and len(found.inputs) > 1:
        plan.notes.append(f"the files of {len(found.inputs) - 1} other rank(s) are not used, for one stands for all")
    plan.notes += found.notes
    return plan
