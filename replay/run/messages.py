"""The messages between the ranks of a replay: work, states and measurements."""

from __future__ import annotations

import msgspec

from crossrank.comm import Group
from crossrank.replay.plan.compute.compute_plan import ComputePlan
from crossrank.replay.plan.plan import PER_THREAD, PlannedCall, Streams
from crossrank.tools.traces.replayed import CheckResult, DataComparison, Settings


class WorkItem(msgspec.Struct, kw_only=True):
    """The work of one rank."""

    settings: Settings = Settings(backend="", device="")
    """Without `OwnOptions`."""
    groups: list[Group] = []
    """All groups of the plan."""
    calls: list[PlannedCall] = []
    compute: ComputePlan | None = None
    streams: Streams = PER_THREAD
    fits_host: bool = False
    """Some rank can fit its host time to steps without a profiler, so all ranks make the passes for it."""
    world_size: int = 0
    ends: bool = False
    """There is no more work: the process may end."""


class OwnOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options that a rank takes only from its own command line. They name code that it runs, and folders that it reads
    and writes. Another process could put other names into the store."""

    imports: tuple[str, ...] = ()
    record: str | None = None
    profile: str | None = None
    save_data: str | None = None
    compare_data: str | None = None

    @classmethod
    def of(cls, source: object) -> OwnOptions:
        """Return these options of `source`, which has them as attributes."""
        values = {name: getattr(source, name) for name in cls.__struct_fields__}
        return cls(**values | {"imports": tuple(values["imports"])})

    def put_into(self, settings: Settings) -> Settings:
        """Return `settings` with these options instead of its own."""
        return msgspec.structs.replace(settings, **msgspec.structs.asdict(self))


class State(msgspec.Struct, kw_only=True):
    """The state of a rank."""

    phase: str
    """Text for the user: `joining`, `warming up`, `pass 3`, `done`."""
    call: int = -1
    """Index of its current call; -1 between calls."""
    error: str = ""
    """The error that ended it."""
    asked_to_end: bool = False
    """It ended because another rank had failed."""


class Pass(msgspec.Struct, kw_only=True):
    """The times of one rank in one pass, in ns of its monotonic clock. Columns of int64 in native byte order, by call.
    The calls of one launch have equal times."""

    launched: bytes
    """When the host made the call."""
    issued: bytes
    """When the launch returned and the host could continue."""
    began: bytes
    """As `launched`; on a GPU, when its stream reached the call."""
    completed: bytes
    start: int
    end: int
    waited: int = 0
    """Time in which the host waited for communication, in ns."""
    steps: list[int] = []
    """The start of each step of computation."""

    @property
    def own_ns(self) -> int:
        """Return the duration without waits for communication."""
        return self.end - self.start - self.waited


class Computed(msgspec.Struct, kw_only=True):
    """What one rank computed."""

    operations: dict[str, tuple[int, int, int]]
    """Name -> (operations in a pass, their ns in a pass with a clock around each, their ns under the profiler)."""
    host_ns: int
    """Idle time in a pass, in place of the host's work between operations."""
    host_once_ns: int
    """Host time of single steps beyond the typical step; the replay skips it."""
    slowness: float | None
    """Duration of operations here divided by their recorded duration; None if unknown."""
    failed: list[tuple[str, str, int]]
    """(operation, why it cannot run, recorded ns)"""
    peak_bytes: int
    """Peak memory of the process, or on a GPU of torch's allocator."""


class RankResult(msgspec.Struct, kw_only=True):
    """The result of one rank."""

    rank: int
    host: str
    device: str
    offset_ns: int
    """Add this to its clock to get rank 0's."""
    offset_error_ns: int
    passes: list[Pass]
    cpu_s: float
    """CPU seconds of all measured passes."""
    late_ends: list[int]
    """Calls whose end is visible only in their wait, which is the latest possible end."""
    substitutes: dict[str, int]
    """Difference from the recording -> number of calls."""
    check: CheckResult | None
    """None if nothing was checked."""
    versions: dict[str, str]
    computed: Computed | None = None
    data: DataComparison | None = None
