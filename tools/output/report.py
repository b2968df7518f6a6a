"""The page of `crossrank report`, made of its figures."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

from crossrank.text import amount, milliseconds, percent, plural, printable, rank_ranges
from crossrank.tools.analysis.figures import Figures
from crossrank.tools.analysis.traffic import Traffic
from crossrank.tools.analysis.waiting import Steps, Waiting
from crossrank.tools.output.bandwidth import BOUNDS, KEYS, bandwidth_table
from crossrank.tools.output.charts import (
    CATEGORIES,
    Chart,
    Rate,
    axis,
    bandwidth_chart,
    from_zero,
    heatmap,
    labels,
    line,
)
from crossrank.tools.output.console import table_of
from crossrank.tools.output.diagnosis.page import VERDICT_TONES, diagnosis_sections
from crossrank.tools.output.page import Block, Columns, Fact, Facts, Page, Points, Section, Text, Tile, Tiles
from crossrank.tools.output.replay import replay_sections

_SHOWN = 12
"""Findings and notes on the page; the JSON has all."""
_ROWS = 40
"""Rows of tables."""


def report_page(figures: Figures) -> Page:
    nodes = f" on {plural(figures.nodes, 'node')}" if figures.nodes else ""
    inputs = ", ".join(figures.inputs)
    sections = [
        Section("", [_tiles(figures)]),
        _communicates(figures),
        _traffic(figures.traffic, figures.unsized),
        _lines(figures),
        _bandwidth(figures),
        _waiting(figures.waiting),
        _steps(figures.steps),
    ]
    if figures.diagnosis is not None:
        sections += diagnosis_sections(figures.diagnosis, _SHOWN)
    else:
        sections.append(Section("Diagnosis", [Text(f"{figures.diagnosis_problem}.")], id="diagnosis"))
    if figures.replay is not None:
        sections += replay_sections(figures.replay, _ROWS)
    return Page(
        title=f"crossrank: {figures.ranks} ranks, {inputs}",
        heading=f"{figures.ranks:,} of {figures.world_size:,} ranks{nodes}",
        subtitle=inputs,
        sections=[*sections, _basis(figures)],
    )


def _tiles(figures: Figures) -> Tiles:
    table, diagnosis = figures.bandwidth, figures.diagnosis
    unknown = figures.by_locality.get("unknown", 0)
    known = sum(figures.by_locality.values()) - unknown
    crossing = percent(figures.by_locality.get("cross_node", 0) / known) if known else "not known"
    where = ", where the place is known" if unknown and known else ""
    timed = f"in {table.timed_collectives:,} timed of {table.collectives:,} collectives and transfers, each from its "
    tiles = [
        Tile(amount(figures.bytes, figures.unsized), f"in {figures.calls:,} calls of all ranks (S of nccl-tests)"),
        Tile(crossing, f"of the bytes in calls that cross nodes{where}"),
        Tile(milliseconds(table.total_ms) if table.timed_collectives else "not timed", f"{timed}last arrival"),
    ]
    if figures.waiting is not None and figures.waiting.last:
        worst = figures.waiting.last[0]
        text = f"was waited for {milliseconds(worst.cost_ms)} in all: it came last in "
        tiles.append(Tile(f"rank {worst.rank}", f"{text}{worst.last:,} of {worst.of:,} collectives"))
    if diagnosis is None:
        return Tiles([*tiles, Tile("none", "no diagnosis", "warn")])
    text = f"diagnosis: {plural(len(diagnosis.findings), 'finding')}"
    if suspects := diagnosis.suspect_ranks:
        text += f", rank {rank_ranges(suspects[:20])}" + (", …" if len(suspects) > 20 else "")
    return Tiles([*tiles, Tile(diagnosis.verdict, text, VERDICT_TONES[diagnosis.verdict])])


def _communicates(figures: Figures) -> Section:
    matrix, table = figures.matrix, figures.bandwidth

    def in_ms(values: list[list[float]]) -> dict[str, object]:
        return from_zero(values) | {"text": [[milliseconds(one) if one else "" for one in row] for row in values]}

    sizes = [
        [amount(size, unsized) if size or unsized else "" for size, unsized in zip(*rows, strict=True)]
        for rows in zip(matrix.bytes, matrix.unsized, strict=True)
    ]
    counts = [[f"{count:,}" if count else "" for count in row] for row in matrix.calls]
    views = {"Bytes": from_zero(matrix.bytes) | {"text": sizes}, "Calls": from_zero(matrix.calls) | {"text": counts}}
    text = "Bytes are S of nccl-tests, summed over ranks."
    if table.timed_collectives:
        views |= {"Time": in_ms(matrix.time_ms), "Waiting": in_ms(matrix.waiting_ms)}
        text += (
            f" Time is that of the {table.timed_calls:,} of {table.calls:,} calls that have one; waiting is summed "
            "over calls and ranks."
        )
    cells = "%{text}" if len(matrix.groups) <= 12 else ""
    trace = heatmap(labels(matrix.groups), matrix.ops, "%{y}, %{x}<br>%{text}", texttemplate=cells, showscale=False)
    # Names that are too long to stand side by side are turned.
    height = 110 + 34 * len(matrix.ops) + (110 if sum(map(len, matrix.groups)) > 150 else 0)
    chart = Chart(id="matrix", height=height, traces=[trace], layout=CATEGORIES, views=views)
    intro = "Operations by kinds of process groups: groups of one description and size count as one."
    return Section("What it communicates", [Text(intro, "soft"), chart, Text(text, "soft")], id="communicates")


def _traffic(traffic: Traffic, unsized: int) -> Section:
    text = f"{amount(traffic.total, unsized)} in all, one row per {traffic.what}."
    if traffic.between_nodes is not None and traffic.total:
        text += f" {percent(traffic.between_nodes / traffic.total)} goes between nodes."
    logarithms = [[log10(one) if one > 0 else None for one in row] for row in traffic.bytes]
    views = {"Linear": from_zero(traffic.bytes), "Logarithmic": {"z": logarithms, "zmin": None, "zmax": None}}
    names, texts = labels(traffic.labels), [[amount(one) for one in row] for row in traffic.bytes]
    chart = Chart(
        id="traffic-map",
        height=max(320, min(640, 160 + 14 * len(names))),
        traces=[heatmap(names, traffic.labels, "%{y} → %{x}<br>%{text}", text=texts, showscale=False)],
        layout={"xaxis": axis("to", type="category"), "yaxis": CATEGORIES["yaxis"] | axis("from")},
        views=views,
    )
    blocks: list[Block] = [Text(text, "soft"), chart]
    if traffic.not_placed:
        reasons = ", ".join(traffic.reasons)
        blocks.append(Text(f"{amount(traffic.not_placed)} of calls are not on the map: of {reasons}.", "warn"))
    how = (
        "Point-to-point calls and uneven all_to_alls as recorded; other collectives as a ring that moves the least "
        "would: NCCL does not say which way it takes."
    )
    return Section("Who sends to whom", [*blocks, Text(how, "soft")], id="traffic", half=True)


def _lines(figures: Figures) -> Section:
    table = table_of(
        figures.sources,
        (
            ("source", lambda row: row.source),
            ("operation", lambda row: row.op),
            ("#calls", lambda row: f"{row.calls:,}"),
            ("#bytes", lambda row: amount(row.bytes, row.unsized)),
            ("#time", lambda row: milliseconds(row.time_ms)),
            ("#waiting", lambda row: milliseconds(row.waiting_ms)),
        ),
        limit=_ROWS,
    )
    text = "(C++): no Python frame called, as DDP's reducer, or the files do not tell lines."
    return Section("Source lines", [table, Text(text, "soft")], id="lines", half=True)


def _bandwidth(figures: Figures) -> Section:
    result = figures.bandwidth
    if not result.timed_collectives:
        text = (
            "Nothing says how long communication took. Record a window (TRACING_WINDOW=START:STOP), a report of Nsight "
            "Systems, or set TORCH_NCCL_ENABLE_TIMING=1."
        )
        return Section("Bandwidth by size", [Text(text)], id="bandwidth")
    rates = [
        Rate(
            op=row.op or "",
            size=row.bytes / row.collectives,
            low=row.busbw_gb_per_s["p5"],
            busbw=row.busbw_gb_per_s["p50"],
            high=row.busbw_gb_per_s["p95"],
            text=f"{row.op}, {row.pg}, {amount(row.bytes / row.collectives)} each, "
            + plural(row.collectives, "collective")
            + (f", {plural(row.upper_bounds, 'upper bound')} of time" if row.upper_bounds else ""),
            is_bound=bool(row.upper_bounds),
            choices=[printable(str(one)) for one in (row.op, row.pg, row.locality)],
        )
        for row in result.rows
        if row.busbw_gb_per_s is not None and row.bytes
    ]
    keys = [KEYS["op"], ("group", lambda row: row.pg), KEYS["locality"], KEYS["size"]]
    more = "crossrank bandwidth has all"
    table = bandwidth_table(result, keys, _ROWS, more=more, id="size-table", choices=3)
    line_rates = sorted({row.line_rate_gb_per_s for row in result.rows if row.line_rate_gb_per_s})
    blocks: list[Block] = [
        Text("Bus bandwidth, median and the range from p5 to p95; GB/s of 1e9 bytes, factors of nccl-tests.", "soft"),
        bandwidth_chart("sizes", rates, table.id, line_rates),
        table,
        Text(f"{BOUNDS.capitalize()}; the time includes waiting.", "soft"),
    ]
    return Section("Bandwidth by size", blocks, id="bandwidth")


def _waiting(waiting: Waiting | None) -> Section:
    if waiting is None:
        text = "No two ranks can be compared: no collective has times on several ranks, or their clocks share none."
        return Section("Who waits for whom", [Text(text)], id="waiting")
    text = (
        f"Waiting of a rank: from its arrival to that of the last, by {waiting.measured}. The lines and the map are of "
        "single calls; in the tables calls that wait at the same time count once."
    )
    few = {"dtick": 1} if len(waiting.bins) < 12 else {}
    bins = axis(waiting.axis, **({"tickformat": "d", **few} if waiting.axis == "iteration" else {}))
    lines = [
        line("p50", waiting.bins, waiting.p50_us, "us"),
        line("p95", waiting.bins, waiting.p95_us, "us"),
        line("max", waiting.bins, waiting.max_us, "us", dash="dot"),
    ]
    cells = heatmap(waiting.bins, waiting.rows, "%{y}, %{x}<br>%{z:,.1f} us", z=waiting.mean_us, zmin=0)
    cells["colorbar"] = {"title": {"text": "mean, us"}}
    height = max(200, min(640, 130 + 16 * len(waiting.rows)))
    yaxis = axis("waiting, us", rangemode="tozero")
    last = table_of(
        waiting.last,
        (
            ("was waited for", lambda row: f"rank {row.rank}"),
            ("#time", lambda row: milliseconds(row.cost_ms)),
            ("#came last in", lambda row: f"{row.last:,}"),
            ("#of", lambda row: f"{row.of:,}"),
        ),
        limit=_ROWS,
    )
    waiters = table_of(
        waiting.waiters,
        (
            ("waited longest in all", lambda row: f"rank {row.rank}"),
            ("#time", lambda row: milliseconds(row.waiting_ms)),
        ),
        limit=_ROWS,
    )
    blocks: list[Block] = [
        Text(text, "soft"),
        Chart(id="waiting-lines", height=280, traces=lines, layout={"xaxis": bins, "yaxis": yaxis}),
        Chart(id="waiting-map", height=height, traces=[cells], layout=CATEGORIES | {"xaxis": bins}),
        Columns([last, waiters]),
    ]
    return Section("Who waits for whom", blocks, id="waiting")


def _steps(steps: Steps | None) -> Section:
    if steps is None:
        return Section("Iterations", [Text("No file says when iterations began.")], id="steps")
    text = "Time from one iteration to the next: median over the ranks, and the range from the fastest to the slowest."
    band = {"type": "scatter", "mode": "lines", "x": steps.step, "line": {"width": 0}, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": "rgba(80, 130, 210, 0.25)", "name": "fastest to slowest rank"}
    traces = [
        line("median", steps.step, steps.p50_ms, "ms"),
        band | {"y": steps.most_ms, "showlegend": False},
        band | {"y": steps.least_ms} | fill,
    ]
    layout = {"xaxis": axis("iteration", tickformat="d"), "yaxis": axis("ms", rangemode="tozero")}
    chart = Chart(id="steps-chart", height=280, traces=traces, layout=layout)
    return Section("Iterations", [Text(text, "soft"), chart], id="steps")


def _basis(figures: Figures) -> Section:
    table = figures.bandwidth
    counted = (
        ("timed", table.attributed),
        ("not attributed", table.unattributed),
        ("not compared", table.not_compared),
    )
    clocks = table.clocks.note
    if residual := table.clocks.residual_us:
        clocks += f"; the ends of a collective still differ by {residual['p50']:,.1f} us (p50), "
        clocks += f"{residual['max']:,.1f} us at most"
    facts = [
        *(Fact(name, value) for name, value in figures.about.items()),
        *([Fact("missing", f"rank {figures.missing_ranks}", "bad")] if figures.missing_ranks else []),
        *(
            Fact("linked", f"{count:,} of {of:,} {what} ({percent(count / of)})")
            for what, (count, of) in figures.matched.items()
        ),
        *(Fact(name, f"{count:,}: {text}") for name, counts in counted for text, count in counts.items()),
        Fact("clocks", clocks),
        Fact("made by", f"crossrank {figures.crossrank}"),
    ]
    return Section("What this rests on", [Facts(facts), *_notes([*figures.skipped, *figures.notes])], id="basis")


def _notes(notes: Sequence[str]) -> list[Block]:
    more = [f"… and {len(notes) - _SHOWN} more: --json has all"] if len(notes) > _SHOWN else []
    return [Points([Text(note) for note in [*notes[:_SHOWN], *more]])] if notes else []
