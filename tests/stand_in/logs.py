"""The log of the stand-in: what really ran on its devices, which tests hold against what crossrank says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def rows(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """What ran of these kinds, in the order in which it began, with its `pid`; times are ns of time.monotonic_ns()."""
    found = [row for row in _all(folder) if row["kind"] in kinds]
    return sorted(found, key=lambda row: row.get("begin", 0))


def _all(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            yield json.loads(line) | {"pid": int(path.stem)}


def log_to(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Have the processes that a test starts log to a folder."""
    folder.mkdir(exist_ok=True)
    patch.setenv("STAND_IN_LOG", str(folder))
    return folder
