"""Every way in which PyTorch programs communicate, each as a function of the rank.

The expected records stand in `test_interception.py`. The names at the top are bound before tracing is enabled,
as they are in people's modules. What takes seconds to import is imported by the ranks.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn_functional
from torch import nn
from torch.distributed import all_reduce as early_all_reduce
from torch.distributed import batch_isend_irecv as early_batch_isend_irecv
from torch.distributed import distributed_c10d
from torch.distributed import irecv as early_irecv
from torch.distributed import isend as early_isend
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.integration import names


def _tensor(size: int = 4) -> torch.Tensor:
    return torch.ones(size)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def all_reduce(rank: int) -> None:
    dist.all_reduce(_tensor())


def early_bound(rank: int) -> None:
    early_all_reduce(_tensor())


def module_attribute(rank: int) -> None:
    distributed_c10d.all_reduce(_tensor())


def asynchronous(rank: int) -> None:
    work = dist.all_reduce(_tensor(), async_op=True)
    assert work is not None
    work.wait()


def new_single_names(rank: int) -> None:
    dist.all_gather_single(_tensor(8), _tensor())
    dist.reduce_scatter_single(_tensor(2), _tensor())


def old_single_names(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(_tensor(8), _tensor())
        dist.reduce_scatter_tensor(_tensor(2), _tensor())
        distributed_c10d._all_gather_base(_tensor(8), _tensor())
        distributed_c10d._reduce_scatter_base(_tensor(2), _tensor())


def lists(rank: int) -> None:
    dist.all_gather([_tensor(), _tensor()], _tensor())
    dist.reduce_scatter(_tensor(), [_tensor(), _tensor()])
    dist.all_to_all_single(_tensor(), _tensor())


def rooted(rank: int) -> None:
    dist.broadcast(_tensor(), 1)
    dist.reduce(_tensor(), 0)
    dist.gather(_tensor(), [_tensor(), _tensor()] if rank == 0 else None, dst=0)
    dist.scatter(_tensor(), [_tensor(), _tensor()] if rank == 1 else None, src=1)


def group_keywords(rank: int) -> None:
    group = dist.new_group([1, 0])
    dist.broadcast(_tensor(), group_src=1, group=group)
    dist.reduce(_tensor(), group_dst=0, group=group)
    dist.barrier(group=group)
    if rank == 0:
        dist.send(_tensor(), group_dst=1, group=group)
    else:
        dist.recv(_tensor(), group_src=0, group=group)


def ddp(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
    model(_tensor()).sum().backward()


def ddp_backward_in_thread(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
    loss = model(_tensor()).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def ddp_comm_hook(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
    model.register_comm_hook(None, allreduce_hook)
    model(_tensor()).sum().backward()


def fsdp1(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        model(_tensor()).sum().backward()


def fsdp2(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(_tensor()).sum().backward()


def dtensor(rank: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(_tensor(), mesh, [Shard(0)], src_data_rank=None)
    sharded.redistribute(mesh, [Replicate()]).to_local()
    partial = DTensor.from_local(_tensor(), mesh, [Partial()])
    partial.redistribute(mesh, [Replicate()]).to_local()


def functional_eager(rank: int) -> None:
    functional.wait_tensor(functional.all_reduce(_tensor(), "sum", _world()))
    functional.wait_tensor(functional.all_gather_tensor(_tensor(), 0, _world()))


def _functional_sum(tensor: torch.Tensor) -> torch.Tensor:
    summed: torch.Tensor = functional.all_reduce(tensor, "sum", _world())
    return summed * 2


def compiled(rank: int, backend: str) -> None:
    torch._dynamo.reset()
    result = torch.compile(_functional_sum, backend=backend, fullgraph=True)(_tensor())
    assert result.tolist() == [4.0, 4.0, 4.0, 4.0]


def compiled_eager(rank: int) -> None:
    compiled(rank, "eager")


def compiled_aot_eager(rank: int) -> None:
    compiled(rank, "aot_eager")


def compiled_inductor(rank: int) -> None:
    compiled(rank, "inductor")


def compiled_dist_all_reduce(rank: int) -> None:
    def add(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor + 1

    torch._dynamo.reset()
    torch.compile(add, backend="aot_eager", fullgraph=True)(_tensor())


def batch_p2p(rank: int) -> None:
    ops = [dist.P2POp(dist.isend, _tensor(), 1 - rank), dist.P2POp(dist.irecv, _tensor(), 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def early_batch_p2p(rank: int) -> None:
    ops = [dist.P2POp(early_isend, _tensor(), 1 - rank), dist.P2POp(early_irecv, _tensor(), group_peer=1 - rank)]
    for work in early_batch_isend_irecv(ops):
        work.wait()


def send_recv(rank: int) -> None:
    if rank == 0:
        dist.send(_tensor(), 1)
        work = dist.isend(_tensor(), 1, tag=7)
    else:
        dist.recv(_tensor(), 0)
        work = dist.irecv(_tensor(), 0, tag=7)
    assert work is not None
    work.wait()


def recv_any_source(rank: int) -> None:
    if rank == 0:
        dist.send(_tensor(), 1)
    else:
        assert dist.recv(_tensor()) == 0


def objects(rank: int) -> None:
    dist.all_gather_object([None, None], {"rank": rank})
    dist.broadcast_object_list([rank], src=0)
    dist.gather_object(rank, [None, None] if rank == 0 else None, dst=0)
    dist.scatter_object_list([None], [1, 2] if rank == 0 else None, src=0)


def coalescing_manager(rank: int) -> None:
    with distributed_c10d._coalescing_manager():
        dist.all_reduce(_tensor())
        early_all_reduce(_tensor(8))


def pipeline(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).sum())
    if rank == 0:
        schedule.step(torch.ones(2, 4))
    else:
        schedule.step(target=torch.ones(2, 4))


def barriers(rank: int) -> None:
    dist.barrier()
    dist.monitored_barrier()


def autograd_functions(rank: int) -> None:
    tensor = _tensor().requires_grad_()
    nn_functional.all_reduce(tensor).sum().backward()


def process_group_methods(rank: int) -> None:
    _world().allreduce([_tensor()]).wait()
    _world().broadcast(_tensor(), 0).wait()


def no_grad_and_inference(rank: int) -> None:
    with torch.no_grad():
        dist.all_reduce(_tensor())
    with torch.inference_mode():
        dist.all_reduce(_tensor())


def parameter(rank: int) -> None:
    with torch.no_grad():
        dist.broadcast(nn.Parameter(_tensor()), 0)


# Callers of what older versions of torch do not have, or have with other arguments.
ABSENT: set[Callable[[int], None]] = set() if names.HAS_SINGLE else {new_single_names}
if names.VERSION < (2, 6):
    ABSENT |= {dtensor, pipeline}
