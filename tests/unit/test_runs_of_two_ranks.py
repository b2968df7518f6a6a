"""Runs of two ranks that were recorded by tests/gpu, each on a device, kept in tests/fixtures: what is read of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_file import read_linked
from crossrank.tools.graph.linking.linked_trace import LinkedTrace
from tests.gpu.raw_kineto import RawTrace, read_raw, unpacked

FIXTURES = Path(__file__).parents[1] / "fixtures"
RUNS = sorted(about.parent for about in FIXTURES.glob("*/about.json"))

each_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def traces(run: Path) -> list[tuple[RawTrace, LinkedTrace]]:
    """Of each rank the raw Kineto trace and the linked one."""
    found = []
    for rank in range(2):
        paths = [run / "recording" / f"rank-{rank}.{kind}.zst" for kind in ("et.json", "kineto.json", "comms.jsonl")]
        found.append((read_raw(paths[1]), link(*map(str, paths), rank=rank)))
    return found


def test_a_cpu_run_and_a_gpu_run_exist() -> None:
    about = [json.loads((run / "about.json").read_text()) for run in RUNS]
    assert [one["device"] for one in about] == ["CPU", "NVIDIA H200"]
    assert all(one["torch"] and one["date"] for one in about)


@each_run
def test_operations_are_found_in_kineto_and_every_call_is_a_communication(run: Path) -> None:
    for raw, linked in traces(run):
        report = linked.report
        matched, unmatched = (sum(one.values()) for one in (report.host_matched, report.host_unmatched))
        assert matched >= 0.999 * (matched + unmatched) > 0
        assert raw.calls == {one.record.id for one in linked.communications if one.record.id in raw.calls}
        assert len(raw.calls) >= 15
        assert report.damage == []


@each_run
def test_linked_kernels_and_works_match_an_independent_count(run: Path) -> None:
    for raw, linked in traces(run):
        activities = {one.id: one for one in linked.activities}
        kernels = {  # the calls of a batch share theirs
            number
            for one in linked.communications
            for number in one.activities
            if "nccl" in activities[number].name.lower()
        }
        assert len(kernels) == sum(map(len, raw.kernels.values())) + len(raw.alone)
        works = [one.work for one in linked.communications if one.work is not None]
        assert len(works) == len(set(works)) == raw.works
        assert raw.works or kernels


@each_run
def test_durations_of_large_calls_match_the_measurements_of_the_job(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By CUDA events around the call on a GPU, by the host's clock around it with gloo, whose Work ends within."""
    events = json.loads((run / "timing" / "timing-0.json").read_text())["p50_us"]
    code, found = answer(capsys, "bandwidth", run / "timing", "--source", "kineto", "--by", "op,size")
    assert code == 0
    medians = {str(one["size_to"]): one["kernel_us"]["p50"] for one in found["rows"] if one["op"] == "all_reduce"}
    large = {size: us for size, us in events.items() if int(size) > 1 << 20}
    assert large
    assert {size: medians[size] for size in large} == {size: pytest.approx(us, rel=0.15) for size, us in large.items()}


@each_run
@pytest.mark.parametrize("hang", ["hang", "hang-beside"])
def test_the_missing_rank_is_reported(run: Path, hang: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, "diagnose", run / hang)
    assert code == 1
    (cause,) = found["findings"]
    assert (cause["kind"], cause["culprit_ranks"], cause["op"]) == ("missing_rank", [1], "all_reduce")


def test_a_send_during_its_launch_does_not_count_as_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 makes an asynchronous barrier and then sends, rank 1 receives before the barrier. The barrier's kernel
    runs on rank 0's GPU for ever while its host connects the two ranks for the send."""
    code, found = answer(capsys, "diagnose", FIXTURES / "h200" / "hang-order")
    (cause,) = found["findings"]
    assert (code, cause["kind"], cause["culprit_ranks"], cause["waiting_ranks"]) == (1, "opposite_order", [], [0, 1])


@each_run
def test_the_training_job_has_no_fault(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, "diagnose", run / "recording")
    assert (code, found["verdict"]) == (0, "ok")


@each_run
def test_old_linked_and_converted_files_are_still_readable(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, (_, linked) in enumerate(traces(run)):
        before = read_linked(str(run / "linked" / f"rank-{rank}.linked.json.zst"))
        assert [one.record.id for one in before.communications] == [one.record.id for one in linked.communications]
    for path in (run / "chakra").iterdir():
        (tmp_path / path.stem).write_bytes(unpacked(path))
    for path in tmp_path.iterdir():
        code, checked = answer(capsys, "check", path)
        assert code == 0
        assert checked
    _, checked = answer(capsys, "check", *sorted(tmp_path.iterdir()))
    # One rank puts more than the other into its all_to_all.
    others = [[fault for fault in file["faults"] if "give different amounts" not in fault] for file in checked]
    assert others == [[], []]


@each_run
def test_files_of_a_run_have_no_local_paths(run: Path) -> None:
    for path in run.rglob("*.zst"):
        assert not re.search(rb"/(?:tmp|home|root|work)/", unpacked(path)), path
