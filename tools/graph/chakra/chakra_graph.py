"""The graph between a linked trace and a Chakra file: nodes on threads and streams, edges with their reasons, groups.

Process groups have numbers: the feeders take a group's name for an integer, with 0 for the world. The world is torch's
default group; another one of all ranks orders its communications by itself and has a number. A number is made from the
group's name and members alone, so that ranks converted apart, on different machines or days, agree on it. Groups that
old traces name by an address, which differs between ranks, go by their members.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from crossrank.comm import CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.tools.graph.linking import EdgeKind, LinkedTrace
from crossrank.tools.traces.execution_trace import HostOp
from crossrank.tools.traces.param_comms import named_by_address

RunsOn = tuple[str, object]
"""What runs one thing after the other: ("thread", tid) or ("stream", (device, stream)); a communication that runs
elsewhere has one of its own, ("communication", its id)."""

# Names of nodes that stand for no operation of the trace.
PAUSE = "host between operations"
LATE = "until its rank began"
MESSAGES_END = "end of the messages"
WORLD = "0"
_LARGEST = (1 << 31) - 1
"""The feeders read an int."""


class NumberedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group as the traces and `comm_groups.json` have it, and what it was called."""

    number: str
    ranks: tuple[int, ...]
    """Global ranks."""
    pg: str
    desc: str = ""


class Dependency(msgspec.Struct, frozen=True, gc=False):
    """Why a node waits for `source`."""

    source: int
    kind: EdgeKind
    inferred: bool = False


class Comm(msgspec.Struct, frozen=True, gc=False):
    """What a communication node says to a simulator."""

    record: CommRecord
    group: NumberedGroup
    runs_as: CommRecord | None = None
    """What the simulator is to run instead of `record`, which it cannot run."""


class ChakraNode(msgspec.Struct, gc=False):
    """A node to be. Times are nanoseconds on the clock of the trace."""

    id: int
    name: str
    runs_on: RunsOn
    start_ns: int
    duration_ns: int
    """On a thread: exclusive, because the operations it calls are nodes of their own; and after `cut_waits` only
    until the next node of the thread."""
    is_cpu: bool = False
    dependencies: list[Dependency] = []
    comm: Comm | None = None
    rf_id: int = 0
    tensor_bytes: int = 0
    """Of what its operation takes and gives; 0 = not known."""
    flop: int | None = None
    """Floating-point operations; None = not known."""
    op: HostOp | None = None
    """The host operation whose inputs and outputs are written with it."""
    is_pause: bool = False
    """Stands for what a thread did before a node that no node has: a computation on the host named `PAUSE`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What of a trace is written, and how."""

    deps: Literal["all", "data"] = "all"
    """all: `data_deps` hold every dependency; data: what is only the order of a thread stands in `ctrl_deps` alone."""
    nodes: Literal["all", "gpu"] = "all"
    """gpu: GPU and communication nodes only; the host then takes no time."""
    pauses: bool = True
    """Write what a thread did between its operations as nodes."""
    lower: bool = False
    """Turn communications that ASTRA-sim cannot run into ones that it runs."""
    messages: bool = False
    """With `lower`: an all_to_all with splits is its sends and receives."""
    roofline: bool = False
    """With `lower`: what has no number of operations keeps its time in a simulator whose roofline needs one of every
    computation on a GPU."""
    group_node: bool = False
    """Write the process groups as a metadata node too, at which ASTRA-sim stops."""
    strict: bool = False
    """Refuse dependencies that form a cycle."""


def number_group(group: Group, world_size: int | None) -> NumberedGroup:
    """The group with its number. Raises `CrossrankError` where its members are not known."""
    if not group.ranks:
        raise CrossrankError(
            f"process group {group.pg!r} has no known members, and a simulator needs them; link with the comms file of "
            "the rank, or a trace with '## process_group:init ##'"
        )
    ranks = tuple(group.ranks)
    by_address = named_by_address(group.pg)
    number = str(1 + zlib.crc32(msgspec.json.encode(["" if by_address else group.pg, ranks])) % _LARGEST)
    if (by_address or group.pg == "0" or group.desc == "default_pg") and world_size is not None:
        number = WORLD if ranks == tuple(range(world_size)) else number
    return NumberedGroup(number=number, ranks=ranks, pg=group.pg, desc=group.desc)


def number_groups(trace: LinkedTrace) -> dict[str, NumberedGroup]:
    """The groups that communications use, by their names."""
    used = {one.record.pg: one.group for one in reversed(trace.communications) if one.group is not None}
    return {pg: number_group(group, trace.world_size) for pg, group in used.items()}


def merge(of_ranks: Iterable[Iterable[NumberedGroup]]) -> dict[str, list[int]]:
    """`comm_groups.json`: number -> global ranks of every group but the world.

    Raises `CrossrankError` where one number stands for two groups.
    """
    merged: dict[str, NumberedGroup] = {}
    for groups in of_ranks:
        for group in groups:
            other = merged.setdefault(group.number, group)
            if other.ranks != group.ranks and group.number != WORLD:
                raise CrossrankError(
                    f"groups {other.pg!r} {list(other.ranks)} and {group.pg!r} {list(group.ranks)} got the same number "
                    f"{group.number}; give one of them another name (group_desc) and record again"
                )
    ordered = sorted(merged.values(), key=lambda group: int(group.number))
    return {group.number: list(group.ranks) for group in ordered if group.number != WORLD}
