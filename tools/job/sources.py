"""Finds what measured the communication of each rank, and reads it into `RankTimes`, one worker per rank or export.

A folder may hold several measurements of one rank. The one that says most is taken: Nsight Systems, else what is
linked or can be linked (Kineto with its execution trace), Kineto alone, the flight recorder; a comms file beside any
of them gives the meaning of the calls, and by itself says when they were made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import msgspec

from crossrank.comm import MOST_RANKS, OPERATIONS, is_p2p
from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, EXECUTION_TRACE, FLIGHT, KINETO, LINKED
from crossrank.text import rank_ranges, writable
from crossrank.tools.graph.linking.communications import named_by_address
from crossrank.tools.graph.linking.inputs import RankInput
from crossrank.tools.job import rank_readers as readers
from crossrank.tools.job.kineto_calls import NOTHING, read_kineto_trace
from crossrank.tools.job.rank_times import SEND_RECV, SOURCES, RankTimes, TimesBuilder
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import NSIGHT, REPORT, WHAT, FoundFile, discover
from crossrank.tools.traces.flight_calls import read_flight
from crossrank.tools.traces.nsight.read import read_export
from crossrank.tools.traces.rank_calls import Input, RankCalls, RecordedCall

CHOICES = ("nsight", "kineto", "flight", "comms")
"""What a user may ask for instead of what says most."""

EXPORT = "nsys export --type sqlite"
LEFT_OUT = "calls inside a node, which were counted and not recorded (TRACING=CROSSNODE); TRACING=ALL records them"
_RANKS_APART = 60_000_000_000
"""ns between the end of one rank and the begin of another that no job has."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one worker reads."""

    rank: int | None
    path: str
    read: Callable[[Task], list[RankTimes]]
    given: Input | None = None
    comms: tuple[tuple[int, str], ...] = ()
    """(rank, comms file), for an export that holds several ranks."""


@dataclass
class Found:
    """What is to be read, and what is not."""

    tasks: list[Task]
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What else was found and left out."""
    unmixed: set[int] = field(default_factory=set)
    """Ranks that have other files than the exports that are read."""


_MEASURED = (COMMS, LINKED, EXECUTION_TRACE, KINETO, FLIGHT)
_Files = dict[str, list[FoundFile]]


def find(
    paths: Sequence[str],
    ranks: Collection[int] | None = None,
    source: str | None = None,
    files: Sequence[FoundFile] | None = None,
) -> Found:
    """The measurements at `paths`: folders, files or URLs; `files` are those there, where that is known already.

    Raises `CrossrankError` where there is none.
    """
    files = discover(paths) if files is None else files
    broken = [file for file in files if file.problem and file.kind not in (NSIGHT, REPORT)]
    skipped = [f"{file.path}: {file.problem}" for file in broken if not file.left_out]
    notes = [f"{file.path}: {file.problem}" for file in broken if file.left_out]
    skipped += [
        f"{file.path}: is {WHAT[file.kind]}, which measures no communication"
        for file in files
        if file.path in paths and not file.problem and file.kind not in (*_MEASURED, NSIGHT, REPORT)
    ]
    by_rank: dict[int | None, _Files] = defaultdict(lambda: defaultdict(list))
    for file in (file for file in files if file.kind in _MEASURED and not file.problem):
        by_rank[file.rank][file.kind].append(file)
    exports = [file for file in files if file.kind == NSIGHT]
    reports = [file.path for file in files if file.kind == REPORT]
    if reports and not exports and (source == "nsight" or not by_rank):
        raise CrossrankError(_export_command(reports[0]))
    exported = {one.path.rpartition(".")[0] for one in exports}
    skipped += [_export_command(report) for report in reports if report.rpartition(".")[0] not in exported]
    comms = tuple(
        (rank, kinds[COMMS][0].path)
        for rank, kinds in sorted(by_rank.items(), key=_order)
        if rank is not None and kinds[COMMS]
    )
    if exports and source in (None, "nsight"):
        tasks = [Task(rank=one.rank, path=one.path, read=_read_nsight, comms=comms) for one in exports]
        others = {rank for rank in by_rank if rank is not None and (ranks is None or rank in ranks)}
        return Found(tasks, skipped, notes, others)
    if source == "nsight":
        raise CrossrankError(f"{', '.join(paths)}: holds no Nsight export (.sqlite); make one with: {EXPORT} REPORT")
    tasks = []
    for rank, kinds in sorted(by_rank.items(), key=_order):
        if ranks is not None and rank not in ranks:
            continue
        task = _task(rank, kinds, source, skipped)
        if task is not None:
            tasks.append(task)
    if not tasks:
        asked = f" for --source {source}" if source else ""
        told = f" ({'; '.join(skipped[:3])})" if skipped else ""
        raise CrossrankError(
            f"{', '.join(paths)}: holds nothing that measured communication{asked}{told}; name a recording, a folder "
            "of Kineto traces or flight-recorder dumps, or Nsight exports (.sqlite)"
        )
    return Found(tasks, skipped, notes)


def _export_command(report: str) -> str:
    target = report.rpartition(".")[0] + ".sqlite"
    return f"{report}: is a report, not an export; run: {EXPORT} --output {target} {report}"


def _order(item: tuple[int | None, _Files]) -> tuple[bool, int]:
    return item[0] is None, item[0] or 0


def _task(rank: int | None, kinds: _Files, source: str | None, skipped: list[str]) -> Task | None:
    if rank is not None and rank >= MOST_RANKS:
        return None
    if source in ("kineto", "flight", "comms"):
        keep = {"kineto": (COMMS, LINKED, EXECUTION_TRACE, KINETO), "flight": (COMMS, FLIGHT), "comms": (COMMS,)}[
            source
        ]
        kinds = {kind: kinds[kind] for kind in keep if kind in kinds}
    files = {kind: sorted(found, key=lambda one: (one.window, one.path)) for kind, found in kinds.items() if found}
    for kind, found in files.items():
        double = [one for one, other in zip(found[1:], found, strict=False) if one.window == other.window]
        if double:
            names = ", ".join(PurePosixPath(one.path).name for one in found[:3])
            who = f"of rank {rank}" if rank is not None else "without a rank in their names"
            raise CrossrankError(f"{found[0].path}: {names} are all {kind} files {who}; name the folder of one job")
    linked = {one.window: one for one in files.get(LINKED, ())}
    kinetos = {one.window: one for one in files.get(KINETO, ())}
    comms = files[COMMS][0] if COMMS in files else None
    pairs = [
        RankInput(
            rank=rank,
            window=one.window,
            et=one.path,
            kineto=kinetos[one.window].path,
            comms=comms.path if comms else None,
        )
        for one in files.get(EXECUTION_TRACE, ())
        if one.window in kinetos and one.window not in linked
    ]
    if comms is not None:
        flight = files[FLIGHT][0].path if FLIGHT in files else None
        given = Input(
            path=comms.path,
            rank=rank,
            linked=tuple(one.path for one in linked.values()),
            pairs=tuple(pairs),
            flight=flight,
        )
        return Task(rank=rank, path=comms.path, read=_read_comms, given=given)
    several = [one.path for one in [*linked.values(), *kinetos.values()] if one.window > 1]
    skipped += [f"{path}: a later window of rank {rank} without a comms file; name it by itself" for path in several]
    if linked:
        one = linked[min(linked)]
        return Task(rank=rank, path=one.path, read=_read_linked, given=_input(one))
    if pairs:
        return Task(
            rank=rank,
            path=pairs[0].kineto,
            read=_read_pair,
            given=Input(path=pairs[0].kineto, rank=rank, pairs=(pairs[0],)),
        )
    if kinetos:
        one = kinetos[min(kinetos)]
        return Task(rank=rank, path=one.path, read=_read_kineto, given=_input(one))
    if FLIGHT in files:
        return Task(rank=rank, path=files[FLIGHT][0].path, read=_read_flight, given=_input(files[FLIGHT][0]))
    return None


def _input(file: FoundFile) -> Input:
    return Input(path=file.path, rank=file.rank, window=file.window)


def read(found: Found, fleet: Fleet, done: Callable[[], None] = lambda: None) -> list[RankTimes]:
    """Read every file; one that cannot be used is told in `found.skipped`, and the others are read all the same.

    Raises `CrossrankError` where none can be used, or the ranks are of different runs."""
    results = map_ranks(read_task, found.tasks, fleet, failed=failed, done=done)
    ranks: list[RankTimes] = []
    for result in results:
        if isinstance(result, str):
            found.skipped.append(result)
        else:
            ranks += result
    return settle(ranks, found)


def settle(ranks: list[RankTimes], found: Found) -> list[RankTimes]:
    """The ranks of one run in their order. Raises `CrossrankError` where there is none, or they are of several runs."""
    if not ranks:
        raise CrossrankError("; ".join(found.skipped[:3]))
    for one in list(ranks):
        if one.rank is not None and not 0 <= one.rank < MOST_RANKS:
            found.skipped.append(f"{one.path}: rank {one.rank} cannot be; record it again")
            ranks.remove(one)
        if one.world_size is not None and not 0 < one.world_size <= MOST_RANKS:
            one.notes.append(f"{one.path}: says that the job has {one.world_size} ranks, which cannot be")
            one.world_size = None
        one.path = writable(one.path)
        one.notes, one.problems = list(map(writable, one.notes)), list(map(writable, one.problems))
    found.skipped = list(map(writable, found.skipped))
    if not ranks:
        raise CrossrankError("; ".join(found.skipped[:3]))
    ranks[0].notes += map(writable, found.notes)
    others = sorted(found.unmixed - {one.rank for one in ranks if one.rank is not None})
    if others:
        found.skipped.append(
            f"rank {rank_ranges(others)}: has no export of Nsight Systems, and its other files are not mixed with "
            "those of other ranks; --source kineto, flight or comms reads them"
        )
    ranks.sort(key=lambda one: (one.rank is None, one.rank or 0, one.path))
    _refuse_several_runs(ranks)
    return ranks


def read_task(task: Task) -> list[RankTimes] | str:
    """Runs in a worker."""
    return task.read(task)


def failed(task: Task, error: CrossrankError) -> list[RankTimes] | str:
    """What stands for a file that could not be used: why."""
    return str(error) if str(error).startswith(task.path) else f"{task.path}: {error}"


def _refuse_several_runs(ranks: list[RankTimes]) -> None:
    seen: dict[int, RankTimes] = {}
    for one in ranks:
        if one.rank is None:
            if len(ranks) > 1:
                raise CrossrankError(f"{one.path}: neither its name nor its content tells its rank; call it rank-N")
            one.rank = 0
        if one.rank in seen:
            raise CrossrankError(
                f"{seen[one.rank].path} and {one.path} are both of rank {one.rank}; name the files of one run"
            )
        seen[one.rank] = one
    sizes = {one.world_size: one.path for one in ranks if one.world_size}
    if len(sizes) > 1:
        told = ", ".join(
            f"{path} of {size} ranks" for size, path in sorted(sizes.items(), key=lambda item: item[0] or 0)
        )
        raise CrossrankError(f"the ranks are of different runs: {told}; name the files of one run")
    spans = [(span, one) for one in ranks if (span := _span(one)) is not None]
    if spans:
        (_, first_end), early = min(spans, key=lambda entry: entry[0][1])
        (last_start, _), late = max(spans, key=lambda entry: entry[0][0])
        if last_start > first_end + _RANKS_APART:
            raise CrossrankError(
                f"the ranks are of different runs: {early.path} ends {(last_start - first_end) / 1e9:.0f} s before "
                f"{late.path} begins; name the files of one run"
            )


_FIRST_DAY = 86_400_000_000_000
"""A time before the second day of 1970 is no wall clock but one that starts with the capture."""


def _span(one: RankTimes) -> tuple[int, int] | None:
    moments = [
        moment for column in (one.called, one.began) for moment in (min(column, default=0), max(column, default=0))
    ]
    known = [moment for moment in moments if moment > _FIRST_DAY]
    return (min(known), max(known)) if known else None


# --- what a worker does -----------------------------------------------------------------------------------------------


def _read_comms(task: Task) -> list[RankTimes]:
    assert task.given is not None
    calls = readers.read_comms(task.given)
    found = calls.origins
    source = next((name for name in ("kineto", "flight") if found.get(name)), "comms")
    times = _of_calls(calls, source)
    if source == "comms":
        times.unattributed["calls of which only the begin is recorded"] = len(times)
    return [times]


def _read_linked(task: Task) -> list[RankTimes]:
    assert task.given is not None
    return [_of_calls(readers.read_linked_trace(task.given), "kineto")]


def _read_pair(task: Task) -> list[RankTimes]:
    assert task.given is not None
    return [_of_calls(readers.read_pair(task.given), "kineto")]


def _read_kineto(task: Task) -> list[RankTimes]:
    assert task.given is not None
    return [_of_calls(read_kineto_trace(task.given), "kineto")]


def _read_flight(task: Task) -> list[RankTimes]:
    assert task.given is not None
    return [_of_calls(read_flight(task.given), "flight")]


def _read_nsight(task: Task) -> list[RankTimes]:
    return read_export(task.path, task.rank, dict(task.comms))


def _name_by_size(calls: RankCalls) -> None:
    """Old traces name groups by addresses, which differ between ranks: their size is what ranks can agree on."""
    names = {}
    for place, group in enumerate(calls.groups):
        if named_by_address(group.pg):
            names[group.pg] = f"{group.size} ranks"
            calls.groups[place] = msgspec.structs.replace(group, pg=names[group.pg])
    if not names:
        return
    for call in calls.calls:
        if call.record.pg in names:
            call.record = msgspec.structs.replace(call.record, pg=names[call.record.pg])
    calls.notes.append(
        f"{calls.path}: names process groups by addresses: groups of one size are taken to be the same on all ranks"
    )


def _of_calls(calls: RankCalls, source: str) -> RankTimes:
    """The calls of one rank as columns; calls that went out together become one."""
    times = RankTimes(
        rank=calls.rank,
        path=calls.path,
        source=source,
        clock=calls.clock or calls.path,
        world_size=calls.world_size,
        node=calls.node,
        placed=source != "flight",
        numbered=calls.numbered,
        # torch numbers the sends and receives of a group, our records those of each pair.
        p2p_numbered=calls.numbered and calls.p2p_by_pair,
        steps=calls.steps,
        problems=list(calls.problems),
        notes=list(calls.notes),
        about=calls.about,
        matched=calls.matched,
    )
    _name_by_size(calls)
    builder = TimesBuilder(times, calls.groups)
    counted: dict[object, int] = defaultdict(int)
    batches: dict[int, list[RecordedCall]] = {}
    launches: list[list[RecordedCall]] = []
    for call in calls.calls:
        batch = call.record.batch
        if batch is None:
            launches.append([call])
        elif batch in batches:
            batches[batch].append(call)
        else:
            batches[batch] = [call]
            launches.append(batches[batch])
    for launch in launches:
        first = launch[0].record
        kind = builder.take([call.record for call in launch])
        timed = [call for call in launch if call.took_ns is not None]
        began = min((call.began_ns or 0 for call in timed), default=0)
        # Members of one launch share its kernel, or follow each other: the span of them all is the launch's.
        ended = max(((call.began_ns or 0) + (call.took_ns or 0) for call in timed), default=0)
        number = first.p2p_seq if is_p2p(first) else first.seq
        lane = (first.pg, kind.ends, kind.op == SEND_RECV)
        counted[lane] += 1
        counted_p2p = is_p2p(first) and not times.p2p_numbered
        if number is None or not times.numbered or counted_p2p or kind.op == SEND_RECV:
            number = counted[lane]
        if first.op not in OPERATIONS and not times.numbered:
            number = 0  # nobody knows what it would be compared with
        builder.add(
            builder.kind(kind),
            id=first.id,
            number=number,
            step=first.step,
            called=first.t + calls.offset if calls.timed else 0,
            began=began,
            ended=ended,
        )
        if timed and not calls.told_by:
            times.attributed[SOURCES[source]] += len(launch)
    times.attributed.update({how: count for how, count in calls.told_by.items() if how != NOTHING})
    times.unattributed.update({how: count for how, count in calls.told_by.items() if how == NOTHING})
    if calls.left_out:
        times.unattributed[LEFT_OUT] = calls.left_out
    without = sum(call.took_ns is None for call in calls.calls)
    if without and times.attributed:
        times.unattributed["calls outside the windows that were traced, or without a duration"] = without
    return times
