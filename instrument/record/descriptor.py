"""The part of a record that repeated calls share. It is built once and kept.

A training loop repeats its calls, so slow work (bytes, names, JSON) is done only for the first one. The other fields
change from call to call: id, sequence number, time, step, batch and tag.
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
"""Number of distinct calls of a group at which the kept ones become the older ones. An MoE model makes new ones at
every step; older ones that are not repeated are dropped."""
MAX_NUMBERS = 1 << 17
"""Extents and splits in all of them: a call of a large group has thousands, each about 75 bytes."""


@dataclass(eq=False, slots=True)
class Descriptor:
    """A distinct call of one group: op, arguments, source line."""

    reader: Reader
    state: GroupState
    site: Site
    _key: CallKey
    _reduce: str | None
    marker: Any = None
    """NVTX attributes of this call, once they are final."""
    emitted: bool | None = None
    """Whether this call gets markers, once the topology is known."""
    _call: OpCall | None = None  # computed by its first user, usually the writer thread
    _locality: Locality = "unknown"
    _tail: bytes | None = None

    @property
    def numbers(self) -> int:
        """Number of values that identify the call: extents, splits and other arguments."""
        return len(self._key) + sum(len(part) for part in self._key if isinstance(part, tuple))

    @property
    def call(self) -> OpCall:
        """The arguments of the call, and its bytes."""
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
        """Return the locality of the call: of its group, or for P2P of this rank and its peer."""
        if self._locality == "unknown":
            peer = self.peer  # a receive from any source has the locality of its group
            ranks = self.state.group.ranks if peer is None else (topology.rank, peer)
            self._locality = topology.locality(ranks)
        return self._locality

    def fields(self, *, sizes: bool = True, source: bool = True) -> dict[str, Any]:
        """Return the fields of the record that repeated calls share, without the locality.

        The most distinctive fields come first: a list of markers shows only the start of each.
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
            "epoch": self.state.group.epoch or None,
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
        """Return the end of the record's JSON line, from the comma before `op` to the newline."""
        if self._tail is not None:
            return self._tail
        tail = b"," + orjson.dumps(self.fields() | {"locality": locality})[1:] + b"\n"
        if locality != "unknown":  # unknown localities may still become known
            self._tail = tail
        return tail

    def message(self, locality: Locality, *, sizes: bool, source: bool = True) -> str:
        """Return the text of the NVTX marker."""
        return orjson.dumps(self.fields(sizes=sizes, source=source) | {"locality": locality}).decode()


class DescriptorCache(dict[Any, Descriptor]):
    """The descriptors of one group, by the key of the call."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = 0
        self._older: dict[Any, Descriptor] = {}

    def recall(self, key: Any) -> Descriptor | None:
        """Return an older descriptor and keep it again; None if there is none."""
        descriptor = self._older.pop(key, None)
        if descriptor is not None:
            self.keep(key, descriptor)
        return descriptor

    def keep(self, key: Any, descriptor: Descriptor) -> None:
        """Add a descriptor. If there is no room, the present ones become the older ones."""
        numbers = descriptor.numbers
        if len(self) >= MAX_DESCRIPTORS or self._numbers + numbers > MAX_NUMBERS:
            self._older = dict(self)
            self.clear()
            self._numbers = 0
        self._numbers += numbers
        self[key] = descriptor


@dataclass(eq=False, kw_only=True, slots=True)
class GroupState:
    """The recorder's data about one process group."""

    group: Group
    rank: int
    """This rank within the group."""
    timeout: float | None
    """Seconds after which a call of the group fails; None if unknown."""
    seq: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    p2p_seqs: dict[tuple[int | None, str], Iterator[int]] = field(default_factory=dict)
    """Counters by (peer within the group, direction); the peer is None for a receive from any source."""
    descriptors: DescriptorCache = field(default_factory=DescriptorCache)

    def next_p2p_seq(self, peer: int | None, direction: str) -> int:
        key = (peer, direction)
        counter = self.p2p_seqs.get(key)
        if counter is None:
            counter = self.p2p_seqs.setdefault(key, itertools.count(1))
        return next(counter)

    def global_rank(self, group_rank: int | None) -> int | None:
        """Return the global rank of a member; None if `group_rank` is None or the members are unknown."""
        ranks = self.group.ranks
        if group_rank is None or ranks is None or not 0 <= group_rank < len(ranks):
            return None
        return ranks[group_rank]
