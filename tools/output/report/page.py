"""The page: the template `page.html` with the figures as JSON, and plotly.js, all in one file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import msgspec

from crossrank.errors import CrossrankError
from crossrank.text import amount, printable, rank_ranges
from crossrank.tools.analysis.buckets import size_text
from crossrank.tools.analysis.diagnosis.explain import next_step
from crossrank.tools.analysis.diagnosis.findings import KINDS, call_text, group_text
from crossrank.tools.analysis.figures import Figures

_TEMPLATE = Path(__file__).with_name("page.html")
_SHOWN = 12
"""Findings and notes on the page; the JSON has all."""
_ROWS = 40
"""Rows of the table of bandwidth."""


def plotly_script() -> str:
    """The library that draws the charts. Raises `CrossrankError` where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise CrossrankError("the page needs plotly; install it with: pip install 'crossrank[tools]'") from error
    return str(get_plotlyjs())


def page(figures: Figures, plotly: str) -> str:
    """The whole page, with the library that `plotly_script` gives."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        amount=amount,
        safe_text=printable,
        ranks=rank_ranges,
        percent=_percent,
        milliseconds=_milliseconds,
        number=lambda value: f"{value:,}",
        group=group_text,
        call=lambda finding: call_text(
            finding.op or "call",
            finding.collective_seq_id if finding.collective_seq_id is not None else finding.p2p_seq_id,
        ),
        size=size_text,
        next_step=next_step,
    )
    return environment.from_string(_TEMPLATE.read_text()).render(
        figures=figures,
        data=_script(_drawn(figures)),
        plotly=plotly,
        kinds=KINDS,
        shown=_SHOWN,
        rows=_ROWS,
        known=sum(figures.by_locality.values()) - figures.by_locality.get("unknown", 0),
    )


def _drawn(figures: Figures) -> dict[str, Any]:
    """What the charts are drawn from."""
    rows = [
        {
            "op": row.op,
            "group": row.pg,
            "locality": row.locality,
            "size": row.bytes / row.collectives,
            "collectives": row.collectives,
            "busbw": row.busbw_gb_per_s,
            "time": row.time_us,
            "bounds": row.upper_bounds,
        }
        for row in figures.bandwidth.rows
        if row.busbw_gb_per_s is not None and row.bytes
    ]
    return {
        "matrix": figures.matrix,
        "traffic": figures.traffic,
        "sizes": rows,
        "waiting": figures.waiting,
        "steps": figures.steps,
        "rates": sorted({row.line_rate_gb_per_s for row in figures.bandwidth.rows if row.line_rate_gb_per_s}),
    }


def _script(content: object) -> str:
    """JSON that may stand in a script element: nothing in it ends the element."""
    return msgspec.json.encode(content).decode().replace("<", "\\u003c")


def _percent(share: float | None) -> str:
    # Never rounded up to what it is not.
    return "-" if share is None else f"{int(1000 * share) / 10:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
