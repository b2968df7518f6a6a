"""A replay as one HTML page that works from disk: the template `page.html` beside this module, filled in."""

from __future__ import annotations

from math import log2
from pathlib import Path

import jinja2

from crossrank.replay.results import show as texts
from crossrank.replay.results.report import Report
from crossrank.text import amount, printable

_TEMPLATE = Path(__file__).with_name("page.html")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 240, 64, 28


def page(report: Report) -> str:
    """The whole page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        us=texts.microseconds, rate=texts.rate, percent=texts.percent, amount=amount, safe_text=printable
    )
    environment.globals.update(size_text=texts.size_text)
    points, y_ticks, x_ticks = _points(report)
    return (
        environment.from_string(_TEMPLATE.read_text()).render(
            report=report,
            points=points,
            y_ticks=y_ticks,
            x_ticks=x_ticks,
            width=_WIDTH,
            height=_HEIGHT,
            left=_LEFT,
            bottom=_BOTTOM,
            operations=sorted({op for _, _, op, _ in points}),
        )
        + "\n"
    )


def _points(
    report: Report,
) -> tuple[list[tuple[float, float, str, str]], list[tuple[float, str]], list[tuple[float, str]]]:
    """Bus bandwidth over size, both logarithmic: (x, y, operation, title) per row, and the ticks of both axes."""
    rated = [row for row in report.rows if row.busbw_gb_per_s is not None and row.busbw_gb_per_s["p50"] > 0]
    rows = [row for row in rated if row.size_to]
    if not rows:
        return [], [], []
    values = [log2(row.busbw_gb_per_s["p50"]) for row in rows if row.busbw_gb_per_s is not None]
    sizes = [log2(row.size_to) for row in rows]
    low, high = int(min(values) // 1), int(-(-max(values) // 1))
    high = max(high, low + 1)
    first, last = min(sizes), max(sizes)

    def x(size: float) -> float:
        share = (size - first) / (last - first) if last > first else 0.5
        return round(_LEFT + 16 + share * (_WIDTH - _LEFT - 40), 1)

    def y(value: float) -> float:
        return round((_HEIGHT - _BOTTOM) - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - 16), 1)

    points = [
        (
            x(size),
            y(value),
            row.op,
            f"{row.op} on {row.pg} ({row.ranks} ranks), {texts.size_text(row.size_to)}: "
            f"{2**value:.3g} GB/s, {row.calls} call(s)",
        )
        for row, size, value in zip(rows, sizes, values, strict=True)
    ]
    step = max(1, (high - low) // 5)
    y_ticks = [(y(tick), f"{2.0**tick:.2g}") for tick in range(low, high + 1, step)]
    x_ticks = [(x(size), texts.size_text(round(2**size)).removeprefix("up to ")) for size in sorted(set(sizes))]
    return points, y_ticks, x_ticks
