"""What lies in a folder that a tool reads stops nobody, and what it writes runs nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import polars as pl
import pytest
import zstandard

from crossrank.recording import VERDICT
from crossrank.tools.cli import main
from tests.integration import jobs

RECORDING = Path(__file__).parents[1] / "fuzz" / "seeds" / "recording"


@pytest.mark.parametrize("what", ["a pipe", "a device", "a large file"])
def test_watch_shows_a_job_with_an_unreadable_verdict_file(what: str, tmp_path: Path) -> None:
    shutil.copytree(RECORDING, tmp_path / "recording")
    verdict = tmp_path / "recording" / VERDICT
    if what == "a pipe":
        os.mkfifo(verdict)
    elif what == "a device":
        verdict.symlink_to("/dev/zero")
    else:
        with verdict.open("wb") as file:
            file.truncate(1 << 30)

    ended = jobs.fork(["-m", "crossrank", "watch", "recording", "--once"], tmp_path, 30)

    assert "rank" in ended.stdout
    assert f"{VERDICT}: is " in ended.stdout + ended.stderr


def test_a_formula_in_a_name_is_escaped_in_a_csv(tmp_path: Path) -> None:
    recording = shutil.copytree(RECORDING, tmp_path / "recording")
    for path in recording.glob("*.comms.jsonl.zst"):
        content = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
        path.write_bytes(zstandard.compress(content.replace(b'"source":"', b'"source":"=1+1+')))

    assert main(["export", str(recording), "-o", str(tmp_path / "out"), "--format", "csv", "--tables", "calls"]) == 0

    sources = pl.read_csv(tmp_path / "out" / "calls" / "rank-0.csv")["source"].drop_nulls()
    assert len(sources) > 0
    assert {source[:5] for source in sources} == {"'=1+1"}
