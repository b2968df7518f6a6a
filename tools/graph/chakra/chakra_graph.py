"""The graph between a linked trace and a Chakra file: nodes on threads and streams, edges with reasons, groups.

The feeders read a group's name as an integer, with 0 for the world. The world is torch's default group. Another group
of all ranks orders its own communications, so it has its own number. A number depends only on the name and the
members of the group. So ranks that are converted on different machines or days agree on it. Old traces name groups by
an address, which differs between ranks. For these, only the members count.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from crossrank.comm import DEFAULT_GROUP, CommRecord, Group
from crossrank.errors import CrossrankError
from crossrank.tools.graph.linking import EdgeKind, LinkedTrace
from crossrank.tools.traces.execution_trace import HostOp
from crossrank.tools.traces.param_comms import named_by_address

RunsOn = tuple[str, object]
"""Executes nodes one after the other: ("thread", tid) or ("stream", (device, stream)). A communication that runs
elsewhere has its own: ("communication", its id)."""

# Names of nodes that represent no operation of the trace.
PAUSE = "host between operations"
LATE = "late start of the rank"
MESSAGES_END = "end of the messages"
WORLD = "0"
_MAX_INT = (1 << 31) - 1
"""The feeders read a 32-bit int."""


class NumberedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group as the traces and `comm_groups.json` have it, with its original name."""

    number: str
    ranks: tuple[int, ...]
    """Global ranks."""
    pg: str
    desc: str = ""


class Dependency(msgspec.Struct, frozen=True, gc=False):
    """Reason why a node waits for `source`."""

    source: int
    kind: EdgeKind
    inferred: bool = False


class Comm(msgspec.Struct, frozen=True, gc=False):
    """The communication of a node, for a simulator."""

    record: CommRecord
    group: NumberedGroup
    runs_as: CommRecord | None = None
    """What the simulator runs instead of `record`, if it cannot run that."""


class ChakraNode(msgspec.Struct, gc=False):
    """A node to write. Times are ns on the clock of the trace."""

    id: int
    name: str
    runs_on: RunsOn
    start_ns: int
    duration_ns: int
    """On a thread, the exclusive duration, since called operations are nodes too. After `cut_waits`, it ends at the
    latest when the next node of the thread starts."""
    is_cpu: bool = False
    dependencies: list[Dependency] = []
    comm: Comm | None = None
    rf_id: int = 0
    tensor_bytes: int = 0
    """Bytes of its operation's inputs and outputs; 0 if unknown."""
    flop: int | None = None
    """Floating-point operations; None if unknown."""
    op: HostOp | None = None
    """The host operation whose inputs and outputs are written with the node."""
    is_pause: bool = False
    """Whether the node, named `PAUSE`, represents what a thread did before a node that no other node covers."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What of a trace is written, and how."""

    deps: Literal["all", "data"] = "all"
    """all: `data_deps` has every dependency. data: the order of a thread is only in `ctrl_deps`."""
    nodes: Literal["all", "gpu"] = "all"
    """gpu: only GPU and communication nodes. The host then takes no time."""
    pauses: bool = True
    """Write what a thread did between its operations as nodes."""
    lower: bool = False
    """Replace communications that ASTRA-sim cannot run with ones that it can run."""
    messages: bool = False
    """With `lower`: write an all_to_all with splits as its sends and receives."""
    roofline: bool = False
    """With `lower`: nodes without a number of operations keep their time in a simulator whose roofline needs this
    number for every computation on a GPU."""
    group_node: bool = False
    """Write the process groups as a metadata node too. ASTRA-sim stops at such a node."""
    strict: bool = False
    """Refuse dependencies that form a cycle."""


def number_group(group: Group, world_size: int | None) -> NumberedGroup:
    """Return the group with its number. Raise `CrossrankError` if its members are unknown."""
    if not group.ranks:
        raise CrossrankError(
            f"process group {group.pg!r} has unknown members, and a simulator needs them; link with the comms file of "
            "the rank, or a trace with '## process_group:init ##'"
        )
    ranks = tuple(group.ranks)
    by_address = named_by_address(group.pg)
    number = str(1 + zlib.crc32(msgspec.json.encode(["" if by_address else group.pg, ranks])) % _MAX_INT)
    if (by_address or group.pg == "0" or group.desc == DEFAULT_GROUP) and world_size is not None:
        number = WORLD if ranks == tuple(range(world_size)) else number
    return NumberedGroup(number=number, ranks=ranks, pg=group.pg, desc=group.desc)


def number_groups(trace: LinkedTrace) -> dict[str, NumberedGroup]:
    """Return the groups that communications use, by name."""
    used = {one.record.pg: one.group for one in reversed(trace.communications) if one.group is not None}
    return {pg: number_group(group, trace.world_size) for pg, group in used.items()}


def merge(groups_by_rank: Iterable[Iterable[NumberedGroup]]) -> dict[str, list[int]]:
    """Return the content of `comm_groups.json`: number -> global ranks, for every group except the world.

    Raise `CrossrankError` if two groups have the same number.
    """
    merged: dict[str, NumberedGroup] = {}
    for groups in groups_by_rank:
        for group in groups:
            other = merged.setdefault(group.number, group)
            if other.ranks != group.ranks and group.number != WORLD:
                raise CrossrankError(
                    f"groups {other.pg!r} {list(other.ranks)} and {group.pg!r} {list(group.ranks)} have the same "
                    f"number {group.number}; give one of them another name (group_desc) and record again"
                )
    ordered = sorted(merged.values(), key=lambda group: int(group.number))
    return {group.number: list(group.ranks) for group in ordered if group.number != WORLD}
