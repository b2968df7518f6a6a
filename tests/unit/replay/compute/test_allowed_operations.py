"""Which operations of a file run: those that compute on tensors, with what such operations take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from crossrank.replay.plan.compute.compute_plan import ComputeOperation
from crossrank.replay.run.allowed_operations import MISSING, find_operations, refusal

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
        "aten::_wrapped_linear_prepack(Tensor weight, Tensor scale, Tensor zero_point, Tensor bias) -> Tensor",
        "aten::fbgemm_pack_gemm_matrix_fp16(Tensor input) -> Tensor",
        "mkldnn::data_ptr(Tensor mkldnn_tensor) -> int",
        "aten::_sparse_coo_tensor_with_dims_and_tensors(int sparse_dim) -> Tensor",
        "aten::_cummax_helper(Tensor self, Tensor(a!) values, Tensor(b!) indices, int dim) -> ()",
    ],
)
def test_an_operation_that_may_do_more_than_compute_is_not_run(schema: str) -> None:
    assert why_not(schema) == "may do more than compute on tensors: not run from a file"


@pytest.mark.parametrize(
    "schema",
    [
        "aten::add._qualified_op_name(Tensor self) -> Tensor",
        "no schema",
        "aten::nobody_has(Tensor self) -> Tensor",
        "aten::x(" + "(" * 20_000,
        "acme::x(Tensor a) -> Tensor",
    ],
)
def test_an_unknown_operation_is_missing(schema: str) -> None:
    assert why_not(schema) == MISSING


_STRANGE = "has an unusual argument: not run from a file"


@pytest.mark.parametrize(
    ("schema", "arguments", "refused"),
    [
        *(
            (DIV, [TENSOR, TENSOR, mode], _STRANGE)
            for mode in ("/home/alice/.profile", "os", "trunc; import os", "../x")
        ),
        (DIV, [TENSOR, TENSOR, ["floor"]], ""),
        (DIV, [TENSOR, TENSOR, "floor"], ""),
        (EINSUM, ["bij, bjk -> bik", [TENSOR, TENSOR]], ""),
        (EINSUM, ["/bin/sh", [TENSOR]], _STRANGE),
        # More arguments than the schema has.
        (ADD, [TENSOR, TENSOR, 1, 2], _STRANGE),
        (ADD, [TENSOR, TENSOR], ""),
        # A type of elements that is none.
        *((ONES, [[4], code], _STRANGE) for code in (-1, 12, 99)),
        (ONES, [[4], 6], ""),
        # A size is no tensor, and a gradient is not asked for.
        (ONES, [[TENSOR]], _STRANGE),
        ("prims::empty(SymInt[] shape)", [[4], 6, {"device": "cpu"}, True], _STRANGE),
        # A slice to the last row is no large tensor, nor is a view.
        (SLICE, [TENSOR, 0, 500, (1 << 63) - 1], ""),
        ("aten::expand(Tensor(a) self, SymInt[] size) -> Tensor(a)", [TENSOR, [1 << 20, 1 << 20]], ""),
    ],
)
def test_an_operation_gets_only_valid_arguments(schema: str, arguments: list[Any], refused: str) -> None:
    assert why_not(schema, *arguments) == refused


BATCH_NORM = "native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var"
NORM = f"aten::{BATCH_NORM}, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)"
PAD = "aten::reflection_pad1d_backward(Tensor grad_output, Tensor self, SymInt[2] padding) -> Tensor"
SGD = (
    "aten::_fused_sgd_(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffer_list, *, float weight_decay)"
    " -> ()"
)
IMAGES, CHANNELS = torch.ones(2, 3, 4, 4), torch.ones(3)


@pytest.mark.parametrize(
    ("schema", "arguments", "why"),
    [
        (NORM, (IMAGES, torch.ones(2), None, None, None, True, 0.1, 1e-5), "one element for each of 3 channels"),
        (NORM, (IMAGES, None, None, None, None, False, 0.1, 1e-5), "needs running statistics outside of training"),
        (PAD, (torch.ones(2, 3, 4), torch.ones(2, 3, 4), []), "a padding of 0 numbers for a tensor of 3 dimensions"),
        (SGD, ([CHANNELS], [torch.ones(0)], []), "the lists have different tensors"),
    ],
)
def test_shapes_that_torch_does_not_check_are_checked_before_the_operation(
    schema: str, arguments: tuple[Any, ...], why: str
) -> None:
    (found,) = find_operations([schema])
    with pytest.raises(ValueError, match=why):
        found.operation._op(*arguments)


def test_a_checked_operation_computes_as_torch_does() -> None:
    (found,) = find_operations([NORM])
    given = (IMAGES, CHANNELS, CHANNELS, torch.zeros(3), CHANNELS, False, 0.1, 1e-5)
    assert torch.equal(found.operation._op(*given)[0], torch.native_batch_norm(*given)[0])


@pytest.mark.parametrize(
    "name", ["_reshape_alias_copy", "_foreach_copy", "_stack", "_weight_norm", "_cdist_backward", "promote_types"]
)
def test_an_operation_that_torch_crashes_in_is_not_run(name: str) -> None:
    assert why_not(f"aten::{name}(Tensor self) -> Tensor") == "may do more than compute on tensors: not run from a file"
    assert "not run" not in why_not("aten::_foreach_copy_(Tensor(a!)[] self, Tensor[] src, bool non_blocking) -> ()")


def test_a_memory_format_is_one_that_torch_has() -> None:
    clone = "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"
    assert [why_not(clone, TENSOR, code) == "" for code in (None, 0, 3, 4, -1)] == [True, True, True, False, False]


def test_a_view_stays_in_its_tensors_memory() -> None:
    (found,) = find_operations(["aten::_reshape_alias(Tensor(a) self, SymInt[] size, SymInt[] stride) -> Tensor(a)"])
    assert found.operation._op(torch.arange(4), [2], [2]).tolist() == [0, 2]
    with pytest.raises(RuntimeError, match="out of bounds"):
        found.operation._op(torch.arange(4), [12], [1])


@pytest.mark.parametrize(("schema", "size"), [(ONES, [1 << 20, 1 << 30]), (ARANGE, 1e18), (ARANGE, 10**400)])
def test_a_tensor_larger_than_the_memory_is_not_made(schema: str, size: Any) -> None:
    assert "elements, more than this machine has bytes" in why_not(schema, size)
    assert why_not(schema, [4] if schema == ONES else 4) == ""


def test_custom_operations_run_only_from_imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
