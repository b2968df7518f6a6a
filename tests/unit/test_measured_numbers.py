"""Numbers in the documentation are those of the tests and benchmarks that produce them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.healthy_jobs import JOBS
from tests.integration.live_faults import EVERY_FAULT

ROOT = Path(__file__).parents[2]
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
NUMBERS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
BLOCKS = [
    one
    for one in re.findall(r"^(`[^\n]+)\n\n```\n(.+?)\n```$", PERFORMANCE, re.MULTILINE | re.DOTALL)
    if "benchmarks" in one[0]
]
"""(the paragraph that names a benchmark, what it printed)"""


def test_the_documentation_counts_live_faults_and_healthy_jobs_correctly() -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "tested.md").read_text().splitlines() if "|" in line]
    (faults,) = (row for row in rows if row[1].startswith(" live faults"))
    (healthy,) = (row for row in rows if row[1].startswith(" healthy jobs"))
    on_gloo, on_stand_in = (re.match(r"\d+", cell.strip()) for cell in faults[2:4])
    assert on_gloo is not None
    assert on_stand_in is not None
    without_gpu = sum(fault.with_gloo for fault in EVERY_FAULT)
    assert (int(on_gloo[0]), int(on_stand_in[0])) == (without_gpu, sum(fault.with_nccl for fault in EVERY_FAULT))
    assert healthy[2].strip() == str(len(JOBS))
    page = (ROOT / "docs" / "commands" / "diagnose.md").read_text()
    assert f"tried on {on_gloo[0]} live faults of gloo jobs" in page
    assert f"on {on_stand_in[0]} with PyTorch's own NCCL backend" in page


def test_every_benchmark_has_its_table() -> None:
    assert len(BLOCKS) >= 9


@pytest.mark.parametrize(("paragraph", "table"), BLOCKS, ids=[one[0][:60] for one in BLOCKS])
def test_each_benchmark_prints_the_words_of_its_table(paragraph: str, table: str) -> None:
    named = [f"benchmarks/{name}.py" for name in re.findall(r"benchmarks[/.](\w+)", paragraph.replace(".py", ""))]
    source = "".join(path.read_text() for path in map(ROOT.joinpath, named))
    source += "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*_jobs.py"))
    titles = [line.strip() for line in table.splitlines() if line and not re.search(r"\d", line)]
    words = {word for title in titles for word in re.findall(r"[a-zA-Z]{3,}", title)}
    assert words
    missing = {word for word in words if word not in source}
    assert not missing, f"{named} prints no {sorted(missing)}"


def test_the_text_and_table_agree_on_the_number_of_accurate_replays() -> None:
    paragraph, table = next(one for one in BLOCKS if "whole_steps" in one[0])
    ratios = [float(ratio) for ratio in re.findall(r"^  \w+ +[\d.]+ +[\d.]+ +([\d.]+) \(", table, re.MULTILINE)]
    near = sum(0.95 <= ratio <= 1.05 for ratio in ratios)
    assert len(ratios) == 10
    assert f"{NUMBERS[near].capitalize()} of the ten are within 5 % of their job" in paragraph
