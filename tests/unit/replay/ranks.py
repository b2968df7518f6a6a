"""What a rank of a replay runs and hands in, made by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from crossrank.replay.run.messages import Pass, RankResult
from crossrank.replay.run.program import Bound, Program

Moments = tuple[int, int, int]
"""When a call was launched, issued and completed, in ns."""


def result(rank: int, *passes: Sequence[Moments], offset: int = 0, host: str = "host") -> RankResult:
    """What a rank hands in."""

    def column(calls: Sequence[Moments], place: int) -> bytes:
        return array("q", [call[place] for call in calls]).tobytes()

    made = []
    for calls in passes:
        begins, issued, ends = (column(calls, place) for place in range(3))
        start, end = calls[0][0], calls[-1][2]
        made.append(Pass(launched=begins, issued=issued, began=begins, completed=ends, start=start, end=end))
    times: dict[str, Any] = {"offset_ns": offset, "offset_error_ns": 0, "passes": made, "cpu_s": 0.0, "late_ends": []}
    about: dict[str, Any] = {"device": "cpu", "substitutes": {}, "check": None, "versions": {"torch": "2.13.0"}}
    return RankResult(rank=rank, host=host, **times, **about)


def bound(call: int, **fields: Any) -> Bound:
    """A launch of one call that blocks and does nothing, but for what `fields` say."""
    base = {"launch": lambda: None, "waits": (), "blocking": True, "has_future": False, "holds_host": False}
    return Bound(calls=range(call, call + 1), lane="0", **(base | fields))  # type: ignore[arg-type]


def program(*launches: Bound, **fields: Any) -> Program:
    """What a rank does on the CPU, without tensors, but for what `fields` say."""
    base: dict[str, Any] = {"calls": [], "tensors": [], "substitutes": [], "groups": {}, "last_waits": (), "width": 1}
    base |= {"bound": list(launches), "device": torch.device("cpu"), "block": torch.empty(0)}
    return Program(**(base | fields))
