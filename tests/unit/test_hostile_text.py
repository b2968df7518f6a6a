"""Texts of files on their way out: to a terminal, a spreadsheet, a page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossrank.replay.results.replay_report import make_report, to_csv
from crossrank.text import csv_text, from_csv_text
from crossrank.tools.cli import main
from crossrank.tools.output.console import Printable
from crossrank.tools.traces.replayed import Settings
from tests.unit.replay.test_measure import job

MARKUP = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\u2028"
FORMULA = '=cmd|"/C calc"!A0'
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two ranks whose every text is hostile."""
    folder = tmp_path / ESCAPES.replace("\x1b]0;", "") / "recording"
    folder.mkdir(parents=True)
    text = MARKUP + ESCAPES
    for rank in range(2):
        header = {"schema": "crossrank-comms 1", "rank": rank, "world_size": 2, "host": text, "node": text + str(rank)}
        header |= {"clock": {"t": 0, "wall": 1}, "versions": {"torch": text, text: ESCAPES}, "blind_spots": [text]}
        lines: list[dict[str, Any]] = [{"header": header}]
        for name in (text, FORMULA):
            lines.append({"group": {"pg": name, "size": 2, "ranks": [0, 1], "desc": name, "backend": name}})
        for number in range(4):
            call = {"id": number, "seq": number + 1, "t": number * 1000, "op": "all_reduce", "api": text, "c10d": text}
            call |= {"pg": text, "in": [[4]], "out": [[4]], "dtype": "float32", "bytes": 16, "source": text + ":1"}
            lines.append(call)
        lines.append({"id": 9, "seq": 5, "t": 9000, "op": text, "c10d": text, "pg": FORMULA, "bytes": 4, "dtype": text})
        lines.append({"end": {"reason": text, "calls": 5, "records": 5}})
        (folder / f"rank-{rank}.comms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    "command",
    ["inspect", "inspect --json", "diagnose", "replay --dry-run", "bandwidth", "link", "timeline -o OUT.pftrace"],
)
def test_terminal_control_text_is_not_printed(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    main([*command.replace("OUT", str(tmp_path / "out")).split(), str(recording), "--jobs", "1"])
    printed = capsys.readouterr()
    assert printed.out + printed.err
    assert STEERING.search(printed.out + printed.err) is None


def test_escaped_json_is_the_same_json() -> None:
    stream = io.StringIO()
    Printable(stream).write(json.dumps({"name": ESCAPES + "\U000e0001é"}, ensure_ascii=False))
    assert json.loads(stream.getvalue()) == {"name": ESCAPES + "\U000e0001é"}
    assert STEERING.search(stream.getvalue()) is None


@pytest.mark.parametrize("page", ["report -o", "diagnose --html"])
def test_a_page_has_no_markup_of_a_file(recording: Path, tmp_path: Path, page: str) -> None:
    main([*page.split(), str(tmp_path / "page.html"), str(recording), "--jobs", "1"])
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in text
    assert "<img src=x" not in text


def test_a_formula_is_written_as_text_in_the_table_of_calls() -> None:
    plan, results = job()
    for rank in plan.ranks:
        for call in rank.calls:
            call.record = msgspec.structs.replace(call.record, source=FORMULA)
    _, measured = make_report(plan, Settings(backend="gloo", device="cpu"), results, what_if={}, variables={})
    table = to_csv(plan, measured)
    assert "'=cmd|" in table
    assert ",=" not in table
    assert ',"=' not in table


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@a", "\t=1", "\r", "'=1", "'", "sum", ""])
def test_csv_text_is_read_back_unchanged(text: str) -> None:
    written = csv_text(text)
    assert isinstance(written, str)
    assert not written.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert from_csv_text(written) == text
