"""A rank of which there are several files: a dump of torch's flight recorder completed by the comms file beside it.

torch's recorder of gloo notes no sends and receives and no members of groups; the comms file has both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from crossrank.comm import is_p2p
from crossrank.tools.analysis.diagnosis.findings import call_text, group_text
from crossrank.tools.traces.comms import stack_of
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder, sort_by_time

_UNRECORDED = ("monitored_barrier_",)
"""Collectives of gloo that torch's recorder neither notes nor counts."""


def complete(dump: RankTrace, comms: RankTrace) -> None:
    """Add to a dump what the rank's comms file beside it knows: the members of groups, and gloo's P2P calls."""
    ranks_of = {one.group.pg: one.group.ranks for one in comms.groups}
    dump.groups = [
        one
        if one.group.ranks is not None
        else msgspec.structs.replace(one, group=msgspec.structs.replace(one.group, ranks=ranks_of.get(one.group.pg)))
        for one in dump.groups
    ]
    dump.host = dump.host or comms.host
    dump.world_size = dump.world_size or comms.world_size
    ending, other = dump.ending, comms.ending
    if ending.error is None:
        ending.error, ending.traceback, ending.causes = other.error, other.traceback, other.causes
    ending.of_threads = ending.of_threads or other.of_threads
    has_p2p = any(map(is_p2p, dump.signatures))
    builder, before = TraceBuilder(dump), len(dump)
    counts: Counter[tuple[str, str]] = Counter()
    for row, record in enumerate(comms.records()):
        p2p = is_p2p(record)
        if not (p2p and not has_p2p) and record.c10d not in _UNRECORDED:
            continue
        apart = "" if p2p else record.c10d
        counts[record.pg, apart] += 1
        if apart:
            record = msgspec.structs.replace(record, seq=counts[record.pg, apart])
        group = builder.define(comms.groups[comms.calls.group[row]].group, apart)
        place = builder.add(record, called=record.t, state=comms.calls.state[row], group=group)
        if row in comms.unawaited:
            dump.unawaited.add(place)
    if len(dump) > before:
        dump.numbered_pairs = dump.numbered_pairs or not has_p2p
        sort_by_time(dump)


def count_as_torch_does(comms: RankTrace, others: Sequence[RankTrace]) -> None:
    """Make a comms file comparable with the other ranks' dumps: its collectives get the numbers that torch gave them
    there, by what those dumps know of both."""
    comms.comparable = False
    shifts: list[int] = []
    for one in comms.groups:
        known = (other.dump.recorded_from.get(one.group.pg) for other in others)
        before = Counter(count for count in known if count is not None)
        shifts.append(max(before, key=lambda count: (before[count], -count), default=0))
    for row, (group, signature) in enumerate(zip(comms.calls.group, comms.calls.signature, strict=True)):
        if not is_p2p(comms.signatures[signature]):
            comms.calls.number[row] += shifts[group]


def last_call(comms: RankTrace) -> str:
    """The last call in a comms file, for a rank that left nothing else."""
    if not len(comms):
        return "its comms file holds no call"
    call = comms.record(len(comms) - 1)
    group = comms.groups[comms.calls.group[-1]].group
    frames = stack_of(call)
    where = f" at {frames[0].filename}:{frames[0].line}" if frames else ""
    name = group_text([group.pg, group.desc])
    return f"the last call in its comms file is {call_text(call.op, comms.calls.number[-1])} on {name}{where}"
