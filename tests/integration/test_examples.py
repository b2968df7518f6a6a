"""The examples for Nsight Systems start what they say; a script that notes its options stands in for nsys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.traces.nsight.exports import write_exports

pytestmark = pytest.mark.touches("tools")

EXAMPLES = Path(__file__).parents[2] / "examples" / "nsys"

# Runs the command after its own options, as `nsys profile` does, and writes the options where the report would be; what
# it "exports" was made beforehand.
NSYS = r"""#!/usr/bin/env bash
if [[ $1 == export ]]; then  # … --output FILE REPORT
  cp "$EXPORTS/$(basename "${@: -1}" .nsys-rep).sqlite" "${@: -2:1}"
  exit
fi
shift
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
for option in "${options[@]}"; do
  [[ $option == --output=* ]] && report=${option#--output=}
done
report=${report//'%q{RANK}'/$RANK}
printf '%s\n' "${options[@]}" > "$report.nsys-rep"
exec "$@"
"""
SCRIPT = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(4):
    dist.all_reduce(torch.ones(4))
assert sys.argv[1:] == ["--name", "two words"], sys.argv
print("trained")
"""


@pytest.mark.parametrize("example", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_example_is_valid_for_the_shell(example: Path) -> None:
    assert subprocess.run(["bash", "-n", str(example)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("gpu", "capture"),
    [
        (True, {"--trace=cuda,nvtx", "--capture-range=cudaProfilerApi"}),
        (False, {"--trace=nvtx", "--capture-range=nvtx", "--nvtx-capture=window@crossrank"}),
    ],
    ids=["with a GPU", "without a GPU"],
)
def test_each_rank_has_one_report_under_torchrun(tmp_path: Path, gpu: bool, capture: set[str]) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, source in (("nsys", NSYS), ("nvidia-smi", f"#!/bin/sh\nexit {int(not gpu)}\n")):
        (programs / name).write_text(source)
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    exports = tmp_path / "exports"
    exports.mkdir()
    write_exports(exports)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {
        "PATH": path,
        "NPROC": "2",
        "TORCHRUN_ARGS": "--standalone",
        "OMP_NUM_THREADS": "1",
        "EXPORTS": str(exports),
    }
    done = subprocess.run(
        ["bash", str(EXAMPLES / "per_rank.sh"), "train.py", "--name", "two words"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.count("trained")) == (0, 2), done.stderr
    assert ("launched inside crossrank's marker" in done.stdout) == gpu
    for name in ("timeline.pftrace", "report.html"):
        assert (tmp_path / "nsys-reports" / name).stat().st_size > 500
    for rank in (0, 1):
        options = (tmp_path / "nsys-reports" / f"rank_{rank}.nsys-rep").read_text().split("\n")
        assert {*capture, "--capture-range-end=stop", "--kill=none"} <= set(options)
        assert (tmp_path / "crossrank-recording" / f"rank-{rank}.comms.jsonl.zst").exists()
