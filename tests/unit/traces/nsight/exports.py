"""Writes SQLite exports as Nsight Systems does, of either schema: of its tables the columns that say what was called.

Tables without rows are left out, as `nsys export` leaves them out. Times are ns from the begin of the report.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from crossrank.tools.traces.nsight.read import read_export
from crossrank.tools.traces.rank_trace import RankTrace

EPOCH = 1_780_000_000_000_000_000
_HARDWARE = 0x01_00_00_0000_000000  # an id in the top byte, as real exports have

_NVTX = (
    "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, textId INTEGER, "
    "domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, jsonTextId INTEGER, jsonText TEXT"
)
_ACTIVITY = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, "
    "correlationId INTEGER, globalPid INTEGER, graphNodeId INTEGER, "
)
_EPOCH = "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT"

SCHEMAS = {
    "3.16.1": {"TARGET_INFO_SESSION_START_TIME": _EPOCH, "NVTX_EVENTS": _NVTX},
    "3.28.1": {
        "TARGET_INFO_SESSION_START_TIME": f"{_EPOCH}, systemClockNs INTEGER, sessionStartCntVctNs INTEGER",
        "NVTX_EVENTS": f"{_NVTX}, eventId INTEGER NOT NULL PRIMARY KEY",
    },
}
_COMMON = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER, globalTid INTEGER, correlationId INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": _ACTIVITY + "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_MEMCPY": _ACTIVITY + "copyKind INTEGER NOT NULL, srcDeviceId INTEGER, dstDeviceId INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER",
    "CUDA_GRAPH_NODE_EVENTS": (
        "start INTEGER NOT NULL, globalTid INTEGER, graphNodeId INTEGER NOT NULL, originalGraphNodeId INTEGER"
    ),
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_SYSTEM_ENV": "name TEXT NOT NULL, value TEXT NOT NULL",
    "ENUM_NSYS_EVENT_TYPE": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
}
EVENT_TYPES = {34: "NvtxMark", 59: "NvtxPushPopRange", 60: "NvtxStartEndRange", 75: "NvtxDomainCreate"}


@dataclass
class ExportFile:
    """Rows of one export; `write` puts them into a file."""

    schema: str = "3.28.1"
    epoch: int | None = EPOCH
    registered: bool = True
    """Texts of ranges stand in StringIds, as the nvtx package has them; else in the row itself."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _strings: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.row("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value=self.schema)
        if self.epoch is not None:
            self.row("TARGET_INFO_SESSION_START_TIME", utcEpochNs=self.epoch)
        for number, name in EVENT_TYPES.items():
            self.row("ENUM_NSYS_EVENT_TYPE", id=number, name=name)

    def row(self, table: str, **values: Any) -> None:
        self.tables.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.row("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def process(self, pid: int) -> Process:
        return Process(self, pid)

    def write(self, path: Path) -> Path:
        layouts = _COMMON | SCHEMAS[self.schema if self.schema in SCHEMAS else "3.28.1"]
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        for table, rows in self.tables.items():
            connection.execute(f"CREATE TABLE {table} ({layouts[table]})")
            for number, row in enumerate(rows):
                given = dict(row)
                if table == "NVTX_EVENTS" and "eventId" in layouts[table]:
                    given["eventId"] = number + 1
                names = ", ".join(f'"{name}"' for name in given)
                marks = ", ".join("?" * len(given))
                connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(given.values()))
        connection.commit()
        connection.close()
        return path


@dataclass
class Process:
    """One process of an export."""

    export: ExportFile
    pid: int
    correlations: Any = field(default_factory=lambda: count(100))

    def thread(self, number: int = 1) -> int:
        return _HARDWARE | self.pid << 24 | number

    def event(
        self,
        kind: int,
        start: int,
        end: int | None,
        text: str,
        *,
        thread: int = 1,
        payload: int | None = None,
        **more: Any,
    ) -> None:
        said: dict[str, Any] = {"textId": self.export.string(text)} if self.export.registered else {"text": text}
        said |= {"globalTid": self.thread(thread), "domainId": 3, "int64Value": payload}
        self.export.row("NVTX_EVENTS", start=start, end=end, eventType=kind, **said, **more)

    def marker(self, start: int, end: int | None, payload: int | None, *, thread: int = 1, **said: Any) -> None:
        """A range of ours; `said` is what differs from an all_reduce of 4 MB on the world of two."""
        text: dict[str, Any] = {"op": "all_reduce", "c10d": "allreduce_", "pg": "0", "dtype": "float32"}
        text |= {"in": [[1_000_000]], "out": [[1_000_000]], "bytes": 4_000_000, "locality": "cross_node"}
        self.event(59, start, end, json.dumps(text | said), thread=thread, payload=payload)

    def identity(self, rank: int, world_size: int = 2) -> None:
        text = {"crossrank": "0.1.0", "rank": rank, "world_size": world_size, "host": "host-a"}
        self.event(34, 0, None, json.dumps(text))

    def group(self, pg: str = "0", ranks: tuple[int, ...] = (0, 1), desc: str = "default_pg", **more: object) -> None:
        group = {"pg": pg, "size": len(ranks), "ranks": list(ranks), "desc": desc, "backend": "nccl"} | more
        self.event(34, 1, None, json.dumps({"group": group}))

    def kernel(
        self,
        launched: int,
        start: int,
        end: int,
        *,
        name: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        thread: int = 1,
        stream: int = 20,
        graph_node: int | None = None,
        launch: bool = True,
    ) -> int:
        """A kernel and the driver's call that launched it; returns the correlation id."""
        return self._activity(
            "KERNEL",
            launched if launch else None,
            thread,
            start=start,
            end=end,
            deviceId=self.pid % 8,
            streamId=stream,
            demangledName=self.export.string(name),
            shortName=self.export.string(name.split("(")[0]),
            graphNodeId=graph_node,
        )

    def copy(self, launched: int, start: int, end: int, *, kind: int = 10, to: int = 0, thread: int = 1) -> None:
        """A copy; from one GPU to another where that is its kind, or where it is not to the first one."""
        devices = {"deviceId": 0, "srcDeviceId": 0, "dstDeviceId": to}
        self._activity("MEMCPY", launched, thread, start=start, end=end, streamId=20, copyKind=kind, **devices)

    def _activity(self, table: str, launched: int | None, thread: int, **columns: int | None) -> int:
        correlation: int = next(self.correlations)
        ids = {"globalTid": self.thread(thread), "correlationId": correlation}
        if launched is not None:
            for start in (launched, launched + 1):  # the runtime's call with the driver's within it
                self.export.row("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=2 * launched + 3 - start, **ids)
        given = {"correlationId": correlation, "globalPid": self.thread(0)}
        self.export.row(f"CUPTI_ACTIVITY_KIND_{table}", **given, **columns)
        return correlation

    def graph_node(self, at: int, node: int, original: int | None = None, *, thread: int = 1) -> None:
        ids = {"graphNodeId": node, "originalGraphNodeId": original}
        self.export.row("CUDA_GRAPH_NODE_EVENTS", start=at, globalTid=self.thread(thread), **ids)

    def nccl(self, start: int, end: int, function: str, *, thread: int = 1, **payload: int) -> None:
        """A range of NCCL's own, with its payload as `--include-json true` exports it."""
        names = {"comm": "NCCL communicator ID", "size": "Message size [bytes]", "root": "Root"}
        names |= {"peer": "Peer rank", "ranks": "No. of ranks", "rank": "Rank"}
        said = {names[name]: value for name, value in payload.items()}
        self.event(59, start, end, function, thread=thread, jsonText=json.dumps(said) if said else None)


def read(process: Process, folder: Path, rank: int | None = None, comms: str | None = None) -> RankTrace:
    """What is read of an export of one process, of rank 0 where it has a comms file."""
    files = {} if comms is None else {0: comms}
    (times,) = read_export(str(process.export.write(folder / "a.sqlite")), rank, files)
    return times


def changed(path: Path, *statements: str) -> Path:
    """The database at `path` after these statements."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


def write_exports(folder: Path, ranks: int = 2, *, world: int = 2) -> None:
    """A report for each rank: two all_reduces of 4 MB that take 100 us from rank 1's arrival, which is 50 us late."""
    for rank in range(ranks):
        export = ExportFile()
        process = export.process(70 + rank)
        process.identity(rank, world)
        process.group(ranks=tuple(range(world)))
        for number in (1, 2):
            start = 1_000_000 * number
            process.marker(start, start + 9000, number)
            process.kernel(start + 5000, start + 10_000 + 50_000 * rank, start + 160_000)
        export.write(folder / f"rank_{rank}.sqlite")
