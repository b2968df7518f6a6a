"""Device events whose times cannot be right are left out and counted; those of clocks that differ stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.traces.kineto import read_kineto

Rows = list[dict[str, Any]]
KERNELS = 12


def rows_of_a_step(*, behind_us: float = 0.0) -> Rows:
    """Twelve kernels of 80 us, one every 100 us on two streams, each launched 10 us before, and a synchronization.

    `behind_us`: how far the device's clock is behind the host's."""
    rows: Rows = [_row("cuda_runtime", "cudaDeviceSynchronize", 1250, 60, 1, {"correlation": 1000})]
    for number in range(KERNELS):
        begin = 10_000 + 100 * number
        rows.append(_row("cuda_runtime", "cudaLaunchKernel", begin - 10, 5, 1, {"correlation": number}))
        of_stream = {"correlation": number, "device": 0, "stream": 7 + number % 2, "context": 1}
        rows.append(_row("kernel", f"kernel {number}", begin - behind_us, 80, 7, of_stream))
    rows[0]["ts"] = 10_000 + 100 * KERNELS
    return rows


def _row(category: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 5, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(rows: Rows, number: int) -> dict[str, Any]:
    return next(one for one in rows if one["name"] == f"kernel {number}")


def read(rows: Rows, folder: Path) -> tuple[int, list[str]]:
    """Return (number of device events, damage) of a trace with these rows."""
    (folder / "trace.json").write_text(json.dumps({"traceEvents": rows}))
    trace = read_kineto(str(folder / "trace.json"))
    return len(trace.device), trace.damage


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ts": 0, "dur": 0}, "a start before their launch"),
        ({"ts": 5000}, "a start before their launch"),
        ({"dur": 2_000_000}, "an end after a synchronization that waited for them"),
        ({"ts": 900_000}, "an end after a synchronization that waited for them"),
        ({"dur": 600}, "a duration that contains several later ones of their stream"),
    ],
)
def test_an_event_with_impossible_times_is_left_out(change: dict[str, float], said: str, tmp_path: Path) -> None:
    rows = rows_of_a_step()
    kernel(rows, 4).update(change)
    assert read(rows, tmp_path) == (KERNELS - 1, [f"left out: 1 device event with {said} (first: 'kernel 4')"])


def test_an_event_outside_of_the_profilers_window_is_left_out(tmp_path: Path) -> None:
    rows = [*rows_of_a_step()[1:], _row("Trace", "PyTorch Profiler (0)", 9900, 1500, 1, {})]
    kernel(rows, 4)["dur"] = 2_000_000
    said = "left out: 1 device event with a time outside of the profiler's window (first: 'kernel 4')"
    assert read(rows, tmp_path) == (KERNELS - 1, [said])


def test_a_trace_of_devices_alone_has_no_window(tmp_path: Path) -> None:
    rows = [one for one in rows_of_a_step() if one["cat"] == "kernel"]
    kernel(rows, 0)["ts"] = 3_000_000
    assert read(rows, tmp_path) == (KERNELS, [])


@pytest.mark.parametrize("behind_us", [30_000, -30_000])
def test_clocks_that_differ_leave_all_events(behind_us: float, tmp_path: Path) -> None:
    assert read(rows_of_a_step(behind_us=behind_us), tmp_path) == (KERNELS, [])


def test_work_from_before_the_window_stays(tmp_path: Path) -> None:
    rows = [*rows_of_a_step()[1:], _row("Trace", "PyTorch Profiler (0)", 10_500, 900, 1, {})]
    for row in rows[:-1]:
        row["ts"] -= 5_000 if row["ts"] < 10_500 else 0
    assert read(rows, tmp_path) == (KERNELS, [])


@pytest.mark.parametrize("change", [{"correlation": 6}, {"context": 2}, {"stream": 9}, {"device": 1}])
def test_kernels_of_one_graph_context_or_stream_may_contain_others(change: dict[str, int], tmp_path: Path) -> None:
    rows = rows_of_a_step()
    kernel(rows, 4)["dur"] = 600
    kernel(rows, 4)["args"].update(change)
    for number in (6, 8) if "correlation" in change else ():
        kernel(rows, number)["args"].update(change)
    assert read(rows, tmp_path) == (KERNELS, [])


def test_kernels_may_overlap_at_their_edges(tmp_path: Path) -> None:
    rows = rows_of_a_step()
    for number in range(KERNELS):
        kernel(rows, number)["dur"] = 210
    rows[0]["ts"] += 1000
    assert read(rows, tmp_path) == (KERNELS, [])
