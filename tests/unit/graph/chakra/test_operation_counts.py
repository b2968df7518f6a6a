"""Floating-point operations of a GPU's activities are those of torch's own formulas, where it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from crossrank.tools.graph.chakra.operation_counts import COUNTS, count_of, counts_by_activity
from crossrank.tools.graph.linking import link
from crossrank.tools.traces.execution_trace import IO
from tests.unit.graph.chakra.test_convert import two_streams

aten = torch.ops.aten


def torch_counts(operation: Any, arguments: list[Any], outputs: Any) -> int:
    def tensors(value: Any) -> Any:
        is_shape = isinstance(value, tuple)
        return torch.empty(value, device="meta") if is_shape else value

    made = tuple(map(tensors, outputs)) if isinstance(outputs, list) else tensors(outputs)
    return int(flop_registry[operation](*map(tensors, arguments), out_val=made))


def sides(arguments: list[Any], outputs: Any) -> tuple[IO, IO]:
    """As an execution trace has them: shapes of tensors, values of the rest."""
    given = IO(
        values=[[] if isinstance(one, tuple) else one for one in arguments],
        shapes=[list(one) if isinstance(one, tuple) else [] for one in arguments],
    )
    made = outputs if isinstance(outputs, list) else [outputs]
    return given, IO(shapes=[list(one) if isinstance(one, tuple) else [] for one in made])


_FORWARD = [(4, 6, 9, 9), (8, 6, 3, 3), None, [1, 1], [0, 0], [1, 1]]
_CASES: dict[str, tuple[list[Any], Any]] = {
    "mm": ([(5, 7), (7, 11)], (5, 11)),
    "addmm": ([(11,), (5, 7), (7, 11)], (5, 11)),
    "bmm": ([(3, 5, 7), (3, 7, 11)], (3, 5, 11)),
    "baddbmm": ([(3, 5, 11), (3, 5, 7), (3, 7, 11)], (3, 5, 11)),
    "convolution": ([*_FORWARD, False, [0, 0], 1], (4, 8, 7, 7)),
    "convolution transposed": (
        [(4, 8, 7, 7), (8, 6, 3, 3), None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1],
        (4, 6, 9, 9),
    ),
    "convolution_backward": (
        [(4, 8, 7, 7), (4, 6, 9, 9), (8, 6, 3, 3), [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]],
        [(4, 6, 9, 9), (8, 6, 3, 3), (8,)],
    ),
    "convolution_backward of the weight alone": (
        [(4, 8, 7, 7), (4, 6, 9, 9), (8, 6, 3, 3), [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True]],
        [None, (8, 6, 3, 3), (8,)],
    ),
    "_scaled_dot_product_flash_attention": ([(2, 4, 16, 8), (2, 4, 24, 8), (2, 4, 24, 12)], (2, 4, 16, 12)),
    "_scaled_dot_product_flash_attention_backward": (
        [(2, 4, 16, 12), (2, 4, 16, 8), (2, 4, 24, 8), (2, 4, 24, 12)],
        [(2, 4, 16, 8), (2, 4, 24, 8), (2, 4, 24, 12)],
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_an_operation_has_the_count_of_torch(case: str) -> None:
    name = case.split()[0]
    arguments, outputs = _CASES[case]
    expected = torch_counts(getattr(aten, name), arguments, outputs)
    assert expected > 0
    assert count_of(f"aten::{name}", *sides(arguments, outputs)) == expected


def test_operations_without_formula_or_valid_shapes_have_no_count() -> None:
    assert count_of("aten::add", IO(shapes=[[4], [4]]), IO(shapes=[[4]])) is None
    for name in COUNTS:
        shapes: Any
        for shapes in ([], [[]], [[1], [2], [3], [4]], ["x", None, 3], [[1 << 40] * 4] * 4):
            assert count_of(name, IO(shapes=shapes), IO(shapes=shapes)) is None


def test_the_longest_kernel_of_an_operation_has_its_count(tmp_path: Path) -> None:
    trace = link(*two_streams().write(tmp_path))
    host = next(op for op in trace.host if op.id == trace.activities[0].host)
    host.name = "aten::mm"
    host.inputs = b'{"values": [], "shapes": [[2, 3], [3, 5]], "types": []}'  # type: ignore[assignment]
    (first, *others) = [one for one in trace.activities if one.host == host.id]
    assert counts_by_activity(trace) == {max([first, *others], key=lambda one: one.duration_ns).id: 60}
