"""Small traces for tests: one call adds one node, event or activity; what a test does not name has a default."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_IO: dict[str, Any] = {"values": [], "shapes": [], "types": []}
MAIN, BACKWARD = 700, 701
"""System ids of the threads that the execution trace numbers 1 and 2."""
PID = 70


FLOATS = [5, 6, 0, 24, 4, "cuda:0"]
"""24 floats, as execution traces describe a tensor."""


def comm_params(
    name: str, seq: Any = 1, pg: Any = ("0", "default_pg"), *, rank: int = 0, size: int = 2, splits: Any = ((), ())
) -> dict[str, Any]:
    """The inputs of a `record_param_comms` node with such a tensor."""
    values = [[FLOATS], seq, pg, rank, name, *splits, 0, 1, size]
    return {"values": values, "shapes": [[[24]]] + [[]] * 9, "types": ["GenericList[Tensor(float)]"] + [""] * 9}


def nested_node(
    node_id: int,
    name: str,
    parent: int,
    rf_id: int = 0,
    *,
    tid: int = 1,
    seq_id: int = -1,
    scope: int = 0,
    fw_tid: int = 0,
    inputs: dict[str, Any] | None = None,
    outputs: dict[str, Any] | None = None,
    **attributes: Any,
) -> dict[str, Any]:
    """A node as schemas from 1.0.2 on have it."""
    values = {"rf_id": rf_id, "fw_parent": 0, "seq_id": seq_id, "scope": scope, "tid": tid, "fw_tid": fw_tid}
    return {
        "id": node_id,
        "name": name,
        "ctrl_deps": parent,
        "inputs": inputs or NO_IO,
        "outputs": outputs or NO_IO,
        "attrs": [
            {"name": key, "type": "string" if isinstance(value, str) else "uint64", "value": value}
            for key, value in {**values, "op_schema": "", **attributes}.items()
        ],
    }


def flat_node(node_id: int, name: str, parent: int, rf_id: int = 0, *, tid: int = 1, **fields: Any) -> dict[str, Any]:
    """A node as schema 1.0.1 has it."""
    numbers = {"id": node_id, "rf_id": rf_id, "parent": parent, "tid": tid, "seq_id": -1}
    numbers |= dict.fromkeys(("fw_parent", "scope", "fw_tid"), 0)
    sides: dict[str, list[Any]] = {
        f"{side}put{what}": [] for side in ("in", "out") for what in ("s", "_shapes", "_types")
    }
    return {"name": name, "op_schema": "", **numbers, **sides, **fields}


ET_HEAD = {"schema": "1.1.1-chakra.0.0.4", "pid": PID, "time": "2024-05-02 10:00:01", "start_ts": 1, "finish_ts": 2}
KINETO_HEAD: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": 1714644000000000000}
KINETO_HEAD |= {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}}


@dataclass
class SmallTrace:
    """One rank: an execution trace with its roots (ids 1 to 3, threads 1 and 2) and a Kineto trace, in step.

    Times are microseconds. `op` adds a node and its event at once; the rest adds to the Kineto trace alone.
    """

    nodes: list[dict[str, Any]] = field(
        default_factory=lambda: [
            nested_node(1, "[pytorch|profiler|execution_trace|process]", 1, tid=0, scope=7),
            nested_node(2, "[pytorch|profiler|execution_trace|thread]", 1, tid=1, scope=7),
            nested_node(3, "[pytorch|profiler|execution_trace|thread]", 1, tid=2, scope=7),
        ]
    )
    events: list[dict[str, Any]] = field(default_factory=list)
    et_head: dict[str, Any] = field(default_factory=lambda: {**ET_HEAD})
    kineto_head: dict[str, Any] = field(default_factory=lambda: deepcopy(KINETO_HEAD))

    def op(self, name: str, ts: float, dur: float, parent: int = 2, *, tid: int = 1, **node: Any) -> int:
        """A host operation in both traces; returns its node id, which is also its record-function id plus 3."""
        rf_id = len(self.nodes) - 2
        self.nodes.append(nested_node(rf_id + 3, name, parent, rf_id, tid=tid, **node))
        self.host_event(name, ts, dur, rf_id, tid=tid)
        return rf_id + 3

    def host_event(
        self, name: str, ts: float, dur: float, rf_id: int | None, tid: int = 1, category: str = "cpu_op", **args: Any
    ) -> None:
        number = {} if rf_id is None else {"Record function id": rf_id}
        given = {"External id": len(self.events) + 1} | number | args
        self.add(category, name, ts, dur, PID, BACKWARD if tid == 2 else MAIN, given)

    def call(
        self, name: str, ts: float, dur: float, correlation: int, *, tid: int = 1, pid: int = PID, **args: Any
    ) -> None:
        given = {"correlation": correlation, "External id": correlation} | args
        self.add("cuda_runtime", name, ts, dur, pid, BACKWARD if tid == 2 else MAIN, given)

    def activity(
        self,
        name: str,
        ts: float,
        dur: float,
        correlation: int,
        *,
        category: str = "kernel",
        stream: int = 7,
        device: int = 0,
        **args: Any,
    ) -> None:
        given = {"External id": correlation, "device": device, "context": 1, "stream": stream}
        given |= {"correlation": correlation}
        self.add(category, name, ts, dur, device, stream, given | args)

    def launch(
        self, name: str, call_ts: float, ts: float, dur: float, correlation: int, *, stream: int = 7, **args: Any
    ) -> None:
        """A kernel with the call that launches it on the main thread."""
        self.call("cudaLaunchKernel", call_ts, 1, correlation)
        self.activity(name, ts, dur, correlation, stream=stream, **args)

    def sync(self, kind: str, ts: float, dur: float, correlation: int, *, stream: int = 7, **args: Any) -> None:
        given = {"cuda_sync_kind": kind, "stream": stream, "correlation": correlation, "device": 0, "context": 1}
        self.add("cuda_sync", kind, ts, dur, 0, stream, given | args)

    def add(self, category: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict[str, Any]) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    def write(self, folder: Path, rank: int = 0) -> tuple[str, str]:
        """Paths of the two files, named as a recording names them but plain."""
        et, kineto = folder / f"rank-{rank}.et.json", folder / f"rank-{rank}.kineto.json"
        et.write_text(json.dumps(self.et_head | {"nodes": self.nodes}))
        kineto.write_text(json.dumps(self.kineto_head | {"traceEvents": self.events}))
        return str(et), str(kineto)
