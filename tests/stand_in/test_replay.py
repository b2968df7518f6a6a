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


def test_the_probe_reports_a_slow_link(tmp_path: Path) -> None:
    record(tmp_path, REDUCTIONS, 4)
    slow = {"STAND_IN_NCCL_GBPS": "0.2", "STAND_IN_SLOW_LINKS": "1-3=5"}
    done = crossrank(tmp_path, "probe", "recording", **slow)
    assert done.returncode == 1, done.stdout + done.stderr
    (ratio,) = re.findall(r"^Slow link: rank 3 \(.+\) with rank 1 \(.+\), ([\d.]+) x pairs like it", done.stdout, re.M)
    assert 4 < float(ratio) < 6
    healthy = crossrank(tmp_path, "probe", "recording", STAND_IN_NCCL_GBPS="0.2")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
