"""Jobs with the faults that users make are diagnosed while they hang, and from what they leave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from tests.integration.forked_jobs import Job, JobServer, wait_until
from tests.integration.live_faults import FAULTS, Fault


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    server = JobServer("tests.integration.live_faults")
    yield server
    server.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_diagnosed(
    fault: Fault, server: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = server.start(fault.name, tmp_path, fault.ranks)
    try:
        if fault.gives_up_after is not None:
            time.sleep(fault.gives_up_after)
            job.terminate()
            job.wait_until_over()
        wait_until(lambda: job.is_over() or hangs(job, fault), "the job neither ends nor notices that it hangs")
        if not job.is_over():
            assert complaints(fault, job, capsys) == [], "while it hangs"
            job.terminate()
        job.wait_until_over()
        assert complaints(fault, job, capsys) == [], "when it is dead"
    finally:
        job.kill()


def hangs(job: Job, fault: Fault) -> bool:
    """Whether every rank that still runs has written down where it is."""
    running = [rank for rank, code in enumerate(job.codes()) if code is None]
    return all(rank in fault.cannot_dump or job.has_noticed_a_hang(rank) for rank in running)


def complaints(fault: Fault, job: Job, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `crossrank diagnose` says of the job that is not true, or leaves out."""
    code = main(["diagnose", str(job.recording)])
    text = capsys.readouterr().out
    main(["diagnose", str(job.recording), "--json"])
    diagnosis = json.loads(capsys.readouterr().out)
    found = [] if code == 1 else [f"exit code {code}, verdict {diagnosis['verdict']}"]
    return found + list(untrue(fault, diagnosis)) + list(not_shown(fault, diagnosis, text))


def untrue(fault: Fault, diagnosis: dict[str, Any]) -> Iterator[str]:
    roots = {(finding["kind"], *finding["culprit_ranks"]) for finding in diagnosis["findings"]}
    accused = {rank for _, *ranks in roots for rank in ranks}
    named = {rank for kind, *ranks in roots if kind in fault.kinds for rank in ranks}
    if innocent := sorted(accused & fault.innocent):
        yield f"accuses rank {innocent}, who are innocent: {sorted(roots)}"
    if missed := sorted(set(fault.culprits) - named):
        yield f"does not name rank {missed} for {' or '.join(fault.kinds)}: {sorted(roots)}"
    standing = {
        rank for finding in diagnosis["findings"] for rank in finding["culprit_ranks"] + finding["waiting_ranks"]
    }
    if overlooked := sorted(set(fault.involved) - standing):
        yield f"says nothing of rank {overlooked}: {sorted(roots)}"
    if strange := sorted({kind for kind, *_ in roots} - set(fault.kinds)):
        yield f"finds {', '.join(strange)}, which it is not"


def not_shown(fault: Fault, diagnosis: dict[str, Any], text: str) -> Iterator[str]:
    places = json.dumps([diagnosis["findings"], diagnosis["notes"]])
    for lines in fault.lines():
        for where, shown in (("text", text), ("JSON", places)):
            if not any(line in shown for line in lines):
                yield f"the {where} does not show {' or '.join(lines)}"
