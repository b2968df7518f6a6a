"""One of two ranks that asks of the compiled recorder all that a job may, much of it at the same time.

It says `all calls were made` and ends with a receive in flight.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

import crossrank

ROUNDS = int(os.environ.get("ROUNDS", 200))
THREADS = 4
CALLS = 20
"""Of each thread in each round."""


def main() -> None:
    folder, rank = Path(os.environ["FOLDER"]), int(os.environ["RANK"])
    peer = 1 - rank
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    stop = threading.Event()
    background = [thread(calls_until, own_group(), stop) for _ in range(2)]
    groups = [dist.new_group() for _ in range(THREADS)]
    for number in range(ROUNDS):
        # The other rank has it off in a part of the rounds.
        if number % 5 != rank:
            crossrank.enable(directory=folder / f"{number}", timing=number % 3 == 0, recorder="compiled", ring=64)
        if number % 10 == 9:
            for group in groups:
                dist.destroy_process_group(group)
            groups = [dist.new_group() for _ in range(THREADS)]
        threads = [thread(collectives, group, rank, number) for group in groups]
        sends_and_receives(peer)
        fails(rank)
        if number % 8 == 0:
            forks()
        for one in threads:
            one.join()
        crossrank.step()
        crossrank.disable()
    crossrank.enable(directory=folder / "last", recorder="compiled")
    dist.barrier()
    print("all calls were made", flush=True)
    stop.set()
    for one in background:
        one.join()
    if rank == 0:  # an exit with a receive in flight that nobody answers
        dist.irecv(torch.ones(4), src=peer, tag=7)


def thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    def run() -> None:
        try:
            work(*arguments)
        except BaseException:  # it would end this thread alone
            traceback.print_exc()
            os._exit(1)

    started = threading.Thread(target=run, daemon=True)
    started.start()
    return started


def own_group() -> dist.ProcessGroup:
    """A group of this rank alone; both make them in the same order."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    found = groups[dist.get_rank()]
    assert isinstance(found, dist.ProcessGroup)
    return found


def calls_until(group: dist.ProcessGroup, stop: threading.Event) -> None:
    while not stop.wait(0.001):
        dist.all_reduce(torch.ones(4), group=group)


def collectives(group: dist.ProcessGroup, rank: int, number: int) -> None:
    works = []
    for index in range(CALLS):
        works.append(dist.all_reduce(torch.ones(8), group=group, async_op=True))
        # New splits each time, which differ per rank, so that tables fill.
        sent = 1 + (number * CALLS + index) % 1000
        splits = [[sent, sent + 1], [sent + 1, sent]][rank]
        came = torch.empty(sum(splits))
        dist.all_to_all_single(came, torch.ones(sum(splits)), splits, splits, group=group)
        functional_all_reduce(torch.ones(2), "sum", group).sum()
    for work in works:
        work.wait()


def sends_and_receives(peer: int) -> None:
    sent, came = torch.ones(4), torch.empty(4)
    batch = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, came, peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def fails(rank: int) -> None:
    """Calls that raise on both ranks before anything is sent."""
    calls: tuple[Callable[[], object], ...] = (
        lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 1], [1, 1]),
        lambda: dist.broadcast(torch.ones(4), src=rank, group=dist.group.WORLD, group_src=rank),
        lambda: dist.all_gather([torch.empty(2)], torch.ones(4)),
    )
    for call in calls:
        with contextlib.suppress(RuntimeError, ValueError):
            call()


def forks() -> None:
    """A child of which the parent's threads are gone, and that has recording off."""
    child = os.fork()
    if child == 0:
        torch.ones(4).sum()
        crossrank.disable()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status


if __name__ == "__main__":
    main()
