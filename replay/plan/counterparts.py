"""Joins the calls of all ranks, group by group, and leaves out what has no counterpart.

By their recorded numbers where all files have them; else by their order, from the first call on, or, where the
beginnings are lost (rings), from the last. What the members of a group say together completes a call: an uneven
all_to_all of which the flight recorder notes the shapes and not the splits gets parts that add up on both sides, as
proportional to both as whole rows can be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

from crossrank.comm import CommRecord, Group, ends_of, is_p2p
from crossrank.replay.plan.plan import number_of
from crossrank.replay.plan.schedule import Key, lane_of
from crossrank.tools.traces.rank_trace import RankTrace, Signatures

_OUT_OF_RING = "another rank's dump no longer has it"
_ALONE = "another rank of its group has no such call"
BROKEN = "it contradicts itself"


@dataclass
class Rank:
    """One rank on its way into the plan."""

    source: RankTrace
    rank: int
    recorded: list[CommRecord]
    labels: list[str | None]
    """By call: the name of its group in the plan; None where nobody defined it."""
    records: list[CommRecord | None] = field(default_factory=list)
    """Completed, by call; None where the call is left out."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Call -> why it is left out."""


Lane = dict[int, list[tuple["int | None", int]]]
"""Side (a member, or an end of a pair) -> (number, call) of its calls there, in order."""


def align(ranks: list[Rank], groups: dict[str, Group], broken: list[str], partial: bool) -> int:
    """Leave out, on all ranks, what is left out on one, and what has no counterpart.

    What contradicts itself over several ranks is added to `broken`. Returns how many uneven all_to_alls got parts that
    are not recorded.
    """
    guessed = 0
    by_rank = {rank.rank: rank for rank in ranks}
    numbered = all(rank.source.numbered for rank in ranks)
    for lane in _lanes(by_rank, groups):
        late = {member for member in lane if by_rank[member].source.starts_late}
        numbers = [[number for number, _ in calls] for calls in lane.values()]
        use_numbers = numbered and all(None not in one and len(set(one)) == len(one) for one in numbers)
        if not use_numbers:
            # From the first call on, or, where beginnings are lost, from the last one.
            for calls in lane.values():
                shift = -len(calls) if late else 0
                calls[:] = [(place + shift, index) for place, (_, index) in enumerate(calls)]
        guessed += _give_parts(lane, by_rank, broken)
        if use_numbers and not partial:
            broken += _gaps(lane, by_rank)
        _leave_out_unmatched(lane, by_rank, late, partial)
    return guessed


def _lanes(ranks: dict[int, Rank], groups: dict[str, Group]) -> Collection[Lane]:
    lanes: dict[Key, Lane] = {}
    for rank in ranks.values():
        for index, (record, label) in enumerate(zip(rank.recorded, rank.labels, strict=True)):
            p2p = is_p2p(record)
            if label is None or (p2p and record.peer not in ranks):
                continue  # left out, or refused, already; any other call takes its place, left out or not
            key = lane_of(record, rank.rank, label)
            if key not in lanes:  # a member without a call has an empty list
                members = (rank.rank, record.peer) if p2p else groups[label].ranks or ()
                lanes[key] = {member: [] for member in members if member is not None}
            lanes[key].setdefault(rank.rank, []).append((number_of(record), index))
    return lanes.values()


def _gaps(lane: Lane, ranks: dict[int, Rank]) -> list[str]:
    """Calls that a rank lacks although it has later ones: by their numbers they are known to be missing."""
    found = []
    numbers = {member: {number for number, _ in calls if number is not None} for member, calls in lane.items()}
    for member, mine in numbers.items():
        if not mine:
            continue
        for other, calls in lane.items():
            for number, index in calls:
                if number is not None and number not in mine and min(mine) < number < max(mine):
                    record = ranks[other].recorded[index]
                    found.append(
                        f"missing_rank: {record.op} #{number} on {record.pg!r}: {ranks[member].source.path} of rank "
                        f"{member} lacks it and has later ones (call {record.id} of {ranks[other].source.path})"
                    )
            if found:
                return found
    return found


def name_sources(sources: list[RankTrace]) -> int:
    """Give receives from any source the rank of a send that no other receive takes; returns how many got one."""
    sends: Counter[tuple[str, tuple[int | None, int | None], int]] = Counter()
    for source in sources:
        for record in filter(is_p2p, source.records()):
            if record.peer is not None and source.rank is not None:
                ends = ends_of(record.op, source.rank, record.peer)
                sends[(record.pg, ends, record.tag or 0)] += 1 if record.op == "send" else -1
    named = 0
    for source in sources:
        if not any(one.op == "recv" and one.peer is None for one in source.signatures):
            continue
        signatures = Signatures(*source.signatures)
        for row, record in enumerate(source.records()):
            if record.op != "recv" or record.peer is not None:
                continue
            for (pg, (sender, receiver), tag), left in sends.items():
                if left > 0 and (pg, receiver, tag) == (record.pg, source.rank, record.tag or 0):
                    sends[pg, (sender, receiver), tag] -= 1
                    source.calls.signature[row] = signatures.of(msgspec.structs.replace(record, peer=sender))
                    source.calls.number[row] = 0
                    named += 1
                    break
        source.signatures = signatures.rows
    return named


def _give_parts(lane: Lane, ranks: dict[int, Rank], broken: list[str]) -> int:
    """Find parts for the uneven all_to_alls of a lane of which only totals are recorded; how many got some."""
    exchanges: dict[int | None, dict[int, tuple[int, CommRecord]]] = defaultdict(dict)
    for member, calls in lane.items():
        for number, index in calls:
            record = ranks[member].records[index]
            if record is not None and record.op == "all_to_all":
                exchanges[number][member] = index, record
    given = 0
    for number, sides in exchanges.items():
        records = [sides[member][1] for member in lane if member in sides]
        if len(records) < len(lane) or any(
            one.c10d != "alltoall_base_" or one.in_split or one.out_split for one in records
        ):
            continue
        sides_of = [(one.inputs[0], one.outputs[0]) for one in records]
        sent, received = ([shape[0] if shape else 1 for shape in side] for side in zip(*sides_of, strict=True))
        if len({*sent, *received}) == 1 and sent[0] % len(lane) == 0:
            continue  # even parts
        widths = {prod(shape[1:]) for pair in sides_of for shape in pair if shape}
        parts = fit(sent, received) if sum(sent) == sum(received) and len(widths) <= 1 else None
        given += parts is not None
        for place, member in enumerate(lane):
            rank, (index, record) = ranks[member], sides[member]
            if parts is not None:
                splits = {"in_split": parts[place], "out_split": [row[place] for row in parts]}
                rank.records[index] = msgspec.structs.replace(record, **splits)
                continue
            rank.records[index], rank.reasons[index] = None, BROKEN
            broken.append(
                f"{rank.source.path}: rank {member}, call {record.id} (all_to_all #{number} on {record.pg!r}): what "
                "its ranks send is not what they receive"
            )
    return given


def fit(rows: Sequence[int], columns: Sequence[int]) -> list[list[int]]:
    """A table of whole numbers with these sums of rows and columns, which are equal in total.

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
    out = {
        number: ranks[member].reasons[index]
        for member, calls in lane.items()
        for number, index in calls
        if index in ranks[member].reasons
    }
    for member, calls in lane.items():
        seen_common = False
        for number, index in calls:
            reason = out.get(number)
            if number in common:
                seen_common = True
            elif reason is None and not seen_common and any(other != member for other in late):
                reason = _OUT_OF_RING
            elif reason is None and partial:
                reason = _ALONE
            if reason is not None:
                ranks[member].reasons.setdefault(index, reason)
                ranks[member].records[index] = None
