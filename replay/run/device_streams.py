"""The streams of a GPU on which operations run again, and the events by which one waits for another."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class DeviceStreams:
    """As many streams as the recording used. Number 0 is the one that is current when a pass begins."""

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
