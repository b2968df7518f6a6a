"""Makes each recorded c10d op again, on the ProcessGroup itself: one row per op, by its name at the dispatcher.

torch's public functions check and convert their arguments on every call; what they pass to c10d is what was recorded,
so it is made here once, and a launch is one call into C++. The recorder sits below that and sees it all the same.
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a row needs to make its call. `root` and `peer` are ranks within the group."""

    pg: ProcessGroup
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    reduce: ReduceOp.RedOpType
    is_async: bool
    root: int
    peer: int
    tag: int
    in_split: list[int]
    out_split: list[int]
    timeout: timedelta
    device: torch.device

    @property
    def all_inputs(self) -> list[list[torch.Tensor]]:
        """Those of all members, as c10d has them: a list in a list, or nothing on a rank that holds none."""
        return [self.inputs] if self.inputs else []

    @property
    def all_outputs(self) -> list[list[torch.Tensor]]:
        return [self.outputs] if self.outputs else []

    @property
    def outputs_by_member(self) -> list[list[torch.Tensor]]:
        """Of a coalesced gather: as many tensors of each member as this one gives."""
        width = len(self.inputs)
        return [self.outputs[start : start + width] for start in range(0, len(self.outputs), width)]

    def options(self, name: str) -> Any:
        """The options object of c10d of that name, with all it has a place for."""
        options = barrier_options(self.device) if name == "BarrierOptions" else getattr(c10d, name)()
        values = {"timeout": self.timeout, "asyncOp": self.is_async, "reduceOp": self.reduce, "rootRank": self.root}
        for field, value in values.items():
            if hasattr(options, field):
                setattr(options, field, value)
        return options


def barrier_options(device: torch.device) -> Any:
    """Options of a barrier on `device`: NCCL, whose group is bound to none, would take the GPU of the rank's number."""
    options = c10d.BarrierOptions()
    options.device = device
    if device.index is not None:
        options.device_ids = [device.index]
    return options


@dataclass(frozen=True)
class C10dOp:
    """How one op is made: a method of ProcessGroup, what it takes, and the options that come last."""

    method: str
    operands: Callable[[Arguments], tuple[Any, ...]]
    options: str | None = None


ROWS = {
    "allreduce_": C10dOp("allreduce", lambda a: (a.inputs,), "AllreduceOptions"),
    "allreduce_coalesced_": C10dOp("allreduce_coalesced", lambda a: (a.inputs,), "AllreduceCoalescedOptions"),
    "reduce_": C10dOp("reduce", lambda a: (a.inputs,), "ReduceOptions"),
    "broadcast_": C10dOp("broadcast", lambda a: (a.inputs,), "BroadcastOptions"),
    "allgather_": C10dOp("allgather", lambda a: (a.all_outputs, a.inputs), "AllgatherOptions"),
    "_allgather_base_": C10dOp("_allgather_base", lambda a: (a.outputs[0], a.inputs[0]), "AllgatherOptions"),
    "allgather_coalesced_": C10dOp(
        "allgather_coalesced", lambda a: (a.outputs_by_member, a.inputs), "AllgatherOptions"
    ),
    "allgather_into_tensor_coalesced_": C10dOp(
        "allgather_into_tensor_coalesced", lambda a: (a.outputs, a.inputs), "AllgatherOptions"
    ),
    "reduce_scatter_": C10dOp("reduce_scatter", lambda a: (a.outputs, a.all_inputs), "ReduceScatterOptions"),
    "_reduce_scatter_base_": C10dOp(
        "_reduce_scatter_base", lambda a: (a.outputs[0], a.inputs[0]), "ReduceScatterOptions"
    ),
    "reduce_scatter_tensor_coalesced_": C10dOp(
        "reduce_scatter_tensor_coalesced", lambda a: (a.outputs, a.inputs), "ReduceScatterOptions"
    ),
    "gather_": C10dOp("gather", lambda a: (a.all_outputs, a.inputs), "GatherOptions"),
    "scatter_": C10dOp("scatter", lambda a: (a.outputs, a.all_inputs), "ScatterOptions"),
    "alltoall_": C10dOp("alltoall", lambda a: (a.outputs, a.inputs), "AllToAllOptions"),
    "alltoall_base_": C10dOp(
        "alltoall_base", lambda a: (a.outputs[0], a.inputs[0], a.out_split, a.in_split), "AllToAllOptions"
    ),
    "send": C10dOp("send", lambda a: (a.inputs, a.peer, a.tag)),
    "recv_": C10dOp("recv", lambda a: (a.outputs, a.peer, a.tag)),
    "barrier": C10dOp("barrier", lambda a: (), "BarrierOptions"),
    "monitored_barrier_": C10dOp("monitored_barrier", lambda a: (a.timeout, False)),
}


def bind(record: CommRecord, op: str, arguments: Arguments) -> Launch:
    """The call of `record` by the c10d op `op`, a key of `ROWS`, ready to be made."""
    row = ROWS[op]
    try:
        options = () if row.options is None else (arguments.options(row.options),)
        return partial(getattr(arguments.pg, row.method), *row.operands(arguments), *options)
    except AttributeError as error:  # a torch that lacks it
        raise CrossrankError(
            f"call {record.id} ({record.op}): torch {torch.__version__} has no {op} ({error}); "
            "leave it out with --ops, or use the torch of the recording"
        ) from error
