"""A job in which ranks wait for another one, and that says so while they wait: the last part of `make demo`.

Four gloo ranks train; in the third step rank 2 does something else instead of joining the others' all_reduce. Two
seconds later every rank has answered what it does, and the verdict is in the log. Then rank 2 joins, and the job ends.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import crossrank

ABSENT = 2


def train_step(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)


def do_something_else(folder: Path) -> None:
    """What rank 2 does while the others wait for it."""
    while not (folder / "verdict.json").exists():
        time.sleep(0.1)
    time.sleep(1)  # longer than it takes to print it


def main() -> None:
    folder = Path(os.environ["TRACING_DIR"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    crossrank.enable(hang_seconds=2)
    for step in range(4):
        if step == 2 and rank == ABSENT:
            do_something_else(folder)
        train_step(torch.ones(1024))
    dist.barrier()
    crossrank.disable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
