"""What NVTX ranges say: ours, the older shim's, and NCCL's own.

Ours have the JSON of a call as text and its id as payload; their process tells its rank and groups in markers of the
same domain. One that would be too long for a tool writes ranks as runs, and counts in `left_out` what it lacks.
The older shim wrote one JSON text per call, with `name`, `message_size` and `group_ranks` and no id.
NCCL's have the name of a function as text and its arguments as an extended payload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from crossrank.comm import MOST_RANKS, CommRecord, Group, Int, Locality, operation_of
from crossrank.errors import CrossrankError
from crossrank.rank_runs import Run, from_runs
from crossrank.text import rank_ranges
from crossrank.tools.traces.nsight.database import NONE, NVTX, Column, Export

MARK, PUSH_POP, START_END = ("NvtxMark", 34), ("NvtxPushPopRange", 59), ("NvtxStartEndRange", 60)

CALL, BATCH, IDENTITY, GROUP, NCCL = range(5)
"""What a text is: a call, the launch that ends a batch, who the process is, a process group, a function of NCCL."""

_MOST_ID = 1 << 62

WORLD = "world"
"""Name of the group of an old marker that names no ranks."""


class Meaning(msgspec.Struct, frozen=True):
    """What one text says."""

    what: int
    record: CommRecord | None = None
    """The call, without number and time."""
    group: Group | None = None
    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    old: bool = False
    """A marker of the older shim."""
    sizeless: bool = False
    """The text of a call without its sizes."""
    left_out: bool = False
    """The text lacks lists that were too long for it: ranks of a group, splits or shapes of a call."""
    function: str = ""
    """Of NCCL."""


class _MarkedGroup(Group, frozen=True, kw_only=True):
    """A group as a marker has it, where a large one has runs in the place of ranks."""

    rank_runs: list[Run] = msgspec.field(default_factory=list)
    left_out: dict[str, int] = msgspec.field(default_factory=dict)


class _Text(msgspec.Struct):
    """Every key that any of the texts may have."""

    op: str | None = None
    api: str | None = None
    c10d: str = ""
    pg: str | None = None
    inputs: list[list[Int]] = msgspec.field(name="in", default_factory=list)
    outputs: list[list[Int]] = msgspec.field(name="out", default_factory=list)
    in_split: list[Int] | None = None
    out_split: list[Int] | None = None
    dtype: str | None = None
    reduce: str | None = None
    bytes: Int | None = None
    root: Int | None = None
    peer: Int | None = None
    source: str | None = None
    locality: Locality = "unknown"
    crossrank: str | None = None
    rank: Int | None = None
    world_size: Int | None = None
    host: str = ""
    group: _MarkedGroup | None = None
    name: str | None = None
    message_size: float | None = None
    group_ranks: list[int] | None = None
    rank_runs: list[Run] = msgspec.field(default_factory=list)
    left_out: dict[str, int] = msgspec.field(default_factory=dict)
    peer_rank: int | None = None
    root_rank: int | None = None
    source_line: str | None = None


class _OldId(msgspec.Struct):
    correlation_id: int | None = None


_decode = msgspec.json.Decoder(_Text).decode
_decode_id = msgspec.json.Decoder(_OldId).decode


def meaning_of(text: str) -> Meaning | None:
    """What a text says; None for somebody else's."""
    if text.startswith("nccl"):
        return Meaning(NCCL, function=text)
    if not text.startswith("{"):
        return None
    try:
        said = _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not all(number is None or abs(number) < _MOST_ID for number in (said.bytes, said.root, said.peer)):
        return None
    if said.op == "coalesced" and said.pg is not None:
        return Meaning(BATCH, record=CommRecord(id=0, op="coalesced", c10d="", pg=said.pg, bytes=0, t=0))
    if said.op is not None and said.pg is not None:
        record = CommRecord(
            id=0,
            op=said.op,
            api=said.api,
            c10d=said.c10d,
            pg=said.pg,
            bytes=max(said.bytes or 0, 0),
            t=0,
            inputs=said.inputs,
            outputs=said.outputs,
            in_split=said.in_split,
            out_split=said.out_split,
            dtype=said.dtype,
            reduce=said.reduce,
            root=said.root,
            peer=said.peer,
            source=said.source,
            locality=said.locality,
        )
        return Meaning(CALL, record=record, sizeless=said.bytes is None, left_out=bool(said.left_out))
    if said.crossrank is not None and said.rank is not None and 0 <= said.rank < MOST_RANKS:
        return Meaning(IDENTITY, rank=said.rank, world_size=said.world_size, host=said.host)
    if said.group is not None:
        return _group(said.group)
    if said.name is not None and said.message_size is not None:
        return _old(said)
    return None


def _group(marked: _MarkedGroup) -> Meaning:
    ranks = marked.ranks or from_runs(marked.rank_runs) or None
    group = Group(
        pg=marked.pg,
        size=marked.size,
        ranks=ranks,
        desc=marked.desc,
        backend=marked.backend,
        locality=marked.locality,
    )
    return Meaning(GROUP, group=group, left_out="ranks" in marked.left_out)


def _rank(number: int | None) -> int | None:
    return number if number is not None and 0 <= number < MOST_RANKS else None


def _old(said: _Text) -> Meaning | None:
    operation = operation_of(said.name or "")
    ranks = [rank for rank in said.group_ranks or from_runs(said.rank_runs) or () if 0 <= rank < MOST_RANKS]
    unnamed = said.left_out.get("ranks")
    pg = rank_ranges(ranks) if ranks else f"{unnamed} ranks" if unnamed else WORLD
    record = CommRecord(
        id=0,
        op=operation.name if operation is not None else str(said.name),
        api=said.name,
        c10d="",
        pg=pg,
        bytes=int(min(max(said.message_size or 0, 0), 1 << 60)),
        t=0,
        root=_rank(said.root_rank),
        peer=_rank(said.peer_rank),
        source=said.source_line,
    )
    group = Group(pg=pg, size=len(ranks), ranks=ranks) if ranks else None
    return Meaning(CALL, record=record, group=group, rank=_rank(said.rank), old=True)


@dataclass
class Ranges:
    """Rows of NVTX_EVENTS that mean something here, in the order of their starts."""

    start: Column
    end: Column
    """`NONE` for a range that was open at the end, and for a marker without an extent."""
    thread: Column
    """globalTid."""
    meaning: Column
    """Index into `meanings`."""
    id: Column
    """Id of the record; `NONE` where the marker has none."""
    row: Column
    """rowid, for what is looked up later."""
    instant: np.ndarray[Any, np.dtype[np.bool_]]
    meanings: list[Meaning] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def process(self) -> Column:
        return self.thread >> 24

    def of(self, *what: int) -> Ranges:
        """Those that mean one of `what`."""
        kinds = np.array([meaning.what for meaning in self.meanings] or [NONE])
        return self.take(np.flatnonzero(np.isin(kinds[self.meaning], what)))

    def take(self, rows: Column) -> Ranges:
        return Ranges(
            start=self.start[rows],
            end=self.end[rows],
            thread=self.thread[rows],
            meaning=self.meaning[rows],
            id=self.id[rows],
            row=self.row[rows],
            instant=self.instant[rows],
            meanings=self.meanings,
        )


_COLUMNS = ("start", "end", "eventType", "globalTid", "textId", "int64Value", "uint64Value", "rowid")


def read_ranges(export: Export) -> Ranges:
    """Every range and marker that means something here, of all processes."""
    types = {export.event_type(*one): one for one in (MARK, PUSH_POP, START_END)}
    mark = export.event_type(*MARK)
    meanings: list[Meaning] = []
    numbers: dict[bytes, int] = {}
    parts: list[list[Column]] = []
    if not export.has(NVTX):
        return _ranges([], meanings, mark)

    def number(text: str) -> int:
        meaning = meaning_of(text)
        if meaning is None:
            return NONE
        key = msgspec.msgpack.encode(meaning)
        found = numbers.get(key)
        if found is None:
            found = numbers[key] = len(meanings)
            meanings.append(meaning)
        return found

    columns = [name for name in _COLUMNS if name != "rowid"]
    there = export.columns(NVTX)
    of_types = f"eventType IN ({','.join(map(str, types))})"
    if "textId" in there:
        (distinct,) = export.all(NVTX, ["textId"], f"WHERE {of_types} AND textId IS NOT NULL GROUP BY textId")
        known = {identity: found for identity, text in export.strings(distinct).items() if (found := number(text)) >= 0}
        ids = np.array(sorted(known), np.int64)
        of_id = np.array([known[identity] for identity in sorted(known)], np.int64)
        if len(ids):
            for part in export.read(NVTX, _COLUMNS, f"WHERE {of_types} AND textId IS NOT NULL"):
                at = np.minimum(np.searchsorted(ids, part[4]), len(ids) - 1)
                keep = np.flatnonzero(ids[at] == part[4])
                meaning = of_id[at[keep]]
                payload = np.where(part[5] != NONE, part[5], part[6])[keep]
                kept = [part[0], part[1], part[2], part[3]]
                parts.append([*(column[keep] for column in kept), meaning, payload, part[7][keep]])
    if "text" in there:
        parts += _spelled_out(export, columns, of_types, number)
    return _ranges(parts, meanings, mark)


def _spelled_out(export: Export, columns: list[str], of_types: str, number: Any) -> list[list[Column]]:
    """The rows whose text stands in the row itself."""
    there = export.columns(NVTX)
    select = ", ".join(f'COALESCE("{name}", {NONE})' if name in there else str(NONE) for name in columns)
    registered = "AND textId IS NULL" if "textId" in there else ""
    query = (
        f"SELECT {select}, rowid, text FROM {NVTX} WHERE {of_types} {registered} "
        "AND (text LIKE '{%' OR text LIKE 'nccl%')"
    )
    known: dict[str, int] = {}
    rows: list[tuple[int, ...]] = []
    parts: list[list[Column]] = []

    def flush() -> None:
        if rows:
            parts.append(list(np.array(rows, np.int64).T))
            rows.clear()

    for row in export.rows(query):
        if not all(isinstance(value, int) for value in row[:-1]):
            raise CrossrankError(f"{export.path}: {NVTX} holds text where a number belongs; export it anew")
        start, end, kind, thread, _, payload, unsigned, rowid = (int(str(value)) for value in row[:-1])
        text = str(row[-1])
        found = known.get(text)
        if found is None:
            found = number(text)
            if len(known) < 1 << 16:  # the older shim's texts are all different
                known[text] = found
        if found < 0:
            continue
        payload = payload if payload != NONE else unsigned
        if payload == NONE and text.startswith("{"):
            payload = _old_id(text)
        rows.append((start, end, kind, thread, found, payload, rowid))
        if len(rows) >= 1 << 16:
            flush()
    flush()
    return parts


def _old_id(text: str) -> int:
    try:
        found = _decode_id(text).correlation_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NONE
    return found if found is not None and 0 <= found < _MOST_ID else NONE


def _ranges(parts: list[list[Column]], meanings: list[Meaning], mark: int) -> Ranges:
    columns = [
        np.concatenate([part[index] for part in parts]) if parts else np.empty(0, np.int64) for index in range(7)
    ]
    start, end, kind, thread, meaning, payload, row = columns
    order = np.lexsort((row, start))
    instant = (kind == mark)[order]
    return Ranges(
        start[order], end[order], thread[order], meaning[order], payload[order], row[order], instant, meanings
    )
