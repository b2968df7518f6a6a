"""Real traces of NCCL: times that were read off the raw kernels by other means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import crossrank
from crossrank.tools.cli import main
from crossrank.tools.graph.linking.linked_trace import OTHER_ITERATIONS
from crossrank.tools.job.launches import OTHER_ITERATION
from crossrank.tools.traces.nsight.nccl import NO_PAYLOAD
from crossrank.tools.traces.nsight.read import IN_TORCH, NO_LAUNCH
from tests.unit.graph.linking.public_traces import needs_traces, public

pytestmark = needs_traces


def bandwidth_of(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["bandwidth", public(name), "--json", "--jobs", "1", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_eight_ranks_with_own_clocks_agree_within_10_us(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("dlrm_8gpu", capsys)
    assert (found["calls"], found["timed_calls"], found["collectives"]) == (64, 64, 8)
    assert found["clocks"]["count"] == 8
    # Their kernels wait up to 6 ms for each other, and end within some us once the clocks are brought together.
    assert found["clocks"]["residual_us"]["max"] < 10
    (all_reduces,) = (row for row in found["rows"] if row["op"] == "all_reduce")
    # The shortest of the eight kernels of each.
    assert (all_reduces["time_us"]["p50"], all_reduces["time_us"]["max"]) == (69.0, 86.0)
    assert all_reduces["time_us"]["total"] == 20.0 + 69.0 + 86.0
    assert all(row["upper_bounds"] == 0 for row in found["rows"])


def test_sizes_are_not_divided_by_times_of_another_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The execution traces hold another iteration than the Kineto traces, and an all_to_all's splits change."""
    found = bandwidth_of("dlrm_8gpu", capsys)
    assert found["unattributed"] == {OTHER_ITERATION: 64}
    shown = [(row["bytes"], row["unsized"], row["busbw_gb_per_s"]) for row in found["rows"]]
    assert shown == [(None, 3, None), (None, 5, None)]
    said, *left_out = found["notes"]
    assert said == f"{OTHER_ITERATIONS} (each of 8 ranks: 0-7)"
    assert left_out == ["64 GPU activities launched before the Kineto trace are skipped (each of 2 ranks: 1,3)"]
    job = crossrank.load(public("dlrm_8gpu"))
    assert f"{OTHER_ITERATIONS} (each of 8 ranks: 0-7)" in job.notes
    calls = job.table("calls")
    assert [calls[column].null_count() for column in ("bytes", "inputs", "outputs")] == [64, 64, 64]


def test_kineto_steps_are_known_with_an_execution_trace_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = crossrank.load(public("dlrm_8gpu")).steps
    assert steps.drop_nulls("duration_ns")["step"].to_list() == 8 * [10]
    assert steps.filter(rank=0)["duration_ns"].drop_nulls().to_list() == [14_455_000]
    (iteration,) = bandwidth_of("dlrm_8gpu", capsys)["overlap"]["steps"]
    assert iteration["step"] == 10


def test_a_late_profiler_start_is_not_lateness() -> None:
    """The profilers began up to 7.5 ms apart: the others wait 7.62 ms for rank 7 in the first collective of the window,
    and 1.62 ms after it."""
    answer = crossrank.load(public("dlrm_8gpu")).stragglers()
    assert answer.text.endswith("profiler windows are not); skipped: 1 collective at the start of a rank's window")
    assert answer.frame.filter(rank=7).row(0, named=True) == {
        "rank": 7,
        "collectives": 7,
        "first": 0,
        "last": 4,
        "waiting_ns": 1_531_000,
        "waited_for_ns": 1_621_500,
    }


def test_lateness_within_the_clock_error_makes_no_straggler() -> None:
    """Dumps of a healthy job, whose ends were found out by a watchdog that looks now and then."""
    job = crossrank.load(public("flight/clean"))
    assert job.collectives["last_rank"].null_count() == len(job.collectives)
    assert job.stragglers().text == (
        "no stragglers: ranks cannot be compared, or no rank was later than the error of the clocks"
    )


def test_deep_ep_kernels_are_communication(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("kineto_deepep", capsys, "--by", "op")
    assert (found["calls"], found["total_ms"]) == (36, 113.44)
    assert {row["op"]: row["calls"] for row in found["rows"] if row["op"] == "all_to_all"} == {"all_to_all": 16}


def test_works_of_a_backend_without_kernels_are_communication(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("kineto_mtia", capsys, "--by", "op")
    assert {row["op"]: row["calls"] for row in found["rows"]} == {
        "all_to_all": 1,
        "all_gather": 96,
        "barrier": 48,  # gloo's
        "all_reduce": 1,
    }
    # Of 13.336 s the device computed in 7.702, and Works ran in 2.532, of which 2.089 while it computed.
    overlap = found["overlap"]
    assert overlap["measured_on"] == ["device"]
    assert overlap["computation"] == pytest.approx(0.5775, abs=0.0005)
    assert overlap["exposed"] == pytest.approx(0.0332, abs=0.0003)
    assert len([note for note in found["notes"] if "fc-dtype_Float takes more than a tenth" in note]) == 1


def test_a_user_chosen_kernel_is_communication(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("kineto_mtia", capsys, "--by", "op", "--communication-kernels", "^fc-")
    assert [row["op"] for row in found["rows"]] == ["fc-dtype_Float"]
    assert main(["bandwidth", public("kineto_mtia"), "--communication-kernels", "("]) == 2
    assert capsys.readouterr().err == (
        "crossrank: '(', for kernels that communicate, is not a regular expression: missing ), unterminated subpattern "
        "at position 0\n"
    )


def test_one_of_two_ranks_gives_upper_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("nccl_2gpu", capsys, "--by", "op")
    assert found["missing_ranks"] == [1]
    shown = {row["op"]: (row["collectives"], row["upper_bounds"]) for row in found["rows"]}
    assert shown == {"all_reduce": (15, 15), "broadcast": (6, 6)}
    assert all(row["waiting_us"] is None for row in found["rows"])


def test_communication_kernels_without_arguments_count_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("kineto_mi300", capsys, "--by", "op,size")
    assert (found["calls"], found["timed_calls"]) == (17, 17)
    rows = {(row["op"], row["size_to"]): row for row in found["rows"]}
    assert {key: (row["collectives"], row["bytes"], row["unsized"]) for key, row in rows.items()} == {
        ("all_reduce", 64 << 20): (3, 3 * 8816192 * 2, 0),
        ("all_reduce", 16 << 20): (3, 3 * 2873320 * 2, 0),
        ("broadcast", 64 << 10): (3, 3 * 9600 * 2, 0),
        ("broadcast", 1024): (3, 3 * 20 * 8, 0),
        ("ncclDevKernel_Generic", None): (5, None, 5),
    }
    large = rows["all_reduce", 64 << 20]
    assert (large["time_us"]["p50"], large["algbw_gb_per_s"]["p50"]) == (8932.626, 1.974)


def test_host_ranges_give_the_operations_of_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(public("dlrm_8gpu")).glob("*.kineto.json.gz"):
        (tmp_path / path.name).symlink_to(path)
    found = bandwidth_of(str(tmp_path), capsys, "--by", "op")
    shown = {row["op"]: (row["collectives"], row["unsized"]) for row in found["rows"]}
    assert shown == {"all_reduce": (3, 3), "all_to_all": (5, 5)}


def test_dumps_with_timing_give_durations_without_clocks(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("flight/clean", capsys)
    assert (found["sources"], found["calls"], found["timed_calls"]) == ({"flight": 4}, 80, 80)
    assert found["clocks"]["note"] == "4 clocks, not compared: exact end times of collectives are unknown"


def test_a_real_export_of_two_gpus_gives_its_kernel_times(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("nsight_h100", capsys, "--by", "op,size")
    assert found["ranks"] == [0, 1]
    # Of 25.18 ms of kernels on both ranks, 13.8 are waiting: a collective takes what it takes on its last arriver.
    assert (found["attributed"], found["total_ms"]) == ({IN_TORCH: 64}, 5.677)
    assert found["unattributed"] == {NO_PAYLOAD: 256, NO_LAUNCH: 2}
    (row,) = found["rows"]
    assert (row["op"], row["collectives"], row["time_us"]["p50"]) == ("all_to_all", 32, 177.392)
    assert (row["kernel_us"]["total"], round(row["waiting_us"]["total"] / 1000, 1)) == (25_179.513, 13.8)
    assert (row["size_to"], row["unsized"]) == (None, 32)
    assert found["clocks"]["residual_us"]["max"] < 27
    assert {kind["locality"] for kind in bandwidth_of("nsight_h100", capsys, "--by", "locality")["rows"]} == {
        "intra_node"
    }
