"""What torch calls its functions, where that differs between versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

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
