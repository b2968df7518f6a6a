"""The contents of a recording, per rank and over all ranks: the numbers of `crossrank inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from crossrank.comm import MOST_RANKS, Group, Locality
from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, KINDS, CommsFile, Header, list_recording
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import FoundFile, files_by_rank, other_jobs


class Tally(msgspec.Struct):
    """Calls and bytes of one kind. Bytes are the sum of S over all calls of all ranks."""

    calls: int
    bytes: int
    cross_node_bytes: int
    """Bytes of calls between nodes."""
    unknown_bytes: int
    """Bytes of calls with unknown locality."""


class CallKey(NamedTuple):
    """The key by which calls are counted."""

    op: str
    api: str
    """`(C++)` if no Python frame made the call; so is `source`."""
    pg: str
    source: str
    locality: Locality
    bytes: int


class RankSummary(msgspec.Struct):
    """The contents of one rank's comms file."""

    rank: int
    path: str
    problems: list[str]
    header: Header | None = None
    groups: list[Group] = []
    calls: Counter[CallKey] = msgspec.field(default_factory=Counter)
    steps: int = 0
    """Steps that ended."""
    timed_steps: int = 0
    """Steps with a recorded start and end: those that ended, without the first one of the recording."""
    finished: bool = False
    """The file has an `end` line."""
    ended_by: str | None = None
    """What ended the process other than a normal exit."""
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    notes: list[str] = []
    """What the file has and this version does not know."""
    blind_spots: set[str] = msgspec.field(default_factory=set)


class Summary(msgspec.Struct):
    """The contents of all ranks together."""

    path: str
    world_size: int | None
    ranks: list[int]
    missing_ranks: list[int]
    nodes: dict[str, list[int]]
    versions: dict[str, str | None]
    emit: str | None
    steps: int
    """Steps that ended, of the rank with most; so is the next."""
    timed_steps: int
    """Steps with a recorded start and end."""
    parts: list[tuple[int, int]]
    """(START, STOP): the recording is a part of a longer one, with the steps START to STOP-1."""
    calls: Tally
    counts: dict[str, int]
    """Sums of the writers' own counts: calls, records, filtered, dropped, unwritten, errors."""
    by_op: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    files: dict[str, dict[str, int]]
    """kind -> number of files and bytes on disk"""
    unfinished_ranks: list[int]
    """Ranks without an `end` line: the process was killed, or still runs."""
    endings: dict[str, list[int]]
    """How ranks ended, if not by a normal exit -> these ranks: `SIGTERM`, `ValueError: …`"""
    mixed: bool
    """The files come from several jobs."""
    cut_off: list[str]
    """Incomplete files: their writing was interrupted."""
    unrecognized: list[str]
    """Files that do not belong to a recording."""
    other_jobs: list[str]
    """Subfolders with recordings of other jobs: `earlier-K`, `spawned-K`."""
    problems: list[str]
    """What could not be read, with the file."""
    warnings: list[str]


def summarise(path: str, files: Sequence[FoundFile], fleet: Fleet) -> Summary:
    """Read the recording at `path`, whose files are `files`. Raises `CrossrankError` if there is none."""
    found = [file for file in files if file.kind == COMMS and not file.left_out]
    comms = [file for file in found if file.rank is not None and not file.problem]
    unusable = [f"{file.path}: {file.problem or 'does not say its rank'}" for file in found if file not in comms]
    if not comms:
        raise CrossrankError(
            f"{path} is not a recording: {_describe_files(path, files)}; give the folder TRACING_DIR (for other "
            "traces and dumps: crossrank bandwidth, timeline, report, link, replay, diagnose)"
        )
    files_by_rank(comms, (COMMS,))  # raises for two files of a rank, whose calls would be counted twice
    return _merge(path, files, map_ranks(summarise_rank, comms, fleet, failed=_failed_rank), unusable)


def _describe_files(path: str, files: Sequence[FoundFile]) -> str:
    """Return what the folder has instead of comms files."""
    folders = list_recording(path).folders
    names = [file.name for file in files]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    found = f"no comms file among {', '.join(names[:3])}{more}" if names else "it has no files"
    return found + (f", but these folders: {', '.join(folders[:5])}" if folders else "")


def summarise_rank(file: FoundFile) -> RankSummary:
    """Read one rank's comms file, as far as it is readable."""
    assert file.rank is not None
    comms = CommsFile(file.path, file.rank)
    calls = Counter(
        CallKey(one.op, one.api or "(C++)", one.pg, one.source or "(C++)", one.locality, one.bytes)
        for one in comms.records()
    )
    problems, header, end = comms.issues.problems, comms.header, comms.end or {}
    if header is not None and not _is_possible(header):
        problems.append(f"has the invalid world size {header.world_size}")
    numbers = {name: value for name, value in end.items() if isinstance(value, int) and name != "step"}
    return RankSummary(
        rank=file.rank,
        path=file.path,
        problems=problems,
        header=header,
        groups=comms.groups,
        calls=calls,
        steps=comms.steps[-1].get("step", 0) if comms.steps else 0,
        timed_steps=max(0, len(comms.steps) - 1),
        finished=comms.end is not None,
        ended_by=_ended_by(end),
        counts=Counter(numbers),
        notes=comms.notes,
        blind_spots={*(header.blind_spots if header else ()), *_list_of(str, end.get("blind_spots"))},
    )


def _is_possible(header: Header) -> bool:
    return 0 < header.world_size <= MOST_RANKS


T = TypeVar("T")


def _list_of(kind: type[T], value: object) -> list[T]:
    """Return the items of type `kind`; empty if `value` is not a list. The fields of a line are unchecked."""
    return [one for one in value if isinstance(one, kind)] if isinstance(value, list) else []


def _ended_by(end: dict[str, Any]) -> str | None:
    for exception in _list_of(dict, end.get("exceptions")):
        return str(exception.get("error"))
    reason = str(end.get("reason", ""))
    if reason == "abort":
        return "TRACING_ON_HANG=abort, because the job hung"
    return reason if reason.startswith("SIG") else None


def _failed_rank(file: FoundFile, error: CrossrankError) -> RankSummary:
    """Return an empty summary, with the error, for a rank whose file could not be read."""
    assert file.rank is not None
    return RankSummary(file.rank, file.path, [str(error).removeprefix(f"{file.path}: ")])


def _tallies(calls: Counter[CallKey], *names: str) -> dict[tuple[str, ...], Tally]:
    """Return calls grouped by some fields of `CallKey`, most bytes first; without names, one tally of all calls."""
    sums = {} if names else {(): [0] * 4}
    for key, count in calls.items():
        size = key.bytes * count
        crossing = size if key.locality in ("cross_node", "nvlink_domain") else 0
        added = (count, size, crossing, size if key.locality == "unknown" else 0)
        group = tuple(getattr(key, name) for name in names)
        sums[group] = list(map(sum, zip(sums.get(group, [0] * 4), added, strict=True)))
    tallies = {group: Tally(*of_group) for group, of_group in sums.items()}
    return dict(sorted(tallies.items(), key=lambda item: (-item[1].bytes, item[0])))


def _table(calls: Counter[CallKey], *names: str) -> list[dict[str, Any]]:
    tallies = _tallies(calls, *names).items()
    return [dict(zip(names, key, strict=True)) | msgspec.to_builtins(tally) for key, tally in tallies]


def _merge(path: str, found: Sequence[FoundFile], ranks: list[RankSummary], problems: list[str]) -> Summary:
    headers = [rank.header for rank in ranks if rank.header is not None]
    world = max((header.world_size for header in headers if _is_possible(header)), default=None)
    present = [rank.rank for rank in ranks if rank.header is not None]
    calls, counts = Counter[CallKey](), Counter[str]()
    for rank in ranks:
        calls.update(rank.calls)
        counts.update(rank.counts)
    files: dict[str, dict[str, int]] = {}
    for file in found:
        if file.kind not in KINDS or file.left_out:
            continue
        entry = files.setdefault(file.kind, {"files": 0, "bytes": 0})
        entry["files"] += 1
        entry["bytes"] += file.size
    return Summary(
        path=path,
        world_size=world,
        ranks=present,
        missing_ranks=sorted(set(range(world or 0)) - set(present)),
        nodes=_ranks_by((header.node, header.rank) for header in headers),
        versions=headers[0].versions if headers else {},
        emit=headers[0].config.get("emit") if headers else None,
        steps=max(rank.steps for rank in ranks),
        timed_steps=max(rank.timed_steps for rank in ranks),
        parts=sorted({header.part for header in headers if header.part is not None}),
        calls=_tallies(calls)[()],
        counts=dict(counts),
        by_op=_table(calls, "op", "api"),
        groups=_groups(ranks),
        sources=_table(calls, "source", "op"),
        files=files,
        unfinished_ranks=[rank.rank for rank in ranks if not rank.finished],
        endings=_ranks_by((rank.ended_by, rank.rank) for rank in ranks if rank.ended_by is not None),
        mixed=len({header.world_size for header in headers}) > 1,
        cut_off=[file.name for file in found if file.partial],
        unrecognized=[file.name for file in found if file.kind not in KINDS and not file.partial],
        other_jobs=other_jobs(path),
        problems=problems + [f"{rank.path}: {problem}" for rank in ranks for problem in rank.problems],
        warnings=_warnings(headers, counts, ranks)
        + [note for rank in ranks for note in rank.notes]
        + [f"{file.path}: {file.problem}" for file in found if file.left_out],
    )


def _ranks_by(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for what, rank in pairs:
        found.setdefault(what, []).append(rank)
    return found


def _groups(ranks: list[RankSummary]) -> list[dict[str, Any]]:
    """Return every group once. Groups with one name and different members are different groups."""
    found: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for rank in ranks:
        of_name: dict[str, dict[str, Any]] = {}
        for group in rank.groups:
            known = {name: getattr(group, name) for name in ("pg", "desc", "backend", "size", "ranks", "locality")}
            members = None if group.ranks is None else tuple(group.ranks)
            entry = found.setdefault((group.pg, members), known | {"calls": 0, "bytes": 0})
            if entry["locality"] == "unknown":
                entry["locality"] = group.locality
            of_name[group.pg] = entry
        for (name,), tally in _tallies(rank.calls, "pg").items():
            if name in of_name:
                of_name[name]["calls"] += tally.calls
                of_name[name]["bytes"] += tally.bytes
    return sorted(found.values(), key=lambda entry: (-entry["size"], entry["ranks"] or [], entry["pg"]))


_LOSSES = {
    "dropped": "calls were dropped because the ring was full; increase TRACING_RING",
    "unwritten": "records were lost because they could not be written to disk",
    "errors": "calls could not be recorded; the log of the job has the first error",
}
"""Counter of a writer -> warning if it is not 0."""


def _warnings(headers: list[Header], counts: Counter[str], ranks: Sequence[RankSummary]) -> list[str]:
    blind_spots = sorted((rank.rank, spot) for rank in ranks for spot in rank.blind_spots)
    warnings = [f"rank {rank}: {spot}" for rank, spot in blind_spots]
    warnings += [f"{counts[name]} {meaning}" for name, meaning in _LOSSES.items() if counts[name]]
    sizes = sorted({header.world_size for header in headers})
    if len(sizes) > 1:
        warnings.append(f"the files come from jobs of different world sizes: {sizes}")
    if len({header.versions.get("torch") for header in headers}) > 1:
        warnings.append("the ranks ran different versions of torch")
    return warnings
