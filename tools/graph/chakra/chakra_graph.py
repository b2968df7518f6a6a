"""The graph between a linked trace and a Chakra file: nodes on threads and streams, edges with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from crossrank.comm import CommRecord
from crossrank.tools.graph.chakra.group_numbers import NumberedGroup
from crossrank.tools.graph.linking import EdgeKind
from crossrank.tools.traces.execution_trace import HostOp

RunsOn = tuple[str, object]
"""What runs one thing after the other: ("thread", tid) or ("stream", (device, stream)); a communication that runs
elsewhere has one of its own, ("communication", its id)."""

# Names of nodes that stand for no operation of the trace.
PAUSE = "host between operations"
LATE = "until its rank began"
MESSAGES_END = "end of the messages"


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
