"""Verifies the result of each collective (`--check`): fills inputs with known numbers and compares the outputs.

* Moved data shows its sender. Element j of a tensor of member m in the n-th call of its kind is (j + 31 m + 7 n) mod P.
  P is the largest prime that the type holds exactly, at most 65,521.
* In a reduction, one member (or as few as possible) decides each element: 1 in a sum of zeros, 2 in a product or
  maximum of ones. So a missing or repeated member changes the result. An average may differ by four roundings of its
  type; in a narrow type with more members than elements, a missing member may change less.
* If a call sends different parts to different members, each part counts as a tensor. Outputs are overwritten first.

The device makes and compares the numbers; the CPU does so if the device cannot compute (a stand-in for a GPU).
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

_SHIFT = 5
"""The shift of the numbers from one part of a call to the next."""
_SPOILED = 0x55
MOST_FAILURES = 20
"""The most reported failures of a rank."""


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
        """Set the inputs of launch `position`, and overwrite its outputs."""
        for index in self.program.bound[position].calls:
            record = self.program.calls[index].record
            inputs, outputs = self.program.tensors[index]
            member = self._member_number(record, self.rank)
            for tensor in outputs:
                tensor.view(-1).view(torch.uint8).fill_(0 if tensor.dtype == torch.bool else _SPOILED)
            for part, tensor in enumerate(inputs):
                for at, piece in self._split_parts(record, tensor, record.in_split):
                    piece.copy_(self._input(index, record, part, at, piece, member))

    def take(self, position: int) -> None:
        """Compare the outputs of launch `position`, which has ended."""
        for index in self.program.bound[position].calls:
            record = self.program.calls[index].record
            _, outputs = self.program.tensors[index]
            for part, tensor in enumerate(outputs):
                offset = 0
                for at, piece in self._split_parts(record, tensor, record.out_split, of_output=True):
                    self._compare(index, part, offset, piece, self._expected(index, record, part, at, piece))
                    offset += piece.numel()

    def _input(self, index: int, record: CommRecord, part: int, at: int, piece: torch.Tensor, own: int) -> torch.Tensor:
        """Return the input of this rank for a part of a tensor."""
        shift = self._numbers[index] + _SHIFT * (part + at)
        if record.op not in REDUCING:
            return _make_moved(piece, shift, own)
        n = self._group_size(record)
        whole = piece.numel()
        if record.c10d != "reduce_scatter_" and record.op == "reduce_scatter":
            whole //= n  # each stretch is reduced separately
        return _make_to_reduce(piece, self.program.substitutes[index].reduce or "sum", shift, own, n, whole)

    def _expected(self, index: int, record: CommRecord, part: int, at: int, piece: torch.Tensor) -> torch.Tensor | None:
        number, own, n = self._numbers[index], self._member_number(record, self.rank), self._group_size(record)
        op, reduction = record.op, self.program.substitutes[index].reduce or "sum"
        if not gives(record, self.rank):
            return None
        if op in REDUCING:
            # A list to scatter has a tensor for each member, a single tensor has a stretch.
            return _result(piece, reduction, number + _SHIFT * (own if record.c10d == "reduce_scatter_" else part), n)
        if op == "broadcast":
            return _make_moved(piece, number + _SHIFT * part, self._member_number(record, record.root))
        if op in ("all_gather", "gather"):
            # Member by member; `allgather_coalesced_` and similar ops have several tensors for each.
            width = len(self.program.tensors[index][0])
            if record.c10d in GATHERED_WHOLE:
                return _make_moved(piece, number + _SHIFT * part, at)
            return _make_moved(piece, number + _SHIFT * (part % width), part // width)
        if op == "scatter":
            return _make_moved(piece, number + _SHIFT * own, self._member_number(record, record.root))
        if op == "all_to_all":
            return _make_moved(piece, number + _SHIFT * own, part if record.c10d == "alltoall_" else at)
        if op == "recv":
            return _make_moved(piece, number + _SHIFT * part, self._member_number(record, record.peer))
        return None

    def _group_size(self, record: CommRecord) -> int:
        return len(self.program.groups[record.pg].ranks or ())

    def _split_parts(
        self, record: CommRecord, tensor: torch.Tensor, split: list[int] | None, *, of_output: bool = False
    ) -> list[tuple[int, torch.Tensor]]:
        """Return (number, piece) of the parts of `tensor` that different members send or receive."""
        n = self._group_size(record)
        flat = tensor.reshape(-1)
        if record.c10d == "alltoall_base_":
            sizes = parts([flat.numel()], split, n)
        elif of_output and record.c10d in GATHERED_WHOLE:
            sizes = [flat.numel() // n] * n
        else:
            return [(0, flat)]
        return list(enumerate(flat.split(sizes)))

    def _member_number(self, record: CommRecord, rank: int | None) -> int:
        return [one == rank for one in self.program.groups[record.pg].ranks or ()].index(True)

    def _compare(self, index: int, part: int, offset: int, piece: torch.Tensor, expected: torch.Tensor | None) -> None:
        if expected is None or not piece.numel():
            return
        self.result.tensors += 1
        record = self.program.calls[index].record
        piece = piece.to(expected.device)
        wrong = piece != expected
        if record.op in REDUCING and self.program.substitutes[index].reduce == "avg":
            # Backends divide differently.
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
    """Describe what is `wrong` in a piece of output number `tensor` that starts at element `offset`."""
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
    """Return whether the operation defines the outputs of `rank`: a reduce does so only on its root."""
    return record.op != "reduce" or record.root == rank


@lru_cache(maxsize=64)
def _largest_prime(dtype: torch.dtype) -> int:
    """Return the largest prime that the type holds exactly, at most 65,521."""
    if dtype.is_complex:
        return 65_521
    exact = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    return next(p for p in range(min(exact, 65_521), 1, -1) if all(p % q for q in range(2, int(p**0.5) + 1)))


def _positions(piece: torch.Tensor) -> torch.Tensor:
    return torch.arange(piece.numel(), device=piece.device if _can_compute(piece.device) else "cpu")


@lru_cache(maxsize=8)
def _can_compute(device: torch.device) -> bool:
    return int(torch.arange(8, device=device).sum()) == 28


def _make_moved(piece: torch.Tensor, shift: int, member: int) -> torch.Tensor:
    """Return the values of `member` in a moved tensor like `piece`."""
    places = _positions(piece)
    if piece.dtype == torch.bool:  # bit by bit, repeated
        return ((member + shift) >> (places % 12)) % 2 == 1
    return ((places + 31 * member + 7 * shift) % _largest_prime(piece.dtype)).to(piece.dtype)


def _is_deciding(places: torch.Tensor, shift: int, member: int, n: int, whole: int) -> torch.Tensor:
    """Return whether `member` decides each position. With fewer elements than members, several decide one."""
    cycle = max(1, min(n, whole))
    return (places + shift) % cycle == member % cycle


def _make_to_reduce(piece: torch.Tensor, reduction: str, shift: int, member: int, n: int, whole: int) -> torch.Tensor:
    """Return the input of `member` of `n` for a tensor whose stretches of `whole` elements are reduced."""
    others, deciding = _VALUES[reduction]
    return torch.where(_is_deciding(_positions(piece), shift, member, n, whole), deciding, others).to(piece.dtype)


def _result(piece: torch.Tensor, reduction: str, shift: int, n: int) -> torch.Tensor:
    """Return the result of `n` members in a stretch like `piece` of the reduced tensor."""
    _, deciding_value = _VALUES[reduction]
    cycle = max(1, min(n, piece.numel()))
    places = (_positions(piece) + shift) % cycle
    deciding = (n - 1 - places) // cycle + 1  # the number of members with this remainder
    if reduction in ("sum", "avg"):
        total: torch.Tensor = deciding.to(torch.float64)
        if reduction == "avg":
            total = total / n
        return (total > 0 if piece.dtype == torch.bool else total).to(piece.dtype)
    if reduction == "product":
        return (2.0 ** deciding.to(torch.float64)).to(piece.dtype)
    if reduction == "bxor":
        return (deciding % 2).to(piece.dtype)
    return torch.full_like(places, deciding_value, dtype=piece.dtype)


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
"""Reduction -> the value of members that do not decide a position, and of those that do."""
