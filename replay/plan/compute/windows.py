"""Finds the windows of all ranks that are replayed with their computation, and makes a plan of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, KINETO, LINKED, is_folder
from crossrank.replay.plan.build_plan import build
from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.replay.plan.compute.read_window import RankWindow, read_window
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
    """Return the files of window `number` at `path`, or of the first window. Raises `CrossrankError` if there is none.

    A linked trace is read only if the execution trace or the Kineto trace is missing.
    """
    files = discover([path])
    usable = [file for file in files if not file.problem]
    numbers = sorted({file.window for file in usable if file.kind in (EXECUTION_TRACE, LINKED)})
    if not numbers:
        raise CrossrankError(f"{path}: {_describe_missing_window(path, files)}")
    chosen = numbers[0] if number is None else number
    if chosen not in numbers:
        raise CrossrankError(f"{path}: has no window {chosen}; it has {', '.join(map(str, numbers))}")
    inputs, incomplete = [], []
    for rank, kinds in files_by_rank(files, (COMMS, LINKED, EXECUTION_TRACE, KINETO)).items():
        own_files = {kind: file.path for kind, found in kinds.items() for file in found if file.window == chosen}
        comms = kinds[COMMS][0].path if COMMS in kinds else None
        et, kineto = own_files.get(EXECUTION_TRACE, ""), own_files.get(KINETO, "")
        linked = None if et and kineto else own_files.get(LINKED)
        if linked or (et and kineto):
            inputs.append(RankInput(rank=rank, window=chosen, et=et, kineto=kineto, comms=comms, linked=linked))
        elif rank is not None and (own_files or comms):
            incomplete.append(rank)
    if not inputs or (incomplete and not one_trace):
        who = f"rank {rank_ranges(incomplete)}" if incomplete else path
        raise CrossrankError(
            f"{who}: has no execution trace with its Kineto trace in window {chosen}; record a window on all ranks "
            "(TRACING_WINDOW=START:STOP), or use the window of one rank for all (--one-trace)"
        )
    notes = [f"{len(numbers)} windows exist, and window {chosen} is replayed; --window selects another one"]
    return FoundWindows(inputs=inputs, notes=notes[: len(numbers) > 1])


def _describe_missing_window(path: str, files: list[FoundFile]) -> str:
    problems = [f"{file.path}: {file.problem}" for file in files if file.problem]
    holds = Counter(WHAT[file.kind] for file in files if not file.problem)
    has = f"{', '.join(sorted(holds))} alone" if holds else "; ".join(problems[:3]) or "nothing"
    what = "" if is_folder(path) else "give the folder with all its files; "
    return f"it has no window with an execution trace ({has}); {what}record one with TRACING_WINDOW=START:STOP"


def read_windows(
    found: FoundWindows,
    path: str,
    fleet: Fleet,
    *,
    one_trace: bool = False,
    world_size: int | None = None,
    partial: bool = False,
) -> Plan:
    """Return the plan of a window: computation and communication. Raises `CrossrankError` if its files make none."""
    windows: list[RankWindow] = map_ranks(read_window, found.inputs[: 1 if one_trace else None], fleet)
    plan = build(
        [one.trace for one in windows],
        path,
        LINKED,
        world_size=world_size,
        partial=partial,
        one_trace=one_trace,
        may_be_silent=True,
    )
    computes = {one.trace.rank or 0: one.compute for one in windows}
    for rank in plan.ranks:
        # A rank without files did nothing.
        nothing = ComputePlan(operations=[], schemas=[], slots=[], blocks=[])
        rank.compute = windows[0].compute if one_trace else computes.get(rank.rank, nothing)
    if one_trace and len(found.inputs) > 1:
        plan.notes.append(f"the files of {len(found.inputs) - 1} other rank(s) are not used (--one-trace)")
    plan.notes += found.notes
    return plan
