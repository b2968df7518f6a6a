"""Real gloo jobs that hang are diagnosed from their folder while they hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import forked_jobs, jobs, names
from tests.integration.hanging_jobs import WAYS, WORLD
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of, in_short, roots

pytestmark = pytest.mark.touches("tools/analysis/diagnosis")

EVERYONE = [0, 1, 2, 3]

FOUND: dict[str, list[tuple[str, str, int | None, list[int], list[int]]]] = {
    "missing_rank": [("missing_rank", "default_pg", 3, [2], [0, 1, 3])],
    "type_mismatch": [("type_mismatch", "default_pg", 3, [1], [0, 2, 3])],
    "p2p_wait_cycle": [("p2p_wait_cycle", "default_pg", 1, [], EVERYONE)],
    "opposite_order": [("opposite_order", "a", 1, [3], [0, 1, 2])],
    "killed": [("dump_missing", "default_pg", 3, [2], [0, 1, 3])],
}


# One test, for the jobs are slow to start: they hang all at once.
@names.needs_gloo_recorder
@pytest.mark.timeout(240)
def test_jobs_that_hang_are_diagnosed_while_they_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACING", "CROSSNODE")
    monkeypatch.setenv("TRACING_HANG_SECONDS", "2")
    hanging = {
        way: forked_jobs.start("tests.integration.hanging_jobs", way, tmp_path / way, WORLD, delay=600) for way in WAYS
    }
    try:
        for way, job in hanging.items():
            for rank in range(WORLD):
                if (way, rank) != ("killed", 2):
                    jobs.wait_for_file(job.dump(rank), seconds=120)
        diagnoses = {way: diagnosis_of(job.recording) for way, job in hanging.items()}
        for job in hanging.values():
            for dump in job.recording.glob("*.flight.*"):
                dump.unlink()
        # The comms files alone: what a job leaves that is killed before it could dump anything.
        from_comms = {way: diagnosis_of(job.recording) for way, job in hanging.items() if way != "killed"}
    finally:
        for job in hanging.values():
            job.kill()

    answers = {way: roots(found) for way, found in diagnoses.items()}
    # Whether the last call of the killed rank reached the disk is a matter of luck; if so, its comms file testifies.
    killed = answers.pop("killed")
    assert killed in (FOUND["killed"], [("missing_rank", *FOUND["killed"][0][1:])])
    assert answers == {way: rows for way, rows in FOUND.items() if way != "killed"}
    assert [found.consequences for found in diagnoses.values()] == [[]] * len(FOUND)
    culprit, waiting = diagnoses["missing_rank"].findings[0].places
    assert (culprit.rank, waiting.rank) == (2, 0)
    assert culprit.frames[0].startswith("missing_rank (")
    assert any(frame.startswith("missing_rank (") and "hanging_jobs.py" in frame for frame in waiting.frames)
    # Which of them wait is not known then: a call that failed looks like one that ended.
    assert {way: [in_short(finding)[:4] for finding in found.findings] for way, found in from_comms.items()} == {
        way: [row[:4] for row in rows] for way, rows in FOUND.items() if way != "killed"
    }
