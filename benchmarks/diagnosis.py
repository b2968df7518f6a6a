"""How long `crossrank diagnose` takes over the dumps of many ranks, and how much memory, beside torchfrtrace.

    python benchmarks/diagnosis.py [--quick]

The dumps are synthesised in the layout of torch 2.13's NCCL recorder, with stacks, as pickles of protocol 2: every
rank has calls on four groups (the world, tensor parallel of 8, data parallel across those, and one of 64 ranks), and
rank 1 lacks the last call on the world. Each figure is one run of the whole command in a process of its own: user CPU
seconds of all its processes, and the peak resident memory of the largest one. torchfrtrace is the analyzer that ships
with torch; its own imports take about 1.2 s and 220 MB of that.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TENSOR, BLOCK = 8, 64
START = 1_795_000_000_000_000_000
KINDS = (  # (operation, input, output, type), in elements
    ("_all_gather_base", 256, 256 * TENSOR, "BFloat16"),
    ("_reduce_scatter_base", 512 * TENSOR, 512, "BFloat16"),
    ("all_reduce", 4096, 4096, "Float"),
    ("all_reduce", 1, 1, "Float"),
)


@dataclass(frozen=True)
class Cost:
    """What one run took."""

    user_s: float
    peak_mb: float
    wall_s: float
    said: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without 2,048 ranks, and torchfrtrace up to 64 alone")
    arguments = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores; --jobs 1 but where it says otherwise\n")
    titles = f"{'dumps MB':>8} {'user s':>8} {'us/entry':>9} {'MB':>6} {'wall s':>7}"
    print(f"  {'ranks x entries':<20} {titles}   torchfrtrace")
    sizes = [(64, 1000), (64, 2000), (128, 2000), (512, 500), (512, 1000), (512, 2000)]
    if not arguments.quick:
        sizes.append((2048, 2000))
    for ranks, entries in sizes:
        with tempfile.TemporaryDirectory() as folder:
            megabytes = synthesise(Path(folder), ranks, entries)
            cost = diagnose(folder, 1)
            existing = "-"
            if ranks == 64 or (not arguments.quick and (ranks, entries) in ((128, 2000), (512, 2000))):
                other = run([sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-p", "rank_"])
                existing = f"{other.user_s:.1f} s, {other.peak_mb:.0f} MB"
            _row(f"{ranks:,} x {entries:,}", megabytes, cost, ranks * entries, existing)
            if (ranks, entries) == (512, 2000):
                _row("  the same, --jobs 2", megabytes, diagnose(folder, 2), ranks * entries, "-")


def diagnose(folder: str, jobs: int) -> Cost:
    """Diagnose, and see that the answer is the right one."""
    cost = run([sys.executable, "-m", "crossrank", "diagnose", folder, "--jobs", str(jobs)])
    if "culprit    rank 1\n" not in cost.said or "missing_rank" not in cost.said:
        raise SystemExit(f"the answer is wrong:\n{cost.said}")
    return cost


def run(command: list[str]) -> Cost:
    """Run a command in a process of its own that reports on itself and its children."""
    probe = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime, used.ru_maxrss / 1000)\n"
        "print(done.stdout)\n"
    )
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", probe, *command], stdout=subprocess.PIPE, text=True, check=True)
    wall = time.perf_counter() - begun
    first, _, said = done.stdout.partition("\n")
    user, peak = map(float, first.split())
    return Cost(user_s=user, peak_mb=peak, wall_s=wall, said=said)


def synthesise(folder: Path, ranks: int, entries: int) -> float:
    """Write the dumps; returns their size in MB."""
    size = 0
    for rank in range(ranks):
        content = pickle.dumps(_dump(rank, ranks, entries), 2)
        (folder / f"rank_{rank}").write_bytes(content)
        size += len(content)
    return size / 1e6


def _dump(rank: int, ranks: int, count: int) -> dict[str, Any]:
    tensor = list(range(rank // TENSOR * TENSOR, rank // TENSOR * TENSOR + TENSOR))
    data = list(range(rank % TENSOR, ranks, TENSOR))
    block = list(range(rank // BLOCK * BLOCK, rank // BLOCK * BLOCK + BLOCK))
    groups = [("0", "default_pg", list(range(ranks))), (f"t{tensor[0]}", "tp", tensor)]
    groups += [(f"d{data[0]}", "dp", data), (f"b{block[0]}", "ep", block)]
    # Of every eight calls four are tensor parallel, two data parallel, one is of the block and one of the world.
    pattern = ((1, 0), (1, 1), (2, 2), (1, 0), (3, 2), (1, 1), (2, 2), (0, 3))
    calls = count - (rank == 1)
    text = {word: word for word in ("scheduled", "completed", "pt_main_thread", "140000000000000")}
    frames = [
        [
            {"name": name, "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 3007}
            for name in ("all_reduce",)
        ]
        + [{"name": "train_step", "filename": "train.py", "line": 100 + place}]
        + [{"name": "<module>", "filename": "train.py", "line": 400}]
        for place in range(len(pattern))
    ]
    names = [(group[0], group[1]) for group in groups]
    profiling = [f"nccl:{kind[0]}" for kind in KINDS]
    seqs = [0] * len(groups)
    rows = []
    for number in range(calls):
        place = number % len(pattern)
        last = number == count - 1
        group, kind = (0, 3) if last else pattern[place]
        _, into, out, dtype = KINDS[kind]
        seqs[group] += 1
        created = START + number * 250_000 + (rank * 7919 + number * 104_729) % 40_000
        rows.append(
            {
                "frames": frames[place],
                "record_id": number,
                "pg_id": group,
                "process_group": names[group],
                "thread_name": text["pt_main_thread"],
                "thread_id": text["140000000000000"],
                "collective_seq_id": seqs[group],
                "p2p_seq_id": 0,
                "op_id": seqs[group],
                "profiling_name": profiling[kind],
                "time_created_ns": created,
                "duration_ms": 0.08,
                "input_sizes": [[into]],
                "input_dtypes": [dtype],
                "output_sizes": [[out]],
                "output_dtypes": [dtype],
                "state": text["scheduled"] if last else text["completed"],
                "time_discovered_started_ns": None if last else created + 50_000,
                "time_discovered_completed_ns": None if last else created + 130_000,
                "retired": not last,
                "timeout_ms": 600_000,
                "is_p2p": False,
            }
        )
    status = {
        str(index): {
            "last_enqueued_collective": seq,
            "last_started_collective": seq,
            "last_completed_collective": seq - (index == 0 and rank != 1),
        }
        for index, seq in enumerate(seqs)
    }
    config = {name: {"name": name, "desc": desc, "ranks": str(members)} for name, desc, members in groups}
    return {
        "version": "2.10",
        "pg_config": config,
        "comm_lib_version": "2.27.7",
        "pg_status": status,
        "entries": rows,
    }


def _row(name: str, megabytes: float, cost: Cost, entries: int, existing: str) -> None:
    per_entry = cost.user_s / entries * 1e6
    print(
        f"  {name:<20} {megabytes:>8.0f} {cost.user_s:>8.2f} {per_entry:>9.1f} {cost.peak_mb:>6.0f} {cost.wall_s:>7.1f}"
        f"   {existing}",
        flush=True,
    )


if __name__ == "__main__":
    main()
