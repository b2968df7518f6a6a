"""Run as a script: four gloo ranks for every way to hang, all at once, each job with a folder of its own.

`python hanging_jobs.py FOLDER WAY…` forks the ranks, so that torch is imported once, and ends when its stdin does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import crossrank

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


def main(folder: str, ways: list[str]) -> None:
    children = []
    for way in ways:
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                hang(f"{folder}/{way}", WAYS[way], rank)
                sys.exit(0)
            children.append(child)
    sys.stdin.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def hang(directory: str, way: Callable[[int], None], rank: int) -> None:
    store = dist.FileStore(f"{directory}.store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    kernel = ("compiled", "python")[rank % 2]
    crossrank.enable(directory=directory, node=f"node-{rank}", kernel=kernel)
    for _ in range(2):
        dist.all_reduce(torch.ones(8))
    way(rank)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
