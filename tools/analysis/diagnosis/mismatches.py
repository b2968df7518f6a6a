"""Compares the collectives of a group over its ranks, call by call, and finds the first that do not fit.

Two calls with one sequence number fit when they are the same operation on as many elements of the same type, from or
to the same root; which tensors must be of one size stands in the table of operations (`Operation.agrees`). For
all_to_all, what each rank sends to each other one must be what that one expects; where the splits are not known, the
group's sums must be equal.

What goes in and what comes out must fit each other as well (`contradiction`): an all_reduce has as much of both.

The majority says what a call should have been. Where members have not made it, or nothing is known of them, so do most
of those that made it, if they went on as before and no other one did. Else nobody is accused.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from crossrank.comm import OPERATIONS, CommRecord
from crossrank.tools.analysis.diagnosis.call_history import is_out_of_turn, is_usual
from crossrank.tools.analysis.diagnosis.findings import rank_text, ranks_by
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.rank_trace import Interned

TYPE, SIZE, DTYPE, ROOT, REDUCE = KINDS = (
    "type_mismatch",
    "size_mismatch",
    "dtype_mismatch",
    "root_mismatch",
    "reduce_op_mismatch",
)
"""What can be different, in the order of the fields of `MatchKey`."""
MISSING, EXTRA = "missing_rank", "extra_collective"

_DIVIDES = "alltoall_base_"
"""The operation of c10d that divides one tensor among the ranks."""
_PAIRS = 2
"""Pairs of ranks that a mismatch of splits shows."""
_FURTHER = 64
"""Calls after the first that does not fit at which it is seen whether one is too many or too few."""


class MatchKey(NamedTuple):
    """What of a call must be the same on all ranks of a collective; None fits anything."""

    op: str | None = None
    elements: int | tuple[int, ...] | None = None
    dtype: str | None = None
    root: int | None = None
    reduce: str | None = None

    def fits(self, other: MatchKey) -> bool:
        """Whether two calls can be one collective: what only one of them states is no difference."""
        return self == other or all(a is None or b is None or a == b for a, b in zip(self, other, strict=True))

    @property
    def text(self) -> str:
        words = [self.op or "coalesced"]
        if self.elements is not None:
            words.append(f"of {self.elements} elements")
        words += [word for word in (self.dtype, self.reduce) if word]
        return " ".join(words + ([f"with root {self.root}"] if self.root is not None else []))


def match_key(signature: CommRecord) -> MatchKey:
    row = OPERATIONS.get(signature.op)
    agrees = "input" if row is None else row.agrees
    elements: int | tuple[int, ...] | None = None
    if signature.members:
        # Of an uneven all_gather the members' outputs are the same on every rank; one's input is its own tensor.
        elements = tuple(_elements(member.outputs or member.inputs) for member in signature.members)
    elif agrees != "none" and not _is_uneven_by_name(signature) and (signature.inputs or signature.outputs):
        elements = _elements(signature.inputs if agrees == "input" else signature.outputs)
    # Dumps before 2.7, and rings that lost the members, do not know what was coalesced.
    op = None if signature.op == "coalesced" and not signature.members else signature.op
    dtype = signature.dtype
    if signature.out_dtype is not None:
        dtype = f"{dtype} into {signature.out_dtype}"
    return MatchKey(op, elements, dtype, signature.root, signature.reduce)


def contradiction(signature: CommRecord, size: int) -> str:
    """How a call contradicts itself, whatever the others call, in a group of `size` members; empty where all fits.

    An all_reduce gives back as much as it is given, an all_gather as much from every member, a reduce_scatter gives
    each its share, and all of them what they are given in the type that it has.
    """
    op = signature.op
    if signature.members or not signature.inputs or not signature.outputs:
        return ""
    if op not in ("all_reduce", "all_gather", "reduce_scatter"):
        return ""
    if op != "all_reduce" and (not size or _is_uneven(signature) or _is_uneven_by_name(signature)):
        return ""
    given, got = _elements(signature.inputs), _elements(signature.outputs)
    whole, shares = (given, got) if op == "reduce_scatter" else (got, given)
    if whole != (shares if op == "all_reduce" else shares * size):
        return f"{given} elements in, {got} elements out"
    return f"{signature.dtype} in, {signature.out_dtype} out" if signature.out_dtype is not None else ""


def _is_uneven_by_name(signature: CommRecord) -> bool:
    """Whether it is an all_gather or a reduce_scatter of shares that differ: all_gather_v, reduce_scatter_v."""
    return signature.op in ("all_gather", "reduce_scatter") and signature.c10d.endswith("_v")


def _is_uneven(signature: CommRecord) -> bool:
    """Whether it has a tensor per member on one side, of different sizes: one member's share shows nothing of them."""
    few, many = sorted((signature.inputs, signature.outputs), key=len)
    return len(few) == 1 < len(many) and len({prod(shape) for shape in many}) > 1


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(prod, shapes))


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first collective of a group that some ranks called differently."""

    group: ProcessGroup
    seq: int
    kind: str
    culprits: tuple[int, ...] = ()
    """Those unlike the majority; empty where there is none."""
    op: str
    """Of the majority, or of an extra collective."""
    text: str
    """What happened, for people."""
    ranks: list[int]
    """Those with a call of this number."""
    since: int
    """When the first of them made it, ns since 1970."""


def find_mismatches(job: JobState) -> list[Mismatch]:
    """The first mismatch of every group that has one."""
    keys: Interned[MatchKey] = Interned()
    of_signature = [keys.number(match_key(signature)) for signature in job.signatures]
    # Of a rank whose calls cannot be compared but for these two.
    barely = [keys.number(MatchKey(root=one.root, reduce=one.reduce)) for one in job.signatures]
    comparisons = (_Comparison(job, group, (barely, of_signature), keys.rows) for group in job.groups)
    return [found for one in comparisons if (found := one.first()) is not None]


class _Comparison:
    """One group over its ranks."""

    def __init__(
        self, job: JobState, group: ProcessGroup, of_signature: tuple[list[int], list[int]], keys: list[MatchKey]
    ) -> None:
        """`of_signature`: numbers of keys by signature, of ranks that are not comparable and of those that are."""
        self._job, self._group, self._keys = job, group, keys
        self._columns: dict[int, array[int]] = {}
        """Rank -> number of the key of each of its calls."""
        size = 0 if group.inferred else len(group.ranks)
        texts: dict[int, str] = {}
        self._wrong: dict[int, dict[int, str]] = defaultdict(dict)
        """Number of a call -> rank -> how it contradicts itself there; the first one of each rank."""
        for rank, lane in group.lanes.items():
            trace = job.ranks[rank]
            column = array("I", map(trace.calls.signature.__getitem__, lane.rows))
            self._columns[rank] = array("I", map(of_signature[trace.comparable].__getitem__, column))
            own = set(column) if trace.comparable else set()
            texts |= {number: contradiction(job.signatures[number], size) for number in own - texts.keys()}
            first = min((column.index(number) for number in own if texts[number]), default=None)
            if first is not None:
                self._wrong[lane.numbers[first]][rank] = texts[column[first]]

    def first(self) -> Mismatch | None:
        """The first mismatch of the group."""
        wrong = min(self._wrong, default=None)
        for seq in self._suspicious():
            if wrong is not None and seq > wrong:
                break
            calls = self._calls_at(seq)
            mismatch = self._judge(seq, calls) or self._all_to_all(seq, calls)
            # How a call contradicts itself says more than how it differs from others, unless it is another operation.
            if mismatch is not None and (seq != wrong or mismatch.kind not in (SIZE, DTYPE)):
                return mismatch
        if wrong is None:
            return None
        calls, texts = self._calls_at(wrong), self._wrong[wrong]
        kind = SIZE if any("elements" in text for text in texts.values()) else DTYPE
        culprits = sorted(texts) if len(texts) < len(calls) else []
        return self._mismatch(wrong, kind, calls, calls[min(texts)].op, _by_text(texts), culprits)

    def _mismatch(
        self, seq: int, kind: str, calls: dict[int, MatchKey], op: str | None, text: str, culprits: Sequence[int] = ()
    ) -> Mismatch:
        return Mismatch(
            group=self._group,
            seq=seq,
            kind=kind,
            culprits=tuple(culprits),
            op=op or "",
            text=text,
            ranks=list(calls),
            since=min(self._job.moment(*place) for place in self._job.rows_of(self._group, seq)),
        )

    def _suspicious(self) -> list[int]:
        """Sequence numbers at which the ranks' calls are not the very same, and all those of all_to_all."""
        lanes, columns = self._group.lanes, self._columns
        if len(lanes) < 2:
            return []
        reference = max(lanes, key=lambda rank: (len(lanes[rank].numbers), -rank))
        numbers, column = lanes[reference].numbers, columns[reference]
        sums = {number for number, key in enumerate(self._keys) if key.op == "all_to_all"}
        key_of: dict[int, int] = {}
        seqs: set[int] = set()
        for rank, lane in lanes.items():
            start = lanes[reference].index(lane.numbers[0])
            end = None if start is None else start + len(lane.numbers)
            if numbers[start:end] != lane.numbers or column[start:end] != columns[rank]:
                key_of = key_of or dict(zip(numbers, column, strict=True))
                # What the longest list does not have is compared among the others.
                seqs |= {seq for seq, key in zip(lane.numbers, columns[rank], strict=True) if key_of.get(seq) != key}
            if sums:
                seqs |= {seq for seq, key in zip(lane.numbers, columns[rank], strict=True) if key in sums}
        return sorted(seqs)

    def _calls_at(self, seq: int) -> dict[int, MatchKey]:
        # A broken file may have calls of a rank that its group does not list.
        places = {rank: lane.index(seq) for rank, lane in sorted(self._group.lanes.items())}
        return {rank: self._keys[self._columns[rank][place]] for rank, place in places.items() if place is not None}

    def _judge(self, seq: int, calls: dict[int, MatchKey]) -> Mismatch | None:
        largest, *others = _classes(calls)
        if not others:
            return None
        # Members that have not made the call, and those of which nothing is known, speak for neither side.
        behind = sum(1 for rank in self._group.ranks if rank not in calls and self._is_behind(rank, seq))
        has_majority = len(largest) * 2 > len(calls) + behind or self._is_out_of_turn(seq, largest, others)
        columns = zip(KINDS, *(calls[ranks[0]] for ranks in (largest, *others)), strict=True)
        kind = next((kind for kind, *values in columns if len({one for one in values if one is not None}) > 1), TYPE)
        odd = sorted(rank for ranks in others for rank in ranks) if has_majority else []
        op, text = calls[largest[0]].op, _by_text({rank: key.text for rank, key in calls.items()})
        # Where root or reduction differ it is the same call but for that: nobody made one too many.
        shifts = {self._shift(seq, rank, largest[0]) for rank in odd} if kind not in (ROOT, REDUCE) else set()
        if shifts == {EXTRA}:
            kind, op = EXTRA, calls[odd[0]].op
            text = f"{rank_text(odd)} made this call and the other ranks did not; the next calls match again"
        elif shifts == {MISSING}:
            kind, text = MISSING, f"{rank_text(odd)} skipped this call; its next calls match those of the other ranks"
        return self._mismatch(seq, kind, calls, op, text, odd)

    def _is_out_of_turn(self, seq: int, most: list[int], others: list[list[int]]) -> bool:
        """Whether most of those that made the call went on as they did before, and none of the others did."""
        few = [rank for ranks in others for rank in ranks]
        if len(most) <= len(few):
            return False
        rows = dict(self._job.rows_of(self._group, seq))
        return all(is_usual(self._job, rank, rows[rank]) for rank in most) and all(
            is_out_of_turn(self._job, rank, rows[rank]) for rank in few
        )

    def _is_behind(self, rank: int, seq: int) -> bool:
        ranks, group = self._job.ranks, self._group
        if rank in ranks:
            return not ranks[rank].ending.unseen and (self._job.enqueued(group, rank) or 0) < seq
        # A member of which nothing is left may have ended by the mismatch itself, as they do on gloo.
        known = [(ranks[one], group.local_index.get(one)) for one in group.ranks if one in ranks]
        return not any(one.ending.has_failed and one.is_gloo(local) for one, local in known)

    def _shift(self, seq: int, odd: int, reference: int) -> str | None:
        """Whether the odd rank's calls fit again when one is taken out, or one that it lacks is put in."""
        ours, theirs = self._following(odd, seq), self._following(reference, seq)
        if _all_fit(ours[1:], theirs[1:]):
            return None  # only this one call is different
        extra, missing = _all_fit(ours[1:], theirs), _all_fit(ours, theirs[1:])
        if extra and missing:  # calls that alternate fit both ways; then the number of calls decides
            last, other_last = (self._group.lanes[rank].numbers[-1] for rank in (odd, reference))
            extra, missing = last > other_last, last < other_last
        return EXTRA if extra else MISSING if missing else None

    def _following(self, rank: int, seq: int) -> list[MatchKey]:
        index = self._group.lanes[rank].index(seq) or 0
        return [self._keys[number] for number in self._columns[rank][index : index + _FURTHER]]

    def _all_to_all(self, seq: int, calls: dict[int, MatchKey]) -> Mismatch | None:
        if len(calls) < len(self._group.ranks) or any(call.op != "all_to_all" for call in calls.values()):
            return None
        signatures = {rank: self._job.signature(rank, row) for rank, row in self._job.rows_of(self._group, seq)}
        size = len(self._group.ranks)
        sent = {rank: _parts(one.inputs, one.in_split, one, size) for rank, one in signatures.items()}
        expected = {rank: _parts(one.outputs, one.out_split, one, size) for rank, one in signatures.items()}
        if not (all(sent.values()) and all(expected.values())):
            return self._sums(seq, calls, list(signatures.values()))
        pairs = [
            (sender, receiver)
            for index, sender in enumerate(self._group.ranks)
            for other, receiver in enumerate(self._group.ranks)
            if sent[sender][other] != expected[receiver][index]
        ]
        if not pairs:
            return None
        in_all = set.intersection(*map(set, pairs))
        # Of one pair alone either end may be wrong.
        culprits = in_all if len(in_all) == 1 else set()
        place = {rank: index for index, rank in enumerate(self._group.ranks)}
        texts = [
            f"rank {one} sends {sent[one][place[other]]} elements to rank {other}, "
            f"which expects {expected[other][place[one]]}"
            for one, other in pairs[:_PAIRS]
        ]
        more = f"; … {len(pairs) - _PAIRS} more pairs" if len(pairs) > _PAIRS else ""
        return self._mismatch(seq, SIZE, calls, "all_to_all", "; ".join(texts) + more, sorted(culprits))

    def _sums(self, seq: int, calls: dict[int, MatchKey], signatures: list[CommRecord]) -> Mismatch | None:
        """Where the parts for each rank are not known: a mismatch if the sums differ."""
        sent, expected = (
            sum(_elements(one.inputs) for one in signatures),
            sum(_elements(one.outputs) for one in signatures),
        )
        if sent == expected:
            return None
        text = f"the ranks send {sent} elements in total and expect {expected}"
        return self._mismatch(seq, SIZE, calls, "all_to_all", text)


def _parts(shapes: list[list[int]], splits: list[int] | None, record: CommRecord, size: int) -> list[int]:
    """Elements for, or of, each of `size` ranks; empty where that is not known: torch's recorder notes no splits.

    A tensor is divided along its first dimension by its splits, in a record of ours without any into equal parts; or
    there is a tensor for each rank.
    """
    elements = [_elements([shape]) for shape in shapes]
    if len(shapes) == 1 and record.c10d == _DIVIDES:
        splits = splits or [1] * size
    # A rank that gives nothing has splits of 0, and an empty tensor.
    if splits and len(splits) == size and len(shapes) == 1 and (any(splits) or not elements[0]):
        return [elements[0] * split // (sum(splits) or 1) for split in splits]
    return elements if len(shapes) == size > 1 else []


def _by_text(texts: dict[int, str]) -> str:
    """Ranks with what is to be reported of them, that of the most first."""
    ordered = sorted(ranks_by(texts).items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{rank_text(ranks)}: {text}" for text, ranks in ordered)


def _all_fit(some: list[MatchKey], others: list[MatchKey]) -> bool:
    """Whether calls fit in their order, as far as both lists go, of which neither may be empty."""
    return bool(some and others) and all(one.fits(other) for one, other in zip(some, others))  # noqa: B905


def _classes(calls: dict[int, MatchKey]) -> list[list[int]]:
    """Ranks whose calls fit each other, the largest class first, then that of the lowest rank."""
    classes: list[tuple[MatchKey, list[int]]] = []
    # The most frequent call first, so that one which states less joins it.
    for one, _ in sorted(Counter(calls.values()).items(), key=lambda item: (-item[1], repr(tuple(item[0])))):
        members = next((ranks for other, ranks in classes if one.fits(other)), None)
        if members is None:
            classes.append((one, members := []))
        members += [rank for rank, call in calls.items() if call == one]
    return sorted((sorted(ranks) for _, ranks in classes), key=lambda ranks: (-len(ranks), ranks))
