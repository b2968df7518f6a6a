"""Who sends how much to whom, as far as it is recorded: point-to-point calls and uneven all_to_alls exactly, other
collectives by the algorithm that moves the least over a ring.

NCCL chooses rings, trees and others by size and topology and does not say which; the sum of what a rank sends is the
same for all that are bandwidth-optimal, to whom it goes is not. With n members and S of nccl-tests:

* all_reduce: 2 (n - 1) / n S, all_gather and reduce_scatter: (n - 1) / n S, from each member to the next of the group;
* broadcast: S from each member to the next, from the root on, but for the last; reduce: the other way round;
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

_EACH = 64
"""Ranks up to which each has a row of its own."""
_MOST = 128
"""Rows of the map."""

Places = Sequence[int] | Ints


class Traffic(msgspec.Struct, kw_only=True):
    """Rows send to columns."""

    what: str
    """What a row is: `rank`, `node`, or so many ranks."""
    labels: list[str]
    bytes: list[list[int]]
    """Over all calls recorded."""
    total: int
    modelled: int
    """Of them: those of collectives, which were not seen on their way but go as on a ring."""
    between_nodes: int | None
    """Bytes that go from one node to another; None where nodes are not known."""
    not_placed: int
    """S of the calls of which it is not known who sends to whom."""
    reasons: list[str]
    """Why."""


def _others(place: int, n: int) -> Ints:
    return np.delete(np.arange(n), place)


# operation -> (place, members, place of the root, S) -> what the member sends: to which places, how much to each
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
    """The map of a job, of at most 128 rows."""
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
        total=round(float(matrix.sum())),
        modelled=round(modelled),
        between_nodes=round(between) if nodes is not None else None,
        not_placed=lost.total(),
        reasons=list(lost),
    )


def _sent(found: JobTables, lost: Counter[str]) -> Iterator[tuple[int, Places, float, bool]]:
    """(from, to, bytes to each, whether that is a model) over all calls; `lost` gets the S of those of which it is not
    known, by reason."""
    ranks, world = found.job.ranks, range(len(found.job.world))
    # Calls of one kind on one rank send the same: each combination is looked at once.
    for rank, number, count in found.calls.group_by("rank", "kind").len().sort("rank", "kind").iter_rows():
        kind = found.kinds[number]
        if kind.ends is None:
            sent = _of_collective(kind, found.job.groups[kind.group], rank, len(world))
            if isinstance(sent, str):
                lost[sent] += kind.bytes * count
            elif sent[1]:
                yield rank, sent[0], sent[1] * count, True
        # A receive counts where its sender left no file.
        elif (kind.op == "send" or kind.ends[0] not in ranks) and all(end in world for end in kind.ends):
            yield kind.ends[0], [kind.ends[1]], kind.bytes * count, False
    if found.not_placed:
        lost["batches and uneven all_to_alls with unknown receivers"] += found.not_placed
    for rank, sent_to in found.sent.items():
        yield from ((rank, [to], size, False) for to, size in sent_to.items() if to in world)


def _of_collective(kind: CallKind, group: ProcessGroup, rank: int, world: int) -> str | tuple[Places, float]:
    """What a rank sends in a call, (to, bytes to each), or why that is not known."""
    n = len(group.members)
    if kind.exchanged >= 0 or n < 2 or not kind.bytes:
        return [], 0.0  # batches and uneven all_to_alls stand in `sent`
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
    """(names of the nodes, number of the node of each rank); None where some rank's is not known."""
    node_of = {rank: one.node for rank, one in ranks.items() if one.node}
    if len(node_of) < world:
        return None
    names = list(dict.fromkeys(node_of[rank] for rank in range(world)))
    return names, np.array([names.index(node_of[rank]) for rank in range(world)], np.int64)


def _rows(world: int, nodes: tuple[list[str], Ints] | None) -> tuple[Ints, list[str], str]:
    """(row of each rank, names of the rows, what a row is)."""
    if world <= _EACH:
        return np.arange(world), [f"rank {rank}" for rank in range(world)], "rank"
    if nodes is not None and len(nodes[0]) <= _MOST:
        members = [rank_ranges(np.flatnonzero(nodes[1] == number).tolist()) for number in range(len(nodes[0]))]
        labels = [f"{name[:24]} (rank {own})" for name, own in zip(nodes[0], members, strict=True)]
        return nodes[1], labels, "node"
    width = -(-world // _MOST)
    labels = [f"rank {first}-{min(first + width, world) - 1}" for first in range(0, world, width)]
    return np.arange(world) // width, labels, f"{width} ranks"
