"""`crossrank convert`: Chakra traces for simulators such as ASTRA-sim."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

import msgspec

from crossrank.errors import CrossrankError
from crossrank.recording import LINKED, is_folder
from crossrank.text import printable
from crossrank.tools.commands.options import (
    add_fleet_arguments,
    complain,
    fleet_of,
    output_folder,
    progress,
    rank_list,
    share,
)
from crossrank.tools.commands.simulation import as_json, print_simulation, simulate_windows
from crossrank.tools.graph.chakra.graph import Options
from crossrank.tools.graph.chakra.ranks import (
    RankResult,
    Task,
    convert_ranks,
    delay_starts,
    disagreements,
    write_groups,
)
from crossrank.tools.graph.linking.inputs import Inputs, RankInput, find_inputs
from crossrank.tools.output.console import print_table
from crossrank.tools.traces.discover import discover

_SHOWN = 16
_READS = ("ranks", "deps", "nodes", "no_pauses", "lower", "group_node", "strict", "simulate", "timeline")
"""Options that decide what a rank's conversion gives."""


class Convert:
    """Write one Chakra trace per rank (chakra.RANK.et) and the communicator groups (comm_groups.json) from a
    recording, in a form that ASTRA-sim's feeders accept; with --lower astra-sim only of what ASTRA-sim runs. Links
    first, in memory. Exit code 1: a rank failed or lost part of a file, matched less than --min-match, or the ranks of
    a group disagree on their collectives."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "recording",
            nargs="+",
            help="a recording, any folder of such files, the two files of one rank, or linked traces",
        )
        parser.add_argument("-o", "--output", metavar="DIR", help="folder for the traces (default: the input's)")
        parser.add_argument("--ranks", type=rank_list, metavar="LIST", help="only these, for example 0-7,12")
        parser.add_argument(
            "--deps",
            choices=("all", "data"),
            default="all",
            help="all: data_deps hold every dependency, for a reader of data_deps alone (default); data: what is only "
            "the order of a thread stands in ctrl_deps",
        )
        parser.add_argument(
            "--nodes",
            choices=("all", "gpu"),
            default="all",
            help="gpu: GPU and communication nodes only, with the dependencies that ran through the host, which then "
            "takes no time: ASTRA-sim says the overlap of computation and communication of such traces alone",
        )
        parser.add_argument(
            "--no-pauses",
            action="store_true",
            help="leave out what a thread did between its operations (default: a node for each such pause)",
        )
        parser.add_argument(
            "--lower",
            choices=("astra-sim",),
            help="write only what this simulator runs: barrier as all_reduce, gather as all_gather, scatter and reduce "
            "as reduce_scatter, what a rank does alone as a computation; and let threads and streams that ran side by "
            "side, which it runs one after the other, not take longer than they did",
        )
        parser.add_argument(
            "--group-node",
            action="store_true",
            help="write the process groups as a metadata node too, as Chakra's converter does: ASTRA-sim stops at it",
        )
        parser.add_argument("--strict", action="store_true", help="refuse dependencies that run in a circle")
        parser.add_argument(
            "--simulate", action="store_true", help="play all ranks and say how long they take, and why"
        )
        parser.add_argument(
            "--timeline", metavar="FILE", help="write the simulation as a trace for ui.perfetto.dev (.json or .json.gz)"
        )
        parser.add_argument("--keep-linked", action="store_true", help="write rank-N.linked.json.zst as well")
        parser.add_argument(
            "--min-match", type=share, default=0.95, metavar="SHARE", help="exit 1 where less matched (default 0.95)"
        )
        add_fleet_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print the summary as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.recording
        if linked := _linked(paths):
            ranks = arguments.ranks
            inputs = Inputs(pairs=[pair for pair in linked if ranks is None or pair.rank in ranks], problems=[])
            if not inputs.pairs:
                raise CrossrankError(f"none of the {len(paths)} linked traces is of a rank that --ranks names")
        elif len(paths) > 2:
            raise CrossrankError(
                f"{len(paths)} paths given; name one folder, the two files of one rank, or linked traces"
            )
        else:
            inputs = find_inputs(paths, arguments.ranks)
        _refuse_doubles(inputs.pairs)
        if arguments.timeline is not None:
            _refuse_timeline(arguments.timeline)
        folder = output_folder(paths, arguments.output)
        options = Options(
            deps=arguments.deps,
            nodes=arguments.nodes,
            pauses=not arguments.no_pauses,
            lower=arguments.lower == "astra-sim",
            group_node=arguments.group_node,
            strict=arguments.strict,
        )
        tasks = [
            Task(
                input=pair,
                folder=folder,
                options=options,
                keep_linked=arguments.keep_linked,
                keep_graph=arguments.simulate or arguments.timeline is not None,
            )
            for pair in inputs.pairs
        ]
        fleet = fleet_of(arguments, paths, reads=_READS)
        results = progress("converting", len(tasks), lambda done: convert_ranks(tasks, fleet, done))
        good = [result for result in results if result.error is None]
        group_file = write_groups(good, folder) if good else None
        apart = delay_starts(good)
        differ = disagreements(results)
        simulations = simulate_windows(good, arguments.timeline)
        if arguments.json:
            summary = {
                "ranks": [asdict(_without_graph(result)) for result in results],
                "groups": group_file,
                "windows_by_no_clock": apart,
                "simulations": [as_json(window, simulation) for window, simulation in simulations],
                "disagreements": differ,
                "problems": [problem.text for problem in inputs.problems],
            }
            encoded = msgspec.json.encode(summary, enc_hook=msgspec.to_builtins)
            sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
        elif good:
            _print(good, folder)
            for window in apart:
                print(f"\nclocks     of the ranks are further apart than window {window} is long; all begin at 0")
            for window, simulation in simulations:
                print_simulation(window, simulation)
        for text in [problem.text for problem in inputs.problems] + inputs.notes + differ:
            complain(text)
        poor = [result for result in good if min(result.host_rate, result.activity_rate) < arguments.min_match]
        for result in results:
            for text in ([result.error] if result.error else []) + result.damage + result.converted.warnings:
                complain(f"{result.name}: {text}")
        for result in poor:
            complain(f"{result.name}: matched less than --min-match; `crossrank link` says what and why")
        if not good:
            return 2
        lost = any(result.error or result.damage for result in results)
        return 1 if inputs.problems or differ or poor or lost else 0


def _without_graph(result: RankResult) -> RankResult:
    return replace(result, converted=replace(result.converted, graph=None))


def _linked(paths: Sequence[str]) -> list[RankInput]:
    """The inputs where linked traces are named; empty where other files or folders are."""
    if any(is_folder(path) for path in paths):
        return []
    files = discover(paths)
    if any(file.kind != LINKED for file in files):
        return []
    for file in files:
        if file.rank is None:
            raise CrossrankError(f"{file.path}: does not say its rank; name it rank-N.linked.json, .gz or .zst")
    return [RankInput(rank=file.rank, window=file.window, et="", kineto="", linked=file.path) for file in files]


def _refuse_doubles(pairs: Sequence[RankInput]) -> None:
    """Two inputs of one rank would write one file."""
    seen: dict[tuple[int | None, int], RankInput] = {}
    for pair in pairs:
        other = seen.setdefault((pair.rank, pair.window), pair)
        if other is not pair:
            raise CrossrankError(
                f"{other.linked or other.et} and {pair.linked or pair.et} are both of rank {pair.rank}; "
                "name one of them"
            )


def _refuse_timeline(timeline: str) -> None:
    """Tell before the work what would fail after it."""
    folder = os.path.dirname(timeline) or "."
    if not timeline.endswith((".json", ".json.gz")):
        raise CrossrankError(f"{timeline}: a timeline is a .json or .json.gz file")
    if os.path.isdir(timeline) or not os.path.isdir(folder):
        raise CrossrankError(f"{timeline}: cannot be written; name a file in a folder that exists")


def _print(results: list[RankResult], folder: str) -> None:
    print_table(
        f"Chakra traces in {printable(folder)}",
        (
            "rank",
            "#nodes",
            "#on the host",
            "#pauses",
            "#on GPUs",
            "#communications",
            "#dependencies",
            "#implied",
            "#size",
        ),
        [_row(result) for result in results[:_SHOWN]],
    )
    if len(results) > _SHOWN:
        print(f"  … and {len(results) - _SHOWN} more: --json has all")
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.converted.dependencies)
    print("\nDependencies, by kind")
    for kind, count in total.most_common():
        print(f"  {count:>9,}  {kind}")
    lowered: Counter[str] = Counter()
    for result in results:
        lowered.update(result.converted.lowered)
    if lowered:
        print("\nLowered to what ASTRA-sim runs")
        for what, count in lowered.most_common():
            print(f"  {count:>9,}  {what}")


def _row(result: RankResult) -> tuple[object, ...]:
    nodes = result.converted.nodes
    host, pauses, gpu = (
        nodes.get(kind, 0) for kind in ("computation on the host", "pause of the host", "computation on a GPU")
    )
    total = sum(nodes.values())
    return (
        result.name.removeprefix("rank "),
        f"{total:,}",
        f"{host:,}",
        f"{pauses:,}",
        f"{gpu:,}",
        f"{total - host - pauses - gpu:,}",
        f"{sum(result.converted.dependencies.values()):,}",
        f"{result.converted.implied:,}",
        f"{result.size / 1e6:.2f} MB",
    )
