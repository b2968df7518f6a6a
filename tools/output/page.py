"""Fill a template of `pages/` into one HTML file that works from disk without a network.

All texts are escaped, because they may come from files. Unprintable characters are shown as escapes.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
import markupsafe
import orjson

from crossrank.text import amount, microseconds, milliseconds, percent, printable, rank_ranges
from crossrank.tools.analysis.diagnosis.findings import group_text
from crossrank.tools.output.bandwidth import alignment_text
from crossrank.tools.output.charts import Chart
from crossrank.tools.output.diagnosis.verdict import clocks_text, compared_text, facts, finding_call, frame_lines

_TEMPLATES = Path(__file__).with_name("pages")
_FILTERS = {
    "alignment": alignment_text,
    "amount": amount,
    "call": finding_call,
    "clocks": clocks_text,
    "compared": compared_text,
    "facts": facts,
    "frames": frame_lines,
    "group": group_text,
    "ms": milliseconds,
    "number": lambda count: f"{count:,}",
    "percent": percent,
    "ranks": rank_ranges,
    "us": microseconds,
}


def render(template: str, charts: Sequence[Chart] = (), **shown: object) -> str:
    """Return the file. Without plotly it has a message instead of charts."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters.update(_FILTERS)
    by_id = {chart.id: chart for chart in charts}
    # The JSON must not end its script element.
    data = orjson.dumps(by_id).replace(b"<", b"\\u003c").decode()
    scripts = {"plotly": _plotly() if charts else "", "data": data}
    shown |= {name: markupsafe.Markup(text) for name, text in scripts.items()}
    shown["licenses"] = _licenses() if scripts["plotly"] else ""
    return environment.get_template(template).render(charts=by_id, **shown) + "\n"


@lru_cache
def _licenses() -> str:
    """Return the license texts of plotly.js and its parts, which are unreadable in the compressed library."""
    from plotly.offline import get_plotlyjs

    comments = re.findall(r"/\*[*!].*?\*/", get_plotlyjs(), re.DOTALL)
    texts = [one.replace("\\n", "\n") for one in comments if "licens" in one.lower()]
    return "\n\n".join(dict.fromkeys(texts))


@lru_cache
def _plotly() -> str:
    """Return plotly.js, deflated, in base64; empty if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return base64.b64encode(zlib.compress(get_plotlyjs().encode())).decode()
