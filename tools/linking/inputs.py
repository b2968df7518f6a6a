"""Which files belong together: the execution trace, the Kineto trace and the comms file of each rank and window.

In a recording of ours the names say it. Among other people's files the content tells an execution trace from a
Kineto trace, and the rank is read from the name (`rank-3`, `rank3`, `worker3`, `et_3`), or from what Kineto says.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from crossrank.errors import CrossrankError
from crossrank.recording import (
    COMMS,
    EXECUTION_TRACE,
    KINETO,
    Damage,
    Listing,
    list_recording,
    read_chunks,
)

_HEAD = 1 << 16
_RANK_IN_NAME = (
    re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"worker[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:et|trace|kineto|host|device)[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[^\d])(\d+)(?=\.|$)"),
)
_RANK_IN_KINETO = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)')
_SUFFIXES = (".json", ".json.gz", ".json.zst", ".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class RankInput:
    """The files of one rank and window."""

    rank: int | None
    window: int
    et: str
    kineto: str
    comms: str | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What can be linked, and what lacks its other half."""

    pairs: list[RankInput]
    problems: list[str]


def find_inputs(paths: Sequence[str], ranks: Collection[int] | None = None) -> Inputs:
    """The pairs among `paths`: one folder, or the two files of one rank in either order.

    Only `ranks` are looked for, where they are given. Raises `CrossrankError` where there is nothing to link.
    """
    if len(paths) == 2:
        return Inputs(pairs=[_two_files(paths[0], paths[1])], problems=[])
    listing = list_recording(paths[0])
    inputs = _of_recording(listing) if _has_traces(listing) else _of_folder(listing)
    if ranks is not None:
        found = {pair.rank for pair in inputs.pairs}
        lacking = [f"rank {rank} has no pair of traces in {paths[0]}" for rank in sorted(set(ranks) - found)]
        pairs = [pair for pair in inputs.pairs if pair.rank in ranks]
        inputs = Inputs(pairs=pairs, problems=lacking)
    if not inputs.pairs:
        raise CrossrankError(
            f"{paths[0]}: no execution trace with its Kineto trace in it"
            + "".join(f"; {problem}" for problem in inputs.problems[:4])
            + "; record a window (TRACING_WINDOW=START:STOP), or name the two files of a rank"
        )
    return inputs


def _has_traces(listing: Listing) -> bool:
    return bool(listing.of_kind(EXECUTION_TRACE) or listing.of_kind(KINETO))


def _of_recording(listing: Listing) -> Inputs:
    paths: dict[str, dict[tuple[int, int], str]] = {kind: {} for kind in (COMMS, EXECUTION_TRACE, KINETO)}
    for file in listing.files:
        if file.kind in paths:
            paths[file.kind].setdefault((file.rank, file.window), file.path)
    pairs, problems = [], []
    for rank, window in sorted({*paths[EXECUTION_TRACE], *paths[KINETO]}):
        et, kineto = paths[EXECUTION_TRACE].get((rank, window)), paths[KINETO].get((rank, window))
        if et is not None and kineto is not None:
            comms = paths[COMMS].get((rank, 1))
            pairs.append(RankInput(rank=rank, window=window, et=et, kineto=kineto, comms=comms))
        else:
            lacks = "Kineto trace" if kineto is None else "execution trace"
            problems.append(f"rank {rank}{_in_window(window)}: no {lacks} beside {et or kineto}")
    problems += [f"{name} was cut off while it was written" for name in listing.torn if not name.endswith(".jsonl")]
    return Inputs(pairs=pairs, problems=problems)


def _in_window(window: int) -> str:
    return "" if window == 1 else f", window {window}"


def _of_folder(listing: Listing) -> Inputs:
    """Other people's files: told apart by content, paired by rank."""
    by_rank: dict[int | None, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    problems = []
    for name in listing.foreign:
        if not name.endswith(_SUFFIXES):
            continue
        path = f"{listing.path.rstrip('/')}/{name}"
        kind, rank = _look(path)
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
        elif ets and kinetos:
            problems.append(
                f"{_rank_text(rank)}: {len(ets)} execution traces and {len(kinetos)} Kineto traces "
                f"({PurePosixPath(ets[0]).name}, …); name the two files to link"
            )
        else:
            lacks = "Kineto trace" if ets else "execution trace"
            problems.append(f"{_rank_text(rank)}: no {lacks} beside {(ets + kinetos)[0]}")
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
    if b'"traceEvents"' in head or (head.lstrip()[:1] == b"[" and b'"ph"' in head):
        kind = KINETO
    elif b'"nodes"' in head and (b'"schema"' in head or b'"ctrl_deps"' in head or b'"rf_id"' in head):
        kind = EXECUTION_TRACE
    name = PurePosixPath(path).name
    rank = next((int(match[1]) for pattern in _RANK_IN_NAME if (match := pattern.search(name))), None)
    if rank is None and (found := _RANK_IN_KINETO.search(head)):
        rank = int(found[1])
    return kind, rank
