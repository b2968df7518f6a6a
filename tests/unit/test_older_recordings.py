"""Recordings that earlier versions wrote are read as if today's had written them: `tests/fixtures/older`."""

from __future__ import annotations

from pathlib import Path

import pytest

import crossrank
from crossrank.tools.cli import main

OLDER = Path(__file__).parents[1] / "fixtures" / "older"
RECORDINGS = sorted(path for path in OLDER.iterdir() if path.is_dir())
SCRIPT = (OLDER / "train.py").read_text().splitlines()
STEPS = 4
BYTES = {"all_reduce": 256, "all_gather": 32, "send": 64, "recv": 64, "broadcast": 20}
"""Operation -> size S, as the job has it."""

older = pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name)


def test_two_earlier_versions_are_kept() -> None:
    assert [path.name for path in RECORDINGS] == ["2026-11-22", "2026-11-26"]


@older
def test_every_call_of_an_older_recording_is_read(recording: Path) -> None:
    job = crossrank.load(recording)
    for rank, transfer in enumerate(("send", "recv")):
        calls = job.table("calls").filter(rank=rank)
        assert calls["op"].to_list() == ["all_reduce", "all_gather", transfer, "broadcast"] * STEPS
        assert [BYTES[op] for op in calls["op"]] == calls["bytes"].to_list()
        assert calls["step"].to_list() == [step for step in range(STEPS) for _ in range(4)]
        made = [
            line.split("(")[0].split()[-1]
            for line in (SCRIPT[int(place.split(":")[1]) - 1] for place in calls["source"])
        ]
        assert made == ["dist.all_reduce", "dist.all_gather", f"dist.{transfer}", "dist.broadcast"] * STEPS
        assert set(calls["dtype"]) == {"float32"}
    collectives = job.table("collectives")
    assert collectives["ranks"].to_list() == collectives["expected"].to_list() == [2] * 3 * STEPS
    assert job.transfers.select("source_rank", "destination_rank").unique().rows() == [(0, 1)]
    assert len(job.transfers) == STEPS
    assert job.steps.drop_nulls("duration_ns")["step"].to_list() == [1, 2, 3] * 2
    assert job.groups.select("members", "desc", "backend").rows() == [
        ("0-1", "default_pg", "cpu:gloo,cuda:gloo"),
        ("0-1", "pair", "cpu:gloo,cuda:gloo"),
    ]
    assert not [note for note in job.notes if "does not know" in note]


@older
def test_the_window_of_an_older_recording_is_linked(recording: Path) -> None:
    job = crossrank.load(recording)
    assert set(job.overlap().frame["rank"]) == {0, 1}
    for rank in range(2):
        graph = job.graph(rank)
        names = [one.record.op for one in graph.communications]
        assert names == ["all_reduce", "all_gather", ("send", "recv")[rank], "broadcast"]
        assert graph.report.damage == []


@older
@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["diagnose"],
        ["bandwidth"],
        ["report", "-o", "OUT/report.html"],
        ["timeline", "-o", "OUT/timeline.pftrace"],
        ["export", "-o", "OUT/tables"],
        ["link", "-o", "OUT/linked"],
        ["convert", "-o", "OUT/chakra"],
        ["anonymize", "-o", "OUT/shared"],
        ["minimize", "--steps", "1:3", "-o", "OUT/part"],
        ["replay", "--dry-run"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_takes_an_older_recording(
    recording: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    assert main([name, str(recording), *(one.replace("OUT", str(tmp_path)) for one in options)]) == 0
    assert "does not know" not in "".join(capsys.readouterr())
