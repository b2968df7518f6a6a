"""The diagnosis of the job that this process belongs to, made by `crossrank diagnose` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from crossrank.errors import CrossrankError, one_line
from crossrank.recording import OVER

_PATIENCE = 300.0
"""Seconds that a diagnosis may take."""
_FEW_RANKS = 64
_LAST = 512
"""Calls that are read of many ranks' dumps before what is not over: so many are looked back at."""
# The tools are found where this process finds them.
_PROGRAM = """import sys
sys.path[:] = {path!r}
from crossrank.tools.cli import main
sys.exit(main())
"""


class Verdict(msgspec.Struct):
    """Of `verdict.json`, which is what `crossrank diagnose -o` writes, what is looked at here."""

    verdict: str = ""
    findings: list[dict[str, Any]] = []

    @property
    def is_hang(self) -> bool:
        """Whether some rank waits for another."""
        return any(finding.get("waiting_ranks") for finding in self.findings)

    def says_as(self, other: Verdict) -> bool:
        """Whether another one finds the same, wherever its threads were meanwhile."""
        return self.verdict == other.verdict and _essence(self.findings) == _essence(other.findings)


def _essence(findings: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    names = ("kind", "pg", "op", "collective_seq_id", "p2p_seq_id", "culprit_ranks", "waiting_ranks")
    return [tuple(str(finding.get(name)) for name in names) for finding in findings]


def read(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Verdict)
    except (OSError, msgspec.MsgspecError):
        return None


def write_none(path: Path) -> None:
    """Leave word for the other ranks of this folder that there is no diagnosis: they need not try."""
    with contextlib.suppress(OSError):
        path.write_bytes(msgspec.json.encode(Verdict(verdict="none")))


def take_back(path: Path) -> bool:
    """Write into the file that its verdict is over; whether it was there."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        path.write_bytes(msgspec.json.encode(document | {"verdict": OVER, "was": document.get("verdict")}))
    except (OSError, msgspec.MsgspecError):
        return False
    return True


def diagnose(folder: Path, output: Path, world_size: int) -> str:
    """Diagnose what is in `folder`, write it to `output`, and return it as text.

    Raises `CrossrankError` where that cannot be done.
    """
    command = [sys.executable, "-c", _PROGRAM.format(path=sys.path), "diagnose", str(folder)]
    options = ["--last", str(_LAST)] if world_size > _FEW_RANKS else []
    # Nothing of it is for a rank: it must neither record nor join.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACING")}
    try:
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
    except (OSError, subprocess.SubprocessError) as error:
        raise CrossrankError(f"it could not be diagnosed here ({one_line(error)})") from error
    if done.returncode not in (0, 1):
        said = done.stderr.strip().splitlines()
        raise CrossrankError(f"it could not be diagnosed here ({said[-1] if said else f'exit code {done.returncode}'})")
    return done.stdout.rstrip()
