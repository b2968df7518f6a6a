"""`crossrank link`: one graph per rank from its execution trace and its Kineto trace."""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from crossrank.atomic_file import join
from crossrank.comm import is_p2p
from crossrank.errors import CrossrankError
from crossrank.recording import LINKED, file_name
from crossrank.text import percent, plural, rank_ranges
from crossrank.tools.commands.options import add_shared, complain, fleet_of, output_folder
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_file import write_linked
from crossrank.tools.graph.linking.linked_trace import LinkedTrace, MatchReport
from crossrank.tools.graph.linking.window_files import Inputs, RankInput, RankOutput, find_inputs, writing
from crossrank.tools.output.console import Columns, print_counts, print_fact, print_json, print_notes, table_of
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.param_comms import named_by_address

_ROWS = 16
_WARNINGS = 4
_NUMBER = re.compile(r"(?<!thread )(?<![\w.])\d{1,18}(?![\w.])")
_COUNTED = {
    "host_matched": "Matched host operations, by method",
    "edges": "Dependencies, by kind",
    "communications": "Communications, by source of their record",
    "host_unmatched": "Host operations without a Kineto event",
    "kineto_unmatched": "Kineto host events without an operation in the execution trace",
    "activities_unlinked": "GPU activities without a host operation, kept in the graph",
    "activities_outside": "Skipped GPU activities",
    "syncs_unresolved": "Waits without a dependency on their communication, by reason",
}
"""Counts of a report -> the heading above their totals."""
_EXTENSIONS = {"zst": ".zst", "gz": ".gz", "none": ""}
_GroupKey = tuple[str, tuple[int, ...]]
"""Identifies a group on all ranks: its name, unless that is an address, and its members."""


@dataclass(kw_only=True)
class LinkedRank(RankOutput):
    """The result of linking one rank and window."""

    nodes: int = 0
    report: MatchReport = field(default_factory=MatchReport)
    collectives: Counter[_GroupKey] = field(default_factory=Counter)
    p2p: Counter[_GroupKey] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """One process group over all linked ranks."""

    pg: str
    ranks: tuple[int, ...]
    window: int
    collectives: dict[int, int]
    """Rank -> collectives in this window."""
    p2p: int
    """Sends and receives of all ranks."""

    @property
    def name(self) -> str:
        return self.pg or "(named by an address)"

    @property
    def disagrees(self) -> bool:
        return len(set(self.collectives.values())) > 1


class LinkCommand:
    """Join the execution trace and the Kineto trace of every rank into one linked trace. It has host operations with
    times, GPU activities with the operation that launched them, communications with their records, and every dependency
    with its kind. Exit code 1: a rank failed, lost part of a file or matched less than --min-match, or the ranks of a
    group made different numbers of collectives."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        meaning = "a recording, a folder of traces, or the two files of one rank; plain, gzip or zstd"
        add("recording", nargs="+", help=meaning)
        add(
            "-o", "--output", metavar="DIR", help="folder for rank-N.linked.json.zst (default: the folder of the input)"
        )
        meaning = "compression of the output (default zst)"
        add("--compress", choices=sorted(_EXTENSIONS), default="zst", help=meaning)
        add_shared(parser, "ranks", "min-match", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.recording
        if len(paths) > 2:
            raise CrossrankError(f"{len(paths)} paths given; give one folder, or the two files of one rank")
        inputs = find_inputs(paths, arguments.ranks)
        folder = output_folder(paths, arguments.output)
        results = _link_ranks(inputs.pairs, folder, arguments.compress, fleet_of(arguments))
        groups = _compare_groups(results)
        linked = [result for result in results if result.error is None]
        if arguments.json:
            print_json(_summary(results, groups, inputs))
        else:
            _print(results, linked, groups)
        complain(*inputs.problems, *inputs.notes)
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


def _link_ranks(inputs: Iterable[RankInput], folder: str, compression: str, fleet: Fleet) -> list[LinkedRank]:
    """Link every rank. The result of a rank that fails has its error."""
    link_one = partial(_link_one, folder=folder, compression=compression)
    return map_ranks(
        link_one,
        inputs,
        fleet,
        failed=lambda given, error: LinkedRank(rank=given.rank, window=given.window, error=str(error)),
        what="linking",
    )


def _link_one(given: RankInput, folder: str, compression: str) -> LinkedRank:
    trace = link(given.et, given.kineto, given.comms, rank=given.rank)
    if given.rank is not None and trace.kineto_rank not in (None, given.rank):
        trace.report.doubts.append(f"rank {given.rank} in the file name, {trace.kineto_rank} in the Kineto trace")
    name = file_name(LINKED, trace.rank or 0, given.window).removesuffix(".zst") + _EXTENSIONS[compression]
    path = join(folder, name)
    with writing(path):
        write_linked(trace, path)
    return LinkedRank(
        rank=trace.rank,
        window=given.window,
        output=path,
        nodes=len(trace.host) + len(trace.activities),
        report=trace.report,
        collectives=_calls_by_group(trace, p2p=False),
        p2p=_calls_by_group(trace, p2p=True),
    )


def _calls_by_group(trace: LinkedTrace, *, p2p: bool) -> Counter[_GroupKey]:
    return Counter(
        ("" if named_by_address(c.record.pg) else c.record.pg, tuple(c.group.ranks or ()) if c.group else ())
        for c in trace.communications
        if is_p2p(c.record) == p2p
    )


def _compare_groups(results: Sequence[LinkedRank]) -> list[GroupRow]:
    """Return how many collectives each rank made on each of its groups."""
    users: dict[tuple[int, _GroupKey], set[int]] = defaultdict(set)
    linked = {(result.rank, result.window): result for result in results if result.error is None}
    for (rank, window), result in linked.items():
        for key in {*result.collectives, *result.p2p}:
            if rank is not None:
                users[window, key].add(rank)
    rows = []
    for (window, key), seen in sorted(users.items()):
        pg, ranks = key
        members = {rank: linked[rank, window] for rank in ranks or sorted(seen) if (rank, window) in linked}
        rows.append(
            GroupRow(
                pg=pg,
                ranks=ranks,
                window=window,
                collectives={rank: result.collectives[key] for rank, result in members.items()},
                p2p=sum(result.p2p[key] for result in members.values()),
            )
        )
    return rows


def _faults(result: LinkedRank, least: float) -> Iterator[str]:
    """Yield why a rank was not linked, not completely, or matched less than `least`."""
    report = result.report
    if result.error is not None:
        yield result.error
    yield from report.damage
    yield from (f"the two files may be of different runs: {doubt}" for doubt in report.doubts)
    rate = min(report.host_rate, report.activity_rate)
    if result.error is None and rate < least:
        of_host = report.host_rate <= report.activity_rate
        reasons = report.host_unmatched if of_host else report.activities_unlinked
        reason, count = max(reasons.items(), key=lambda item: item[1])
        what = "operations" if of_host else "GPU activities"
        yield f"matched {percent(rate)}, less than --min-match {percent(least)}; {count} {what}: {reason}"


def _print(results: Sequence[LinkedRank], linked: Sequence[LinkedRank], groups: Sequence[GroupRow]) -> None:
    operations = sum(result.report.host_nodes for result in linked)
    matched = sum(sum(result.report.host_matched.values()) for result in linked)
    share = percent(matched / operations if operations else None)
    of_all = plural(len(results), "trace")
    print_fact("linked", f"{len(linked)} of {of_all}: {share} of {operations:,} host operations matched")
    if linked:
        more = f" and {len(linked) - 1} more" if len(linked) > 1 else ""
        print_fact("wrote", f"{linked[0].output}{more}; next: crossrank convert, simulate, or replay --compute")
    table_of(linked, _RANKS, limit=_ROWS).print("Linked traces")
    for name, title in _COUNTED.items():
        total = sum((Counter(getattr(result.report, name)) for result in linked), Counter[str]())
        print_counts(title, sorted(total.items(), key=lambda item: (-item[1], item[0])))
    alone = sum(result.report.communication_kernels_alone for result in linked)
    if alone:
        print_counts("Communication kernels without a call", [("all", alone)])
    if groups:
        table_of(groups, _GROUPS, limit=_ROWS).print("Process groups of the linked ranks")
    absent = sorted({rank for row in groups for rank in row.ranks} - {result.rank for result in linked})
    if absent:
        print(f"\nmissing    rank {rank_ranges(absent)}: in these groups, but not linked")
    notes = [f"{', '.join(ranks[:4])}{', …' if len(ranks) > 4 else ''}: {text}" for text, ranks in _warnings(linked)]
    print_notes(notes, _WARNINGS)


def _warnings(linked: Sequence[LinkedRank]) -> list[tuple[str, list[str]]]:
    """Return each warning with its ranks, most frequent first.

    Warnings that differ only in numbers are merged, and each number becomes a range. The number of a thread stays.
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
            text = text.replace("\0", str(low) if low == high else f"{low} to {high}", 1)
        merged.append((text, list(dict.fromkeys(name for _, name in given))))
    return sorted(merged, key=lambda item: -len(item[1]))


def _group_name(row: GroupRow) -> str:
    return row.name if row.window == 1 else f"{row.name}, window {row.window}"


def _counts(row: GroupRow) -> str:
    if not row.disagrees:
        return str(next(iter(row.collectives.values()), 0))
    by_count: dict[int, list[int]] = {}
    for rank, count in row.collectives.items():
        by_count.setdefault(count, []).append(rank)
    return "; ".join(f"{count} on rank {rank_ranges(ranks)}" for count, ranks in sorted(by_count.items()))


def _summary(results: Sequence[LinkedRank], groups: Sequence[GroupRow], inputs: Inputs) -> dict[str, object]:
    """Return what `--json` prints."""
    named = ("rank", "window", "output", "error", "nodes")
    return {
        "ranks": [
            {name: getattr(result, name) for name in named}
            | {name: getattr(result.report, name) for name in ("host_rate", "activity_rate")}
            | asdict(result.report)
            for result in results
        ],
        "groups": [asdict(row) | {"disagrees": row.disagrees} for row in groups],
        "problems": inputs.problems,
    }


def _left_out(result: LinkedRank) -> int:
    return sum(result.report.activities_outside.values())


_RANKS: Columns[LinkedRank] = (
    ("rank", lambda result: "-" if result.rank is None else result.rank),
    ("window", lambda result: result.window),
    ("#host\noperations", lambda result: f"{result.report.host_nodes:,}"),
    ("#host\nmatched", lambda result: percent(result.report.host_rate)),
    ("#GPU\nactivities", lambda result: f"{sum(result.report.activities.values()) - _left_out(result):,}"),
    ("#GPU\nlinked", lambda result: percent(result.report.activity_rate) if result.report.activities else "-"),
    ("#GPU\nskipped", lambda result: f"{_left_out(result):,}"),
    ("#commu-\nnications", lambda result: f"{sum(result.report.communications.values()):,}"),
    ("#depen-\ndencies", lambda result: f"{sum(result.report.edges.values()):,}"),
)
_GROUPS: Columns[GroupRow] = (
    ("group", lambda row: row.name),
    ("window", lambda row: row.window),
    ("#members", lambda row: len(row.ranks) or "unknown"),
    ("ranks", lambda row: rank_ranges(row.ranks) if row.ranks else "unknown"),
    ("#collectives per rank", _counts),
    ("#sends and receives", lambda row: row.p2p),
)
