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
from tests.integration.jobs import Scripts

pytestmark = pytest.mark.touches("tools")

JOB = """
crossrank.enable(directory="recording", timing=True)
while not os.path.exists("stop"):
    time.sleep(0.02 * rank)
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.02 * rank)
    dist.barrier()
    crossrank.step()
"""
WATCH = ["-m", "crossrank", "watch"]


def look(folder: Path) -> tuple[int, dict[str, Any]]:
    result = jobs.fork([*WATCH, "recording", "--once", "--json"], folder)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def until(folder: Path, holds: Callable[[dict[str, Any]], bool]) -> tuple[int, dict[str, Any]]:
    """The first look of which something holds."""
    last = time.monotonic() + 60
    while True:
        code, found = look(folder) if (folder / "recording").is_dir() else (2, {})
        if found and holds(found):
            return code, found
        assert time.monotonic() < last, found
        time.sleep(0.2)


def test_watch_shows_a_running_job_a_silent_rank_and_the_end(scripts: Scripts) -> None:
    ranks = scripts.start_two(JOB)
    code, found = until(
        scripts.folder,
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
    assert all(one["step_ms"] > 15 and one["silent_s"] < 5 and one["ended"] is None for one in found["ranks"])
    assert found["ranks"][0]["exposed_share"] > 0.3

    ranks[1].send_signal(signal.SIGSTOP)
    code, found = until(scripts.folder, lambda one: one["ranks"][1]["unheard_s"] > 5)
    assert (code, found["ranks"][0]["unheard_s"] < 5) == (1, True)

    ranks[1].send_signal(signal.SIGCONT)
    (scripts.folder / "stop").touch()
    for process in ranks:
        process.communicate(timeout=60)
    _, found = look(scripts.folder)
    assert {one["ended"] for one in found["ranks"]} == {"exit"}


def test_metrics_are_served_locally_and_written_to_a_file(scripts: Scripts, tmp_path: Path) -> None:
    scripts.python("crossrank.enable()\nfor _ in range(3):\n    dist.all_reduce(torch.ones(4))\n")
    words = [
        sys.executable,
        *WATCH,
        jobs.RECORDING,
        "--metrics",
        "0",
        "--textfile",
        "metrics.prom",
        "--interval",
        "0.2",
    ]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in its background with SIGINT ignored, and so would this process be.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    jobs.STARTED.append(process)
    assert process.stderr is not None
    address = process.stderr.readline().split()[-1]
    assert address.startswith("http://127.0.0.1:")
    jobs.wait_for_file(tmp_path / "metrics.prom", 60)
    with urlopen(address, timeout=60) as answer:
        served = answer.read().decode()
    for text in (served, (tmp_path / "metrics.prom").read_text()):
        assert 'crossrank_calls_total{description="default_pg",group="0"} 3.0' in text
        assert "crossrank_ranks 1.0" in text
        assert "crossrank_hang 0.0" in text
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["nowhere"],
            "crossrank: nowhere: is not a folder; give a recording (the folder TRACING_DIR) on a local or shared file "
            "system",
        ),
        (["."], "crossrank: .: no rank has started to record here; give a recording (the folder TRACING_DIR)"),
        ([".", "--metrics", "99999"], "'99999' is not a port from 0 to 65535"),
        ([".", "--interval", "0"], "'0' is not a number of seconds from 0.1 to 3600"),
    ],
)
def test_unusable_watch_input_prints_one_line(arguments: list[str], said: str, scripts: Scripts) -> None:
    assert said in scripts(2).crossrank("watch", *arguments, "--once").stderr
