"""A job of two ranks that is written for four is the job that four ranks run; of dlrm's eight ranks, one of many."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.growing import JOB, convert
from crossrank.tools.cli import main
from tests.integration import jobs
from tests.integration.commands import Commands
from tests.unit.graph.linking.public_traces import needs_traces, public

pytestmark = pytest.mark.touches("tools", traced=False)


def record(folder: Path, model: str, ranks: int) -> Path:
    recording = folder / str(ranks)
    ended = jobs.ranks(folder, jobs.write_script(folder, JOB), ranks, model, TRACING_DIR=str(recording))
    assert ended.returncode == 0, ended.stderr
    return recording


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_grown_calls_have_the_groups_sizes_and_order_of_the_larger_job(tmp_path: Path, model: str) -> None:
    grown = convert(record(tmp_path, model, 2), tmp_path / "grown", "--grow-to", "4")
    truth = convert(record(tmp_path, model, 4), tmp_path / "recorded")
    assert len(truth) == 4
    for rank, (calls, _) in truth.items():
        assert len(calls) >= 3
        assert grown[rank][0] == calls


@needs_traces
def test_dedupe_writes_equal_ranks_to_one_file(tmp_path: Path, command: Commands) -> None:
    words = ["convert", public("dlrm_8gpu"), "--grow-to", "24", "--jobs", "1", "-o"]
    assert main([*words, str(tmp_path / "plain")]) == main([*words, str(tmp_path / "dedupe"), "--dedupe"]) == 0
    assert json.loads((tmp_path / "dedupe" / "comm_groups.json").read_text()) == {}
    names = sorted(path.name for path in (tmp_path / "plain").glob("*.et"))
    assert names == sorted(path.name for path in (tmp_path / "dedupe").glob("*.et"))
    assert len(names) == 24
    assert len({os.stat(path).st_ino for path in (tmp_path / "dedupe").glob("*.et")}) == 8
    assert main(["check", *map(str, sorted((tmp_path / "plain").glob("*.et")))]) == 0
    assert main(["check", *map(str, sorted((tmp_path / "dedupe").glob("*.et")))]) == 0


@needs_traces
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grow-to", "16", "--grow", "tp"], "the job has no dimension 'tp', but dp=8; give others with --dims"),
        (
            ["--grow-to", "16", "--grow", "tp", "--dims", "tp=8"],
            "--grow tp: each matrix product would be split further",
        ),
        (["--grow-to", "12", "--dims", "dp=4"], "--dims dp=4 makes 4 ranks; the job has 8"),
        (["--grow-to", "16", "--grow", "dp", "--dims", "dp=4,tp=2", "--dedupe"], ""),
        (["--dims", "dp=8"], "--dims needs --grow-to N"),
        (["--dedupe"], "--dedupe needs --grow-to N"),
        (["--grow-to", "0"], "--grow-to 0 is not a number of ranks; a job has 1 to 1,048,576"),
    ],
)
def test_an_impossible_growth_ends_in_one_line(tmp_path: Path, command: Commands, words: list[str], said: str) -> None:
    code, _, err = command.ended("convert", public("dlrm_8gpu"), "--jobs", "1", "-o", tmp_path / "out", *words)
    # What is wrong with the traces themselves takes two lines.
    assert (code, said in err, err.count("\n")) == (2 if said else 0, True, 1 if said else 2)


@needs_traces
def test_missing_ranks_are_reported(tmp_path: Path, command: Commands) -> None:
    for rank in (0, 1, 3):
        for kind in ("et", "kineto"):
            name = f"rank-{rank}.{kind}.json.gz"
            (tmp_path / name).symlink_to(Path(public("dlrm_8gpu"), name))
    assert "rank 2,4-7 of 8 is missing, and new ranks copy recorded ranks" in command.said(
        "convert", tmp_path, "--grow-to", "16", "--jobs", "1", "-o", tmp_path / "out"
    )
