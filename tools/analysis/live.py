"""The state of a running job: steps, communication, last ranks, ranks without calls.

Each update reads what was added to the ranks' comms files. Recent means the calls, waits and steps of the last `RECENT`
seconds of a rank's recording, or of a shorter time if there are very many.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from crossrank.comm import MOST_RANKS, OPERATIONS, Amount, Group, Int
from crossrank.errors import BROKEN
from crossrank.recording import Header, Ran, Wait, name_in_epoch, with_epoch
from crossrank.text import plural
from crossrank.tools.traces.growing import Growth
from crossrank.unknown_values import Decoder

if TYPE_CHECKING:
    from crossrank.tools.tables import Row

RECENT = 10.0
"""Seconds."""
_MOST_CALLS = 100_000
"""Recent calls that are kept, over all ranks."""
_LEAST_CALLS = 64
"""Recent calls that are kept at least, per rank."""
_COMPARED = 64
"""Calls of each rank that are compared with those of other ranks."""
_NS = 1e9
_GOLDEN = 0x9E3779B1
"""2**32 / golden ratio. Its multiples modulo 2**32 are spread evenly (Knuth, TAOCP 6.4)."""


class LiveLine(msgspec.Struct):
    """A line of a comms file: some fields of a record, or a line of another kind."""

    id: Int | None = None
    op: str = ""
    pg: str = ""
    epoch: Amount = 0
    bytes: Amount = 0
    t: Int = 0
    seq: Int | None = None
    header: Header | None = None
    group: Group | None = None
    step: Any = None
    wait: Wait | None = None
    ran: Ran | None = None
    clock: dict[str, Int] | None = None
    end: dict[str, Any] | None = None


_NEEDED = ("id", "seq", "epoch", "bytes", "t")
_decode_lines = msgspec.json.Decoder(LiveLine).decode_lines


class Snapshot(msgspec.Struct, kw_only=True):
    """A job at one time."""

    recording: str
    time: float
    """Seconds since 1970."""
    world_size: int | None
    missing_ranks: list[int]
    """Ranks without a file."""
    step: list[int] | None
    """The lowest and the highest step of any rank."""
    step_ms: float | None
    """Median over the ranks; so is the share."""
    exposed_share: float | None
    groups: list[Row]
    """Rows of `live_groups`."""
    ranks: list[Row]
    """Rows of `live_ranks`."""
    hang: str
    """The latest verdict that the job has written; empty if there is none."""
    notes: list[str]
    schema: str = "crossrank-watch 1"


class LiveContent:
    """The content of one rank's file so far: totals over all its lines, and the recent lines."""

    def __init__(self, most: int) -> None:
        self.header: Header | None = None
        self.groups: dict[str, Group] = {}
        self.count: Counter[str] = Counter()
        """Group -> calls; so are the bytes."""
        self.bytes: Counter[str] = Counter()
        self.calls: deque[LiveLine] = deque(maxlen=most)
        self.waits: deque[Wait] = deque(maxlen=most)
        self.took: dict[int, int] = {}
        self.on_device = False
        """Events of a device measure the durations."""
        self.steps: deque[tuple[int, int]] = deque(maxlen=1000)
        self.clock: dict[str, int] | None = None
        self.end: dict[str, Any] | None = None
        self.problems = 0

    def add(self, content: bytes) -> None:
        for line in self._decode(content):
            if line.id is not None:
                line.pg = name_in_epoch(line.pg, line.epoch)
                self.count[line.pg] += 1
                self.bytes[line.pg] += line.bytes
                self.calls.append(line)
                continue
            if line.wait is not None:
                self.waits.append(line.wait)
                continue
            if line.ran is not None and not line.ran.raised:
                self.took[line.ran.id] = line.ran.took
                self.on_device = line.ran.on_device
            elif isinstance(line.step, dict):
                self.steps.append((int(line.step.get("step", 0)), int(line.step.get("t", 0))))
            elif line.group is not None:
                group = with_epoch(line.group)
                self.groups[group.pg] = group
            self.header = line.header or self.header
            self.clock = line.clock or self.clock
            self.end = line.end or self.end

    def _decode(self, content: bytes) -> Iterator[LiveLine]:
        try:
            yield from _decode_lines(content)
        except BROKEN:
            decode = Decoder(LiveLine, Counter(), {"wait.in": "unknown"}, _NEEDED).decode
            for line in content.splitlines():
                try:
                    yield decode(line)
                except BROKEN:
                    self.problems += 1

    def trim(self, since: int) -> None:
        """Drop what was before a time on the rank's clock."""
        for times in (self.calls, self.waits):
            while times and times[0].t < since:
                times.popleft()
        while len(self.steps) > 2 and self.steps[1][1] < since:
            self.steps.popleft()
        if self.took:
            first = (self.calls[0].id or 0) if self.calls else 1 << 62
            self.took = {number: took for number, took in self.took.items() if number >= first}

    @property
    def now(self) -> int | None:
        """Return the latest time of the rank's clock in its file."""
        last = [self.calls[-1].t] if self.calls else []
        if self.clock is not None and "t" in self.clock:
            last.append(self.clock["t"])
        return max(last, default=None)

    def wall(self, t: int) -> int | None:
        """Convert a time of the rank's clock to ns since 1970."""
        moment = self.clock or (self.header.clock if self.header is not None else None)
        if not moment or "wall" not in moment or "t" not in moment:
            return None
        return t + moment["wall"] - moment["t"]

    def copied(self) -> LiveContent:
        """Return a copy that lines can be added to independently."""
        other = copy(self)
        vars(other).update({name: copy(value) for name, value in vars(self).items()})
        return other


class LiveFile:
    """The growing file of one rank."""

    def __init__(self, ranks: int) -> None:
        """`ranks` is the number of ranks that are watched."""
        self._most = max(_LEAST_CALLS, _MOST_CALLS // ranks)
        self._settled = LiveContent(self._most)
        self.content = self._settled

    def take(self, growth: Growth) -> None:
        if growth.begins_anew:
            self._settled = LiveContent(self._most)
        self._settled.add(growth.settled)
        self.content = self._settled.copied()
        self.content.add(growth.recent)
        if (now := self.content.now) is not None:
            for content in (self._settled, self.content):
                content.trim(now - round(RECENT * _NS))


def snapshot(recording: str, files: Mapping[int, LiveContent], now: float, hang: str = "") -> Snapshot:
    """Return the state of the job at `now`, s since 1970."""
    world = Counter(file.header.world_size for file in files.values() if file.header is not None)
    world_size = world.most_common(1)[0][0] if world else None
    ranks = [_rank(rank, file, now) for rank, file in sorted(files.items())]
    steps = [one["step"] for one in ranks if one["step"] is not None]
    groups = _groups(files)
    notes = []
    if apart := sum(one.lacks_durations for one in groups):
        notes.append(
            f"the last rank of {plural(apart, 'group')} is unknown: clocks of several nodes are not aligned; record "
            "with TRACING_TIMING=1, which measures durations"
        )
    if broken := sum(file.problems for file in files.values()):
        notes.append(f"{plural(broken, 'line')} of the files could not be read")
    return Snapshot(
        recording=recording,
        time=now,
        world_size=world_size,
        missing_ranks=[rank for rank in range(min(world_size or 0, MOST_RANKS)) if rank not in files],
        step=[min(steps), max(steps)] if steps else None,
        step_ms=_median(one["step_ms"] for one in ranks),
        exposed_share=_median(one["exposed_share"] for one in ranks),
        groups=sorted((one.row() for one in groups), key=lambda row: (-row["bytes"], -row["calls"], row["pg"])),
        ranks=ranks,
        hang=hang,
        notes=notes,
    )


def _rank(rank: int, file: LiveContent, now: float) -> Row:
    """Return a row of `live_ranks`."""
    last, calls, steps = file.now, file.calls, file.steps
    heard = file.wall(last) if last is not None else None
    called = file.wall(calls[-1].t) if calls else None
    ended = None if file.end is None else str(file.end.get("reason", "")) or "unknown"
    durations = [(after - before) / 1e6 for (_, before), (_, after) in pairwise(steps) if after > before]
    return {
        "rank": rank,
        "node": (file.header.node or None) if file.header is not None else None,
        "step": steps[-1][0] if steps else None,
        "step_ms": _median(durations),
        "exposed_share": _exposed(file.waits, last),
        "calls": file.count.total(),
        "silent_s": None if ended or called is None else round(max(0.0, now - called / _NS), 1),
        "unheard_s": None if ended or heard is None else round(max(0.0, now - heard / _NS), 1),
        "ended": ended,
    }


def _exposed(waits: Collection[Wait], last: int | None) -> float | None:
    """Return the share of the recent time in waits. Waits of several threads at the same time count once."""
    if not waits or last is None:
        return None
    since = max(min(wait.t for wait in waits), last - round(RECENT * _NS))
    covered, end = 0, since
    for wait in sorted(waits, key=lambda one: one.t):
        until = min(wait.t + wait.took, last)
        covered += max(0, until - max(wait.t, end))
        end = max(end, until)
    return round(covered / (last - since), 4) if last > since else None


# (name, members)
_Key = tuple[str, tuple[int, ...]]


class _Collective:
    """One collective: the members that have made it so far."""

    def __init__(self, call: LiveLine) -> None:
        self.op, self.bytes = call.op, call.bytes
        self.first, self.last, self.last_rank = 1 << 62, -1, -1
        self.members = self.timed = self.longest = 0
        self.took, self.shortest_rank = 1 << 62, -1

    def add(self, rank: int, wall: int, took: int | None) -> None:
        self.members += 1
        self.first = min(self.first, wall)
        if wall > self.last:
            self.last, self.last_rank = wall, rank
        if took:
            self.timed += 1
            self.longest = max(self.longest, took)
            if took < self.took:
                self.took, self.shortest_rank = took, rank

    @property
    def releases_all(self) -> bool:
        operation = OPERATIONS.get(self.op)
        return operation is not None and operation.releases_all


class _Group:
    """The calls of all ranks on one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.calls = self.bytes = self.recent_calls = self.recent_bytes = 0
        self.seconds = 0.0
        self.collectives: dict[int, _Collective] = {}
        self.timed: dict[int, _Collective] = {}
        self.clocks: set[str] = set()
        """Hosts with a clock of their own, of the ranks with recent calls."""
        self.on_device = False

    def add(self, rank: int, pg: str, calls: Sequence[LiveLine], file: LiveContent) -> None:
        """Add the recent calls of a rank on the group, and its totals."""
        self.calls += file.count[pg]
        self.bytes += file.bytes[pg]
        if not calls:
            return
        self.on_device |= file.on_device
        self.clocks.add("" if file.header is None else file.header.boot_id or file.header.host)
        self.recent_calls += len(calls)
        self.recent_bytes += sum(call.bytes for call in calls)
        self.seconds = max(self.seconds, (calls[-1].t - calls[0].t) / _NS)
        offset, took = file.wall(0), file.took
        if offset is None:
            return
        for call in calls[-_COMPARED:]:
            if call.seq is not None:
                made = self.collectives.get(call.seq)
                if made is None:
                    made = self.collectives[call.seq] = _Collective(call)
                made.add(rank, call.t + offset, took.get(call.id or 0))
        # Durations are written later, on a GPU by up to a second, at different times per rank. So sample all recent
        # calls, by a hash of the sequence number: ranks then choose the same calls. Every 2nd, 4th or 8th call would be
        # biased, because a step may have that many calls.
        shift = 32 - (len(calls) // _COMPARED).bit_length()
        for call in calls if took else ():
            if call.seq is None or (call.seq * _GOLDEN & 0xFFFFFFFF) >> shift:
                continue
            if ns := took.get(call.id or 0):
                timed = self.timed.setdefault(call.seq, _Collective(call))
                timed.add(rank, call.t + offset, ns)

    def _lateness(self) -> list[tuple[int, float]]:
        """Return (last rank, ms from the first rank's arrival to its own) of collectives that all members made.

        As in `crossrank.tools.job.collectives`, the rank with the shortest duration arrived last. Hosts with one clock
        that measure themselves compare the times of their calls."""
        size = self.group.size
        if len(self.clocks) > 1 or self.on_device:
            timed = [one for one in self.timed.values() if one.timed == size > 1 and one.releases_all]
            if timed or len(self.clocks) > 1:
                return [(one.shortest_rank, (one.longest - one.took) / 1e6) for one in timed]
        whole = [one for one in self.collectives.values() if one.members == size > 1]
        return [(one.last_rank, (one.last - one.first) / 1e6) for one in whole]

    @property
    def lacks_durations(self) -> bool:
        """Whether its last rank is unknown because its ranks have several clocks."""
        return len(self.clocks) > 1 and bool(self.collectives) and not self._lateness()

    def row(self) -> Row:
        """Return the row of `live_groups`."""
        group, late = self.group, self._lateness()
        last = Counter(rank for rank, _ in late).most_common(1)
        rates = []
        for one in self.timed.values():
            operation = OPERATIONS.get(one.op)
            if operation is not None and operation.bus_factor is not None and one.bytes and one.timed == group.size:
                rates.append(one.bytes * operation.bus_factor(group.size) / one.took)
        # Calls at one moment, such as a single one, have no rate.
        has_rate = bool(self.seconds) or not self.recent_calls
        per_second = 1 / self.seconds if self.seconds else 0.0
        return {
            "pg": group.pg,
            "desc": group.desc,
            "size": group.size,
            "calls": self.calls,
            "bytes": self.bytes,
            "calls_per_s": round(self.recent_calls * per_second, 1) if has_rate else None,
            "bytes_per_s": round(self.recent_bytes * per_second) if has_rate else None,
            "busbw_gb_per_s": _median(rates),
            "last_rank": last[0][0] if last else None,
            "last_share": round(last[0][1] / len(late), 4) if last else None,
            "late_ms": _median(ms for _, ms in late),
        }


def _groups(files: Mapping[int, LiveContent]) -> list[_Group]:
    """Return the groups by name and members: several groups of a job may share a name."""
    found: dict[_Key, _Group] = {}
    for rank, file in files.items():
        calls: dict[str, list[LiveLine]] = defaultdict(list)
        for call in file.calls:
            calls[call.pg].append(call)
        for pg, group in file.groups.items():
            key = pg, tuple(group.ranks or ())
            if key not in found:
                found[key] = _Group(group)
            found[key].add(rank, pg, calls[pg], file)
    return list(found.values())


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None
