"""What a replay wrote reads back as collectives with the times that it measured."""

from __future__ import annotations

import csv
from pathlib import Path

import polars as pl
import pytest

from crossrank.errors import CrossrankError
from crossrank.replay.results.replay_report import make_report, write_report
from crossrank.tools.job.from_replay import is_replay, read_replay
from crossrank.tools.traces.replayed import CSV, JSON, Settings
from tests.unit.replay.plans import isend, plan_of, record, recv
from tests.unit.replay.ranks import result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An all_reduce of 4,000 bytes to which rank 1 comes 300 ns late, a send, a call whose end only a wait tells."""
    call = record("all_reduce", inputs=[[1000]], outputs=[[1000]], bytes=4000)
    plan = plan_of([call, isend(1), call], [call, recv(0), call])
    moments = [(2000, 2100, 2200), (3000, 3100, 4000)]
    results = [
        result(0, [(1000, 1100, 2300), *moments]),
        result(1, [(1300, 1350, 2200), *moments]),
    ]
    results[1].late_ends = [2]
    results[0].offset_error_ns = 1500
    report, times = make_report(plan, Settings(backend="gloo", device="cpu"), results, what_if={}, variables={})
    write_report(str(tmp_path), report, plan, times)
    return tmp_path


def test_the_calls_of_a_replay_have_its_measured_times_and_waits(folder: Path) -> None:
    assert is_replay(str(folder))
    found = read_replay(str(folder))
    shown = [(one.rank, one.source, one.placed) for one in found.job.ranks.values()]
    assert shown == [(0, "replay", False), (1, "replay", False)]
    took = pl.col("ended_ns") - pl.col("began_ns")
    rows = found.calls.select("rank", "id", "collective", took, "waiting_ns").iter_rows()
    assert sorted(tuple(map(int, row)) for row in rows) == [
        (0, 0, 0, 1300, 300),
        (0, 1, 2, 200, 0),
        (0, 2, 1, 1000, 0),
        (1, 0, 0, 900, 0),
        (1, 1, 2, 200, 0),
        (1, 2, 1, 1000, 0),
    ]
    assert [found.kinds[kind].label for kind in found.collectives["kind"]] == ["all_reduce", "all_reduce", "send/recv"]
    times = found.collectives.select("time_ns", "is_upper_bound").rows()
    assert times == [(1000, False), (1000, True), (200, False)]
    assert (found.collectives["ranks"].to_list(), found.collectives["expected"].to_list()) == ([2, 2, 2], [2, 2, 2])
    assert (found.clocks.count, found.clocks.note) == (1, "one clock, aligned by the replay to within 1.5 us")
    assert len(found.job.world) == 2


@pytest.mark.parametrize("empty", ["", "0.0"])
def test_a_time_that_was_too_short_to_measure_is_unknown(folder: Path, empty: str) -> None:
    with (folder / CSV).open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["op"] == "all_reduce" and row["call"] == "0":
            row["time_us_p50"], row["completion_us_p50"] = empty, "0.0"
    with (folder / CSV).open("w") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    found = read_replay(str(folder))
    assert found.collectives["time_ns"].to_list() == [None, 1000, 200]
    rated = found.collectives["algbw_gb_per_s"].is_not_null().to_list()
    assert rated == [False, True, True]
    assert found.calls.filter(pl.col("ended_ns").is_null())["id"].to_list() == [0, 0]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("\n0,0,all_reduce", "\n2,0,all_reduce", "has no call, or a rank of 2 or more"),
        ("\n0,0,all_reduce", "\n-1,0,all_reduce", "is not a file of crossrank replay"),
        ("\n0,0,all_reduce", "\n0,-1,all_reduce", "is not a file of crossrank replay"),
        (",4000,", ",1125899906842624,", "is not a file of crossrank replay"),
        (",1.3,", ",nan,", "is not a file of crossrank replay"),
        (",1.3,", ",1e12,", "is not a file of crossrank replay"),
        ("completion_us_p50", "something", "is not a file of crossrank replay"),
    ],
)
def test_invalid_numbers_in_a_replay_are_refused(folder: Path, old: str, new: str, problem: str) -> None:
    text = (folder / CSV).read_text()
    assert old in text
    (folder / CSV).write_text(text.replace(old, new))
    with pytest.raises(CrossrankError, match=problem):
        read_replay(str(folder))


def test_a_replay_without_calls_or_next_to_a_recording_is_not_used(folder: Path) -> None:
    (folder / CSV).write_text((folder / CSV).read_text().partition("\n")[0] + "\n")
    with pytest.raises(CrossrankError, match="has no call"):
        read_replay(str(folder))
    (folder / "rank-0.comms.jsonl").write_text("{}")
    assert not is_replay(str(folder))
    assert not is_replay(str(folder / "nowhere"))
    (folder / JSON).unlink()
    assert not is_replay(str(folder))
