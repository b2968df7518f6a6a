"""However a command ends, it ends in an exit code and one line."""

from __future__ import annotations

import argparse

import pytest

from crossrank.tools.cli import main
from crossrank.tools.commands.inspect import InspectCommand


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("a\nb\x1b[2J"), r"stopped by an unexpected error (KeyError: 'a\nb\x1b[2J' at test_cli"),
        (MemoryError(), "there is not enough memory for it; try --jobs 1, or a larger machine"),
        (RecursionError("maximum recursion depth exceeded"), "its content is nested too deeply to be read; name a"),
    ],
)
def test_an_error_that_nobody_foresaw_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    def run(self: InspectCommand, arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(InspectCommand, "run", run)

    assert main(["inspect", "recording"]) == 2

    error_text = capsys.readouterr().err
    assert error_text.startswith(f"crossrank: {line}")
    assert error_text.count("\n") == 1
