"""Which calls of different ranks are one collective.

Calls are joined by group, for sends and receives by their two ends as well, and number. Where files have no numbers
they were counted, which goes wrong if files begin at different calls: so what is joined is checked. Calls of one
collective agree in operation, root and size, and none ends before another has begun. Where ranks have different
numbers of calls, for a capture does not begin and end at the same call on all ranks, `shift_between` finds which call
of one is the first of the other. A lane (the calls of one group, or of one pair) with counted numbers on which too
many contradict is not joined at all, and what is not joined is counted.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl

from crossrank.comm import OPERATIONS
from crossrank.tools.job.launches import CallKind, Launches, of_collectives
from crossrank.tools.traces.busy import Ints
from crossrank.tools.traces.rank_trace import Interned

_OFTEN = 0.05
"""Share of contradictions above which counted numbers are taken to be shifted."""
_MOST = 256
"""Calls that one rank may have more than another at one edge; more is no edge."""
_OVERLAP = 0.5
"""Share of the shorter sequence that both must have."""
_CLEARLY = 4
"""Times by which differences must vary less at one shift than at any other to decide for it."""

NO_NUMBER = "calls without a number: not matched across ranks"
UNLIKE_COUNTS = "calls on groups whose ranks have different numbers of calls: not matched across ranks"
AT_EDGE = "calls at the start or end of a capture that other ranks of the group do not have"
SHIFTED = "calls that crossrank numbered by counting, and that contradict each other: not matched across ranks"
TWICE = "calls that share their number with another call of the rank: not matched across ranks"
DISAGREE = "calls whose ranks differ in operation, size or root: see crossrank diagnose"


_OF_KIND = {
    "lane": pl.UInt32,
    "apart": pl.Boolean,
    "operation": pl.UInt32,
    "agreed": pl.Int64,
    "root": pl.Int32,
    "meaning": pl.UInt32,
}
_COUNTED, _APART = pl.col("counted"), pl.col("apart")


def match_calls(found: Launches, unmatched: Counter[str]) -> pl.DataFrame:
    """The launches with the columns `collective`, counted from 0, and `apart`: it is that of one rank alone. `lane` is
    the number of what calls are numbered on, a group or the two ends of a transfer. `unmatched` gets what could not be
    joined, with the number of calls."""
    lanes, operations, meanings = Interned[object](), Interned[str](), Interned[object]()
    rows = [
        (
            lanes.number((one.group, one.ends)),
            one.is_p2p and one.ends is None,
            operations.number(_operation(one)),
            _agreed_size(one),
            one.root,
            meanings.number((_operation(one), _agreed_size(one), one.root)),
        )
        for one in found.kinds
    ]
    kinds = pl.DataFrame(rows, schema=_OF_KIND, orient="row")
    calls = found.calls.hstack(kinds.select("lane", "apart")[found.calls["kind"]])
    calls = _leave_out(calls, pl.col("number").is_null() & ~_APART, NO_NUMBER, unmatched)
    if calls["counted"].any() and (unlike := _unlike_counts(calls)).any():
        calls, at_edge, unlike = _renumber_shifted(calls, unlike, kinds["meaning"])
        calls = _leave_out(calls, at_edge, AT_EDGE, unmatched)
        calls = _leave_out(calls, unlike, UNLIKE_COUNTS, unmatched)
    return _part_unlike_calls(_without_doubles(_join(calls), unmatched), kinds, unmatched)


def _join(calls: pl.DataFrame) -> pl.DataFrame:
    """Make one collective of the calls that have a lane and a number in common, of those apart one each."""
    span = int(calls.select(pl.max("number")).item() or 0) + 1
    key = pl.col("lane").cast(pl.Int64) * span + pl.col("number")
    key = pl.when(_APART).then(-1 - pl.int_range(pl.len())).otherwise(key)
    keys = calls.select(key).to_series()
    return calls.with_columns(keys.unique().sort().search_sorted(keys).cast(pl.UInt32).alias("collective"))


def _without_doubles(calls: pl.DataFrame, unmatched: Counter[str]) -> pl.DataFrame:
    """Leave out collectives that a rank has two calls of: a group that was made anew under its old name. Nobody knows
    which of the calls belong together."""
    most = int(calls.select(pl.max("rank")).item() or 0) + 1
    one_rank = pl.col("collective").cast(pl.Int64) * most + pl.col("rank")
    made = np.sort(calls.select(one_rank).to_series().to_numpy())
    double = np.unique(made[1:][made[1:] == made[:-1]] // most)
    if not len(double):
        return calls
    return _join(_leave_out(calls, pl.col("collective").is_in(double.tolist()), TWICE, unmatched))


def _leave_out(calls: pl.DataFrame, out: pl.Series | pl.Expr, why: str, unmatched: Counter[str]) -> pl.DataFrame:
    """Take calls out of their collectives, which `_join` makes anew, and count them."""
    before = int(calls["apart"].sum())
    calls = calls.with_columns(apart=_APART | out)
    if left_out := int(calls["apart"].sum()) - before:
        unmatched[why] += left_out
    return calls


def _on_bad_lanes(looked_at: pl.Expr, is_bad: pl.Expr) -> pl.Expr:
    """Calls with counted numbers on lanes of which too many of the calls that were looked at are bad."""
    bad, count = ((one & looked_at).sum().over("lane") for one in (is_bad, pl.lit(True)))
    return (bad > _OFTEN * count) & _COUNTED & ~_APART


def part_lanes(calls: pl.DataFrame, usable: pl.Expr, slack_ns: float, unmatched: Counter[str]) -> pl.DataFrame:
    """Take apart lanes with counted numbers in which a collective ends on one rank before another has begun it.

    `shift` puts each call on one clock, to within `slack_ns`; only those that are `usable` are looked at.
    """
    if not calls["counted"].any():
        return calls
    looked_at = usable & ~_APART
    begin, end = (pl.when(looked_at).then(pl.col(name) + pl.col("shift")) for name in ("began_ns", "ended_ns"))
    is_bad = begin.max().over("collective") > end.min().over("collective") + slack_ns
    judged = calls.with_columns(bad=is_bad.fill_null(value=False), looked_at=looked_at)
    parted = _leave_out(judged, _on_bad_lanes(pl.col("looked_at"), pl.col("bad")), SHIFTED, unmatched)
    return calls if parted["apart"].equals(calls["apart"]) else _join(parted.drop("bad", "looked_at"))


def _renumber_shifted(
    calls: pl.DataFrame, unlike: pl.Series, meaning: pl.Series
) -> tuple[pl.DataFrame, pl.Series, pl.Series]:
    """Renumber the calls of lanes of which the ranks began at different calls. Returns (the calls, which of them ranks
    have beyond those of the others, which are still `unlike`).

    On each lane the rank with the fewest calls is what the others are shifted to.
    """
    number = calls["number"].fill_null(0).to_numpy().copy()
    rest, at_edge = unlike.to_numpy().copy(), np.zeros(len(calls), bool)
    moment = calls.select(pl.coalesce("ended_ns", "called_ns").fill_null(0)).to_series().to_numpy()
    what = meaning.gather(calls["kind"]).to_numpy()
    order = (
        calls.select("lane", "rank", "number")
        .with_row_index("row")
        .filter(unlike)
        .sort("lane", "rank", "number", maintain_order=True)
    )
    by_lane: dict[int, list[Ints]] = {}
    for (lane, _), part in order.group_by("lane", "rank", maintain_order=True):
        by_lane.setdefault(lane, []).append(part["row"].to_numpy())
    for of_ranks in by_lane.values():
        fewest = min(of_ranks, key=len)
        shifts = [
            0 if rows is fewest else shift_between(what[fewest], moment[fewest], what[rows], moment[rows])
            for rows in of_ranks
        ]
        known = [(rows, shift) for rows, shift in zip(of_ranks, shifts, strict=True) if shift is not None]
        if len(known) < len(shifts):
            continue
        first = max(-shift for _, shift in known)
        last = min(len(rows) - shift for rows, shift in known)
        for rows, shift in known:
            place = np.arange(len(rows)) - shift
            rest[rows] = False
            at_edge[rows] = (place < first) | (place >= last)
            number[rows] = np.where(at_edge[rows], number[rows], place - first + 1)
    renumbered = pl.when(pl.col("number").is_not_null()).then(pl.Series(number))
    return calls.with_columns(number=renumbered), pl.Series(at_edge), pl.Series(rest)


def shift_between(what: Ints, when: Ints, other: Ints, other_when: Ints) -> int | None:
    """The place in `other` of the first call of the shorter `what`, negative where `other` lacks it; None where nothing
    decides for one.

    `what` are numbers that are equal where calls may be one collective, `when` ns, 0 = not known. First the calls
    themselves decide, then their times if these are on clocks that agree to less than half of the time between calls,
    then how much the differences of times vary, for which clocks need not agree.
    """
    more = len(other) - len(what)
    if more > _MOST or len(what) == 0:
        return None
    least = max(1, int(len(what) * _OVERLAP))
    fitting = []
    for shift in range(max(-_MOST, least - len(what)), min(more + _MOST, len(other) - least) + 1):
        mine = slice(max(0, -shift), min(len(what), len(other) - shift))
        theirs = slice(mine.start + shift, mine.stop + shift)
        if np.array_equal(what[mine], other[theirs]):
            fitting.append((shift, mine, theirs))
    whole = [one for one in fitting if 0 <= one[0] <= more]
    if len(fitting) == 1 or (len(whole) == 1 and len(np.unique(what)) > 1):
        return (whole or fitting)[0][0]
    if not fitting or (when == 0).any() or (other_when == 0).any():
        return None
    gaps = [other_when[theirs] - when[mine] for _, mine, theirs in fitting]
    apart = np.array([float(np.median(np.abs(gap))) for gap in gaps])
    best = int(apart.argmin())
    if len(what) > 1 and apart[best] < float(np.median(np.diff(when))) / 2:
        return fitting[best][0]
    vary = np.array([float(np.median(np.abs(gap - np.median(gap)))) for gap in gaps])
    best = int(vary.argmin())
    others = np.delete(vary, best)
    return fitting[best][0] if len(gaps[best]) > 2 and _CLEARLY * vary[best] < others.min() else None


def _operation(kind: CallKind) -> str:
    return kind.label.partition(",")[0]


def _agreed_size(kind: CallKind) -> int | None:
    """The bytes that all ranks of a collective have alike; None where they need not."""
    row = OPERATIONS.get(kind.op)
    agrees = kind.calls == 1 and row is not None and row.agrees != "none" and not row.p2p
    return kind.bytes or None if agrees else None


def _part_unlike_calls(calls: pl.DataFrame, kinds: pl.DataFrame, unmatched: Counter[str]) -> pl.DataFrame:
    """Ranks that call different things under one number: a fault of the job, or numbers counted from elsewhere."""
    differ = [pl.min(name) != pl.max(name) for name in ("operation", "agreed", "root")]
    unlike = of_collectives(calls, kinds, unlike=pl.any_horizontal(differ)).filter("unlike")
    if not len(unlike):
        return calls
    calls = calls.with_columns(unlike=pl.col("collective").is_in(unlike["collective"].to_list()))
    calls = _leave_out(calls, _on_bad_lanes(~_APART, pl.col("unlike")), SHIFTED, unmatched)
    calls = _leave_out(calls, pl.col("unlike"), DISAGREE, unmatched)
    return _join(calls.drop("unlike"))


def _unlike_counts(calls: pl.DataFrame) -> pl.Series:
    """Calls whose numbers were counted, on lanes on which the ranks' counts differ: they began at different calls."""
    counted = _COUNTED & ~_APART
    counts = calls.filter(counted).group_by("lane", "rank").len()
    differ = counts.group_by("lane").agg(differ=pl.min("len") < pl.max("len")).filter("differ")
    return calls.select(counted & pl.col("lane").is_in(differ["lane"].to_list())).to_series()
