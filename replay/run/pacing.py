"""Fills the recorded gaps between calls, in which the job computed: idle, or with work on the device.

If it is recorded when the rank could continue after its previous call, the gap starts there, and contains no wait for
communication. Otherwise it starts at the previous launch: launches then never follow each other faster than recorded,
and the communication runs in the gap.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossrank.errors import CrossrankError
from crossrank.replay.plan.plan import PlannedCall, launches

if TYPE_CHECKING:
    import torch

_SPIN_NS = 200_000
"""The end of a gap is spent in a loop on the clock, since a sleep ends about 50 us too late."""
_MATRIX = 192
_CALIBRATION_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How to fill the gaps."""

    scale: float = 0.0
    """Factor on the recorded gaps; 0: as fast as possible."""
    busy: bool = False
    """Fill them with matrix products on the device instead of idling."""


_NAMED = {"fast": Pace(), "recorded": Pace(scale=1.0), "compute": Pace(scale=1.0, busy=True)}


def parse_pace(text: str) -> Pace:
    """Parse a pace: `fast`, `recorded`, `compute` or a factor. Raises `CrossrankError` for anything else.

    >>> parse_pace("0.5"), parse_pace("compute")
    (Pace(scale=0.5, busy=False), Pace(scale=1.0, busy=True))
    """
    try:
        pace = _NAMED.get(text) or Pace(scale=float(text))
    except ValueError:
        pace = Pace(scale=-1.0)
    if not 0 <= pace.scale <= 1e6:
        raise CrossrankError(f"--pace {text!r} is not fast, recorded, compute, or a factor on the recorded gaps")
    return pace


def make_pacer(calls: list[PlannedCall], pace: Pace, device: torch.device) -> Pacer | None:
    """Return the pacer for the gaps between `calls` on `device`; None for calls as fast as possible."""
    if not pace.scale:
        return None
    first = [calls[start] for start, _ in launches(calls)]
    queues = pace.busy and device.type == "cuda"
    gaps = computed_ns(first) if queues else [call.gap_ns for call in first]
    fill = make_busy(device) if pace.busy else idle
    return Pacer([round(gap * pace.scale) for gap in gaps], [call.gap_from_return for call in first], fill, queues)


class Pacer:
    """Waits before each launch of one rank's program."""

    def __init__(
        self, gaps: list[int], from_return: list[bool], fill: Callable[[int], None], queues: bool = False
    ) -> None:
        """`gaps` has ns by launch. If `from_return`, the gap starts when the rank could continue. The function `fill`
        takes the given ns, or `queues` work of that duration on the device."""
        self._gaps, self._from_return, self._fill, self._queues = gaps, from_return, fill, queues
        self._queued: Counter[int] = Counter()
        """The work queued in this pass, in ns by thread of the replay."""
        self._launched: dict[int, int] = {}
        self._returned: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a pass."""
        self._queued.clear()
        self._launched.clear()
        self._returned.clear()

    def pace(self, position: int, recorded: int = 0, thread: int = 0) -> None:
        """Wait for the gap before launch `position`. Its recorded thread is number `recorded`; `thread` makes it."""
        now = self._now(thread)
        times = self._returned if self._from_return[position] else self._launched
        left = times.get(recorded, now) + self._gaps[position] - now
        if left > 0:
            self._fill(left)
            if self._queues:
                self._queued[thread] += left
        self._launched[recorded] = self._now(thread)

    def returned(self, recorded: int = 0, thread: int = 0) -> None:
        """Note that a thread finished its launch and the waits after it."""
        self._returned[recorded] = self._now(thread)

    def _now(self, thread: int) -> int:
        """Return the time at which the queued work of a thread ends, if the device started it at once. So gaps of
        recorded threads that overlap are not queued twice."""
        return time.monotonic_ns() + self._queued[thread]


def computed_ns(calls: list[PlannedCall]) -> list[int]:
    """Return the gap before each launch of `calls` without exposed communication. A host ahead of its device may wait
    for communication only in a later gap. So a gap that is too short reduces the next ones."""
    gaps, owed = [], 0
    for call in calls:
        computed = call.gap_ns - call.exposed_ns - owed
        owed = max(0, -computed)
        gaps.append(max(0, computed))
    return gaps


def idle(nanoseconds: int) -> None:
    """Do nothing for `nanoseconds`."""
    until = time.monotonic_ns() + nanoseconds
    if nanoseconds > _SPIN_NS:
        time.sleep((nanoseconds - _SPIN_NS) / 1e9)
    while time.monotonic_ns() < until:
        pass


def make_busy(device: torch.device) -> Callable[[int], None]:
    """Return a function that keeps `device` busy for a number of nanoseconds; calibrate it now.

    On CUDA it queues the products on the current stream and returns, so that they overlap communication like the job's
    kernels.
    """
    import torch

    size = _MATRIX if device.type == "cpu" else 1024
    matrix = torch.full((size, size), 1.0 / size, device=device)
    result = torch.empty_like(matrix)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=result)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    multiply(3)
    rounds, start = 0, time.perf_counter()
    while time.perf_counter() - start < _CALIBRATION_S:
        multiply(10)
        rounds += 10
    each_ns = (time.perf_counter() - start) * 1e9 / rounds

    def busy(nanoseconds: int) -> None:
        if device.type == "cuda":
            for _ in range(round(nanoseconds / each_ns)):
                torch.mm(matrix, matrix, out=result)
            return
        until = time.monotonic_ns() + nanoseconds
        while until - time.monotonic_ns() > each_ns:
            torch.mm(matrix, matrix, out=result)
        idle(until - time.monotonic_ns())

    return busy
