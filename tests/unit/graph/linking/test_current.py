"""A linked trace counts only beside the traces that it was made of."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import zstandard

import crossrank
from crossrank.tools.cli import main

RECORDING = Path(__file__).parents[3] / "fuzz/seeds/recording"
LEFT_OUT = "is left out, because it is of other traces than those next to it"


def linked_recording(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    shutil.copytree(RECORDING, folder)
    main(["link", str(folder), "--jobs", "1"])
    capsys.readouterr()
    assert list(folder.glob("*.linked.json*"))
    return folder


def slow_down(kineto: Path) -> None:
    """Make each event of a trace last twice as long, as another run might have written it."""
    trace = json.loads(zstandard.ZstdDecompressor().stream_reader(kineto.read_bytes(), read_across_frames=True).read())
    for event in trace["traceEvents"]:
        if "dur" in event:
            event["dur"] *= 2
    kineto.unlink()
    kineto.with_suffix(".gz").write_bytes(gzip.compress(json.dumps(trace).encode()))


def durations(folder: Path) -> list[int]:
    return crossrank.load(folder).table("durations")["duration_ns"].to_list()


@pytest.mark.parametrize("has_comms", [True, False])
def test_a_linked_trace_of_an_earlier_run_does_not_answer_for_newer_traces(
    has_comms: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = linked_recording(tmp_path / "recording", capsys)
    for path in () if has_comms else [*folder.glob("*.comms.*"), *folder.glob("*.flight.*")]:
        path.unlink()
    assert not any(LEFT_OUT in note for note in crossrank.load(folder).notes)
    for path in list(folder.glob("*.kineto.*")):
        slow_down(path)
    found = durations(folder)
    notes = [note for note in crossrank.load(folder).notes if LEFT_OUT in note]
    for path in folder.glob("*.linked.*"):
        path.unlink()
    assert found == durations(folder)
    assert len(found) > 2
    assert notes


def test_a_linked_trace_alone_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = linked_recording(tmp_path / "recording", capsys)
    whole = durations(folder)
    for path in [*folder.glob("*.kineto.*"), *folder.glob("*.et.*")]:
        path.unlink()
    assert durations(folder) == whole
