"""Pages: what they say, whatever the texts in it are, and what charts are drawn from."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from crossrank.replay.results.replay_report import make_report
from crossrank.tools.analysis.diagnosis.findings import Diagnosis, Finding, GroupStragglers, Place
from crossrank.tools.analysis.figures import figures
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.output import page as pages
from crossrank.tools.output.charts import Rate, bandwidth_chart, labels
from crossrank.tools.output.console import table_of
from crossrank.tools.output.diagnosis.diagnosis_page import Cell, diagnosis_page, merge_cells
from crossrank.tools.output.replay import replay_page
from crossrank.tools.output.report import report_page
from crossrank.tools.traces.replayed import CheckFailure, CheckResult, ReplayReport, Settings
from tests.unit.analysis.test_figures import figures_of, late_job
from tests.unit.replay.test_measure import job

EVIL = "<b onclick=x>\x1b[2J</script>&"
SHOWN = "<b onclick=x>\\x1b[2J</script>&"
KEPT = ("kind", "verdict", "role", "schema")
"""Fields whose texts are the program's own."""


class Parsed(HTMLParser):
    """Tags, texts and attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts = ""
        self.attributes: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts += data


def spoiled(value: Any) -> Any:
    """`value` with a hostile text in the place of every text, and in the names of dictionaries that come from files."""
    if isinstance(value, dict):
        return {name: one if name in KEPT else spoiled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [spoiled(one) for one in value]
    return EVIL if isinstance(value, str) else value


def a_diagnosis() -> Diagnosis:
    place = Place(rank=1, role="culprit", what="its last call", frames=["step (train.py:1)"])
    pg: dict[str, Any] = {"pg": ["0", "world"], "pg_ranks": [0, 1]}
    root = Finding(kind="missing_rank", op="all_reduce", collective_seq_id=4, culprit_ranks=[1], places=[place], **pg)
    waits = dict.fromkeys(("p50", "p95", "max", "total"), 1.0)
    late = GroupStragglers(collectives=3, last_rank=1, last_share=2 / 3, max_rank=1, wait_ms=waits, late_ms={}, **pg)
    consequence = Finding(kind="p2p_unmatched", op="recv", p2p_seq_id=2, waiting_ranks=[0], because_of=0, **pg)
    found: dict[str, Any] = {"findings": [root], "consequences": [consequence], "stragglers": [late]}
    found |= {"advisory": [Finding(kind="straggler", text="rank 1 comes last", **pg)], "notes": ["a note"]}
    counts = {"collectives": 3, "calls": 6, "groups": 1}
    return Diagnosis(verdict="error", world_size=2, ranks=[0, 1], suspect_ranks=[1], counts=counts, **found)


def a_report() -> ReplayReport:
    plan, results = job()
    plan.ranks[0].calls[0].took_ns = plan.ranks[1].calls[0].took_ns = 800
    report, _ = make_report(plan, Settings(backend="gloo", device="cpu"), results, what_if={}, variables={"A": "1"})
    wrong = CheckFailure(rank=0, call=1, op="all_reduce", pg="0", tensor=0, element=2, elements=3, expected=1, got=2)
    report.check = CheckResult(tensors=5, failures=[wrong])
    report.substitutes, report.notes, report.damage = {EVIL: 2}, ["a note"], ["a torn file"]
    return report


def hostile_pages() -> dict[str, str]:
    diagnosis = msgspec.convert(spoiled(msgspec.to_builtins(a_diagnosis())), Diagnosis)
    report = msgspec.convert(spoiled(msgspec.to_builtins(a_report())), ReplayReport)
    found = figures_of(*late_job())
    found.diagnosis, found.replay = diagnosis, report
    found.notes, found.about, found.inputs = [EVIL], {EVIL: EVIL}, [EVIL]
    found.matrix.groups, found.traffic.labels, found.sources[0]["source"] = [EVIL], [EVIL, "b"], EVIL
    for row in found.bandwidth.rows:
        row["pg"] = row["op"] = EVIL
    return {"diagnosis": diagnosis_page(diagnosis), "replay": replay_page(report), "report": report_page(found)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_report_skips_the_replay_of_another_number_of_ranks(ranks: int) -> None:
    replay = a_report()
    replay.world_size = ranks
    times = [rank.times for rank in late_job()]
    found = figures(match_collectives(Job.match(times)), inputs=["run"], replay=replay)
    told = "skipped the replay of job: it has 3 ranks, the job has 2; give a replay of this recording with --replay"
    assert (found.replay is None, told in found.skipped) == (ranks == 3, ranks == 3)


def test_every_page_escapes_the_text_of_files() -> None:
    for name, html in hostile_pages().items():
        parsed = Parsed(html)
        assert parsed.texts.count(SHOWN) > 8, name
        assert "\x1b" not in html, name
        assert "onclick" not in parsed.attributes, name
        assert parsed.tags.count("script") == {"diagnosis": 0}.get(name, 3), name


def test_charts_escape_html_in_texts() -> None:
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', hostile_pages()["report"])
    assert data is not None
    charts = json.loads(data[1])
    escaped = "&lt;b onclick=x&gt;\\x1b[2J&lt;/script&gt;&amp;"
    assert charts["matrix"]["traces"][0]["x"] == [escaped]
    assert charts["sizes"]["traces"][0]["name"] == escaped
    assert charts["replayed-sizes"]["traces"][0]["name"] == escaped


def lacking(html: str, *texts: str) -> list[str]:
    """Those of the texts that a page does not have, whatever stands between their words."""
    shown = "".join(Parsed(html).texts.split())
    return [text for text in texts if text.replace(" ", "") not in shown]


def test_a_diagnosis_page_has_the_texts_of_the_console() -> None:
    assert not lacking(
        diagnosis_page(a_diagnosis()),
        "Verdict: error 2 of 2 ranks read; 6 calls on 1 group (3 collectives) compared. Culprit: rank 1.",
        "1. missing_rank: a rank has not made a collective, and other ranks wait in it",
        "call all_reduce #4 of group world [0] (rank 0-1)",
        "culprit rank 1",
        "rank 1, culprit its last call step (train.py:1)",
        "More calls in which ranks wait as a result: 1",
        "recv p2p #2 world [0] 0 ?",
        "straggler on world [0]: rank 1 comes last",
        "world [0] 0-1 3 rank 1 in 66.7 % 1 ms 1 ms 1 ms rank 1 1 ms",
    )


def test_a_replay_page_shows_coverage_and_problems() -> None:
    assert not lacking(
        replay_page(a_report()),
        "2 ranks with gloo on host (2); 5 passes after 2 warm-up passes, pace fast; torch 2.13.0",
        "100.0 % of the calls are replayed: 2 of 2",
        "wrong 5 results checked",
        "damaged: a torn file",
        "all_reduce 0 2 ≤4 KiB 1 1.0 1.0 1.0",
        "Relative error of each timed call (2): 31.2 % median",
        "0 1 all_reduce 0 0 2 3 1 2",
        "time p50 us",
    )


def test_a_page_lists_the_licences_of_what_it_embeds() -> None:
    page = replay_page(a_report())
    shown = page[page.index("<summary>Licenses") : page.index('id="plotly"')]
    assert "Licensed under the MIT license" in shown
    assert "BSD-3-Clause" in shown


def test_a_page_without_plotly_reports_missing_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_plotly", lambda: "")
    parsed = Parsed(replay_page(a_report()))
    assert "Charts need plotly (pip install 'crossrank[tools]')." in parsed.texts
    assert "script" not in parsed.tags


def test_ranks_of_a_large_job_share_cells() -> None:
    cells = [Cell(str(rank), "bad" if rank == 700 else "", "") for rank in range(1025)]
    assert [cell.text for cell in merge_cells(cells)] == ["0-699", "700", "701-1024"]
    assert merge_cells(cells[:1024]) == cells[:1024]


def test_a_table_counts_its_omitted_rows() -> None:
    table = table_of([1, 2, 3], [("#n", lambda one: one)], limit=2)
    assert (table.rows, table.more) == ([[1], [2]], "… and 1 more (--json shows all)")
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
    assert (reduce["x"], reduce["y"], reduce["text"]) == ([1e6, 2e6], [2, 3], ["a<br>2 GB/s", "b<br>3 GB/s"])
    assert (reduce["error_y"]["array"], reduce["error_y"]["arrayminus"]) == ([0, 1], [0, 2])
    assert reduce["marker"]["symbol"] == ["circle", "circle-open"]
    assert (reduce["name"], gather["name"]) == ("all_reduce", "all_gather")
    assert [shape["y0"] for shape in chart.layout["shapes"]] == [50.0]
