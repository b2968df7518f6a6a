"""What a recording asks of a job of thousands of ranks: of its store, its file system, its start, and a hang's verdict.

    python -m benchmarks.thousands_of_ranks [--quick]

No machine here has 16,384 ranks. What is measured: the requests that real clients make of a real TCPStore in a process
of its own, and the CPU time that each costs it; how long one rank of such a job takes to begin, on torch's `fake`
backend, which has any number of ranks; and `crossrank diagnose --last 512`, as the job itself runs it when it hangs,
over synthetic dumps of up to 2,048 ranks with 2,000 calls each. What is computed from that for 16,384 is marked with ~.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import torch.distributed as dist
import zstandard

from benchmarks.diagnosis import START, _dump
from crossrank.instrument.identity.topology import Topology
from crossrank.recording import file_name, rank_folder

RANKS = 16_384
PER_NODE = 8
CORES = 16
SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
START_UP = """
import sys, tempfile, time
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import crossrank
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=int(sys.argv[1]))
with tempfile.TemporaryDirectory() as folder:
    begun = time.perf_counter()
    crossrank.enable(directory=folder)
    enabled = time.perf_counter()
    dist.all_reduce(torch.ones(8))
    print(enabled - begun, time.perf_counter() - enabled)
    crossrank.disable()
"""
VERDICT = """
import resource, sys, time
from crossrank.tools.cli import main
begun = time.perf_counter()
try:
    main()
finally:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = [one.ru_utime + one.ru_stime for one in parts]
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(time.perf_counter() - begun, *cpu, int(peak) / 1000, file=sys.stderr)
"""


class CountedStore(dist.Store):
    """A store that counts what is asked of another one."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self._store.set(key, value.decode() if isinstance(value, bytes) else value)

    def add(self, key: str, value: int) -> int:
        self.requests["add"] += 1
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.requests["compare_set"] += 1
        texts = [one.decode() if isinstance(one, bytes) else one for one in (expected, desired)]
        return self._store.compare_set(key, *texts)

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        return self._store.multi_get(keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="with fewer ranks")
    quick = parser.parse_args().quick
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores; ~ is computed for {RANKS:,} ranks\n")
    measure_store([64, 256] if quick else [64, 256, 1024])
    measure_start()
    show_folders()
    measure_verdict([128, 256] if quick else [512, 1024, 2048])


def measure_store(counts: list[int]) -> None:
    """How often the ranks ask the job's store where the others are, and what that costs the process that has it."""
    print("the job's store: requests from enable() until every rank knows where all others are")
    print(f"  {'ranks':>7} {'per rank':>9} {'of all':>9} {'seconds':>8} {'server CPU us/request':>22}")
    per_request = 0.0
    for ranks in counts:
        requests, seconds, cpu = _exchange(ranks)
        total = sum(requests.values())
        per_request = cpu / total
        print(f"  {ranks:>7,} {total / ranks:>9.2f} {total:>9,} {seconds:>8.2f} {per_request * 1e6:>22.1f}")
    asked = 3 * RANKS
    print(f"  ~{RANKS:>6,} {3:>9.2f} {asked:>9,}     server: {asked * per_request:.1f} s of CPU")
    print("  a rank that begins more than 1.6 s before another one asks once more, more than 8 s before it twice\n")


def _exchange(ranks: int) -> tuple[Counter[str], float, float]:
    """Requests by kind, seconds, and CPU seconds of the server."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    # One of about 25 that connect one after the other waits 5 s for it.
    with ThreadPoolExecutor(64) as pool:
        clients = list(pool.map(lambda _: dist.TCPStore("127.0.0.1", port, ranks, False), range(ranks)))
    stores = [CountedStore(client) for client in clients]
    topologies = [Topology(rank, ranks, f"node {rank // PER_NODE}") for rank in range(ranks)]
    before, begun = _cpu_of(server.pid), time.perf_counter()
    together = threading.Barrier(ranks)

    def exchange(topology: Topology, store: dist.Store) -> None:
        together.wait()  # as after init_process_group
        topology.exchange(lambda: store, 0)

    threads = [threading.Thread(target=exchange, args=pair) for pair in zip(topologies, stores, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - begun, _cpu_of(server.pid) - before
    server.communicate()
    if any(topology.missing() for topology in topologies):
        raise SystemExit("a rank does not know where the others are")
    return sum((store.requests for store in stores), Counter()), seconds, cpu


def _cpu_of(pid: int) -> float:
    """CPU seconds of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure_start() -> None:
    """What one rank of a large job waits for when it begins to record."""
    print("start-up of one rank, s: enable() with torch imported, and the first call")
    for ranks in (8, RANKS):
        runs = []
        for _ in range(5):
            done = subprocess.run([sys.executable, "-c", START_UP, str(ranks)], stdout=subprocess.PIPE, check=True)
            runs.append(tuple(map(float, done.stdout.split())))
        enable, first = sorted(runs)[len(runs) // 2]
        print(f"  {ranks:>7,} ranks  enable {enable:.2f}   first call {first:.4f}")
    print()


def show_folders() -> None:
    """How many files and folders lie side by side in a recording."""
    print("files of a recording with one window: 4 per rank")
    for ranks in (64, 65, 1024, 8192, RANKS):
        of_folder = Counter(rank_folder(rank, ranks) for rank in range(ranks))
        folders = len(of_folder) if "" not in of_folder else 0
        print(f"  {ranks:>7,} ranks  {folders:>5,} folders, at most {4 * max(of_folder.values()):>4,} files in each")
    print()


def measure_verdict(counts: list[int]) -> None:
    """How long `crossrank diagnose --last 512` takes over a job that hangs."""
    print("verdict: crossrank diagnose --last 512 of dumps with 2,000 calls each; `all` is without --last")
    print(f"  {'ranks':>7} {'wall s':>7} {'serial CPU s':>13} {'CPU s of workers':>17} {'main MB':>8}   all: wall s")
    found: list[tuple[float, float]] = []
    for ranks in counts:
        with tempfile.TemporaryDirectory() as folder:
            synthesise(Path(folder), ranks)
            wall, serial, workers, megabytes = _diagnose(folder, "--last", "512")
            whole = f"{_diagnose(folder)[0]:.1f}" if ranks <= 1024 else "-"
        print(f"  {ranks:>7,} {wall:>7.1f} {serial:>13.1f} {workers:>17.1f} {megabytes:>8.0f}   {whole}", flush=True)
        found.append((serial, workers))
    # From one job to one of twice as many ranks: what every run takes to begin is not multiplied.
    rise = (RANKS - counts[-1]) / (counts[-1] - counts[-2])
    serial, workers = (last + rise * (last - before) for before, last in zip(*found[-2:], strict=True))
    seconds = serial + workers / CORES
    print(
        f"  ~{RANKS:>6,} {seconds:>7.1f} {serial:>13.1f} {workers:>17.1f}   {CORES} cores: serial + workers / {CORES}"
    )


def _diagnose(folder: str, *options: str) -> list[float]:
    """(wall s, CPU s of the process, CPU s of its workers, peak MB of the process)"""
    command = [sys.executable, "-c", VERDICT, "diagnose", folder, *options, "--jobs", str(os.cpu_count()), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if json.loads(done.stdout)["suspect_ranks"] != [1]:
        raise SystemExit(f"the answer is wrong:\n{done.stdout[:2000]}{done.stderr}")
    return [float(number) for number in done.stderr.splitlines()[-1].split()]


def synthesise(folder: Path, ranks: int) -> None:
    """Write the dumps as the recorder of a job of so many ranks does. Rank 1 lacks the last call on the world."""
    compressor = zstandard.ZstdCompressor(level=3)
    taken = START + 3600 * 10**9
    for rank in range(ranks):
        dump = _dump(rank, ranks, 2000)
        for entry in dump["entries"]:
            del entry["frames"]
        groups = [(group["name"], group["desc"], json.loads(group["ranks"])) for group in dump["pg_config"].values()]
        dump["crossrank"] = {
            "rank": rank,
            "world_size": ranks,
            "host": f"node{rank // PER_NODE}",
            "reason": "hang",
            "time_ns": taken,
            "clock": {"t": taken, "wall": taken},
            "groups": [{"pg": name, "desc": desc, "size": len(of), "ranks": of} for name, desc, of in groups],
            "stacks": [{"thread": "MainThread", "frames": [{"name": "step", "filename": "train.py", "line": 100}]}],
        }
        place = folder / rank_folder(rank, ranks)
        place.mkdir(exist_ok=True)
        (place / file_name("flight", rank)).write_bytes(compressor.compress(orjson.dumps(dump)))


if __name__ == "__main__":
    if shutil.disk_usage(tempfile.gettempdir()).free < 1 << 30:
        raise SystemExit(f"{tempfile.gettempdir()} has less than 1 GB free")
    main()
