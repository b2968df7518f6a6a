"""Whether the files of several ranks are of one run: the answer for every command that measures, replays or predicts.

`diagnose` asks otherwise: a rank may leave an early and a late dump, so there two folders with the same ranks are two
runs (`crossrank.tools.analysis.diagnosis.evidence`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from crossrank.tools.traces.rank_trace import RankTrace

_APART = 60_000_000_000
"""ns between the end of one rank and the begin of another that no job has, on clocks of two machines."""
_FIRST_DAY = 86_400_000_000_000
"""A time before the second day of 1970 is no wall clock but one that starts with the capture."""
_STEP = "give the files of one run"


def problems(ranks: Sequence[RankTrace]) -> Iterator[str]:
    """Why the ranks are not those of one run, each reason once. A single file that names no rank becomes rank 0."""
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
        yield f"the ranks are from different runs: {named}; {_STEP}"
    spans = [(*span, one) for one in ranks if (span := _span(one)) is not None]
    if spans:
        _, end, early = min(spans, key=lambda span: (span[1], span[2].path))
        start, _, late = max(spans, key=lambda span: (span[0], span[2].path))
        known = early.clock == late.clock and _is_whole(early) and _is_whole(late)
        if start > end + (0 if known else _APART):
            apart = f"{(start - end) / 1e9:.0f} s"
            yield f"the ranks are from different runs: {early.path} ends {apart} before {late.path} begins; {_STEP}"


def _is_whole(one: RankTrace) -> bool:
    """Whether its span is that of the process: a comms file has both ends, other traces say when they began at most."""
    return one.source == "comms" and one.span is not None and bool(one.clock)


def _span(one: RankTrace) -> tuple[int, int] | None:
    """From when to when the rank ran, or called; None where it has no wall clock."""
    if one.source == "comms" and one.span is not None:
        return one.span
    columns = [column for column in (one.calls.called, one.calls.began) if column]
    moments = [moment for column in columns for moment in (min(column), max(column)) if moment > _FIRST_DAY]
    return (min(moments), max(moments)) if moments else None
