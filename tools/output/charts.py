"""Charts of a page for Plotly: traces and a layout. Colors, fonts and margins are in `base.html`.

Plotly reads texts as HTML; `label` escapes a text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crossrank.text import printable, significant

_LONGEST = 34
Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    id: str
    height: int
    traces: Sequence[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    views: dict[str, Trace] = field(default_factory=dict)
    """Name of a button -> what it changes in the only trace. The first one is shown first."""
    table: str = ""
    """Id of a table whose filters also apply to the points, through their `customdata`."""


def label(text: str) -> str:
    return html.escape(printable(text), quote=False)


def labels(texts: Sequence[str]) -> list[str]:
    """Return labels of an axis, shortened unless two would become equal."""
    short = [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…" for text in texts]
    return [label(text) for text in (short if len({*short}) == len({*texts}) else texts)]


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    # Keep the title clear of long tick labels.
    return {"title": {"text": label(title), "standoff": 12}, **more}


def whole_numbers(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return an axis of integers with at most one tick per integer."""
    return axis(title, tickformat="d", **({"dtick": 1} if len(values) < 12 else {}))


def heatmap(x: Sequence[object], y: Sequence[str], hover: str, **more: Any) -> Trace:
    gaps = {"xgap": 2, "ygap": 2} if len(x) * len(y) <= 400 else {}
    return {"type": "heatmap", "x": x, "y": labels(y), "hovertemplate": f"{hover}<extra></extra>", **gaps, **more}


def from_zero(values: Sequence[Sequence[float | None]]) -> Trace:
    """Return the values of a map with colors from 0, so that a map of zeros is empty. None leaves a gap."""
    return {"z": values, "zmin": 0, "zmax": max((one or 0 for row in values for one in row), default=0) or 1}


CATEGORIES = {"xaxis": axis(type="category"), "yaxis": axis(type="category", autorange="reversed")}


def line(name: str, x: Sequence[float], y: Sequence[float | None], unit: str, **style: Any) -> Trace:
    """Return a line of values over steps or time."""
    hover = f"%{{x}}: %{{y:,.1f}} {unit}<extra>{label(name)}</extra>"
    mode = "lines" if len(x) > 60 else "lines+markers"
    return {"type": "scatter", "mode": mode, "name": label(name), "x": x, "y": y, "hovertemplate": hover} | {
        "line": {"width": 2, **style}
    }


class Rate(NamedTuple):
    """Bus bandwidth of a group of collectives."""

    op: str
    size: float
    """Mean bytes of a collective, S of nccl-tests."""
    low: float
    busbw: float
    """Median, GB/s."""
    high: float
    text: str
    is_bound: bool
    choices: Sequence[str] = ()


def bandwidth_chart(id: str, rates: Sequence[Rate], table: str = "", line_rates: Sequence[float] = ()) -> Chart:
    """Return a chart of bus bandwidth over message size, both logarithmic, one color per operation."""
    traces = []
    for op in dict.fromkeys(rate.op for rate in rates):
        own = sorted((rate for rate in rates if rate.op == op), key=lambda rate: rate.size)
        symbols = ["circle-open" if rate.is_bound else "circle" for rate in own]
        trace: Trace = {
            "type": "scatter",
            "mode": "markers",
            "name": label(op),
            "x": [rate.size for rate in own],
            "y": [rate.busbw for rate in own],
            "error_y": {
                "symmetric": False,
                "array": [rate.high - rate.busbw for rate in own],
                "arrayminus": [rate.busbw - rate.low for rate in own],
                "thickness": 1,
                "width": 3,
            },
            "marker": {"size": 9, "symbol": symbols},
            "text": [f"{label(rate.text)}<br>{significant(rate.busbw)} GB/s" for rate in own],
            "customdata": [rate.choices for rate in own],
            "hovertemplate": "%{text}<extra></extra>",
        }
        traces.append(trace)
    lines = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": rate, "y1": rate, "line": {"dash": "dot", "width": 1}}
        | {"label": {"text": f"line rate {significant(rate)} GB/s", "textposition": "end"}}
        for rate in line_rates
    ]
    x = axis("mean size S of a collective, bytes", type="log", exponentformat="SI")
    y = axis("busbw, GB/s", type="log", exponentformat="e")
    layout = {"shapes": lines, "showlegend": True, "xaxis": x, "yaxis": y}
    return Chart(id=id, height=380, traces=traces, layout=layout, table=table)
