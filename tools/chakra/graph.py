"""The graph between a linked trace and a Chakra file: nodes with their lane, and edges with their reasons."""

from __future__ import annotations

from typing import Literal

import msgspec

from crossrank.comm import CommRecord
from crossrank.tools.chakra.groups import NumberedGroup
from crossrank.tools.linking import EdgeKind

Lane = tuple[str, object]
"""What runs one thing after the other: ("thread", tid) or ("stream", (device, stream)); a communication that runs
elsewhere has one of its own, ("communication", its id)."""


class Dependency(msgspec.Struct, frozen=True, gc=False):
    """Why a node waits for `source`."""

    source: int
    kind: EdgeKind
    inferred: bool = False


class Comm(msgspec.Struct, frozen=True, gc=False):
    """What a communication node says to a simulator."""

    record: CommRecord
    group: NumberedGroup


class ChakraNode(msgspec.Struct, gc=False):
    """A node to be. Times are nanoseconds on the clock of the trace."""

    id: int
    name: str
    lane: Lane
    start_ns: int
    duration_ns: int
    """On a thread: exclusive, because the operations it calls are nodes of their own."""
    is_cpu: bool
    dependencies: list[Dependency]
    comm: Comm | None = None
    host: int | None = None
    """The execution trace's node that it comes from, or that launched it."""
    rf_id: int = 0
    tensor_bytes: int = 0
    inputs: tuple[str, str, str] | None = None
    """Values, shapes and types as JSON text."""
    outputs: tuple[str, str, str] | None = None


DependencyMode = Literal["all", "data"]
