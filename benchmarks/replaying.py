"""What a replay costs per call beside a bare loop, how fast the communication of a large trace is read, and whether
real traces replay whole.

    python benchmarks/replaying.py [--traces FOLDER] [--runs N]

The bare loop calls `torch.distributed.all_reduce` on one tensor of 256 floats, over and over; the replay makes as many
recorded calls of the same kind, with all its measurements. Both run in processes of their own on gloo, in turns, and
each pair of neighbouring runs gives one ratio; the table has their median. With one rank the CPU time counts (nothing
is waited for), with two the wall time. The execution trace has 200,000 nodes of the newest schema, one in 250 of which
communicates; it is read plain and gzipped, in a process of its own. FOLDER holds the public traces (`dlrm_8gpu`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from crossrank.comm import CommRecord, Group
from crossrank.replay.plan.plan import Plan, PlannedCall, RankPlan, save_plan

CALLS = 2000
PASSES = 5
NODES = 200_000
EVERY = 250
ROOT = Path(__file__).parents[1]

_BARE = f"""
import json, resource, sys, time, torch, torch.distributed as dist
rank, size, port = map(int, sys.argv[1:])
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
tensor = torch.ones(256)
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
for _ in range(2 * {CALLS}):
    dist.all_reduce(tensor)
found = []
for _ in range({PASSES}):
    dist.barrier()
    start, spent = time.perf_counter(), cpu()
    for _ in range({CALLS}):
        dist.all_reduce(tensor)
    found.append(((cpu() - spent) / {CALLS} * 1e6, (time.perf_counter() - start) / {CALLS} * 1e6))
dist.barrier()
if rank == 0:
    print(json.dumps([sum(row[0] for row in found) / {PASSES}, sorted(row[1] for row in found)[{PASSES} // 2]]))
dist.destroy_process_group()
"""

_READ = """
import json, resource, sys
from crossrank.replay.plan.replay_inputs import find, read
from crossrank.tools.parallel import Fleet
before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
(rank,) = read(find(sys.argv[1]), Fleet(jobs=1))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([usage.ru_utime - before, usage.ru_maxrss / 1024, len(rank.calls)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=os.environ.get("CROSSRANK_TRACES"), help="folder of the public traces")
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs (5)")
    arguments = parser.parse_args()
    print(f"torch {version('torch')}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, gloo\n")
    print(f"all_reduce of 256 floats, {PASSES} passes of {CALLS} calls, us per call: median of {arguments.runs} pairs")
    print(f"  {'':<24} {'bare loop':>10} {'replay':>10} {'ratio (least..most)':>22}")
    with tempfile.TemporaryDirectory() as folder:
        for ranks, what, column in ((1, "CPU", 0), (2, "wall", 1)):
            pairs = [(bare(ranks)[column], replayed(Path(folder), ranks)[column]) for _ in range(arguments.runs)]
            ratios = sorted(other / one for one, other in pairs)
            print(
                f"  {f'{ranks} rank(s), {what}':<24} {statistics.median(one for one, _ in pairs):>10.1f} "
                f"{statistics.median(other for _, other in pairs):>10.1f} "
                f"{statistics.median(ratios):>8.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})",
                flush=True,
            )
        print(f"\nReading the communication of an execution trace of {NODES:,} nodes")
        print(f"  {'':<24} {'MB':>10} {'user s':>10} {'peak MB':>10} {'calls':>10}")
        for name in ("rank-0.et.json", "rank-0.et.json.gz"):
            path = Path(folder) / name
            write_trace(path)
            user_s, peak_mb, calls = launch([sys.executable, "-c", _READ, str(path)])
            size = path.stat().st_size / 1e6
            print(f"  {name:<24} {size:>10.0f} {user_s:>10.2f} {peak_mb:>10.0f} {calls:>10,}", flush=True)
            path.unlink()
        print("\nReal traces, the whole command with start-up")
        print(f"  {'':<24} {'ranks':>10} {'wall s':>10} {'coverage':>10} {'calls':>10} {'ms per pass':>12}")
        recording = Path(folder) / "demo"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "4",
                "examples/demo.py",
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRACING": "ALL", "TRACING_DIR": str(recording)},
            check=True,
            capture_output=True,
        )
        inputs = {"demo recording": recording}
        if arguments.traces:
            inputs["dlrm_8gpu"] = Path(arguments.traces) / "dlrm_8gpu"
        for name, path in inputs.items():
            start = time.monotonic()
            report = replay_json(path)
            print(
                f"  {name:<24} {report['world_size']:>10} {time.monotonic() - start:>10.1f} "
                f"{report['share_of_calls']:>10.1%} {report['coverage']['calls']:>10} "
                f"{report['end_to_end_us']['p50'] / 1000:>12.1f}",
                flush=True,
            )


_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def launch(words: list[str]) -> list[float]:
    found: list[float] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    return found


def bare(ranks: int) -> list[float]:
    """[CPU us, wall us] per call on rank 0."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", _BARE]
    others = [subprocess.Popen([*words, str(rank), str(ranks), str(port)]) for rank in range(1, ranks)]
    found = launch([*words, "0", str(ranks), str(port)])
    for other in others:
        other.wait()
    return found


def replayed(folder: Path, ranks: int) -> list[float]:
    """[CPU us, wall us] per call."""
    record = CommRecord(
        id=0,
        op="all_reduce",
        c10d="allreduce_",
        pg="0",
        bytes=1024,
        t=0,
        inputs=[[256]],
        outputs=[[256]],
        dtype="float32",
        reduce="sum",
        is_async=False,
    )
    calls = [
        PlannedCall(
            record=msgspec.structs.replace(record, id=number, seq=number + 1), wait_before=number + 1, blocking=True
        )
        for number in range(CALLS)
    ]
    members = list(range(ranks))
    plan = Plan(
        source="made",
        kind="comms",
        world_size=ranks,
        groups=[Group(pg="0", size=ranks, ranks=members)],
        ranks=[RankPlan(rank=rank, calls=calls) for rank in members],
    )
    path = folder / f"plan-{ranks}.json"
    save_plan(plan, path)
    report = replay_json(path)
    return [report["cpu_us_per_call"], report["end_to_end_us"]["p50"] / CALLS]


def replay_json(path: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "crossrank", "replay", str(path), "--json", "--repeat", str(PASSES)]
    report: dict[str, Any] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    return report


def write_trace(path: Path) -> None:
    """An execution trace as torch 2.13 writes it: mostly views, and now and then a collective."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write('{\n  "schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "2026-01-01 00:00:00", "start_ts": 1,\n')
        file.write('  "nodes": [')
        for number in range(1, NODES + 1):
            communicates = number % EVERY == 0
            name = "record_param_comms" if communicates else "aten::as_strided"
            node = {
                "id": number,
                "name": name,
                "ctrl_deps": 1,
                "inputs": _COMMUNICATION if communicates else _VIEW,
                "outputs": {
                    "values": [[338, 332, 0, 512, 4, "cpu"]],
                    "shapes": [[4, 4, 32]],
                    "types": ["Tensor(float)"],
                },
                "attrs": [
                    {"name": "rf_id", "type": "uint64", "value": number},
                    {"name": "fw_parent", "type": "uint64", "value": 0},
                    {"name": "seq_id", "type": "int64", "value": -1},
                    {"name": "scope", "type": "uint64", "value": 0},
                    {"name": "tid", "type": "uint64", "value": 1},
                    {"name": "fw_tid", "type": "uint64", "value": 0},
                    {"name": "op_schema", "type": "string", "value": _SCHEMA},
                    {"name": "kernel_backend", "type": "string", "value": ""},
                    {"name": "kernel_file", "type": "string", "value": ""},
                ],
            }
            file.write(("," if number > 1 else "") + "\n    " + json.dumps(node))
        file.write('\n  ],\n  "finish_ts": 2\n}\n')


_SCHEMA = "aten::as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"
_VIEW = {
    "values": [[331, 332, 0, 512, 4, "cpu"], [4, 4, 32], [128, 1, 4], "<None>"],
    "shapes": [[4, 32, 4], [[], [], []], [[], [], []], []],
    "types": ["Tensor(float)", "GenericList[Int,Int,Int]", "GenericList[Int,Int,Int]", "None"],
    "strides": [[128, 4, 1], [[], [], []], [[], [], []], []],
}
_RESULT = {"values": [[338, 332, 0, 512, 4, "cpu"]], "shapes": [[4, 4, 32]], "types": ["Tensor(float)"]}
_COMMUNICATION = {
    "values": [[[1, 2, 0, 256, 4, "cuda:0"]], [7, False], ["0", "default_pg"], 0, "allreduce", [], [], 0, 1, 8],
    "shapes": [[[256]], [[], []], [[], []], [], [], [], [], [], [], []],
    "types": [
        "GenericList[Tensor(float)]",
        "Tuple[Int,Bool]",
        "Tuple[String,String]",
        "Int",
        "String",
        "GenericList[]",
        "GenericList[]",
        "Int",
        "Int",
        "Int",
    ],
}

if __name__ == "__main__":
    main()
