"""Commands of crossrank, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.cli import main


class Commands:
    """Runs commands and holds each to the exit code that it has to end with; `folder` is that of the test."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder

    def ended(self, *words: object) -> tuple[int, str, str]:
        """Run a command: its exit code, what it printed, and what it said on stderr."""
        self._capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *self._capsys.readouterr()

    def __call__(self, *words: object, code: int = 0) -> str:
        """What a command printed."""
        ended, printed, said = self.ended(*words)
        assert ended == code, printed + said
        return printed

    def json(self, *words: object, code: int = 0) -> Any:
        """What a command says with `--json`."""
        return json.loads(self(*words, "--json", code=code))

    def said(self, *words: object, code: int = 2) -> str:
        """What a command says on stderr, of an input that it cannot use."""
        ended, printed, said = self.ended(*words)
        assert ended == code, printed + said
        return said
