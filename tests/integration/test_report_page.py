"""The report in a browser: it renders from disk, without network, and its controls work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main
from tests.integration.test_link import train
from tests.integration.world import World
from tests.unit.graph.linking.public_traces import needs_traces, public

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
EVIL = "</script><script>document.title='evil'</script><b onmouseover=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    path = path or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium to open the report in: set CHROMIUM to one")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """The report of a real recording of two gloo ranks."""
    folder = tmp_path_factory.mktemp("recording")
    world.run(train, folder, window="1:3")
    assert main(["report", str(folder / "recording"), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


class Page:
    """An open report, with all that it complained about."""

    def __init__(self, browser: Any, path: Path, theme: str = "light") -> None:
        self.complaints: list[str] = []
        self.page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=theme)
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._request(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelectorAll('.main-svg').length > 0")

    def _request(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"request: {url}")

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_renders_without_errors_in_both_themes(browser: Any, report: Path, theme: str, tmp_path: Path) -> None:
    page = Page(browser, report, theme)
    drawn = page.value("[...document.querySelectorAll('.js-plotly-plot')].map((chart) => chart.id)")
    waiting = ["waiting-lines", "waiting-map", "overlap-chart", "exposed-chart"]
    assert drawn == ["matrix", "traffic-map", "sizes", *waiting, "steps-chart"]
    assert page.value("document.querySelector('h1').textContent").split() == [
        "2",
        "of",
        "2",
        "ranks",
        "on",
        "1",
        "node",
    ]
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(246, 247, 249)" if theme == "light" else "rgb(20, 23, 28)")
    # Nothing is wider than the window.
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []
    page.page.screenshot(path=str(tmp_path / f"{theme}.png"), full_page=True)


def test_the_controls_work(browser: Any, report: Path) -> None:
    page = Page(browser, report)
    matrix = "JSON.stringify(document.getElementById('matrix').data[0].z)"
    of_bytes = page.value(matrix)
    page.page.click("[data-views=matrix] button:text-is('Calls')")
    assert page.value(matrix) == page.value("JSON.stringify(charts.matrix.views.Calls.z)") != of_bytes
    assert page.value("document.querySelector('[data-views=matrix] [aria-pressed=true]').textContent") == "Calls"
    page.page.click("[data-views=traffic-map] button:text-is('Logarithmic')")
    assert page.value("document.getElementById('traffic-map').data[0].z[0][1]") == pytest.approx(
        page.value("Math.log10(charts['traffic-map'].views.Linear.z[0][1])")
    )
    shown = "[...document.querySelectorAll('#size-table tbody tr')].filter((row) => !row.hidden)"
    rows = f"{shown}.map((row) => row.cells[0].textContent)"
    everything = page.value(rows)
    chosen = everything[-1]
    page.page.select_option("[data-choices=size-table] select", chosen)
    assert page.value(rows) == [op for op in everything if op == chosen] != everything
    assert page.value("document.getElementById('sizes').data.map((trace) => trace.name)") in ([], [chosen])
    page.page.select_option("#theme", "dark")
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert page.complaints == []


def test_names_from_a_recording_cannot_become_code(browser: Any, tmp_path: Path) -> None:
    from crossrank.tools.analysis.figures import figures
    from crossrank.tools.job.collectives import match_collectives
    from crossrank.tools.job.job import Job
    from crossrank.tools.output.report import report_page
    from tests.unit.job.ranks import Rank

    ranks = [Rank(rank).call(100, 200, source=f"{EVIL}.py:1", op=f"all_{EVIL}").call(300, 400) for rank in range(2)]
    times = [rank.times for rank in ranks]
    for one in times:
        one.node, one.notes, one.about = EVIL, [EVIL], {EVIL: EVIL}
    job = Job.match(times)
    job.skipped = [EVIL]
    shown = figures(match_collectives(job), inputs=[EVIL], diagnosis_problem=EVIL)
    path = tmp_path / "evil.html"
    path.write_text(report_page(shown))
    page = Page(browser, path)
    assert page.value("document.title").startswith("crossrank: 2 ranks")
    assert page.value("document.querySelectorAll('[onmouseover]').length") == 0
    assert page.complaints == []


@needs_traces
@pytest.mark.parametrize(
    ("trace", "sections", "absent"),
    [
        (
            "kineto_deepep",
            ["communicates", "bandwidth", "overlap", "steps", "basis"],
            "sizes of calls whose ranks are known",
        ),
        ("dlrm_8gpu", ["communicates", "bandwidth", "waiting", "overlap", "steps", "basis"], "waits of the hosts"),
        ("linear_1gpu", ["communicates", "overlap", "basis"], "times of communication"),
        ("flight/clean", ["communicates", "traffic", "bandwidth", "diagnosis", "basis"], "a profiled window"),
    ],
)
def test_a_page_of_other_tools_files_has_no_empty_section(
    browser: Any, tmp_path: Path, trace: str, sections: list[str], absent: str
) -> None:
    path = tmp_path / "report.html"
    main(["report", public(trace), "-o", str(path)])
    page = Page(browser, path)
    assert page.value("[...document.querySelectorAll('section[id]')].map(one => one.id)") == sections
    page.page.wait_for_function(
        "[...document.querySelectorAll('.chart')].every(one => one.querySelector('.main-svg') || one.offsetTop > 1200)"
    )
    basis = page.value("document.getElementById('basis').innerText")
    assert absent in basis.partition("Missing data: ")[2]
    assert "TRACING_TIMING" not in page.value("document.body.innerText")
    assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.complaints == []


@needs_traces
def test_modelled_ring_traffic_is_not_shown_as_measured(browser: Any, tmp_path: Path) -> None:
    main(["report", public("flight/clean"), "-o", str(tmp_path / "report.html")])
    page = Page(browser, tmp_path / "report.html")
    traffic = page.value("document.getElementById('traffic').innerText")
    assert traffic.startswith("Traffic between ranks, modelled as rings")
    assert "100.0 % of these bytes are modelled" in traffic
