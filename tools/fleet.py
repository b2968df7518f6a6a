"""A map over ranks: each worker reads the files of its rank and returns a small summary."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ranks(function: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> list[Result]:
    """`function` of every item, in order, on up to `jobs` processes; in this process where that is 1."""
    work = list(items)
    jobs = min(jobs, len(work))
    if jobs <= 1:
        return [function(item) for item in work]
    # Workers are spawned: a fork of a process with threads may deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        return list(pool.map(function, work))
