"""When each call is waited for, and whether the ranks, waiting so, come to their end.

Where a trace has no waits (our records note calls alone), they are placed by what the callers of such calls do. Ranks
that wait for each other differently than they did when they were recorded may wait for ever; so every placement is
walked through first (`walk`), and one that cannot end gives way to a laxer one.

The walk takes a collective to end when all members have made it, and a send when it is received: no backend needs
less of a program that has to end on all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from crossrank.comm import CommRecord, ends_of, is_p2p
from crossrank.replay.plan.plan import UNPLACED, Plan, PlannedCall, RankPlan, launches, waited_before

_PREFETCHED = ("all_gather", "reduce_scatter")
"""What sharded training has two of under way: the one that is used, and the next one."""
_PREFETCHES = 2
_BLOCKING_APIS = ("send", "recv")

Key = tuple[object, ...]
Worker = tuple[int, int | None]
"""(rank, thread)"""


def returns_early(record: CommRecord) -> bool:
    """Whether the rank went on before the call was over."""
    if is_p2p(record):
        return (
            record.api not in _BLOCKING_APIS
            if record.api is not None
            else bool(record.is_async) or record.batch is not None
        )
    if not record.is_async:
        return False
    # C++ asks for a Work in every call; DDP's reducer goes on only while it reduces gradients.
    return record.api is not None or record.op == "all_reduce"


def _place(calls: list[PlannedCall], ends: Callable[[Sequence[PlannedCall], PlannedCall], bool]) -> None:
    """Wait for open calls before one for which `ends`, and before the first of another step."""
    open_calls: list[PlannedCall] = []
    for first, end in launches(calls):
        call = calls[first]
        if open_calls and (open_calls[0].record.step != call.record.step or ends(open_calls, call)):
            _wait_before(first, open_calls)
            open_calls = []
        open_calls += [one for one in calls[first:end] if one.wait_before == UNPLACED]
    _wait_before(len(calls), open_calls)


def _wait_before(index: int, calls: Iterable[PlannedCall]) -> None:
    for call in calls:
        call.wait_before = index


def _until_next_blocking(calls: list[PlannedCall]) -> None:
    def ends(open_calls: Sequence[PlannedCall], call: PlannedCall) -> bool:
        """Before one that blocks, and where as many of its kind are under way as a prefetching caller has."""
        kind = (call.record.pg, call.record.op)
        under_way = sum((one.record.pg, one.record.op) == kind for one in open_calls)
        return call.blocking or (call.record.op in _PREFETCHED and under_way >= _PREFETCHES)

    _place(calls, ends)


def _all_p2p_until_end(calls: list[PlannedCall]) -> None:
    for call in calls:
        if call.wait_before == UNPLACED or is_p2p(call.record):
            call.wait_before, call.blocking = len(calls), False


POLICIES: dict[str | None, Callable[[list[PlannedCall]], None]] = {
    None: lambda calls: None,
    "before the rank's next blocking call, or the end of its step": _until_next_blocking,
    "at the end of its step": lambda calls: _place(calls, lambda open_calls, call: False),
    "at the end": lambda calls: _wait_before(len(calls), (one for one in calls if one.wait_before == UNPLACED)),
    "at the end, and so are all sends and receives, for some block each other otherwise": _all_p2p_until_end,
}
"""Where waits that are not recorded (`UNPLACED`) are placed -> what sets `wait_before` of such calls. The first is for
plans of which all are recorded."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where each rank comes to."""

    reached: dict[int, int]
    """Rank -> the call it does not return from, the first where several threads do not; the number of its calls where
    it ends."""
    made: dict[int, bytearray]
    """Rank -> for each call whether it was made, up to what its thread does not return from."""
    over: dict[int, bytearray]
    """Rank -> for each call whether it can end."""
    keys: dict[int, list[Key]]
    """Rank -> what each of its calls is on all ranks (`keys_of`)."""

    @property
    def ends(self) -> bool:
        return all(at == len(self.over[rank]) for rank, at in self.reached.items())


def place_waits(ranks: list[RankPlan], members: dict[str, list[int]]) -> tuple[str | None, Walk]:
    """Place every wait that is not recorded (`UNPLACED`), and walk through the result.

    Returns how that was done, None where all waits are recorded, and the walk with it.
    """
    for rank in ranks:
        for first, end in launches(rank.calls):
            _wait_before(end, (call for call in rank.calls[first:end] if call.blocking))
    some_unplaced = any(call.wait_before == UNPLACED for rank in ranks for call in rank.calls)
    policies = list(POLICIES.items())[some_unplaced:]
    recorded = [[(call.wait_before, call.blocking) for call in rank.calls] for rank in ranks]

    def place(policy: Callable[[list[PlannedCall]], None]) -> None:
        for rank, waits in zip(ranks, recorded, strict=True):
            for call, (wait, blocking) in zip(rank.calls, waits, strict=True):
                call.wait_before, call.blocking = wait, blocking
            policy(rank.calls)

    found: list[tuple[str | None, Walk]] = []
    for text, policy in policies:
        place(policy)
        found.append((text, walk(ranks, members)))
        if found[-1][1].ends:
            return found[-1]
    place(policies[0][1])
    return found[0]


def walk(ranks: list[RankPlan], members: dict[str, list[int]]) -> Walk:
    """Let every thread of every rank make its calls and wait as its plan says. Linear in the number of calls."""
    keys = {rank.rank: keys_of(rank) for rank in ranks}
    needed = {key: takers(key, members) for mine in keys.values() for key in mine}
    arrived: Counter[Key] = Counter()
    blocked: dict[Key, list[Worker]] = defaultdict(list)
    programs = {(rank.rank, thread): one for rank in ranks for thread, one in _programs(rank.calls).items()}
    at = dict.fromkeys(programs, 0)
    stands: dict[Worker, int] = {}
    """The threads that do not return -> from which call."""
    todo = deque(programs)
    while todo:
        worker = todo.popleft()
        program, mine = programs[worker], keys[worker[0]]
        while at[worker] < len(program):
            index, is_wait = program[at[worker]]
            key = mine[index]
            if not is_wait:
                arrived[key] += 1
                if arrived[key] == needed[key]:
                    for other in blocked.pop(key, ()):
                        del stands[other]
                        todo.append(other)
            elif arrived[key] < needed[key]:
                blocked[key].append(worker)
                stands[worker] = index
                break
            at[worker] += 1
    over = {rank: bytearray(arrived[key] >= needed[key] for key in mine) for rank, mine in keys.items()}
    reached = {rank.rank: len(rank.calls) for rank in ranks}
    for (rank_number, _), index in stands.items():
        reached[rank_number] = min(reached[rank_number], index)
    made = {
        rank.rank: bytearray(
            index <= stands.get((rank.rank, call.record.thread), index) for index, call in enumerate(rank.calls)
        )
        for rank in ranks
    }
    return Walk(reached=reached, made=made, keys=keys, over=over)


def lane_of(record: CommRecord, rank: int, pg: str) -> Key:
    """What a rank's call is counted among on all ranks that take part in it: the collectives of its group, or the
    messages from one rank to another with one tag."""
    if is_p2p(record):
        return "p2p", pg, *ends_of(record.op, rank, record.peer), record.tag or 0
    return "collective", pg


def calls_by_key(plan: Plan, keys: Mapping[int, list[Key]], op: str) -> dict[Key, dict[int, CommRecord]]:
    """The calls of one operation: key -> rank -> its call."""
    found: dict[Key, dict[int, CommRecord]] = defaultdict(dict)
    for rank in plan.ranks:
        for call, key in zip(rank.calls, keys[rank.rank], strict=True):
            if call.record.op == op:
                found[key][rank.rank] = call.record
    return found


def keys_of(rank: RankPlan) -> list[Key]:
    """What each call of a rank is on all ranks: the n-th of its lane."""
    counts: Counter[Key] = Counter()
    keys: list[Key] = []
    for call in rank.calls:
        lane = lane_of(call.record, rank.rank, call.record.pg)
        keys.append((*lane, counts[lane]))
        counts[lane] += 1
    return keys


def takers(key: Key, members: dict[str, list[int]]) -> int:
    """How many ranks make the call of that key."""
    return 2 if key[0] == "p2p" else len(members[str(key[1])])


def _programs(calls: list[PlannedCall]) -> dict[int | None, list[tuple[int, bool]]]:
    """By thread: (call, whether it is waited for here) in the order in which the executor goes."""
    spans = launches(calls)
    waits: list[list[int]] = [[] for _ in range(len(spans) + 1)]
    for (first, end), until in zip(spans, waited_before(calls, spans), strict=True):
        waits[until] += range(first, end)
    programs: dict[int | None, list[tuple[int, bool]]] = defaultdict(list)
    for (first, end), before in zip([*spans, (0, 0)], waits, strict=True):
        steps = [(other, True) for other in before] + [(index, False) for index in range(first, end)]
        for step in steps:
            programs[calls[step[0]].record.thread].append(step)
    return programs
