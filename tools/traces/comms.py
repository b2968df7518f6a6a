"""Reads a rank's comms file into a `RankTrace`: every call, without its state.

The state of a call follows from what the rank did next. A rank that ended its recording itself had finished all calls.
Any other rank may hang in its last call. A send or receive that does not block (`isend`, a batch) counts as unfinished:
matching it with the other rank's call shows whether it finished.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from crossrank.comm import MOST_RANKS, CommRecord, is_p2p
from crossrank.errors import BROKEN, CrossrankError
from crossrank.recording import ANSWERS, READ_WAITS, CommsFile, Ran, Wait
from crossrank.text import plural
from crossrank.tools.traces.call_numbers import mend
from crossrank.tools.traces.ending import CUT_SHORT
from crossrank.tools.traces.flight.dump import Frame, Raised
from crossrank.tools.traces.kept import shared
from crossrank.tools.traces.rank_trace import (
    COMPLETED,
    GLOO,
    RETIRED,
    SCHEDULED,
    RankTrace,
    TraceBuilder,
    waits_of,
)

STRANGE_RANKS = "calls with a peer or root that is not a rank of the job: it is unknown"
IMPOSSIBLE_TIMES = "calls, steps, waits and durations with impossible times"
_BLOCKING_P2P = ("send", "recv")
_MOST = 1 << 62


@shared
def read_comms(path: str, rank: int | None = None, *, steps: tuple[int, int] | None = None) -> RankTrace:
    """Read the comms file of `rank`; with `steps`, only the steps from the first to before the second.

    Raises `CrossrankError` if the file has no header.
    """
    file = CommsFile(path, rank)
    trace = RankTrace(rank=rank, path=path, source="comms", numbered_pairs=True)
    builder = TraceBuilder(trace)
    # The header is the first line, so it is read before the first record.
    records = list(file.records())
    header = file.header
    if header is None:
        raise CrossrankError(f"{path}: {'; '.join(file.issues.problems)}; record it again")
    end = file.end or {}
    clocks = [header.clock, *file.clocks]
    clock = WallClock(clocks, starts=True)
    trace.rank = header.rank if rank is None else rank
    trace.world_size = header.world_size if 0 < header.world_size <= MOST_RANKS else None
    trace.version = header.schema
    trace.host, trace.node, trace.clock = header.host, header.node, header.boot_id or header.host
    trace.filtered = header.leaves_out_calls
    trace.about = {name: version for name, version in header.versions.items() if version}
    trace.about["TRACING"] = str(header.config.get("emit", ""))
    trace.problems = file.issues.problems
    trace.notes += file.notes
    trace.dropped, trace.left_out = _count(end.get("dropped")), _count(end.get("filtered"))
    trace.lost_after = file.lost_after
    _drop_doubles(trace, records)
    defined = {group.pg for group in file.groups}
    if strange := [record.id for record in records if record.pg not in defined]:
        trace.problems.append(f"{plural(len(strange), 'call')} on a group that the file does not have")
        trace.lose_after(strange[-1])
    trace.records_steps = True
    step_lines = [line for line in file.steps if "step" in line and "t" in line]
    trace.steps = [(line["step"], clock.at(line["t"])) for line in step_lines if clock.is_possible(line["t"])]
    if lost := len(step_lines) - len(trace.steps):
        trace.unattributed[IMPOSSIBLE_TIMES] += lost
    trace.profiler_steps = _profiler_steps(
        trace.steps, [clock.at(line["t"]) for line in file.windows if isinstance(line.get("t"), int)]
    )
    trace.ending.ended, trace.ending.unseen = file.end is not None, file.end is None
    trace.ending.reason = str(end.get("reason") or "")
    trace.ending.take_exceptions(_exceptions(end.get("exceptions")))
    if trace.world_size is None:
        trace.notes.append(f"{path}: reports {header.world_size} ranks for the job, which is not a valid number")
    is_cut = file.end is None or trace.ending.reason in CUT_SHORT
    for group in file.groups:
        if group.ranks is not None and not _are_members(group.ranks, trace.world_size):
            trace.problems.append(f"the ranks of group {group.pg[:60]!r} are not ranks of the job: they are unknown")
            group = msgspec.structs.replace(group, ranks=None)
        builder.define(group)
        trace.backend = trace.backend or group.backend
    last = records[-1] if records else None
    wanted = records
    if steps is not None:
        wanted = [record for record in records if steps[0] <= record.step < steps[1]]
        others = [max(record.bytes, 0) for record in records if not steps[0] <= record.step < steps[1]]
        trace.skipped = len(others), sum(others)
        trace.until = next((clock.at(record.t) for record in records if record.step >= steps[1]), None)
    add_records(builder, wanted, clock, last.id if last is not None and is_cut else None, is_cut=is_cut)
    # The file notes up to when it is complete; files of earlier versions end with a call.
    if last is not None and is_cut:
        until = max([last.t, *(line["t"] for line in file.clocks if "t" in line)])
        if last.t < until and clock.at(until) < _MOST:
            trace.ending.taken_at = clock.at(until)
    mend(trace)
    if file.ran or file.waits:
        row_of = {identity: row for row, identity in enumerate(trace.calls.id)}
        if len(row_of) < len(trace.calls.id):
            repeated = {identity for identity, count in Counter(trace.calls.id).items() if count > 1}
            trace.problems.append(
                f"ids of several calls: {plural(len(repeated), 'id')}, whose ends and waits are unknown"
            )
            row_of = {identity: row for identity, row in row_of.items() if identity not in repeated}
        _add_times(trace, file.ran, clock, row_of)
        _add_waits(trace, file.waits, clock, row_of)
    if clock.set_by:
        trace.notes.append(
            f"{path}: its wall clock was set by {clock.set_by / 1e9:+,.3f} s while it ran; crossrank ignores that"
        )
    if file.end is None:
        trace.notes.append(f"{path}: has no last line: the process died, or still runs")
    elif "wall" in header.clock:
        # The duration of the run is unknown if the file has no end.
        ends = [line["wall"] for line in clocks if "wall" in line] + ([clock.at(last.t)] if last else [])
        trace.span = header.clock["wall"], max(ends)
    return trace


def _are_members(ranks: Sequence[int], world_size: int | None) -> bool:
    return len(set(ranks)) == len(ranks) and all(0 <= rank < (world_size or MOST_RANKS) for rank in ranks)


def _drop_doubles(trace: RankTrace, records: list[CommRecord]) -> None:
    """Drop the calls that the file has twice, in place."""
    ids = {record.id for record in records}
    if len(ids) == len(records):
        return
    kept: dict[int, list[CommRecord]] = {}
    doubled = []
    for row, record in enumerate(records):
        if record in kept.setdefault(record.id, []):
            doubled.append(row)
        kept[record.id].append(record)
    for row in reversed(doubled):
        del records[row]
    if doubled:
        trace.problems.append(f"{plural(len(doubled), 'call')} that the file has twice: counted once")


def _profiler_steps(steps: Sequence[tuple[int, int]], edges: Sequence[int]) -> frozenset[int]:
    """Return the steps that contain an edge of a window. A window is opened and closed between two steps, by the
    thread that counts them: it takes its time from the step that begins."""
    begins = [begin for _, begin in steps]
    places = [bisect_right(begins, moment) - 1 for moment in edges]
    return frozenset(steps[place][0] for place in places if place >= 0)


class WallClock:
    """Converts monotonic times of a process to ns since 1970, from moments at which both clocks were read.

    Between two moments the offset is interpolated, because the clocks drift: NTP slews a clock by at most 500 ppm. A
    larger difference means that the wall clock was set; that change is ignored.
    """

    def __init__(self, moments: Iterable[dict[str, int]], *, starts: bool = False) -> None:
        """`starts`: nothing was noted before the first moment. That of a dump comes after its calls."""
        self._starts = starts
        self._times: list[int] = []
        self._offsets: list[int] = []
        self.set_by = 0
        """ns by which the wall clock was set while the process ran, in total."""
        for moment in moments:
            t, wall = moment.get("t"), moment.get("wall")
            if t is None or wall is None or (self._times and t <= self._times[-1]):
                continue
            offset = wall - t - self.set_by
            if self._times and abs(offset - self._offsets[-1]) > _MOST_DRIFT * (t - self._times[-1]) + _JITTER:
                self.set_by += offset - self._offsets[-1]
                offset = self._offsets[-1]
            self._times.append(t)
            self._offsets.append(offset)

    def is_possible(self, t: int) -> bool:
        """Return whether the process can have noted this time: not before its start, or long after the last moment."""
        times = self._times
        return not times or not (
            (self._starts and t < times[0] - _BEFORE) or (len(times) > 1 and t > times[-1] + _AFTER)
        )

    def at(self, t: int) -> int:
        """`t` as ns since 1970."""
        times, offsets = self._times, self._offsets
        if not times:
            return t
        place = bisect_right(times, t)
        if place in (0, len(times)):
            return t + offsets[max(place - 1, 0)]
        before, after = times[place - 1], times[place]
        return t + offsets[place - 1] + (offsets[place] - offsets[place - 1]) * (t - before) // (after - before)


_BEFORE = 10_000_000_000
_AFTER = 60_000_000_000
"""ns. A file notes its first moment before the first call, and while the process runs, one in ten seconds."""
_MOST_DRIFT = 0.001
_JITTER = 1_000_000
"""Maximum ns between reading one clock and the other."""


def _span(trace: RankTrace, one: Ran | Wait, clock: WallClock) -> tuple[int, int] | None:
    """Start and end of a wait or of a call's communication. Impossible times are counted, and None is returned."""
    began, ended = clock.at(one.t), clock.at(one.t + one.took)
    if clock.is_possible(one.t) and clock.is_possible(one.t + one.took) and 0 <= began <= ended < _MOST:
        return began, ended
    trace.unattributed[IMPOSSIBLE_TIMES] += 1
    return None


def _add_times(trace: RankTrace, ran: Sequence[Ran], clock: WallClock, row_of: Mapping[int, int]) -> None:
    """Set the times of the calls whose ends were recorded."""
    calls = trace.calls
    for one in ran:
        row = row_of.get(one.id)
        if row is not None and (span := _span(trace, one, clock)) is not None and not one.raised:
            calls.began[row], calls.ended[row] = span
            calls.state[row] = COMPLETED
            calls.took[row] = one.took if one.on_device else 0
            trace.timed_by = "flight" if one.on_device or trace.timed_by == "flight" else "work"


def _add_waits(trace: RankTrace, waits: Sequence[Wait], clock: WallClock, row_of: Mapping[int, int]) -> None:
    """Add the times of waits, and for replay, the later call before which the rank waited for each call."""
    if not waits:
        return
    calls, host, places = trace.calls, trace.host_waits, waits_of(trace)
    for wait in waits:
        row = -1 if wait.id is None else row_of.get(wait.id, -1)
        if (span := _span(trace, wait, clock)) is None:
            continue
        began, ended = span
        host.row.append(row)
        host.began.append(began)
        host.ended.append(ended)
        host.waited_in.append(READ_WAITS.index(wait.waited_in))
        # Another thread may have made calls during this wait: they come before its end.
        if row >= 0 and places.before[row] < 0 and wait.waited_in in ("wait", "wait_tensor"):
            places.before[row] = max(row + 1, bisect_right(calls.called, ended))
            places.recorded += 1


def add_records(
    builder: TraceBuilder, records: Sequence[CommRecord], clock: WallClock, last: int | None, *, is_cut: bool
) -> None:
    """Append recorded calls with times on `clock`. `last` is the id of a call that may not have returned. `is_cut`: the
    recording may end before a call finishes that the rank did not wait for."""
    trace = builder.trace
    ending, awaited, waiting = trace.ending, trace.ending.awaited, trace.ending.thread_of_call
    # A launch of NCCL may block, and is not a recorded wait.
    waits_known = trace.backend == GLOO and ending.waits is not None and ending.reason in (*ANSWERS, "SIGUSR1")
    state = []
    for row, record in enumerate(records, len(trace)):
        blocks = record.api in _BLOCKING_P2P
        unawaited = not blocks and is_p2p(record)
        may_block = record.id == last and not (blocks and waits_known)
        state.append(SCHEDULED if may_block or record.id in awaited or (is_cut and unawaited) else RETIRED)
        if record.id in waiting:
            trace.row_of_thread[waiting[record.id]] = row
        if record.id in awaited:
            trace.awaited.add(row)
        elif unawaited:
            trace.unawaited.add(row)
    is_strange = _has_strange_rank(trace)
    if strange := sum(map(is_strange, records)):
        trace.unattributed[STRANGE_RANKS] += strange
        records = [msgspec.structs.replace(one, peer=None, root=None) if is_strange(one) else one for one in records]
    called = [clock.at(record.t) if clock.is_possible(record.t) else 0 for record in records]
    if lost := called.count(0):
        trace.unattributed[IMPOSSIBLE_TIMES] += lost
    builder.add_all(records, called, state)


def _has_strange_rank(trace: RankTrace) -> Callable[[CommRecord], bool]:
    """Return a function that tells whether the peer or the root of a call is not a rank of the job."""
    ranks = range(trace.world_size or MOST_RANKS)
    return lambda one: (
        (one.peer is not None and one.peer not in ranks) or (one.root is not None and one.root not in ranks)
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _exceptions(value: object) -> list[Raised]:
    with suppress(*BROKEN):
        return msgspec.convert(value or [], list[Raised], strict=False)
    return []


def stack_of(record: CommRecord) -> tuple[Frame, ...]:
    """The source line of a record, as a stack of one frame."""
    if record.source is None:
        return ()
    name, _, line = record.source.rpartition(":")
    is_line = line.isascii() and line.isdigit() and len(line) < 10
    return (Frame(name=record.api or "(C++)", filename=name, line=int(line) if is_line else 0),)
