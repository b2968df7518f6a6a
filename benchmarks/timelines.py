"""How long bandwidth, timeline and report take, and what the engines over ranks gain.

    python benchmarks/timelines.py [bandwidth timeline report cluster]

* bandwidth: SQLite exports as Nsight Systems writes them, of 1, 2 and 4 times 250,000 markers and as many kernels: user
  CPU and peak memory of the whole command. Linear means twice the rows in twice the time.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from crossrank.tools.fleet import Fleet
from crossrank.tools.timeline.build import write_timeline
from crossrank.tools.timeline.chrome import ChromeWriter
from crossrank.tools.timeline.perfetto import PerfettoWriter
from crossrank.tools.timing.collectives import lay_side_by_side
from crossrank.tools.timing.sources import find, read

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
    together = lay_side_by_side(ranks)
    print(f"\ncrossrank timeline, {RANKS} ranks x {COLLECTIVES:,} collectives from Nsight exports")
    print("  every call a moment on its host and a slice on its device, arrows, counters")
    print(f"  {'':28} {'wall s':>8} {'user s':>8} {'peak MB':>8} {'file MB':>8}")
    print(f"  {'whole command':28} {wall:>8.1f} {user:>8.1f} {peak:>8.0f} {output.stat().st_size / 1e6:>8.1f}")
    for name, factory in (("native", PerfettoWriter), ("Chrome JSON", ChromeWriter)):
        start, used = time.monotonic(), time.process_time()
        write_timeline(ranks, together, output, factory)
        wall, user = time.monotonic() - start, time.process_time() - used
        size = output.stat().st_size / 1e6
        print(f"  {'writing alone, ' + name:28} {wall:>8.1f} {user:>8.1f} {'':>8} {size:>8.1f}", flush=True)


RANKS, COLLECTIVES = 64, 4000

PARTS: dict[str, Callable[[Path], None]] = {"bandwidth": bandwidth, "timeline": timeline}


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
