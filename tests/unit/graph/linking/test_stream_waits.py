"""What streams wait for, concluded from the communications of a trace without `cuda_sync` events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crossrank.tools.graph.linking import LinkedTrace, link
from tests.unit.graph.linking.small_traces import SmallTrace, comm_params

COMPUTE, NCCL = 7, 20


def waiting(seq: int) -> dict[str, Any]:
    return {"values": [seq, 0, 0, "wait", [], []], "shapes": [[]] * 6, "types": [""] * 6}


def issue(trace: SmallTrace, ts: float, seq: int, correlation: int, start: float, dur: float, pg: str = "0") -> None:
    """A collective as NCCL issues it: the stream waits before the launch, and once more after it."""
    trace.op("record_param_comms", ts, 20, inputs=comm_params("allreduce", seq, (pg, "")))
    trace.call("cudaStreamWaitEvent", ts + 2, 1, correlation + 1)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", ts + 5, start, dur, correlation, stream=NCCL)
    trace.call("cudaStreamWaitEvent", ts + 15, 1, correlation + 2)


def stream_waits(result: LinkedTrace) -> list[tuple[str, str, int | None]]:
    names = {one.id: f"{one.name.split('_')[0]}@{one.start_ns // 1000}" for one in result.activities}
    edges = [edge for edge in result.edges if edge.kind == "stream_wait"]
    assert all(edge.inferred for edge in edges)
    return [(names[edge.source], names[edge.target], edge.slack_ns) for edge in edges]


def test_a_communication_waits_for_the_compute_before_it(tmp_path: Path) -> None:
    trace = SmallTrace()
    issue(trace, 20, 3, 510, 153, 60)
    trace.op("aten::mm", 0, 10)
    trace.launch("gemm", 2, 50, 100, 501)
    trace.launch("launched after the communication", 30, 300, 5, 520)
    result = link(*trace.write(tmp_path))
    assert stream_waits(result) == [("gemm@50", "ncclDevKernel@153", 3_000)]
    assert result.report.syncs == {"cudaStreamWaitEvent": 2}
    assert result.report.syncs_unresolved == {"it belongs to a communication, after its launch": 1}


def test_compute_on_any_thread_waits_for_the_communication_of_a_wait_node(
    tmp_path: Path,
) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 10)
    trace.launch("gemm", 2, 10, 5, 501)
    issue(trace, 20, 3, 510, 40, 60)
    issue(trace, 60, 3, 520, 110, 200, pg="4")
    trace.op("record_param_comms", 90, 5, inputs=waiting(3))
    trace.call("cudaStreamWaitEvent", 92, 1, 530)
    trace.op("record_param_comms", 91, 4, 3, tid=2, inputs=waiting(3))
    trace.call("cudaStreamWaitEvent", 93, 1, 531, tid=2)  # by a thread that has launched nothing yet
    trace.op("aten::add", 96, 10, 3, tid=2)
    trace.call("cudaLaunchKernel", 97, 1, 540, tid=2)
    trace.activity("add", 99, 5, 540, stream=COMPUTE)
    trace.op("aten::add", 200, 50, 3, tid=2)
    for number in range(3):  # on the stream that most is launched on
        trace.call("cudaLaunchKernel", 201 + number, 0.5, 550 + number, tid=2)
        trace.activity("other", 210 + 10 * number, 5, 550 + number, stream=9)
    assert stream_waits(link(*trace.write(tmp_path))) == [
        ("gemm@10", "ncclDevKernel@40", 15_000),
        ("gemm@10", "ncclDevKernel@110", 45_000),
        ("ncclDevKernel@40", "add@99", 0),
        ("ncclDevKernel@40", "other@210", 9_000),
    ]


def test_a_wait_for_a_communication_before_the_trace_is_counted(tmp_path: Path) -> None:
    trace = SmallTrace()
    issue(trace, 20, 3, 510, 40, 60)
    trace.op("record_param_comms", 90, 5, inputs=waiting(2))
    trace.call("cudaStreamWaitEvent", 92, 1, 530)
    del trace.nodes[:3]  # whether it has roots or not
    assert link(*trace.write(tmp_path)).report.syncs_unresolved == {
        "no activity on the stream before or after": 1,
        "it belongs to a communication, after its launch": 1,
        "the communication that it waits for is not in the trace": 1,
    }


def test_the_reducer_waits_for_its_buckets_in_order_outside_any_operation(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 10)
    trace.launch("gemm", 2, 10, 5, 501)
    issue(trace, 20, 3, 510, 40, 60)
    issue(trace, 60, 4, 520, 110, 200)
    for number in range(3):  # one more than there are buckets
        trace.call("cudaStreamWaitEvent", 100 + number, 1, 530 + number)
    trace.op("aten::addcmul_", 120, 10)
    trace.launch("step", 125, 312, 5, 540)
    result = link(*trace.write(tmp_path))
    assert stream_waits(result) == [
        ("gemm@10", "ncclDevKernel@40", 15_000),
        ("gemm@10", "ncclDevKernel@110", 45_000),
        ("ncclDevKernel@40", "step@312", 187_000),
        ("ncclDevKernel@110", "step@312", 2_000),
    ]
    assert result.report.syncs_unresolved["a stream waits for an event that the trace does not name"] == 1
