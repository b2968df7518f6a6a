"""What a replay measured, as collectives: `replay.csv` has every call of every rank, `replay.json` the groups.

A replay has compared its ranks on one clock already: its times and waits, medians over the passes, are taken over.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from crossrank.atomic_file import join
from crossrank.comm import MOST_RANKS, Int, ends_of
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import Damage, list_recording, read_chunks
from crossrank.text import from_csv_text
from crossrank.tools.job.clocks import Clocks
from crossrank.tools.job.collectives import Collectives
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.launches import TIMED_BY, CallKind
from crossrank.tools.traces.rank_trace import RankTrace
from crossrank.tools.traces.replayed import CSV, JSON

_LONGEST_US = 1e12


class _Row(msgspec.Struct):
    pg: str
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]


class _Replay(msgspec.Struct):
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    clock_error_us: float
    rows: list[_Row]


class _Call(msgspec.Struct):
    rank: Int
    call: Int
    op: str
    pg: str
    bytes: Int
    completion_us_p50: float
    waiting_us_p50: float
    time_us_p50: float
    has_rate: bool = True
    """Whether its bytes and its time belong together: not in a batch, nor where only a wait tells the end."""
    seq: Int = 0
    peer: Int | None = None
    source: str | None = None


def is_replay(path: str) -> bool:
    """Whether a folder holds what a replay wrote, and no recording."""
    try:
        listing = list_recording(path)
    except CrossrankError:
        return False
    return {CSV, JSON} <= set(listing.foreign) and not listing.files


def read_replay(path: str) -> tuple[list[RankTrace], Collectives]:
    """The calls in the folder of a replay. Raises `CrossrankError` where its files are damaged."""
    try:
        head = msgspec.json.decode(_content(join(path, JSON)), type=_Replay)
        lines = csv.DictReader(io.StringIO(_content(join(path, CSV)).decode()))
        given = [{name: from_csv_text(value) for name, value in line.items() if value and name} for line in lines]
        calls = msgspec.convert(given, list[_Call], strict=False)
    except (*BROKEN, csv.Error) as error:
        raise CrossrankError(
            f"{path}: {CSV} and {JSON} are not what a replay writes ({one_line(error)}); replay anew"
        ) from error
    for call in calls:
        measured = (call.completion_us_p50, call.waiting_us_p50, call.time_us_p50)
        if not (
            all(0 <= time < _LONGEST_US for time in measured)
            and 0 <= call.rank < head.world_size <= MOST_RANKS
            and all(0 <= number < 1 << 50 for number in (call.bytes, call.seq, call.call))
        ):
            raise CrossrankError(
                f"{path}: {CSV}, rank {call.rank}, call {call.call}: has numbers that cannot be; replay anew"
            )
    if not calls:
        raise CrossrankError(f"{path}: {CSV} has no call; replay anew")
    sizes = {row.pg: row.ranks for row in head.rows}
    times = []
    for rank in sorted({call.rank for call in calls}):
        times.append(RankTrace(rank=rank, path=join(path, CSV), source="replay", timed_by="replay"))
    return times, _collectives(calls, sizes, head)


def _content(path: str) -> bytes:
    damage = Damage(path)
    content = b"".join(read_chunks(path, damage))
    if damage.problems:
        raise CrossrankError(f"{path}: {damage.problems[0]}; replay anew")
    return content


def _collectives(calls: Sequence[_Call], sizes: dict[str, int], head: _Replay) -> Collectives:
    names = list(dict.fromkeys(call.pg for call in calls))
    members = {name: sorted({call.rank for call in calls if call.pg == name}) for name in names}
    groups = [
        ProcessGroup(index, name, "", tuple(members[name]), sizes.get(name, len(members[name])))
        for index, name in enumerate(names)
    ]
    kinds: dict[CallKind, int] = {}
    keys: dict[object, int] = {}
    columns: dict[str, list[int]] = {name: [] for name in ("kind", "collective", "waiting", "ended")}
    first: list[_Call] = []
    for call in calls:
        ends = None if call.peer is None else ends_of(call.op, call.rank, call.peer)
        kind = CallKind(
            op=call.op,
            group=names.index(call.pg),
            bytes=call.bytes,
            moved=-1,
            ends=ends,
            root=None,
            source=call.source,
            locality="unknown",
            calls=1,
        )
        number = keys.setdefault((call.pg, ends, call.seq), len(keys))
        if number == len(first):
            first.append(call)
        columns["kind"].append(kinds.setdefault(kind, len(kinds)))
        columns["collective"].append(number)
        columns["waiting"].append(round(call.waiting_us_p50 * 1000))
        columns["ended"].append(round(call.completion_us_p50 * 1000))
    kind_of, collective, waiting, ended = (np.array(column, np.int64) for column in columns.values())
    ordered = list(kinds)
    seen = np.bincount(collective, minlength=len(first)).astype(np.int64)
    nothing = np.zeros(len(calls), np.int64)
    of_kind = np.zeros(len(first), np.int64)
    of_kind[collective[::-1]] = kind_of[::-1]
    largest = np.zeros(len(first), np.int64)
    np.maximum.at(largest, collective, np.array([call.bytes for call in calls], np.int64))
    expected = [2 if ordered[kind].ends is not None else groups[ordered[kind].group].size for kind in of_kind.tolist()]
    return Collectives(
        groups=groups,
        kinds=ordered,
        ranks=sorted({call.rank for call in calls}),
        world_size=head.world_size,
        clocks=Clocks(count=1, note=f"one clock, measured by the replay to {head.clock_error_us:.1f} us"),
        rank=np.array([call.rank for call in calls], np.int64),
        kind=kind_of,
        id=np.array([call.call for call in calls], np.int64),
        step=nothing,
        called=nothing,
        began=nothing,
        ended=np.maximum(ended, 1),
        collective=collective,
        waiting=waiting,
        comparable=np.zeros(len(calls), bool),
        of_kind=of_kind,
        number=np.array([call.seq for call in first], np.int64),
        bytes=largest,
        moved=np.full(len(first), -1, np.int64),
        seen=seen,
        expected=np.array(expected, np.int64),
        time=np.array([round(call.time_us_p50 * 1000) for call in first], np.int64),
        bound=(seen < np.array(expected)) | ~np.array([call.has_rate for call in first]),
        last_rank=np.full(len(first), -1, np.int64),
        attributed=Counter({TIMED_BY["replay"]: len(calls)}),
    )
