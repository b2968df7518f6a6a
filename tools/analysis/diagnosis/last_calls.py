"""The evidence of thousands of ranks: of their dumps what is not over and the calls before it, and only those comms
files that say more.

Who waits for whom shows in what is not over, and whether a call was due in the calls before it. A rank's own dump does
not say what is over on the others: one of them may still be in a collective that this rank left long ago, as the root
of a broadcast does. Where some rank is in an earlier one than those that were read, the dumps of its group are read
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from crossrank.comm import is_p2p
from crossrank.recording import COMMS
from crossrank.tools.analysis.diagnosis.evidence import NEWER, Evidence, Failure, failed, put_together, read_candidate
from crossrank.tools.job.groups import Members
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import FoundFile
from crossrank.tools.traces.flight_calls import SAME_TIME
from crossrank.tools.traces.growing import last_call_at
from crossrank.tools.traces.rank_trace import GLOO, RETIRED, RankTrace


def read_last_calls(
    candidates: Sequence[FoundFile],
    fleet: Fleet,
    *,
    last: int,
    named: bool = False,
) -> Evidence:
    """Read of `candidates` what is not over and the `last` calls before it."""
    dumps = [one for one in candidates if one.kind != COMMS]
    found = map_ranks(partial(read_candidate, last=last), dumps, fleet, failed=failed)
    earlier = _began_too_late([one for one in found if isinstance(one, RankTrace)])
    again = [place for place, one in enumerate(found) if id(one) in earlier]
    whole = map_ranks(read_candidate, [dumps[place] for place in again], fleet, failed=failed)
    for place, one in zip(again, whole, strict=True):
        found[place] = one
    comms = [one for one in candidates if one.kind == COMMS]
    told = _told_by_dumps(comms, _taken_at(found), fleet)
    comms = [one for one in comms if one.path not in told]
    found += map_ranks(read_candidate, comms, fleet, failed=failed)
    evidence = put_together([*dumps, *comms], found, named=named)
    if any(one.dump.left_out for one in evidence.ranks):
        evidence.notes.append(f"of every dump what is not over was read, and {last} calls before it (--last)")
    return evidence


def _taken_at(found: Sequence[RankTrace | Failure]) -> dict[int | None, int]:
    """Rank -> when its dump was taken, of dumps of ours that are as new as the newest. Of gloo's sends and receives
    they do not say enough."""
    dumps = [one for one in found if isinstance(one, RankTrace) and one.backend not in ("", GLOO)]
    taken = {one.rank: one.ending.taken_at for one in dumps if one.ending.taken_at is not None}
    newest = max(taken.values(), default=0)
    return {rank: at for rank, at in taken.items() if newest - at < NEWER}


def _told_by_dumps(comms: Sequence[FoundFile], taken: Mapping[int | None, int], fleet: Fleet) -> set[str]:
    """Paths of the comms files that say no more than the dumps of their ranks: no call was made since. None, where some
    job goes on after all of them, for then the dumps are not of its end."""
    beside = [one for one in comms if one.rank in taken and not one.problem]
    latest = max(taken.values(), default=0) + NEWER
    told = set()
    for one, at in zip(beside, map_ranks(_last_call_at, beside, fleet), strict=True):
        if at is None or at > latest:
            return set()
        if at <= taken[one.rank] + SAME_TIME:
            told.add(one.path)
    return told


def _last_call_at(file: FoundFile) -> int | None:
    """Runs in a worker."""
    try:
        return last_call_at(file.path)
    except OSError:
        return None


def _began_too_late(traces: Sequence[RankTrace]) -> set[int]:
    """The `id()` of the traces of which more can be read and that begin after a call that is open elsewhere."""
    members = Members()
    needed: dict[tuple[str, int], int] = {}
    begins: list[tuple[RankTrace, tuple[str, int], int]] = []
    for trace in traces:
        is_collective = ~np.fromiter(map(is_p2p, trace.signatures), bool, len(trace.signatures))
        calls = trace.calls
        rows = np.flatnonzero(is_collective[np.asarray(calls.signature)] & (np.asarray(calls.number) > 0))
        groups, numbers, states = (np.asarray(one)[rows] for one in (calls.group, calls.number, calls.state))
        for index in np.unique(groups):
            own, is_open = numbers[groups == index], states[groups == index] < RETIRED
            group = trace.groups[index].group
            key = group.pg, id(members.of(group))
            waits_in = int(own[is_open].min()) if is_open.any() else int(own.max()) + 1
            needed[key] = min(waits_in, needed.get(key, waits_in))
            if trace.dump.left_out:
                begins.append((trace, key, int(own.min())))
    return {id(trace) for trace, key, first in begins if first > needed[key]}
