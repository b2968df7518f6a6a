"""What torch calls its functions, where that differs between versions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def _first(*places: tuple[str, str]) -> Any:
    """The first of these (module, name) that this torch has."""
    for module, name in places:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"torch has none of {places}")


fully_shard = _first(
    ("torch.distributed.fsdp", "fully_shard"),
    ("torch.distributed._composable.fsdp", "fully_shard"),  # torch before 2.6
)
# Before torch 2.5 the module of the public name is there, and empty.
_TENSOR = "torch.distributed.tensor", "torch.distributed._tensor"
DTensor, Partial, Replicate, Shard, distribute_tensor = (
    _first(*((module, name) for module in _TENSOR))
    for name in ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor")
)

VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])

HAS_SINGLE = hasattr(dist, "all_gather_single")
"""Whether what gathers into one tensor is called `all_gather_single`."""

HAS_GLOO_RECORDER = VERSION >= (2, 9)
"""Whether torch's flight recorder notes the calls of gloo: not in 2.8, but in 2.11."""

needs_gloo_recorder = pytest.mark.skipif(
    not HAS_GLOO_RECORDER, reason=f"torch {torch.__version__} notes no calls of gloo in its flight recorder"
)

needs_reductions = pytest.mark.skipif(
    VERSION < (2, 9), reason=f"torch {torch.__version__} does not let Python read which reduction the dispatcher has"
)

ALL_GATHER = "all_gather_single" if HAS_SINGLE else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if HAS_SINGLE else "reduce_scatter_tensor"
FUNCTIONAL_ALL_GATHER = "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor"

all_gather: Any = getattr(dist, ALL_GATHER)
