"""The format of `replay.json`: the settings of a replay, and its results. `replay.csv` has every call.

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
    """Percentiles. For a bandwidth, the values at the p50, p95 and p99 of the time, so p95 is lower than p50."""

    p50: float
    p95: float
    p99: float


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """The settings of a replay."""

    backend: str
    device: str
    """`cpu` or `cuda`."""
    warmup: Amount = 2
    """Number of warm-up passes, which are not measured."""
    repeats: Amount = 5
    """Number of measured passes."""
    pace: str = "fast"
    check: bool = False
    timeout_s: float = 120.0
    """Seconds without progress after which a rank counts as hanging."""
    slack_s: float = 0.0
    """Extra seconds in which ranks may wait for each other in the gaps of the plan."""
    record: str | None = None
    """Folder for a recording of the replay."""
    imports: tuple[str, ...] = ()
    """Modules that define operations. Every rank imports them."""
    indices: str = "uniform"
    """Distribution of indices into embedding tables."""
    threads: Amount = 1
    """CPU threads of torch per rank."""
    blocking: bool = False
    """Whether a barrier of the group runs before and after each collective."""
    graph: bool = False
    """Whether the calls of a pass run as one CUDA graph."""
    profile: str | None = None
    """Folder for a recording of two more passes, with execution traces and Kineto traces."""
    save_data: str | None = None
    """Folder for the saved results of every call."""
    compare_data: str | None = None
    """Folder of the saved results to compare with."""
    batch: Amount | None = None
    """Number of calls in a row that are timed together."""
    rtol: float | None = None
    """None: the default of the type."""
    atol: float | None = None


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the recorded communication the replay runs, over all recorded ranks."""

    calls: Amount
    recorded_calls: Amount
    bytes: Amount
    recorded_bytes: Amount
    unsized: Amount = 0
    """Recorded calls with an unknown size; they are not replayed."""
    reasons: dict[str, Amount]
    """Reason why calls were skipped -> number of calls."""
    damaged: bool
    """Whether parts of the files are unreadable, so that there were more calls than counted."""

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
    """Skipped operations with one name and one reason."""

    name: str
    reason: str
    operations: Amount
    ns: Amount
    """Total recorded time."""


class ComputeCoverage(msgspec.Struct, kw_only=True, frozen=True):
    """How much of the recorded computation the replay runs, over all recorded ranks."""

    operations: Amount = 0
    recorded_operations: Amount = 0
    ns: Amount = 0
    recorded_ns: Amount = 0
    """Time of operations with the profiler, without the time between them."""
    left_out: list[LeftOutOperations] = []
    """Longest first."""

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
    """With the profiler; None if the trace has no times."""
    profiled_us: float | None
    """Replayed with the same profiler, to compare with `recorded_us`; None if unknown."""
    replayed_us: float
    """Without a profiler."""

    @property
    def ratio(self) -> float | None:
        """Replayed / recorded, both with the profiler."""
        return self.profiled_us / self.recorded_us if self.recorded_us and self.profiled_us else None


class StepComparison(msgspec.Struct, kw_only=True):
    """A whole step, replayed and recorded."""

    coverage: ComputeCoverage
    steps: Amount
    """Number of steps in the replayed window."""
    replayed_ms: float
    """Median over ranks, passes and steps."""
    replayed_p95_ms: float
    recorded_ms: float | None
    """Median over ranks and steps that were recorded without a profiler and made the same calls as a step of the
    window; None without such steps."""
    recorded_steps: Amount
    """Number of these steps, over all ranks."""
    own_ratio: float | None = None
    """Time of a step without waits for communication: replayed / recorded without a profiler."""
    noise: float | None = None
    """Half of the 95 % interval of replayed / recorded, as a share of it; it follows from the variation of steps."""
    other_steps: Amount
    """Steps without a profiler that made other calls, over all ranks; they are not compared."""
    profiled_ms: float | None
    """Median of the steps of the window, recorded with the profiler."""
    profiled_operations_ms: float | None
    """Time of operations in such a step; None if some ran on a device, or times are unknown."""
    profiled_between_ms: float | None
    """Time between operations in such a step, without waits: host time, and time of the profiler."""
    exposed_ms: float
    """Time of a step in which the host waited for communication in the replay, median over ranks and passes."""
    recorded_exposed_ms: float | None
    """The recorded part of the same time in the window."""
    host_ms: float
    """Replayed time of a step in which the host neither computed nor waited."""
    host_once_ms: float = 0.0
    """Excess of that time in single steps of the window, mean over the steps; it is not replayed."""
    bytes_per_rank: Amount
    """Planned peak of the tensors of a rank."""
    peak_bytes: Amount
    """Peak memory of a process, or of torch on a GPU."""
    operations: list[ComputedOperation]
    """Most time first."""

    @property
    def ratio(self) -> float | None:
        """Replayed / recorded."""
        return self.replayed_ms / self.recorded_ms if self.recorded_ms else None

    @property
    def error(self) -> float | None:
        """Estimated error of the replay as a share of a step: the error of its own time, plus the noise of both
        medians. It does not include changed communication."""
        if self.own_ratio is None or self.noise is None:
            return None
        own = max(self.replayed_ms - self.exposed_ms, 0.0) / self.replayed_ms if self.replayed_ms else 0.0
        return abs(self.own_ratio - 1) * own + self.noise

    @property
    def operations_ratio(self) -> float | None:
        """Time of the operations: replayed / recorded, both with the profiler."""
        both = [(one.profiled_us, one.recorded_us) for one in self.operations if one.profiled_us and one.recorded_us]
        recorded = sum(us for _, us in both)
        return sum(us for us, _ in both) / recorded if recorded else None


class ReplayRow(msgspec.Struct, kw_only=True):
    """Calls of one operation, size bucket and group."""

    op: str
    pg: str
    ranks: Amount
    """Number of ranks of the group."""
    size_from: Amount
    """Sizes of the bucket in bytes; both ends belong to it."""
    size_to: Amount
    calls: Amount
    bytes: Amount
    """Sum over all calls of one pass."""
    time_us: Percentiles
    issue_us: Percentiles
    completion_us: Percentiles
    waiting_us: Percentiles
    algbw_gb_per_s: Percentiles | None
    """None for a barrier, for calls of a batch, for calls with a late end, and if all times are unknown."""
    busbw_gb_per_s: Percentiles | None
    late_ends: Amount = 0
    """Calls whose end is known only from a wait: their times are upper bounds."""
    unknown_times: Amount = 0
    """Times, over all calls and passes, that are shorter than the clock can show. They have no bandwidth."""


class CheckFailure(msgspec.Struct, kw_only=True):
    """A wrong result."""

    rank: Amount
    call: Amount
    """Id of the record."""
    op: str
    pg: str
    tensor: Amount
    """Index of the output tensor of the call."""
    element: Amount
    """Index of the first wrong element."""
    elements: Amount
    """Number of wrong elements."""
    expected: float
    got: float


class CheckResult(msgspec.Struct, kw_only=True):
    """The result of `--check`."""

    tensors: Amount
    """Output tensors that were compared, over all ranks and passes."""
    failures: list[CheckFailure]


class DataComparison(msgspec.Struct, kw_only=True):
    """The result of `--compare-data`. An element agrees if |now - then| <= atol + rtol |then|."""

    folder: str
    rtol: float | None
    """None: 8 roundings of the type, at least 1e-4. The same for `atol`."""
    atol: float | None
    not_comparable: Amount = 0
    """Output tensors that were saved with another type or in other parts, because of another backend."""
    tensors: Amount = 0
    """Output tensors that were compared, over all ranks."""
    different: Amount = 0
    """Tensors with an element that differs."""
    largest_difference: float = 0.0
    """Largest difference of two elements."""
    failures: list[CheckFailure] = []
    """The first few of each rank. `expected` is the saved value."""


class CallTimes(msgspec.Struct, kw_only=True):
    """Calls of one source line, or of one step."""

    name: str
    calls: Amount
    bytes: Amount
    """Sum over all calls of one pass."""
    time_us: Percentiles
    """Sum over the calls, per pass. Calls that overlap count separately."""
    waiting_us: Percentiles
    """Sum over the calls, as a mean over the ranks."""
    span_us: Percentiles
    """From the first start on a rank (on its device, if it has one) to the last end."""


class Batches(msgspec.Struct, kw_only=True):
    """Times of several calls in a row."""

    calls: Amount
    """Number of calls in a row. A shorter rest of a pass is skipped."""
    batches: Amount
    """Number of such rows per pass, over all ranks."""
    time_us: Percentiles
    """From the first start to the last end on a rank."""


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
    """Median of the collectives with a recorded time on every rank; None if there is none."""
    collective_replayed_us: float | None
    collective_error_p50: float | None
    collective_error_p95: float | None


class Comparison(msgspec.Struct, kw_only=True):
    """A replay compared with its recording."""

    calls: Amount
    """Calls of single ranks that could be compared."""
    without_time: Amount
    """Replayed calls whose duration is not recorded, or is unknown in the replay."""
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
    """Parts of the trace that could not be read."""
    substitutes: dict[str, int]
    """What the backend could not do as recorded, and what it did instead -> calls, over all ranks."""
    hosts: dict[str, int]
    """Host -> ranks."""
    devices: dict[str, int]
    versions: dict[str, str]
    clock_error_us: float
    """Maximum difference of the ranks' clocks, and so the maximum error of "waiting" and "time"."""
    end_to_end_us: Percentiles
    """Over the passes, from the first rank's start to the last rank's end."""
    cpu_us_per_call: float
    """CPU time of the process per launch-and-wait, all threads, mean over the ranks."""
    rows: list[ReplayRow]
    comparison: Comparison | None
    """None if the recording has no times."""
    check: CheckResult | None
    data: DataComparison | None = None
    by_source: list[CallTimes] = []
    """Longest first."""
    by_step: list[CallTimes] = []
    """In the order of steps."""
    batches: Batches | None = None
    step: StepComparison | None = None
    """Only in a replay with computation."""
    schema: str = "crossrank-replay 1"
    crossrank: str = crossrank.__version__


def read_report(folder: str) -> ReplayReport:
    """The report in the folder of a replay, or in the file `….json`. Raises `CrossrankError` if it is not a report."""
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
