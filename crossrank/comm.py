"""What a communication is: the vocabulary that every part of crossrank speaks.

`OPERATIONS` has one row per operation: how its bytes are counted, how its algorithm bandwidth becomes bus
bandwidth, whether it has a root or a peer. `CommRecord` is one communication call on one rank and `Group` one
process group, as they stand in `rank-N.comms.jsonl.zst`.

Bytes and bus factors are those of nccl-tests (doc/PERFORMANCE.md and src/*.cu there). With n the size of the
group, S = `bytes` and t the time of the collective in seconds: algbw = S / t, busbw = algbw * bus_factor(n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec

from crossrank.privacy import Privacy

MOST_RANKS = 1 << 20
"""More ranks than any job has: a larger number in a file or an option is an error, and no list is made of it."""

Int = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62) - 1)]
"""A number as a file may have it: sums and differences of it fit into 64 bits."""
Number = Annotated[Int, Privacy.NUMBER]
"""One that says nothing of its user."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
"""One that is not negative."""
MOST = 1 << 50
"""More bytes, and more of anything, than a job has: a larger number is damage. Sums of them fit into 64 bits."""
Amount = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
"""Bytes, or how many."""
Extents = Annotated[list[Int], msgspec.Meta(max_length=64), Privacy.SIZE]
"""Extents of a tensor; torch's have 64 at most."""

Payload = Literal["input", "output", "input_per_member", "output_per_member", "none"]
Side = Literal["input", "output", "none"]
Peer = TypeVar("Peer", int, int | None)
Locality = Literal["intra_node", "nvlink_domain", "cross_node", "unknown"]


def _ring_twice(n: int) -> float:
    return 2 * (n - 1) / n


def _all_but_self(n: int) -> float:
    return (n - 1) / n


def _whole(n: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Operation:
    """One operation, whatever the API or the backend calls it."""

    name: str
    payload: Payload
    """Which tensors make up S: all inputs, all outputs, either one times the group's size, or nothing."""
    bus_factor: Callable[[int], float] | None
    """busbw / algbw for a group of n ranks; None where a bandwidth means nothing (barrier)."""
    agrees: Side
    """Which tensors have the same number of elements on every rank of a call; the others may differ by rank."""
    releases_all: bool = False
    """Whether it ends on no rank before every rank has begun it."""
    rooted: bool = False
    p2p: bool = False
    suffixes: str = ""
    """What c10d, its backends and the functional collectives put behind the name, in lower-case letters alone."""

    def bytes(self, in_bytes: int, out_bytes: int, group_size: int) -> int:
        """S of nccl-tests in bytes, the same number on every rank of an even call.

        `in_bytes` and `out_bytes` are the sums over this rank's input and output tensors. gather and scatter
        count what the root holds, so that a rank that is not the root gives the same S as the root.
        """
        if self.payload == "none":
            return 0
        one = in_bytes if self.payload.startswith("input") else out_bytes
        return one * group_size if self.payload.endswith("per_member") else one


_GATHER = "base coalesced intotensor intotensorcoalesced intotensorout single v"
_SCATTER = "base coalesced tensor tensorcoalesced single v"
OPERATIONS: dict[str, Operation] = {
    row.name: row
    for row in (
        Operation("all_reduce", "input", _ring_twice, "input", releases_all=True, suffixes="coalesced sparse"),
        Operation("reduce", "input", _whole, "input", rooted=True, suffixes="oop"),
        Operation("broadcast", "input", _whole, "input", rooted=True, suffixes="oop"),
        Operation("all_gather", "output", _all_but_self, "output", releases_all=True, suffixes=_GATHER),
        Operation("reduce_scatter", "input", _all_but_self, "input", releases_all=True, suffixes=_SCATTER),
        Operation("gather", "input_per_member", _all_but_self, "input", rooted=True, suffixes="intotensor"),
        Operation("scatter", "output_per_member", _all_but_self, "output", rooted=True),
        Operation("all_to_all", "input", _all_but_self, "none", releases_all=True, suffixes="base single v vsingle"),
        Operation("send", "input", _whole, "none", p2p=True),
        Operation("recv", "output", _whole, "none", p2p=True, suffixes="anysource"),
        Operation("barrier", "none", None, "none", releases_all=True),
    )
}
_OTHER_NAMES = {"isend": "send", "irecv": "recv", "monitoredbarrier": "barrier", "allreducebarrier": "barrier"}
_BY_ALIAS = {
    row.name.replace("_", "") + suffix: row for row in OPERATIONS.values() for suffix in ("", *row.suffixes.split())
} | {other: OPERATIONS[name] for other, name in _OTHER_NAMES.items()}


@lru_cache(maxsize=1 << 14)
def operation_of(name: str) -> Operation | None:
    """The operation that c10d, a backend or a trace calls `name`; None for what is no communication.

    >>> [operation_of(name).name for name in ("c10d::_allgather_base_", "nccl:all_to_all", "recvAnySource")]
    ['all_gather', 'all_to_all', 'recv']
    """
    bare = name.rpartition(":")[2].split(".")[0]
    return _BY_ALIAS.get("".join(filter(str.isalpha, bare)).lower())


class CommRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One communication call on one rank.

    A field that is absent from the file has the default below: None where it has no meaning for the call.
    Ranks are global. Times are nanoseconds of the rank's monotonic clock; the header and the `clock` lines
    of the file pair that clock with wall time.
    """

    id: Number
    """Running number of this rank; also the NVTX payload and N of the range `crossrank#N` in ET and Kineto."""
    op: Annotated[str, Privacy.API]
    """A key of `OPERATIONS`, or the c10d op's own name where torch has one that the table lacks."""
    c10d: Annotated[str, Privacy.API]
    """The c10d op as the dispatcher names it, for example `_allgather_base_`."""
    pg: Annotated[str, Privacy.GROUP]
    """Name of the process group; its `group` line comes earlier in the file."""
    bytes: Annotated[int, msgspec.Meta(ge=-1, le=MOST), Privacy.SIZE]
    """S of nccl-tests, in bytes: see `Operation.bytes`."""
    t: Number
    api: Annotated[str, Privacy.API] | None = None
    """The public function called; None when C++ called (DDP's reducer on an autograd thread)."""
    seq: Number | None = None
    """This is the seq-th collective of this rank on that group, counted from 1; None for P2P."""
    p2p_seq: Number | None = None
    """This is the p2p_seq-th send to (receive from) that peer on that group, counted from 1."""
    inputs: list[Extents] = msgspec.field(name="in", default_factory=list)
    """Shape of every input tensor."""
    outputs: list[Extents] = msgspec.field(name="out", default_factory=list)
    """Shape of every output tensor; the same as the inputs where the call works in place."""
    in_split: Annotated[list[Int], Privacy.SIZE] | None = None
    """Rows of the input that go to each member of the group, for an uneven all_to_all."""
    out_split: Annotated[list[Int], Privacy.SIZE] | None = None
    """Rows of the output that come from each member of the group, for an uneven all_to_all."""
    dtype: Annotated[str, Privacy.DTYPE] | None = None
    """Element type of the inputs, or of the outputs where there are no inputs."""
    out_dtype: Annotated[str, Privacy.DTYPE] | None = None
    """Element type of the outputs where it differs from that of the inputs; a dump of the flight recorder has both."""
    reduce: Annotated[str, Privacy.REDUCTION] | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    """Whether the caller asked for a Work to wait on; None where the c10d op does not say."""
    root: Number | None = None
    peer: Number | None = None
    """Destination of a send, source of a receive; None for a receive from any source."""
    tag: Number | None = None
    batch: Number | None = None
    """Id of the first record of the coalesced or batched launch that this call is part of."""
    source: Annotated[str, Privacy.PLACE] | None = None
    """`file.py:line` of the first frame outside torch and crossrank; None when no Python frame called."""
    locality: Locality = "unknown"
    step: Number = 0
    """Iteration, counted from 0."""
    thread: Number | None = None
    """The thread that called, as the operating system numbers it; None in files of earlier versions."""
    members: list[CommRecord] = msgspec.field(default_factory=list)
    """The calls of a launch that have no numbers of their own, as the flight recorder notes coalesced collectives."""


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process group as one of its members sees it."""

    pg: Annotated[str, Privacy.GROUP]
    size: Number
    ranks: list[Number] | None = None
    """Global ranks in the group's order; None where torch does not know them (groups outside its registry)."""
    desc: Annotated[str, Privacy.GROUP] = ""
    backend: Annotated[str, Privacy.BACKEND] = ""
    locality: Locality = "unknown"
    eager: bool = False
    """It is bound to a device (`device_id=`): its communicator is made with it, not by its first call, and carries all
    its calls in one order, single sends and receives too."""


def is_p2p(record: CommRecord) -> bool:
    """Whether a call is a send or a receive."""
    operation = OPERATIONS.get(record.op)
    return operation is not None and operation.p2p


def has_size(record: CommRecord) -> bool:
    """Whether `bytes` of a record is known.

    A call that moves data, but has neither bytes nor tensors, comes from a source that does not say them: a kernel that
    is known by its name alone, a marker of which the sizes were left out.
    """
    operation = OPERATIONS.get(record.op)
    moves_none = operation is not None and operation.payload == "none"
    return moves_none or bool(record.bytes or record.inputs or record.outputs or record.in_split or record.out_split)


def ends_of(op: str, rank: int, peer: Peer) -> tuple[int | Peer, int | Peer]:
    """(sender, receiver) of a send or receive that `rank` makes."""
    return (rank, peer) if op == "send" else (peer, rank)


def crosses_nodes(locality: Locality) -> bool:
    """Whether CROSSNODE emits such a call. What is not known to stay inside a node counts as crossing."""
    return locality != "intra_node"


def total_bytes(shapes: Sequence[Sequence[int]], item_size: int) -> int:
    """Bytes of tensors of these shapes with `item_size` bytes per element.

    >>> total_bytes([[2, 3], [4]], 4)
    40
    """
    return sum(map(math.prod, shapes)) * item_size
