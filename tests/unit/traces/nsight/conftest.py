from __future__ import annotations

import pytest

from tests.unit.traces.nsight.exports import ExportFile, Process


@pytest.fixture
def process() -> Process:
    """The only process of an export."""
    return ExportFile().process(70)
