"""What recording costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu import machine
from tests.gpu.machine import CUDA, ONE_RANK


@pytest.mark.needs(seconds=50, real=True)
@pytest.mark.parametrize("kernel", ["compiled", "python"])
def test_recording_adds_little_time_per_call_and_step(kernel: str, tmp_path: Path, note: Any) -> None:
    calls, rounds = ("2000", "7") if CUDA else ("300", "3")
    variables = {"JOB_CALLS": calls, "JOB_ROUNDS": rounds, "TRACING_RECORDER": kernel}
    done = machine.run_job("overhead", tmp_path, ONE_RANK, 110, fails=True, **variables)
    found = machine.facts(tmp_path, "overhead").get(0)
    assert found is not None, done.last
    note(**found)
    if CUDA:  # a machine without a GPU is shared with other tests
        assert found["added_us"] < 25
        assert found["step_ratio"] < 1.03
