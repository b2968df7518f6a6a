"""Which rank diagnoses a job that hangs, when, and by which calls."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossrank.instrument.config import Config
from crossrank.instrument.facts import Facts
from crossrank.instrument.hang import response, verdict
from crossrank.instrument.hang.answers import Answers
from crossrank.instrument.hang.questions import Questions
from crossrank.instrument.hang.response import _Silence
from crossrank.instrument.hang.verdict import Verdict
from crossrank.recording import list_recording
from tests.unit.analysis.diagnosis.moments import Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Programs, SimulatedJob


def silence(rank: int, places: dict[int, str] | None, folder: Path) -> _Silence:
    """Of a job of which the nodes of some ranks are known."""
    known = {other: (node, None) for other, node in (places or {}).items()}
    topology: Any = None if places is None else SimpleNamespace(places=known)
    facts = Facts(config=Config(), rank=rank, world_size=4, topology=topology)
    session: Any = SimpleNamespace(facts=facts, recorder=SimpleNamespace(calls=lambda: 0))
    return _Silence(session, Answers(session, folder, Questions(folder, 4, lambda: None)), 0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rank", "places", "seconds"),
    [
        (0, {0: "a", 1: "a"}, 0.0),
        (1, {0: "a", 1: "a"}, 1.0),
        (1, None, 1.0),
        (3, {0: "a", 1: "a", 2: "b", 3: "b"}, 9.0),
        (5, {0: "a", 2: "b", 3: "b", 4: "c", 5: "c"}, 10.0),
        (3, {2: "b", 3: "b"}, 1.0),  # it is not known where rank 0 is
        (99, {rank: str(rank) for rank in range(100)}, 38.0),
    ],
)
def test_rank_0_diagnoses_first_then_its_node_then_other_ranks(
    rank: int, places: dict[int, str] | None, seconds: float, tmp_path: Path
) -> None:
    assert silence(rank, places, tmp_path)._turn() == seconds


@pytest.mark.parametrize("in_containers", [False, True])
def test_one_process_per_node_diagnoses_even_in_containers(
    in_containers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_containers:  # in another network namespace the name is free
        monkeypatch.setattr(response, "take_lock", lambda name: socket.socket(socket.AF_UNIX))
    one, other = silence(0, None, tmp_path), silence(1, None, tmp_path)
    with one._alone_on_node() as is_alone, other._alone_on_node() as is_alone_too:
        assert (is_alone, is_alone_too) == (True, False)
        assert not list_recording(str(tmp_path)).unrecognized  # the lock is no file of the job
    with other._alone_on_node() as is_alone:
        assert is_alone
    assert list(tmp_path.iterdir()) == []


def test_the_socket_alone_decides_if_the_folder_is_unusable(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    one, other = silence(0, None, gone), silence(1, None, gone)
    with one._alone_on_node() as is_alone, other._alone_on_node() as is_alone_too:
        assert (is_alone, is_alone_too) == (True, False)


@pytest.mark.parametrize("has_many_ranks", [False, True])
def test_the_last_calls_of_many_ranks_give_the_same_culprit(
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


def test_a_verdict_without_a_file_that_could_not_be_read_proves_no_hang() -> None:
    proven = Verdict(verdict="error", proof="deadlock")
    assert proven.is_hang
    proven.skipped = ["rank-1.flight.json.zst: is damaged"]
    assert not proven.is_hang
