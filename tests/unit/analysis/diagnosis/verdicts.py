"""Diagnoses folders for tests, and says a diagnosis in a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis, Finding
from crossrank.tools.parallel import Fleet
from tests.unit.analysis.diagnosis.moments import Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import SimulatedJob


def diagnosis_of(folder: Path, **options: Any) -> Diagnosis:
    """The diagnosis of the dumps in `folder`."""
    return diagnose(read_evidence(find_candidates([str(folder)]), Fleet()), **options)[0]


def diagnose_job(job: SimulatedJob, folder: Path, **dump_options: Any) -> Diagnosis:
    """Run `job` to where nothing moves, dump it and diagnose the dumps."""
    job.run()
    job.write(folder, **dump_options)
    return diagnosis_of(folder)


def diagnose_moments(job: SimulatedJob, folder: Path, moments: dict[int, Moment]) -> Diagnosis:
    """Run `job` to where nothing moves, write the dumps of the ranks in `moments` and diagnose them."""
    write_moments(job, folder, moments)
    return diagnosis_of(folder)


def in_short(finding: Finding) -> tuple[str, str, int | None, list[int], list[int]]:
    """(kind, description of the group, sequence number, culprits, waiting ranks)"""
    seq = finding.collective_seq_id if finding.collective_seq_id is not None else finding.p2p_seq_id
    return finding.kind, finding.pg[1], seq, finding.culprit_ranks, finding.waiting_ranks


def roots(diagnosis: Diagnosis) -> list[tuple[str, str, int | None, list[int], list[int]]]:
    return [in_short(finding) for finding in diagnosis.findings]
