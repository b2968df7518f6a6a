"""Scripts as users start them: with python, or with torchrun on a free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

ONE_RANK = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import crossrank
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

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
    command: Sequence[str | Path], folder: Path, seconds: float = 60, /, **variables: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    done.stdout, done.stderr = map(_GLOO_CONNECTS.sub, ("", ""), (done.stdout, done.stderr))
    return done


def python(folder: Path, source: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of one rank to its end."""
    return run(
        [sys.executable, write_script(folder, ONE_RANK + textwrap.dedent(source)), *arguments], folder, **variables
    )


def start(folder: Path, source: str, name: str = "train.py", **variables: str) -> subprocess.Popen[str]:
    """Start a script and leave it running; it is killed with the end of the test."""
    process = subprocess.Popen(
        [sys.executable, str(write_script(folder, source, name))],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


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
