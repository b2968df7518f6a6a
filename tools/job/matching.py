"""Join calls of different ranks into collectives and P2P transfers.

A lane is the calls of one group, or of one sender and receiver. Calls of a lane with the same number are joined.

If a file has no numbers, crossrank counts the calls. That is wrong if files start at different calls, so it checks
the result: calls of one collective have the same operation, root and size, and none ends before another starts. If a
lane has too many contradictions, its calls are not joined. If ranks have different numbers of calls, because captures
start and end at different calls, `shift_between` aligns them. Calls that are not joined are counted, with the reason.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl

from crossrank.comm import OPERATIONS
from crossrank.tools.job.launches import CallKind, Launches, of_collectives
from crossrank.tools.traces.busy import Ints
from crossrank.tools.traces.rank_trace import Interned

_MAX_CONTRADICTIONS = 0.05
"""Counted numbers with a larger share of contradictions count as shifted."""
_MAX_SHIFT = 256
"""Calls that one rank may have more than another at one edge of a capture."""
_MIN_OVERLAP = 0.5
"""Share of the shorter sequence that both ranks must have."""
_MIN_RATIO = 4
"""Time differences must vary this many times less at the chosen shift than at any other."""

NO_NUMBER = "calls whose place in the order of their group is unknown: not matched across ranks"
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
    "root": pl.Int64,
    "meaning": pl.UInt32,
}
_COUNTED, _APART = pl.col("counted"), pl.col("apart")


def match_calls(found: Launches, unmatched: Counter[str]) -> pl.DataFrame:
    """Return the launches with three more columns: `collective`, a number from 0; `apart`, whether the launch is not
    joined with others; `lane`. Adds the reasons for calls that are not joined to `unmatched`, with their number."""
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
    calls = _exclude(calls, pl.col("number").is_null() & ~_APART, NO_NUMBER, unmatched)
    if calls["counted"].any() and (unlike := _unlike_counts(calls)).any():
        calls, at_edge, unlike = _renumber_shifted(calls, unlike, kinds["meaning"])
        calls = _exclude(calls, at_edge, AT_EDGE, unmatched)
        calls = _exclude(calls, unlike, UNLIKE_COUNTS, unmatched)
    return _exclude_unlike_calls(_exclude_doubles(_join(calls), unmatched), kinds, unmatched)


def _join(calls: pl.DataFrame) -> pl.DataFrame:
    """Set `collective`: one per lane and number; one for each launch that is `apart`."""
    span = int(calls.select(pl.max("number")).item() or 0) + 1
    key = pl.col("lane").cast(pl.Int64) * span + pl.col("number")
    key = pl.when(_APART).then(-1 - pl.int_range(pl.len())).otherwise(key)
    keys = calls.select(key).to_series()
    return calls.with_columns(keys.unique().sort().search_sorted(keys).cast(pl.UInt32).alias("collective"))


def _exclude_doubles(calls: pl.DataFrame, unmatched: Counter[str]) -> pl.DataFrame:
    """Exclude collectives in which one rank has two calls, after a group was created again under its old name: it is
    unknown which calls belong together."""
    most = int(calls.select(pl.max("rank")).item() or 0) + 1
    one_rank = pl.col("collective").cast(pl.Int64) * most + pl.col("rank")
    made = np.sort(calls.select(one_rank).to_series().to_numpy())
    double = np.unique(made[1:][made[1:] == made[:-1]] // most)
    if not len(double):
        return calls
    return _join(_exclude(calls, pl.col("collective").is_in(double.tolist()), TWICE, unmatched))


def _exclude(calls: pl.DataFrame, out: pl.Series | pl.Expr, why: str, unmatched: Counter[str]) -> pl.DataFrame:
    """Mark calls as `apart` and count them. Call `_join` afterwards."""
    before = int(calls["apart"].sum())
    calls = calls.with_columns(apart=_APART | out)
    if left_out := int(calls["apart"].sum()) - before:
        unmatched[why] += left_out
    return calls


def _on_bad_lanes(checked: pl.Expr, is_bad: pl.Expr) -> pl.Expr:
    """Select calls with counted numbers on lanes with too many bad calls among the `checked` ones."""
    bad, count = ((one & checked).sum().over("lane") for one in (is_bad, pl.lit(True)))
    return (bad > _MAX_CONTRADICTIONS * count) & _COUNTED & ~_APART


def part_lanes(calls: pl.DataFrame, usable: pl.Expr, slack_ns: float, unmatched: Counter[str]) -> pl.DataFrame:
    """Exclude lanes with counted numbers in which a collective ends on one rank before another rank starts it.

    The column `shift` aligns the clocks to within `slack_ns`. Only `usable` calls are checked.
    """
    if not calls["counted"].any():
        return calls
    checked = usable & ~_APART
    begin, end = (pl.when(checked).then(pl.col(name) + pl.col("shift")) for name in ("began_ns", "ended_ns"))
    is_bad = begin.max().over("collective") > end.min().over("collective") + slack_ns
    judged = calls.with_columns(bad=is_bad.fill_null(value=False), checked=checked)
    parted = _exclude(judged, _on_bad_lanes(pl.col("checked"), pl.col("bad")), SHIFTED, unmatched)
    return calls if parted["apart"].equals(calls["apart"]) else _join(parted.drop("bad", "checked"))


def _renumber_shifted(
    calls: pl.DataFrame, unlike: pl.Series, meaning: pl.Series
) -> tuple[pl.DataFrame, pl.Series, pl.Series]:
    """Renumber lanes whose ranks start at different calls.

    Returns (the calls, whether each is missing on other ranks, whether each is still `unlike`). On each lane the ranks
    are aligned to the rank with the fewest calls.
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
    """Return the index in `other` of the first call of the shorter `what`, negative if `other` lacks it; None if the
    shift is ambiguous.

    Equal numbers in `what` and `other` may be one collective. `when` and `other_when` are ns, 0 = unknown. Criteria:

    1. the calls themselves;
    2. their times, if the clocks agree to less than half the time between calls;
    3. the variation of the time differences, which needs no aligned clocks.
    """
    more = len(other) - len(what)
    if more > _MAX_SHIFT or len(what) == 0:
        return None
    least = max(1, int(len(what) * _MIN_OVERLAP))
    fitting = []
    for shift in range(max(-_MAX_SHIFT, least - len(what)), min(more + _MAX_SHIFT, len(other) - least) + 1):
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
    return fitting[best][0] if len(gaps[best]) > 2 and _MIN_RATIO * vary[best] < others.min() else None


def _operation(kind: CallKind) -> str:
    return kind.label.partition(",")[0]


def _agreed_size(kind: CallKind) -> int | None:
    """Return the size that must be equal on all ranks of a collective; None if sizes may differ."""
    row = OPERATIONS.get(kind.op)
    agrees = kind.calls == 1 and row is not None and row.agrees != "none" and not row.p2p
    return kind.bytes or None if agrees else None


def _exclude_unlike_calls(calls: pl.DataFrame, kinds: pl.DataFrame, unmatched: Counter[str]) -> pl.DataFrame:
    """Exclude collectives whose ranks differ in operation, size or root: a fault of the job, or shifted numbers."""
    differ = [pl.min(name) != pl.max(name) for name in ("operation", "agreed", "root")]
    unlike = of_collectives(calls, kinds, unlike=pl.any_horizontal(differ)).filter("unlike")
    if not len(unlike):
        return calls
    calls = calls.with_columns(unlike=pl.col("collective").is_in(unlike["collective"].to_list()))
    calls = _exclude(calls, _on_bad_lanes(~_APART, pl.col("unlike")), SHIFTED, unmatched)
    calls = _exclude(calls, pl.col("unlike"), DISAGREE, unmatched)
    return _join(calls.drop("unlike"))


def _unlike_counts(calls: pl.DataFrame) -> pl.Series:
    """Select calls with counted numbers on lanes whose ranks have different numbers of calls."""
    counted = _COUNTED & ~_APART
    counts = calls.filter(counted).group_by("lane", "rank").len()
    differ = counts.group_by("lane").agg(differ=pl.min("len") < pl.max("len")).filter("differ")
    return calls.select(counted & pl.col("lane").is_in(differ["lane"].to_list())).to_series()
