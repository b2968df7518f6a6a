"""A rank stays away: who is accused while the job hangs, and how its processes end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import machine
from tests.gpu.machine import CUDA, Way
from tests.gpu.raw_kineto import unpacked
from tests.gpu.results import keep_recording

_ACCUSED = re.compile(r"^culprit +rank 1 on ", re.MULTILINE)


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it has come true before the time is over."""
    until = time.monotonic() + min(seconds, machine.seconds_left())
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def dumps(recording: Path) -> list[Path]:
    return sorted(recording.glob("rank-*.flight.json.zst"))


@contextmanager
def started(job: str, folder: Path, way: Way, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job while it runs, recorded in `folder/recording`."""
    words = machine.torchrun(machine.job(job, folder / "job"), way)
    with machine.started(words, folder / "job", **machine.of_job(way, folder / "job"), **variables) as process:
        yield process


def snapshot_in_a_hang(folder: Path, process: subprocess.Popen[bytes], fixture: str) -> tuple[Path, str]:
    """A copy of the recording once both ranks have noticed the hang, which is kept, and its diagnosis."""
    recording = folder / "recording"
    assert wait_for(lambda: len(dumps(recording)) == 2 or process.poll() is not None, 60)
    snapshot = Path(shutil.copytree(recording, folder / "snapshot"))
    keep_recording(fixture, snapshot)
    found = machine.crossrank(folder / "diagnosis", "diagnose", snapshot, code=1)
    assert _ACCUSED.search(found.text), found.last
    return snapshot, found.text


@pytest.mark.needs(seconds=60, ranks=2)
def test_the_missing_rank_is_reported_while_the_job_hangs(way: Way, tmp_path: Path, note: Any) -> None:
    theirs = tmp_path / "torch" / "torch_trace_"
    theirs.parent.mkdir()
    with started(
        "hang",
        tmp_path,
        way,
        JOB_TIMEOUT="25" if CUDA else "100",
        TORCH_NCCL_DUMP_ON_TIMEOUT="1",
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="3000",  # after four times that the watchdog ends the job
        TORCH_FR_BUFFER_SIZE="2000",
        TORCH_FR_DUMP_TEMP_FILE=str(theirs),
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE=str(theirs),
    ) as process:
        began = time.monotonic()
        snapshot, _ = snapshot_in_a_hang(tmp_path, process, "hang")
        note(seconds_to_the_diagnosis=round(time.monotonic() - began, 1))
        if CUDA:
            assert_nccls(dumps(snapshot)[0])
            assert wait_for(lambda: process.poll() is not None, 60), "NCCL's watchdog did not end the job"
    if CUDA:
        written = sorted((tmp_path / "torch").glob("torch_trace_*"))
        keep_recording("hang-torch", tmp_path / "torch")
        words = ["diagnose", *map(str, written), "--world-size", "2", "--allow-missing"]
        assert "missing_rank" in machine.crossrank(tmp_path / "theirs", *words, code=1).text
    inspected = machine.crossrank(tmp_path / "inspect", "inspect", tmp_path / "recording", code=None)
    assert inspected.code in (0, 1)


def assert_nccls(dump: Path) -> None:
    content = json.loads(unpacked(dump))
    assert content["entries"][-1]["state"] in ("scheduled", "started")
    assert content["pg_status"]


@pytest.mark.needs(seconds=40, ranks=2)
def test_a_gloo_hang_in_an_nccl_job_is_found(way: Way, tmp_path: Path) -> None:
    with started("hang_beside_nccl", tmp_path, way) as process:
        assert "checkpoint" in snapshot_in_a_hang(tmp_path, process, "hang-beside")[1]


@pytest.mark.needs(seconds=60, ranks=2, cuda=True)
def test_sigterm_ends_a_rank_that_is_stuck_on_its_gpu_in_a_window(way: Way, tmp_path: Path, note: Any) -> None:
    with started("stuck_in_window", tmp_path, way):
        assert wait_for(lambda: 0 in machine.facts(tmp_path, "stuck"), 60)
        pid = machine.facts(tmp_path, "stuck")[0]["pid"]
        time.sleep(2)  # it has launched the call by then, and nothing says when it stands still
        os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        assert wait_for(lambda: has_ended(pid), 12)
        note(seconds_to_the_end=round(time.monotonic() - began, 1))
    assert (tmp_path / "recording" / "rank-0.flight.json.zst").exists()


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
