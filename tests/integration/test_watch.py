"""`crossrank watch` on a job that runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.integration import jobs

pytestmark = pytest.mark.touches("tools")

JOB = """
import os, time
import torch, torch.distributed as dist
import crossrank
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
crossrank.enable(directory="recording", timing=True)
while not os.path.exists("stop"):
    time.sleep(0.02 * rank)
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.02 * rank)
    dist.barrier()
    crossrank.step()
"""
RECORDING = "crossrank-recording"
WATCH = ["-m", "crossrank", "watch"]


def look(folder: Path) -> tuple[int, dict[str, Any]]:
    result = jobs.fork([*WATCH, "recording", "--once", "--json"], folder)
    assert result.stdout, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return result.returncode, found


def until(folder: Path, holds: Callable[[dict[str, Any]], bool]) -> tuple[int, dict[str, Any]]:
    """The first look of which something holds."""
    last = time.monotonic() + 60
    while True:
        code, found = look(folder) if (folder / "recording").is_dir() else (2, {})
        if found and holds(found):
            return code, found
        assert time.monotonic() < last, found
        time.sleep(0.2)


def test_a_job_is_shown_while_it_runs_when_a_rank_falls_silent_and_when_it_has_ended(tmp_path: Path) -> None:
    ranks = [jobs.start(tmp_path, JOB, RANK=str(rank)) for rank in (0, 1)]
    code, found = until(
        tmp_path,
        # Durations are written some time after the calls.
        lambda one: len(one["ranks"]) == 2 and (one["step"] or [0])[0] > 10 and one["groups"][0]["busbw_gb_per_s"],
    )
    assert code == 0
    (group,) = found["groups"]
    assert (group["pg"], group["size"], group["last_rank"]) == ("0", 2, 1)
    assert group["last_share"] > 0.6
    assert group["late_ms"] > 1
    assert group["busbw_gb_per_s"] > 0
    assert group["bytes"] / group["calls"] == pytest.approx(2000, rel=0.1)  # every second call is a barrier
    assert all(one["step_ms"] > 15 and one["silent_s"] < 5 and one["ended"] == "" for one in found["ranks"])
    assert found["ranks"][0]["exposed_share"] > 0.3

    ranks[1].send_signal(signal.SIGSTOP)
    code, found = until(tmp_path, lambda one: one["ranks"][1]["unheard_s"] > 5)
    assert (code, found["ranks"][0]["unheard_s"] < 5) == (1, True)

    ranks[1].send_signal(signal.SIGCONT)
    (tmp_path / "stop").touch()
    for process in ranks:
        process.communicate(timeout=60)
    _, found = look(tmp_path)
    assert {one["ended"] for one in found["ranks"]} == {"exit"}


def test_metrics_are_served_here_alone_and_written_to_a_file(tmp_path: Path) -> None:
    job = jobs.ONE_RANK + "crossrank.enable()\nfor _ in range(3):\n    dist.all_reduce(torch.ones(4))\n"
    assert jobs.fork([jobs.write_script(tmp_path, job)], tmp_path).returncode == 0
    process = subprocess.Popen(
        [
            sys.executable,
            *WATCH,
            RECORDING,
            "--metrics",
            "0",
            "--textfile",
            "metrics.prom",
            "--interval",
            "0.2",
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    jobs.STARTED.append(process)
    assert process.stderr is not None
    address = process.stderr.readline().split()[-1]
    assert address.startswith("http://127.0.0.1:")
    jobs.wait_for_file(tmp_path / "metrics.prom")
    with urlopen(address, timeout=10) as answer:
        served = answer.read().decode()
    for text in (served, (tmp_path / "metrics.prom").read_text()):
        assert 'crossrank_calls_total{description="default_pg",group="0"} 3.0' in text
        assert "crossrank_ranks 1.0" in text
        assert "crossrank_hang 0.0" in text
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["nowhere"],
            "crossrank: nowhere: is not a folder; give the folder TRACING_DIR on a local or shared file system",
        ),
        (["."], "crossrank: .: no rank has started to record here; give the folder TRACING_DIR"),
        ([".", "--metrics", "99999"], "'99999' is not a port from 0 to 65535"),
        ([".", "--interval", "0"], "'0' is not a number of seconds from 0.1 to 3600"),
    ],
)
def test_what_cannot_be_watched_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = jobs.fork([*WATCH, *arguments, "--once"], tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
