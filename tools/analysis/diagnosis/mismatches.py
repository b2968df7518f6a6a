"""Compare the collectives of a group over its ranks, call by call, and find the first mismatch.

Two calls with one sequence number match if they have the same operation, number of elements, data type and root.
`Operation.agrees` says which tensors must have equal sizes. For all_to_all, each rank must send what the other rank
expects; if the splits are unknown, the sums over the group must be equal.

Input and output of a call must also match (`contradiction`): an all_reduce has equal sizes.

The majority of the group defines the right call, or half of it if the files of all others that may have made the other
call are missing. If members are missing or unknown, or both calls have as many ranks, the ranks define it that made
their usual calls, if no other rank did. Otherwise there is no culprit.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from crossrank.comm import DEFAULT_GROUP, MOST, OPERATIONS, REDUCTIONS, CommRecord, is_p2p, operation_of
from crossrank.dtypes import dtype_of
from crossrank.tools.analysis.diagnosis.call_history import (
    is_from_elsewhere,
    is_out_of_turn,
    is_usual,
    unlike_the_rest,
)
from crossrank.tools.analysis.diagnosis.findings import rank_text, ranks_by
from crossrank.tools.analysis.diagnosis.job_state import JobState, called_op
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.traces.rank_trace import Interned

TYPE, SIZE, DTYPE, ROOT, REDUCE = KINDS = (
    "type_mismatch",
    "size_mismatch",
    "dtype_mismatch",
    "root_mismatch",
    "reduce_op_mismatch",
)
"""Kinds of mismatches, in the order of the fields of `MatchKey`."""
MISSING, EXTRA = "missing_rank", "extra_collective"

_COPY = ("broadcast", "gather", "scatter", "all_gather")
"""Operations that copy bytes, and reduce none."""
_DIVIDES = "alltoall_base_"
"""c10d's operation that divides one tensor among the ranks."""
_PAIRS = 2
"""Pairs of ranks that the text on a mismatch of splits shows."""
_NAME = re.compile(r"[\w.:+-]{1,80}", re.ASCII)
"""Names of operations. Another text is damaged: the operation is unknown."""
_FURTHER = 64
"""Calls after the first mismatch that show whether a rank made one call too many or too few."""


class MatchKey(NamedTuple):
    """The properties of a call that must be equal on all ranks of a collective; None matches anything."""

    op: str | None = None
    elements: int | tuple[int, ...] | None = None
    dtype: str | None = None
    root: int | None = None
    reduce: str | None = None

    def fits(self, other: MatchKey) -> bool:
        """Return whether two calls can be one collective. Unknown properties match."""
        return self == other or all(a is None or b is None or a == b for a, b in zip(self, other, strict=True))

    @property
    def text(self) -> str:
        words = [self.op or "coalesced"]
        if self.elements is not None:
            words.append(f"of {self.elements} elements")
        words += [word for word in (self.dtype, self.reduce) if word]
        return " ".join(words + ([f"with root {self.root}"] if self.root is not None else []))


def match_key(signature: CommRecord) -> MatchKey:
    """Return the properties of a call; those with a value that crossrank does not know are unknown."""
    if not _is_operation(signature):
        return MatchKey()
    row = OPERATIONS.get(signature.op)
    agrees = "input" if row is None else row.agrees
    elements: int | tuple[int, ...] | None = None
    if signature.members:
        # In an uneven all_gather the outputs are equal on every rank; the inputs differ.
        elements = tuple(_elements(member.outputs or member.inputs) for member in signature.members)
    elif agrees != "none" and not _is_uneven_by_name(signature):
        side = signature.inputs if agrees == "input" else signature.outputs
        count = _elements(side) if side else None
        elements = count if count is not None and count <= MOST else None
    # Dumps of torch before 2.7, and rings that lost the members, do not show the calls of a batch.
    op = None if signature.op == "coalesced" and not signature.members else signature.op
    dtypes = [dtype for dtype in (signature.dtype, signature.out_dtype) if dtype is not None]
    dtype = " into ".join(dtypes) if dtypes and all(map(dtype_of, dtypes)) else None
    return MatchKey(op, elements, dtype, signature.root, _reduction(signature))


def _reduction(signature: CommRecord) -> str | None:
    name = signature.reduce or ""
    return name if name in REDUCTIONS or name.startswith("op_") else None


def _is_operation(signature: CommRecord) -> bool:
    """Return whether the name of the operation is right. A name without a row is that of an operation that crossrank
    does not know, or damaged: its name in c10d shows which, except in a dump, which has only one name."""
    op, c10d = signature.op, signature.c10d
    if op in OPERATIONS or op == "coalesced":
        return True
    return _NAME.fullmatch(op) is not None and ":" not in c10d and operation_of(c10d) is None


def contradiction(signature: CommRecord, size: int) -> str:
    """Return how input and output of a call contradict each other, in a group of `size` members; empty if they match.

    Sizes: an all_reduce has equal sizes, an all_gather has `size` times more output, a reduce_scatter `size` times
    less. Input and output have the same data type.
    """
    op = signature.op
    if signature.members or not signature.inputs or not signature.outputs:
        return ""
    if op not in ("all_reduce", "all_gather", "reduce_scatter"):
        return ""
    if op != "all_reduce" and (not size or _is_uneven(signature) or _is_uneven_by_name(signature)):
        return ""
    given, got = _elements(signature.inputs), _elements(signature.outputs)
    if max(given, got) > MOST:
        return ""  # damaged
    whole, shares = (given, got) if op == "reduce_scatter" else (got, given)
    if whole != (shares if op == "all_reduce" else shares * size):
        return f"{given} elements in, {got} elements out"
    both_known = dtype_of(signature.dtype or "") is not None and dtype_of(signature.out_dtype or "") is not None
    return f"{signature.dtype} in, {signature.out_dtype} out" if both_known else ""


def _copied_bytes(key: MatchKey) -> int | str:
    """Return the bytes of a call that only copies them: their types do not matter to it. Another call has a text."""
    dtype = dtype_of(key.dtype or "")
    if key.op not in _COPY or dtype is None or not isinstance(key.elements, int):
        return key.text
    return key.elements * dtype.size


def _is_uneven_by_name(signature: CommRecord) -> bool:
    """Return whether it is an all_gather_v or a reduce_scatter_v, whose shares may differ."""
    return signature.op in ("all_gather", "reduce_scatter") and signature.c10d.endswith("_v")


def _is_uneven(signature: CommRecord) -> bool:
    """Return whether it has one tensor per member, of different sizes: one share does not show the others."""
    few, many = sorted((signature.inputs, signature.outputs), key=len)
    return len(few) == 1 < len(many) and len({prod(shape) for shape in many}) > 1


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(prod, shapes))


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first collective of a group whose calls differ between ranks."""

    group: ProcessGroup
    seq: int
    kind: str
    culprits: tuple[int, ...] = ()
    """Ranks that differ from the majority; empty without a majority."""
    op: str
    """Operation of the majority, or of an extra collective."""
    text: str
    """What happened."""
    ranks: list[int]
    """Ranks with a call of this number."""
    since: int
    """Time of the first of these calls, ns since 1970."""


def find_mismatches(job: JobState) -> list[Mismatch]:
    """Return the first mismatch of every group with one."""
    keys: Interned[MatchKey] = Interned()
    of_signature = [keys.number(match_key(signature)) for signature in job.signatures]
    # For ranks that are not comparable: only these two fields are compared.
    barely = [keys.number(MatchKey(root=one.root, reduce=_reduction(one))) for one in job.signatures]
    comparisons = (_Comparison(job, group, (barely, of_signature), keys.rows) for group in job.groups)
    return [found for one in comparisons if (found := one.first()) is not None]


class _Comparison:
    """Compares the ranks of one group."""

    def __init__(
        self, job: JobState, group: ProcessGroup, of_signature: tuple[list[int], list[int]], keys: list[MatchKey]
    ) -> None:
        """`of_signature`: signature -> key number, one list for ranks that are not comparable, one for the others."""
        self._job, self._group, self._keys = job, group, keys
        self._columns: dict[int, array[int]] = {}
        """Rank -> key number of each of its calls."""
        size = 0 if group.inferred else len(group.ranks)
        texts: dict[int, str] = {}
        self._wrong: dict[int, dict[int, str]] = defaultdict(dict)
        """Number of a call -> rank -> its contradiction; only the first one of each rank."""
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
        """Return the first mismatch of the group."""
        wrong = min(self._wrong, default=None)
        for seq in self._suspicious():
            if wrong is not None and seq > wrong:
                break
            calls = self._calls_at(seq)
            mismatch = self._judge(seq, calls) or self._all_to_all(seq, calls)
            # A contradiction in a call is more exact than a difference to other ranks, except of the operation.
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
            op=self._called_op(seq) or op or "",
            text=text,
            ranks=list(calls),
            since=min(self._job.moment(*place) for place in self._job.rows_of(self._group, seq)),
        )

    def _called_op(self, seq: int) -> str:
        """Return the operation that the ranks called, if gloo's recorder notes another one: see `called_op`."""
        ops = {called_op(self._job.signature(*place)) for place in self._job.rows_of(self._group, seq)}
        return ops.pop() if len(ops) == 1 else ""

    def _suspicious(self) -> list[int]:
        """Return the sequence numbers at which the ranks' calls differ, and those of all_to_all."""
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
                # Calls that the longest list lacks are compared among the others.
                seqs |= {seq for seq, key in zip(lane.numbers, columns[rank], strict=True) if key_of.get(seq) != key}
            if sums:
                seqs |= {seq for seq, key in zip(lane.numbers, columns[rank], strict=True) if key in sums}
        return sorted(seqs)

    def _calls_at(self, seq: int) -> dict[int, MatchKey]:
        # A damaged file may have calls of a rank outside the group.
        places = {rank: lane.index(seq) for rank, lane in sorted(self._group.lanes.items())}
        return {rank: self._keys[self._columns[rank][place]] for rank, place in places.items() if place is not None}

    def _judge(self, seq: int, calls: dict[int, MatchKey]) -> Mismatch | None:
        largest, *others = _classes(calls)
        if not others:
            return None
        # Members without the call, and unknown members, count for neither side.
        behind = [rank for rank in self._group.ranks if rank not in calls and self._is_behind(rank, seq)]
        has_majority = self._is_majority(largest, calls, behind) or self._is_out_of_turn(seq, largest, others)
        if not has_majority and len(others) == 1 and self._is_out_of_turn(seq, others[0], [largest]):
            largest, others, has_majority = others[0], [largest], True
        columns = zip(KINDS, *(calls[ranks[0]] for ranks in (largest, *others)), strict=True)
        kind = next((kind for kind, *values in columns if len({one for one in values if one is not None}) > 1), TYPE)
        if kind in (SIZE, DTYPE) and len(set(map(_copied_bytes, calls.values()))) == 1 and not self._is_stuck(seq):
            return None
        odd = (
            sorted(rank for ranks in others for rank in ranks)
            if has_majority
            else sorted(unlike_the_rest(self._job, calls))
        )
        op, text = calls[largest[0]].op, _by_text({rank: key.text for rank, key in calls.items()})
        if odd and behind and len(largest) * 2 == len(calls) + len(behind):
            text += f"; the files of {rank_text(behind)} are missing, which may have made either call"
        # If only root or reduction differ, no rank made an extra call.
        shifts = {self._shift(seq, rank, largest[0]) for rank in odd} if kind not in (ROOT, REDUCE) else set()
        if shifts == {EXTRA}:
            kind, op = EXTRA, calls[odd[0]].op
            text = f"{rank_text(odd)} made this call and the other ranks did not; the next calls match again"
        elif shifts == {MISSING}:
            kind, text = MISSING, f"{rank_text(odd)} skipped this call; its next calls match those of the other ranks"
        return self._mismatch(seq, kind, calls, op, text, odd)

    def _is_majority(self, largest: list[int], calls: Collection[int], behind: list[int]) -> bool:
        """Return whether ranks with one call are the majority of a group. Members without files may have made the other
        call: then half of the group counts as one, if they are more than the known others."""
        if len(largest) * 2 > len(calls) + len(behind):
            return True
        unseen = all(rank not in self._job.ranks for rank in behind)
        return unseen and len(largest) * 2 == len(calls) + len(behind) and len(largest) * 2 > len(calls)

    def _is_stuck(self, seq: int) -> bool:
        """Return whether a call has not finished although all members have made it."""
        index = self._group.index
        return self._job.over[index] < seq <= self._job.made_by_all[index]

    def _is_out_of_turn(self, seq: int, most: list[int], others: list[list[int]]) -> bool:
        """Return whether some ranks, at least as many as the others, made their usual call, and none of the others."""
        few = [rank for ranks in others for rank in ranks]
        if len(most) < len(few):
            return False
        rows = dict(self._job.rows_of(self._group, seq))
        # Where a member is missing, a call that is new may also be the first one after a loop, which the others lead.
        missing = set(self._group.ranks).difference(most, few)
        is_whole = all(any(self._is_left_by(rank, one) for one in few) for rank in missing)
        job = self._job
        return any(
            all(is_usual(job, rank, rows[rank], sized=sized) for rank in most)
            and all(
                is_out_of_turn(job, rank, rows[rank], sized=sized)
                or (is_whole and is_from_elsewhere(job, rank, rows[rank]))
                for rank in few
            )
            for sized in (False, True)
        )

    def _is_left_by(self, rank: int, other: int) -> bool:
        """Return whether a rank waits in a collective of another group that `other` has not made."""
        job = self._job
        for row in job.open_rows.get(rank, ()):
            group, number = job.group_at(rank, row), job.ranks[rank].calls.number[row]
            if group is not self._group and other in group.ranks and not is_p2p(job.signature(rank, row)):
                return (job.enqueued(group, other) or 0) < number
        return False

    def _is_behind(self, rank: int, seq: int) -> bool:
        ranks, group = self._job.ranks, self._group
        if rank in ranks:
            return not ranks[rank].ending.unseen and (self._job.enqueued(group, rank) or 0) < seq
        # A member without evidence may have ended because of the mismatch, as happens on gloo.
        known = [(ranks[one], group.local_index.get(one)) for one in group.ranks if one in ranks]
        return not any(one.ending.has_failed and one.is_gloo(local) for one, local in known)

    def _shift(self, seq: int, odd: int, reference: int) -> str | None:
        """Return whether the calls of rank `odd` match again after one call is removed or added."""
        ours, theirs = self._following(odd, seq), self._following(reference, seq)
        if _all_fit(ours[1:], theirs[1:]):
            return None  # only this call differs
        extra, missing = _all_fit(ours[1:], theirs), _all_fit(ours, theirs[1:])
        if extra and missing:  # alternating calls match both ways; then the number of calls decides
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
            return self._sums(seq, calls, signatures)
        pairs = [
            (sender, receiver)
            for index, sender in enumerate(self._group.ranks)
            for other, receiver in enumerate(self._group.ranks)
            if sent[sender][other] != expected[receiver][index]
        ]
        if not pairs:
            return None
        in_all = set.intersection(*map(set, pairs))
        if len(in_all) > 1:  # of one pair, the rank is wrong that has changed its share, if the other has not
            changed = {rank for rank in in_all if self._has_changed_shares(rank, seq)}
            in_all = changed if len(changed) == 1 else set()
        culprits = in_all
        place = {rank: index for index, rank in enumerate(self._group.ranks)}
        texts = [
            f"rank {one} sends {sent[one][place[other]]} elements to rank {other}, "
            f"which expects {expected[other][place[one]]}"
            for one, other in pairs[:_PAIRS]
        ]
        more = f"; … {len(pairs) - _PAIRS} more pairs" if len(pairs) > _PAIRS else ""
        return self._mismatch(seq, SIZE, calls, "all_to_all", "; ".join(texts) + more, sorted(culprits))

    def _has_changed_shares(self, rank: int, seq: int) -> bool:
        """Return whether a rank divides this all_to_all in another way than the last one that it made at this line."""
        lane, trace, size = self._group.lanes[rank], self._job.ranks[rank], len(self._group.ranks)
        this = lane.row(seq)
        earlier = (row for row in reversed(lane.rows[: lane.index(seq) or 0]) if this is not None)
        calls = trace.calls
        same = next((row for row in earlier if calls.stack[row] == calls.stack[this or 0]), None)
        if same is None or this is None:
            return False
        shares = [
            [_parts(one.inputs, one.in_split, one, size), _parts(one.outputs, one.out_split, one, size)]
            for one in (self._job.signature(rank, row) for row in (this, same))
        ]
        return shares[0] != shares[1]

    def _sums(self, seq: int, calls: dict[int, MatchKey], signatures: dict[int, CommRecord]) -> Mismatch | None:
        """Return a mismatch if the sums differ, for unknown splits. If all ranks expect alike, and all but a few send
        alike, those few are named."""
        sent = {rank: _elements(one.inputs) for rank, one in signatures.items()}
        expected = {rank: _elements(one.outputs) for rank, one in signatures.items()}
        total, wanted = sum(sent.values()), sum(expected.values())
        of_log = all(self._job.ranks[rank].dump.of_log for rank in calls)
        may_lack_members = of_log and DEFAULT_GROUP not in self._group.pg  # a log has only those that printed lines
        if total == wanted or may_lack_members:
            return None
        text = f"the ranks send {total} elements in total and expect {wanted}"
        usual, many = Counter(sent.values()).most_common(1)[0]
        odd = [rank for rank, count in sent.items() if count != usual]
        if len(set(expected.values())) > 1 or many <= len(sent) // 2:
            odd = []
        if odd:
            text += (
                f"; {', '.join(f'rank {rank} sends {sent[rank]}' for rank in odd[:_PAIRS])}, the others {usual} each"
            )
        return self._mismatch(seq, SIZE, calls, "all_to_all", text, odd)


def _parts(shapes: list[list[int]], splits: list[int] | None, record: CommRecord, size: int) -> list[int]:
    """Return the elements for, or from, each of `size` ranks; empty if unknown, because torch's recorder has no splits.

    There is one tensor per rank, or one tensor that its splits divide along its first dimension. In crossrank's records
    a tensor without splits is divided equally.
    """
    elements = [_elements([shape]) for shape in shapes]
    if len(shapes) == 1 and record.c10d == _DIVIDES:
        splits = splits or [1] * size
    # A rank that sends nothing has splits of 0 and an empty tensor.
    if splits and len(splits) == size and len(shapes) == 1 and (any(splits) or not elements[0]):
        return [elements[0] * split // (sum(splits) or 1) for split in splits]
    return elements if len(shapes) == size > 1 else []


def _by_text(texts: dict[int, str]) -> str:
    """Return a text on the ranks, the most frequent text first."""
    ordered = sorted(ranks_by(texts).items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{rank_text(ranks)}: {text}" for text, ranks in ordered)


def _all_fit(some: list[MatchKey], others: list[MatchKey]) -> bool:
    """Return whether calls match in order, up to the end of the shorter list. Neither list may be empty."""
    return bool(some and others) and all(one.fits(other) for one, other in zip(some, others))  # noqa: B905


def _classes(calls: dict[int, MatchKey]) -> list[list[int]]:
    """Return classes of ranks whose calls match, the largest first, then by lowest rank."""
    classes: list[tuple[MatchKey, list[int]]] = []
    # The most frequent call first, so that less specific calls join it.
    for one, _ in sorted(Counter(calls.values()).items(), key=lambda item: (-item[1], repr(tuple(item[0])))):
        members = next((ranks for other, ranks in classes if one.fits(other)), None)
        if members is None:
            classes.append((one, members := []))
        members += [rank for rank, call in calls.items() if call == one]
    return sorted((sorted(ranks) for _, ranks in classes), key=lambda ranks: (-len(ranks), ranks))
