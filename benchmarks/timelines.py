"""How long bandwidth, timeline and report take, and what the engines over ranks gain.

    python benchmarks/timelines.py [bandwidth timeline report cluster]

* bandwidth: SQLite exports as Nsight Systems writes them, of 1, 2 and 4 times 250,000 markers and as many kernels: user
  CPU and peak memory of the whole command. Linear means twice the rows in twice the time.
* timeline: Nsight exports of 64 ranks with 4,000 collectives each.
* report: comms files and flight-recorder dumps of 1,024 ranks.
* cluster: 1,024 small ranks linked by one and by two workers of a Dask cluster on this machine, start-up included.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zstandard

sys.path.insert(0, str(Path(__file__).parents[1]))
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.sources import find, read
from crossrank.tools.output.timeline.build import write_timeline
from crossrank.tools.parallel import Fleet
from tests.unit.graph.linking.small_traces import SmallTrace

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MARKER = (
    '{"op":"all_reduce","api":"all_reduce","c10d":"allreduce_","pg":"0","in":[[%d]],"out":[[%d]],"dtype":"float32",'
    '"reduce":"sum","async":false,"bytes":%d,"source":"train.py:%d","locality":"cross_node"}'
)


def measured(command: Sequence[str]) -> tuple[float, float, float]:
    """(wall s, user CPU s with all children, largest process in MB) of one command."""
    program = (
        "import resource, subprocess, sys, time; start = time.monotonic();"
        "code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode;"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(time.monotonic() - start, used.ru_utime, used.ru_maxrss / 1000);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *command], check=True, capture_output=True, text=True)
    wall, user, peak = map(float, done.stdout.split())
    return wall, user, peak


def crossrank(*words: str) -> list[str]:
    return [sys.executable, "-m", "crossrank.tools.cli", *words]


def write_export(path: Path, markers: int, kinds: int = 200, late: int = 0) -> None:
    """One process with `markers` calls, each with a kernel, on two threads; its kernels begin `late` ns later."""
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
        INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.28.1');
        CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
        INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1780000000000000000);
        CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT,
          globalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, jsonText TEXT,
          eventId INTEGER NOT NULL PRIMARY KEY);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
          eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
          returnValue INTEGER NOT NULL, callchainId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
          deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
          demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER);
        """
    )
    strings = [(1, KERNEL), (2, "void gemm()"), (3, "cuLaunchKernelEx")]
    strings += [(10 + i, MARKER % (i + 1, i + 1, 4 * (i + 1), i)) for i in range(kinds)]
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", strings)
    pid = 70 << 24

    def nvtx() -> object:
        for i in range(markers):
            yield 2000 * i, 2000 * i + 90, 59, pid | i % 2, 10 + i % kinds, 3, i

    def runtime() -> object:
        for i in range(markers):
            yield 2000 * i + 50, 2000 * i + 60, 1, pid | i % 2, i, 3, 0

    def kernels() -> object:
        for i in range(markers):
            yield 2000 * i + 300 + late, 2000 * i + 1500, 0, 20, i, pid, 1, 1

    connection.executemany(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, textId, domainId, int64Value) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        nvtx(),  # type: ignore[arg-type]
    )
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME (start, end, eventClass, globalTid, correlationId, nameId, "
        "returnValue) VALUES (?, ?, ?, ?, ?, ?, ?)",
        runtime(),  # type: ignore[arg-type]
    )
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, globalPid, "
        "demangledName, shortName) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        kernels(),  # type: ignore[arg-type]
    )
    connection.commit()
    connection.close()


def bandwidth(folder: Path) -> None:
    print("\ncrossrank bandwidth, one export of Nsight Systems")
    print(f"  {'markers':>10} {'kernels':>10} {'file MB':>8} {'user s':>8} {'wall s':>8} {'peak MB':>8}")
    for markers in (250_000, 500_000, 1_000_000):
        path = folder / "rank_0.sqlite"
        path.unlink(missing_ok=True)
        write_export(path, markers)
        size = path.stat().st_size / 1e6
        wall, user, peak = measured(crossrank("bandwidth", str(path)))
        print(f"  {markers:>10,} {markers:>10,} {size:>8.0f} {user:>8.1f} {wall:>8.1f} {peak:>8.0f}", flush=True)
    path.unlink()


def timeline(folder: Path) -> None:
    exports = folder / "exports"
    exports.mkdir()
    for rank in range(RANKS):
        write_export(exports / f"rank_{rank}.sqlite", COLLECTIVES, late=rank)
    output = folder / "timeline.pftrace"
    wall, user, peak = measured(crossrank("timeline", str(exports), "-o", str(output)))
    ranks = read(find([str(exports)]), Fleet(jobs=2))
    together = match_collectives(Job.match(ranks))
    print(f"\ncrossrank timeline, {RANKS} ranks x {COLLECTIVES:,} collectives from Nsight exports")
    print("  every call a moment on its host and a slice on its device, arrows, counters")
    print(f"  {'':28} {'wall s':>8} {'user s':>8} {'peak MB':>8} {'file MB':>8}")
    print(f"  {'whole command':28} {wall:>8.1f} {user:>8.1f} {peak:>8.0f} {output.stat().st_size / 1e6:>8.1f}")
    start, used = time.monotonic(), time.process_time()
    with output.open("wb") as file:
        write_timeline(together, file)
    wall, user = time.monotonic() - start, time.process_time() - used
    print(f"  {'writing alone':28} {wall:>8.1f} {user:>8.1f} {'':>8} {output.stat().st_size / 1e6:>8.1f}", flush=True)


def report(folder: Path) -> None:
    recording = folder / "recording"
    recording.mkdir()
    calls = sum(write_rank(recording, rank, MANY) for rank in range(MANY))
    size = sum(path.stat().st_size for path in recording.iterdir()) / 1e6
    output = folder / "report.html"
    wall, user, peak = measured(crossrank("report", str(recording), "-o", str(output)))
    print(f"\ncrossrank report, {MANY:,} ranks, {calls:,} calls, comms files and dumps of {size:.0f} MB")
    print(f"  {'wall s':>8} {'user s':>8} {'peak MB':>8} {'page MB':>8}")
    print(f"  {wall:>8.1f} {user:>8.1f} {peak:>8.0f} {output.stat().st_size / 1e6:>8.1f}", flush=True)


def write_rank(folder: Path, rank: int, world: int, steps: int = 10, layers: int = 8) -> int:
    """A rank's comms file, and its flight-recorder dump with durations; nodes of 8, which are tensor-parallel groups.

    In every iteration the rank of node 3 with local rank 5 comes late to the collectives of its groups.
    """
    node, local = divmod(rank, 8)
    tensor = list(range(8 * node, 8 * node + 8))
    data = list(range(local, world, 8))
    groups = [
        {"pg": "0", "size": world, "ranks": list(range(world)), "desc": "default_pg", "locality": "cross_node"},
        {"pg": str(1 + node), "size": 8, "ranks": tensor, "desc": "mesh_tp", "locality": "intra_node"},
        {
            "pg": str(1 + world // 8 + local),
            "size": len(data),
            "ranks": data,
            "desc": "mesh_dp",
            "locality": "cross_node",
        },
    ]
    wall = 1_780_000_000_000_000_000
    header = {
        "schema": "crossrank-comms 1",
        "rank": rank,
        "world_size": world,
        "host": f"host-{node}",
        "boot_id": f"boot-{node}",
        "node": f"node-{node}",
        "clock": {"t": 0, "wall": wall},
        "versions": {"crossrank": "0.1.0", "torch": "2.13.0"},
        "config": {"emit": "ALL"},
    }
    lines: list[dict[str, Any]] = [{"header": header}, *({"group": group} for group in groups)]
    entries: list[dict[str, Any]] = []
    seqs = [0, 0, 0]
    whole, part = [1 << 18], [1 << 15]
    tensors = {"all_gather": (part, whole), "reduce_scatter": (whole, part), "all_reduce": (whole, whole)}

    def call(group: int, op: str, c10d: str, at: int, took: int, late: int) -> None:
        seqs[group] += 1
        pg = groups[group]["pg"]
        begin = at + late
        record = {"id": len(entries), "seq": seqs[group], "t": begin, "step": step, "op": op, "c10d": c10d, "pg": pg}
        into, out_of = tensors[op]
        record |= {
            "in": [into],
            "out": [out_of],
            "dtype": "float32",
            "bytes": 4 << 18,
            "source": f"model.py:{40 + group}",
        }
        lines.append(record | {"locality": groups[group]["locality"]})
        entries.append(
            {
                "record_id": len(entries),
                "pg_id": group,
                "process_group": [pg, groups[group]["desc"]],
                "collective_seq_id": seqs[group],
                "p2p_seq_id": 0,
                "op_id": seqs[group],
                "profiling_name": f"nccl:{op}",
                "time_created_ns": wall + begin + 2000,
                "input_sizes": [into],
                "input_dtypes": ["Float"],
                "output_sizes": [out_of],
                "output_dtypes": ["Float"],
                "state": "completed",
                "time_discovered_started_ns": wall + begin + 5000,
                "time_discovered_completed_ns": wall + at + LATE + took,
                "duration_ms": (took + LATE - late - 5000) / 1e6,
                "retired": True,
                "timeout_ms": 600000,
                "is_p2p": False,
                "frames": [],
            }
        )

    at = 1_000_000
    for step in range(steps):
        lines.append({"step": {"step": step, "t": at}})
        late = LATE if rank == 29 else (rank * 7919 + step * 104729) % 50_000
        for _ in range(layers):
            call(1, "all_gather", "_allgather_base_", at, 200_000, late)
            call(1, "reduce_scatter", "_reduce_scatter_base_", at + 1_000_000, 200_000, late)
            call(2, "all_reduce", "allreduce_", at + 2_000_000, 400_000, late)
            at += 3_000_000
        call(0, "all_reduce", "allreduce_", at, 100_000, late)
        at += 2_000_000
    lines.append({"end": {"reason": "exit", "calls": len(entries), "records": len(entries)}})
    compress = zstandard.ZstdCompressor(level=3).compress
    content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (folder / f"rank-{rank}.comms.jsonl.zst").write_bytes(compress(content))
    config = {
        str(i): {"name": group["pg"], "desc": group["desc"], "ranks": str(group["ranks"])}
        for i, group in enumerate(groups)
    }
    dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
    dump["crossrank"] = {"rank": rank, "world_size": world, "time_ns": wall + at, "clock": {"t": at, "wall": wall + at}}
    (folder / f"rank-{rank}.flight.json.zst").write_bytes(compress(msgspec.json.encode(dump)))
    return len(entries)


def cluster(folder: Path) -> None:
    pairs = folder / "pairs"
    pairs.mkdir()
    for rank in range(MANY):
        small_rank(rank).write(pairs, rank)
    print(f"\ncrossrank link, {MANY:,} small ranks of 240 operations and 80 kernels each")
    print(f"  {'':28} {'wall s':>8} {'user s':>8}")
    ways = {
        "--cluster local --jobs 1": ["--cluster", "local", "--jobs", "1"],
        "--cluster local --jobs 2": ["--cluster", "local", "--jobs", "2"],
        "--jobs 1": ["--jobs", "1"],
        "--jobs 2": ["--jobs", "2"],
    }
    walls: dict[str, list[float]] = {name: [] for name in ways}
    users: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(RUNS):
        for name, words in ways.items():
            wall, user, _ = measured(crossrank("link", str(pairs), "-o", str(folder / "linked"), *words))
            walls[name].append(wall)
            users[name].append(user)
    for name in ways:
        print(f"  {name:28} {statistics.median(walls[name]):>8.1f} {statistics.median(users[name]):>8.1f}", flush=True)
    for one, two in (list(ways)[:2], list(ways)[2:]):
        ratios = [a / b for a, b in zip(walls[one], walls[two], strict=True)]
        print(
            f"  {two}: {statistics.median(ratios):.2f} x as fast as with one worker "
            f"({min(ratios):.2f}..{max(ratios):.2f}, {RUNS} pairs)"
        )


def small_rank(rank: int) -> SmallTrace:
    trace = SmallTrace()
    trace.kineto_head["distributedInfo"]["rank"] = rank
    floats = [5, 6, 0, 24, 4, "cuda:0"]
    for i in range(40):
        at = 1000 * i
        values = [[floats], i + 1, ["0", "default_pg"], 0, "allreduce", [], [], 0, 1, MANY]
        types = ["GenericList[Tensor(float)]"] + [""] * 9
        inputs = {"values": values, "shapes": [[[24]]] + [[]] * 9, "types": types}
        trace.op("record_param_comms", at, 50, inputs=inputs)
        trace.launch("ncclDevKernel_AllReduce_Sum_f32(x)", at + 5, at + 10, 20, 500 + 2 * i, stream=20)
        for k in range(5):
            trace.op("aten::mm", at + 100 + 20 * k, 15)
        trace.launch("gemm", at + 182, at + 190, 30, 501 + 2 * i, stream=7)
    return trace


RANKS, COLLECTIVES, MANY, RUNS = 64, 4000, 1024, 5
LATE = 80_000
"""ns by which one rank comes late."""

PARTS: dict[str, Callable[[Path], None]] = {
    "bandwidth": bandwidth,
    "timeline": timeline,
    "report": report,
    "cluster": cluster,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure (default: all)")
    arguments = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="crossrank-benchmark-") as folder:
        for name in arguments.parts or PARTS:
            PARTS[name](Path(folder))


if __name__ == "__main__":
    main()
