"""All work over ranks goes through here: a worker takes one rank and returns a small summary of it.

Which workers, a `Fleet` says: this process, local processes, a Dask cluster, or any `concurrent.futures.Executor`.
Results come in the order of the items, so what is made of them does not depend on who did the work. An item that
failed is tried once more before it is given up (a network drive may have had a bad moment); what a killed process
left undone is tried in halves, until the item that kills is by itself.

`--shard I/N` does every N-th item and keeps the results in a file; `--merge` goes on from all N of them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from crossrank.errors import CrossrankError, unforeseen
from crossrank.tools.shards import Merge, Shard

_LEAST_TASKS, _MOST_AT_ONCE = 64, 16
"""For a cluster: tasks that the work is cut into before items share one, and how many do at most."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Who does the work. The first that is set counts: `executor`, `cluster`, `jobs`."""

    jobs: int = 1
    """Local processes; 1 = this one."""
    cluster: str | None = None
    """`local`, or the address of a Dask scheduler."""
    executor: Executor | None = None
    """The caller's; it is left open."""
    part: Shard | Merge | None = None
    """Only a share of the items, or the results of all shares."""


def map_ranks(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    fleet: Fleet,
    *,
    failed: Callable[[Item, CrossrankError], Result] | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[Result]:
    """`function` of every item, in order.

    `done` is called here after each item. Where `failed` is given, it makes the result of an item that failed twice,
    and the other items go on; else the first such error is raised. Raises `ShardDone` where only a share was asked for.
    """
    work = list(items)
    if isinstance(fleet.part, Merge):
        results: list[Result] = fleet.part.results(len(work), function)
        for _ in work:
            done()
        return results
    if isinstance(fleet.part, Shard):
        share = fleet.part.of(len(work))
        mine = _map(function, [work[index] for index in share], fleet, failed, done)
        raise fleet.part.keep(mine, len(work))
    return _map(function, work, fleet, failed, done)


def _map(
    function: Callable[[Item], Result],
    work: list[Item],
    fleet: Fleet,
    failed: Callable[[Item, CrossrankError], Result] | None,
    done: Callable[[], None],
) -> list[Result]:
    slots: dict[int, Result] = {}
    given_up: dict[int, Exception] = {}
    failures: Counter[int] = Counter()
    # A single item is done here, unless it was among others: it may be the one that kills its process.
    apart = min(fleet.jobs, len(work)) > 1
    todo = [list(range(len(work)))]
    while todo:
        again: list[int] = []
        broken: list[int] = []
        chunk = todo.pop(0)
        for index, outcome in _outcomes(function, [(index, work[index]) for index in chunk], fleet, apart):
            if not isinstance(outcome, _Failure):
                slots[index] = outcome
                done()
            elif _was_killed(outcome.error) and len(chunk) > 1:
                broken.append(index)
            else:
                failures[index] += 1
                again.append(index)
                if failures[index] == 2:
                    given_up[index] = outcome.error
                    done()
        again = [index for index in again if index not in given_up]
        # A process that is killed takes its pool along, and it is not known which item it had: what was left is tried
        # in halves, until the one that kills is by itself.
        broken.sort()
        todo += [half for half in (again, broken[: len(broken) // 2], broken[len(broken) // 2 :]) if half]
    if given_up and failed is None:
        error = given_up[min(given_up)]
        raise _as_ours(error) from error
    for index, error in given_up.items():
        assert failed is not None
        slots[index] = failed(work[index], _as_ours(error))
    return [slots[index] for index in range(len(work))]


@dataclass(frozen=True)
class _Spilled(Generic[Item, Result]):
    """`function` in a process of a pool, with its result in a file.

    All processes of a pool send their results through one pipe. One that is killed in the middle of a large one would
    leave the others, and us, waiting for the rest of it; the name of a file goes through at once.
    """

    function: Callable[[Item], Result]
    folder: str

    def __call__(self, item: Item) -> str:
        descriptor, name = tempfile.mkstemp(dir=self.folder)
        with open(descriptor, "wb") as file:
            pickle.dump(self.function(item), file, protocol=5)
        return name


def _load(name: str) -> Any:
    with open(name, "rb") as file:
        result = pickle.load(file)
    os.unlink(name)
    return result


@dataclass(frozen=True)
class _Failure:
    error: Exception


def _was_killed(error: Exception) -> bool:
    return isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker"


@dataclass(frozen=True)
class _Several(Generic[Item, Result]):
    """`function` of several items in one task; the failure of one does not end the others."""

    function: Callable[[Item], Result]

    def __call__(self, items: list[Item]) -> list[Any]:
        outcomes: list[Any] = []
        for item in items:
            try:
                outcomes.append(self.function(item))
            except Exception as error:
                outcomes.append(_Failure(error))
        return outcomes


def _outcomes(
    function: Callable[[Item], Result], work: list[tuple[int, Item]], fleet: Fleet, apart: bool
) -> Iterator[tuple[int, Any]]:
    """Results as they come, or a `_Failure`, each with the number of its item. `apart`: in processes of their own."""
    if fleet.executor is not None:
        yield from _from_pool(function, work, fleet.executor, lambda result: result)
    elif fleet.cluster is not None:
        from crossrank.tools.cluster import dask_executor

        # A task costs the scheduler some ms of work, more than a small rank takes.
        size = max(1, min(_MOST_AT_ONCE, len(work) // _LEAST_TASKS))
        tasks = [work[first : first + size] for first in range(0, len(work), size)]
        several = [(number, [item for _, item in task]) for number, task in enumerate(tasks)]
        with dask_executor(fleet.cluster, min(fleet.jobs, len(work))) as executor:
            for number, outcomes in _from_pool(_Several(function), several, executor, lambda result: result):
                for place, (index, _) in enumerate(tasks[number]):
                    yield index, outcomes if isinstance(outcomes, _Failure) else outcomes[place]
    elif apart:
        # Workers are spawned: a fork of a process with threads may deadlock.
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory(prefix="crossrank-", ignore_cleanup_errors=True) as folder:
            pool = ProcessPoolExecutor(max_workers=min(fleet.jobs, len(work)), mp_context=context)
            try:
                yield from _from_pool(_Spilled(function, folder), work, pool, _load)
            finally:
                pool.shutdown(cancel_futures=True)
    else:
        for index, item in work:
            try:
                yield index, function(item)
            except Exception as error:
                yield index, _Failure(error)


def _from_pool(
    function: Callable[[Item], Any], work: list[tuple[int, Item]], pool: Executor, load: Callable[[Any], Any]
) -> Iterator[tuple[int, Any]]:
    futures: dict[Future[Any], int] = {}
    for index, item in work:
        try:
            futures[pool.submit(function, item)] = index
        except Exception as error:  # the pool broke while it was filled
            yield index, _Failure(error)
    for future in as_completed(futures):
        try:
            yield futures[future], load(future.result())
        except Exception as error:
            yield futures[future], _Failure(error)


def _as_ours(error: Exception) -> CrossrankError:
    """An error that nobody foresaw must not end the work on other ranks."""
    if isinstance(error, CrossrankError):
        return error
    if _was_killed(error):
        return CrossrankError("its process was killed, most often for lack of memory; try --jobs 1")
    return unforeseen(error)
