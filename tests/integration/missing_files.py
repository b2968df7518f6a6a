"""How often a fault is diagnosed exactly where the files of a rank that did nothing wrong are missing.

`python -m tests.integration.missing_files [NAME …]` runs the faults of `live_faults`, takes the files of each innocent
rank away in turn, and prints what `crossrank diagnose` says then.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from crossrank.recording import DIAGNOSING
from crossrank.tools.cli import main as crossrank
from tests.integration.fork_server import start_server
from tests.integration.forked_jobs import Job
from tests.integration.live_fault import Fault
from tests.integration.live_faults import FAULTS
from tests.integration.test_live_faults import accused, moments_to_look, roots_of, start

_OUT_OF_PLACE = {"dump_missing", "no_entries"}
"""Findings that say no more of a rank than that its files are missing."""


def answer_without(job: Job, fault: Fault, missing: int, part: Path) -> tuple[str, str]:
    """What is said where a rank's files are missing: `exact`, `useful`, `silent` or `wrong`, and its findings."""
    ignored = shutil.ignore_patterns("*.part", f"{DIAGNOSING}*", f"rank-{missing}.*", "verdict.json")
    shutil.copytree(job.recording, part, ignore=ignored)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = crossrank(["diagnose", str(part), "--json"])
    try:
        diagnosis = json.loads(out.getvalue())
    except ValueError:
        return "silent", out.getvalue()
    roots = roots_of(diagnosis)
    without_dump = {rank for rank in range(fault.ranks) if not job.dump(rank).exists()} | {missing}
    said = f"{code} {diagnosis['verdict']} {roots}"
    if accused(roots, without_dump) & fault.innocent:
        return "wrong", said
    named = {rank for kind, *ranks in roots if kind in fault.kinds for rank in ranks}
    if (
        set(fault.culprits) <= named
        and code == 1
        and all(kind in fault.kinds or (kind in _OUT_OF_PLACE and set(ranks) <= {missing}) for kind, *ranks in roots)
    ):
        return "exact", said
    return ("silent" if code == 0 else "useful"), said


def answers(fault: Fault, folder: Path) -> Iterator[tuple[str, int, str, str]]:
    """Moment, rank without files, answer and findings of one fault."""
    for delay in fault.delays:
        job = start(fault, folder / f"{delay}", delay)
        try:
            for moment in moments_to_look(job, fault):
                for rank in sorted(fault.innocent):
                    part = folder / f"{delay} {moment} without {rank}"
                    yield f"{moment}, {delay} s", rank, *answer_without(job, fault, rank, part)
        finally:
            job.kill()


def main(names: list[str]) -> int:
    counts: Counter[str] = Counter()
    start_server()
    with tempfile.TemporaryDirectory(prefix="missing-files-") as folder:
        for fault in FAULTS:
            if names and fault.name not in names:
                continue
            for moment, rank, answer, said in answers(fault, Path(folder, fault.name)):
                counts[answer] += 1
                if answer != "exact":
                    print(f"{answer:7} {fault.name} of {fault.culprits}, {moment}, without {rank}: {said}", flush=True)
    total = counts.total()
    print(", ".join(f"{count} {answer} ({count / total:.0%})" for answer, count in counts.most_common()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
