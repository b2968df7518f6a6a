"""Small recordings made by hand: what ranks communicated, as the readers give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from crossrank.comm import CommRecord, Group
from crossrank.replay.plan.build_plan import build, settle
from crossrank.replay.plan.plan import Plan
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder


def record(op: str, **fields: Any) -> CommRecord:
    """A call with what is not given as it is for one tensor of 4 floats on group "0"."""
    c10d = {"all_reduce": "allreduce_", "broadcast": "broadcast_", "send": "send", "recv": "recv_"}.get(op, "")
    base: dict[str, Any] = {"id": 0, "c10d": c10d, "pg": "0", "bytes": 16, "t": 0, "dtype": "float32"}
    base["reduce"] = "sum" if op in ("all_reduce", "reduce", "reduce_scatter") else None
    if op not in ("recv", "barrier"):
        base["inputs"] = [[4]]
    if op in ("all_reduce", "broadcast", "reduce", "recv"):
        base["outputs"] = [[4]]
    if op == "barrier":
        base |= {"bytes": 0, "dtype": None}
    return CommRecord(op=op, **(base | fields))


def send(peer: int, **fields: Any) -> CommRecord:
    return record("send", peer=peer, api="send", **fields)


def recv(peer: int, **fields: Any) -> CommRecord:
    return record("recv", peer=peer, api="recv", **fields)


def isend(peer: int, **fields: Any) -> CommRecord:
    return record("send", peer=peer, api="isend", **fields)


def irecv(peer: int, **fields: Any) -> CommRecord:
    return record("recv", peer=peer, api="irecv", **fields)


def rank_trace(
    rank: int, records: Sequence[CommRecord], groups: dict[str, list[int]] | None = None, world: int = 2, **fields: Any
) -> RankTrace:
    """The calls of one rank, with ids, times and numbers as a recorder gives them."""
    counts: dict[object, int] = {}
    known = groups or {"0": list(range(world))}
    trace = RankTrace(rank=rank, path=f"rank-{rank}", source="comms", world_size=world, numbered_pairs=True, **fields)
    builder = TraceBuilder(trace, [Group(pg=pg, size=len(ranks), ranks=ranks) for pg, ranks in known.items()])
    for number, one in enumerate(records):
        p2p = one.op in ("send", "recv")
        key = (one.pg, one.op, one.peer) if p2p else one.pg
        counts[key] = counts.get(key, 0) + 1
        count: dict[str, int] = {"p2p_seq": counts[key]} if p2p else {"seq": counts[key]}
        builder.add(msgspec.structs.replace(one, id=number, **count), called=1000 * (number + 1))
    return trace


def plan_of(*ranks: Sequence[CommRecord], groups: dict[str, list[int]] | None = None, partial: bool = False) -> Plan:
    """The settled plan of a job in which rank i made `ranks[i]`."""
    plan = built(*ranks, groups=groups, partial=partial)
    settle(plan)
    return plan


def built(*ranks: Sequence[CommRecord], groups: dict[str, list[int]] | None = None, partial: bool = False) -> Plan:
    """The same plan before its waits are placed and its ranks matched."""
    world = len(ranks)
    known = groups or {"0": list(range(world))}
    return build(
        [
            rank_trace(rank, records, {pg: members for pg, members in known.items() if rank in members}, world)
            for rank, records in enumerate(ranks)
        ],
        "job",
        "comms",
        partial=partial,
    )


def waits(plan: Plan, rank: int = 0) -> list[int]:
    return [call.wait_before for call in plan.ranks[rank].calls]


def ops(plan: Plan, rank: int = 0) -> list[str]:
    return [call.record.op for call in plan.ranks[rank].calls]
