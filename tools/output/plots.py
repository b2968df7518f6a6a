"""Plotly figures of answers, for notebooks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import polars as pl

from crossrank.tools.analysis.overlap import shown_parts
from crossrank.tools.tables import ANSWERS

if TYPE_CHECKING:
    import plotly.graph_objects as go


def flat(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the bandwidth table with one column per percentile, such as `time_us_p50`."""
    rows = ANSWERS["bandwidth"].select(rows)
    spreads = [name for name, kind in rows.schema.items() if isinstance(kind, pl.Struct)]
    for name in spreads:
        rows = rows.with_columns(pl.col(name).name.prefix_fields(f"{name}_")).unnest(name)
    return rows


def bandwidth(frame: pl.DataFrame) -> go.Figure:
    """Return bus bandwidth over size, one line per operation."""
    shown = frame.drop_nulls(["size_to", "busbw_gb_per_s_p50"]).sort("size_to")
    names = ("op", "pg", "locality")
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": " ".join(str(name) for name in key if name is not None),
            "x": part["size_to"].to_list(),
            "y": part["busbw_gb_per_s_p50"].to_list(),
        }
        for key, part in shown.group_by(names, maintain_order=True)
    ]
    return _figure(traces, "bytes", "busbw, GB/s", xaxis={"type": "log"})


def stragglers(frame: pl.DataFrame) -> go.Figure:
    """Return how long each rank waited, and how long others waited for it."""
    columns = {"waited for": "waited_for_ns", "waited": "waiting_ns"}
    return _figure(_bars(frame, frame["rank"].to_list(), columns), "rank", "ms", barmode="group")


def overlap(frame: pl.DataFrame) -> go.Figure:
    """Return the time per rank, means over steps."""
    columns = {name: f"{part}_ns" for part, name in shown_parts(float(frame["profiler_ns"].sum())).items()}
    means = frame.group_by("rank", maintain_order=True).agg(pl.col(*columns.values()).mean()).sort("rank")
    return _figure(_bars(means, means["rank"].to_list(), columns), "rank", "ms per iteration", barmode="stack")


def findings(frame: pl.DataFrame) -> go.Figure:
    """Return the number of findings by kind."""
    traces = []
    for (what,), part in frame.group_by("what", maintain_order=True):
        count = Counter(part["kind"].to_list())
        traces.append({"type": "bar", "name": str(what), "x": list(count), "y": list(count.values())})
    return _figure(traces, "", "findings", barmode="stack")


def _bars(frame: pl.DataFrame, x: list[Any], columns: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"type": "bar", "name": name, "x": x, "y": (frame[column] / 1e6).to_list()} for name, column in columns.items()
    ]


def _figure(traces: list[dict[str, Any]], x: str, y: str, **layout: Any) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure(traces, {**layout, "template": "plotly_white"})
    return figure.update_xaxes(title=x).update_yaxes(title=y, rangemode="tozero")
