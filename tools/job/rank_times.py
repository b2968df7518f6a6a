"""The calls of one rank with their times, in columns: what a worker sends to the process that compares the ranks.

A job has millions of calls. What calls have in common (operation, group, sizes, place in the code) stands once, as a
`CallKind`; a call is a row of 48 bytes over arrays. Times are ns since 1970 on the clock of the file, 0 = not known.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from crossrank.comm import MOST_RANKS, OPERATIONS, CommRecord, Group, Locality, ends_of, has_size, is_p2p, total_bytes
from crossrank.dtypes import dtype_of

_LATE = re.compile(r"\A(?:\w+:)?gloo(?:,\w+:gloo)*\Z")
"""Backends of a group that is gloo on every device."""

SEND_RECV = "send/recv"
"""Operation of several sends and receives that went out in one launch."""


class GroupKey(msgspec.Struct, frozen=True):
    """A process group, the same on all its ranks."""

    pg: str
    ranks: tuple[int, ...] | None = None
    """Global ranks; None where the file does not say. Then those who use the name are its members."""
    desc: str = ""
    size: int = 0
    late_ends: bool = False
    """Its backend tells the end of a send or receive only when somebody waits for it."""

    @classmethod
    def of(cls, group: Group) -> GroupKey:
        ranks = tuple(group.ranks) if group.ranks else None
        if ranks is not None and (len(set(ranks)) < len(ranks) or not all(0 <= rank < MOST_RANKS for rank in ranks)):
            ranks = None
        size = len(ranks) if ranks is not None else group.size
        return cls(
            pg=group.pg,
            ranks=ranks,
            desc=group.desc,
            size=size if 0 <= size <= MOST_RANKS else 0,
            late_ends=_LATE.search(group.backend) is not None,
        )


class CallKind(msgspec.Struct, frozen=True):
    """What equal calls of a rank share."""

    op: str
    """A key of `OPERATIONS`, `SEND_RECV`, or what the file calls it."""
    group: int
    """Index into the groups of the rank, or of all ranks where they are laid side by side."""
    bytes: int
    """S of nccl-tests; of a launch of several calls the sum, of an all_to_all the larger of sent and received."""
    recorded: int = 0
    """Sum of S of its calls as they were recorded."""
    moved: int = -1
    """Bytes that this rank sends to others or receives from them, the larger; -1 where the bus factor tells them."""
    ends: tuple[int, int] | None = None
    """Sender and receiver of a send or receive."""
    root: int | None = None
    source: str | None = None
    locality: Locality = "unknown"
    calls: int = 1
    """That went out in this one launch."""
    whole: bool = True
    """All calls of the launch are known: CROSSNODE may have left some out."""
    sized: bool = True
    """`bytes` is known; else it is 0, or of a launch of several calls what is known of it."""

    @property
    def releases_all(self) -> bool:
        """Whether it ends on no rank before every rank has begun it."""
        row = OPERATIONS.get(self.op)
        return row is not None and row.releases_all and self.moved < 0

    @property
    def is_p2p(self) -> bool:
        row = OPERATIONS.get(self.op)
        return self.op == SEND_RECV or (row is not None and row.p2p)

    @property
    def label(self) -> str:
        """The operation for people: a send and its receive are one; with a word where several went out together."""
        op = SEND_RECV if self.is_p2p else self.op
        if self.calls == 1:
            return op
        return f"{op}, batched" if self.is_p2p else f"{op}, coalesced"


@dataclass
class RankTimes:
    """One rank, or what one file says of it."""

    rank: int | None
    path: str
    source: str
    """What measured the times: a key of `SOURCES`."""
    clock: str
    """Ranks with the same text here have the same clock."""
    world_size: int | None = None
    node: str = ""
    placed: bool = True
    """Whether begins and ends are exact, and not durations alone."""
    numbered: bool = True
    """Whether `number` is the same on all ranks; else it was counted from the begin of the file."""
    p2p_numbered: bool = True
    """The same of sends and receives."""
    groups: list[GroupKey] = field(default_factory=list)
    kinds: list[CallKind] = field(default_factory=list)
    kind: array[int] = field(default_factory=lambda: array("I"))
    id: array[int] = field(default_factory=lambda: array("q"))
    number: array[int] = field(default_factory=lambda: array("q"))
    """n-th collective on the group, or n-th send (receive) of the pair; 0 = not known."""
    step: array[int] = field(default_factory=lambda: array("i"))
    called: array[int] = field(default_factory=lambda: array("q"))
    """The host made the call."""
    began: array[int] = field(default_factory=lambda: array("q"))
    """The kernel began, or on a backend without kernels its Work."""
    ended: array[int] = field(default_factory=lambda: array("q"))
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(iteration, when it began)"""
    sent: Counter[int] = field(default_factory=Counter)
    """Rank -> bytes sent to it by batches of sends and by uneven all_to_alls, of which the kinds do not tell."""
    not_placed: int = 0
    """Bytes of such calls of which it is not known to whom they go."""
    about: dict[str, str] = field(default_factory=dict)
    """Versions and settings, as the rank's header has them."""
    matched: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What was linked -> (matched, of how many)."""
    attributed: Counter[str] = field(default_factory=Counter)
    """How kernels found their calls -> kernels."""
    unattributed: Counter[str] = field(default_factory=Counter)
    """What could not be given a time, or a call, and why -> how many."""
    unattributed_ns: int = 0
    """Time of the communication kernels without a call."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kind)


SOURCES = {
    "nsight": "Nsight Systems: kernels that were launched within our markers or NCCL's",
    "kineto": "Kineto: the kernels of a call, or on a backend without kernels its Work",
    "flight": "torch's flight recorder: durations that its events measured",
    "replay": "a replay: medians over its passes",
    "comms": "no times of the communication itself, only when calls were made",
}


class TimesBuilder:
    """Appends calls to a `RankTimes`, each distinct kind once."""

    def __init__(self, times: RankTimes, groups: Iterable[Group] = ()) -> None:
        self.times = times
        self._groups: dict[str, int] = {}
        self.kinds: dict[CallKind, int] = {}
        """Number of each kind."""
        self.defined = 0
        """Groups of a file that are taken over by now."""
        for group in groups:
            self._add_group(GroupKey.of(group))

    def group(self, pg: str) -> int:
        """Index of the group of that name, which is made where nobody defined it."""
        found = self._groups.get(pg)
        return self._add_group(GroupKey(pg)) if found is None else found

    def group_of(self, key: GroupKey) -> int:
        """Index of a group that is defined here."""
        found = self._groups.get(key.pg)
        return self._add_group(key) if found is None else found

    def _add_group(self, key: GroupKey) -> int:
        if key.pg not in self._groups:
            self._groups[key.pg] = len(self.times.groups)
            self.times.groups.append(key)
        return self._groups[key.pg]

    def kind(self, kind: CallKind) -> int:
        """Number of a kind."""
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = len(self.times.kinds)
            self.times.kinds.append(kind)
        return found

    def _count_sent(self, records: Sequence[CommRecord], times: int) -> None:
        """Note to whom a launch sends, where its kind will not tell."""
        rank, sent = self.times.rank, self.times.sent
        for record in records:
            split = record.in_split
            if record.op == "send" and len(records) > 1:
                if record.peer is None:
                    self.times.not_placed += record.bytes * times
                else:
                    sent[record.peer] += record.bytes * times
            elif record.op == "all_to_all" and (split is not None or record.out_split is not None):
                ranks = self.times.groups[self.group(record.pg)].ranks
                if ranks is None or split is None or len(ranks) != len(split):
                    self.times.not_placed += record.bytes * times
                elif rows := sum(split):
                    for to, count in zip(ranks, split, strict=True):
                        sent[to] += round(count * record.bytes / rows) * times
        if rank is not None:
            del sent[rank]

    def _possible(self, record: CommRecord, times: int) -> CommRecord:
        """The record without sizes that cannot be."""
        splits = [count for split in (record.in_split, record.out_split) for count in split or ()]
        extents = [extent for shape in (*record.inputs, *record.outputs) for extent in shape] if splits else []
        whole = (
            [record.bytes, total_bytes(record.inputs, 16), total_bytes(record.outputs, 16)]
            if splits
            else [record.bytes]
        )
        if min([0, *splits, *extents]) >= 0 and all(0 <= count <= _MOST_BYTES for count in [*whole, *splits]):
            return record
        self.times.unattributed[IMPOSSIBLE] += times
        return msgspec.structs.replace(record, bytes=0, in_split=None, out_split=None, inputs=[], outputs=[])

    def take(self, records: Sequence[CommRecord], times: int = 1) -> CallKind:
        """Take in a launch, of one call or of several that went out together: note to whom it sends; its kind.

        `times`: how often it was made.
        """
        records = [self._possible(record, times) for record in records]
        self._count_sent(records, times)
        first = records[0]
        index = self.group(first.pg)
        group = self.times.groups[index]
        rank = self.times.rank
        if len(records) == 1 and not is_p2p(first):
            size, moved = _exchanged(first, group, rank)
            return _kind(first, index, size, moved)
        if len(records) == 1:
            ends = None if first.peer is None or rank is None else ends_of(first.op, rank, first.peer)
            return _kind(first, index, first.bytes, ends=ends)
        if any(is_p2p(record) for record in records):
            sent = sum(record.bytes for record in records if record.op == "send" and record.peer != rank)
            received = sum(record.bytes for record in records if record.op == "recv" and record.peer != rank)
            far = {record.locality for record in records}
            locality = next((name for name in _FARTHEST if name in far), first.locality)
            return CallKind(
                op=SEND_RECV,
                group=index,
                bytes=max(sent, received),
                recorded=sum(record.bytes for record in records),
                moved=max(sent, received),
                source=first.source,
                locality=locality,
                calls=len(records),
                whole=_is_whole(records),
                sized=all(map(has_size, records)),
            )
        kind = _kind(first, index, sum(record.bytes for record in records), calls=len(records))
        return msgspec.structs.replace(kind, whole=_is_whole(records), sized=all(map(has_size, records)))

    def add(
        self, kind: int, *, id: int, number: int, step: int = 0, called: int = 0, began: int = 0, ended: int = 0
    ) -> None:
        """Append a call. One with numbers that cannot be is counted, and has none."""
        if not (
            abs(id) < _MOST and abs(step) < 1 << 31 and all(0 <= moment < _MOST for moment in (called, began, ended))
        ):
            self.times.unattributed[IMPOSSIBLE] += 1
            id, step, called, began, ended = -1, 0, 0, 0, 0
        times = self.times
        times.kind.append(kind)
        times.id.append(id)
        times.number.append(number if 0 <= number < _MOST_NUMBER else 0)
        times.step.append(step)
        times.called.append(called)
        times.began.append(began)
        times.ended.append(ended)


_MOST = 1 << 62
_MOST_NUMBER = 1 << 40
_MOST_BYTES = 1 << 50
"""More than any call moves: what is above it is a mistake in the file, and would drown all sums."""
IMPOSSIBLE = "calls with numbers that cannot be: they have no times or sizes"


def _is_whole(records: Sequence[CommRecord]) -> bool:
    """Whether all calls of a launch are there: the first gives the batch its id, and their ids follow each other."""
    ids = [record.id for record in records]
    if records[0].batch is None:
        return True
    return ids[0] == records[0].batch and ids == list(range(ids[0], ids[0] + len(ids)))


_FARTHEST: tuple[Locality, ...] = ("cross_node", "nvlink_domain", "unknown", "intra_node")


def _kind(
    record: CommRecord,
    group: int,
    size: int,
    moved: int = -1,
    ends: tuple[int, int] | None = None,
    calls: int = 1,
) -> CallKind:
    return CallKind(
        op=record.op,
        group=group,
        bytes=size,
        recorded=record.bytes if calls == 1 else size,
        moved=moved,
        ends=ends,
        root=record.root,
        source=record.source,
        locality=record.locality,
        calls=calls,
        sized=has_size(record),
    )


def _exchanged(record: CommRecord, group: GroupKey, rank: int | None) -> tuple[int, int]:
    """(S, bytes exchanged with others) of a collective; of an uneven all_to_all both are the larger direction's."""
    if record.op != "all_to_all" or (record.in_split is None and record.out_split is None):
        return record.bytes, -1
    sizes = []
    for split, shapes in ((record.in_split, record.inputs), (record.out_split, record.outputs)):
        total = _bytes_of(shapes, record.dtype)
        if split is None or total is None:
            continue
        rows = sum(split)
        own = 0
        if rank is not None and group.ranks is not None and rank in group.ranks:
            own = split[place] if (place := group.ranks.index(rank)) < len(split) else 0
        sizes.append((total, total - (total * own // rows if rows else 0)))
    if not sizes:
        return record.bytes, -1
    return max(total for total, _ in sizes), max(others for _, others in sizes)


def _bytes_of(shapes: Sequence[Sequence[int]], dtype: str | None) -> int | None:
    known = dtype_of(dtype) if dtype is not None else None
    if known is None:
        return None
    return total_bytes(shapes, known.size)
