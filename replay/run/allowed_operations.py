"""Decides which operations of this torch a replay may run, by their schemas in a trace or a plan.

Such files may be from untrusted users, and torch has operations that write files, print, or allocate any amount of
memory. So a replay runs only operations that are known to compute on tensors. These are those of `_NAMESPACES` except
`_REFUSED`, if each argument is a tensor, a number, or in `_WORDS`. Others run if the user imports their module.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from crossrank.errors import CrossrankError, one_line
from crossrank.machine import memory
from crossrank.replay.plan.compute.compute_plan import ComputeOperation
from crossrank.replay.plan.plan import Plan

MISSING = "this torch has no such operation; --import MODULE can define it"
_NOT_ALLOWED = "may do more than compute on tensors: not run from a file"
_STRANGE_ARGUMENT = "has an unusual argument: not run from a file"
_NEEDS = {
    "_c10d_functional": "torch.distributed._functional_collectives",
    "fsdp": "torch.distributed.fsdp",
}
"""Namespace of operations -> the module of torch that defines them."""
_NAMESPACES = frozenset(("aten", "prims", "fsdp", "mkldnn"))
_FUNCTIONAL = frozenset(("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"))
"""They do not communicate: the replay makes communication from the records of calls."""
_TORCH_NAMESPACES_TEXT = """
aten prims prim fsdp mkldnn c10d _c10d_functional c10d_functional _c10d_functional_autograd symm_mem quantized
_quantized quantization onednn mkl mkldnn_prepacked sparse static_runtime inductor inductor_prims profiler rngprims
debugprims debug_mode_ops export _test _dtensor _native cuda torch higher_order triton torchbind rpc
"""
_TORCH_NAMESPACES = frozenset(_TORCH_NAMESPACES_TEXT.split())
"""Namespaces of torch. An import of the user cannot allow more of them."""
_REFUSED = re.compile(
    r"from_file|save|load|_?print|_?(?:functional_)?assert\w*|set|set_data|_resize_output|resize_as_sparse|"
    r"_copy_from_and_resize|_unsafe_(?!view$)\w+|_reinterpret\w*|_nested_\w+|_test_\w+|_cufft_\w+|record_stream|"
    r"requires_grad|_backward|retain_grad|_version|\w*sparse\w*|_?indices|_?values|c?col_indices|c?row_indices|"
    r"_convert_indices\w*|_coalesced|fbgemm_\w+|_wrapped_\w+|quantized_\w+|data_ptr|_nbytes|_get_mkldnn\w*|"
    r"_cumm(?:ax|in)_helper|_sobol_\w+|_?segment_reduce\w*|_nnpack_\w+|"
    r"_reshape_alias_copy|_autocast_to_\w+|promote_types|_new_zeros_with_same_feature_meta|_remove_batch_dim|_stack|"
    r"_slow_conv2d_backward|_thnn_differentiable_\w+|_transform_bias_rescale_qkv|_weight_norm\w*|_[cp]dist_backward|"
    r"_ctc_loss_backward|_cholesky_solve_helper|_dyn_quant_\w+|fractional_max_pool\dd_backward|"
    r"\w*fused_moving_avg\w*|_reorder_\w+|_batch_norm_impl_index_backward|"
    r"batch_norm_update_stats|multi(?:label)?_margin_loss_backward|_masked_softmax_backward|"
    r"_convolution_transpose_pointwise"
)
"""Names without the final underscore of in-place operations. They write files, end the process, keep addresses in
tensors, or use memory by indices and sizes without a check."""
_REFUSED_EXCEPT_IN_PLACE = "_foreach_copy"
"""Torch ends the process if its lists differ; its in-place form checks them."""
_WORDS_TEXT = """
none tanh trunc floor mean sum prod amax amin max min constant reflect replicate circular same valid ij xy linear lower
higher midpoint nearest left right reduced complete r backward forward ortho L U gelsy gelsd gelss gels gesvd gesvdj
gesvda fro nuc relu silu gelu hardswish swish sigmoid hardtanh add multiply mul sub div leaky_relu
"""
_WORDS = frozenset(("", *_WORDS_TEXT.split()))
"""All strings that operations on tensors take as a choice."""
_EQUATION = re.compile(r"[A-Za-z., \->]{1,200}")
_CHOICE = re.compile(r"\w{0,32}")
"""A string that an operation of the user may take, unless it names a file."""
_FILE = re.compile(r"file|path|name$", re.IGNORECASE)
_SIZES = frozenset(("size", "shape", "output_size", "repeats", "sizes"))
_LENGTHS = _SIZES | {"steps", "minlength", "num_classes", "window_length"}
_SIDES = ("n", "m", "row", "col")
"""Arguments with the size of a tensor, or of one of its sides."""
_RANGES = ("aten::arange", "aten::range")
_UNBOUNDED = 1 << 63
_SCHEMA = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?\(")
_MEMORY_FORMATS = range(4)
"""Codes of torch.memory_format (c10/core/MemoryFormat.h); another one ends the process."""
_TYPES = frozenset((*range(12), 15, *range(23, 30), 44))
"""Codes of element types (c10/core/ScalarType.h) except quantized ones."""


class Found(NamedTuple):
    """The operation of a schema, or why none runs."""

    operation: Any
    reason: str = ""


def find_operations(schemas: Iterable[str], imports: Sequence[str] = ()) -> list[Found]:
    """Return the operation of each schema, after the import of `imports`.

    Raises `CrossrankError` if a module cannot be imported.
    """
    imported = frozenset[str]().union(*map(_operations_of_module, imports))
    return [_find_operation(text, imported) for text in schemas]


@functools.cache
def _operations_of_module(module: str) -> frozenset[str]:
    """Return the operations that an import of the module defines; all that are not torch's if it was imported."""
    is_known = module in sys.modules
    before = frozenset(torch._C._dispatch_get_all_op_names())
    try:
        importlib.import_module(module)
    except Exception as error:
        raise CrossrankError(f"--import {module}: cannot be imported ({one_line(error)}); install it") from error
    after = torch._C._dispatch_get_all_op_names()
    names = {name.partition(".")[0] for name in (after if is_known else set(after) - before)}
    return frozenset(name for name in names if name.partition("::")[0] not in _TORCH_NAMESPACES)


def _find_operation(text: str, imported: frozenset[str]) -> Found:
    # Not torch's own parser of schemas, which has no limits of memory and depth.
    match = _SCHEMA.match(text)
    if match is None:
        return Found(None, MISSING)
    namespace, name, overload = match.groups()
    if not _is_computation(namespace, name, imported):
        return Found(None, _NOT_ALLOWED if namespace in _TORCH_NAMESPACES else MISSING)
    if namespace in _NEEDS:
        importlib.import_module(_NEEDS[namespace])
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload or "default", None)
    # An attribute of the packet may be no operation, and TorchScript has its own operations.
    if not isinstance(found, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(found.name()):
        return Found(None, MISSING)
    check = next((check for names, check in _CHECKS if names.fullmatch(name)), None)
    return Found(found if check is None else _Checked(found, check))


class _Checked:
    """An operation whose arguments are checked first, because torch reads or writes beyond its tensors otherwise."""

    def __init__(self, operation: Any, check: Callable[[Mapping[str, Any]], None]) -> None:
        self._schema, self._run, self._check = operation._schema, operation._op, check

    def _op(self, *arguments: Any, **named: Any) -> Any:
        names = (one.name for one in self._schema.arguments)
        self._check(dict(zip(names, arguments, strict=False)) | named)
        return self._run(*arguments, **named)


def _check_storage(given: Mapping[str, Any]) -> None:
    tensor = given["self"]
    tensor.as_strided(given["size"], given["stride"], tensor.storage_offset())  # raises


def _check_lists(given: Mapping[str, Any]) -> None:
    shapes = [[one.shape for one in value] for value in given.values() if isinstance(value, list | tuple) and value]
    if any(one != shapes[0] for one in shapes):
        raise ValueError("the lists have different tensors")


def _check_channels(given: Mapping[str, Any]) -> None:
    tensor = given["input"]
    channels = tensor.shape[1] if tensor.dim() > 1 else -1
    in_training = given.get("training", given.get("train", False))
    used = _OF_CHANNELS if in_training else [name for name in _OF_CHANNELS if not name.startswith("save_")]
    others = [value for name, value in given.items() if name in used and value is not None]
    if any(one.shape != (channels,) for one in others) or not tensor.numel():
        raise ValueError(f"an argument does not have one element for each of {channels} channels")
    if not in_training and any(given.get(name) is None for name in ("running_mean", "running_var")):
        raise ValueError("the operation needs running statistics outside of training")
    if in_training and any(name.startswith("save_") and value is None for name, value in given.items()):
        raise ValueError("the backward pass needs saved statistics in training")
    gradient = next((given[name] for name in ("grad_out", "grad_output") if name in given), tensor)
    if gradient.shape != tensor.shape:
        raise ValueError("the gradient has another shape than the input")


def _check_padding(sides: int, given: Mapping[str, Any]) -> None:
    padding, tensor = given["padding"], given["self"]
    if len(padding) != 2 * sides or not sides < tensor.dim() <= sides + 2 or not tensor.numel():
        raise ValueError(f"a padding of {len(padding)} numbers for a tensor of {tensor.dim()} dimensions")


_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
"""Mode of a recurrent layer (RNN with ReLU or tanh, LSTM, GRU) -> rows of a weight per element of its state."""


def _check_recurrent(given: Mapping[str, Any]) -> None:
    tensor, hidden = given["input"], given["hidden_size"]
    rows = _GATES.get(given["mode"], 0) * hidden
    batch = tensor.shape[1] if tensor.dim() == 3 else -1
    expected = {
        "weight0": (rows, tensor.shape[-1] if tensor.dim() else -1),
        "weight1": (rows, hidden),
        "weight2": (rows,),
        "weight3": (rows,),
        "hx_": (batch, hidden),
        "cx_": (batch, hidden),
    }
    for name, shape in expected.items():
        if given[name].shape[-len(shape) :] != shape or given[name].numel() != math.prod(shape):
            raise ValueError(f"{name} has the shape {tuple(given[name].shape)}, and not {shape}")


_OF_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")
_CHECKS: tuple[tuple[re.Pattern[str], Callable[[Mapping[str, Any]], None]], ...] = (
    (re.compile("_reshape_alias"), _check_storage),
    (re.compile(r"_fused_(?:sgd|adamw?|adagrad)_?"), _check_lists),
    (re.compile(r"\w*batch_norm\w*"), _check_channels),
    (re.compile("mkldnn_rnn_layer"), _check_recurrent),
    *(
        (re.compile(rf"(?:reflection|replication)_pad{sides}d_backward"), functools.partial(_check_padding, sides))
        for sides in (1, 2, 3)
    ),
)
"""Names of operations -> what checks their arguments before each call."""


def _is_computation(namespace: str, name: str, imported: frozenset[str]) -> bool:
    if namespace not in _NAMESPACES:
        return f"{namespace}::{name}" in imported | _FUNCTIONAL
    return name != _REFUSED_EXCEPT_IN_PLACE and _REFUSED.fullmatch(name.removesuffix("_")) is None


def refusal(found: Found, operation: ComputeOperation) -> str:
    """Return why an operation does not run with its arguments; empty if it runs."""
    if found.operation is None:
        return found.reason
    schema = found.operation._schema
    if len(operation.arguments) > len(schema.arguments):
        return _STRANGE_ARGUMENT
    is_own = schema.name.partition("::")[0] not in _TORCH_NAMESPACES
    if not all(map(functools.partial(_is_allowed, schema.name, is_own), schema.arguments, operation.arguments)):
        return _STRANGE_ARGUMENT
    elements, most = _largest_tensor(schema, operation.arguments), memory()
    if elements > most:
        return f"asks for a tensor of more than {most:,} elements, more than this machine has bytes of memory"
    return ""


def _is_allowed(name: str, is_own: bool, argument: Any, value: Any) -> bool:
    """Return whether a value has the kind that an argument takes: no tensors as sizes, only choices as strings."""
    if argument.name == "requires_grad" and value:
        return False
    if argument.name in ("dtype", "out_dtype") and isinstance(value, int) and not is_own:
        return value in _TYPES
    if argument.name == "memory_format" and value is not None:
        return value in _MEMORY_FORMATS
    is_number = "int" in str(argument.type) and "Tensor" not in str(argument.type)
    for one in _flatten(value):
        if isinstance(one, dict) and "slot" in one and is_number:
            return False
        if isinstance(one, str) and one not in _WORDS:
            is_equation = name == "aten::einsum" and argument.name == "equation" and _EQUATION.fullmatch(one)
            is_choice = is_own and _CHOICE.fullmatch(one) and not _FILE.search(argument.name)
            if not (is_equation or is_choice):
                return False
    return True


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _flatten(one)
    else:
        yield value


def _largest_tensor(schema: Any, arguments: Sequence[Any]) -> int:
    """Return the number of elements of the largest tensor that the arguments ask for; 0 for views (no memory)."""
    if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
        return 0
    given = {one.name: value for one, value in zip(schema.arguments, arguments, strict=False)}
    most = 0
    for name, value in given.items():
        if name in _SIZES and isinstance(value, list) and all(isinstance(one, int) for one in value):
            most = max(most, math.prod(max(one, 1) for one in value))
        elif name in _LENGTHS and isinstance(value, int):
            most = max(most, abs(value))
    sides = [given.get(name) for name in _SIDES]
    most = max(most, math.prod(max(abs(one), 1) for one in sides if isinstance(one, int)))
    if schema.name in _RANGES:
        begin, end, step = (given.get(name, default) for name, default in (("start", 0), ("end", 0), ("step", 1)))
        if all(isinstance(one, int | float) and abs(one) < _UNBOUNDED for one in (begin, end, step)) and step:
            most = max(most, int(abs(end - begin) / abs(step)))
        else:
            most = _UNBOUNDED
    return most


def leave_out_refused(plan: Plan, imports: Sequence[str]) -> None:
    """Skip, with a reason, the operations of `plan` that this torch lacks or that a replay may not run."""
    for rank in plan.ranks:
        if rank.compute is None:
            continue
        found = find_operations(rank.compute.schemas, imports)
        for one in rank.compute.operations:
            if one.runs and (reason := refusal(found[one.schema], one)):
                one.schema, one.reason = -1, reason
