"""Which host operation launched which GPU activity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crossrank.tools.graph.linking import LinkedTrace, link
from tests.unit.graph.linking.small_traces import SmallTrace


def linked(trace: SmallTrace, folder: Path) -> LinkedTrace:
    return link(*trace.write(folder))


def hosts(result: LinkedTrace) -> list[tuple[str, int | None]]:
    return [(activity.name, activity.host) for activity in result.activities]


def external_id(number: int) -> dict[str, Any]:
    return {"External id": number}


def test_kernels_copies_and_memsets_belong_to_the_innermost_operation_around_their_launch(tmp_path: Path) -> None:
    trace = SmallTrace()
    outer = trace.op("aten::linear", 0, 100)
    inner = trace.op("aten::addmm", 10, 50, outer)
    trace.launch("gemm", 20, 30, 200, 501)
    trace.call("cudaMemsetAsync", 22, 1, 502)
    trace.activity("Memset (Device)", 25, 1, 502, category="gpu_memset")
    trace.call("cudaMemcpyAsync", 70, 2, 503)
    trace.activity("Memcpy DtoH (Device -> Pinned)", 240, 4, 503, category="gpu_memcpy", **external_id(2))
    result = linked(trace, tmp_path)
    assert hosts(result) == [("Memset (Device)", inner), ("gemm", inner), ("Memcpy DtoH (Device -> Pinned)", outer)]
    assert [activity.id for activity in result.activities] == [6, 7, 8]
    assert result.report.activities == {"gpu_memcpy": 1, "gpu_memset": 1, "kernel": 1}
    assert result.report.activities_linked == {"correlation id": 3}
    assert result.report.host_matched == {"record function id": 2}


def test_any_call_with_the_correlation_id_is_a_launch(tmp_path: Path) -> None:
    trace = SmallTrace()
    op = trace.op("graph", 0, 100)
    names = ("cudaGraphLaunch", "cudaLaunchCooperativeKernel", "cuLaunchKernelEx", "hipExtModuleLaunchKernel", "new")
    for number, name in enumerate(names, start=501):
        trace.call(name, number - 500, 0.5, number)
        trace.activity(f"kernel of {name}", 10 * number, 5, number)
    trace.activity("second kernel of the graph", 9000, 5, 501)
    result = linked(trace, tmp_path)
    assert {host for _, host in hosts(result)} == {op}
    assert len(result.activities) == 6


def test_an_operation_that_ended_before_the_launch_does_not_get_it(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("early", 0, 10)
    trace.launch("between", 20, 60, 5, 501)
    trace.op("late", 40, 10)
    result = linked(trace, tmp_path)
    assert hosts(result) == [("between", None)]
    assert result.activities[0].unlinked == "no operation encloses its launch"
    assert result.report.activities_unlinked == {"no operation encloses its launch": 1}


def test_calls_of_another_process_with_the_same_correlation_id_are_ignored(tmp_path: Path) -> None:
    trace = SmallTrace()
    op = trace.op("ours", 0, 100)
    trace.call("cudaLaunchKernel", 30, 1, 501)
    trace.activity("ours", 40, 5, 501)
    trace.call("cudaLaunchKernel", 35, 1, 501, pid=99)
    trace.call("cudaLaunchKernel", 36, 1, 777, pid=99)
    trace.activity("theirs alone", 42, 5, 777)
    result = linked(trace, tmp_path)
    assert hosts(result) == [("ours", op), ("theirs alone", None)]
    assert result.report.activities_unlinked == {"launched by another process": 1}
    assert result.report.warnings == [
        "1 correlation id(s) belong to several calls (first: 501); crossrank uses the last one of this process before "
        "the activity"
    ]


def test_a_correlation_id_used_twice_goes_to_the_last_call_before_the_kernel(tmp_path: Path) -> None:
    trace = SmallTrace()
    first = trace.op("first", 0, 10)
    second = trace.op("second", 100, 10)
    trace.launch("a", 5, 20, 5, 501)
    trace.launch("b", 105, 120, 5, 501)
    assert hosts(linked(trace, tmp_path)) == [("a", first), ("b", second)]


def test_an_activity_without_a_call_is_found_by_its_external_id(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("begins later", 50, 10)
    op = trace.op("aten::mm", 0, 10)
    trace.launch("other", 5, 12, 1, 400)
    trace.add("cpu_op", "of another process", 0, 10, 99, 99, external_id(2))
    trace.activity("blocklisted launch", 20, 5, 501, **external_id(2))
    trace.activity("legacy id", 30, 5, 502)
    trace.activity("of an operation that begins later", 40, 5, 503, **external_id(1))
    result = linked(trace, tmp_path)
    assert hosts(result)[:2] == [("other", op), ("blocklisted launch", op)]
    assert result.report.activities_linked == {"correlation id": 1, "external id": 1}
    assert result.report.activities_unlinked == {"no launch call has its correlation id": 2}
    assert result.report.activity_rate == 0.5


def test_reasons_for_unlinked_activities_are_given(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 10)
    trace.host_event("not in the execution trace", 20, 10, None)
    trace.launch("of the other", 22, 23, 1, 1)
    trace.activity("of nothing", 30, 1, 501)
    del trace.events[-1]["args"]["correlation"]
    trace.op("aten::mm", 40, 10)
    report = linked(trace, tmp_path).report
    shown = report.activities_unlinked
    assert shown == {"no operation at its launch is in the execution trace": 1, "it has no correlation id": 1}
    assert report.kineto_unmatched == {"within the execution trace": 1}


def test_launches_before_the_trace_are_counted_and_left_out(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 1000)
    trace.activity("queued before", 100, 5, 17)
    trace.launch("ours", 200, 210, 5, 501)
    trace.launch("after", 5000, 5010, 5, 502)
    result = linked(trace, tmp_path)
    assert [activity.name for activity in result.activities] == ["ours"]
    shown = result.report.activities_outside
    assert shown == {"launched before the Kineto trace": 1, "launched before or after the execution trace": 1}
    assert result.report.activity_rate == 1.0


def test_an_operation_outside_the_execution_trace_passes_launches_to_its_parent(tmp_path: Path) -> None:
    trace = SmallTrace()
    outer = trace.op("known", 0, 100)
    trace.host_event("not in the execution trace", 10, 50, None)
    trace.launch("kernel", 20, 30, 5, 501)
    trace.op("last", 150, 10)
    trace.host_event("after it", 300, 10, None)
    del trace.nodes[:3]  # whether it has roots or not
    result = linked(trace, tmp_path)
    assert hosts(result) == [("kernel", outer)]
    assert result.report.activities_linked == {"correlation id": 1}
    unmatched = {"within the execution trace": 1, "before or after the execution trace": 1}
    assert result.report.kineto_unmatched == unmatched


def test_record_function_ids_of_another_process_are_ignored(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.add("cpu_op", "aten::mm", 500, 10, 99, 99, {"Record function id": 1, "External id": 1})
    trace.op("aten::mm", 0, 100)
    result = linked(trace, tmp_path)
    assert result.host[3].start_ns == 0
    assert result.report.warnings == []
