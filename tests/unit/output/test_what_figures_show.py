"""Columns and bars show the values that their names say."""

from __future__ import annotations

import polars as pl

from crossrank.tools.output import plots, watch
from crossrank.tools.output.charts import Rate, bandwidth_chart


def test_the_bars_of_the_notebook_show_who_waited_and_who_was_waited_for() -> None:
    frame = pl.DataFrame({"rank": [0, 1], "waiting_ns": [5_000_000, 0], "waited_for_ns": [1_000_000, 7_000_000]})
    bars = {bar["name"]: (list(bar["x"]), list(bar["y"])) for bar in plots.stragglers(frame).data}
    assert bars == {"waited for": ([0, 1], [1.0, 7.0]), "waited": ([0, 1], [5.0, 0.0])}


def test_the_table_of_a_running_job_shows_each_value_under_its_name() -> None:
    row = {"pg": "0", "desc": "world", "size": 4, "calls": 1200, "bytes": 3_000_000, "calls_per_s": 5.0}
    row |= {"bytes_per_s": 2_000_000, "busbw_gb_per_s": 1.5, "last_rank": 2, "last_share": 0.25, "late_ms": 7.5}
    shown = {name: cell(row) for name, cell in watch._GROUPS}
    assert (shown["#last rank"], shown["#share"], shown["#wait p50"]) == ("rank 2", "25.0 %", "7.5 ms")
    assert (shown["group"], shown["#size"], shown["#calls"]) == ("0", 4, "1,200")
    assert (shown["#bytes"], shown["#bytes/s"], shown["#busbw GB/s"]) == ("3 MB", "2 MB", "1.5")


def test_error_bars_reach_from_the_low_to_the_high_rate() -> None:
    (trace,) = bandwidth_chart(
        "rates", [Rate(op="send", size=8, low=2.0, busbw=5.0, high=6.0, text="", is_bound=False)]
    ).traces
    assert trace["y"] == [5.0]
    assert (trace["error_y"]["arrayminus"], trace["error_y"]["array"]) == ([3.0], [1.0])
