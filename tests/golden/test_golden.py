"""The commands answer on the public traces, and on small files of their kinds, as they did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.answers import SMALL, TRACES, answers, answers_on_a_copy, as_text, golden_file
from tests.unit.graph.linking.public_traces import needs_traces, public

pytestmark = pytest.mark.touches("crossrank", "tools", "replay", traced=False)


@needs_traces
@pytest.mark.parametrize("trace", TRACES)
def test_every_command_gives_its_golden_output(trace: str, tmp_path: Path) -> None:
    assert as_text(answers(Path(public(trace)), tmp_path)) == golden_file(trace).read_text()


@pytest.mark.parametrize("name", SMALL)
def test_every_command_gives_its_golden_output_on_small_files(name: str, tmp_path: Path) -> None:
    assert as_text(answers_on_a_copy(name, tmp_path)) == golden_file(f"small-{name}").read_text()
