"""Kineto traces of several years and makers, and communication kernels by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossrank.comm import Group
from crossrank.errors import CrossrankError
from crossrank.tools.traces.kernels import communication_kernel
from crossrank.tools.traces.kineto import KinetoTrace, SyncEvent, read_kineto


def event(category: str = "cpu_op", **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": "n", "pid": 1, "tid": 2, "ts": 1.0, "dur": 2.0, "args": {}} | fields


def read(folder: Path, content: Any) -> KinetoTrace:
    path = folder / "k.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_kineto(str(path))


@pytest.mark.parametrize(
    ("ts", "dur", "start", "end"),
    [
        ("4458676983543.183", "0.001", 4458676983543183, 4458676983543184),
        ("8796093022207.999", "41.407", 8796093022207999, 8796093022249406),
        ("1694128201435418", "52", 1694128201435418000, 1694128201435470000),
        ("1694128201435418.123", "0.457", 1694128201435418000, 1694128201435418457),
        ("-3.5", "1.25", -3500, -2250),
    ],
)
def test_times_keep_every_digit_of_a_double(tmp_path: Path, ts: str, dur: str, start: int, end: int) -> None:
    text = json.dumps({"traceEvents": [event()]}).replace('"ts": 1.0', f'"ts": {ts}')
    host = read(tmp_path, text.replace('"dur": 2.0', f'"dur": {dur}')).host[0]
    assert (host.start, host.end) == (start, end)


def test_events_are_sorted_by_kind(tmp_path: Path) -> None:
    sync_args = {"cuda_sync_kind": "Stream Wait Event", "device": 0, "stream": 20, "wait_on_stream": 7}
    sync_args |= {"correlation": 3, "wait_on_cuda_event_record_corr_id": 2}
    trace = read(
        tmp_path,
        {
            "baseTimeNanoseconds": 7,
            "distributedInfo": {"rank": 3, "world_size": 8, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]},
            "traceEvents": [
                event("cpu_op", args={"Record function id": 5, "External id": 6, "Sequence number": 9}),
                event("user_annotation", args={"External id": "12"}),
                event("cuda_runtime", name="cudaGraphLaunch", args={"correlation": 8, "External id": 6}),
                event("cuda_driver", name="cuLaunchKernelEx", args={"correlation": 9}),
                event("cuda_runtime", name="hipLaunchKernel", args={"correlation": 10}),
                event("kernel", args={"device": 1, "stream": 7, "context": 2, "correlation": 8, "External id": 6}),
                event("gpu_memset", pid=4, tid=20, args={"correlation": 11}),
                event("cuda_sync", args=sync_args),
                event("cuda_sync", args={"stream": 5}),
                event("python_function"),
                event("cpu_op", ph="B"),
                event("gpu_user_annotation"),
                event("", ph="i"),
                event(""),
                {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
                {"ph": "s", "cat": "ac2g", "id": 3, "ts": 5},
            ],
        },
    )
    assert [(e.rf_id, e.external_id, e.seq_id) for e in trace.host] == [(5, 6, 9), (None, 12, -1)]
    calls = [(one.name, one.correlation) for one in trace.calls]
    assert calls == [("cudaGraphLaunch", 8), ("cuLaunchKernelEx", 9), ("hipLaunchKernel", 10)]
    device = [(one.category, one.device, one.stream, one.correlation) for one in trace.device]
    assert device == [("kernel", 1, 7, 8), ("gpu_memset", 4, 20, 11)]
    assert trace.syncs == [
        SyncEvent("Stream Wait Event", 0, 20, 1000, 3000, 3, 7, 2),
        SyncEvent("n", 1, 5, 1000, 3000, None, None, None),
    ]
    assert (trace.base_ns, trace.rank, trace.world_size) == (7, 3, 8)
    assert trace.groups == (Group(pg="0", size=2, ranks=[0, 1]),)
    unread = ("cpu_op, phase 'B'", "gpu_user_annotation", "python_function", "(none), phase 'i'")
    assert trace.unread == dict.fromkeys(unread, 1)
    assert trace.damage == ["1 event(s) lack a phase or a category and were skipped (first: 'n')"]


def test_broken_times_and_durations_are_counted(tmp_path: Path) -> None:
    events = [event(dur=-3), event(name="later"), event(ts=None), event(name="nan")]
    text = json.dumps({"traceEvents": events}).replace(
        '"name": "nan", "pid": 1, "tid": 2, "ts": 1.0, "dur": 2.0', '"name": "nan", "ts": 1.0, "dur": NaN'
    )
    trace = read(tmp_path, text)
    assert [(e.name, e.end - e.start) for e in trace.host] == [("n", 0), ("later", 2000), ("nan", 0)]
    assert trace.damage == [
        "numbers that JSON lacks (inf, nan): 1; they are taken as unknown",
        "2 event(s) have no valid duration; 0 is used (first: 'n')",
        "1 event(s) have no valid time and were skipped (first: 'n')",
    ]


@pytest.mark.parametrize("dur", [None, -3, 1e30, "x"])
def test_a_kernel_without_a_valid_duration_is_skipped(tmp_path: Path, dur: object) -> None:
    trace = read(tmp_path, {"traceEvents": [event("kernel", name="gemm", dur=dur), event("kernel")]})
    assert [(one.name, one.end - one.start) for one in trace.device] == [("n", 2000)]
    assert len(trace.damage) == (2 if dur == "x" else 1)
    if dur != "x":
        assert [one.name for one in trace.untimed] == ["gemm"]
        assert trace.damage == [
            "1 event(s) of devices have no valid time or duration: both are unknown (first: 'gemm')"
        ]


@pytest.mark.parametrize("lacks", [("ph",), ("cat",), ("ph", "cat", "name", "ts", "dur")])
def test_an_event_without_a_phase_or_a_category_is_counted(tmp_path: Path, lacks: tuple[str, ...]) -> None:
    bad = {name: value for name, value in event("kernel").items() if name not in lacks}
    trace = read(tmp_path, {"traceEvents": [bad, event("kernel")]})
    assert len(trace.device) == 1
    (damage,) = trace.damage
    assert damage.startswith("1 event(s) lack a phase or a category and were skipped")


@pytest.mark.parametrize(
    ("has_window", "ts", "dur"), [(True, 0, 5), (True, 10**10 + 300, 2_000_000), (False, 0, 5), (False, 10**10, 10**10)]
)
def test_a_range_outside_of_the_window_is_left_out(tmp_path: Path, has_window: bool, ts: int, dur: int) -> None:
    """A trace without a window shows only times that are hours away."""
    window = [event("Trace", ts=10**10, dur=1000)] * has_window
    good = [event(ts=10**10 + 10 * number, dur=5) for number in range(40)]
    trace = read(tmp_path, {"traceEvents": [*window, *good, event(name="bad", ts=ts, dur=dur)]})
    # A range that starts in the window is one: its end is unknown.
    inside = [one for one in trace.host if one.name == "bad"]
    assert [one.end - one.start for one in inside] == ([0] if has_window and ts else [])
    assert trace.damage == ["left out: 1 host range with a time outside of the profiler's window (first: 'bad')"]


def test_arguments_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    events = [event("kernel", args={"correlation": number}) for number in ([1], "4")]
    trace = read(tmp_path, {"traceEvents": events})
    assert [activity.correlation for activity in trace.device] == [None, 4]
    assert trace.damage == ["1 event(s) have arguments that cannot be read (first: 'n')"]


@pytest.mark.parametrize("ts", ["1e300", "1e999", "-9e20", str(1 << 53)])
def test_an_event_with_an_impossible_time_is_skipped(tmp_path: Path, ts: str) -> None:
    text = json.dumps({"traceEvents": [event(), event(name="absurd", ts=77)]}).replace("77", ts)
    trace = read(tmp_path, text)
    assert [host.name for host in trace.host] == ["n"]
    assert trace.damage == ["1 event(s) have no valid time and were skipped (first: 'absurd')"]


def test_only_the_invalid_field_of_a_head_is_skipped(tmp_path: Path) -> None:
    trace = read(tmp_path, {"distributedInfo": None, "baseTimeNanoseconds": 7, "traceEvents": [event()]})
    assert (trace.base_ns, trace.rank, len(trace.host)) == (7, None, 1)
    assert trace.damage == [
        "distributedInfo is unusable (ValidationError: Expected `object`, got `null` - at `$.distributedInfo`)",
    ]


def test_a_bare_list_of_events_and_groups_by_name_are_read(tmp_path: Path) -> None:
    bare = read(tmp_path, [event(), event()])
    assert (len(bare.host), bare.base_ns, bare.rank) == (2, 0, None)
    info = {"pg_config": {"a": {"pg_name": "a", "ranks": "[0, 4]", "pg_size": 3}, "b": {"pg_name": []}}}
    assert read(tmp_path, {"distributedInfo": info, "traceEvents": [event()]}).groups == (
        Group(pg="a", size=3, ranks=[0, 4]),
    )


def test_a_trace_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CrossrankError, match=r"k\.json: has no events"):
        read(tmp_path, {"traceEvents": []})


def test_arguments_of_a_host_event_are_kept_where_they_describe_a_collective(tmp_path: Path) -> None:
    collective = {"Record function id": 6, "Collective name": "allreduce"}
    events = [event("cpu_op", args={"Record function id": 5}), event("cpu_op", args=collective)]
    assert [json.loads(bytes(host.args)) for host in read(tmp_path, {"traceEvents": events}).host] == [{}, collective]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", ("nccl", "all_reduce")),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", ("nccl", None)),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ("nccl", "reduce_scatter")),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ("nccl", "broadcast")),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", ("nccl", None)),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs4K)", ("nccl", "all_reduce")),
        ("rcclGenericKernel_4(ncclDevKernelArgsStorage<4096ul>)", ("rccl", None)),
        ("void c10d::symmetric_memory::multimem_all_reduce_kernel<float>(int)", ("symmetric memory", "all_reduce")),
        ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16>(int)", ("symmetric memory", "all_reduce")),
        ("multimem_all_reduce_bias_rms_norm", ("symmetric memory", "all_reduce")),  # as Triton writes it
        ("void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)", ("custom all-reduce", "all_reduce")),
        ("void deep_ep::internode_ll::combine<false, 7168>(void*)", ("deep_ep", "all_to_all")),
        ("void dpsk::ep::internode::dispatch<false, 8>(int4*)", ("deep_ep", "all_to_all")),
        ("void dpsk::ep::internode::cached_notify<false>(int, int)", ("deep_ep", None)),
        ("void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)", ("nvshmem", "barrier")),
        ("nvshmemi_init_array_kernel", ("nvshmem", None)),
        ("hcom_allReduce__428_0_1", ("hccl", "all_reduce")),
        ("void allreduce7<__half>(mscclpp::MemoryChannelDeviceHandle*, __half*)", ("mscclpp", None)),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", ("nccl", "all_reduce")),
        ("ncclReduceScatterTreeLL128Kernel_sum_f16(ncclColl)", ("nccl", "reduce_scatter")),
        ("userbuffers_fp16_sum_inplace_gpu_rr(int)", ("userbuffers", "all_reduce")),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs(int)", ("userbuffers", "reduce_scatter")),
        ("userbuffers_fp16_sum_inplace_gpu_rr_ag(int)", ("userbuffers", "all_gather")),
        ("kuserbuffers_pushrecv(int)", ("userbuffers", None)),
        ("all_reduce_2shot_kernel", ("custom all-reduce", "all_reduce")),
        ("allreduce_one_shot_push_kernel_bf16", ("custom all-reduce", "all_reduce")),
        ("void aiter::allreduce_fusion_kernel_1stage<__half>(int)", ("custom all-reduce", "all_reduce")),
        ("void aiter::reduce_scatter_cross_device_store<__half>(int)", ("aiter", "reduce_scatter")),
        ("hcclAllReduce_kernel", ("hccl", "all_reduce")),
        ("triton_poi_fused_all_reduce_0", None),
        ("volta_sgemm_64x64_tn", None),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)", None),
        ("void at::native::gather_kernel<float>(int)", None),
    ],
)
def test_a_kernel_name_gives_its_library_and_operation(name: str, known: tuple[str, str | None] | None) -> None:
    assert communication_kernel(name) == known


@pytest.mark.parametrize(
    ("field", "value"), [("ts", "abc"), ("ts", {}), ("dur", [4644]), ("dur", "2430.5us"), ("tid", [1]), ("cat", 7)]
)
def test_a_field_that_cannot_be_read_costs_itself_alone(tmp_path: Path, field: str, value: object) -> None:
    args = {"correlation": 4, "stream": 7}
    events = [event("kernel", name="first", args=args), event("kernel", args=args) | {field: value}]
    trace = read(tmp_path, {"traceEvents": [*events, event("kernel", name="last", args=args)]})
    found = [*trace.device, *trace.untimed]
    assert [one.name for one in trace.device if one.name != "n"] == ["first", "last"]
    assert [one.correlation for one in found] == [4] * (2 if field == "cat" else 3)
    assert f"values of traceEvents that cannot be read are unknown: {field} 1" in trace.damage


def test_an_event_that_the_file_has_twice_counts_once(tmp_path: Path) -> None:
    kernels = [event("kernel", ts=number, args={"correlation": 8, "stream": 7}) for number in (1, 1, 9)]
    hosts = [event(name="gloo:all_reduce", args={"Record function id": 5})] * 2
    unlike = [event(ts=20, args={"Record function id": 6}), event(ts=30, args={"Record function id": 6})]
    trace = read(tmp_path, {"traceEvents": [*kernels, *hosts, *unlike]})
    assert [one.start for one in trace.device] == [1000, 9000]
    assert [(one.name, one.start) for one in trace.host] == [("gloo:all_reduce", 1000), ("n", 20_000), ("n", 30_000)]
    assert trace.damage == [
        "left out: 1 host range that the file has twice (first: 'gloo:all_reduce')",
        "left out: 1 device event that the file has twice (first: 'n')",
    ]


def test_a_last_step_of_unknown_length_ends_the_one_before(tmp_path: Path) -> None:
    steps = [event("user_annotation", name=f"ProfilerStep#{n}", ts=10 * n, dur=10) for n in (5, 6, 7)]
    assert read(tmp_path, {"traceEvents": steps}).iterations == [(5, 50_000), (6, 60_000), (7, 70_000), (8, 80_000)]
    steps[-1]["dur"] = None
    assert read(tmp_path, {"traceEvents": steps}).iterations == [(5, 50_000), (6, 60_000), (7, 70_000)]
