"""Reads the output of NCCL Inspector, a profiler plug-in of NCCL: a line of JSON for each operation of a process.

The source is plugins/profiler/inspector in NCCL's repository, format v4.0. A line has a hash of the communicator, and
the rank of the process within it. Global ranks are missing: `number_ranks` finds them after all processes are read.
Collectives are numbered separately for each operation on a communicator. Their size is that of the tensor that a rank
gives to NCCL (`count` times the type); here it is converted to S of nccl-tests. Times are whole microseconds. Lines
have start times only with NCCL_INSPECTOR_DUMP_VERBOSE=1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from crossrank.comm import MOST_RANKS, CommRecord, Count, Group, Int, operation_of
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import ReadIssues, read_lines
from crossrank.tools.traces.call_numbers import mend, odd_ones
from crossrank.tools.traces.rank_trace import RankGroup, RankTrace, Signatures, TraceBuilder
from crossrank.unknown_values import Decoder

LEAVES_OUT = (
    "NCCL Inspector skips calls that are smaller than NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES (default 8,192 B), barriers "
    "among it, and has times of whole microseconds"
)
TWICE = "lines of an operation that an earlier line has too: skipped"
NO_START = "operations without a start time: that of their line less the duration is used"
TOO_LONG = "operations that last longer than from their start to the time of their line: their times are unknown"
ODD_TIME = "operations whose time is far from those of the lines around them: it is unknown"
_SIZE_OF_ONE = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Operations for which NCCL counts one rank's part, while S is that of all ranks."""
_TIMED_BY = {
    "kernel_gpu": "NCCL Inspector: the kernel, by the GPU's clock",
    "kernel_cpu": "NCCL Inspector: the kernel, by the CPU's clock",
    "collective_cpu": "NCCL Inspector: from the launch, by the CPU's clock",
}
_MOST_PROBLEMS = 3
_LONGEST_US = 86_400_000_000
"""A day."""
_OUT_OF_ORDER = 60_000_000_000
"""ns. Lines are nearly in the order of time."""


class _Header(msgspec.Struct):
    id: str
    """Hash of the communicator."""
    rank: Count
    """Rank of the process within the communicator."""
    n_ranks: Count
    comm_name: str = ""


class _Metadata(msgspec.Struct):
    dump_timestamp_us: Annotated[int, msgspec.Meta(ge=1, le=(1 << 62) - 1)]
    hostname: str = ""
    pid: Int = 0
    inspector_output_format_version: str = ""


class _Kernel(msgspec.Struct):
    kernel_start_ts: Count = 0


class _Times(msgspec.Struct):
    """us since 1970, on the CPU's clock."""

    coll_start_ts: Count = 0
    p2p_start_ts: Count = 0
    kernel_events: list[_Kernel] = []


class _Collective(msgspec.Struct):
    """A field with its default is unknown."""

    coll: str
    coll_sn: Count = -1
    coll_msg_size_bytes: Count = 0
    coll_exec_time_us: Count = 0
    coll_timing_source: str = "kernel_gpu"
    event_trace_ts: _Times | None = None


class _Transfer(msgspec.Struct):
    """A field with its default is unknown."""

    p2p: str
    p2p_sn: Count = -1
    p2p_peer: Int = -1
    p2p_msg_size_bytes: Count = 0
    p2p_exec_time_us: Count = 0
    p2p_timing_source: str = "kernel_gpu"
    event_trace_ts: _Times | None = None


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None
    p2p_perf: _Transfer | None = None


def read_inspector(path: str) -> RankTrace:
    """Read the operations of one process. `number_ranks` adds its rank, members of groups, and global ranks of peers.

    Raises `CrossrankError` if no line can be read.
    """
    issues = ReadIssues(path)
    trace = RankTrace(rank=None, path=path, source="inspector", timed_by="inspector", placed=False, backend="nccl")
    builder, unknown = TraceBuilder(trace), Counter[str]()
    decode = Decoder(_Line, unknown).decode
    damaged: list[str] = []
    seen: set[tuple[object, ...]] = set()
    for number, text in enumerate(read_lines(path, issues), 1):
        try:
            _take(decode(text), trace, builder, seen)
        except BROKEN as error:
            damaged.append(f"line {number} is not from NCCL Inspector ({one_line(error)})")
    trace.problems = [*issues.problems, *damaged[:_MOST_PROBLEMS]]
    if len(damaged) > _MOST_PROBLEMS:
        trace.problems.append(f"{len(damaged) - _MOST_PROBLEMS} more lines are not from NCCL Inspector either")
    mend(trace)
    written = np.array(trace.calls.called, np.int64)
    for row in odd_ones(written):
        if abs(written[row] - written[row - 1]) > _OUT_OF_ORDER:
            trace.calls.called[row] = trace.calls.began[row] = trace.calls.ended[row] = 0
            trace.unattributed[ODD_TIME] += 1
    if unknown:
        named = ", ".join(f"{name} {count:,}" for name, count in unknown.items())
        trace.problems.append(f"values that cannot be read are unknown: {named}")
    if trace.unattributed[NO_START] == len(trace):  # older versions do not write it
        trace.timed = False
        del trace.unattributed[NO_START]
    if not len(trace):
        raise CrossrankError(f"{path}: has no operation that NCCL Inspector measured: {'; '.join(trace.problems)}")
    return trace


def _take(line: _Line, trace: RankTrace, builder: TraceBuilder, seen: set[tuple[object, ...]]) -> None:
    header, metadata = line.header, line.metadata
    trace.host, trace.version = metadata.hostname, metadata.inspector_output_format_version
    trace.about["pid"] = str(metadata.pid)
    collective, transfer = line.coll_perf, line.p2p_perf
    if collective is not None:
        name, number, peer = collective.coll, collective.coll_sn, -1
        number += number >= 0  # NCCL counts from 0
        bytes, took, source = (
            collective.coll_msg_size_bytes,
            collective.coll_exec_time_us,
            collective.coll_timing_source,
        )
        times = collective.event_trace_ts
    elif transfer is not None:
        name, number, peer = transfer.p2p, transfer.p2p_sn, transfer.p2p_peer
        bytes, took, source = transfer.p2p_msg_size_bytes, transfer.p2p_exec_time_us, transfer.p2p_timing_source
        times = transfer.event_trace_ts
    else:
        return
    operation = operation_of(name)
    op = operation.name if operation is not None else name
    is_p2p = operation is not None and operation.p2p
    size = min(header.n_ranks, MOST_RANKS)
    pg = header.id
    desc = header.comm_name if header.comm_name != "unknown" else ""
    # On a communicator, each operation is counted separately.
    group = builder.define(Group(pg=pg, size=size, desc=desc, backend="nccl"), "" if is_p2p else op)
    if trace.group_rank.setdefault(group, header.rank) != header.rank and not trace.notes:
        trace.notes.append(f"{trace.path}: is of a process of several ranks; all its lines count as lines of one rank")
    line_of = group, op, number, peer
    if number >= 0 and line_of in seen:
        trace.unattributed[TWICE] += 1
        return
    seen.add(line_of)
    called = times.coll_start_ts or times.p2p_start_ts if times is not None else 0
    begins = [one.kernel_start_ts for one in times.kernel_events if one.kernel_start_ts] if times is not None else []
    is_possible = True
    if not called:
        trace.unattributed[NO_START] += 1
    if took > _LONGEST_US or (called and took > metadata.dump_timestamp_us - called > 0):
        trace.unattributed[TOO_LONG] += 1
        is_possible, took = False, 0
    has_times = is_possible and took > 0
    called = called or max(metadata.dump_timestamp_us - took, 0)
    began = min(begins, default=called)
    record = CommRecord(
        id=len(trace),
        op=op,
        c10d=name,
        pg=pg,
        bytes=bytes * size if op in _SIZE_OF_ONE else bytes,
        t=0,
        seq=number if number >= 0 and not is_p2p else None,
        p2p_seq=number if number >= 0 and is_p2p else None,
        peer=peer if is_p2p else None,
    )
    builder.add(
        record,
        called=called * 1000,
        began=began * 1000 if has_times else 0,
        ended=(began + took) * 1000 if has_times else 0,
        took=took * 1000,
        group=group,
    )
    if took:
        trace.attributed[_TIMED_BY.get(source, f"NCCL Inspector: {source}")] += 1


def number_ranks(traces: Sequence[RankTrace]) -> None:
    """Set the global ranks of processes, the members of groups, and the peers of transfers.

    torch makes the communicator of all ranks, ordered by rank. It is the largest one, if each process has a different
    rank in it. Without one (if only skipped calls used it), processes are numbered by host and process id, as launchers
    start them, and a note says so.
    """
    places: dict[str, dict[int, RankTrace]] = {}
    sizes: dict[str, int] = {}
    for trace in traces:
        for index, place in trace.group_rank.items():
            group = trace.groups[index].group
            places.setdefault(group.pg, {})[place] = trace
            sizes[group.pg] = group.size
    largest = max(sizes, key=lambda pg: (sizes[pg], len(places[pg])), default="")
    world = places.get(largest, {})
    traces[0].notes.append(LEAVES_OUT)
    if len(world) == len(traces):
        for place, trace in world.items():
            trace.rank, trace.world_size = place, sizes[largest]
    else:
        for rank, trace in enumerate(sorted(traces, key=lambda one: (one.host, int(one.about["pid"]), one.path))):
            trace.rank, trace.world_size = rank, len(traces)
        traces[0].notes.append("no communicator has all processes: crossrank numbers the ranks by host and process id")
    members = {
        pg: [ranked[place].rank or 0 for place in range(sizes[pg])]
        for pg, ranked in places.items()
        if len(ranked) == sizes[pg] and ranked.keys() == set(range(sizes[pg]))
    }
    for trace in traces:
        trace.groups = [
            RankGroup(msgspec.structs.replace(one.group, ranks=members.get(one.group.pg)), one.apart)
            for one in trace.groups
        ]
        trace.signatures = Signatures(*(_with_peer(one, members.get(one.pg)) for one in trace.signatures)).rows


def _with_peer(record: CommRecord, members: list[int] | None) -> CommRecord:
    """A record whose peer is a global rank; None = unknown."""
    if record.peer is None:
        return record
    known = members is not None and 0 <= record.peer < len(members)
    return msgspec.structs.replace(record, peer=members[record.peer] if known and members is not None else None)
