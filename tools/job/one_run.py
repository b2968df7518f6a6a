"""Check that the files of several ranks are from one run: the one rule of all commands that read several ranks.

`convert` and `simulate` print what does not fit, and go on. `diagnose` notes it for comms files alone: ranks of one run
may have dumps of different times, and one rank several of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from crossrank.tools.traces.rank_trace import RankTrace

_MAX_GAP_NS = 60_000_000_000
"""Ranks of one run overlap at least to within this gap, on clocks of different nodes."""
_YEAR_2000_NS = 946_684_800_000_000_000
"""Earlier times are not from a wall clock, but from a clock that starts with the capture or the machine."""
_ADVICE = "give the files of one run"


class RankFacts(NamedTuple):
    """What the files of a rank say of its run."""

    path: str
    """File or rank, for the text of a problem."""
    world_size: int | None
    span: tuple[int, int] | None
    """ns since 1970; None without a wall clock."""
    clock: str = ""
    """The clock of the span if that is from the start to the end of the process; empty if it is not."""


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
    yield from several_runs(list(map(facts_of, ranks)))


def several_runs(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yield the reasons why the ranks cannot be from one run."""
    sizes = {one.world_size: one.path for one in ranks if one.world_size}
    if len(sizes) > 1:
        named = ", ".join(f"{path} of {size} ranks" for size, path in sorted(sizes.items()))
        yield f"the ranks are from different runs: {named}; {_ADVICE}"
    spans = [(*one.span, one) for one in ranks if one.span is not None]
    if spans:
        _, end, early = min(spans, key=lambda span: (span[1], span[2].path))
        start, _, late = max(spans, key=lambda span: (span[0], span[2].path))
        if start > end + (0 if early.clock and early.clock == late.clock else _MAX_GAP_NS):
            apart = f"{(start - end) / 1e9:.0f} s"
            yield f"the ranks are from different runs: {early.path} ends {apart} before {late.path} starts; {_ADVICE}"


def facts_of(one: RankTrace) -> RankFacts:
    """Return the facts of a rank. The times are those of its process, which comms files alone have, or of its calls."""
    if one.source == "comms" and one.span is not None:
        return RankFacts(one.path, one.world_size, one.span, one.clock)
    columns = [column for column in (one.calls.called, one.calls.began) if column]
    return RankFacts(one.path, one.world_size, span_of(end for one in columns for end in (min(one), max(one))))


def span_of(times_ns: Iterable[int]) -> tuple[int, int] | None:
    """Return the first and the last time of a wall clock; None if there is none."""
    moments = [time_ns for time_ns in times_ns if time_ns > _YEAR_2000_NS]
    return (min(moments), max(moments)) if moments else None
