"""A map over ranks: each worker reads the files of its rank and returns a small summary."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from crossrank.errors import CrossrankError, one_line

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ranks(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    jobs: int,
    *,
    failed: Callable[[Item, CrossrankError], Result] | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[Result]:
    """`function` of every item, in order, on up to `jobs` processes; in this process where that is 1.

    `done` is called here after each item. Where `failed` is given, it makes the result of an item whose function
    raised or whose process was killed, and the other items go on; else the first error is raised.
    """
    work = list(items)
    jobs = min(jobs, len(work))
    if jobs <= 1:
        results = []
        for item in work:
            results.append(_one(function, item, failed))
            done()
        return results
    slots: list[Result | None] = [None] * len(work)
    left = _in_pool(function, list(enumerate(work)), jobs, slots, failed, done)
    # A process that is killed takes the pool along. What it leaves is tried once more, each by itself.
    for index, item in left:
        if _in_pool(function, [(index, item)], 1, slots, failed, done):
            killed = CrossrankError("its process was killed, most often for lack of memory; try --jobs 1")
            if failed is None:
                raise killed
            slots[index] = failed(item, killed)
            done()
    return slots  # type: ignore[return-value]  # every slot is filled by now


def _one(
    function: Callable[[Item], Result], item: Item, failed: Callable[[Item, CrossrankError], Result] | None
) -> Result:
    try:
        return function(item)
    except Exception as error:
        if failed is None:
            raise
        return failed(item, _as_ours(error))


def _as_ours(error: Exception) -> CrossrankError:
    """An error that nobody foresaw must not end the work on other ranks."""
    if isinstance(error, CrossrankError):
        return error
    if isinstance(error, MemoryError):
        return CrossrankError("there is not enough memory for it; try --jobs 1, or a larger machine")
    return CrossrankError(f"stopped by an error that was not foreseen ({one_line(error)}); please report it")


def _in_pool(
    function: Callable[[Item], Result],
    work: list[tuple[int, Item]],
    jobs: int,
    slots: list[Result | None],
    failed: Callable[[Item, CrossrankError], Result] | None,
    done: Callable[[], None],
) -> list[tuple[int, Item]]:
    """Fill the slots of `work`; returns what could not be done because a process of the pool was killed."""
    # Workers are spawned: a fork of a process with threads may deadlock.
    context = multiprocessing.get_context("spawn")
    left = []
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        futures: dict[Future[Result], tuple[int, Item]] = {
            pool.submit(function, item): (index, item) for index, item in work
        }
        for future in as_completed(futures):
            index, item = futures[future]
            try:
                slots[index] = future.result()
            except BrokenProcessPool:
                left.append((index, item))
                continue
            except Exception as error:
                if failed is None:
                    pool.shutdown(cancel_futures=True)
                    raise
                slots[index] = failed(item, _as_ours(error))
            done()
    return sorted(left, key=lambda entry: entry[0])
