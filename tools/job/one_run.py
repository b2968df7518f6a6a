"""Check that the files of several ranks are from one run, for all commands that measure, replay or predict.

`diagnose` has its own check, because one rank may write several dumps: see
`crossrank.tools.analysis.diagnosis.evidence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from crossrank.tools.traces.rank_trace import RankTrace

_MAX_GAP_NS = 60_000_000_000
"""Ranks of one run overlap at least to within this gap, on clocks of different nodes."""
_FIRST_DAY_NS = 86_400_000_000_000
"""Earlier times are not from a wall clock, but from a clock that starts with the capture."""
_ADVICE = "give the files of one run"


def problems(ranks: Sequence[RankTrace]) -> Iterator[str]:
    """Yield the reasons why the ranks are not from one run. A single file without a rank becomes rank 0."""
    seen: dict[int, RankTrace] = {}
    for one in ranks:
        if one.rank is None and len(ranks) == 1:
            one.rank = 0
        if one.rank is None:
            yield f"{one.path}: its rank is neither in its name nor in its content; rename it to rank-N"
            continue
        if one.rank in seen:
            yield (
                f"{seen[one.rank].path} and {one.path} are both of rank {one.rank}; give one of them, or the "
                "folder of one run"
            )
        seen[one.rank] = one
    sizes = {one.world_size: one.path for one in ranks if one.world_size}
    if len(sizes) > 1:
        named = ", ".join(f"{path} of {size} ranks" for size, path in sorted(sizes.items()))
        yield f"the ranks are from different runs: {named}; {_ADVICE}"
    spans = [(*span, one) for one in ranks if (span := _span(one)) is not None]
    if spans:
        _, end, early = min(spans, key=lambda span: (span[1], span[2].path))
        start, _, late = max(spans, key=lambda span: (span[0], span[2].path))
        known = early.clock == late.clock and _is_whole(early) and _is_whole(late)
        if start > end + (0 if known else _MAX_GAP_NS):
            apart = f"{(start - end) / 1e9:.0f} s"
            yield f"the ranks are from different runs: {early.path} ends {apart} before {late.path} starts; {_ADVICE}"


def _is_whole(one: RankTrace) -> bool:
    """Return whether the trace has start and end of the process. Only comms files have both."""
    return one.source == "comms" and one.span is not None and bool(one.clock)


def _span(one: RankTrace) -> tuple[int, int] | None:
    """Return start and end of the rank's run or of its calls; None without a wall clock."""
    if one.source == "comms" and one.span is not None:
        return one.span
    columns = [column for column in (one.calls.called, one.calls.began) if column]
    moments = [moment for column in columns for moment in (min(column), max(column)) if moment > _FIRST_DAY_NS]
    return (min(moments), max(moments)) if moments else None
