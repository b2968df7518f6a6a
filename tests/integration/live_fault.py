"""What is true of a job with a fault that users make, and what such jobs are made of."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.machine import ONE_GPU, STAND_IN
from tests.integration import forked_jobs

ABSENT = ("missing_rank",)
RAISED = ("missing_rank", "raised")
DIED = ("missing_rank", "dump_missing")
ANOTHER_WAY = ("missing_rank", "extra_collective", "type_mismatch", "size_mismatch")
"""By what a rank is found that goes another way than the others depends on what its next calls are."""
ABORTED = (*ANOTHER_WAY, "dump_missing")
"""gloo aborts processes of a group whose calls do not fit, the one that is wrong or its neighbours."""
DELAYS = (0.0, 0.4, 3.0)
"""Seconds after which a launcher terminates the ranks that are left: before they notice anything, while they do, and
when all of them have raised that their peer is gone."""
UNANSWERED = ("p2p_unmatched", "p2p_wait_cycle")

DEVICE = os.environ.get("LIVE_FAULTS_DEVICE", "cpu")
"""`cpu`, with gloo, or `cuda`, with NCCL."""


def device_of(rank: int) -> torch.device:
    """That of a rank, which may be that of others too; a new thread knows no default device, and begins on the first
    GPU."""
    return torch.device(DEVICE, rank % torch.cuda.device_count() if DEVICE == "cuda" else 0)


FOLDER = "LIVE_FAULTS_FOLDER"
Job = Callable[..., None]
"""What every rank runs: a function of the rank."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A job and what is true of it."""

    job: Job
    ranks: int = 4
    culprits: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    """Kinds that a root finding may have."""
    involved: tuple[int, ...] = ()
    """Ranks that must stand in a root finding although nobody can say which of them is to blame: any may be accused."""
    cannot_dump: tuple[int, ...] = ()
    """Ranks that live and write nothing while the job hangs."""
    hangs: bool = True
    """Whether a user would look at it while it hangs; else it ends on its own."""
    delays: tuple[float, ...] = (0.0,)
    """Seconds from the failure of a rank to the end of the others; the job is run once with each."""
    timeout: float = 120.0
    """Seconds after which gloo gives up."""
    hang_seconds: float = 2.5
    tracing: str = "ALL"
    nodes: int = 2
    gives_up_after: float | None = None
    """Seconds after which the user ends the job without a look at it."""
    timing: bool = False
    eager: bool = False
    """The group is bound to a GPU (`device_id=`), so communicators are made with their groups."""
    variant: str = ""
    """What is different from the other fault of the same job."""
    alone: bool = False
    """The job is what the culprits do, before the third of four reductions that all ranks make."""
    end: Callable[[], object] | None = None
    """How the culprit ends: given to the job, which has None on the other ranks."""
    with_nccl: bool = True
    """Whether it is a fault there, too. With NCCL the host does not wait for a group to be made, tags mean nothing, and
    there is no monitored barrier. A stand-in for a GPU computes no loss."""

    with_gloo: bool = True
    """Whether it is one without a GPU."""

    by_stand_in: bool = False
    """Whether a stand-in for a GPU makes it."""

    with_nccl2: bool = True
    """Whether torch's recorder shows it with `ProcessGroupNCCL2`: that notes no starts, and no ends once a rank is in
    `destroy_process_group`."""

    line_with_nccl: bool = True
    """Whether its line can be shown there. A backward pass on a GPU makes its calls on a thread without Python."""

    by_majority: bool = False
    """Whether only the calls of most ranks show who is wrong: nobody can be named if too few came to that call before
    the job was ended."""

    @property
    def name(self) -> str:
        return "_".join(filter(None, (self.job.__name__, self.variant)))

    def run(self, rank: int) -> None:
        """Be a rank of the job."""
        if self.end is not None:
            self.job(rank, self.end if rank in self.culprits else None)
        elif not self.alone:
            self.job(rank)
        else:
            for step in range(4):
                if rank in self.culprits and step == 2:
                    self.job(rank)
                dist.all_reduce(torch.ones(64))

    @property
    def innocent(self) -> set[int]:
        return set(range(self.ranks)) - {*self.culprits, *self.involved}

    def lines(self) -> list[list[str]]:
        """For each culprit, or for everyone, the `file:line`s of which one must be shown; none are marked where its job
        is over."""
        marks = [("# the culprit\n", f"# rank {rank}\n") for rank in self.culprits]
        marks = marks or [("# every rank\n",) * 2]
        source, first = inspect.getsourcelines(self.job)
        file = Path(inspect.getfile(self.job)).name
        lines = list(enumerate(source, first))
        return [[f"{file}:{number}" for number, line in lines if line.endswith(mark)] for mark in marks]


NOTED: list[Fault] = []
"""Every fault of the modules that were imported."""


def fault(kinds: tuple[str, ...], **facts: Any) -> Callable[[Job], Job]:
    """Note a job in `NOTED` as one with a fault that is found by these kinds; `facts` are fields of a `Fault`.

    The truth of each was written before it was run.
    """

    def note(job: Job) -> Job:
        NOTED.append(Fault(job=job, kinds=kinds, **facts))
        return job

    return note


def replicated() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A model under DDP, and its optimizer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def training(steps: int) -> Iterator[tuple[int, nn.Module]]:
    """Train under DDP: each step and its model, once it is done."""
    model, optimizer = replicated()
    for step, batch in enumerate(batches(steps)):
        model(batch).sum().backward()
        optimizer.step()
        yield step, model


class Blocks(nn.Module):
    """Layers that FSDP2 shards one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.dropped: int | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != self.dropped:
                batch = block(batch)
        return batch


def sharded() -> tuple[Blocks, torch.optim.Optimizer]:
    """A model under FSDP2, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = Blocks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count: int) -> list[torch.Tensor]:
    return [torch.ones(8, 16) for _ in range(count)]


def wait_for_the_test() -> None:
    """What takes long: it lasts until the job has been looked at."""
    while not (Path(os.environ[FOLDER]) / forked_jobs.GO_ON).exists():
        time.sleep(0.02)


def init_again(rank: int, ranks: int, store: str) -> None:
    """Make the default group once more, after it was destroyed; `store` is the file of the first one's store."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(f"{store}-2", ranks), rank=rank, world_size=ranks)


def init_process_group(rank: int, ranks: int, folder: Path, timeout: float, *, eager: bool = False) -> int:
    """Make the default group, on a GPU of this rank where there are as many. Returns how many times slower all is."""
    store = dist.FileStore(str(folder / "store"), ranks)
    slower = 1
    if DEVICE == "cuda":
        if torch.cuda.device_count() < ranks:
            os.environ.update(ONE_GPU, NCCL_HOSTID=f"rank-{rank}")
            slower = 1 if STAND_IN else 5  # processes take turns on a GPU: NCCL connects them in seconds
        torch.cuda.set_device(device_of(rank))
        torch.set_default_device(DEVICE)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout * slower),
        device_id=device_of(rank) if eager else None,
    )
    return slower
