"""Bytes that each rank sends to each other rank. P2P calls and uneven all_to_alls are exact; other collectives are
modelled by the bandwidth-optimal ring algorithm.

NCCL chooses rings, trees and other algorithms by size and topology, and does not report its choice. All bandwidth-
optimal algorithms send the same number of bytes per rank, but to different ranks. With n members and S of nccl-tests:

* all_reduce: 2 (n - 1) / n S; all_gather and reduce_scatter: (n - 1) / n S; from each member to the next of the group;
* broadcast: S from each member to the next, from the root to the last member; reduce: the reverse;
* gather and scatter: S / n between the root and each member; an even all_to_all: S / n to each other member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from crossrank.text import rank_ranges
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.launches import CallKind
from crossrank.tools.traces.busy import Ints
from crossrank.tools.traces.rank_trace import RankTrace

_MAX_RANK_ROWS = 64
"""Largest job with one row per rank."""
_MAX_ROWS = 128
"""Maximum number of rows."""

Places = Sequence[int] | Ints


class Traffic(msgspec.Struct, kw_only=True):
    """Bytes sent from rows to columns."""

    what: str
    """What a row is: `rank`, `node`, or `N ranks`."""
    labels: list[str]
    bytes: list[list[int]]
    """Sums over all recorded calls."""
    total: int | None
    modelled: int
    """Bytes of collectives in `total`, which are modelled as on a ring."""
    between_nodes: int | None
    """Bytes between different nodes; None if the nodes are unknown."""
    not_placed: int
    """S of calls whose senders and receivers are unknown."""
    reasons: list[str]
    """Why they are unknown."""


def _others(place: int, n: int) -> Ints:
    return np.delete(np.arange(n), place)


# operation -> (index of the member, number of members, index of the root, S) -> (receivers, bytes to each)
_PATTERNS: dict[str, Callable[[int, int, int, int], tuple[Places, float]]] = {
    "all_reduce": lambda place, n, root, size: ([(place + 1) % n], 2 * (n - 1) / n * size),
    "all_gather": lambda place, n, root, size: ([(place + 1) % n], (n - 1) / n * size),
    "reduce_scatter": lambda place, n, root, size: ([(place + 1) % n], (n - 1) / n * size),
    "broadcast": lambda place, n, root, size: ([(place + 1) % n], size if (place - root) % n < n - 1 else 0),
    "reduce": lambda place, n, root, size: ([(place - 1) % n], size if place != root else 0),
    "gather": lambda place, n, root, size: ([root], size / n if place != root else 0),
    "scatter": lambda place, n, root, size: (_others(place, n), size / n if place == root else 0),
    "all_to_all": lambda place, n, root, size: (_others(place, n), size / n),
}
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def traffic(found: JobTables) -> Traffic:
    """Return the traffic of a job, in at most 128 rows."""
    world = len(found.job.world)
    nodes = _nodes(world, found.job.ranks)
    row_of, labels, what = _rows(world, nodes)
    matrix = np.zeros((len(labels), len(labels)))
    between = 0.0
    lost: Counter[str] = Counter()
    modelled = 0.0
    for source, targets, amount, is_modelled in _sent(found, lost):
        np.add.at(matrix[row_of[source]], row_of[targets], amount)
        modelled += amount * len(targets) if is_modelled else 0.0
        if nodes is not None:
            between += amount * int((nodes[1][targets] != nodes[1][source]).sum())
    return Traffic(
        what=what,
        labels=labels,
        bytes=np.rint(matrix).astype(np.int64).tolist(),
        total=round(float(matrix.sum())) or None,
        modelled=round(modelled),
        between_nodes=round(between) if nodes is not None else None,
        not_placed=lost.total(),
        reasons=list(lost),
    )


def _sent(found: JobTables, lost: Counter[str]) -> Iterator[tuple[int, Places, float, bool]]:
    """Yield (sender, receivers, bytes to each, whether that is modelled) over all calls. Adds S of calls with unknown
    senders or receivers to `lost`, by reason."""
    ranks, world = found.job.ranks, range(len(found.job.world))
    # Calls of one kind on one rank send the same bytes.
    for rank, number, count in found.calls.group_by("rank", "kind").len().sort("rank", "kind").iter_rows():
        kind = found.kinds[number]
        if kind.ends is None:
            sent = _sent_in_collective(kind, found.job.groups[kind.group], rank, len(world))
            if isinstance(sent, str):
                lost[sent] += kind.bytes * count
            elif sent[1]:
                yield rank, sent[0], sent[1] * count, True
        # Count a receive if its sender has no file.
        elif (kind.op == "send" or kind.ends[0] not in ranks) and all(end in world for end in kind.ends):
            yield kind.ends[0], [kind.ends[1]], kind.bytes * count, False
    if found.not_placed:
        lost["batches and uneven all_to_alls with unknown receivers"] += found.not_placed
    for rank, sent_to in found.sent.items():
        yield from ((rank, [to], size, False) for to, size in sent_to.items() if to in world)


def _sent_in_collective(kind: CallKind, group: ProcessGroup, rank: int, world: int) -> str | tuple[Places, float]:
    """Return what a rank sends in a call, (receivers, bytes to each), or the reason why that is unknown."""
    n = len(group.members)
    if kind.exchanged >= 0 or n < 2 or not kind.bytes:
        return [], 0.0  # batches and uneven all_to_alls are in `Launches.sent`
    if kind.op not in _PATTERNS:
        return "unknown operations"
    if group.guessed or rank not in group.members or max(group.members) >= world:
        return "groups with unknown members"
    if kind.root not in group.members and kind.op in _ROOTED:
        return "calls with an unknown root"
    root = group.members.index(kind.root) if kind.root in group.members else 0
    places, size = _PATTERNS[kind.op](group.members.index(rank), n, root, kind.bytes)
    return np.array(group.members)[places], size


def _nodes(world: int, ranks: Mapping[int, RankTrace]) -> tuple[list[str], Ints] | None:
    """Return (names of the nodes, index of each rank's node); None if the node of any rank is unknown."""
    node_of = {rank: one.node for rank, one in ranks.items() if one.node}
    if len(node_of) < world:
        return None
    names = list(dict.fromkeys(node_of[rank] for rank in range(world)))
    return names, np.array([names.index(node_of[rank]) for rank in range(world)], np.int64)


def _rows(world: int, nodes: tuple[list[str], Ints] | None) -> tuple[Ints, list[str], str]:
    """Return (row of each rank, names of the rows, what a row is)."""
    if world <= _MAX_RANK_ROWS:
        return np.arange(world), [f"rank {rank}" for rank in range(world)], "rank"
    if nodes is not None and len(nodes[0]) <= _MAX_ROWS:
        members = [rank_ranges(np.flatnonzero(nodes[1] == number).tolist()) for number in range(len(nodes[0]))]
        labels = [f"{name[:24]} (rank {own})" for name, own in zip(nodes[0], members, strict=True)]
        return nodes[1], labels, "node"
    width = -(-world // _MAX_ROWS)
    labels = [f"rank {first}-{min(first + width, world) - 1}" for first in range(0, world, width)]
    return np.arange(world) // width, labels, f"{width} ranks"
