"""Scripts as users start them, with python or torchrun, or as forks, which start in milliseconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.fork_server import ForkedProcess
from tests.integration.traces import Recorded, load

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

ONE_RANK = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import crossrank
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

TWO_RANKS = """
import datetime, os, signal, sys, threading, time
import torch, torch.distributed as dist
import crossrank
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
"""

RECORDING = "crossrank-recording"
"""Where scripts record that are told no folder."""

_GLOO_CONNECTS = re.compile(r"^\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)
"""What gloo of torch 2.6 to 2.8 prints, in the middle of what scripts print; that of several ranks may be mixed."""

STARTED: list[subprocess.Popen[str]] = []
"""Processes of the test that runs."""


def write_script(folder: Path, source: str, name: str = "train.py") -> Path:
    script = folder / name
    script.write_text(textwrap.dedent(source))
    return script


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TRACING": "ALL"} | variables


def run(
    command: Sequence[str | Path], folder: Path, seconds: float = 150, /, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a new process."""
    return _end(_begin(subprocess.Popen, command, folder, variables), seconds)


def fork(
    command: Sequence[str | Path], folder: Path, seconds: float = 150, /, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m module`, to its end in a process that has imported torch already."""
    return _end(_begin(ForkedProcess, [sys.executable, *command], folder, variables), seconds)


def python(folder: Path, source: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of one rank to its end."""
    return fork([write_script(folder, ONE_RANK + textwrap.dedent(source)), *arguments], folder, **variables)


def start(folder: Path, source: str, name: str = "train.py", **variables: str) -> subprocess.Popen[str]:
    """Start a script and leave it running; it is killed with the end of the test."""
    return _begin(ForkedProcess, [sys.executable, write_script(folder, source, name)], folder, variables)


@dataclass(frozen=True)
class EndedRanks:
    """What became of the ranks of a job."""

    codes: list[int]
    stdout: str
    """What they printed, one rank after the other."""
    stderr: str

    @property
    def returncode(self) -> int:
        """That of torchrun."""
        return int(any(self.codes))


@dataclass(frozen=True)
class Scripts:
    """Runs scripts in the folder of a test, and reads what they recorded."""

    folder: Path
    code: int | None = 0
    """What each rank ends with; None for whatever."""
    variables: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, code: int | None = 0, /, folder: str = "", **variables: str) -> Scripts:
        """As this one, but with another exit code, with variables, or in a folder below."""
        below = self.folder / folder
        below.mkdir(exist_ok=True)
        return Scripts(below, code, variables)

    def python(self, source: str) -> subprocess.CompletedProcess[str]:
        """Run a script of one rank, that begins with `ONE_RANK`, to its end."""
        return self._ended(python(self.folder, source, **self.variables))

    def run(self, source: str) -> subprocess.CompletedProcess[str]:
        """Run a script as it is to its end."""
        return self._ended(fork([write_script(self.folder, source)], self.folder, **self.variables))

    def ranks(self, source: str, count: int = 2) -> EndedRanks:
        """Run a script as it is on ranks."""
        ended = ranks(self.folder, write_script(self.folder, source), count, **self.variables)
        assert self.code is None or ended.codes == [self.code] * count, (ended.codes, ended.stderr)
        return ended

    def start(self, source: str) -> subprocess.Popen[str]:
        """Start a script of one rank, that begins with `ONE_RANK`; it has printed "ready" by then."""
        process = start(self.folder, ONE_RANK + textwrap.dedent(source), **self.variables)
        wait_for_line(process, "ready")
        return process

    def start_two(self, source: str) -> list[subprocess.Popen[str]]:
        """Start two ranks of a script that begins with `TWO_RANKS`."""
        source = TWO_RANKS + textwrap.dedent(source)
        return [start(self.folder, source, RANK=str(rank), **self.variables) for rank in (0, 1)]

    def crossrank(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        return self._ended(fork(["-m", "crossrank", *words], self.folder, **self.variables))

    def recorded(self, rank: int = 0, folder: str = RECORDING) -> Recorded:
        return Recorded(self.folder / folder, rank)

    def load(self, kind: str, folder: str = RECORDING) -> Any:
        """A file of rank 0 that holds JSON."""
        return load(self.folder / folder, kind)

    def _ended(self, done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
        assert self.code in (None, done.returncode), (done.returncode, done.stderr)
        return done


def ranks(folder: Path, script: Path | str, ranks: int = 2, /, *arguments: str, **variables: str) -> EndedRanks:
    """Run a script on ranks that meet as under torchrun. As there, when one fails the others are terminated."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    processes = [
        _begin(
            ForkedProcess,
            [sys.executable, script, *arguments],
            folder,
            shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables,
        )
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as pool:
        ended = [pool.submit(_end, process, 120) for process in processes]
        for one in as_completed(ended):
            if one.result().returncode:
                for process in processes:
                    process.terminate()
        done = [one.result() for one in ended]
    return EndedRanks(
        [one.returncode for one in done], "".join(one.stdout for one in done), "".join(one.stderr for one in done)
    )


def _begin(
    kind: type[subprocess.Popen[str]], command: Sequence[str | Path], folder: Path, variables: dict[str, str]
) -> subprocess.Popen[str]:
    process = kind(
        [str(word) for word in command],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def _end(process: subprocess.Popen[str], seconds: float) -> subprocess.CompletedProcess[str]:
    printed, errors = process.communicate(timeout=seconds)
    printed, errors = map(_GLOO_CONNECTS.sub, ("", ""), (printed, errors))
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


def end_started() -> None:
    """Kill what the test has left running."""
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], first: str) -> list[str]:
    """The words of the first line that begins with that one."""
    assert process.stdout is not None
    for printed in process.stdout:
        words = printed.split()
        if words[:1] == [first]:
            return words
    assert process.stderr is not None
    raise AssertionError(f"the script ended without printing {first!r}:\n{process.stderr.read()}")


def wait_for_file(path: Path, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not appear"
        time.sleep(0.05)


def torchrun(
    folder: Path, script: Path, *words: str, ranks: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    return run([*_TORCHRUN, f"--nproc-per-node={ranks}", *words, script], folder, **variables)
