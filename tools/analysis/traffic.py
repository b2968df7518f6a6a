"""Who sends how much to whom, as far as calls tell: point-to-point calls and uneven all_to_alls exactly, other
collectives by the algorithm that moves the least over a ring.

NCCL chooses rings, trees and others by size and topology and does not say which; the sum of what a rank sends is the
same for all that are bandwidth-optimal, to whom it goes is not. With n members and S of nccl-tests:

* all_reduce: 2 (n - 1) / n S, all_gather and reduce_scatter: (n - 1) / n S, from each member to the next of the group;
* broadcast: S from each member to the next, from the root on, but for the last; reduce: the other way round;
* gather and scatter: S / n between the root and each member; an even all_to_all: S / n to each other member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossrank.text import rank_ranges
from crossrank.tools.job.collectives import Collectives
from crossrank.tools.job.launches import SEND_RECV
from crossrank.tools.traces.rank_trace import RankTrace

_EACH = 64
"""Ranks up to which each has a row of its own."""
_MOST = 128
"""Rows of the map."""

Ints = NDArray[np.int64]


class Traffic(msgspec.Struct, kw_only=True):
    """Rows send to columns."""

    what: str
    """What a row stands for: `rank`, `node`, or so many ranks."""
    labels: list[str]
    bytes: list[list[int]]
    """Over all calls recorded."""
    total: int
    between_nodes: int | None
    """Bytes that go from one node to another; None where nodes are not known."""
    not_placed: int = 0
    """S of the calls of which it is not known who sends to whom."""
    reasons: list[str] = []
    """Why."""


@dataclass(frozen=True)
class _Sent:
    """What one member of a group sends in one call: bytes to each of some members, by their places."""

    to: Ints
    bytes: float


def _next(place: int, n: int, size: float) -> _Sent:
    return _Sent(np.array([(place + 1) % n]), size)


def _from_root(place: int, n: int, root: int, size: float) -> _Sent:
    last = (place - root) % n == n - 1
    return _Sent(np.array([(place + 1) % n]), 0.0 if last else size)


def _to_root(place: int, n: int, root: int, size: float) -> _Sent:
    return _Sent(np.array([(place - 1) % n]), 0.0 if place == root else size)


def _others(place: int, n: int) -> Ints:
    return np.delete(np.arange(n), place)


# operation -> (place, members, place of the root, S) -> what the member sends
_PATTERNS: dict[str, Callable[[int, int, int, int], _Sent]] = {
    "all_reduce": lambda place, n, root, size: _next(place, n, 2 * (n - 1) / n * size),
    "all_gather": lambda place, n, root, size: _next(place, n, (n - 1) / n * size),
    "reduce_scatter": lambda place, n, root, size: _next(place, n, (n - 1) / n * size),
    "broadcast": lambda place, n, root, size: _from_root(place, n, root, size),
    "reduce": lambda place, n, root, size: _to_root(place, n, root, size),
    "gather": lambda place, n, root, size: _Sent(np.array([root]), 0.0 if place == root else size / n),
    "scatter": lambda place, n, root, size: _Sent(_others(place, n), size / n if place == root else 0.0),
    "all_to_all": lambda place, n, root, size: _Sent(_others(place, n), size / n),
}


def traffic(found: Collectives, ranks: Sequence[RankTrace]) -> Traffic:
    """The map of a job, of at most 128 rows."""
    world = found.world_size
    row_of, labels, what = _rows(world, ranks)
    size = len(labels)
    matrix = np.zeros((size, size))
    node_of = _nodes(world, ranks)
    between = 0.0
    present = set(found.ranks)
    lost: Counter[str] = Counter()

    def add(source: int, targets: Ints, amount: float) -> None:
        nonlocal between
        np.add.at(matrix[row_of[source]], row_of[targets], amount)
        if node_of is not None:
            between += amount * int((node_of[targets] != node_of[source]).sum())

    # Calls of one kind on one rank send the same: each combination is looked at once.
    pairs, counts = np.unique(found.rank * max(len(found.kinds), 1) + found.kind, return_counts=True)
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        rank, number = divmod(pair, max(len(found.kinds), 1))
        kind = found.kinds[number]
        group = found.groups[kind.group]
        if kind.ends is not None:
            sender, receiver = kind.ends
            # A receive counts where its sender left no file.
            if (kind.op == "send" or sender not in present) and 0 <= sender < world and 0 <= receiver < world:
                add(sender, np.array([receiver]), kind.bytes * count)
            continue
        pattern = _PATTERNS.get(kind.op)
        n = len(group.members)
        if kind.op == SEND_RECV or kind.moved >= 0 or n < 2 or not kind.bytes:
            continue  # batches and uneven all_to_alls stand in `sent`
        if pattern is None:
            lost["operations that are not known"] += kind.bytes * count
            continue
        if group.guessed or rank not in group.members or max(group.members) >= world:
            lost["groups whose members are not known"] += kind.bytes * count
            continue
        if kind.root not in group.members and kind.op in ("broadcast", "reduce", "gather", "scatter"):
            lost["calls whose root is not known"] += kind.bytes * count
            continue
        place = group.members.index(rank)
        root = group.members.index(kind.root) if kind.root in group.members else 0
        sent = pattern(place, n, root, kind.bytes)
        if sent.bytes:
            add(rank, np.array(group.members)[sent.to], sent.bytes * count)
    if found.not_placed:
        lost["batches and uneven all_to_alls without known ends"] += found.not_placed
    for rank, sent_to in found.sent.items():
        for to, size in sent_to.items():
            if 0 <= to < world:
                add(rank, np.array([to]), size)
    return Traffic(
        what=what,
        labels=labels,
        bytes=np.rint(matrix).astype(np.int64).tolist(),
        total=round(float(matrix.sum())),
        between_nodes=round(between) if node_of is not None else None,
        not_placed=sum(lost.values()),
        reasons=list(lost),
    )


def _nodes(world: int, ranks: Sequence[RankTrace]) -> Ints | None:
    """Number of the node of each rank; None where some rank's is not known."""
    names = {one.rank: one.node for one in ranks if one.node}
    if len(names) < world or world == 0:
        return None
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(names[rank], len(numbers)) for rank in range(world)], np.int64)


def _rows(world: int, ranks: Sequence[RankTrace]) -> tuple[Ints, list[str], str]:
    """(row of each rank, names of the rows, what a row is)."""
    if world <= _EACH:
        return np.arange(max(world, 1)), [f"rank {rank}" for rank in range(max(world, 1))], "rank"
    nodes = _nodes(world, ranks)
    if nodes is not None and int(nodes.max()) < _MOST:
        names = {int(nodes[one.rank or 0]): one.node for one in ranks}
        members = [np.flatnonzero(nodes == number).tolist() for number in range(int(nodes.max()) + 1)]
        labels = [f"{names[number][:24]} (rank {rank_ranges(own)})" for number, own in enumerate(members)]
        return nodes, labels, "node"
    width = -(-world // _MOST)
    firsts = range(0, world, width)
    labels = [f"rank {first}-{min(first + width, world) - 1}" for first in firsts]
    return np.arange(world) // width, labels, f"{width} ranks"
