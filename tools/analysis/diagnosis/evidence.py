"""Find the evidence of each rank and read it, with one worker per rank.

Accepts recordings, files of `TORCH_FR_DUMP_TEMP_FILE` with host names in them, and one folder per node. The rank comes
from a file's name, because most dumps do not have it.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations

import msgspec
import numpy as np

from crossrank.comm import is_p2p
from crossrank.errors import CrossrankError
from crossrank.recording import ANSWERS, COMMS, FLIGHT, SEEN, ReadIssues, read_chunks
from crossrank.text import writable
from crossrank.tools.analysis.diagnosis.findings import Finding, call_text, group_text, rank_text
from crossrank.tools.analysis.diagnosis.log_evidence import add_logs
from crossrank.tools.job.groups import Members
from crossrank.tools.job.one_run import facts_of, several_runs
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.comms import read_comms, stack_of
from crossrank.tools.traces.discover import LOG, WHAT, FoundFile, discover
from crossrank.tools.traces.ending import CUT_SHORT, MAIN_THREAD, Ending
from crossrank.tools.traces.flight.calls import SAME_TIME, UNRECORDED, read_flight
from crossrank.tools.traces.flight.dump import NoDumpError, OwnStack
from crossrank.tools.traces.growing import last_call_at
from crossrank.tools.traces.logs.read import read_logs
from crossrank.tools.traces.rank_trace import GLOO, RETIRED, RankTrace, TraceBuilder, sort_by_time
from crossrank.tools.traces.seen import Seen, read_seen

NEWER = 5_000_000_000
"""A comms file replaces the dumps only if it continues for more ns after all dumps of its recording."""


@dataclass(frozen=True)
class Failure:
    """A file that could not be used."""

    candidate: FoundFile
    text: str
    kind: str = "unreadable_dump"
    """Kind of the finding about its rank; empty if the file is not a dump."""


@dataclass
class Evidence:
    """The evidence at a path."""

    ranks: list[RankTrace] = field(default_factory=list)
    unusable: dict[int, str] = field(default_factory=dict)
    """Rank -> `unreadable_dump` or `refused_dump`."""
    skipped: list[str] = field(default_factory=list)
    """Files that were not used, with the reason."""
    notes: list[str] = field(default_factory=list)
    """Notes on the files."""
    world_size: int | None = None
    """World size in most comms files, including those of ranks without a dump."""
    logs_only: bool = False
    """Only logs were read: what a rank has not printed is unknown."""
    log_is_cut: bool = False
    """The lines of some ranks may be missing."""
    told: list[Finding] = field(default_factory=list)
    """What lines of logs say that no call shows."""


def find_candidates(paths: Iterable[str], files: Sequence[FoundFile] | None = None) -> list[FoundFile]:
    """Return every dump and comms file at `paths`, with all subfolders, also damaged ones, and files of other kinds
    that `paths` has itself. `files` are the files there, if already listed.

    Next to dumps and comms files, a log counts only if `paths` has it: it may be of another run, and a job that hangs
    diagnoses its own folder.
    """
    named = list(paths)
    found = [
        file
        for file in (discover(named) if files is None else files)
        if (file.kind in (FLIGHT, COMMS, SEEN, LOG, "") and not file.partial) or file.path in named
    ]
    if any(one.kind in (FLIGHT, COMMS, SEEN) for one in found):
        found = [one for one in found if one.kind != LOG or one.path in named]
    # Also read files of unknown kind: reading a damaged dump gives the best error message.
    return [replace(one, problem="") if not one.kind and os.path.isfile(one.path) else one for one in found]


def read_evidence(
    candidates: Sequence[FoundFile], fleet: Fleet, *, named: bool = False, last: int | None = None
) -> Evidence:
    """Read all `candidates` with `fleet`; with `last` only the last calls (see `_last_calls`). `named`: the user gave
    each file, so an unrecognized file is reported."""
    logs = {one.path: one.shown or one.path for one in candidates if one.kind == LOG}
    candidates = [one for one in candidates if one.kind != LOG]
    if last is not None:
        candidates, results = _last_calls(candidates, fleet, last)
    else:
        results = map_ranks(read_candidate, candidates, fleet, failed=failed)
    evidence = put_together(candidates, results, named=named)
    if logs:
        add_logs(evidence, read_logs(logs, logs))
    if any(one.dump.left_out for one in evidence.ranks):
        evidence.notes.append(
            f"crossrank read only the unfinished calls of each dump and {last} calls before them (--last)"
        )
    return evidence


def put_together(
    candidates: Sequence[FoundFile], results: Sequence[RankTrace | Failure | Seen], *, named: bool = False
) -> Evidence:
    """Return the evidence of each rank: the best of its files, completed from the others."""
    evidence = Evidence()
    dumps: dict[int, list[RankTrace]] = defaultdict(list)
    is_over = any(isinstance(one, RankTrace) and one.ending.ended for one in results)
    comms_files: dict[int, list[RankTrace]] = defaultdict(list)
    for candidate, result in zip(candidates, results, strict=True):
        if isinstance(result, RankTrace) and result.rank is None:
            evidence.skipped.append(f"{candidate.path}: is a dump without a rank in its name; rename it to rank_N")
        elif isinstance(result, RankTrace):
            (comms_files if result.source == "comms" else dumps)[result.rank or 0].append(result)
    _refuse_several_jobs(dumps)
    _refuse_several_jobs(comms_files)
    # A rank without calls may have ended before others began to record.
    made_calls = [one for one in chain(*comms_files.values()) if one.span is not None and len(one)]
    evidence.notes += several_runs([facts_of(one)._replace(clock="") for one in made_calls])
    last_dump, last_comms = (max(map(_last_time, chain(*one.values())), default=0) for one in (dumps, comms_files))
    # Dumps that end long before the comms files are from a window, not from the end of the job.
    use_comms = not dumps or last_comms > last_dump + NEWER
    alone: list[RankTrace] = []
    for rank in sorted(dumps.keys() | comms_files.keys()):
        comms_files[rank] = _join_moments(comms_files[rank])
        comms = max(comms_files[rank], key=_by_age, default=None)
        kept = sorted((comms_files if use_comms else dumps)[rank], key=_by_age)
        best = kept.pop() if kept else None
        if comms is not None and (best is None or _went_on(best, comms, is_over=is_over)):
            why = "has no dump" if best is None else "made calls after its dump"
            if best is None and comms.filtered and not len(comms):
                evidence.notes.append(f"rank {rank} has no dump, and its comms file has no call between nodes")
            else:
                alone.append(comms)
                evidence.notes.append(f"rank {rank} {why}, so crossrank uses its comms file; {_last_call(comms)}")
        elif best is not None:
            if comms is not None and best is not comms and best.backend == GLOO:
                _complete(best, comms)
            elif comms is not None and best is not comms:
                best.ending.was_ended = comms.ending.reason in CUT_SHORT
                best.ending.went_on = best.ending.reason in ANSWERS and _has_ended_recording(comms)
            evidence.ranks.append(best)
            evidence.skipped += [
                f"{other.path}: skipped; {best.path} of the same rank {rank} is newer" for other in kept
            ]
    for comms in alone:
        _count_as_torch_does(comms, evidence.ranks)
    evidence.ranks += alone
    _find_vanished(evidence.ranks, list(chain(*comms_files.values())))
    _add_seen(evidence, [one for one in results if isinstance(one, Seen)])
    sizes = Counter(one.world_size for one in chain(*comms_files.values()) if one.world_size)
    evidence.world_size = max(sizes, key=lambda size: (sizes[size], size), default=None)
    usable = {None, *(one.rank for one in evidence.ranks)}
    for result in results:
        if isinstance(result, Failure) and (named or result.kind or result.candidate.rank not in usable):
            evidence.skipped.append(result.text)  # otherwise an unrelated file next to the dumps
            if result.candidate.rank not in usable and result.kind:
                evidence.unusable[result.candidate.rank or 0] = result.kind
    return evidence


def _find_vanished(ranks: Sequence[RankTrace], comms_files: Sequence[RankTrace]) -> None:
    """Find the ranks whose processes were killed after they had answered.

    The communication of the first rank that ended failed, so another rank had ended before: one without a last line. A
    launcher or a user ends ranks with communication that works.
    """
    cut_off = {one.rank for one in comms_files if one.ending.unseen}
    open_ones = [one.ending for one in ranks if one.rank in cut_off and one.ending.reason in ANSWERS]
    over = [(one.span[1], one.ending) for one in comms_files if one.ending.ended and one.span is not None]
    if len(open_ones) + len(over) < len(ranks) or len(open_ones) >= len(over):
        return
    _, first = min(over, key=lambda one: one[0])
    for ending in open_ones:
        ending.vanished = first.has_failed and not first.was_terminated


def _add_seen(evidence: Evidence, seen: Sequence[Seen]) -> None:
    """Give each rank what its neighbours saw of it, unless it has answered or ended its recording since."""
    of_rank = {one.rank: one for one in sorted(seen, key=lambda one: (bool(one.frames), one.time_ns))}
    for trace in evidence.ranks:
        found, ending = of_rank.get(trace.rank if trace.rank is not None else -1), trace.ending
        # A rank that was ended from outside has not answered.
        was_ended = ending.reason in CUT_SHORT and max(trace.calls.called, default=0) < (found.time_ns if found else 0)
        if found is not None and (
            was_ended
            or (not (ending.ended or ending.went_on) and (ending.unseen or (ending.taken_at or 0) < found.time_ns))
        ):
            ending.seen = found
            if found.state != "X" and not found.frames:
                ending.stacks = []  # those of an earlier answer
            if found.frames:
                ending.stacks = [OwnStack(thread=MAIN_THREAD, number=found.process, frames=found.frames)]


def read_candidate(candidate: FoundFile, last: int | None = None) -> RankTrace | Failure | Seen:
    """Read one file; runs in a worker. With `last`, read from a dump only the unfinished calls and the `last` calls
    before them. The path in the result is printable."""
    if candidate.kind == SEEN:
        return read_seen(candidate.path) or Failure(candidate, f"{writable(candidate.path)}: cannot be used", "")
    try:
        trace = _read(candidate, last)
    except NoDumpError as error:
        kind = "" if error.unrecognized else "refused_dump" if error.refused else "unreadable_dump"
        return Failure(candidate, writable(str(error)), kind)
    except CrossrankError as error:
        return Failure(candidate, writable(str(error)))
    trace.path, trace.problems = writable(trace.path), list(map(writable, trace.problems))
    return trace


def _read(candidate: FoundFile, last: int | None) -> RankTrace:
    path, kind = candidate.path, candidate.kind
    if candidate.problem:
        raise CrossrankError(f"{path}: {candidate.problem}")
    if kind == COMMS:
        return read_comms(path, candidate.rank, steps=None)
    if kind not in (FLIGHT, ""):
        raise NoDumpError(f"{path}: is {WHAT[kind]}, not a flight-recorder dump", unrecognized=True)
    if not kind and not _looks_like_dump(path):
        text = f"{path}: is not a flight-recorder dump: it is neither a pickle nor JSON"
        raise NoDumpError(text, unrecognized=True)
    return read_flight(path, candidate.rank, last=last)


def failed(candidate: FoundFile, error: CrossrankError) -> RankTrace | Failure | Seen:
    """Return the result for a file that no worker could read."""
    return Failure(candidate, f"{candidate.path}: {error}")


def _looks_like_dump(path: str) -> bool:
    try:
        start = next(read_chunks(path, ReadIssues(path)), b"")[:64].lstrip()
    except OSError:
        return True  # reading it will give the error
    return start[:1] in (b"\x80", b"{") or not start


def _refuse_several_jobs(files: dict[int, list[RankTrace]]) -> None:
    """Raise if several folders have the same ranks: they are several jobs. Two files of one rank may be two dumps."""
    folders: dict[str, set[int]] = defaultdict(set)
    for rank, traces in files.items():
        for one in traces:
            folders[one.path.rpartition("/")[0]].add(rank)
    for folder, other in combinations(sorted(folders), 2):
        if len(both := folders[folder] & folders[other]) > 1:
            raise CrossrankError(
                f"{folder} and {other} both have dumps of {rank_text(both)}: "
                f"{len(folders)} folders, probably of several jobs; name the folder of one job"
            )


def _last_time(trace: RankTrace) -> int:
    # Only calls count: a comms file may continue without any.
    taken_at = trace.ending.taken_at if trace.source == "flight" else None
    return max(taken_at or 0, *(int(np.asarray(one).max(initial=0)) for one in (trace.calls.called, trace.calls.ended)))


def _by_age(trace: RankTrace) -> tuple[int, str]:
    return _last_time(trace), trace.path


def _has_ended_recording(comms: RankTrace) -> bool:
    """Return whether a rank ended its recording itself, without an exception."""
    ending = comms.ending
    return ending.ended and ending.reason in ("exit", "disable") and ending.error is None


def _went_on(dump: RankTrace, comms: RankTrace, *, is_over: bool) -> bool:
    """Return whether a rank made calls after its dump, and ended before it wrote the next one. `is_over`: a rank of the
    job has ended."""
    taken_at, calls = dump.ending.taken_at, comms.calls
    if comms is dump or taken_at is None or comms.filtered:
        return False
    # On gloo, hosts wait for their calls: a thread that made another one has left the wait that the dump shows.
    waiting = {one.number for one in dump.ending.waits or () if one.number} or {*dump.ending.callers.values()}
    later = np.flatnonzero(np.asarray(calls.called) > taken_at + SAME_TIME)
    if dump.backend == GLOO and waiting and waiting <= set(np.asarray(calls.thread)[later].tolist()):
        return True
    # While the job runs, or a thread waits, an answer shows what a rank does that makes more calls, until it is old.
    activity = dump.ending.activity
    counts = activity is not None and not comms.ending.ended and (bool(activity.held) or not is_over)
    return max(calls.called, default=0) > taken_at + (NEWER if counts else SAME_TIME)


# --- a dump and a comms file of one rank ------------------------------------------------------------------------------


def _join_moments(files: list[RankTrace]) -> list[RankTrace]:
    """Return the comms files of a rank with the state from its dumps without entries of torch: the calls of such a dump
    are the end of a comms file."""
    moments = sorted((one for one in files if one.dump.has_no_entries), key=_by_age)
    comms = max((one for one in files if not one.dump.has_no_entries), key=_by_age, default=None)
    if not moments or comms is None:
        return files
    last = moments[-1]
    made = comms.calls.id[-1] if len(comms) else -1
    if last.calls.id[-1] > made:  # the process was killed before it wrote them to the comms file
        return [one for one in files if one is not comms]
    if last.calls.id[-1] == made:
        last.ending.ended = comms.ending.ended
        _add_exceptions(last.ending, comms.ending)
        comms.ending = last.ending
    return [one for one in files if not one.dump.has_no_entries]


def _add_exceptions(ending: Ending, other: Ending) -> None:
    """Add the exceptions of another file of the rank to those that one file has. A process that is aborted ends neither
    file with certainty."""
    if ending.error is None:
        ending.error, ending.traceback, ending.causes = other.error, other.traceback, other.causes
    ending.of_threads = ending.of_threads or other.of_threads


def _complete(dump: RankTrace, comms: RankTrace) -> None:
    """Add to a dump what torch's recorder lacks on gloo, from the rank's comms file: members of groups, sends and
    receives."""
    ranks_of = {one.group.pg: one.group.ranks for one in comms.groups}
    for index, one in enumerate(dump.groups):
        if one.group.ranks is None:
            known = msgspec.structs.replace(one.group, ranks=ranks_of.get(one.group.pg))
            dump.groups[index] = msgspec.structs.replace(one, group=known)
    dump.host = dump.host or comms.host
    dump.world_size = dump.world_size or comms.world_size
    ending, other = dump.ending, comms.ending
    _add_exceptions(ending, other)
    ending.went_on = ending.reason in ANSWERS and (other.has_left or _has_ended_recording(comms))
    has_p2p = any(map(is_p2p, dump.signatures))
    builder, before = TraceBuilder(dump), len(dump)
    counts: Counter[tuple[str, str]] = Counter()
    for row, record in enumerate(comms.records()):
        p2p = is_p2p(record)
        if not (p2p and not has_p2p) and record.c10d not in UNRECORDED:
            continue
        apart = "" if p2p else record.c10d
        counts[record.pg, apart] += 1
        if apart:
            record = msgspec.structs.replace(record, seq=counts[record.pg, apart])
        group = builder.define(comms.groups[comms.calls.group[row]].group, apart)
        place = builder.add(record, called=record.t, state=comms.calls.state[row], group=group)
        if row in comms.unawaited:
            dump.unawaited.add(place)
    if len(dump) > before:
        dump.numbered_pairs = dump.numbered_pairs or not has_p2p
        sort_by_time(dump)


def _count_as_torch_does(comms: RankTrace, others: Sequence[RankTrace]) -> None:
    """Give the collectives of a comms file torch's numbers, from the dumps of other ranks, to compare both."""
    comms.comparable = False
    comms.calls = replace(comms.calls, number=comms.calls.number[:])  # other readers share these
    shifts: list[int] = []
    for one in comms.groups:
        froms = [other.dump.recorded_from for other in others]
        before = Counter(counts[one.group.pg] for counts in froms if one.group.pg in counts)
        shifts.append(max(before, key=lambda count: (before[count], -count), default=0))
    for row, (group, signature) in enumerate(zip(comms.calls.group, comms.calls.signature, strict=True)):
        if not is_p2p(comms.signatures[signature]):
            comms.calls.number[row] += shifts[group]


def _last_call(comms: RankTrace) -> str:
    """Return a text on the last call in a comms file, for a rank without a dump."""
    if not len(comms):
        return "its comms file has no call"
    call = comms.record(len(comms) - 1)
    group = comms.groups[comms.calls.group[-1]].group
    frames = stack_of(call)
    where = f" at {frames[0].filename}:{frames[0].line}" if frames else ""
    name = group_text([group.pg, group.desc])
    return f"the last call in its comms file is {call_text(call.op, comms.calls.number[-1])} on {name}{where}"


# --- only the last calls, for thousands of ranks ---------------------------------------------------------------------


def _last_calls(
    candidates: Sequence[FoundFile], fleet: Fleet, last: int
) -> tuple[Sequence[FoundFile], list[RankTrace | Failure | Seen]]:
    """Read from dumps only the unfinished calls and the `last` calls before them, and only the comms files that have
    more. Return (files that were read, their content).

    Unfinished calls show the waits, and the calls before them show which call was due. Another rank may still be in a
    collective that this rank left long ago, such as a broadcast from this rank. If a rank is in an earlier collective
    than those that were read, the dumps of its group are read completely.
    """
    dumps = [one for one in candidates if one.kind != COMMS]
    found = map_ranks(partial(read_candidate, last=last), dumps, fleet, failed=failed)
    earlier = _began_too_late([one for one in found if isinstance(one, RankTrace)])
    again = [place for place, one in enumerate(found) if id(one) in earlier]
    whole = map_ranks(read_candidate, [dumps[place] for place in again], fleet, failed=failed)
    for place, one in zip(again, whole, strict=True):
        found[place] = one
    comms = [one for one in candidates if one.kind == COMMS]
    told = _covered_by_dumps(comms, _taken_at(found), fleet)
    comms = [one for one in comms if one.path not in told]
    return [*dumps, *comms], found + map_ranks(read_candidate, comms, fleet, failed=failed)


def _taken_at(found: Sequence[RankTrace | Failure | Seen]) -> dict[int | None, int]:
    """Return rank -> time of its dump, for crossrank's dumps that are as new as the newest. Excludes gloo, whose dumps
    do not show enough of sends and receives."""
    dumps = [one for one in found if isinstance(one, RankTrace) and one.backend not in ("", GLOO)]
    taken = {one.rank: one.ending.taken_at for one in dumps if one.ending.taken_at is not None}
    newest = max(taken.values(), default=0)
    return {rank: at for rank, at in taken.items() if newest - at < NEWER}


def _covered_by_dumps(comms: Sequence[FoundFile], taken: Mapping[int | None, int], fleet: Fleet) -> set[str]:
    """Return the paths of comms files without calls after their rank's dump. Empty if a comms file has calls after all
    dumps, because then the dumps are not from the end of the job."""
    beside = [one for one in comms if one.rank in taken and not one.problem]
    latest = max(taken.values(), default=0) + NEWER
    told = set()
    for one, at in zip(beside, map_ranks(_last_call_at, beside, fleet), strict=True):
        if at is None or at > latest:
            return set()
        if at <= taken[one.rank] + SAME_TIME:
            told.add(one.path)
    return told


def _last_call_at(file: FoundFile) -> int | None:
    """Return the time of the last call in a comms file; runs in a worker."""
    try:
        return last_call_at(file.path)
    except OSError:
        return None


def _began_too_late(traces: Sequence[RankTrace]) -> set[int]:
    """Return the `id()` of incompletely read traces that start after a call that is unfinished on another rank."""
    members = Members()
    needed: dict[tuple[str, int], int] = {}
    begins: list[tuple[RankTrace, tuple[str, int], int]] = []
    for trace in traces:
        is_collective = ~np.fromiter(map(is_p2p, trace.signatures), bool, len(trace.signatures))
        calls = trace.calls
        rows = np.flatnonzero(is_collective[np.asarray(calls.signature)] & (np.asarray(calls.number) > 0))
        groups, numbers, states = (np.asarray(one)[rows] for one in (calls.group, calls.number, calls.state))
        for index in np.unique(groups):
            own, is_open = numbers[groups == index], states[groups == index] < RETIRED
            group = trace.groups[index].group
            key = group.pg, id(members.of(group))
            waits_in = int(own[is_open].min()) if is_open.any() else int(own.max()) + 1
            needed[key] = min(waits_in, needed.get(key, waits_in))
            if trace.dump.left_out:
                begins.append((trace, key, int(own.min())))
    return {id(trace) for trace, key, first in begins if first > needed[key]}
