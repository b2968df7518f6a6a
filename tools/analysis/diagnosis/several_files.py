"""A rank of which there are several files: a dump of torch's flight recorder completed by the comms file beside it.

torch's recorder of gloo notes no sends and receives and no members of groups; the comms file has both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from crossrank.comm import CommRecord, is_p2p
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
    builder = TraceBuilder(dump)
    counts: Counter[tuple[str, str]] = Counter()
    added = 0
    for row in range(len(comms)):
        signature = comms.signatures[comms.calls.signature[row]]
        if not _is_unknown(signature, has_p2p):
            continue
        record = comms.record(row)
        apart = "" if is_p2p(signature) else signature.c10d
        counts[record.pg, apart] += 1
        if apart:
            record = msgspec.structs.replace(record, seq=counts[record.pg, apart])
        group = builder.define(comms.groups[comms.calls.group[row]].group, apart)
        called, state = comms.calls.called[row], comms.calls.state[row]
        place = builder.add(record, called=called, state=state, group=group)
        if row in comms.unawaited:
            dump.unawaited.add(place)
        added += 1
    if added:
        dump.numbered_pairs = dump.numbered_pairs or not has_p2p
        sort_by_time(dump)


def _is_unknown(call: CommRecord, has_p2p: bool) -> bool:
    """Whether torch's recorder does not note such a call of gloo."""
    return call.c10d in _UNRECORDED or (is_p2p(call) and not has_p2p)


def count_as_torch_does(comms: RankTrace, others: Sequence[RankTrace]) -> None:
    """Make a comms file comparable with the other ranks' dumps: its collectives get the numbers that torch gave them
    there, by what those dumps know of both."""
    comms.comparable = False
    p2p = list(map(is_p2p, comms.signatures))
    for index, one in enumerate(comms.groups):
        name = one.group.pg
        before = Counter(other.dump.recorded_from[name] for other in others if name in other.dump.recorded_from)
        if not before:
            continue
        shift = max(before, key=lambda count: (before[count], -count))
        for row, of_group in enumerate(comms.calls.group):
            if of_group == index and not p2p[comms.calls.signature[row]]:
                comms.calls.number[row] += shift


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
