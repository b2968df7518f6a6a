"""Who sends how much to whom."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.comm import CommRecord, Group
from crossrank.tools.analysis.traffic import Traffic, traffic
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import TraceBuilder
from tests.unit.analysis.test_figures import figures_of
from tests.unit.job.ranks import Rank

SIZE = 1_000_000


def map_of(*ranks: Rank) -> Traffic:
    times = [rank.times for rank in ranks]
    return traffic(match_collectives(Job.match(times)))


def job(op: str, size: int = 4, **said: Any) -> Traffic:
    return map_of(*(Rank(rank, size).call(0, 0, op, bytes=SIZE, **said) for rank in range(size)))


def ring(amount: int) -> list[list[int]]:
    return [[amount if to == (at + 1) % 4 else 0 for to in range(4)] for at in range(4)]


@pytest.mark.parametrize(
    ("op", "bytes_of_each"),
    [("all_reduce", 1_500_000), ("all_gather", 750_000), ("reduce_scatter", 750_000)],
)
def test_a_ring_sends_the_bus_factor_to_the_next_rank(op: str, bytes_of_each: int) -> None:
    assert job(op).bytes == ring(bytes_of_each)
    assert job("all_reduce", 2).bytes == [[0, SIZE], [SIZE, 0]]


def test_a_broadcast_ring_starts_and_a_reduce_ring_ends_at_the_root() -> None:
    assert job("broadcast", root=2).bytes == [[0, SIZE, 0, 0], [0, 0, 0, 0], [0, 0, 0, SIZE], [SIZE, 0, 0, 0]]
    assert job("reduce", root=2).bytes == [[0, 0, 0, SIZE], [SIZE, 0, 0, 0], [0, 0, 0, 0], [0, 0, SIZE, 0]]


def test_gather_scatter_and_all_to_all_move_a_part_for_each_member() -> None:
    part = SIZE // 4
    assert job("scatter", root=1).bytes == [[0] * 4, [part, 0, part, part], [0] * 4, [0] * 4]
    assert job("gather", root=1).bytes == [[0, part, 0, 0], [0] * 4, [0, part, 0, 0], [0, part, 0, 0]]
    assert job("all_to_all").bytes == [[0 if at == to else part for to in range(4)] for at in range(4)]


def test_an_uneven_all_to_all_moves_its_split_sizes() -> None:
    ranks = [Rank(0), Rank(1)]
    for rank, splits in zip(ranks, ([1, 3], [5, 5]), strict=True):
        record = CommRecord(
            id=0, op="all_to_all", c10d="", pg="0", bytes=1000 * sum(splits), t=0, in_split=splits, dtype="float32"
        )
        builder = TraceBuilder(rank.times, [Group(pg="0", size=2, ranks=[0, 1])])
        builder.add(record, called=0)
    assert map_of(*ranks).bytes == [[0, 3000], [5000, 0]]


def test_a_send_counts_once_and_a_receive_only_if_its_sender_is_missing() -> None:
    both = map_of(Rank(0).call(0, 0, "send", peer=1), Rank(1).call(0, 0, "recv", peer=0))
    receiver = map_of(Rank(1).call(0, 0, "recv", peer=0))
    sender = map_of(Rank(0).call(0, 0, "send", peer=1))
    assert both.bytes == receiver.bytes == sender.bytes == [[0, SIZE], [0, 0]]


@pytest.mark.parametrize(
    ("op", "said", "reason"),
    [
        ("tree_reduce", {}, "unknown operations"),
        ("broadcast", {}, "calls with an unknown root"),
        ("broadcast", {"root": 9}, "calls with an unknown root"),
        ("all_reduce", {"pg": "of a name that no file explains"}, "groups with unknown members"),
    ],
)
def test_bytes_with_an_unknown_route_are_counted_with_the_reason(op: str, said: dict[str, Any], reason: str) -> None:
    found = job(op, **said)
    assert (found.total, found.not_placed, found.reasons) == (None, 4 * SIZE, [reason])


def test_bytes_between_nodes_are_counted() -> None:
    ranks = [Rank(rank, 4).call(0, 0, "all_reduce", bytes=SIZE) for rank in range(4)]
    assert map_of(*ranks).between_nodes is None
    for rank in ranks:
        rank.times.node = f"node-{(rank.times.rank or 0) // 2}"
    # Two of the four steps of the ring cross.
    assert map_of(*ranks).between_nodes == 3_000_000


def test_many_ranks_are_merged_by_node_or_in_blocks() -> None:
    ranks = [Rank(rank, 256).call(100 + rank, 500, bytes=256) for rank in range(256)]
    found = figures_of(*ranks)
    blocks, waiting = found.traffic, found.waiting
    assert blocks.modelled == blocks.total
    assert (blocks.what, len(blocks.labels), blocks.labels[1]) == ("2 ranks", 128, "rank 2-3")
    assert blocks.bytes[1][1] == blocks.bytes[1][2] == 510
    assert waiting is not None
    # One collective is in one bin, whenever its ranks came to it.
    assert (waiting.rows[1], waiting.bins, waiting.mean_us[1]) == ("rank 2-3", [0.0], [252.5])
    for rank in ranks:
        rank.times.node = f"host-{(rank.times.rank or 0) // 8:02d}"
    nodes = map_of(*ranks)
    assert (nodes.what, len(nodes.labels), nodes.labels[1]) == ("node", 32, "host-01 (rank 8-15)")
    assert nodes.bytes[1][1] == 7 * 510
    assert nodes.total == blocks.total == 256 * 510
