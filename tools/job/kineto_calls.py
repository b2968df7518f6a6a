"""Read calls from a Kineto trace without an execution trace.

Every communication kernel is a call. Its operation comes from the first of these that has one:

1. the kernel's arguments in the trace;
2. the host record, or the c10d or `nccl:` range, around its launch;
3. the kernel's name.

NCCL runs several operations with one kernel (SendRecv), RCCL all of them (Generic). Libraries that call NCCL directly
(vLLM's pynccl) leave no range: these calls have a time but no size. A trace without communication kernels has only the
host's records, or the ranges of Works; the latter have times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from crossrank.budget import Budget
from crossrank.comm import Group, operation_of
from crossrank.text import plural
from crossrank.tools.graph.linking.communications import C10D, FUNCTIONAL, MARKERS
from crossrank.tools.graph.linking.nesting import Nesting, is_work, nest
from crossrank.tools.job.traced_windows import take_kineto
from crossrank.tools.traces.call_numbers import mostly_numbered
from crossrank.tools.traces.kernels import communication_kernel
from crossrank.tools.traces.kineto import DeviceEvent, HostEvent, KinetoTrace, read_kineto
from crossrank.tools.traces.param_comms import ParamComms, from_kineto, shapes_from_elements, to_record
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder

HALF_HOUR = 1_800_000_000_000
"""Assumed maximum length (ns) of a trace that has only a start time."""

ARGUMENTS = "described by the kernel's arguments in the Kineto trace"
RANGE = "described by the host range around the kernel's launch"
NAME = "described only by the kernel's name"
WORK = "described only by the name of the Work's host range"
NOTHING = "communication kernels whose operation is unknown"

_RANGES = (C10D, *FUNCTIONAL, "nccl:", "rccl:")
_RECORD = "record_param_comms"


def read_kineto_trace(path: str, rank: int | None = None) -> RankTrace:
    """Read the calls of a Kineto trace, each with the time of its kernel."""
    kineto = read_kineto(path)
    trace = RankTrace(
        rank=kineto.rank if rank is None else rank,
        path=path,
        source="kineto",
        timed_by="kineto",
        world_size=kineto.world_size,
        numbered=False,
        span=(kineto.base_ns, kineto.base_ns + HALF_HOUR) if kineto.base_ns else None,
        problems=list(kineto.damage),
    )
    builder = TraceBuilder(trace, kineto.groups)
    groups = {group.pg: group for group in kineto.groups}
    budget = Budget.of(path)
    described_by: Counter[str] = Counter()
    rows = _kernel_rows(kineto, described_by) or _host_rows(kineto) or _work_rows(kineto, described_by)
    rows.sort(key=lambda row: row[0])
    trace.numbered = _are_numbered([described for *_, described in rows])
    for number, (start, source, described) in enumerate(rows):
        group = groups.get(described.pg)
        if group is None and described.ranks:
            ranks = budget.ranks(described.ranks)
            group = groups[described.pg] = Group(pg=described.pg, size=len(ranks), ranks=ranks, desc=described.desc)
            builder.define(group)
        shapes_from_elements(described)
        called = start + kineto.base_ns
        record = to_record(described, group, number=number, time=called, c10d="")
        timed = isinstance(source, DeviceEvent) or is_work(source.name)
        timed = timed and source.end > source.start
        began, ended = (source.start + kineto.base_ns, source.end + kineto.base_ns) if timed else (0, 0)
        builder.add(record, called=called, began=began, ended=ended)
    nameless = sum(not described.pg and described.dtype is not None for *_, described in rows)
    if nameless and any(described.pg for *_, described in rows):
        trace.problems.append(f"the arguments of {plural(nameless, 'call')} lack the group")
    if NOTHING in described_by:
        trace.unattributed[NOTHING] = described_by.pop(NOTHING)
    trace.attributed = described_by
    take_kineto(trace, kineto)
    return trace


def _are_numbered(calls: Sequence[ParamComms]) -> bool:
    """Return whether the collectives have torch's numbers within their groups (`Seq`), which are the same on all ranks.

    Calls of a batch share a number, and a launch of a CUDA graph repeats those of its calls: they are counted."""
    operations = {one.name: operation_of(one.name) for one in calls}
    numbers = [(one.pg, one.seq) for one in calls if (operation := operations[one.name]) is None or not operation.p2p]
    given = [one for one in numbers if one[1]]
    return bool(given) and mostly_numbered([not seq for _, seq in numbers]) and len(set(given)) == len(given)


_Row = tuple[int, DeviceEvent | HostEvent, ParamComms]
"""(time of the call, event with its start and end, description)"""


def _kernel_rows(trace: KinetoTrace, described_by: Counter[str]) -> list[_Row]:
    launches = {call.correlation: index for index, call in enumerate(trace.calls) if call.correlation is not None}
    naming = [event for event in trace.host if event.name == _RECORD or event.name.startswith(_RANGES)]
    nesting = nest(naming, trace.calls)
    around_of = _descriptions(naming, nesting)
    by_external_id = {event.external_id: index for index, event in enumerate(naming) if event.external_id}
    rows: list[_Row] = []
    for event in (*trace.device, *trace.untimed):
        if event.category != "kernel":
            continue
        described, known = from_kineto(event.args), communication_kernel(event.name)
        if described is None and known is None:
            continue
        index = launches.get(event.correlation) if event.correlation is not None else None
        start = trace.calls[index].start if index is not None else event.start
        host = nesting.around_call[index] if index is not None else None
        if host is None and (host := by_external_id.get(event.external_id or 0)) is not None:
            start = naming[host].start  # some ROCm traces have no correlation ids
        if described is not None and described.name not in MARKERS:
            described_by[ARGUMENTS] += 1
            rows.append((start, event, described))
            continue
        around = around_of.get(host) if host is not None else None
        op = known[1] if known is not None else None
        if around is not None:
            described_by[RANGE] += 1
        else:
            described_by[NAME if op is not None else NOTHING] += 1
            around = ParamComms(name=op or event.name.partition("(")[0].strip())
        if described is not None:  # a launch of several calls: their group is known
            around = msgspec.structs.replace(around, pg=described.pg, desc=described.desc, ranks=described.ranks)
        rows.append((start, event, around))
    return rows


def _descriptions(events: Sequence[HostEvent], nesting: Nesting) -> dict[int, ParamComms]:
    """Return event -> description of the calls launched inside it, from the innermost event that has one. Arguments
    are preferred to names."""
    described: dict[int, ParamComms] = {}
    named: dict[int, ParamComms] = {}
    for index in nesting.order:  # parents first
        name = ParamComms(name=events[index].name)
        for found, own in ((described, from_kineto(events[index].args)), (named, name)):
            if own is None or operation_of(own.name) is None:
                own = found.get(nesting.parent[index])
            if own is not None:
                found[index] = own
    return named | described


def _host_rows(trace: KinetoTrace) -> list[_Row]:
    """Return the host's records, for a backend without kernels."""
    found: list[_Row] = []
    for event in trace.host:
        described = from_kineto(event.args)
        if described is not None and (operation_of(described.name) is not None or described.name not in MARKERS):
            found.append((event.start, event, described))
    return found


def _work_rows(trace: KinetoTrace, described_by: Counter[str]) -> list[_Row]:
    """Return the ranges of Works, for a trace without other information on calls."""
    works = [event for event in trace.host if is_work(event.name) and operation_of(event.name) is not None]
    described_by.update({WORK: len(works)} if works else {})
    return [(event.start, event, ParamComms(name=event.name)) for event in works]
