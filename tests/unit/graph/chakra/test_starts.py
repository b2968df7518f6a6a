"""When each rank of a window begins, by the clocks of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from crossrank.tools.graph.chakra.chakra_graph import LATE
from crossrank.tools.graph.chakra.framing import read_trace
from crossrank.tools.output.chakra import as_dict
from tests.unit.graph.linking.small_traces import SmallTrace


def converted(folder: Path, *starts_us: int) -> list[list[dict[str, Any]]]:
    """The nodes of one file for each rank, of which each has two operations of 100 µs from its start on."""
    for rank, start in enumerate(starts_us):
        trace = SmallTrace()
        trace.op("first", start, 100)
        trace.op("second", start + 100, 100)
        trace.write(folder, rank)
    assert main(["convert", str(folder), "-o", str(folder / "out"), "--jobs", "1"]) == 0
    paths = [folder / "out" / f"chakra.{rank}.et" for rank in range(len(starts_us))]
    return [[as_dict(node) for _, node in read_trace(str(path))[1]] for path in paths]


def test_a_rank_begins_as_long_after_the_first_as_its_clock_says(tmp_path: Path) -> None:
    early, late = converted(tmp_path, 1000, 1150)
    assert [(node["name"], node["duration_micros"]) for node in early] == [(LATE, 0), ("first", 100), ("second", 100)]
    assert [(node["name"], node["duration_micros"]) for node in late] == [(LATE, 150), ("first", 100), ("second", 100)]
    start, first, second = late
    assert (first["data_deps"], second["data_deps"]) == ([start["id"]], [first["id"]])


def test_ranks_of_clocks_that_are_too_far_apart_begin_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = converted(tmp_path, 0, 5_000_000)
    assert [nodes[0]["duration_micros"] for nodes in ranks] == [0, 0]
    told = "clocks     of the ranks are further apart than window 1 is long; all begin at 0\n"
    assert told in capsys.readouterr().out
