"""The order in which a pass on CUDA launches, waits and notes ends, on streams that write down what is asked of them.

No GPU is needed, and none is simulated: only what the host does when.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from crossrank.errors import CrossrankError
from crossrank.replay.run.executor import CudaExecutor, GraphExecutor
from crossrank.replay.run.program import Bound, Program, late_ends
from tests.unit.replay import ranks

LOG: list[str] = []


class Event:
    """One that is over as soon as it is recorded; a query of one that never was would never be answered."""

    def __init__(self, *, enable_timing: bool, external: bool = False) -> None:
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
        self.name = {0: "main", -1: "side"}.get(priority, "second")

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        LOG.append(f"{self.name} waits for {other.name}")


class Graph:
    def replay(self) -> None:
        LOG.append("launch of the graph")

    def reset(self) -> None:
        LOG.append("reset")


class Work:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self) -> None:
        LOG.append(f"wait for {self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    current = threading.local()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, current.stream = getattr(current, "stream", Stream()), stream
        yield
        current.stream = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(current, "stream", Stream()))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: capture())


@contextmanager
def capture() -> Iterator[None]:
    LOG.append("capture")
    yield
    LOG.append("captured")


def launch(name: str) -> Any:
    def make() -> Work:
        LOG.append(name)
        return Work(name)

    return make


def bound(first: int, name: str, *, blocking: bool = False, waits: tuple[int, ...] = ()) -> Bound:
    is_barrier = name == "barrier"
    return ranks.bound(first, launch=launch(name), waits=waits, blocking=blocking, holds_host=is_barrier)


def program(*launches: Bound, last_waits: tuple[int, ...] = ()) -> Program:
    return ranks.program(*launches, last_waits=(last_waits,), device=torch.device("cuda", 0))


def made(program: Program) -> list[str]:
    LOG.clear()
    CudaExecutor(program).run()
    return LOG[1:]  # after the event that the pass begins with


@pytest.mark.usefixtures("cuda")
def test_an_asynchronous_barrier_blocks_only_at_its_recorded_wait() -> None:
    order = made(program(bound(0, "barrier"), bound(1, "all_reduce", blocking=True), last_waits=(0,)))
    assert order == [
        "event on main", "barrier",
        "event on main", "all_reduce", "wait for all_reduce", "event on main",
        "wait for barrier", "event on main",
    ]  # fmt: skip


@pytest.mark.usefixtures("cuda")
def test_a_side_stream_records_the_end_of_other_asynchronous_calls() -> None:
    order = made(program(bound(0, "all_reduce"), bound(1, "barrier", blocking=True, waits=(0,))))
    assert order == [
        "event on main", "all_reduce", "wait for all_reduce", "event on side",
        "wait for all_reduce", "event on main", "barrier", "wait for barrier", "event on main",
    ]  # fmt: skip


@pytest.mark.usefixtures("cuda")
def test_a_graph_is_captured_in_the_second_pass_and_launched_once_per_later_pass() -> None:
    executor = GraphExecutor(program(bound(0, "all_reduce"), bound(1, "all_gather", blocking=True, waits=(0,))))
    calls = [
        "event on main", "all_reduce", "wait for all_reduce", "event on side",
        "wait for all_reduce", "event on main", "all_gather", "wait for all_gather", "event on main",
    ]  # fmt: skip
    passes = []
    for _ in range(3):
        LOG.clear()
        executor.run()
        passes.append(LOG[1:])
    assert passes[0] == calls
    # Streams that work was captured on are joined, and the pass begins anew after the capture.
    joined = ["main waits for side", "captured", "event on main"]
    assert passes[1] == ["capture", *calls, *joined, "launch of the graph"]
    assert passes[2] == ["launch of the graph"]
    LOG.clear()
    executor.run(before=lambda position: None)
    assert LOG[1:] == calls
    LOG.clear()
    executor.close()
    executor.close()
    assert LOG == ["reset"]


@pytest.mark.usefixtures("cuda")
def test_a_blocking_barrier_cannot_be_captured() -> None:
    with pytest.raises(CrossrankError, match="a barrier blocks the host and cannot be captured; use --drop barrier"):
        GraphExecutor(program(bound(0, "barrier", blocking=True)))


@pytest.mark.usefixtures("cuda")
def test_each_thread_launches_and_waits_on_a_stream_of_its_own() -> None:
    calls = [ranks.bound(number, launch=launch(f"all_reduce {number}"), thread=number) for number in (0, 1)]
    order = made(ranks.program(*calls, last_waits=((), ()), device=torch.device("cuda", 0)))
    for number, stream in enumerate(("main", "second")):
        at = order.index(f"all_reduce {number}")
        assert f"event on {stream}" in order[:at]
        assert f"event on {stream}" in order[order.index(f"wait for all_reduce {number}") :]
    assert sorted(order) == sorted(
        [f"event on {stream}" for stream in ("main", "second") * 2]
        + [f"{what}all_reduce {number}" for number in (0, 1) for what in ("", "wait for ")]
    )


def test_only_the_wait_shows_the_end_of_an_asynchronous_gpu_barrier() -> None:
    calls = (bound(0, "all_reduce"), bound(1, "barrier"), bound(2, "barrier", blocking=True))
    assert late_ends(program(*calls)) == [1]
