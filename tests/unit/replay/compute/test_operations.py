"""Which operations of a file run: those that compute on tensors, with what such operations take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crossrank.replay.plan.compute.compute_plan import ComputeOperation
from crossrank.replay.run.operations import MISSING, find_operations, refusal

FROM_FILE = (
    "aten::from_file(str filename, bool? shared=None, int? size=0, *, ScalarType? dtype=None, Layout? layout=None, "
    "Device? device=None, bool? pin_memory=None) -> Tensor"
)
DIV = "aten::div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"
ONES = (
    "aten::ones(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
    "bool? pin_memory=None) -> Tensor"
)
ARANGE = (
    "aten::arange(Scalar end, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
    "bool? pin_memory=None) -> Tensor"
)
EINSUM = "aten::einsum(str equation, Tensor[] tensors, *, int[]? path=None) -> Tensor"
ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
SLICE = (
    "aten::slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)"
)
TENSOR = {"slot": 0}


def why_not(schema: str, *arguments: Any) -> str:
    (found,) = find_operations([schema])
    return refusal(found, ComputeOperation(schema=0, arguments=list(arguments)))


@pytest.mark.parametrize(
    "schema",
    [
        FROM_FILE,
        "aten::_print(str s) -> ()",
        "aten::set_.source_Tensor(Tensor(a!) self, Tensor source) -> Tensor(a!)",
        "aten::_resize_output_(Tensor(a!) self, SymInt[] size, Device device) -> Tensor(a!)",
        "aten::_unsafe_index.Tensor(Tensor self, Tensor?[] indices) -> Tensor",
        "aten::_assert_async(Tensor self) -> ()",
        "aten::save(Tensor item, str filename) -> ()",
        "prim::Print(Tensor self) -> ()",
        "profiler::_record_function_enter_new(str name, str? args=None) -> Tensor",
        "inductor::_reinterpret_tensor(Tensor self, int[] size, int[] stride, int offset) -> Tensor",
        "_c10d_functional::all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor",
        "c10d::barrier(Tensor tensor) -> Tensor",
    ],
)
def test_an_operation_that_may_do_more_than_compute_is_not_run(schema: str) -> None:
    assert why_not(schema) == "may do more than compute on tensors: not run from a file"


@pytest.mark.parametrize(
    "schema",
    ["aten::add._qualified_op_name(Tensor self) -> Tensor", "no schema", "aten::nobody_has(Tensor self) -> Tensor"],
)
def test_what_is_no_operation_is_missing(schema: str) -> None:
    assert why_not(schema) == MISSING


@pytest.mark.parametrize("mode", ["/home/alice/.profile", "os", "trunc; import os", ["floor"], "../x"])
def test_a_text_that_is_no_choice_of_an_operation_is_not_given(mode: Any) -> None:
    refused = why_not(DIV, TENSOR, TENSOR, mode)
    assert (refused == "") == (mode == ["floor"])
    assert refused in ("", "is given what no computation takes: not run from a file")


def test_a_choice_and_an_equation_are_given() -> None:
    assert why_not(DIV, TENSOR, TENSOR, "floor") == why_not(EINSUM, "bij, bjk -> bik", [TENSOR, TENSOR]) == ""
    assert why_not(EINSUM, "/bin/sh", [TENSOR]) != ""


def test_more_arguments_than_the_schema_has_are_not_given() -> None:
    assert why_not(ADD, TENSOR, TENSOR, 1, 2) == "is given what no computation takes: not run from a file"


@pytest.mark.parametrize(("schema", "size"), [(ONES, [1 << 20, 1 << 30]), (ARANGE, 1e18), (ARANGE, 1 << 62)])
def test_a_tensor_larger_than_the_memory_is_not_made(schema: str, size: Any) -> None:
    assert "elements, and this machine has" in why_not(schema, size)
    assert why_not(schema, [4] if schema == ONES else 4) == ""


def test_a_slice_to_the_last_row_is_no_large_tensor() -> None:
    assert why_not(SLICE, TENSOR, 0, 500, (1 << 63) - 1) == ""


def test_the_operations_of_an_imported_module_run_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = "acme_of_tests::twice(Tensor x) -> Tensor"
    assert why_not(schema) == MISSING
    (tmp_path / "acme_of_tests.py").write_text(
        "import torch\n"
        "library = torch.library.Library('acme_of_tests', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "library.impl('twice', lambda x: 2 * x, 'CPU')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found, other = find_operations([schema, FROM_FILE], ["acme_of_tests"])
    assert found.operation(torch.ones(2)).tolist() == [2, 2]
    assert other.operation is None
    assert find_operations([schema])[0].operation is None  # what was imported for another replay is not asked for here
