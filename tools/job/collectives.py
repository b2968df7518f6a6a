"""All ranks side by side: which calls are one collective, how long it took, and who waited for whom.

With d the duration of a collective on a rank (its kernel, or its Work on a backend without kernels):

* `time` is that of the collective itself, from the last arrival. Where the operation releases all ranks together, the
  last to arrive waits for nobody: its duration is the shortest d, and needs no clocks to be compared. Elsewhere
  (a broadcast, a send) it is the last begin to the last end, on corrected clocks; where only durations are known,
  the longest d, an upper bound.
* `waiting` of a rank is the part of its d before the last arrival.
* algbw = S / time, busbw = algbw * factor, with S and the factor of nccl-tests (see `crossrank.comm.OPERATIONS`). Of
  an uneven all_to_all busbw is the larger of what a rank sends to others and receives from them, of the busiest
  rank, over time, as PARAM counts it.

An all_to_all with splits releases nobody together: a rank that exchanges nothing with the last to arrive has ended
before. A collective that not all members of its group were seen in, or whose members are not known, has a time that
includes waiting for the others: an upper bound, which is counted as such. So has a launch of several sends and
receives, which is a rank's own, and what is shorter than the clocks that it was measured on agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from crossrank.comm import OPERATIONS
from crossrank.tools.job.clocks import Clocks
from crossrank.tools.job.rank_times import SEND_RECV, CallKind, GroupKey

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """A process group over all ranks."""

    key: GroupKey
    members: tuple[int, ...]
    """Global ranks: as recorded, else all that used it."""
    size: int
    guessed: bool = False
    """No file tells its members or their number: those who used the name are taken."""

    @property
    def name(self) -> str:
        return self.key.pg


@dataclass
class Collectives:
    """Columns over the calls of all ranks, and columns over collectives. Times in ns, on corrected clocks."""

    groups: list[Group]
    kinds: list[CallKind]
    """Of all ranks, with the groups by their index in `groups`."""
    ranks: list[int]
    """Ranks that were read, ascending."""
    world_size: int
    clocks: Clocks
    # One row per call and rank.
    rank: Ints
    kind: Ints
    id: Ints
    step: Ints
    called: Ints
    """0 = not known; so are `began` and `ended`."""
    began: Ints
    ended: Ints
    collective: Ints
    """Index of the collective that the call is part of."""
    waiting: Ints
    """-1 = not known."""
    comparable: Bools
    """Its begin and end are on the common clock."""
    # One row per collective.
    of_kind: Ints
    """Kind on its first rank."""
    number: Ints
    bytes: Ints
    """S of nccl-tests; the largest of its ranks'."""
    moved: Ints
    """-1 where the bus factor tells it."""
    seen: Ints
    """Ranks with times."""
    expected: Ints
    time: Ints
    """-1 = not known."""
    bound: Bools
    """`time` is an upper bound."""
    last_rank: Ints
    """Who arrived last; -1 = not known."""
    shift: dict[int, int] = field(default_factory=dict)
    """Rank -> what was added to its times to have them on the common clock."""
    told: dict[str, int] = field(default_factory=dict)
    """What was left out or could not be compared, and why -> calls."""

    @property
    def timed(self) -> Bools:
        return self.time >= 0

    @property
    def calls(self) -> Ints:
        """Calls that each row stands for: one, or those of a launch."""
        return np.array([kind.calls for kind in self.kinds] or [0], np.int64)[self.kind]

    @property
    def unsized_calls(self) -> Ints:
        """`calls` of the rows of which not all bytes are known, 0 of the others."""
        sized = np.array([kind.sized for kind in self.kinds] or [True])[self.kind]
        calls: Ints = np.where(sized, 0, self.calls)
        return calls

    @property
    def unsized(self) -> Bools:
        """Collectives of which no rank says the bytes."""
        sized = np.array([kind.sized for kind in self.kinds] or [True])[self.of_kind]
        unsized: Bools = ~sized & (self.bytes == 0)
        return unsized

    def busbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        factors = np.array([_factor(kind, self.groups[kind.group].size) for kind in self.kinds] or [np.nan])
        factor = factors[self.of_kind]
        rate: Floats = self.algbw() * factor
        own = np.flatnonzero((self.moved >= 0) & (self.time > 0) & ~np.isnan(factor))
        rate[own] = np.where(self.moved[own] > 0, self.moved[own] / self.time[own], np.nan)
        return rate

    def algbw(self) -> Floats:
        """GB/s (1e9 bytes) by collective; NaN where none can be given."""
        rate = np.full(len(self.time), np.nan)
        whole = np.array([kind.whole for kind in self.kinds] or [True])[self.of_kind]
        usable = (self.time > 0) & (self.bytes > 0) & whole
        rate[usable] = self.bytes[usable] / self.time[usable]
        return rate


def _factor(kind: CallKind, size: int) -> float:
    """Bus factor; NaN where a bandwidth means nothing: a barrier, a group of one, an operation that is not known."""
    if kind.op == SEND_RECV:
        return 1.0
    row = OPERATIONS.get(kind.op)
    if row is None or row.bus_factor is None or (size < 2 and not row.p2p):
        return float("nan")
    return row.bus_factor(size)
