"""A page: what each block becomes, whatever the texts are."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from crossrank.tools.output import page as pages
from crossrank.tools.output.charts import Chart, Rate, bandwidth_chart, labels, line
from crossrank.tools.output.console import Table, table_of
from crossrank.tools.output.page import (
    Block,
    Cell,
    Cells,
    Columns,
    Details,
    Fact,
    Facts,
    Heading,
    Page,
    Points,
    Section,
    Stack,
    Text,
    Tile,
    Tiles,
    merge_cells,
)

EVIL = "<b onclick=x>\x1b[2J</script>&"
SHOWN = "<b onclick=x>\\x1b[2J</script>&"


class Parsed(HTMLParser):
    """Tags and texts of a page."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        self.feed(page.html())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def page_of(*blocks: Block, text: str = "page") -> Page:
    return Page(title=text, heading=text, subtitle=text, sections=[Section(text, blocks)])


TABLE = Table(columns=[EVIL, f"#{EVIL}"], rows=[[EVIL, 1]], more=EVIL)


@pytest.mark.parametrize(
    ("block", "times"),
    [
        (Text(EVIL), 1),
        (Heading(EVIL), 1),
        (Tiles([Tile(EVIL, EVIL)]), 2),
        (Facts([Fact(EVIL, EVIL)]), 2),
        (Points([Text(EVIL), Text(EVIL)]), 2),
        (Stack(EVIL, "bad", EVIL, [EVIL]), 3),
        (Details(EVIL, [Columns([Text(EVIL), Text(EVIL)])]), 3),
        (TABLE, 4),
    ],
)
def test_a_text_of_a_file_is_shown_as_it_is_in_every_block(block: Block, times: int) -> None:
    parsed = Parsed(page_of(block, text=EVIL))
    assert parsed.texts.count(SHOWN) == times + 4  # window, heading, subtitle, section
    assert not {"b", "script"} & {*parsed.tags} - ({"b"} if isinstance(block, Tiles | Stack) else set())


def test_the_title_of_a_cell_is_escaped_too() -> None:
    parsed = Parsed(page_of(Cells([Cell("0", "bad", EVIL)], [("bad", EVIL)])))
    assert (parsed.titles, "script" in parsed.tags) == ([SHOWN], False)


def test_a_chart_brings_its_library_and_the_texts_in_it_are_no_html() -> None:
    chart = Chart(id="c", height=100, traces=[line(EVIL, [1.0], [None], "us")])
    html = page_of(chart).html()
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html)
    assert data is not None
    (trace,) = json.loads(data[1])["c"]["traces"]
    assert trace["name"] == "&lt;b onclick=x&gt;\\x1b[2J&lt;/script&gt;&amp;"
    assert 'id="plotly"' in html
    assert 'id="plotly"' not in page_of(TABLE).html()


def test_without_plotly_a_line_stands_in_the_place_of_a_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_plotly", lambda: "")
    parsed = Parsed(page_of(Chart(id="c", height=100, traces=[])))
    assert "A chart is missing: it needs plotly (pip install 'crossrank[report]')." in parsed.texts
    assert "script" not in parsed.tags


def test_ranks_of_a_large_job_share_cells() -> None:
    cells = [Cell(str(rank), "bad" if rank == 700 else "", "") for rank in range(1025)]
    assert [cell.text for cell in merge_cells(cells)] == ["0-699", "700", "701-1024"]
    assert merge_cells(cells[:1024]) == cells[:1024]


def test_a_table_says_how_many_rows_it_leaves_out() -> None:
    table = table_of([1, 2, 3], [("#n", lambda one: one)], limit=2)
    assert (table.rows, table.more) == ([[1], [2]], "… and 1 more: --json has all")
    assert table_of([1, 2], [("#n", lambda one: one)], limit=2).more == ""


def test_labels_are_cut_short_unless_two_would_be_the_same() -> None:
    long = "x" * 40
    assert labels([long, "y"]) == ["x" * 33 + "…", "y"]
    assert labels([f"{long}1", f"{long}2"]) == [f"{long}1", f"{long}2"]


def test_bandwidths_are_one_series_per_operation_by_size() -> None:
    rates = [
        Rate("all_reduce", 2e6, low=1, busbw=3, high=4, text="b", is_bound=True),
        Rate("all_gather", 1e3, low=1, busbw=2, high=2, text="c", is_bound=False),
        Rate("all_reduce", 1e6, low=2, busbw=2, high=2, text="a", is_bound=False),
    ]
    chart = bandwidth_chart("rates", rates, line_rates=[50.0])
    reduce, gather = chart.traces
    assert (reduce["name"], reduce["x"], reduce["y"], reduce["text"]) == (
        "all_reduce",
        [1e6, 2e6],
        [2, 3],
        ["a<br>2 GB/s", "b<br>3 GB/s"],
    )
    assert (reduce["error_y"]["array"], reduce["error_y"]["arrayminus"]) == ([0, 1], [0, 2])
    assert reduce["marker"]["symbol"] == ["circle", "circle-open"]
    assert gather["name"] == "all_gather"
    assert [shape["y0"] for shape in chart.layout["shapes"]] == [50.0]
