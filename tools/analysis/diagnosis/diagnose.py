"""The diagnosis of a job: from evidence of all ranks to a verdict."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.causes import find_causes
from crossrank.tools.analysis.diagnosis.collectives import find_mismatches
from crossrank.tools.analysis.diagnosis.findings import LACKS_EVIDENCE, Diagnosis, Finding
from crossrank.tools.analysis.diagnosis.inputs import Evidence
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.p2p import pair_up
from crossrank.tools.analysis.diagnosis.places import add_places
from crossrank.tools.analysis.diagnosis.stragglers import find_stragglers
from crossrank.tools.analysis.diagnosis.waiting import who_waits
from crossrank.tools.traces.rank_trace import RETIRED, RankTrace


def diagnose(
    evidence: Evidence, *, world_size: int | None = None, allow_missing: bool = False
) -> tuple[Diagnosis, JobState]:
    """What is wrong with the job that left `evidence`, and the evidence side by side.

    With `allow_missing` ranks without a dump are taken to be where the others are, and are no fault by themselves.
    """
    job = JobState.match(evidence.ranks, world_size or evidence.world_size)
    lacking = dict.fromkeys(job.missing, "dump_missing")
    lacking |= {rank: kind for rank, (kind, _) in evidence.unusable.items() if rank in lacking or rank not in job.ranks}
    for rank, one in job.ranks.items():
        if not len(one.calls) and not one.dump.has_status and not one.dump.active_only and one.source == "flight":
            lacking[rank] = "no_entries"
    stragglers, clocks, late = find_stragglers(job)
    job.clock_offset = {int(rank): int(offset_ms * 1e6) for rank, offset_ms in clocks.offset_ms.items()}
    pairing = pair_up(job)
    waiting = who_waits(job, pairing)
    if allow_missing:
        for stall in waiting.stalls:
            stall.absent -= lacking.keys()
        waiting.edges = {rank: waiting.stall_of[rank].waits_for() - {rank} for rank in waiting.edges}
        missing, lacking = lacking, {}
    else:
        missing = {}
    causes = find_causes(job, waiting, pairing, find_mismatches(job), lacking)
    short = {rank for rank in job.ranks if _lost_open_calls(job, rank)}
    for finding in causes.roots:
        if short.intersection(finding.culprit_ranks):  # what it is accused by may follow from what fell out of its ring
            finding.waiting_ranks = sorted({*finding.waiting_ranks, *finding.culprit_ranks})
            finding.culprit_ranks = []
    for finding in causes.roots + causes.consequences:
        finding.backend = _backend(job, finding)
    add_places(job, waiting, causes.roots)
    verdict = "ok"
    if causes.roots or causes.consequences:
        kinds = {finding.kind for finding in causes.roots}
        failed = any(one.ending.has_failed or one.ending.has_raised for one in job.ranks.values())
        verdict = "incomplete" if kinds <= set(LACKS_EVIDENCE) and not failed else "error"
    counts = {
        "ranks": len(job.ranks),
        "groups": len(job.groups),
        "calls": sum(len(one.calls) for one in job.ranks.values()),
        "collectives": sum(len({seq for lane in group.lanes.values() for seq in lane.numbers}) for group in job.groups),
    }
    return (
        Diagnosis(
            verdict=verdict,
            world_size=len(job.world),
            ranks=sorted(job.ranks),
            suspect_ranks=sorted({rank for finding in causes.roots for rank in finding.culprit_ranks}),
            findings=causes.roots,
            consequences=causes.consequences,
            advisory=causes.in_progress + late,
            stragglers=stragglers,
            clocks=clocks,
            skipped=evidence.skipped,
            notes=evidence.notes + job.outside + list(_notes(job, short, missing)),
            counts=counts,
        ),
        job,
    )


def _backend(job: JobState, finding: Finding) -> str:
    """What the ranks of a finding communicate by, where they agree."""
    ranks = {*finding.culprit_ranks, *finding.waiting_ranks}.intersection(job.ranks)
    backends = {job.ranks[rank].backend for rank in ranks} - {""}
    return backends.pop() if len(backends) == 1 else ""


def _notes(job: JobState, short: Collection[int], missing: Collection[int]) -> Iterator[str]:
    """What the verdict rests on that is not in the dumps, and what of them could not be read."""
    inferred = [group for group in job.groups if group.inferred and len(group.ranks) > 0]
    if inferred:
        yield (
            f"the members of {len(inferred)} group(s) are not in the dumps; they are taken from who called on them "
            "(a member that never did is not seen)"
        )
    if short:
        yield (
            f"rank {rank_ranges(sorted(short))} has more calls open than its ring holds: the one that it is stuck in "
            "fell out, and it is accused of nothing. Raise TORCH_FR_BUFFER_SIZE"
        )
    blind = [rank for rank, one in job.ranks.items() if _knows_no_p2p(one)]
    if blind:
        yield (
            f"the dumps of rank {rank_ranges(blind)} are torch's own, of gloo: they hold no sends and receives, and a "
            "rank that waits in one seems to wait for nobody. crossrank records them"
        )
    if missing:
        yield (
            f"rank {rank_ranges(sorted(missing))} has no usable dump and is taken to have made every call "
            "(--allow-missing)"
        )
    yield from (f"{one.path}: {problem}" for one in job.ranks.values() for problem in one.problems)


def _knows_no_p2p(evidence: RankTrace) -> bool:
    """Whether sends and receives may have been made that the evidence cannot show: torch's own dump, of gloo."""
    ours = evidence.source == "comms" or evidence.ending.taken_at is not None or evidence.numbered_pairs
    return evidence.backend == "gloo" and not ours


def _lost_open_calls(job: JobState, rank: int) -> bool:
    """Whether the first call of a group that is not over is no longer in the rank's ring."""
    evidence = job.ranks[rank]
    if evidence.backend == "gloo":
        return False
    for group in job.groups:
        lane, progress = group.lanes.get(rank), evidence.dump.progress.get(group.local_index.get(rank, -1))
        if lane is None or progress is None or group.has_p2p:
            continue
        if (
            evidence.calls.state[lane.rows[0]] < RETIRED
            and lane.numbers[0] > max(progress.last_completed_collective, 0) + 1
        ):
            return True
    return False
