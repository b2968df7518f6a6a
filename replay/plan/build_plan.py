"""Makes one plan from the files of all ranks: groups with one name, matching calls, waits and gaps.

A call that the replay cannot make is skipped on all ranks that take part in it, with the reason. A call that
contradicts itself or has no counterpart is an error. With `partial`, the plan skips and counts it instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

import msgspec

from crossrank.comm import Group
from crossrank.errors import CrossrankError
from crossrank.recording import FLIGHT
from crossrank.replay.plan.counterparts import CONTRADICTS_ITSELF, Rank, align, name_sources
from crossrank.replay.plan.match import mismatches
from crossrank.replay.plan.one_trace import spread
from crossrank.replay.plan.plan import (
    NOT_IN_STEPS,
    UNPLACED,
    Plan,
    PlannedCall,
    RankPlan,
    check_world_size,
    launches,
    leave_out,
    number_of,
    with_records,
)
from crossrank.replay.plan.replay_inputs import KINDS
from crossrank.replay.plan.schedule import place_waits, returns_early
from crossrank.replay.plan.shapes import BrokenError, LeftOutError, complete
from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.findings import call_text
from crossrank.tools.job.job import Job
from crossrank.tools.job.one_run import problems
from crossrank.tools.traces.rank_trace import GLOO, RankTrace, with_members

_SHOWN = 3


def build(
    sources: list[RankTrace],
    path: str,
    kind: str,
    *,
    world_size: int | None = None,
    partial: bool = False,
    one_trace: bool = False,
    may_be_silent: bool = False,
) -> Plan:
    """Return the plan of a recording. With `one_trace`, its first rank represents all.

    Raises `CrossrankError` if the files make no plan, or hold no communication and not `may_be_silent`.
    """
    if one_trace:
        sources = spread(sources[0], world_size)
    sources = list(map(with_members, sources))
    size = _decide_world_size(sources, path, world_size)
    _add_idle_ranks(sources, size)
    damage = [f"{source.path}: {problem}" for source in sources for problem in source.problems]
    damage += [
        f"{source.path}: its recorder could not keep {source.dropped} calls (TRACING_RING)"
        for source in sources
        if source.dropped
    ]
    for problem in _find_problems(sources, path, size, damage, partial):
        raise CrossrankError(problem)
    job = Job.match(sources, size)
    groups = _name_groups(job)
    ranks = [
        Rank(trace, rank, list(trace.records()), [groups.get(job.group_of[rank][local]) for local in trace.calls.group])
        for rank, trace in job.ranks.items()
    ]
    any_source = name_sources(ranks)
    broken = [problem for rank in ranks for problem in _complete_calls(rank)]
    guessed = align(ranks, broken, partial) if partial or not broken else 0
    if broken and not partial:
        raise CrossrankError(_join_problems(broken, "--partial skips such calls"))
    plans = [_make_rank_plan(rank) for rank in ranks]
    plan = Plan(
        source=path,
        kind=kind,
        world_size=size,
        damage=damage,
        groups=used_groups(plans, groups.values()),
        ranks=plans,
        notes=list(_make_notes(sources, ranks, kind, any_source, guessed)),
    )
    if broken:
        plan.notes.append(_join_problems(broken, "left out"))
    if not may_be_silent and not any(rank.calls for rank in plans):
        raise CrossrankError(_explain_empty_plan(path, kind, sources, plan))
    return plan


def settle(plan: Plan, *, partial: bool = False) -> None:
    """Place the waits of `plan` and check that its ranks fit together. Call it after the last change to the plan.

    `partial`: calls without a match were skipped already. Raises `CrossrankError` with the problems.
    """
    how, walk = place_waits(plan.ranks, {group.pg: group.ranks or [] for group in plan.groups})
    if how is not None:
        plan.notes.append(f"where no wait was recorded, the replay waits {how}")
    found = mismatches(plan, walk)
    if found:
        step = "choose others with --ops or --pgs" if partial else "--partial skips calls without a match"
        raise CrossrankError(f"the ranks do not fit together: {_join_problems(found, step)}")


def _join_problems(found: list[str], step: str) -> str:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{'; '.join(found[:_SHOWN])}{more}; {step}"


def _decide_world_size(sources: list[RankTrace], path: str, given: int | None) -> int:
    size = next((source.world_size for source in sources if source.world_size), given)
    if given not in (None, size):
        raise CrossrankError(f"--world-size {given}, but the files are of a job of {size} ranks; leave it out")
    if size is None:
        members = [rank for source in sources for one in source.groups for rank in one.group.ranks or ()]
        size = max([0, *(source.rank or 0 for source in sources), *members]) + 1
    check_world_size(size, path)
    return size


def _find_problems(sources: list[RankTrace], path: str, size: int, damage: list[str], partial: bool) -> Iterator[str]:
    """Yield the reasons why the files are not those of all ranks of one job."""
    yield from problems(sources)
    ranks = {source.rank: source.path for source in sources if source.rank is not None}
    for rank, file in ranks.items():
        if not 0 <= rank < size:
            yield f"{file}: rank {rank} is outside the job of {size} ranks; name one job's files"
    missing = rank_ranges(sorted(set(range(size)) - ranks.keys()))
    if missing:
        yield (
            f"{path}: has no file of rank {missing} of {size}; add it, or let one rank's file stand for all "
            "(--one-trace)"
        )
    if damage and not partial:
        yield _join_problems(damage, "record it again, or replay the rest with --partial")
    for owner, group in ((source.path, one.group) for source in sources for one in source.groups):
        members = group.ranks or []
        if not partial and (len(set(members)) < len(members) or not all(0 <= rank < size for rank in members)):
            yield (
                f"{owner}: group {group.pg!r} has a member twice, or outside the {size} ranks ({members[:8]}); "
                "record it again, or leave its calls out with --partial"
            )


def _add_idle_ranks(sources: list[RankTrace], size: int) -> None:
    """Add ranks without a file that have no part in the calls of others: a rank that made no call leaves no file."""
    present = {source.rank for source in sources}
    if len(present) >= size or None in present:
        return
    called = {
        rank
        for source in sources
        for index in set(source.calls.group)
        for rank in source.groups[index].group.ranks or range(size)
    }
    absent = sorted(set(range(size)) - present - called)
    if not absent or len(absent) > len(present):
        return  # too many missing ranks: files were lost, or the size is wrong
    sources += [
        RankTrace(rank=rank, path=f"(no file of rank {rank})", source=sources[0].source, world_size=size)
        for rank in absent
    ]
    sources[0].notes = [
        *sources[0].notes,
        f"rank {rank_ranges(absent)} has no file and no part in the others' calls: taken to have made none",
    ]


def _name_groups(job: Job) -> dict[int, Group]:
    """Return the plan's group by index. Each gets a unique name, since torch may use one name for different groups.

    A group without known members is in no plan. The exception is gloo's dumps, which never name the members: there, the
    ranks that called on a group are its members.
    """
    by_use = any(trace.source == FLIGHT and trace.backend == GLOO for trace in job.ranks.values())
    known = [group for group in job.groups if group.members and (by_use or not group.inferred)]
    count = Counter(group.name for group in known)
    return {
        group.index: Group(
            pg=group.name if count[group.name] == 1 else f"{group.name} of ranks {rank_ranges(group.members)}",
            size=len(group.members),
            ranks=list(group.members),
            desc=group.desc,
            backend=group.backend,
            eager=group.eager,
        )
        for group in known
    }


def _complete_calls(rank: Rank) -> Iterator[str]:
    """Complete the calls of a rank; yield the calls that contradict themselves."""
    for record, group in zip(rank.recorded, rank.groups, strict=True):
        try:
            whole = complete(record, group, rank.rank)
            rank.records.append(msgspec.structs.replace(whole, pg=group.pg if group is not None else record.pg))
        except LeftOutError as error:
            rank.records.append(str(error))
        except BrokenError as error:
            rank.records.append(CONTRADICTS_ITSELF)
            call_name = f"call {record.id} ({call_text(record.op, number_of(record))} on {record.pg!r})"
            yield f"{rank.source.path}: rank {rank.rank}, {call_name}: {error}"


def _make_rank_plan(rank: Rank) -> RankPlan:
    source, waits = rank.source, rank.source.waits
    recorded = RankPlan(rank=rank.rank, calls=[], source=source.path, is_copy=source.is_copy)
    if source.skipped != (0, 0):
        leave_out(recorded.left_out, NOT_IN_STEPS, *source.skipped)
    for row, (record, made) in enumerate(zip(rank.recorded, rank.records, strict=True)):
        before, blocking = (waits.before[row], waits.blocking[row]) if waits is not None else (-1, -1)
        recorded.calls.append(
            PlannedCall(
                record=record,
                wait_before=before,
                blocking=not returns_early(record) if blocking < 0 else bool(blocking),
                recorded_bytes=max(record.bytes, 0) if isinstance(made, str) else made.bytes,
                took_ns=source.took(row),
            )
        )
    plan = with_records(recorded, rank.records)
    for first, end in launches(plan.calls):  # one wait for all calls of a launch
        batch = plan.calls[first:end]
        if any(call.wait_before != UNPLACED for call in batch):
            latest = max(end, *(call.wait_before for call in batch))
            for call in batch:
                call.wait_before = latest
    if source.timed:
        _set_gaps(plan.calls, source, [row for row, made in enumerate(rank.records) if not isinstance(made, str)])
    return plan


def _set_gaps(calls: list[PlannedCall], source: RankTrace, rows: list[int]) -> None:
    """Set the gap before each launch, without communication that the rank waited for: the replay waits for that
    again."""
    by_thread: dict[int | None, list[tuple[int, int]]] = {}
    for span in launches(calls):
        by_thread.setdefault(calls[span[0]].record.thread, []).append(span)
    for (before, _), (first, _) in chain.from_iterable(map(pairwise, by_thread.values())):
        resumed = [_resume_time(source, rows[index], calls[index].blocking) for index in range(before, first)]
        launched, since = source.calls.called[rows[before]], max((ns for ns in resumed if ns is not None), default=0)
        now = source.calls.called[rows[first]]
        # If the launch precedes that time, another thread made it, or the clocks differ slightly.
        calls[first].gap_from_return = None not in resumed and since <= now
        calls[first].gap_ns = max(0, now - (since if calls[first].gap_from_return else launched))
        if not calls[first].gap_from_return:
            waited = (source.took(rows[index]) or 0 for index in range(before, first) if calls[index].blocking)
            calls[first].exposed_ns = max(waited, default=0)


def _resume_time(source: RankTrace, row: int, blocking: bool) -> int | None:
    """Return when the rank could continue after a call: the end of a blocking call. None if that is unknown."""
    if blocking and source.timed_by == "work" and source.calls.ended[row]:
        return source.calls.ended[row]  # the host saw the end
    returned = source.waits.returned[row] if source.waits is not None else 0
    if not returned:
        return None
    if not blocking:
        return returned
    began, took = source.calls.began[row], source.took(row)
    return max(returned, began + took) if began and took is not None else None


def used_groups(ranks: Iterable[RankPlan], groups: Iterable[Group]) -> list[Group]:
    """Return the groups that a call uses: the world first, then by size and members."""
    used = {call.record.pg for rank in ranks for call in rank.calls}
    return sorted((group for group in groups if group.pg in used), key=lambda group: (-group.size, group.ranks or []))


def _make_notes(sources: list[RankTrace], ranks: list[Rank], kind: str, any_source: int, guessed: int) -> Iterable[str]:
    for text, count in Counter(note for source in sources for note in source.notes).items():
        yield text if count == 1 else f"{text} ({count} times)"
    waits = [source.waits for source in sources if source.waits is not None and not source.is_copy]
    if lost := sum(one.without_call for one in waits):
        yield f"{lost} recorded wait(s) are for calls before the trace, and are not replayed"
    if kept := sum(one.recorded for one in waits):
        yield f"{kept} recorded wait(s) are replayed at their original position"
    if any(source.filtered for source in sources):
        yield "the recording has only calls between nodes; record with TRACING=ALL to have the others"
    if not all(source.timed for source in sources):
        yield f"{KINDS[kind]} have no times, so there are no gaps to keep"
    if any_source:
        yield f"{any_source} receive(s) from any source are replayed from a rank with an unmatched send"
    pairs = [pair for rank in ranks for pair in zip(rank.recorded, rank.records, strict=True)]
    if rootless := sum(
        recorded.root is None and not isinstance(made, str) and made.root is not None for recorded, made in pairs
    ):
        yield f"{rootless} call(s) have no recorded root; the replay uses the first rank of the group"
    if guessed:
        yield (
            f"{guessed} uneven all_to_all(s) have no recorded splits: parts were chosen that give what each rank sends "
            "and receives in total"
        )


def _explain_empty_plan(path: str, kind: str, sources: list[RankTrace], plan: Plan) -> str:
    coverage = plan.coverage()
    if not coverage.recorded_calls:
        is_filtered = any(source.filtered for source in sources)
        inside = "record with TRACING=ALL to have calls inside a node"
        tail = inside if is_filtered else "was the window long enough, and did the job communicate?"
        return f"{path}: the {KINDS[kind]} have no communication; {tail}"
    reasons = ", ".join(f"{count} for {reason}" for reason, count in coverage.reasons.items())
    return f"{path}: none of {coverage.recorded_calls} calls can be replayed ({reasons})"
