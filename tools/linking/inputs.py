"""Which files belong together: the execution trace, the Kineto trace and the comms file of each rank and window.

In a recording of ours the names say it. Among other people's files the content tells an execution trace from a
Kineto trace, and the rank is read from the name (`rank-3`, `rank3`, `worker3`, `et_3`), or from what Kineto says.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError
from crossrank.recording import (
    COMMS,
    EXECUTION_TRACE,
    KINETO,
    Damage,
    Listing,
    is_url,
    list_recording,
    rank_of,
    read_chunks,
)

_HEAD = 1 << 16
_RANK_IN_NAME = (
    re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"worker[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:et|trace|kineto|host|device)[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[^\d])(\d+)(?=\.|$)"),
)
_RANK_IN_KINETO = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,18})')
_SUFFIXES = (".json", ".json.gz", ".json.zst", ".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class RankInput:
    """The files of one rank and window."""

    rank: int | None
    window: int
    et: str
    kineto: str
    comms: str | None = None
    linked: str | None = None
    """A linked trace, which takes the place of the others."""


@dataclass(frozen=True)
class Problem:
    """What cannot be linked."""

    rank: int | None
    """None where it is not known."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What can be linked, and what cannot."""

    pairs: list[RankInput]
    problems: list[Problem]


def find_inputs(paths: Sequence[str], ranks: Collection[int] | None = None) -> Inputs:
    """The pairs among `paths`: one folder, or the two files of one rank in either order.

    Only `ranks` are looked for, where they are given. Raises `CrossrankError` where there is nothing to link.
    """
    if len(paths) == 2:
        if ranks is not None:
            raise CrossrankError("--ranks chooses from a folder; two files are one rank")
        return Inputs(pairs=[_two_files(paths[0], paths[1])], problems=[])
    listing = list_recording(paths[0])
    if not is_url(paths[0]) and os.path.isfile(paths[0]):
        raise CrossrankError(f"{paths[0]} is one file; name its other half beside it, or the folder of both")
    inputs = _of_recording(listing) if _has_traces(listing) else _of_folder(listing)
    if ranks is not None:
        told = {problem.rank for problem in inputs.problems} | {pair.rank for pair in inputs.pairs}
        lacking = [
            Problem(rank, f"rank {rank} has no pair of traces in {paths[0]}") for rank in sorted(set(ranks) - told)
        ]
        inputs = Inputs(
            pairs=[pair for pair in inputs.pairs if pair.rank in ranks],
            problems=lacking + [p for p in inputs.problems if p.rank is None or p.rank in ranks],
        )
    if not inputs.pairs:
        raise CrossrankError(
            f"{paths[0]}: no execution trace with its Kineto trace in it"
            + "".join(f"; {problem.text}" for problem in inputs.problems[:4])
            + "; record a window (TRACING_WINDOW=START:STOP), or name the two files of a rank"
        )
    return inputs


def _has_traces(listing: Listing) -> bool:
    return bool(listing.of_kind(EXECUTION_TRACE) or listing.of_kind(KINETO))


def _of_recording(listing: Listing) -> Inputs:
    paths: dict[tuple[int, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in listing.files:
        paths[file.rank, file.window][file.kind].append(file.path)
    pairs: list[RankInput] = []
    problems: list[Problem] = []
    for (rank, window), kinds in sorted(paths.items()):
        ets, kinetos = sorted(kinds[EXECUTION_TRACE]), sorted(kinds[KINETO])
        if len(ets) == len(kinetos) == 1:
            comms = next(iter(sorted(paths[rank, 1][COMMS])), None) if (rank, 1) in paths else None
            pairs.append(RankInput(rank=rank, window=window, et=ets[0], kineto=kinetos[0], comms=comms))
        elif ets or kinetos:
            problems.append(_no_pair(rank, f"rank {rank}{_in_window(window)}", ets, kinetos))
    for name in listing.torn:
        if f".{EXECUTION_TRACE}." in name or f".{KINETO}." in name:
            problems.append(Problem(rank_of(name), f"{name} was cut off while it was written"))
    return Inputs(pairs=pairs, problems=problems)


def _no_pair(rank: int | None, who: str, ets: list[str], kinetos: list[str]) -> Problem:
    if not ets or not kinetos:
        lacks = "Kineto trace" if ets else "execution trace"
        return Problem(rank, f"{who}: no {lacks} beside {(ets + kinetos)[0]}")
    names = ", ".join(PurePosixPath(path).name for path in (ets + kinetos)[:4])
    return Problem(
        rank,
        f"{who}: {len(ets)} execution traces and {len(kinetos)} Kineto traces ({names}); name the two files to link",
    )


def _in_window(window: int) -> str:
    return "" if window == 1 else f", window {window}"


def _of_folder(listing: Listing) -> Inputs:
    """Other people's files: told apart by content, paired by rank."""
    by_rank: dict[int | None, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    problems: list[Problem] = []
    for name in listing.foreign:
        if not name.endswith(_SUFFIXES):
            continue
        path = f"{listing.path.rstrip('/')}/{name}"
        try:
            kind, rank = _look(path)
        except CrossrankError as error:
            problems.append(Problem(None, str(error)))
            continue
        if kind is not None:
            by_rank[rank][kind].append(path)
    pairs = []
    if len(by_rank) == 2 and None in by_rank:  # one pair of which only one file says its rank
        unnamed, (other,) = by_rank.pop(None), by_rank.values()
        for kind, paths in unnamed.items():
            other[kind] += paths
    for rank, kinds in sorted(by_rank.items(), key=lambda item: (item[0] is None, item[0] or 0)):
        ets, kinetos = kinds[EXECUTION_TRACE], kinds[KINETO]
        if len(ets) == len(kinetos) == 1:
            pairs.append(RankInput(rank=rank, window=1, et=ets[0], kineto=kinetos[0]))
        else:
            problems.append(_no_pair(rank, _rank_text(rank), ets, kinetos))
    return Inputs(pairs=pairs, problems=problems)


def _rank_text(rank: int | None) -> str:
    return f"rank {rank}" if rank is not None else "files without a rank in their names"


def _two_files(first: str, second: str) -> RankInput:
    kinds = {path: _look(path) for path in (first, second)}
    by_kind = {kind: path for path, (kind, _) in kinds.items()}
    if EXECUTION_TRACE not in by_kind or KINETO not in by_kind:
        told = ", ".join(f"{path} is {_KINDS[kind]}" for path, (kind, _) in kinds.items())
        raise CrossrankError(f"need one execution trace and one Kineto trace, but {told}")
    rank = next((rank for _, rank in kinds.values() if rank is not None), None)
    return RankInput(rank=rank, window=1, et=by_kind[EXECUTION_TRACE], kineto=by_kind[KINETO])


_KINDS = {EXECUTION_TRACE: "an execution trace", KINETO: "a Kineto trace", None: "neither"}


def _look(path: str) -> tuple[str | None, int | None]:
    """(kind, rank) of a file by its first bytes and its name."""
    damage = Damage(path)
    head = b""
    for chunk in read_chunks(path, damage):
        head += chunk
        if len(head) >= _HEAD:
            break
    if not head.strip():
        reason = damage.problems[0] if damage.problems else "it is empty"
        raise CrossrankError(f"{path}: cannot be linked, {reason}; remove it or record it anew")
    head = head[:_HEAD]
    kind = None
    if b'"metadata":{"crossrank"' in head:
        kind = None  # a timeline of ours
    elif b'"traceEvents"' in head or (head.lstrip()[:1] == b"[" and b'"ph"' in head):
        kind = KINETO
    elif b'"nodes"' in head and (b'"schema"' in head or b'"ctrl_deps"' in head or b'"rf_id"' in head):
        kind = EXECUTION_TRACE
    return kind, rank_said(PurePosixPath(path).name, head)


def rank_said(name: str, head: bytes) -> int | None:
    """The rank of somebody's trace by the name of the file, or by what Kineto says at its beginning.

    >>> rank_said("worker3.pt.trace.json.gz", b""), rank_said("7.json", b""), rank_said("trace.json", b"")
    (3, 7, None)
    """
    rank = next((int(match[1]) for pattern in _RANK_IN_NAME if (match := pattern.search(name))), None)
    if rank is None and (found := _RANK_IN_KINETO.search(head)):
        rank = int(found[1])
    return rank if rank is None or rank < MOST_RANKS else None
