"""Writes SQLite exports as Nsight Systems does, of either schema: tables and columns are those of its documentation.

Tables without rows are left out, as `nsys export` leaves them out. Times are ns from the begin of the report.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

EPOCH = 1_780_000_000_000_000_000
_HARDWARE = 0x01_00_00_0000_000000  # an id in the top byte, as real exports have

_STRINGS = "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL"
_RUNTIME = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER"
)
_KERNEL = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, "
    "cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, "
    "gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, "
    "staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, "
    "localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, "
    "sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER"
)
_KERNEL_NEW = (
    ", qmdBulkReleaseDone INTEGER, qmdPreexitDone INTEGER, qmdLastCtaDone INTEGER, graphId INTEGER, "
    "clusterX INTEGER, clusterY INTEGER, clusterZ INTEGER, clusterSchedulingPolicy INTEGER, "
    "maxPotentialClusterSize INTEGER, maxActiveClusters INTEGER, sharedMemoryRequestedPercentage INTEGER, "
    "tensorSizeMinusOneElements TEXT NOT NULL DEFAULT ''"
)
_NVTX = (
    "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, "
    "color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, "
    "uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, "
    "floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT"
)
_MEMCPY = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, "
    "srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER, graphNodeId INTEGER"
)
_GRAPH_NODES = (
    "start INTEGER NOT NULL, end INTEGER, eventClass INTEGER, globalTid INTEGER, nameId INTEGER, "
    "graphNodeId INTEGER NOT NULL, originalGraphNodeId INTEGER, graphId INTEGER"
)

SCHEMAS = {
    "3.16.1": {
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
        "NVTX_EVENTS": _NVTX,
        "CUPTI_ACTIVITY_KIND_KERNEL": _KERNEL,
    },
    "3.28.1": {
        "TARGET_INFO_SESSION_START_TIME": (
            "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER, sessionStartCntVctNs INTEGER"
        ),
        "NVTX_EVENTS": _NVTX + ", eventId INTEGER NOT NULL PRIMARY KEY",
        "CUPTI_ACTIVITY_KIND_KERNEL": _KERNEL + _KERNEL_NEW,
    },
}
_COMMON = {
    "StringIds": _STRINGS,
    "CUPTI_ACTIVITY_KIND_RUNTIME": _RUNTIME,
    "CUPTI_ACTIVITY_KIND_MEMCPY": _MEMCPY,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER",
    "CUDA_GRAPH_NODE_EVENTS": _GRAPH_NODES,
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_SYSTEM_ENV": (
        "globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL, nameEnum INTEGER NOT NULL, "
        "value TEXT NOT NULL"
    ),
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
        self._graph_nodes = count(9000)
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
        said = {"textId": self.export.string(text)} if self.export.registered else {"text": text}
        self.export.row(
            "NVTX_EVENTS",
            start=start,
            end=end,
            eventType=kind,
            globalTid=self.thread(thread),
            domainId=3,
            int64Value=payload,
            **said,
            **more,
        )

    def marker(self, start: int, end: int | None, payload: int | None, *, thread: int = 1, **said: Any) -> None:
        """A range of ours; `said` is what differs from an all_reduce of 4 MB on the world of two."""
        text: dict[str, Any] = {"op": "all_reduce", "c10d": "allreduce_", "pg": "0", "dtype": "float32"}
        text |= {"in": [[1_000_000]], "out": [[1_000_000]], "bytes": 4_000_000, "locality": "cross_node"}
        self.event(59, start, end, json.dumps(text | said), thread=thread, payload=payload)

    def identity(self, rank: int, world_size: int = 2) -> None:
        text = {"crossrank": "0.1.0", "rank": rank, "world_size": world_size, "host": "host-a"}
        self.event(34, 0, None, json.dumps(text))

    def group(self, pg: str = "0", ranks: tuple[int, ...] = (0, 1), desc: str = "default_pg") -> None:
        group = {"pg": pg, "size": len(ranks), "ranks": list(ranks), "desc": desc, "backend": "nccl"}
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
        correlation: int = next(self.correlations)
        if launch:
            for kind, at in ((0, launched), (1, launched + 1)):  # the runtime's call with the driver's within it
                self.export.row(
                    "CUPTI_ACTIVITY_KIND_RUNTIME",
                    start=at,
                    end=at + 3 - kind,
                    eventClass=kind,
                    globalTid=self.thread(thread),
                    correlationId=correlation,
                    nameId=self.export.string("cuLaunchKernelEx"),
                    returnValue=0,
                )
        zeros: tuple[str, ...] = (
            "contextId",
            "registersPerThread",
            "gridX",
            "gridY",
            "gridZ",
            "blockX",
            "blockY",
            "blockZ",
            "gridId",
        )
        zeros += ("staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal")
        self.export.row(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start=start,
            end=end,
            deviceId=self.pid % 8,
            streamId=stream,
            correlationId=correlation,
            globalPid=self.thread(0),
            demangledName=self.export.string(name),
            shortName=self.export.string(name.split("(")[0]),
            graphNodeId=graph_node,
            **dict.fromkeys(zeros, 0),
        )
        return correlation

    def copy(self, launched: int, start: int, end: int, *, kind: int = 10, thread: int = 1) -> None:
        """A copy between GPUs."""
        correlation = next(self.correlations)
        self.export.row(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=launched,
            end=launched + 2,
            eventClass=0,
            globalTid=self.thread(thread),
            correlationId=correlation,
            nameId=self.export.string("cudaMemcpyBatchAsync"),
            returnValue=0,
        )
        self.export.row(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=start,
            end=end,
            deviceId=0,
            contextId=1,
            streamId=20,
            correlationId=correlation,
            globalPid=self.thread(0),
            bytes=1000,
            copyKind=kind,
            srcDeviceId=0,
            dstDeviceId=1 if kind == 10 else 0,
        )

    def graph_node(self, at: int, node: int, original: int | None = None, *, thread: int = 1) -> None:
        self.export.row(
            "CUDA_GRAPH_NODE_EVENTS",
            start=at,
            end=at + 1,
            globalTid=self.thread(thread),
            nameId=self.export.string("cudaGraphAddKernelNode"),
            graphNodeId=node,
            originalGraphNodeId=original,
        )

    def nccl(self, start: int, end: int, function: str, *, thread: int = 1, **payload: int) -> None:
        """A range of NCCL's own, with its payload as `--include-json true` exports it."""
        names = {
            "comm": "NCCL communicator ID",
            "size": "Message size [bytes]",
            "root": "Root",
            "peer": "Peer rank",
            "ranks": "No. of ranks",
            "rank": "Rank",
        }
        said = {names[name]: value for name, value in payload.items()}
        self.event(59, start, end, function, thread=thread, jsonText=json.dumps(said) if said else None)


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
