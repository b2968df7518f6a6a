"""What `crossrank inspect` shows of files without a recording: their kinds, what they contain, and which commands can
use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from crossrank.errors import CrossrankError
from crossrank.recording import EXECUTION_TRACE
from crossrank.text import amount, plural, rank_ranges
from crossrank.tools.job.launches import TIMED_BY
from crossrank.tools.output.console import print_fact, print_json, print_notes, table_of
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.discover import COMMANDS, WHAT, FoundFile
from crossrank.tools.traces.execution_trace import read_execution_trace

if TYPE_CHECKING:
    from crossrank.tools.job.collectives import JobTables


def show_contents(path: str, files: Sequence[FoundFile], fleet: Fleet, *, as_json: bool, top: int) -> int:
    """Print what the files contain, as text or JSON. Returns the exit code: 1 if a file or a rank is missing. Raises
    CrossrankError if no command can use any of the files."""
    kinds = list(_kinds(files))
    if not any(one["commands"] for one in kinds):
        names = ", ".join(PurePosixPath(file.path).name for file in files[:3])
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise CrossrankError(
            f"{path}: no file has a known type ({names}{more}); give a recording (the folder TRACING_DIR), traces, "
            "dumps, exports or logs"
        )
    problems = [f"{file.path}: {file.problem}" for file in files if file.problem and not file.left_out]
    job, why = _job(path, fleet)
    if job is None:
        why = "; ".join(_of_execution_traces(files, problems)) or why
    if as_json:
        print_json({"path": path, "files": kinds, "job": job, "contents": why, "problems": problems})
    else:
        table_of(kinds, _FILES).print("Files")
        if job is not None:
            _print(job, top)
        else:
            print_fact("contents", why)
        print_notes(problems)
    return int(bool(problems or (job is not None and job["missing_ranks"])))


def _kinds(files: Sequence[FoundFile]) -> Iterator[dict[str, Any]]:
    of_kind = defaultdict(list)
    for file in files:
        of_kind[file.kind].append(file)
    for kind, those in sorted(of_kind.items()):
        yield {
            "kind": kind or "unknown",
            "what": WHAT[kind],
            "files": len(those),
            "ranks": sorted({file.rank for file in those if kind and file.rank is not None}),
            "bytes": sum(file.size for file in those),
            "commands": list(COMMANDS.get(kind, ())),
        }


def _job(path: str, fleet: Fleet) -> tuple[dict[str, Any] | None, str]:
    """Return (what the calls of a job are, empty), or (None, why there are none)."""
    from crossrank.tools.job.sources import open_job

    try:
        found = open_job([path], fleet)
    except CrossrankError as error:
        return None, str(error).removeprefix(f"{path}: ")
    return _contents(found), ""


def _contents(found: JobTables) -> dict[str, Any]:
    import polars as pl

    from crossrank.tools.analysis.bandwidth import known_sum

    ranks = found.job.ranks
    rows = [
        (one.label, found.job.groups[one.group].pg[0], found.job.groups[one.group].known_size, one.calls)
        + (one.recorded if one.sized else None,)
        for one in found.kinds
    ]
    schema = {"op": pl.String, "group": pl.String, "size": pl.Int64, "calls": pl.Int64, "bytes": pl.Int64}
    kinds = pl.DataFrame(rows, schema=schema, orient="row")[found.calls["kind"]]
    kinds = kinds.with_columns(is_timed=found.calls["ended_ns"].is_not_null())
    of_op = kinds.group_by("op", "group", "size", maintain_order=True).agg(
        pl.sum("calls"),
        timed_calls=pl.col("calls").filter("is_timed").sum(),
        bytes=known_sum("bytes"),
        unsized=pl.col("calls").filter(pl.col("bytes").is_null()).sum(),
    )
    return {
        "world_size": len(found.job.world),
        "ranks": sorted(ranks),
        "missing_ranks": found.job.missing,
        "measured_by": sorted({*found.timed_by.values()}),
        "steps": max(one.ended_steps for one in ranks.values()) or None,
        "operations": of_op.sort("calls", "op", descending=[True, False]).to_dicts(),
        "notes": found.job.notes,
        "skipped": found.job.skipped,
    }


def _of_execution_traces(files: Sequence[FoundFile], problems: list[str]) -> Iterator[str]:
    """Yield how many operations and communications each execution trace has; add what is wrong to `problems`."""
    for file in files:
        if file.kind == EXECUTION_TRACE and not file.problem:
            try:
                nodes = read_execution_trace(file.path).nodes
            except CrossrankError as error:
                problems.append(str(error))
                continue
            calls = sum(node.name == "record_param_comms" for node in nodes)
            yield f"{file.path}: {plural(len(nodes), 'operation')} of the host, {plural(calls, 'communication')}"


def _print(job: dict[str, Any], top: int) -> None:
    print()
    lacking = f", missing: {rank_ranges(job['missing_ranks'])}" if job["missing_ranks"] else ""
    print_fact("ranks", f"{len(job['ranks'])} of {job['world_size']} ({rank_ranges(job['ranks'])}){lacking}")
    print_fact("times", "; ".join(TIMED_BY[one] for one in job["measured_by"]) or "no call has a measured time")
    steps = "unknown" if job["steps"] is None else f"{plural(job['steps'], 'complete step')} on the rank with most"
    print_fact("steps", steps)
    if job["operations"]:
        table_of(job["operations"], _OPERATIONS, limit=top, more="--top").print("Operations")
    else:
        print_fact("calls", "none")
    print_notes([*job["skipped"], *job["notes"]])


_FILES = (
    ("kind", itemgetter("what")),
    ("#files", itemgetter("files")),
    ("ranks", lambda row: rank_ranges(row["ranks"])),
    ("#size", lambda row: amount(row["bytes"])),
    ("commands", lambda row: ", ".join(row["commands"]) or "none"),
)
_OPERATIONS = (
    ("operation", itemgetter("op")),
    ("group", itemgetter("group")),
    ("#ranks", lambda row: "unknown" if row["size"] is None else f"{row['size']:,}"),
    ("#calls", itemgetter("calls")),
    ("#with a time", itemgetter("timed_calls")),
    (
        "#bytes, sum of\nthese ranks",
        lambda row: "unknown" if row["bytes"] is None else amount(row["bytes"], row["unsized"]),
    ),
)
