"""Saves the results of a replay's calls (`--save-data`), or compares them with saved ones (`--compare-data`).

The inputs depend only on rank, call and tensor. So two replays of one trace must give the same results, except for
rounding, also on other hardware, backends or algorithms. A folder has for each rank `rank-N.data`, the memory of all
output tensors, and `rank-N.data.json`, the position of each.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import torch

from crossrank.atomic_file import whole_file
from crossrank.comm import CommRecord, Count
from crossrank.dtypes import DTYPES
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.replay.plan.plan import Plan
from crossrank.replay.results.expected_values import MOST_FAILURES, failure_of, gives
from crossrank.replay.run.program import Program
from crossrank.tools.traces.replayed import DataComparison

SCHEMA = "crossrank-data 1"
_CHUNK = 1 << 22
"""The number of elements that are compared at once."""
_MIN_TOLERANCE = 1e-4


class SavedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """An output of a call."""

    call: Count
    """Its index among the rank's calls."""
    op: str
    part: Count
    dtype: str
    elements: Count

    @property
    def bytes(self) -> int:
        return self.elements * DTYPES[self.dtype].size


class SavedData(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `rank-N.data.json`."""

    tensors: list[SavedTensor]
    """In their order in `rank-N.data`, without gaps."""
    schema: str = SCHEMA


class RandomInputs:
    """Fills the inputs of every launch of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank

    def fill(self, position: int) -> None:
        """Set the inputs of launch `position`."""
        for index in self.program.bound[position].calls:
            for part, tensor in enumerate(self.program.tensors[index][0]):
                # On the CPU for every device: generators of other devices give other numbers.
                seed = zlib.crc32(f"{self.rank} {index} {part}".encode())  # torch uses only 32 bits of a seed
                generator = torch.Generator().manual_seed(seed)
                tensor.view(-1).copy_(_make_numbers(tensor, generator))

    def outputs(self, position: int) -> Iterator[tuple[SavedTensor, torch.Tensor]]:
        """Yield the outputs of launch `position`, which has ended, on this rank."""
        for index in self.program.bound[position].calls:
            record = self.program.calls[index].record
            for part, tensor in enumerate(self.program.tensors[index][1]):
                if tensor.numel() and gives(record, self.rank):
                    name = str(tensor.dtype).removeprefix("torch.")
                    yield (
                        SavedTensor(call=index, op=record.op, part=part, dtype=name, elements=tensor.numel()),
                        tensor.view(-1),
                    )


class DataWriter(RandomInputs):
    """Saves the outputs of one rank."""

    def __init__(self, program: Program, rank: int, file: IO[bytes]) -> None:
        super().__init__(program, rank)
        self._path = file
        self.saved: list[SavedTensor] = []

    def take(self, position: int) -> None:
        """Save the outputs of launch `position`."""
        for saved, tensor in self.outputs(position):
            self._path.write(tensor.view(torch.uint8).cpu().numpy().tobytes())
            self.saved.append(saved)


@contextmanager
def saving(program: Program, rank: int, folder: str) -> Iterator[DataWriter]:
    """Yield a writer for the files of one rank. The files exist after the context has ended without an error."""
    path = Path(_path(folder, rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary, temporary.open("wb") as file:
        writer = DataWriter(program, rank, file)
        yield writer
    with whole_file(Path(f"{path}.json")) as temporary:
        temporary.write_bytes(msgspec.json.encode(SavedData(tensors=writer.saved)))


class DataComparer(RandomInputs):
    """Compares the outputs of one rank with saved ones."""

    def __init__(self, program: Program, rank: int, folder: str, rtol: float | None, atol: float | None) -> None:
        """Raises `CrossrankError` if the files cannot be used."""
        super().__init__(program, rank)
        self._rtol, self._atol = rtol, atol
        self._saved: dict[tuple[int, int], tuple[SavedTensor, int]] = {}
        at = 0
        for one in load_saved(folder, rank).tensors:
            self._saved[one.call, one.part] = one, at
            at += one.bytes
        self._bytes = np.memmap(_path(folder, rank), np.uint8, "r") if at else np.zeros(0, np.uint8)
        self.result = DataComparison(folder=folder, rtol=rtol, atol=atol)

    def take(self, position: int) -> None:
        """Compare the outputs of launch `position`."""
        for made, tensor in self.outputs(position):
            saved, at = self._saved.get((made.call, made.part), (None, 0))
            if saved != made:
                self.result.not_comparable += 1
                continue
            self.result.tensors += 1
            record = self.program.calls[made.call].record
            size = tensor.dtype.itemsize
            for first in range(0, made.elements, _CHUNK):
                now = tensor[first : first + _CHUNK].cpu()
                begin = at + first * size
                then = torch.from_numpy(self._bytes[begin : begin + len(now) * size].copy()).view(now.dtype)
                if self._compare(record, made, first, _widen(now), _widen(then)):
                    break

    def _compare(
        self, record: CommRecord, made: SavedTensor, first: int, now: torch.Tensor, then: torch.Tensor
    ) -> bool:
        """Return whether a part of a tensor differs from the saved one."""
        distance = (now - then).abs()
        self.result.largest_difference = max(self.result.largest_difference, float(distance.nan_to_num().max()))
        least = tolerance(getattr(torch, made.dtype))
        rtol, atol = (least if given is None else given for given in (self._rtol, self._atol))
        different = ~torch.isclose(now, then, rtol, atol, equal_nan=True)
        if not bool(different.any()):
            return False
        self.result.different += 1
        if len(self.result.failures) < MOST_FAILURES:
            self.result.failures.append(failure_of(record, self.rank, made.part, first, different, then, now))
        return True


def tolerance(dtype: torch.dtype) -> float:
    """Return the default for both tolerances, relative and absolute: 8 roundings of the type, at least 1e-4."""
    return max(_MIN_TOLERANCE, 8 * torch.finfo(dtype).eps) if dtype.is_floating_point else _MIN_TOLERANCE


def load_saved(folder: str, rank: int) -> SavedData:
    """Return what was saved for `rank`. Raises `CrossrankError` if there is nothing."""
    path = f"{_path(folder, rank)}.json"
    try:
        size = Path(_path(folder, rank)).stat().st_size
        saved = msgspec.json.decode(Path(path).read_bytes(), type=SavedData)
        if saved.schema != SCHEMA:
            raise msgspec.DecodeError(f"its schema is {saved.schema!r}, not {SCHEMA!r}")
        for one in saved.tensors:
            if one.dtype not in DTYPES:
                raise msgspec.DecodeError(f"{one.dtype!r} is not an element type")
        if size != (needed := sum(one.bytes for one in saved.tensors)):
            raise msgspec.DecodeError(f"its results have {size:,} bytes, not {needed:,}")
    except (*BROKEN, OSError) as error:
        raise CrossrankError(
            f"{path}: has no results of rank {rank} ({one_line(error)}); save them with --save-data"
        ) from error
    return saved


def check_saved(plan: Plan, folder: str) -> None:
    """Raise `CrossrankError` if another plan's replay saved the data in `folder`."""
    for rank in plan.ranks:
        operations = [one.record.op for one in rank.calls]
        for saved in load_saved(folder, rank.rank).tensors:
            if saved.call >= len(operations) or operations[saved.call] != saved.op:
                raise CrossrankError(
                    f"{_path(folder, rank.rank)}: was saved by a replay with other calls: call {saved.call} is there "
                    f"{saved.op}; replay the same trace with the same options, or save again with --save-data"
                )


def _path(folder: str, rank: int) -> str:
    return str(Path(folder) / f"rank-{rank}.data")


def _make_numbers(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return numbers for `tensor`: integers are small, so that no sum overflows."""
    count, dtype = tensor.numel(), tensor.dtype
    if dtype.is_complex:
        return torch.view_as_complex(torch.rand(count, 2, generator=generator) * 2 - 1).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(count, generator=generator) * 2 - 1).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 4, (count,), generator=generator).to(dtype)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a type that holds the values of all others, except for the largest integers."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)
