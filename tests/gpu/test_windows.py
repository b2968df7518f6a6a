"""Windows: nothing is lost at their edges, and nothing is waited for that comes after them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from crossrank.recording import CommsFile
from tests.gpu import machine
from tests.gpu.machine import CUDA, Way
from tests.gpu.raw_kineto import read_raw
from tests.gpu.results import keep_recording


@pytest.mark.needs(seconds=30)
def test_every_window_has_all_of_its_calls_and_kernels(way: Way, tmp_path: Path) -> None:
    machine.run_job("windows", tmp_path, way, 80)
    traces = {path.name: read_raw(path) for path in sorted((tmp_path / "recording").glob("rank-*.kineto.json.zst"))}
    assert len(traces) == 3 * way.ranks
    for name, raw in traces.items():
        assert len(raw.calls) == 5, name
        kernels = sum(map(len, raw.kernels.values())), len(raw.alone)
        assert kernels == ((5, 0) if CUDA else (0, 0)), name


@pytest.mark.needs(seconds=30)
def test_durations_match_events_and_nccls_own_timing(way: Way, tmp_path: Path, note: Any) -> None:
    recording = tmp_path / "recording"
    machine.run_job("timing", tmp_path, way, 80, TRACING_TIMING="1")
    keep_recording("timing", recording, *sorted((tmp_path / "job").glob("timing-*.json")))
    calls = {int(size): us for size, us in machine.facts(tmp_path, "timing")[0]["us"].items()}
    events = {size: statistics.median(us) for size, us in calls.items()}
    timed = durations(CommsFile(str(recording / "rank-0.comms.jsonl.zst")))
    note(timed=timed, events=events)
    largest = max(events)  # what a launch takes shows in the others, where streams are threads of a stand-in
    if machine.STAND_IN:  # its streams are threads, which may wait for a CPU between any two moments
        assert 0 < timed[largest] <= max(calls[largest])
    else:
        assert timed[largest] == pytest.approx(events[largest], rel=0.02 if CUDA else 0.5)
    for source in ("kineto", "flight") if CUDA else ("kineto",):
        words = ("bandwidth", recording, "--source", source, "--by", "op,size", "--json", "-o", "bandwidth.json")
        machine.crossrank(tmp_path / source, *words)
        rows = json.loads((tmp_path / source / "bandwidth.json").read_text())["rows"]
        medians = {one["size_to"]: one["kernel_us"]["p50"] for one in rows if one["op"] == "all_reduce"}
        note(**{source: medians}, events=events)
        large = {size: medians[size] for size in events if size > 1 << 20}
        assert large.keys() == {1 << 24}
        # NCCL's kernel lies within the events that its caller records around it.
        if machine.STAND_IN:
            assert all(0 < us <= max(calls[size]) for size, us in large.items())
        elif CUDA:
            assert all(0.85 * events[size] <= us <= 1.15 * events[size] for size, us in large.items())


def durations(file: CommsFile) -> dict[int, float]:
    """Bytes of an all_reduce in the window -> the median of what its calls took, in us."""
    found: dict[int, list[float]] = {}
    records = list(file.records())
    took = {one.id: one.took / 1e3 for one in file.ran}
    for record in records:
        if record.op == "all_reduce" and record.step == 1 and record.bytes:
            found.setdefault(record.bytes, []).append(took[record.id])
    return {size: statistics.median(those) for size, those in found.items()}


@pytest.mark.needs(seconds=25, ranks=2)
@pytest.mark.parametrize("tracing", ["NONE", "ALL"])
def test_a_window_end_does_not_wait_for_a_receive_with_a_later_send(way: Way, tracing: str, tmp_path: Path) -> None:
    done = machine.run_job("receive_ahead", tmp_path, way, 40, fails=True, TRACING=tracing)
    assert machine.facts(tmp_path, "receive_ahead") == {0: {"passed": True}, 1: {"passed": True}}, done.last
