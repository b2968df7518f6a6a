"""A figure that two commands or tables have is the same in both, on recordings, traces, dumps and exports."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import crossrank
from crossrank.tools.api import LoadedJob
from crossrank.tools.cli import main
from tests.unit.graph.linking.public_traces import public

FIXTURES = Path(__file__).parents[1] / "fixtures"
OWN = ("gloo/recording", "gloo/timing", "h200/recording", "h200/timing", "older/2026-11-22", "older/2026-11-26")
PUBLIC = (
    *("dlrm_8gpu", "nccl_2gpu", "kineto_mi300", "kineto_mtia", "nsight_h100", "flight_real"),
    *("flight/clean", "flight/p2p_single_clean"),
)
INPUTS = [*(FIXTURES / name for name in OWN), *(Path(public(name)) for name in PUBLIC)]


@dataclass(frozen=True)
class Views:
    """What is said of one input: by tables, and by the JSON of two commands."""

    job: LoadedJob
    bandwidth: dict[str, Any]
    report: dict[str, Any]

    def table(self, name: str) -> pl.DataFrame:
        return self.job.table(name)


def answer(command: str, path: Path, folder: Path) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()):
        main([command, str(path), "--json", "-o", str(folder / f"{command}.out")])
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def total(column: pl.Series) -> int:
    return int(column.sum() or 0)


def check_ranks_and_calls(views: Views) -> None:
    calls, ranks = views.table("calls"), views.table("ranks")
    report, bandwidth = views.report, views.bandwidth
    assert report["ranks"] == len(bandwidth["ranks"]) == len(ranks) == calls["rank"].n_unique()
    assert report["world_size"] == bandwidth["world_size"]
    # A batch may be one launch of its ranks, with all its calls; collectives of one launch are one call.
    assert report["calls"] == bandwidth["calls"]
    assert total(ranks["calls"]) == len(calls) >= report["calls"]
    groups = views.table("groups")
    if not groups["calls"].null_count():
        assert total(groups["calls"]) == len(calls)


def check_bytes(views: Views) -> None:
    sizes, groups = views.table("calls")["bytes"], views.table("groups")["bytes"]
    if not sizes.null_count():
        assert views.report["bytes"] == total(sizes) == total(groups)
    elif sizes.null_count() == len(sizes):
        assert views.report["bytes"] is None
    known = [size for row in views.report["matrix"]["bytes"] for size in row if size is not None]
    assert sum(known) == (views.report["bytes"] or 0) == sum(views.report["by_locality"].values())


def check_collectives_and_their_times(views: Views) -> None:
    bandwidth, rows = views.bandwidth, views.bandwidth["rows"]
    assert sum(row["collectives"] for row in rows) == bandwidth["timed_collectives"]
    assert sum((row["time_us"] or {"total": 0})["total"] for row in rows) / 1e3 == pytest.approx(
        bandwidth["total_ms"], abs=0.001 * (1 + len(rows))
    )
    for name in (
        "calls",
        "collectives",
        "timed_calls",
        "timed_collectives",
        "total_ms",
        "clocks",
        "overlap",
        "openings",
    ):
        assert views.report["bandwidth"][name] == bandwidth[name]
    collectives = views.table("collectives").drop_nulls("time_ns")
    of_collectives = [row for row in rows if not row["op"].startswith("send/recv")]
    assert sum(row["collectives"] for row in of_collectives) == len(collectives)
    assert sum(row["time_us"]["total"] for row in of_collectives) == pytest.approx(
        total(collectives["time_ns"]) / 1e3, abs=0.001 * (1 + len(rows))
    )
    assert sum(row["upper_bounds"] for row in of_collectives) == total(collectives["is_upper_bound"])


def check_waits_and_lateness(views: Views) -> None:
    arrivals = views.table("arrivals")
    both = pl.concat([views.table("collectives"), views.table("transfers")], how="diagonal")
    known = arrivals.drop_nulls("waiting_ns").group_by("collective").agg(pl.max("waiting_ns"))
    joined = both.join(known, on="collective").drop_nulls("longest_wait_ns")
    assert joined["waiting_ns"].to_list() == joined["longest_wait_ns"].to_list()
    # The rank that others wait for is the one that is latest, and waits for nobody.
    last = arrivals.join(both.select("collective", "last_rank"), on="collective").filter(
        pl.col("rank") == pl.col("last_rank")
    )
    latest = arrivals.group_by("collective").agg(latest=pl.max("late_ns"))
    last = last.join(latest, on="collective").drop_nulls("late_ns")
    assert last["late_ns"].to_list() == last["latest"].to_list()
    assert set(last.drop_nulls("waiting_ns")["waiting_ns"]) <= {0}


def check_stragglers(views: Views) -> None:
    table, waiting = views.table("stragglers"), views.report["waiting"]
    assert views.job.stragglers().frame.equals(table)
    if waiting is None:
        assert not total(table["waited_for_ns"])
        return
    for rows, column, shown in (
        (waiting["last"], "waited_for_ns", "cost_ms"),
        (waiting["waiters"], "waiting_ns", "waiting_ms"),
    ):
        of_rank = {row["rank"]: row for row in table.to_dicts()}
        for row in rows:
            own = of_rank[row["rank"]]
            assert row[shown] == pytest.approx(own[column] / 1e6, abs=0.001)
            assert row["of"] == own["collectives"]


def check_shares_of_time(views: Views) -> None:
    table, overlap = views.table("overlap"), views.bandwidth["overlap"]
    if overlap is None:
        assert not len(table)
        return
    parts = ("computation", "exposed", "profiler", "memory", "idle")
    whole = total(table["duration_ns"])
    assert (
        table.select(pl.sum_horizontal(f"{name}_ns" for name in parts)).to_series().to_list()
        == table["duration_ns"].to_list()
    )
    for name in parts:
        assert overlap[name] == pytest.approx(total(table[f"{name}_ns"]) / whole, abs=1e-6)
    assert (overlap["windows"], overlap["of_ranks"]) == (len(table), table["rank"].n_unique())
    for row in overlap["ranks"]:
        own = table.filter(rank=row["rank"])["duration_ns"]
        assert row["duration_ms"] == pytest.approx(total(own) / len(own) / 1e6, abs=1e-4)


def check_steps(views: Views) -> None:
    steps = views.table("steps").drop_nulls("duration_ns")
    ended = views.table("ranks")["steps"].drop_nulls()
    if not len(ended):
        assert not len(steps)
        return
    assert total(ended) == len(steps)
    shown = views.report["steps"]
    if shown is None:
        assert not len(steps)
        return
    medians = steps.group_by("step").agg(pl.median("duration_ns") / 1e6).sort("step")
    assert shown["step"] == medians["step"].to_list()
    assert shown["p50_ms"] == pytest.approx(medians["duration_ns"].to_list(), abs=0.001)


@pytest.mark.parametrize("path", [path for path in INPUTS if path.exists()], ids=lambda path: "/".join(path.parts[-2:]))
def test_equal_figures(path: Path, tmp_path: Path) -> None:
    # Without a measured time, `bandwidth` has no answer; the report has the same rows.
    report = answer("report", path, tmp_path)
    timed = report["bandwidth"]["timed_collectives"]
    bandwidth = answer("bandwidth", path, tmp_path) if timed else report["bandwidth"]
    views = Views(crossrank.load(path), bandwidth, report)
    check_ranks_and_calls(views)
    check_bytes(views)
    check_collectives_and_their_times(views)
    check_waits_and_lateness(views)
    check_stragglers(views)
    check_shares_of_time(views)
    check_steps(views)
