"""Reads the NVTX ranges of crossrank, the older shim, torch and NCCL.

* crossrank's ranges have the JSON of a call as text, and its id as payload. Other markers of this domain have the rank
  and groups of the process. A text that is too long for a tool has ranks as runs; `left_out` counts what it lacks.
* The older shim wrote one JSON text per call, with `name`, `message_size` and `group_ranks`, without an id.
* NCCL's ranges have the name of a function as text, and its arguments as an extended payload.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec
import numpy as np

from crossrank.comm import MOST_RANKS, CommRecord, Group, Int, Number, operation_of
from crossrank.privacy import Privacy
from crossrank.rank_runs import Run, from_runs
from crossrank.recording import name_in_epoch, with_epoch
from crossrank.text import rank_ranges
from crossrank.tools.traces.nsight.export import NONE, NVTX, Column, Columns, Export, Mask, at, lookup
from crossrank.tools.traces.rank_trace import Interned

_TYPES = {"NvtxMark": 34, "NvtxPushPopRange": 59, "NvtxStartEndRange": 60}
"""NVTX event types -> their numbers, for exports that do not list them. The first is an instant, without an end."""

CALL, BATCH, IDENTITY, GROUP, NCCL, TORCH = range(6)
"""What a text describes: a call, the launch that ends a batch, the identity of the process, a process group, a function
of NCCL, or an operation of torch's ProcessGroupNCCL (from `torch.autograd.profiler.emit_nvtx`)."""

_MOST_ID = 1 << 62

NO_CALL = CommRecord(id=0, op="", c10d="", pg="", bytes=0, t=0)

WORLD = "world"
"""Name of the group of an old marker without ranks."""


class Meaning(msgspec.Struct, frozen=True):
    """The content of one text."""

    what: int
    record: CommRecord = NO_CALL
    """The call, without number and time; for a batch only its group."""
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
    """Function of NCCL, or operation of torch."""
    id: int = NONE
    """Id of the call, in the text of a marker of the older shim."""


class _MarkedGroup(Group, frozen=True, kw_only=True):
    """A group in a marker; a large one has runs instead of ranks."""

    rank_runs: Annotated[list[Run], Privacy.NUMBER] = msgspec.field(default_factory=list)
    left_out: dict[Annotated[str, Privacy.FIELD], Annotated[int, Privacy.NUMBER]] = msgspec.field(default_factory=dict)


_ABSENT = "\0"


class MarkerText(CommRecord, frozen=True, kw_only=True):
    """Every key that a text may have: those of a call, and others."""

    id: Number = 0
    t: Number = 0
    op: Annotated[str, Privacy.API] = _ABSENT
    c10d: Annotated[str, Privacy.API] = ""
    pg: Annotated[str, Privacy.GROUP] = _ABSENT
    bytes: Annotated[Int, Privacy.SIZE] = -1
    crossrank: Annotated[str, Privacy.VERSION] | None = None
    rank: Number | None = None
    world_size: Number | None = None
    host: Annotated[str, Privacy.HOST] = ""
    group: _MarkedGroup | None = None
    name: Annotated[str, Privacy.API] | None = None
    message_size: Annotated[float, Privacy.SIZE] | None = None
    group_ranks: Annotated[list[int], Privacy.NUMBER] | None = None
    rank_runs: Annotated[list[Run], Privacy.NUMBER] = msgspec.field(default_factory=list)
    left_out: dict[Annotated[str, Privacy.FIELD], Annotated[int, Privacy.NUMBER]] = msgspec.field(default_factory=dict)
    peer_rank: Annotated[int, Privacy.NUMBER] | None = None
    root_rank: Annotated[int, Privacy.NUMBER] | None = None
    correlation_id: Annotated[Any, Privacy.NUMBER] = None
    source_line: Annotated[str, Privacy.PLACE] | None = None


_OF_CALL = (
    *("op", "api", "c10d", "pg", "inputs", "outputs", "in_split", "out_split"),
    *("dtype", "reduce", "root", "peer", "source", "locality", "epoch"),
)
_decode = msgspec.json.Decoder(MarkerText).decode


def meaning_of(text: str) -> Meaning | None:
    """The content of a text; None if it is from another tool."""
    if text.startswith("nccl:"):  # nccl:all_to_all, op_id = 991144
        return Meaning(TORCH, function=text.partition(",")[0])
    if text.startswith("nccl"):
        return Meaning(NCCL, function=text)
    if not text.startswith("{"):
        return None
    try:
        marked = _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if _ABSENT not in (marked.op, marked.pg):
        if marked.op == "coalesced":
            pg = name_in_epoch(marked.pg, marked.epoch)
            return Meaning(BATCH, record=msgspec.structs.replace(NO_CALL, op=marked.op, pg=pg))
        same = {name: getattr(marked, name) for name in _OF_CALL}
        if marked.bytes < 0:  # 0 bytes of a known type are a known size
            same["dtype"] = None
        record = with_epoch(CommRecord(id=0, t=0, bytes=max(marked.bytes, 0), **same))
        return Meaning(CALL, record=record, sizeless=marked.bytes < 0, left_out=bool(marked.left_out))
    if marked.crossrank is not None and marked.rank is not None and 0 <= marked.rank < MOST_RANKS:
        return Meaning(IDENTITY, rank=marked.rank, world_size=marked.world_size, host=marked.host)
    if marked.group is not None:
        return _group(marked.group)
    if marked.name is not None and marked.message_size is not None:
        return _old(marked)
    return None


def _group(marked: _MarkedGroup) -> Meaning:
    same = {name: getattr(marked, name) for name in Group.__struct_fields__}
    group = with_epoch(Group(**same | {"ranks": marked.ranks or from_runs(marked.rank_runs) or None}))
    return Meaning(GROUP, group=group, left_out="ranks" in marked.left_out)


def _rank(number: int | None) -> int | None:
    return number if number is not None and 0 <= number < MOST_RANKS else None


def _old(marked: MarkerText) -> Meaning | None:
    operation = operation_of(marked.name or "")
    ranks = [rank for rank in marked.group_ranks or from_runs(marked.rank_runs) or () if 0 <= rank < MOST_RANKS]
    unnamed = marked.left_out.get("ranks")
    pg = rank_ranges(ranks) if ranks else f"{unnamed} ranks" if unnamed else WORLD
    record = CommRecord(
        id=0,
        op=operation.name if operation is not None else str(marked.name),
        api=marked.name,
        c10d="",
        pg=pg,
        bytes=int(min(max(marked.message_size or 0, 0), 1 << 60)),
        t=0,
        root=_rank(marked.root_rank),
        peer=_rank(marked.peer_rank),
        source=marked.source_line,
    )
    group = Group(pg=pg, size=len(ranks), ranks=ranks) if ranks else None
    own = marked.correlation_id
    identity = own if isinstance(own, int) and 0 <= own < _MOST_ID else NONE
    return Meaning(CALL, record=record, group=group, rank=_rank(marked.rank), old=True, id=identity)


@dataclass
class Ranges(Columns):
    """Rows of NVTX_EVENTS with a known meaning, ordered by start.

    `end` is `NONE` for a range that was open at the end, and for an instant marker.
    """

    thread: Column
    """globalTid."""
    meaning: Column
    """Index into `meanings`."""
    id: Column
    """Id of the record; `NONE` if the marker has none."""
    row: Column
    """rowid, for later queries."""
    instant: Mask
    meanings: list[Meaning] = field(default_factory=list)

    @property
    def process(self) -> Column:
        return self.thread >> 24

    def of_range(self, index: int) -> Meaning:
        return self.meanings[int(self.meaning[index])]

    def of(self, *what: int) -> Ranges:
        """The ranges with one of these meanings."""
        kinds = np.array([meaning.what for meaning in self.meanings] or [NONE])
        return self.take(np.isin(kinds[self.meaning], what))


_COLUMNS = ("start", "end", "eventType", "globalTid", "int64Value", "uint64Value", "rowid")


def read_ranges(export: Export) -> Ranges:
    """Read every range and marker with a known meaning, of all processes."""
    listed = {name: export.value("ENUM_NSYS_EVENT_TYPE", "id", name) for name in _TYPES}
    types = [number if isinstance(number, int) else _TYPES[name] for name, number in listed.items()]
    of_any_id = partial(msgspec.structs.replace, id=NONE)
    meanings = Interned[Meaning](key=lambda one: msgspec.msgpack.encode(of_any_id(one) if one.old else one))
    parts = [[np.empty(0, np.int64)] * 7]

    @lru_cache(maxsize=1 << 16)  # the older shim's texts are all different
    def number(text: str) -> tuple[int, int] | None:
        meaning = meaning_of(text)
        if meaning is None:
            return None
        return meanings.number(meaning), meaning.id

    def take(key: str, where: str, texts: Iterable[tuple[Any, ...]]) -> None:
        known = array("q")
        for identity, text in texts:
            if (found := number(str(text))) is not None:
                known.extend((identity, *found))
        table = np.frombuffer(known, np.int64).reshape(-1, 3)
        keys, meaning, own = table[np.argsort(table[:, 0], kind="stable")].T
        columns = export.all(NVTX, (*_COLUMNS, key), where, keep=lambda part: lookup(keys, part[-1]) != NONE)
        start, end, kind, thread, signed, unsigned, row, named = columns
        found_at = lookup(keys, named)
        payload = np.where(signed != NONE, signed, unsigned)
        payload = np.where(payload == NONE, at(own, found_at), payload)
        parts.append([start, end, kind, thread, at(meaning, found_at), payload, row])

    there = export.columns(NVTX)
    of_types = f"WHERE eventType IN ({','.join(map(str, types))})"
    if "textId" in there:
        registered = f"{of_types} AND textId IS NOT NULL"
        take("textId", registered, export.strings(NVTX, "textId", registered).items())
    if "text" in there:  # texts in the rows themselves
        of_types += " AND textId IS NULL" if "textId" in there else ""
        spelled_out = f"{of_types} AND (text LIKE '{{%' OR text LIKE 'nccl%')"
        take("rowid", spelled_out, export.rows(f"SELECT rowid, text FROM {NVTX} {spelled_out}"))
    start, end, kind, thread, meaning, payload, row = map(np.concatenate, zip(*parts, strict=True))
    ranges = Ranges(start, end, thread, meaning, payload, row, kind == types[0], meanings.rows)
    return ranges.take(np.lexsort((row, start)))
