"""How true a replay of the communication alone is: a job recorded and replayed again and again on one machine.

    python -m benchmarks.record_and_replay [--pairs N]

Each pair is a new recording (`TRACING_TIMING=1`) of a job on two gloo ranks, and its replay at the recorded pace. The
job multiplies matrices between collectives of 4 KB to 16 MB, as training does. Compared are the whole job, from the
first launch to the last end, and the median of the collectives of each operation and size, from the last arrival to the
last end. Beside it stands each recording against the one before: what the machine itself differs by.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

_JOB = """
import os, torch, torch.distributed as dist, crossrank
torch.set_num_threads(1)
dist.init_process_group("gloo")
matrix = torch.rand(256, 256)
with crossrank.enable():
    for step in range(20):
        for kib in (4, 64, 1024, 4096, 16384):
            torch.mm(matrix, matrix)
            dist.all_reduce(torch.ones(256 * kib))
            part = torch.ones(64 * kib)
            dist.all_gather_into_tensor(torch.empty(128 * kib), part)
        crossrank.step()
dist.barrier()
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="recordings, each with its replay (10)")
    arguments = parser.parse_args()
    print(f"torch {version('torch')}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, 2 gloo ranks\n")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.py").write_text(_JOB)
        found = [pair(folder, number) for number in range(arguments.pairs)]
    print(f"{arguments.pairs} recordings and their replays, ratios: median (least..most), typical error")
    print(f"  {'':<26} {'replayed / recorded':>32} {'recorded / the one before':>34}")
    for title, of_recording, of_replay in (
        ("end to end", "recorded_end_to_end_us", "replayed_end_to_end_us"),
        ("operation and size", "collective_recorded_us", "collective_replayed_us"),
    ):
        replayed, before = [], []
        for number, one in enumerate(found):
            rows = [one] if title == "end to end" else one["rows"]
            replayed += [row[of_replay] / row[of_recording] for row in rows]
            if number:
                before += ratios_to(found[number - 1], one, title, of_recording)
        print(f"  {title:<26} {spread(replayed):>32} {spread(before):>34}")


def ratios_to(before: dict[str, Any], now: dict[str, Any], title: str, column: str) -> list[float]:
    """Times of one recording over those of another."""
    if title == "end to end":
        return [now[column] / before[column]]
    earlier = {(row["op"], row["size_to"]): row[column] for row in before["rows"]}
    return [row[column] / earlier[row["op"], row["size_to"]] for row in now["rows"]]


def spread(ratios: list[float]) -> str:
    typical = statistics.median(abs(ratio - 1) for ratio in ratios)
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}), {100 * typical:.0f} %"


def pair(folder: str, number: int) -> dict[str, Any]:
    recording = str(Path(folder, f"recording-{number}"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {"OMP_NUM_THREADS": "1", "TRACING": "ALL", "TRACING_DIR": recording, "TRACING_TIMING": "1"}
    subprocess.run([*torchrun, f"{folder}/job.py"], env=os.environ | variables, check=True, capture_output=True)
    replay = [sys.executable, "-m", "crossrank", "replay", recording, "--pace", "recorded", "--json"]
    comparison: dict[str, Any] = json.loads(subprocess.run(replay, check=True, stdout=subprocess.PIPE).stdout)[
        "comparison"
    ]
    return comparison


if __name__ == "__main__":
    main()
