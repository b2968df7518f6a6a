"""The verdict that a job prints of itself, made in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossrank.instrument.hang import verdict
from tests.unit.analysis.diagnosis.moments import Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Programs, SimulatedJob


@pytest.mark.parametrize("has_many_ranks", [False, True])
def test_of_many_ranks_the_last_calls_are_read_and_the_culprit_is_the_same(
    has_many_ranks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "_FEW_RANKS", 2 if has_many_ranks else 3)
    programs: Programs = [[Collective("0")] * 600 for _ in range(3)]
    programs[1].append(CpuStall())
    for program in programs:
        program.append(Collective("0"))
    job = SimulatedJob(programs, {"0": ("default_pg", [0, 1, 2])})
    write_moments(job, tmp_path, dict.fromkeys(range(3), Moment()))

    text, content = verdict.diagnose(tmp_path, 3)

    assert "missing_rank" in text
    found = json.loads(content)
    assert found["suspect_ranks"] == [1]
    assert any("(--last)" in note for note in found["notes"]) == has_many_ranks
