"""Real gloo jobs that hang are diagnosed from their folder while they hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import hanging_jobs, jobs
from tests.unit.diagnosis.verdicts import diagnosis_of, in_short

ROOT = Path(__file__).parents[2]
EVERYONE = [0, 1, 2, 3]

FOUND = {
    "missing_rank": ("missing_rank", "default_pg", 3, [2], [0, 1, 3]),
    "type_mismatch": ("type_mismatch", "default_pg", 3, [1], [0, 2, 3]),
    "p2p_wait_cycle": ("p2p_wait_cycle", "default_pg", 1, [], EVERYONE),
    "opposite_order": ("opposite_order", "a", 1, [3], [0, 1, 2]),
    "killed": ("dump_missing", "default_pg", 3, [2], [0, 1, 3]),
}


@pytest.fixture(scope="module")
def hung_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one recording per way to hang; the jobs still hang."""
    folder = tmp_path_factory.mktemp("hung")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.hanging_jobs", str(folder), *hanging_jobs.WAYS],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRACING": "CROSSNODE", "TRACING_HANG_SECONDS": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for way in hanging_jobs.WAYS:
            for rank in range(hanging_jobs.WORLD):
                if (way, rank) != ("killed", 2):
                    jobs.wait_for_file(folder / way / f"rank-{rank}.flight.json.zst", seconds=90)
        yield folder
    finally:
        process.communicate(b"", timeout=60)


@pytest.mark.parametrize("way", hanging_jobs.WAYS)
def test_a_job_that_hangs_is_diagnosed_while_it_hangs(hung_jobs: Path, way: str) -> None:
    found = diagnosis_of(hung_jobs / way)

    assert [in_short(finding) for finding in found.findings] == [FOUND[way]]
    assert found.consequences == []


def test_the_rank_that_others_wait_for_shows_where_it_is(hung_jobs: Path) -> None:
    (finding,) = diagnosis_of(hung_jobs / "missing_rank").findings

    culprit, waiting = finding.places
    assert (culprit.rank, waiting.rank) == (2, 0)
    assert culprit.frames[0].startswith("missing_rank (")
    assert any(frame.startswith("missing_rank (") and "hanging_jobs.py" in frame for frame in waiting.frames)


@pytest.mark.parametrize("way", ["missing_rank", "type_mismatch", "p2p_wait_cycle", "opposite_order"])
def test_the_comms_files_alone_give_the_same_answer(hung_jobs: Path, way: str, tmp_path: Path) -> None:
    for file in (hung_jobs / way).glob("*.comms.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())

    found = diagnosis_of(tmp_path)

    assert [in_short(finding)[:4] for finding in found.findings] == [FOUND[way][:4]]
