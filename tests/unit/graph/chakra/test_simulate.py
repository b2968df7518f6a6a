"""Playing converted traces: begin, end, joining over ranks, critical path."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from crossrank.tools.cli import main
from crossrank.tools.graph.chakra.chakra_graph import LATE, PAUSE
from crossrank.tools.graph.chakra.convert import convert
from crossrank.tools.graph.chakra.simulate import GPU, HOST, RankGraph, Simulation, simulate
from crossrank.tools.graph.chakra.simulation_timeline import write_timeline
from crossrank.tools.graph.linking import link
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


def test_one_rank_is_played_as_it_was_measured(tmp_path: Path) -> None:
    one = graph(two_streams(), tmp_path)
    simulation = simulate([one])
    # linear until its child begins, the child, the call, the wait for both streams, and what follows 50 us later.
    assert begins(one, simulation) == {
        "aten::linear": 0,
        "aten::addmm": 10,
        "record": 50,
        "gemm": 30,
        "ncclDevKernel": 300,
        "aten::add": 395,
    }
    assert (simulation.makespan_ns, simulation.measured_ns) == (445_000, 450_000)
    assert simulation.critical_ns == {GPU: 270_000, "communication": 45_000, HOST: 80_000, PAUSE: 50_000}


def test_a_collective_begins_when_its_last_member_is_ready_and_takes_the_shortest_time(tmp_path: Path) -> None:
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


def test_a_rank_that_begins_late_is_on_the_critical_path_with_its_delay(tmp_path: Path) -> None:
    graphs = [graph(two_streams(), tmp_path, rank) for rank in (0, 1)]
    graphs[1].begin_ns += 100_000
    simulation = simulate(graphs)
    assert simulation.critical_ns[LATE] == 100_000
    assert sum(simulation.critical_ns.values()) == simulation.makespan_ns == 545_000


def test_ranks_that_disagree_do_not_stop_the_play(tmp_path: Path) -> None:
    graphs = []
    for rank in (0, 1):
        trace = SmallTrace()
        for i in range(1 + rank):
            trace.op("record_param_comms", 10 * i, 5, inputs=params("allreduce", seq=i + 1))
        graphs.append(graph(trace, tmp_path, rank))
    simulation = simulate(graphs)
    assert (simulation.joined, simulation.alone) == (1, 1)


def test_clocks_that_are_far_apart_are_told(tmp_path: Path) -> None:
    graphs = [graph(two_streams(), tmp_path, rank) for rank in (0, 1)]
    graphs[1].begin_ns += 10**12
    simulation = simulate(graphs)
    assert not simulation.by_clocks
    assert simulation.makespan_ns == simulate(graphs[:1]).makespan_ns


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_timeline_has_every_node_on_the_track_of_its_thread_or_stream(tmp_path: Path, name: str) -> None:
    one = graph(two_streams(), tmp_path)
    simulation = simulate([one])
    write_timeline([one], simulation, tmp_path / name)
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


@needs_traces
def test_the_simulation_of_dlrm_is_close_to_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [public("dlrm_8gpu"), "-o", str(tmp_path), "--simulate", "--json", "--jobs", "1"]
    assert main(["convert", *words]) == 0
    (simulation,) = json.loads(capsys.readouterr().out)["simulations"]
    assert (simulation["joined"], simulation["alone"]) == (8, 0)
    assert abs(simulation["error"]) < 0.02


@needs_traces
def test_the_simulation_of_dlrm_is_the_one_that_the_readme_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", public("dlrm_8gpu"), "-o", str(tmp_path), "--simulate"]) == 0
    readme = (Path(__file__).parents[4] / "README.md").read_text()
    shown = "Simulation\n" + readme.partition("\nSimulation\n")[2].partition("  …\n")[0]
    assert shown.count("\n") > 10
    assert shown in capsys.readouterr().out


def test_the_command_prints_the_simulation_and_writes_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_streams().write(tmp_path)
    timeline = tmp_path / "t.json"
    assert main(["convert", str(tmp_path), "-o", str(tmp_path / "out"), "--simulate", "--timeline", str(timeline)]) == 0
    out = capsys.readouterr().out
    assert "  makespan   0.445 ms, -1.1% of the measured 0.450 ms (first start to last end of all ranks)\n" in out
    assert "  joined     0 communications over several ranks, 1 played alone\n" in out
    assert "           0.270 ms  computation on a GPU\n" in out
    assert timeline.exists()
