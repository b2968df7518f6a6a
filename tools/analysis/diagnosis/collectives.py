"""Compares the collectives of a group over its ranks, call by call, and finds the first that do not fit.

Two calls with one sequence number fit when they are the same operation on as many elements of the same type, from or
to the same root; which tensors must be of one size stands in the table of operations (`Operation.agrees`). For
all_to_all it is the group's sums of what is sent and received that must be equal.

What goes in and what comes out must fit each other as well (`contradiction`): an all_reduce has as much of both.

The majority says what a call should have been. Without one nobody is accused.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from crossrank.comm import OPERATIONS, CommRecord
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import Lane, ProcessGroup
from crossrank.tools.traces.rank_trace import Table

MISSING, EXTRA, TYPE, SIZE, DTYPE, ROOT, REDUCE = (
    "missing_rank",
    "extra_collective",
    "type_mismatch",
    "size_mismatch",
    "dtype_mismatch",
    "root_mismatch",
    "reduce_op_mismatch",
)

_FURTHER = 64
"""Calls after the first that does not fit at which it is seen whether one is too many or too few."""

# (operation, elements, dtype, root, reduction); None fits anything.
Meaning = tuple["str | None", "int | tuple[int, ...] | None", "str | None", "int | None", "str | None"]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first collective of a group that some ranks called differently."""

    group: ProcessGroup
    seq: int
    kind: str
    culprits: tuple[int, ...]
    """Those unlike the majority; empty where there is none."""
    op: str
    """Of the majority, or of an extra collective."""
    ranks: dict[int, Meaning]
    """What each rank with a call of this number called."""
    elements: tuple[int, int] | None = None
    """Sums over the group of what all_to_all sends and receives."""
    contradictions: dict[int, str] = field(default_factory=dict)
    """Rank -> what of its own call cannot be."""


def meaning(signature: CommRecord) -> Meaning:
    """What of a call must be the same on all ranks of a collective."""
    row = OPERATIONS.get(signature.op)
    elements: int | tuple[int, ...] | None = None
    if signature.members:
        # Of an uneven all_gather the members' outputs are the same on every rank; one's input is its own tensor.
        elements = tuple(_elements(member.outputs or member.inputs) for member in signature.members)
    elif row is None or row.agrees == "input":
        elements = _elements(signature.inputs)
    elif row.agrees == "output":
        elements = _elements(signature.outputs)
    if not signature.inputs and not signature.outputs and not signature.members:
        elements = None
    # Dumps before 2.7, and rings that lost the members, do not know what was coalesced.
    op = None if signature.op == "coalesced" and not signature.members else signature.op
    return op, elements, _dtype(signature), signature.root, signature.reduce


def _dtype(signature: CommRecord) -> str | None:
    """The type of what goes in, and of what comes out where that is another."""
    return f"{signature.dtype} into {signature.out_dtype}" if signature.out_dtype is not None else signature.dtype


def contradiction(signature: CommRecord, size: int) -> str:
    """What of a call cannot be, whatever the others call, in a group of `size` members; empty where all fits.

    An all_reduce gives back as much as it is given, an all_gather as much from every member, a reduce_scatter gives
    each its share, and all of them what they are given in the type that it has.
    """
    if signature.members or not signature.inputs or not signature.outputs:
        return ""
    if signature.op not in ("all_reduce", "all_gather", "reduce_scatter"):
        return ""
    given, got = _elements(signature.inputs), _elements(signature.outputs)
    if signature.op == "all_reduce":
        wanted = given
    elif not size or _is_uneven(signature):
        return ""
    else:
        wanted = given * size if signature.op == "all_gather" else given // size
    if got != wanted or (signature.op == "reduce_scatter" and given % size):
        return f"{given} elements go in and {got} come out"
    return f"{signature.dtype} goes in and {signature.out_dtype} comes out" if signature.out_dtype is not None else ""


def _is_uneven(signature: CommRecord) -> bool:
    """Whether it has a tensor per member on one side, of different sizes: one member's share tells nothing of them."""
    sides = sorted((signature.inputs, signature.outputs), key=len)
    return len(sides[0]) == 1 < len(sides[1]) and len({prod(shape) for shape in sides[1]}) > 1


def find_mismatches(job: JobState) -> list[Mismatch]:
    """The first mismatch of every group that has one."""
    meanings: Table[Meaning] = Table()
    of_signature = [meanings.number(meaning(signature)) for signature in job.signatures]
    barely = [meanings.number((None, None, None, one.root, one.reduce)) for one in job.signatures]
    sums = {number for number, meaning in enumerate(meanings.rows) if meaning[0] == "all_to_all"}
    found = []
    for group in job.groups:
        mismatch = _Comparison(job, group, (barely, of_signature), meanings.rows, sums).first()
        if mismatch is not None:
            found.append(mismatch)
    return found


class _Comparison:
    """One group over its ranks."""

    def __init__(
        self,
        job: JobState,
        group: ProcessGroup,
        of_signature: tuple[list[int], list[int]],
        meanings: list[Meaning],
        sums: set[int],
    ) -> None:
        """`of_signature`: meanings by signature, of ranks that are not comparable and of those that are."""
        self._job = job
        self._group = group
        self._meanings = meanings
        self._sums = sums
        self._columns: dict[int, array[int]] = {}
        size = 0 if group.inferred else len(group.ranks)
        wrong: dict[int, str] = {}
        for rank, lane in group.lanes.items():
            signatures = job.ranks[rank].calls.signature
            column = array("I", (signatures[row] for row in lane.rows))
            comparable = job.ranks[rank].comparable
            for number in set(column) - wrong.keys() if comparable else ():
                wrong[number] = contradiction(job.signatures[number], size)
            self._columns[rank] = array("I", map(of_signature[comparable].__getitem__, column))
        self._wrong = {number: text for number, text in wrong.items() if text}

    def first(self) -> Mismatch | None:
        """The first mismatch of the group."""
        group = self._group
        contradictory = self._first_contradiction()
        if len(group.lanes) < 2:
            return contradictory
        for seq in self._suspicious():
            if contradictory is not None and seq >= contradictory.seq:
                break
            calls = self._calls_at(seq)
            mismatch = self._judge(seq, calls) or self._all_to_all(seq, calls)
            if mismatch is not None:
                return mismatch
        return contradictory

    def _first_contradiction(self) -> Mismatch | None:
        """The first call of which what goes in does not fit what comes out, on any rank."""
        if not self._wrong:
            return None
        found: dict[int, dict[int, str]] = {}
        for rank, lane in self._group.lanes.items():
            signatures = self._job.ranks[rank].calls.signature
            for row, seq in zip(lane.rows, lane.numbers, strict=True):
                if signatures[row] in self._wrong:
                    found.setdefault(seq, {})[rank] = self._wrong[signatures[row]]
                    break
        seq = min(found)
        wrong, calls = found[seq], self._calls_at(seq)
        culprits = tuple(sorted(wrong)) if len(wrong) < len(calls) else ()
        op = calls[min(wrong)][0] or ""
        kind = SIZE if any("elements" in text for text in wrong.values()) else DTYPE
        return Mismatch(
            group=self._group, seq=seq, kind=kind, culprits=culprits, op=op, ranks=calls, contradictions=wrong
        )

    def _suspicious(self) -> list[int]:
        """Sequence numbers at which the ranks' calls are not the very same, and all those of all_to_all."""
        lanes = self._group.lanes
        reference = max(lanes, key=lambda rank: (len(lanes[rank].numbers), -rank))
        seqs: set[int] = set()
        for rank in lanes:
            if rank != reference:
                seqs.update(self._differences(reference, rank))
        # What the longest list does not reach is compared among the others.
        known = (
            set(lanes[reference].numbers)
            if any(not _spans(lanes[reference], lane) for lane in lanes.values())
            else None
        )
        if known is not None:
            for lane in lanes.values():
                seqs.update(seq for seq in lane.numbers if seq not in known)
        if self._sums:
            for rank, column in self._columns.items():
                seqs.update(
                    seq for seq, number in zip(lanes[rank].numbers, column, strict=True) if number in self._sums
                )
        return sorted(seqs)

    def _differences(self, one: int, other: int) -> list[int]:
        a, b = self._group.lanes[one], self._group.lanes[other]
        low, high = max(a.numbers[0], b.numbers[0]), min(a.numbers[-1], b.numbers[-1])
        if low > high:
            return []
        a_low, b_low, a_high, b_high = a.index(low), b.index(low), a.index(high), b.index(high)
        if None not in (a_low, b_low, a_high, b_high):
            same_numbers = a.numbers[a_low : a_high + 1] == b.numbers[b_low : b_high + 1]  # type: ignore[operator]
            if same_numbers:
                left = self._columns[one][a_low : a_high + 1]  # type: ignore[operator]
                right = self._columns[other][b_low : b_high + 1]  # type: ignore[operator]
                if left == right:
                    return []
                numbers = a.numbers[a_low:]
                return [seq for seq, x, y in zip(numbers, left, right) if x != y]  # noqa: B905
        found = []
        for seq, number in zip(a.numbers, self._columns[one], strict=True):
            index = b.index(seq)
            if index is not None and self._columns[other][index] != number:
                found.append(seq)
        return found

    def _calls_at(self, seq: int) -> dict[int, Meaning]:
        calls = {}
        # A broken file may have calls of a rank that its group does not list.
        for rank, lane in sorted(self._group.lanes.items()):
            index = lane.index(seq)
            if index is not None:
                calls[rank] = self._meanings[self._columns[rank][index]]
        return calls

    def _judge(self, seq: int, calls: dict[int, Meaning]) -> Mismatch | None:
        if len(calls) < 2:
            return None
        classes = _classes(calls)
        if len(classes) < 2:
            return None
        largest = max(classes, key=len)
        # Members that have not made the call, and those of which nothing is known, speak for neither side.
        behind = sum(1 for rank in self._group.ranks if rank not in calls and self._is_behind(rank, seq))
        majority = len(largest) * 2 > len(calls) + behind
        kind = _kind([calls[ranks[0]] for ranks in classes])
        reference = calls[largest[0]]
        if not majority:
            return Mismatch(group=self._group, seq=seq, kind=kind, culprits=(), op=reference[0] or "", ranks=calls)
        odd = sorted(rank for ranks in classes if ranks is not largest for rank in ranks)
        if kind in (ROOT, REDUCE):  # the same call but for that: nobody made one too many
            return Mismatch(
                group=self._group, seq=seq, kind=kind, culprits=tuple(odd), op=reference[0] or "", ranks=calls
            )
        shifted = {rank: self._shift(seq, rank, largest[0]) for rank in odd}
        kinds = set(shifted.values())
        if kinds == {EXTRA}:
            return Mismatch(
                group=self._group, seq=seq, kind=EXTRA, culprits=tuple(odd), op=calls[odd[0]][0] or "", ranks=calls
            )
        if kinds == {MISSING}:
            kind = MISSING
        return Mismatch(group=self._group, seq=seq, kind=kind, culprits=tuple(odd), op=reference[0] or "", ranks=calls)

    def _is_behind(self, rank: int, seq: int) -> bool:
        evidence = self._job.ranks.get(rank)
        if evidence is None:
            return not self._may_have_aborted()
        return not evidence.ending.unseen and (self._job.enqueued(self._group, rank) or 0) < seq

    def _may_have_aborted(self) -> bool:
        """Whether members of which nothing is left may have ended by the mismatch itself, as they do on gloo."""
        ranks, index = self._job.ranks, self._group.local_index
        known = [rank for rank in self._group.ranks if rank in ranks]
        return any(ranks[rank].ending.has_failed and ranks[rank].is_gloo(index.get(rank)) for rank in known)

    def _shift(self, seq: int, odd: int, reference: int) -> str | None:
        """Whether the odd rank's calls fit again when one is taken out, or one that it lacks is put in."""
        ours, theirs = self._following(odd, seq), self._following(reference, seq)
        if len(ours) > 1 and len(theirs) > 1 and _fit(ours[1:], theirs[1:]):
            return None  # only this one call is different
        kinds = [
            kind
            for kind, mine, other in ((EXTRA, ours[1:], theirs), (MISSING, ours, theirs[1:]))
            if mine and other and _fit(mine, other)
        ]
        if len(kinds) == 2:  # calls that alternate fit both ways; then the number of calls tells
            last, other_last = (self._group.lanes[rank].numbers[-1] for rank in (odd, reference))
            kinds = [] if last == other_last else [EXTRA if last > other_last else MISSING]
        return kinds[0] if kinds else None

    def _following(self, rank: int, seq: int) -> list[Meaning]:
        index = self._group.lanes[rank].index(seq)
        if index is None:
            return []
        return [self._meanings[number] for number in self._columns[rank][index : index + _FURTHER]]

    def _all_to_all(self, seq: int, calls: dict[int, Meaning]) -> Mismatch | None:
        if len(calls) < len(self._group.ranks) or any(call[0] != "all_to_all" for call in calls.values()):
            return None
        sent = received = 0
        for rank in calls:
            row = self._group.lanes[rank].row(seq)
            assert row is not None
            signature = self._job.signature(rank, row)
            sent += _elements(signature.inputs)
            received += _elements(signature.outputs)
        if sent == received:
            return None
        return Mismatch(
            group=self._group,
            seq=seq,
            kind=SIZE,
            culprits=(),
            op="all_to_all",
            ranks=calls,
            elements=(sent, received),
        )


def _spans(outer: Lane, inner: Lane) -> bool:
    return outer.numbers[0] <= inner.numbers[0] and outer.numbers[-1] >= inner.numbers[-1]


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(prod, shapes))


def fits(one: Meaning, other: Meaning) -> bool:
    """Whether two calls can be one collective: what only one of them states is no difference."""
    return all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def _fit(some: list[Meaning], others: list[Meaning]) -> bool:
    return all(fits(one, other) for one, other in zip(some, others))  # noqa: B905


def _classes(calls: dict[int, Meaning]) -> list[list[int]]:
    """Ranks whose calls fit each other, the largest class first, then that of the lowest rank."""
    counts = Counter(calls.values())
    classes: list[tuple[Meaning, list[int]]] = []
    # The most frequent call first, so that one which states less joins it.
    for one, _ in sorted(counts.items(), key=lambda item: (-item[1], repr(item[0]))):
        ranks = [rank for rank, call in calls.items() if call == one]
        for other, members in classes:
            if fits(one, other):
                members.extend(ranks)
                break
        else:
            classes.append((one, ranks))
    return sorted((sorted(ranks) for _, ranks in classes), key=lambda ranks: (-len(ranks), ranks))


def _kind(calls: list[Meaning]) -> str:
    """The most telling difference."""
    for position, kind in ((0, TYPE), (1, SIZE), (2, DTYPE), (3, ROOT), (4, REDUCE)):
        if len({call[position] for call in calls if call[position] is not None}) > 1:
            return kind
    return TYPE
