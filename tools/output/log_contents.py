"""What `crossrank inspect` shows of logs: who printed how much, and what lines say that crossrank knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

from crossrank.text import plural, rank_ranges
from crossrank.tools.output.console import print_fact, print_json, table_of
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.ranks import RankLog, ranks_of
from crossrank.tools.traces.logs.read import Attempt, Fact, JobLog, read_logs
from crossrank.tools.traces.logs.tracebacks import Quote, Traceback

_LONGEST_TEXT = 100


def show_logs(logs: Mapping[str, str], *, as_json: bool, top: int) -> int:
    """Print what the logs of a job contain, as text or JSON. `logs`: path -> what to call the file. Returns the exit
    code: 1 if a log ends within a line."""
    job = read_logs(logs, logs)
    if as_json:
        attempts = [{"ranks": _ranks(one), "lines": _kinds(one), "unplaced": one.unplaced} for one in job.attempts]
        print_json({"files": list(logs.values()), "attempts": attempts, "problems": job.problems})
    else:
        for name, text in _head(job, len(logs)):
            print_fact(name, text)
        for number, attempt in enumerate(job.attempts):
            of = f" of attempt {number}" if len(job.attempts) > 1 else ""
            table_of(_ranks(attempt), _RANKS, limit=4 * top, more="--top").print(f"Ranks{of}")
            table_of(_kinds(attempt), _KINDS).print(f"Lines{of} that say something")
    return 1 if job.is_cut else 0


def _head(job: JobLog, files: int) -> Iterator[tuple[str, str]]:
    yield "logs", plural(files, "file")
    ranks = sorted(job.last.lines_of)
    yield (
        "ranks",
        f"{len(ranks)} with lines of their own: {rank_ranges(ranks)}" if ranks else "none has a line of its own",
    )
    if len(job.attempts) > 1:
        yield "attempts", f"{len(job.attempts)}; `crossrank diagnose` judges the last one"
    if job.last.unplaced:
        yield "no rank", f"{plural(job.last.unplaced, 'line')} could not be given to a rank"
    for problem in job.problems:
        yield "problem", problem


def _ranks(attempt: Attempt) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "host": one.host, "lines": attempt.lines_of[rank], "end": _end(one)}
        for rank, one in sorted(ranks_of(attempt).items())
    ]


def _end(rank: RankLog) -> str:
    if rank.killed is not None:
        return rank.killed[0]
    return "" if rank.raised is None else rank.raised.error.partition("\n")[0]


def _kinds(attempt: Attempt) -> list[dict[str, Any]]:
    """Return for each kind of line: how many there are, which ranks printed them, and the first of them."""
    found: dict[str, dict[str, Any]] = {}
    said: list[tuple[str, Fact | Traceback]] = [(one.kind, one) for one in attempt.facts]
    said += [(formats.TRACEBACK, one) for one in attempt.tracebacks]
    for kind, one in said:
        row = found.setdefault(kind, {"kind": kind, "lines": 0, "ranks": set()} | _place(one.quote))
        row["lines"] += 1
        row["ranks"] |= {one.origin.rank} - {None}
    return [row | {"ranks": sorted(row["ranks"])} for row in found.values()]


def _place(quote: Quote) -> dict[str, Any]:
    return {"file": quote.path, "line": quote.number, "text": quote.text}


_RANKS = (
    ("rank", itemgetter("rank")),
    ("host", itemgetter("host")),
    ("#lines", itemgetter("lines")),
    ("end", lambda row: row["end"][:_LONGEST_TEXT]),
)
_KINDS = (
    ("kind", itemgetter("kind")),
    ("#lines", itemgetter("lines")),
    ("ranks", lambda row: rank_ranges(row["ranks"])),
    ("first in", lambda row: f"{PurePosixPath(row['file']).name}:{row['line']}"),
    ("text", lambda row: row["text"][:_LONGEST_TEXT]),
)
