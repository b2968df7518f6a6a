"""`crossrank inspect`: the contents of a recording."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from crossrank.recording import COMMS
from crossrank.text import amount, percent, plural, rank_ranges
from crossrank.tools.analysis.summary import Summary, summarise
from crossrank.tools.commands.options import add_shared, complain, fleet_of
from crossrank.tools.commands.standard_input import STANDARD_INPUT, kept_input
from crossrank.tools.output.console import print_fact, print_json, table_of
from crossrank.tools.traces.discover import LOG, discover

_MOST_ENDINGS = 8
_MOST_LINES = 12
_LONGEST_ENDING = 200
_CHAKRA = (".et", ".et.gz", ".et.zst")


class InspectCommand:
    """Show the contents of a recording: ranks, groups, calls and bytes per operation, the share between nodes, the
    source lines that communicate most, and what is missing or damaged. Bytes are S of nccl-tests, summed over ranks.
    For a Chakra trace (FILE.et), shows its metadata and first nodes; --json shows all nodes. For logs of a launcher,
    shows which ranks printed lines, and the lines that say something of a hang or an end. For all other files, shows
    what they are, the calls of the job in them, and which commands can use them."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        meaning = (
            "a recording (the folder TRACING_DIR), one comms file, FILE.et, logs (a file, a folder, - for standard "
            "input), or files that any other command takes; also by URL"
        )
        parser.add_argument("recording", help=meaning)
        meaning = "list N source lines (default 10) and 4 x N groups"
        parser.add_argument("--top", type=_count, default=10, metavar="N", help=meaning)
        add_shared(parser, "json")

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.recording.endswith(_CHAKRA):
            from crossrank.tools.output import chakra

            (chakra.print_json if arguments.json else chakra.print_nodes)(arguments.recording)
            return 0
        if arguments.recording == STANDARD_INPUT:
            with kept_input([STANDARD_INPUT]) as (log,):
                return _show_logs({log.path: log.shown}, arguments)
        files = discover([arguments.recording])
        comms = [file for file in files if file.kind == COMMS]
        if not comms and (logs := {file.path: file.shown or file.path for file in files if file.kind == LOG}):
            return _show_logs(logs, arguments)
        fleet = fleet_of(arguments, sum(file.size for file in comms or files))
        if not comms and files:
            from crossrank.tools.output.job_contents import show_contents

            return show_contents(arguments.recording, files, fleet, as_json=arguments.json, top=arguments.top)
        summary = summarise(arguments.recording, files, fleet)
        if arguments.json:
            print_json(summary)
        else:
            _print(summary, arguments.top)
        complain(*summary.problems, most=_MOST_LINES)
        if summary.problems:
            return 2
        return 1 if _lacks(summary) else 0


def _show_logs(logs: Mapping[str, str], arguments: argparse.Namespace) -> int:
    from crossrank.tools.output.log_contents import show_logs

    return show_logs(logs, as_json=arguments.json, top=arguments.top)


def _print(summary: Summary, top: int) -> None:
    for name, text in (*_missing(summary), *_head(summary)):
        print_fact(name, text)
    if summary.by_op:
        table_of(summary.by_op, _OPERATIONS).print("Operations")
    if summary.groups:
        called = sorted((one for one in summary.groups if one["calls"]), key=lambda one: -one["bytes"])
        table_of(called, _GROUPS, limit=4 * top, more="--top").print("Process groups")
        if silent := len(summary.groups) - len(called):
            print(f"  {plural(silent, 'group')} without a call (--json shows them)")
    if summary.sources:
        table_of(summary.sources, _SOURCES, limit=top, more="--top").print("Source lines with most bytes")
    table_of(list(summary.files.items()), _FILES).print("Files")


def _head(summary: Summary) -> Iterator[tuple[str, str]]:
    total = summary.calls
    ranks = f"{len(summary.ranks)} of {summary.world_size}" if summary.world_size is not None else "0"
    nodes = ", ".join(f"{node[:8]}: {rank_ranges(on)}" for node, on in list(summary.nodes.items())[:4])
    more = ", …" if len(summary.nodes) > 4 else ""
    unknown = f", {_share(total.unknown_bytes, total.bytes)} unknown" if total.unknown_bytes else ""
    yield "recording", summary.path
    yield "ranks", f"{ranks} on {plural(len(summary.nodes), 'node')} ({nodes}{more})"
    versions = {name: version.partition(" (") for name, version in summary.versions.items() if version}
    yield "versions", ", ".join(f"{name} {number}" for name, (number, _, _) in versions.items())
    yield from (("", why.removesuffix(")")) for _, _, why in versions.values() if why)
    parts = ", ".join(f"{first}:{stop}" for first, stop in summary.parts)
    yield "steps", f"{summary.steps:,} ended, {summary.timed_steps:,} with a recorded start"
    if parts:
        yield "", f"steps {parts} of a longer recording"
    yield "calls", f"{total.calls}, {amount(total.bytes)} (size S of nccl-tests, summed over ranks)"
    if filtered := summary.counts.get("filtered"):
        yield "", f"{filtered} more inside nodes, not recorded (TRACING=CROSSNODE)"
    yield "cross-node", f"{_share(total.cross_node_bytes, total.bytes)} of the bytes{unknown}"


def _missing(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.missing_ranks:
        yield "missing", f"rank {rank_ranges(summary.missing_ranks)} has no comms file"
    if summary.unfinished_ranks:
        ended = "no last line: the process was killed or still runs; its last 0.5 s may be missing"
        yield "unfinished", f"rank {rank_ranges(summary.unfinished_ranks)}: {ended}"
    for ending, ranks in list(summary.endings.items())[:_MOST_ENDINGS]:
        yield "ended", f"rank {rank_ranges(ranks)}: {ending[:_LONGEST_ENDING]}"
    for name in summary.cut_off:
        yield "cut off", f"{name}: the process ended while it wrote the file"
    for warning in summary.warnings[:_MOST_LINES]:
        yield "warning", warning
    if len(summary.warnings) > _MOST_LINES:
        yield "warning", f"… and {len(summary.warnings) - _MOST_LINES} more (--json shows all)"
    if unrecognized := summary.unrecognized:
        yield "ignored", f"{len(unrecognized)} file(s) of unknown type: {', '.join(unrecognized[:5])}"
    if others := summary.other_jobs:
        what = "folder(s) of other jobs (earlier ones, or processes that ranks started), not counted"
        yield "others", f"{len(others)} {what}: {', '.join(others[:5])}{', …' if len(others) > 5 else ''}"
    if not (_lacks(summary) or summary.problems):
        yield "complete", "every rank is there" + ("" if summary.endings else ", and ended properly")


def _lacks(summary: Summary) -> bool:
    """Return whether a part of the recording is missing."""
    return bool(summary.missing_ranks or summary.unfinished_ranks or summary.cut_off or summary.mixed)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return number


def _share(part: int, whole: int) -> str:
    return percent(part / whole if whole else None)


_BYTES: tuple[str, Callable[[dict[str, Any]], object]] = ("#bytes", lambda row: amount(row["bytes"]))
_OPERATIONS = (
    ("operation", itemgetter("op")),
    ("API call", itemgetter("api")),
    ("#calls", itemgetter("calls")),
    _BYTES,
    ("#bytes/call", lambda row: amount(row["bytes"] / row["calls"])),
    ("#cross-node", lambda row: _share(row["cross_node_bytes"], row["bytes"])),
)
_GROUPS = (
    ("group", itemgetter("pg")),
    ("description", itemgetter("desc")),
    ("#size", itemgetter("size")),
    ("ranks", lambda row: rank_ranges(row["ranks"]) if row["ranks"] is not None else "unknown"),
    ("locality", itemgetter("locality")),
    ("#calls", itemgetter("calls")),
    _BYTES,
)
_SOURCES = (("source", itemgetter("source")), ("operation", itemgetter("op")), ("#calls", itemgetter("calls")), _BYTES)
_FILES = (
    ("kind", itemgetter(0)),
    ("#files", lambda row: row[1]["files"]),
    ("#size", lambda row: amount(row[1]["bytes"])),
)
