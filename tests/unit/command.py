"""A command as a user runs it, for tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from crossrank.tools.cli import main


class Command:
    """Runs `crossrank` with more words between those given, and returns its exit code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *first: str, last: tuple[str, ...] = ()) -> None:
        self._capsys, self._first, self._last = capsys, first, last

    def __call__(self, *words: object) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = main([*self._first, *map(str, words), *self._last])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def json(self, *words: object) -> tuple[int, Any, str]:
        """With `--json`, and stdout read."""
        code, out, err = self(*words, "--json")
        return code, json.loads(out), err
