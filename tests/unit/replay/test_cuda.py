"""The order in which a pass on CUDA launches, waits and notes ends, on streams that write down what is asked of them.

No GPU is needed, and none is simulated: only what the host does when.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from crossrank.replay.run.executor import CudaExecutor
from crossrank.replay.run.program import Bound, Program, late_ends

LOG: list[str] = []


class Event:
    """One that is over as soon as it is recorded; a query of one that never was would never be answered."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True
        LOG.append(f"event on {stream.name}")

    def query(self) -> bool:
        assert self.recorded
        return True

    def synchronize(self) -> None:
        assert self.recorded

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.name = "side" if priority else "main"

    def synchronize(self) -> None:
        pass


class Work:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self) -> None:
        LOG.append(f"wait for {self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def launch(name: str) -> Any:
    def make() -> Work:
        LOG.append(name)
        return Work(name)

    return make


def bound(first: int, name: str, *, blocking: bool = False, waits: tuple[int, ...] = ()) -> Bound:
    return Bound(
        first=first,
        count=1,
        launch=launch(name),
        waits=waits,
        blocking=blocking,
        has_future=True,
        holds_host=name == "barrier",
        lane="0",
    )


def program(*launches: Bound, last_waits: tuple[int, ...] = ()) -> Program:
    return Program(
        calls=[],
        bound=list(launches),
        tensors=[],
        substitutes=[],
        device=torch.device("cuda", 0),
        groups={},
        last_waits=(last_waits,),
        block=torch.empty(0),
        width=1,
    )


def made(program: Program) -> list[str]:
    LOG.clear()
    CudaExecutor(program).run()
    return LOG[1:]  # after the event that the pass begins with


@pytest.mark.usefixtures("cuda")
def test_an_asynchronous_barrier_is_waited_for_where_the_job_did_and_holds_no_launch_before() -> None:
    order = made(program(bound(0, "barrier"), bound(1, "all_reduce", blocking=True), last_waits=(0,)))
    assert order == [
        "event on main", "barrier",
        "event on main", "all_reduce", "wait for all_reduce", "event on main",
        "wait for barrier", "event on main",
    ]  # fmt: skip


@pytest.mark.usefixtures("cuda")
def test_the_end_of_any_other_asynchronous_call_is_noted_on_a_stream_beside() -> None:
    order = made(program(bound(0, "all_reduce"), bound(1, "barrier", blocking=True, waits=(0,))))
    assert order == [
        "event on main", "all_reduce", "wait for all_reduce", "event on side",
        "wait for all_reduce", "event on main", "barrier", "wait for barrier", "event on main",
    ]  # fmt: skip


def test_of_an_asynchronous_barrier_on_a_gpu_only_the_wait_tells_the_end() -> None:
    calls = (bound(0, "all_reduce"), bound(1, "barrier"), bound(2, "barrier", blocking=True))
    assert late_ends(program(*calls)) == [1]
