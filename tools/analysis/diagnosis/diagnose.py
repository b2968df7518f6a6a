"""Diagnose a job: from evidence of all ranks to a verdict."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from crossrank.recording import PROVEN, SLOW
from crossrank.tools.analysis.diagnosis import absent_ranks, outside_calls, root_causes, unequal_calls
from crossrank.tools.analysis.diagnosis.evidence import Evidence
from crossrank.tools.analysis.diagnosis.findings import (
    PROOFS,
    Diagnosis,
    Finding,
    call_text,
    late_text,
    rank_text,
    ranks_text,
)
from crossrank.tools.analysis.diagnosis.job_state import JobState, is_torchs_own
from crossrank.tools.analysis.diagnosis.log_evidence import lines_of, without_a_line
from crossrank.tools.analysis.diagnosis.mismatches import find_mismatches
from crossrank.tools.analysis.diagnosis.p2p import pair_up
from crossrank.tools.analysis.diagnosis.search import Search
from crossrank.tools.analysis.diagnosis.stacks import add_places
from crossrank.tools.analysis.diagnosis.states import MOVING
from crossrank.tools.analysis.diagnosis.stragglers import find_stragglers
from crossrank.tools.analysis.diagnosis.wait_for_graph import StuckOp, wait_for_graph
from crossrank.tools.traces.rank_trace import COMPLETED, GLOO, RETIRED, RankTrace


def diagnose(
    evidence: Evidence, *, world_size: int | None = None, allow_missing: bool = False
) -> tuple[Diagnosis, JobState]:
    """Return the diagnosis of the job that left `evidence`, and the job.

    With `allow_missing`, ranks without a dump count as ranks that made every call, and are not a fault.
    """
    job = JobState.match(evidence.ranks, world_size or evidence.world_size)
    lacking = dict.fromkeys(job.missing, "log_missing" if evidence.logs_only else "dump_missing") | evidence.unusable
    for rank, one in job.ranks.items():
        if not len(one.calls) and not one.dump.has_status and not one.dump.active_only and one.source == "flight":
            lacking[rank] = "no_entries"
    stragglers, clocks, late = find_stragglers(job)
    job.clock_offset = {int(rank): int(offset_ms * 1e6) for rank, offset_ms in clocks.offset_ms.items()}
    pairing = pair_up(job)
    graph = wait_for_graph(job, pairing)
    for op in graph.ops:
        op.absent -= lacking.keys() if allow_missing else set()
        # A call that a file has lost would look like one that its rank has not made.
        lossy = {rank for rank in op.absent.intersection(job.ranks) if _may_have_lost(job, rank, op)}
        op.absent, op.unknown = op.absent - lossy, op.unknown | lossy
    if evidence.logs_only:
        lacking = {} if evidence.log_is_cut else without_a_line(graph, lacking)
    search = Search(job, graph, pairing, {} if allow_missing else lacking)
    _find_causes(search)
    if evidence.logs_only:
        _accuse_not_all(search)
    if evidence.told and not any(root.culprit_ranks for root in search.roots if root.kind != "log_missing"):
        search.roots = evidence.told
    short = {rank for rank in job.ranks if _lost_open_calls(job, rank)}
    damaged = {rank for rank, one in job.ranks.items() if _lost_its_last_call(one)}
    for finding in search.roots:
        if (short | damaged).intersection(finding.culprit_ranks):  # the call it waits in may be lost
            finding.waiting_ranks = sorted({*finding.waiting_ranks, *finding.culprit_ranks})
            finding.culprit_ranks = []
    found = search.roots + search.consequences
    for finding in found:
        finding.backend = _backend(job, finding)
    add_places(job, graph, search.roots)
    for finding in search.roots:
        finding.lines = finding.lines or lines_of(job, finding)
    diagnosis = Diagnosis(
        verdict=_verdict(job, search.roots, logs_only=evidence.logs_only),
        proof=min((one.proof for one in search.roots), key=list(PROOFS).index, default=""),
        summary=_summary(search.roots[0]) if search.roots else "",
        world_size=len(job.world),
        ranks=sorted(job.ranks),
        suspect_ranks=(suspects := _suspects(search)),
        hosts={str(rank): job.ranks[rank].host for rank in suspects if rank in job.ranks and job.ranks[rank].host},
        findings=search.roots,
        consequences=search.consequences,
        advisory=search.in_progress + late,
        stragglers=stragglers,
        clocks=clocks,
        skipped=evidence.skipped,
        notes=[
            *evidence.notes,
            *job.outside,
            *outside_calls.polling_note(search),
            *_notes(job, found, short, damaged, lacking if allow_missing else ()),
            *(_about_logs(found) if evidence.logs_only else ()),
        ],
        counts={
            "ranks": len(job.ranks),
            "groups": len(job.groups),
            "calls": sum(len(one.calls) for one in job.ranks.values()),
            "collectives": sum(len({seq for lane in one.lanes.values() for seq in lane.numbers}) for one in job.groups),
        },
    )
    return diagnosis, job


def _accuse_not_all(search: Search) -> None:
    """Take back an exception that all ranks of a log raised: it shows a cause that they share, or one of them caused
    those of the others."""
    for root in search.roots:
        if root.kind == "raised" and len(root.culprit_ranks) > 1 and {*root.culprit_ranks} == {*search.job.world}:
            root.culprit_ranks, root.waiting_ranks = [], list(root.culprit_ranks)


def _find_causes(search: Search) -> None:
    """Run all steps. A cause that an early step finds explains faults that a later step would find."""
    root_causes.set_aside_what_just_began(search)
    unequal_calls.find_misfits(search, find_mismatches(search.job))
    unequal_calls.find_unequal_pairs(search)
    unequal_calls.find_unequal_tags(search)
    outside_calls.find_crossed_groups(search)
    root_causes.find_closed_ops(search)
    root_causes.find_cycles(search)
    outside_calls.find_holders(search)
    absent_ranks.find_silent_ranks(search)
    absent_ranks.find_stale_ranks(search)
    outside_calls.find_unrecorded_waits(search)
    absent_ranks.find_lacking_ranks(search)
    root_causes.explain_the_rest(search)
    absent_ranks.find_raised_exceptions(search)
    absent_ranks.find_unended_calls(search)
    outside_calls.find_unknown_ends(search)
    outside_calls.find_unknown_waits(search)
    outside_calls.find_standstill(search)
    # Sort roots by time: an earlier fault is more likely the cause of a later one.
    order = sorted(range(len(search.roots)), key=search.began.__getitem__)
    search.roots = [search.roots[index] for index in order]
    for finding in search.consequences:
        if finding.because_of is not None:
            finding.because_of = order.index(finding.because_of)


def _verdict(job: JobState, roots: Collection[Finding], *, logs_only: bool) -> str:
    """Return the verdict: see `Diagnosis`. Logs alone prove no job healthy."""
    if not roots:
        return "incomplete" if logs_only else "ok"
    if any(one.proof in PROVEN for one in roots):
        return "error"
    late = [one for one in roots if one.proof == "late"]
    if late:
        runs = all(one.late_ranks and all(rank.state in MOVING for rank in one.late_ranks) for one in late)
        return SLOW if runs else "error"
    failed = any(one.ending.has_failed or one.ending.has_raised for one in job.ranks.values())
    return "error" if failed else "incomplete"


def _summary(root: Finding) -> str:
    """Return who waits for whom, in a sentence."""
    call, many = call_text(root.op, root.collective_seq_id or root.p2p_seq_id), len(root.waiting_ranks) > 1
    if not root.waiting_ranks:
        return root.text
    text = f"{ranks_text(root.waiting_ranks)} {'wait' if many else 'waits'}{f' in {call}' if call else ''}"
    late = late_text(root.late_ranks)
    return f"{text} for {late}" if late else f"{text}: {root.text}"


def _suspects(search: Search) -> list[int]:
    """Return the culprits of the roots. Ranks without evidence are included only if there are no others: they may wait
    for the culprits, as their peers do."""
    accused = {rank for finding in search.roots for rank in finding.culprit_ranks}
    return sorted(accused - search.lacking.keys() or accused)


def _backend(job: JobState, finding: Finding) -> str:
    """Return the backend of the ranks of a finding, if they have the same one."""
    ranks = {*finding.culprit_ranks, *finding.waiting_ranks}.intersection(job.ranks)
    backends = {job.ranks[rank].backend for rank in ranks} - {""}
    return backends.pop() if len(backends) == 1 else ""


def _notes(
    job: JobState,
    found: Collection[Finding],
    short: Collection[int],
    damaged: Collection[int],
    missing: Collection[int],
) -> Iterator[str]:
    """Yield the assumptions of the verdict, and what could not be read."""
    if inferred := sum(group.inferred and len(group.ranks) > 0 for group in job.groups):
        yield (
            f"the dumps do not list the members of {inferred} group(s); crossrank takes the ranks that made calls on "
            "them, so it cannot see a member that made none"
        )
    if short:
        yield (
            f"{rank_text(short)} has more unfinished calls than its recorder keeps, so the call that it waits in may "
            "be lost, and it is named as no culprit; increase TORCH_FR_BUFFER_SIZE"
        )
    if damaged and found:
        yield f"the file of {rank_text(damaged)} may have lost its last call, so it is named as no culprit"
    if blind := [rank for rank, one in job.ranks.items() if _knows_no_p2p(one)]:
        yield (
            f"torch wrote the dumps of {rank_text(blind)}, on gloo: they lack sends and receives, so a rank that waits "
            "in one seems not to wait; a recording of crossrank has them"
        )
    if not found and (blind := [rank for rank, one in job.ranks.items() if is_torchs_own(one)]):
        yield (
            f"torch wrote the dumps of {rank_text(blind)}: they lack calls that wait for a new communicator, so a rank "
            "in one seems not to wait; a recording of crossrank has them"
        )
    if not found and (endless := [rank for rank, one in job.ranks.items() if _shows_no_ends(one)]):
        yield (
            f"the dumps of {rank_text(endless)} do not show ends of calls, so it is unknown whether the last calls of "
            "these ranks have finished"
        )
    if missing:
        yield (f"{rank_text(missing)} has no usable dump; crossrank assumes that it made every call (--allow-missing)")
    yield from (problem for one in job.ranks.values() for problem in one.named_problems)


def _about_logs(found: Collection[Finding]) -> Iterator[str]:
    """Yield what logs alone leave open, and what would have shown more."""
    if not found:
        yield "nothing in the logs shows a rank that keeps others waiting; this does not prove that none did"
    yield (
        "logs have no peers, roots and stacks, and nothing of a rank that prints nothing. For the next run, "
        "`crossrank.enable()` records them; without it, TORCH_FR_BUFFER_SIZE=2000 and TORCH_FR_DUMP_ON_TIMEOUT=1 "
        "(before torch 2.9: TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT) let torch leave dumps"
    )


def _shows_no_ends(trace: RankTrace) -> bool:
    """Return whether a dump of another backend than gloo has calls, and not one that has ended."""
    states = set(trace.calls.state)
    has_entries = trace.source == "flight" and not trace.dump.of_log
    return has_entries and trace.backend != GLOO and bool(states) and COMPLETED not in states


def _knows_no_p2p(trace: RankTrace) -> bool:
    """Return whether the file may lack sends and receives: a dump of torch itself, on gloo."""
    ours = trace.source == "comms" or trace.ending.taken_at is not None or trace.numbered_pairs
    return trace.backend == GLOO and not ours


def _may_have_lost(job: JobState, rank: int, op: StuckOp) -> bool:
    """Return whether the file of a rank may have had this call, in a row that cannot be read."""
    lane = op.group.lanes.get(rank)
    if op.is_p2p:
        return _lost_its_last_call(job.ranks[rank])
    return job.ranks[rank].may_lack_calls(lane.rows[-1:] if lane is not None else ())


def _lost_its_last_call(trace: RankTrace) -> bool:
    return trace.may_lack_calls(range(len(trace.calls)))


def _lost_open_calls(job: JobState, rank: int) -> bool:
    """Return whether the first unfinished call of a group is no longer in the rank's ring."""
    trace = job.ranks[rank]
    for group in job.groups if trace.backend != GLOO else ():
        lane, progress = group.lanes.get(rank), trace.dump.progress.get(group.local_index.get(rank, -1))
        if lane is None or progress is None or group.has_p2p or trace.calls.state[lane.rows[0]] >= RETIRED:
            continue
        if lane.numbers[0] > max(progress.last_completed_collective, 0) + 1:
            return True
    return False
