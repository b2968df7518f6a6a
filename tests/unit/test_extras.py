"""Training loads what the recorder needs and no more; a command names the extra that it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = ("fsspec", "google.protobuf", "jinja2", "numpy", "plotly", "polars", "rich")
CLUSTER = ("dask", "distributed")

RECORDING = """
import sys, torch, torch.distributed as dist
there = set(sys.modules)
import crossrank
assert crossrank.enable(directory=sys.argv[1], window="0:1").active
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
crossrank.disable()
crossrank.enable(directory=sys.argv[1])
print(*sorted(set(sys.modules) - there))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def without(modules: tuple[str, ...], program: str) -> str:
    """`program` in an interpreter that has none of these modules."""
    return f"import sys\nsys.modules.update(dict.fromkeys({modules}))\n{program}"


def test_recording_does_not_load_requirements_of_the_tools(tmp_path: Path) -> None:
    loaded = run("-c", RECORDING, str(tmp_path)).stdout.split()
    assert "orjson" in loaded
    assert [name for name in loaded if name.startswith((*TOOLS, *CLUSTER, "google", "crossrank.tools"))] == []


def test_recording_works_with_only_its_own_requirements(tmp_path: Path) -> None:
    lacking = tuple(name for name in (*TOOLS, *CLUSTER) if name != "numpy")  # torch itself looks for numpy
    result = run("-c", without(lacking, RECORDING), str(tmp_path))
    assert result.returncode == 0
    assert "crossrank" not in result.stderr


def test_load_reports_the_missing_extra() -> None:
    result = run("-c", without(("polars",), "import crossrank; crossrank.load('x')"))
    assert result.stderr.splitlines()[-1] == "ImportError: polars is not installed; run: pip install 'crossrank[tools]'"


@pytest.mark.parametrize(
    ("words", "lacking", "line"),
    [
        (("inspect",), TOOLS, "fsspec is not installed; run: pip install 'crossrank[tools]'"),
        (("bandwidth",), TOOLS, "polars is not installed; run: pip install 'crossrank[tools]'"),
        (("check",), ("google.protobuf",), "protobuf is not installed; run: pip install 'crossrank[tools]'"),
    ],
)
def test_a_command_reports_the_missing_extra(
    words: tuple[str, ...], lacking: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    program = without(lacking, "from crossrank.tools.cli import main\nsys.exit(main(sys.argv[1:]))")
    result = run("-c", program, *words, str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"crossrank: {line}\n")
