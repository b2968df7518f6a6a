"""What the ranks of a replay send each other: their work, where they are, and what they measured."""

from __future__ import annotations

import msgspec

from crossrank.comm import Group
from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.replay.plan.plan import PlannedCall
from crossrank.tools.traces.replayed import CheckResult, DataComparison, Settings


class WorkItem(msgspec.Struct, kw_only=True):
    """What one rank is sent."""

    settings: Settings = Settings(backend="", device="")
    groups: list[Group] = []
    """All of the plan."""
    calls: list[PlannedCall] = []
    compute: ComputePlan | None = None
    fits_host: bool = False
    """On some rank the host's time can be fitted to steps without a profiler: all make the passes for it."""
    world_size: int = 0
    ends: bool = False
    """There is nothing more to do: the process may go."""


class State(msgspec.Struct, kw_only=True):
    """Where a rank is."""

    phase: str
    """What it does, for people: `joining`, `warming up`, `pass 3`, `done`."""
    call: int = -1
    """Index of the call it is in; -1 between calls."""
    error: str = ""
    """What ended it."""
    asked_to_end: bool = False
    """It ended because another rank had failed."""


class Pass(msgspec.Struct, kw_only=True):
    """The times of one rank in one pass, in ns of its monotonic clock; columns of int64 in the machine's order, by
    call. Calls of one launch share them."""

    launched: bytes
    """The host made the call."""
    issued: bytes
    """The launch had returned: the host could go on."""
    began: bytes
    """As `launched`, but on a GPU when its stream came to the call."""
    completed: bytes
    start: int
    end: int
    waited: int = 0
    """How long the host waited for communication, in ns."""
    steps: list[int] = []
    """When each step of computation began."""

    @property
    def own_ns(self) -> int:
        """What was no wait for communication."""
        return self.end - self.start - self.waited


class Computed(msgspec.Struct, kw_only=True):
    """What one rank computed, beside its communication."""

    operations: dict[str, tuple[int, int, int]]
    """Name -> (how many ran in a pass, ns in all in a pass with a clock around each, ns in all under the profiler)."""
    host_ns: int
    """Idled in a pass for what the host did between operations."""
    host_once_ns: int
    """What single steps had more of it: left out."""
    slowness: float | None
    """How much longer operations take here than when they were recorded; None where it is not known."""
    failed: list[tuple[str, str, int]]
    """(operation, why it cannot run, recorded ns)"""
    peak_bytes: int
    """Most memory that the process had, or on a GPU that torch took there."""


class RankResult(msgspec.Struct, kw_only=True):
    """What one rank hands in."""

    rank: int
    host: str
    device: str
    offset_ns: int
    """To add to its clock to have rank 0's."""
    offset_error_ns: int
    passes: list[Pass]
    cpu_s: float
    """Of all measured passes."""
    late_ends: list[int]
    """Calls whose end is known only from their wait: they were over at the latest then."""
    substitutes: dict[str, int]
    """What differs from the recording -> calls."""
    check: CheckResult | None
    """None where nothing was checked."""
    versions: dict[str, str]
    computed: Computed | None = None
    data: DataComparison | None = None
