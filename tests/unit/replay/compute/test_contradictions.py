"""A plan whose memory, tensors or steps are impossible is refused before a rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from crossrank.replay.plan.compute.compute_plan import Block, ComputeOperation, ComputePlan, Slot, contradictions


@dataclass
class Change:
    of: str
    fields: dict[str, Any]


PLAN = ComputePlan(
    operations=[ComputeOperation(name="aten::add", schema=0, arguments=[{"slot": 0}], results=[1])],
    schemas=["aten::add(Tensor self) -> Tensor"],
    slots=[Slot(shape=[2, 3], strides=[3, 1], dtype="float32", block=0, offset=2), Slot([6], [1], "float32")],
    blocks=[Block(bytes=32, dtype="float32")],
    steps=[0],
)


def test_a_plan_without_contradictions_is_taken() -> None:
    assert list(contradictions(PLAN)) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Change("blocks", {"dtype": "float99"}), "memory 0 has an impossible type, size or range of values"),
        (Change("blocks", {"bytes": -1}), "memory 0 has an impossible type, size or range of values"),
        (Change("blocks", {"low": 5, "high": 4}), "memory 0 has an impossible type, size or range of values"),
        (Change("blocks", {"bytes": 31}), "tensor 0 is not within its memory"),
        (Change("slots", {"dtype": "float99"}), "tensor 0 is not within its memory"),
        (Change("slots", {"offset": 3}), "tensor 0 is not within its memory"),
        (Change("slots", {"offset": -1}), "tensor 0 is not within its memory"),
        (Change("slots", {"shape": [-2, 3]}), "tensor 0 has impossible sizes"),
        (Change("slots", {"strides": [1]}), "tensor 0 has impossible sizes"),
        (Change("slots", {"strides": [-3, 1]}), "tensor 0 has impossible sizes"),
        (Change("slots", {"shape": [1 << 40, 1 << 40]}), "tensor 0 has impossible sizes"),
        (Change("slots", {"block": 1}), "a tensor is in memory that does not exist"),
        (Change("", {"threads": 1_000_000}), "1000000 threads are impossible (1 to 4096)"),
        (Change("", {"steps": [7]}), "a step begins at an operation that does not exist"),
    ],
)
def test_a_plan_with_an_impossible_value_is_refused(change: Change, why: str) -> None:
    fields = change.fields
    if change.of:
        first, *others = getattr(PLAN, change.of)
        fields = {change.of: [msgspec.structs.replace(first, **change.fields), *others]}
    assert next(contradictions(msgspec.structs.replace(PLAN, **fields))) == why
