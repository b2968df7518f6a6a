"""More and fewer ranks than recorded, and one rank's file for all: the parallel structure goes on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError
from crossrank.replay.plan.build_plan import build, settle
from crossrank.replay.plan.one_trace import spread
from crossrank.replay.plan.plan import Plan
from crossrank.replay.plan.transform import only_operations, resize, scale_bytes
from crossrank.tools.traces.rank_trace import RankTrace
from tests.unit.replay.plans import built, irecv, isend, ops, rank_trace, record


def mesh(data: int, pipeline: int, tensor: int) -> tuple[list[list[CommRecord]], dict[str, list[int]]]:
    """What the ranks of a job call that is data-parallel outside, then a pipeline, then tensor-parallel."""
    world = data * pipeline * tensor
    groups = {"world": list(range(world))}
    for rank in range(world):
        d, p, t = rank // (pipeline * tensor), rank // tensor % pipeline, rank % tensor
        groups[f"dp{p}.{t}"] = [(i * pipeline + p) * tensor + t for i in range(data)]
        groups[f"tp{d}.{p}"] = [(d * pipeline + p) * tensor + i for i in range(tensor)]
    ranks = []
    for rank in range(world):
        d, p, t = rank // (pipeline * tensor), rank // tensor % pipeline, rank % tensor
        calls = [record("all_reduce", pg=f"tp{d}.{p}")]
        if p > 0:
            calls.append(irecv(rank - tensor, pg="world"))
        if p < pipeline - 1:
            calls.append(isend(rank + tensor, pg="world"))
        calls.append(record("reduce_scatter", pg=f"dp{p}.{t}", inputs=[[12 * data]], outputs=[[12]]))
        calls.append(record("all_gather", pg=f"dp{p}.{t}", inputs=[[12]], outputs=[[12 * data]]))
        calls.append(record("broadcast", pg=f"dp{p}.{t}", root=groups[f"dp{p}.{t}"][-1]))
        calls.append(record("all_to_all", pg="world", inputs=[[2 * world]], outputs=[[2 * world]]))
        calls.append(record("barrier", pg="world"))
        ranks.append(calls)
    return ranks, groups


def plan_of_mesh(data: int, pipeline: int, tensor: int) -> Plan:
    ranks, groups = mesh(data, pipeline, tensor)
    return built(*ranks, groups=groups)


def summary(plan: Plan) -> list[tuple[object, ...]]:
    """What every rank does, by the members of groups instead of their names."""
    rows: list[tuple[object, ...]] = []
    for rank in plan.ranks:
        for call in rank.calls:
            one = call.record
            members = tuple(plan.group(one.pg).ranks or ())
            rows.append((rank.rank, one.op, members, one.peer, one.root))
    return rows


@settings(max_examples=30)
@given(st.integers(2, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_resize_equals_a_recording_of_another_data_parallel_width(
    data: int, pipeline: int, tensor: int, wider: int
) -> None:
    small, large = plan_of_mesh(data, pipeline, tensor), plan_of_mesh(data * wider, pipeline, tensor)
    for plan, size, wanted in ((small, large.world_size, large), (large, small.world_size, small)):
        made = resize(plan, size)
        settle(made)
        same = [row for row in summary(made) if row[1] != "broadcast"]
        assert same == [row for row in summary(wanted) if row[1] != "broadcast"]
        assert made.coverage().recorded_calls == plan.coverage().recorded_calls == plan.calls
        assert made.coverage().recorded_bytes == plan.coverage().recorded_bytes == plan.bytes
        assert made.coverage().calls == min(plan.calls, made.calls)


def test_resize_keeps_total_sharded_size_and_reduced_tensor_size() -> None:
    plan = resize(plan_of_mesh(2, 1, 2), 8)
    sizes = {call.record.op: (call.record.inputs, call.record.outputs) for call in plan.ranks[5].calls}
    assert sizes["all_gather"] == ([[6]], [[24]])
    assert sizes["reduce_scatter"] == ([[24]], [[6]])
    assert sizes["all_reduce"] == ([[4]], [[4]])
    assert sizes["all_to_all"] == ([[8]], [[8]])
    names = ["world", "dp0.0", "dp0.1", "tp0.0", "tp1.0", "tp0.0 +4", "tp1.0 +4"]
    assert [group.pg for group in plan.groups] == names
    sent = resize(built([isend(1)], [irecv(0)]), 4).ranks[2].calls[0].record
    assert (sent.inputs, sent.outputs, sent.peer) == ([[4]], [], 3)
    assert plan.notes[-1] == (
        "8 ranks for the 4 recorded: groups of 2 with stride 2 have 4 members, groups of 4 with stride 1 have 8 "
        "members; unchanged: groups of 2 with stride 1"
    )


@pytest.mark.parametrize(
    ("op", "fields", "expected"),
    [
        ("gather", {"inputs": [[3]], "root": 1}, ([[3]], [[3]] * 4)),
        ("scatter", {"inputs": [], "outputs": [[3]], "root": 1}, ([[3]] * 4, [[3]])),
        ("broadcast", {"root": 1}, ([[4]], [[4]])),
        ("all_gather", {"inputs": [[4]], "outputs": [[4]] * 2}, ([[2]], [[2]] * 4)),
        ("all_gather", {"inputs": [[1], [2]], "outputs": [[1], [2]] * 2}, ([[1], [2]], [[1], [2]] * 4)),
        ("all_gather", {"inputs": [[4], [8]], "outputs": [[8], [16]]}, ([[2], [4]], [[8], [16]])),
        ("reduce_scatter", {"inputs": [[4]] * 2, "outputs": [[4]]}, ([[2]] * 4, [[2]])),
        ("all_to_all", {"inputs": [[2], [4]], "outputs": [[2], [2]]}, ([[2]] * 4, [[2]] * 4)),
        ("all_to_all", {"inputs": [[6]], "in_split": [2, 4], "out_split": [2, 2]}, ([[8]], [[8]])),
    ],
)
def test_doubling_a_group_resizes_the_tensors_of_its_calls(op: str, fields: dict[str, Any], expected: object) -> None:
    c10d = "allgather_coalesced_" if len(fields.get("outputs", ())) == 4 else ""
    made = resize(built(*[[record(op, c10d=c10d, **fields)]] * 2), 4).ranks[1].calls[0].record
    assert (made.inputs, made.outputs) == expected
    assert made.root == fields.get("root")
    assert (made.in_split, made.out_split) == (([2] * 4,) * 2 if "in_split" in fields else (None, None))


_REDUCED = [record("all_reduce", pg="a")], [record("all_reduce", pg="b")]


@pytest.mark.parametrize(
    ("ranks", "groups", "size", "message"),
    [
        ([*_REDUCED] * 3, {"a": [0, 2, 4], "b": [1, 3, 5]}, 3,
         r"3 ranks do not divide as the 6 recorded ones: group .* would have 1\.5"),
        ([_REDUCED[0]] * 4 + [_REDUCED[1]] * 4, {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}, 6,
         "6 ranks do not divide into blocks of 4"),
        ([*[_REDUCED[0]] * 3, []], {"a": [0, 1, 2]}, 8, r"group 'a' \(ranks 0-2\) is not regular"),
    ],
)  # fmt: skip
def test_groups_that_do_not_divide_are_refused(
    ranks: list[list[CommRecord]], groups: dict[str, list[int]], size: int, message: str
) -> None:
    with pytest.raises(CrossrankError, match=message):
        resize(built(*ranks, groups=groups), size)


def test_messages_to_removed_ranks_are_skipped_and_counted() -> None:
    plan = built([isend(2)], [], [irecv(0)], [])
    made = resize(plan, 2)
    assert ops(resize(built(*[[record("all_reduce")]] * 2), 1)) == ["all_reduce"]
    assert made.coverage().reasons == {
        "its peer is not among the ranks of the smaller job": 1,
        "its rank is not among the ranks of the smaller job": 1,
    }


def test_coverage_counts_recorded_calls_for_any_number_of_ranks() -> None:
    plan = only_operations(built(*[[record("all_reduce"), record("barrier")]] * 8), ["all_reduce"])
    grown, shrunk = resize(plan, 16), resize(scale_bytes(plan, 3), 2)
    left = {"not in --ops": 8}
    fewer = left | {"its rank is not among the ranks of the smaller job": 6}
    for made, calls, reasons in (
        *((one, 8, left) for one in (plan, grown, resize(grown, 32), resize(grown, 8))),
        *((one, 2, fewer) for one in (shrunk, resize(shrunk, 8))),
    ):
        found = made.coverage()
        assert (found.calls, found.recorded_calls, found.bytes, found.recorded_bytes) == (calls, 16, 16 * calls, 128)
        assert found.reasons == reasons
        assert made.calls == made.world_size


def alone(records: list[CommRecord], groups: dict[str, list[int]], rank: int, world: int) -> RankTrace:
    mine = {name: members for name, members in groups.items() if rank in members}
    return rank_trace(rank, records, mine, world)


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 2), st.data())
def test_one_rank_file_restores_the_calls_of_every_rank(data: int, tensor: int, draw: st.DataObject) -> None:
    ranks, groups = mesh(data, 1, tensor)
    rank = draw.draw(st.integers(0, len(ranks) - 1))
    made = build(spread(alone(ranks[rank], groups, rank, len(ranks))), "job", "comms")
    settle(made)
    assert summary(made) == summary(plan_of_mesh(data, 1, tensor))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_spread_adds_matching_messages_to_a_single_pipeline_stage(stage: int) -> None:
    ranks, groups = mesh(1, 3, 1)
    made = build(spread(alone(ranks[stage], groups, stage, 3)), "job", "comms")
    settle(made)
    sends = {(rank.rank, call.record.peer) for rank in made.ranks for call in rank.calls if call.record.op == "send"}
    assert sends == {(0, 1), (1, 2), (2, 0)}


def test_added_matching_messages_have_their_own_ids() -> None:
    made = spread(rank_trace(0, [isend(1, tag=3), isend(2), isend(2), irecv(1), record("barrier")], world=3))
    assert [(one.id, one.op, one.c10d, one.peer, one.tag, one.batch) for one in made[1].records()] == [
        (0, "send", "send", 2, 3, 0),
        (5, "recv", "recv_", 0, 3, 0),
        (1, "send", "send", 0, None, 1),
        (6, "recv", "recv_", 2, None, 1),
        (2, "send", "send", 0, None, None),
        (3, "recv", "recv_", 2, None, None),
        (4, "barrier", "", None, None, None),
    ]
    assert made[0].notes[1:] == ["2 sends or receives have no match in it; the replay added it on every rank"]
    for tag, calls in ((None, 2), (3, 4)):
        assert len(spread(rank_trace(0, [isend(1, tag=tag), irecv(1, tag=0)]))[1]) == calls


def test_the_file_or_the_user_gives_the_number_of_ranks() -> None:
    trace = rank_trace(1, [record("broadcast", pg="a", root=1)], {"0": [0, 1, 2, 3], "a": [0, 1]}, 4)
    assert [[one.root for one in rank.records()] for rank in spread(trace)] == [[1], [1], [3], [3]]
    trace.world_size = None
    assert (len(spread(trace)), len(spread(trace, 8))) == (4, 8)
    with pytest.raises(CrossrankError, match="rank-1: is of rank 1, which is not among 1 ranks"):
        spread(trace, 1)
    trace.rank = -(1 << 32)
    with pytest.raises(CrossrankError, match="is of rank -4294967296, which is not among 4 ranks"):
        spread(trace)


def test_a_file_without_a_rank_is_of_rank_0() -> None:
    trace = rank_trace(0, [isend(1)], world=3)
    trace.rank = None
    assert [[one.peer for one in rank.records() if one.op == "send"] for rank in spread(trace)] == [[1], [2], [0]]


@pytest.mark.parametrize("size", [-1, (1 << 20) + 1, 1 << 53])
def test_an_impossible_number_of_ranks_is_refused_early(size: int) -> None:
    trace = rank_trace(0, [record("barrier")])
    trace.world_size = size
    with pytest.raises(CrossrankError, match=f"^rank-0: {size} is not a number of ranks from 1 to 1048576; "):
        spread(trace)


def test_ranks_of_one_file_share_their_lists_of_members() -> None:
    made = spread(rank_trace(0, [record("barrier", pg="pair")], {"pair": [0, 1]}, 1024))
    members = [one.group.ranks for trace in made for one in trace.groups]
    assert (members[1022], members[1023]) == ([1022, 1023], [1022, 1023])
    assert len({id(ranks) for ranks in members}) == 512


def test_uneven_all_to_all_splits_rotate_by_rank() -> None:
    call = record("all_to_all", inputs=[[6]], outputs=[[9]], in_split=[1, 2, 3], out_split=[1, 4, 4])
    made = build(spread(rank_trace(0, [call], world=3)), "job", "et")
    settle(made)
    assert [rank.calls[0].record.in_split for rank in made.ranks] == [[1, 2, 3], [3, 1, 2], [2, 3, 1]]
    assert [rank.calls[0].record.out_split for rank in made.ranks] == [[1, 3, 2], [2, 1, 3], [3, 2, 1]]


def test_one_file_of_an_irregular_job_is_refused() -> None:
    with pytest.raises(CrossrankError, match=r"group 'a' .* has no regular form that tiles 4 ranks"):
        spread(rank_trace(0, [record("all_reduce", pg="a")], {"a": [0, 1, 2]}, 4))


def test_all_ranks_of_one_file_make_the_same_calls() -> None:
    made = build(spread(rank_trace(1, [record("all_reduce"), record("barrier")], world=4)), "job", "comms")
    assert [ops(made, rank) for rank in range(4)] == [["all_reduce", "barrier"]] * 4
    assert (made.coverage().recorded_calls, made.calls) == (2, 8)
    assert made.notes == [
        "the file of rank 1 is used for all 4 ranks (--one-trace); groups without this rank are unknown"
    ]
