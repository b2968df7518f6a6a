"""Finds the files of all ranks that are replayed, and reads each into `RankTrace`.

A folder may hold several kinds for each rank, as our recordings do; then the one that says most is read, in the order
of `KINDS`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, replace

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, LINKED, is_url
from crossrank.tools.graph.linking.window_files import RankInput, pairs_of
from crossrank.tools.job.read_rank import READERS, RankSources
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import WHAT, discover, files_by_rank
from crossrank.tools.traces.rank_trace import RankTrace

KINDS = {
    COMMS: "comms files of a recording",
    LINKED: "linked traces",
    EXECUTION_TRACE: "execution traces",
    KINETO: "Kineto traces",
    FLIGHT: "flight-recorder dumps",
}
"""By preference: the first kind that a folder has is read."""


@dataclass(frozen=True, kw_only=True)
class ReplayInputs:
    """The files that are read."""

    kind: str
    inputs: list[RankSources]
    skipped: list[str]


def find(path: str, kind: str | None = None, *, times: bool = True) -> ReplayInputs:
    """The files at `path`: a folder, one file, or several with commas between them; of `kind`, where it is given.
    Without `times` those are left out that say no more of the calls in a comms file than how long they took.

    Raises `CrossrankError` where there is nothing to replay.
    """
    parts = [path] if os.path.exists(path) or is_url(path) else [part for part in path.split(",") if part]
    files = discover(parts)
    skipped = [f"{file.path}: {file.problem}" for file in files if file.problem]
    usable = [file for file in files if not file.problem]
    skipped += [
        f"{file.path}: is {WHAT[file.kind]}" for file in usable if file.path in parts and file.kind not in KINDS
    ]
    kinds = dict.fromkeys(name for name in KINDS for file in usable if file.kind == name)
    chosen = kind or next(iter(kinds), None)
    if chosen is None or chosen not in kinds:
        wanted = f"no {KINDS[chosen]}" if chosen else "no trace that can be replayed"
        holds = ", ".join(KINDS[name] for name in kinds) or "; ".join(skipped[:3])
        raise CrossrankError(
            f"{path}: holds {wanted}{f' ({holds})' if holds else ''}; "
            "name a recording, a folder of traces of all ranks, or a plan"
        )
    # Beside a comms file, a linked trace, a window that nobody has linked or a dump of the same rank says how long its
    # calls took.
    beside: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for file in usable:
        if times and file.kind in (LINKED, FLIGHT) and file.kind != chosen:
            beside[file.kind, file.rank].append(file.path)
    linked_windows = {(file.rank, file.window) for file in usable if file.kind == LINKED}
    pairs: dict[int | None, list[RankInput]] = defaultdict(list)
    for pair in pairs_of(usable).pairs if times and chosen == COMMS else ():
        if (pair.rank, pair.window) not in linked_windows:
            pairs[pair.rank].append(pair)
    inputs = []
    for rank, of_rank in files_by_rank(usable, {chosen}).items():
        one, *later = of_rank[chosen]
        linked, flight = tuple(beside[LINKED, rank]), next(iter(beside[FLIGHT, rank]), None)
        own = tuple(pairs[rank])
        inputs.append(RankSources(kind=chosen, path=one.path, rank=rank, linked=linked, pairs=own, flight=flight))
        skipped += [f"{file.path}: a later window of rank {rank}; name it to replay it" for file in later]
    return ReplayInputs(kind=chosen, inputs=inputs, skipped=skipped)


def read(found: ReplayInputs, fleet: Fleet, *, steps: tuple[int, int] | None = None) -> list[RankTrace]:
    """Read every file, with `fleet`, and of comms files only the iterations `steps`.

    Raises `CrossrankError` for the first that cannot be used.
    """
    count = len(found.inputs) if len(found.inputs) > 1 else None
    inputs = [replace(one, world_size=count, steps=steps) for one in found.inputs]
    return map_ranks(READERS[found.kind], inputs, fleet)
