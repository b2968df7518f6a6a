"""How fast a hung job says what is wrong, and what it costs a healthy one to be ready for that.

    python -m benchmarks.hangs [--rounds 5] [--limit 10]

A job of eight gloo ranks stops: ranks 0-4 wait in an all_reduce for rank 5, which is in C code that keeps Python's
lock, while ranks 6 and 7 train in a group of their own. Printed are the medians and the longest times over the rounds
* from the question of the rank that asks first to the last rank's first answer, and to its second one,
* from the limit to the verdict.
Then two ranks train under DDP for a while: the CPU time of each of the recorder's threads, as a share of the wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from crossrank.recording import ASKED, FLIGHT, SEEN, VERDICT, file_name
from crossrank.tools.output.console import print_table

RANKS, NATIVE = 8, 5
MOST_SECONDS = 60

HANGS = """
import ctypes, os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
work, pair = dist.new_group(range(6)), dist.new_group([6, 7])
while rank >= 6:
    dist.all_reduce(torch.ones(1000), group=pair)
    time.sleep(0.005)
for step in range(20):
    dist.all_reduce(torch.ones(1000), group=work)
if rank == 5:
    ctypes.PyDLL(None).sleep(600)
pathlib.Path(os.environ["BEGAN"], str(rank)).touch()
dist.all_reduce(torch.ones(1000), group=work)
"""

TRAINS = """
import json, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def spent():
    return {one.name: int(open(f"/proc/self/task/{one.native_id}/schedstat").read().split()[0])
            for one in threading.enumerate() if one.name.startswith("crossrank-")}
steps, begin, before = 0, time.monotonic_ns(), {}
while time.monotonic_ns() - begin < 35e9:
    if not before and time.monotonic_ns() - begin > 5e9:
        before, since, first = spent(), time.monotonic_ns(), steps
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
wall, after = time.monotonic_ns() - since, spent()
if dist.get_rank() == 0:
    shares = {name: (after[name] - before.get(name, 0)) / wall for name in after}
    print(json.dumps([wall / 1e6 / (steps - first), shares]))
"""


def run(source: str, ranks: int, recording: Path, **variables: str) -> subprocess.Popen[str]:
    script = recording.with_suffix(".py")
    script.write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*torchrun, "-m", "crossrank.instrument", str(script)],
        env=os.environ | {"TRACING": "ALL", "TRACING_DIR": str(recording), "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def written(path: Path) -> int:
    """When a file was written, in ns since 1970; 0 without one."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + MOST_SECONDS
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"hangs: {what} did not come within {MOST_SECONDS} s")
        time.sleep(0.005)


def answered(recording: Path, rank: int) -> int:
    """When a rank's last answer was written; the rank with the lock is looked at by another one."""
    return max(written(recording / file_name(kind, rank)) for kind in (FLIGHT, SEEN))


def seconds_of_a_hang(limit: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        recording, began = Path(folder, "recording"), Path(folder, "began")
        began.mkdir()
        job = run(HANGS, RANKS, recording, TRACING_HANG_SECONDS=f"{limit:g}", BEGAN=str(began))
        try:
            wait_until(lambda: written(recording / ASKED) > 0, "a question")
            asked = written(recording / ASKED)
            wait_until(lambda: all(answered(recording, rank) for rank in range(RANKS)), "an answer of each rank")
            first = max(answered(recording, rank) for rank in range(RANKS))
            wait_until(lambda: (recording / VERDICT).exists(), "a verdict")
            verdict = written(recording / VERDICT)
            last = max(min(answered(recording, rank), verdict) for rank in range(RANKS))
            silent = max(written(began / str(rank)) for rank in range(NATIVE))
        finally:
            job.terminate()
            job.wait()
    return {
        "question to the first answer of the last rank": (first - asked) / 1e9,
        "question to the last answer": (last - asked) / 1e9,
        "limit to verdict": (verdict - silent) / 1e9 - limit,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--limit", type=float, default=10.0)
    given = options.parse_args()
    rounds = [seconds_of_a_hang(given.limit) for _ in range(given.rounds)]
    rows = []
    for name in rounds[0]:
        times = [one[name] for one in rounds]
        rows.append([name, f"{statistics.median(times):.2f} s", f"{max(times):.2f} s"])
    print_table("A hang of 8 ranks: one in C code, two that train", ["from … to …", "median", "longest"], rows)
    with tempfile.TemporaryDirectory() as folder:
        step_ms, shares = json.loads(run(TRAINS, 2, Path(folder, "recording")).communicate()[0])
    rows = [[name, f"{share:.4%}", f"{share * step_ms * 1e3:.2f} µs"] for name, share in sorted(shares.items())]
    print_table(f"A step of {step_ms:.1f} ms under DDP", ["thread", "CPU time of wall time", "per step"], rows)


if __name__ == "__main__":
    main()
