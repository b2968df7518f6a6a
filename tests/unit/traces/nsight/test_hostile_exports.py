"""An export runs nothing of what it says: views are refused, queries end, and nothing is written beside it."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from pathlib import Path
from types import FrameType

import pytest

from crossrank.budget import BudgetError
from crossrank.errors import CrossrankError
from crossrank.tools.traces.nsight.export import open_export
from crossrank.tools.traces.nsight.read import read_export
from tests.unit.traces.nsight.exports import ExportFile, changed
from tests.unit.traces.nsight.test_read import two_calls

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    file = ExportFile()
    two_calls(file.process(70))
    return file.write(tmp_path / "rank_0.sqlite")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW NVTX_EVENTS AS SELECT * FROM other",
        f"CREATE VIEW NVTX_EVENTS AS {ENDLESS}",
        "CREATE VIRTUAL TABLE NVTX_EVENTS USING fts5(text)",
    ],
)
def test_a_view_or_a_virtual_table_in_place_of_a_table_is_refused(export: Path, statement: str) -> None:
    changed(export, "ALTER TABLE NVTX_EVENTS RENAME TO other", statement)
    with pytest.raises(
        CrossrankError, match="NVTX_EVENTS is a view, not a table, which no export has; export it again"
    ):
        read_export(str(export), None, {})


def test_an_endless_query_is_stopped(export: Path) -> None:
    too_much = pytest.raises(BudgetError, match="more than 3,000,000 microseconds of queries")
    with too_much, open_export(str(export)) as opened:
        list(opened.rows(ENDLESS))


class _SignalError(BaseException):
    pass


def test_a_signal_ends_a_query_with_its_handlers_exception(export: Path) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _SignalError

    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, stop)
    try:
        timer.start()
        with pytest.raises(_SignalError), open_export(str(export)) as opened:
            list(opened.rows(ENDLESS))
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGTERM, before)


def test_reading_creates_no_file_and_takes_no_lock(export: Path) -> None:
    changed(export, "PRAGMA journal_mode = WAL")
    left = sorted(os.listdir(export.parent))
    locked = sqlite3.connect(export, isolation_level=None)
    locked.execute("PRAGMA journal_mode = DELETE")
    locked.execute("BEGIN EXCLUSIVE")
    assert len(read_export(str(export), None, {})) == 1
    locked.close()
    assert sorted(os.listdir(export.parent)) == left


def test_a_column_name_that_is_not_text_is_reported(export: Path) -> None:
    data = export.read_bytes()
    assert data.count(b"globalTid") > 0
    export.write_bytes(data.replace(b"globalTid", b"global\xff\xfed"))
    with pytest.raises(CrossrankError, match=r"globalTid|damaged"):
        read_export(str(export), None, {})


def test_event_types_with_the_same_number_are_still_read(export: Path) -> None:
    rows = ", ".join(f"(59, '{name}')" for name in ("NvtxMark", "NvtxPushPopRange", "NvtxStartEndRange"))
    table = "ENUM_NSYS_EVENT_TYPE"
    changed(
        export,
        f"DROP TABLE IF EXISTS {table}",
        f"CREATE TABLE {table} (id INTEGER, name TEXT)",
        f"INSERT INTO {table} VALUES {rows}",
    )
    (times,) = read_export(str(export), None, {})
    assert len(times) == 2
