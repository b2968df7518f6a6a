"""Writes a simulation as a Chrome trace, which ui.perfetto.dev opens.

Every rank is a process there, every thread and stream a track.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def _events(graph: RankGraph, simulation: Simulation) -> Iterator[dict[str, object]]:
    rank = graph.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    threads = {name: number for number, name in enumerate(dict.fromkeys(node.runs_on for node in graph.nodes))}
    for name, number in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
    for node, (begin, duration) in zip(graph.nodes, simulation.runs_ns[rank], strict=True):
        if node.category != PAUSE:
            measured = {"measured start us": node.start_ns / 1000, "measured us": node.duration_ns / 1000}
            where = {"name": node.name, "cat": node.category, "pid": rank, "tid": threads[node.runs_on]}
            yield {"ph": "X", **where, "ts": begin / 1000, "dur": duration / 1000, "args": measured}
