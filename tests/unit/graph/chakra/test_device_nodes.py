"""GPU and communication nodes alone, with the dependencies that ran through the host."""

from __future__ import annotations

from pathlib import Path

from crossrank.tools.graph.chakra.chakra_graph import Options
from crossrank.tools.graph.chakra.convert import convert
from crossrank.tools.graph.chakra.framing import read_trace
from crossrank.tools.graph.linking import link
from crossrank.tools.output.chakra import as_dict
from tests.unit.graph.chakra.test_convert import two_streams
from tests.unit.graph.linking.small_traces import SmallTrace


def dependencies(trace: SmallTrace, folder: Path) -> dict[str, list[str]]:
    path = folder / "chakra.0.et"
    convert(link(*trace.write(folder)), path, Options(nodes="gpu"))
    nodes = {node["id"]: node for node in (as_dict(node) for _, node in read_trace(str(path))[1])}
    assert not any(node["attr"]["is_cpu_op"] for node in nodes.values())
    assert not any("ctrl_deps" in node for node in nodes.values())
    return {
        node["name"].partition("(")[0]: [
            nodes[source]["name"].partition("(")[0] for source in node.get("data_deps", [])
        ]
        for node in nodes.values()
    }


def test_what_the_host_waited_for_holds_back_what_it_launches_then(tmp_path: Path) -> None:
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


def test_kernels_that_the_host_did_not_wait_for_keep_the_order_of_their_streams_alone(tmp_path: Path) -> None:
    trace = SmallTrace()
    trace.op("aten::mm", 0, 100)
    trace.launch("one", 10, 20, 30, 501)
    trace.launch("two", 20, 60, 30, 502)
    trace.launch("aside", 30, 40, 30, 503, stream=8)
    assert dependencies(trace, tmp_path) == {"one": [], "two": ["one"], "aside": []}


def test_of_what_the_host_waited_for_on_one_stream_the_last_is_enough(tmp_path: Path) -> None:
    trace = SmallTrace()
    for i in range(3):
        trace.op("aten::mm", 1000 * i, 900)
        trace.launch(f"kernel {i}", 1000 * i + 10, 1000 * i + 20, 30, 501 + 2 * i)
        trace.call("cudaDeviceSynchronize", 1000 * i + 30, 100, 502 + 2 * i)
    trace.op("aten::mm", 3000, 900)
    trace.launch("aside", 3010, 3020, 30, 510, stream=8)
    assert dependencies(trace, tmp_path)["aside"] == ["kernel 2"]
