"""The operations of this torch that a replay may run, by the schemas that a trace or a plan has of them.

Both are files of strangers, and torch has operations that write files, print, or take any memory for a tensor. So only
what is known to compute on tensors runs: operations of `_NAMESPACES` but those of `_REFUSED`, with arguments that are
tensors, numbers, or words of `_WORDS`, and operations of others where the user imports the module that makes them.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from math import isfinite, prod
from typing import Any, NamedTuple

import torch

from crossrank.errors import CrossrankError, one_line
from crossrank.replay.plan.compute.compute_plan import ComputeOperation
from crossrank.replay.plan.plan import Plan

MISSING = "this torch has no such operation; --import names a module that makes it"
_NO_COMPUTATION = "may do more than compute on tensors: not run from a file"
_STRANGE_ARGUMENT = "is given what no computation takes: not run from a file"
_NEEDS = {
    "_c10d_functional": "torch.distributed._functional_collectives",
    "fsdp": "torch.distributed.fsdp",
}
"""Namespace of operations -> the module of torch that makes them."""
_NAMESPACES = frozenset(("aten", "prims", "fsdp", "mkldnn"))
_FUNCTIONAL = frozenset(("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"))
"""What is no communication by itself: communication is replayed from the records of calls."""
_TORCHS_OWN = re.compile(
    r"c10d\w*|_c10d\w*|symm_mem|_?quantized|quantization|onednn|mkl|mkldnn_prepacked|sparse|static_runtime|inductor\w*|"
    r"profiler|rngprims|debug\w*|export|prim\w*|_\w+|cuda|torch\w*|higher_order|triton\w*"
)
"""Namespaces of torch that no import of the user's makes allowed."""
_REFUSED = re.compile(
    r"from_file|save|load|_?print|_?(?:functional_)?assert\w*|set|set_data|_resize_output|sparse_resize\w*|"
    r"resize_as_sparse|_copy_from_and_resize|_unsafe_(?!view$)\w+|_sparse_\w+_unsafe|_reinterpret\w*|_nested_\w+|"
    r"_test_\w+|_cufft_\w+|record_stream|requires_grad|_backward|retain_grad|_version"
)
"""Names in `aten`, without the underscore that stands for "in place": they write, end the process, or take memory for
tensors that are not there."""
_WORDS_TEXT = """
none tanh trunc floor mean sum prod amax amin max min constant reflect replicate circular same valid ij xy linear lower
higher midpoint nearest left right reduced complete r backward forward ortho L U gelsy gelsd gelss gels gesvd gesvdj
gesvda fro nuc relu silu gelu hardswish swish sigmoid hardtanh add
"""
_WORDS = frozenset(_WORDS_TEXT.split())
"""Every text that an operation on tensors takes as a choice."""
_EQUATION = re.compile(r"[A-Za-z., \->]{1,200}")
_SIZES = frozenset(("size", "shape", "output_size", "repeats", "sizes", "pad", "padding"))
_LENGTHS = _SIZES | {"steps", "n", "m", "row", "col", "minlength", "num_classes", "window_length"}
"""Arguments that say how large a tensor becomes."""

_RANGES = ("aten::arange", "aten::range")


class Found(NamedTuple):
    """The operation of a schema, or why none runs."""

    operation: Any
    reason: str = ""


def find_operations(schemas: Iterable[str], imports: Sequence[str] = ()) -> list[Found]:
    """The operation of each schema; `imports` are imported first.

    Raises `CrossrankError` where a module cannot be imported.
    """
    imported = frozenset[str]().union(*map(_made_by, imports))
    return [_find(text, imported) for text in schemas]


@functools.cache
def _made_by(module: str) -> frozenset[str]:
    """The operations that importing a module makes; of one that was imported before, all that are not torch's own."""
    is_known = module in sys.modules
    before = frozenset(torch._C._dispatch_get_all_op_names())
    try:
        importlib.import_module(module)
    except Exception as error:
        raise CrossrankError(f"--import {module}: cannot be imported ({one_line(error)}); install it here") from error
    after = torch._C._dispatch_get_all_op_names()
    mine = after if is_known else set(after) - before
    names = {name.partition(".")[0] for name in mine}
    return frozenset(name for name in names if _TORCHS_OWN.fullmatch(name.partition("::")[0]) is None)


def _find(text: str, imported: frozenset[str]) -> Found:
    try:
        schema = torch._C.parse_schema(text)
        namespace, _, name = schema.name.partition("::")
        if not _computes(namespace, name, imported):
            is_torchs = namespace in _NAMESPACES or _TORCHS_OWN.fullmatch(namespace)
            return Found(None, _NO_COMPUTATION if is_torchs else MISSING)
        if namespace in _NEEDS:
            importlib.import_module(_NEEDS[namespace])
        packet = getattr(getattr(torch.ops, namespace), name)
        found = getattr(packet, schema.overload_name or "default")
    except (RuntimeError, AttributeError):
        return Found(None, MISSING)
    # An attribute of the packet may be no operation, and TorchScript has operations of its own.
    is_operation = isinstance(found, torch._ops.OpOverload) and torch._C._dispatch_has_kernel(found.name())
    return Found(found) if is_operation else Found(None, MISSING)


def _computes(namespace: str, name: str, imported: frozenset[str]) -> bool:
    if namespace not in _NAMESPACES:
        return f"{namespace}::{name}" in imported | _FUNCTIONAL
    return _REFUSED.fullmatch(name.removesuffix("_")) is None


def refusal(found: Found, operation: ComputeOperation) -> str:
    """Why an operation does not run with its arguments; empty where it does."""
    if found.operation is None:
        return found.reason
    schema = found.operation._schema
    if len(operation.arguments) > len(schema.arguments):
        return _STRANGE_ARGUMENT
    most = _memory()
    for argument, value in zip(schema.arguments, operation.arguments, strict=False):
        equation = schema.name == "aten::einsum" and argument.name == "equation"
        if not all(_is_plain(text) or (equation and _EQUATION.fullmatch(text)) for text in _texts(value)):
            return _STRANGE_ARGUMENT
        # The end of a slice is beyond its tensor where it goes to the last row.
        name = "size" if argument.name == "end" and schema.name in _RANGES else argument.name
        elements = _elements(name, value)
        if elements > most:
            return f"asks for a tensor of {elements:,} elements, and this machine has {most:,} bytes of memory"
    return ""


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _is_plain(text: str) -> bool:
    return text in _WORDS


def _elements(name: str, value: Any) -> int:
    """Of a tensor whose size an argument gives; 0 for any other argument."""
    if name in _SIZES and isinstance(value, list) and all(isinstance(one, int) for one in value):
        return prod(max(one, 1) for one in value)
    return abs(round(value)) if name in _LENGTHS and isinstance(value, int | float) and isfinite(value) else 0


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def leave_out_refused(plan: Plan, imports: Sequence[str]) -> None:
    """Leave out, with a reason, the operations of `plan` that this torch does not have or a replay does not run."""
    for rank in plan.ranks:
        if rank.compute is None:
            continue
        found = find_operations(rank.compute.schemas, imports)
        for one in rank.compute.operations:
            if one.runs and (reason := refusal(found[one.schema], one)):
                one.schema, one.reason = -1, reason
