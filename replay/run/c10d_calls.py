"""Makes each recorded c10d op again, on the ProcessGroup itself: one row per op, by its name at the dispatcher.

torch's public functions check and convert their arguments on every call; what they hand to c10d is what was recorded,
so it is made here once, and a launch is one call into C++. The recorder sits below that and sees it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import distributed_c10d as c10d

from crossrank.comm import CommRecord
from crossrank.errors import CrossrankError

Launch = Callable[[], Any]
"""Makes the call and returns its Work, or None where the backend gives none."""
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a row needs to make its call. `root` and `peer` are ranks within the group."""

    pg: ProcessGroup
    inputs: Tensors
    outputs: Tensors
    reduce: ReduceOp.RedOpType
    is_async: bool
    root: int
    peer: int
    tag: int
    in_split: list[int]
    out_split: list[int]
    timeout: timedelta
    device: torch.device

    def options(self, options: Any, *, reduce: bool = False, root: bool = False) -> Any:
        """`options`, an object of c10d, filled in."""
        options.timeout = self.timeout
        if hasattr(options, "asyncOp"):
            options.asyncOp = self.is_async
        if reduce:
            options.reduceOp = self.reduce
        if root:
            options.rootRank = self.root
        return options

    def members(self, tensors: Tensors) -> list[list[torch.Tensor]]:
        """Tensors of all members, as c10d has them: a list in a list, or nothing on a rank that holds none."""
        return [list(tensors)] if tensors else []


def _allreduce(a: Arguments) -> Launch:
    return partial(a.pg.allreduce, list(a.inputs), a.options(c10d.AllreduceOptions(), reduce=True))


def _allreduce_coalesced(a: Arguments) -> Launch:
    return partial(a.pg.allreduce_coalesced, list(a.inputs), a.options(c10d.AllreduceCoalescedOptions(), reduce=True))


def _reduce(a: Arguments) -> Launch:
    return partial(a.pg.reduce, list(a.inputs), a.options(c10d.ReduceOptions(), reduce=True, root=True))


def _broadcast(a: Arguments) -> Launch:
    return partial(a.pg.broadcast, list(a.inputs), a.options(c10d.BroadcastOptions(), root=True))


def _allgather(a: Arguments) -> Launch:
    return partial(a.pg.allgather, a.members(a.outputs), list(a.inputs), a.options(c10d.AllgatherOptions()))


def _allgather_base(a: Arguments) -> Launch:
    return partial(a.pg._allgather_base, a.outputs[0], a.inputs[0], a.options(c10d.AllgatherOptions()))


def _allgather_coalesced(a: Arguments) -> Launch:
    width = len(a.inputs)
    lists = [list(a.outputs[start : start + width]) for start in range(0, len(a.outputs), width)]
    return partial(a.pg.allgather_coalesced, lists, list(a.inputs), a.options(c10d.AllgatherOptions()))


def _allgather_into_tensor_coalesced(a: Arguments) -> Launch:
    options = a.options(c10d.AllgatherOptions())
    return partial(a.pg.allgather_into_tensor_coalesced, list(a.outputs), list(a.inputs), options)


def _reduce_scatter(a: Arguments) -> Launch:
    options = a.options(c10d.ReduceScatterOptions(), reduce=True)
    return partial(a.pg.reduce_scatter, list(a.outputs), a.members(a.inputs), options)


def _reduce_scatter_base(a: Arguments) -> Launch:
    options = a.options(c10d.ReduceScatterOptions(), reduce=True)
    return partial(a.pg._reduce_scatter_base, a.outputs[0], a.inputs[0], options)


def _reduce_scatter_tensor_coalesced(a: Arguments) -> Launch:
    options = a.options(c10d.ReduceScatterOptions(), reduce=True)
    return partial(a.pg.reduce_scatter_tensor_coalesced, list(a.outputs), list(a.inputs), options)


def _gather(a: Arguments) -> Launch:
    return partial(a.pg.gather, a.members(a.outputs), list(a.inputs), a.options(c10d.GatherOptions(), root=True))


def _scatter(a: Arguments) -> Launch:
    return partial(a.pg.scatter, list(a.outputs), a.members(a.inputs), a.options(c10d.ScatterOptions(), root=True))


def _alltoall(a: Arguments) -> Launch:
    return partial(a.pg.alltoall, list(a.outputs), list(a.inputs), a.options(c10d.AllToAllOptions()))


def _alltoall_base(a: Arguments) -> Launch:
    options = a.options(c10d.AllToAllOptions())
    return partial(a.pg.alltoall_base, a.outputs[0], a.inputs[0], a.out_split, a.in_split, options)


def _send(a: Arguments) -> Launch:
    return partial(a.pg.send, list(a.inputs), a.peer, a.tag)


def _recv(a: Arguments) -> Launch:
    return partial(a.pg.recv, list(a.outputs), a.peer, a.tag)


def barrier_options(device: torch.device) -> Any:
    """Options of a barrier on `device`: NCCL, whose group is bound to none, would take the GPU of the rank's number."""
    options = c10d.BarrierOptions()
    options.device = device
    if device.index is not None:
        options.device_ids = [device.index]
    return options


def _barrier(a: Arguments) -> Launch:
    return partial(a.pg.barrier, a.options(barrier_options(a.device)))


def _monitored_barrier(a: Arguments) -> Launch:
    pg: Any = a.pg  # torch's type stubs lack it
    return partial(pg.monitored_barrier, a.timeout, False)


ROWS: dict[str, Callable[[Arguments], Launch]] = {
    "allreduce_": _allreduce,
    "allreduce_coalesced_": _allreduce_coalesced,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _allgather,
    "_allgather_base_": _allgather_base,
    "allgather_coalesced_": _allgather_coalesced,
    "allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensor_coalesced,
    "gather_": _gather,
    "scatter_": _scatter,
    "alltoall_": _alltoall,
    "alltoall_base_": _alltoall_base,
    "send": _send,
    "recv_": _recv,
    "barrier": _barrier,
    "monitored_barrier_": _monitored_barrier,
}


def bind(record: CommRecord, op: str, arguments: Arguments) -> Launch:
    """The call of `record` by the c10d op `op`, a key of `ROWS`, ready to be made."""
    try:
        return ROWS[op](arguments)
    except AttributeError as error:  # a torch that lacks it
        raise CrossrankError(
            f"call {record.id} ({record.op}): torch {torch.__version__} has no {op} ({error}); "
            "leave it out with --ops, or use the torch of the recording"
        ) from error
