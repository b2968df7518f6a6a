"""Finds the files of all ranks that are replayed, and reads each into `RankTrace`.

A folder may hold several kinds for each rank, as our recordings do; then the one that says most is read, in the order
of `KINDS`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, LINKED, is_url
from crossrank.tools.job.read_rank import READERS, RankSources
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import BASIC, WHAT, FoundFile, discover
from crossrank.tools.traces.rank_trace import RankTrace

KINDS = {
    COMMS: "comms files of a recording",
    LINKED: "linked traces",
    EXECUTION_TRACE: "execution traces",
    KINETO: "Kineto traces",
    FLIGHT: "flight-recorder dumps",
    BASIC: "PARAM basic traces",
}
"""By preference: the first kind that a folder has is read."""


@dataclass(frozen=True, kw_only=True)
class ReplayInputs:
    """The files that are read."""

    kind: str
    inputs: list[RankSources]
    skipped: list[str]


def find(path: str, kind: str | None = None) -> ReplayInputs:
    """The files at `path`: a folder, one file, or several with commas between them; of `kind`, where it is given.

    Raises `CrossrankError` where there is nothing to replay.
    """
    parts = [path] if os.path.exists(path) or is_url(path) else [part for part in path.split(",") if part]
    by_kind: dict[str, dict[int | None, list[FoundFile]]] = defaultdict(lambda: defaultdict(list))
    skipped = []
    for file in discover(parts):
        if file.problem:
            skipped.append(f"{file.path}: {file.problem}")
        elif file.kind in KINDS:
            by_kind[file.kind][file.rank].append(file)
        elif file.path in parts:
            skipped.append(f"{file.path}: is {WHAT[file.kind]}")
    chosen = kind or next((name for name in KINDS if name in by_kind), None)
    if chosen is None or chosen not in by_kind:
        wanted = f"no {KINDS[chosen]}" if chosen else "no trace that can be replayed"
        holds = ", ".join(KINDS[name] for name in by_kind) or "; ".join(skipped[:3])
        raise CrossrankError(
            f"{path}: holds {wanted}{f' ({holds})' if holds else ''}; "
            "name a recording, a folder of traces of all ranks, or a plan"
        )
    inputs = []
    for rank, found in sorted(by_kind[chosen].items(), key=lambda item: (item[0] is None, item[0] or 0)):
        one, *later = sorted(found, key=lambda file: (file.window, file.path))
        if len({file.window for file in found}) < len(found):
            names = ", ".join(PurePosixPath(file.path).name for file in (one, *later[:2]))
            of = f"of rank {rank}" if rank is not None else "without a rank in their names"
            raise CrossrankError(
                f"{path}: {names} are {'all' if len(found) > 2 else 'both'} {of}; name the folder of one job"
            )
        # Beside a comms file, a linked trace or a dump of the same rank says how long its calls took.
        linked, flight = (
            [file.path for file in by_kind.get(beside, {}).get(rank, ()) if file is not one]
            for beside in (LINKED, FLIGHT)
        )
        flight_dump = flight[0] if flight else None
        inputs.append(
            RankSources(path=one.path, rank=rank, window=one.window, linked=tuple(linked), flight=flight_dump)
        )
        skipped += [f"{file.path}: a later window of rank {rank}; name it to replay it" for file in later]
    return ReplayInputs(kind=chosen, inputs=inputs, skipped=skipped)


def read(
    found: ReplayInputs, fleet: Fleet, done: Callable[[], None] = lambda: None, *, steps: tuple[int, int] | None = None
) -> list[RankTrace]:
    """Read every file, with `fleet`, and of comms files only the iterations `steps`.

    Raises `CrossrankError` for the first that cannot be used.
    """
    count = len(found.inputs) if len(found.inputs) > 1 else None
    inputs = [replace(one, world_size=count, steps=steps) for one in found.inputs]
    return map_ranks(READERS[found.kind], inputs, fleet, done=done)
