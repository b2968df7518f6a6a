"""Find the files that measured the communication of each rank, and read them into `RankTrace`s in parallel.

A folder may have several measurements of one rank. crossrank takes the first of these that exists:

1. exports of Nsight Systems;
2. linked traces, or Kineto traces that can be linked with execution traces;
3. Kineto traces alone;
4. dumps of the flight recorder.

A comms file adds the description of the calls; alone, it has only the times at which they were made. Logs of NCCL
Inspector are read if there are no other files, or with `--source inspector`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, LINKED
from crossrank.text import rank_ranges, writable
from crossrank.tools.job.job import Job
from crossrank.tools.job.one_run import problems
from crossrank.tools.job.read_rank import READERS, RankSources, comms_with_times, windows_of_rank
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import (
    INSPECTOR,
    NSIGHT,
    REPORT,
    WHAT,
    Files,
    FoundFile,
    discover,
    files_by_rank,
    ranked_by,
)
from crossrank.tools.traces.kernels import also_communicate
from crossrank.tools.traces.nccl_inspector import number_ranks
from crossrank.tools.traces.nsight.read import read_export
from crossrank.tools.traces.rank_trace import RankTrace

if TYPE_CHECKING:
    from crossrank.tools.job.collectives import JobTables

CHOICES = ("nsight", "kineto", "flight", "inspector", "comms")
"""Choices of `--source`."""

EXPORT = "nsys export --type sqlite"
NONE_OF_RANKS = "has none of the ranks given by --ranks"


@dataclass
class Measurements:
    """The files to read, and the skipped ones."""

    tasks: list[RankSources]
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Other files that were found and skipped."""
    unmixed: set[int] = field(default_factory=set)
    """Ranks that have other files, if exports are read."""
    ranked_by: list[str] = field(default_factory=list)
    """See `Job`."""


_MEASURED = (COMMS, LINKED, EXECUTION_TRACE, KINETO, FLIGHT)
_KINDS_OF_SOURCE = {
    "kineto": (COMMS, LINKED, EXECUTION_TRACE, KINETO),
    "flight": (COMMS, FLIGHT),
    "comms": (COMMS,),
    "inspector": (),
}
"""`--source` -> kinds of files to read."""


def find(
    paths: Sequence[str],
    ranks: Collection[int] | None = None,
    source: str | None = None,
    files: Sequence[FoundFile] | None = None,
    also: str = "",
) -> Measurements:
    """Return the measurements at `paths`: folders, files or URLs. `files` are the files there, if already listed.
    `also` is a regular expression for the names of more communication kernels.

    Raises `CrossrankError` if there is no measurement, or `also` is invalid.
    """
    try:
        re.compile(also)
    except re.error as error:
        raise CrossrankError(f"{also!r}, for kernels that communicate, is not a regular expression: {error}") from error
    files = discover(paths) if files is None else files
    found = _find_measurements(paths, ranks, source, files)
    found.ranked_by = ranked_by(files)
    found.tasks = [replace(task, also=also) for task in found.tasks]
    return found


def _find_measurements(
    paths: Sequence[str],
    ranks: Collection[int] | None,
    source: str | None,
    files: Sequence[FoundFile],
) -> Measurements:
    broken = [file for file in files if file.problem and file.kind not in (NSIGHT, REPORT)]
    skipped = [f"{file.path}: {file.problem}" for file in broken if not file.left_out]
    notes = [f"{file.path}: {file.problem}" for file in broken if file.left_out]
    skipped += [
        f"{file.path}: is {WHAT[file.kind]}, which has no communication times"
        for file in files
        if file.path in paths and not file.problem and file.kind not in (*_MEASURED, INSPECTOR, NSIGHT, REPORT)
    ]
    by_rank = files_by_rank(files, _KINDS_OF_SOURCE.get(source or "", _MEASURED))
    exports = [file for file in files if file.kind == NSIGHT]
    reports = [file.path for file in files if file.kind == REPORT]
    if reports and not exports and (source == "nsight" or not by_rank):
        raise CrossrankError(_export_command(reports[0]))
    exported = {one.path.rpartition(".")[0] for one in exports}
    skipped += [_export_command(report) for report in reports if report.rpartition(".")[0] not in exported]
    comms = tuple(
        (rank, kinds[COMMS][0].path) for rank, kinds in by_rank.items() if rank is not None and COMMS in kinds
    )
    if exports and source in (None, "nsight"):
        tasks = [RankSources(kind=NSIGHT, path=one.path, rank=one.rank, comms=comms) for one in exports]
        others = {rank for rank in by_rank if rank is not None and (ranks is None or rank in ranks)}
        return Measurements(tasks, skipped, notes, others)
    if source == "nsight":
        raise CrossrankError(f"{', '.join(paths)}: has no Nsight export (.sqlite); create one with: {EXPORT} REPORT")
    logs = [file.path for file in files if file.kind == INSPECTOR and not file.problem]
    if logs and not by_rank:
        tasks = [RankSources(kind=INSPECTOR, path=path, rank=None) for path in logs]
        return Measurements(tasks, skipped, notes)
    if logs:
        notes.append(f"skipped {len(logs)} log(s) of NCCL Inspector; --source inspector reads only them")
    wanted = [rank for rank in by_rank if (ranks is None or rank in ranks) and (rank or 0) < MOST_RANKS]
    if by_rank and not wanted and ranks is not None:
        raise CrossrankError(f"{', '.join(paths)}: {NONE_OF_RANKS}")
    tasks = [one for rank in wanted if (one := _choose_files(rank, by_rank[rank], skipped)) is not None]
    if not tasks:
        asked = f" for --source {source}" if source else ""
        why = f" ({'; '.join(skipped[:3])})" if skipped else ""
        raise CrossrankError(
            f"{', '.join(paths)}: has no communication measurements{asked}{why}; give a recording, a folder of "
            "Kineto traces or flight-recorder dumps, or Nsight exports (.sqlite)"
        )
    return Measurements(tasks, skipped, notes)


def _export_command(report: str) -> str:
    target = report.rpartition(".")[0] + ".sqlite"
    return f"{report}: is a report, not an export; run: {EXPORT} --output {target} {report}"


def _choose_files(rank: int | None, files: Files, skipped: list[str]) -> RankSources | None:
    """Return which files of a rank to read; None if there are none."""
    if COMMS in files:
        return comms_with_times(rank, files)
    later = [one.path for kind in (LINKED, KINETO) for one in files.get(kind, ()) if one.window > 1]
    skipped += [
        f"{path}: is a later window of rank {rank} without a comms file; give this file alone" for path in later
    ]
    windows = windows_of_rank(rank, files)
    chosen = next((one for one in windows if one.linked is not None), next(iter(windows), None))
    if chosen is not None:
        kind, path = (KINETO, chosen.kineto) if chosen.linked is None else (LINKED, chosen.linked)
        return RankSources(kind=kind, path=path, rank=rank, windows=(chosen,))
    for kind in (KINETO, FLIGHT):
        if kind in files:
            return RankSources(kind=kind, path=files[kind][0].path, rank=rank)
    return None


def open_job(
    paths: Sequence[str],
    fleet: Fleet,
    ranks: Collection[int] | None = None,
    source: str | None = None,
    also: str = "",
) -> JobTables:
    """Read and match all ranks at `paths`; the other arguments are those of `find`. Some of `ranks` may have no file.

    Raises `CrossrankError` if there is no usable file, none of `ranks` has a file, or the files are from several runs.
    """
    found = find(paths, ranks, source, also=also)
    traces = [one for one in read(found, fleet) if ranks is None or one.rank in ranks]
    if not traces:
        raise CrossrankError(f"{', '.join(paths)}: {NONE_OF_RANKS}")
    return job_of(traces, found)


def job_of(traces: Sequence[RankTrace], found: Measurements, *, release: bool = False) -> JobTables:
    """Match the traces that were read; `release` is as in `launches`."""
    from crossrank.tools.job.collectives import match_collectives  # imports polars, which is slow in workers

    job = Job.match(traces, lanes=False)
    job.skipped, job.ranked_by = found.skipped, found.ranked_by
    return match_collectives(job, release=release)


def read(found: Measurements, fleet: Fleet) -> list[RankTrace]:
    """Read every file; unusable ones are added to `found.skipped`.

    Raises `CrossrankError` if no file can be used, or the ranks are from different runs."""
    return settle(map_ranks(read_task, found.tasks, fleet, failed=failed), found)


def settle(results: Iterable[object], found: Measurements) -> list[RankTrace]:
    """Return the traces in the order of ranks, from the results of `read_task` and `failed`.

    Raises `CrossrankError` if there is none, or they are from several runs.
    """
    ranks: list[RankTrace] = []
    for result in results:
        if isinstance(result, list):
            ranks += result
        else:
            found.skipped.append(str(result))
    if any(one.source == INSPECTOR for one in ranks):
        number_ranks([one for one in ranks if one.source == INSPECTOR])
    of_kineto = [one for one in ranks if one.source == "kineto" and len(one)]
    if not all(one.numbered for one in of_kineto):  # torch's numbers are no counts
        for one in of_kineto:
            one.numbered = False
    for one in ranks:
        if not 0 <= (one.rank or 0) < MOST_RANKS:
            found.skipped.append(f"{one.path}: rank {one.rank} is invalid; record it again")
        if one.world_size is not None and not 0 < one.world_size <= MOST_RANKS:
            one.notes.append(f"{one.path}: has an invalid world size, {one.world_size}")
            one.world_size = None
        one.path = writable(one.path)
        one.notes, one.problems = list(map(writable, one.notes)), list(map(writable, one.problems))
    found.skipped = list(map(writable, found.skipped))
    ranks = [one for one in ranks if 0 <= (one.rank or 0) < MOST_RANKS]
    if not ranks:
        raise CrossrankError("; ".join(found.skipped[:3]))
    ranks[0].notes += map(writable, (*found.notes, *found.ranked_by))
    others = sorted(found.unmixed - {one.rank for one in ranks})
    if others:
        found.skipped.append(
            f"rank {rank_ranges(others)}: has no Nsight export, and crossrank does not mix exports with "
            "other files; --source kineto, flight or comms reads the other files"
        )
    ranks.sort(key=lambda one: (one.rank is None, one.rank or 0, one.path))
    for problem in problems(ranks):
        raise CrossrankError(problem)
    return ranks


def read_task(task: RankSources) -> list[RankTrace] | str:
    """Read one file or export; runs in a worker."""
    with also_communicate(task.also):
        if task.kind == NSIGHT:
            return read_export(task.path, task.rank, dict(task.comms))
        return [READERS[task.kind](task)]


def failed(task: RankSources, error: CrossrankError) -> list[RankTrace] | str:
    """Return the reason why a file could not be used."""
    return str(error) if str(error).startswith(task.path) else f"{task.path}: {error}"
