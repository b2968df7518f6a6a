"""Real gloo ranks for tests: processes that stay alive and run one function after the other.

The ranks are started once per test session. Each task gets a
fresh process group and, unless it asks not to, a recording of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from crossrank.comm import CommRecord
from tests.integration.fork_server import ForkedProcess
from tests.integration.traces import Recorded, load

Task = Callable[..., Any]


class World:
    """`size` ranks on this machine."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        with Listener(family="AF_UNIX") as listener:
            for rank in range(self.size):
                words = [sys.executable, "-m", __name__, str(listener.address), str(rank), str(self.size)]
                self._processes.append(ForkedProcess(words, text=True))
                self._pipes.append(listener.accept())

    def run(self, task: Task, folder: Path, *arguments: Any, **options: Any) -> list[Any]:
        """`task(rank, *arguments)` on every rank, its results in the order of the ranks.

        Options go to `crossrank.enable`; `record=False` leaves tracing to the task.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for pipe in self._pipes:
            pipe.send((task, str(folder), arguments, options, os.environ.get("TRACING_RECORDER", "auto")))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(120):
                # Ranks that hang would fail every later test as well.
                self.close(seconds=0)
                self._start()
                raise AssertionError(f"rank {rank} does not answer: it hangs in {task.__name__}")
            answers.append(pipe.recv())
        for rank, (failure, _) in enumerate(answers):
            if failure:
                raise AssertionError(f"rank {rank} raised:\n{failure}")
        return [result for _, result in answers]

    def close(self, seconds: float = 10) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True)
class TwoRanks:
    """The two ranks of the test session, in the folder of a test."""

    world: World
    folder: Path

    @property
    def recording(self) -> Path:
        return self.folder / "recording"

    def run(self, task: Task, *arguments: Any, folder: str = "", **options: Any) -> list[Any]:
        """As `World.run`, in a folder below that of the test."""
        return self.world.run(task, self.folder / folder, *arguments, **options)

    def run_bare(self, task: Task, *arguments: Any) -> list[Any]:
        """`task(rank, directory, *arguments)`, which records into the directory itself."""
        return self.run(task, str(self.recording), *arguments, record=False)

    def record(self, task: Task, *arguments: Any, folder: str = "", **options: Any) -> Path:
        """The recording of a task."""
        self.run(task, *arguments, folder=folder, **options)
        return self.folder / folder / "recording"

    def recorded(self, rank: int = 0, folder: str = "recording") -> Recorded:
        """What a rank recorded, without an error."""
        return Recorded(self.folder / folder, rank).without_error()

    def calls(self, task: Task, *arguments: Any, **options: Any) -> list[list[CommRecord]]:
        """The calls of both ranks in a task."""
        self.run(task, *arguments, **options)
        return [self.recorded(rank).calls for rank in (0, 1)]

    def load(self, kind: str, rank: int = 0, window: int = 1) -> Any:
        """A file of a rank that holds JSON."""
        return load(self.recording, kind, rank, window)


def _serve(pipe: Connection[Any, Any], rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    from tests.integration.kernels import remove_kernels

    torch.set_num_threads(1)
    while True:
        try:
            task, folder, arguments, options, os.environ["TRACING_RECORDER"] = pipe.recv()
        except EOFError:
            return
        try:
            remove_kernels()
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
            _meet(size)
            result = _run(task, folder, rank, arguments, options)
            dist.barrier()
            failure = None
        except BaseException:
            result, failure = None, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send((failure, result))


def _meet(size: int) -> None:
    """Wait until every rank is connected: one that left its group before would hang the others. No collective."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.add("connected", 1)
    while store.add("connected", 0) < size:
        time.sleep(0.001)


def _run(task: Task, folder: str, rank: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    import crossrank

    defaults: dict[str, Any] = {"tracing": "ALL", "directory": os.path.join(folder, "recording"), "flight": False}
    options = defaults | options
    if not options.pop("record", True):
        return task(rank, *arguments)
    with crossrank.enable(**options) as tracing:
        assert tracing.active
        return task(rank, *arguments)


if __name__ == "__main__":
    _address, _rank, _size = sys.argv[1:]
    _serve(Client(_address), int(_rank), int(_size))
