"""A training job, recorded: what it computes, and what every command makes of the recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_trace import LinkedTrace
from tests.gpu import machine
from tests.gpu.conftest import Recorded, Ways
from tests.gpu.machine import CUDA, Way
from tests.gpu.raw_kineto import RawTrace, read_raw
from tests.gpu.results import FIXTURES, keep_chakra, keep_recording


@pytest.mark.needs(seconds=90)
def test_recording_does_not_change_the_results_of_a_job(recorded: Recorded, way: Way, tmp_path: Path) -> None:
    assert recorded.done.code == 0, recorded.done.last
    machine.run_job("training", tmp_path, way, 100, TRACING="NONE")
    found = machine.facts(recorded.folder, "training")
    assert len(found) == way.ranks
    assert found == machine.facts(tmp_path, "training")


COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "link": ("--min-match", "0.999", "-o", "linked"),
    "convert": ("--lower", "astra-sim", "-o", "chakra"),
    "simulate": (),
    "bandwidth": ("-o", "bandwidth.json"),
    "timeline": ("-o", "all.pftrace"),
    "diagnose": ("-o", "diagnosis.json"),
    "report": ("-o", "report.html"),
    "export": ("-o", "tables"),
    "replay": ("--dry-run",),
}


@pytest.mark.needs(seconds=20)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_the_recording(recorded: Recorded, command: str, tmp_path: Path) -> None:
    machine.crossrank(tmp_path, command, recorded.recording, *COMMANDS[command])
    if command == "link":
        assert list((tmp_path / "linked").glob("*.linked.json*"))
        keep_recording("linked", tmp_path / "linked")
    if command == "convert":
        machine.crossrank(tmp_path / "check", "check", *sorted((tmp_path / "chakra").glob("*.et")))


@pytest.fixture(scope="module")
def traces(
    recorded: Recorded, ways: Ways, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[RawTrace, LinkedTrace]]:
    """Of each rank the raw trace and the linked one."""
    assert recorded.done.code == 0, recorded.done.last
    keep_recording("recording", recorded.recording)
    folder = tmp_path_factory.mktemp("converted")
    machine.crossrank(folder, "convert", FIXTURES / "recording", "--lower", "astra-sim", "-o", "chakra")
    keep_chakra(sorted((folder / "chakra").glob("*.et")))
    found = []
    for rank in range(ways.found.ranks):
        et, kineto, comms = (
            str(recorded.recording / f"rank-{rank}.{kind}.zst") for kind in ("et.json", "kineto.json", "comms.jsonl")
        )
        found.append((read_raw(Path(kineto)), link(et, kineto, comms, rank=rank)))
    return found


@pytest.mark.needs(seconds=20)
def test_every_call_of_the_window_is_a_communication(traces: list[tuple[RawTrace, LinkedTrace]], note: Any) -> None:
    for raw, linked in traces:
        note(calls=len(raw.calls), matched=linked.report.host_matched, unmatched=linked.report.host_unmatched)
        assert raw.calls == {one.record.id for one in linked.communications if one.record.id in raw.calls}
        assert linked.report.damage == []


@pytest.mark.needs(seconds=20)
def test_each_gloo_work_belongs_to_one_call(traces: list[tuple[RawTrace, LinkedTrace]]) -> None:
    if CUDA:
        pytest.skip("with NCCL a call has kernels")
    for raw, linked in traces:
        works = [one.work for one in linked.communications if one.work is not None]
        assert len(works) == len(set(works)) == raw.works > 0


@pytest.mark.needs(seconds=20, cuda=True)
def test_a_call_has_the_kernels_launched_within_its_range(traces: list[tuple[RawTrace, LinkedTrace]]) -> None:
    """None is lost, and each is of the call that the raw trace says."""
    for raw, linked in traces:
        activities = {one.id: one for one in linked.activities}
        joined: set[int] = set()  # the calls of a batch share theirs
        for one in linked.communications:
            own = [activities[number] for number in one.activities]
            kernels = [activity for activity in own if "nccl" in activity.name.lower()]
            joined.update(kernel.id for kernel in kernels)
            if one.record.id in raw.calls and one.record.batch is None:
                expected = sorted(round(kernel.duration_us, 1) for kernel in raw.kernels[one.record.id])
                assert sorted(round(kernel.duration_ns / 1e3, 1) for kernel in kernels) == expected, one.record
        before = {kernel.id for kernel in linked.activities if kernel.unlinked is not None}
        assert len(joined - before) == sum(map(len, raw.kernels.values())) + len(raw.alone) > 0


@pytest.mark.needs(seconds=20, cuda=True)
def test_bytes_of_a_call_match_kineto(traces: list[tuple[RawTrace, LinkedTrace]]) -> None:
    compared = 0
    for raw, linked in traces:
        for one in linked.communications:
            kernels = raw.kernels.get(one.record.id, [])
            plain = one.record.op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
            if plain and one.record.batch is None and len(kernels) == 1 and kernels[0].bytes is not None:
                assert kernels[0].bytes == one.record.bytes, one.record
                compared += 1
    assert compared
