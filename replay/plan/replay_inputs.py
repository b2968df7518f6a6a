"""Finds the files of all ranks to replay, and reads each into a `RankTrace`.

A folder may hold several kinds of files for each rank. The first kind of `KINDS` that it has is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, LINKED, is_url
from crossrank.tools.job.read_rank import READERS, RankSources, comms_with_times
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import WHAT, discover, files_by_rank, ranked_by
from crossrank.tools.traces.rank_trace import RankTrace

KINDS = {
    COMMS: "comms files of a recording",
    LINKED: "linked traces",
    EXECUTION_TRACE: "execution traces",
    KINETO: "Kineto traces",
    FLIGHT: "flight-recorder dumps",
}
"""Ordered by preference."""


@dataclass(frozen=True, kw_only=True)
class ReplayInputs:
    """The files to read."""

    kind: str
    inputs: list[RankSources]
    skipped: list[str]


def find(path: str, kind: str | None = None, *, times: bool = True) -> ReplayInputs:
    """Find the files at `path`: a folder, a file, or several with commas between them; only of `kind` if it is given.

    Without `times`, skip files that add only durations to the calls of a comms file. Raises `CrossrankError` if nothing
    can be replayed.
    """
    parts = [path] if os.path.exists(path) or is_url(path) else [part for part in path.split(",") if part]
    files = discover(parts)
    skipped = [f"{file.path}: {file.problem}" for file in files if file.problem]
    usable = [file for file in files if not file.problem]
    skipped += [
        f"{file.path}: is {WHAT[file.kind]}" for file in usable if file.path in parts and file.kind not in KINDS
    ]
    skipped += ranked_by(files)
    kinds = dict.fromkeys(name for name in KINDS for file in usable if file.kind == name)
    chosen = kind or next(iter(kinds), None)
    if chosen is None or chosen not in kinds:
        wanted = f"no {KINDS[chosen]}" if chosen else "no trace to replay"
        holds = ", ".join(KINDS[name] for name in kinds) or "; ".join(skipped[:3])
        raise CrossrankError(
            f"{path}: has {wanted}{f' ({holds})' if holds else ''}; "
            "give a recording, a folder of traces of all ranks, or a plan"
        )
    # Other files of the rank have the durations of the calls in a comms file.
    inputs, read_too = [], KINDS if times and chosen == COMMS else (chosen,)
    for rank, of_rank in files_by_rank(usable, read_too).items():
        if chosen not in of_rank:
            continue
        one, *later = of_rank[chosen]
        inputs.append(
            comms_with_times(rank, of_rank) if chosen == COMMS else RankSources(kind=chosen, path=one.path, rank=rank)
        )
        skipped += [f"{file.path}: a later window of rank {rank}; give its path to replay it" for file in later]
    return ReplayInputs(kind=chosen, inputs=inputs, skipped=skipped)


def read(
    found: ReplayInputs, fleet: Fleet, *, steps: tuple[int, int] | None = None, one_trace: bool = False
) -> list[RankTrace]:
    """Read every file with `fleet`; of comms files only `steps`. With `one_trace`, read only the first and skip the
    others.

    Raises `CrossrankError` for the first file that cannot be used.
    """
    count = len(found.inputs) if len(found.inputs) > 1 else None
    inputs = [replace(one, world_size=count, steps=steps) for one in found.inputs[: 1 if one_trace else None]]
    if others := found.inputs[len(inputs) :]:
        found.skipped.append(f"{len(others)} other file(s) are not used (--one-trace): {others[0].path}, …")
    return map_ranks(READERS[found.kind], inputs, fleet)
