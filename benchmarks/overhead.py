"""What recording costs: CPU time per call, step time, disk and memory, as one table of measured numbers.

    python benchmarks/overhead.py [--quick] [SECTION ...]

Sections: calls, splits, threads, nvtx, disk, off; all but `off` with both kernels; what a step of training pays is in
`training.py`. Every comparison is paired: both variants run in turn in the same process, and the median of the paired
differences or ratios is printed, with the quartiles, because machines are shared and noisy. CPU times are of the
calling thread, and of the whole process where the writer's thread is to be counted too; a process's own background
(gloo's threads) cancels in the pair.

The shim that is measured beside crossrank is what people have today: it replaces `dist.all_reduce`, walks
`inspect.stack()` and builds new JSON for every call.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import crossrank
from crossrank.instrument import api
from crossrank.tools.output.console import print_table
from tests.integration.kernels import remove_kernels

HERE = Path(__file__).parent
KERNELS = ("compiled", "python")
CAPTURE = HERE.parent / "tests" / "integration" / "nvtx_capture.c"


@contextlib.contextmanager
def recorded(**options: Any) -> Iterator[None]:
    """A recording, behind which calls are as in a process that was never recorded: there is one for each kernel."""
    with crossrank.enable(tracing="ALL", **options):
        yield
    remove_kernels()


def start_one_rank() -> None:
    """A process group of this process alone, on one core.

    On several, gloo's thread runs elsewhere, and what a virtual machine takes to wake an idle core (7 us per call
    here) lands in the CPU time of the calling thread, and doubles whatever runs right after it.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def cpu_per_call(call: Callable[[], object], number: int, settle: Callable[[], None]) -> tuple[float, float]:
    """CPU us per call: of this thread, and of the process until `settle` returns."""
    thread, process = time.thread_time_ns(), time.process_time_ns()
    for _ in range(number):
        call()
    thread = time.thread_time_ns() - thread
    settle()
    return thread / number / 1000, (time.process_time_ns() - process) / number / 1000


def wait_for_writer() -> None:
    """Until the writer's thread has turned everything so far into lines on disk."""
    current = api._current
    if current is None or current.writer is None:
        return
    writer = current.writer
    while current.recorder.waiting:
        time.sleep(0.02)
    with writer._lock:
        pass


def spread(values: Sequence[float], digits: int = 1) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


class Shim:
    """The monkeypatching shim of today: a new name in torch.distributed, a walk of the stack, JSON per call."""

    def __init__(self) -> None:
        import nvtx

        self._mark = nvtx.mark
        self._original = dist.all_reduce

    def __enter__(self) -> None:
        original = self._original

        def traced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = inspect.stack()[1]
            descriptor = {
                "name": "all_reduce",
                "rank": dist.get_rank(),
                "source_line": f"{caller.filename}:{caller.lineno}",
                "message_size": tensor.numel() * tensor.element_size(),
                "device": str(tensor.device),
                "timestamp": int(time.time()),
                "group_ranks": dist.get_process_group_ranks(dist.group.WORLD),
            }
            self._mark(json.dumps(descriptor))
            return original(tensor, *args, **kwargs)

        dist.all_reduce = traced

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._original


def calls(rounds: int, number: int) -> None:
    """Added CPU time per call with everything on and no NVTX tool attached."""
    start_one_rank()
    small, big = torch.ones(4), torch.ones(4)
    sizes = iter(range(1 << 60))
    split = torch.ones(1 << 20)

    def moe() -> None:
        rows = next(sizes) % 1_000_000
        dist.all_to_all_single(split[:rows], split[:rows], [rows], [rows])

    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(small),
        "all_gather_single": lambda: dist.all_gather_single(big, small),
        "barrier": lambda: dist.barrier(),
        "all_to_all_single, new splits each call": moe,
    }
    rows = []
    folder = tempfile.mkdtemp()
    for kernel, (name, call) in itertools.product(KERNELS, kinds.items()):
        count = number if call is not moe else min(number, 1000)
        thread, process, untraced, inactive = [], [], [], []
        for _ in range(rounds):
            without = cpu_per_call(call, count, wait_for_writer)
            with recorded(directory=folder, flight=False, recorder=kernel):
                call()
                wait_for_writer()
                recorder = api._current.recorder  # type: ignore[union-attr]
                with_ = cpu_per_call(call, count, wait_for_writer)
                # The same kernel that only passes the call on: what the dispatcher takes to call it at all.
                recorder.active = False
                bare = cpu_per_call(call, count, wait_for_writer)
                recorder.active = True
            untraced.append(without[0])
            thread.append(with_[0] - without[0])
            process.append(with_[1] - without[1])
            inactive.append(bare[0] - without[0])
        rows.append(
            (
                f"{kernel}: {name}",
                f"{statistics.median(untraced):.1f}",
                spread(thread),
                spread(process),
                spread(inactive),
            )
        )
    shim, shim_process, untraced = [], [], []
    for _ in range(rounds):
        without = cpu_per_call(lambda: dist.all_reduce(small), number // 10, wait_for_writer)
        with Shim():
            with_ = cpu_per_call(lambda: dist.all_reduce(small), number // 10, wait_for_writer)
        untraced.append(without[0])
        shim.append(with_[0] - without[0])
        shim_process.append(with_[1] - without[1])
    rows.append(("shim: all_reduce", f"{statistics.median(untraced):.1f}", spread(shim), spread(shim_process), "-"))
    shutil.rmtree(folder)
    print_table(
        f"Added CPU us per call, gloo, 1 rank on one core, back to back, no NVTX tool: median (quartiles)"
        f" of {rounds} pairs of {number} calls",
        ("call", "#untraced", "#added, this thread", "#added, all threads", "#of which the empty kernel"),
        rows,
    )


def threads(rounds: int, number: int) -> None:
    """Wall time per call where many threads call at once, each on a group of its own."""
    start_one_rank()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    groups = [dist.new_group([0]) for _ in range(16)]
    folder = tempfile.mkdtemp()

    def us_per_call(count: int) -> float:
        def call(group: Any) -> None:
            tensor = torch.ones(4)
            for _ in range(number // count):
                dist.all_reduce(tensor, group=group)

        workers = [threading.Thread(target=call, args=(group,)) for group in groups[:count]]
        started = time.perf_counter_ns()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return (time.perf_counter_ns() - started) / (number // count * count) / 1000

    rows = []
    for kernel, count in itertools.product(KERNELS, (1, 16)):
        added, untraced = [], []
        for _ in range(rounds):
            without = us_per_call(count)
            with recorded(directory=folder, flight=False, recorder=kernel):
                us_per_call(count)
                added.append(us_per_call(count) - without)
            untraced.append(without)
        rows.append((kernel, count, f"{statistics.median(untraced):.1f}", spread(added)))
    shutil.rmtree(folder)
    print_table(
        f"Added wall us per call where threads call at once: {rounds} pairs of {number} calls",
        ("kernel", "#threads", "#untraced", "#added"),
        rows,
    )


def nvtx_attached(rounds: int, number: int) -> None:
    """What an attached NVTX tool adds, in a process of its own: NVTX decides at its first use."""
    if "NVTX_INJECTION64_PATH" not in os.environ:
        library = _build_tool()
        if library is None:
            print("\nNVTX attached: left out, no C compiler")
            return
        words = [sys.executable, __file__, "nvtx", "--rounds", str(rounds), "--calls", str(number)]
        subprocess.run(words, check=True, env=os.environ | {"NVTX_INJECTION64_PATH": str(library)})
        return
    start_one_rank()
    small = torch.ones(4)
    folder = tempfile.mkdtemp()
    rows = []
    for kernel in KERNELS:
        added = []
        for _ in range(rounds):
            times = []
            for mode in ("0", "1"):
                with recorded(directory=folder, flight=False, nvtx=mode, recorder=kernel):
                    dist.all_reduce(small)
                    wait_for_writer()
                    times.append(cpu_per_call(lambda: dist.all_reduce(small), number, wait_for_writer)[0])
            added.append(times[1] - times[0])
        rows.append((f"{kernel}: all_reduce", spread(added)))
    shutil.rmtree(folder)
    print_table(
        f"Added CPU us per call by an attached NVTX tool whose callbacks do nothing: {rounds} pairs of {number} calls",
        ("call", "#added, this thread"),
        rows,
    )


def _build_tool() -> Path | None:
    """The tests' capture library without an output file: its callbacks return at once."""
    import importlib.metadata

    compiler = shutil.which("cc")
    if compiler is None:
        return None
    files = importlib.metadata.files("nvidia-nvtx") or []
    header = next(file for file in files if file.name == "nvToolsExt.h" and file.parent.name == "nvtx3")
    library = Path(tempfile.mkdtemp()) / "libcapture.so"
    include = f"-I{Path(str(header.locate())).parent.parent}"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", include, str(CAPTURE), "-o", str(library)], check=True)
    return library


def disk(records: int) -> None:
    """Bytes on disk per record and resident memory over many records, sizes fixed and changing (MoE)."""
    start_one_rank()
    rows = []
    fixed = torch.ones(4)
    pool = torch.ones(1 << 16)
    sizes = (
        ("fixed size", lambda number: dist.all_reduce(fixed)),
        ("a new size at each call", lambda number: dist.all_reduce(pool[: number % 60_000 + 1])),
    )
    for kernel, (name, call) in itertools.product(KERNELS, sizes):
        folder = tempfile.mkdtemp()
        with recorded(directory=folder, flight=False, recorder=kernel):
            for number in range(records // 10):
                call(number)
            wait_for_writer()
            early = _resident_mb()
            for number in range(records // 10, records):
                call(number)
            wait_for_writer()
            late = _resident_mb()
            counts = api._current.writer.counts  # type: ignore[union-attr]
            dropped = api._current.recorder.counts().dropped  # type: ignore[union-attr]
        size = (Path(folder) / "rank-0.comms.jsonl.zst").stat().st_size
        rows.append(
            (
                f"{kernel}: {name}",
                records,
                dropped,
                f"{size / counts.records:.1f}",
                f"{early:.1f}",
                f"{late - early:+.1f}",
            )
        )
        shutil.rmtree(folder)
    print_table(
        "The comms file, and resident memory of the process",
        ("all_reduce", "#records", "#dropped", "#bytes/record", f"#MB after {records // 10}", f"#change at {records}"),
        rows,
    )


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def off(rounds: int, number: int) -> None:
    """Calls after disable() and with TRACING=NONE against calls of a process that never heard of crossrank."""
    start_one_rank()
    small = torch.ones(4)
    folder = tempfile.mkdtemp()
    rows = []
    for name in ("after disable()", "TRACING=NONE"):
        ratios = []
        for _ in range(rounds):
            remove_kernels()
            before = cpu_per_call(lambda: dist.all_reduce(small), number, wait_for_writer)[0]
            if name == "after disable()":
                with crossrank.enable(tracing="ALL", directory=folder, flight=False):
                    dist.all_reduce(small)
                after = cpu_per_call(lambda: dist.all_reduce(small), number, wait_for_writer)[0]
            else:
                with crossrank.enable(tracing="NONE"):
                    after = cpu_per_call(lambda: dist.all_reduce(small), number, wait_for_writer)[0]
            ratios.append(after / before)
        rows.append((name, spread(ratios, 3)))
    shutil.rmtree(folder)
    print_table(
        f"CPU time per call with tracing off: {rounds} pairs of {number} calls", ("state", "#off / never on"), rows
    )


def splits(number: int) -> None:
    """A mixture of experts: splits of an all_to_all over 8 ranks that are new with each call, beside fixed ones.

    torch's fake process group sends nothing, so that what is left is the recorder's.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    tokens, received, rng = torch.empty(512), torch.empty(512), random.Random(0)
    cuts = ([0, *sorted(rng.choices(range(513), k=7)), 512] for _ in range(number))
    new = [[end - begin for begin, end in itertools.pairwise(at)] for at in cuts]
    distinct = len(set(map(tuple, new)))
    kinds = {"fixed": [[64] * 8] * number, f"{distinct:,} different ones": new}
    rows, folder = [], tempfile.mkdtemp()
    for kernel, (name, of_calls) in itertools.product(("none", *KERNELS), kinds.items()):
        if kernel != "none":
            crossrank.enable(tracing="ALL", directory=f"{folder}/{kernel}-{len(rows)}", flight=False, recorder=kernel)
        splits_of_calls = iter(of_calls)

        def call(of: Any = splits_of_calls) -> None:
            split = next(of)
            dist.all_to_all_single(received, tokens, split, split)

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        thread, process = cpu_per_call(call, number, wait_for_writer)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        dropped = api._current.recorder.counts().dropped if api._current is not None else 0
        crossrank.disable()
        remove_kernels()
        rows.append((kernel, name, f"{thread:.2f}", f"{process:.2f}", f"{grown:.0f}", f"{dropped:,}"))
    shutil.rmtree(folder)
    columns = ("kernel", "splits", "#CPU us, this thread", "#all threads", "#MiB more", "#dropped")
    print_table(
        f"all_to_all_single over 8 ranks that send nothing, {number:,} calls back to back on one core", columns, rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("calls", "splits", "threads", "nvtx", "disk", "off")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(sections))
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int)
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    scale = 10 if arguments.quick else 1
    rounds = arguments.rounds or max(4, 20 // scale)
    number = arguments.calls or max(500, 4000 // scale)
    wanted = arguments.sections or sections
    if len(wanted) > 1:  # each in a process of its own: a process group is made once
        print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
        for section in wanted:
            words = [sys.executable, __file__, section, *(["--quick"] if arguments.quick else [])]
            sys.stdout.flush()
            subprocess.run(words, check=True)
        return
    run: dict[str, Callable[[], None]] = {
        "calls": lambda: calls(rounds, number),
        "splits": lambda: splits(1_000_000 // scale),
        "threads": lambda: threads(rounds, number),
        "nvtx": lambda: nvtx_attached(rounds, number),
        "disk": lambda: disk(1_000_000 // scale),
        "off": lambda: off(rounds, number),
    }
    run[wanted[0]]()


if __name__ == "__main__":
    main()
