"""How true a replayed step is: `crossrank replay --compute` against the job that was recorded.

    python benchmarks/whole_steps.py [--pairs N] [KIND …]

Ten jobs (`whole_step_jobs.py`) train on two gloo ranks with one thread each. Each is recorded once, with a window of
two steps. Then the job, which neither records nor is profiled, and the replay run in turns. Each replay gives one
ratio: its median step against the mean of the job's just before and just after it, so that a machine whose speed drifts
is the same for both.
Below: what an operation costs in a replay and in a Python loop, and how long it takes to read a window of many steps.
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
import timeit
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

KINDS = {
    "ddp": 24,
    "fsdp2": 24,
    "checkpointed": 24,
    "convolutions": 80,
    "experts": 80,
    "lstm": 80,
    "autocast": 24,
    "accumulated": 24,
    "compiled": 80,
    "llama": 24,
}
"""Job -> how many steps it takes: about five seconds."""
REPLAY = ["--repeat", "15"]
WINDOW = "8:10"
LONG = "3:15"
MANY = 2000
_JOBS = str(Path(__file__).with_name("whole_step_jobs.py"))
_RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

_READ = """
import json, resource, sys, time
from crossrank.replay.plan.compute.read_window import read_window
from crossrank.replay.plan.compute.windows import find_windows
given = find_windows(sys.argv[1]).inputs[0]
start = time.perf_counter()
compute = read_window(given).compute
took = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
from crossrank.tools.traces.execution_trace import read_execution_trace
print(json.dumps([took, peak, len(read_execution_trace(given.et).nodes), len(compute.operations)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], metavar="KIND", help=f"{', '.join(KINDS)} (all)")
    parser.add_argument("--pairs", type=int, default=5, help="replays, each between two runs of the job (5)")
    arguments = parser.parse_args()
    print(f"torch {version('torch')}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, 2 gloo ranks\n")
    with tempfile.TemporaryDirectory() as folder:
        print(f"A step of training, job and replay in turns: medians of {arguments.pairs} replays (least..most)")
        print(f"  {'':12} {'job ms':>8} {'replay ms':>10} {'replay / job':>22} {'memory, replay / job':>22}")
        for kind in arguments.kinds:
            recording = Path(folder, kind)
            job(kind, recording, WINDOW)
            jobs, replays = [job(kind)], []
            for _ in range(arguments.pairs):
                replays.append(replay(recording))
                jobs.append(job(kind))
            steps, memory = (
                [
                    2 * one[place] / (before[place] + after[place])
                    for one, (before, after) in zip(replays, pairwise(jobs), strict=True)
                ]
                for place in (0, 1)
            )
            print(
                f"  {kind:12} {statistics.median(one[0] for one in jobs):>8.1f} "
                f"{statistics.median(one[0] for one in replays):>10.1f} {spread(steps):>22} {spread(memory):>22}",
                flush=True,
            )
        print("\nAn operation (aten::add of 4 floats), us: median of 9")
        for name, us in operation_costs():
            print(f"  {name:44} {us:>8.2f}")
        long = Path(folder, "long")
        job("ddp", long, LONG)
        took, peak, nodes, operations = output([sys.executable, "-c", _READ, str(long)])
        print("\nReading one rank's window with its computation")
        print(f"  {nodes:,.0f} nodes, {operations:,.0f} operations: {took:.2f} s, {peak:.0f} MB")


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})"


def job(kind: str, recording: Path | None = None, window: str = "") -> list[float]:
    """[median ms of a step, MB of the largest process]"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRACING_DIR": str(recording), "TRACING_WINDOW": window}
    return output([*_RUN, _JOBS, kind, str(KINDS[kind]), "record" if recording else "plain"], environment)


def replay(recording: Path) -> list[float]:
    """[median ms of a step, MB of the largest process]"""
    words = [sys.executable, "-m", "crossrank", "replay", str(recording), "--compute", "--json", *REPLAY]
    made = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    step: dict[str, Any] = json.loads(made.stdout)["step"]
    if step["coverage"]["left_out"]:
        raise SystemExit(f"not all operations ran: {step['coverage']['left_out']}")
    return [step["replayed_ms"], step["peak_bytes"] / (1 << 20)]


def output(words: list[str], environment: dict[str, str] | None = None) -> list[float]:
    made = subprocess.run(words, check=False, capture_output=True, env=environment)
    if made.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {made.returncode}\n{made.stderr.decode()[-4000:]}")
    found: list[float] = json.loads(next(line for line in reversed(made.stdout.splitlines()) if line[:1] == b"["))
    return found


def operation_costs() -> list[tuple[str, float]]:
    """us of one small operation, by how it is made."""
    from tests.unit.replay.compute.windows import compute_of, program_of

    torch.set_num_threads(1)
    first, second = torch.ones(4), torch.ones(4)

    def many() -> None:
        for _ in range(MANY):
            torch.add(first, second)

    with tempfile.TemporaryDirectory() as folder:
        program = program_of(compute_of(many, Path(folder)))
    program.run_pass(trial=True)
    by_name = torch.ops.aten.add.Tensor

    def loop(operation: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(MANY):
                    operation(first, second)

        return run

    ways = {
        "torch.ops.aten.add.Tensor in a Python loop": loop(by_name),
        "torch.add in a Python loop": loop(torch.add),
        "replayed": program.run_pass,
    }
    return [
        (name, statistics.median(timeit.repeat(way, number=1, repeat=9)) / MANY * 1e6) for name, way in ways.items()
    ]


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"\n{time.monotonic() - start:.0f} s in all")
