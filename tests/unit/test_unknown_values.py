"""A fact that a trace lacks is unknown in every column of every table: null, and never 0."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import crossrank
from crossrank.errors import CrossrankError
from tests.unit.traces.flight_entries import flight_dump, flight_entry
from tests.unit.traces.nsight.exports import ExportFile, changed

Content = dict[str, Any]
_CALLS = 9
_SHARED: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": 256, "Out msg nelems": 256}
_SHARED |= {"Group size": 2, "dtype": "Float", "Process Group Name": "7", "Process Group Ranks": "[0, 1]"}
_SHARED |= {"Process Group Description": "data", "Global rank start": 0, "Global rank stride": 1}
_TABLES = ("calls", "collectives", "transfers", "arrivals", "steps", "groups", "ranks", "durations")
_COUNTED = ("rank", "call", "group", "collective", "row", "problems", "clock_shift_ns", "first", "last", "number")
"""Columns in which 0 is a number, a place or a count of what was seen."""
_SEEN = {"ranks.calls", "groups.calls", "groups.bytes", "collectives.ranks", "transfers.ranks", "overlap.memory_ns"}
"""Counts and sums of what a source has: 0 where it has no call, or no call with a duration."""


def trace_of(rank: int) -> Content:
    """Nine all_reduces in three steps, of which rank 1 is late in each."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> None:
        one = {"ph": "X", "cat": category, "name": name, "pid": 100 + rank, "tid": tid, "ts": ts, "dur": dur}
        events.append(one | {"args": args})

    for step in range(3):
        add("user_annotation", f"ProfilerStep#{5 + step}", 3000 * step + 50, 2990, 1)
    for number in range(_CALLS):
        called = 1000 * number + 100 + 40 * rank
        ids = {"correlation": number + 1, "External id": number + 1}
        add("cpu_op", "record_param_comms", called, 20, 1, **_SHARED, Seq=number + 1, **{"External id": number + 1})
        add("cuda_runtime", "cudaLaunchKernelExC", called + 5, 5, 1, **ids)
        end = 1000 * number + 500
        device = {"device": rank, "stream": 20, "context": 1}
        add("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", called + 30, end - called - 30, 20, **device, **ids)
        device["stream"] = 7
        add("kernel", "gemm", end + 10, 100, 7, **device)
    info = {"rank": rank, "world_size": 2, "pg_config": [{"pg_name": "7", "pg_desc": "data", "ranks": [0, 1]}]}
    return {"baseTimeNanoseconds": 1_780_000_000_000_000_000, "distributedInfo": info, "traceEvents": events}


def _without_argument(name: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        for event in content["traceEvents"]:
            event["args"].pop(name, None)

    return change


def _with_argument(name: str, value: object) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        for event in content["traceEvents"]:
            if name in event["args"]:
                event["args"][name] = value

    return change


def _without_events(name: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        content["traceEvents"] = [one for one in content["traceEvents"] if not one["name"].startswith(name)]

    return change


def _without_field(name: str) -> Callable[[Content], None]:
    return lambda content: content.pop(name)


MISSING: dict[str, Callable[[Content], None]] = {
    **{
        f"without {name}": _without_argument(name) for name in (*_SHARED, "Seq", "correlation", "External id", "stream")
    },
    **{f"{name} is {value!r}": _with_argument(name, value) for name in _SHARED for value in ("", 0)},
    "without steps": _without_events("ProfilerStep"),
    "without records": _without_events("record_param_comms"),
    "without launches": _without_events("cudaLaunch"),
    "without base time": _without_field("baseTimeNanoseconds"),
    "without distributedInfo": _without_field("distributedInfo"),
}


def write_ranks(
    folder: Path, name: str, make: Callable[[int], Content], change: Callable[[Content], None] | None
) -> Path:
    for rank in range(2):
        content = make(rank)
        if change is not None:
            change(content)
        (folder / name.format(rank)).write_text(json.dumps(content))
    return folder


def write_traces(folder: Path, change: Callable[[Content], None] | None = None) -> Path:
    return write_ranks(folder, "rank-{}.json", trace_of, change)


def tables_of(folder: Path) -> dict[str, pl.DataFrame]:
    job = crossrank.load(folder)
    found = {name: job.table(name) for name in _TABLES}
    return found if job.overlap().frame.is_empty() else found | {"overlap": job.overlap().frame}


@cache
def whole_tables(write: Callable[[Path], Path]) -> dict[str, pl.DataFrame]:
    """Return the tables of an input that lacks nothing."""
    with tempfile.TemporaryDirectory() as folder:
        return tables_of(write(Path(folder)))


@pytest.mark.parametrize("missing", MISSING)
def test_no_column_is_0_for_a_fact_that_the_trace_lacks(missing: str, tmp_path: Path) -> None:
    assert unknown_as_0(whole_tables(write_traces), tables_of(write_traces(tmp_path, MISSING[missing]))) == []


def dump_of(rank: int) -> Content:
    """Nine timed all_reduces, of which rank 1 is late in each."""
    entries = []
    for number in range(_CALLS):
        at = 1_780_000_000_000_000_000 + number * 10_000_000 + rank * 40_000
        times: dict[str, Any] = {"time_created_ns": at, "time_discovered_started_ns": at + 1000, "duration_ms": 0.4}
        times |= {"time_discovered_completed_ns": at + 500_000, "state": "completed"}
        frame = {"name": "step", "filename": "train.py", "line": 12}
        entries.append(flight_entry(number, "all_reduce", number + 1, **times, frames=[frame]))
    return flight_dump(entries, [0, 1])


def _without_entry_field(name: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        for entry in content["entries"]:
            entry.pop(name, None)

    return change


def _with_entry_field(name: str, value: object) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        for entry in content["entries"]:
            entry[name] = value

    return change


_ODD: tuple[object, ...] = (None, 0)
_ENTRY_FIELDS = tuple(dump_of(0)["entries"][0])
MISSING_IN_DUMPS: dict[str, Callable[[Content], None]] = {
    **{f"without {name}": _without_entry_field(name) for name in _ENTRY_FIELDS},
    **{f"{name} is {value!r}": _with_entry_field(name, value) for name in _ENTRY_FIELDS for value in _ODD},
    **{f"without {name}": _without_field(name) for name in dump_of(0) if name != "entries"},
}


def write_dumps(folder: Path, change: Callable[[Content], None] | None = None) -> Path:
    return write_ranks(folder, "rank_{}.json", dump_of, change)


@pytest.mark.parametrize("missing", MISSING_IN_DUMPS)
def test_no_column_is_0_for_a_fact_that_the_dump_lacks(missing: str, tmp_path: Path) -> None:
    write_dumps(tmp_path, MISSING_IN_DUMPS[missing])
    job = crossrank.load(tmp_path)
    if not len(job.calls):  # entries that are none are refused, and counted
        assert job.notes[0].startswith(f"{_CALLS} of {_CALLS} entries are unusable")
        return
    assert unknown_as_0(whole_tables(write_dumps), {table: job.table(table) for table in _TABLES}) == []


def export_of(rank: int, folder: Path) -> Path:
    """Nine all_reduces in three steps, of which rank 1 is late in each, and a copy beside them."""
    export = ExportFile()
    process = export.process(70 + rank)
    process.identity(rank)
    process.group()
    for number in range(1, _CALLS + 1):
        start = 1_000_000 * number
        process.marker(start, start + 9000, number)
        process.kernel(start + 5000, start + 10_000 + 50_000 * rank, start + 160_000)
        process.copy(start + 200_000, start + 210_000, start + 250_000)
    return export.write(folder / f"rank_{rank}.sqlite")


_EXPORT_COLUMNS = {
    "NVTX_EVENTS": ("end", "textId", "globalTid", "domainId", "int64Value"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("end", "globalTid", "correlationId"),
    "CUPTI_ACTIVITY_KIND_KERNEL": ("correlationId", "globalPid", "graphNodeId", "deviceId", "streamId"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("correlationId", "globalPid", "srcDeviceId", "dstDeviceId", "copyKind"),
    "TARGET_INFO_SESSION_START_TIME": ("utcEpochNs",),
}
_MARKER_FIELDS = ("op", "c10d", "pg", "dtype", "in", "out", "bytes", "locality")
MISSING_IN_EXPORTS: dict[str, tuple[str, ...]] = {
    **{f"without {table}": (f"DROP TABLE {table}",) for table in _EXPORT_COLUMNS},
    **{
        f"without {table}.{column}": (f"ALTER TABLE {table} DROP COLUMN {column}",)
        for table, columns in _EXPORT_COLUMNS.items()
        for column in columns
    },
    **{
        f"{table}.{column} is 0": (f"UPDATE {table} SET {column} = 0",)
        for table, columns in _EXPORT_COLUMNS.items()
        for column in columns
    },
    **{
        f"markers without {name}": (
            f"UPDATE StringIds SET value = json_remove(value, '$.{name}') WHERE json_valid(value)",
        )
        for name in (*_MARKER_FIELDS, "group", "rank", "world_size", "host")
    },
}


def write_exports(folder: Path, *statements: str) -> Path:
    for rank in range(2):
        changed(export_of(rank, folder), *statements)
    return folder


@pytest.mark.parametrize("missing", MISSING_IN_EXPORTS)
def test_no_column_is_0_for_a_fact_that_the_export_lacks(missing: str, tmp_path: Path) -> None:
    with suppress(CrossrankError):  # what is refused says nothing wrong
        tables = tables_of(write_exports(tmp_path, *MISSING_IN_EXPORTS[missing]))
        assert unknown_as_0(whole_tables(write_exports), tables) == []


_INSPECTOR = Path(__file__).parent / "traces/inspector"
_LINE_FIELDS = {
    "header": ("id", "comm_name", "rank", "n_ranks", "nnodes"),
    "metadata": ("dump_timestamp_us", "hostname", "pid", "inspector_output_format_version"),
    "coll_perf": ("coll", "coll_sn", "coll_msg_size_bytes", "coll_exec_time_us", "coll_timing_source"),
    "p2p_perf": ("p2p", "p2p_sn", "p2p_peer", "p2p_msg_size_bytes", "p2p_exec_time_us", "p2p_timing_source"),
}
MISSING_IN_INSPECTOR = [
    (part, field, value)
    for part, fields in _LINE_FIELDS.items()
    for field in fields
    for value in (None, 0, "")
    if (field, value) != ("p2p_peer", 0)  # a rank
]


def write_inspector(folder: Path, part: str = "", field: str = "", value: object = None) -> Path:
    """Write the lines of NCCL Inspector; with `field` without it, or with this value."""
    for path in _INSPECTOR.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if part in row:
                row[part] = {key: one for key, one in row[part].items() if key != field}
                row[part] |= {} if value is None else {field: value}
        (folder / path.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(("part", "field", "value"), MISSING_IN_INSPECTOR)
def test_no_column_is_0_for_a_fact_that_nccl_inspector_lacks(
    part: str, field: str, value: object, tmp_path: Path
) -> None:
    with suppress(CrossrankError):  # what is refused says nothing wrong
        tables = tables_of(write_inspector(tmp_path, part, field, value))
        assert unknown_as_0(whole_tables(write_inspector), tables) == []


def unknown_as_0(whole: dict[str, pl.DataFrame], lacking: dict[str, pl.DataFrame]) -> list[str]:
    """Return the columns that are never 0 or empty in the whole tables, and are so where a fact is missing."""
    wrong = []
    for name, table in lacking.items():
        for column in set(table.columns) - {*_COUNTED}:
            before, after = whole[name][column], table[column]
            if before.dtype.is_numeric() and before.null_count() < len(before) and (before.drop_nulls() != 0).all():
                is_unknown = f"{name}.{column}" not in _SEEN
                wrong += [f"{name}.{column} is 0"] if is_unknown and (after.drop_nulls() == 0).any() else []
            if after.dtype == pl.String and (after.drop_nulls() == "").any():
                wrong.append(f"{name}.{column} is an empty text")
    return wrong


def test_the_steps_of_calls_are_those_of_the_profiler(tmp_path: Path) -> None:
    calls = whole_tables(write_traces)["calls"]
    assert calls.filter(pl.col("rank") == 1)["step"].to_list() == [5, 5, 5, 6, 6, 6, 7, 7, 7]
    assert tables_of(write_traces(tmp_path, MISSING["without steps"]))["calls"]["step"].null_count() == 2 * _CALLS
