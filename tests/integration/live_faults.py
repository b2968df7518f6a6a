"""Jobs with the faults that users make, and what a diagnosis of each must say.

A job is a training script in a function that every rank runs. A comment `# rank 2` marks where rank 2 is when it goes
wrong; of the lines so marked for a culprit at least one must be shown. `# every rank` does so where nobody is to blame.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossrank
import tests.integration.more_live_faults  # noqa: F401  # notes more of them
from crossrank.instrument.torch_dumps import uses_nccl2
from tests.gpu.machine import STAND_IN
from tests.integration import forked_jobs
from tests.integration.live_fault import (
    ABORTED,
    ABSENT,
    ANOTHER_WAY,
    DELAYS,
    DEVICE,
    DIED,
    FOLDER,
    NOTED,
    RAISED,
    UNANSWERED,
    Fault,
    batches,
    device_of,
    fault,
    init_again,
    init_process_group,
    replicated,
    sharded,
    training,
    wait_for_the_test,
)

_KERNELS = ("compiled", "python")
"""Of every job half of the ranks record with one kernel and half with the other."""


# --- ranks that leave ------------------------------------------------------------------------------------------------


@fault(RAISED, culprits=(2,), delays=DELAYS, alone=True)
def raises_between_collectives(rank: int) -> None:
    raise ValueError("token id 50257 is out of range")  # rank 2


@fault(ABSENT, culprits=(1,), alone=True)
def hangs_in_the_finally_of_an_exception(rank: int) -> None:
    try:
        raise ValueError("record 17 is damaged")  # rank 1
    finally:
        time.sleep(600)


@fault(RAISED, culprits=(1,), ranks=5, delays=DELAYS, with_nccl=False)
def raises_while_others_are_in_backward(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(6)):
        loss = model(batch * float("nan") if (rank, step) == (1, 3) else batch).sum()
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss}")  # rank 1
        loss.backward()
        optimizer.step()


@fault(RAISED, culprits=(6,), ranks=8, delays=DELAYS)
def raises_in_a_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(DEVICE, (2, 4), mesh_dim_names=("data", "tensor"))
    for step in range(4):
        for _ in range(3):
            dist.all_reduce(torch.ones(64), group=mesh.get_group("tensor"))
        if (rank, step) == (6, 2):
            raise KeyError("labels")  # rank 6
        dist.all_reduce(torch.ones(256), group=mesh.get_group("data"))


@fault((*RAISED, "no_entries"), culprits=(1,), delays=DELAYS)
def raises_before_its_first_call(rank: int) -> None:
    if rank == 1:
        raise FileNotFoundError("/data/train-00001.bin")  # rank 1
    list(training(3))


@fault(RAISED, culprits=(2,), delays=DELAYS)
def raises_and_the_others_wrap_what_fails(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(4)):
        if (rank, step) == (2, 2):
            raise ValueError("token id 50257 is out of range")  # rank 2
        try:
            model(batch).sum().backward()
        except RuntimeError as error:
            raise ValueError(f"step {step} failed") from error
        optimizer.step()


@fault(RAISED, culprits=(1,), delays=DELAYS, alone=True)
def waits_too_long_for_its_data(rank: int) -> None:
    raise RuntimeError("object store: the connection to 10.0.0.7 timed out")  # rank 1


@fault(ABSENT, culprits=(3,), delays=DELAYS)
def leaves_with_sys_exit(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(6)):
        model(batch).sum().backward()  # rank 3
        optimizer.step()
        if (rank, step) == (3, 2):
            sys.exit(0)  # rank 3


@fault(ABSENT, culprits=(1,), delays=DELAYS)
def returns_from_main(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(6)):
        model(batch).sum().backward()  # rank 1
        optimizer.step()
        if (rank, step) == (1, 3):
            return  # rank 1


kill, terminate, stop = (partial(signal.raise_signal, one) for one in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP))


@fault((*RAISED, *DIED), variant="with_os_exit", end=lambda: os._exit(3), culprits=(2,), delays=DELAYS)
@fault(DIED, variant="killed", end=kill, culprits=(2,), hang_seconds=300, delays=DELAYS, line_with_nccl=False)
@fault(
    DIED,
    variant="killed_as_recorded_by_default",
    end=kill,
    culprits=(2,),
    hang_seconds=300,
    tracing="CROSSNODE",
    nodes=1,
    delays=DELAYS,
    line_with_nccl=False,
)
@fault(DIED, variant="stopped", end=stop, culprits=(1,), cannot_dump=(1,), line_with_nccl=False)
def ends_suddenly(rank: int, end: Callable[[], object] | None) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(60)):
        model(batch).sum().backward()  # the culprit
        optimizer.step()
        time.sleep(0.02)
        if end is not None and step == 50:
            end()  # the culprit


@fault(DIED, culprits=(2,), hang_seconds=1, hangs=False, delays=DELAYS, line_with_nccl=False)
def is_killed_after_a_long_evaluation(rank: int) -> None:
    """In the evaluation every rank notices that it does not communicate, and what it wrote then is long out of date."""
    dump = Path(os.environ[FOLDER]) / "recording" / f"rank-{rank}.flight.json.zst"
    model, optimizer = replicated()
    for step, batch in enumerate(batches(60)):
        if (rank, step) == (2, 50):
            kill()
        model(batch).sum().backward()  # rank 2
        optimizer.step()
        time.sleep(0.02)
        while step == 10 and not dump.exists():
            time.sleep(0.02)


@fault(DIED, culprits=(2,), hang_seconds=1, hangs=False, delays=(0.4, 3.0))
def is_killed_while_it_works(rank: int) -> None:
    """It has answered that it runs, and what it has answered is out of date."""
    dump = Path(os.environ[FOLDER]) / "recording" / f"rank-{rank}.flight.json.zst"
    for step in range(6):
        begun = time.time()
        while (rank, step) == (2, 4):
            sum(range(10_000))  # rank 2
            if dump.exists() and dump.stat().st_mtime > begun:  # rank 2
                kill()  # rank 2
        dist.all_reduce(torch.ones(64))


@fault(ABSENT, culprits=(1,), delays=(3.0,))
def is_terminated(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(20)):
        model(batch).sum().backward()  # rank 1
        optimizer.step()
        if (rank, step) == (1, 10):
            terminate()  # rank 1


# --- ranks that stand still ------------------------------------------------------------------------------------------


@fault((*ABSENT, "no_entries"), culprits=(1,))
def sleeps_before_its_first_call(rank: int) -> None:
    if rank == 1:
        time.sleep(600)  # rank 1
    list(training(3))


@fault(ABSENT, culprits=(1,), alone=True)
def stays_when_it_has_destroyed_its_group(rank: int) -> None:
    dist.destroy_process_group()
    time.sleep(600)  # rank 1


@fault(ABSENT, culprits=(1,))
def sleeps_when_its_group_was_made_again(rank: int) -> None:
    for _ in range(4):
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()
    init_again(rank, 4, f"{os.environ[FOLDER]}/store")
    if rank == 1:
        time.sleep(600)  # rank 1
    dist.all_reduce(torch.ones(32))


class _Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, broken: int | None) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._broken:
            time.sleep(600)
        return torch.ones(16, device="cpu")


@fault(ABSENT, culprits=(2,))
def waits_for_its_data(rank: int) -> None:
    model, optimizer = replicated()
    loader = torch.utils.data.DataLoader(_Files(5 if rank == 2 else None), batch_size=2, num_workers=1)
    for batch in loader:  # rank 2
        model(batch.to(DEVICE)).sum().backward()
        optimizer.step()


def gets_its_data_late(rank: int) -> None:
    wait_for_the_test()  # rank 2


@fault(ABSENT, culprits=(3,))
@fault(ABSENT, variant="until_the_user_gives_up", culprits=(3,), hang_seconds=300, gives_up_after=3)
def waits_for_a_lock(rank: int) -> None:
    lock = threading.Lock()
    for step in range(4):
        dist.all_reduce(torch.ones(64))
        if (rank, step) == (3, 2):
            lock.acquire()
        lock.acquire()  # rank 3
        lock.release()


@fault(ABSENT, culprits=(1,), timeout=4, hang_seconds=300, delays=DELAYS, alone=True)
def lets_the_others_time_out(rank: int) -> None:
    time.sleep(600)  # rank 1


@fault(ABSENT, culprits=(2,), hang_seconds=300, delays=DELAYS, with_nccl=False)
def misses_a_monitored_barrier(rank: int) -> None:
    for _ in range(2):
        dist.all_reduce(torch.ones(64))
    if rank == 2:
        time.sleep(600)  # rank 2
    dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)


@fault(ABSENT, culprits=(1,))
def lost_its_thread(rank: int) -> None:
    """A thread averages metrics on a group of its own; on rank 1 it has died, and the loop waits for its answer."""
    metrics = dist.new_group(group_desc="metrics")
    asked: queue.Queue[int] = queue.Queue()
    answered: queue.Queue[torch.Tensor] = queue.Queue()

    def average() -> None:
        while True:
            step = asked.get()
            if (rank, step) == (1, 2):
                raise ZeroDivisionError("no tokens in this step")  # rank 1
            value = torch.ones(4, device=device_of(rank))
            dist.all_reduce(value, group=metrics)
            answered.put(value)

    threading.Thread(target=average, daemon=True, name="metrics").start()
    for step in range(4):
        dist.all_reduce(torch.ones(256))
        asked.put(step)
        answered.get()  # rank 1


@fault(ABSENT, culprits=(1,), hang_seconds=300, gives_up_after=6)
def waits_in_a_thread_beside_training(rank: int) -> None:
    """A thread averages metrics on a group of its own; on rank 1 it stands still, and the loops go on."""
    metrics = dist.new_group(group_desc="metrics")

    def average() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device_of(rank))) if DEVICE == "cuda" else nullcontext():
            for step in range(4):
                if (rank, step) == (1, 2):
                    time.sleep(600)  # rank 1
                dist.all_reduce(torch.ones(4, device=device_of(rank)), group=metrics)

    threading.Thread(target=average, daemon=True, name="metrics").start()
    while True:
        dist.all_reduce(torch.ones(256))  # rank 1
        time.sleep(0.05)  # rank 1


@fault(("all_joined_not_completed",), with_gloo=False, by_stand_in=True, line_with_nccl=False)
@fault(
    ("not_started",), variant="timed", culprits=(1,), timing=True, with_gloo=False, by_stand_in=True, with_nccl2=False
)
def runs_a_kernel_that_never_ends(rank: int) -> None:
    """The GPU of rank 1 does not come to its call; its host has made it."""
    os.environ["STAND_IN_KERNELS"] = "cos=-1" if rank == 1 else ""
    for step in range(4):
        value = torch.ones(256)
        if step == 2:
            value.cos_()
        dist.all_reduce(value)  # rank 1
    torch.cuda.synchronize()


@fault(RAISED, culprits=(1,), delays=DELAYS, with_gloo=False, by_stand_in=True)
def loses_its_gpu(rank: int) -> None:
    os.environ["STAND_IN_LOST"] = "cos" if rank == 1 else ""
    for step in range(4):
        value = torch.ones(256)
        if step == 2:
            value.cos_()
        dist.all_reduce(value)
        torch.cuda.synchronize()  # rank 1


@fault(("communicator_failed", *DIED), culprits=(1,), with_gloo=False, by_stand_in=True, line_with_nccl=False)
def gets_an_error_of_nccl(rank: int) -> None:
    """A link breaks, and rank 1 notices it; torch may end it for that."""
    os.environ["STAND_IN_NCCL_ERROR"] = "3" if rank == 1 else ""
    for _ in range(4):
        dist.all_reduce(torch.ones(256))
    torch.cuda.synchronize()


@fault(ANOTHER_WAY, culprits=(1, 6), ranks=8)
def two_at_once(rank: int) -> None:
    """Two groups of data-parallel ranks, with a fault in each."""
    groups = [dist.new_group(range(4), group_desc="left"), dist.new_group(range(4, 8), group_desc="right")]
    mine = groups[rank // 4]
    lock = threading.Lock()
    for step in range(4):
        if (rank, step) == (1, 2):
            lock.acquire()
        lock.acquire()  # rank 1
        lock.release()
        if (rank, step) == (6, 2):
            dist.barrier(group=mine)  # rank 6
        dist.all_reduce(torch.ones(512), group=mine)


# --- ranks that go another way ---------------------------------------------------------------------------------------


@fault(ABORTED, culprits=(0,), delays=DELAYS)
def averages_the_loss_on_rank_0(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(5)):
        loss = model(batch).sum()
        loss.backward()
        if rank == 0 and step == 3:
            dist.all_reduce(loss.detach())  # rank 0
        optimizer.step()
    dist.barrier()


@fault(ANOTHER_WAY, culprits=(0,))
def gathers_metrics_on_rank_0(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(5)):
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        if rank == 0 and step == 3:
            losses: list[float | None] = [None] * dist.get_world_size()
            dist.all_gather_object(losses, float(loss))  # rank 0


@fault(ANOTHER_WAY, culprits=(3,))
def has_a_batch_less(rank: int) -> None:
    model, optimizer = replicated()
    for batch in batches(5 if rank == 3 else 6):
        model(batch).sum().backward()
        optimizer.step()
    dist.barrier()  # rank 3


@fault(ABSENT, culprits=(3,), delays=DELAYS, line_with_nccl=False)
def has_a_batch_less_and_ends(rank: int) -> None:
    model, optimizer = replicated()
    for batch in batches(5 if rank == 3 else 6):
        model(batch).sum().backward()  # rank 3
        optimizer.step()


@fault(ANOTHER_WAY, culprits=(1,))
def skips_a_bad_batch(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(6)):
        try:
            if (rank, step) == (1, 3):
                raise ValueError("corrupt image")
            model(batch).sum().backward()
        except ValueError:
            continue
        optimizer.step()
        correct = torch.ones(1)
        dist.all_reduce(correct)
    dist.broadcast(torch.ones(32), src=0)  # rank 1


@fault(("missing_rank", "size_mismatch"), culprits=(2,))
def leaves_out_one_call(rank: int) -> None:
    """Its host goes on, as those of the others do."""
    for step in range(6):
        dist.all_reduce(torch.ones(64))  # rank 2
        if (rank, step) != (2, 3):
            dist.all_reduce(torch.ones(256))
    dist.barrier()  # rank 2


@fault(("root_mismatch",), culprits=(2,))
def broadcasts_from_itself(rank: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(64))
    dist.broadcast(torch.ones(64), src=2 if rank == 2 else 0)  # rank 2
    dist.all_reduce(torch.ones(64))


class _Towers(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(16, 64) if name == "up" else nn.Linear(64, 16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(batch))  # type: ignore[no-any-return, operator]


@fault((*RAISED, "size_mismatch"), culprits=(1,), delays=DELAYS, by_majority=True)
def has_another_parameter_order(rank: int) -> None:
    model = DistributedDataParallel(_Towers(["down", "up"] if rank == 1 else ["up", "down"]))  # rank 1
    for batch in batches(3):
        model(batch).sum().backward()


# A majority of five, where one is terminated before it comes to this call.
@fault(ABORTED, culprits=(2,), ranks=5, delays=DELAYS, by_majority=True)
def has_other_buckets(rank: int) -> None:
    layers = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 512))
    # DDP sends rank 0's buckets to all ranks, but not where parameters may be unused.
    model = DistributedDataParallel(layers, bucket_cap_mb=1 if rank == 2 else 25, find_unused_parameters=True)
    for batch in batches(4):
        model(batch).sum().backward()  # rank 2


@fault((*DIED, "size_mismatch"), culprits=(1,), delays=DELAYS, by_majority=True)
def reduces_less(rank: int) -> None:
    """gloo aborts the process that is sent more than it has room for: here the one that is wrong."""
    for step in range(4):
        tokens = torch.ones(96 if (rank, step) == (1, 2) else 128)
        dist.all_reduce(tokens)  # rank 1


@fault(("size_mismatch",), culprits=(1,), delays=DELAYS, by_majority=True)
def reduces_more(rank: int) -> None:
    """Here gloo aborts the neighbour of the one that is wrong."""
    for step in range(4):
        tokens = torch.ones(1024 if (rank, step) == (1, 2) else 128)
        dist.all_reduce(tokens)  # rank 1


@fault((*DIED, "dtype_mismatch"), culprits=(3,), delays=DELAYS, by_majority=True)
def runs_in_autocast(rank: int) -> None:
    head = nn.Linear(16, 16)
    for step, batch in enumerate(batches(4)):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=(rank, step) == (3, 2)):
            logits = head(batch).detach()
        dist.all_reduce(logits)  # rank 3


@fault(("size_mismatch",), culprits=(1,), delays=DELAYS, by_majority=True)
def exchanges_other_splits(rank: int) -> None:
    """Experts exchange tokens; rank 1 expects two more of each than it is sent."""
    for step in range(4):
        sent = torch.ones(16)
        wanted = [6, 6, 6, 6] if (rank, step) == (1, 2) else [4, 4, 4, 4]
        dist.all_to_all_single(torch.zeros(sum(wanted)), sent, wanted, [4, 4, 4, 4])  # rank 1


@fault(ANOTHER_WAY, culprits=(0,))
def saves_on_rank_0(rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    for step, model in training(5):
        if rank == 0 and step == 3:
            dcp.save({"model": model.state_dict()}, checkpoint_id=Path(os.environ[FOLDER]) / "checkpoint")  # rank 0


@fault(ANOTHER_WAY, culprits=(0,))
def meets_alone_after_saving(rank: int) -> None:
    for step, model in training(5):
        if rank == 0 and step == 3:
            torch.save(model.state_dict(), Path(os.environ[FOLDER]) / "model.pt")
            dist.barrier()  # rank 0


@fault(ABSENT, culprits=(0,), with_nccl=False, alone=True)
@fault(ABSENT, variant="bound_to_a_gpu", culprits=(0,), eager=True, with_gloo=False, alone=True)
def makes_a_group_alone(rank: int) -> None:
    dist.new_group([0, 1])  # rank 0


@fault(ABSENT, culprits=(2,), with_nccl=False)
@fault(ABSENT, variant="bound_to_a_gpu", culprits=(2,), eager=True, with_gloo=False)
def leaves_a_group_to_the_others(rank: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(64))
    if rank == 2:
        time.sleep(600)  # rank 2
    dist.new_group()


@fault(("opposite_order", "missing_rank"), culprits=(2,), with_nccl2=False)
def enters_groups_in_another_order(rank: int) -> None:
    tensor_parallel = dist.new_group([1, 2, 3], group_desc="tensor_parallel")
    for step in range(4):
        if (rank, step) == (2, 2):
            dist.all_reduce(torch.ones(64))  # rank 2
        if rank > 0:
            dist.all_reduce(torch.ones(16), group=tensor_parallel)
        if (rank, step) != (2, 2):
            dist.all_reduce(torch.ones(64))


@fault(ABORTED, culprits=(3,), delays=DELAYS)
def evaluates_alone(rank: int) -> None:
    """A layer that averages over ranks in its forward, which rank 3 calls once more."""
    from torch.distributed.nn.functional import all_reduce

    layer = nn.Linear(16, 32)
    for step, batch in enumerate(batches(5)):
        if (rank, step) == (3, 2):
            all_reduce(layer(batch).mean(0))  # rank 3
        all_reduce(layer(batch).mean(0)).sum().backward()  # rank 3
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)  # rank 3


@fault(ANOTHER_WAY, culprits=(0,), line_with_nccl=False)
def samples_alone_under_fsdp(rank: int) -> None:
    model, optimizer = sharded()
    for step, batch in enumerate(batches(5)):
        if rank == 0 and step == 2:
            model(batch)  # rank 0
        model(batch).sum().backward()  # rank 0
        optimizer.step()


@fault(ANOTHER_WAY, culprits=(2,), line_with_nccl=False)
def drops_a_layer_under_fsdp(rank: int) -> None:
    model, optimizer = sharded()
    for step, batch in enumerate(batches(5)):
        model.dropped = 1 if (rank, step) == (2, 2) else None
        model(batch).sum().backward()  # rank 2
        optimizer.step()


# --- sends and receives ----------------------------------------------------------------------------------------------


@fault(("p2p_wait_cycle",), involved=(0, 1, 2, 3))
def everyone_sends_first(rank: int) -> None:
    size = dist.get_world_size()
    dist.barrier()
    dist.send(torch.ones(1 << 16), dst=(rank + 1) % size)  # every rank
    dist.recv(torch.zeros(1 << 16), src=(rank - 1) % size)


@fault(UNANSWERED, culprits=(2,))
def receives_from_the_wrong_stage(rank: int) -> None:
    activations = torch.ones(256)
    for microbatch in range(6):
        if rank > 0:
            dist.recv(activations, src=0 if (rank, microbatch) == (2, 3) else rank - 1)  # rank 2
        if rank < 3:
            dist.send(activations, dst=rank + 1)


@fault(UNANSWERED, culprits=(1,))
def sends_to_the_wrong_stage(rank: int) -> None:
    activations = torch.ones(256)
    for microbatch in range(6):
        if rank > 0:
            dist.recv(activations, src=rank - 1)
        if rank < 3:
            dist.send(activations, dst=3 if (rank, microbatch) == (1, 3) else rank + 1)  # rank 1


@fault(UNANSWERED, culprits=(0,))
def has_a_microbatch_less(rank: int) -> None:
    activations = torch.ones(256)
    for step in range(4):
        for _ in range(3 if (rank, step) == (0, 3) else 4):
            if rank > 0:
                dist.recv(activations, src=rank - 1)
            if rank < 3:
                dist.send(activations, dst=rank + 1)
        dist.all_reduce(torch.ones(64))  # rank 0


@fault(("p2p_tag_mismatch",), involved=(0, 1), with_nccl=False)
def uses_another_tag(rank: int) -> None:
    for step in range(4):
        if rank in (0, 2):
            dist.send(torch.ones(64), dst=rank + 1, tag=step)
        else:
            dist.recv(torch.ones(64), src=rank - 1, tag=7 if (rank, step) == (1, 2) else step)  # rank 1
    dist.barrier()


# --- healthy jobs ----------------------------------------------------------------------------------------------------


def evaluates_for_long(rank: int) -> None:
    for step, _ in training(4):
        if step == 2:
            wait_for_the_test()


def has_a_slow_rank(rank: int) -> None:
    going_on = Path(os.environ[FOLDER]) / forked_jobs.GO_ON
    done = torch.zeros(1)
    while not done:
        time.sleep(0.3 if rank == 2 else 0.01)
        done = torch.tensor([float(going_on.exists())])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)


LATE = Fault(job=gets_its_data_late, culprits=(2,), kinds=ABSENT, alone=True)
LONG_EVALUATION = Fault(job=evaluates_for_long, hang_seconds=1)
SLOW_RANK = Fault(job=has_a_slow_rank, hang_seconds=2)

EVERY_FAULT = NOTED
FAULTS = [one for one in EVERY_FAULT if (one.with_nccl if DEVICE == "cuda" else one.with_gloo)]
if not STAND_IN:
    FAULTS = [one for one in FAULTS if not one.by_stand_in]
if DEVICE == "cuda" and uses_nccl2():
    FAULTS = [one for one in FAULTS if one.with_nccl2]
BY_NAME = {one.name: one for one in [*FAULTS, LATE, LONG_EVALUATION, SLOW_RANK]}


def run_rank(name: str, folder: Path, rank: int) -> None:
    fault = BY_NAME[name]
    os.environ[FOLDER] = str(folder)
    os.environ["TRACING_RECORDER"] = _KERNELS[rank % 2]
    slower = init_process_group(rank, fault.ranks, folder, fault.timeout, eager=fault.eager)
    crossrank.enable(
        tracing=fault.tracing,
        directory=folder / "recording",
        node=f"node-{rank * fault.nodes // fault.ranks}",
        hang_seconds=fault.hang_seconds * slower,
        timing=fault.timing,
    )
    fault.run(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    _name, _folder, *_more = sys.argv[1:]
    if _more:
        forked_jobs.run_job(run_rank, _name, Path(_folder), int(_more[0]), float(_more[1]))
    else:  # under torchrun
        run_rank(_name, Path(_folder), int(os.environ["RANK"]))
