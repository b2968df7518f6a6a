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
        (MemoryError(), "not enough memory; try --jobs 1, or a larger machine"),
        (RecursionError("maximum recursion depth exceeded"), "its content is nested too deeply; give a real file"),
    ],
)
def test_an_unexpected_error_prints_one_line_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    def run(self: InspectCommand, arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(InspectCommand, "run", run)
    assert main(["inspect", "recording"]) == 2
    error_text = capsys.readouterr().err
    assert error_text.startswith(f"crossrank: {line}")
    assert error_text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["bandwith", "x"], "crossrank: bandwith is not a command; did you mean bandwidth? (`crossrank --help`"),
        (["zzz"], "crossrank: zzz is not a command (`crossrank --help`"),
        (["bandwidth", "x", "--jason"], "crossrank bandwidth: --jason is not an option; did you mean --json? ("),
        (
            ["bandwidth", "x", "--sources=kineto"],
            "crossrank bandwidth: --sources=kineto is not an option; did you mean",
        ),
        (["bandwidth", "x", "--zork"], "crossrank bandwidth: --zork is not an option (`crossrank bandwidth --help`"),
        (
            ["bandwidth"],
            "crossrank bandwidth: the following arguments are required: path (`crossrank bandwidth --help`",
        ),
        (["inspect", "one", "two"], "crossrank inspect: one argument too many: two (`crossrank inspect --help`"),
    ],
)
def test_a_mistyped_command_line_suggests_the_nearest_word_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    error_text = capsys.readouterr().err
    assert ended.value.code == 2
    assert error_text.startswith(line)
    assert error_text.count("\n") == 1


def test_crossrank_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])

    assert ended.value.code == 0
    assert "diagnose      find missing, mismatched or stuck ranks" in capsys.readouterr().out
