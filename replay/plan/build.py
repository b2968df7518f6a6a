"""Makes one plan of what the files of all ranks say: groups under one name, calls that fit together, waits, gaps.

What cannot be replayed is left out on all ranks that take part, with its reason. What contradicts itself, or has no
counterpart on another rank, is refused, unless a partial replay is wanted: then it is left out and counted as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from crossrank.comm import MOST_RANKS, CommRecord, Group, has_size
from crossrank.errors import CrossrankError
from crossrank.replay.plan.alignment import BROKEN, Rank, align, name_sources
from crossrank.replay.plan.match import mismatches
from crossrank.replay.plan.plan import NOT_IN_STEPS, UNPLACED, Call, Plan, RankPlan, launches, leave_out, number_of
from crossrank.replay.plan.schedule import place_waits, returns_early
from crossrank.replay.plan.shapes import BrokenError, LeftOutError, complete
from crossrank.replay.plan.sources import KINDS, missing_ranks
from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.findings import call_text
from crossrank.tools.graph.linking.communications import named_by_address
from crossrank.tools.traces.rank_calls import RankCalls, RecordedCall

_SHOWN = 3


def build(
    sources: list[RankCalls], path: str, kind: str, *, world_size: int | None = None, partial: bool = False
) -> Plan:
    """The plan of a recording. Raises `CrossrankError` where its files do not make one."""
    size = _world_size(sources, path, world_size)
    _add_idle_ranks(sources, size)
    any_source = name_sources(sources)
    ranks = _by_rank(sources, path, size)
    damage = _damage(sources)
    if damage and not partial:
        raise CrossrankError(_told(damage, "record it again, or replay what is left of it with --partial"))
    _refuse_different_runs(sources)
    groups, names = _groups(ranks, size, partial)
    broken: list[str] = []
    for rank in ranks:
        for index, call in enumerate(rank.source.calls):
            rank.records.append(_completed(rank, index, call, names, groups, broken))
    if broken and not partial:
        raise CrossrankError(_told(broken, "--partial leaves such calls out"))
    guessed = align(ranks, groups, names, broken, partial)
    if broken and not partial:
        raise CrossrankError(_told(broken, "--partial leaves such calls out"))
    plan = Plan(
        source=path,
        kind=kind,
        world_size=size,
        damage=damage,
        groups=[],
        ranks=[_rank_plan(rank) for rank in ranks],
    )
    plan.groups = used_groups(plan.ranks, groups.values())
    plan.notes = list(_notes(sources, plan))
    rootless = sum(
        1
        for rank in ranks
        for call, record in zip(rank.source.calls, rank.records, strict=True)
        if record is not None and record.root is not None and call.record.root is None
    )
    if any_source:
        plan.notes.append(
            f"{any_source} receive(s) from any source are made from a rank whose send has no other receive"
        )
    if rootless:
        plan.notes.append(f"{rootless} call(s) have no recorded root: the first member of their group stands in")
    if guessed:
        plan.notes.append(
            f"{guessed} uneven all_to_all(s) have no recorded splits: parts were chosen that give what each rank sends "
            "and receives in total"
        )
    if partial and broken:
        plan.notes.append(_told(broken, "left out"))
    if not any(rank.calls for rank in plan.ranks):
        raise CrossrankError(_nothing_left(path, kind, sources, plan))
    return plan


def settle(plan: Plan, *, partial: bool = False) -> None:
    """Place the waits of `plan` and see whether its ranks fit together. Called once it is as it will be run; `partial`
    says that what has no match was left out already.

    Raises `CrossrankError` with what does not fit.
    """
    how, walk = place_waits(plan.ranks, {group.pg: group.ranks or [] for group in plan.groups})
    if how is not None:
        plan.notes.append(f"waits that are not recorded are placed {how}")
    found = mismatches(plan, walk)
    if found:
        step = "choose others with --ops or --pgs" if partial else "--partial leaves out what has no match"
        raise CrossrankError(f"the ranks do not fit together: {_told(found, step)}")


def _told(found: list[str], step: str) -> str:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{'; '.join(found[:_SHOWN])}{more}; {step}"


def _world_size(sources: list[RankCalls], path: str, given: int | None) -> int:
    said = {source.world_size for source in sources if source.world_size}
    if len(said) > 1:
        raise CrossrankError(
            f"{path}: the ranks are of jobs of {', '.join(map(str, sorted(said)))} ranks; name the folder of one job"
        )
    if said and given is not None and said != {given}:
        raise CrossrankError(f"--world-size {given}, but the files are of a job of {said.pop()} ranks; leave it out")
    size = said.pop() if said else given
    if size is not None:
        if not 1 <= size <= MOST_RANKS:
            raise CrossrankError(f"{path}: {size} is no number of ranks; record it again, or give it with --world-size")
        return size
    highest = max((source.rank or 0 for source in sources), default=0)
    members = [rank for source in sources for group in source.groups for rank in group.ranks or ()]
    size = max([highest, *members], default=0) + 1
    if size > MOST_RANKS:
        raise CrossrankError(f"{path}: a group has a rank above {MOST_RANKS - 1}, which is a mistake; record it again")
    return size


def _by_rank(sources: list[RankCalls], path: str, size: int) -> list[Rank]:
    found: dict[int, Rank] = {}
    for source in sources:
        rank = source.rank if source.rank is not None else 0 if len(sources) == 1 else None
        if rank is None:
            raise CrossrankError(f"{source.path}: neither its name nor its content tells its rank; call it rank-N")
        if rank < 0:
            raise CrossrankError(f"{source.path}: rank {rank} cannot be; record it again")
        if rank in found:
            raise CrossrankError(f"{source.path} and {found[rank].source.path} are both of rank {rank}; name one job")
        if rank >= size:
            raise CrossrankError(f"{source.path}: rank {rank} is outside the job of {size} ranks; name one job's files")
        found[rank] = Rank(source=source, rank=rank)
    missing = missing_ranks(found, size)
    if missing:
        raise CrossrankError(
            f"{path}: has no file of rank {missing} of {size}; add it, or let one rank's file stand for all "
            "(--one-trace)"
        )
    return [found[rank] for rank in sorted(found)]


def _damage(sources: list[RankCalls]) -> list[str]:
    """What of the files could not be read, or was never written."""
    damage = [f"{source.path}: {problem}" for source in sources for problem in source.problems]
    return damage + [
        f"{source.path}: its recorder could not keep {source.dropped} calls (TRACING_RING)"
        for source in sources
        if source.dropped
    ]


def _add_idle_ranks(sources: list[RankCalls], size: int) -> None:
    """A rank that made no call leaves no file. It is taken to be one where no call of the others involves it."""
    present = {source.rank for source in sources}
    if len(present) >= size or None in present:
        return
    called = {
        rank
        for source in sources
        for group in source.groups
        if any(call.record.pg == group.pg for call in source.calls)
        for rank in group.ranks or range(size)
    }
    absent = sorted(set(range(size)) - present - called)
    if not absent or len(absent) > len(present):
        return  # more are missing than are there: files were lost, or the size is wrong
    sources += [
        RankCalls(path=f"(no file of rank {rank})", rank=rank, world_size=size, calls=[], groups=[]) for rank in absent
    ]
    sources[0].notes = [
        *sources[0].notes,
        f"rank {rank_ranges(absent)} has no file and no part in the others' calls: taken to have made none",
    ]


def _refuse_different_runs(sources: list[RankCalls]) -> None:
    """Runs that were over before another began are not one job, whatever their names."""
    spans = [(source.span, source) for source in sources if source.span is not None]
    if not spans:
        return
    (_, first_end), early = min(spans, key=lambda entry: entry[0][1])
    (last_start, _), late = max(spans, key=lambda entry: entry[0][0])
    if last_start > first_end:
        raise CrossrankError(
            f"{early.path} ended {(last_start - first_end) / 1e9:.0f} s before {late.path} began: they are of "
            "different runs; name the files of one"
        )


def _groups(ranks: list[Rank], size: int, partial: bool) -> tuple[dict[str, Group], dict[int, dict[str, str]]]:
    """(groups by their name in the plan, rank -> recorded name -> name in the plan).

    torch lets different ranks use one name for different groups, and old traces name groups by addresses.
    """
    said: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for rank in ranks:
        for one in rank.source.groups:
            if one.ranks and not (
                len(set(one.ranks)) == len(one.ranks) and 0 <= min(one.ranks) <= max(one.ranks) < size
            ):
                if partial:
                    continue
                raise CrossrankError(
                    f"{rank.source.path}: group {one.pg!r} has a member twice, or outside the {size} ranks "
                    f"({one.ranks[:8]}); record it again, or leave its calls out with --partial"
                )
            if one.ranks and tuple(one.ranks) not in said[one.pg]:
                said[one.pg].append(tuple(one.ranks))
    for rank in ranks:
        if rank.source.groups_by_use:
            for pg in {call.record.pg for call in rank.source.calls} - {pg for pg, members in said.items() if members}:
                users = [one.rank for one in ranks if any(call.record.pg == pg for call in one.source.calls)]
                said[pg] = [tuple(users)]
    groups: dict[str, Group] = {}
    names: dict[int, dict[str, str]] = {}
    for rank in ranks:
        mine = names[rank.rank] = {}
        addressed: Counter[tuple[int, ...]] = Counter()
        known = {group.pg: group for group in rank.source.groups}
        for pg in dict.fromkeys(call.record.pg for call in rank.source.calls):
            group = known.get(pg)
            members = tuple(group.ranks or ()) if group is not None else None
            members = members if members in said[pg] else None
            if members is None:
                of_others = [ranks_of for ranks_of in said.get(pg, ()) if rank.rank in ranks_of]
                members = of_others[0] if len(of_others) == 1 else None
            if members is None and group is not None and group.size in (0, size) and _is_world(pg, group.desc):
                members = tuple(range(size))
            if members is None:
                continue
            if named_by_address(pg):
                addressed[members] += 1
                label = f"ranks {rank_ranges(members)}" + (f" #{addressed[members]}" if addressed[members] > 1 else "")
            elif len(said[pg]) > 1:
                label = f"{pg} of ranks {rank_ranges(members)}"
            else:
                label = pg
            mine[pg] = label
            if label not in groups:
                known_as = group if group is not None else Group(pg=label, size=0)
                groups[label] = Group(
                    pg=label,
                    size=len(members),
                    ranks=list(members),
                    desc=known_as.desc,
                    backend=known_as.backend,
                    eager=known_as.eager,
                )
    return groups, names


def _is_world(pg: str, desc: str) -> bool:
    return desc in ("default_pg", "") and pg in ("0", "", "default_pg")


def _completed(
    rank: Rank,
    index: int,
    call: RecordedCall,
    names: dict[int, dict[str, str]],
    groups: dict[str, Group],
    broken: list[str],
) -> CommRecord | None:
    record = call.record
    label = names[rank.rank].get(record.pg)
    try:
        whole = complete(record, groups.get(label) if label is not None else None, rank.rank)
    except LeftOutError as error:
        rank.reasons[index] = str(error)
        return None
    except BrokenError as error:
        what = f"call {record.id} ({call_text(record.op, number_of(record))} on {record.pg!r})"
        broken.append(f"{rank.source.path}: rank {rank.rank}, {what}: {error}")
        rank.reasons[index] = BROKEN
        return None
    assert label is not None
    return msgspec.structs.replace(whole, pg=label)


def _rank_plan(rank: Rank) -> RankPlan:
    source = rank.source
    plan = RankPlan(rank=rank.rank, calls=[], source=source.path, is_copy=source.is_copy)
    kept_before = [0]
    for record in rank.records:
        kept_before.append(kept_before[-1] + (record is not None))
    if source.skipped_calls:
        leave_out(plan.left_out, NOT_IN_STEPS, source.skipped_calls, source.skipped_bytes)
    replayed: list[RecordedCall] = []
    for index, (call, record) in enumerate(zip(source.calls, rank.records, strict=True)):
        if record is None:
            leave_out(plan.left_out, rank.reasons[index], 1, max(call.record.bytes, 0), not has_size(call.record))
            continue
        mine = len(plan.calls)
        wait = (
            UNPLACED
            if call.wait_before is None
            else max(kept_before[min(call.wait_before, len(source.calls))], mine + 1)
        )
        plan.calls.append(
            Call(
                record=record,
                wait_before=wait,
                blocking=returns_early(record) is False if call.blocking is None else call.blocking,
                recorded_bytes=record.bytes,
                took_ns=call.took_ns,
            )
        )
        replayed.append(call)
    _whole_batches(plan.calls)
    if source.timed:
        _set_gaps(plan.calls, replayed, source.offset)
    return plan


def _set_gaps(calls: list[Call], recorded: list[RecordedCall], offset: int) -> None:
    """Set the time before each launch, without the communication that the rank waited for before it went on: a replay
    waits for that again. `offset` is to be taken from ns since 1970 to have the clock of the records."""
    for (before, _), (first, _) in pairwise(launches(calls)):
        went_on = [_went_on(recorded[index], calls[index].blocking, offset) for index in range(before, first)]
        launched, since = recorded[before].record.t, max((ns for ns in went_on if ns is not None), default=0)
        now = recorded[first].record.t
        # What is launched before the rank went on is of another thread, or the clocks are not quite one.
        calls[first].gap_from_return = None not in went_on and since <= now
        calls[first].gap_ns = max(0, now - (since if calls[first].gap_from_return else launched))
        if not calls[first].gap_from_return:
            waited = (recorded[index].took_ns or 0 for index in range(before, first) if calls[index].blocking)
            calls[first].exposed_ns = max(waited, default=0)


def _went_on(call: RecordedCall, blocking: bool, offset: int) -> int | None:
    """When the rank could go on after a call: of one that blocked, when it was over. None where that is not known."""
    if call.returned_ns is None or not blocking:
        return call.returned_ns
    if call.began_ns is None or call.took_ns is None:
        return None
    return max(call.returned_ns, call.began_ns + call.took_ns - offset)


def _whole_batches(calls: list[Call]) -> None:
    """Calls of one launch are waited for together."""
    for first, end in launches(calls):
        if end - first > 1 and any(calls[index].wait_before >= 0 for index in range(first, end)):
            latest = max(end, *(calls[index].wait_before for index in range(first, end)))
            for index in range(first, end):
                calls[index].wait_before = latest


def used_groups(ranks: Iterable[RankPlan], groups: Iterable[Group]) -> list[Group]:
    """Those of `groups` that a call names; the world first, then as they are used."""
    used = {call.record.pg for rank in ranks for call in rank.calls}
    return sorted((group for group in groups if group.pg in used), key=lambda group: (-group.size, group.ranks or []))


def _notes(sources: list[RankCalls], plan: Plan) -> Iterable[str]:
    for text, count in Counter(note for source in sources for note in source.notes).items():
        yield text if count == 1 else f"{text} ({count} times)"
    lost = sum(source.waits_without_call for source in sources)
    if lost:
        yield f"{lost} recorded wait(s) are for calls from before the trace and are not replayed"
    waits = sum(source.waits for source in sources)
    if waits:
        yield f"{waits} recorded wait(s) stand where they were"
    if any(source.filtered for source in sources):
        yield "the recording holds only what crosses nodes; record with TRACING=ALL to have the rest"
    if not all(source.timed for source in sources):
        yield f"{KINDS[plan.kind].what} have no times: there are no gaps to keep"


def _nothing_left(path: str, kind: str, sources: list[RankCalls], plan: Plan) -> str:
    coverage = plan.coverage()
    if not coverage.recorded_calls:
        tail = (
            "record with TRACING=ALL to have what stays inside a node"
            if any(s.filtered for s in sources)
            else ("was the window long enough, and did the job communicate?")
        )
        return f"{path}: the {KINDS[kind].what} hold no communication; {tail}"
    reasons = ", ".join(f"{count} for {reason}" for reason, count in coverage.reasons.items())
    return f"{path}: none of {coverage.recorded_calls} calls can be replayed ({reasons})"
