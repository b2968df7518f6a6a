"""`crossrank simulate`: what it takes a network from, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from crossrank.tools.graph.linking.linked_trace import OTHER_ITERATIONS
from tests.unit.graph.chakra.test_convert import two_streams
from tests.unit.graph.linking.public_traces import needs_traces, public

pytestmark = pytest.mark.touches("crossrank", "tools", traced=False)


RECORDING = str(Path(__file__).parents[2] / "fixtures" / "gloo" / "recording")


@pytest.fixture
def dlrm() -> str:
    return public("dlrm_8gpu")


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["simulate", *words, "--json", "--jobs", "1"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@needs_traces
def test_measured_times_are_used_unless_a_network_is_given(dlrm: str, capsys: pytest.CaptureFixture[str]) -> None:
    measured = simulated(capsys, dlrm)
    assert (measured["network"], measured["leave_one_out"], measured["grown"]) == (None, [], None)
    slow = simulated(capsys, dlrm, "--inter", "1GB/s,1ms")
    assert slow["network"]["links"] == {"cross_node": {"gb_per_s": 1.0, "latency_us": 1000.0}}
    assert slow["simulations"][0]["makespan_ns"] > 1.5 * measured["simulations"][0]["makespan_ns"]


def test_a_recording_gives_its_own_network(capsys: pytest.CaptureFixture[str]) -> None:
    answer = simulated(capsys, RECORDING, "--network", "fitted", "--leave-one-out")
    shown = {(one["op"], one["locality"]) for one in answer["network"]["operations"]}
    assert shown == {("all_reduce", "intra_node"), ("all_gather", "intra_node"), ("reduce_scatter", "intra_node")}
    assert abs(answer["simulations"][0]["error"]) < 0.03
    kinds = {(one["op"], one["bytes"]): one for one in answer["leave_one_out"]}
    large = kinds["all_reduce", 524288]
    assert large["measured_ns"] == 2_705_052
    assert large["predicted_ns"] == pytest.approx(575_273, rel=0.01)


@needs_traces
def test_sizes_and_times_of_different_steps_give_no_network(dlrm: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", dlrm, "--grow-to", "16", "--jobs", "1"]) == 2
    said = capsys.readouterr().err
    assert "no collective of several ranks has both a size and a time, so its network is unknown" in said
    assert main(["simulate", dlrm, "--leave-one-out", "--jobs", "1"]) == 0
    printed = capsys.readouterr()
    assert "No prediction: no collective has both a size and a time" in printed.out
    assert OTHER_ITERATIONS in printed.err


@needs_traces
def test_a_grown_job_reports_its_sizes(dlrm: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = simulated(capsys, dlrm, "--grow-to", "16", "--network", "measured")
    assert (answer["grown"]["recorded"]["dp"]["size"], answer["grown"]["written"]) == (8, {"dp": 16})
    assert answer["grown"]["sizes"] == {
        "of all_to_all on groups of 16 instead of 8 keep their size": 8,
        "of all_to_all on groups of 16 instead of 8 keep their rows; which of them go to whom is not known": 32,
        "of all_reduce on groups of 16 instead of 8 keep their size": 24,
    }
    assert answer["simulations"] == simulated(capsys, dlrm)["simulations"]


@needs_traces
def test_the_ranks_per_node_decide_the_link_of_a_group(dlrm: str, capsys: pytest.CaptureFixture[str]) -> None:
    links = ("--intra", "300GB/s,1us", "--inter", "1GB/s,1ms", "--per-node")
    inside = simulated(capsys, dlrm, *links, "8")["simulations"][0]["makespan_ns"]
    assert inside < 21_000_000 < simulated(capsys, dlrm, *links, "4")["simulations"][0]["makespan_ns"]


@needs_traces
def test_simulate_prints_a_summary(dlrm: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", dlrm, "--grow-to", "16", "--intra", "300GB/s", "--compute", "0.5", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "ranks      8 ranks (dp=8) as 16 (dp=16): dp from 8 to 16\n" in out
    assert "groups are inside a node, or cross nodes, as recorded; --per-node N changes this\n" in out
    assert "           intra_node     300 GB/s, 0 us\n" in out
    assert "unchanged  24 calls of all_reduce keep their measured time: no network model\n" in out


def test_a_recording_without_times_gets_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_streams().write(tmp_path)
    assert main(["simulate", str(tmp_path), "--network", "fitted", "--jobs", "1"]) == 2
    assert "give --intra and --inter, or --network measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--intra", "fast"), "'fast' is not RATE[,LATENCY], for example 300GB/s,2us or 400Gbps"),
        (("--per-node", "0"), "'0' is not a number above 0"),
        (("--compute", "-1"), "'-1' is not a number above 0"),
        (("--compute", "nan"), "'nan' is not a number above 0"),
        (("--dims", "dp"), "'dp' is not a list of dimensions; write it as dp=8,tp=4"),
        (("--ranks", "3-1"), "'3-1' goes backwards; write the lower rank first"),
        (("--network", "measured", "--inter", "1GB/s"), "remove --intra and --inter"),
        (("--per-node", "2"), "give --intra and --inter, or --network fitted"),
        (("--algorithm", "tree"), "give --intra and --inter, or --network fitted"),
        (("--grow", "tp"), "--grow needs --grow-to N"),
        (("--ranks", "0-1", "--astra-sim", "x"), "--astra-sim simulates all ranks of a job"),
        (("--astra-sim",), "--astra-sim needs the path of AstraSim_Analytical_Congestion_Unaware"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.delenv("ASTRA_SIM", raising=False)
    two_streams().write(tmp_path)
    try:
        code = main(["simulate", str(tmp_path), *words])
    except SystemExit as error:
        code = int(error.code or 0)
    assert (code, said in capsys.readouterr().err) == (2, True)
