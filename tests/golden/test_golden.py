"""The commands answer on the public traces as they did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.answers import TRACES, answers, as_text, golden_file
from tests.unit.graph.linking.public_traces import needs_traces, public


@needs_traces
@pytest.mark.parametrize("trace", TRACES)
def test_every_command_answers_as_it_did(trace: str, tmp_path: Path) -> None:
    assert as_text(answers(Path(public(trace)), tmp_path)) == golden_file(trace).read_text()
