"""Reads the files of a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard

from crossrank.comm import CommRecord
from crossrank.recording import COMMS, CommsFile, Header, file_name


class Recorded(CommsFile):
    """The comms file of a rank, read through: nothing in it is damaged."""

    header: Header
    end: dict[str, Any]
    """Raises where the process died, when something is looked up in it."""

    def __init__(self, recording: Path, rank: int = 0) -> None:
        super().__init__(str(recording / file_name(COMMS, rank)))
        self.calls = list(self.records())
        assert self.issues.problems == []

    def without_error(self) -> Recorded:
        """This one, whose recorder ended, and raised nothing meanwhile."""
        assert self.end["errors"] == 0
        return self

    @property
    def ids(self) -> list[int]:
        return [record.id for record in self.calls]

    @property
    def ops(self) -> list[str]:
        return [record.op for record in self.calls]


def records_of(recording: Path, rank: int) -> list[CommRecord]:
    """The calls of a rank whose recording ended without an error."""
    return Recorded(recording, rank).without_error().calls


def load(recording: Path, kind: str, rank: int = 0, window: int = 1) -> Any:
    """The JSON of a window's file; raises if it is not whole."""
    compressed = (recording / file_name(kind, rank, window)).read_bytes()
    return json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(compressed))


def execution_trace_ids(trace: Any) -> dict[int, int]:
    """Record id -> record-function id of its range in an execution trace."""
    return {
        int(node["name"].removeprefix("crossrank#")): next(a["value"] for a in node["attrs"] if a["name"] == "rf_id")
        for node in trace["nodes"]
        if node["name"].startswith("crossrank#")
    }


def kineto_ids(trace: Any) -> dict[int, int]:
    """Record id -> record-function id of its range in a Kineto trace."""
    return {
        int(event["name"].removeprefix("crossrank#")): event["args"]["Record function id"]
        for event in trace["traceEvents"]
        if event.get("name", "").startswith("crossrank#") and event.get("cat") != "Trace"
    }


def process_groups(trace: Any) -> list[Any]:
    """What the process-group nodes of an execution trace say, one list of groups per node."""
    return [
        json.loads(node["inputs"]["values"][0]) for node in trace["nodes"] if node["name"] == "## process_group:init ##"
    ]
