"""How long `crossrank link` takes, and how much memory, by size of the traces.

    python benchmarks/linking.py [--traces DIR] [--quick]

Inputs are made from a real pair (`dlrm_8gpu`, `linear_1gpu` in DIR or $CROSSRANK_TRACES) by writing it N times over
with shifted ids, times, sequence numbers and correlation ids. "by name" has no record-function ids in the Kineto
trace, as before 2024, so hosts are matched by their names; "by id" has them. Every figure is the median of
repeated runs of the whole command in a process of its own: user CPU seconds and peak resident memory.

The existing tool, measured on another machine, is the linker of Chakra 1.0.0.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

_HOST = ("cpu_op", "user_annotation")


@dataclass(frozen=True)
class Pair:
    """A pair of traces in memory."""

    et: dict[str, Any]
    kineto: dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """Median over the runs of a command."""

    user_s: float
    wall_s: float
    peak_mb: float


def load(folder: Path, rank: int) -> Pair:
    et, kineto = (
        json.loads(gzip.decompress((folder / f"rank-{rank}.{kind}.json.gz").read_bytes())) for kind in ("et", "kineto")
    )
    return Pair(et, kineto)


def replicate(pair: Pair, copies: int, *, with_ids: bool) -> Pair:
    """`pair` `copies` times over, one after the other, under one set of thread roots."""
    roots = [node for node in pair.et["nodes"] if node["name"].startswith("[pytorch|profiler|")]
    kept = {node["id"] for node in roots}
    nodes = [node for node in pair.et["nodes"] if node["id"] not in kept]
    ids = max(node["id"] for node in nodes)
    rf_ids = max(node["rf_id"] for node in nodes)
    events = pair.kineto["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    span = max(event["ts"] + event["dur"] for event in timed) - min(event["ts"] for event in timed) + 1000
    numbers = 2 + max(
        value for event in timed for key, value in event["args"].items() if key in _SHIFTED and isinstance(value, int)
    )
    if with_ids:
        _give_ids(nodes, timed)
    out_nodes, out_events = list(roots), []
    for copy in range(copies):
        for node in nodes:
            shifted = node | {"id": node["id"] + copy * ids, "rf_id": node["rf_id"] + copy * rf_ids}
            shifted["parent"] = node["parent"] + (0 if node["parent"] in kept else copy * ids)
            if node["seq_id"] >= 0:
                shifted["seq_id"] = node["seq_id"] + copy * numbers
            out_nodes.append(shifted)
        for event in events:
            if event.get("ph") == "M" and copy:
                continue
            out_events.append(_shift(event, copy, span, numbers, rf_ids))
    return Pair(pair.et | {"nodes": out_nodes}, pair.kineto | {"traceEvents": out_events})


_SHIFTED = ("External id", "correlation", "Sequence number")


def _shift(event: dict[str, Any], copy: int, span: int, numbers: int, rf_ids: int) -> dict[str, Any]:
    shifted = event | {"ts": event["ts"] + copy * span}
    if isinstance(event.get("id"), int):
        shifted["id"] = event["id"] + copy * numbers
    if "args" in event:
        shifted["args"] = args = dict(event["args"])
        for key in _SHIFTED:
            if key in args:
                args[key] += copy * numbers
        if "Record function id" in args:
            args["Record function id"] += copy * rf_ids
    return shifted


def _give_ids(nodes: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    """Write record-function ids into the Kineto events, as newer torch does, where names in order agree."""
    host = [event for event in events if event["cat"] in _HOST]
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(host, key=lambda event: event["args"].get("External id", 0)):
        threads.setdefault(event["tid"], []).append(event)
    for tid in {node["tid"] for node in nodes}:
        ours = sorted((n for n in nodes if n["tid"] == tid and n["rf_id"]), key=lambda node: node["rf_id"])
        for theirs in threads.values():
            tail = theirs[len(theirs) - len(ours) :]
            if [event["name"] for event in tail] == [node["name"] for node in ours]:
                for node, event in zip(ours, tail, strict=True):
                    event["args"]["Record function id"] = node["rf_id"]


def write(pair: Pair, folder: Path, rank: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, content in (("et", pair.et), ("kineto", pair.kineto)):
        text = json.dumps(content).encode()
        (folder / f"rank-{rank}.{kind}.json.zst").write_bytes(zstandard.ZstdCompressor(level=3).compress(text))


# Peak memory of a child counts what its parent had when it started the child, so a small process starts it.
_LAUNCHER = """
import json, resource, subprocess, sys, time
started = time.monotonic()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, usage.ru_utime, time.monotonic() - started, usage.ru_maxrss / 1024]))
"""


def measure(words: list[str], runs: int, before: Callable[[], object] = lambda: None) -> Cost:
    """Cost of `crossrank WORDS`, each run after `before`."""
    command = [sys.executable, "-m", "crossrank", *words]
    costs = []
    for _ in range(runs):
        before()
        launched = subprocess.run([sys.executable, "-c", _LAUNCHER, *command], stdout=subprocess.PIPE, check=True)
        code, *figures = json.loads(launched.stdout)
        if code:
            raise SystemExit(f"{' '.join(command)} exited with {code}")
        costs.append(Cost(*figures))
    return Cost(*(statistics.median(getattr(cost, name) for cost in costs) for name in ("user_s", "wall_s", "peak_mb")))


def measure_link(folder: Path, output: Path, runs: int, jobs: int = 1) -> Cost:
    words = ["link", str(folder), "-o", str(output), "--jobs", str(jobs), "--min-match", "0"]
    return measure(words, runs, before=lambda: shutil.rmtree(output, ignore_errors=True))


def row(name: str, pair: Pair, cost: Cost, existing: str) -> None:
    nodes, events = len(pair.et["nodes"]), len(pair.kineto["traceEvents"])
    print(
        f"  {name:<24} {nodes:>10,} {events:>10,} {cost.user_s:>9.2f} {cost.user_s / nodes * 1e6:>8.1f} "
        f"{cost.peak_mb:>8.0f} {(cost.peak_mb - 30) * 1024 / nodes:>8.2f}   {existing}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=os.environ.get("CROSSRANK_TRACES"), help="folder of the real traces")
    parser.add_argument("--quick", action="store_true", help="without the trace of a million nodes")
    arguments = parser.parse_args()
    if arguments.traces is None:
        parser.error("name the folder of the real traces with --traces or CROSSRANK_TRACES")
    traces = Path(arguments.traces)
    dlrm, linear = load(traces / "dlrm_8gpu", 0), load(traces / "linear_1gpu", 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
        print("One rank, --jobs 1: median of 5 runs (1 at 1 M nodes). kB/node is above the 30 MB of an idle process.")
        titles = f"{'host nodes':>10} {'events':>10} {'user s':>9} {'us/node':>8} {'MB':>8} {'kB/node':>8}"
        print(f"  {'input':<24} {titles}   existing tool")
        cases = [
            ("linear", linear, 1, False, "47.35 s, 252 MB"),
            ("dlrm x 1, by name", dlrm, 1, False, "1.20 s"),
            ("dlrm x 30, by name", dlrm, 30, False, "121.68 s"),
            ("dlrm x 30, by id", dlrm, 30, True, "21.63 s, 657 MB"),
        ]
        if not arguments.quick:
            cases += [
                ("dlrm x 600, by name", dlrm, 600, False, "-"),
                ("dlrm x 600, by id", dlrm, 600, True, "(7 min, 11 GB, extrapolated)"),
            ]
        for name, pair, copies, with_ids, existing in cases:
            made = pair if copies == 1 else replicate(pair, copies, with_ids=with_ids)
            write(made, folder / "in")
            row(name, made, measure_link(folder / "in", folder / "out", 1 if copies > 100 else 5), existing)
            del made
            shutil.rmtree(folder / "in")
        print("\n8 ranks of dlrm x 10, by name: median of 5 runs")
        for rank in range(8):
            write(replicate(load(traces / "dlrm_8gpu", rank), 10, with_ids=False), folder / "in", rank)
        one, two = (measure_link(folder / "in", folder / "out", 5, jobs) for jobs in (1, 2))
        print(f"  --jobs 1   {one.wall_s:6.2f} s")
        print(f"  --jobs 2   {two.wall_s:6.2f} s   {one.wall_s / two.wall_s:.2f} times faster")


if __name__ == "__main__":
    main()
