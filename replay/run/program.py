"""One rank's calls, bound to their tensors and process groups: ready to be made without another thought.

`prepare` does beforehand what would cost time between calls, so that `executor` does nothing but launch, wait and read
the clock: per call it costs less than torch's own public functions do.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp

from crossrank.comm import Group
from crossrank.dtypes import DTYPES
from crossrank.errors import CrossrankError
from crossrank.replay.plan.dtype_fallback import Substitute, substitute
from crossrank.replay.plan.memory_plan import Need, assign_offsets
from crossrank.replay.plan.plan import PlannedCall, launches, waited_before
from crossrank.replay.plan.shapes import tensors
from crossrank.replay.run.c10d_calls import Arguments, Launch, bind

FILL = 0x3C
"""Every byte of the arena: small normal numbers in each type, for arithmetic on denormal ones would be slow."""
_NO_FUTURE = ("reduce_scatter", "barrier")
"""Operations whose gloo Work has no future."""
_WIDTH = {"gloo": 2}
"""gloo runs the calls of a group on two threads, others in the order of their launches."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A launch that is ready to go."""

    first: int
    """Index of its first call."""
    count: int
    launch: Launch
    waits: tuple[int, ...]
    """Launches that are waited for before this one, by their position in the program."""
    blocking: bool
    """The rank does not go on before it is over."""
    has_future: bool
    """Its Work can tell when it was over, whoever waits."""
    holds_host: bool
    """A wait for it holds the host, on a GPU too, and not the stream alone (barriers)."""
    lane: str
    """What carries it: launches of one lane do not run beside each other, but for `Program.width` of them."""


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
    last_waits: tuple[int, ...]
    """Launches that are waited for at the end."""
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
) -> Program:
    """Bind `calls` to tensors and groups. Raises `CrossrankError` where this torch or this machine cannot."""
    spans = launches(calls)
    substitutes = [substitute(call.record, backend) for call in calls]
    until = waited_before(calls, spans)
    needs = [
        Need(size, position, until[position])
        for position, (first, end) in enumerate(spans)
        for index in range(first, end)
        for side in tensors(calls[index].record)
        for size in (
            prod(shape) * DTYPES[substitutes[index].dtype].size * substitutes[index].elements for shape in side
        )
    ]
    layout = assign_offsets(needs)
    try:
        block = torch.full((max(layout.size, 1),), FILL, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise CrossrankError(
            f"rank {rank}: {layout.size} bytes for tensors cannot be had on {device} ({str(error).splitlines()[0]}); "
            "try --scale-bytes below 1"
        ) from error
    views = _tensors(block, calls, substitutes, layout.offsets)
    waits: list[list[int]] = [[] for _ in range(len(spans) + 1)]
    for position, (first, _) in enumerate(spans):
        if not calls[first].blocking:
            waits[until[position]].append(position)
    bound = []
    for position, (first, end) in enumerate(spans):
        record, blocking = calls[first].record, calls[first].blocking
        members = []
        for index in range(first, end):
            one, instead, (inputs, outputs) = calls[index].record, substitutes[index], views[index]
            group, pg = groups[one.pg]
            ranks = group.ranks or []
            arguments = Arguments(
                pg=pg,
                inputs=inputs,
                outputs=outputs,
                reduce=getattr(ReduceOp, (instead.reduce or "sum").upper()),
                is_async=not blocking,
                root=ranks.index(one.root) if one.root is not None else 0,
                peer=ranks.index(one.peer) if one.peer is not None else 0,
                tag=one.tag or 0,
                in_split=one.in_split or [],
                out_split=one.out_split or [],
                timeout=timeout,
                device=device,
            )
            members.append(bind(one, instead.c10d, arguments))
        single = len(members) == 1
        bound.append(
            Bound(
                first=first,
                count=end - first,
                launch=members[0] if single else _together(members, groups[record.pg][1], device),
                waits=tuple(waits[position]),
                blocking=blocking,
                has_future=record.peer is None and single and not (backend == "gloo" and record.op in _NO_FUTURE),
                holds_host=record.op == "barrier",
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
        last_waits=tuple(waits[-1]),
        block=block,
        width=_WIDTH.get(backend, 1),
    )


def late_ends(program: Program) -> list[int]:
    """Calls of which only the wait tells when they were over."""
    on_gpu = program.device.type == "cuda"
    return [
        index
        for bound in program.bound
        if not bound.blocking and (bound.holds_host if on_gpu else not bound.has_future)
        for index in range(bound.first, bound.first + bound.count)
    ]


def _tensors(
    block: torch.Tensor, calls: list[PlannedCall], substitutes: list[Substitute], offsets: list[int]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Views into the block. Calls with the same memory and shape share one tensor object."""
    known: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}
    at = iter(offsets)
    made = []
    for call, instead in zip(calls, substitutes, strict=True):
        sides: list[list[torch.Tensor]] = []
        for side in tensors(call.record):
            views = []
            for shape in side:
                extents = tuple(shape) if instead.elements == 1 else (*shape, instead.elements)
                key = (next(at), instead.dtype, extents)
                tensor = known.get(key)
                if tensor is None:
                    dtype = getattr(torch, instead.dtype)
                    piece = block[key[0] : key[0] + prod(extents) * dtype.itemsize]
                    tensor = known[key] = piece.view(dtype).view(extents)
                views.append(tensor)
            sides.append(views)
        made.append((sides[0], sides[-1]))
    return made


def _together(members: list[Launch], pg: ProcessGroup, device: torch.device) -> Launch:
    """Several calls as one launch: coalesced where the backend can, else one after the other without a wait."""
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
