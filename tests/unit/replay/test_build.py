"""What of the files of all ranks makes a plan, and what is refused with its place."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from crossrank.comm import CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.replay.plan.build_plan import build, settle
from crossrank.replay.plan.plan import LeftOut, Plan, check_plan, load_plan, save_plan
from crossrank.tools.traces.rank_trace import RankGroup, RankTrace, Waits
from tests.unit.replay.plans import built, isend, ops, plan_of, rank_trace, record, recv, send

BARRIER, SUM = record("barrier"), record("all_reduce")
LATE = (66_000_000_000, 70_000_000_000)
HOLED = rank_trace(1, [BARRIER] * 4)
HOLED.calls = HOLED.calls.take([0, 1, 3])
_A, _B = (record("all_reduce", pg=pg, is_async=False) for pg in "ab")
_UNEVEN, _EVEN = (
    record("all_to_all", inputs=[[6]], outputs=[[6]], in_split=split, out_split=split) for split in ([2, 4], [3, 3])
)
_IDLE = record("all_to_all", inputs=[[0]], outputs=[[6]], in_split=[0, 0], out_split=[6, 0])
_LISTS = [
    record("all_to_all", c10d="alltoall_", inputs=inputs, outputs=outputs)
    for inputs, outputs in (([[1], [2]], [[1], [2]]), ([[2], [1]], [[9], [1]]))
]


def test_a_group_that_another_rank_defines_is_known() -> None:
    first = rank_trace(0, [record("all_reduce", pg="late")], {"late": [0, 1]})
    second = rank_trace(1, [record("all_reduce", pg="late")], {"other": [1]})
    plan = build([first, second], "job", "comms")
    assert [(group.pg, group.ranks) for group in plan.groups] == [("late", [0, 1])]


def test_different_groups_with_one_name_get_separate_names() -> None:
    groups = [{"tp": [0, 1]}, {"tp": [0, 1]}, {"tp": [2, 3]}, {"tp": [2, 3]}]
    ranks = [rank_trace(rank, [record("all_reduce", pg="tp")], groups[rank], 4) for rank in range(4)]
    plan = build(ranks, "job", "comms")
    shown = [(group.pg, group.ranks) for group in plan.groups]
    assert shown == [("tp of ranks 0-1", [0, 1]), ("tp of ranks 2-3", [2, 3])]
    assert plan.ranks[3].calls[0].record.pg == "tp of ranks 2-3"


def test_groups_named_by_addresses_are_joined_by_their_members() -> None:
    ranks = [
        rank_trace(rank, [record("all_reduce", pg=f"9459410828444{rank}")], {f"9459410828444{rank}": [0, 1]})
        for rank in (0, 1)
    ]
    assert [group.pg for group in build(ranks, "job", "et").groups] == ["ranks 0-1"]


def test_unknown_group_members_are_the_calling_ranks_only_in_gloo_dumps() -> None:
    for source, backend, known in (("flight", "gloo", True), ("flight", "nccl", False), ("comms", "gloo", False)):
        calls = [record("all_reduce", pg="g")]
        ranks = [replace(rank_trace(one, calls, {"g": [0, 1]}), source=source, backend=backend) for one in (0, 1)]
        for rank in ranks:
            rank.groups = [RankGroup(Group(pg="g", size=0))]
        if known:
            assert build(ranks, "job", "flight").groups == [Group(pg="g", size=2, ranks=[0, 1])]
        else:
            with pytest.raises(CrossrankError, match="its group 'g' is not defined"):
                build(ranks, "job", "flight")


def test_any_name_is_a_groups_name() -> None:
    name = "f6d1b81f2a / Größe\n::"
    plan = plan_of(*[[record("all_reduce", pg=name)]] * 2, groups={name: [0, 1]})
    assert [group.pg for group in plan.groups] == [name]


def test_an_undefined_group_is_refused_with_rank_call_and_file() -> None:
    with pytest.raises(CrossrankError) as refused:
        built([record("all_reduce", pg="7")] * 5, [], groups={"0": [0, 1]})
    listed = [
        f"rank-0: rank 0, call {number} (all_reduce #{number + 1} on '7'): its group '7' is not defined; "
        for number in range(3)
    ]
    assert str(refused.value) == "".join(listed) + "and 2 more; --partial skips such calls"


def test_splits_with_a_wrong_sum_are_refused_or_skipped_on_all_ranks() -> None:
    call = record("all_to_all", inputs=[[6]], outputs=[[6]], in_split=[2, 3], out_split=[3, 3])
    ranks = [call, BARRIER], [_EVEN, BARRIER]
    with pytest.raises(CrossrankError, match=r"rank 0, call 0 .*: in_split adds up to 5, but the tensor has 6 rows"):
        built(*ranks)
    plan = plan_of(*ranks, partial=True)
    assert [ops(plan, rank) for rank in (0, 1)] == [["barrier"], ["barrier"]]
    coverage = plan.coverage()
    assert (coverage.calls, coverage.recorded_calls) == (2, 4)
    assert coverage.reasons == {"it contradicts itself": 2}


def test_calls_without_type_or_size_are_skipped_on_all_ranks_with_reason() -> None:
    unsized = record("all_reduce", inputs=[], outputs=[], bytes=-1)
    plan = plan_of(*[[record("all_reduce", dtype=None), unsized, SUM]] * 2)
    found = plan.coverage()
    assert found.reasons == {"its element type is not recorded": 2, "its size is not recorded": 2}
    assert (found.bytes, found.recorded_bytes) == (32, 64)
    assert ops(plan) == ["all_reduce"]


def test_a_damaged_file_is_refused_unless_partial() -> None:
    torn = rank_trace(0, [BARRIER], problems=["the last zstd frame is cut off"])
    whole = rank_trace(1, [BARRIER, BARRIER])
    with pytest.raises(CrossrankError, match="rank-0: the last zstd frame is cut off; record it again, or"):
        build([torn, whole], "job", "comms")
    plan = build([torn, whole], "job", "comms", partial=True)
    settle(plan)
    assert [len(rank.calls) for rank in plan.ranks] == [1, 1]
    assert plan.coverage().reasons == {"another rank of its group has no such call": 1}


def test_calls_before_the_start_of_another_ranks_ring_are_skipped() -> None:
    ring = rank_trace(1, [SUM, SUM, BARRIER], starts_late=True)
    ring.calls = ring.calls.take([2])
    for late in (ring, rank_trace(1, [BARRIER], starts_late=True, numbered=False)):
        plan = build([rank_trace(0, [SUM, SUM, BARRIER]), late], "job", "flight")
        assert [ops(plan, rank) for rank in (0, 1)] == [["barrier"]] * 2
        assert plan.coverage().reasons == {"the dump of another rank no longer has it": 2}


def test_mismatched_ranks_are_refused_with_the_text_of_a_diagnosis() -> None:
    with pytest.raises(CrossrankError) as refused:
        plan_of([SUM, BARRIER], [SUM])
    assert str(refused.value).startswith(
        "the ranks do not fit together: missing_rank: barrier #2 on 0, rank 1 (rank-1): "
    )


def test_a_saved_plan_is_the_same_when_it_is_loaded(tmp_path: object) -> None:
    plan = plan_of([isend(1), BARRIER], [recv(0), BARRIER])
    for name in ("plan.json", "plan.json.zst"):
        path = f"{tmp_path}/{name}"
        save_plan(plan, path)
        assert load_plan(path) == plan
    with open(path, "r+b") as file:
        file.truncate(40)
    with pytest.raises(CrossrankError, match=r"plan.json.zst: the last zstd frame is cut off.*; save the plan again"):
        load_plan(path)


def _grouped(plan: Plan, *members: int) -> None:
    plan.groups = [Group(pg="0", size=2, ranks=list(members))]


def _call(plan: Plan, wait_before: int, **fields: Any) -> None:
    call = plan.ranks[1].calls[0]
    call.record, call.wait_before = msgspec.structs.replace(call.record, **fields), wait_before


_IN_CALL = "call 0 of rank 1 (all_reduce)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.groups.append(plan.groups[0]), "group '0' stands twice"),
        (lambda plan: _grouped(plan), "group '0' has no members, or one of them twice"),
        (lambda plan: _grouped(plan, 0, 0), "group '0' has no members, or one of them twice"),
        (lambda plan: _grouped(plan, 0, 2), "group '0' has a member outside the 2 ranks"),
        (lambda plan: _grouped(plan, -1, 0), "group '0' has a member outside the 2 ranks"),
        (lambda plan: plan.ranks.pop(), "its ranks are not 0 to 1"),
        (lambda plan: plan.ranks.reverse(), "its ranks are not 0 to 1"),
        (lambda plan: _call(plan, 0), f"{_IN_CALL} is waited for before call 0, which is not after it"),
        (lambda plan: _call(plan, 2), f"{_IN_CALL} is waited for before call 2, which is not after it"),
        (lambda plan: _call(plan, 1, bytes=5),
         f"{_IN_CALL} does not say all of its tensors, or other bytes than they have"),
        (lambda plan: _call(plan, 1, dtype=None), f"{_IN_CALL}: its element type is not recorded"),
        (lambda plan: _call(plan, 1, inputs=[[-1]]), f"{_IN_CALL}: a tensor of it has a negative extent"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(change: Callable[[Plan], object], message: str) -> None:
    plan = plan_of([SUM], [SUM])
    check_plan(plan, "p")
    change(plan)
    with pytest.raises(CrossrankError) as refused:
        check_plan(plan, "p")
    assert str(refused.value) == f"p: {message}; save the plan again"


def _waiting(trace: RankTrace, before: list[int], blocking: list[int]) -> RankTrace:
    returned = array("q", bytes(8 * len(before)))
    trace.waits = Waits(array("q", before), array("b", blocking), returned, recorded=3, without_call=1)
    return trace


def test_the_plan_notes_recorded_problems() -> None:
    calls = [record("broadcast", root=None), record("broadcast", root=1)]
    options: dict[str, Any] = {"notes": ["it is odd"], "filtered": True, "timed": False}
    plan = build([_waiting(rank_trace(rank, calls, **options), [1, 2], [-1, 0]) for rank in (0, 1)], "job", "comms")
    assert plan.notes == [
        "it is odd (2 times)",
        "2 recorded wait(s) are for calls before the trace, and are not replayed",
        "6 recorded wait(s) are replayed at their original position",
        "the recording has only calls between nodes; record with TRACING=ALL to have the others",
        "comms files of a recording have no times, so there are no gaps to keep",
        "2 call(s) have no recorded root; the replay uses the first rank of the group",
    ]
    assert [
        (call.record.root, call.wait_before, call.blocking, call.recorded_bytes, call.gap_ns, call.exposed_ns)
        for call in plan.ranks[1].calls
    ] == [(0, 1, True, 16, 0, 0), (1, 2, False, 16, 0, 0)]


@pytest.mark.parametrize(
    ("early", "told"), [(_A, "all_reduce #1 on a, rank 1 "), (isend(1), "barrier #1 on 0, rank 1 ")]
)
def test_the_first_unfinished_call_is_reported_but_no_send_with_a_later_wait(early: CommRecord, told: str) -> None:
    groups = {"0": [0, 1], "a": [0, 1]}
    first = _waiting(rank_trace(0, [early, BARRIER, BARRIER], groups), [3, 2, 3], [0, 1, 1])
    plan = build([first, rank_trace(1, [], groups)], "job", "comms")
    with pytest.raises(CrossrankError, match=f"together: missing_rank: {told}"):
        settle(plan)


def test_waits_move_past_skipped_calls_and_a_batch_has_one_wait() -> None:
    one, of_batch = record("all_reduce", is_async=True), record("all_reduce", is_async=True, batch=7)
    calls = [one, record("all_reduce", dtype=None), of_batch, of_batch, BARRIER]
    trace = _waiting(rank_trace(0, calls, world=1, skipped=(4, 64)), [3, 2, 4, 5, -1], [0, 0, 0, 0, 1])
    (rank,) = build([trace], "job", "comms").ranks
    assert [call.wait_before for call in rank.calls] == [2, 4, 4, -1]
    assert [call.blocking for call in rank.calls] == [False, False, False, True]
    assert rank.left_out == {
        "not in --steps": LeftOut(calls=4, bytes=64),
        "its element type is not recorded": LeftOut(calls=1, bytes=16),
    }


def test_calls_without_unique_numbers_are_joined_by_their_order() -> None:
    for numbers, numbered in (([[1, 1], [1, 2]], True), ([[0, 1], [1, 2]], True), ([[1, 2], [5, 6]], False)):
        ranks = [rank_trace(rank, [SUM, BARRIER], numbered=numbered) for rank in (0, 1)]
        for rank, one in zip(ranks, numbers, strict=True):
            rank.calls.number = array("q", one)
        assert build(ranks, "job", "comms", partial=True).coverage().calls == 4


def test_a_partial_replay_skips_calls_missing_on_a_rank() -> None:
    wrong = rank_trace(0, [BARRIER] * 4, {"0": [0, 1], "x": [0, 5]})
    plan = build([wrong, HOLED], "job", "comms", partial=True)
    assert (plan.calls, plan.coverage().reasons) == (6, {"another rank of its group has no such call": 1})
    with pytest.raises(CrossrankError) as refused:
        built([SUM], [], partial=True)
    why = "1 for another rank of its group has no such call"
    assert str(refused.value) == f"job: none of 1 calls can be replayed ({why})"


def test_a_rank_without_a_file_or_peers_counts_as_having_no_calls() -> None:
    ranks = [rank_trace(rank, [record("barrier", pg="pair")], {"pair": [0, 1]}, 3) for rank in (0, 1)]
    plan = build(ranks, "job", "comms")
    settle(plan)
    assert [len(rank.calls) for rank in plan.ranks] == [1, 1, 0]
    assert plan.notes == ["rank 2 has no file and no part in the others' calls: taken to have made none"]


def test_a_receive_from_any_source_uses_a_rank_that_sent() -> None:
    anyone = record("recv", peer=None, api="recv")
    plan = plan_of([send(3), send(3)], [send(3)], [send(3)], [recv(2), anyone, anyone, anyone])
    assert [call.record.peer for call in plan.ranks[3].calls] == [2, 0, 0, 1]
    assert plan.notes == ["3 receive(s) from any source are replayed from a rank with an unmatched send"]


def test_damage_counts_against_the_coverage() -> None:
    plan = build([rank_trace(0, [BARRIER], world=1, problems=["line 3 is no record"])], "j", "comms", partial=True)
    assert plan.damage == ["rank-0: line 3 is no record"]
    assert not plan.coverage().complete


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([rank_trace(0, [BARRIER])], "job: has no file of rank 1 of 2; add it"),
        ([rank_trace(-1, []), rank_trace(0, [])], "rank--1: rank -1 is outside the job of 2 ranks; name"),
        ([rank_trace(0, []), rank_trace(2, [])], "rank-2: rank 2 is outside the job of 2 ranks; name one job's files"),
        ([replace(rank_trace(0, []), rank=None), rank_trace(1, [])], "rank-0: its rank is neither in its name"),
        ([rank_trace(0, []), rank_trace(0, [])], "rank-0 and rank-0 are both of rank 0"),
        ([rank_trace(0, [], world=2), rank_trace(1, [], world=4)],
         "the ranks are from different runs: rank-0 of 2 ranks, rank-1 of 4 ranks"),
        ([rank_trace(0, [BARRIER], world=3, span=LATE), rank_trace(1, [BARRIER], world=3, span=(0, 5_000_000_000)),
          rank_trace(2, [BARRIER], world=3, span=(1, 80_000_000_000))],
         "the ranks are from different runs: rank-1 ends 61 s before rank-0 starts"),
        ([rank_trace(0, [BARRIER], dropped=3), rank_trace(1, [BARRIER])], "its recorder could not keep 3 calls"),
        ([rank_trace(0, []), rank_trace(1, [])],
         "job: the execution traces have no communication; was the window long"),
        ([rank_trace(0, [record("barrier", pg="x")], {"x": [0, 5]}), rank_trace(1, [])],
         "rank-0: group 'x' has a member twice, or outside the 2 ranks"),
        ([rank_trace(0, []), rank_trace(1, [BARRIER], {"0": [1, 1]})],
         "rank-1: group '0' has a member twice, or outside the 2 ranks"),
        ([rank_trace(0, [BARRIER] * 4), HOLED],
         r"missing_rank: barrier #3 on '0': rank-1 of rank 1 lacks it and has later"),
    ],
)  # fmt: skip
def test_incomplete_or_mixed_jobs_are_refused(ranks: list[RankTrace], message: str) -> None:
    with pytest.raises(CrossrankError, match=message):
        build(ranks, "job", "et")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (4, "--world-size 4, but the files are of a job of 1 ranks"),
        (None, "job: 2000000 is not a number of ranks from 1 to "),
    ],
)
def test_an_invalid_number_of_ranks_is_refused(given: int | None, message: str) -> None:
    with pytest.raises(CrossrankError, match=message):
        build([rank_trace(0, [BARRIER], world=1 if given else 2_000_000)], "job", "comms", world_size=given)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[SUM], [SUM], [record("broadcast", root=0)]], "the ranks do not fit together: type_mismatch: "),
        ([[SUM], [SUM], [record("all_reduce", inputs=[[5]], outputs=[[5]])]], "together: size_mismatch: "),
        ([[SUM], [SUM], [record("all_reduce", dtype="int32")]], "together: dtype_mismatch: "),
        ([[SUM], [SUM], [record("all_reduce", reduce="max")]], "together: reduce_op_mismatch: "),
        ([[_A, _B], [_B, _A]], "opposite_order"),
        ([[_B, _A], [msgspec.structs.replace(_B, dtype="int32"), msgspec.structs.replace(_A, reduce="max")]],
         "together: dtype_mismatch: all_reduce #1 on b.*; reduce_op_mismatch: all_reduce #1 on a"),
        ([[send(1), BARRIER], [BARRIER]], "p2p_unmatched: send"),
        ([[send(1)], [recv(0, outputs=[[5]])]], "p2p_size_mismatch"),
        ([[_LISTS[0]], [_LISTS[1]]], "all_to_all #1 on 0: rank 0 sends 2 elements to rank 1, which expects 9; "),
        ([[_IDLE], [_EVEN]], r"rank 0 \(rank-0\): rank 0 sends 0 elements to rank 0, which expects 6; "),
        ([[_UNEVEN], [_EVEN]], "rank 0 sends 4 elements to rank 1, which expects 3; rank 1 sends 3 elements to rank 0"),
    ],
)  # fmt: skip
def test_mismatched_ranks_are_refused(ranks: list[list[CommRecord]], message: str) -> None:
    everyone = list(range(len(ranks)))
    with pytest.raises(CrossrankError, match=message):
        plan_of(*ranks, groups={"0": everyone, "a": everyone, "b": everyone})
