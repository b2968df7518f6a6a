"""Operations of several streams of a GPU: where each ran, for what it waited there, and the code that does it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from crossrank.replay.plan.compute.compute_plan import contradictions
from crossrank.replay.plan.compute.streams import place_on_streams
from crossrank.replay.run.compute_device import DeviceStreams
from crossrank.tools.graph.linking.linked_trace import Activity, Edge
from tests.unit.replay.compute.windows import compute_of, program_of


def activity(id: int, host: int, stream: int) -> Activity:
    return Activity(
        id=id, name="kernel", category="kernel", device=0, stream=stream, start_ns=id, duration_ns=1, correlation=None,
        host=host, unlinked=None, args=b"{}",  # type: ignore[arg-type]
    )  # fmt: skip


def test_an_operation_runs_after_the_last_awaited_operation_of_each_other_stream() -> None:
    activities = [
        activity(101, host=1, stream=7),
        activity(102, host=2, stream=7),
        activity(103, host=3, stream=20),
        activity(104, host=4, stream=7),
    ]
    edges = [
        Edge(source=101, target=103, kind="stream_wait"),
        Edge(source=102, target=103, kind="stream_wait"),
        Edge(source=103, target=104, kind="stream_wait"),
        Edge(source=101, target=102, kind="stream"),
    ]
    positions = {1: 0, 2: 1, 3: 2, 4: 3}
    placed = place_on_streams(activities, edges, positions, ())
    assert placed == {0: (0, []), 1: (0, []), 2: (1, [1]), 3: (0, [2])}


def test_a_call_is_launched_on_the_stream_that_its_communicator_waits_for() -> None:
    activities = [activity(101, 1, 7), activity(102, 2, 20), activity(103, 3, 33), activity(104, 4, 7)]
    edges = [Edge(source=102, target=103, kind="stream_wait"), Edge(source=103, target=104, kind="stream_wait")]
    placed = place_on_streams(activities, edges, {1: 0, 2: 1, 3: 2, 4: 3}, calls={2})
    assert placed == {0: (0, []), 1: (1, []), 2: (1, []), 3: (0, [])}


def test_one_stream_needs_no_placement() -> None:
    assert place_on_streams([activity(101, 1, 7), activity(102, 2, 7)], [], {1: 0, 2: 1}, ()) == {}


class Streams:
    """Writes down what is asked of the streams."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def write(*given: int | torch.Tensor) -> None:
            assert all(isinstance(one, torch.Tensor) == (name == "kept") for one in given)
            self.log.append(" ".join([name, *(str(one) for one in given if isinstance(one, int))]))

        return write


def test_a_pass_switches_streams_and_keeps_tensors_for_other_streams(tmp_path: Path) -> None:
    plan = compute_of(lambda: (torch.ones(4) + 1).mul(2), tmp_path)
    names = [one.name for one in plan.operations]
    add, mul = names.index("aten::add"), names.index("aten::mul")
    plan.operations[mul].stream, plan.operations[mul].after = 1, [add]
    assert list(contradictions(plan)) == []
    streams = Streams()
    program = program_of(plan, cast("DeviceStreams", streams))
    program.reset()
    program.run_pass(trial=True)
    streams.log.clear()
    program.reset()
    program.run_pass()
    assert streams.log == ["begin", f"done {add}", "on 1", f"after {add}", "kept", "end"]
    plan.operations[add].after = [mul]
    assert "waits for a later operation" in next(contradictions(plan))
