"""What matters to a job of many ranks: a few lines in its log, a few files in a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from crossrank.recording import CommsFile
from tests.integration import jobs

pytestmark = pytest.mark.touches("tools")

RECORDING = "crossrank-recording"

THREE_RANKS = """
import os
import torch, torch.distributed as dist
import crossrank
from crossrank.instrument.log import log

early = os.environ["EARLY"] == "1"
if not early:
    dist.init_process_group("gloo")
crossrank.enable()
if early:
    dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
log.warning("crossrank: of all ranks")
log.warning("crossrank: of rank %d", dist.get_rank())
crossrank.disable()
dist.destroy_process_group()
"""

ONE_OF_16_384 = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import crossrank

dist.init_process_group("fake", store=FakeStore(), rank=8195, world_size=16_384)
with crossrank.enable():
    for _ in range(3):
        dist.all_reduce(torch.ones(8))
    crossrank.step()
"""


def test_what_all_ranks_have_to_say_one_of_them_says(tmp_path: Path) -> None:
    for early in ("1", "0"):  # enable() before and after the process group
        folder = tmp_path / early
        folder.mkdir()
        script = jobs.write_script(folder, THREE_RANKS)
        result = jobs.ranks(folder, script, 3, EARLY=early, CXX="/nowhere/c++", XDG_CACHE_HOME=str(tmp_path))
        assert result.returncode == 0, result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("crossrank: ")]
        in_python = [line for line in lines if "calls are recorded in Python" in line]
        assert len(in_python) == 1
        assert sorted(set(lines) - set(in_python)) == [
            "crossrank: of all ranks",
            *(f"crossrank: of rank {rank}" for rank in range(3)),
        ]
        assert len(lines) == 5


def test_a_rank_of_a_large_job_writes_into_the_folder_of_a_few_and_is_read_from_there(tmp_path: Path) -> None:
    result = jobs.fork([jobs.write_script(tmp_path, ONE_OF_16_384)], tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    (folder,) = os.listdir(tmp_path / RECORDING)
    assert folder == "ranks-8192-8207"
    assert sorted(os.listdir(tmp_path / RECORDING / folder)) == [
        "rank-8195.comms.jsonl.zst",
        "rank-8195.flight.json.zst",
    ]
    comms = CommsFile(str(tmp_path / RECORDING / folder / "rank-8195.comms.jsonl.zst"))
    assert [record.seq for record in comms.records()] == [1, 2, 3]
    for command in (["inspect", "--json"], ["watch", "--once", "--json"], ["diagnose", "--json"]):
        words = ["-m", "crossrank", command[0], str(tmp_path / RECORDING), *command[1:]]
        told = jobs.fork(words, tmp_path)
        assert json.loads(told.stdout)["ranks"], told.stderr
