"""A job that hangs, and its diagnosis while it hangs: the last part of `make demo`.

Four gloo ranks train; in the third step rank 2 does something else instead of joining the others' all_reduce. Two
seconds later every rank has written down where it is. Rank 2 then also plays the person at the terminal, who asks
what is wrong; after that it joins, and the job ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import crossrank

ABSENT = 2


def train_step(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)


def look_at_the_job(folder: Path, world_size: int) -> None:
    """What rank 2 does while the others wait for it."""
    while len(list(folder.glob("rank-*.flight.*"))) < world_size:
        time.sleep(0.1)
    subprocess.run([sys.executable, "-m", "crossrank", "diagnose", str(folder)], check=False)


def main() -> None:
    folder = Path(os.environ["TRACING_DIR"])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    crossrank.enable(hang_seconds=2)
    for step in range(4):
        if step == 2 and rank == ABSENT:
            look_at_the_job(folder, world_size)
        train_step(torch.ones(1024))
    dist.barrier()
    crossrank.disable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
