"""`crossrank link`: one graph per rank from its execution trace and its Kineto trace."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import msgspec

from crossrank.errors import CrossrankError
from crossrank.text import printable, rank_ranges
from crossrank.tools.commands.options import (
    add_fleet_arguments,
    complain,
    fleet_of,
    output_folder,
    progress,
    rank_list,
    share,
)
from crossrank.tools.graph.linking.inputs import Inputs, find_inputs
from crossrank.tools.graph.linking.ranks import EXTENSIONS, GroupRow, RankResult, Task, compare_groups, link_ranks
from crossrank.tools.output.console import print_table

_ROWS = 16
_WARNINGS = 4
_NUMBER = re.compile(r"(?<!thread )(?<![\w.])\d{1,18}(?![\w.])")


class Link:
    """Join the execution trace and the Kineto trace of every rank into one linked trace: times for host operations,
    GPU activities with the operation that launched them, communications with their records, and every dependency
    with its kind. Says what matched and what did not. Exit code 1: a rank failed, lost part of a file,
    or matched less than --min-match, or the ranks of a group disagree on their number of collectives."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "recording",
            nargs="+",
            help="a recording, any folder of such files, or the two files of one rank; plain, gzip or zstd",
        )
        parser.add_argument(
            "-o", "--output", metavar="DIR", help="folder for rank-N.linked.json.zst (default: the input's)"
        )
        parser.add_argument("--ranks", type=rank_list, metavar="LIST", help="only these, for example 0-7,12")
        parser.add_argument(
            "--min-match",
            type=share,
            default=0.95,
            metavar="SHARE",
            help="exit 1 where less of the host operations, or of the GPU activities launched during them, matched "
            "(default 0.95)",
        )
        parser.add_argument(
            "--compress", choices=sorted(EXTENSIONS), default="zst", help="compression of the output (default zst)"
        )
        add_fleet_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print the summary as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.recording
        if len(paths) > 2:
            raise CrossrankError(f"{len(paths)} paths given; name one folder, or the two files of one rank")
        inputs = find_inputs(paths, arguments.ranks)
        folder = output_folder(paths, arguments.output)
        tasks = [Task(input=pair, folder=folder, compression=arguments.compress) for pair in inputs.pairs]
        fleet = fleet_of(arguments, paths, reads=("ranks", "compress"))
        results = progress("linking", len(tasks), lambda done: link_ranks(tasks, fleet, done))
        rows = compare_groups(results)
        poor = [result for result in results if result.error is None and _rate(result) < arguments.min_match]
        if arguments.json:
            sys.stdout.write(_json(results, rows, inputs))
        else:
            _print(results, rows, folder)
        for text in [problem.text for problem in inputs.problems] + inputs.notes:
            complain(text)
        for result in results:
            if result.error is not None:
                complain(f"{result.name}: {result.error}")
            for damage in result.report.damage:
                complain(f"{result.name}: {damage}")
            for doubt in result.report.doubts:
                complain(f"{result.name}: are these two files of one run? {doubt}")
        for result in poor:
            complain(
                f"{result.name}: matched {_percent(_rate(result))}, less than {_percent(arguments.min_match)} "
                f"(--min-match); {_main_reason(result)}"
            )
        disagree = [row for row in rows if row.disagrees]
        for row in disagree:
            complain(f"the ranks of group {_group_name(row)} made different numbers of collectives: {_counts(row)}")
        if all(result.error is not None for result in results):
            return 2
        wrong = any(result.error or result.report.damage or result.report.doubts for result in results)
        return 1 if inputs.problems or poor or disagree or wrong else 0


def _rate(result: RankResult) -> float:
    return min(result.report.host_rate, result.report.activity_rate)


def _main_reason(result: RankResult) -> str:
    report = result.report
    reasons = report.host_unmatched if report.host_rate <= report.activity_rate else report.activities_unlinked
    what = "operations" if report.host_rate <= report.activity_rate else "GPU activities"
    reason, count = max(reasons.items(), key=lambda item: item[1])
    return f"{count} {what}: {reason}"


def _print(results: list[RankResult], rows: list[GroupRow], folder: str) -> None:
    linked = [result for result in results if result.error is None]
    print_table(
        f"Linked traces in {printable(folder)}",
        ("rank", "#host ops", "#matched", "#GPU", "#linked", "#left out", "#comms", "#edges"),
        [_row(result) for result in linked[:_ROWS]],
    )
    if len(linked) > _ROWS:
        print(f"  … and {len(linked) - _ROWS} more: --json has all")
    if not linked:
        return
    total = _total(linked)
    for title, counts in total.items():
        if counts:
            print(f"\n{title}")
            for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
                print(f"  {count:>9,}  {printable(reason)}")
    if rows:
        print_table(
            "Process groups, over the ranks linked",
            ("group", "#members", "ranks", "#collectives per rank", "#sends and receives"),
            [
                (
                    _group_name(row),
                    len(row.ranks) or "not known",
                    rank_ranges(row.ranks) if row.ranks else "not known",
                    _counts(row),
                    row.p2p,
                )
                for row in rows[:_ROWS]
            ],
        )
        if len(rows) > _ROWS:
            print(f"  … and {len(rows) - _ROWS} more: --json has all")
    for text, ranks in _warnings(linked)[:_WARNINGS]:
        print(f"\nwarning    {printable(text)} ({', '.join(ranks[:4])}{', …' if len(ranks) > 4 else ''})")
    more = len(_warnings(linked)) - _WARNINGS
    if more > 0:
        print(f"\n… and {more} more warning(s): --json has all")


def _row(result: RankResult) -> tuple[object, ...]:
    report = result.report
    return (
        result.name.removeprefix("rank "),
        f"{report.host_nodes:,}",
        _percent(report.host_rate),
        f"{sum(report.activities.values()) - sum(report.activities_outside.values()):,}",
        _percent(report.activity_rate) if report.activities else "-",
        f"{sum(report.activities_outside.values()):,}",
        f"{sum(report.communications.values()):,}",
        f"{sum(report.edges.values()):,}",
    )


def _total(linked: list[RankResult]) -> dict[str, Counter[str]]:
    """The counts of all ranks together, by the heading they stand under."""
    total: dict[str, Counter[str]] = {}
    for title, name in (
        ("Host operations, by how their Kineto event was found", "host_matched"),
        ("Dependencies, by kind", "edges"),
        ("Communications, by where their record comes from", "communications"),
        ("Host operations without a Kineto event", "host_unmatched"),
        ("Kineto host events without an operation in the execution trace", "kineto_unmatched"),
        ("GPU activities without a host operation, kept in the graph", "activities_unlinked"),
        ("GPU activities left out", "activities_outside"),
        ("Synchronisations that gave no dependency", "syncs_unresolved"),
    ):
        total[title] = Counter()
        for result in linked:
            total[title].update(getattr(result.report, name))
    alone = sum(result.report.communication_kernels_alone for result in linked)
    if alone:
        total["Communication kernels without a call around them"] = Counter({"all": alone})
    return total


def _warnings(linked: list[RankResult]) -> list[tuple[str, list[str]]]:
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
        spans = [(min(column), max(column)) for column in zip(*(numbers for numbers, _ in given), strict=True)]
        for low, high in spans:
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


def _json(results: list[RankResult], rows: list[GroupRow], inputs: Inputs) -> str:
    summary: dict[str, Any] = {
        "ranks": [
            {
                "rank": result.rank,
                "window": result.window,
                "output": result.output,
                "error": result.error,
                "nodes": result.nodes,
                "host_rate": result.report.host_rate,
                "activity_rate": result.report.activity_rate,
                **asdict(result.report),
            }
            for result in results
        ],
        "groups": [
            {
                "pg": row.pg,
                "ranks": row.ranks,
                "window": row.window,
                "collectives": {str(rank): count for rank, count in row.collectives.items()},
                "p2p": row.p2p,
                "disagrees": row.disagrees,
            }
            for row in rows
        ],
        "problems": [problem.text for problem in inputs.problems],
    }
    return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"


def _percent(share: float) -> str:
    # Never rounded up to a match that it is not.
    return f"{int(share * 1000) / 10:.1f} %"
