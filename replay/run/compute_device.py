"""What operations run on: memory with numbers of which no operation minds the value, and the streams of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from crossrank.errors import CrossrankError
from crossrank.replay.plan.compute.compute_plan import Block
from crossrank.text import amount

_SPREAD = 0.02
_ZIPF = 1.1
"""Exponent: a little above 1, as words and users are."""


def fill_blocks(blocks: Sequence[Block], device: torch.device, indices: str, seed: int) -> list[torch.Tensor]:
    """Memory for `blocks`, as bytes.

    Floats are small and positive: no operation overflows, takes a root of a negative number, or meets denormal ones,
    which are slow; a number by itself is 1, which changes nothing as a factor. Raises `CrossrankError` where memory
    lacks.
    """
    made = []
    generator = torch.Generator().manual_seed(seed)
    for one in blocks:
        where = torch.device("cpu") if one.device.startswith("cpu") else device
        dtype = getattr(torch, one.dtype)
        count = -(-one.bytes // dtype.itemsize)
        try:
            values = _values(one, count, dtype, indices, generator)
            made.append(values.to(where).view(torch.uint8))
        except RuntimeError as error:
            raise CrossrankError(
                f"{amount(sum(block.bytes for block in blocks))} for tensors that were there before the window cannot "
                f"be had on {where} ({str(error).splitlines()[0]})"
            ) from error
    return made


def _values(block: Block, count: int, dtype: torch.dtype, indices: str, generator: torch.Generator) -> torch.Tensor:
    if block.is_number and block.high <= block.low:
        return torch.full((count,), block.high or 1, dtype=torch.int64).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.empty(count * (2 if dtype.is_complex else 1)).normal_(0, _SPREAD, generator=generator).abs_()
        return torch.view_as_complex(real.view(-1, 2)).to(dtype) if dtype.is_complex else real.to(dtype)
    if dtype == torch.bool or block.high <= block.low:
        return torch.full((count,), block.low, dtype=torch.int64).to(dtype)
    if block.is_index and indices == "zipf":
        # By the inverse of the distribution: the n-th row is chosen in proportion to n ** -_ZIPF.
        share = torch.rand(count, generator=generator, dtype=torch.float64).clamp_(min=1e-9)
        rows = share.pow_(-1 / (_ZIPF - 1)).clamp_(max=block.high - block.low + 1).floor_() - 1
        return (rows + block.low).to(dtype)
    return torch.randint(block.low, block.high + 1, (count,), generator=generator).to(dtype)


class DeviceStreams:
    """As many streams as the recording used, and the events by which one waits for another. Number 0 is the one that is
    current when a pass begins."""

    def __init__(self, device: torch.device, count: int, awaited: Iterable[int]) -> None:
        """`awaited` are the positions of operations that an operation on another stream waits for."""
        self._device = device
        self._first = torch.cuda.current_stream(device)
        self._others = [torch.cuda.Stream(device) for _ in range(count - 1)]
        self._events = {at: torch.cuda.Event() for at in awaited}

    def begin(self) -> None:
        """A pass begins: nothing runs before what was launched until now is over."""
        for stream in self._others:
            stream.wait_stream(self._first)

    def on(self, stream: int) -> None:
        """What follows is launched on `stream`."""
        torch.cuda.set_stream(self._others[stream - 1] if stream else self._first)

    def done(self, at: int) -> None:
        """The operation at that position was launched."""
        self._events[at].record(torch.cuda.current_stream(self._device))

    def after(self, at: int) -> None:
        """What follows on the current stream begins when that operation is over."""
        torch.cuda.current_stream(self._device).wait_event(self._events[at])

    def kept(self, tensor: object) -> None:
        """The current stream takes a tensor that another one made: its memory is not given away before it is done."""
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """The pass is over when all streams are."""
        self.on(0)
        for stream in self._others:
            self._first.wait_stream(stream)
