"""What of the files of all ranks makes a plan, and what is refused with its place."""

from __future__ import annotations

import msgspec
import pytest

from crossrank.comm import Group
from crossrank.errors import CrossrankError
from crossrank.replay.plan.build import build, settle
from crossrank.replay.plan.plan import check_plan, load_plan, save_plan
from tests.unit.replay.plans import built, isend, ops, plan_of, rank_trace, record, recv, send


def test_a_group_that_another_rank_defines_is_known() -> None:
    first = rank_trace(0, [record("all_reduce", pg="late")], {"late": [0, 1]})
    second = rank_trace(1, [record("all_reduce", pg="late")], {"other": [1]})
    plan = build([first, second], "job", "comms")
    assert [(group.pg, group.ranks) for group in plan.groups] == [("late", [0, 1])]


def test_one_name_for_different_groups_stands_for_each_on_its_members() -> None:
    groups = [{"tp": [0, 1]}, {"tp": [0, 1]}, {"tp": [2, 3]}, {"tp": [2, 3]}]
    ranks = [rank_trace(rank, [record("all_reduce", pg="tp")], groups[rank], 4) for rank in range(4)]
    plan = build(ranks, "job", "comms")
    assert [(group.pg, group.ranks) for group in plan.groups] == [
        ("tp of ranks 0-1", [0, 1]),
        ("tp of ranks 2-3", [2, 3]),
    ]
    assert plan.ranks[3].calls[0].record.pg == "tp of ranks 2-3"


def test_groups_that_are_named_by_addresses_are_joined_by_their_members() -> None:
    ranks = [
        rank_trace(rank, [record("all_reduce", pg=f"9459410828444{rank}")], {f"9459410828444{rank}": [0, 1]})
        for rank in (0, 1)
    ]
    assert [group.pg for group in build(ranks, "job", "et").groups] == ["ranks 0-1"]


def test_any_name_is_a_groups_name() -> None:
    name = "f6d1b81f2a / Größe\n::"
    plan = plan_of(*[[record("all_reduce", pg=name)]] * 2, groups={name: [0, 1]})
    assert [group.pg for group in plan.groups] == [name]


def test_a_group_that_no_file_defines_is_refused_with_rank_call_and_file() -> None:
    with pytest.raises(CrossrankError) as refused:
        built([record("all_reduce", pg="7")], [], groups={"0": [0, 1]})
    assert str(refused.value) == (
        "rank-0: rank 0, call 0 (all_reduce #1 on '7'): its group '7' is defined nowhere; "
        "--partial leaves such calls out"
    )


def test_splits_that_do_not_add_up_are_refused() -> None:
    call = record("all_to_all", inputs=[[6]], outputs=[[6]], in_split=[2, 3], out_split=[3, 3])
    with pytest.raises(CrossrankError, match=r"rank 0, call 0 .*: in_split adds up to 5, but the tensor has 6 rows"):
        built([call], [call])


def test_partial_leaves_a_broken_call_out_on_all_ranks_and_counts_it() -> None:
    broken = record("all_to_all", inputs=[[6]], outputs=[[6]], in_split=[2, 3], out_split=[3, 3])
    good = record("all_to_all", inputs=[[6]], outputs=[[6]], in_split=[3, 3], out_split=[3, 3])
    plan = plan_of([broken, record("barrier")], [good, record("barrier")], partial=True)
    assert [ops(plan, rank) for rank in (0, 1)] == [["barrier"], ["barrier"]]
    coverage = plan.coverage()
    assert (coverage.calls, coverage.recorded_calls) == (2, 4)
    assert coverage.reasons == {"it contradicts itself": 2}


def test_what_cannot_be_made_again_is_left_out_on_all_ranks_with_its_reason() -> None:
    plan = plan_of(*[[record("all_reduce", dtype=None), record("all_reduce")]] * 2)
    assert plan.coverage().reasons == {"its element type is not recorded": 2}
    assert ops(plan) == ["all_reduce"]


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(CrossrankError, match="job: has no file of rank 1 of 2; add it"):
        build([rank_trace(0, [record("barrier")])], "job", "comms")


def test_two_files_of_one_rank_are_refused() -> None:
    with pytest.raises(CrossrankError, match="rank-0 and rank-0 are both of rank 0"):
        build([rank_trace(0, []), rank_trace(0, [])], "job", "comms")


def test_ranks_of_jobs_of_different_sizes_are_refused() -> None:
    with pytest.raises(CrossrankError, match="the ranks are of jobs of 2, 4 ranks"):
        build([rank_trace(0, [], world=2), rank_trace(1, [], world=4)], "job", "comms")


def test_ranks_of_different_runs_are_refused() -> None:
    early = rank_trace(0, [record("barrier")], span=(0, 5_000_000_000))
    late = rank_trace(1, [record("barrier")], span=(65_000_000_000, 70_000_000_000))
    with pytest.raises(CrossrankError, match="rank-0 ended 60 s before rank-1 began: they are of different runs"):
        build([early, late], "job", "comms")


def test_a_damaged_file_is_refused_and_may_be_replayed_in_part() -> None:
    torn = rank_trace(0, [record("barrier")], problems=["the last zstd frame is cut off"])
    whole = rank_trace(1, [record("barrier"), record("barrier")])
    with pytest.raises(CrossrankError, match="rank-0: the last zstd frame is cut off; record it again, or"):
        build([torn, whole], "job", "comms")
    plan = build([torn, whole], "job", "comms", partial=True)
    settle(plan)
    assert [len(rank.calls) for rank in plan.ranks] == [1, 1]
    assert plan.coverage().reasons == {"another rank of its group has no such call": 1}


def test_calls_that_a_recorder_could_not_keep_are_damage() -> None:
    with pytest.raises(CrossrankError, match="its recorder could not keep 3 calls"):
        build([rank_trace(0, [record("barrier")], dropped=3), rank_trace(1, [record("barrier")])], "job", "comms")


def test_calls_before_the_beginning_of_another_ranks_ring_are_left_out() -> None:
    whole = rank_trace(0, [record("barrier")] * 4)
    ring = rank_trace(1, [record("barrier")] * 4, starts_late=True)
    ring.calls = ring.calls.take(range(3, 4))
    plan = build([whole, ring], "job", "flight")
    assert [len(rank.calls) for rank in plan.ranks] == [1, 1]
    assert plan.coverage().reasons == {"another rank's dump no longer has it": 3}


def test_a_trace_without_communication_is_no_success() -> None:
    with pytest.raises(CrossrankError, match="job: the execution traces hold no communication; was the window long"):
        build([rank_trace(0, []), rank_trace(1, [])], "job", "et")


def test_ranks_that_do_not_fit_together_are_told_in_the_words_of_a_diagnosis() -> None:
    with pytest.raises(CrossrankError) as refused:
        plan_of([record("all_reduce"), record("barrier")], [record("all_reduce")])
    assert str(refused.value).startswith(
        "the ranks do not fit together: missing_rank: barrier #2 on 0, rank 1 (rank-1): "
    )


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (record("broadcast", root=0), "type_mismatch"),
        (record("all_reduce", inputs=[[5]], outputs=[[5]]), "size_mismatch"),
        (record("all_reduce", dtype="int32"), "dtype_mismatch"),
        (record("all_reduce", reduce="max"), "reduce_op_mismatch"),
    ],
)
def test_a_call_that_differs_between_ranks_is_a_mismatch(other: object, kind: str) -> None:
    with pytest.raises(CrossrankError, match=f"the ranks do not fit together: {kind}: "):
        plan_of([record("all_reduce")], [record("all_reduce")], [other])  # type: ignore[list-item]


def test_groups_entered_in_opposite_order_are_a_deadlock() -> None:
    groups = {"a": [0, 1], "b": [0, 1]}
    a, b = record("all_reduce", pg="a", is_async=False), record("all_reduce", pg="b", is_async=False)
    with pytest.raises(CrossrankError, match="opposite_order"):
        plan_of([a, b], [b, a], groups=groups)


def test_a_send_without_a_receive_is_told() -> None:
    with pytest.raises(CrossrankError, match="p2p_unmatched: send"):
        plan_of([send(1), record("barrier")], [record("barrier")])


def test_a_send_and_its_receive_must_be_of_one_size() -> None:
    with pytest.raises(CrossrankError, match="p2p_size_mismatch"):
        plan_of([send(1)], [recv(0, outputs=[[5]])])


def test_parts_of_an_all_to_all_must_be_what_the_other_rank_expects() -> None:
    sender = record("all_to_all", inputs=[[6]], outputs=[[6]], in_split=[2, 4], out_split=[2, 4])
    receiver = record("all_to_all", inputs=[[6]], outputs=[[6]], in_split=[3, 3], out_split=[3, 3])
    with pytest.raises(
        CrossrankError, match=r"rank 0 sends 4 elements to rank 1 \(call 0 of rank-0\), which expects 3"
    ):
        plan_of([sender], [receiver])


def test_a_saved_plan_is_the_same_when_it_is_loaded(tmp_path: object) -> None:
    plan = plan_of([isend(1), record("barrier")], [recv(0), record("barrier")])
    for name in ("plan.json", "plan.json.zst"):
        path = f"{tmp_path}/{name}"
        save_plan(plan, path)
        assert load_plan(path) == plan


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    plan = plan_of(*[[record("barrier")]] * 2)
    plan.ranks[1].calls[0].wait_before = 0
    with pytest.raises(CrossrankError, match=r"p: call 0 of rank 1 \(barrier\) is waited for before call 0"):
        check_plan(plan, "p")
    strange = msgspec.structs.replace(plan, groups=[Group(pg="0", size=2, ranks=[0, 7])])
    with pytest.raises(CrossrankError, match="group '0' has a member outside the 2 ranks"):
        check_plan(strange, "p")


def test_a_rank_without_a_file_that_nobody_calls_is_taken_to_have_made_no_call() -> None:
    ranks = [rank_trace(rank, [record("barrier", pg="pair")], {"pair": [0, 1]}, 3) for rank in (0, 1)]
    plan = build(ranks, "job", "comms")
    settle(plan)
    assert [len(rank.calls) for rank in plan.ranks] == [1, 1, 0]
    assert plan.notes == ["rank 2 has no file and no part in the others' calls: taken to have made none"]


def test_a_receive_from_any_source_is_made_from_who_sent() -> None:
    anyone = record("recv", peer=None, api="recv")
    plan = plan_of([send(2)], [send(2)], [recv(0), anyone])
    assert [call.record.peer for call in plan.ranks[2].calls] == [0, 1]
    assert plan.notes == ["1 receive(s) from any source are made from a rank whose send has no other receive"]


def test_a_call_that_a_rank_lacks_in_the_middle_is_named_by_its_number() -> None:
    whole, holed = rank_trace(0, [record("barrier")] * 4), rank_trace(1, [record("barrier")] * 4)
    holed.calls = holed.calls.take([0, 1, 3])
    with pytest.raises(
        CrossrankError, match=r"missing_rank: barrier #3 on '0': rank-1 of rank 1 lacks it and has later"
    ):
        build([whole, holed], "job", "comms")


def test_a_group_with_a_member_that_cannot_be_is_refused() -> None:
    with pytest.raises(CrossrankError, match="rank-0: group 'x' has a member twice, or outside the 2 ranks"):
        build([rank_trace(0, [record("barrier", pg="x")], {"x": [0, 5]}), rank_trace(1, [])], "job", "comms")


def test_damage_counts_against_the_coverage() -> None:
    plan = build(
        [rank_trace(0, [record("barrier")], world=1, problems=["line 3 is no record"])], "j", "comms", partial=True
    )
    assert plan.damage == ["rank-0: line 3 is no record"]
    assert not plan.coverage().complete


def test_a_world_size_that_the_files_deny_is_refused() -> None:
    with pytest.raises(CrossrankError, match="--world-size 4, but the files are of a job of 1 ranks"):
        build([rank_trace(0, [record("barrier")], world=1)], "job", "comms", world_size=4)
