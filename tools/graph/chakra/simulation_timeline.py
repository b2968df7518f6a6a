"""Writes a simulation as a Chrome trace, which ui.perfetto.dev opens.

Every rank is a process there, every thread and stream a track.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from crossrank.atomic_file import gzip_writer, whole_file
from crossrank.tools.graph.chakra.chakra_graph import PAUSE
from crossrank.tools.graph.chakra.simulate import RankGraph, Simulation


def write_timeline(graphs: Sequence[RankGraph], simulation: Simulation, path: Path) -> None:
    """Write to `path`, compressed where its name ends in `.gz`: whole or not at all."""
    with whole_file(path) as temporary, temporary.open("wb") as plain:
        file: BinaryIO = plain
        if path.name.endswith(".gz"):
            file = gzip_writer(plain)
        file.write(b'{"displayTimeUnit":"ns","metadata":{"crossrank":"simulation"},"traceEvents":[')
        separator = b"\n"
        for graph in graphs:
            for event in _events(graph, simulation):
                file.write(separator + msgspec.json.encode(event))
                separator = b",\n"
        file.write(b"\n]}\n")
        if file is not plain:
            file.close()


def _events(graph: RankGraph, simulation: Simulation) -> list[dict[str, object]]:
    begin = simulation.begin_ns[graph.rank]
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": graph.rank, "args": {"name": f"rank {graph.rank}"}}
    ]
    for lane, name in enumerate(graph.lanes):
        events.append({"ph": "M", "name": "thread_name", "pid": graph.rank, "tid": lane, "args": {"name": name}})
    for index, start in enumerate(begin):
        if graph.category[index] == PAUSE:
            continue
        events.append(
            {
                "ph": "X",
                "name": graph.names[index],
                "cat": graph.category[index],
                "pid": graph.rank,
                "tid": graph.lane[index],
                "ts": start / 1000,
                "dur": simulation.run_ns[graph.rank][index] / 1000,
                "args": {
                    "measured start us": graph.start_ns[index] / 1000,
                    "measured us": graph.duration_ns[index] / 1000,
                },
            }
        )
    return events
