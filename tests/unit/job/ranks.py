"""Times of ranks for tests: one call adds one row, in us."""

from __future__ import annotations

from typing import Any

import msgspec

from crossrank.comm import CommRecord, Group, ends_of, is_p2p
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder

EPOCH = 1_780_000_000_000_000_000
WORLD = "0"


class Rank:
    """One rank of a job; `clock` is by how many us its clock is ahead."""

    def __init__(
        self, rank: int, size: int = 2, *, clock: float = 0, host: str = "", placed: bool = True, numbered: bool = True
    ) -> None:
        about: dict[str, Any] = {"path": f"rank-{rank}", "source": "kineto", "timed_by": "kineto", "world_size": size}
        about |= {"clock": host or "one", "placed": placed, "numbered": numbered, "numbered_pairs": True}
        self.times = RankTrace(rank=rank, **about)
        self._clock = clock
        self._builder = TraceBuilder(self.times, [Group(pg=WORLD, size=size, ranks=list(range(size)))])
        self._numbers: dict[object, int] = {}

    def call(
        self, begin: float, end: float, op: str = "all_reduce", *, number: int | None = None, **facts: Any
    ) -> Rank:
        """A call whose kernel ran from `begin` to `end`; `begin` 0 = it has no times."""
        fields: dict[str, Any] = {"id": len(self.times), "op": op, "c10d": "", "pg": WORLD, "bytes": 1_000_000, "t": 0}
        record = CommRecord(**fields | facts)
        ends = ends_of(record.op, self.times.rank or 0, record.peer) if is_p2p(record) else None
        lane = (record.pg, ends)
        self._numbers[lane] = number if number is not None else self._numbers.get(lane, 0) + 1
        field = "p2p_seq" if is_p2p(record) else "seq"
        self._builder.add(
            msgspec.structs.replace(record, **{field: self._numbers[lane]}),
            called=self._ns(begin) - 5000,
            began=self._ns(begin) if begin else 0,
            ended=self._ns(end) if begin else 0,
        )
        return self

    def _ns(self, us: float) -> int:
        return EPOCH + round((us + self._clock) * 1000)
