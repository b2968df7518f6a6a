"""What matters to a job of many ranks: a few lines in its log, a few files in a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.jobs import RECORDING, Scripts
from tests.integration.traces import Recorded

pytestmark = pytest.mark.touches("tools")

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


@pytest.mark.parametrize("early", ["1", "0"])  # enable() before and after the process group
def test_one_rank_prints_a_message_of_all_ranks(early: str, scripts: Scripts, tmp_path: Path) -> None:
    result = scripts(EARLY=early, CXX="/nowhere/c++", XDG_CACHE_HOME=str(tmp_path)).ranks(THREE_RANKS, 3)
    lines = [line for line in result.stderr.splitlines() if line.startswith("crossrank: ")]
    in_python = [line for line in lines if "calls are recorded in Python" in line]
    assert len(in_python) == 1
    of_ranks = [f"crossrank: of rank {rank}" for rank in range(3)]
    assert sorted(set(lines) - set(in_python)) == ["crossrank: of all ranks", *of_ranks]
    assert len(lines) == 5


def test_a_rank_of_a_large_job_is_written_to_and_read_from_a_subfolder(scripts: Scripts) -> None:
    assert scripts.run(ONE_OF_16_384).stderr == ""
    (folder,) = (scripts.folder / RECORDING).iterdir()
    assert folder.name == "ranks-8192-8207"
    kinds = ("comms.jsonl", "flight.json")
    assert sorted(os.listdir(folder)) == [f"rank-8195.{kind}.zst" for kind in kinds]
    assert [record.seq for record in Recorded(folder, 8195).calls] == [1, 2, 3]
    for words in (["inspect"], ["watch", "--once"], ["diagnose"]):
        told = scripts(None).crossrank(words[0], scripts.folder / RECORDING, *words[1:], "--json")
        assert json.loads(told.stdout)["ranks"], told.stderr
