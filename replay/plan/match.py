"""Whether the calls of all ranks fit together, in the words of `crossrank diagnose`, before any process is started.

The plan is walked through; what every rank would then have left behind is handed to the diagnosis: calls
that can end are over, those that cannot are open, and what a stuck rank would have done next it has not done.
"""

from __future__ import annotations

from math import prod

from crossrank.comm import is_p2p
from crossrank.recording import COMMS
from crossrank.replay.plan.plan import Plan, RankPlan
from crossrank.replay.plan.schedule import Key, Walk
from crossrank.replay.plan.shapes import parts
from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.findings import Finding, call_text, group_text
from crossrank.tools.analysis.diagnosis.inputs import Evidence
from crossrank.tools.traces.ending import Ending
from crossrank.tools.traces.rank_trace import RETIRED, SCHEDULED, RankTrace, TraceBuilder


def mismatches(plan: Plan, walk: Walk) -> list[str]:
    """What does not fit, the cause before what follows from it; empty where all ranks come to their end.

    Each is one line: kind, operation, group, ranks, and what happened.
    """
    evidence = Evidence(ranks=[_trace(plan, rank, walk) for rank in plan.ranks], world_size=plan.world_size)
    diagnosis, _ = diagnose(evidence, world_size=plan.world_size)
    files = {rank.rank: rank.source for rank in plan.ranks}
    found = [_line(finding, files) for finding in diagnosis.findings]
    found += _split_mismatches(plan, walk)
    if not found and not walk.ends:
        stuck = {rank: at for rank, at in walk.reached.items() if at < len(plan.ranks[rank].calls)}
        rank, at = next(iter(stuck.items()))
        record = plan.ranks[rank].calls[at].record
        found.append(
            f"rank {rank_ranges(sorted(stuck))} wait(s) for ever, rank {rank} in {record.op} (call {record.id}) "
            f"on {record.pg} of {files[rank]}"
        )
    return found


def _line(finding: Finding, files: dict[int, str]) -> str:
    number = finding.collective_seq_id if finding.collective_seq_id is not None else finding.p2p_seq_id
    what = f"{finding.kind}: {call_text(finding.op, number)} on {group_text(finding.pg)}"
    if finding.culprit_ranks:
        ranks = sorted(finding.culprit_ranks)
        what += f", rank {rank_ranges(ranks)} ({files.get(ranks[0], '')})"
    elif finding.waiting_ranks:
        what += f", waiting: rank {rank_ranges(sorted(finding.waiting_ranks))}"
    return f"{what}: {finding.text}" if finding.text else what


def _trace(plan: Plan, rank: RankPlan, walk: Walk) -> RankTrace:
    """What a rank leaves behind that has come as far as the walk: what it would have done next it has not done."""
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
    for index, (call, key) in enumerate(zip(rank.calls[: reached + 1], walk.keys[rank.rank], strict=False)):
        number = key[-1]
        assert isinstance(number, int)
        row = builder.add(call.record, called=index + 1, state=RETIRED if over[index] else SCHEDULED)
        trace.calls.number[row] = number + 1
        if is_p2p(call.record) and call.wait_before > index + 1:
            trace.unawaited.add(row)
    return trace


def _split_mismatches(plan: Plan, walk: Walk) -> list[str]:
    """all_to_alls in which what one rank sends to another is not what that one expects from it."""
    groups = {group.pg: group for group in plan.groups}
    sent: dict[Key, dict[int, tuple[list[int], list[int], int]]] = {}
    for rank in plan.ranks:
        for call, key in zip(rank.calls, walk.keys[rank.rank], strict=True):
            record = call.record
            if record.op != "all_to_all":
                continue
            n = len(groups[record.pg].ranks or ())
            sides = (
                _elements_per_member(record.inputs, record.in_split, n),
                _elements_per_member(record.outputs, record.out_split, n),
            )
            sent.setdefault(key, {})[rank.rank] = (*sides, record.id)
    found = []
    for key, by_rank in sent.items():
        group = groups[str(key[1])]
        for i, sender in enumerate(group.ranks or ()):
            for j, receiver in enumerate(group.ranks or ()):
                if sender in by_rank and receiver in by_rank:
                    sends, expects = by_rank[sender][0][j], by_rank[receiver][1][i]
                    if sends != expects:
                        found.append(
                            f"size_mismatch: all_to_all on {group_text([group.pg, group.desc])}: rank {sender} sends "
                            f"{sends} elements to rank {receiver} (call {by_rank[sender][2]} of "
                            f"{plan.ranks[sender].source}), which expects {expects} (call {by_rank[receiver][2]} of "
                            f"{plan.ranks[receiver].source})"
                        )
    return found


def _elements_per_member(shapes: list[list[int]], split: list[int] | None, n: int) -> list[int]:
    """Of a list of one tensor per member, or of one tensor in parts."""
    if len(shapes) == n and not (n == 1 and split):
        return [prod(shape) for shape in shapes]
    return parts(shapes[0], split, n)
