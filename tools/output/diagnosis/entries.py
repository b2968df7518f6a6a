"""Every call of every rank: one line per call, one column per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from crossrank.comm import is_p2p
from crossrank.tools.analysis.diagnosis.findings import group_text
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.output.console import print_table
from crossrank.tools.traces.rank_trace import STATES

_MOST_COLUMNS = 8


def print_entries(job: JobState, ranks: set[int] | None, groups: Sequence[str] | None) -> None:
    """Print the calls group by group, collectives by number and P2P as each rank made them."""
    for group in job.groups:
        if groups is not None and not set(groups) & set(group.pg):
            continue
        members = [rank for rank in group.ranks if rank in job.ranks and (ranks is None or rank in ranks)]
        for first in range(0, len(members), _MOST_COLUMNS):
            some = members[first : first + _MOST_COLUMNS]
            rows = list(_collectives(job, group, some))
            if rows:
                columns = ("#number", "call", *(f"rank {rank}" for rank in some))
                print_table(f"Collectives of {group_text(group.pg)}", columns, rows)
        rows = [row for rank in members for row in _p2p(job, group, rank)]
        if rows:
            print_table(
                f"Sends and receives on {group_text(group.pg)}",
                ("rank", "call", "#peer", "#number", "sizes", "state"),
                rows,
            )


def _collectives(job: JobState, group: ProcessGroup, ranks: list[int]) -> Iterator[tuple[object, ...]]:
    lanes = {rank: group.lanes[rank] for rank in ranks if rank in group.lanes}
    for seq in sorted({seq for lane in lanes.values() for seq in lane.numbers}):
        rows = {rank: row for rank, lane in lanes.items() if (row := lane.row(seq)) is not None}
        names = {rank: _call(job, rank, row) for rank, row in rows.items()}
        counts = Counter(names.values())
        common = max(counts, key=lambda name: (counts[name], name))
        states = {rank: STATES[job.ranks[rank].calls.state[row]] for rank, row in rows.items()}
        cells = {rank: state if names[rank] == common else f"{state}: {names[rank]}" for rank, state in states.items()}
        yield seq, common, *(cells.get(rank, "-") for rank in ranks)


def _call(job: JobState, rank: int, row: int) -> str:
    signature = job.signature(rank, row)
    shapes = signature.inputs or signature.outputs
    sizes = "+".join("x".join(map(str, shape)) or "1" for shape in shapes[:4]) + ("+…" if len(shapes) > 4 else "")
    return " ".join(word for word in (signature.op, sizes, signature.dtype or "") if word)


def _p2p(job: JobState, group: ProcessGroup, rank: int) -> Iterator[tuple[object, ...]]:
    calls = job.ranks[rank].calls
    for row in range(len(calls)):
        signature = job.signature(rank, row)
        if is_p2p(signature) and job.group_at(rank, row) is group:
            peer = "any" if signature.peer is None else signature.peer
            words = _call(job, rank, row).split(" ", 1)
            yield rank, signature.op, peer, calls.number[row], words[-1], STATES[calls.state[row]]
