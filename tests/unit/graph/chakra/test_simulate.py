"""Playing converted traces: begin, end, joining over ranks, critical path."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from crossrank.comm import CommRecord
from crossrank.tools.cli import main
from crossrank.tools.graph.chakra.chakra_graph import LATE, PAUSE, ChakraNode, Comm, Dependency, NumberedGroup, RunsOn
from crossrank.tools.graph.chakra.convert import convert
from crossrank.tools.graph.chakra.simulate import (
    COMMUNICATION,
    GPU,
    HOST,
    RankGraph,
    RankNode,
    Simulation,
    Transfer,
    rank_graph,
    simulate,
)
from crossrank.tools.graph.linking import link
from crossrank.tools.output.simulation import print_simulation, write_timeline
from tests.unit.graph.chakra.test_convert import params, two_streams
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.graph.linking.small_traces import SmallTrace


def graph(trace: SmallTrace, folder: Path, rank: int = 0) -> RankGraph:
    made = folder / str(rank)
    made.mkdir(exist_ok=True)
    trace.kineto_head["distributedInfo"]["rank"] = rank
    result = convert(link(*trace.write(made)), made / f"chakra.{rank}.et", keep_graph=True).graph
    assert result is not None
    return result


def begins(one: RankGraph, simulation: Simulation) -> dict[str, float]:
    return {
        node.name.partition("_")[0]: begin / 1000
        for node, (begin, _) in zip(one.nodes, simulation.runs_ns[one.rank], strict=True)
        if node.name != PAUSE
    }


def test_one_rank_is_simulated_as_measured(tmp_path: Path) -> None:
    one = graph(two_streams(), tmp_path)
    simulation = simulate([one])
    # linear until its child begins, the child, the call, the wait for both streams, and what follows 50 us later.
    host = {"aten::linear": 0, "aten::addmm": 10, "record": 50, "aten::add": 395}
    assert begins(one, simulation) == host | {"gemm": 30, "ncclDevKernel": 300}
    assert (simulation.makespan_ns, simulation.measured_ns) == (445_000, 450_000)
    assert simulation.critical_ns == {GPU: 270_000, "communication": 45_000, HOST: 80_000, PAUSE: 50_000}
    busy = {"thread 1": 100_000, "device 0 stream 7": 270_000, "device 0 stream 20": 45_000}
    assert simulation.busy_ns == {(0, runs_on): ns for runs_on, ns in busy.items()}


def test_without_a_measured_time_the_error_of_a_simulation_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    simulation = Simulation(makespan_ns=5, measured_ns=0, busy_ns={(0, "thread 1"): 0}, joined=0, alone=0)
    assert simulation.error is None
    print_simulation(1, simulation, changed=True)
    assert "0.000 ms; simulated is -" in capsys.readouterr().out


def test_a_graph_has_relative_times_and_separates_communications() -> None:
    group = NumberedGroup(number="5", ranks=(0, 1), pg="x")
    thread: RunsOn = ("thread", 1)
    waits = [Dependency(1, "sync")]
    nodes = [
        ChakraNode(1, "op", thread, 100, 50, is_cpu=True),
        ChakraNode(2, PAUSE, thread, 150, 30, is_cpu=True, is_pause=True, dependencies=waits),
        ChakraNode(3, "gemm", ("stream", (2, 7)), 120, 5),
    ]
    numbers = [("send", None, 1), ("recv", None, 2), ("all_reduce", 2, None), ("broadcast", 1, None)]
    numbers.append(("barrier", None, None))
    for node_id, (op, seq, p2p_seq) in enumerate(numbers, start=4):
        record = CommRecord(id=0, op=op, c10d="", pg="x", bytes=8, t=0, seq=seq, p2p_seq=p2p_seq, peer=1)
        nodes.append(ChakraNode(node_id, op, ("communication", node_id), 130 + node_id, 5, comm=Comm(record, group)))
    outside = ("communication without a stream", COMMUNICATION)

    def carried(op: str) -> Transfer:
        return Transfer(op, 8, (0, 1), "unknown")

    assert rank_graph(nodes, 0, 7, 99) == RankGraph(
        rank=0,
        begin_ns=7,
        end_ns=99,
        nodes=[
            RankNode("op", "thread 1", HOST, 0, 50, [], None),
            RankNode(PAUSE, "thread 1", PAUSE, 50, 30, [0], None),
            RankNode("gemm", "device 2 stream 7", GPU, 20, 5, [], None),
            RankNode("send", *outside, 34, 5, [], ("5", (0, 1), 1), carried("send")),
            RankNode("recv", *outside, 35, 5, [], ("5", (1, 0), 2), carried("recv")),
            RankNode("all_reduce", *outside, 36, 5, [], ("5", None, 3), carried("all_reduce")),
            RankNode("broadcast", *outside, 37, 5, [], ("5", None, 2), carried("broadcast")),
            # Without a number it comes first.
            RankNode("barrier", *outside, 38, 5, [], ("5", None, 1), carried("barrier")),
        ],
    )


def test_the_simulation_breaks_a_deadlock_of_ranks() -> None:
    def rank(number: int, *groups: str) -> RankGraph:
        nodes = [
            RankNode(group, f"thread {i}", COMMUNICATION, 0, 10, [i - 1] if i else [], (group, None, 1))
            for i, group in enumerate(groups)
        ]
        return RankGraph(rank=number, begin_ns=0, end_ns=20, nodes=nodes)

    simulation = simulate([rank(0, "x", "y"), rank(1, "y", "x")])
    assert simulation.runs_ns == {0: [(0, 10), (10, 10)], 1: [(10, 10), (20, 10)]}
    assert (simulation.joined, simulation.alone) == (1, 2)
    assert simulation.critical_ns == {COMMUNICATION: 30}
    assert simulation.waiting_ns == {0: 0, 1: 10}


def test_a_collective_starts_with_its_last_rank_and_takes_the_shortest_time(tmp_path: Path) -> None:
    graphs = []
    for rank, (compute, kernel, dur) in enumerate(((100, 110, 500), (400, 410, 200))):
        trace = SmallTrace()
        trace.op("compute", 0, compute)
        trace.op("record_param_comms", compute, 5, inputs=params("allreduce"))
        trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", compute + 2, kernel, dur, 501, stream=20)
        graphs.append(graph(trace, tmp_path, rank))
    simulation = simulate(graphs)
    assert [begins(one, simulation)["ncclDevKernel"] for one in graphs] == [405, 405]
    assert (simulation.makespan_ns, simulation.measured_ns) == (605_000, 610_000)
    assert simulation.waiting_ns == {0: 300_000, 1: 0}
    assert (simulation.joined, simulation.alone) == (1, 0)
    assert simulation.critical_ns["communication"] == 200_000
    assert simulation.critical_ns[HOST] == 405_000  # of the rank that came last
    assert sum(simulation.critical_ns.values()) == simulation.makespan_ns


def test_the_delay_of_a_late_rank_is_on_the_critical_path(tmp_path: Path) -> None:
    graphs = [graph(two_streams(), tmp_path, rank) for rank in (0, 1)]
    graphs[1].begin_ns += 100_000
    simulation = simulate(graphs)
    assert simulation.critical_ns[LATE] == 100_000
    assert simulation.measured_ns == 550_000
    assert sum(simulation.critical_ns.values()) == simulation.makespan_ns == 545_000


def test_disagreeing_ranks_do_not_stop_a_simulation(tmp_path: Path) -> None:
    graphs = []
    for rank in (0, 1):
        trace = SmallTrace()
        for i in range(1 + rank):
            trace.op("record_param_comms", 10 * i, 5, inputs=params("allreduce", seq=i + 1))
        graphs.append(graph(trace, tmp_path, rank))
    simulation = simulate(graphs)
    assert (simulation.joined, simulation.alone) == (1, 1)


def test_clocks_far_apart_are_ignored(tmp_path: Path) -> None:
    graphs = [graph(two_streams(), tmp_path, rank) for rank in (0, 1)]
    graphs[1].begin_ns += 10**12
    simulation = simulate(graphs)
    assert not simulation.by_clocks
    assert simulation.makespan_ns == simulate(graphs[:1]).makespan_ns


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_timeline_has_every_node_on_the_track_of_its_thread_or_stream(tmp_path: Path, name: str) -> None:
    one = graph(two_streams(), tmp_path)
    simulation = simulate([one])
    write_timeline([one], simulation, tmp_path / name, name)
    content = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["device 0 stream 20", "device 0 stream 7", "thread 1"]
    gemm = next(event for event in events if event["name"] == "gemm")
    assert (gemm["pid"], tracks[gemm["tid"]], gemm["ts"], gemm["dur"]) == (0, "device 0 stream 7", 30, 270)
    # On one track nothing overlaps.
    for tid in tracks:
        runs = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == tid
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(runs))


def two_ranks(*members: tuple[int, str, int]) -> list[RankGraph]:
    """Ranks that compute for 100 ns on a GPU, and then communicate; (ns measured, operation, bytes) of each."""
    graphs = []
    for rank, (took, op, size) in enumerate(members):
        nodes = [
            RankNode("launch", "thread 1", HOST, 0, 10, [], None),
            RankNode("gemm", "device 0 stream 7", GPU, 10, 100, [0], None),
            RankNode(op, "s", COMMUNICATION, 110, took, [1], ("0", None, 1), Transfer(op, size, (0, 1), "unknown")),
        ]
        graphs.append(RankGraph(rank=rank, begin_ns=0, end_ns=110 + took, nodes=nodes))
    return graphs


def test_communication_takes_the_network_time_of_the_busiest_rank() -> None:
    uneven = two_ranks((40, "all_to_all", 600), (30, "all_to_all", 1000))
    assert simulate(uneven).makespan_ns == 140
    slow = simulate(uneven, lambda one: one.bytes / 2)
    assert (slow.makespan_ns, slow.measured_ops) == (610, {})


def test_operations_unknown_to_the_network_keep_measured_times_and_are_counted() -> None:
    simulation = simulate(two_ranks((40, "barrier", 0), (30, "barrier", 0)), lambda one: None)
    assert (simulation.makespan_ns, simulation.measured_ops) == (140, {"barrier": 2})


def test_computation_is_scaled_on_gpus_or_on_the_host_without_gpus() -> None:
    graphs = two_ranks((40, "barrier", 0), (30, "barrier", 0))
    assert simulate(graphs, compute=1.5).makespan_ns == 10 + 150 + 30
    for graph in graphs:
        graph.nodes = [node for node in graph.nodes if node.category != GPU]
        graph.nodes[1].sources = [0]
    assert simulate(graphs, compute=1.5).makespan_ns == 15 + 30


@needs_traces
def test_the_simulation_of_dlrm_matches_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", public("dlrm_8gpu")]) == 0
    page = (Path(__file__).parents[4] / "docs" / "commands" / "simulate.md").read_text()
    title = "\nSimulation of window 1\n"
    shown = title + page.partition(title)[2].partition("  …\n")[0]
    assert shown.count("\n") > 10
    assert shown in capsys.readouterr().out


def test_the_command_prints_the_simulation_and_writes_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_streams().write(tmp_path)
    timeline = tmp_path / "t.json"
    assert main(["simulate", str(tmp_path), "--timeline", str(timeline)]) == 0
    out = capsys.readouterr().out
    assert "\nsimulated  0.445 ms from the first start to the last end of all ranks\n" in out
    assert "\nmeasured   0.450 ms; simulated -1.1 %\n" in out
    assert "\nmatched    0 communications across ranks, 1 without a match\n" in out
    assert "         0.270 ms  computation on a GPU\n" in out
    assert timeline.exists()


@pytest.mark.parametrize("timeline", ["{folder}/gone/t.json", "{folder}", "{folder}/chakra.0.et"])
def test_an_unwritable_timeline_is_reported_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], timeline: str
) -> None:
    two_streams().write(tmp_path)
    assert main(["simulate", str(tmp_path), "--timeline", timeline.format(folder=tmp_path)]) == 2
    assert capsys.readouterr().out == ""
