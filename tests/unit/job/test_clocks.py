"""Clocks are aligned by the collectives that they share, most first."""

from __future__ import annotations

import numpy as np

from crossrank.tools.job.clocks import align

OFFSET = 1_000_000


def test_a_clock_with_few_shared_collectives_is_aligned_by_another_clock_that_shares_many() -> None:
    """A and B share 12 collectives, B and C 10; in the one that A and C share, the end on C is wrong."""
    rows = [(0, number, 1000 * number) for number in (*range(13), *range(40, 70))]  # most: it is the reference
    rows += [(1, number, 1000 * number - OFFSET) for number in (*range(1, 13), *range(20, 30))]
    rows += [(2, number, 1000 * number - 2 * OFFSET) for number in range(20, 30)] + [(2, 0, 77_777_777)]
    clock, collective, ended = np.array(rows, np.int64).T
    offsets, aligned, clocks = align(["A", "B", "C"], clock, collective, ended)
    assert aligned.all()
    # Median of eleven differences, of which ten are right; the wrong end alone would give -77 ms.
    assert (offsets - offsets[0]).tolist() == [0, OFFSET, 2 * OFFSET]
    assert clocks.count == 3
