"""Writes the older JSON format of chrome://tracing, for scripts that read it.

Its times are us in a double: from the begin of the timeline, with three decimals, so that nanoseconds fit.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
import numpy as np

import crossrank
from crossrank.tools.output.timeline.tracks import FIRST, LAST, MIDDLE, Counter, Events, Track

_encoder = msgspec.json.Encoder()
_FLOW: dict[int, dict[str, Any]] = {FIRST: {"ph": "s"}, MIDDLE: {"ph": "t", "bp": "e"}, LAST: {"ph": "f", "bp": "e"}}


class ChromeWriter:
    """A timeline as a `.json` file, written as it is given."""

    def __init__(self, path: Path, epoch: int) -> None:
        self._path = path
        self._epoch = epoch
        self._file: BinaryIO
        self._place: dict[int, tuple[int, int]] = {}
        """Track -> (pid, tid)."""

    def __enter__(self) -> ChromeWriter:
        self._file = self._path.open("wb")
        head = {"crossrank": crossrank.__version__, "epoch_ns": str(self._epoch)}
        self._file.write(b'{"displayTimeUnit":"ns","metadata":' + _encoder.encode(head) + b',"traceEvents":[')
        self._file.write(_encoder.encode({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "job"}}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.write(b"]}\n")
        self._file.close()

    def track(self, track: Track) -> None:
        """A track without parent becomes a process, one with a parent a thread of it."""
        if track.unit is not None:
            self._place[track.id] = (self._place[track.parent][0] if track.parent else 0, 0)
            return
        if track.parent:
            pid = self._place[track.parent][0]
            self._place[track.id] = pid, track.id
            self._describe("thread", track, {"pid": pid, "tid": track.id})
            return
        self._place[track.id] = track.id, 0
        self._describe("process", track, {"pid": track.id})

    def _describe(self, what: str, track: Track, place: dict[str, int]) -> None:
        for name, value in (("name", track.name), ("sort_index", track.id)):
            self._write({"ph": "M", "name": f"{what}_{name}", "args": {name: value}} | place)

    def events(self, events: Events) -> None:
        pid, tid = self._place[events.track.id]
        columns = {name: values.tolist() for name, values in events.arguments.items()}
        ends = events.end.tolist() if events.end is not None else None
        flows = events.flow.tolist() if events.flow is not None else None
        flow_ends = events.flow_end.tolist() if events.flow_end is not None else None
        rows = []
        for i, (name, start) in enumerate(zip(events.name.tolist(), events.start.tolist(), strict=True)):
            event: dict[str, Any] = {"ph": "i", "name": events.names[name], "pid": pid, "tid": tid, "ts": start / 1000}
            if ends is not None:
                event |= {"ph": "X", "dur": (ends[i] - start) / 1000}
            else:
                event["s"] = "t"
            event["args"] = {name: values[i] for name, values in columns.items()}
            rows.append(event)
            if flows is not None and flow_ends is not None and flows[i]:
                flow = {"name": "arrival", "cat": "arrival", "pid": pid, "tid": tid, "ts": start / 1000}
                rows.append(_FLOW[flow_ends[i]] | {"id": flows[i]} | flow)
        self._write_all(rows)

    def counter(self, counter: Counter) -> None:
        pid, _ = self._place[counter.track.id]
        track = counter.track
        name = f"{track.name} [{track.unit}]"
        self._write_all(
            [
                {"ph": "C", "name": name, "pid": pid, "ts": at / 1000, "args": {"value": value}}
                for at, value in zip(counter.at.tolist(), np.round(counter.value, 6).tolist(), strict=True)
            ]
        )

    def _write_all(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._file.write(b"," + _encoder.encode(rows)[1:-1])

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(b"," + _encoder.encode(row))
