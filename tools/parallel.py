"""All work over ranks goes through here: a worker takes one rank and returns a small summary of it.

A `Fleet` says which workers: this process, local processes, a Dask cluster, or any `concurrent.futures.Executor`.
Results come in the order of the items, whoever did the work. An item that failed is tried once more before it is given
up (a network drive may have had a bad moment), by itself if its process was killed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from crossrank.errors import CrossrankError, one_line, unforeseen
from crossrank.tools.paused_gc import paused_gc

Item = TypeVar("Item")
Result = TypeVar("Result")
_PATIENCE = "20s"
"""How long a scheduler may take to answer."""
_Function = Callable[[Any], Any]
_Batch = Sequence[tuple[int, Any]]
"""Items with their numbers."""
_Outcomes = Iterator[tuple[int, Any]]
"""The number of an item with its result or a `_Failure`."""


@contextmanager
def unseen(what: str, count: int) -> Iterator[Callable[[], None]]:
    """No progress bar."""
    yield lambda: None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Who does the work. The first that is set counts: `executor`, `cluster`, `jobs`."""

    jobs: int = 1
    """Local processes; 1 = this one."""
    cluster: str | None = None
    """`local`, or the address of a Dask scheduler."""
    executor: Executor | None = None
    """The caller's; it is left open."""
    bar: Callable[[str, int], AbstractContextManager[Callable[[], None]]] = unseen
    """(what is done, to how many items) -> shows the progress while its block runs; gives what is called after each."""


@dataclass(frozen=True)
class _Failure:
    error: CrossrankError
    was_killed: bool = False
    was_begun: bool = True


def map_ranks(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    fleet: Fleet,
    *,
    failed: Callable[[Item, CrossrankError], Result] | None = None,
    what: str = "reading",
) -> list[Result]:
    """`function` of every item, in order, with a progress bar of `fleet` that says `what` is done.

    Where `failed` is given, it makes the result of an item that failed twice, and the other items go on; else the first
    such error is raised.
    """
    work = list(items)
    with fleet.bar(what, len(work)) as done:
        results, errors = _work_through(function, work, fleet, done)
    for index in sorted(errors):
        if failed is None:
            raise errors[index]
        results[index] = failed(work[index], errors[index])
    return [results[index] for index in range(len(work))]


def _work_through(
    function: _Function, work: Sequence[Any], fleet: Fleet, done: Callable[[], None]
) -> tuple[dict[int, Any], dict[int, CrossrankError]]:
    """The results, and the errors of items that failed twice, by their places. `done` is called after each item."""
    results: dict[int, Any] = {}
    errors: dict[int, CrossrankError] = {}
    failures: Counter[int] = Counter()
    batches = [list(range(len(work)))]
    workers = max(1, min(fleet.jobs, len(work)))
    while batches:
        again: list[int] = []
        batch = [(index, work[index]) for index in batches.pop(0)]
        for index, outcome in _outcomes(function, batch, fleet, workers):
            if not isinstance(outcome, _Failure):
                results[index] = outcome
                done()
                continue
            failures[index] += outcome.was_begun
            if failures[index] == 2:
                errors[index] = outcome.error
                done()
            elif outcome.was_killed and outcome.was_begun:
                batches.append([index])  # alone, for it may take what runs beside it along once more
            else:
                again.append(index)
        if again:
            batches.append(again)
    return results, errors


def _outcomes(function: _Function, batch: _Batch, fleet: Fleet, workers: int) -> _Outcomes:
    """The results of a batch. Its workers are its own: those of a batch that killed some may not all come back."""
    if fleet.executor is not None:
        yield from _submit(function, batch, fleet.executor)
    elif fleet.cluster is not None:
        with dask_executor(fleet.cluster, workers) as executor:
            # A task costs Dask's scheduler 3 ms, more than a small rank takes.
            yield from _submit(function, batch, executor, size=min(16, len(batch) // 64))
    elif workers > 1:
        yield from _in_processes(function, batch, workers)
    else:
        yield from ((index, _try(function, item)) for index, item in batch)


def _in_processes(function: _Function, batch: _Batch, workers: int) -> _Outcomes:
    """A pool for this batch alone: a process that is killed takes its pool along."""
    # Workers are spawned: a fork of a process with threads may deadlock.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="crossrank-", ignore_cleanup_errors=True) as folder:
        pool = ProcessPoolExecutor(max_workers=min(workers, len(batch)), mp_context=context)
        failures: dict[int, _Failure] = {}
        try:
            for index, outcome in _submit(_Spilled(function, folder), [(one[0], one) for one in batch], pool):
                if isinstance(outcome, _Failure):
                    failures[index] = outcome
                    continue
                path = os.path.join(folder, str(index))
                with open(path, "rb") as file, paused_gc():
                    result = pickle.load(file)
                os.unlink(path)
                yield index, result
        finally:
            pool.shutdown(cancel_futures=True)
        begun = {index for index in failures if os.path.exists(os.path.join(folder, str(index)))}
    for index, failure in failures.items():
        yield index, replace(failure, was_begun=index in begun or not begun)


@dataclass(frozen=True)
class _Spilled:
    """`function` in a process of a pool, with its result in a file, which also says that the item was begun.

    All processes of a pool send their results through one pipe. One that is killed in the middle of a large one would
    leave the others, and us, waiting for the rest of it.
    """

    function: _Function
    folder: str

    def __call__(self, numbered: tuple[int, Any]) -> None:
        with open(os.path.join(self.folder, str(numbered[0])), "xb") as file:
            pickle.dump(self.function(numbered[1]), file, protocol=5)


def _submit(function: _Function, batch: _Batch, executor: Executor, size: int = 1) -> _Outcomes:
    """Results as they come, of tasks of `size` items."""
    futures: dict[Future[list[Any]], tuple[int, ...]] = {}
    for first in range(0, len(batch), max(1, size)):
        indices, items = zip(*batch[first : first + max(1, size)], strict=True)
        future = _try(lambda items: executor.submit(_each, function, items), items)
        if isinstance(future, _Failure):  # the pool broke while it was filled
            yield from ((index, future) for index in indices)
        else:
            futures[future] = indices
    for future in as_completed(futures):
        indices, outcomes = futures.pop(future), _try(Future.result, future)
        del future  # Dask computes what it has a future of once more when the worker that has the result is killed
        if isinstance(outcomes, _Failure):
            outcomes = [outcomes] * len(indices)
        yield from zip(indices, outcomes, strict=True)


def _each(function: _Function, items: Sequence[Any]) -> list[Any]:
    """Runs in a worker; the failure of one item does not end the others."""
    return [_try(function, item) for item in items]


def _try(function: _Function, argument: Any) -> Any:
    """An error becomes one that every process can unpickle, and one that nobody foresaw says its place."""
    try:
        # A file becomes tens of thousands of small objects without a cycle: looking for one costs a sixth of the time.
        with paused_gc():
            return function(argument)
    except CrossrankError as error:
        return _Failure(CrossrankError(str(error)))
    except Exception as error:
        if isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker":
            text = "its process was killed, most often for lack of memory; try --jobs 1"
            return _Failure(CrossrankError(text), was_killed=True)
        return _Failure(unforeseen(error))


def _close(cluster: Any) -> None:
    # One of whose workers was killed and is just being started again cannot be closed in order, and raises: that is no
    # error of the work, which is over. Its processes end with this one.
    with suppress(Exception):
        cluster.close()


@contextmanager
def dask_executor(address: str, workers: int) -> Iterator[Executor]:
    """An executor on the Dask cluster at `address`; `local` starts `workers` processes, which end with the block.

    Raises `CrossrankError` where Dask is not installed, or nothing answers.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise CrossrankError("--cluster needs Dask; install it with: pip install 'crossrank[cluster]'") from error
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="crossrank-", ignore_cleanup_errors=True))
        options = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.CRITICAL}
        try:
            where: Any = address
            if address == "local":
                where = LocalCluster(n_workers=workers, local_directory=scratch, **options)
                stack.callback(_close, where)
            client = stack.enter_context(Client(where, timeout=_PATIENCE))
        except Exception as error:  # what it raises depends on the protocol of the address
            raise CrossrankError(
                f"--cluster {address}: no Dask scheduler answers there ({one_line(error)}); "
                "give its address as HOST:PORT, or `local`"
            ) from error
        # Not pure: the work writes files, and Dask would leave out what it has done before.
        yield client.get_executor(pure=False, retries=2)
