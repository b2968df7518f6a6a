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
from crossrank.recording import OVER, PROVEN, VERDICT

NO_VERDICT = "none"
"""`verdict` in the file if the job could not be diagnosed."""
_PATIENCE = 300.0
"""Seconds that a diagnosis may take."""
_FEW_RANKS = 64
_LAST = 512
"""Calls before the unfinished ones that are read from each dump if there are many ranks."""
# The new process finds the tools where this process does, and does not block the signals that this thread does.
_PROGRAM = """import signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, ())
sys.path[:] = {path!r}
from crossrank.tools.cli import main
sys.exit(main())
"""


class Verdict(msgspec.Struct):
    """The fields of `verdict.json`, the output of `crossrank diagnose -o`, that the recorder reads."""

    verdict: str = ""
    proof: str = ""
    """`deadlock`, `mismatch`, `gone`, `late` or `not_known`; empty if no rank waits for another."""
    summary: str = ""
    """Who waits for whom, in a sentence."""
    findings: list[dict[str, Any]] = []
    skipped: list[str] = []
    """Files that could not be used."""
    ends: list[int] = []
    """Not empty if the job ends: the ranks of the hang."""

    @property
    def is_hang(self) -> bool:
        """Whether it is proven that no rank can release those that wait. A file that could not be read may show it."""
        return self.verdict != OVER and self.proof in PROVEN and not self.skipped

    def involved(self) -> list[int]:
        """Return the ranks of the hang. If one of them moves, the verdict no longer holds."""
        names = ("culprit_ranks", "waiting_ranks")
        return sorted({rank for one in self.findings for name in names for rank in one.get(name, ())})

    def reason(self) -> str:
        """Return why the job ends."""
        return "the job hangs" if self.is_hang else self.summary

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
        _write(path, msgspec.json.encode(Verdict(verdict=NO_VERDICT)))


def replace(path: Path, verdict: str) -> bool:
    """Replace the verdict in the file and keep the old one in `was`. Return whether there was one."""
    try:
        document = msgspec.json.decode(read_small(path), type=dict[str, Any])
        was = document.get("was", document.get("verdict"))
        _write(path, msgspec.json.encode(document | {"verdict": verdict, "was": was}))
    except (OSError, BudgetError, msgspec.MsgspecError):
        return False
    return True


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
            if done.returncode in (0, 1) and output.exists():
                return done.stdout.rstrip(), read_small(output)
    except (OSError, subprocess.SubprocessError) as error:
        raise CrossrankError(f"crossrank could not diagnose it here ({one_line(error)})") from error
    said = done.stderr.strip().splitlines()
    raise CrossrankError(
        f"crossrank could not diagnose it here ({said[-1] if said else f'exit code {done.returncode}'})"
    )


def publish(path: Path, content: bytes, *, ends: list[int] | None = None) -> None:
    """Write the result of `diagnose` for the other ranks, with the decision that the job ends if there is one.

    Raises `CrossrankError` if it cannot be written.
    """
    try:
        if ends is not None:
            content = msgspec.json.encode(msgspec.json.decode(content, type=dict[str, Any]) | {"ends": ends})
        _write(path, content)
    except OSError as error:
        raise CrossrankError(f"cannot write {path} ({one_line(error)})") from error
