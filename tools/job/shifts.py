"""Which call of one rank is the first of another, where both counted from the begin of what was captured.

A capture does not begin and end at the same call on all ranks: a file may have some launches more at its edges.
"""

from __future__ import annotations

import numpy as np

from crossrank.tools.job.launches import Ints

_MOST = 256
"""Calls that one rank may have more than another at one edge; more is no edge."""
_OVERLAP = 0.5
"""Share of the shorter sequence that both must have."""
_CLEARLY = 4
"""Times by which differences must vary less at one shift than at any other to decide for it."""


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
