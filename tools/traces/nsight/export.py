"""Opens an export for reading: its tables and columns, which may be missing, as numpy arrays."""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import fsspec
import numpy as np
from numpy.typing import NDArray

from crossrank.budget import BYTES, QUERIES, ROWS, Budget
from crossrank.errors import CrossrankError, one_line
from crossrank.recording import is_url

if TYPE_CHECKING:
    from typing_extensions import Self

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

NVTX = "NVTX_EVENTS"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH_TRACE = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
GRAPH_NODES = ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS")
"""Names of the table with the times at which nodes of CUDA graphs were created; 2022.4 and 2023.4 have the second."""
STRINGS = "StringIds"

_KNOWN = ((3, 0), (3, 28))
"""First and last schema version (major, minor) whose documentation has the columns read here: 2022.4 to 2026.4."""
_META_DATA = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""Names of the table with the version; 2022 has the second."""
_SIGNS = (NVTX, RUNTIME, KERNEL, *_META_DATA, "TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS")
_READ = (*_SIGNS, MEMCPY, MEMSET, GRAPH_TRACE, *GRAPH_NODES, STRINGS, "TARGET_INFO_SYSTEM_ENV", "ENUM_NSYS_EVENT_TYPE")
_NEEDED = {
    NVTX: ("start", "end", "eventType", "globalTid"),
    KERNEL: ("start", "end", "globalPid", "correlationId"),
    RUNTIME: ("start", "globalTid", "correlationId"),
}
"""Columns without which a table is not usable."""
_ROWS = 1 << 16
_TICK = 10_000
"""Instructions of SQLite's virtual machine between two checks of the time."""
_LONGEST_VERSION = 40
LATEST = 1 << 61
"""Latest possible time of a capture, in ns since 1970: in 2043."""
_LONGEST = 1 << 56
"""Upper bound for the ns of a capture (2.3 years); from 1970 to any capture it is longer."""
NONE = -1
"""Replaces NULL, and the values of a column that the export does not have."""


class Export:
    """One export, opened read-only. Only tables are read, because a view or a virtual table runs code of the file.
    `notes` has what the export lacks, and `left_out` the numbers of rows with impossible times, by table. A value that
    is no number, in the place of one, is taken as NULL; a note says where the first one is."""

    def __init__(self, path: str, connection: sqlite3.Connection, budget: Budget) -> None:
        self.path = path
        self._connection = connection
        self._budget = budget
        self.notes: list[str] = []
        self.left_out: dict[str, Column] = {}
        # A virtual table has no page of its own.
        query = "SELECT name, type = 'table' AND rootpage > 0 FROM sqlite_master WHERE type IN ('table', 'view')"
        kinds = {str(name): bool(is_table) for name, is_table in self.rows(query)}
        tables = sorted(name for name, is_table in kinds.items() if is_table)
        views = sorted(name for name, is_table in kinds.items() if not is_table and name in _READ)
        if views:
            raise CrossrankError(
                f"{path}: {', '.join(views)} is a view, not a table, which no export has; export it again"
            )
        if not tables:
            raise CrossrankError(f"{path}: is an empty database; export the report again")
        if not any(sign in tables for sign in _SIGNS):
            raise CrossrankError(
                f"{path}: is a database, but not an export of Nsight Systems (its tables: {', '.join(tables[:4])})"
            )
        pragmas = {name: connection.execute(f'PRAGMA table_info("{name}")') for name in tables if name in _READ}
        self._columns = {name: {str(row[1]) for row in rows} for name, rows in pragmas.items()}
        self._check_version()

    def has(self, table: str) -> bool:
        return table in self._columns

    def columns(self, table: str) -> set[str]:
        """Names of the columns of a table; empty if there is no such table."""
        return self._columns.get(table, set())

    def value(self, table: str, column: str, name: str | None = None, *, select: str = "") -> object:
        """The first value of a column, or the value in the row with this `name`; None if the export lacks it."""
        where = "" if name is None else "WHERE name = ?"
        if not {column} | ({"name"} if where else set()) <= self.columns(table):
            return None
        query = f'SELECT {select or column} FROM "{table}" {where}'
        row = self._connection.execute(query, (name,) if where else ()).fetchone()
        return row[0] if row is not None else None

    def all(
        self, table: str, columns: Sequence[str], where: str = "", keep: Callable[[list[Column]], Mask] | None = None
    ) -> list[Column]:
        """Whole columns as integers, with the rows that `keep` selects from some ten thousand at a time; empty columns
        if there is no such table."""
        parts = [[np.empty(0, np.int64)] * len(columns)]
        for part in self._parts(table, columns, where) if self.has(table) else ():
            rows = slice(None) if keep is None else keep(part)
            parts.append([column[rows] for column in part])
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _parts(self, table: str, columns: Sequence[str], where: str) -> Iterator[list[Column]]:
        there = [name for name in columns if name in self.columns(table) | {"rowid"}]

        def rows(number: str) -> Iterator[Sequence[object]]:  # no generator: it would outlive the connection
            select = ", ".join(number.format(f'"{name}"') if name in there else str(NONE) for name in columns)
            return self._connection.execute(f'SELECT {select} FROM "{table}" {where}')

        given, read = rows(f"COALESCE({{0}}, {NONE})"), 0
        while True:
            try:
                # One row at a time: a value in the place of a number may be large.
                flat = np.fromiter(chain.from_iterable(islice(given, _ROWS)), np.int64)
            except (ValueError, TypeError, OverflowError):
                self._note_broken(table, there)
                given = islice(rows(f"CASE WHEN typeof({{0}}) = 'integer' THEN {{0}} ELSE {NONE} END"), read, None)
                continue
            if not len(flat):
                return
            read += len(flat) // len(columns)
            self._budget.spend(ROWS, len(flat) // len(columns))
            yield [flat[number :: len(columns)] for number in range(len(columns))]

    def _note_broken(self, table: str, columns: Sequence[str]) -> None:
        """Say where the first value of these columns is that is no number."""
        broken = " OR ".join(f"typeof(\"{name}\") NOT IN ('integer', 'null')" for name in columns)
        names = ", ".join(f'substr("{name}", 1, 40), typeof("{name}")' for name in columns)
        row = self._connection.execute(f'SELECT rowid, {names} FROM "{table}" WHERE {broken} LIMIT 1').fetchone()
        values = zip(columns, row[1::2], row[2::2], strict=True)
        held = next(f"{name} holds {value!r}" for name, value, kind in values if kind not in ("integer", "null"))
        note = f"{table}: values that are no numbers are taken as unknown (first: row {row[0]}, {held})"
        if note not in self.notes:
            self.notes.append(note)

    def rows(self, query: str, parameters: Sequence[object] = ()) -> Iterator[tuple[object, ...]]:
        """The rows of a query over tables and columns that are known to exist."""
        for row in self._connection.execute(query, parameters):
            self._budget.spend(ROWS, 1)
            for value in row:
                if isinstance(value, bytes):
                    self._budget.spend(BYTES, len(value))
            yield row

    def strings(self, table: str, column: str, where: str = "") -> dict[int, str]:
        """The texts whose ids are in a column."""
        if not self.has(STRINGS):
            return {}
        query = f'SELECT id, value FROM {STRINGS} WHERE id IN (SELECT "{column}" FROM "{table}" {where}) ORDER BY id'
        return {number: str(value) for number, value in self.rows(query) if isinstance(number, int)}

    def epoch_ns(self) -> int:
        """Time 0 of the export, in ns since 1970. 0 if it is unknown, or if the times are already since 1970
        (`--ts-normalize true`)."""
        latest = (self.value(table, "start", select="MAX(start)") for table in (NVTX, KERNEL, RUNTIME))
        if any(isinstance(start, int) and start > _LONGEST for start in latest):
            return 0
        epoch = self.value("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        if isinstance(epoch, int) and 0 < epoch < LATEST:
            return epoch
        self.notes.append("has no start time of its session: its times are aligned only by collectives")
        return 0

    def _check_version(self) -> None:
        """Add a note if the schema is unknown."""
        values = (self.value(table, "value", "EXPORT_SCHEMA_VERSION") for table in _META_DATA)
        version = str(next((value for value in values if value is not None), ""))[:_LONGEST_VERSION]
        number = re.match(r"(\d+)\.(\d+)", version)
        if version and not (number and _KNOWN[0] <= (int(number[1]), int(number[2])) <= _KNOWN[1]):
            self.notes.append(
                f"has schema version {version}; 3.0 to 3.28 are supported: crossrank reads the columns that they share"
            )


@dataclass
class Columns:
    """Columns of one length. Fields that are not arrays belong to all rows."""

    start: Column
    end: Column

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: Column | Mask) -> Self:
        """The rows at these indices, or of this mask."""
        columns = {name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **columns)


def lookup(ordered: Column, values: Column) -> Column:
    """Index in `ordered` of each value (the first of equal ones); `NONE` if it is missing."""
    if not len(ordered):
        return np.full(len(values), NONE, np.int64)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[at] == values, at, NONE)


def at(values: Column | Mask, index: Column) -> Column:
    """The value at each index; `NONE` if the index is negative."""
    if not len(values):
        return np.full(len(index), NONE, np.int64)
    return np.where(index < 0, NONE, values[np.maximum(index, 0)])


@dataclass
class _Watch:
    """Watches the queries of one export: spends their time and text, and ends them by an exception."""

    budget: Budget
    stopped: BaseException | None = None

    def text(self, raw: bytes) -> str:
        self.budget.spend(BYTES, len(raw))
        return raw.decode("utf-8", "replace")

    def ticks(self) -> Iterator[int]:
        """A progress handler: SQLite continues its query after each tick, and ends it if there is none.

        SQLite drops exceptions of its callbacks. The exception of a signal, such as SIGTERM, would be raised before the
        first line of a function. In a generator it is raised at the `yield`, inside the `try`.
        """
        last = time.thread_time_ns()
        try:
            while True:
                now = time.thread_time_ns()
                self.budget.spend(QUERIES, (now - last) // 1000)
                last = now
                yield 0
        except GeneratorExit:
            raise
        except BaseException as error:
            self.stopped = error


@contextmanager
def open_export(path: str) -> Iterator[Export]:
    """Open the export at a path or URL. Raises `CrossrankError` if it is not an export, or is damaged."""
    with tempfile.TemporaryDirectory(prefix="crossrank-") as scratch:
        local = path
        if is_url(path):  # SQLite reads only files
            local = str(Path(scratch) / "export.sqlite")
            try:
                file_system, there = fsspec.core.url_to_fs(path)
                file_system.get_file(there, local)
            except Exception as error:  # every kind of file system has its own errors
                raise CrossrankError(f"{path}: cannot be read ({one_line(error)})") from error
        try:
            if os.path.getsize(local) == 0:
                raise CrossrankError(f"{path}: is empty; export the report again")
            # Immutable: SQLite takes no lock, and neither reads nor makes another file.
            connection = sqlite3.connect(f"file:{quote(os.path.abspath(local))}?mode=ro&immutable=1", uri=True)
        except (OSError, sqlite3.Error) as error:
            raise CrossrankError(f"{path}: cannot be opened ({one_line(error)})") from error
        watch = _Watch(Budget(path, os.path.getsize(local)))
        try:
            connection.text_factory = watch.text
            connection.set_progress_handler(watch.ticks().__next__, _TICK)
            connection.execute("PRAGMA trusted_schema = OFF")
            yield Export(path, connection, watch.budget)
        except (sqlite3.Error, UnicodeError) as error:  # the latter for names of columns
            if watch.stopped is not None:
                raise watch.stopped from None
            raise CrossrankError(
                f"{path}: is damaged or not an SQLite file ({one_line(error)}); export it again"
            ) from error
        finally:
            with suppress(sqlite3.Error):
                connection.close()


def require_tables(export: Export) -> None:
    """Raise `CrossrankError` if the export lacks what is needed; the text says what was not recorded."""
    for table, columns in _NEEDED.items():
        lacking = [name for name in columns if name not in export.columns(table)]
        if export.has(table) and lacking:
            raise CrossrankError(
                f"{export.path}: {table} has no column {', '.join(lacking)}; export it with a version of Nsight "
                "Systems whose schema is 3.0 to 3.28 (2022.4 to 2026.4)"
            )
    if not export.has(KERNEL) and not export.has(NVTX):
        raise CrossrankError(
            f"{export.path}: has neither NVTX ranges nor CUDA kernels; record with --trace=cuda,nvtx and export "
            f"the tables {', '.join(_NEEDED)}"
        )
