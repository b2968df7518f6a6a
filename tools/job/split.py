"""Splits a column by a number that each of its values has: the calls of each row, clock or bin."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", np.int64, np.float64)


def split_by(number: NDArray[np.int64], values: NDArray[Scalar], count: int) -> list[NDArray[Scalar]]:
    """For each number below `count` the values that have it, in their order."""
    order = np.argsort(number, kind="stable")
    edges = np.searchsorted(number[order], np.arange(count + 1))
    ordered = values[order]
    return [ordered[edges[index] : edges[index + 1]] for index in range(count)]
