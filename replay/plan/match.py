"""Checks that the calls of all ranks fit together, with the findings of `crossrank diagnose`, before any rank starts.

The plan is fine if the walk through it ends and all ranks agree on each call. Otherwise the diagnosis gets the state in
which the walk ends: calls that can end are finished, the others are unfinished.
"""

from __future__ import annotations

from crossrank.comm import CommRecord, is_p2p
from crossrank.recording import COMMS
from crossrank.replay.plan.plan import Plan, RankPlan
from crossrank.replay.plan.schedule import Key, Walk
from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.findings import Finding, call_text, group_text
from crossrank.tools.traces.ending import Ending
from crossrank.tools.traces.rank_trace import RETIRED, SCHEDULED, RankTrace, TraceBuilder


def mismatches(plan: Plan, walk: Walk) -> list[str]:
    """Return what does not fit, causes first; empty if all ranks reach their end.

    Each item is one line: kind, operation, group, ranks, and what happened.
    """
    if walk.ends and _all_ranks_agree(plan, walk):
        return []
    from crossrank.tools.analysis.diagnosis.diagnose import diagnose
    from crossrank.tools.analysis.diagnosis.evidence import Evidence

    evidence = Evidence(ranks=[_make_trace(plan, rank, walk) for rank in plan.ranks], world_size=plan.world_size)
    diagnosis, _ = diagnose(evidence, world_size=plan.world_size)
    files = {rank.rank: rank.source for rank in plan.ranks}
    found = [_format_finding(finding, files) for finding in diagnosis.findings]
    if not found and not walk.ends:
        at = {rank.rank: rank.calls[walk.reached[rank.rank] :] for rank in plan.ranks}
        found = [
            f"rank {rank} waits forever in {calls[0].record.op} (call {calls[0].record.id} of {files[rank]})"
            for rank, calls in at.items()
            if calls
        ]
    return found


def _all_ranks_agree(plan: Plan, walk: Walk) -> bool:
    """Return whether all ranks agree on each call, as far as that is visible without a diagnosis."""
    fields_by_key: dict[Key, object] = {}
    for rank in plan.ranks:
        for call, key in zip(rank.calls, walk.keys[rank.rank], strict=True):
            fields = _shared_fields(call.record)
            if fields is None or fields_by_key.setdefault(key, fields) != fields:
                return False
    return True


def _shared_fields(record: CommRecord) -> object:
    """Return the fields that must be equal on all ranks; None if equality is not enough."""
    if is_p2p(record):
        return record.bytes, record.dtype
    if record.op == "all_to_all" or record.out_dtype is not None:
        return None
    return record.op, record.bytes, record.dtype, record.root, record.reduce


def _format_finding(finding: Finding, files: dict[int, str]) -> str:
    number = finding.collective_seq_id if finding.collective_seq_id is not None else finding.p2p_seq_id
    what = f"{finding.kind}: {call_text(finding.op, number)} on {group_text(finding.pg)}"
    if finding.culprit_ranks:
        ranks = sorted(finding.culprit_ranks)
        what += f", rank {rank_ranges(ranks)} ({files.get(ranks[0], '')})"
    elif finding.waiting_ranks:
        what += f", waiting: rank {rank_ranges(sorted(finding.waiting_ranks))}"
    return f"{what}: {finding.text}" if finding.text else what


def _make_trace(plan: Plan, rank: RankPlan, walk: Walk) -> RankTrace:
    """Return the trace that a rank leaves if it stops where the walk stops."""
    reached, over = walk.reached[rank.rank], walk.over[rank.rank]
    is_through = reached == len(rank.calls)
    trace = RankTrace(
        rank=rank.rank,
        path=rank.source,
        source=COMMS,
        world_size=plan.world_size,
        numbered_pairs=True,
        ending=Ending(ended=is_through, unseen=not is_through),
    )
    builder = TraceBuilder(trace, (group for group in plan.groups if rank.rank in (group.ranks or ())))
    for index, (call, key) in enumerate(zip(rank.calls, walk.keys[rank.rank], strict=True)):
        if not walk.made[rank.rank][index]:
            continue
        number = key[-1]
        assert isinstance(number, int)
        row = builder.add(call.record, called=index + 1, state=RETIRED if over[index] else SCHEDULED)
        trace.calls.number[row] = number + 1
        if is_p2p(call.record) and call.wait_before > index + 1:
            trace.unawaited.add(row)
    return trace
