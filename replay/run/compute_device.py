"""The memory of a replay's operations, filled with harmless numbers, and the streams of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from crossrank.errors import CrossrankError
from crossrank.replay.plan.compute.compute_plan import Block
from crossrank.text import amount

_DEVIATION = 0.02
_ZIPF_EXPONENT = 1.1
"""A little above 1, as for words and users."""


def fill_blocks(blocks: Sequence[Block], device: torch.device, indices: str, seed: int) -> list[torch.Tensor]:
    """Return memory for `blocks`, as bytes.

    Floats are small and positive. So no operation overflows, takes the root of a negative number, or meets denormal
    numbers, which are slow. A single number is 1, a neutral factor. Raises `CrossrankError` if there is too little
    memory.
    """
    made = []
    generator = torch.Generator().manual_seed(seed)
    for one in blocks:
        where = torch.device("cpu") if one.device.startswith("cpu") else device
        dtype = getattr(torch, one.dtype)
        count = -(-one.bytes // dtype.itemsize)
        try:
            values = _fill(one, count, dtype, indices, generator)
            made.append(values.to(where).view(torch.uint8))
        except RuntimeError as error:
            raise CrossrankError(
                f"{amount(sum(block.bytes for block in blocks))} for tensors that were there before the window cannot "
                f"be had on {where} ({str(error).splitlines()[0]})"
            ) from error
    return made


def _fill(block: Block, count: int, dtype: torch.dtype, indices: str, generator: torch.Generator) -> torch.Tensor:
    if block.is_number and block.high <= block.low:
        return torch.full((count,), block.high or 1, dtype=torch.int64).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.empty(count * (2 if dtype.is_complex else 1)).normal_(0, _DEVIATION, generator=generator).abs_()
        return torch.view_as_complex(real.view(-1, 2)).to(dtype) if dtype.is_complex else real.to(dtype)
    if dtype == torch.bool or block.high <= block.low:
        return torch.full((count,), block.low, dtype=torch.int64).to(dtype)
    if block.is_index and indices == "zipf":
        # Inverse transform sampling: row n has probability proportional to n ** -_ZIPF_EXPONENT.
        share = torch.rand(count, generator=generator, dtype=torch.float64).clamp_(min=1e-9)
        rows = share.pow_(-1 / (_ZIPF_EXPONENT - 1)).clamp_(max=block.high - block.low + 1).floor_() - 1
        return (rows + block.low).to(dtype)
    return torch.randint(block.low, block.high + 1, (count,), generator=generator).to(dtype)


class DeviceStreams:
    """The streams of a recording, and the events by which they wait for each other. Number 0 is the current stream at
    the start of a pass."""

    def __init__(self, device: torch.device, count: int, awaited: Iterable[int]) -> None:
        """`awaited` has the positions of operations that an operation on another stream waits for."""
        self._device = device
        self._first = torch.cuda.current_stream(device)
        self._others = [torch.cuda.Stream(device) for _ in range(count - 1)]
        self._events = {at: torch.cuda.Event() for at in awaited}

    def begin(self) -> None:
        """Begin a pass: it runs after all earlier launches."""
        for stream in self._others:
            stream.wait_stream(self._first)

    def on(self, stream: int) -> None:
        """Launch the next operations on `stream`."""
        torch.cuda.set_stream(self._others[stream - 1] if stream else self._first)

    def done(self, at: int) -> None:
        """Note that the operation at this position was launched."""
        self._events[at].record(torch.cuda.current_stream(self._device))

    def after(self, at: int) -> None:
        """Let the current stream wait for this operation."""
        torch.cuda.current_stream(self._device).wait_event(self._events[at])

    def kept(self, tensor: object) -> None:
        """Keep the memory of a tensor from another stream until the current stream has finished with it."""
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """End the pass: wait for all streams."""
        self.on(0)
        for stream in self._others:
            self._first.wait_stream(stream)
