"""What GPUs did with their time, of exports of Nsight Systems."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from crossrank.tools.traces.nsight.read import read_export
from crossrank.tools.traces.rank_trace import RankTrace
from tests.busy_time import busy_ns
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.traces.nsight.exports import EPOCH, ExportFile, Process, read
from tests.unit.traces.nsight.test_read import two_calls, write_comms

Pairs = list[tuple[int, int]]


def spans(times: RankTrace) -> tuple[Pairs, Pairs, Pairs]:
    """(computation, communication, memory) in ns of the report."""
    busy = times.busy
    parts = (busy.computation, busy.communication, busy.memory)
    computation, communication, memory = ([(one - EPOCH, two - EPOCH) for one, two in part.tolist()] for part in parts)
    return computation, communication, memory


def computing(process: Process) -> None:
    """Two calls, three kernels of a product, and copies."""
    two_calls(process)
    for launched, start, end in ((100, 300, 600), (1200, 1600, 2100), (2200, 2300, 2600)):
        process.kernel(launched, start, end, name="sm90_gemm_bf16(Params)", stream=7)
    process.copy(50, 100, 200, kind=1)


def test_kernels_compute_or_communicate_and_copies_are_memory(tmp_path: Path, process: Process) -> None:
    computing(process)
    times = read(process, tmp_path)
    assert times.busy.where == "device"
    assert spans(times) == ([(300, 600), (1600, 2100), (2300, 2600)], [(1500, 1900), (2500, 2900)], [(100, 200)])
    assert (times.busy.observed - EPOCH).tolist() == [[100, 2900]]


def test_gpu_copies_launched_by_a_call_count_as_communication(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1, op="all_gather")
    process.copy(1020, 2000, 2500)
    process.copy(3000, 3100, 3200)
    process.kernel(1200, 1300, 1400, name="gemm")
    assert spans(read(process, tmp_path))[1:] == ([(2000, 2500)], [(2000, 2500), (3100, 3200)])


def test_steps_come_from_the_comms_file_and_start_at_their_first_launched_kernel(
    tmp_path: Path, process: Process
) -> None:
    process.identity(0)
    computing(process)
    records = [{"id": number, "op": "all_reduce", "seq": number, "step": number} for number in (1, 2)]
    comms = write_comms(tmp_path / "rank-0.comms.jsonl", *records, clock={"t": 0, "wall": EPOCH + 1100 - 50})
    lines = Path(comms).read_text().replace('"t": 60', '"step": 8, "t": 1100')
    Path(comms).write_text(lines)
    (times,) = read_export(str(process.export.write(tmp_path / "a.sqlite")), None, {0: comms})
    assert times.steps == [(7, EPOCH + 1100), (8, EPOCH + 2150)]
    # The product that the host launched at 1200 ran from 1600 on, that of 2200 from 2300 on.
    assert [(step, one - EPOCH, two - EPOCH) for step, one, two in times.busy.iterations] == [(7, 1600, 2300)]


MS = 1_000_000


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        (0, 1, "a start before their launch"),
        (104 * MS, 9_000 * MS, "a time outside of the profiler's window"),
        (104 * MS, 124 * MS, "a duration that contains several later ones of their stream"),
    ],
)
@pytest.mark.parametrize("name", ["gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"])
def test_a_kernel_with_impossible_times_is_left_out(
    start: int, end: int, said: str, name: str, tmp_path: Path, process: Process
) -> None:
    for number in range(1, 11):
        at = (95 + 5 * number) * MS
        is_wrong = number == 2
        if is_wrong and name != "gemm":
            process.marker(at - MS, at, 1)
        span = (start, end) if is_wrong else (at, at + 2 * MS)
        process.kernel(at - MS // 2, *span, name=name if is_wrong else "gemm", stream=7)
    process.marker(199 * MS, 200 * MS + 5, 2)
    process.kernel(200 * MS, 201 * MS, 202 * MS)
    times = read(process, tmp_path)
    assert spans(times)[0] == [((95 + 5 * number) * MS, (97 + 5 * number) * MS) for number in (1, *range(3, 11))]
    assert spans(times)[1] == [(201 * MS, 202 * MS)]
    assert list(times.calls.ended) == [*([0] if name != "gemm" else []), EPOCH + 202 * MS]
    (note,) = (one for one in times.notes if "left out" in one)
    assert note.endswith(f"left out: 1 device event with {said} (first: {name!r})")


def test_each_process_has_its_own_time(tmp_path: Path) -> None:
    export = ExportFile()
    for rank in range(2):
        process = export.process(70 + rank)
        process.identity(rank)
        two_calls(process)
        process.kernel(100, 200, 300 + rank, name="gemm")
    found = read_export(str(export.write(tmp_path / "a.sqlite")), None, {})
    assert [spans(times)[0] for times in found] == [[(200, 300)], [(200, 301)]]


def test_gpu_activity_is_unknown_if_graphs_are_traced_whole(tmp_path: Path, process: Process) -> None:
    computing(process)
    process.export.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=5000, end=9000, deviceId=0, correlationId=1)
    assert read(process, tmp_path).busy.where == ""


def test_device_time_is_unknown_without_communication_kernels(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1)
    process.kernel(100, 200, 300, name="gemm")
    other = process.export.process(71)
    other.identity(1)
    two_calls(other)
    found = read_export(str(process.export.write(tmp_path / "a.sqlite")), None, {})
    assert [times.busy.where for times in found] == ["", "device"]


def test_copies_of_a_call_with_a_kernel_count_as_communication(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1, op="all_gather")
    process.kernel(1010, 1200, 1300)
    process.copy(1020, 1300, 2500)
    assert spans(read(process, tmp_path)) == ([], [(1200, 2500)], [(1300, 2500)])


@needs_traces
def test_times_of_two_h100s_match_an_independent_count() -> None:
    path = public("nsight_h100/mfu_2gpu_before.sqlite")
    query = """SELECT k.globalPid, s.value LIKE 'ncclDevKernel%', k.start, k.end
        FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName"""
    kernels: defaultdict[int, tuple[Pairs, Pairs]] = defaultdict(lambda: ([], []))
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        for process, communicates, start, end in connection.execute(query):
            kernels[process][communicates].append((start, end))
    expected = [(busy_ns(computes), busy_ns(communicates)) for _, (computes, communicates) in sorted(kernels.items())]
    found = [spans(times)[:2] for times in read_export(path, None, {})]
    assert [(busy_ns(one), busy_ns(two)) for one, two in found] == expected
    assert expected == [(253_690_832, 17_172_652), (256_095_624, 8_229_100)]
