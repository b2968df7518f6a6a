"""Starts gloo jobs in milliseconds: an agent, itself a fork of a process that has imported torch, forks the ranks.

The agent does what torchrun's does: when a rank fails it terminates the others, and a signal to the agent reaches its
ranks. Each rank is a process that ends as the interpreter ends, with its own traceback, exit code and atexit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crossrank.comm import CommRecord
from crossrank.recording import CommsFile
from crossrank.tools.traces.flight.dump import read_flight_dump
from tests.integration import jobs
from tests.integration.fork_server import ForkedProcess

GO_ON = "go on"
_STATE = "job.json"
_PATIENCE = 6.0
"""Seconds that terminated ranks have to end; torchrun gives 30."""

RankMain = Callable[[str, Path, int], None]
"""What a rank runs: (name of the job, its folder, the rank)."""


def run_job(run_rank: RankMain, name: str, folder: Path, ranks: int, delay: float) -> None:
    """Run a job in processes that are forked from this one, which becomes its agent."""
    run_rank(name, folder, _run_agent(folder, ranks, delay))


def _run_agent(folder: Path, ranks: int, delay: float) -> int:
    """Fork the ranks and look after them. Returns in the ranks only, with the rank."""
    os.setsid()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY, 0o644)
            for stream in (1, 2):
                os.dup2(log, stream)
            return rank
        pids.append(pid)
    try:
        _look_after(folder, pids, delay)
    finally:
        os._exit(0)


def _look_after(folder: Path, pids: list[int], delay: float) -> None:
    codes: dict[int, int | None] = dict.fromkeys(pids)
    never = float("inf")
    terminate_at = kill_at = never

    def terminate(*_: object) -> None:
        nonlocal terminate_at
        terminate_at = time.monotonic()

    signal.signal(signal.SIGTERM, terminate)
    _publish(folder, codes)
    while None in codes.values():
        ended = _reap()
        if ended is not None:
            codes[ended[0]] = ended[1]
            _publish(folder, codes)
            if ended[1] != 0:
                terminate_at = min(terminate_at, time.monotonic() + delay)
            continue
        alive = [pid for pid, code in codes.items() if code is None]
        if time.monotonic() >= terminate_at and kill_at == never:
            kill_at = time.monotonic() + _PATIENCE
            _send(signal.SIGTERM, alive)
        if time.monotonic() >= kill_at or (kill_at < never and all(map(_is_stopped, alive))):
            _send(signal.SIGKILL, alive)
        time.sleep(0.02)


def _reap() -> tuple[int, int] | None:
    """A child that has ended and its exit code; None where none has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP: it would not see that it is to end."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _publish(folder: Path, codes: dict[int, int | None]) -> None:
    part = folder / f".{_STATE}"
    part.write_text(json.dumps({"agent": os.getpid(), "codes": list(codes.values())}))
    part.replace(folder / _STATE)


@dataclass(frozen=True)
class Job:
    """A job that was started."""

    folder: Path

    @property
    def recording(self) -> Path:
        return self.folder / "recording"

    def codes(self) -> list[int | None]:
        """The exit code of every rank, None of those that run."""
        codes: list[int | None] = json.loads((self.folder / _STATE).read_text())["codes"]
        return codes

    def is_over(self) -> bool:
        return None not in self.codes()

    def dump(self, rank: int) -> Path:
        return self.recording / f"rank-{rank}.flight.json.zst"

    def has_noticed_a_hang(self, rank: int) -> bool:
        """Whether the rank has written down where it hangs, and not yet ended."""
        if not self.dump(rank).exists():
            return False
        moment = read_flight_dump(str(self.dump(rank))).moment
        return moment is not None and moment.reason == "hang"

    def go_on(self) -> None:
        """End what `wait_for_the_test` waits for."""
        (self.folder / GO_ON).touch()

    def terminate(self) -> None:
        """Send SIGTERM to the agent, as `scancel` and Ctrl-C of torchrun do."""
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self._agent(), signal.SIGTERM)

    def kill(self) -> None:
        """End whatever is left of the job."""
        with suppress(ProcessLookupError):
            os.killpg(self._agent(), signal.SIGKILL)

    def wait_until_over(self) -> None:
        wait_until(self.is_over, "the job does not end")

    def recorded(self, rank: int) -> list[CommRecord]:
        """The calls in the rank's comms file so far."""
        path = self.recording / f"rank-{rank}.comms.jsonl.zst"
        return list(CommsFile(str(path)).records()) if path.exists() else []

    def logs(self) -> list[str]:
        """What every rank has printed."""
        return [log.read_text() for log in sorted(self.folder.glob("rank-*.log"))]

    def _agent(self) -> int:
        return int(json.loads((self.folder / _STATE).read_text())["agent"])


def start(module: str, name: str, folder: Path, ranks: int, *, delay: float = 0.0) -> Job:
    """Start a job of a module that calls `run_job` when it is run.

    `delay` is how many seconds after the failure of a rank the others are terminated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs.STARTED.append(
        ForkedProcess(
            [sys.executable, "-m", module, name, str(folder), str(ranks), str(delay)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            text=True,
        )
    )
    wait_until((folder / _STATE).exists, f"the job {name} does not start")
    return Job(folder)


def wait_until(condition: Callable[[], bool], otherwise: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, otherwise
        time.sleep(0.05)
