"""CUDA graphs and torch.compile under recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import machine
from tests.gpu.machine import ONE_RANK, STAND_IN, Way


@pytest.mark.needs(seconds=40, cuda=True)
def test_graphs_are_captured_during_any_recording(tmp_path: Path) -> None:
    done = machine.run_job("graphs", tmp_path, ONE_RANK, 80, fails=True)
    found = machine.facts(tmp_path, "graphs").get(0)
    assert found is not None, done.last
    # What an optimizer computes a stand-in does not; that its step could be captured is no text of an error.
    right = {name for name, value in found.items() if value is True or (STAND_IN and "window_" in name and not value)}
    assert right == found.keys(), found


@pytest.mark.needs(seconds=60, ranks=2, cuda=True)
def test_two_ranks_capture_a_collective(way: Way, tmp_path: Path) -> None:
    done = machine.run_job("graphs", tmp_path, way, 80, fails=True, TRACING_FLIGHT="0")
    found = machine.facts(tmp_path, "graphs")
    assert [one["plain"] for one in found.values()] == [True, True], done.last


@pytest.mark.needs(seconds=40, real=True)
def test_compiled_functions_compute_correct_results(tmp_path: Path) -> None:
    done = machine.run_job("compiled", tmp_path, ONE_RANK, 110, fails=True)
    found = machine.facts(tmp_path, "compiled").get(0)
    assert found is not None, done.last
    assert found == dict.fromkeys(found, True)
