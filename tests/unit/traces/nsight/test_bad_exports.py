"""Exports that are none, are damaged, lack what is needed, or hold what cannot be: each is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrank.errors import CrossrankError
from crossrank.tools.traces.nsight.read import IN_OURS, NO_KERNEL, NO_LAUNCH, OUTSIDE, read_export
from tests.unit.traces.nsight.exports import EPOCH, ExportFile, Process, changed, read
from tests.unit.traces.nsight.test_read import rows, two_calls


def refused(path: Path) -> str:
    with pytest.raises(CrossrankError) as error:
        read_export(str(path), None, {})
    text = str(error.value)
    assert "\n" not in text
    return text.removeprefix(str(path))


@pytest.mark.parametrize("kernel", [None, "gemm"])
def test_markers_without_communication_kernels_are_calls_without_times(
    tmp_path: Path, process: Process, kernel: str | None
) -> None:
    process.identity(0)
    process.marker(1000, 1100, 1)
    if kernel is not None:
        process.kernel(1000, 1100, 1200, name=kernel)
    times = read(process, tmp_path)
    assert rows(times) == [("all_reduce", "0", 1, 1, 0, 0)]
    assert [moment - EPOCH for moment in times.calls.called] == [1000]
    assert dict(times.unattributed) == {NO_KERNEL: 1}
    (note,) = times.notes
    assert "1 calls have markers, but the export has no communication kernel with times" in note


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("gemm", "has no communication: no marker of a call and no communication kernel"),
        ("ncclDevKernel_AllReduce", "has 1 communication kernels, but no marker of crossrank, the older shim or NCCL"),
    ],
)
def test_kernels_without_markers_show_the_work_of_their_process(
    tmp_path: Path, process: Process, name: str, note: str
) -> None:
    process.kernel(1000, 1100, 1200, name=name)
    (times,) = read_export(str(process.export.write(tmp_path / "b.sqlite")), 3, {})
    busy = times.busy.communication if "nccl" in name else times.busy.computation
    assert (times.rank, len(times), (busy - EPOCH).tolist()) == (3, 0, [[1100, 1200]])
    assert times.notes[0].startswith(f"{tmp_path}/b.sqlite: {note}")


def test_an_export_without_kernels_is_refused(tmp_path: Path, process: Process) -> None:
    assert refused(process.export.write(tmp_path / "b.sqlite")).startswith(": has neither NVTX ranges nor CUDA kernels")


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "start"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "end"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId"),
        ("NVTX_EVENTS", "globalTid"),
    ],
)
def test_a_missing_required_column_is_reported(tmp_path: Path, table: str, column: str) -> None:
    export = ExportFile("3.16.1")
    two_calls(export.process(70))
    path = export.write(tmp_path / "a.sqlite")
    changed(path, f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
    assert refused(path).startswith(f": {table} has no column {column}; export it with a version")


@pytest.mark.parametrize(
    ("column", "value", "shown", "durations"),
    [
        ("deviceId", "cuda", "'cuda'", [400, 400]),
        ("start", b"x", "b'x'", [0, 400]),
        ("end", float("inf"), "'Inf'", [0, 400]),
        ("start", 1e30, "'1.0e+30'", [0, 400]),
        ("correlationId", "7" * 100, "'7.77777777777778e+99'", [0, 400]),
    ],
)
def test_a_value_that_is_not_a_number_is_unknown(
    tmp_path: Path, process: Process, column: str, value: object, shown: str, durations: list[int]
) -> None:
    two_calls(process)
    process.export.tables["CUPTI_ACTIVITY_KIND_KERNEL"][0][column] = value
    found = read(process, tmp_path)
    assert [end - start for start, end in zip(found.calls.began, found.calls.ended, strict=True)] == durations
    said = f"values that are no numbers are taken as unknown (first: row 1, {column} holds {shown})"
    assert any(f"CUPTI_ACTIVITY_KIND_KERNEL: {said}" in note for note in found.notes)


def test_impossible_times_skip_only_their_kernel(tmp_path: Path) -> None:
    process = ExportFile(epoch=1 << 61).process(70)
    two_calls(process)
    process.marker(5000, 5100, 3)
    process.kernel(5050, 5500, 5400)
    process.marker(6000, 6100, 4)
    process.kernel(6050, 6500, 1 << 61)
    process.kernel(6060, -1, 6900)
    times = read(process, tmp_path)
    assert list(zip(times.calls.began, times.calls.ended, strict=True)) == [(1500, 1900), (2500, 2900), (0, 0), (0, 0)]
    assert times.unattributed == {NO_KERNEL: 2}
    assert [note.partition(": ")[2] for note in times.notes] == [
        "rows that end before they start, or at impossible times, were left out: 3 of CUPTI_ACTIVITY_KIND_KERNEL",
        "has no start time of its session: its times are aligned only by collectives",
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"op": 5, "pg": "0"}',
        '{"op": "all_reduce", "pg": "0", "bytes": 1e400}',
        '{"op": "all_reduce", "pg": "0", "root": ' + "9" * 40 + "}",
        "{" + '"a":{' * 5000,
        '{"name": "all_reduce", "message_size": "many"}',
        '{"crossrank": "1", "rank": -3}',
        "{\ud800",
    ],
)
@pytest.mark.parametrize("registered", [True, False])
def test_only_a_broken_marker_is_skipped(tmp_path: Path, text: str, registered: bool) -> None:
    process = ExportFile(registered=registered).process(70)
    two_calls(process)
    process.event(59, 5000, 5100, text.encode("utf-8", "replace").decode(), payload=9)
    process.kernel(5050, 5500, 5900)
    times = read(process, tmp_path)
    assert [row[3:] for row in rows(times)] == [(1, 1500, 1900), (2, 2500, 2900)]
    assert times.unattributed == {OUTSIDE: 1}
    assert times.rank is None


def test_whole_graph_traces_are_refused_with_the_option_to_use(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1)
    process.export.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=2000, end=3000)
    told = refused(process.export.write(tmp_path / "a.sqlite"))
    assert told.endswith("record with --cuda-graph-trace=node, or without the graph")


def test_kernels_without_a_call_are_counted_by_reason(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1)
    process.kernel(0, 500, 600, launch=False)
    why = f": none of 1 marked calls has a kernel among 1 (1 {NO_KERNEL}; 1 {NO_LAUNCH}); record with"
    assert refused(process.export.write(tmp_path / "a.sqlite")).startswith(why)
    process.kernel(2000, 2100, 2200)
    process.kernel(3000, 3100, 3200)
    assert refused(process.export.write(tmp_path / "a.sqlite")) == (
        f": none of 1 marked calls has a kernel among 3 (2 {OUTSIDE}; 1 {NO_KERNEL}; 1 {NO_LAUNCH}); record "
        "with --trace=cuda,nvtx, and export NVTX_EVENTS, CUPTI_ACTIVITY_KIND_KERNEL and _RUNTIME"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", ": is empty; export the report again"),
        (b"nothing of the kind" * 99, ": is damaged or not an SQLite file"),
        (["PRAGMA user_version = 3"], ": is an empty database; export the report again"),
        (["CREATE TABLE cats (id)"], ": is a database, but not an export of Nsight Systems (its tables: cats)"),
        # As of 2022, with nothing but its version.
        (["CREATE TABLE EXPORT_META_DATA (name TEXT NOT NULL, value TEXT)"], ": has neither NVTX ranges nor CUDA kern"),
    ],
)
def test_files_that_are_not_exports_are_refused(tmp_path: Path, content: bytes | list[str], why: str) -> None:
    path = tmp_path / "a.sqlite"
    if isinstance(content, bytes):
        path.write_bytes(content)
    assert refused(path if isinstance(content, bytes) else changed(path, *content)).startswith(why)


def test_half_an_export_is_refused(tmp_path: Path, process: Process) -> None:
    two_calls(process)
    path = process.export.write(tmp_path / "a.sqlite")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refused(path).startswith(": is damaged or not an SQLite file")


@pytest.mark.parametrize(("version", "notes"), [("3.0.0", []), ("", []), ("2.9.0", ["has schema version 2.9.0"])])
def test_the_2022_schema_is_recognised_by_its_table(tmp_path: Path, version: str, notes: list[str]) -> None:
    export = ExportFile(version, epoch=1)
    two_calls(export.process(70))
    path = changed(export.write(tmp_path / "a.sqlite"), "ALTER TABLE META_DATA_EXPORT RENAME TO EXPORT_META_DATA")
    (times,) = read_export(str(path), None, {})
    assert [note.partition(": ")[2].partition(";")[0] for note in times.notes] == notes


def test_empty_kernel_tables_count_as_missing(tmp_path: Path, process: Process) -> None:
    process.marker(1000, 1100, 1)
    process.export.tables |= {"CUPTI_ACTIVITY_KIND_KERNEL": [], "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": []}  # --lazy false
    assert len(read(process, tmp_path)) == 1


def test_an_unknown_schema_is_reported_and_its_known_columns_are_read(tmp_path: Path) -> None:
    process = ExportFile("4.1.0", epoch=None).process(70)
    two_calls(process)
    times = read(process, tmp_path)
    assert dict(times.attributed) == {IN_OURS: 2}
    assert [note.partition(": ")[2] for note in times.notes] == [
        "has schema version 4.1.0; 3.0 to 3.28 are supported: crossrank reads the columns that they share",
        "has no start time of its session: its times are aligned only by collectives",
    ]
