"""Replay with NCCL on the stand-in: every result checked, graphs captured, a slow link found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import jobs
from tests.stand_in.test_machine import record
from tests.unit.graph.linking.public_traces import needs_traces, public

REDUCTIONS = """
values = [torch.ones(1 << 20, device="cuda") for _ in range(2)]
gathered = torch.ones(size << 18, device="cuda")
for step in range(4):
    work = dist.all_reduce(values[0], async_op=True)
    dist.all_gather_into_tensor(gathered, values[1][: 1 << 18])
    work.wait()
    torch.cuda.synchronize()
    crossrank.step()
"""

FORWARD_AND_BACKWARD = """
pair = dist.new_group([0, 1])
tensors = [torch.ones(1 << 10, device="cuda") for _ in range(3)]

def backward():
    torch.cuda.set_device(rank)
    dist.all_reduce(tensors[2])  # on the stream of the main thread, which waits for this thread

wake, done = threading.Semaphore(0), threading.Semaphore(0)

def autograd():
    while wake.acquire() and not finished:
        backward()
        done.release()

finished = []
thread = threading.Thread(target=autograd)
thread.start()
for step in range(6):
    dist.all_reduce(tensors[0])
    dist.all_reduce(tensors[1], group=pair)
    wake.release()
    done.acquire()
    crossrank.step()
finished.append(True)
wake.release()
thread.join()
torch.cuda.synchronize()
"""
TWO_STREAMS = """
groups = [dist.new_group([0, 1]) for _ in range(2)]
for group in groups:
    dist.all_reduce(torch.ones(8, device="cuda"), group=group)
torch.cuda.synchronize()

def work(number):
    torch.cuda.set_device(rank)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            dist.all_reduce(torch.ones(1 << 18, device="cuda"), group=groups[number])

for number in (rank, 1 - rank):  # another order on each rank
    thread = threading.Thread(target=work, args=(number,))
    thread.start()
    thread.join()
torch.cuda.synchronize()
"""


def replay(folder: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return crossrank(folder, "replay", *words, **variables)


def crossrank(folder: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return jobs.run([sys.executable, "-m", "crossrank", *words], folder, 150, **variables)


@needs_traces
def test_the_replay_of_an_eight_gpu_trace_has_correct_results(tmp_path: Path) -> None:
    done = replay(tmp_path, public("dlrm_8gpu"), "--check", "--repeat", "2", "--scale-bytes", "0.1")
    assert done.returncode == 0, done.stderr
    assert "Replayed with nccl" in done.stdout
    assert "output tensors are correct" in done.stdout


@pytest.mark.parametrize("mode", [(), ("--graph",), ("--blocking",)], ids=["", "graph", "blocking"])
def test_the_replay_of_a_recording_has_correct_results(mode: tuple[str, ...], tmp_path: Path) -> None:
    record(tmp_path, REDUCTIONS)
    done = replay(tmp_path, "recording", "--check", "--repeat", "2", *mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Checked: all" in done.stdout


def test_threads_of_a_job_that_share_a_stream_share_one_in_its_replay(tmp_path: Path) -> None:
    record(tmp_path, FORWARD_AND_BACKWARD)
    done = replay(tmp_path, "recording", "--check", "--timeout", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Checked: all" in done.stdout
    assert "GPU stream" not in done.stdout
    # A graph needs one thread.
    done = replay(tmp_path, "recording", "--graph", "--timeout", "20")
    assert done.returncode == 0, done.stdout + done.stderr


def test_threads_that_call_in_another_order_on_each_rank_have_streams_of_their_own(tmp_path: Path) -> None:
    record(tmp_path, TWO_STREAMS)
    done = replay(tmp_path, "recording", "--check", "--timeout", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Checked: all" in done.stdout
    assert "calls of each thread use a GPU stream of their own" in done.stdout


def test_the_probe_reports_a_slow_link(tmp_path: Path) -> None:
    record(tmp_path, REDUCTIONS, 4)
    slow = {"STAND_IN_NCCL_GBPS": "0.2", "STAND_IN_SLOW_LINKS": "1-3=5"}
    done = crossrank(tmp_path, "probe", "recording", **slow)
    assert done.returncode == 1, done.stdout + done.stderr
    (ratio,) = re.findall(r"^Slow link: rank 3 \(.+\) with rank 1 \(.+\), ([\d.]+) x pairs like it", done.stdout, re.M)
    assert 4 < float(ratio) < 6
    healthy = crossrank(tmp_path, "probe", "recording", STAND_IN_NCCL_GBPS="0.2")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
