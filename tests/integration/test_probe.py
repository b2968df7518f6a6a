"""Probes on real gloo ranks, one of which is slow."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.commands import Commands
from tests.integration.test_replay import record_job
from tests.integration.test_replay_processes import free_port, launch
from tests.integration.world import TwoRanks, World

pytestmark = pytest.mark.touches("replay")

RANKS = 4


def _reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(4_000_000))


@pytest.fixture(scope="module")
def recorded(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_job(world, _reduce, tmp_path_factory.mktemp("reduce"))


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process may run a ninth of the time, however late this one gets its turns."""
    over = threading.Event()

    def slow() -> None:
        ran = 0.0
        while not over.is_set():
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(8 * ran)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            begun = time.monotonic()
            time.sleep(0.002)
            ran = time.monotonic() - begun

    slower = threading.Thread(target=slow)
    slower.start()
    try:
        yield
    finally:
        over.set()
        slower.join()


@pytest.mark.parametrize("kind", ["pairs", "bisect"])
def test_a_slow_rank_is_found(kind: str, recorded: Path, tmp_path: Path) -> None:
    port, words = (
        str(free_port()),
        ["--groups", kind, "--tolerance", "2", "--warmup", "1", "--json", "-o", str(tmp_path)],
    )
    words += ["--num-replays", "9"]
    started = [
        launch(
            [str(recorded), *words, "--timeout", "60"],
            {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_PORT": port},
            ("crossrank", "probe"),
        )
        for rank in range(RANKS)
    ]
    with slowed(started[2].pid):
        outputs = [process.communicate(timeout=100) for process in started]
    report: dict[str, Any] = json.loads(outputs[0][0])
    assert [one["rank"] for one in report["ranks"] if one["is_slow"]] == [2], outputs
    assert report["ranks"][0]["score"] > 2
    assert [process.returncode for process in started] == [1, 0, 0, 0], outputs
    assert json.loads((tmp_path / "probe.json").read_text()) == report


def test_similar_ranks_give_no_finding(recorded: Path, command: Commands) -> None:
    words = ["probe", str(recorded), "--nproc", str(RANKS), "--tolerance", "1000"]
    output = command(*words)
    assert "6 groups in 3 rounds for each of its sizes (16 MB)" in output
    assert "No compared rank or link is slower than 1000 x similar ones" in output


def test_job_groups_need_not_fit_the_probed_ranks(two_ranks: TwoRanks, command: Commands) -> None:
    path = two_ranks.record(_groups)
    assert command.json("probe", path, "--nproc", "5", "--dry-run") == {"groups": 10, "rounds": 5, "sizes": [40]}


def _groups(rank: int) -> None:
    alone = dist.new_group([1])
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        dist.all_reduce(torch.ones(10), group=alone)


def test_an_impossible_probe_is_refused_before_it_starts(recorded: Path, command: Commands) -> None:
    assert "2 rank(s) make one at most; use 3 or more" in command.said("probe", recorded)
    assert "--tolerance 0.9 is not a number from 1.01 to 1,000,000" in command.said(
        "probe", recorded, "--nproc", "4", "--groups", "ring", "--tolerance", "0.9"
    )
