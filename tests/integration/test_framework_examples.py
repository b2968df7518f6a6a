"""The examples, as their first lines say to run them: recorded as a whole, and training as it does without."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

import crossrank
from tests.integration import jobs

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Example(NamedTuple):
    """What a recording of it has to hold."""

    name: str
    command: tuple[str, ...]
    framework: str
    ranks: int
    iterations: int
    operations: set[str]
    groups: set[tuple[str, int]]
    """(description, members)"""
    result: str = "loss"
    """First word of the line that it prints."""


DDP = {"all_reduce", "broadcast", "all_gather"}
WORLD = {("default_pg", 2)}
RUN = (
    Example("with_accelerate", (*TORCHRUN, "2"), "accelerate", 2, 4, DDP | {"barrier"}, WORLD),
    Example("with_trainer", (*TORCHRUN, "2"), "transformers", 2, 4, DDP, WORLD),
    Example("with_lightning", (sys.executable,), "lightning", 2, 4, DDP | {"barrier"}, WORLD, "weights"),
    Example("with_deepspeed", (*TORCHRUN, "2"), "deepspeed", 2, 4, DDP | {"barrier"}, {*WORLD, ("undefined", 2)}),
    Example("with_ray", (sys.executable,), "ray", 2, 4, DDP, WORLD),
    Example(
        "three_dimensions",
        (*TORCHRUN, "4"),
        "torch",
        4,
        3,
        {"all_gather", "reduce_scatter", "broadcast", "send", "recv", "scatter"},
        {("default_pg", 4), ("mesh_pp", 2), ("mesh_dp_shard", 1), ("mesh_tp", 2)},
    ),
)


ABORTED_AT_EXIT = "terminate called without an active exception"
"""On a busy machine gloo's process group ends one process of a hundred so once training is over: of 60 with Accelerate
that were not recorded one, of 60 that were none."""


def run(example: Example, script: Path, tracing: str) -> tuple[int, str, str]:
    """Exit code, and what was printed. Ranks of plain torch and those that do not record are forks."""
    folder = script.parent
    variables = {"TRACING": tracing, "TRACING_DIR": str(folder / "recording"), "DS_ACCELERATOR": "cpu"}
    shutil.rmtree(folder / "recording", ignore_errors=True)
    done: CompletedProcess[str] | jobs.EndedRanks
    if example.framework == "torch" or (tracing == "NONE" and example.framework in ("accelerate", "transformers")):
        done = jobs.ranks(folder, script, example.ranks, **variables)
    else:
        done = jobs.run([*example.command, script], folder, 240, **variables)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("example", RUN, ids=lambda one: one.name)
def test_a_recorded_example_trains_as_without_recording(example: Example, tmp_path: Path) -> None:
    if importlib.util.find_spec(example.framework) is None:
        pytest.skip(f"{example.framework} is not installed; `make examples` installs it")
    # As a user's own file: Python would look for modules beside it, and find the checkout's.
    script = Path(shutil.copy(EXAMPLES / f"{example.name}.py", tmp_path))
    results = []
    for tracing in ("NONE", "ALL"):
        code, printed, errors = run(example, script, tracing)
        if code and ABORTED_AT_EXIT in errors:
            code, printed, errors = run(example, script, tracing)
        assert code == 0, errors
        results.append([line for line in printed.splitlines() if line.startswith(example.result)])
    without, traced = results
    assert without == traced
    assert len(traced) == 1
    job = crossrank.load(tmp_path / "recording")
    assert job.ranks["rank"].to_list() == list(range(example.ranks))
    assert set(job.ranks["ended_by"]) == {"disable"}
    assert job.steps.group_by("rank").max()["step"].to_list() == [example.iterations] * example.ranks
    assert set(job.calls["op"]) == example.operations
    assert set(job.groups.select("desc", "size").rows()) == example.groups
    assert job.diagnose().text == "ok"
