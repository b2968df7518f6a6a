"""Diagnoses the job of this process by running `crossrank diagnose` in another process."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from crossrank.atomic_file import whole_file
from crossrank.budget import BudgetError, read_small
from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.unpatched import subprocess
from crossrank.recording import OVER, SLOW, VERDICT
from crossrank.text import rank_ranges

_OF_SOMEBODY = ("missing_rank", "p2p_unmatched")
"""Kinds of findings that some rank has caused."""
_PATIENCE = 300.0
"""Seconds that a diagnosis may take."""
_FEW_RANKS = 64
_LAST = 512
"""Calls before the unfinished ones that are read from each dump if there are many ranks."""
# The new process finds the tools where this process does.
_PROGRAM = """import sys
sys.path[:] = {path!r}
from crossrank.tools.cli import main
sys.exit(main())
"""


class Verdict(msgspec.Struct):
    """The fields of `verdict.json`, the output of `crossrank diagnose -o`, that the recorder reads."""

    verdict: str = ""
    findings: list[dict[str, Any]] = []

    @property
    def is_hang(self) -> bool:
        """Whether some rank waits for another."""
        return self.verdict not in (OVER, SLOW) and any(finding.get("waiting_ranks") for finding in self.findings)

    def doubt(self) -> str:
        """Return why this may not be a hang, empty if it is one: the ranks that others wait for move, are unknown, or
        have no evidence."""
        waited_for = {rank for one in self.findings for rank in one.get("culprit_ranks", ())}
        moving = {rank for one in self.findings for rank in one.get("moving_ranks", ())}
        if self.verdict == "incomplete":
            return "ranks wait, and evidence of other ranks is missing"
        if all(not one.get("culprit_ranks") and one.get("kind") in _OF_SOMEBODY for one in self.findings):
            return "ranks wait, and it is unknown for which rank"
        if waited_for and waited_for <= moving and all(one.get("culprit_ranks") for one in self.findings):
            return f"rank {rank_ranges(sorted(waited_for))} is slow: its main thread is running while other ranks wait"
        return ""

    def says_as(self, other: Verdict) -> bool:
        """Return whether another verdict has the same findings, regardless of the positions of threads."""
        return self.verdict == other.verdict and _essence(self.findings) == _essence(other.findings)


def _essence(findings: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    names = ("kind", "pg", "op", "collective_seq_id", "p2p_seq_id", "culprit_ranks", "waiting_ranks")
    return [tuple(str(finding.get(name)) for name in names) for finding in findings]


def read(path: Path) -> Verdict | None:
    """Return the verdict in a file; None if it has none."""
    try:
        return parse(read_small(path))
    except (OSError, BudgetError, msgspec.MsgspecError):
        return None


def parse(content: bytes) -> Verdict:
    return msgspec.json.decode(content, type=Verdict)


def write_none(path: Path) -> None:
    """Tell the other ranks of this folder that there is no diagnosis, so that they do not try."""
    with contextlib.suppress(OSError):
        _write(path, msgspec.json.encode(Verdict(verdict="none")))


def replace(path: Path, verdict: str) -> bool:
    """Replace the verdict in the file and keep the old one in `was`. Return whether there was one."""
    try:
        _write_as(path, read_small(path), verdict)
    except (OSError, BudgetError, msgspec.MsgspecError):
        return False
    return True


def _write_as(path: Path, content: bytes, verdict: str) -> None:
    document = msgspec.json.decode(content, type=dict[str, Any])
    was = document.get("was", document.get("verdict"))
    _write(path, msgspec.json.encode(document | {"verdict": verdict, "was": was}))


def _write(path: Path, content: bytes) -> None:
    with whole_file(path) as part:
        part.write_bytes(content)


def diagnose(folder: Path, world_size: int) -> tuple[str, bytes]:
    """Diagnose the recording in `folder`. Return the text, and the JSON for `publish`.

    Raises `CrossrankError` if that fails.
    """
    command = [sys.executable, "-c", _PROGRAM.format(path=sys.path), "diagnose", str(folder)]
    options = ["--last", str(_LAST)] if world_size > _FEW_RANKS else []
    # Remove the variables of the recorder: the new process must not record or join the job.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACING")}
    try:
        with tempfile.TemporaryDirectory(prefix="crossrank-") as own:
            output = Path(own, VERDICT)
            done = subprocess.run(
                [*command, *options, "-o", str(output), "--world-size", str(world_size)],
                env=environment | {"COLUMNS": "120", "TRACING": "NONE"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE,
                check=False,
            )
            if done.returncode in (0, 1):
                return done.stdout.rstrip(), read_small(output)
    except (OSError, subprocess.SubprocessError) as error:
        raise CrossrankError(f"crossrank could not diagnose it here ({one_line(error)})") from error
    said = done.stderr.strip().splitlines()
    raise CrossrankError(
        f"crossrank could not diagnose it here ({said[-1] if said else f'exit code {done.returncode}'})"
    )


def publish(path: Path, content: bytes, verdict: str | None = None) -> None:
    """Write the result of `diagnose` for the other ranks, with another `verdict` if one is given.

    Raises `CrossrankError` if it cannot be written.
    """
    try:
        if verdict is None:
            _write(path, content)
        else:
            _write_as(path, content, verdict)
    except OSError as error:
        raise CrossrankError(f"cannot write {path} ({one_line(error)})") from error
