"""What-if: plans that are changed still fit together, and say what was taken from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.errors import CrossrankError
from crossrank.replay.plan.build_plan import settle
from crossrank.replay.plan.plan import Plan
from crossrank.replay.plan.transform import (
    first_calls,
    for_backend,
    only_groups,
    only_operations,
    scale_bytes,
    with_dtype,
)
from tests.unit.replay.plans import built, isend, ops, record, recv, waits

_TWO = [0, 1]


def job() -> Plan:
    """Two ranks with one of each kind of call."""
    ranks = []
    for rank in _TWO:
        splits = [[1, 2], [3, 4]]
        ranks.append(
            [
                record("all_gather", inputs=[[3]], outputs=[[6]]),
                record("reduce_scatter", inputs=[[10]], outputs=[[5]]),
                record("all_to_all", inputs=[[sum(splits[rank])]], outputs=[[0]], in_split=splits[rank],
                       out_split=[splits[0][rank], splits[1][rank]]),
                record("all_reduce", pg="dp"),
                isend(1) if rank == 0 else recv(0),
                record("barrier"),
            ]
        )  # fmt: skip
        ranks[-1][2].outputs[0][0] = splits[0][rank] + splits[1][rank]
    return built(*ranks, groups={"0": _TWO, "dp": _TWO})


def test_scaling_by_elements_keeps_a_plan_consistent() -> None:
    plan = scale_bytes(job(), 2.5)
    settle(plan)
    gather, scatter, exchange, reduced, sent, barrier = (call.record for call in plan.ranks[0].calls)
    assert (gather.inputs, gather.outputs, gather.bytes) == ([[8]], [[16]], 64)
    assert (scatter.inputs, scatter.outputs, scatter.bytes) == ([[24]], [[12]], 96)
    assert (exchange.in_split, exchange.out_split) == ([2, 5], [2, 8])
    assert (exchange.inputs, exchange.outputs) == ([[7]], [[10]])
    assert reduced.inputs == reduced.outputs == sent.inputs == [[10]]
    assert barrier.bytes == 0
    nothing = built(*[[record("all_reduce", inputs=[[0, 3]])]] * 2)
    assert scale_bytes(nothing, 9).ranks[0].calls[0].record.inputs == [[0]]
    assert plan.coverage().complete


@given(st.floats(0.01, 50))
def test_any_scale_factor_gives_a_consistent_plan(factor: float) -> None:
    plan = scale_bytes(job(), factor)
    settle(plan)
    assert all(call.record.bytes > 0 for call in plan.ranks[0].calls if call.record.op != "barrier")


def test_a_new_dtype_changes_bytes_but_not_elements() -> None:
    plan = with_dtype(job(), "bfloat16")
    assert [call.record.bytes for call in plan.ranks[0].calls] == [12, 20, 6, 8, 8, 0]
    assert plan.ranks[0].calls[0].record.inputs == [[3]]


def test_a_filter_counts_the_calls_it_removes() -> None:
    plan = only_operations(job(), ["all-gather", "reduce_scatter_tensor"])
    assert ops(plan) == ["all_gather", "reduce_scatter"]
    assert plan.coverage().reasons == {"not in --ops": 8}
    assert [group.pg for group in plan.groups] == ["0"]
    plan = only_groups(job(), ["dp"])
    assert ops(plan) == ["all_reduce"]
    assert plan.coverage().reasons == {"not in --pgs": 10}


def test_first_calls_keeps_only_calls_complete_on_every_rank() -> None:
    early = [record("all_reduce"), record("all_reduce", pg="dp"), record("barrier")]
    late = [early[1], early[0], early[2]]
    plan = built(early, late, groups={"0": _TWO, "dp": _TWO})
    assert [ops(first_calls(plan, 1), rank) for rank in _TWO] == [[], []]
    assert [ops(first_calls(plan, 2), rank) for rank in _TWO] == [["all_reduce"] * 2] * 2
    assert first_calls(plan, 2).coverage().reasons == {"beyond --max-calls": 2}


def test_gloo_gets_one_tensor_with_splits_instead_of_an_uneven_list() -> None:
    even = record("all_to_all", c10d="alltoall_", inputs=[[2], [2]], outputs=[[2], [2]])
    lists = [([[1], [2]], [[1], [3]]), ([[3], [4]], [[2], [4]])]
    plan = built(*[[record("all_to_all", c10d="alltoall_", inputs=i, outputs=o), even] for i, o in lists])
    assert for_backend(plan, "nccl") is plan
    changed = for_backend(plan, "gloo")
    first, second = (call.record for call in changed.ranks[1].calls)
    assert (first.c10d, first.inputs, first.outputs) == ("alltoall_base_", [[7]], [[6]])
    assert (first.in_split, first.out_split) == ([3, 4], [2, 4])
    assert second == plan.ranks[1].calls[1].record
    assert changed.notes == ["1 all_to_all(s) with lists of uneven tensors use one tensor each, because of gloo"]
    assert for_backend(only_operations(plan, ["barrier"]), "gloo").notes == []


def test_waits_move_with_their_calls() -> None:
    plan = built(*[[record("all_reduce", is_async=True), record("broadcast", root=0), record("barrier")]] * 2)
    settle(plan)
    for rank in plan.ranks:
        rank.calls[0].wait_before = 3
    assert waits(only_operations(plan, ["all_reduce", "barrier"])) == [2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: only_operations(plan, ["allredcue"]), "'allredcue' is not an operation; choose from all_reduce"),
        (lambda plan: only_operations(plan, ["send"]), "sends and receives belong together"),
        (lambda plan: only_groups(plan, ["tp"]), "no call is on a group 'tp'; choose from 0, dp"),
        (lambda plan: with_dtype(plan, "float7"), "--dtype 'float7' is not known; choose from float32"),
        (lambda plan: scale_bytes(plan, 0.0), "--scale-bytes 0 is not above 0"),
    ],
)
def test_an_invalid_name_or_number_is_refused_with_the_valid_ones(change: object, message: str) -> None:
    with pytest.raises(CrossrankError, match=message):
        change(job())  # type: ignore[operator]
