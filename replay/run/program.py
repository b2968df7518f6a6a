"""One rank's calls, bound to their tensors and process groups.

All work that would cost time between calls is done in advance, by `prepare`. So the `executor` only launches, waits and
reads the clock. A call costs less than torch's public functions, which check and convert their arguments every time.
The arguments are in `ROWS`, by the op's name in the dispatcher. A launch is one call into C++ on the ProcessGroup. The
recorder is below that and records it as usual.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import distributed_c10d as c10d

from crossrank.comm import CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.replay.plan.dtype_fallback import Substitute, substitute
from crossrank.replay.plan.memory_plan import lay_out
from crossrank.replay.plan.plan import PER_THREAD, PlannedCall, Streams, launches, waited_before
from crossrank.replay.plan.schedule import number_threads
from crossrank.replay.plan.shapes import tensors
from crossrank.replay.plan.streams import SHARINGS

FILL = 0x3C
"""Every byte of the memory: small normal numbers in each type, since arithmetic on denormal ones is slow."""
_NO_FUTURE = ("reduce_scatter", "barrier")
"""Operations whose gloo Work has no future."""
_LANE_WIDTH = {"gloo": 2}
"""gloo runs the calls of a group on two threads, other backends in launch order."""


Launch = Callable[[], Any]
"""Makes the call and returns its Work, or None if the backend returns none."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a row of `ROWS` needs to make the call of `record` on `pg` with the members `ranks`."""

    record: CommRecord
    pg: ProcessGroup
    ranks: list[int]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    reduce: ReduceOp.RedOpType
    is_async: bool
    timeout: timedelta
    device: torch.device

    def member(self, rank: int | None) -> int:
        """Return the number of `rank` within the group."""
        return 0 if rank is None else self.ranks.index(rank)

    @property
    def other_end(self) -> tuple[int, int]:
        """(peer, tag) of a send or receive."""
        return self.member(self.record.peer), self.record.tag or 0

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        return self.record.out_split or [], self.record.in_split or []

    @property
    def all_inputs(self) -> list[list[torch.Tensor]]:
        """The inputs for all members as c10d takes them: a list in a list, or nothing on a rank without inputs."""
        return [self.inputs] if self.inputs else []

    @property
    def all_outputs(self) -> list[list[torch.Tensor]]:
        return [self.outputs] if self.outputs else []

    @property
    def outputs_by_member(self) -> list[list[torch.Tensor]]:
        """For a coalesced gather: for each member, as many tensors as there are inputs."""
        width = len(self.inputs)
        return [self.outputs[start : start + width] for start in range(0, len(self.outputs), width)]

    def joined(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return `whole` with the members' parts concatenated: unlike NCCL, gloo does not take them stacked."""
        is_stacked = whole.dim() == part.dim() + 1 and part.numel() > 0
        return whole.view(-1, *part.shape[1:]) if is_stacked and self.device.type == "cpu" else whole

    def options(self, name: str) -> Any:
        """Return c10d's options object of that name, with all fields set that it has."""
        options = barrier_options(self.device) if name == "BarrierOptions" else getattr(c10d, name)()
        values = {"timeout": self.timeout, "asyncOp": self.is_async, "reduceOp": self.reduce}
        values["rootRank"] = self.member(self.record.root)
        for field, value in values.items():
            if hasattr(options, field):
                setattr(options, field, value)
        return options


def barrier_options(device: torch.device) -> Any:
    """Return options of a barrier on `device`: NCCL in an unbound group would use the GPU with the rank's number."""
    options = c10d.BarrierOptions()
    options.device = device
    if device.index is not None:
        options.device_ids = [device.index]
    return options


ROWS: dict[str, tuple[Callable[[Arguments], tuple[Any, ...]], str | None]] = {
    "allreduce_": (lambda a: (a.inputs,), "AllreduceOptions"),
    "allreduce_coalesced_": (lambda a: (a.inputs,), "AllreduceCoalescedOptions"),
    "reduce_": (lambda a: (a.inputs,), "ReduceOptions"),
    "broadcast_": (lambda a: (a.inputs,), "BroadcastOptions"),
    "allgather_": (lambda a: (a.all_outputs, a.inputs), "AllgatherOptions"),
    "_allgather_base_": (lambda a: (a.joined(a.outputs[0], a.inputs[0]), a.inputs[0]), "AllgatherOptions"),
    "allgather_coalesced_": (lambda a: (a.outputs_by_member, a.inputs), "AllgatherOptions"),
    "allgather_into_tensor_coalesced_": (lambda a: (a.outputs, a.inputs), "AllgatherOptions"),
    "reduce_scatter_": (lambda a: (a.outputs, a.all_inputs), "ReduceScatterOptions"),
    "_reduce_scatter_base_": (
        lambda a: (a.outputs[0], a.joined(a.inputs[0], a.outputs[0])),
        "ReduceScatterOptions",
    ),
    "reduce_scatter_tensor_coalesced_": (lambda a: (a.outputs, a.inputs), "ReduceScatterOptions"),
    "gather_": (lambda a: (a.all_outputs, a.inputs), "GatherOptions"),
    "scatter_": (lambda a: (a.outputs, a.all_inputs), "ScatterOptions"),
    "alltoall_": (lambda a: (a.outputs, a.inputs), "AllToAllOptions"),
    "alltoall_base_": (lambda a: (a.outputs[0], a.inputs[0], *a.splits), "AllToAllOptions"),
    "send": (lambda a: (a.inputs, *a.other_end), None),
    "recv_": (lambda a: (a.outputs, *a.other_end), None),
    "barrier": (lambda a: (), "BarrierOptions"),
    "monitored_barrier_": (lambda a: (a.timeout, False), None),
}
"""c10d op -> arguments of the ProcessGroup method that makes it, and the options that come last. The method has the
op's name without the final underscore."""


@dataclass(frozen=True, kw_only=True)
class OwnTensors:
    """Tensors of a call that operations make again in every pass."""

    slots: list[Any]
    """All current tensors."""
    inputs: list[int]
    outputs: list[int]

    def given_to(self, arguments: Arguments) -> Arguments:
        """Return `arguments` with the current tensors."""
        inputs, outputs = ([self.slots[number] for number in side] for side in (self.inputs, self.outputs))
        return replace(arguments, inputs=inputs, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A launch, bound to its tensors and group."""

    calls: range
    """Indices of its calls: one, or those of a batch."""
    launch: Launch
    waits: tuple[int, ...]
    """Launches that are waited for before this one, by their position in the program."""
    blocking: bool
    """The rank waits for its end before it continues."""
    has_future: bool
    """Its Work has a future that completes at its end."""
    holds_host: bool
    """A wait for it blocks the host, not only the stream, also on a GPU (barriers)."""
    thread: int = 0
    """Number of the thread that makes it. On a GPU, each thread has its own stream."""
    recorded_thread: int = 0
    """Number of the recorded thread, whose gaps it keeps. Several recorded threads may be one thread here."""
    follows: int = -1
    """The previous launch on its group if another thread makes that, to keep the order of the group's calls; otherwise
    -1."""
    barrier: Launch | None = None
    """A barrier of its group, before the launch and after its end."""
    lane: str
    """At most `Program.width` launches of one lane run at once."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that one rank does in a pass."""

    calls: list[PlannedCall]
    bound: list[Bound]
    tensors: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    """(inputs, outputs) by call."""
    substitutes: list[Substitute]
    device: torch.device
    groups: dict[str, Group]
    last_waits: tuple[tuple[int, ...], ...]
    """By thread: launches that are waited for at the end."""
    block: torch.Tensor
    """The memory of all tensors."""
    width: int
    """Launches of one lane that a backend runs at once."""


def prepare(
    calls: list[PlannedCall],
    *,
    rank: int,
    groups: dict[str, tuple[Group, ProcessGroup]],
    backend: str,
    device: torch.device,
    timeout: timedelta,
    own: Mapping[int, OwnTensors] = MappingProxyType({}),
    barriers: bool = False,
    streams: Streams = PER_THREAD,
) -> Program:
    """Bind `calls` to tensors and groups; those in `own`, by index, use tensors of operations. With `barriers`, the
    members of a group meet before and after each collective. `streams` decides which recorded threads are one thread.
    Raises `CrossrankError` if this torch or this machine cannot run them."""
    spans = launches(calls)
    substitutes = [substitute(call.record, backend) for call in calls]
    until = waited_before(calls, spans)
    offsets, size = lay_out(calls, own)
    try:
        block = torch.full((max(size, 1),), FILL, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise CrossrankError(
            f"rank {rank}: {size} bytes for tensors cannot be allocated on {device} ({str(error).splitlines()[0]}); "
            "try --scale-bytes below 1"
        ) from error
    views = _make_views(block, calls, substitutes, offsets, own)
    numbers, recorded_numbers = SHARINGS[streams](calls), number_threads(calls)
    thread_of = [numbers[calls[first].record.thread] for first, _ in spans]
    threads = range(len(set(thread_of)))
    waits: list[list[int]] = [[] for _ in spans]
    last_waits: list[list[int]] = [[] for _ in threads]
    launches_of_thread: list[list[int]] = [[] for _ in threads]
    for position, thread in enumerate(thread_of):
        launches_of_thread[thread].append(position)
    for position, (first, _) in enumerate(spans):
        if not calls[first].blocking:
            # The launching thread waits for it, before its next launch at that time.
            siblings = launches_of_thread[thread_of[position]]
            place = bisect_left(siblings, until[position])
            (waits[siblings[place]] if place < len(siblings) else last_waits[thread_of[position]]).append(position)
    latest: dict[str, int] = {}
    bound = []
    for position, (first, end) in enumerate(spans):
        record, blocking = calls[first].record, calls[first].blocking
        members = []
        for index in range(first, end):
            one, instead, (inputs, outputs) = calls[index].record, substitutes[index], views[index]
            group, pg = groups[one.pg]
            arguments = Arguments(
                record=one,
                pg=pg,
                ranks=group.ranks or [],
                inputs=inputs,
                outputs=outputs,
                reduce=getattr(ReduceOp, (instead.reduce or "sum").upper()),
                is_async=not blocking,
                timeout=timeout,
                device=device,
            )
            members.append(_bind_call(instead.c10d, arguments, own.get(index)))
        single = len(members) == 1
        before = latest.get(record.pg, -1) if record.peer is None else -1
        if record.peer is None:
            latest[record.pg] = position
        bound.append(
            Bound(
                calls=range(first, end),
                launch=members[0] if single else _combine(members, groups[record.pg][1], device),
                waits=tuple(waits[position]),
                blocking=blocking,
                has_future=record.peer is None and single and not (backend == "gloo" and record.op in _NO_FUTURE),
                holds_host=record.op == "barrier",
                thread=thread_of[position],
                recorded_thread=recorded_numbers[record.thread],
                follows=before if before >= 0 and thread_of[before] != thread_of[position] else -1,
                barrier=_make_barrier(groups[record.pg][1], device) if barriers and record.peer is None else None,
                lane=record.pg if record.peer is None else f"{record.pg} {record.peer} {record.op}",
            )
        )
    return Program(
        calls=calls,
        bound=bound,
        tensors=views,
        substitutes=substitutes,
        device=device,
        groups={name: group for name, (group, _) in groups.items()},
        last_waits=tuple(map(tuple, last_waits)),
        block=block,
        width=_LANE_WIDTH.get(backend, 1),
    )


def _bind_call(op: str, arguments: Arguments, own: OwnTensors | None) -> Launch:
    """Bind the call by the c10d op `op`, a key of `ROWS`."""
    operands, options = ROWS[op]
    record = arguments.record
    try:
        last = () if options is None else (arguments.options(options),)
        method = getattr(arguments.pg, op.rstrip("_"))
        if own is None:
            return partial(method, *operands(arguments), *last)
        return lambda: method(*operands(own.given_to(arguments)), *last)
    except AttributeError as error:  # a torch without this op
        raise CrossrankError(
            f"call {record.id} ({record.op}): torch {torch.__version__} has no {op} ({error}); "
            "skip it with --drop, or use the torch of the recording"
        ) from error


def _make_barrier(pg: ProcessGroup, device: torch.device) -> Launch:
    """Return a barrier of the backend itself, so that crossrank does not record it as a call."""
    backend: Any = pg._get_backend(device)
    return partial(backend.barrier, barrier_options(device))


def late_ends(program: Program) -> list[int]:
    """Return the calls whose end is visible only in their wait."""
    on_gpu = program.device.type == "cuda"
    return [
        index
        for bound in program.bound
        if not bound.blocking and (bound.holds_host if on_gpu else not bound.has_future)
        for index in bound.calls
    ]


def _make_views(
    block: torch.Tensor,
    calls: list[PlannedCall],
    substitutes: list[Substitute],
    offsets: list[int],
    own: Container[int],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return views into the block. Calls with the same memory and shape share one tensor object."""

    @cache
    def view(at: int, dtype: torch.dtype, extents: tuple[int, ...]) -> torch.Tensor:
        return block[at : at + prod(extents) * dtype.itemsize].view(dtype).view(extents)

    at = iter(offsets)
    made: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for index, (call, instead) in enumerate(zip(calls, substitutes, strict=True)):
        if index in own:
            made.append(([], []))
            continue
        dtype, more = getattr(torch, instead.dtype), (instead.elements,) if instead.elements > 1 else ()
        sides = [[view(next(at), dtype, (*shape, *more)) for shape in side] for side in tensors(call.record)]
        made.append((sides[0], sides[-1]))
    return made


def _combine(members: list[Launch], pg: ProcessGroup, device: torch.device) -> Launch:
    """Combine several calls into one launch: coalesced if the backend can, else one after another without a wait."""
    backend: Any = pg._get_backend(device)

    def coalesced() -> Any:
        pg._start_coalescing(device)
        for member in members:
            member()
        return pg._end_coalescing(device)

    return coalesced if getattr(backend, "supports_coalescing", False) else lambda: _Works([one() for one in members])


class _Works:
    """The Works of a batch as one."""

    __slots__ = ("works",)

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()
