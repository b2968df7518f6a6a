"""The vocabulary of communication, which every part of crossrank uses.

`OPERATIONS` has one row per operation: how its bytes are counted, how algorithm bandwidth becomes bus bandwidth, and
whether it has a root or a peer. A `CommRecord` is one communication call of one rank. A `Group` is one process group.
Both are lines of `rank-N.comms.jsonl.zst`.

Bytes and bus factors follow nccl-tests (doc/PERFORMANCE.md and src/*.cu). With n the size of the group, S = `bytes`
and t the time of the collective in seconds: algbw = S / t, busbw = algbw * bus_factor(n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec

from crossrank.dtypes import dtype_of
from crossrank.privacy import Privacy

DEFAULT_GROUP = "default_pg"
"""Description that torch gives the default process group."""
MOST_RANKS = 1 << 20
"""More ranks than any job has. A larger number in a file or an option is an error, and no list is made of it."""

Int = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62) - 1)]
"""An integer in a file. Sums and differences of two fit into 64 bits."""
Number = Annotated[Int, Privacy.NUMBER]
"""An integer that reveals nothing about the user."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
"""An integer that is not negative."""
UNKNOWN_SIZE = -1
"""Bytes of a call whose size is unknown."""
UNKNOWN_STEP = -(1 << 31)
"""Step of a call whose step is unknown."""
MOST = 1 << 50
"""More bytes, or items of any kind, than a job has. A larger number is damage. Sums of them fit into 64 bits."""
Amount = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""In the order of c10d's RedOpType. A record has `op_N` for a number that is larger."""
"""A number of bytes or items."""
Extents = Annotated[list[Int], msgspec.Meta(max_length=64), Privacy.SIZE]
"""Extents of a tensor. torch allows at most 64 dimensions."""

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
    """One operation, independent of its names in APIs and backends."""

    name: str
    payload: Payload
    """Which tensors make up S: all inputs, all outputs, inputs or outputs times the group's size, or none."""
    bus_factor: Callable[[int], float] | None
    """busbw / algbw for a group of n ranks; None if a bandwidth has no meaning (barrier)."""
    agrees: Side
    """Which tensors have the same number of elements on every rank of a call. The others may differ by rank."""
    releases_all: bool = False
    """Whether no rank ends the operation before every rank has started it."""
    by_pairs: bool = False
    """Whether it consists of sends and receives: a rank ends it when its own pairs are through."""
    rooted: bool = False
    p2p: bool = False
    suffixes: str = ""
    """Suffixes that c10d, its backends and the functional collectives add to the name; lower-case letters only."""

    def bytes(self, in_bytes: int, out_bytes: int, group_size: int) -> int:
        """Return S of nccl-tests in bytes, the same on every rank of an even call.

        `in_bytes` and `out_bytes` are the sums over this rank's input and output tensors. gather and scatter count
        the bytes of the root, so that every rank returns the same S as the root.
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
        Operation("all_to_all", "input", _all_but_self, "none", True, by_pairs=True, suffixes="base single v vsingle"),
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
    """Return the operation that c10d, a backend or a trace calls `name`; None if it is no communication.

    >>> [operation_of(name).name for name in ("c10d::_allgather_base_", "nccl:all_to_all", "recvAnySource")]
    ['all_gather', 'all_to_all', 'recv']
    """
    bare = name.rpartition(":")[2].split(".")[0]
    return _BY_ALIAS.get("".join(filter(str.isalpha, bare)).lower())


class CommRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One communication call of one rank.

    A field that is absent from the file has the default below; None means that the call has no such value. Ranks
    are global. Times are ns of the rank's monotonic clock. The header and the `clock` lines pair it with wall time.
    """

    id: Number
    """Running number of this rank's calls; also the NVTX payload and N of the range `crossrank#N` in ET and Kineto."""
    op: Annotated[str, Privacy.API]
    """A key of `OPERATIONS`, or the c10d op's own name if the table lacks the operation."""
    c10d: Annotated[str, Privacy.API] = ""
    """The c10d op as the dispatcher calls it, for example `_allgather_base_`; empty if unknown."""
    pg: Annotated[str, Privacy.GROUP]
    """Name of the process group. Its `group` line is earlier in the file."""
    bytes: Annotated[int, msgspec.Meta(ge=-1, le=MOST), Privacy.SIZE]
    """S of nccl-tests, in bytes: see `Operation.bytes`."""
    t: Number
    api: Annotated[str, Privacy.API] | None = None
    """The public function that the user called; None for a call from C++ (DDP's reducer on an autograd thread)."""
    seq: Number | None = None
    """Number of this collective among this rank's collectives on that group, from 1; None for P2P."""
    p2p_seq: Number | None = None
    """Number of this send or receive among those with the same peer on that group, from 1."""
    inputs: list[Extents] = msgspec.field(name="in", default_factory=list)
    """Shape of every input tensor."""
    outputs: list[Extents] = msgspec.field(name="out", default_factory=list)
    """Shape of every output tensor; equal to the inputs if the call works in place."""
    in_split: Annotated[list[Int], Privacy.SIZE] | None = None
    """Rows of the input that go to each member of the group, for an uneven all_to_all."""
    out_split: Annotated[list[Int], Privacy.SIZE] | None = None
    """Rows of the output that come from each member of the group, for an uneven all_to_all."""
    dtype: Annotated[str, Privacy.DTYPE] | None = None
    """Element type of the inputs, or of the outputs if there are no inputs."""
    out_dtype: Annotated[str, Privacy.DTYPE] | None = None
    """Element type of the outputs if it differs from that of the inputs. A flight-recorder dump has both."""
    reduce: Annotated[str, Privacy.REDUCTION] | None = None
    is_async: bool | None = msgspec.field(name="async", default=None)
    """Whether the caller asked for a Work to wait on; None if the c10d op has no such argument."""
    root: Number | None = None
    peer: Number | None = None
    """Destination of a send, source of a receive; None for a receive from any source."""
    tag: Number | None = None
    batch: Number | None = None
    """Id of the first record of the coalesced or batched launch that this call belongs to."""
    source: Annotated[str, Privacy.PLACE] | None = None
    """`file.py:line` of the first frame outside torch and crossrank; None if no Python frame made the call."""
    locality: Locality = "unknown"
    step: Number = 0
    """Training step, counted from 0; `UNKNOWN_STEP` = unknown."""
    thread: Number | None = None
    """The operating system's id of the calling thread; None in files of earlier versions."""
    epoch: Number = 0
    """As in the group of the call."""
    members: list[CommRecord] = msgspec.field(default_factory=list)
    """Calls of a launch without numbers of their own. The flight recorder writes coalesced collectives this way."""


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process group, as one of its members sees it."""

    pg: Annotated[str, Privacy.GROUP]
    size: Number
    ranks: list[Number] | None = None
    """Global ranks in the group's order; None if torch does not know them (groups outside its registry)."""
    desc: Annotated[str, Privacy.GROUP] = ""
    backend: Annotated[str, Privacy.BACKEND] = ""
    locality: Locality = "unknown"
    eager: bool = False
    """Whether the group is bound to a device (`device_id=`). Then its communicator is created with the group, not by
    the first call. It carries all calls of the group in one order, single sends and receives too."""
    epoch: Number = 0
    """Number of earlier default groups of this rank. After `destroy_process_group()` and `init_process_group()` torch
    uses names again: the default group is "0" each time."""
    t: Number = 0
    """When this rank first saw the group, on its monotonic clock; 0 in files of earlier versions."""


def is_p2p(record: CommRecord) -> bool:
    """Return whether a call is a send or a receive."""
    operation = OPERATIONS.get(record.op)
    return operation is not None and operation.p2p


def has_size(record: CommRecord) -> bool:
    """Return whether `bytes` of a record is known.

    A call that moves data but has neither bytes nor tensors comes from a source without sizes: a kernel that is known
    only by its name, or a marker without sizes. Without a known element type, 0 bytes are those of no known tensor.
    """
    operation = OPERATIONS.get(record.op)
    if not has_possible_size(record):
        return False
    if record.bytes or (operation is not None and operation.payload == "none"):
        return True
    is_known = record.dtype is not None and dtype_of(record.dtype) is not None
    return is_known and bool(record.inputs or record.outputs or record.in_split or record.out_split)


def has_possible_size(record: CommRecord) -> bool:
    """Return whether every number of bytes and elements of a record is one that a call can have."""
    splits = [*(record.in_split or ()), *(record.out_split or ())]
    extents = [extent for shapes in (record.inputs, record.outputs) for shape in shapes for extent in shape]
    numbers = [record.bytes, *splits, *extents]
    if splits:
        numbers += [total_bytes(shapes, 16) for shapes in (record.inputs, record.outputs)]
    return all(0 <= number <= MOST for number in numbers)


def ends_of(op: str, rank: int, peer: Peer) -> tuple[int | Peer, int | Peer]:
    """Return (sender, receiver) of a send or receive that `rank` makes."""
    return (rank, peer) if op == "send" else (peer, rank)


def crosses_nodes(locality: Locality) -> bool:
    """Return whether CROSSNODE emits a call of this locality. Unknown counts as crossing nodes."""
    return locality != "intra_node"


def total_bytes(shapes: Sequence[Sequence[int]], item_size: int) -> int:
    """Return the bytes of tensors of these shapes with `item_size` bytes per element.

    >>> total_bytes([[2, 3], [4]], 4)
    40
    """
    return sum(map(math.prod, shapes)) * item_size
