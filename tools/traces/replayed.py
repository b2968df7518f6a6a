"""The form of `replay.json`: what a replay was asked to do, and what it measured; `replay.csv` has every call.

Durations of rows are in us, bandwidths in GB/s (1e9 bytes), sizes are S of nccl-tests.
"""

from __future__ import annotations

import msgspec

import crossrank
from crossrank.atomic_file import join
from crossrank.comm import Amount
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import ReadIssues, read_chunks

CSV, JSON = "replay.csv", "replay.json"


class Percentiles(msgspec.Struct, kw_only=True, frozen=True):
    """Of a bandwidth, that of the p50, p95 and p99 of the time: it is smaller at p95."""

    p50: float
    p95: float
    p99: float


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """How a plan is run."""

    backend: str
    device: str
    """`cpu` or `cuda`."""
    warmup: Amount = 2
    """Passes that are not measured."""
    repeats: Amount = 5
    """Passes that are measured."""
    pace: str = "fast"
    check: bool = False
    timeout_s: float = 120.0
    """After this long without progress a rank is taken to hang."""
    slack_s: float = 0.0
    """How long the ranks of this plan may wait for each other in its gaps, beside that."""
    record: str | None = None
    """Folder for a recording of the replay."""
    imports: tuple[str, ...] = ()
    """Modules that make operations, imported by every rank."""
    indices: str = "uniform"
    """How indices into a table are spread over its rows."""
    threads: Amount = 1
    """Of torch on the CPU, in each rank."""
    blocking: bool = False
    """The members of a group meet before and after each of their collectives."""
    graph: bool = False
    """The calls of a pass are launched as one CUDA graph."""
    profile: str | None = None
    """Folder for a recording of further passes, with execution traces and Kineto."""
    save_data: str | None = None
    """Folder for what every call gives."""
    compare_data: str | None = None
    """Folder of what it is compared with."""
    batch: Amount | None = None
    """Calls in a row that are told as one."""
    rtol: float | None = None
    """None = as the type asks for."""
    atol: float | None = None


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the recorded communication is replayed, over all recorded ranks."""

    calls: Amount
    recorded_calls: Amount
    bytes: Amount
    recorded_bytes: Amount
    unsized: Amount = 0
    """Recorded calls of which the bytes are not known; none of them is replayed."""
    reasons: dict[str, Amount]
    """Why calls were left out -> how many."""
    damaged: bool
    """Parts of the files could not be read, so that there were more calls than are counted."""

    @property
    def share_of_calls(self) -> float:
        return self.calls / self.recorded_calls if self.recorded_calls else 1.0

    @property
    def share_of_bytes(self) -> float:
        return self.bytes / self.recorded_bytes if self.recorded_bytes else 1.0

    @property
    def complete(self) -> bool:
        return not self.reasons and not self.damaged


class LeftOutOperations(msgspec.Struct, kw_only=True, frozen=True):
    """Operations of one name that do not run, for one reason."""

    name: str
    reason: str
    operations: Amount
    ns: Amount
    """Recorded, in all."""


class ComputeCoverage(msgspec.Struct, kw_only=True, frozen=True):
    """How much of the recorded computation is replayed, over all recorded ranks."""

    operations: Amount = 0
    recorded_operations: Amount = 0
    ns: Amount = 0
    recorded_ns: Amount = 0
    """Of operations, under the profiler, without what lies between them."""
    left_out: list[LeftOutOperations] = []
    """The longest first."""

    @property
    def share_of_operations(self) -> float:
        return self.operations / self.recorded_operations if self.recorded_operations else 1.0

    @property
    def share_of_time(self) -> float:
        return self.ns / self.recorded_ns if self.recorded_ns else 1.0

    @property
    def complete(self) -> bool:
        return not self.left_out


class ComputedOperation(msgspec.Struct, kw_only=True):
    """Operations of one name in a step of one rank, replayed and recorded; means over ranks and steps."""

    name: str
    count: float
    recorded_us: float | None
    """Under the profiler; None where the trace has no times."""
    profiled_us: float | None
    """Replayed under the same profiler: what compares with it; None where that is not known."""
    replayed_us: float
    """Without a profiler."""

    @property
    def ratio(self) -> float | None:
        """Replayed / recorded, both under the profiler."""
        return self.profiled_us / self.recorded_us if self.recorded_us and self.profiled_us else None


class StepComparison(msgspec.Struct, kw_only=True):
    """A whole step, replayed and recorded."""

    coverage: ComputeCoverage
    steps: Amount
    """Of the window that is replayed."""
    replayed_ms: float
    """Median over ranks, passes and steps."""
    replayed_p95_ms: float
    recorded_ms: float | None
    """Median over ranks and steps of those steps that were recorded without a profiler and made the same calls as one
    of the window; None without any."""
    recorded_steps: Amount
    """How many they are, over all ranks."""
    own_ratio: float | None = None
    """Of a step, what is no wait for communication, replayed / recorded without a profiler."""
    noise: float | None = None
    """Half of the 95 % interval of replayed / recorded that follows from how steps differ, as a share of it."""
    other_steps: Amount
    """Steps without a profiler that made other calls, over all ranks: they are not compared with."""
    profiled_ms: float | None
    """Median of the steps of the window, recorded under the profiler."""
    profiled_operations_ms: float | None
    """Of such a step, the operations; None where some ran on a device, beside the host, or times are not known."""
    profiled_between_ms: float | None
    """Of such a step, what lies between operations and is no waiting: the host's own time, and the profiler's."""
    exposed_ms: float
    """Time of a step in which the host waited for communication in the replay, median over ranks and passes."""
    recorded_exposed_ms: float | None
    """The same in the window, as far as it is recorded."""
    host_ms: float
    """Time of a step in which the host did neither, as it is replayed."""
    host_once_ms: float = 0.0
    """What single steps of the window had more of it than the others, mean over the steps: it is not replayed."""
    bytes_per_rank: Amount
    """Of tensors, at most, as planned."""
    peak_bytes: Amount
    """Most memory of a process, or what torch took on a GPU."""
    operations: list[ComputedOperation]
    """Those that take longest first."""

    @property
    def ratio(self) -> float | None:
        """Replayed / recorded."""
        return self.replayed_ms / self.recorded_ms if self.recorded_ms else None

    @property
    def error(self) -> float | None:
        """By what share of a step the replay may be wrong, as far as it knows itself: what its own time is off by, and
        the noise of both. Communication that was changed is not a part of it."""
        if self.own_ratio is None or self.noise is None:
            return None
        own = max(self.replayed_ms - self.exposed_ms, 0.0) / self.replayed_ms if self.replayed_ms else 0.0
        return abs(self.own_ratio - 1) * own + self.noise

    @property
    def operations_ratio(self) -> float | None:
        """Time of the operations, replayed / recorded, both under the profiler."""
        both = [(one.profiled_us, one.recorded_us) for one in self.operations if one.profiled_us and one.recorded_us]
        recorded = sum(us for _, us in both)
        return sum(us for us, _ in both) / recorded if recorded else None


class ReplayRow(msgspec.Struct, kw_only=True):
    """Calls of one operation, size bucket and group."""

    op: str
    pg: str
    ranks: Amount
    """Members of the group."""
    size_from: Amount
    """Sizes of the bucket in bytes; both ends belong to it."""
    size_to: Amount
    calls: Amount
    bytes: Amount
    """Of all calls of one pass."""
    time_us: Percentiles
    issue_us: Percentiles
    completion_us: Percentiles
    waiting_us: Percentiles
    algbw_gb_per_s: Percentiles | None
    """None where there is none: of a barrier, of calls of a batch, of calls with a late end."""
    busbw_gb_per_s: Percentiles | None
    late_ends: Amount = 0
    """Calls whose end is known only from a wait: their times are upper bounds."""


class CheckFailure(msgspec.Struct, kw_only=True):
    """A result that is not what it must be."""

    rank: Amount
    call: Amount
    """Id of the record."""
    op: str
    pg: str
    tensor: Amount
    """Which of the call's output tensors."""
    element: Amount
    """The first that is wrong."""
    elements: Amount
    """How many are."""
    expected: float
    got: float


class CheckResult(msgspec.Struct, kw_only=True):
    """What `--check` found."""

    tensors: Amount
    """Output tensors that were compared, over all ranks and passes."""
    failures: list[CheckFailure]


class DataComparison(msgspec.Struct, kw_only=True):
    """What `--compare-data` found: an element agrees where |now - then| <= atol + rtol |then|."""

    folder: str
    rtol: float | None
    """None = 8 roundings of the type, at least 1e-4; so for `atol`."""
    atol: float | None
    not_comparable: Amount = 0
    """Output tensors that were not saved so: another backend moved another type, or in other parts."""
    tensors: Amount = 0
    """Output tensors that were compared, over all ranks."""
    different: Amount = 0
    """Those with an element that does not agree."""
    largest_difference: float = 0.0
    """Of two elements, among all."""
    failures: list[CheckFailure] = []
    """The first few of each rank: `expected` was saved."""


class CallTimes(msgspec.Struct, kw_only=True):
    """Calls of one source line, or of one iteration."""

    name: str
    calls: Amount
    bytes: Amount
    """Of all calls of one pass."""
    time_us: Percentiles
    """Of all of them together, over the passes: calls that ran beside each other count each."""
    waiting_us: Percentiles
    """Mean over the ranks, of all of them together."""
    span_us: Percentiles
    """From the first begin on a rank, on its device where it has one, to the last end."""


class Batches(msgspec.Struct, kw_only=True):
    """Calls of a rank, so many in a row."""

    calls: Amount
    """In one batch; the last of a pass may have fewer and is left out."""
    batches: Amount
    """In a pass, over all ranks."""
    time_us: Percentiles
    """From the first begin to the last end, on a rank."""


class Compared(msgspec.Struct, kw_only=True):
    """Calls of one operation and size bucket, replayed and recorded."""

    op: str
    size_from: Amount
    size_to: Amount
    calls: Amount
    """Calls of single ranks with a recorded time."""
    recorded_us: float
    """Median completion."""
    replayed_us: float
    ratio: float
    """Median of replayed / recorded: below 1, the replay was faster."""
    error_p50: float
    """Relative error of the completion, median and 95th percentile over the calls."""
    error_p95: float
    collective_recorded_us: float | None
    """Median of the collectives of which every rank's time is recorded; None where there is none."""
    collective_replayed_us: float | None
    collective_error_p50: float | None
    collective_error_p95: float | None


class Comparison(msgspec.Struct, kw_only=True):
    """A replay beside its recording."""

    calls: Amount
    """Calls of single ranks that could be compared."""
    without_time: Amount
    """Replayed calls whose duration is not recorded."""
    error_p50: float | None
    """Relative error of the completions over all compared calls."""
    error_p95: float | None
    collective_error_p50: float | None
    collective_error_p95: float | None
    recorded_end_to_end_us: float | None
    """From a rank's first launch to its last call's launch or end, the longest of all ranks; None without times."""
    replayed_end_to_end_us: float
    """Median over the passes."""
    rows: list[Compared]


class ReplayReport(msgspec.Struct, kw_only=True):
    """`replay.json`."""

    source: str
    kind: str
    world_size: Amount
    settings: Settings
    variables: dict[str, str]
    """Environment variables that a sweep set."""
    what_if: dict[str, str]
    """How the plan differs from the recording: option -> value."""
    coverage: Coverage
    share_of_calls: float
    share_of_bytes: float
    bytes_per_pass: Amount
    """Summed over calls and ranks, as replayed; `coverage` counts as recorded."""
    calls_per_pass: Amount = 0
    """Calls over all ranks, as replayed; `coverage` counts as recorded. 0 in reports of older versions."""
    notes: list[str]
    damage: list[str]
    """What of the trace could not be read."""
    substitutes: dict[str, int]
    """What the backend could not do as recorded, and what it did instead -> calls, over all ranks."""
    hosts: dict[str, int]
    """Host -> ranks."""
    devices: dict[str, int]
    versions: dict[str, str]
    clock_error_us: float
    """By how much the ranks' clocks may be apart, at worst: what "waiting" and "time" may be wrong by."""
    end_to_end_us: Percentiles
    """Over the passes, from the first rank's start to the last rank's end."""
    cpu_us_per_call: float
    """CPU time of the process per launch-and-wait, all threads, mean over the ranks."""
    rows: list[ReplayRow]
    comparison: Comparison | None
    """None where the recording has no times."""
    check: CheckResult | None
    data: DataComparison | None = None
    by_source: list[CallTimes] = []
    """The one that takes longest first."""
    by_step: list[CallTimes] = []
    """In their order."""
    batches: Batches | None = None
    step: StepComparison | None = None
    """With computation alone."""
    schema: str = "crossrank-replay 1"
    crossrank: str = crossrank.__version__


def read_report(folder: str) -> ReplayReport:
    """The report in the folder of a replay, or in the file `….json`. Raises `CrossrankError` where it is none."""
    path = folder if folder.endswith(".json") else join(folder, JSON)
    issues = ReadIssues(path)
    content = b"".join(read_chunks(path, issues))
    try:
        if issues.problems:
            raise msgspec.DecodeError(issues.problems[0])
        report = msgspec.json.decode(content, type=ReplayReport)
        if not report.schema.startswith("crossrank-replay"):
            raise msgspec.DecodeError("its schema is not that of a replay")
    except BROKEN as error:
        raise CrossrankError(
            f"{path}: is not a result of crossrank replay ({one_line(error)}); give the folder of its option -o"
        ) from error
    return report
