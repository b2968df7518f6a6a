"""The recording again, on the backend that it was made on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import machine
from tests.gpu.conftest import Recorded
from tests.gpu.machine import CUDA, Done, Way

_ON_CPU = () if CUDA else ("--backend", "gloo", "--device", "cpu")


def replay(way: Way, folder: Path, recording: Path, *options: str) -> Done:
    words = ["-m", "crossrank.replay", recording, "--timeout", "40", *options, *_ON_CPU]
    done = machine.run(machine.torchrun(words, way), folder, 100, **machine.of_job(way, folder))
    assert done.code == 0, done.last
    return done


@pytest.mark.needs(seconds=60, ranks=2)
def test_every_result_of_the_replay_is_right(recorded: Recorded, way: Way, tmp_path: Path, note: Any) -> None:
    done = replay(way, tmp_path, recorded.recording, "--check", "--strict", "--repeat", "3", "-o", "replay")
    note(printed=done.text[-3000:])
    machine.crossrank(tmp_path / "bandwidth", "bandwidth", tmp_path / "replay")


@pytest.mark.needs(seconds=60, ranks=2)
def test_a_whole_step_is_replayed_with_its_computation(recorded: Recorded, way: Way, tmp_path: Path, note: Any) -> None:
    note(printed=replay(way, tmp_path, recorded.recording, "--compute", "-o", "replay").text[-3000:])


@pytest.mark.needs(seconds=10, ranks=2, cuda=True)
def test_two_ranks_on_one_gpu_are_refused_without_a_launcher(recorded: Recorded, way: Way, tmp_path: Path) -> None:
    words = ["-m", "crossrank", "replay", str(recorded.recording), "--repeat", "1"]
    done = machine.run([sys.executable, *words], tmp_path, 40, **way.env)
    assert done.code == 2, done.last
    assert "GPU" in done.text


@pytest.mark.needs(seconds=50, ranks=2)
@pytest.mark.parametrize("name", ["ring", "barrier"])
def test_a_replay_finishes(way: Way, name: str, tmp_path: Path) -> None:
    """The ring's communicators were made when they were needed; made ahead they would run one after the other."""
    machine.run_job(name, tmp_path, way, 60)
    replay(way, tmp_path / "replay", tmp_path / "recording", "--repeat", "2")
