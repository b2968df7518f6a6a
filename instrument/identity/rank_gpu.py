"""Which GPU this rank uses, settled as soon as it is certain, which may be after the recording has begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from crossrank.instrument.identity.gpu import Gpu, GpuReader, bound_device, cuda_is_in_use, may_use_cuda

_PATIENCE = 2.0
"""Seconds for which the other ranks may wait to learn of this rank's NVLink domain."""


class RankGpu:
    """The GPU of this rank. `on_late` is called with it where it becomes known after `begin`."""

    def __init__(self, on_late: Callable[[Gpu], None]) -> None:
        self._on_late = on_late
        self._device: int | None = None
        self._reader: GpuReader | None = None
        self._begun = False
        self._lock = threading.RLock()  # a signal handler may end the recording while its thread holds it
        self.is_open = False
        """Whether the device is not known yet: the recorder passes on the devices of tensors until it is."""

    @property
    def gpu(self) -> Gpu | None:
        return self._reader.gpu if self._reader is not None else None

    def begin(self) -> None:
        """Take the device that the process group is bound to, or that is certain otherwise."""
        if self._device is None:
            self._device = bound_device()
            self.is_open = self._device is None and may_use_cuda()
        self.read()
        self._begun = True

    def settle(self, device: str | None) -> None:
        """Take in the device of a tensor that is communicated, such as `cuda:1`."""
        if device is None or not device.startswith("cuda"):
            return
        index = device.partition(":")[2]
        self._device = int(index) if index else torch.cuda.current_device()
        self.is_open = False

    def read(self) -> None:
        """Ask the driver once the device is known."""
        with self._lock:
            if self._reader is not None or self._device is None or not cuda_is_in_use():
                return
            self._reader = GpuReader(self._device)
            if self._begun and self._reader.gpu is not None:
                self._on_late(self._reader.gpu)

    def nvlink_domain(self) -> str | None:
        """The NVLink domain, waiting a moment for the device to be known."""
        until = time.monotonic() + _PATIENCE
        while self.is_open and time.monotonic() < until:
            time.sleep(0.05)
        self.read()
        return self.gpu.nvlink_domain if self.gpu is not None else None

    def counters(self) -> dict[str, int] | None:
        """Cumulative counters of the GPU; None without one."""
        return self._reader.counters() if self._reader is not None else None
