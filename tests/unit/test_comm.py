from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.comm import OPERATIONS


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        # in 100 bytes, out 300 bytes, 4 ranks
        ("all_reduce", 100),
        ("reduce", 100),
        ("broadcast", 100),
        ("all_gather", 300),
        ("reduce_scatter", 100),
        ("gather", 400),
        ("scatter", 1200),
        ("all_to_all", 100),
        ("send", 100),
        ("recv", 300),
        ("barrier", 0),
    ],
)
def test_bytes_of_each_operation(op: str, expected: int) -> None:
    assert OPERATIONS[op].bytes(100, 300, 4) == expected


def test_the_table_has_a_row_for_every_operation_of_the_record_format() -> None:
    assert sorted(OPERATIONS) == [
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "reduce",
        "reduce_scatter",
        "scatter",
        "send",
    ]


@given(st.integers(min_value=1, max_value=100_000))
def test_bus_factors_are_those_of_nccl_tests(n: int) -> None:
    for name, operation in OPERATIONS.items():
        if name == "barrier":
            assert operation.bus_factor is None
            continue
        assert operation.bus_factor is not None
        expected = {"all_reduce": 2 * (n - 1) / n}.get(name)
        if expected is None:
            expected = 1.0 if name in ("broadcast", "reduce", "send", "recv") else (n - 1) / n
        assert operation.bus_factor(n) == expected
