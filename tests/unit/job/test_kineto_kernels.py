"""Kineto traces alone: every kernel that communicates is a call, and what nothing says is unknown."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import crossrank
from crossrank.tools.cli import main
from crossrank.tools.job.kineto_calls import ARGUMENTS, HALF_HOUR, NAME, NOTHING, RANGE, read_kineto_trace

DESCRIBED: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": 256, "Out msg nelems": 256}
DESCRIBED |= {"Group size": 2, "dtype": "Float", "Process Group Name": "0"}
DESCRIBED |= {"Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"}


BASE = 1_780_000_000_000_000_000


class Trace:
    """A Kineto trace in the making: each call 1 ms after the one before."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.count = 0

    def host(self, name: str, start: float, end: float, **args: Any) -> None:
        event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start}
        self.events.append(event | {"args": args})

    def kernel(self, name: str, around: tuple[str, ...] = (), *, launched: bool = True, **args: Any) -> None:
        self.count += 1
        start = 1000.0 * self.count
        for depth, one in enumerate(around):
            facts = args if one == "record_param_comms" else {}
            self.host(one, start + depth, start + 100 - depth, **facts)
        if launched:
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": 1, "tid": 1, "dur": 5}
            self.events.append(launch | {"ts": start + 50, "args": {"correlation": self.count}})
        own = {} if "record_param_comms" in around else args
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start + 200, "dur": 40.0}
        self.events.append(kernel | {"args": {"stream": 7, "correlation": self.count} | own})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": self.events}))


def bandwidth(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["bandwidth", str(folder), *words])
    return capsys.readouterr().out


def test_kernels_with_and_without_arguments_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", **DESCRIBED)
    trace.kernel("ncclDevKernel_SendRecv(ncclDevComm*)", ("c10d::alltoall_base_", "nccl:all_to_all"))
    trace.kernel("ncclDevKernel_Generic(ncclDevComm*)", ("record_param_comms", "nccl:all_reduce"), **DESCRIBED)
    trace.kernel("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(unsigned int)")
    trace.kernel("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", ("vllm::unified_attention",))
    trace.kernel("ncclDevKernel_SendRecv(ncclDevComm*)", launched=False)
    trace.kernel("ncclDevKernel_SendRecv(ncclDevComm*)", **DESCRIBED | {"Collective name": "coalesced"})
    trace.kernel("volta_sgemm_64x64_tn")
    trace.write(tmp_path / "rank-0.json")
    out = bandwidth(tmp_path, capsys, "--json", "--by", "op,group")
    found = json.loads(out)
    assert (found["calls"], found["timed_calls"]) == (7, 7)
    calls = read_kineto_trace(str(tmp_path / "rank-0.json")).calls
    times = [(one - BASE) / 1000 for column in (calls.called, calls.began, calls.ended) for one in column[5:]]
    assert times == [6200, 7050, 6200, 7200, 6240, 7240]  # the sixth kernel has no launch
    assert found["attributed"] == {ARGUMENTS: 1, RANGE: 2, NAME: 2}
    assert found["unattributed"] == {NOTHING: 2}
    rows = {(row["op"], row["pg"]): (row["collectives"], row["bytes"], row["unsized"]) for row in found["rows"]}
    assert rows == {
        ("all_reduce", "0"): (2, 2048, 0),
        ("all_to_all", None): (1, None, 1),
        ("all_reduce", None): (1, None, 1),
        ("all_gather", None): (1, None, 1),
        ("ncclDevKernel_SendRecv", None): (1, None, 1),
        ("ncclDevKernel_SendRecv", "0"): (1, None, 1),
    }


def test_a_kernel_communicates_by_its_name_or_its_arguments(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel("ncclDevKernel_SendRecv(ncclDevComm*)")
    trace.kernel("void own::exchange()", **DESCRIBED)
    trace.kernel("volta_sgemm_64x64_tn")
    trace.write(tmp_path / "rank-0.json")
    busy = read_kineto_trace(str(tmp_path / "rank-0.json")).busy
    starts = [((spans[:, 0] - BASE) // 1000).tolist() for spans in (busy.communication, busy.computation)]
    assert starts == [[1200, 2200], [3200]]


@pytest.mark.parametrize(("base", "span"), [(BASE, (BASE, BASE + HALF_HOUR)), (0, None)])
def test_host_records_without_kernels_are_calls_without_times(
    tmp_path: Path, base: int, span: tuple[int, int] | None
) -> None:
    trace = Trace()
    for start, name in ((10, "wait"), (50, "allreduce"), (30, "broadcast"), (40, "coalesced")):
        trace.host("record_param_comms", start, start + 5, **DESCRIBED | {"Collective name": name})
    trace.host("aten::mm", 20, 25)
    path = tmp_path / "rank-3.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": trace.events}))
    found = read_kineto_trace(str(path), 5)
    assert (found.rank, found.span, found.attributed, found.unattributed) == (5, span, {}, {})
    assert [record.op for record in found.records()] == ["broadcast", "all_reduce"]
    assert [one - base for one in found.calls.called] == [30_000, 50_000]
    assert [*map(list, (found.calls.id, found.calls.began, found.calls.ended))] == [[0, 1], [0, 0], [0, 0]]


def test_unrecorded_bytes_are_unknown_and_not_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)")
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", **DESCRIBED)
    trace.write(tmp_path / "rank-0.json")
    out = bandwidth(tmp_path, capsys)
    lines = [line.split() for line in out.splitlines() if line.startswith("  all_reduce")]
    assert sorted(" ".join(line[:10]) for line in lines) == [
        "all_reduce default_pg [0] ≤1 KiB unknown 2 1 1 1.02",
        "all_reduce unknown unknown unknown - 1 1 unknown 40.0 40.0",
    ]
    out = bandwidth(tmp_path, capsys, "--by", "op")
    assert "1.02 kB + 1 unknown" in out
    assert "0 B" not in out
    main(["timeline", str(tmp_path), "-o", str(tmp_path / "out.pftrace")])
    content = (tmp_path / "out.pftrace").read_bytes()
    for label in ("all_reduce unknown · unknown group", "all_reduce 1.02 kB · 0 default_pg"):
        assert label.encode() in content
    capsys.readouterr()
    main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")])
    assert "2 calls (2 with a measured time), 1.02 kB + 1 unknown" in capsys.readouterr().out


def test_a_call_without_elements_has_0_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    trace.kernel("ncclDevKernel_AllReduce(int)", **DESCRIBED | {"In msg nelems": 0, "Out msg nelems": 0})
    trace.write(tmp_path / "rank-0.json")
    out = bandwidth(tmp_path, capsys, "--json")
    assert [(row["size_to"], row["unsized"]) for row in json.loads(out)["rows"]] == [(0, 0)]


def test_kernels_with_unknown_operation_are_not_compared_across_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        trace = Trace()
        trace.kernel("ncclDevKernel_Generic(int)")
        trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", **DESCRIBED)
        trace.write(tmp_path / f"rank-{rank}.json")
    found = json.loads(bandwidth(tmp_path, capsys, "--json", "--by", "op"))
    assert {row["op"]: row["collectives"] for row in found["rows"]} == {"ncclDevKernel_Generic": 2, "all_reduce": 1}
    assert found["not_compared"] == {
        "calls whose place in the order of their group is unknown: not matched across ranks": 2
    }


def test_nesting_depth_does_not_slow_down_reading_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, depth = Trace(), 4000
    trace.host("record_param_comms", 0, 3 * depth, **DESCRIBED)
    for one in range(1, depth):
        trace.host("nccl:coalesced", one, 3 * depth - one)
    for one in range(depth):
        placed = {"ph": "X", "ts": depth + one / 2, "dur": 0.25, "args": {"correlation": one}}
        trace.events.append(placed | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1})
        trace.events.append(placed | {"cat": "kernel", "name": "ncclDevKernel_Generic(int)", "pid": 0, "tid": 7})
    trace.write(tmp_path / "rank-0.json")
    started = time.process_time()
    out = bandwidth(tmp_path, capsys, "--json", "--by", "op")
    assert time.process_time() - started < 5
    assert json.loads(out)["attributed"] == {RANGE: depth}


def numbered(rank: int, first: int, last: int, *, by_external_id: bool = False) -> dict[str, Any]:
    """A trace with all_reduces `first` to `last` of a job, each with torch's number."""
    trace = Trace()
    trace.count = first - 1
    for number in range(first, last + 1):
        trace.kernel("ncclDevKernel_Generic", ("record_param_comms",), **DESCRIBED, Seq=number)
    if by_external_id:
        for event in trace.events:
            number = round(event["ts"] // 1000)
            event["args"] = {name: one for name, one in event["args"].items() if name != "correlation"}
            event["args"]["External id"] = number
    info = {"rank": rank, "world_size": 2}
    return {"baseTimeNanoseconds": BASE, "distributedInfo": info, "traceEvents": trace.events}


@pytest.mark.parametrize("by_external_id", [False, True])
def test_calls_with_torchs_numbers_match_although_one_trace_is_cut(by_external_id: bool, tmp_path: Path) -> None:
    for rank, first in ((0, 1), (1, 9)):
        content = numbered(rank, first, 15, by_external_id=by_external_id)
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content))
    found = crossrank.load(tmp_path).table("collectives")
    assert found["number"].to_list() == [*range(1, 16)]
    joined = crossrank.load(tmp_path).table("calls")["collective"].value_counts().sort("collective")
    assert joined["count"].to_list() == [1] * 8 + [2] * 7


def test_calls_that_share_torchs_number_are_counted(tmp_path: Path) -> None:
    for rank in range(2):
        content = numbered(rank, 1, 4)
        for event in content["traceEvents"]:
            event["args"] = {name: 7 if name == "Seq" else one for name, one in event["args"].items()}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content))
    joined = crossrank.load(tmp_path).table("calls")["collective"].value_counts()
    assert joined["count"].to_list() == [2] * 4


def test_kernels_of_no_known_library_with_a_name_of_communication_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace()
    for name in ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "my_allgather_v3", "my_allgather_v3", "triton_all_reduce"):
        trace.kernel(name)
    trace.write(tmp_path / "rank-0.json")
    notes = json.loads(bandwidth(tmp_path, capsys, "--json"))["notes"]
    (note,) = (one for one in notes if "a name of communication" in one)
    assert note.startswith("2 kernels (my_allgather_v3) have a name of communication and count as computation")
    notes = json.loads(bandwidth(tmp_path, capsys, "--json", "--communication-kernels", "allgather"))["notes"]
    assert not any("a name of communication" in one for one in notes)


def test_kernels_of_no_known_library_that_a_range_of_communication_launched_are_named(tmp_path: Path) -> None:
    """A kernel that is launched elsewhere too computes; so does one of a library that computes."""
    trace = Trace()
    around = ("record_param_comms",)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", around, **DESCRIBED)
    for name in ("exchange_tokens", "exchange_tokens", "pack", "ampere_gemm"):
        trace.kernel(name, ("c10d::allreduce_",))
    trace.kernel("pack")
    trace.write(tmp_path / "rank-0.json")
    found = [note for note in crossrank.load(tmp_path).notes if "range of communication" in note]
    assert [note.split(", because")[0].split(": ")[-1] for note in found] == [
        "2 kernels (exchange_tokens) were launched within a range of communication and count as computation"
    ]


def test_calls_are_counted_on_all_ranks_if_one_has_no_numbers_of_torch(tmp_path: Path) -> None:
    for rank in range(2):
        content = numbered(rank, 1, 4)
        for event in content["traceEvents"]:
            event["args"] = {
                name: one + 100 if name == "Seq" else one
                for name, one in event["args"].items()
                if name != "Seq" or rank == 0
            }
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content))
    joined = crossrank.load(tmp_path).table("calls")["collective"].value_counts()
    assert joined["count"].to_list() == [2] * 4


@pytest.mark.parametrize("bad", [{"dur": None}, {"dur": -1}, {"ts": None}, {"dur": 1e30}])
def test_the_call_of_a_kernel_without_usable_times_keeps_its_place(tmp_path: Path, bad: dict[str, Any]) -> None:
    """Calls without numbers are counted: a lost one would shift all later ones."""
    for rank in range(2):
        trace = Trace()
        for _ in range(5):
            trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", **DESCRIBED)
        if rank:
            kernels = [event for event in trace.events if event["cat"] == "kernel"]
            kernels[2].update(bad)
        trace.write(tmp_path / f"rank-{rank}.json")
    collectives = crossrank.load(tmp_path).table("collectives")
    assert collectives["ranks"].to_list() == [2, 2, 1, 2, 2]
    assert collectives["expected"].to_list() == [2] * 5
