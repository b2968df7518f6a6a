"""All work over ranks goes through here: a worker takes one rank and returns a small summary of it.

Which workers, a `Fleet` says: this process, local processes, a Dask cluster, or any `concurrent.futures.Executor`.
Results come in the order of the items, so what is made of them does not depend on who did the work. An item whose
worker was killed or whose function failed is tried once more, by itself, before it is given up.

`--shard I/N` does every N-th item and keeps the results in a file; `--merge` goes on from all N of them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from crossrank.errors import CrossrankError, one_line
from crossrank.tools.shards import Merge, Shard

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
        results: list[Result] = fleet.part.results(len(work))
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
    slots: list[Result | None] = [None] * len(work)
    left: list[tuple[int, Exception]] = []
    with _workers(fleet, len(work)) as pool, _spilling(function, pool) as spilled:
        for index, outcome in _outcomes(spilled, list(enumerate(work)), pool):
            if isinstance(outcome, _Failure):
                left.append((index, outcome.error))
            else:
                slots[index] = outcome
                done()
    # A process that is killed takes its pool along. What it leaves is tried once more, each by itself.
    for index, _ in sorted(left, key=lambda entry: entry[0]):
        with _workers(fleet, len(work)) as pool, _spilling(function, pool) as spilled:
            _, outcome = next(_outcomes(spilled, [(index, work[index])], pool))
        if isinstance(outcome, _Failure):
            if failed is None:
                raise _as_ours(outcome.error) from outcome.error
            slots[index] = failed(work[index], _as_ours(outcome.error))
        else:
            slots[index] = outcome
        done()
    return slots  # type: ignore[return-value]  # every slot is filled by now


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

    def load(self, name: str) -> Result:
        with open(name, "rb") as file:
            result: Result = pickle.load(file)
        os.unlink(name)
        return result


@contextmanager
def _spilling(
    function: Callable[[Item], Result], pool: Executor | None
) -> Iterator[Callable[[Item], Result] | _Spilled[Item, Result]]:
    if isinstance(pool, ProcessPoolExecutor):
        with tempfile.TemporaryDirectory(prefix="crossrank-", ignore_cleanup_errors=True) as folder:
            yield _Spilled(function, folder)
    else:
        yield function


@dataclass(frozen=True)
class _Failure:
    error: Exception


@contextmanager
def _workers(fleet: Fleet, items: int) -> Iterator[Executor | None]:
    """The executor of `fleet`; None for this process."""
    if fleet.executor is not None:
        yield fleet.executor
    elif fleet.cluster is not None:
        from crossrank.tools.cluster import dask_executor

        with dask_executor(fleet.cluster, min(fleet.jobs, max(items, 1))) as executor:
            yield executor
    elif (jobs := min(fleet.jobs, items)) > 1:
        # Workers are spawned: a fork of a process with threads may deadlock.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(max_workers=jobs, mp_context=context)
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        with nullcontext():
            yield None


def _outcomes(
    function: Callable[[Item], Result] | _Spilled[Item, Result], work: list[tuple[int, Item]], pool: Executor | None
) -> Iterator[tuple[int, Any]]:
    """Results as they come, or a `_Failure`, each with the number of its item."""
    if pool is None:
        assert not isinstance(function, _Spilled)
        for index, item in work:
            try:
                yield index, function(item)
            except Exception as error:
                yield index, _Failure(error)
        return
    futures: dict[Future[Any], int] = {}
    for index, item in work:
        try:
            futures[pool.submit(function, item)] = index
        except Exception as error:  # the pool broke while it was filled
            yield index, _Failure(error)
    for future in as_completed(futures):
        try:
            result = future.result()
            yield futures[future], function.load(result) if isinstance(function, _Spilled) else result
        except Exception as error:
            yield futures[future], _Failure(error)


def _as_ours(error: Exception) -> CrossrankError:
    """An error that nobody foresaw must not end the work on other ranks."""
    if isinstance(error, CrossrankError):
        return error
    if isinstance(error, MemoryError):
        return CrossrankError("there is not enough memory for it; try --jobs 1, or a larger machine")
    if type(error).__name__ in ("BrokenProcessPool", "KilledWorker"):
        return CrossrankError("its process was killed, most often for lack of memory; try --jobs 1")
    return CrossrankError(f"stopped by an error that was not foreseen ({one_line(error)}); please report it")
