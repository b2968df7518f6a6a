"""The report of a replay is read from its folder or its file, and what is none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrank.errors import CrossrankError
from crossrank.tools.traces.replayed import Coverage, read_report


def test_a_coverage_is_complete_if_nothing_is_skipped_or_lost() -> None:
    none = {"calls": 0, "recorded_calls": 0, "bytes": 0, "recorded_bytes": 0}
    half = {"calls": 1, "recorded_calls": 2, "bytes": 1, "recorded_bytes": 4}
    whole, damaged = Coverage(reasons={}, damaged=False, **none), Coverage(reasons={}, damaged=True, **none)
    part = Coverage(reasons={"no group": 1}, damaged=False, **half)
    assert [one.complete for one in (whole, damaged, part)] == [True, False, False]
    assert [(one.share_of_calls, one.share_of_bytes) for one in (whole, part)] == [(1.0, 1.0), (0.5, 0.25)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Input data was truncated"),
        (b'{"source": 3}', "Expected `str`"),
        (b"\x1f\x8b\x08", "the last gzip stream is cut off"),
        (None, "cannot be opened: No such file"),
    ],
)
def test_a_missing_or_invalid_report_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "replay.json"
    if content is not None:
        path.write_bytes(content)
    for name in (path, tmp_path):
        with pytest.raises(CrossrankError, match=f"replay.json: is not a result of crossrank replay .*{reason}"):
            read_report(str(name))
