"""`crossrank link`: one graph per rank from its execution trace and its Kineto trace."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from crossrank.errors import CrossrankError
from crossrank.text import percent, printable, rank_ranges
from crossrank.tools.commands.options import add_shared, complain, fleet_of, output_folder
from crossrank.tools.graph.linking.link_ranks import EXTENSIONS, GroupRow, LinkedRank, compare_groups, link_ranks
from crossrank.tools.graph.linking.window_files import Inputs, find_inputs
from crossrank.tools.output.console import Columns, print_counts, print_json, table_of

_ROWS = 16
_WARNINGS = 4
_NUMBER = re.compile(r"(?<!thread )(?<![\w.])\d{1,18}(?![\w.])")
_COUNTED = {
    "host_matched": "Host operations, by how their Kineto event was found",
    "edges": "Dependencies, by kind",
    "communications": "Communications, by where their record comes from",
    "host_unmatched": "Host operations without a Kineto event",
    "kineto_unmatched": "Kineto host events without an operation in the execution trace",
    "activities_unlinked": "GPU activities without a host operation, kept in the graph",
    "activities_outside": "GPU activities left out",
    "syncs_unresolved": "Synchronisations that gave no dependency",
}
"""Counts of a report, and the heading over those of all ranks together."""


class LinkCommand:
    """Join the execution trace and the Kineto trace of every rank into one linked trace: times for host operations,
    GPU activities with the operation that launched them, communications with their records, and every dependency
    with its kind. Says what matched and what did not. Exit code 1: a rank failed, lost part of a file,
    or matched less than --min-match, or the ranks of a group disagree on their number of collectives."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        meaning = "a recording, any folder of such files, or the two files of one rank; plain, gzip or zstd"
        add("recording", nargs="+", help=meaning)
        add("-o", "--output", metavar="DIR", help="folder for rank-N.linked.json.zst (default: the input's)")
        meaning = "compression of the output (default zst)"
        add("--compress", choices=sorted(EXTENSIONS), default="zst", help=meaning)
        add_shared(parser, "ranks", "min-match", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.recording
        if len(paths) > 2:
            raise CrossrankError(f"{len(paths)} paths given; name one folder, or the two files of one rank")
        inputs = find_inputs(paths, arguments.ranks)
        folder = output_folder(paths, arguments.output)
        results = link_ranks(inputs.pairs, folder, arguments.compress, fleet_of(arguments))
        groups = compare_groups(results)
        linked = [result for result in results if result.error is None]
        if arguments.json:
            print_json(_summary(results, groups, inputs))
        else:
            _print(linked, groups, folder)
        complain(*(problem.text for problem in inputs.problems), *inputs.notes)
        faults = [f"{result.name}: {text}" for result in results for text in _faults(result, arguments.min_match)]
        faults += [
            f"the ranks of group {_group_name(row)} made different numbers of collectives: {_counts(row)}"
            for row in groups
            if row.disagrees
        ]
        complain(*faults)
        if not linked:
            return 2
        return 1 if inputs.problems or faults else 0


def _faults(result: LinkedRank, least: float) -> Iterator[str]:
    """Why a rank was not linked, or not as a whole, or matched less than it should."""
    report = result.report
    if result.error is not None:
        yield result.error
    yield from report.damage
    yield from (f"are these two files of one run? {doubt}" for doubt in report.doubts)
    rate = min(report.host_rate, report.activity_rate)
    if result.error is None and rate < least:
        of_host = report.host_rate <= report.activity_rate
        reasons = report.host_unmatched if of_host else report.activities_unlinked
        reason, count = max(reasons.items(), key=lambda item: item[1])
        what = "operations" if of_host else "GPU activities"
        yield f"matched {percent(rate)}, less than {percent(least)} (--min-match); {count} {what}: {reason}"


def _print(linked: Sequence[LinkedRank], groups: Sequence[GroupRow], folder: str) -> None:
    table_of(linked, _RANKS, limit=_ROWS).print(f"Linked traces in {folder}")
    for name, title in _COUNTED.items():
        total = sum((Counter(getattr(result.report, name)) for result in linked), Counter[str]())
        print_counts(title, sorted(total.items(), key=lambda item: (-item[1], item[0])))
    alone = sum(result.report.communication_kernels_alone for result in linked)
    if alone:
        print_counts("Communication kernels without a call around them", [("all", alone)])
    if groups:
        table_of(groups, _GROUPS, limit=_ROWS).print("Process groups, over the ranks linked")
    absent = sorted({rank for row in groups for rank in row.ranks} - {result.rank for result in linked})
    if absent:
        print(f"\nmissing    rank {rank_ranges(absent)}: of these groups, and not linked here")
    warnings = _warnings(linked)
    for text, ranks in warnings[:_WARNINGS]:
        print(f"\nwarning    {printable(text)} ({', '.join(ranks[:4])}{', …' if len(ranks) > 4 else ''})")
    if len(warnings) > _WARNINGS:
        print(f"\n… and {len(warnings) - _WARNINGS} more warning(s): --json has all")


def _warnings(linked: Sequence[LinkedRank]) -> list[tuple[str, list[str]]]:
    """Warnings with the ranks that gave them, the most frequent first.

    Those that differ in numbers alone are one: each number becomes the range that it spans, but for a thread's, which
    says what it is about.
    """
    found: dict[str, list[tuple[list[int], str]]] = {}
    for result in linked:
        for warning in result.report.warnings:
            numbers = [int(number) for number in _NUMBER.findall(warning)]
            found.setdefault(_NUMBER.sub("\0", warning), []).append((numbers, result.name))
    merged = []
    for text, given in found.items():
        for column in zip(*(numbers for numbers, _ in given), strict=True):
            low, high = min(column), max(column)
            text = text.replace("\0", str(low) if low == high else f"{low}…{high}", 1)
        merged.append((text, list(dict.fromkeys(name for _, name in given))))
    return sorted(merged, key=lambda item: -len(item[1]))


def _group_name(row: GroupRow) -> str:
    name = row.pg or "(named by an address)"
    return name if row.window == 1 else f"{name}, window {row.window}"


def _counts(row: GroupRow) -> str:
    if not row.disagrees:
        return str(next(iter(row.collectives.values()), 0))
    by_count: dict[int, list[int]] = {}
    for rank, count in row.collectives.items():
        by_count.setdefault(count, []).append(rank)
    return "; ".join(f"{count} on rank {rank_ranges(ranks)}" for count, ranks in sorted(by_count.items()))


def _summary(results: Sequence[LinkedRank], groups: Sequence[GroupRow], inputs: Inputs) -> dict[str, object]:
    """What `--json` prints."""
    named = ("rank", "window", "output", "error", "nodes")
    return {
        "ranks": [
            {name: getattr(result, name) for name in named}
            | {name: getattr(result.report, name) for name in ("host_rate", "activity_rate")}
            | asdict(result.report)
            for result in results
        ],
        "groups": [asdict(row) | {"disagrees": row.disagrees} for row in groups],
        "problems": [problem.text for problem in inputs.problems],
    }


def _left_out(result: LinkedRank) -> int:
    return sum(result.report.activities_outside.values())


_RANKS: Columns[LinkedRank] = (
    ("rank", lambda result: result.name.removeprefix("rank ")),
    ("#host ops", lambda result: f"{result.report.host_nodes:,}"),
    ("#matched", lambda result: percent(result.report.host_rate)),
    ("#GPU", lambda result: f"{sum(result.report.activities.values()) - _left_out(result):,}"),
    ("#linked", lambda result: percent(result.report.activity_rate) if result.report.activities else "-"),
    ("#left out", lambda result: f"{_left_out(result):,}"),
    ("#comms", lambda result: f"{sum(result.report.communications.values()):,}"),
    ("#edges", lambda result: f"{sum(result.report.edges.values()):,}"),
)
_GROUPS: Columns[GroupRow] = (
    ("group", _group_name),
    ("#members", lambda row: len(row.ranks) or "not known"),
    ("ranks", lambda row: rank_ranges(row.ranks) if row.ranks else "not known"),
    ("#collectives per rank", _counts),
    ("#sends and receives", lambda row: row.p2p),
)
