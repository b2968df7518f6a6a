"""The stand-in does what CUDA and NCCL do: data moves, times are those of its log, and nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration import jobs
from tests.stand_in.logs import log_to, rows

RANK = """
import os, threading
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")

def on_gpu(*values, dtype=torch.float32):
    return torch.tensor(values).to(dtype).cuda()  # a kernel computes nothing, a copy copies
"""


RECORDED = f"import crossrank\nrecording = crossrank.enable()\n{RANK}"
"""A rank that records."""


def record(folder: Path, source: str, ranks: int = 2, **variables: str) -> jobs.EndedRanks:
    """Run ranks that record in `folder/recording`."""
    folder.mkdir(exist_ok=True)
    script = jobs.write_script(folder, RECORDED + source + "dist.destroy_process_group()\n")
    ended = jobs.ranks(folder, script, ranks, TRACING_DIR="recording", **variables)
    assert ended.codes == [0] * ranks, ended.stderr
    return ended


def run(folder: Path, source: str, ranks: int = 2) -> jobs.EndedRanks:
    ended = jobs.ranks(folder, jobs.write_script(folder, RANK + source), ranks, TRACING="NONE")
    assert ended.codes == [0] * ranks, ended.stderr
    return ended


def test_collectives_give_correct_results(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64"):
    dtype = getattr(torch, name)
    tensor = on_gpu(rank + 1, 2, dtype=dtype)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6, 6], (dtype, tensor)
for name, expected in {"MAX": 3, "MIN": 1, "PRODUCT": 6, "AVG": 2}.items():
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
    assert tensor.tolist() == [expected], (name, tensor)
gathered = on_gpu(0, 0, 0)
dist.all_gather_into_tensor(gathered, on_gpu(rank + 1))
assert gathered.tolist() == [1, 2, 3]
scattered = on_gpu(0)
dist.reduce_scatter_tensor(scattered, on_gpu(rank, rank + 10, rank + 20))
assert scattered.tolist() == [3 + 30 * rank]
exchanged = on_gpu(0, 0, 0)
dist.all_to_all_single(exchanged, on_gpu(*(10 * rank + other for other in range(3))))
assert exchanged.tolist() == [rank, 10 + rank, 20 + rank]
uneven = [[1, 0, 2], [0, 3, 1], [2, 1, 1]]
received = [row[rank] for row in uneven]
exchanged = on_gpu(*[0] * sum(received))
dist.all_to_all_single(exchanged, on_gpu(*[rank] * sum(uneven[rank])), received, uneven[rank])
assert exchanged.tolist() == [other for other, count in enumerate(received) for _ in range(count)]
tensor = on_gpu(rank)
dist.broadcast(tensor, 2)
assert tensor.tolist() == [2]
ring = on_gpu(0)
ops = [dist.P2POp(dist.isend, on_gpu(rank), (rank + 1) % 3), dist.P2POp(dist.irecv, ring, (rank - 1) % 3)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert ring.tolist() == [(rank - 1) % 3]
part = dist.new_group([0, 2])
if rank != 1:
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor, group=part)
    assert tensor.tolist() == [4]
""",
        ranks=3,
    )


def test_an_async_collective_ends_on_all_ranks_when_the_last_rank_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_to(tmp_path / "log", monkeypatch)
    run(
        tmp_path,
        """
import time
tensor = on_gpu(1)
dist.all_reduce(tensor)  # the first one makes the connections
dist.barrier()
if rank == 1:
    time.sleep(0.3)
begun = time.monotonic()
work = dist.all_reduce(tensor, async_op=True)
took = time.monotonic() - begun
assert took < 0.1, took
assert rank == 1 or not work.is_completed()
work.wait()
torch.cuda.synchronize()
assert rank == 1 or time.monotonic() - begun > 0.25
""",
    )
    *_, one, other = [row for row in rows(log, "communication") if row["calls"][0]["op"] == "AllReduce"]
    assert one["end"] == other["end"]
    assert other["begin"] - one["begin"] > 2e8


def test_events_measure_the_logged_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_to(tmp_path / "log", monkeypatch)
    monkeypatch.setenv("STAND_IN_KERNELS", "elementwise=700")
    run(
        tmp_path,
        """
tensor = on_gpu(1)
torch.cuda.synchronize()
events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
events[0].record()
for _ in range(10):
    tensor.add_(1)
events[1].record()
torch.cuda.synchronize()
assert 7.0 <= events[0].elapsed_time(events[1]) < 50, events[0].elapsed_time(events[1])
""",
        ranks=1,
    )
    kernels = [row for row in rows(log, "kernel") if "elementwise" in row["name"]]
    assert [row["end"] - row["begin"] for row in kernels[-10:]] == [700_000] * 10


def test_unimplemented_functions_fail_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_to(tmp_path / "log", monkeypatch)
    run(tmp_path, "import ctypes\nassert [ctypes.CDLL(None).cublasZtrsm_v2() for _ in range(2)] == [15, 15]\n", ranks=1)
    assert ("cublasZtrsm_v2", 2) in [(row["name"], row["count"]) for row in rows(log, "missing")]


def test_nvml_reports_the_clocks_throttle_reasons_and_xid_of_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "counters"
    counters.write_text("0 sm_mhz 1215\n0 throttle_reasons 64\n")
    monkeypatch.setenv("STAND_IN_COUNTERS", str(counters))
    run(
        tmp_path,
        """
import ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1")
device, events, clock, reasons = (ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_ulonglong())
assert nvml.nvmlInit_v2() == nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
for kind, expected in {1: 1215, 2: 2619}.items():  # the SM clock, the memory's
    assert nvml.nvmlDeviceGetClockInfo(device, kind, ctypes.byref(clock)) == 0
    assert clock.value == expected, (kind, clock)
assert nvml.nvmlDeviceGetCurrentClocksEventReasons(device, ctypes.byref(reasons)) == 0
assert reasons.value == 64  # thermal slowdown

assert nvml.nvmlEventSetCreate(ctypes.byref(events)) == 0
assert nvml.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(8), events) == 0  # critical Xid
found = (ctypes.c_ulonglong * 4)()
assert nvml.nvmlEventSetWait_v2(events, found, 5) == 10  # timed out
with open(os.environ["STAND_IN_COUNTERS"], "a") as counters:
    counters.write("0 xid 79\\n")
assert nvml.nvmlEventSetWait_v2(events, found, 5000) == 0
assert (found[0], found[1], found[2]) == (device.value, 8, 79), list(found)
""",
        ranks=1,
    )


def test_a_rank_killed_in_a_wait_leaves_no_socket(tmp_path: Path) -> None:
    source = """
import ctypes
identity = ctypes.create_string_buffer(128)  # others would ask this process for the memory of a communicator
assert ctypes.CDLL(None).ncclGetUniqueId(identity) == 0
print("waits", identity.value.decode(), flush=True)
while True: pass
"""
    process = jobs.start(tmp_path, source)
    (_, name) = jobs.wait_for_line(process, "waits")
    sockets = Path("/proc/net/unix")
    assert f"@{name}" in sockets.read_text()
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert f"@{name}" not in sockets.read_text()
