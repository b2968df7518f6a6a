"""Which nodes a file has, and when: pauses between host nodes, the start of a rank, GPU nodes alone.

No time is written twice, and none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from crossrank.tools.graph.chakra.chakra_graph import LATE, PAUSE, Options
from crossrank.tools.graph.chakra.convert import convert
from crossrank.tools.graph.chakra.framing import read_trace
from crossrank.tools.graph.chakra.simulate import simulate
from crossrank.tools.graph.linking import LinkedTrace, link
from crossrank.tools.output.chakra import as_dict
from tests.unit.graph.chakra.test_convert import two_streams
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.graph.linking.small_traces import SmallTrace


def written(trace: LinkedTrace, folder: Path, **options: Any) -> list[dict[str, Any]]:
    path = folder / "chakra.0.et"
    convert(trace, path, Options(**options))
    return [as_dict(node) for _, node in read_trace(str(path))[1]]


def shown(nodes: list[dict[str, Any]]) -> list[tuple[str, int, list[int]]]:
    return [(node["name"], node["duration_micros"], node.get("data_deps", [])) for node in nodes]


def longest_path(nodes: list[dict[str, Any]]) -> int:
    """Microseconds that a file takes if nothing but its dependencies holds a node back."""
    ends: dict[int, int] = {}
    for node in nodes:
        sources = node.get("data_deps", []) + node.get("ctrl_deps", [])
        ends[node["id"]] = max((ends[source] for source in sources), default=0) + node["duration_micros"]
    return max(ends.values())


def test_a_pause_is_a_node_between_two_operations_of_a_thread(tmp_path: Path) -> None:
    nodes = written(link(*two_streams().write(tmp_path)), tmp_path)
    linear, addmm, params, add, gemm, reduce = 4, 5, 6, 7, 8, 9
    rest, late, start = 10, 11, 12  # of linear after its call; after the wait for the GPU; before the rank began
    assert shown(nodes) == [
        (LATE, 0, []),
        ("aten::linear", 10, [start]),
        ("aten::addmm", 20, [linear]),
        ("gemm", 270, [addmm]),
        (PAUSE, 20, [addmm]),
        ("record_param_comms", 20, [rest]),
        ("ncclDevKernel_AllReduce_Sum_f32(x)", 45, [params, gemm]),
        (PAUSE, 50, [params, gemm, reduce]),
        ("aten::add", 50, [late]),
    ]
    assert {node["id"] for node in nodes} == {linear, addmm, params, add, gemm, reduce, rest, late, start}
    assert [node["attr"]["tid"] for node in nodes if node["name"] == PAUSE] == [1, 1]


def test_durations_are_the_same_without_pauses(tmp_path: Path) -> None:
    trace = link(*two_streams().write(tmp_path))
    nodes = [node for node in shown(written(trace, tmp_path)) if node[0] != PAUSE]
    without = shown(written(trace, tmp_path, pauses=False))
    assert [node[:2] for node in without] == [node[:2] for node in nodes]
    assert without[-1] == ("aten::add", 50, [6, 8, 9])


def test_pauses_of_less_than_a_microsecond_add_up(tmp_path: Path) -> None:
    trace = SmallTrace()
    for i in range(11):
        trace.op("op", 10.25 * i, 10)
    nodes = shown(written(link(*trace.write(tmp_path)), tmp_path))
    assert [name for name, _, _ in nodes if name == PAUSE] == [PAUSE] * 2
    assert sum(duration for _, duration, _ in nodes) == 112  # of 112.5


def test_a_range_does_not_include_its_wait_for_another_thread(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("forward", 0, 100)
    trace.op("## backward ##", 110, 103_000, scope=7)
    for i in range(10):
        trace.op("backward", 200 + 10_000 * i, 10_000, 3, tid=2)
    trace.op("optimizer", 103_120, 100)
    nodes = written(link(*trace.write(tmp_path)), tmp_path)
    waiting = {node["name"]: node["duration_micros"] for node in nodes if node["name"] != PAUSE}
    assert waiting == {LATE: 0, "forward": 100, "## backward ##": 90, "backward": 10_000, "optimizer": 100}
    # All of a rank one after the other, as a simulator with one host per rank runs it.
    assert sum(node["duration_micros"] for node in nodes) == longest_path(nodes) == 103_220


def test_a_thread_waits_for_the_work_that_it_started(tmp_path: Path) -> None:
    trace = SmallTrace()
    outer = trace.op("## backward ##", 0, 9_000, scope=7)
    first = trace.op("aten::ones_like", 10, 10, outer)
    begun = trace.op("evaluate_function", 50, 4_000, 3, tid=2)
    last = trace.op("evaluate_function", 4_050, 4_000, 3, tid=2)
    accumulate = trace.op("AccumulateGrad", 8_060, 10, outer)
    nodes = {node["id"]: node for node in written(link(*trace.write(tmp_path)), tmp_path, pauses=False)}
    assert nodes[begun]["data_deps"] == [first]
    assert nodes[accumulate]["data_deps"] == [first, last]


def test_an_operation_that_computes_waits_for_no_other_thread(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 9_000)
    other = trace.op("loader", 100, 8_000, 3, tid=2)
    after = trace.op("aten::add", 9_000, 10)
    nodes = {node["id"]: node for node in written(link(*trace.write(tmp_path)), tmp_path, pauses=False)}
    assert nodes[4]["duration_micros"] == 9_000
    assert other not in nodes[after]["data_deps"]


@needs_traces
@pytest.mark.parametrize("name", ["dlrm_8gpu", "linear_1gpu"])
def test_a_file_takes_as_long_as_the_simulation_of_its_rank(tmp_path: Path, name: str) -> None:
    pair = (public(f"{name}/rank-0.{kind}.json.gz") for kind in ("et", "kineto"))
    path = tmp_path / "chakra.0.et"
    graph = convert(link(*pair, rank=0), path, keep_graph=True).graph
    assert graph is not None
    simulated = simulate([graph]).makespan_ns / 1000
    assert longest_path([as_dict(node) for _, node in read_trace(str(path))[1]]) == pytest.approx(simulated, rel=0.01)


def of_ranks(folder: Path, *starts_us: int) -> list[list[dict[str, Any]]]:
    """The nodes of one file for each rank, of which each has two operations of 100 µs from its start on."""
    for rank, start in enumerate(starts_us):
        trace = SmallTrace()
        trace.op("first", start, 100)
        trace.op("second", start + 100, 100)
        trace.write(folder, rank)
    assert main(["convert", str(folder), "-o", str(folder / "out"), "--jobs", "1"]) == 0
    paths = [folder / "out" / f"chakra.{rank}.et" for rank in range(len(starts_us))]
    return [[as_dict(node) for _, node in read_trace(str(path))[1]] for path in paths]


def test_a_rank_starts_at_the_delay_given_by_its_clock(tmp_path: Path) -> None:
    early, late = of_ranks(tmp_path, 1000, 1150)
    assert [(node["name"], node["duration_micros"]) for node in early] == [(LATE, 0), ("first", 100), ("second", 100)]
    assert [(node["name"], node["duration_micros"]) for node in late] == [(LATE, 150), ("first", 100), ("second", 100)]
    start, first, second = late
    assert (first["data_deps"], second["data_deps"]) == ([start["id"]], [first["id"]])


def test_ranks_with_clocks_too_far_apart_start_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [nodes[0]["duration_micros"] for nodes in of_ranks(tmp_path, 0, 5_000_000)] == [0, 0]
    told = "clocks     differ by more than window 1 is long, so all ranks start at 0\n"
    assert told in capsys.readouterr().out


def dependencies(trace: SmallTrace, folder: Path) -> dict[str, list[str]]:
    nodes = {node["id"]: node for node in written(link(*trace.write(folder)), folder, nodes="gpu")}
    assert not any(node["attr"]["is_cpu_op"] for node in nodes.values())
    assert not any("ctrl_deps" in node for node in nodes.values())
    return {
        node["name"].partition("(")[0]: [
            nodes[source]["name"].partition("(")[0] for source in node.get("data_deps", [])
        ]
        for node in nodes.values()
    }


def test_a_wait_of_the_host_delays_its_next_launches(tmp_path: Path) -> None:
    trace = two_streams()  # a gemm, an all_reduce on another stream after it, and a wait for both
    trace.op("aten::mul", 460, 20)
    trace.launch("after", 465, 500, 10, 510)
    trace.launch("aside", 470, 520, 10, 512, stream=30)
    assert dependencies(trace, tmp_path) == {
        "gemm": [],
        "ncclDevKernel_AllReduce_Sum_f32": ["gemm"],
        "after": ["gemm", "ncclDevKernel_AllReduce_Sum_f32"],  # its stream, and what the host waited for
        "aside": ["ncclDevKernel_AllReduce_Sum_f32"],  # which itself waited for the gemm
    }


def test_kernels_without_a_host_wait_have_only_the_order_of_their_streams(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 100)
    trace.launch("one", 10, 20, 30, 501)
    trace.launch("two", 20, 60, 30, 502)
    trace.launch("aside", 30, 40, 30, 503, stream=8)
    assert dependencies(trace, tmp_path) == {"one": [], "two": ["one"], "aside": []}


def test_launches_depend_on_the_last_awaited_kernel_of_a_stream(tmp_path: Path) -> None:
    trace = SmallTrace()
    for i in range(3):
        trace.op("aten::mm", 1000 * i, 900)
        trace.launch(f"kernel {i}", 1000 * i + 10, 1000 * i + 20, 30, 501 + 2 * i)
        trace.call("cudaDeviceSynchronize", 1000 * i + 30, 100, 502 + 2 * i)
    trace.op("aten::mm", 3000, 900)
    trace.launch("aside", 3010, 3020, 30, 510, stream=8)
    assert dependencies(trace, tmp_path)["aside"] == ["kernel 2"]
