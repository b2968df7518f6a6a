"""Reads all that a report is made of with one map over the files: times of ranks, and evidence for the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, FLIGHT, list_recording
from crossrank.tools.analysis.diagnosis import evidence as diagnosis_inputs
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Failure, find_candidates
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.job import sources
from crossrank.tools.job.collectives import Collectives, match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.read_rank import RankSources
from crossrank.tools.job.sources import Measurements
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.discover import FoundFile, discover
from crossrank.tools.traces.rank_trace import RankTrace
from crossrank.tools.traces.replayed import JSON, ReplayReport, read_report


@dataclass
class Material:
    """What the files of a run say."""

    inputs: list[str]
    ranks: list[RankTrace]
    together: Collectives
    diagnosis: Diagnosis | None
    """None where nothing could be diagnosed; then `diagnosis_problem` says why."""
    diagnosis_problem: str
    replay: ReplayReport | None
    """Where a replay of the run is given."""
    skipped: list[str]


@dataclass
class ReportInputs:
    """What is to be read."""

    inputs: list[str]
    times: Measurements
    candidates: list[FoundFile]
    replay: ReplayReport | None

    @property
    def items(self) -> list[RankSources | FoundFile]:
        return [*self.times.tasks, *self.candidates]


def plan(paths: Sequence[str], replay: str | None, source: str | None = None) -> ReportInputs:
    """The files at `paths`. Raises `CrossrankError` where there is nothing to report on."""
    files = discover(paths)
    found = sources.find(paths, None, source, files)
    candidates = [one for one in find_candidates(paths, files) if one.kind in (COMMS, FLIGHT)]
    folder = replay or _replay_beside(paths)
    return ReportInputs(
        inputs=list(paths),
        times=found,
        candidates=candidates,
        # Read at once: a wrong one is reported before the work on the ranks.
        replay=read_report(folder) if folder is not None else None,
    )


def _replay_beside(paths: Sequence[str]) -> str | None:
    """A replay's result in the folder of the recording."""
    for path in paths:
        if JSON in list_recording(path).foreign:
            return path
    return None


def gather(planned: ReportInputs, fleet: Fleet, done: Callable[[], None] = lambda: None) -> Material:
    """Read everything with `fleet`, a rank's times or a file of evidence at a time."""
    results = map_ranks(_read, planned.items, fleet, failed=_failed, done=done)
    count = len(planned.times.tasks)
    ranks = sources.settle(results[:count], planned.times)
    evidence = [one for one in results[count:] if isinstance(one, RankTrace | Failure)]
    diagnosis, problem = _diagnose(planned.candidates, evidence)
    return Material(
        inputs=planned.inputs,
        ranks=ranks,
        together=match_collectives(Job.match(ranks)),
        diagnosis=diagnosis,
        diagnosis_problem=problem,
        replay=planned.replay,
        skipped=planned.times.skipped,
    )


_Result = list[RankTrace] | str | RankTrace | Failure


def _read(item: RankSources | FoundFile) -> _Result:
    return diagnosis_inputs.read_candidate(item) if isinstance(item, FoundFile) else sources.read_task(item)


def _failed(item: RankSources | FoundFile, error: CrossrankError) -> _Result:
    if isinstance(item, FoundFile):
        return diagnosis_inputs.failed(item, error)
    return sources.failed(item, error)


def _diagnose(candidates: list[FoundFile], results: list[RankTrace | Failure]) -> tuple[Diagnosis | None, str]:
    if not candidates:
        return None, "there is neither a comms file nor a flight-recorder dump"
    try:
        evidence = diagnosis_inputs.put_together(candidates, results)
        if not evidence.ranks:
            return None, "; ".join(evidence.skipped[:3]) or "no file could be used"
        return diagnose(evidence)[0], ""
    except CrossrankError as error:
        return None, str(error)
