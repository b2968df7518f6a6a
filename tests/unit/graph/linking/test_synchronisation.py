"""Who waits for the GPU, by the trace's own events or concluded from its calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrank.tools.graph.linking import Edge, LinkedTrace, link
from crossrank.tools.graph.linking.waits import GpuWait, GpuWaits, find_waits
from crossrank.tools.traces.kineto import read_kineto
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.graph.linking.small_traces import SmallTrace


def two_streams(wait: str = "cudaDeviceSynchronize") -> SmallTrace:
    """Op A launches on stream 7 (until 300) and, in between, on stream 20 (until 250); op B follows a wait."""
    trace = SmallTrace()
    trace.op("A", 0, 100)
    trace.launch("compute", 10, 30, 270, 501)
    trace.call("cudaEventRecord", 20, 1, 502)
    trace.call("cudaStreamWaitEvent", 22, 1, 503)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", 30, 305, 57, 504, stream=20)
    trace.call(wait, 110, 250, 505)
    trace.op("B", 400, 50)
    return trace


def waits_of(result: LinkedTrace) -> list[Edge]:
    return [edge for edge in result.edges if edge.kind in ("sync", "stream_wait")]


def test_a_context_sync_waits_for_the_last_activity_of_every_stream(tmp_path: Path) -> None:
    trace = two_streams()
    trace.sync("Context Sync", 110, 245, 505, stream=4294967295)
    a, b, compute, reduce = 4, 5, 6, 7
    result = link(*trace.write(tmp_path))
    assert waits_of(result) == [Edge(compute, b, "sync"), Edge(reduce, b, "sync")]
    assert result.report.syncs == {"Context Sync": 1}
    assert Edge(a, compute, "launch") in result.edges


def test_a_stream_sync_waits_only_for_its_stream(tmp_path: Path) -> None:
    trace = two_streams()
    trace.sync("Stream Sync", 110, 245, 505, stream=20)
    assert waits_of(link(*trace.write(tmp_path))) == [Edge(7, 5, "sync")]


def test_a_stream_wait_joins_the_activity_before_its_event_to_the_next_launch(
    tmp_path: Path,
) -> None:
    trace = two_streams()
    event = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 502}
    trace.sync("Stream Wait Event", 40, 1, 503, stream=20, **event)
    trace.sync("Stream Wait Event", 24, 1, 9999, stream=20, **event)  # its call is not in the trace
    trace.events.sort(key=lambda event: not event["name"].startswith(("cudaStreamWait", "nccl")))
    result = link(*trace.write(tmp_path))
    assert waits_of(result) == [Edge(6, 7, "stream_wait")]
    assert [op.blocked_ns for op in result.host] == [0] * 5
    assert (result.report.syncs, result.report.syncs_unresolved) == ({"Stream Wait Event": 2}, {})


def test_an_event_sync_waits_for_launches_before_the_event(tmp_path: Path) -> None:
    trace = two_streams()
    event = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 502}
    trace.sync("Event Sync", 110, 245, 505, stream=7, **event)
    trace.events.sort(key=lambda event: event["name"] != "cudaEventRecord")
    assert waits_of(link(*trace.write(tmp_path))) == [Edge(6, 5, "sync")]


def test_waits_without_a_dependency_are_counted_by_reason(tmp_path: Path) -> None:
    trace = two_streams()
    trace.sync("Stream Sync", 110, 245, 505, stream=99)
    trace.sync("Event Sync", 110, 245, 505, wait_on_stream=7, wait_on_cuda_event_record_corr_id=9999)
    trace.sync("Event Sync", 110, 245, 505, wait_on_stream=7)
    trace.sync("Stream Wait Event", 23, 1, 503, stream=99, wait_on_stream=7, wait_on_cuda_event_record_corr_id=502)
    trace.sync("Event Sync", 110, 245, 505, wait_on_stream=20, wait_on_cuda_event_record_corr_id=502)
    trace.call("cudaStreamSynchronize", 500, 10, 506)
    trace.sync("Stream Sync", 500, 10, 506, stream=7)
    result = link(*trace.write(tmp_path))
    assert waits_of(result) == []
    assert result.report.syncs_unresolved == {
        "no activity on the stream before": 1,
        "the call that recorded the event is not in the trace": 2,
        "no launch on the waiting stream after it": 1,
        "no launch on the stream before its event": 1,
        "no operation after the wait in the execution trace": 1,
    }


@pytest.mark.parametrize(("until", "drawn"), [(12, True), (12.001, False)])
def test_a_wait_that_contradicts_the_times_is_counted_not_drawn(until: float, drawn: bool, tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::a", 10, 20)
    trace.launch("k1", 10.5, 11, until - 11, 501)
    trace.call("cudaDeviceSynchronize", 1, 5, 505)
    trace.sync("Context Sync", 75, 5, 505, stream=4294967295)
    del trace.nodes[:3]  # whether it has roots or not
    result = link(*trace.write(tmp_path))
    assert waits_of(result) == ([Edge(5, 4, "sync")] if drawn else [])
    assert result.report.syncs_unresolved == ({} if drawn else {"contradicts the times": 1})


@pytest.mark.parametrize(("call", "first"), [("cudaDeviceSynchronize", 0), ("cudaStreamSynchronize", 1)])
def test_waits_without_sync_events_are_inferred_with_their_slack(call: str, first: int, tmp_path: Path) -> None:
    trace = two_streams(call)
    trace.call(call, 2, 3, 506)
    trace.call("cudaMemcpyAsync", 6, 1, 507)
    result = link(*trace.write(tmp_path))
    compute = Edge(6, 5, "sync", inferred=True, slack_ns=60_000)
    assert waits_of(result) == [compute, Edge(7, 5, "sync", inferred=True, slack_ns=0)][first:]
    assert result.report.syncs == {call: 2, "cudaStreamWaitEvent": 1}
    assert result.report.syncs_unresolved == {
        "no activity ended during the call": 1,
        "a stream waits for an event that the trace does not name": 1,
    }
    assert {op.blocked_ns for op in result.host} == {0}  # the calls are in no operation


def test_a_copy_that_ends_within_its_call_blocks_the_host(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::item", 0, 100)
    trace.call("cudaMemcpyAsync", 10, 50, 501)
    trace.activity("Memcpy DtoH (Device -> Pageable)", 20, 30, 501, category="gpu_memcpy")
    trace.call("cudaMemcpyAsync", 62, 4, 503)
    trace.activity("Memcpy DtoH (Device -> Pageable)", 64, 4, 503, category="gpu_memcpy")
    trace.call("cudaMemcpyAsync", 70, 5, 502)
    trace.activity("Memcpy HtoD (Pinned -> Device)", 90, 40, 502, category="gpu_memcpy")
    trace.op("next", 200, 10)
    del trace.nodes[:3]
    result = link(*trace.write(tmp_path))
    shown = waits_of(result)
    assert shown == [Edge(6, 5, "sync", inferred=True, slack_ns=10_000), Edge(7, 5, "sync", inferred=True, slack_ns=0)]
    assert [op.blocked_ns for op in result.host] == [40_000 + 4_000, 0]


def test_a_sync_delays_only_its_own_thread(tmp_path: Path) -> None:
    trace = two_streams()
    trace.op("other thread", 370, 5, 3, tid=2)
    assert {edge.target for edge in waits_of(link(*trace.write(tmp_path))) if edge.kind == "sync"} == {5}


def correlations(path: str, *, without_events: bool = False) -> set[tuple[int | None, int | None]]:
    """(correlation id of what is waited for, of the waiting activity or call) of every wait in a trace."""
    trace = read_kineto(path)
    if without_events:
        trace.syncs.clear()
    calls = {call.correlation: index for index, call in enumerate(trace.calls)}
    waits: GpuWaits = find_waits(trace, [calls.get(activity.correlation, -1) for activity in trace.device])

    def waiter(wait: GpuWait) -> int | None:
        return trace.calls[wait.call].correlation if wait.target < 0 else trace.device[wait.target].correlation

    return {(trace.device[wait.source].correlation, waiter(wait)) for wait in waits.waits}


# The SYNC_DEPENDENCY edges of HolisticTraceAnalysis 0.5.0 (critical_path_analysis over the whole trace).
ALEXNET = {
    (14, 15), (25, 26), (40, 41), (51, 52), (62, 63), (73, 74), (84, 85), (95, 96), (106, 107), (117, 118),
    (132, 133), (143, 144), (158, 159), (169, 170), (184, 185), (195, 196), (218, 225), (5144, 5181), (5178, 5188),
    (5190, 5213), (5190, 5503), (5190, 5511), (5498, 5503), (5498, 5511), (5560, 5597), (5594, 5604), (5606, 5629),
    (5606, 5894), (5889, 5894),
}  # fmt: skip
EVENT_SYNC = {(1511, 1512), (1526, 1536), (1526, 1537), (1526, 1549)}


@needs_traces
def test_every_dependency_of_the_reference_derivation_is_found() -> None:
    assert correlations(public("cuda_sync/alexnet.kineto.json.gz")) >= ALEXNET
    assert correlations(public("cuda_sync/event_sync.kineto.json.gz")) == EVENT_SYNC


@needs_traces
def test_inference_finds_exactly_the_host_waits_of_a_real_trace() -> None:
    path = public("cuda_sync/alexnet.kineto.json.gz")
    trace = read_kineto(path)
    calls = {call.correlation for call in trace.calls if "Synchronize" in call.name}
    of_host = {wait for wait in correlations(path) if wait[1] in calls}
    assert len(of_host) == 25
    assert correlations(path, without_events=True) == of_host
