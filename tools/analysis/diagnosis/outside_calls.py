"""Find ranks that wait in something else than a recorded call: for a new group, a file lock or the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from crossrank.recording import ANSWERS
from crossrank.tools.analysis.diagnosis.findings import call_text, late_text, rank_text, ranks_by
from crossrank.tools.analysis.diagnosis.job_state import ends_unknown
from crossrank.tools.analysis.diagnosis.mismatches import MISSING
from crossrank.tools.analysis.diagnosis.search import Search, finding_of, finding_on
from crossrank.tools.analysis.diagnosis.stacks import place_of_call
from crossrank.tools.analysis.diagnosis.states import (
    IDLE,
    RUNS,
    STOPPED,
    may_wake,
    members_in_making,
    name_in_making,
    polls_only,
    state_of,
    waits_for_key,
    waits_for_lock,
    way_out,
)
from crossrank.tools.traces.ending import Ending


def find_unrecorded_waits(search: Search) -> None:
    """Find ranks that wait outside of calls: for example, for a new group or a key of the store.

    A group that is made waits for all its members. Ranks that make different groups at the same place of their order
    wait for each other. So do ranks that make a group, and members that wait for them in a call. In all other cases,
    the files do not show which rank they wait for; if exactly one rank does not wait, it is the culprit.
    """
    waiting, silent, ranks = search.waiting_unrecorded, search.silent, search.job.ranks
    if not waiting or search.roots:
        return
    making = {rank: one for rank in sorted(waiting) if (one := members_in_making(ranks[rank].ending)) is not None}
    whats = {rank: f"{_members_text(one)}{_place_text(ranks[rank].ending)}" for rank, one in making.items()}
    ranks_of = sorted(ranks_by(whats).items(), key=_by_size)
    members = {rank: set(one or search.job.world) for rank, one in making.items()}
    silent = silent.intersection(set().union(*members.values())) if making else silent
    culprits = silent.intersection(*members.values()) if making or len(silent) == 1 else set()
    stuck = [op for op in search.left() if op.awaited & (waiting | silent)]
    kind, proof = (MISSING, "late") if silent else ("opposite_order", "not_known")
    text = f"{rank_text(waiting)} waits inside torch.distributed, but not in a call; for example, it creates a group"
    states = [state_of(ranks[rank]) for rank in sorted(waiting)]
    if all(waits_for_key(ranks[rank].ending) for rank in waiting):
        text = late_text(states, which="")
    if not making:
        text += "".join(f"; {rank_text(op.waiting)} waits in {call_text(op.op, op.seq)}" for op in stuck)
        if not silent and len({one.place for one in states}) == 1:  # few went past it
            in_calls = {rank for op in stuck for rank in op.waiting}
            culprits = in_calls if len(in_calls) < len(waiting) else set()
    if making:
        text = "; ".join(f"{rank_text(those)} makes a group of {members}" for members, those in ranks_of)
        text += "".join(f"; {rank_text(op.waiting)} waits in {call_text(op.op, op.seq)}" for op in stuck)
    made = {rank: ranks[rank].ending.groups_made for rank in members}
    same = len({frozenset(those) for those in members.values()}) == 1
    if _differ(members, made):
        kind, proof = "opposite_order", "mismatch"
        culprits = set(ranks_of[-1][1]) if len(ranks_of) == 2 and len(ranks_of[0][1]) > len(ranks_of[1][1]) else set()
    elif same and None not in made.values() and len(set(made.values())) > 1:
        # They make one group, and have not made as many before: a rank has left another one out.
        proof = "mismatch"
        usual, many = Counter(made.values()).most_common(1)[0]
        odd = {rank for rank, count in made.items() if count != usual}
        culprits = odd if many > len(odd) else set()
    elif making and not silent:
        in_calls = {rank for op in stuck for rank in op.waiting if op.awaited & making.keys()}
        closed = in_calls and all(those <= in_calls | making.keys() for those in members.values())
        those_waiting = [ranks[rank].ending for rank in in_calls | making.keys()]
        if closed and not any(map(way_out, those_waiting)):
            proof = "late" if any(map(may_wake, those_waiting)) else "deadlock"
        owing = in_calls.intersection(*members.values())
        if proof != "not_known" and same and len(owing) < len(making):  # few went past it
            culprits = owing
            text += f"; {rank_text(owing)} made another call where most ranks make this group"
    finding = finding_on(
        search.world,
        kind,
        culprit_ranks=sorted(culprits),
        waiting_ranks=sorted(waiting.union(*(op.waiting for op in stuck)) - culprits),
        text=text + (f"; {rank_text(silent)} does not wait" if silent else ""),
        proof=proof,
        late_ranks=[state_of(ranks[rank]) for rank in sorted(culprits & silent)],
    )
    search.add_root(finding, stuck)


def find_crossed_groups(search: Search) -> None:
    """Find ranks that made their process groups in different orders.

    torch numbers the groups that `new_group` makes, on every rank, and the members of one number find each other by it.
    So a number with different members on two ranks is two groups, whose ranks talk to each other.
    """
    by_name: dict[str, dict[tuple[int, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    stuck: set[str] = set()
    ranks, left = search.job.ranks, list(search.left())
    for group in search.job.groups:
        if not (group.inferred or group.apart):
            by_name[group.name][group.ranks].update(group.local_index)
            stuck |= {group.name for op in left if op.group is group}
    for rank, trace in ranks.items():
        if members := tuple(sorted(members_in_making(trace.ending) or ())):
            name = name_in_making(trace.ending)
            stuck |= {name, *(one for one, known in by_name.items() if members in known)}
            by_name[name][members].add(rank)
    crossed = (name for name in stuck if name.isdecimal() and len(by_name[name]) > 1)
    first = min(crossed, key=int, default=None)
    if first is None:
        return
    most, *others = sorted(by_name[first].items(), key=lambda one: (-len(one[1]), one[0]))
    odd = (
        {rank for _, those in others for rank in those}
        if len(most[1]) > len(others[0][1])
        else _in_all_crossings(by_name)
    )
    groups = [group for group in search.job.groups if group.name == first]
    firsts = [(rank, group.lanes[rank].rows[0]) for group in groups for rank in odd if rank in group.lanes]
    places = (place_of_call(search.job, *one, "culprit", "its first call on the group") for one in sorted(firsts))
    texts = (f"on {rank_text(those)} it has {rank_text(members)}" for members, those in (most, *others))
    finding = finding_on(
        search.world,
        "group_order",
        culprit_ranks=sorted(odd),
        waiting_ranks=sorted({rank for op in left for rank in op.waiting}.union(search.waiting_unrecorded) - odd),
        text=f"group {first} has different members: {'; '.join(texts)}",
        places=[place for place in places if place is not None],
        proof="mismatch",
    )
    search.add_root(finding, left)


def _in_all_crossings(by_name: Mapping[str, Mapping[tuple[int, ...], set[int]]]) -> set[int]:
    """Return the rank whose groups differ from those of several ranks, if no two others differ. A group of one number
    has other members there, or is missing there although it has groups of higher numbers."""
    last: dict[int, int] = defaultdict(int)
    of_rank: dict[tuple[int, int], tuple[int, ...]] = {}
    for name, sets in by_name.items():
        for members, ranks in sets.items() if name.isdecimal() else ():
            for rank in ranks:
                of_rank[rank, int(name)] = members
                last[rank] = max(last[rank], int(name))
    pairs = {
        frozenset((rank, other))
        for (rank, name), members in of_rank.items()
        for other in members
        if of_rank.get((other, name), members if last[other] <= name else ()) != members
    }
    found = set.intersection(*map(set, pairs)) if len(pairs) > 1 else set()
    return found if len(found) == 1 else set()


def _differ(members: Mapping[int, Collection[int]], made: Mapping[int, int | None]) -> bool:
    """Return whether a rank makes a group with a member that makes another group in its place. `made`: how many groups
    each rank made before."""
    return any(
        other in those and those != theirs and made[rank] == made[other]
        for rank, those in members.items()
        for other, theirs in members.items()
    )


def _members_text(members: Sequence[int]) -> str:
    return rank_text(members) if members else "all ranks"


def _place_text(ending: Ending) -> str:
    """Return which group of a rank the one that it makes is."""
    return "" if ending.groups_made is None else f" (no. {ending.groups_made + 1} on these ranks)"


def _by_size(found: tuple[str, list[int]]) -> tuple[int, list[int]]:
    return -len(found[1]), found[1]


def find_holders(search: Search) -> None:
    """Find ranks that wait in a call for ranks that wait for them in something else: for a file lock, or for data of a
    pipe or socket."""
    ranks = search.job.ranks
    for op in search.left():
        by = {rank: search.released_by(rank, op.group.name) for rank in op.absent & ranks.keys()}
        those = set().union(*by.values())
        culprits = those.intersection(op.waiting)
        # Each rank that has not come waits for one of the waiting ranks, or for another of these ranks. A rank without
        # files changes nothing: those that wait cannot come.
        if not culprits or not all(by.values()) or not those <= {*culprits, *by}:
            continue
        kind, what = "owes_data", f"data of a pipe or socket that {rank_text(culprits)} has the other end of"
        if any(waits_for_lock(ranks[rank].ending, op.group.name) for rank in by):
            kind, what = "holds_lock", f"a file lock that {rank_text(culprits)} holds"
        places = {state_of(ranks[rank], op.group.name).place for rank in by} - {""}
        text = f"{rank_text(by)} waits for {what}{''.join(f', in {place}' for place in sorted(places))}"
        # Another thread may release it, or a process that has inherited it, or a signal may end the wait.
        about = {"text": text, "waiting_ranks": sorted(by), "proof": "late"}
        search.add_root(finding_of(op, kind, culprits=culprits, **about), [op])


def find_unknown_waits(search: Search) -> None:
    """Report a silent job whose ranks have unfinished calls but no known waits."""
    unknown = {rank for rank in search.may_wait_otherwise if not search.is_known(rank)}
    if unknown and not search.roots:
        text = f"{rank_text(unknown)} has unfinished calls; whether it waits for them is unknown"
        search.add_root(finding_on(search.world, "not_recorded", text=text, proof="not_known"))


def find_standstill(search: Search) -> None:
    """Report a silent job in which no rank waits in a call, and some ranks do nothing.

    If the other ranks use little CPU time at one line, they poll, and wait in this way: for example, for a key of the
    store.
    """
    if search.roots or search.graph.blocked:
        return
    answered = {rank: one for rank, one in search.job.ranks.items() if one.ending.reason in ANSWERS}
    ranks = {rank: one for rank, one in answered.items() if not one.ending.went_on}
    states = [state_of(one) for rank, one in sorted(ranks.items()) if search.is_known(rank)]
    standing = [one for one in states if one.state in (IDLE, STOPPED)]
    activities = [one.ending.activity for one in ranks.values() if one.ending.activity is not None]
    if not standing or any(one.has_communicated for one in activities):
        return
    running = [one for one in states if one.state == RUNS]
    polls = len(running) > len(standing) and len({one.place for one in running}) == 1
    polls = polls and all(polls_only(ranks[one.rank].ending) for one in running)
    left = [state_of(one) for _, one in sorted(search.job.ranks.items()) if one.ending.ended_well]
    left = left if not running and len(left) * 2 < len(search.job.ranks) else []
    finding = finding_on(
        search.world,
        "no_progress",
        culprit_ranks=[one.rank for one in (standing if polls else left)],
        waiting_ranks=[one.rank for one in running] if polls else [],
        text=late_text([*states, *left], which=""),
        proof="late" if polls else "not_known",
        late_ranks=standing if polls else [],
    )
    search.add_root(finding)


def polling_note(search: Search) -> Iterator[str]:
    """Yield a note if no rank waits in a call, and all ranks may poll for something at one line."""
    ranks = search.job.ranks
    if search.roots or len(ranks) < 2 or len(ranks) < len(search.job.world):
        return
    if all(one.ending.reason in ANSWERS and polls_only(one.ending) for one in ranks.values()):
        places = {state_of(one).place for one in ranks.values()} - {""}
        if len(places) == 1:
            yield f"all ranks wake up now and then at one line, {places.pop()}: they may wait there for something"


def find_unknown_ends(search: Search) -> None:
    """Report a silent job in which all ranks made every call, and it is unknown which calls finished."""
    ranks = search.job.ranks
    if search.roots or search.graph.blocked or not ranks:
        return
    hung = [rank for rank, one in ranks.items() if one.ending.reason in ANSWERS and not one.ending.went_on]
    if hung and all(ends_unknown(ranks[rank]) for rank in hung):
        frozen = all(ranks[rank].dump.ends_frozen for rank in hung)
        why = (
            "torch records no ends of calls while it destroys a group"
            if frozen
            else "the dumps have no entries of torch's flight recorder"
        )
        text = f"all ranks made every recorded call; {why}, so it is unknown which calls finished"
        search.add_root(finding_on(search.world, "not_recorded", waiting_ranks=hung, text=text, proof="not_known"))
