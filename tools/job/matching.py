"""Join calls of different ranks into collectives and P2P transfers.

A lane is the calls of one group, or of one sender and receiver. Calls of a lane with the same number are joined.

If a file has no numbers, crossrank counts the calls. That is wrong if files start at different calls or a file is
damaged. So `align` finds which calls belong together, if ranks have different numbers of calls, or if calls of one
collective differ in operation, root or size. If it does not find it, or if calls of one collective end before others of
it start, too often, the calls of the lane are not joined. Calls that are not joined are counted, with the reason.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl

from crossrank.comm import OPERATIONS
from crossrank.tools.job.alignment import LaneCalls, align
from crossrank.tools.job.launches import CallKind, Launches, of_collectives
from crossrank.tools.traces.busy import Ints
from crossrank.tools.traces.rank_trace import Interned

_NO_STEP = -1
_MAX_CONTRADICTIONS = 0.05
"""Counted numbers with a larger share of contradictions are aligned, or count as shifted."""
NO_NUMBER = "calls whose place in the order of their group is unknown: not matched across ranks"
UNLIKE_COUNTS = "calls on groups whose ranks have different numbers of calls: not matched across ranks"
MISSING = "calls that other ranks of the group lack, or that may belong to several of theirs: not matched across ranks"
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
    calls = _join(calls)
    if calls["counted"].any() and (unlike := _on_unlike_ranks(calls, kinds)).any():
        calls, excluded = _renumber(calls, unlike, kinds["meaning"])
        for reason, of_calls in excluded.items():
            calls = _exclude(calls, of_calls, reason, unmatched)
        calls = _join(calls)
    return _exclude_unlike_calls(_exclude_doubles(calls, unmatched), kinds, unmatched)


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


def _renumber(calls: pl.DataFrame, unlike: pl.Series, meaning: pl.Series) -> tuple[pl.DataFrame, dict[str, pl.Series]]:
    """Renumber the lanes whose ranks are `unlike`. Return (the calls, reason -> the calls that it excludes).

    On each lane, the ranks are aligned to one with the most common number of calls.
    """
    number, rest = calls["number"].fill_null(0).to_numpy().copy(), unlike.to_numpy().copy()
    at_edge, missing = np.zeros((2, len(calls)), bool)
    moment = calls.select(pl.coalesce("ended_ns", "called_ns").fill_null(0)).to_series().to_numpy()
    what = meaning.gather(calls["kind"]).to_numpy()
    step = calls["step"].fill_null(_NO_STEP).to_numpy()
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
        counts = Counter(map(len, of_ranks))
        reference = max(of_ranks, key=lambda rows: (counts[len(rows)], len(rows)))
        places = []
        for rows in of_ranks:
            if rows is reference:
                places.append(np.arange(len(rows)))
            else:
                mine, theirs = (LaneCalls(what[one], moment[one], step[one]) for one in (rows, reference))
                if (found := align(mine, theirs)) is not None:
                    places.append(found)
        if len(places) < len(of_ranks):
            for rows in of_ranks if len(counts) == 1 else ():
                rest[rows] = False  # they stay as they are: whether they contradict each other is checked later
            continue
        members = np.bincount(np.concatenate([place[place >= 0] for place in places]), minlength=len(reference))
        first = int(np.argmax(members > 1))
        for rows, place in zip(of_ranks, places, strict=True):
            joined = (place >= 0) & (members[place] > 1)
            inside = np.flatnonzero(joined)
            index = np.arange(len(rows))
            rest[rows], missing[rows] = False, ~joined
            at_edge[rows] = ~joined & ((index < inside[0]) | (index > inside[-1])) if len(inside) else True
            number[rows] = np.where(joined, place - first + 1, number[rows])
    renumbered = pl.when(pl.col("number").is_not_null()).then(pl.Series(number))
    excluded = {AT_EDGE: pl.Series(at_edge), MISSING: pl.Series(missing), UNLIKE_COUNTS: pl.Series(rest)}
    return calls.with_columns(number=renumbered), excluded


def _operation(kind: CallKind) -> str:
    return kind.label.partition(",")[0]


def _agreed_size(kind: CallKind) -> int | None:
    """Return the size that must be equal on all ranks of a collective; None if sizes may differ."""
    row = OPERATIONS.get(kind.op)
    agrees = kind.calls == 1 and row is not None and row.agrees != "none" and not row.p2p
    return kind.bytes or None if agrees else None


def _unlike_calls(calls: pl.DataFrame, kinds: pl.DataFrame) -> pl.Series:
    """Select calls of collectives whose ranks differ in operation, size or root. Unknown sizes and roots differ from
    none."""
    differ = [pl.min(name) != pl.max(name) for name in ("operation", "agreed", "root")]
    unlike = of_collectives(calls, kinds, unlike=pl.any_horizontal(differ)).filter("unlike")
    return calls.select(unlike=pl.col("collective").is_in(unlike["collective"].to_list())).to_series()


def _exclude_unlike_calls(calls: pl.DataFrame, kinds: pl.DataFrame, unmatched: Counter[str]) -> pl.DataFrame:
    """Exclude unlike calls: a fault of the job, or shifted numbers."""
    unlike = _unlike_calls(calls, kinds)
    if not unlike.any():
        return calls
    calls = calls.with_columns(unlike)
    calls = _exclude(calls, _on_bad_lanes(~_APART, pl.col("unlike")), SHIFTED, unmatched)
    calls = _exclude(calls, pl.col("unlike"), DISAGREE, unmatched)
    return _join(calls.drop("unlike"))


def _on_unlike_ranks(calls: pl.DataFrame, kinds: pl.DataFrame) -> pl.Series:
    """Select calls with counted numbers on lanes whose ranks have different numbers of calls, or too many unlike
    calls."""
    counted = _COUNTED & ~_APART
    counts = calls.filter(counted).group_by("lane", "rank").len()
    differ = counts.group_by("lane").agg(differ=pl.min("len") < pl.max("len")).filter("differ")
    is_bad = _on_bad_lanes(~_APART, pl.col("unlike"))
    selected = is_bad | (counted & pl.col("lane").is_in(differ["lane"].to_list()))
    return calls.with_columns(_unlike_calls(calls, kinds)).select(selected).to_series()
