"""What `crossrank convert` writes, run by ASTRA-sim itself, through examples/astra-sim/run.sh.

Needs the analytical backend, built from astra-sim/astra-sim; ASTRA_SIM names its binary
(AstraSim_Analytical_Congestion_Unaware).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.feeder_contract import check
from tests.integration import jobs
from tests.integration.commands import Commands
from tests.integration.kineto_only import execution_trace
from tests.unit.graph.chakra.test_files import file_of, node
from tests.unit.graph.linking.public_traces import needs_traces, public

pytestmark = pytest.mark.skipif(
    not os.access(os.environ.get("ASTRA_SIM", ""), os.X_OK),
    reason="no ASTRA-sim here; ASTRA_SIM names its analytical backend",
)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "astra-sim"
EVERY_KIND = """
import torch, torch.distributed as dist
import crossrank
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
alone = [dist.new_group([one]) for one in range(size)][rank]
crossrank.enable(window="1:2")
one, parts = torch.ones(12), [torch.empty(12) for _ in range(size)]
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
for _ in range(3):
    dist.barrier()
    dist.gather(one, parts if rank == 0 else None, dst=0)
    dist.scatter(one, parts if rank == 0 else None, src=0)
    dist.reduce(one, dst=0)
    dist.broadcast(one, src=0)
    dist.all_reduce(one)
    dist.all_gather([torch.empty(1, dtype=torch.uint8) for _ in range(size)], torch.ones(1, dtype=torch.uint8))
    dist.all_reduce(one, group=alone)
    if rank == 0:
        dist.send(torch.empty(0), 1)
        dist.send(one, 1)
    elif rank == 1:
        dist.recv(torch.empty(0), 0)
        dist.recv(one, 0)
    optimizer.step()
crossrank.disable()
dist.destroy_process_group()
"""

EXPERTS = """
import torch, torch.distributed as dist
import crossrank
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
with crossrank.enable(window="1:2"):
    for step in range(3):
        counts = torch.tensor([100_000 + 10_000 * rank + 1_000 * step, 50_000 * rank])
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        sent, came = counts.tolist(), coming.tolist()
        there = torch.empty(sum(came))
        dist.all_to_all_single(there, torch.ones(sum(sent)), came, sent)
        dist.all_to_all_single(torch.empty(sum(sent)), there, sent, came)
        optimizer.step()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Simulated:
    """What ASTRA-sim printed."""

    text: str
    ranks: int
    finished: int
    last_ns: int


def simulate(prefix: Path, system: str = "system.json", seconds: float = 120) -> Simulated:
    command = [str(EXAMPLES / "run.sh"), str(prefix)]
    variables = os.environ | {"SYSTEM": str(EXAMPLES / system)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        try:
            out, err = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # ASTRA-sim as well, which would run for ever
            raise
    said = re.search(r"^(\d+) of (\d+) ranks finished, the last after (\d+) ns$", out, re.MULTILINE)
    assert said is not None, out + err
    finished, ranks, last = map(int, said.groups())
    assert run.returncode == (finished != ranks)
    return Simulated(out + err, ranks, finished, last)


def convert(source: str | Path, folder: Path, command: Commands, *words: str) -> list[dict[str, Any]]:
    """Convert for ASTRA-sim; the figures of our own simulation of each window."""
    command("convert", source, "-o", folder, "--lower", "astra-sim", "--jobs", "1", *words)
    command("check", *sorted(folder.glob("*.et")))
    simulations: list[dict[str, Any]] = command.json("simulate", source, "--jobs", "1")["simulations"]
    return simulations


def as_measured(simulated: Simulated, ours: dict[str, Any]) -> bool:
    """Whether all ranks finished, within a tenth of the measured makespan."""
    error = simulated.last_ns / ours["measured_ns"] - 1
    return simulated.finished == simulated.ranks and abs(error) < 0.1


@needs_traces
def test_dlrm_ranks_finish_at_the_measured_time(tmp_path: Path, command: Commands) -> None:
    (ours,) = convert(public("dlrm_8gpu"), tmp_path, command)
    for system in ("system.json", "replay.json"):
        simulated = simulate(tmp_path / "chakra", system)
        assert simulated.ranks == 8
        assert as_measured(simulated, ours)


@needs_traces
def test_a_range_around_backward_does_not_count_its_time_twice(tmp_path: Path, command: Commands) -> None:
    with gzip.open(public("nccl_2gpu") + "/rank-0.kineto.json.gz") as file:
        kineto = json.load(file)
    (tmp_path / "rank-0.kineto.json").write_text(json.dumps(kineto))
    (tmp_path / "rank-0.et.json").write_text(json.dumps(execution_trace(kineto)))
    (ours,) = convert(tmp_path, tmp_path / "out", command)
    # The other rank's files are not there; it did the same.
    shutil.copy(tmp_path / "out" / "chakra.0.et", tmp_path / "out" / "chakra.1.et")
    assert as_measured(simulate(tmp_path / "out" / "chakra"), ours)


@needs_traces
def test_astra_sim_reports_overlap_without_host_nodes(tmp_path: Path, command: Commands) -> None:
    convert(public("dlrm_8gpu"), tmp_path, command, "--nodes", "gpu")
    simulated = simulate(tmp_path / "chakra")
    assert simulated.finished == 8
    assert simulated.text.count("Total compute-communication overlap") == 8
    assert "removed before call" not in simulated.text


def test_both_demo_windows_finish_at_the_measured_time(tmp_path: Path, command: Commands) -> None:
    done = jobs.torchrun(tmp_path, ROOT / "examples" / "demo.py", ranks=4, TRACING_DIR=str(tmp_path / "recording"))
    assert done.returncode == 0, done.stderr
    for prefix, ours in zip(
        ("chakra", "chakra-w2"), convert(tmp_path / "recording", tmp_path / "out", command), strict=True
    ):
        # gloo between processes of one machine is no network, so its communications last as long as measured.
        assert as_measured(simulate(tmp_path / "out" / prefix, "replay.json"), ours)
        assert simulate(tmp_path / "out" / prefix).finished == 4


def test_experts_that_exchange_different_amounts_finish(tmp_path: Path, command: Commands) -> None:
    script = jobs.write_script(tmp_path, EXPERTS)
    done = jobs.torchrun(tmp_path, script, ranks=2, TRACING_DIR=str(tmp_path / "recording"))
    assert done.returncode == 0, done.stderr
    command("convert", tmp_path / "recording", "-o", tmp_path / "plain", "--jobs", "1")
    assert simulate(tmp_path / "plain" / "chakra").finished < 2
    command("check", *(tmp_path / "plain").glob("*.et"), code=1)
    convert(tmp_path / "recording", tmp_path / "out", command)
    for system in ("system.json", "replay.json"):
        assert simulate(tmp_path / "out" / "chakra", system).finished == 2


@pytest.mark.parametrize("nodes", ["all", "gpu"])
def test_a_job_of_every_kind_of_communication_finishes_when_it_is_lowered(command: Commands, nodes: str) -> None:
    script = jobs.write_script(command.folder, EVERY_KIND)
    done = jobs.torchrun(command.folder, script, ranks=3, TRACING_DIR=str(command.folder / "recording"))
    assert done.returncode == 0, done.stderr
    command("convert", command.folder / "recording", "-o", command.folder / "plain", "--jobs", "1")
    command("check", *(command.folder / "plain").glob("*.et"), code=1)
    convert(command.folder / "recording", command.folder / "out", command, "--nodes", nodes)
    assert simulate(command.folder / "out" / "chakra").finished == 3


@pytest.mark.parametrize("host", [True, False])
def test_ranks_with_host_nodes_stop_if_they_end_with_a_message(tmp_path: Path, host: bool) -> None:
    kept = []
    for rank, kind in enumerate((pb.COMM_SEND_NODE, pb.COMM_RECV_NODE)):
        message = node(2, 1, kind=kind, comm_src=0, comm_dst=1, comm_size=8, comm_tag=1)
        path = file_of(tmp_path / f"chakra.{rank}.et", node(1, is_cpu_op=host), message)
        kept.append(not check(path).faults)
    (tmp_path / "comm_groups.json").write_text("{}")
    simulated = simulate(tmp_path / "chakra")
    assert (simulated.finished == 2) == all(kept) == (not host)


COLLECTIVE: dict[str, Any] = {"kind": pb.COMM_COLL_NODE, "comm_type": pb.ALL_REDUCE, "comm_size": 64}


@pytest.mark.parametrize(
    "attributes",
    [
        *({"comm_type": number} for number in pb.CollectiveCommType.values()),
        *({"comm_type": pb.ALL_GATHER, "comm_size": size} for size in (0, 3, 4)),
        *({"comm_type": number, "comm_size": 0} for number in (pb.ALL_REDUCE, pb.ALL_TO_ALL, pb.REDUCE_SCATTER)),
        {"pg_name": "5"},
        {"pg_name": "6"},
        {"kind": pb.METADATA_NODE},
    ],
    ids=str,
)
def test_check_fails_only_on_traces_that_do_not_finish(tmp_path: Path, attributes: dict[str, Any]) -> None:
    groups = {"5": [0], "6": [0, 1], "7": [1]}
    (tmp_path / "comm_groups.json").write_text(json.dumps(groups))
    kept = []
    for rank in (0, 1):
        own = {"pg_name": "7"} if rank and attributes.get("pg_name") == "5" else {}
        path = file_of(tmp_path / f"chakra.{rank}.et", node(1, **COLLECTIVE | attributes | own))
        kept.append(not check(path, groups).faults)
    try:
        finished = simulate(tmp_path / "chakra", seconds=10).finished
    except subprocess.TimeoutExpired:
        finished = 0
    assert (finished == 2) == all(kept)


@needs_traces
@pytest.mark.parametrize(
    ("words", "ranks", "apart"),
    [
        ((), 8, 0.002),
        (("--network", "fitted"), 8, 0.002),
        (("--inter", "0.01GB/s,8us"), 8, 0.01),
        (("--inter", "0.01GB/s,8us", "--algorithm", "direct"), 8, 0.01),
        (("--inter", "50GB/s,5ms"), 8, 0.01),
        (("--inter", "50GB/s,5ms", "--algorithm", "tree"), 8, 0.01),
        (("--inter", "1GB/s,8us", "--ranks", "64"), 64, 0.05),
    ],
)
def test_astra_sim_matches_our_simulation_on_the_same_network(
    command: Commands, words: tuple[str, ...], ranks: int, apart: float
) -> None:
    binary = os.environ["ASTRA_SIM"]
    answer = command.json("simulate", public("dlrm_8gpu"), *words, "--astra-sim", binary, "--jobs", "1")
    (ours,), (theirs,) = answer["simulations"], answer["astra_sim"]
    assert (theirs["finished"], theirs["ranks"]) == (ranks, ranks)
    assert theirs["last_ns"] == pytest.approx(ours["makespan_ns"], rel=apart)


@needs_traces
def test_roofline_runs_nodes_with_a_count_and_replays_the_rest(tmp_path: Path, command: Commands) -> None:
    words = ["--lower", "astra-sim", "--nodes", "gpu", "--jobs", "1"]
    system = json.loads((EXAMPLES / "system.json").read_text()) | {"roofline-enabled": 1, "peak-perf": 15}
    (tmp_path / "roofline.json").write_text(json.dumps(system))
    for more, finished in ((), 0), (("--roofline",), 8):
        folder = tmp_path / str(finished)
        assert main(["convert", public("dlrm_8gpu"), "-o", str(folder), *words, *more]) == 0
        assert simulate(folder / "chakra", str(tmp_path / "roofline.json")).finished == finished


@needs_traces
def test_a_wrong_astra_sim_binary_ends_in_one_line(tmp_path: Path, command: Commands) -> None:
    for binary in (tmp_path / "gone", Path("/bin/false")):
        said = command.said("simulate", public("dlrm_8gpu"), "--astra-sim", binary, "--jobs", "1")
        assert said.startswith(f"crossrank: {binary}: ")
