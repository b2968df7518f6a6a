"""Run work over ranks in parallel: a worker reads one rank and returns a small result.

A `Fleet` selects the workers: this process, local processes, a Dask cluster, or any `concurrent.futures.Executor`.
Results are in the order of the items. An item that fails is tried once more, because a network drive may fail for a
moment. If its process was killed, it is tried alone.
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
"""Maximum time until a scheduler answers."""
_Function = Callable[[Any], Any]
_Batch = Sequence[tuple[int, Any]]
"""(number of the item, item)"""
_Outcomes = Iterator[tuple[int, Any]]
"""(number of the item, its result or a `_Failure`)"""


@contextmanager
def unseen(what: str, count: int) -> Iterator[Callable[[], None]]:
    """Show no progress bar."""
    yield lambda: None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The workers. The first of these that is set is used: `executor`, `cluster`, `jobs`."""

    jobs: int = 1
    """Local processes; 1 = this one."""
    cluster: str | None = None
    """`local`, or the address of a Dask scheduler."""
    executor: Executor | None = None
    """An executor of the caller; crossrank does not close it."""
    bar: Callable[[str, int], AbstractContextManager[Callable[[], None]]] = unseen
    """(label, number of items) -> context manager of a progress bar; yields the function to call after each item."""


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
    """Return `function` of every item, in order. `what` is the label of the progress bar.

    If an item fails twice, `failed` makes its result. Without `failed`, its error is raised.
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
    """Return (results, errors of items that failed twice), by the number of the item. Calls `done` after each item."""
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
                batches.append([index])  # alone: if it is killed again, other items do not fail with it
            else:
                again.append(index)
        if again:
            batches.append(again)
    return results, errors


def _outcomes(function: _Function, batch: _Batch, fleet: Fleet, workers: int) -> _Outcomes:
    """Yield the results of a batch. Each batch starts new workers, because a killed worker may break the others."""
    if fleet.executor is not None:
        yield from _submit(function, batch, fleet.executor)
    elif fleet.cluster is not None:
        with dask_executor(fleet.cluster, workers) as executor:
            # A task costs Dask's scheduler 3 ms, more than reading a small rank. So a task has several items.
            yield from _submit(function, batch, executor, size=min(16, len(batch) // 64))
    elif workers > 1:
        yield from _in_processes(function, batch, workers)
    else:
        yield from ((index, _try(function, item)) for index, item in batch)


def _in_processes(function: _Function, batch: _Batch, workers: int) -> _Outcomes:
    """Yield the results of a batch from a new pool: a killed process breaks its pool."""
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
    """Runs `function` in a process of a pool and writes its result to a file. The file also shows that it started.

    All processes of a pool send their results through one pipe. A process that is killed while it sends a large result
    would block the other processes and the parent.
    """

    function: _Function
    folder: str

    def __call__(self, numbered: tuple[int, Any]) -> None:
        with open(os.path.join(self.folder, str(numbered[0])), "xb") as file:
            pickle.dump(self.function(numbered[1]), file, protocol=5)


def _submit(function: _Function, batch: _Batch, executor: Executor, size: int = 1) -> _Outcomes:
    """Yield results as they arrive, from tasks of `size` items."""
    futures: dict[Future[list[Any]], tuple[int, ...]] = {}
    for first in range(0, len(batch), max(1, size)):
        indices, items = zip(*batch[first : first + max(1, size)], strict=True)
        future = _try(lambda items: executor.submit(_each, function, items), items)
        if isinstance(future, _Failure):  # the pool broke during submission
            yield from ((index, future) for index in indices)
        else:
            futures[future] = indices
    for future in as_completed(futures):
        indices, outcomes = futures.pop(future), _try(Future.result, future)
        del future  # if the worker with the result is killed, Dask computes again every task that has a future
        if isinstance(outcomes, _Failure):
            outcomes = [outcomes] * len(indices)
        yield from zip(indices, outcomes, strict=True)


def _each(function: _Function, items: Sequence[Any]) -> list[Any]:
    """Run several items in a worker; if one fails, the others still run."""
    return [_try(function, item) for item in items]


def _try(function: _Function, argument: Any) -> Any:
    """Return the result, or a `_Failure` that every process can unpickle. An unexpected error gets its source line."""
    try:
        # Reading creates many small objects without cycles; the garbage collector would take a sixth of the time.
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
    # `close` raises if a killed worker is being restarted. The work is finished, so this error does not matter. The
    # processes of the cluster end with this one.
    with suppress(Exception):
        cluster.close()


@contextmanager
def dask_executor(address: str, workers: int) -> Iterator[Executor]:
    """Yield an executor on the Dask cluster at `address`. `local` starts `workers` processes, which end with the block.

    Raises `CrossrankError` if Dask is not installed, or no scheduler answers.
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
        # Not pure: Dask would skip repeated tasks, but tasks write files.
        yield client.get_executor(pure=False, retries=2)
