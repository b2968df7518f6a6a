"""The part of a record that is the same at every repetition of a call, built once and kept.

A training loop repeats its calls, so all that takes time (bytes, names, JSON) is done for the first one. What
changes from call to call, and therefore is no part of it: id, sequence number, time, step, batch and tag.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from crossrank.comm import Group, Locality
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.record.call_site import Site
from crossrank.instrument.record.op_schema import CallKey, OpCall, Reader

MAX_DESCRIPTORS = 1024
"""Distinct calls of a group after which those that are kept become the older ones. An MoE model makes new ones at
every step; older ones that are not repeated go."""
MAX_NUMBERS = 1 << 17
"""Extents and splits in all of them: a call of a large group has thousands, at about 75 bytes each."""


@dataclass(eq=False, slots=True)
class Descriptor:
    """One distinct call of one group: op, arguments, place in the user's code."""

    reader: Reader
    state: GroupState
    site: Site
    _key: CallKey
    _reduce: str | None
    marker: Any = None
    """NVTX attributes of this call, once they are final."""
    emitted: bool | None = None
    """Whether markers of this call are wanted, once the topology has settled it."""
    _call: OpCall | None = None  # worked out by whoever needs it first, most often the writer's thread
    _locality: Locality = "unknown"
    _tail: bytes | None = None

    @property
    def numbers(self) -> int:
        """How many values identify the call: its extents, its splits and what else its arguments are."""
        return len(self._key) + sum(len(part) for part in self._key if isinstance(part, tuple))

    @property
    def call(self) -> OpCall:
        """What the arguments say, with the bytes of the call."""
        if self._call is None:
            self._call = self.reader.call(self._key, self.state.group.size, self._reduce)
        return self._call

    @property
    def root(self) -> int | None:
        """Global rank of the root."""
        return self.state.global_rank(self.call.root)

    @property
    def peer(self) -> int | None:
        """Global rank of the peer."""
        return self.state.global_rank(self.call.peer)

    def locality(self, topology: Topology) -> Locality:
        """How far this call reaches: its group, or for P2P the way between this rank and its peer."""
        if self._locality == "unknown":
            peer = self.peer  # a receive from any source is no nearer than its group
            ranks = self.state.group.ranks if peer is None else (topology.rank, peer)
            self._locality = topology.locality(ranks)
        return self._locality

    def fields(self, *, sizes: bool = True, source: bool = True) -> dict[str, Any]:
        """The fields of the record that a repetition shares, without the locality.

        First what distinguishes one call from another: a list of markers shows little more than the begin of each.
        """
        call = self.call
        fields: dict[str, Any] = {
            "op": self.reader.op,
            "pg": self.state.group.pg,
            "bytes": call.bytes if sizes else None,
            "dtype": call.dtype,
            "reduce": call.reduce,
            "root": self.root,
            "peer": self.peer,
            "api": self.site.api,
            "c10d": self.reader.c10d,
            "async": call.is_async,
            "source": self.site.source if source else None,
        }
        if sizes:
            fields |= {
                "in": call.inputs or None,
                "out": call.outputs or None,
                "in_split": call.in_split,
                "out_split": call.out_split,
            }
        return {name: value for name, value in fields.items() if value is not None}

    def tail(self, locality: Locality) -> bytes:
        """The end of the record's JSON line, from the comma before `op` to the newline."""
        if self._tail is not None:
            return self._tail
        tail = b"," + orjson.dumps(self.fields() | {"locality": locality})[1:] + b"\n"
        if locality != "unknown":  # may still become known
            self._tail = tail
        return tail

    def message(self, locality: Locality, *, sizes: bool, source: bool = True) -> str:
        """The text of the NVTX marker."""
        return orjson.dumps(self.fields(sizes=sizes, source=source) | {"locality": locality}).decode()


class DescriptorCache(dict[Any, Descriptor]):
    """The descriptors of one group, found by what identifies the call."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = 0
        self._older: dict[Any, Descriptor] = {}

    def recall(self, key: Any) -> Descriptor | None:
        """One of the older ones, which is kept again."""
        descriptor = self._older.pop(key, None)
        if descriptor is not None:
            self.keep(key, descriptor)
        return descriptor

    def keep(self, key: Any, descriptor: Descriptor) -> None:
        """Add one; where it does not fit any more, the others become the older ones."""
        numbers = descriptor.numbers
        if len(self) >= MAX_DESCRIPTORS or self._numbers + numbers > MAX_NUMBERS:
            self._older = dict(self)
            self.clear()
            self._numbers = 0
        self._numbers += numbers
        self[key] = descriptor


@dataclass(eq=False, kw_only=True, slots=True)
class GroupState:
    """What the recorder keeps for one process group."""

    group: Group
    rank: int
    """This rank within the group."""
    timeout: float | None
    """Seconds after which a call of it fails; None where its backend does not say."""
    seq: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    p2p_seqs: dict[tuple[int | None, str], Iterator[int]] = field(default_factory=dict)
    """Counters by peer within the group, None for a receive from any source, and direction."""
    descriptors: DescriptorCache = field(default_factory=DescriptorCache)

    def next_p2p_seq(self, peer: int | None, direction: str) -> int:
        key = (peer, direction)
        counter = self.p2p_seqs.get(key)
        if counter is None:
            counter = self.p2p_seqs.setdefault(key, itertools.count(1))
        return next(counter)

    def global_rank(self, group_rank: int | None) -> int | None:
        """The global rank of a member; None where the call names none or the members are not known."""
        ranks = self.group.ranks
        if group_rank is None or ranks is None or not 0 <= group_rank < len(ranks):
            return None
        return ranks[group_rank]
