"""How long `crossrank convert` takes, from recording to Chakra traces, and how much memory; and `check` and `inspect`.

    python benchmarks/converting.py [--traces DIR] [--quick]

Inputs are those of `benchmarks/linking.py`: a real pair, N times over. Every figure is the median of repeated runs of
the whole command in a process of its own: user CPU seconds and peak resident memory. The existing tools, measured on
another machine, are the linker and the converter of Chakra 1.0.0, one after the other; their file size is that of
their converter's output for the same input.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from linking import load, measure, replicate, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=os.environ.get("CROSSRANK_TRACES"), help="folder of the real traces")
    parser.add_argument("--quick", action="store_true", help="without the trace of a million nodes")
    arguments = parser.parse_args()
    if arguments.traces is None:
        parser.error("name the folder of the real traces with --traces or CROSSRANK_TRACES")
    pair = load(Path(arguments.traces) / "dlrm_8gpu", 0)
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    print("One rank, by id, --jobs 1: median of 5 runs (1 at 1 M nodes)")
    print(
        f"  {'command':<30} {'host nodes':>10} {'user s':>8} {'us/node':>8} {'MB':>6} {'file MB':>8}   existing tools"
    )
    cases = [(1, "1.38 s, 0.91 MB"), (30, "29.6 s, 657 MB, 27.5 MB")]
    if not arguments.quick:
        cases.append((600, "(10 min, 11 GB, extrapolated)"))
    for copies, existing in cases:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            made = replicate(pair, copies, with_ids=True)
            nodes = len(made.et["nodes"])
            write(made, folder / "in")
            del made
            out = folder / "out"
            runs = 1 if copies > 100 else 5
            convert = ["convert", str(folder / "in"), "-o", str(out), "--jobs", "1", "--min-match", "0"]
            cost = measure(convert, runs, before=lambda out=out: shutil.rmtree(out, ignore_errors=True))
            trace = out / "chakra.0.et"
            size = f"{trace.stat().st_size / 1e6:.2f}"
            _row(f"convert, dlrm x {copies}", nodes, cost.user_s, cost.peak_mb, size, existing)
            for command in (["check", str(trace)], ["inspect", "--json", str(trace)]):
                cost = measure(command, runs)
                _row(f"{command[0]}, dlrm x {copies}", nodes, cost.user_s, cost.peak_mb, "-", "-")


def _row(name: str, nodes: int, user_s: float, peak_mb: float, size: str, existing: str) -> None:
    per_node = user_s / nodes * 1e6
    print(
        f"  {name:<30} {nodes:>10,} {user_s:>8.2f} {per_node:>8.1f} {peak_mb:>6.0f} {size:>8}   {existing}", flush=True
    )


if __name__ == "__main__":
    main()
