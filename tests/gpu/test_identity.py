"""Which GPU it is, and Nsight Systems."""

from __future__ import annotations

import glob
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import machine
from tests.gpu.machine import ONE_RANK


@pytest.mark.needs(seconds=15, cuda=True, real=True)
def test_the_recorded_gpu_matches_nvidia_smi(tmp_path: Path, note: Any) -> None:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    (uuid, *_) = re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)
    done = machine.run_job("identity", tmp_path, ONE_RANK, 60, fails=True, CUDA_VISIBLE_DEVICES=uuid)
    found = machine.facts(tmp_path, "identity").get(0)
    assert found is not None, done.last
    note(**found)
    assert found["gpu"]["uuid"] == uuid
    assert all(found["gpu"][name] not in (None, "") for name in ("index", "name", "pci_bus_id", "driver"))
    assert found["counters"]


_PLACES = ("/opt/nvidia/nsight-systems/*/target-linux-x64/nsys", "/opt/nvidia/nsight-*/*/host/target-linux-x64/nsys")


@pytest.mark.needs(seconds=30, cuda=True)
def test_a_window_drives_a_capture_of_nsight_systems(tmp_path: Path) -> None:
    found = [shutil.which("nsys"), *(path for place in _PLACES for path in sorted(glob.glob(place)))]
    nsys = next(filter(None, found), None)
    if nsys is None:
        pytest.skip("no Nsight Systems")
    words = [nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", f"--output={tmp_path}/one"]
    words += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--kill=none", "--wait=all"]
    job = tmp_path / "job"
    inner = machine.torchrun(machine.job("identity", job), ONE_RANK)
    done = machine.run([*words, *inner], tmp_path, 90, **machine.of_job(ONE_RANK, job), TRACING_NSYS="1")
    assert done.code == 0, done.last
    written = [path for path in tmp_path.iterdir() if path.suffix in (".nsys-rep", ".qdstrm", ".qdrep")]
    assert written, done.last
    if written[0].suffix == ".nsys-rep":
        export = machine.run(
            [nsys, "export", "--type", "sqlite", "-o", "one.sqlite", written[0]], tmp_path / "export", 60
        )
        assert export.code == 0, export.last
        read = machine.crossrank(
            tmp_path / "read", "bandwidth", tmp_path / "recording", tmp_path / "export" / "one.sqlite"
        )
        assert "launched inside crossrank's marker" in read.text
