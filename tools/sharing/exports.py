"""Writes an export of Nsight Systems without names: from known tables, only the columns with a rule."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from crossrank.privacy import Privacy
from crossrank.tools.sharing.kinds import MARKER, Names, listed
from crossrank.tools.sharing.rules import LEFT_OUT, Rule, Scrubber, inner_json, rule_of_class
from crossrank.tools.traces.nsight.export import (
    GRAPH_NODES,
    GRAPH_TRACE,
    KERNEL,
    MEMCPY,
    MEMSET,
    NVTX,
    RUNTIME,
    STRINGS,
    open_export,
)

_MARKER_RULE = inner_json(MARKER)


def _scrub_text(value: Any, scrubber: Scrubber) -> Any:
    """Replace the text of a range, or the name of a kernel or CUDA function."""
    if isinstance(value, str) and value.startswith("{"):
        made = _MARKER_RULE(value, scrubber)
        return scrubber.names.name("name", value) if made is LEFT_OUT else made
    return rule_of_class(Privacy.EVENT)(value, scrubber)


_ACTIVITY: Names = {
    Privacy.WALL: "start, end",
    Privacy.SIZE: "bytes",
    Privacy.NUMBER: """globalTid, endGlobalTid, globalPid, correlationId, deviceId, contextId, streamId, graphNodeId,
    originalGraphNodeId, graphId, eventId, eventClass, eventType, rangeId, domainId, category, textId,
    jsonTextId, nameId, demangledName, shortName, mangledName, copyKind, srcKind, dstKind, srcDeviceId,
    dstDeviceId, int64Value, uint64Value, int32Value, uint32Value, returnValue, gridX, gridY, gridZ, blockX,
    blockY, blockZ, registersPerThread, staticSharedMemory, dynamicSharedMemory, launchType""",
}
_VERSION: Names = {Privacy.FACT: "name", Privacy.VERSION: "value"}
_COLUMNS: dict[str, Names] = {
    STRINGS: {Privacy.NUMBER: "id"},
    **dict.fromkeys((NVTX, RUNTIME, KERNEL, MEMCPY, MEMSET, GRAPH_TRACE, *GRAPH_NODES), _ACTIVITY),
    "TARGET_INFO_SESSION_START_TIME": {
        Privacy.WALL: "utcEpochNs, systemClockNs",
        Privacy.NUMBER: "sessionStartCntVctNs",
    },
    "TARGET_INFO_SYSTEM_ENV": {Privacy.FACT: "name", Privacy.HOST: "value"},
    "ENUM_NSYS_EVENT_TYPE": {Privacy.NUMBER: "id", Privacy.EVENT_TYPE: "name"},
    "META_DATA_EXPORT": _VERSION,
    "EXPORT_META_DATA": _VERSION,
    "ANALYSIS_DETAILS": {Privacy.NUMBER: "duration", Privacy.WALL: "startTime, stopTime"},
}
"""Table -> its columns by class, without columns that have texts of ranges."""
TABLES: dict[str, dict[str, Rule]] = {table: listed(columns) for table, columns in _COLUMNS.items()}
"""Table -> rule of each column."""
TABLES[STRINGS]["value"] = _scrub_text
TABLES[NVTX] |= {"text": _scrub_text, "jsonText": _scrub_text}
_ROW_CONDITIONS = {
    "TARGET_INFO_SYSTEM_ENV": "name = 'Hostname'",
    "META_DATA_EXPORT": "name LIKE 'EXPORT_SCHEMA_VERSION%'",
    "EXPORT_META_DATA": "name LIKE 'EXPORT_SCHEMA_VERSION%'",
    "ENUM_NSYS_EVENT_TYPE": "name LIKE 'Nvtx%'",
}
"""Table -> condition for the rows to keep."""


def write_export(path: str, output: Path, scrubber: Scrubber) -> None:
    """Write the known parts of the export at `path` to `output`, an empty file. Raise `CrossrankError` if the export is
    unreadable."""
    target = sqlite3.connect(output)
    try:
        with open_export(path) as export:
            tables = [str(row[0]) for row in export.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                rules = TABLES.get(table)
                if rules is None or not export.has(table):
                    scrubber.left_out["tables that crossrank does not read"] += 1
                    continue
                columns = sorted(export.columns(table) & rules.keys())
                for _ in export.columns(table) - rules.keys():
                    scrubber.left_out[f"{table}: columns that crossrank does not read"] += 1
                if not columns:
                    continue
                listed = ", ".join(f'"{column}"' for column in columns)
                where = f"WHERE {_ROW_CONDITIONS[table]}" if table in _ROW_CONDITIONS else ""
                target.execute(f'CREATE TABLE "{table}" ({listed})')
                rows = export.rows(f'SELECT rowid, {listed} FROM "{table}" {where} ORDER BY rowid')
                marks = ", ".join("?" * (1 + len(columns)))
                target.executemany(
                    f'INSERT INTO "{table}" (rowid, {listed}) VALUES ({marks})',
                    _scrub_rows(rows, [rules[column] for column in columns], scrubber),
                )
        target.commit()
    finally:
        target.close()


def _scrub_rows(rows: Iterator[tuple[object, ...]], rules: list[Rule], scrubber: Scrubber) -> Iterator[list[object]]:
    for rowid, *values in rows:
        found = [rule(value, scrubber) for rule, value in zip(rules, values, strict=True)]
        yield [rowid, *map(_storable, found)]


def _storable(value: object) -> object:
    """Return a value for SQLite; None for a skipped value or an integer above 64 bits."""
    value = int(value) if isinstance(value, Decimal) else value
    return None if value is LEFT_OUT or (isinstance(value, int) and abs(value) >= 1 << 63) else value


def texts_in(path: str) -> Iterator[str]:
    """Yield every text of a written export once."""
    connection = sqlite3.connect(path)
    try:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for column in [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]:
                query = f'SELECT DISTINCT "{column}" FROM "{table}" WHERE typeof("{column}") != \'integer\''
                yield from (str(row[0]) for row in connection.execute(query))
    finally:
        connection.close()
