"""Time that overlapping spans cover."""

from __future__ import annotations

import polars as pl
import pytest

from crossrank.tools.analysis.waiting import covered


@pytest.mark.parametrize(
    ("spans", "ns"),
    [
        ([(0, 10), (2, 4)], 10),
        ([(0, 10), (2, 4), (8, 15)], 15),
        ([(0, 10), (0, 10)], 10),
        ([(0, 3), (5, 6)], 4),
        ([(5, 6), (0, 100), (7, 8), (99, 101)], 101),
    ],
    ids=["one inside another", "inside and overlapping", "equal", "apart", "in any order"],
)
def test_overlapping_spans_count_once(spans: list[tuple[int, int]], ns: int) -> None:
    rows = [(rank, begin, end) for rank in range(2) for begin, end in spans]
    frame = pl.LazyFrame(rows, schema=["rank", "begin", "end"], orient="row")
    found = covered(frame, ["rank"], pl.col("begin"), pl.col("end"))
    assert found.sort("rank").rows() == [(0, ns), (1, ns)]
