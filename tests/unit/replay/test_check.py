"""`--check` finds every result that is not what it must be, and no other: here calls are made right, and wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, mul, or_, xor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrank.comm import CommRecord, Group
from crossrank.replay.plan.dtype_fallback import substitute
from crossrank.replay.plan.plan import PlannedCall
from crossrank.replay.plan.shapes import complete
from crossrank.replay.results.expected_values import Checker
from tests.unit.replay.plans import record
from tests.unit.replay.ranks import bound, program

Tensors = list[list[torch.Tensor]]
"""By member."""


def checkers(call: CommRecord, n: int) -> tuple[list[Checker], Tensors, Tensors]:
    """One for each of `n` members that make `call` twice, with the tensors of all as the second one fills them."""
    group = Group(pg="0", size=n, ranks=list(range(n)))
    made, inputs, outputs = [], [], []
    for rank in range(n):
        mine = complete(call, group, rank)
        dtype = getattr(torch, call.dtype or "float32")
        sides = [[torch.zeros(shape, dtype=dtype) for shape in shapes] for shapes in (mine.inputs, mine.outputs)]
        if call.op in ("all_reduce", "reduce", "broadcast"):
            sides[1] = sides[0]
        made_twice = program(
            *map(bound, (0, 1)),
            calls=[PlannedCall(record=mine, wait_before=at + 1, blocking=True) for at in (0, 1)],
            tensors=[(sides[0], sides[1])] * 2,
            substitutes=[substitute(mine, "gloo")] * 2,
            groups={"0": group},
        )
        checker = Checker(made_twice, rank)
        checker.fill(1)
        made.append(checker)
        inputs.append(sides[0])
        outputs.append(sides[1])
    return made, inputs, outputs


def failures(made: list[Checker]) -> list[int]:
    """Ranks that find a wrong result."""
    for checker in made:
        checker.take(1)
    return [checker.rank for checker in made if checker.result.failures]


_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.sum(0) / len(rows),
    "product": lambda rows: rows.prod(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}
_DTYPES = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8"]


def reduced(inputs: Tensors, reduction: str, members: list[int]) -> torch.Tensor:
    rows = torch.stack([inputs[member][0].to(torch.float64) for member in members])
    return _REDUCE[reduction](rows)


@settings(max_examples=60)
@given(
    n=st.sampled_from([1, 2, 3, 16, 40, 120]),
    size=st.integers(1, 200),
    dtype=st.sampled_from(_DTYPES),
    reduction=st.sampled_from(["sum", "avg", "min", "max"]),
    data=st.data(),
)
def test_a_reduction_is_right_with_every_member_once(
    n: int, size: int, dtype: str, reduction: str, data: st.DataObject
) -> None:
    if reduction == "avg" and not dtype.startswith(("float", "bfloat")):
        reduction = "sum"
    call = record("all_reduce", inputs=[[size]], outputs=[[size]], dtype=dtype, reduce=reduction)
    made, inputs, outputs = checkers(call, n)
    whole = reduced(inputs, reduction, list(range(n)))
    lost = data.draw(st.integers(0, n - 1))
    without = reduced(inputs, reduction, [m for m in range(n) if m != lost]) if n > 1 else None
    if without is not None and reduction == "avg":
        without *= (n - 1) / n
    for tensors in outputs:
        tensors[0].copy_(whole)
    assert failures(made) == []
    # An average over more members than elements has several that decide: one of them may be lost in rounding.
    if without is not None and (reduction == "sum" or (reduction == "avg" and size >= n)):
        for tensors in outputs:
            tensors[0].copy_(without)
        assert failures(made) == list(range(n))


@pytest.mark.parametrize(
    ("reduction", "combine"),
    [("product", mul), ("min", min), ("max", max), ("band", and_), ("bor", or_), ("bxor", xor)],
)
def test_a_reduction_without_a_deciding_member_is_wrong(reduction: str, combine: Callable[[int, int], int]) -> None:
    call = record("all_reduce", inputs=[[3]], outputs=[[3]], reduce=reduction, dtype="int32")
    made, inputs, outputs = checkers(call, 4)
    sent = [mine[0].tolist() for mine in inputs]
    for members, wrong in ((range(4), []), ((0, 2, 3), [0, 1, 2, 3])):
        whole = torch.tensor([reduce(combine, (sent[member][at] for member in members)) for at in range(3)])
        for tensors in outputs:
            tensors[0].copy_(whole)
        assert failures(made) == wrong


def test_an_average_may_be_rounded_differently() -> None:
    made, inputs, outputs = checkers(record("all_reduce", inputs=[[3]], outputs=[[3]], reduce="avg"), 3)
    whole = reduced(inputs, "avg", [0, 1, 2])
    eps = torch.finfo(torch.float32).eps
    for tensors, factor in zip(outputs, (1 + 3 * eps, 1 - 6 * eps, float("inf")), strict=True):
        tensors[0].copy_(whole * factor)
    assert failures(made) == [1, 2]


@pytest.mark.parametrize(
    ("dtype", "prime"),
    [("bfloat16", 251), ("float16", 2039), ("float32", 65_521), ("uint8", 251), ("int8", 127), ("int64", 65_521)],
)
def test_sent_values_count_from_their_sender_modulo_the_prime_of_their_type(dtype: str, prime: int) -> None:
    _, inputs, _ = checkers(record("all_gather", inputs=[[70_000]], dtype=dtype), 2)
    for member, (tensor,) in enumerate(inputs):
        assert torch.equal(tensor.to(torch.int64), (torch.arange(70_000) + 31 * member + 7) % prime)


def given_to(member: int, call: CommRecord, inputs: Tensors) -> list[torch.Tensor]:
    """The outputs of a member, made of what all put in."""
    sums = [torch.stack(parts).sum(0) for parts in zip(*inputs, strict=True)] if "reduce" in call.op else []
    match call.op, call.c10d:
        case "all_reduce" | "reduce", _:
            return sums
        case "reduce_scatter", "reduce_scatter_":
            return sums[member : member + 1]
        case "reduce_scatter", _:
            return [whole.view(len(inputs), -1)[member] for whole in sums]
        case "all_gather", "_allgather_base_" | "allgather_into_tensor_coalesced_":
            return [torch.cat(parts) for parts in zip(*inputs, strict=True)]
        case "all_gather" | "gather", _:
            return [tensor for mine in inputs for tensor in mine]
        case _, "scatter_":
            return inputs[call.root or 0][member : member + 1]
        case _:
            return [mine[member] for mine in inputs]


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("all_reduce", {"inputs": [[3], [9]]}),
        ("all_reduce", {"inputs": [[3], [9]], "dtype": "bool"}),
        ("reduce", {"inputs": [[3]], "root": 2}),
        ("all_gather", {"inputs": [[3]]}),
        ("all_gather", {"inputs": [[15]], "dtype": "bool"}),
        ("all_gather", {"inputs": [[3], [9]], "outputs": [[12], [36]]}),
        ("all_gather", {"inputs": [[3]], "outputs": [[3]] * 4}),
        ("all_gather", {"inputs": [[3], [9]], "outputs": [[3], [9]] * 4, "c10d": "allgather_coalesced_"}),
        ("reduce_scatter", {"inputs": [[12], [36]], "outputs": [[3], [9]]}),
        ("reduce_scatter", {"inputs": [[3]] * 4, "outputs": [[3]]}),
        ("gather", {"inputs": [[3]], "root": 2}),
        ("scatter", {"outputs": [[3]], "inputs": [], "root": 2}),
        ("all_to_all", {"inputs": [[3]] * 4}),
    ],
)
def test_a_second_call_is_right_until_its_last_element_changes(op: str, fields: dict[str, Any]) -> None:
    made, inputs, outputs = checkers(record(op, **{"c10d": ""} | fields), 4)
    results = [given_to(checker.rank, checker.program.calls[1].record, inputs) for checker in made]
    holders = [rank for rank, mine in enumerate(outputs) if mine and op != "reduce"] or [2]
    for rank in holders:
        for tensor, result in zip(outputs[rank], results[rank], strict=True):
            tensor.copy_(result)
    assert failures(made) == []
    spoilt = outputs[holders[-1]][-1]
    wrong = spoilt[-1].item()
    spoilt[-1] = not wrong if spoilt.dtype == torch.bool else wrong + 1
    assert failures(made) == holders[-1:]
    (found,) = made[holders[-1]].result.failures
    assert (found.rank, found.call, found.op) == (holders[-1], 0, op)
    assert (found.tensor, found.element, found.elements) == (len(outputs[holders[-1]]) - 1, len(spoilt) - 1, 1)
    assert (found.expected, found.got) == (wrong, spoilt[-1].item())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_unwritten_output_is_wrong(dtype: str) -> None:
    made, _, outputs = checkers(record("all_gather", inputs=[[1]], dtype=dtype), 1)
    assert outputs[0][0].view(torch.uint8).unique().tolist() == [0x55]
    assert failures(made) == [0]


@settings(max_examples=40)
@given(
    n=st.sampled_from([2, 3, 14, 40]),
    size=st.integers(1, 20),
    dtype=st.sampled_from([*_DTYPES, "bool"]),
    data=st.data(),
)
def test_gathered_parts_are_right_only_in_rank_order(n: int, size: int, dtype: str, data: st.DataObject) -> None:
    if dtype == "bool":
        size += 12  # a few bits have to tell the members apart
    call = record("all_gather", inputs=[[size]], outputs=[[n * size]], dtype=dtype)
    made, inputs, outputs = checkers(call, n)
    for tensors in outputs:
        tensors[0].copy_(torch.cat([inputs[member][0] for member in range(n)]))
    assert failures(made) == []
    one, other = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    order = list(range(n))
    order[one], order[other] = order[other], order[one]
    outputs[0][0].copy_(torch.cat([inputs[member][0] for member in order]))
    assert failures(made) == [0]


def test_parts_of_an_exchange_come_from_the_right_sender_and_place() -> None:
    sizes = [[1, 2, 3], [4, 0, 1], [2, 2, 2]]
    calls = [
        record("all_to_all", inputs=[[sum(row)]], outputs=[[sum(r[rank] for r in sizes)]], in_split=row,
               out_split=[r[rank] for r in sizes])
        for rank, row in enumerate(sizes)
    ]  # fmt: skip
    made = [checkers(calls[rank], 3)[0][rank] for rank in range(3)]
    tensors = [checker.program.tensors[0] for checker in made]
    pieces = [list(sent[0].split(row)) for (sent, _), row in zip(tensors, sizes, strict=True)]
    for receiver, (_, received) in enumerate(tensors):
        received[0].copy_(torch.cat([pieces[sender][receiver] for sender in range(3)]))
    assert failures(made) == []
    assert [checker.result.tensors for checker in made] == [3, 2, 3]  # an empty part is none
    tensors[2][1][0].copy_(tensors[2][1][0].flip(0))
    assert failures(made) == [2]


def test_a_missing_broadcast_and_one_from_another_root_are_wrong() -> None:
    call = record("broadcast", root=1)
    made, inputs, _ = checkers(call, 3)
    of_root, of_other = inputs[1][0].clone(), inputs[2][0].clone()
    inputs[0][0].copy_(of_root)
    assert failures(made) == [2]
    made, inputs, _ = checkers(call, 3)
    for tensors in inputs:
        tensors[0].copy_(of_other)
    assert failures(made) == [0, 1, 2]
