"""Verifies what each collective gives (`--check`): inputs are filled with known numbers, outputs are compared.

Element j of a tensor of member m in the n-th call of its kind is 1 + (j + 3 m + n) mod 13, so that what all members
together give has a period of 13 and is known without their data. Where a call sends different parts to different
members, a part is a tensor of its own. Sums that the type cannot hold exactly are compared within its precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import prod
from operator import and_, or_, xor

import torch

from crossrank.comm import CommRecord
from crossrank.replay.plan import RankPlan
from crossrank.replay.program import Program
from crossrank.replay.results import CheckFailure
from crossrank.replay.schedule import keys_of

_PERIOD = 13
_PART = 5
"""By how much the numbers of one part of a call are ahead of those of the part before."""
_MOST_FAILURES = 20


@dataclass
class Checker:
    """Fills and verifies the calls of one rank."""

    program: Program
    rank: int
    failures: list[CheckFailure] = field(default_factory=list)
    """The first few, one per call."""
    checked: int = 0
    """Tensors that were compared."""

    def __post_init__(self) -> None:
        keys = keys_of(RankPlan(rank=self.rank, calls=self.program.calls))
        self._numbers = [int(str(key[-1])) for key in keys]

    def fill(self, position: int) -> None:
        """Set the inputs of launch `position`, and spoil its outputs."""
        bound = self.program.bound[position]
        for index in range(bound.first, bound.first + bound.count):
            record = self.program.calls[index].record
            inputs, outputs = self.program.tensors[index]
            mine = self._index(record, self.rank)
            for tensor in outputs:
                tensor.zero_()
            for part, tensor in enumerate(inputs):
                for at, piece in self._parts(record, tensor, record.in_split):
                    self._set(piece, self._numbers[index] + _PART * (part + at), mine, record)

    def verify(self, position: int) -> None:
        """Compare the outputs of launch `position`, which is over."""
        bound = self.program.bound[position]
        for index in range(bound.first, bound.first + bound.count):
            record = self.program.calls[index].record
            _, outputs = self.program.tensors[index]
            for part, tensor in enumerate(outputs):
                offset = 0
                for at, piece in self._parts(record, tensor, record.out_split, of_output=True):
                    self._compare(index, part, offset, piece, self._expected(index, record, part, at, piece))
                    offset += piece.numel()

    def _expected(self, index: int, record: CommRecord, part: int, at: int, piece: torch.Tensor) -> torch.Tensor | None:
        number, mine = self._numbers[index], self._index(record, self.rank)
        n = len(self.program.groups[record.pg].ranks or ())
        instead = self.program.substitutes[index]
        op = record.op
        if op == "reduce" and record.root != self.rank:
            return None
        if op in ("all_reduce", "reduce"):
            return self._reduced(piece, number + _PART * part, n, instead.reduce, record)
        if op == "broadcast":
            return self._pattern(piece, number, self._index(record, record.root), record)
        if op == "reduce_scatter":
            # A list has a tensor for each member, a single one a stretch of it.
            in_list = record.c10d == "reduce_scatter_"
            start = 0 if in_list else mine * piece.numel()
            return self._reduced(piece, number + _PART * (mine if in_list else part) + start, n, instead.reduce, record)
        if op in ("all_gather", "gather"):
            # Member after member; `allgather_coalesced_` and the like have several tensors of each.
            width = len(self.program.tensors[index][0])
            if record.c10d in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
                return self._pattern(piece, number + _PART * part, at, record)
            return self._pattern(piece, number + _PART * (part % width), part // width, record)
        if op == "scatter":
            return self._pattern(piece, number + _PART * mine, self._index(record, record.root), record)
        if op == "all_to_all":
            sender = part if record.c10d == "alltoall_" else at
            return self._pattern(piece, number + _PART * mine, sender, record)
        if op == "recv":
            return self._pattern(piece, number + _PART * part, self._index(record, record.peer), record)
        return None

    def _parts(
        self, record: CommRecord, tensor: torch.Tensor, split: list[int] | None, *, of_output: bool = False
    ) -> list[tuple[int, torch.Tensor]]:
        """(number, piece) of the parts of `tensor` that come from, or go to, different members."""
        n = len(self.program.groups[record.pg].ranks or ())
        flat = tensor.reshape(-1)
        if record.c10d == "alltoall_base_":
            sizes = (
                [flat.numel() // n] * n if not split else [size * (flat.numel() // (sum(split) or 1)) for size in split]
            )
        elif of_output and record.c10d in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
            sizes = [flat.numel() // n] * n
        else:
            return [(0, flat)]
        return list(enumerate(flat.split(sizes)))

    def _index(self, record: CommRecord, rank: int | None) -> int:
        ranks = self.program.groups[record.pg].ranks or []
        return ranks.index(rank) if rank in ranks else 0

    def _phase(self, piece: torch.Tensor, shift: int) -> torch.Tensor:
        return (torch.arange(piece.numel(), device=piece.device) + shift) % _PERIOD

    def _pattern(self, piece: torch.Tensor, shift: int, member: int, record: CommRecord) -> torch.Tensor:
        """What `member` has in a tensor like `piece`."""
        table = [_value(phase, member, record.reduce) for phase in range(_PERIOD)]
        return self._laid_out(table, piece, shift + 3 * member)

    def _laid_out(self, table: Sequence[float], piece: torch.Tensor, shift: int) -> torch.Tensor:
        """A table over one period, laid out over a tensor like `piece`."""
        values = torch.tensor(table, dtype=torch.float64, device=piece.device)
        if piece.dtype == torch.bool:
            values = values % 2 == 1
        elif not (piece.dtype.is_floating_point or piece.dtype.is_complex):
            values = values.to(torch.int64)  # from where it wraps around as the sum does
        return values.to(piece.dtype)[self._phase(piece, shift)]

    def _set(self, piece: torch.Tensor, shift: int, member: int, record: CommRecord) -> None:
        piece.copy_(self._pattern(piece, shift, member, record))

    def _reduced(self, piece: torch.Tensor, shift: int, n: int, reduce: str | None, record: CommRecord) -> torch.Tensor:
        """What all `n` members together give."""
        table = _together(n, reduce or "sum", record.reduce, piece.dtype == torch.bool)
        return self._laid_out(table, piece, shift)

    def _compare(self, index: int, part: int, offset: int, piece: torch.Tensor, expected: torch.Tensor | None) -> None:
        if expected is None or not piece.numel():
            return
        self.checked += 1
        if piece.dtype.is_floating_point or piece.dtype.is_complex:
            got = (piece.real if piece.dtype.is_complex else piece).to(torch.float64)
            wanted = (expected.real if expected.dtype.is_complex else expected).to(torch.float64)
            n = len(self.program.groups[self.program.calls[index].record.pg].ranks or ())
            precision = torch.finfo(piece.dtype).eps if not piece.dtype.is_complex else 1e-6
            wrong = (got - wanted).abs() > wanted.abs() * precision * n
            wrong |= ~torch.isfinite(got)
        else:
            got = piece
            wanted = expected
            wrong = got != wanted
        if bool(wrong.any()) and len(self.failures) < _MOST_FAILURES:
            first = int(wrong.nonzero()[0])
            record = self.program.calls[index].record
            self.failures.append(
                CheckFailure(
                    rank=self.rank,
                    call=record.id,
                    op=record.op,
                    pg=record.pg,
                    tensor=part,
                    element=offset + first,
                    elements=int(wrong.sum()),
                    expected=float(wanted[first]),
                    got=float(got[first]),
                )
            )


def _value(phase: int, member: int, reduce: str | None) -> int:
    """What `member` has at a place of the period. Products stay within every type: each has one factor of 2."""
    if reduce == "product":
        return 2 if phase % _PERIOD == 0 and member < _PERIOD else 1
    return phase % _PERIOD + 1


@lru_cache(maxsize=1024)
def _together(n: int, reduce: str, recorded: str | None, is_bool: bool) -> tuple[float, ...]:
    """What `n` members give at each place of the period."""
    found = []
    for place in range(_PERIOD):
        values = [_value(place + 3 * member, member, recorded) for member in range(n)]
        if is_bool:
            values = [value % 2 for value in values]
        whole = _REDUCTIONS[reduce](values)
        found.append(float(whole > 0) if is_bool else whole / n if reduce == "avg" else float(whole))
    return tuple(found)


_REDUCTIONS: dict[str, Callable[[list[int]], int]] = {
    "sum": sum,
    "avg": sum,
    "product": prod,
    "min": min,
    "max": max,
    "band": lambda values: reduce(and_, values),
    "bor": lambda values: reduce(or_, values),
    "bxor": lambda values: reduce(xor, values),
}
