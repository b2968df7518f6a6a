"""Joins the calls of all ranks, group by group, and skips calls without a counterpart.

Calls match by their recorded numbers if all files have them. Otherwise they match by order: from the first call, or
from the last if the beginnings are lost (ring buffers). The flight recorder notes the shapes of an uneven all_to_all,
but not its splits. Such a call gets splits that add up on both sides and are as proportional as whole rows allow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

from crossrank.comm import CommRecord, Group, is_p2p
from crossrank.replay.plan.plan import number_of
from crossrank.replay.plan.schedule import Key, lane_of
from crossrank.tools.traces.rank_trace import RankTrace

_OUT_OF_RING = "the dump of another rank no longer has it"
_NO_COUNTERPART = "another rank of its group has no such call"
CONTRADICTS_ITSELF = "it contradicts itself"


@dataclass
class Rank:
    """One rank while the plan is made."""

    source: RankTrace
    rank: int
    recorded: list[CommRecord]
    groups: list[Group | None]
    """By call: its group in the plan, None if no file defines it."""
    records: list[CommRecord | str] = field(default_factory=list)
    """By call: the completed record, or why it is skipped."""


Lane = dict[int, list[tuple[int, int]]]
"""Member of a group, or end of a P2P pair -> (number or 0, call) of its calls, in order."""


def align(ranks: list[Rank], broken: list[str], partial: bool) -> int:
    """Skip a call on all ranks if one rank skips it or lacks it.

    Adds calls whose ranks contradict each other to `broken`. Returns how many uneven all_to_alls got inferred splits.
    """
    guessed = 0
    by_rank = {rank.rank: rank for rank in ranks}
    numbered = all(rank.source.numbered for rank in ranks)
    for lane in _collect_lanes(by_rank):
        late = {member for member in lane if by_rank[member].source.starts_late}
        numbers = [[number for number, _ in calls] for calls in lane.values()]
        use_numbers = numbered and all(0 not in one and len(set(one)) == len(one) for one in numbers)
        if not use_numbers:
            # From the first call, or from the last if beginnings are lost.
            for calls in lane.values():
                shift = -len(calls) if late else 0
                calls[:] = [(place + shift, index) for place, (_, index) in enumerate(calls)]
        guessed += _infer_splits(lane, by_rank, broken)
        if use_numbers and not partial:
            broken += _find_missing_calls(lane, by_rank)
        _leave_out_unmatched(lane, by_rank, late, partial)
    return guessed


def _collect_lanes(ranks: dict[int, Rank]) -> Collection[Lane]:
    lanes: dict[Key, Lane] = {}
    for rank in ranks.values():
        for index, (record, group) in enumerate(zip(rank.recorded, rank.groups, strict=True)):
            p2p = is_p2p(record)
            if group is None or (p2p and record.peer not in ranks):
                continue  # already skipped or refused; all other calls keep their position, skipped or not
            key = lane_of(record, rank.rank, group.pg)
            if key not in lanes:  # so that a member without a call has an empty list
                members = (rank.rank, record.peer) if p2p else group.ranks or ()
                lanes[key] = {member: [] for member in members if member is not None}
            lanes[key].setdefault(rank.rank, []).append((number_of(record) or 0, index))
    return lanes.values()


def _find_missing_calls(lane: Lane, ranks: dict[int, Rank]) -> list[str]:
    """Return one line per call that a rank lacks although it has later ones. Only numbers can show that."""
    for member, own in lane.items():
        mine = {number for number, _ in own}
        for other, calls in lane.items():
            found = [
                f"missing_rank: {record.op} #{number} on {record.pg!r}: {ranks[member].source.path} of rank {member} "
                f"lacks it and has later ones (call {record.id} of {ranks[other].source.path})"
                for number, index in calls
                if number not in mine and min(mine, default=number) < number < max(mine, default=number)
                for record in (ranks[other].recorded[index],)
            ]
            if found:
                return found
    return []


def name_sources(ranks: Sequence[Rank]) -> int:
    """Set the sender of each receive from any source to a rank whose send has no other receive; return how many were
    set."""
    sends: Counter[Key] = Counter()
    for rank in ranks:
        for record in filter(is_p2p, rank.recorded):
            sends[lane_of(record, rank.rank, record.pg)] += 1 if record.op == "send" else -1
    named = 0
    for rank in ranks:
        for row, record in enumerate(rank.recorded):
            if record.op != "recv" or record.peer is not None:
                continue
            any_source_lane = lane_of(record, rank.rank, record.pg)
            for lane, left in sends.items():
                kind, pg, sender, *rest = lane
                if left > 0 and (kind, pg, None, *rest) == any_source_lane:
                    sends[lane] -= 1
                    rank.recorded[row] = msgspec.structs.replace(record, peer=sender, p2p_seq=None)
                    named += 1
                    break
    return named


def _infer_splits(lane: Lane, ranks: dict[int, Rank], broken: list[str]) -> int:
    """Infer splits for the uneven all_to_alls of a lane that have only totals recorded; return how many got some."""
    exchanges: dict[int, dict[int, tuple[int, CommRecord]]] = defaultdict(dict)
    for member, calls in lane.items():
        for number, index in calls:
            record = ranks[member].records[index]
            if isinstance(record, str) or record.c10d != "alltoall_base_" or record.in_split or record.out_split:
                continue
            exchanges[number][member] = index, record
    given = 0
    for number, sides in exchanges.items():
        if len(sides) < len(lane):
            continue
        shapes = [(sides[member][1].inputs[0], sides[member][1].outputs[0]) for member in lane]
        sent, received = ([prod(shape[:1]) for shape in side] for side in zip(*shapes, strict=True))
        if len({*sent, *received}) == 1 and sent[0] % len(lane) == 0:
            continue  # even parts
        widths = {prod(shape[1:]) for pair in shapes for shape in pair}
        parts = fit(sent, received) if sum(sent) == sum(received) and len(widths) == 1 else None
        given += parts is not None
        for place, member in enumerate(lane):
            rank, (index, record) = ranks[member], sides[member]
            if parts is not None:
                splits = {"in_split": parts[place], "out_split": [row[place] for row in parts]}
                rank.records[index] = msgspec.structs.replace(record, **splits)
                continue
            rank.records[index] = CONTRADICTS_ITSELF
            broken.append(
                f"{rank.source.path}: rank {member}, call {record.id} (all_to_all #{number} on {record.pg!r}): what "
                "its ranks send is not what they receive"
            )
    return given


def fit(rows: Sequence[int], columns: Sequence[int]) -> list[list[int]]:
    """Return a table of whole numbers with these row and column sums, whose totals are equal.

    >>> fit([4, 2], [3, 3])
    [[2, 2], [1, 1]]
    """
    total = sum(rows) or 1
    table = [[row * column // total for column in columns] for row in rows]
    left = [row - sum(cells) for row, cells in zip(rows, table, strict=True)]
    wanted = [column - sum(cells[at] for cells in table) for at, column in enumerate(columns)]
    i = j = 0
    while i < len(left) and j < len(wanted):
        more = min(left[i], wanted[j])
        table[i][j] += more
        left[i] -= more
        wanted[j] -= more
        if not left[i]:
            i += 1
        else:
            j += 1
    return table


def _leave_out_unmatched(lane: Lane, ranks: dict[int, Rank], late: Collection[int], partial: bool) -> None:
    common = set.intersection(*({number for number, _ in calls} for calls in lane.values()))
    out: dict[int, str] = {}
    for member, calls in lane.items():
        for number, index in calls:
            record = ranks[member].records[index]
            if isinstance(record, str):
                out[number] = record
    for member, calls in lane.items():
        records, seen_common = ranks[member].records, False
        for number, index in calls:
            reason = out.get(number)
            if number in common:
                seen_common = True
            elif reason is None and not seen_common and any(other != member for other in late):
                reason = _OUT_OF_RING
            elif reason is None and partial:
                reason = _NO_COUNTERPART
            if reason is not None and not isinstance(records[index], str):
                records[index] = reason
