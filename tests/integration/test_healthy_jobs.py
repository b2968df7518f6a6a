"""A healthy job ends by itself, whatever its ranks do for long, and nobody says that it hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import forked_jobs
from tests.integration.commands import Commands
from tests.integration.healthy_jobs import JOBS, RANKS

pytestmark = pytest.mark.touches("tools", traced=False)


@pytest.mark.parametrize("name", JOBS)
def test_a_healthy_job_ends_well_without_a_hang_report(name: str, tmp_path: Path, command: Commands) -> None:
    job = forked_jobs.start("tests.integration.healthy_jobs", name, tmp_path / "job", RANKS)
    try:
        job.wait_until_over()
        logs = job.logs()
        assert (job.codes(), ["ended well" in log for log in logs]) == ([0] * RANKS, [True] * RANKS), "\n".join(logs)
        assert not any("the job hangs" in log for log in logs), logs
        command("diagnose", job.recording)
    finally:
        job.kill()
