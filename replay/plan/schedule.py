"""When each call is waited for, and whether the ranks, waiting so, come to their end.

Where a trace has no waits (our records note calls alone), they are placed by what the callers of such calls do. Ranks
that wait for each other differently than they did when they were recorded may wait for ever; so every placement is
walked through first (`walk`), and one that cannot end gives way to a laxer one.

The walk takes a collective to end when all members have made it, and a send when it is received: no backend needs
less of a program that has to end on all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossrank.comm import CommRecord, ends_of, is_p2p
from crossrank.replay.plan.plan import UNPLACED, Call, RankPlan, launches, waited_before

_PREFETCHED = ("all_gather", "reduce_scatter")
"""What sharded training has two of under way: the one that is used, and the next one."""
_PREFETCHES = 2
_BLOCKING_APIS = ("send", "recv")

Key = tuple[object, ...]


@dataclass(frozen=True)
class Policy:
    """Where waits that are not recorded are placed."""

    text: str
    place: Callable[[list[Call]], None]
    """Sets `wait_before` of calls that have none (`UNPLACED`)."""


def returns_early(record: CommRecord) -> bool:
    """Whether the rank went on before the call was over."""
    if is_p2p(record):
        return record.api not in _BLOCKING_APIS if record.api is not None else bool(record.is_async or record.batch)
    if record.op == "barrier" or not record.is_async:
        return False
    # C++ asks for a Work in every call; DDP's reducer goes on only while it reduces gradients.
    return record.api is not None or record.op == "all_reduce"


def _until_next_blocking(calls: list[Call]) -> None:
    _place(calls, lambda open_calls, call: call.blocking or _enough(calls, open_calls, call))


def _until_step(calls: list[Call]) -> None:
    _place(calls, lambda open_calls, call: False)


def _until_end(calls: list[Call]) -> None:
    for call in calls:
        if call.wait_before == UNPLACED:
            call.wait_before = len(calls)


def _all_p2p_until_end(calls: list[Call]) -> None:
    for call in calls:
        if call.wait_before == UNPLACED or is_p2p(call.record):
            call.wait_before, call.blocking = len(calls), False


def _enough(calls: list[Call], open_calls: Sequence[int], call: Call) -> bool:
    """Whether as many of the call's kind are under way as a prefetching caller has."""
    record = call.record
    if record.op not in _PREFETCHED:
        return False
    same = sum(1 for at in open_calls if (calls[at].record.pg, calls[at].record.op) == (record.pg, record.op))
    return same >= _PREFETCHES


def _place(calls: list[Call], ends: Callable[[Sequence[int], Call], bool]) -> None:
    """Wait for open calls before one for which `ends`, and before the first of another step."""
    open_calls: list[int] = []
    for first, end in launches(calls):
        call = calls[first]
        step = calls[open_calls[0]].record.step if open_calls else call.record.step
        if step != call.record.step or ends(open_calls, call):
            for at in open_calls:
                calls[at].wait_before = first
            open_calls = []
        open_calls += [index for index in range(first, end) if calls[index].wait_before == UNPLACED]
    for at in open_calls:
        calls[at].wait_before = len(calls)


POLICIES = (
    Policy("before the rank's next blocking call, or the end of its step", _until_next_blocking),
    Policy("at the end of its step", _until_step),
    Policy("at the end", _until_end),
    Policy("at the end, and so are all sends and receives, for some block each other otherwise", _all_p2p_until_end),
)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where each rank comes to."""

    reached: dict[int, int]
    """Rank -> the call it does not return from; the number of its calls where it ends."""
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
            for call in rank.calls[first:end]:
                if call.blocking:
                    call.wait_before = end
    missing = any(call.wait_before == UNPLACED for rank in ranks for call in rank.calls)
    as_recorded = walk(ranks, members) if not missing else None
    if as_recorded is not None and as_recorded.ends:
        return None, as_recorded
    recorded = [[(call.wait_before, call.blocking) for call in rank.calls] for rank in ranks]

    def place(policy: Policy) -> None:
        for rank, waits in zip(ranks, recorded, strict=True):
            for call, (wait, blocking) in zip(rank.calls, waits, strict=True):
                call.wait_before, call.blocking = wait, blocking
            policy.place(rank.calls)

    best: tuple[str | None, Walk] | None = (None, as_recorded) if as_recorded is not None else None
    for policy in POLICIES:
        place(policy)
        tried = walk(ranks, members)
        if tried.ends:
            return policy.text, tried
        best = best or (policy.text, tried)
    place(POLICIES[0])
    assert best is not None
    return best


def walk(ranks: list[RankPlan], members: dict[str, list[int]]) -> Walk:
    """Let every rank make its calls and wait as its plan says. Linear in the number of calls."""
    keys = {rank.rank: keys_of(rank) for rank in ranks}
    needed: dict[Key, int] = {}
    arrived: Counter[Key] = Counter()
    blocked: dict[Key, list[int]] = defaultdict(list)
    programs = {rank.rank: _program(rank.calls) for rank in ranks}
    at = dict.fromkeys(programs, 0)
    reached = {rank.rank: len(rank.calls) for rank in ranks}
    todo = deque(programs)
    while todo:
        rank = todo.popleft()
        program, mine = programs[rank], keys[rank]
        while at[rank] < len(program):
            index, is_wait = program[at[rank]]
            key = mine[index]
            if key not in needed:
                needed[key] = 2 if key[0] == "p2p" else len(members[str(key[1])])
            if is_wait:
                if arrived[key] < needed[key]:
                    blocked[key].append(rank)
                    reached[rank] = index
                    break
            else:
                arrived[key] += 1
                if arrived[key] == needed[key]:
                    for other in blocked.pop(key, ()):
                        reached[other] = len(keys[other])
                        todo.append(other)
            at[rank] += 1
    return Walk(
        reached=reached,
        keys=keys,
        over={rank: bytearray(arrived[key] >= needed.get(key, 1) for key in mine) for rank, mine in keys.items()},
    )


def keys_of(rank: RankPlan) -> list[Key]:
    """What each call of a rank is on all ranks that take part in it: the n-th collective of a group, or the n-th
    message from one rank to another with one tag."""
    counts: Counter[Key] = Counter()
    keys: list[Key] = []
    for call in rank.calls:
        record = call.record
        lane: Key
        if is_p2p(record):
            lane = ("p2p", record.pg, *ends_of(record.op, rank.rank, record.peer), record.tag or 0)
        else:
            lane = ("collective", record.pg)
        keys.append((*lane, counts[lane]))
        counts[lane] += 1
    return keys


def _program(calls: list[Call]) -> list[tuple[int, bool]]:
    """(call, whether it is waited for here) in the order in which the executor goes."""
    spans = launches(calls)
    waits: list[list[int]] = [[] for _ in range(len(spans) + 1)]
    for (first, end), until in zip(spans, waited_before(calls, spans), strict=True):
        waits[until] += range(first, end)
    program = []
    for (first, end), before in zip(spans, waits, strict=False):
        program += [(other, True) for other in before]
        program += [(index, False) for index in range(first, end)]
    program += [(other, True) for other in waits[-1]]
    return program
