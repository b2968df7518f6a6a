"""Which files say something about which rank, and reading them, one worker per rank.

Any folder will do: our recordings, `TORCH_FR_DUMP_TEMP_FILE`'s files with host names in them, one folder per node. The
rank is in a file's name, for most dumps do not tell it.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, FLIGHT, Damage, read_chunks
from crossrank.text import rank_ranges, writable
from crossrank.tools.analysis.diagnosis.several_files import complete, count_as_torch_does, last_call
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.comms import read_comms
from crossrank.tools.traces.discover import WHAT, FoundFile, discover
from crossrank.tools.traces.flight_calls import SAME_TIME, read_flight
from crossrank.tools.traces.flight_recorder import NoDumpError
from crossrank.tools.traces.rank_trace import RankTrace

_NEWER = 5_000_000_000
"""ns by which a comms file must go on after every dump of its recording to say more than they do."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A file that may hold evidence."""

    path: str
    rank: int | None
    kind: str
    size: int = 0
    problem: str = ""
    """Why it cannot even be opened."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A file that could not be used."""

    candidate: Candidate
    text: str
    refused: bool = False
    foreign: bool = False
    """It never was a dump."""


@dataclass
class Evidence:
    """What was found at a path."""

    ranks: list[RankTrace] = field(default_factory=list)
    unusable: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rank -> (`unreadable_dump` or `refused_dump`, why)"""
    skipped: list[str] = field(default_factory=list)
    """Files that were not used, and why."""
    notes: list[str] = field(default_factory=list)
    """What else the files say."""
    world_size: int | None = None
    """What most comms files say, those of ranks without a dump included."""


def find_candidates(paths: Iterable[str], files: Sequence[FoundFile] | None = None) -> list[Candidate]:
    """Every file at `paths`, folders with all below them, that is a dump or a comms file or may be a broken one, and of
    other kinds what is named itself. `files` are those there, where that is known already."""
    named = list(paths)
    return [
        Candidate(path=file.path, rank=file.rank, kind=file.kind, size=file.size, problem=_problem(file))
        for file in (discover(named) if files is None else files)
        if (file.kind in (FLIGHT, COMMS, "") and not file.torn) or file.path in named
    ]


def _problem(file: FoundFile) -> str:
    """A file without a kind is read all the same: what is wrong with a dump, reading it says best."""
    return "" if file.problem and not file.kind and os.path.isfile(file.path) else file.problem


def read_evidence(
    candidates: list[Candidate], fleet: Fleet, done: Callable[[], None] = lambda: None, *, named: bool = False
) -> Evidence:
    """Read all `candidates` with `fleet`. `named`: the user named each file, so none may be foreign."""
    results = map_ranks(read_candidate, candidates, fleet, failed=failed, done=done)
    return put_together(candidates, results, named=named)


def put_together(
    candidates: Sequence[Candidate], results: Sequence[RankTrace | Failure], *, named: bool = False
) -> Evidence:
    """What the files together say of each rank: the best of several, completed by others."""
    evidence = Evidence()
    by_rank: dict[int, dict[str, list[RankTrace]]] = defaultdict(lambda: {"flight": [], "comms": []})
    failures: list[Failure] = []
    for candidate, result in zip(candidates, results, strict=True):
        if isinstance(result, Failure):
            failures.append(result)
        elif result.rank is None:
            evidence.skipped.append(f"{candidate.path}: is a dump, but its name has no rank; rename it to rank_N")
        else:
            by_rank[result.rank][result.source].append(result)
    _refuse_several_jobs(by_rank)
    use_comms = _comms_say_more(by_rank)
    alone: list[RankTrace] = []
    for rank, sources in sorted(by_rank.items()):
        kept = sources["comms" if use_comms else "flight"]
        comms = max(sources["comms"], key=lambda one: (_last_time(one), one.path), default=None)
        if not kept:
            if comms is not None and comms.filtered and not len(comms.calls):
                evidence.notes.append(f"rank {rank} left no dump, and no call of its comms file left its node")
            elif comms is not None:
                alone.append(comms)
                evidence.notes.append(f"rank {rank} left no dump, its comms file is used; {last_call(comms)}")
            continue
        best = max(kept, key=lambda one: (_last_time(one), one.path))
        if comms is not None and _went_on(best, comms):
            alone.append(comms)
            evidence.notes.append(f"rank {rank} went on after its dump, its comms file is used; {last_call(comms)}")
            continue
        if comms is not None and best is not comms and best.backend == "gloo":
            complete(best, comms)
        evidence.ranks.append(best)
        evidence.skipped += [
            f"{other.path}: is older than {best.path}, of the same rank {rank}, and was left out"
            for other in kept
            if other is not best
        ]
    for comms in alone:
        count_as_torch_does(comms, evidence.ranks)
    evidence.ranks += alone
    sizes = Counter(one.world_size for sources in by_rank.values() for one in sources["comms"] if one.world_size)
    evidence.world_size = max(sizes, key=lambda size: (sizes[size], size), default=None)
    usable = {one.rank for one in evidence.ranks}
    for failure in failures:
        rank_or_none = failure.candidate.rank
        if failure.foreign and not named and (rank_or_none is None or rank_or_none in usable):
            continue  # a log, a note, somebody's JSON beside the dumps
        evidence.skipped.append(failure.text)
        if rank_or_none is not None and rank_or_none not in usable and not failure.foreign:
            kind = "refused_dump" if failure.refused else "unreadable_dump"
            evidence.unusable[rank_or_none] = (kind, failure.text)
    return evidence


def read_candidate(candidate: Candidate) -> RankTrace | Failure:
    """Runs in a worker: one file into evidence, with a path that can be written to any output."""
    result = _read_candidate(candidate)
    if isinstance(result, RankTrace):
        result.path = writable(result.path)
        result.problems = list(map(writable, result.problems))
        return result
    return replace(result, text=writable(result.text))


def _read_candidate(candidate: Candidate) -> RankTrace | Failure:
    if candidate.problem:
        return Failure(candidate=candidate, text=f"{candidate.path}: {candidate.problem}")
    if candidate.kind == COMMS:
        try:
            return read_comms(candidate.path, candidate.rank)
        except CrossrankError as error:
            return Failure(candidate=candidate, text=str(error))
    if candidate.kind not in (FLIGHT, ""):
        text = f"{candidate.path}: is {WHAT[candidate.kind]}, no flight-recorder dump"
        return Failure(candidate=candidate, text=text, foreign=True)
    if candidate.kind != FLIGHT and not _looks_like_dump(candidate.path):
        text = f"{candidate.path}: is no flight-recorder dump: it starts neither as a pickle nor as JSON"
        return Failure(candidate=candidate, text=text, foreign=True)
    try:
        # A dump is tens of thousands of small containers without a circle among them: looking for one takes longer
        # than reading the dump.
        with _without_collector():
            return read_flight(candidate.path, candidate.rank)
    except NoDumpError as error:
        return Failure(candidate=candidate, text=str(error), refused=error.refused, foreign=error.foreign)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Leaves the garbage collector as it was found."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def failed(candidate: Candidate, error: CrossrankError) -> RankTrace | Failure:
    """What stands for a file that no worker could read."""
    return Failure(candidate=candidate, text=f"{candidate.path}: {error}")


def _looks_like_dump(path: str) -> bool:
    try:
        start = next(read_chunks(path, Damage(path)), b"")[:64].lstrip()
    except OSError:
        return True  # what it is, reading it will say
    return start[:1] in (b"\x80", b"{") or not start


def _refuse_several_jobs(by_rank: dict[int, dict[str, list[RankTrace]]]) -> None:
    """Two files of one rank may be an early and a late dump; several folders with the same ranks are several jobs."""
    for source in ("flight", "comms"):
        folders: dict[str, set[int]] = defaultdict(set)
        for rank, sources in by_rank.items():
            for one in sources[source]:
                folders[one.path.rpartition("/")[0]].add(rank)
        for folder, ranks in folders.items():
            for other, others in folders.items():
                if folder < other and len(ranks & others) > 1:
                    raise CrossrankError(
                        f"{folder} and {other} both hold dumps of rank {rank_ranges(sorted(ranks & others))}: "
                        f"{len(folders)} folders, most likely of several jobs; name the folder of one"
                    )


def _last_time(evidence: RankTrace) -> int:
    calls = evidence.calls
    # That a comms file goes on is no news where no call is in what follows.
    taken_at = evidence.ending.taken_at if evidence.source == "flight" else None
    return max(taken_at or 0, max(calls.called, default=0), max(calls.ended, default=0))


def _went_on(dump: RankTrace, comms: RankTrace) -> bool:
    """Whether a rank made calls after a dump that it wrote when it seemed to hang, and died before the next."""
    if comms is dump or dump.ending.taken_at is None or comms.filtered:
        return False
    return max(comms.calls.called, default=0) > dump.ending.taken_at + SAME_TIME


def _comms_say_more(by_rank: dict[int, dict[str, list[RankTrace]]]) -> bool:
    """Whether the comms files go on after the last dump, which was then of a window and not of the end."""
    dumps = [_last_time(one) for sources in by_rank.values() for one in sources["flight"]]
    comms = [_last_time(one) for sources in by_rank.values() for one in sources["comms"]]
    return bool(comms) and (not dumps or max(comms) > max(dumps) + _NEWER)
