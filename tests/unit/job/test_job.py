"""Which groups of different ranks are one, who their members are, and what ranks belong to a job."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.comm import MOST_RANKS, CommRecord, Group
from crossrank.tools.job.job import Job
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder

DEFAULT = Group(pg="0", size=0, desc="default_pg")


def rank(number: int, *groups: Group, calls: tuple[CommRecord, ...] = (), **facts: Any) -> RankTrace:
    trace = RankTrace(rank=number, path=f"rank-{number}", **{"source": "kineto"} | facts)
    builder = TraceBuilder(trace, groups)
    for record in calls:
        builder.add(record, called=1)
    return trace


def call(pg: str, op: str = "all_reduce", **facts: Any) -> CommRecord:
    return CommRecord(**dict[str, Any]({"id": 0, "op": op, "c10d": "", "pg": pg, "bytes": 8, "t": 0, "seq": 1} | facts))


def gathers(pg: str, op: str, inputs: list[list[int]], outputs: list[list[int]]) -> list[CommRecord]:
    return [call(pg, op, inputs=inputs, outputs=outputs)]


def members(job: Job) -> list[tuple[object, ...]]:
    """(name, members, size, whether they are who used it, whether that is a guess) of each group."""
    return [(one.name, one.members, one.size, one.inferred, one.guessed) for one in job.groups]


def pair(pg: str, *ranks: int, **facts: Any) -> Group:
    return Group(pg=pg, size=len(ranks), ranks=list(ranks) or None, **facts)


A, B, C, D, E, F = (f"{number}00000000" for number in range(1, 7))
"""Addresses of groups."""
SHOWN = (
    *gathers("4", "all_gather", [[2, 3]], [[8, 3]]),
    *gathers("4", "all_gather", [[2, 3]], [[10, 3]]),
    *gathers("4", "gather", [[1]], [[2], [2]]),
    *gathers("5", "reduce_scatter", [[4], [4], [4]], [[4]]),
    *gathers("6", "all_gather", [[4]], [[4], [5]]),
    *gathers("7", "all_gather", [[3]], [[7]]),
    *gathers("8", "all_to_all", [[3]], [[6]]),
)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (  # members that another rank knows
            [rank(0, DEFAULT, pair("3", 1, 0)), rank(1, DEFAULT, pair("3")), rank(2, DEFAULT, pair("3", 2, 3))],
            [("0", (0, 1, 2, 3), 4, True, True), ("3", (1, 0), 2, False, False), ("3", (2, 3), 2, False, False)],
        ),
        (  # members of which nothing is known: those who used the name, or have it in their dump
            [
                rank(0, pair("3"), calls=(call("3"),)),
                rank(1, pair("3")),
                rank(2, pair("3"), source="flight"),
                rank(3, Group(pg="4", size=9), calls=(call("4"), call("4"))),
                rank(4, Group(pg="4", size=-1), Group(pg="5", size=1), calls=(call("5"),)),
            ],
            [("3", (0, 2), 2, True, True), ("4", (3,), 9, True, False), ("5", (4,), 1, False, False)],
        ),
        (  # members that are no ranks, or one twice
            [rank(0, pair("3", 0, 0), pair("4", 0, MOST_RANKS), pair("5", -1, 0), calls=(call("3"),))],
            [("3", (0,), 2, True, False), ("4", (), 2, True, False), ("5", (), 2, True, False)],
        ),
        (  # sizes that calls show
            [rank(0, *map(pair, "45678"), calls=SHOWN), rank(3, calls=())],
            [
                *(("4", (0, 1, 2, 3), 4, False, False), ("5", (0,), 3, True, False)),
                *((name, (0,), 1, True, True) for name in "678"),
            ],
        ),
        (  # the world, by name or description
            [rank(0, pair("0"), pair("9", desc="default_pg"), pair("default_pg"), pair("0x", desc="0"), world_size=4)],
            [
                *((name, (0, 1, 2, 3), 4, False, False) for name in ("0", "9", "default_pg")),
                ("0x", (), 0, False, False),
            ],
        ),
        (  # names that are addresses: by members, or size, and order
            [
                rank(0, pair(A, 0, 1), pair(B, 0, 1), Group(pg=D, size=2), Group(pg=F, size=0)),
                rank(1, pair(C, 0, 1), pair(A, 0, 1), Group(pg=E, size=2), world_size=2),
            ],
            [
                ("ranks 0-1", (0, 1), 2, False, False),
                ("ranks 0-1 #2", (0, 1), 2, False, False),
                ("2 ranks", (), 2, True, False),
                (F, (), 0, False, False),
            ],
        ),
    ],
    ids=["elsewhere", "used", "invalid", "shown", "world", "addresses"],
)
def test_groups_are_joined_by_name_and_members(ranks: list[RankTrace], expected: list[tuple[object, ...]]) -> None:
    for given in (ranks, ranks[::-1]):
        assert sorted(members(Job.match(given)), key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize(
    ("ranks", "given", "world", "outside"),
    [
        ([rank(1), rank(3)], None, 4, []),
        ([rank(1), rank(3)], 6, 6, []),
        ([rank(0), rank(1)], 1, 1, ["rank-1: rank 1 is outside the world of 1 ranks; the file was skipped"]),
        ([rank(0, world_size=8)], None, 8, []),
        ([rank(0, pair("3", 0, 9))], None, 10, []),
        ([rank(0, Group(pg="0", size=0), calls=tuple(gathers("0", "all_gather", [[1]], [[5]])))], None, 5, []),
        # One of two does not shut the other out, two of three do.
        ([rank(0, world_size=2), rank(2)], None, 3, []),
        # A world that its own rank is not in is none.
        ([rank(5, world_size=2)], None, 6, []),
        (
            [rank(0, pair("0", 0, 1)), rank(1, world_size=2), rank(2, world_size=3)],
            None,
            2,
            ["rank-2: rank 2 is outside the world of 2 ranks; the file was skipped"],
        ),
    ],
)
def test_the_world_has_every_known_rank(
    ranks: list[RankTrace], given: int | None, world: int, outside: list[str]
) -> None:
    job = Job.match(ranks[::-1], given)
    assert (job.world, job.outside) == (tuple(range(world)), outside)
    there = [one.rank for one in ranks if (one.rank or 0) < world]
    assert (list(job.ranks), job.missing) == (there, [one for one in range(world) if one not in there])


def test_a_lane_has_the_collectives_of_a_rank_in_the_order_of_their_numbers() -> None:
    numbers = (0, 3, 4, 4, 7, 2)
    sends = call("0", "send", p2p_seq=1, peer=0)
    records = (*(call("0", seq=number) for number in numbers), call("1", seq=1), sends, call("1", seq=9))
    job = Job.match([rank(1, DEFAULT, pair("1", 0, 1), calls=records)])
    lane, other = (group.lanes[1] for group in job.groups)
    assert (lane.rows.tolist(), lane.numbers.tolist()) == ([1, 2, 4], [3, 4, 7])
    assert (other.rows.tolist(), other.numbers.tolist()) == ([6, 8], [1, 9])
    assert [lane.row(number) for number in range(2, 9)] == [None, 1, 2, None, None, 4, None]
    assert [one.has_p2p for one in job.groups] == [True, False]
    assert (job.signature(1, 7).op, job.group_at(1, 6).name, job.stack(1, 0)) == ("send", "1", ())
