"""Jobs recorded on 2, 4 and 8 gloo ranks: is what is grown to 8 from fewer the job that 8 ranks run?

    python -m benchmarks.growing [MODEL ...]

Models: ddp, fsdp2, tp_dp (tensor parallel over 2 ranks, data parallel over the others), each a small transformer or
perceptron with AdamW. Compared are, rank by rank, the calls of the window in their order: operation, bytes, and members
of the group. Beside it stands by how much the computation of a rank takes another time: fewer ranks share the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from crossrank.recording import list_recording
from crossrank.tools.cli import main as crossrank
from crossrank.tools.graph.chakra import et_def_pb2 as pb
from crossrank.tools.graph.chakra.framing import read_trace

JOB = """
import os, sys, torch, torch.distributed as dist, crossrank
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model, size = sys.argv[1], dist.get_world_size()
layers = [nn.Linear(256, 256) for _ in range(6)]
net = nn.Sequential(*[one for layer in layers for one in (layer, nn.ReLU())])
if model == "ddp":
    net = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.5)
elif model == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for layer in layers:
        fully_shard(layer)
    fully_shard(net)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {str(4 * at): ColwiseParallel() for at in range(3)} | {str(4 * at + 2): RowwiseParallel() for at in range(3)}
    net = parallelize_module(net, mesh["tp"], plan)
    from torch.distributed.fsdp import fully_shard
    fully_shard(net, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
crossrank.enable(window="3:4")
for step in range(5):
    optimizer.zero_grad()
    net(torch.rand(32, 256)).square().mean().backward()
    optimizer.step()
    crossrank.step()
crossrank.disable()
dist.barrier()
os._exit(0)
"""
MODELS = ("ddp", "fsdp2", "tp_dp")
Calls = list[tuple[str, int, tuple[int, ...]]]


def record(folder: Path, model: str, ranks: int) -> Path:
    """A recording of a job of so many ranks."""
    script, recording = folder / "job.py", folder / f"{model}-{ranks}"
    script.write_text(JOB)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script, model],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRACING": "ALL", "TRACING_DIR": str(recording)},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert len(list_recording(str(recording)).of_kind("kineto")) == ranks
    return recording


def convert(recording: Path, output: Path, *words: str) -> dict[int, tuple[Calls, int]]:
    """Rank -> its calls in their order, and the us of its computation."""
    with open(os.devnull, "w") as nothing:
        stdout, sys.stdout = sys.stdout, nothing
        try:
            assert crossrank(["convert", str(recording), "-o", str(output), *words]) == 0
        finally:
            sys.stdout = stdout
    return {int(path.suffixes[-2][1:]): _calls(path) for path in output.glob("chakra.*.et")}


def _calls(path: Path) -> tuple[Calls, int]:
    import json

    metadata, nodes = read_trace(str(path))
    given = {one.name: one for one in metadata.attr}
    groups = {one["number"]: tuple(one["ranks"]) for one in json.loads(given["process_groups"].string_val)}
    calls, computed = [], 0
    for _, node in nodes:
        attributes = {one.name: one for one in node.attr}
        if node.type == pb.COMM_COLL_NODE:
            start = attributes["start_ns"].int64_val
            group = groups[attributes["pg_name"].string_val]
            calls.append((start, attributes["comm_op"].string_val, attributes["comm_size"].int64_val, group))
        elif node.type == pb.COMP_NODE and not node.name.startswith(("until", "host between")):
            computed += node.duration_micros
    return [call[1:] for call in sorted(calls)], computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    print(f"torch {version('torch')}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, gloo\n")
    head = f"  {'job':<8} {'from':>4} {'to':>4} {'calls of a rank':>16} {'as recorded':>18}"
    print(f"{head} {'computation, grown / recorded':>32}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in arguments.models:
            # Of tensor parallelism over 2 ranks, 2 ranks have no data parallelism that could grow.
            counts = (4, 8) if model == "tp_dp" else (2, 4, 8)
            recordings = {ranks: record(folder, model, ranks) for ranks in counts}
            truth = convert(recordings[8], folder / f"{model}-truth")
            for ranks in counts[:-1]:
                grown = convert(recordings[ranks], folder / f"{model}-{ranks}-grown", "--grow-to", "8")
                equal = sum(grown[rank][0] == truth[rank][0] for rank in range(8))
                ratios = [grown[rank][1] / truth[rank][1] for rank in range(8)]
                print(
                    f"  {model:<8} {ranks:>4} {8:>4} {len(truth[0][0]):>16} {f'{equal} of 8 ranks':>18}"
                    f" {f'{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})':>32}"
                )
                if equal < 8:
                    print(*_differences(grown, truth), sep="\n")


def _differences(grown: dict[int, tuple[Calls, int]], truth: dict[int, tuple[Calls, int]]) -> list[str]:
    """The first call of each rank that is another one."""
    found = []
    for rank, (calls, _) in sorted(truth.items()):
        ours = grown[rank][0]
        if len(ours) != len(calls):
            found.append(f"    rank {rank}: {len(ours)} calls, recorded {len(calls)}")
        pairs = [(place, a, b) for place, (a, b) in enumerate(zip(ours, calls, strict=False)) if a != b]
        found += [f"    rank {rank}, call {place}: {a}, recorded {b}" for place, a, b in pairs[:2]]
    return found


if __name__ == "__main__":
    main()
