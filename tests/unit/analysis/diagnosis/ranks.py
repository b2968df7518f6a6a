"""Ranks of a job for tests, made of their calls without a file."""

from __future__ import annotations

from typing import Any

from crossrank.comm import CommRecord, Group, is_p2p
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.traces.ending import Ending
from crossrank.tools.traces.rank_trace import COMPLETED, DumpState, RankTrace, TraceBuilder

Call = tuple[CommRecord, dict[str, Any]]


def world(size: int) -> Group:
    return group("0", *range(size), desc="default_pg")


def group(pg: str, *ranks: int, **facts: Any) -> Group:
    return Group(pg=pg, size=len(ranks), ranks=list(ranks), **facts)


def call(op: str = "all_reduce", number: int = 1, state: int = COMPLETED, called: int = 0, **facts: Any) -> Call:
    """A call of that number; `facts` are its ends and stack, and fields of its record."""
    times = {name: facts.pop(name) for name in ("began", "ended", "stack") if name in facts}
    fields: dict[str, Any] = {"id": 0, "op": op, "c10d": "", "pg": "0", "bytes": 8, "t": 0, "inputs": [[8]]} | facts
    record = CommRecord(**fields)
    numbered = CommRecord(**fields | {"p2p_seq" if is_p2p(record) else "seq": number})
    return numbered, {"state": state, "called": called} | times


def rank(
    number: int,
    *calls: Call,
    groups: tuple[Group, ...] = (world(2),),
    dump: dict[str, Any] | None = None,
    ending: dict[str, Any] | None = None,
    **facts: Any,
) -> RankTrace:
    whole: dict[str, Any] = {"path": f"rank-{number}", "source": "flight", "backend": "nccl"}
    trace = RankTrace(rank=number, **whole | facts, dump=DumpState(**dump or {}), ending=Ending(**ending or {}))
    builder = TraceBuilder(trace, groups)
    for record, times in calls:
        builder.add(record, **times)
    return trace


def job(*ranks: RankTrace) -> JobState:
    return JobState.match(ranks)
