"""Decides before which call each call is waited for, and checks that all ranks then reach their end.

If a trace has no waits, `place_waits` puts them where the callers of such calls usually wait. Ranks that wait in
another order than recorded may wait forever. So `walk` tests a placement; if it does not end, a laxer one follows.

In the walk, a collective ends when all members have made it, and a send ends when it is received. A program that ends
under these rules ends on every backend.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from crossrank.comm import CommRecord, ends_of, is_p2p
from crossrank.replay.plan.plan import UNPLACED, Plan, PlannedCall, RankPlan, launches, waited_before

_PREFETCHED = ("all_gather", "reduce_scatter")
"""Sharded training has two of these unfinished: the one in use, and the next one."""
_PREFETCHES = 2
_BLOCKING_APIS = ("send", "recv")

Key = tuple[object, ...]
Worker = tuple[int, int]
"""(rank, number of the thread)"""
Share = Callable[[Sequence[PlannedCall]], Mapping[int | None, int]]
"""Numbers the threads that make the calls of a rank, by recorded thread."""


def returns_early(record: CommRecord) -> bool:
    """Return whether the rank continued before the call ended."""
    if is_p2p(record):
        return (
            record.api not in _BLOCKING_APIS
            if record.api is not None
            else bool(record.is_async) or record.batch is not None
        )
    if not record.is_async:
        return False
    # C++ asks for a Work in every call. DDP's reducer continues early only while it reduces gradients.
    return record.api is not None or record.op == "all_reduce"


def _set_waits(calls: list[PlannedCall], must_wait: Callable[[Sequence[PlannedCall], PlannedCall], bool]) -> None:
    """Wait for unfinished calls before a call for which `must_wait` is true, and before the first call of a new
    step."""
    open_calls: list[PlannedCall] = []
    for first, end in launches(calls):
        call = calls[first]
        if open_calls and (open_calls[0].record.step != call.record.step or must_wait(open_calls, call)):
            _wait_at(first, open_calls)
            open_calls = []
        open_calls += [one for one in calls[first:end] if one.wait_before == UNPLACED]
    _wait_at(len(calls), open_calls)


def _wait_at(index: int, calls: Iterable[PlannedCall]) -> None:
    for call in calls:
        call.wait_before = index


def _wait_before_next_blocking(calls: list[PlannedCall]) -> None:
    def must_wait(open_calls: Sequence[PlannedCall], call: PlannedCall) -> bool:
        """Wait before a blocking call, and before a prefetch if `_PREFETCHES` of its kind are unfinished."""
        kind = (call.record.pg, call.record.op)
        under_way = sum((one.record.pg, one.record.op) == kind for one in open_calls)
        return call.blocking or (call.record.op in _PREFETCHED and under_way >= _PREFETCHES)

    _set_waits(calls, must_wait)


def _wait_for_p2p_at_end(calls: list[PlannedCall]) -> None:
    for call in calls:
        if call.wait_before == UNPLACED or is_p2p(call.record):
            call.wait_before, call.blocking = len(calls), False


POLICIES: dict[str | None, Callable[[list[PlannedCall]], None]] = {
    None: lambda calls: None,
    "before the next blocking call of the rank, or at the end of its step": _wait_before_next_blocking,
    "at the end of its step": lambda calls: _set_waits(calls, lambda open_calls, call: False),
    "at the end": lambda calls: _wait_at(len(calls), (one for one in calls if one.wait_before == UNPLACED)),
    "at the end, and also for all sends and receives, because some would block each other": _wait_for_p2p_at_end,
}
"""Where waits that are not recorded (`UNPLACED`) are placed -> the function that sets `wait_before` of such calls. The
first is for plans in which all waits are recorded."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How far each rank comes."""

    reached: dict[int, int]
    """Rank -> the call from which it does not return, the first one if several threads wait; the number of its calls if
    it reaches its end."""
    made: dict[int, bytearray]
    """Rank -> for each call, whether its thread made it."""
    over: dict[int, bytearray]
    """Rank -> for each call, whether it can end."""
    keys: dict[int, list[Key]]
    """Rank -> the key of each of its calls (`keys_of`)."""

    @property
    def ends(self) -> bool:
        return all(at == len(self.over[rank]) for rank, at in self.reached.items())


def place_waits(ranks: list[RankPlan], members: dict[str, list[int]]) -> tuple[str | None, Walk]:
    """Place every wait that is not recorded (`UNPLACED`), and walk through the result.

    Returns the key of `POLICIES` (None if all waits are recorded) and the walk.
    """
    for rank in ranks:
        for first, end in launches(rank.calls):
            _wait_at(end, (call for call in rank.calls[first:end] if call.blocking))
    some_unplaced = any(call.wait_before == UNPLACED for rank in ranks for call in rank.calls)
    policies = list(POLICIES.items())[some_unplaced:]
    recorded = [[(call.wait_before, call.blocking) for call in rank.calls] for rank in ranks]

    def place(policy: Callable[[list[PlannedCall]], None]) -> None:
        for rank, waits in zip(ranks, recorded, strict=True):
            for call, (wait, blocking) in zip(rank.calls, waits, strict=True):
                call.wait_before, call.blocking = wait, blocking
            policy(rank.calls)

    tried: list[tuple[str | None, Walk]] = []
    for text, policy in policies:
        place(policy)
        tried.append((text, walk(ranks, members)))
        if tried[-1][1].ends:
            return tried[-1]
    place(policies[0][1])
    return tried[0]


def number_threads(calls: Sequence[PlannedCall]) -> dict[int | None, int]:
    """Number the recorded threads, in the order of their first calls."""
    return {thread: number for number, thread in enumerate(dict.fromkeys(call.record.thread for call in calls))}


def walk(ranks: list[RankPlan], members: dict[str, list[int]], share: Share = number_threads) -> Walk:
    """Let every thread of every rank make its calls and wait as planned. Linear in the number of calls. Recorded
    threads to which `share` gives one number are one thread."""
    keys = {rank.rank: keys_of(rank) for rank in ranks}
    needed = {key: takers(key, members) for mine in keys.values() for key in mine}
    arrived: Counter[Key] = Counter()
    blocked: dict[Key, list[Worker]] = defaultdict(list)
    programs = {(rank.rank, thread): one for rank in ranks for thread, one in _programs(rank.calls, share).items()}
    at = dict.fromkeys(programs, 0)
    stuck_at: dict[Worker, int] = {}
    """Thread that waits forever -> in which call."""
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
                        del stuck_at[other]
                        todo.append(other)
            elif arrived[key] < needed[key]:
                blocked[key].append(worker)
                stuck_at[worker] = index
                break
            at[worker] += 1
    over = {rank: bytearray(arrived[key] >= needed[key] for key in mine) for rank, mine in keys.items()}
    reached = {rank.rank: len(rank.calls) for rank in ranks}
    for (rank_number, _), index in stuck_at.items():
        reached[rank_number] = min(reached[rank_number], index)
    made = {rank.rank: bytearray(len(rank.calls)) for rank in ranks}
    for worker, program in programs.items():
        for index, is_wait in program[: at[worker]]:
            made[worker[0]][index] |= not is_wait
    return Walk(reached=reached, made=made, keys=keys, over=over)


def lane_of(record: CommRecord, rank: int, pg: str) -> Key:
    """Return the lane in which a call is counted on all ranks. A lane is the collectives of a group, or the messages
    from one rank to another with one tag."""
    if is_p2p(record):
        return "p2p", pg, *ends_of(record.op, rank, record.peer), record.tag or 0
    return "collective", pg


def exchanges(plan: Plan) -> tuple[dict[int, list[Key]], dict[Key, dict[int, CommRecord]]]:
    """Return the keys of the calls of each rank, and the all_to_alls as key -> rank -> call."""
    keys = {rank.rank: keys_of(rank) for rank in plan.ranks}
    all_to_alls: dict[Key, dict[int, CommRecord]] = defaultdict(dict)
    for rank in plan.ranks:
        for call, key in zip(rank.calls, keys[rank.rank], strict=True):
            if call.record.op == "all_to_all":
                all_to_alls[key][rank.rank] = call.record
    return keys, all_to_alls


def keys_of(rank: RankPlan) -> list[Key]:
    """Return the key of each call of a rank, which is the same on all ranks: its lane and its position in it."""
    counts: Counter[Key] = Counter()
    keys: list[Key] = []
    for call in rank.calls:
        lane = lane_of(call.record, rank.rank, call.record.pg)
        keys.append((*lane, counts[lane]))
        counts[lane] += 1
    return keys


def takers(key: Key, members: dict[str, list[int]]) -> int:
    """Return how many ranks make the call with this key."""
    return 2 if key[0] == "p2p" else len(members[str(key[1])])


def _programs(calls: list[PlannedCall], share: Share) -> dict[int, list[tuple[int, bool]]]:
    """Return, by thread, its calls and waits in the order of the executor: (call, whether this is its wait)."""
    spans, numbers = launches(calls), share(calls)
    waits: list[list[int]] = [[] for _ in range(len(spans) + 1)]
    for (first, end), until in zip(spans, waited_before(calls, spans), strict=True):
        waits[until] += range(first, end)
    programs: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for (first, end), before in zip([*spans, (0, 0)], waits, strict=True):
        steps = [(other, True) for other in before] + [(index, False) for index in range(first, end)]
        for step in steps:
            programs[numbers[calls[step[0]].record.thread]].append(step)
    return programs
