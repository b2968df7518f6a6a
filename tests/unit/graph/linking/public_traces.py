"""Real traces from elsewhere, where the machine has them: CROSSRANK_TRACES names their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FOLDER = Path(os.environ.get("CROSSRANK_TRACES") or Path(__file__).parents[5] / "shared" / "traces")

needs_traces = pytest.mark.skipif(
    not (_FOLDER / "dlrm_8gpu").is_dir(), reason="no real traces here; CROSSRANK_TRACES names their folder"
)


def public(name: str) -> str:
    return str(_FOLDER / name)
