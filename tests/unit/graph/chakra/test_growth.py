"""Dimensions are found from groups, and a rank of a larger job does what its source does, in groups of its own."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra.chakra_graph import Comm, NumberedGroup
from crossrank.tools.graph.chakra.grow import JobGrowth, plan_growth, used_groups
from crossrank.tools.graph.chakra.mesh import UsedGroup, find_mesh, name_in


def record(op: str = "all_reduce", bytes: int = 960, **facts: Any) -> CommRecord:
    given: dict[str, Any] = {"id": 0, "c10d": op, "pg": "1", "t": 0, "dtype": "float32"} | facts
    return CommRecord(op=op, bytes=bytes, **given)


def used(ranks: tuple[int, ...], desc: str, *calls: CommRecord) -> UsedGroup:
    group = UsedGroup("1", ranks, desc)
    for call in calls:
        group.add(ranks[0], call)
    return group


WORLD_OF_8 = used(tuple(range(8)), "default_pg", record())
TP = [used((first, first + 1), "mesh_tp", record()) for first in (0, 2, 4, 6)]
DP = [used((first, first + 2, first + 4, first + 6), "mesh_dp", record()) for first in (0, 1)]
PP = [used((first, first + 4), "", record("send", peer=first + 4)) for first in range(4)]


@pytest.mark.parametrize(
    ("groups", "mesh"),
    [
        ([WORLD_OF_8], "dp=8"),
        ([WORLD_OF_8, *TP], "dp=4,tp=2"),
        ([*TP, *DP], "dp=4,tp=2"),
        ([WORLD_OF_8, *TP, *PP], "pp=2,dp=2,tp=2"),
        ([used((0, 1, 2, 3), "mesh_replicate", record()), *PP], "pp=2,dp=4"),
        (
            [
                *[used((one, one + 1), "mesh_dp_shard", record()) for one in (0, 2, 4, 6)],
                *[used((one, one + 2), "mesh_dp_replicate", record()) for one in (0, 1, 4, 5)],
                *[used((one, one + 4), "mesh_tp", record()) for one in range(4)],
            ],
            "tp=2,dp_replicate=2,dp_shard=2",
        ),
        ([used((0, 1, 4, 5), "", record()), used((2, 3, 6, 7), "", record())], "dp=2,dim1=2,dp2=2"),
    ],
)
def test_the_dimensions_are_found_from_members_descriptions_and_calls(groups: list[UsedGroup], mesh: str) -> None:
    assert str(find_mesh(8, groups)).replace("dp0", "dp") == mesh


def test_dimensions_from_the_user_must_fit_the_job() -> None:
    assert str(find_mesh(8, TP, {"pp": 4, "tp": 2})) == "pp=4,tp=2"
    with pytest.raises(CrossrankError, match="--dims dp=3,tp=2 makes 6 ranks; the job has 8"):
        find_mesh(8, TP, {"dp": 3, "tp": 2})
    with pytest.raises(CrossrankError, match=r"group of rank 0-1 \(mesh_tp\) is not all ranks of some dimensions"):
        find_mesh(8, TP, {"dp": 2, "tp": 4})


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 3, 5), (1, 2)])
def test_a_group_outside_a_mesh_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(CrossrankError, match=r"give them with --dims"):
        find_mesh(8, [used(ranks, "odd", record())])


def grown(groups: list[UsedGroup], ranks: int, name: str = "dp", world: int = 8) -> JobGrowth:
    return plan_growth(find_mesh(world, groups), groups, ranks, name)


def numbered(ranks: tuple[int, ...], desc: str = "", pg: str = "1", number: str = "5") -> NumberedGroup:
    return NumberedGroup(number=number, ranks=ranks, pg=pg, desc=desc)


def test_a_rank_repeats_the_recorded_rank_in_its_place() -> None:
    growth = grown([*TP, *DP], 16)
    # Pairs of neighbours stay pairs; the first of data parallelism is there once, the others in turns.
    assert [growth.source(rank) for rank in range(16)] == [0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 2, 3]
    assert growth.copies[0] == [0]
    assert growth.copies[3] == [3, 9, 15]
    assert grown([*TP, *DP], 4).copies == {0: [0], 1: [1], 2: [2], 3: [3]}


def test_groups_along_the_dimension_grow_and_others_are_repeated() -> None:
    growth = grown([*TP, *DP], 16)
    assert growth.group(numbered((1, 3, 5, 7), "mesh_dp"), 9).ranks == (1, 3, 5, 7, 9, 11, 13, 15)
    tp = numbered((2, 3), "mesh_tp")
    assert growth.group(tp, 8).ranks == (8, 9) == growth.group(tp, 9).ranks
    assert growth.group(tp, 8).number == growth.group(tp, 9).number != growth.group(tp, 2).number
    assert growth.group(numbered(tuple(range(8)), "default_pg", "0"), 11).number == "0"


@pytest.mark.parametrize(
    ("call", "bytes"),
    [
        (record("all_reduce"), 960),
        (record("broadcast", root=0), 960),
        (record("all_to_all"), 960),
        (record("reduce_scatter"), 960),
        (record("reduce_scatter", 1000, dtype="float64"), 1024),  # 16 ranks with whole elements of 8 bytes
        (record("all_gather", c10d="_allgather_base_"), 960),
        (record("all_gather", c10d="allgather_"), 3840),
        (record("gather", root=0), 3840),
        (record("barrier", 0), 0),
    ],
)
def test_shards_shrink_and_data_of_each_rank_adds_up(call: CommRecord, bytes: int) -> None:
    world = used((0, 1, 2, 3), "default_pg", record("reduce_scatter"), call)
    growth = grown([world], 16, world=4)
    made = growth.comm(Comm(call, numbered((0, 1, 2, 3), "default_pg")), 15)
    assert (made.record.bytes, len(made.group.ranks)) == (bytes, 16)


def test_an_all_gather_without_reduce_scatter_has_no_shards() -> None:
    call = record("all_gather", c10d="_allgather_base_")
    growth = grown([used((0, 1, 2, 3), "default_pg", call)], 16, world=4)
    assert growth.comm(Comm(call, numbered((0, 1, 2, 3))), 0).record.bytes == 3840
    assert growth.rules([[Comm(call, numbered((0, 1, 2, 3)))]]) == {
        "of all_gather have as much for each member: of 16 instead of 4": 1
    }


ROWS = "keep their rows; which of them go to whom is not known"
SHARDS = "keep their size, of smaller shards; what does not divide is padded more in truth"


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (record("all_reduce"), "keep their size"),
        (record("all_to_all"), "keep their size"),
        (record("all_to_all", in_split=[1, 2, 3, 4], out_split=[1, 1, 1, 1]), ROWS),
        (record("all_reduce", in_split=[1, 2, 3, 4]), "keep their size"),
        (record("reduce_scatter"), SHARDS),
        (record("barrier", 0), None),
    ],
)
def test_the_rule_of_a_call_says_what_its_size_becomes(call: CommRecord, rule: str | None) -> None:
    growth = grown([used((0, 1, 2, 3), "default_pg", call)], 16, world=4)
    told = {} if rule is None else {f"of {call.op} on groups of 16 instead of 4 {rule}": 1}
    assert growth.rules([[Comm(call, numbered((0, 1, 2, 3)))]]) == told


def test_messages_stay_inside_their_pipeline() -> None:
    growth = grown([WORLD_OF_8, *TP, *PP], 16)  # pp=2,dp=2,tp=2 as pp=2,dp=4,tp=2
    send = Comm(record("send", peer=6), numbered((2, 6)))
    assert growth.comm(send, 4).record.peer == 12
    assert growth.comm(send, 4).group.ranks == (4, 12)


def test_uneven_splits_keep_their_rows() -> None:
    call = record("all_to_all", in_split=[5, 3], out_split=[1, 2])
    growth = grown([used((0, 1), "default_pg", call)], 4, world=2)
    made = growth.comm(Comm(call, numbered((0, 1))), 3).record
    assert (made.in_split, made.out_split) == ([2, 3, 1, 2], [0, 1, 1, 1])


@pytest.mark.parametrize(
    ("groups", "ranks", "name", "said"),
    [
        ([*TP, *DP], 24, "tp", "--grow tp: each matrix product would be split further"),
        ([WORLD_OF_8, *TP, *PP], 16, "pp", "--grow pp: each stage would have fewer layers"),
        ([*TP, *DP], 15, "dp", "15 ranks are no multiple of the 2 that dp=4,tp=2 has for one of dp"),
        ([*TP, *DP], 16, "ep", "the job has no dimension 'ep', but dp=4,tp=2"),
        (
            [used(tuple(range(8)), "default_pg", record("broadcast", root=0), record("broadcast", root=3))],
            16,
            "dp",
            "has broadcast with 2 of its ranks as root, as where each one has its shard",
        ),
        (
            [used(tuple(range(8)), "mesh_dp", record("send", peer=1))],
            16,
            "dp",
            "has sends and receives in it, and the peers of more ranks are unknown",
        ),
    ],
)
def test_impossible_growth_is_refused(groups: list[UsedGroup], ranks: int, name: str, said: str) -> None:
    with pytest.raises(CrossrankError, match=said):
        grown(groups, ranks, name)


def test_names_distinguish_groups_with_equal_members() -> None:
    world, tp = numbered((0, 1), "default_pg", "0"), numbered((0, 1), "mesh_tp", "2")
    groups = used_groups(
        {
            rank: [(record(), world), (record(pg="2"), tp), (record(pg="3"), numbered((rank,), "mesh_dp", "3"))]
            for rank in (0, 1)
        }
    )
    growth = plan_growth(find_mesh(2, groups, {"dp": 1, "tp": 2}), groups, 8, "dp")
    assert growth.group(tp, 5).ranks == (4, 5)
    assert growth.group(world, 5).ranks == tuple(range(8))
    assert growth.group(numbered((1,), "mesh_dp", "3"), 5).ranks == (1, 3, 5, 7)


def test_a_dimension_of_one_rank_cannot_grow() -> None:
    groups = used_groups({rank: [(record(), numbered((0, 1), "mesh_tp", "2"))] for rank in (0, 1)})
    with pytest.raises(CrossrankError, match="the recorded job has only one rank in it, without communication"):
        plan_growth(find_mesh(2, groups, {"dp": 1, "tp": 2}), groups, 8, "dp")


def test_a_dimension_without_communication_is_not_guessed() -> None:
    mesh = find_mesh(4, [used((0, 1), "mesh_tp", record()), used((2, 3), "mesh_tp", record())])
    assert str(mesh) == "dim0=2,tp=2"
    assert mesh.dimensions[0].because == "no communication in it"
    with pytest.raises(CrossrankError, match="the job has no dimension 'dp', but dim0=2,tp=2; give others with --dims"):
        plan_growth(mesh, TP, 8, "dp")


@pytest.mark.parametrize(
    ("desc", "name"),
    [
        ("mesh_dp_shard_cp", "dp_shard"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("mesh_pp", "pp"),
    ],
)
def test_a_group_description_gives_the_name_of_its_dimension(desc: str, name: str) -> None:
    assert name_in(desc) == name


def test_the_replicas_of_smaller_shards_reduce_less() -> None:
    shard, replicate = numbered((0, 1), "mesh_dp_shard", "1"), numbered((0, 2), "mesh_dp_replicate", "2")
    calls = {
        rank: [
            (record("reduce_scatter", 960), shard if rank < 2 else numbered((2, 3), "mesh_dp_shard", "1")),
            (
                record("all_reduce", 480, pg="2"),
                replicate if rank % 2 == 0 else numbered((1, 3), "mesh_dp_replicate", "2"),
            ),
        ]
        for rank in range(4)
    }
    groups = used_groups(calls)
    mesh = find_mesh(4, groups)
    assert str(mesh) == "dp_replicate=2,dp_shard=2"
    with pytest.raises(CrossrankError, match="choose with --grow dp_replicate or --grow dp_shard"):
        plan_growth(mesh, groups, 8, "dp")
    growth = plan_growth(mesh, groups, 8, "dp_shard")
    assert growth.comm(Comm(record("all_reduce", 480, pg="2"), replicate), 0).record.bytes == 240
    assert growth.comm(Comm(record("all_reduce", 4, pg="2"), replicate), 0).record.bytes == 4
    more = plan_growth(mesh, groups, 8, "dp_replicate")
    assert more.comm(Comm(record("all_reduce", 480, pg="2"), replicate), 0).record.bytes == 480
