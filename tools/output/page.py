"""One HTML file that works from disk without a network: a title and sections, each made of a few kinds of blocks.

What a page says is put together by `report`, `replay` and `diagnosis.page`; how a block looks is in `page.html`, once.
Texts may come from files: the template escapes all of them, and shows what is not printable as an escape.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jinja2
import markupsafe
import orjson

from crossrank.text import printable
from crossrank.tools.output.charts import Chart
from crossrank.tools.output.console import Table

_TEMPLATE = Path(__file__).with_name("page.html")
_MOST_CELLS = 1024
"""Ranks up to which each has a cell of its own."""


class Tile(NamedTuple):
    """A number that stands out, and what it is."""

    value: str
    text: str
    tone: str = ""


class Fact(NamedTuple):
    name: str
    value: str
    tone: str = ""


class Cell(NamedTuple):
    """A rank and its role."""

    text: str
    tone: str
    title: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `tone` is one of "", soft, good, warn, bad, none."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Tiles:
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Facts:
    facts: Sequence[Fact]


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    points: Sequence[Text]


@dataclass(frozen=True)
class Cells:
    """Cells in rows, and what their colours mean."""

    cells: Sequence[Cell]
    legend: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Stack:
    """Frames of a rank, innermost first."""

    title: str
    tone: str
    text: str
    frames: Sequence[str]


@dataclass(frozen=True)
class Heading:
    """The title of a part of a section."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Columns:
    """Blocks side by side, where there is room."""

    blocks: Sequence[Block]


@dataclass(frozen=True)
class Details:
    """Blocks that are shown when asked for."""

    summary: str
    blocks: Sequence[Block]


Block = Text | Heading | Tiles | Facts | Points | Cells | Stack | Columns | Details | Table | Chart


@dataclass(frozen=True)
class Section:
    """A card of the page. A section without a title has no frame."""

    title: str
    blocks: Sequence[Block]
    id: str = ""
    half: bool = False
    """It takes half of the page's width where there is room."""


@dataclass(frozen=True)
class Page:
    title: str
    """Of the window."""
    heading: str
    subtitle: str
    sections: Sequence[Section]
    tone: str = ""
    """Of the heading."""
    charts: dict[str, Chart] = field(init=False)

    def __post_init__(self) -> None:
        found = {one.id: one for section in self.sections for one in _walk(section.blocks) if isinstance(one, Chart)}
        object.__setattr__(self, "charts", found)

    def html(self) -> str:
        """The whole file. Without plotly a line stands in the place of each chart."""
        environment = jinja2.Environment(
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: printable(value) if type(value) is str else value,
        )
        environment.filters["kind"] = lambda block: type(block).__name__
        plotly = _plotly() if self.charts else ""
        # Nothing in the JSON ends the script element that it stands in.
        charts = orjson.dumps(self.charts).replace(b"<", b"\\u003c").decode()
        template = environment.from_string(_TEMPLATE.read_text())
        return (
            template.render(page=self, plotly=markupsafe.Markup(plotly), charts=markupsafe.Markup(charts)).strip()
            + "\n"
        )


def _walk(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if isinstance(block, Columns | Details):
            yield from _walk(block.blocks)


@lru_cache
def _plotly() -> str:
    """The library that draws the charts, deflated, in base64; empty where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return base64.b64encode(zlib.compress(get_plotlyjs().encode())).decode()


def merge_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Neighbours of one role and title as one cell, where a job has more ranks than a page has room for."""
    merged: list[Cell] = []
    for cell in cells:
        last = merged[-1] if merged else None
        if len(cells) > _MOST_CELLS and last is not None and last[1:] == cell[1:]:
            merged[-1] = last._replace(text=f"{last.text.partition('-')[0]}-{cell.text}")
        else:
            merged.append(cell)
    return merged
