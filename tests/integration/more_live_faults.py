"""More jobs with faults that users make: of threads and futures, of control flow, of groups and pipelines."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import socket
import sqlite3
import subprocess
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.integration.live_fault import (
    ABORTED,
    ABSENT,
    ANOTHER_WAY,
    DEVICE,
    FOLDER,
    RAISED,
    UNANSWERED,
    batches,
    device_of,
    fault,
    replicated,
    sharded,
)

# --- waits that begin late, or beside others -------------------------------------------------------------------------


@fault(ABSENT, culprits=(2,))
def waits_for_a_future(rank: int) -> None:
    for step in range(4):
        if (rank, step) == (2, 2):
            time.sleep(600)  # rank 2
        work = dist.all_reduce(torch.ones(64), async_op=True)
        assert work is not None
        work.get_future().wait()


@fault(ABSENT, culprits=(1,), line_with_nccl=False)
def leaves_others_in_a_future_of_a_hook(rank: int) -> None:
    model, _ = replicated()

    steps: list[int] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and takes no text
        if rank == 1 and len(steps) == 3:
            time.sleep(600)  # rank 1
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    for batch in batches(4):
        steps.append(1)
        model(batch).sum().backward()


# With NCCL the receive may be what its stream waits in: nobody is accused there.
@fault(ABSENT, culprits=(2,), with_nccl=False)
def sleeps_with_a_receive_open(rank: int) -> None:
    """Rank 0 has posted a receive from rank 1 that is answered later; it is rank 2 that does not come."""
    control = dist.new_group(group_desc="control")
    message = torch.zeros(1)
    request = dist.irecv(message, src=1, group=control) if rank == 0 else None
    for step in range(4):
        if (rank, step) == (2, 2):
            time.sleep(600)  # rank 2
        dist.all_reduce(torch.ones(64))
    if rank == 1:
        dist.send(message, dst=0, group=control)
    if request is not None:
        request.wait()


@fault(ABSENT, culprits=(3,))
def sleeps_while_others_listen(rank: int) -> None:
    """Every rank but 0 listens on a thread for what rank 0 never has to say; it is rank 3 that does not come."""
    control = dist.new_group(group_desc="control")

    def listen() -> None:
        dist.recv(torch.zeros(1, device=device_of(rank)), src=0, group=control)

    if rank > 0:
        threading.Thread(target=listen, daemon=True, name="listener").start()
    for step in range(4):
        if (rank, step) == (3, 2):
            time.sleep(600)  # rank 3
        dist.all_reduce(torch.ones(64))


@fault(ABSENT, culprits=(3,))
def waits_for_what_it_began_before(rank: int) -> None:
    """The ranks compute before they wait for what rank 3 never began."""
    dist.all_reduce(torch.ones(64))
    if rank == 3:
        time.sleep(600)  # rank 3
    work = dist.all_reduce(torch.ones(64), async_op=True)
    time.sleep(1.5)
    assert work is not None
    work.wait()


@fault(ABSENT, culprits=(1,), line_with_nccl=False)
def sleeps_in_a_hook_of_the_backward_pass(rank: int) -> None:
    model, _ = replicated()

    steps: list[int] = []

    def stall(gradient: torch.Tensor) -> torch.Tensor:
        if rank == 1 and len(steps) == 3:
            time.sleep(600)  # rank 1
        return gradient

    next(model.parameters()).register_hook(stall)
    for batch in batches(4):
        steps.append(1)
        model(batch).sum().backward()


@fault(ABSENT, culprits=(1,), alone=True)
def turns_in_a_loop_without_end(rank: int) -> None:
    def drawn(count: int) -> list[float]:
        return [float(index * index) for index in range(count)]

    total = 0.0
    while True:
        total += sum(drawn(500))  # rank 1
        total += max(drawn(700))  # rank 1
        total -= min(drawn(900))  # rank 1


@fault(ABSENT, culprits=(2,), alone=True)
def waits_for_a_process(rank: int) -> None:
    subprocess.run(["sleep", "600"], check=True)  # rank 2


@fault(ABSENT, culprits=(0,))
def waits_for_a_file(rank: int) -> None:
    """Rank 0 waits for a file that rank 1 writes behind the next barrier."""
    path = Path(os.environ[FOLDER]) / "shards.json"
    dist.all_reduce(torch.ones(64))
    while rank == 0 and not path.exists():
        time.sleep(0.1)  # rank 0
    dist.barrier()
    if rank == 1:
        path.touch()


@fault(ABSENT, culprits=(3,), alone=True)
def waits_for_a_key(rank: int) -> None:
    """Rank 3 asks the store for what nobody sets."""
    dist.distributed_c10d._get_default_store().wait(["ready"], timedelta(seconds=600))  # rank 3


@fault(ABSENT, culprits=(1,))
def holds_a_lock_in_its_thread(rank: int) -> None:
    """On rank 1 a thread keeps the lock that training takes in each step."""
    lock = threading.Lock()

    def save() -> None:
        with lock:
            time.sleep(600)

    for step in range(4):
        if (rank, step) == (1, 2):
            threading.Thread(target=save, daemon=True, name="saver").start()
            time.sleep(0.2)
        with lock:  # rank 1
            dist.all_reduce(torch.ones(64))


# --- another way through the program ---------------------------------------------------------------------------------


@fault(ABORTED, culprits=(1,))
def stops_early(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(64))
        if (rank, step) == (1, 2):  # its own loss is good enough
            break
    dist.all_reduce(torch.ones(3))  # rank 1


@fault(ABORTED, culprits=(2,))
def does_a_step_again(rank: int) -> None:
    """Rank 2 catches an error behind its call, and makes the call again."""
    for step in range(4):
        for attempt in range(2):
            dist.all_reduce(torch.ones(64 + step))  # rank 2
            if (rank, step, attempt) != (2, 1, 0):
                break
    dist.barrier()


@fault(ABORTED, culprits=(1,))
def broadcasts_where_others_reduce(rank: int) -> None:
    for step in range(4):
        if (rank, step) == (1, 2):
            dist.broadcast(torch.ones(64), src=0)  # rank 1
        else:
            dist.all_reduce(torch.ones(64))


@fault(("root_mismatch",), culprits=(2,))
def gathers_on_itself(rank: int) -> None:
    for step in range(4):
        to = 2 if (rank, step) == (2, 2) else 0
        parts = [torch.zeros(64) for _ in range(4)] if rank == to else None
        dist.gather(torch.ones(64), parts, dst=to)  # rank 2
    dist.barrier()


@fault(ABORTED, culprits=(3,))
def gathers_objects_with_a_guard(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(64))  # rank 3
        if step == 2 and rank != 3:
            dist.all_gather_object([None] * 4, {"rank": rank})
    dist.barrier()


@fault(ABORTED, culprits=(0,), alone=True)
def shares_its_settings_alone(rank: int) -> None:
    """Rank 0 broadcasts what it has read; the others have read it, too, and do not listen."""
    dist.broadcast_object_list([{"rate": 0.1}], src=0)  # rank 0


@fault(ABORTED, culprits=(1,))
def validates_more(rank: int) -> None:
    """Rank 1 has a larger part of the validation set."""
    for step in range(2):
        dist.all_reduce(torch.ones(256))
        for _ in range(4 if (rank, step) == (1, 1) else 3):
            dist.reduce(torch.ones(1), dst=0)  # rank 1
    dist.barrier()


@fault(ABORTED, culprits=(2,))
def resumes_elsewhere(rank: int) -> None:
    """Rank 2 has found a checkpoint of the last step, the others none."""
    for step in range(3 if rank == 2 else 0, 4):
        dist.all_reduce(torch.ones(64))
        if step == 3:
            dist.all_gather([torch.zeros(8) for _ in range(4)], torch.ones(8))  # rank 2


@fault(ABORTED, culprits=(2,))
def skips_a_layer(rank: int) -> None:
    """A model of which rank 2 leaves a branch out: its gradients are never ready."""
    model, optimizer = replicated()
    for step, batch in enumerate(batches(5)):
        loss = model(batch).sum()
        if (rank, step) == (2, 2):
            loss = loss.detach().requires_grad_()
        loss.backward()  # rank 2
        optimizer.step()
        if step == 2:
            dist.barrier()  # rank 2


@fault(ANOTHER_WAY, culprits=(3,), line_with_nccl=False)
def tests_under_fsdp_on_one_rank(rank: int) -> None:
    model, optimizer = sharded()
    for step, batch in enumerate(batches(5)):
        model(batch).sum().backward()  # rank 3
        optimizer.step()
        if (rank, step) == (3, 2):
            with torch.no_grad():
                model(batch)  # rank 3


@fault(RAISED, culprits=(2,))
def raises_in_its_loss(rank: int) -> None:
    model, _ = replicated()
    for step, batch in enumerate(batches(4)):
        loss = model(batch).sum()
        if (rank, step) == (2, 2):
            raise FloatingPointError("the loss is not a number")  # rank 2
        loss.backward()


@fault(RAISED, culprits=(1,))
def goes_on_when_its_data_ends(rank: int) -> None:
    """Rank 1 catches the end of its data, and leaves."""
    data = iter(batches(2 if rank == 1 else 4))
    for _ in range(4):
        try:
            next(data)
        except StopIteration:
            return
        dist.all_reduce(torch.ones(64))  # rank 1


# --- groups ----------------------------------------------------------------------------------------------------------


@fault((*ANOTHER_WAY, "opposite_order"), culprits=(5,), ranks=8)
def leaves_out_a_call_in_a_mesh(rank: int) -> None:
    mesh = init_device_mesh(DEVICE, (4, 2), mesh_dim_names=("data", "tensor"))
    for step in range(4):
        if (rank, step) != (5, 2):
            dist.all_reduce(torch.ones(32), group=mesh["tensor"].get_group())
        dist.all_reduce(torch.ones(128), group=mesh["data"].get_group())


# The truth is rank 6. Between two ranks nothing says which of them is wrong: a line may be new. Of a job that gloo ends
# before rank 6 wrote its last call, the files show that it is missing in the group that it left. With NCCL the next
# calls of its pair match again.
@fault(("size_mismatch", "missing_rank", "extra_collective"), involved=(6,), ranks=8)
def takes_the_group_of_the_other_dimension(rank: int) -> None:
    mesh = init_device_mesh(DEVICE, (4, 2), mesh_dim_names=("data", "tensor"))
    for step in range(4):
        dist.all_reduce(torch.ones(32), group=mesh["tensor"].get_group())
        name = "tensor" if (rank, step) == (6, 2) else "data"
        dist.all_reduce(torch.ones(128), group=mesh[name].get_group())  # every rank


@fault(ABSENT, culprits=(6,), ranks=8)
def sleeps_in_a_mesh(rank: int) -> None:
    mesh = init_device_mesh(DEVICE, (2, 4), mesh_dim_names=("data", "tensor"))
    for step in range(4):
        if (rank, step) == (6, 2):
            time.sleep(600)  # rank 6
        dist.all_reduce(torch.ones(32), group=mesh["tensor"].get_group())
        dist.all_reduce(torch.ones(128), group=mesh["data"].get_group())


# --- pipelines -------------------------------------------------------------------------------------------------------


@fault(UNANSWERED, culprits=(2,))
def stalls_in_the_middle(rank: int) -> None:
    activations = torch.ones(256)
    for microbatch in range(6):
        if rank > 0:
            dist.recv(activations, src=rank - 1)
        if (rank, microbatch) == (2, 3):
            time.sleep(600)  # rank 2
        if rank < 3:
            dist.send(activations, dst=rank + 1)
    dist.barrier()


# The truth is rank 1. Between two ranks nothing says which of them is wrong.
@fault((*UNANSWERED, *ABSENT), involved=(2,), line_with_nccl=False)
def leaves_out_a_send_of_a_batch(rank: int) -> None:
    left, right = (rank - 1) % 4, (rank + 1) % 4
    for step in range(4):
        sent, received = torch.ones(64), torch.zeros(64)
        pairs = [dist.P2POp(dist.irecv, received, left)]
        if (rank, step) != (1, 2):
            pairs.append(dist.P2POp(dist.isend, sent, right))
        for request in dist.batch_isend_irecv(pairs):
            request.wait()  # every rank
    dist.barrier()


@fault(UNANSWERED, culprits=(1,), line_with_nccl=False)
def goes_backward_too_soon(rank: int) -> None:
    """Rank 1 awaits a gradient of rank 2 where its activations are due."""
    activations, gradients = torch.ones(256), torch.ones(256)
    for step in range(4):
        if rank > 0:
            dist.recv(activations, src=rank - 1)
        if (rank, step) == (1, 2):
            dist.recv(gradients, src=2)  # rank 1
        if rank < 3:
            dist.send(activations, dst=rank + 1)
        if rank < 3 and (rank, step) != (1, 2):
            dist.recv(gradients, src=rank + 1)
        if rank > 0:
            dist.send(gradients, dst=rank - 1)


# With NCCL the receives of both threads are on one stream, and the job hangs before rank 2 sleeps.
@fault((*ABSENT, *UNANSWERED), culprits=(2,), with_nccl=False)
def keeps_a_thread_of_another_rank_waiting(rank: int) -> None:
    """Rank 1 receives on a thread, and its main thread waits for what that one gets, in a function of C."""
    control = dist.new_group(group_desc="control")
    received: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def receive() -> None:
        for _ in range(4):
            message = torch.zeros(1, device=device_of(rank))
            dist.recv(message, src=2, group=control)
            received.put(message)

    if rank == 1:
        threading.Thread(target=receive, daemon=True).start()
    for step in range(4):
        if (rank, step) == (2, 2):
            time.sleep(600)  # rank 2
        if rank == 2:
            dist.send(torch.ones(1), dst=1, group=control)
        if rank == 1:
            received.get()
        dist.all_reduce(torch.ones(64))


@fault((*ABSENT, *UNANSWERED), culprits=(2,), with_nccl=False)
def keeps_a_chain_of_threads_waiting(rank: int) -> None:
    """Rank 1 receives on a thread from rank 2, and rank 0 on a thread from rank 1, which passes on what it got."""
    control = dist.new_group(group_desc="control")
    received: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def receive() -> None:
        for _ in range(4):
            message = torch.zeros(1)
            dist.recv(message, src=rank + 1, group=control)
            received.put(message)

    if rank < 2:
        threading.Thread(target=receive, daemon=True).start()
    for step in range(4):
        if (rank, step) == (2, 2):
            time.sleep(600)  # rank 2
        message = received.get() if rank < 2 else torch.ones(1)
        if rank in (1, 2):
            dist.send(message, dst=rank - 1, group=control)
        dist.all_reduce(torch.ones(64))


class _Slow(nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(600)
        return batch


@fault(ABSENT, culprits=(3,))
def stalls_in_its_model(rank: int) -> None:
    model, optimizer = replicated()
    slow = _Slow()
    for step, batch in enumerate(batches(4)):
        if (rank, step) == (3, 2):
            batch = slow(batch)  # rank 3
        model(batch).sum().backward()
        optimizer.step()


@fault(("thread_order",), with_nccl=False)
def calls_on_one_group_from_two_threads(rank: int) -> None:
    """A thread reduces what it measures, while the main thread trains: which of them calls first is left to chance."""
    for _ in range(4):
        dist.all_reduce(torch.ones(64))
    is_first = threading.Event()

    def reduce_metrics() -> None:
        if rank == 2:
            is_first.wait()
            time.sleep(0.5)
        dist.all_reduce(torch.ones(3))  # every rank

    metrics = threading.Thread(target=reduce_metrics, name="metrics")
    metrics.start()
    if rank != 2:
        time.sleep(0.5)
    is_first.set()
    dist.broadcast(torch.ones(256), src=0)  # every rank
    metrics.join()


@fault(ABSENT, culprits=(2,))
def awaits_what_never_comes(rank: int) -> None:
    """The stack of the thread shows the event loop, and the line where it was started."""

    async def fetch(step: int) -> None:
        fetched = asyncio.get_running_loop().create_future()
        if (rank, step) != (2, 3):
            fetched.set_result(None)
        await fetched  # rank 2

    for step in range(5):
        asyncio.run(fetch(step))
        dist.all_reduce(torch.ones(64))


@fault(("group_order",), culprits=(2,), with_nccl=False)
def makes_its_groups_in_another_order(rank: int) -> None:
    """torch numbers the groups on every rank: those of one number find each other, and are not of one group."""
    dist.all_reduce(torch.ones(64))
    groups = {}
    for ranks in ([2, 3], [0, 1]) if rank == 2 else ([0, 1], [2, 3]):
        groups[tuple(ranks)] = dist.new_group(ranks)  # rank 2
    for _ in range(3):
        dist.all_reduce(torch.ones(64), group=groups[(0, 1) if rank < 2 else (2, 3)])  # rank 2
    dist.barrier()


@fault(UNANSWERED, culprits=(3,))
def sends_to_another_peer(rank: int) -> None:
    for step in range(6):
        after = (rank + (2 if (rank, step) == (3, 4) else 1)) % 4
        sent = dist.P2POp(dist.isend, torch.ones(64), after)
        received = dist.P2POp(dist.irecv, torch.ones(64), (rank - 1) % 4)
        for work in dist.batch_isend_irecv([sent, received]):  # rank 3
            work.wait()  # rank 3
        dist.barrier()


# --- ranks that wait for each other's data outside of torch ----------------------------------------------------------


def _connection(rank: int, server: int, client: int) -> socket.socket:
    """A connection of two ranks; the others have one that nobody uses."""
    path = f"{os.environ[FOLDER]}/{server}-{client}"
    if rank == server:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            Path(f"{path}.part").write_text(str(listener.getsockname()[1]))
            Path(f"{path}.part").rename(path)
            return listener.accept()[0]
    if rank != client:
        return socket.socket()
    while not Path(path).exists():
        time.sleep(0.01)
    return socket.create_connection(("127.0.0.1", int(Path(path).read_text())))


@fault(("owes_data",), culprits=(0,), with_nccl=False)
def sends_another_rank_too_little(rank: int) -> None:
    """Rank 3 gets its configuration from rank 0 through a connection of their own."""
    connection = _connection(rank, 0, 3)
    for step in range(5):
        if rank == 0:
            connection.sendall(b"x" * (60 if step == 3 else 64))
        elif rank == 3:
            left = 64
            while left:
                left -= len(connection.recv(left))
        dist.all_reduce(torch.ones(64))  # rank 0


@fault(ABSENT, culprits=(1,), with_nccl=False)
def keeps_another_rank_waiting_for_its_data(rank: int) -> None:
    """Rank 2 waits for what rank 1 sends, which waits for something else."""
    connection = _connection(rank, 1, 2)
    for step in range(5):
        if rank == 1:
            if step == 3:
                threading.Event().wait()  # rank 1
            connection.sendall(b"x")
        elif rank == 2:
            connection.recv(1)
        dist.all_reduce(torch.ones(64))


# --- where the other ranks show who is wrong -------------------------------------------------------------------------


@fault(("opposite_order",), culprits=(1,))
def leaves_a_call_out_in_one_of_two_pairs(rank: int) -> None:
    """The other pair makes the calls that both pairs should make."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(6):
        if (rank, step) != (1, 3):
            dist.all_reduce(torch.ones(64), group=mesh.get_group("tp"))
        dist.all_reduce(torch.ones(64), group=mesh.get_group("dp"))
    dist.barrier()  # rank 1


@fault(("p2p_tag_mismatch",), culprits=(2,), with_nccl=False)
def sends_with_another_tag_around_a_ring(rank: int) -> None:
    for step in range(6):
        sent = dist.isend(torch.ones(8), (rank + 1) % 4, tag=step + ((rank, step) == (2, 4)))  # rank 2
        dist.recv(torch.ones(8), (rank - 1) % 4, tag=step)
        assert sent is not None
        sent.wait()  # rank 2


@fault(("p2p_wait_cycle",), culprits=(2,), involved=(3,), with_nccl=False)
def counts_its_tags_otherwise_once(rank: int) -> None:
    """Both ranks of a pair send what the other one does not expect."""
    tag = 0
    for step in range(9):
        tag += (rank, step) != (2, 7)
        received = dist.irecv(torch.ones(8), rank ^ 1, tag=tag)
        dist.send(torch.ones(8), rank ^ 1, tag=tag)  # rank 2
        assert received is not None
        received.wait()
        dist.barrier()


@fault(("opposite_order",), culprits=(0,), with_nccl=False)
def makes_a_group_on_all_ranks_but_one(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(64))  # rank 0
        if rank and step == 2:
            dist.new_group([0, 1, 2, 3])


@fault(("group_order",), culprits=(3,), with_nccl=False)
def makes_its_mesh_in_another_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(64))
    tp = 1 if rank == 3 else 2
    mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    for _ in range(3):
        dist.all_reduce(torch.ones(64), group=mesh.get_group("tp"))  # rank 3
        dist.all_reduce(torch.ones(64), group=mesh.get_group("dp"))


@fault(("p2p_unmatched",), culprits=(2,), with_nccl=False)
def sends_after_its_collective_once(rank: int) -> None:
    for step in range(6):
        is_late = (rank, step) == (2, 4)
        if is_late:
            dist.all_reduce(torch.ones(64))  # rank 2
        if rank == 2:
            dist.send(torch.ones(8), 3)
        elif rank == 3:
            dist.recv(torch.ones(8), 2)
        if not is_late:
            dist.all_reduce(torch.ones(64))


@fault(("opposite_order",), culprits=(2,), with_nccl=False)
def leaves_a_group_out_that_it_is_not_in(rank: int) -> None:
    """All ranks must make each group; the next one does not meet those of the others."""
    dist.all_reduce(torch.ones(64))
    if rank != 2:
        dist.new_group([0, 1, 3])
    for _ in range(3):
        dist.all_reduce(torch.ones(64))
    dist.new_group()  # rank 2


@fault(("p2p_wait_cycle",), culprits=(1,), with_nccl=False)
def drops_a_micro_batch(rank: int) -> None:
    """A stage whose loss is not finite sends nothing, and waits for the gradient of what it did not send."""
    for step in range(8):
        for micro_batch in range(3):
            if rank > 0:
                dist.recv(torch.ones(8), rank - 1)  # rank 1
            if rank < 3 and (rank, step, micro_batch) != (1, 6, 1):
                dist.send(torch.ones(8), rank + 1)
        for _ in range(3):
            if rank < 3:
                dist.recv(torch.ones(8), rank + 1)  # rank 1
            if rank > 0:
                dist.send(torch.ones(8), rank - 1)


def _acquire(lock: int) -> None:
    """Wait for a lock as libraries do that give a timeout."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return


@fault(("holds_lock",), culprits=(2,), with_nccl=False)
def holds_a_lock_that_another_rank_polls(rank: int) -> None:
    lock = os.open(f"{os.environ[FOLDER]}/cache.lock", os.O_RDWR | os.O_CREAT)
    for step in range(4):
        dist.all_reduce(torch.ones(64))
        if (rank, step) in ((2, 2), (0, 3)):
            _acquire(lock)
        if (rank, step) == (0, 3):
            fcntl.flock(lock, fcntl.LOCK_UN)
        dist.barrier()  # rank 2


@fault(("holds_lock",), culprits=(2,), with_nccl=False)
def leaves_a_transaction_open(rank: int) -> None:
    path = f"{os.environ[FOLDER]}/runs.db"
    with closing(sqlite3.connect(path, timeout=3600, isolation_level=None)) as database:
        for step in range(4):
            dist.all_reduce(torch.ones(64))
            if (rank, step) == (2, 2):
                database.execute("BEGIN EXCLUSIVE")
            elif (rank, step) == (0, 3):
                database.execute("CREATE TABLE runs(step)")
            dist.barrier()  # rank 2
