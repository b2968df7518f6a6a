"""What /proc says of the process of another rank on this node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from crossrank.instrument.hang import neighbours
from crossrank.machine import pid_namespace
from crossrank.recording import SCHEMA

PROGRAM = """
import sys
file = open(sys.argv[1])
print("ready", flush=True)
while sys.argv[2] == "spins":
    pass
input()
"""


def write_header(path: Path, pid: int, namespace: int | None) -> None:
    header = {"schema": SCHEMA, "rank": 1, "world_size": 2, "host": "h", "node": "n", "pid": pid}
    path.write_bytes(orjson.dumps({"header": header | {"pid_namespace": namespace}}) + b"\n")


@pytest.fixture(params=["waits"])
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a comms file open, and this file."""
    comms = tmp_path / "rank-1.comms.jsonl"
    comms.touch()
    command = [sys.executable, "-c", PROGRAM, str(comms), request.param]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        write_header(comms, process.pid, pid_namespace())
        yield process, comms
        process.kill()


def wait_for_state(comms: Path, states: str) -> neighbours.Sight:
    deadline = time.monotonic() + 30
    while (seen := neighbours.see(comms)) is not None and seen.state not in states and time.monotonic() < deadline:
        pass
    assert seen is not None
    assert seen.state in states
    return seen


def test_a_process_that_is_stopped_is_seen_as_stopped(rank: tuple[subprocess.Popen[str], Path]) -> None:
    process, comms = rank
    os.kill(process.pid, signal.SIGSTOP)
    wait_for_state(comms, "T")


def test_a_process_that_was_killed_is_seen_as_ended(rank: tuple[subprocess.Popen[str], Path]) -> None:
    process, comms = rank
    process.kill()
    wait_for_state(comms, "X")


@pytest.mark.parametrize("rank", ["spins"], indirect=True)
def test_a_process_that_computes_uses_cpu_time(rank: tuple[subprocess.Popen[str], Path]) -> None:
    _, comms = rank
    first, deadline = wait_for_state(comms, "RS"), time.monotonic() + 30
    while (seen := neighbours.compare(1, 0, first, wait_for_state(comms, "RS")))["cpu_ns"] == 0:
        assert time.monotonic() < deadline
    assert (seen["rank"], seen["by"], seen["frozen"]) == (1, 0, False)


def test_another_process_of_the_same_number_is_not_taken_for_the_rank(tmp_path: Path) -> None:
    comms = tmp_path / "rank-1.comms.jsonl"
    write_header(comms, os.getpid(), pid_namespace())  # this process does not have the file open
    wait_for_state(comms, "X")


def test_a_process_in_another_namespace_is_not_visible(tmp_path: Path) -> None:
    comms = tmp_path / "rank-1.comms.jsonl"
    write_header(comms, os.getpid(), 1)
    assert neighbours.see(comms) is None
    assert neighbours.see(tmp_path / "none") is None
