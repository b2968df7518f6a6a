"""Verifies what each collective gives (`--check`): inputs are filled with known numbers, outputs are compared.

What is moved carries its sender: element j of a tensor of member m in the n-th call of its kind is
(j + 31 m + 7 n) mod P, P a prime as large as the type holds exactly. What is reduced has one member (or as few as
there must be) that decides each element, so that a result without it, or with it twice, is another number: 1 in a sum
of zeros, 2 in a product or among maxima of ones. Where a call sends different parts to different members, a part is a
tensor of its own. Outputs are spoilt before the call.

An average is compared within four roundings of its type: of one over more members than elements, in a narrow type, a
missing member may be less than that.

Numbers are made and compared on the device, or on the CPU where the device does not compute (a stand-in for a GPU).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from crossrank.comm import CommRecord
from crossrank.replay.plan.dtype_fallback import REDUCING
from crossrank.replay.plan.plan import RankPlan
from crossrank.replay.plan.schedule import keys_of
from crossrank.replay.plan.shapes import GATHERED_WHOLE, parts
from crossrank.replay.run.program import Program
from crossrank.tools.traces.replayed import CheckFailure, CheckResult

_PART = 5
"""By how much the numbers of one part of a call are ahead of those of the part before."""
_SPOILT = 0x55
MOST_FAILURES = 20
"""Of a rank, which are reported."""


class Checker:
    """Fills and verifies the calls of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.result = CheckResult(tensors=0, failures=[])
        """With the first few failures."""
        keys = keys_of(RankPlan(rank=rank, calls=program.calls))
        self._numbers = [int(str(key[-1])) for key in keys]

    def fill(self, position: int) -> None:
        """Set the inputs of launch `position`, and spoil its outputs."""
        for index in self.program.bound[position].calls:
            record = self.program.calls[index].record
            inputs, outputs = self.program.tensors[index]
            mine = self._index(record, self.rank)
            for tensor in outputs:
                tensor.view(-1).view(torch.uint8).fill_(0 if tensor.dtype == torch.bool else _SPOILT)
            for part, tensor in enumerate(inputs):
                for at, piece in self._parts(record, tensor, record.in_split):
                    piece.copy_(self._sent(index, record, part, at, piece, mine))

    def take(self, position: int) -> None:
        """Compare the outputs of launch `position`, which is over."""
        for index in self.program.bound[position].calls:
            record = self.program.calls[index].record
            _, outputs = self.program.tensors[index]
            for part, tensor in enumerate(outputs):
                offset = 0
                for at, piece in self._parts(record, tensor, record.out_split, of_output=True):
                    self._compare(index, part, offset, piece, self._expected(index, record, part, at, piece))
                    offset += piece.numel()

    def _sent(self, index: int, record: CommRecord, part: int, at: int, piece: torch.Tensor, mine: int) -> torch.Tensor:
        """What this rank puts into a part of a tensor."""
        shift = self._numbers[index] + _PART * (part + at)
        if record.op not in REDUCING:
            return _moved(piece, shift, mine)
        n = self._size(record)
        whole = piece.numel()
        if record.c10d != "reduce_scatter_" and record.op == "reduce_scatter":
            whole //= n  # each stretch is reduced by itself
        return _to_reduce(piece, self.program.substitutes[index].reduce or "sum", shift, mine, n, whole)

    def _expected(self, index: int, record: CommRecord, part: int, at: int, piece: torch.Tensor) -> torch.Tensor | None:
        number, mine, n = self._numbers[index], self._index(record, self.rank), self._size(record)
        op, reduction = record.op, self.program.substitutes[index].reduce or "sum"
        if not gives(record, self.rank):
            return None
        if op in REDUCING:
            # A list to scatter has a tensor for each member, a single one a stretch of it.
            return _reduced(piece, reduction, number + _PART * (mine if record.c10d == "reduce_scatter_" else part), n)
        if op == "broadcast":
            return _moved(piece, number + _PART * part, self._index(record, record.root))
        if op in ("all_gather", "gather"):
            # Member after member; `allgather_coalesced_` and the like have several tensors of each.
            width = len(self.program.tensors[index][0])
            if record.c10d in GATHERED_WHOLE:
                return _moved(piece, number + _PART * part, at)
            return _moved(piece, number + _PART * (part % width), part // width)
        if op == "scatter":
            return _moved(piece, number + _PART * mine, self._index(record, record.root))
        if op == "all_to_all":
            return _moved(piece, number + _PART * mine, part if record.c10d == "alltoall_" else at)
        if op == "recv":
            return _moved(piece, number + _PART * part, self._index(record, record.peer))
        return None

    def _size(self, record: CommRecord) -> int:
        return len(self.program.groups[record.pg].ranks or ())

    def _parts(
        self, record: CommRecord, tensor: torch.Tensor, split: list[int] | None, *, of_output: bool = False
    ) -> list[tuple[int, torch.Tensor]]:
        """(number, piece) of the parts of `tensor` that come from, or go to, different members."""
        n = self._size(record)
        flat = tensor.reshape(-1)
        if record.c10d == "alltoall_base_":
            sizes = parts([flat.numel()], split, n)
        elif of_output and record.c10d in GATHERED_WHOLE:
            sizes = [flat.numel() // n] * n
        else:
            return [(0, flat)]
        return list(enumerate(flat.split(sizes)))

    def _index(self, record: CommRecord, rank: int | None) -> int:
        return [one == rank for one in self.program.groups[record.pg].ranks or ()].index(True)

    def _compare(self, index: int, part: int, offset: int, piece: torch.Tensor, expected: torch.Tensor | None) -> None:
        if expected is None or not piece.numel():
            return
        self.result.tensors += 1
        record = self.program.calls[index].record
        piece = piece.to(expected.device)
        wrong = piece != expected
        if record.op in REDUCING and self.program.substitutes[index].reduce == "avg":
            # Each backend divides in its own way.
            wrong = (piece - expected).abs() > expected.abs() * 4 * torch.finfo(piece.dtype).eps
            wrong |= ~torch.isfinite(piece)
        if bool(wrong.any()) and len(self.result.failures) < MOST_FAILURES:
            self.result.failures.append(failure_of(record, self.rank, part, offset, wrong, expected, piece))


def failure_of(
    record: CommRecord,
    rank: int,
    tensor: int,
    offset: int,
    wrong: torch.Tensor,
    expected: torch.Tensor,
    got: torch.Tensor,
) -> CheckFailure:
    """What is `wrong` of a piece of output number `tensor`, which begins at its element `offset`."""
    first = int(wrong.nonzero()[0])
    return CheckFailure(
        rank=rank,
        call=record.id,
        op=record.op,
        pg=record.pg,
        tensor=tensor,
        element=offset + first,
        elements=int(wrong.sum()),
        expected=float(expected[first].real),
        got=float(got[first].real),
    )


def gives(record: CommRecord, rank: int) -> bool:
    """Whether the operation says what is in the outputs of `rank`: of a reduction to one rank on that rank alone."""
    return record.op != "reduce" or record.root == rank


@lru_cache(maxsize=64)
def _prime(dtype: torch.dtype) -> int:
    """The largest prime below what the type holds exactly, at most 65,521."""
    if dtype.is_complex:
        return 65_521
    exact = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    return next(p for p in range(min(exact, 65_521), 1, -1) if all(p % q for q in range(2, int(p**0.5) + 1)))


def _places(piece: torch.Tensor) -> torch.Tensor:
    return torch.arange(piece.numel(), device=piece.device if _computes(piece.device) else "cpu")


@lru_cache(maxsize=8)
def _computes(device: torch.device) -> bool:
    return int(torch.arange(8, device=device).sum()) == 28


def _moved(piece: torch.Tensor, shift: int, member: int) -> torch.Tensor:
    """What `member` has in a tensor like `piece` that is moved."""
    places = _places(piece)
    if piece.dtype == torch.bool:  # bit by bit, over and over
        return ((member + shift) >> (places % 12)) % 2 == 1
    return ((places + 31 * member + 7 * shift) % _prime(piece.dtype)).to(piece.dtype)


def _decides(places: torch.Tensor, shift: int, member: int, n: int, whole: int) -> torch.Tensor:
    """Whether `member` is the one (of several, where there are fewer elements than members) that decides each place."""
    turns = max(1, min(n, whole))
    return (places + shift) % turns == member % turns


def _to_reduce(piece: torch.Tensor, reduction: str, shift: int, member: int, n: int, whole: int) -> torch.Tensor:
    """What `member` of `n` puts into a tensor of which stretches of `whole` elements are reduced."""
    others, own = _VALUES[reduction]
    return torch.where(_decides(_places(piece), shift, member, n, whole), own, others).to(piece.dtype)


def _reduced(piece: torch.Tensor, reduction: str, shift: int, n: int) -> torch.Tensor:
    """What `n` members give in a stretch like `piece` of the tensor that was reduced."""
    _, own = _VALUES[reduction]
    turns = max(1, min(n, piece.numel()))
    places = (_places(piece) + shift) % turns
    deciding = (n - 1 - places) // turns + 1  # members with that remainder
    if reduction in ("sum", "avg"):
        total: torch.Tensor = deciding.to(torch.float64)
        if reduction == "avg":
            total = total / n
        return (total > 0 if piece.dtype == torch.bool else total).to(piece.dtype)
    if reduction == "product":
        return (2.0 ** deciding.to(torch.float64)).to(piece.dtype)
    if reduction == "bxor":
        return (deciding % 2).to(piece.dtype)
    return torch.full_like(places, own, dtype=piece.dtype)


_VALUES: dict[str, tuple[int, int]] = {
    "sum": (0, 1),
    "avg": (0, 1),
    "product": (1, 2),
    "min": (2, 1),
    "max": (1, 2),
    "band": (1, 0),
    "bor": (0, 1),
    "bxor": (0, 1),
}
"""Reduction -> what members have at a place that they do not decide, and what those have that do."""
