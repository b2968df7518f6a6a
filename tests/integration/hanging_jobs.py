"""Four gloo ranks for every way to hang."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import crossrank
from tests.integration import forked_jobs

WORLD = 4


def missing_rank(rank: int) -> None:
    if rank == 2:
        time.sleep(600)
    dist.all_reduce(torch.ones(8))


def type_mismatch(rank: int) -> None:
    if rank == 1:
        dist.barrier()
    dist.all_reduce(torch.ones(1 << 16))


def p2p_wait_cycle(rank: int) -> None:
    received = torch.zeros(4)
    dist.recv(received, src=(rank - 1) % WORLD)
    dist.send(torch.ones(4), dst=(rank + 1) % WORLD)


def opposite_order(rank: int) -> None:
    groups = [dist.new_group(group_desc=name) for name in "ab"]
    if rank == 3:
        groups.reverse()
    for group in groups:
        dist.all_reduce(torch.ones(8), group=group)


def killed(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(8))


WAYS: dict[str, Callable[[int], None]] = {
    way.__name__: way for way in (missing_rank, type_mismatch, p2p_wait_cycle, opposite_order, killed)
}


def run_rank(name: str, folder: Path, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    kernel = ("compiled", "python")[rank % 2]
    crossrank.enable(directory=folder / "recording", node=f"node-{rank}", recorder=kernel)
    for _ in range(2):
        dist.all_reduce(torch.ones(8))
    WAYS[name](rank)
    dist.barrier()


if __name__ == "__main__":
    forked_jobs.run_job(run_rank, sys.argv[1], Path(sys.argv[2]), WORLD, float(sys.argv[4]))
