"""Jobs on the one machine: started under torchrun, ended at their limit, all of them within one deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEVICE = os.environ.get("CROSSRANK_GPU_TESTS", "")
"""`cuda` or `cpu`; empty where these tests were not asked for."""
CUDA = DEVICE == "cuda"
STAND_IN = "STAND_IN_GPUS" in os.environ
"""The GPU is a stand-in, which computes nothing: tests/stand_in."""
_SPEEDY = CUDA and not STAND_IN
_DEADLINE = time.monotonic() + float(os.environ.get("CROSSRANK_GPU_SECONDS", "560" if _SPEEDY else "1800"))
_SLOWER = 1.0 if _SPEEDY else 2.5
"""A machine without a GPU has few cores."""
LAST_OUTPUT = 6000


def seconds_left() -> float:
    return _DEADLINE - time.monotonic()


@dataclass(frozen=True)
class Way:
    """How ranks share the machine."""

    name: str
    ranks: int = 2
    own_host: bool = False
    """Every rank is a host of its own to NCCL."""
    env: Mapping[str, str] = field(default_factory=dict)


ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
    "NCCL_CUMEM_HOST_ENABLE": "0",
}
"""For ranks that share one GPU, each of which is a host of its own to NCCL (NCCL_HOSTID)."""
GLOO = Way("gloo")
OWN_HOSTS = Way("own hosts", own_host=True, env=ONE_GPU)
AS_THEY_ARE = Way("as they are", env={"NCCL_DEBUG": "WARN"})
"""NCCL refuses two ranks on one GPU."""
ONE_RANK = Way("one rank", ranks=1, env={"NCCL_DEBUG": "WARN"} if CUDA else {})


@dataclass(frozen=True)
class Done:
    """What a program printed, and how it ended: 124 where it ran past its limit."""

    code: int
    text: str

    @property
    def last(self) -> str:
        return f"exit code {self.code}: …{self.text[-LAST_OUTPUT:]}"


def run(words: Sequence[str | Path], folder: Path, seconds: float, **variables: str) -> Done:
    """A program to its end; past its limit it and all that it started are killed."""
    with started(words, folder, **variables) as process:
        until = max(3.0, min(seconds * _SLOWER, seconds_left()))
        with suppress(subprocess.TimeoutExpired):
            process.wait(until)
        code = process.poll()
    return Done(124 if code is None else code, (folder / "output.txt").read_text(errors="replace"))


@contextmanager
def started(words: Sequence[str | Path], folder: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program while it runs, in a process group of its own, which is killed at the end; it prints into
    `output.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            list(map(str, words)), stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(4)


def torchrun(words: Sequence[str | Path], way: Way) -> list[str]:
    """The command that starts the ranks of a program; `env` of the way has to be among its variables."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(way.ranks)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    # NCCL reads the variable when it is initialised, and only a shell knows the rank before.
    shell = 'export NCCL_HOSTID=crossrank-$RANK; exec "$@"' if way.own_host else 'exec "$@"'
    return [*launcher, "--no-python", "bash", "-c", shell, "_", sys.executable, *map(str, words)]


def job(name: str, folder: Path) -> list[str | Path]:
    """The words of one of the jobs, `tests/gpu/jobs.py`."""
    return [Path(__file__).with_name("jobs.py"), name, folder]


def run_job(name: str, folder: Path, way: Way, seconds: float, *, fails: bool = False, **variables: str) -> Done:
    """A job to its end in `folder/job`, recorded in `folder/recording`. It has to end well, unless it `fails`."""
    folder = folder / "job"
    done = run(torchrun(job(name, folder), way), folder, seconds, **of_job(way, folder) | variables)
    assert done.code == 0 or fails, done.last
    return done


def of_job(way: Way, folder: Path) -> dict[str, str]:
    """The variables of a job, which records all in the folder beside its own."""
    recording = {"TRACING": "ALL", "TRACING_DIR": str(folder.with_name("recording"))}
    return {"JOB_DEVICE": DEVICE, "OMP_NUM_THREADS": "2", **way.env, **recording}


def crossrank(folder: Path, *words: str | Path, code: int | None = 0, seconds: float = 60) -> Done:
    """A command, which sees no GPU, and ends with a code; None for whatever."""
    done = run([sys.executable, "-m", "crossrank", *words], folder, seconds, CUDA_VISIBLE_DEVICES="")
    assert code in (None, done.code), done.last
    return done


def facts(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """What the ranks of a job said, which ran in `folder/job`."""
    paths = sorted((folder / "job").glob(f"{name}-*.json"))
    return {int(path.stem.rsplit("-", 1)[1]): json.loads(path.read_text()) for path in paths}
