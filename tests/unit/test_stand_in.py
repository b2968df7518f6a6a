"""The stand-in for CUDA says in one line why it cannot be built; that it works, its own tests show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "stand_in" / "with_gpus"


def with_gpus(*words: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [PROGRAM, *words], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_reported_with_the_install_command() -> None:
    done = with_gpus("2", "true")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"stand-in: torch {torch.__version__} in ")
    assert "is a build without CUDA: pip install 'torch===2.13.0'" in line


def test_a_missing_number_of_gpus_prints_the_usage() -> None:
    done = with_gpus("python", "train.py")
    assert (done.returncode, done.stderr) == (2, "usage: with_gpus N COMMAND…\n")
