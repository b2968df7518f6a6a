"""What a source leaves out of a call is filled in, and what stands in where a backend lacks a type or a reduction."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import CommRecord, Group
from crossrank.dtypes import DTYPES
from crossrank.errors import CrossrankError
from crossrank.replay.plan.counterparts import fit
from crossrank.replay.plan.dtype_fallback import BACKENDS, Substitute, substitute
from crossrank.replay.plan.shapes import BrokenError, LeftOutError, complete
from tests.unit.replay.plans import plan_of, record

_COALESCED = "allgather_into_tensor_coalesced_"
_LIST, _LISTS, _REDUCED = "allgather_", "allgather_coalesced_", "allreduce_coalesced_"
_SCATTERED = "reduce_scatter_tensor_coalesced_"
_ONE_EACH = " instead of one each"
_IN_ROWS = {"in_split": [1, 2, 3, 0], "out_split": [2, 2, 2, 2]}
_IN_ELEMENTS = {"in_split": [2, 4, 6, 0], "out_split": [3, 3, 3, 3]}
_NOT_FOUR = "is not one number for each of 4 ranks"
_FOUR = Group(pg="0", size=4, ranks=[0, 1, 2, 3])


def completed(op: str, rank: int = 0, **fields: Any) -> tuple[str, list[list[int]], list[list[int]]]:
    one = complete(record(op, **({"c10d": ""} | fields)), _FOUR, rank)
    return one.c10d, one.inputs, one.outputs


@pytest.mark.parametrize(
    ("op", "fields", "expected"),
    [
        ("all_reduce", {"inputs": [[2, 3]]}, ("allreduce_", [[2, 3]], [[2, 3]])),
        ("all_reduce", {"inputs": [], "outputs": []}, ("allreduce_", [[4]], [[4]])),
        ("all_reduce", {"inputs": [[2], [3]]}, ("allreduce_coalesced_", [[2], [3]], [[2], [3]])),
        ("all_reduce", {"inputs": [[2]], "c10d": _REDUCED}, (_REDUCED, [[2]], [[2]])),
        ("reduce", {"inputs": [], "outputs": [[3]], "root": 1}, ("reduce_", [[3]], [[3]])),
        ("all_gather", {"inputs": [[2]]}, ("_allgather_base_", [[2]], [[8]])),
        ("all_gather", {"inputs": [], "outputs": [[8]]}, ("_allgather_base_", [[2]], [[8]])),
        ("all_gather", {"inputs": [[2]], "outputs": [[2]] * 4}, ("allgather_", [[2]], [[2]] * 4)),
        ("all_gather", {"inputs": [], "bytes": 32}, ("_allgather_base_", [[2]], [[8]])),
        ("all_gather", {"inputs": [[1], [2]], "outputs": [[4], [8]]}, (_COALESCED, [[1], [2]], [[4], [8]])),
        ("all_gather", {"c10d": _COALESCED, "inputs": [[2]], "outputs": [[8]]}, (_COALESCED, [[2]], [[8]])),
        ("all_gather", {"c10d": _LIST, "inputs": [[2, 1]], "outputs": [[8]]}, (_LIST, [[2, 1]], [[2, 1]] * 4)),
        ("all_gather", {"c10d": _LISTS, "inputs": [[1], [2]], "outputs": [[1], [2]] * 4},
         (_LISTS, [[1], [2]], [[1], [2]] * 4)),
        ("reduce_scatter", {"inputs": [[4], [8]], "outputs": [[1], [2]]}, (_SCATTERED, [[4], [8]], [[1], [2]])),
        ("reduce_scatter", {"inputs": [], "bytes": 32}, ("_reduce_scatter_base_", [[8]], [[2]])),
        ("reduce_scatter", {"inputs": [[8]]}, ("_reduce_scatter_base_", [[8]], [[2]])),
        ("reduce_scatter", {"inputs": [], "outputs": [[2]]}, ("_reduce_scatter_base_", [[8]], [[2]])),
        ("reduce_scatter", {"inputs": [[2]] * 4, "outputs": [[2]]}, ("reduce_scatter_", [[2]] * 4, [[2]])),
        ("all_to_all", {"inputs": [[8]]}, ("alltoall_base_", [[8]], [[8]])),
        ("all_to_all", {"inputs": [], "bytes": 32}, ("alltoall_base_", [[8]], [[8]])),
        ("all_to_all", {"inputs": [], "in_split": [1, 2, 3, 2]}, ("alltoall_base_", [[8]], [[8]])),
        ("all_to_all", {"inputs": [[5]], "outputs": [[3]]}, ("alltoall_base_", [[5]], [[3]])),
        ("all_to_all", {"c10d": "alltoall_", "inputs": [[1]] * 4, "outputs": [[2]] * 4},
         ("alltoall_", [[1]] * 4, [[2]] * 4)),
        ("all_to_all", {"inputs": [[6, 2]]} | _IN_ROWS, ("alltoall_base_", [[6, 2]], [[8, 2]])),
        ("all_to_all", {"inputs": [[6, 2]]} | _IN_ELEMENTS, ("alltoall_base_", [[12]], [[12]])),
        ("all_to_all", {"inputs": [[1], [2], [3], [4]]}, ("alltoall_", [[1], [2], [3], [4]], [[1], [2], [3], [4]])),
        ("gather", {"inputs": [[3]], "root": 0}, ("gather_", [[3]], [[3]] * 4)),
        ("gather", {"inputs": [], "bytes": 64, "root": 0}, ("gather_", [[4]], [[4]] * 4)),
        ("gather", {"inputs": [[3]], "outputs": [[3], [3], [3], [5]], "root": 0},
         ("gather_", [[3]], [[3], [3], [3], [5]])),
        ("gather", {"inputs": [[3]], "outputs": [[3]], "root": 0}, ("gather_", [[3]], [[3]] * 4)),
        ("scatter", {"inputs": [[3], [4], [4], [4]], "outputs": [], "root": 0},
         ("scatter_", [[3], [4], [4], [4]], [[3]])),
        ("gather", {"inputs": [[3], [4]], "root": 1}, ("gather_", [[3]], [])),
        ("gather", {"inputs": [], "outputs": [[3]] * 4, "root": 0}, ("gather_", [[3]], [[3]] * 4)),
        ("gather", {"inputs": [[3]], "root": 1}, ("gather_", [[3]], [])),
        ("scatter", {"inputs": [], "outputs": [[3]], "root": 0}, ("scatter_", [[3]] * 4, [[3]])),
        ("scatter", {"inputs": [], "outputs": [[3]], "root": 2}, ("scatter_", [], [[3]])),
        ("send", {"peer": 1}, ("send", [[4]], [])),
        ("send", {"peer": 1, "inputs": [], "outputs": [[3]]}, ("send", [[3]], [])),
        ("recv", {"peer": 1, "inputs": [[5]], "outputs": []}, ("recv_", [], [[5]])),
        ("recv", {"peer": 1, "outputs": [], "bytes": 12}, ("recv_", [], [[3]])),
        ("recv", {"peer": 1, "tag": 0, "outputs": [], "bytes": 1, "dtype": "int8"}, ("recv_", [], [[1]])),
        ("barrier", {}, ("barrier", [], [])),
    ],
)  # fmt: skip
def test_complete_derives_the_tensors_of_a_call(op: str, fields: dict[str, Any], expected: object) -> None:
    assert completed(op, **fields) == expected


@pytest.mark.parametrize(
    ("op", "fields", "why"),
    [
        ("all_reduce", {"dtype": None}, "its element type is not recorded"),
        ("all_reduce", {"dtype": "float3"}, "its element type float3 is not known"),
        ("fancy_reduce", {}, "fancy_reduce is not a known operation"),
        ("recv", {"peer": None}, "its peer is not recorded"),
        ("gather", {"root": None}, "its root is not recorded"),
        ("reduce", {"inputs": [[1], [2]]}, "reduce of several tensors at once"),
        ("all_reduce", {"inputs": [], "outputs": [], "bytes": 0}, "its size is not recorded"),
        ("all_gather", {"inputs": [], "outputs": [[2]] * 4, "c10d": "all_gather"},
         "all_gather of a list without this rank's own part"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_replayed_reports_why(op: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(LeftOutError) as left:
        completed(op, **fields)
    assert str(left.value) == why


@pytest.mark.parametrize(
    ("op", "fields", "why"),
    [
        ("send", {"peer": 0}, "its peer, rank 0, is not another rank of its group '0'"),
        ("send", {"peer": 9}, "its peer, rank 9, is not another rank of its group '0'"),
        ("broadcast", {"root": 5}, "its root, rank 5, is not in its group '0'"),
        ("all_gather", {"outputs": [[7]]}, "4 elements of each of 4 ranks are not the 7 of the other side"),
        ("reduce_scatter", {"inputs": [[7]]}, "7 elements cannot be divided among 4 ranks"),
        ("all_to_all", {"inputs": [[7]]}, "its 7 rows cannot be divided evenly among 4 ranks"),
        ("all_to_all", {"inputs": [[]]}, "its 1 rows cannot be divided evenly among 4 ranks"),
        ("all_to_all", {"inputs": [[7]], "in_split": [1, 2, 3]}, "in_split [1, 2, 3] " + _NOT_FOUR),
        ("all_to_all", {"inputs": [[2]], "in_split": [5, -1, -1, -1]}, "in_split [5, -1, -1, -1] " + _NOT_FOUR),
        ("all_reduce", {"inputs": [[-1]]}, "a tensor of it has a negative extent"),
        ("all_reduce", {"inputs": [[1 << 45]]}, "a tensor of it has more elements than any memory holds"),
        ("send", {"peer": 1, "tag": -1}, "its tag -1 is not from 0 to 2147483647"),
        ("send", {"peer": 1, "tag": 1 << 31}, "its tag 2147483648 is not from 0 to 2147483647"),
        ("all_gather", {"c10d": _LIST, "outputs": [[4]] * 3}, "it has 3 tensors for 4 ranks"),
        ("all_gather", {"inputs": [[3]], "outputs": [[4]] * 4}, "3 elements of its own are not the 4 of each rank"),
        ("all_gather", {"c10d": _LISTS, "outputs": [[1]] * 7}, "1 tensors of each of 4 ranks are gathered into 7"),
        ("all_gather", {"inputs": [[1], [2]], "outputs": [[4]]}, "it has 2 and 1 tensors on its sides, for 4 ranks"),
        ("gather", {"outputs": [[4]] * 3, "root": 0}, "its root holds 3 tensors for 4 ranks"),
        ("all_to_all", {"inputs": [[1]] * 4, "outputs": [[1]] * 3}, "it has 4 input and 3 output tensors for 4 ranks"),
        ("all_to_all", {"inputs": [[1]] * 2, "outputs": []}, "it has 2 input and 0 output tensors" + _ONE_EACH),
        ("all_to_all", {"inputs": [[4]], "outputs": [[1]] * 2}, "it has 1 input and 2 output tensors" + _ONE_EACH),
        ("all_to_all", {"inputs": [[4, 2]], "outputs": [[4, 3]], "in_split": [1] * 4},
         "a row of its input has 2 elements, one of its output 3"),
        ("all_to_all", {"inputs": [[4]], "outputs": [[4]], "out_split": [1, 1, 1, 2]},
         "out_split adds up to 5, but the tensor has 4 rows"),
    ],
)  # fmt: skip
def test_a_contradictory_call_gives_the_reason(op: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BrokenError) as broken:
        completed(op, **fields)
    assert str(broken.value) == why


def test_the_bytes_of_a_call_come_from_its_tensors_not_the_trace() -> None:
    calls = (record("gather", inputs=[[3]], root=1), record("all_gather"), record("send", peer=1), record("barrier"))
    assert [complete(one, _FOUR, 0).bytes for one in calls] == [48, 64, 16, 0]


def test_a_call_on_a_group_without_its_rank_is_refused() -> None:
    with pytest.raises(BrokenError, match=r"^its group '0' is not defined$"):
        complete(record("all_reduce"), None, 0)
    with pytest.raises(BrokenError, match=r"^its group '0' is not defined$"):
        complete(record("all_reduce"), Group(pg="0", size=4), 0)
    with pytest.raises(BrokenError, match=r"rank 7 is not in its group '0' \(ranks 0-3\)"):
        complete(record("all_reduce"), _FOUR, 7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "send"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_substitute_has_the_same_bytes(backend: str, op: str, dtype: str) -> None:
    instead = substitute(record(op, dtype=dtype, peer=1 if op == "send" else None), backend)
    assert DTYPES[instead.dtype].size * instead.elements == DTYPES[dtype].size
    assert (instead.dtype != dtype) == bool(instead.differences)


@pytest.mark.parametrize(
    ("fields", "backend", "reduce", "differences"),
    [
        ({"reduce": "avg"}, "gloo", "avg", ()),
        ({"reduce": None}, "gloo", "sum", ("all_reduce as sum, because the reduction is not recorded",)),
        (
            {"reduce": "max", "dtype": "complex64"},
            "gloo",
            "max",
            ("all_reduce of complex64 as float64, of the same size",),
        ),
        ({"reduce": "avg", "dtype": "complex64"}, "gloo", "avg", ()),
        ({"reduce": "premul_sum"}, "nccl", "sum", ("all_reduce as sum, instead of premul_sum",)),
        ({"reduce": "band", "dtype": "int32"}, "gloo", "band", ()),
        (
            {"reduce": "band", "dtype": "int32"},
            "nccl",
            "sum",
            ("all_reduce as sum, because nccl has no band of int32",),
        ),
        ({"reduce": "band"}, "gloo", "sum", ("all_reduce as sum, because gloo has no band of float32",)),
        ({"reduce": "avg", "dtype": "int64"}, "gloo", "sum", ("all_reduce as sum, because int64 has no avg",)),
    ],
)
def test_reductions_may_change(fields: dict[str, Any], backend: str, reduce: str, differences: tuple[str, ...]) -> None:
    instead = substitute(record("all_reduce", **fields), backend)
    assert (instead.reduce, instead.differences) == (reduce, differences)


def test_an_unknown_backend_gets_the_recorded_call() -> None:
    found = substitute(record("all_reduce", dtype="float8_e5m2"), "ucc")
    assert found == Substitute(c10d="allreduce_", dtype="float8_e5m2", elements=1, reduce="sum", differences=())
    barrier = record("barrier", c10d="monitored_barrier_")
    assert substitute(barrier, "gloo") == Substitute(c10d="monitored_barrier_", dtype="uint8")
    assert substitute(barrier, "nccl").differences == ("monitored_barrier, which gloo alone has, as barrier",)


@given(st.lists(st.lists(st.integers(0, 99), min_size=3, max_size=3), min_size=3, max_size=3))
def test_fit_meets_any_consistent_totals(table: list[list[int]]) -> None:
    rows = [sum(row) for row in table]
    columns = [sum(column) for column in zip(*table, strict=True)]
    made = fit(rows, columns)
    assert [sum(row) for row in made] == rows
    assert [sum(column) for column in zip(*made, strict=True)] == columns
    assert all(part >= 0 for row in made for part in row)


def exchange(inputs: list[int], outputs: list[int]) -> CommRecord:
    return record("all_to_all", c10d="alltoall_base_", inputs=[inputs], outputs=[outputs])


def test_missing_all_to_all_splits_are_chosen_and_reported() -> None:
    even = exchange([4], [4])
    plan = plan_of([even, exchange([5, 2], [3, 2])], [even, exchange([1, 2], [3, 2])])
    assert [[call.record.in_split for call in rank.calls] for rank in plan.ranks] == [[None, [3, 2]], [None, [0, 1]]]
    assert [rank.calls[1].record.out_split for rank in plan.ranks] == [[3, 0], [2, 1]]
    assert plan.notes[0].startswith("1 uneven all_to_all(s) have no recorded splits: parts were chosen")


@pytest.mark.parametrize("other", [exchange([1], [4]), exchange([1, 2], [3, 2])])
def test_an_exchange_with_unequal_totals_or_rows_is_refused(other: CommRecord) -> None:
    ranks = [exchange([5], [3]), record("barrier")], [other, record("barrier")]
    with pytest.raises(CrossrankError) as refused:
        plan_of(*ranks)
    what = "(all_to_all #1 on '0'): what its ranks send is not what they receive"
    assert str(refused.value) == (
        f"rank-0: rank 0, call 0 {what}; rank-1: rank 1, call 0 {what}; --partial skips such calls"
    )
    assert plan_of(*ranks, partial=True).coverage().reasons == {"it contradicts itself": 2}
