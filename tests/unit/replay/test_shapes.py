"""What a source leaves out of a call is filled in from what the operation implies."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.comm import Group
from crossrank.replay.plan.shapes import BrokenError, LeftOutError, complete
from tests.unit.replay.plans import record

_COALESCED = "allgather_into_tensor_coalesced_"
_IN_ROWS = {"in_split": [1, 2, 3, 0], "out_split": [2, 2, 2, 2]}
_IN_ELEMENTS = {"in_split": [2, 4, 6, 0], "out_split": [3, 3, 3, 3]}
_NOT_FOUR = "is not one number for each of 4 ranks"
_FOUR = Group(pg="0", size=4, ranks=[0, 1, 2, 3])


def completed(op: str, rank: int = 0, **fields: Any) -> tuple[str, list[list[int]], list[list[int]]]:
    one = complete(record(op, c10d="", **fields), _FOUR, rank)
    return one.c10d, one.inputs, one.outputs


@pytest.mark.parametrize(
    ("op", "fields", "expected"),
    [
        ("all_reduce", {"inputs": [[2, 3]]}, ("allreduce_", [[2, 3]], [[2, 3]])),
        ("all_reduce", {"inputs": [], "outputs": []}, ("allreduce_", [[4]], [[4]])),
        ("all_reduce", {"inputs": [[2], [3]]}, ("allreduce_coalesced_", [[2], [3]], [[2], [3]])),
        ("all_gather", {"inputs": [[2]]}, ("_allgather_base_", [[2]], [[8]])),
        ("all_gather", {"inputs": [], "outputs": [[8]]}, ("_allgather_base_", [[2]], [[8]])),
        ("all_gather", {"inputs": [[2]], "outputs": [[2]] * 4}, ("allgather_", [[2]], [[2]] * 4)),
        ("all_gather", {"inputs": [], "bytes": 32}, ("_allgather_base_", [[2]], [[8]])),
        ("all_gather", {"inputs": [[1], [2]], "outputs": [[4], [8]]}, (_COALESCED, [[1], [2]], [[4], [8]])),
        ("reduce_scatter", {"inputs": [[8]]}, ("_reduce_scatter_base_", [[8]], [[2]])),
        ("reduce_scatter", {"inputs": [], "outputs": [[2]]}, ("_reduce_scatter_base_", [[8]], [[2]])),
        ("reduce_scatter", {"inputs": [[2]] * 4, "outputs": [[2]]}, ("reduce_scatter_", [[2]] * 4, [[2]])),
        ("all_to_all", {"inputs": [[8]]}, ("alltoall_base_", [[8]], [[8]])),
        ("all_to_all", {"inputs": [[6, 2]]} | _IN_ROWS, ("alltoall_base_", [[6, 2]], [[8, 2]])),
        ("all_to_all", {"inputs": [[6, 2]]} | _IN_ELEMENTS, ("alltoall_base_", [[12]], [[12]])),
        ("all_to_all", {"inputs": [[1], [2], [3], [4]]}, ("alltoall_", [[1], [2], [3], [4]], [[1], [2], [3], [4]])),
        ("gather", {"inputs": [[3]], "root": 0}, ("gather_", [[3]], [[3]] * 4)),
        ("gather", {"inputs": [[3]], "root": 1}, ("gather_", [[3]], [])),
        ("scatter", {"inputs": [], "outputs": [[3]], "root": 0}, ("scatter_", [[3]] * 4, [[3]])),
        ("scatter", {"inputs": [], "outputs": [[3]], "root": 2}, ("scatter_", [], [[3]])),
        ("send", {"peer": 1}, ("send", [[4]], [])),
        ("recv", {"peer": 1, "outputs": [], "bytes": 12}, ("recv_", [], [[3]])),
        ("barrier", {}, ("barrier", [], [])),
    ],
)  # fmt: skip
def test_tensors_of_a_call_of_four_ranks(op: str, fields: dict[str, Any], expected: object) -> None:
    assert completed(op, **fields) == expected


@pytest.mark.parametrize(
    ("op", "fields", "why"),
    [
        ("all_reduce", {"dtype": None}, "its element type is not recorded"),
        ("all_reduce", {"dtype": "float3"}, "its element type float3 is not known"),
        ("fancy_reduce", {}, "fancy_reduce is no operation that is known"),
        ("recv", {"peer": None}, "its other end is not recorded"),
        ("gather", {"root": None}, "its root is not recorded"),
    ],
)
def test_a_call_that_cannot_be_made_again_says_why(op: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(LeftOutError) as left:
        completed(op, **fields)
    assert str(left.value) == why


@pytest.mark.parametrize(
    ("op", "fields", "why"),
    [
        ("send", {"peer": 0}, "its peer, rank 0, is no other member of its group '0'"),
        ("send", {"peer": 9}, "its peer, rank 9, is no other member of its group '0'"),
        ("broadcast", {"root": 5}, "its root, rank 5, is no member of its group '0'"),
        ("all_gather", {"outputs": [[7]]}, "4 elements of each of 4 ranks are not the 7 of the other side"),
        ("reduce_scatter", {"inputs": [[7]]}, "7 elements cannot be shared out among 4 ranks"),
        ("all_to_all", {"inputs": [[7]]}, "its 7 rows cannot be shared out evenly among 4 ranks"),
        ("all_to_all", {"inputs": [[7]], "in_split": [1, 2, 3]}, "in_split [1, 2, 3] " + _NOT_FOUR),
        ("all_to_all", {"inputs": [[2]], "in_split": [5, -1, -1, -1]}, "in_split [5, -1, -1, -1] " + _NOT_FOUR),
        ("all_reduce", {"inputs": [[-1]]}, "a tensor of it has a negative extent"),
    ],
)  # fmt: skip
def test_a_call_that_contradicts_itself_says_what(op: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BrokenError) as broken:
        completed(op, **fields)
    assert str(broken.value) == why


def test_a_group_without_the_rank_is_no_group_of_its() -> None:
    with pytest.raises(BrokenError, match=r"rank 7 is no member of its group '0' \(ranks 0-3\)"):
        complete(record("all_reduce"), _FOUR, 7)
