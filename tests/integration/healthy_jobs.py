"""Healthy jobs in which some rank communicates nothing for longer than a hang takes to be noticed.

Each must end as it would without a recording, and nobody may say that it hangs. `pause` is what takes long.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossrank
from tests.integration import forked_jobs
from tests.integration.live_fault import DEVICE, batches, device_of, init_again, init_process_group, replicated

HANG_SECONDS = 2.0
LONG = 5.0
RANKS = 4
TIMEOUT = 120.0
NEXT = 7
"""Tag of a message between two ranks."""


def pause() -> None:
    """Sleep at one place, as in one long call of C++."""
    time.sleep(LONG)


def evaluate() -> float:
    """Compute at several places, as a loop over batches does."""
    until = time.monotonic() + LONG
    loss = 0.0
    while time.monotonic() < until:
        batch = _load()
        loss += _forward(batch)
        _score()
    return loss


def _load() -> torch.Tensor:
    time.sleep(0.07)
    return torch.ones(4)


def _forward(batch: torch.Tensor) -> float:
    time.sleep(0.07)
    return batch.sum().item()


def _score() -> None:
    time.sleep(0.07)


# --- calls that begin long before anybody waits for them -------------------------------------------------------------


def connect(rank: int, tag: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Rank 0 sends everyone something: the first receive of NCCL holds its host until the sender comes."""
    for other in range(1, RANKS):
        if rank == 0:
            dist.send(torch.zeros(8), dst=other, tag=tag, group=group)
        elif rank == other:
            dist.recv(torch.zeros(8), src=0, tag=tag, group=group)


def send_to_everyone(group: dist.ProcessGroup | None = None) -> None:
    for other in range(1, RANKS):
        dist.send(torch.zeros(8), dst=other, group=group)


def receive_early(rank: int, compute: Callable[[], object], tag: int = 0) -> None:
    """Rank 1 has posted the receive of what rank 0 sends when both have computed."""
    connect(rank, tag)
    message = torch.zeros(8)
    request = dist.irecv(message, src=0, tag=tag) if rank == 1 else None
    compute()
    if rank == 0:
        dist.send(message + 1, dst=1, tag=tag)
    if request is not None:
        request.wait()
        assert DEVICE == "cuda" or message.tolist() == [1] * 8  # a stand-in computes nothing


def receives_early(rank: int) -> None:
    receive_early(rank, pause, NEXT)


def receives_early_and_computes(rank: int) -> None:
    receive_early(rank, evaluate)


def receives_early_beside_a_backward_pass(rank: int) -> None:
    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda _: pause())
    receive_early(rank, weight.sum().backward)


class _LongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        torch.linalg.svd(torch.rand(600, 600))
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            gradient = (gradient * 1.0).clone()
        return gradient


def computes_for_long_in_a_backward_pass(rank: int) -> None:
    connect(rank)
    request = dist.irecv(torch.zeros(8), src=0) if rank > 0 else None
    weight = torch.ones(4, requires_grad=True)
    _LongBackward.apply(weight).sum().backward()  # type: ignore[no-untyped-call]
    if request is None:
        send_to_everyone()
    else:
        request.wait()


def receives_tags_in_another_order(rank: int) -> None:
    """Rank 1 receives the second message first, and the first one when it has computed."""
    messages = [torch.full((8,), float(tag)) for tag in (1, 2)]
    if rank == 0:
        for request in [dist.isend(message, 1, tag=tag) for tag, message in enumerate(messages, 1)]:
            assert request is not None
            request.wait()
    elif rank == 1:
        received = [torch.zeros(8), torch.zeros(8)]
        dist.recv(received[1], 0, tag=2)
        evaluate()
        dist.recv(received[0], 0, tag=1)
        assert [one[0].item() for one in received] == [1, 2]


def reduced() -> dist.Work:
    work: dist.Work | None = dist.all_reduce(torch.ones(8), async_op=True)
    assert work is not None
    return work


def reduces_beside_long_computation(rank: int) -> None:
    work = reduced()
    pause()
    work.wait()


def works_between_a_call_and_its_wait(rank: int) -> None:
    """Rank 0 has posted a call of all ranks, and works; the others wait for another call first."""
    orders = dist.new_group(group_desc="orders")
    for step in range(2):
        if rank == 0:
            work = reduced()
            pause() if step == 1 else None
        dist.broadcast(torch.ones(8), src=0, group=orders)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if rank > 0:
            work = reduced()
        work.wait()


def waits_for_a_future_late(rank: int) -> None:
    future = reduced().get_future().then(lambda done: done.value())
    pause()
    future.wait()


def begins_a_call_one_after_the_other(rank: int) -> None:
    """Each rank begins its call when it has the time; nobody needs the result yet."""
    time.sleep(rank * LONG / RANKS)
    work = reduced()
    time.sleep((RANKS - rank) * LONG / RANKS)
    work.wait()


def receives_a_batch_early(rank: int) -> None:
    left, right = (rank - 1) % RANKS, (rank + 1) % RANKS
    pair = [dist.P2POp(dist.isend, torch.ones(8), right), dist.P2POp(dist.irecv, torch.zeros(8), left)]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    first = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(8), left)])
    pause()
    second = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(8), right)])
    for request in first + second:
        request.wait()


def asks_again_and_again_whether_it_is_over(rank: int) -> None:
    if rank == 0:
        evaluate()
    work = reduced()
    while not work.is_completed():
        time.sleep(0.01)


# --- ranks that others wait for, and that work -----------------------------------------------------------------------


def evaluates_on_rank_0(rank: int) -> None:
    if rank == 0:
        evaluate()
    dist.barrier()


def evaluates_on_rank_0_and_says_so(rank: int) -> None:
    if rank == 0:
        with crossrank.expect_pause():
            pause()
    dist.barrier()


def saves_on_rank_0(rank: int) -> None:
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            until = time.monotonic() + LONG
            while time.monotonic() < until:
                torch.save({"weight": torch.ones(1000, 100)}, Path(folder, "model.pt"))
                torch.load(Path(folder, "model.pt"))
    dist.all_reduce(torch.ones(8))


def answers_when_all_have_sent(rank: int) -> None:
    """Rank 0 receives from any rank, and the last one is late."""
    message = torch.zeros(1)
    for step in range(2):
        if rank == 0:
            for _ in range(RANKS - 1):
                dist.recv(message)
            for other in range(1, RANKS):
                dist.send(message, dst=other)
        else:
            if (rank, step) == (RANKS - 1, 1):
                pause()
            dist.send(message, dst=0)
            dist.recv(message, src=0)


def has_slow_data_on_one_rank(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(4)):
        if (rank, step) == (2, 2):
            evaluate()
        model(batch).sum().backward()
        optimizer.step()


def merges_metrics_on_rank_0(rank: int) -> None:
    gathered: list[object] | None = [None] * RANKS if rank == 0 else None
    dist.gather_object({"rank": rank}, gathered)
    if rank == 0:
        evaluate()
    dist.broadcast_object_list([{"best": rank}], src=0)


def waits_for_the_first_stage(rank: int) -> None:
    activations = torch.ones(64)
    for microbatch in range(3):
        if rank > 0:
            dist.recv(activations, src=rank - 1)
        elif microbatch == 1:
            evaluate()
        if rank < RANKS - 1:
            dist.send(activations, dst=rank + 1)


def is_waited_for_in_a_monitored_barrier(rank: int) -> None:
    if rank == 3:
        evaluate()
    dist.monitored_barrier(timeout=timedelta(seconds=30))


def waits_for_a_key_that_takes_long(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        evaluate()
        store.set("ready", "yes")
    store.wait(["ready"])
    dist.barrier()


def makes_a_group_late(rank: int) -> None:
    if rank == 1:
        evaluate()
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(8), group=group)


# --- silence in which nobody waits -----------------------------------------------------------------------------------


def trains_without_communication(rank: int) -> None:
    model, optimizer = replicated()
    for step, batch in enumerate(batches(3)):
        with model.no_sync():
            model(batch).sum().backward()
            if step == 1:
                pause()
        model(batch).sum().backward()
        optimizer.step()


def compiles_for_long(rank: int) -> None:
    pause()
    dist.all_reduce(torch.ones(8))


def works_on_when_its_group_is_gone(rank: int) -> None:
    dist.destroy_process_group()
    pause()


def writes_a_report_when_others_have_ended(rank: int) -> None:
    dist.destroy_process_group()
    if rank == 0:
        evaluate()


def makes_its_groups_anew(rank: int) -> None:
    dist.destroy_process_group()
    pause()
    init_again(rank, RANKS, os.environ["STORE"])
    dist.barrier()


def makes_other_calls_in_groups_of_the_same_names(rank: int) -> None:
    """torch gives the names of destroyed groups to new ones."""
    for attempt in range(2):
        pair = dist.new_group([0, 1] if attempt == 0 else [1, 2])
        other = dist.new_group([0, 3])
        for size in range(4 - attempt, 0, -1):
            dist.all_reduce(torch.ones(size))
            if rank in dist.get_process_group_ranks(pair):
                dist.all_reduce(torch.ones(10 * size + attempt), group=pair)
        if attempt == 1 and rank in dist.get_process_group_ranks(other):
            dist.all_reduce(torch.ones(3), group=other)
        if attempt == 0:
            if rank == 0:
                time.sleep(1)  # it alone sees the group that nobody uses
            dist.destroy_process_group()
            init_again(rank, RANKS, os.environ["STORE"])
    pause()
    dist.barrier()


def joins_with_uneven_data(rank: int) -> None:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(nn.Linear(4, 4))
    with Join([model]):
        for _ in range(2 + rank):
            model(torch.ones(2, 4)).sum().backward()
    pause()
    dist.barrier()


def records_twice(rank: int) -> None:
    crossrank.disable()
    pause()
    crossrank.enable(directory=Path(os.environ["STORE"]).parent / "second", hang_seconds=HANG_SECONDS, on_hang="abort")
    dist.barrier()


def stops_by_a_signal(rank: int) -> None:
    """A scheduler's SIGTERM, which the script takes as the word to save and leave."""
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGTERM)
    while not asked:
        time.sleep(0.01)
    pause()
    dist.barrier()


# --- threads ---------------------------------------------------------------------------------------------------------


@contextmanager
def on_a_thread(work: Callable[[], object]) -> Iterator[None]:
    """Do work beside the block, which does not end before."""
    thread = threading.Thread(target=work, name="beside")
    thread.start()
    yield
    thread.join()


def listens_on_a_thread(rank: int) -> None:
    """Rank 0 tells the others to stop when it has computed enough."""
    control = dist.new_group(group_desc="control")
    connect(rank, group=control)
    told = threading.Event()

    def listen() -> None:
        if rank > 0:
            dist.recv(torch.zeros(8, device=device_of(rank)), src=0, group=control)
            told.set()

    with on_a_thread(listen):
        evaluate()
        send_to_everyone(control) if rank == 0 else told.wait()


def listens_on_a_thread_while_it_sleeps(rank: int) -> None:
    control = dist.new_group(group_desc="control")
    connect(rank, group=control)
    with on_a_thread(functools.partial(dist.recv, torch.zeros(8), 0, control) if rank > 0 else lambda: None):
        pause()
        if rank == 0:
            send_to_everyone(control)


def averages_metrics_on_a_thread(rank: int) -> None:
    metrics = dist.new_group(group_desc="metrics")

    def average() -> None:
        for _ in range(4):
            time.sleep(LONG / 5)
            dist.all_reduce(torch.ones(1, device=device_of(rank)), group=metrics)

    with on_a_thread(average):
        pause()


def saves_beside_training(rank: int) -> None:
    saving = dist.new_group(group_desc="saving")
    # A stream of its own: on one that both threads share, the barrier and a reduction wait for each other as soon as
    # two ranks begin them in different orders.
    stream = torch.cuda.Stream() if DEVICE == "cuda" else None

    def save() -> None:
        with torch.cuda.stream(stream):
            if rank == 0:
                evaluate()
            dist.barrier(group=saving)

    with on_a_thread(save):
        for _ in range(round(LONG / 0.1)):
            dist.all_reduce(torch.ones(8))
            time.sleep(0.1)


def serves_another_group_on_a_thread(rank: int, supply: Callable[[], object] = pause, by: int = 0) -> None:
    """Rank 1 waits for the thread of rank 0, and rank 0's main thread for rank 1: only the thread can go on."""
    orders = dist.new_group([0, 1], group_desc="orders")
    results = dist.new_group([0, 1], group_desc="results")
    supplies = dist.new_group([0, 2], group_desc="supplies")

    def serve() -> None:
        for step in range(3):
            if rank == by and step == 2:
                supply()
            if rank in (0, 2):
                dist.all_reduce(torch.ones(2), group=supplies)
            if rank == 0:
                dist.all_reduce(torch.ones(3), group=orders)

    with on_a_thread(serve):
        for _ in range(3 if rank < 2 else 0):
            if rank == 1:
                dist.all_reduce(torch.ones(3), group=orders)
            dist.all_reduce(torch.ones(5), group=results)


def serves_with_a_pause(rank: int) -> None:
    serves_another_group_on_a_thread(rank)


def serves_with_computation(rank: int) -> None:
    serves_another_group_on_a_thread(rank, evaluate)


def serves_with_what_another_rank_supplies(rank: int) -> None:
    serves_another_group_on_a_thread(rank, pause, 2)


def releases_two_groups_on_a_thread_that_made_no_call(rank: int) -> None:
    """Ranks 0 and 1 wait for each other in two groups, until a thread of rank 0 makes its first call."""
    orders, results = (dist.new_group([0, 1]) for _ in range(2))

    def serve() -> None:
        if rank == 0:
            pause()
            dist.all_reduce(torch.ones(3), group=orders)

    with on_a_thread(serve):
        if rank == 1:
            dist.all_reduce(torch.ones(3), group=orders)
        if rank < 2:
            dist.all_reduce(torch.ones(5), group=results)


# --- waits that the script ends by a timeout -------------------------------------------------------------------------


def works_on_when_a_wait_has_timed_out(rank: int) -> None:
    """Rank 1 makes its call when rank 0 has given up waiting for it."""
    averages = dist.new_group([0, 1], group_desc="averages")
    value = torch.ones(2)
    if rank == 0:
        request = dist.all_reduce(value, group=averages, async_op=True)
        assert request is not None
        with pytest.raises(RuntimeError, match="timed out"):
            request.wait(timedelta(seconds=LONG))
        dist.send(torch.ones(1), dst=1)
        request.wait()
    elif rank == 1:
        dist.recv(torch.zeros(1), src=0)
        dist.all_reduce(value, group=averages)


def works_on_when_a_group_has_timed_out(rank: int) -> None:
    """Rank 3 waits for what it is told when the others, who wait for it, have given up."""
    health = dist.new_group(timeout=timedelta(seconds=LONG), group_desc="health")
    dist.all_reduce(torch.ones(2), group=health)
    if rank == 3:
        dist.recv(torch.zeros(1), src=0)
        return
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2), group=health)
    if rank == 0:
        dist.send(torch.ones(1), dst=3)


WITH_GLOO = (
    answers_when_all_have_sent,  # NCCL receives from a given rank alone
    is_waited_for_in_a_monitored_barrier,  # NCCL has none
    joins_with_uneven_data,  # a stand-in for a GPU computes no loss
    receives_a_batch_early,  # a deadlock: NCCL's sends wait behind the receives
    receives_tags_in_another_order,  # tags mean nothing there
    # A stream waits, and nothing tells whether its host will need it soon.
    begins_a_call_one_after_the_other,
    listens_on_a_thread_while_it_sleeps,
    # All groups wait for one stream.
    serves_with_a_pause,
    serves_with_computation,
    serves_with_what_another_rank_supplies,
    releases_two_groups_on_a_thread_that_made_no_call,
    # A timeout of NCCL ends the process.
    works_on_when_a_wait_has_timed_out,
    works_on_when_a_group_has_timed_out,
)
JOBS: dict[str, Callable[[int], None]] = {
    name: job
    for name, job in list(globals().items())
    if inspect.isfunction(job) and job.__module__ == __name__ and [*inspect.signature(job).parameters] == ["rank"]
    if DEVICE == "cpu" or job not in WITH_GLOO
}
"""Functions of this module that take a rank and nothing else."""


def run_rank(name: str, folder: Path, rank: int) -> None:
    os.environ["STORE"] = str(folder / "store")
    os.environ["TRACING_RECORDER"] = ("compiled", "python")[rank % 2]
    slower = init_process_group(rank, RANKS, folder, TIMEOUT)
    crossrank.enable(
        tracing="ALL", directory=folder / "recording", node="one", hang_seconds=HANG_SECONDS * slower, on_hang="abort"
    )
    dist.barrier()
    JOBS[name](rank)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    crossrank.disable()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    print("ended well")


if __name__ == "__main__":
    forked_jobs.run_job(run_rank, sys.argv[1], Path(sys.argv[2]), RANKS, float(sys.argv[4]))
