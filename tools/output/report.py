"""The page of `crossrank report`: charts and tables of its figures, for the template `report.html`."""

from __future__ import annotations

from collections.abc import Iterator
from math import log10

from crossrank.text import amount, milliseconds, plural, printable
from crossrank.tools.analysis.bandwidth import Bandwidth
from crossrank.tools.analysis.figures import Figures, Matrix
from crossrank.tools.analysis.overlap import Overlap, shown_parts
from crossrank.tools.analysis.traffic import Traffic
from crossrank.tools.analysis.waiting import COMPARED, Steps, Waiting
from crossrank.tools.output import charts as draw
from crossrank.tools.output import replay
from crossrank.tools.output.bandwidth import BOUNDS, KEYS, bandwidth_table
from crossrank.tools.output.charts import CATEGORIES, Chart, axis, from_zero, whole_numbers
from crossrank.tools.output.diagnosis import diagnosis_page as diagnosis
from crossrank.tools.output.page import render

_FINDINGS = 12
_ROWS = 40
"""Rows of the bandwidth table. The JSON has all rows."""


def report_page(figures: Figures) -> str:
    """Return the page."""
    replayed = replay.shown(figures.replay, limit=_ROWS) if figures.replay is not None else None
    keys = [KEYS["op"], ("group", lambda row: row["pg"]), KEYS["locality"], KEYS["size"]]
    more = "crossrank bandwidth shows all"
    charts = [*_charts(figures), *(replayed["charts"] if replayed else [])]
    parts = _parts(figures)
    return render(
        "report.html",
        charts,
        figures=figures,
        rows=bandwidth_table(figures.bandwidth, keys, _ROWS, more=more, id="size-table", choices=3),
        diagnosis=figures.diagnosis and diagnosis.shown(figures.diagnosis, limit=_FINDINGS),
        replay=replayed,
        links=[(id, name) for id, (name, is_there, _) in parts.items() if is_there],
        absent=[why for _, is_there, why in parts.values() if why and not is_there],
        has_lines=parts["lines"][1],
        compared=COMPARED,
        bounds=BOUNDS.capitalize() if any(row["upper_bounds"] for row in figures.bandwidth.rows) else "",
    )


_NO_LINE = "(C++)"


def _parts(figures: Figures) -> dict[str, tuple[str, bool, str]]:
    """Return id of each section -> (name, whether it has data, the data that it needs)."""
    return {
        "communicates": ("Operations and groups", True, ""),
        "traffic": ("Traffic", bool(figures.traffic.total), "sizes of calls whose ranks are known"),
        "lines": (
            "Source lines",
            any(row["source"] != _NO_LINE for row in figures.sources),
            "source lines of calls (recordings of crossrank have them)",
        ),
        "bandwidth": ("Bandwidth", bool(figures.bandwidth.timed_collectives), "times of communication"),
        "waiting": (
            "Waiting time",
            figures.waiting is not None,
            "a rank that waits for another one in a collective whose times are known on both",
        ),
        "overlap": ("Overlap", figures.bandwidth.overlap is not None, "a profiled window"),
        "exposed": (
            "Exposed communication",
            figures.exposed is not None,
            "waits of the hosts (recordings of crossrank have them)",
        ),
        "steps": ("Steps", figures.steps is not None, "start times of steps"),
        "diagnosis": ("Diagnosis", figures.diagnosis is not None, ""),
    }


def _charts(figures: Figures) -> Iterator[Chart]:
    is_timed = bool(figures.bandwidth.timed_collectives)
    yield _matrix(figures.matrix, is_timed)
    if figures.traffic.total:
        yield _traffic(figures.traffic)
    if is_timed and (sizes := _bandwidth(figures.bandwidth)).traces:
        yield sizes
    if figures.waiting is not None:
        yield from _waiting(figures.waiting)
    if figures.bandwidth.overlap is not None:
        yield _overlap(figures.bandwidth.overlap)
    if figures.exposed is not None and figures.exposed.steps is not None:
        yield _steps("exposed-chart", figures.exposed.steps, "least to most exposed rank")
    if figures.steps is not None:
        yield _steps("steps-chart", figures.steps, "fastest to slowest rank")


def _matrix(matrix: Matrix, is_timed: bool) -> Chart:
    def in_ms(values: list[list[float | None]]) -> draw.Trace:
        texts = [["" if one is None else milliseconds(one) for one in row] for row in values]
        return from_zero(values) | {"text": texts}

    sizes = [
        [amount(size, unsized) if size or unsized else "" for size, unsized in zip(*rows, strict=True)]
        for rows in zip(matrix.bytes, matrix.unsized, strict=True)
    ]
    counts = [[f"{count:,}" if count else "" for count in row] for row in matrix.calls]
    views = {"Bytes": from_zero(matrix.bytes) | {"text": sizes}, "Calls": from_zero(matrix.calls) | {"text": counts}}
    if is_timed:
        views |= {"Time": in_ms(matrix.time_ms), "Waiting": in_ms(matrix.waiting_ms)}
    groups, hover = draw.labels(matrix.groups), "%{y}, %{x}<br>%{text}"
    cells = "%{text}" if len(groups) <= 12 else ""
    trace = draw.heatmap(groups, matrix.ops, hover, texttemplate=cells, showscale=False)
    # Long names are rotated; on a narrow page most are.
    height = 110 + 34 * len(matrix.ops) + (110 if sum(map(len, groups)) > 40 else 0)
    layout = CATEGORIES | {"yaxis": CATEGORIES["yaxis"] | {"dtick": 1}}
    return Chart(id="matrix", height=height, traces=[trace], layout=layout, views=views)


def _traffic(traffic: Traffic) -> Chart:
    logarithms = [[log10(one) if one > 0 else None for one in row] for row in traffic.bytes]
    names, texts = draw.labels(traffic.labels), [[amount(one) for one in row] for row in traffic.bytes]
    return Chart(
        id="traffic-map",
        height=max(320, min(640, 160 + 14 * len(names))),
        traces=[draw.heatmap(names, traffic.labels, "%{y} → %{x}<br>%{text}", text=texts, showscale=False)],
        layout={"xaxis": axis("to", type="category"), "yaxis": CATEGORIES["yaxis"] | axis("from")},
        views={"Linear": from_zero(traffic.bytes), "Logarithmic": {"z": logarithms, "zmin": None, "zmax": None}},
    )


def _bandwidth(result: Bandwidth) -> Chart:
    rates = [
        draw.Rate(
            op=row["op"] or "",
            size=row["bytes"] / row["collectives"],
            low=row["busbw_gb_per_s"]["p5"],
            busbw=row["busbw_gb_per_s"]["p50"],
            high=row["busbw_gb_per_s"]["p95"],
            text=f"{row['op']}, {row['pg']}, {amount(row['bytes'] / row['collectives'])} each, "
            + plural(row["collectives"], "collective")
            + (f", {plural(row['upper_bounds'], 'upper bound')} of time" if row["upper_bounds"] else ""),
            is_bound=bool(row["upper_bounds"]),
            choices=[printable(str(one)) for one in (row["op"], row["pg"], row["locality"])],
        )
        for row in result.rows
        if row["busbw_gb_per_s"] is not None and row["bytes"]
    ]
    line_rates = sorted({row["line_rate_gb_per_s"] for row in result.rows if row["line_rate_gb_per_s"]})
    return draw.bandwidth_chart("sizes", rates, "size-table", line_rates)


def _waiting(waiting: Waiting) -> Iterator[Chart]:
    bins = whole_numbers(waiting.axis, waiting.bins) if waiting.axis == "step" else axis(waiting.axis)
    lines = [
        draw.line("p50", waiting.bins, waiting.p50_us, "us"),
        draw.line("p95", waiting.bins, waiting.p95_us, "us"),
        draw.line("max", waiting.bins, waiting.max_us, "us", dash="dot"),
    ]
    layout = {"xaxis": bins, "yaxis": axis("waiting time, us", rangemode="tozero")}
    yield Chart(id="waiting-lines", height=280, traces=lines, layout=layout)
    cells = draw.heatmap(waiting.bins, waiting.rows, "%{y}, %{x}<br>%{z:,.1f} us", z=waiting.mean_us, zmin=0)
    cells["colorbar"] = {"title": {"text": "mean, us"}}
    height = max(200, min(640, 130 + 16 * len(waiting.rows)))
    yield Chart(id="waiting-map", height=height, traces=[cells], layout=CATEGORIES | {"xaxis": bins})


def _overlap(overlap: Overlap) -> Chart:
    ranks = [f"rank {one['rank']}" for one in overlap.ranks]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": ranks,
            "x": [one[f"{part}_ms"] for one in overlap.ranks],
            "hovertemplate": "%{y}: %{x:,.2f} ms<extra>" + name + "</extra>",
            **({"marker": {"color": "rgba(128, 128, 128, 0.4)"}} if name == "idle" else {}),
        }
        for part, name in shown_parts(overlap.profiler).items()
    ]
    layout = {
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "xaxis": axis("ms"),
        "yaxis": CATEGORIES["yaxis"],
    }
    return Chart(id="overlap-chart", height=max(200, min(640, 130 + 18 * len(ranks))), traces=traces, layout=layout)


def _steps(id: str, steps: Steps, range: str) -> Chart:
    band = {"type": "scatter", "mode": "lines", "x": steps.step, "line": {"width": 0}, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": "rgba(80, 130, 210, 0.25)", "name": range}
    traces = [
        draw.line("median", steps.step, steps.p50_ms, "ms"),
        band | {"y": steps.most_ms, "showlegend": False},
        band | {"y": steps.least_ms} | fill,
    ]
    layout = {"xaxis": whole_numbers("step", steps.step), "yaxis": axis("ms", rangemode="tozero")}
    return Chart(id=id, height=280, traces=traces, layout=layout)
