"""What stands in where a backend lacks a type or a reduction."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.dtypes import DTYPES
from crossrank.replay.plan.dtype_fallback import BACKENDS, Substitute, substitute
from tests.unit.replay.plans import record


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "send"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stand_in_has_the_same_bytes(backend: str, op: str, dtype: str) -> None:
    instead = substitute(record(op, dtype=dtype, peer=1 if op == "send" else None), backend)
    assert DTYPES[instead.dtype].size * instead.elements == DTYPES[dtype].size
    assert (instead.dtype != dtype) == bool(instead.differences)


@pytest.mark.parametrize(
    ("fields", "backend", "reduce", "differences"),
    [
        ({"reduce": "avg"}, "gloo", "avg", ()),
        ({"reduce": None}, "gloo", "sum", ("all_reduce as sum, for the recording does not say the reduction",)),
        (
            {"reduce": "max", "dtype": "complex64"},
            "gloo",
            "max",
            ("all_reduce of complex64 as float64, of the same size",),
        ),
        ({"reduce": "avg", "dtype": "complex64"}, "gloo", "avg", ()),
        ({"reduce": "premul_sum"}, "nccl", "sum", ("all_reduce as sum, in the place of premul_sum",)),
        ({"reduce": "band", "dtype": "int32"}, "gloo", "band", ()),
        ({"reduce": "band", "dtype": "int32"}, "nccl", "sum", ("all_reduce as sum, for nccl has no band of int32",)),
        ({"reduce": "band"}, "gloo", "sum", ("all_reduce as sum, for gloo has no band of float32",)),
        ({"reduce": "avg", "dtype": "int64"}, "gloo", "sum", ("all_reduce as sum, for there is no avg of int64",)),
    ],
)
def test_reductions(fields: dict[str, Any], backend: str, reduce: str, differences: tuple[str, ...]) -> None:
    instead = substitute(record("all_reduce", **fields), backend)
    assert (instead.reduce, instead.differences) == (reduce, differences)


def test_a_backend_that_is_not_known_gets_the_call_as_it_was() -> None:
    found = substitute(record("all_reduce", dtype="float8_e5m2"), "ucc")
    assert found == Substitute(c10d="allreduce_", dtype="float8_e5m2", elements=1, reduce="sum", differences=())
    barrier = record("barrier", c10d="monitored_barrier_")
    assert substitute(barrier, "gloo") == Substitute(c10d="monitored_barrier_", dtype="uint8")
    assert substitute(barrier, "nccl").differences == ("monitored_barrier, which gloo alone has, as barrier",)
