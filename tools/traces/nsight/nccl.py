"""Reads NCCL's own ranges, for launches outside crossrank's markers.

NCCL opens one range per API call in its domain `NCCL` (src/include/nvtx.h in NCCL), with communicator, message size,
root and peer as an extended payload. The size is that of one message: `all_gather`, `reduce_scatter` and `all_to_all`
move this size per member. The element type is missing. `ncclGroupEnd` launches the calls since `ncclGroupStart`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np

from crossrank.comm import MOST_RANKS, CommRecord, Group, Int, Number, operation_of
from crossrank.privacy import Privacy
from crossrank.tools.traces.nsight.export import NVTX, STRINGS, Column, Export
from crossrank.tools.traces.nsight.markers import Ranges

NO_PAYLOAD = "functions of NCCL in ranges without payload (an all_to_all has several): their bytes are unknown"
"""`nsys export --include-json true` writes payloads, in versions that have the option (2022.4 and 2023.4 refuse it)."""
_GROUP_START, _GROUP_END = "ncclGroupStart", "ncclGroupEnd"
_PER_MEMBER = ("all_gather", "reduce_scatter", "all_to_all")


class Payload(msgspec.Struct):
    communicator: Annotated[int | str, Privacy.COMMUNICATOR] | None = msgspec.field(
        name="NCCL communicator ID", default=None
    )
    size: Annotated[Int, Privacy.SIZE] | None = msgspec.field(name="Message size [bytes]", default=None)
    peer: Number | None = msgspec.field(name="Peer rank", default=None)
    ranks: Number | None = msgspec.field(name="No. of ranks", default=None)
    rank: Number | None = msgspec.field(name="Rank", default=None)

    @property
    def name(self) -> str:
        """Name of the communicator."""
        identity = self.communicator
        return f"nccl:{identity:x}" if isinstance(identity, int) else f"nccl:{identity or '?'}"


_NOTHING = Payload()

_decode = msgspec.json.Decoder(Payload, strict=False).decode


class NcclRanges:
    """NCCL's ranges of one process, with their payloads."""

    def __init__(self, export: Export, ranges: Ranges) -> None:
        self.ranges = ranges
        self.functions = [ranges.meanings[meaning].function for meaning in ranges.meaning.tolist()]
        self.sizes: dict[str, int] = {}
        """Communicator -> number of its ranks."""
        self.ranks: dict[str, int] = {}
        """Communicator -> rank of this process in it."""
        self.unknown: Counter[str] = Counter()
        """What is unknown about calls -> number of calls."""
        by_row = _payloads(export, ranges.row)
        self._payloads = [by_row.get(row, _NOTHING) for row in ranges.row.tolist()]
        self._grouped = self._groups()
        for payload in self._payloads:
            if payload.ranks is not None and 0 < payload.ranks <= MOST_RANKS and payload.communicator is not None:
                self.sizes[payload.name] = payload.ranks
                if payload.rank is not None:
                    self.ranks[payload.name] = payload.rank

    def _groups(self) -> dict[int, list[int]]:
        """Range of an outermost `ncclGroupEnd` -> ranges of its thread since the start of the group or the capture.

        If an end is lost, the depth never falls below that group's again: the lowest depth of what follows is the
        outermost one."""
        threads = self.ranges.thread.tolist()
        depth: Counter[int] = Counter()
        before, after = [0] * len(threads), [0] * len(threads)
        for index, (thread, function) in enumerate(zip(threads, self.functions, strict=True)):
            before[index] = depth[thread]
            depth[thread] = max(0, depth[thread] + (function == _GROUP_START) - (function == _GROUP_END))
            after[index] = depth[thread]
        outermost = list(after)
        for index in range(len(threads) - 1, -1, -1):
            outermost[index] = depth[threads[index]] = min(depth[threads[index]], after[index])
        grouped: dict[int, list[int]] = {}
        since: dict[int, list[int]] = defaultdict(list)
        for index, (thread, function) in enumerate(zip(threads, self.functions, strict=True)):
            if function == _GROUP_START:
                if before[index] <= outermost[index]:
                    since[thread] = []
            elif function == _GROUP_END:
                if after[index] == outermost[index]:
                    grouped[index] = since.pop(thread, [])
            else:
                since[thread].append(index)
        return grouped

    def record(self, index: int, rank: int | None, world_size: int | None) -> CommRecord | None:
        """The call of a range on this rank; None if the function does not communicate."""
        operation = operation_of(self.functions[index].removeprefix("nccl"))
        if operation is None:
            return None
        payload = self._payloads[index]
        size = self.sizes.get(payload.name, 0)
        if payload.size is None:
            self.unknown[NO_PAYLOAD] += 1
        elif size == 0 and operation.name in _PER_MEMBER:
            self.unknown["the size of the communicator is unknown: its creation was not captured"] += 1
        message = (payload.size or 0) * (size if operation.name in _PER_MEMBER else 1)
        # Peers are ranks of the communicator. These are global only if it has all ranks.
        is_world = size > 0 and size == world_size and self.ranks.get(payload.name) == rank
        return CommRecord(
            id=index,
            op=operation.name,
            c10d="",
            pg=payload.name,
            bytes=operation.bytes(message, message, size),
            t=0,
            peer=payload.peer if operation.p2p and is_world else None,
        )

    def members(self, index: int, rank: int | None, world_size: int | None) -> list[CommRecord]:
        """The calls that a range launches: its own, or all calls of the group that it ends."""
        calls = self._grouped.get(index, []) if self.functions[index] == _GROUP_END else [index]
        records = (self.record(call, rank, world_size) for call in calls)
        return [record for record in records if record is not None]

    def group(self, pg: str) -> Group:
        """The group of a communicator, whose members NCCL does not list."""
        return Group(pg=pg, size=self.sizes.get(pg, 0), desc="NCCL communicator")


def _payloads(export: Export, rows: Column) -> dict[int, Payload]:
    there = export.columns(NVTX)
    registered = "jsonTextId" in there and export.has(STRINGS)
    texts = ["s.value"] * registered + ["jsonText"] * ("jsonText" in there)
    if not texts:
        return {}
    join = f"LEFT JOIN {STRINGS} AS s ON s.id = n.jsonTextId" if registered else ""
    wanted = set(rows.tolist())
    select = f"COALESCE({', '.join(texts)}, NULL)"
    query = f"SELECT n.rowid, {select} FROM {NVTX} AS n {join} WHERE {select} IS NOT NULL AND n.rowid BETWEEN ? AND ?"

    @lru_cache(maxsize=1 << 16)
    def decoded(text: str) -> Payload | None:
        try:
            return _decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    given = export.rows(query, (int(np.min(rows)), int(np.max(rows))))
    found = ((row, decoded(str(text))) for row, text in given if isinstance(row, int) and row in wanted)
    return {row: payload for row, payload in found if payload is not None}
