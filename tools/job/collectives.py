"""All ranks matched: which calls are one collective, how long it took, and who waited for whom.

With d the duration of a collective on a rank (its kernel, or its Work on a backend without kernels):

* `time` is that of the collective itself, from the last arrival. Where the operation releases all ranks together, the
  last to arrive waits for nobody: its duration is the shortest d, and needs no clocks to be compared. Elsewhere
  (a broadcast, a send) it is the last begin to the last end, on corrected clocks; where only durations are known,
  the longest d, an upper bound.
* `waiting` of a rank is the part of its d before the last arrival.
* algbw = S / time, busbw = algbw * factor, with S and the factor of nccl-tests (see `crossrank.comm.OPERATIONS`). Of
  an uneven all_to_all busbw is the larger of what a rank sends to others and receives from them, of the busiest
  rank, over time, as PARAM counts it.

An all_to_all with splits releases nobody together: a rank that exchanges nothing with the last to arrive has ended
before. A collective that not all members of its group were seen in, or whose members are not known, has a time that
includes waiting for the others: an upper bound, which is counted as such. Upper bounds too: the
time of a launch of several sends and receives, of which one rank alone is known, and any time that is shorter than
the residual of the clocks it was measured on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from crossrank.comm import OPERATIONS
from crossrank.tools.job.clocks import Clocks, align
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import SEND_RECV, Bools, Ints, Launches, launches, reduce_by
from crossrank.tools.job.matching import Joined, match_calls, part_lanes
from crossrank.tools.traces.rank_trace import Interned

if TYPE_CHECKING:
    import polars as pl

Floats = NDArray[np.float64]
_MAX = np.iinfo(np.int64).max
_BY_PROFILER = ("kineto", "nsight")
NO_DURATION = "calls whose end does not come after their begin: they have no times"
MOVED = (
    "calls that were numbered by counting, on clocks that were moved by more than half the time between calls: if the "
    "files begin at different calls, they are paired wrongly"
)


@dataclass(kw_only=True)
class Collectives(Launches):
    """The launches of all ranks and the collectives that they are parts of. Times in ns, on corrected clocks."""

    groups: list[ProcessGroup]
    ranks: list[int]
    """Ranks that were read, ascending."""
    world_size: int
    clocks: Clocks
    shift: dict[int, int]
    """Rank -> what was added to its times to have them on the common clock."""
    unmatched: dict[str, int]
    """What was left out or could not be compared, and why -> calls."""
    # One row per launch, beside those of `Launches`.
    collective: Ints
    """Index of the collective that the call is part of."""
    waiting: Ints
    """-1 = not known."""
    comparable: Bools
    """Its begin and end are on the common clock."""
    # One row per collective.
    of_kind: Ints
    """Kind on its first rank."""
    bytes: Ints
    """S of nccl-tests; the largest of its ranks'."""
    exchanged: Ints
    """-1 where the bus factor tells it."""
    seen: Ints
    """Ranks with times."""
    expected: Ints
    time: Ints
    """-1 = not known."""
    bound: Bools
    """`time` is an upper bound."""
    last_rank: Ints
    """Who arrived last; -1 = not known, or all arrived within what the clocks may be apart."""
    opens: Bools
    """It is the first that one of its ranks made in a window of a profiler, which began on that rank when it did."""

    @property
    def timed(self) -> Bools:
        return self.time >= 0

    @property
    def calls(self) -> Ints:
        """Calls that each row stands for: one, or those of a launch."""
        calls: Ints = self.by_kind(lambda one: one.calls, np.int64)[self.kind]
        return calls

    @property
    def together(self) -> Ints:
        """Calls of its batch that have the times of each row."""
        together: Ints = self.by_kind(lambda one: one.together, np.int64)[self.kind]
        return together

    def algbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        whole = self.by_kind(lambda one: one.whole)[self.of_kind]
        return _rate(self.bytes, np.where(whole, self.time, 0))

    def busbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        factor = self.by_kind(lambda one: _factor(one.op, self.groups[one.group].size), float)[self.of_kind]
        own = (self.exchanged >= 0) & (self.time > 0) & ~np.isnan(factor)
        rate: Floats = np.where(own, _rate(self.exchanged, self.time), self.algbw() * factor)
        return rate

    def calls_frame(self, *names: str) -> pl.DataFrame:
        """Columns of these names, with a row per launch and rank; `last_rank`, `expected` and `opens` are those of its
        collective. Times are ns, 0 = not known; `waiting` is -1 where it is not known."""
        import polars as pl

        of_collective = ("last_rank", "expected", "opens")
        return pl.DataFrame(
            {
                name: getattr(self, name)[self.collective] if name in of_collective else getattr(self, name)
                for name in names
            }
        )

    def collectives_frame(self) -> pl.DataFrame:
        """One row per collective or transfer. `bytes` (which no rank knows of the `unsized`) and `time`, in ns, are
        null where they are not known; bandwidths are in GB/s."""
        import polars as pl

        # As categories texts cost 4 bytes a row.
        schema = {"op": pl.Categorical, "group": pl.Int64, "locality": pl.Categorical, "source": pl.Categorical}
        rows = [(one.label, one.group, one.locality, one.source) for one in self.kinds]
        kinds = pl.DataFrame(rows, schema=schema, orient="row").with_columns(sized=self.by_kind(lambda one: one.sized))
        return (
            kinds[self.of_kind]
            .with_columns(unsized=~pl.col("sized") & pl.Series(self.bytes == 0))
            .with_columns(
                bytes=pl.when(~pl.col("unsized")).then(self.bytes),
                time=pl.Series(self.time).replace(-1, None),
                algbw=pl.Series(self.algbw()).fill_nan(None),
                busbw=pl.Series(self.busbw()).fill_nan(None),
                bound=self.bound,
            )
        )


def _rate(size: Ints, time: Ints) -> Floats:
    """bytes/ns, which is GB/s; NaN where one of them is not known or 0."""
    rate = np.full(len(time), np.nan)
    np.divide(size, time, out=rate, where=(size > 0) & (time > 0))
    return rate


def _factor(op: str, size: int) -> float:
    """Bus factor; NaN where a bandwidth means nothing: a barrier, a group of one, an operation that is not known."""
    if op == SEND_RECV:
        return 1.0
    row = OPERATIONS.get(op)
    if row is None or row.bus_factor is None or (size < 2 and not row.p2p):
        return float("nan")
    return row.bus_factor(size)


def match_collectives(job: Job, *, batches_apart: bool = False) -> Collectives:
    """Join the calls of all ranks into collectives and transfers, on one clock, and measure them.

    With `batches_apart` each send of a batch is joined with its receive; the time of a launch of several is an upper
    bound for each.
    """
    found = launches(job, batches_apart=batches_apart)
    unmatched: Counter[str] = Counter()
    impossible = found.measured & (found.ended <= found.began)
    if impossible.any():
        unmatched[NO_DURATION] = int(impossible.sum())
        found = replace(found, began=np.where(impossible, 0, found.began), ended=np.where(impossible, 0, found.ended))
    joined = match_calls(found, unmatched)
    names = Interned[str]()
    clock_of = {rank: names.number(trace.clock or trace.path) for rank, trace in job.ranks.items()}
    place = np.searchsorted(list(job.ranks), found.rank)
    clock = np.array(list(clock_of.values()), np.int64)[place]
    releasing = found.by_kind(lambda one: one.releases_all)[found.kind]
    bad_lanes = True
    while bad_lanes:
        usable = found.measured & found.placed & releasing & ~joined.own[joined.collective] & ~joined.doubtful
        shift, aligned, clocks = align(
            names.rows, clock[usable], joined.collective[usable], found.ended[usable], joined.count
        )
        comparable = found.placed & aligned[clock]
        bad_lanes = part_lanes(joined, shift[clock], releasing & comparable & found.measured, clocks.slack_ns)
    _note_large_shifts(joined, shift[clock])
    opens = _opens_window(job, found, joined)  # by each rank's own clock
    for column in (found.called, found.began, found.ended):
        column += shift[clock] * (column > 0)
    unknown = np.full(joined.count, -1, np.int64)
    result = Collectives(
        **vars(found) | {"number": joined.number},
        groups=job.groups,
        ranks=sorted(job.ranks),
        world_size=len(job.world),
        clocks=clocks,
        shift={rank: int(shift[one]) for rank, one in clock_of.items()},
        unmatched=unmatched,
        collective=joined.collective,
        waiting=np.full(len(found.kind), -1, np.int64),
        comparable=comparable,
        of_kind=joined.of_kind,
        bytes=_largest(joined, found.by_kind(lambda one: one.bytes, np.int64)),
        exchanged=_largest(joined, found.by_kind(lambda one: one.exchanged, np.int64)),
        seen=np.bincount(joined.collective[found.measured], minlength=joined.count),
        expected=np.where(joined.own, 1, _members(found, job.groups)[joined.of_kind]),
        time=unknown,
        bound=joined.own,
        last_rank=unknown.copy(),
        opens=opens,
    )
    _measure(result, joined, releasing)
    return result


def _opens_window(job: Job, found: Launches, joined: Joined) -> Bools:
    """Which collectives are the first of a rank in one of the windows that its profiler traced."""
    opens = np.zeros(joined.count, bool)
    for rank, trace in job.ranks.items():
        if trace.timed_by not in _BY_PROFILER or not trace.busy.where:
            continue
        first, last = np.searchsorted(found.rank, (rank, rank + 1))  # ranks follow each other
        rows = first + np.flatnonzero(found.measured[first:last])
        rows = rows[np.argsort(found.began[rows], kind="stable")]
        window = np.searchsorted(trace.busy.observed[:, 0], found.began[rows], side="right")
        opens[joined.collective[rows[np.diff(window, prepend=-1) != 0]]] = True
    return opens


def _note_large_shifts(joined: Joined, shift_ns: Ints) -> None:
    """A clock that was moved by more than half the time between calls may hide that they were counted from different
    ones: shifted numbers look like a shifted clock."""
    began = joined.calls.began
    rows = np.flatnonzero(joined.calls.counted & ~joined.apart & (began > 0) & (shift_ns != 0))
    order = rows[np.lexsort((began[rows], joined.lane[rows]))]
    steps = np.diff(began[order])[np.diff(joined.lane[order]) == 0]
    if len(steps) and int(np.abs(shift_ns[rows]).max()) > np.median(steps) / 2:
        joined.unmatched[MOVED] += len(rows)


def _largest(joined: Joined, by_kind: Ints) -> Ints:
    return reduce_by(np.maximum, joined.collective, by_kind[joined.calls.kind], joined.count, -1)


def _members(found: Launches, groups: Sequence[ProcessGroup]) -> Ints:
    """How many ranks take part, by kind."""
    members: Ints = found.by_kind(
        lambda one: groups[one.group].size if one.ends is None else len(set(one.ends)), np.int64
    )
    return members


def _measure(found: Collectives, joined: Joined, releasing: Bools) -> None:
    """Times of collectives and waits of ranks."""
    count, measured = joined.count, found.measured
    rows: Ints | slice = slice(None) if measured.all() else np.flatnonzero(measured)
    collective, began, ended = found.collective[rows], found.began[rows], found.ended[rows]
    duration = ended - began
    shortest = reduce_by(np.minimum, collective, duration, count, _MAX)
    longest = reduce_by(np.maximum, collective, duration, count, -1)
    last_begin, last_end = (reduce_by(np.maximum, collective, one, count, 0) for one in (began, ended))
    # A send that left before its receive began is over when the receive has it: ends after begins, or nothing.
    placed = last_end > last_begin
    placed[collective[~found.comparable[rows]]] = False
    # One call that releases nobody makes the whole collective one of that kind.
    released = ~joined.own
    released[found.collective[~releasing]] = False
    known, several = found.seen > 0, found.seen > 1
    found.time[known] = np.where(released, shortest, np.where(placed, last_end - last_begin, longest))[known]
    uncertain = ~released & (~placed | (several & (found.time < found.clocks.slack_ns)))
    late = found.by_kind(lambda one: one.is_p2p and found.groups[one.group].late_ends)
    vague = late | found.by_kind(lambda one: found.groups[one.group].guessed)
    shared = reduce_by(np.maximum, found.collective, found.together, count, 1) > 1
    found.bound = known & ((found.seen < found.expected) | joined.own | uncertain | vague[found.of_kind] | shared)
    lateness = last_begin[collective] - began
    wait = np.where(released[collective], duration - shortest[collective], np.minimum(lateness, duration))
    # A launch that is busy with one peer does not wait for the other.
    compared = (several & (released | placed) & ~shared)[collective]
    found.waiting[rows] = np.where(compared, wait, -1)
    # Who arrived last: between clocks the shortest duration tells it better than begins that are only so well aligned.
    by_begin = placed & ((found.clocks.count == 1) | ~released)
    last = compared & (np.where(by_begin[collective], lateness, duration - shortest[collective]) == 0)
    spread = reduce_by(np.maximum, collective, np.where(compared, wait, -1), count, -1)
    # Durations that kernels have are exact, whatever the clocks; what is no later than clocks may be apart is not late.
    exact = found.placed[rows] & ~by_begin[collective]
    last &= exact | (spread > found.clocks.slack_ns)[collective]
    found.last_rank[collective[last]] = found.rank[rows][last]
