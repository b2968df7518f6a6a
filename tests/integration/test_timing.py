"""How long calls of a CPU backend take, recorded without a window: `TRACING_TIMING=1`, on real gloo."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crossrank.recording import CommsFile, Ran
from crossrank.tools.traces.comms import read_comms
from crossrank.tools.traces.rank_trace import COMPLETED
from tests.integration import jobs
from tests.integration.world import World

LATE = 0.2  # s


def comms(folder: Path, rank: int) -> str:
    return str(folder / "recording" / f"rank-{rank}.comms.jsonl.zst")


def times(folder: Path, rank: int) -> list[Ran]:
    file = CommsFile(comms(folder, rank))
    list(file.records())
    return sorted(file.ran, key=lambda one: one.id)  # they end in any order


def _late(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        time.sleep(LATE)
    work = dist.all_reduce(torch.ones(8), async_op=True)
    dist.all_reduce(torch.ones(8))
    time.sleep(LATE)
    work.wait()


def test_a_call_took_from_its_launch_to_its_end_whenever_it_was_waited_for(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(_late, tmp_path, timing=True, kernel="compiled")
    early, late = times(tmp_path, 0), times(tmp_path, 1)
    assert [one.id for one in early] == [one.id for one in late] == [1, 2]  # a barrier has no tensor to tell its device
    assert LATE * 0.5e9 < early[0].took < 60e9
    assert late[0].took < early[0].took
    trace = read_comms(comms(tmp_path, 0))
    took = [ended - began for began, ended in zip(trace.calls.began, trace.calls.ended, strict=True)]
    assert took[1:] == pytest.approx([one.took for one in early], rel=0.01)  # the wall clock is slewed
    assert trace.calls.called[1] <= trace.calls.began[1]
    assert list(trace.calls.state)[1:] == [COMPLETED, COMPLETED]
    assert (trace.timed_by, trace.calls.ended[0]) == ("work", 0)


def _untimed(rank: int) -> None:
    dist.all_reduce(torch.ones(8))


def test_unless_asked_for_ends_are_not_followed(two_ranks: World, tmp_path: Path) -> None:
    two_ranks.run(_untimed, tmp_path, kernel="compiled")
    assert times(tmp_path, 0) == []


def test_the_kernel_in_python_says_that_it_does_not_follow_them(tmp_path: Path) -> None:
    source = "crossrank.enable()\ndist.all_reduce(torch.ones(8))\n"
    result = jobs.python(tmp_path, source, TRACING_TIMING="1", TRACING_KERNEL="python")
    said = "crossrank: how long calls of a CPU backend take is not recorded: that needs the compiled kernel"
    assert result.stderr.splitlines()[0] == said


def test_a_job_that_is_timed_has_bandwidths_without_a_window(tmp_path: Path) -> None:
    script = jobs.write_script(
        tmp_path,
        """
        import torch, torch.distributed as dist, crossrank
        dist.init_process_group("gloo")
        crossrank.enable()
        for _ in range(5):
            dist.all_reduce(torch.ones(1 << 20))
        dist.destroy_process_group()
        """,
    )
    recording = str(tmp_path / "recording")
    assert jobs.torchrun(tmp_path, script, TRACING_TIMING="1", TRACING_DIR=recording).returncode == 0
    result = jobs.run([sys.executable, "-m", "crossrank", "bandwidth", recording], tmp_path)
    assert (
        "measured   the recording (TRACING_TIMING=1): from the launch of a call to the end of its Work" in result.stdout
    )
    assert "calls      10 of 10 have times; they are 5 collectives" in result.stdout
