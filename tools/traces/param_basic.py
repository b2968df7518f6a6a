"""Reads PARAM's basic trace: a list of calls, groups (`init`), waits and computations, with sizes in elements."""

from __future__ import annotations

from array import array

import msgspec

from crossrank.comm import MOST_RANKS, CommRecord, Group, Int, operation_of
from crossrank.tools.traces.json_document import Shape, read_document
from crossrank.tools.traces.param_comms import ParamComms, shapes_from_elements, to_record
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder, Waits


class _Basic(msgspec.Struct):
    """A call of a PARAM basic trace. Sizes are elements."""

    comms: str | None = None
    req: Int | list[Int] | None = None
    pg_id: Int | str | None = None
    global_ranks: list[Int] | None = None
    world_size: Int | None = None
    root: Int | None = None
    in_msg_size: Int | None = None
    out_msg_size: Int | None = None
    dtype: str | None = None
    in_split: list[Int] | None = None
    out_split: list[Int] | None = None
    src_rank: Int | None = None
    dst_rank: Int | None = None
    use_batch: bool = False
    startTime_ns: Int | None = None


class _BasicFile(msgspec.Struct):
    calls: list[_Basic]


_SHAPE = Shape(what="a PARAM basic trace", content=_BasicFile, rows="calls", row=_Basic, bare_list=True)


def read_basic(path: str, rank: int | None = None) -> RankTrace:
    """PARAM's basic trace: a list of calls, of groups (`init`), of waits and of computations."""
    document = read_document(path, _SHAPE)
    trace = RankTrace(rank=rank, path=path, source="basic", numbered=False, problems=list(document.damage))
    builder, waits = TraceBuilder(trace), Waits()
    groups: dict[str, Group] = {}
    by_req: dict[str, int] = {}
    computed = batch = 0
    in_batch = False
    for row in document.content.calls:
        if row.comms is None:
            computed += 1
            continue
        name = row.comms.lower()
        pg = str(row.pg_id if row.pg_id is not None else 0)
        if pg not in groups and (row.global_ranks or row.world_size):
            ranks = row.global_ranks or document.budget.ranks(range(min(row.world_size or 0, MOST_RANKS)))
            groups[pg] = Group(pg=pg, size=len(ranks), ranks=ranks)
            builder.define(groups[pg])
        if name == "init":
            continue
        count = len(trace)
        if name == "wait":
            call = by_req.get(str(row.req))
            if call is not None:
                waits.before[call] = count
                waits.recorded += 1
            else:
                waits.without_call += 1
            continue
        in_batch, batch = row.use_batch, batch if row.use_batch and in_batch else count
        record = _basic_record(row, name, pg, groups.get(pg), count, batch)
        waits.before.append(-1)
        place = builder.add(record, called=record.t)
        if row.req is not None:
            by_req[str(row.req)] = place
    waits.returned = array("q", [0]) * len(trace)
    waits.blocking = array("b", [-1 if not waits.recorded else int(before < 0) for before in waits.before])
    trace.waits = waits
    trace.world_size = max((row.world_size or 0 for row in document.content.calls), default=0) or None
    trace.timed = any(trace.calls.called)
    if computed:
        trace.notes.append(f"{computed} computation(s) of a file are no communication and are not replayed")
    return trace


def _basic_record(row: _Basic, name: str, pg: str, group: Group | None, number: int, batch: int) -> CommRecord:
    operation = operation_of(name)
    place = row.root
    if operation is not None and operation.p2p:
        place = row.dst_rank if operation.name == "send" else row.src_rank
    elif operation is not None and operation.rooted and row.root is None:
        place = row.src_rank
    comms = ParamComms(
        name=name,
        pg=pg,
        global_rank=place,
        in_elements=row.in_msg_size,
        out_elements=row.out_msg_size,
        dtype=row.dtype,
        in_split=row.in_split or None,
        out_split=row.out_split or None,
    )
    shapes_from_elements(comms)
    record = to_record(comms, group, number=number, time=row.startTime_ns or 0, c10d="")
    return msgspec.structs.replace(record, batch=batch if row.use_batch else None)
