"""Machines on which something is scarce, slow or wrong: training continues as without a recording."""

from __future__ import annotations

import os
import re
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

from crossrank.recording import COMMS, CommsFile, file_name
from crossrank.tools.cli import main
from tests.integration import jobs

RECORDING = "crossrank-recording"
LOOP = """
def loop(calls):
    for number in range(calls):
        size = number % 50 + 1
        dist.all_reduce(torch.ones(8))
        dist.all_to_all_single(torch.empty(size), torch.ones(size), [size], [size])
        crossrank.step()

loop(20)
"""


def records(folder: Path) -> CommsFile:
    found = CommsFile(str(folder / RECORDING / file_name(COMMS, 0)))
    list(found.records())
    return found


@pytest.mark.parametrize("kernel", ["compiled", "python"])
@pytest.mark.parametrize("when", ["before enable()", "while it records"])
@pytest.mark.parametrize("megabytes", [4, 8])
def test_training_continues_with_little_memory_left(megabytes: int, when: str, kernel: str, tmp_path: Path) -> None:
    limit = f"limit_memory({megabytes} << 20)"
    source = (
        "from crossrank.machine import limit_memory"
        + LOOP
        + (limit if when == "before enable()" else "")
        + f"""
crossrank.enable(tracing="ALL", recorder={kernel!r})
loop(20)
{limit if when != "before enable()" else ""}
loop(300)
crossrank.disable()
loop(20)
print("trained")
"""
    )
    result = jobs.python(tmp_path, source)

    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert result.stderr.count("crossrank: ") <= 3, result.stderr
    if when == "before enable()":
        assert "this process can allocate less than 32 MiB more" in result.stderr


def test_a_clock_jump_of_an_hour_moves_no_call(tmp_path: Path) -> None:
    source = """
plain, plain_ns, offset = time.time, time.time_ns, 0
time.time = lambda: plain() + offset
time.time_ns = lambda: plain_ns() + offset * 10**9
crossrank.enable(tracing="ALL", window="1:2")
for offset in (0, 3600, 3600, -3600, 0, 0):
    dist.all_reduce(torch.ones(8))
    crossrank.step()
    time.sleep(0.3)
crossrank.disable()
print("trained")
"""
    result = jobs.python(tmp_path, source)

    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    calls = list(CommsFile(str(tmp_path / RECORDING / file_name(COMMS, 0))).records())
    gaps = [(after.t - before.t) / 1e9 for before, after in pairwise(calls)]
    assert len(gaps) == 5
    assert all(0.25 < gap < 5 for gap in gaps), gaps
    assert main(["diagnose", str(tmp_path / RECORDING)]) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, and its own processes have no limit")
def test_training_continues_if_no_thread_can_start(tmp_path: Path) -> None:
    source = """
import resource
import crossrank.instrument.session
dist.all_reduce(torch.ones(8))
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("no thread")
crossrank.enable(tracing="ALL", hang_seconds=0.5)
for step in range(5):
    dist.all_reduce(torch.ones(8))
    crossrank.step()
crossrank.disable()
print("trained")
"""
    with tempfile.TemporaryDirectory() as folder:  # the other user does not get into that of the test
        Path(folder).chmod(0o777)
        result = jobs.python(tmp_path, source, TRACING_DIR=folder)

        assert (result.returncode, result.stdout) == (0, "no thread\ntrained\n"), result.stderr
        comms = CommsFile(str(Path(folder, file_name(COMMS, 0))))
        assert len(list(comms.records())) == 5, result.stderr


def test_a_slow_file_system_delays_enable_by_a_second_and_loses_no_call(tmp_path: Path) -> None:
    source = """
import builtins, io
import crossrank.instrument.session

def slow(owner, name):
    original = getattr(owner, name)
    def call(*args, **kwargs):
        if any("crossrank-recording" in os.fsdecode(one) for one in args if isinstance(one, (str, os.PathLike))):
            time.sleep(0.7)
        return original(*args, **kwargs)
    setattr(owner, name, call)

for name in ("open", "replace", "rename", "fsync", "unlink", "mkdir", "link", "stat"):
    slow(os, name)
slow(builtins, "open")
slow(io, "open")
begun = time.monotonic()
crossrank.enable(tracing="ALL")
took = time.monotonic() - begun
begun = time.monotonic()
for step in range(100):
    dist.all_reduce(torch.ones(8))
    crossrank.step()
print(took, time.monotonic() - begun)
crossrank.disable()
"""
    result = jobs.python(tmp_path, source)

    assert result.returncode == 0, result.stderr
    enable, calls = map(float, result.stdout.split())
    assert 1.0 <= enable < 3.0
    assert calls < 1.0
    assert re.search(r"crossrank: \S+ takes more than 1 s to open, .*: calls are kept, but", result.stderr)
    comms = records(tmp_path)
    assert comms.end is not None
    assert (comms.end["calls"], comms.end["records"], comms.end["dropped"]) == (100, 100, 0)
    assert len(comms.steps) == 100
