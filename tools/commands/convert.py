"""`crossrank convert`: Chakra traces for simulators such as ASTRA-sim."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from crossrank.errors import CrossrankError
from crossrank.recording import LINKED, is_folder
from crossrank.text import percent
from crossrank.tools.commands.options import add_shared, complain, fleet_of, output_folder, progress
from crossrank.tools.graph.chakra.chakra_graph import Options
from crossrank.tools.graph.chakra.convert_ranks import (
    ConvertedRank,
    convert_ranks,
    delay_starts,
    disagreements,
    write_groups,
)
from crossrank.tools.graph.chakra.simulate import RankGraph, Simulation, simulate
from crossrank.tools.graph.chakra.simulation_timeline import write_timeline
from crossrank.tools.graph.linking.window_files import Inputs, RankInput, find_inputs
from crossrank.tools.output.console import Columns, print_counts, print_json, table_of
from crossrank.tools.traces.discover import discover

_SHOWN, _BUSIEST = 16, 12
_FIGURES = ("makespan_ns", "measured_ns", "by_clocks", "error", "critical_ns", "waiting_ns", "joined", "alone")
"""What `--json` says of a simulation besides how busy its threads and streams are."""


class ConvertCommand:
    """Write one Chakra trace per rank (chakra.RANK.et) and the communicator groups (comm_groups.json) from a
    recording, in a form that ASTRA-sim's feeders accept; with --lower astra-sim only of what ASTRA-sim runs. Links
    first, in memory. Exit code 1: a rank failed or lost part of a file, matched less than --min-match, or the ranks of
    a group disagree on their collectives."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        meaning = "a recording, any folder of such files, the two files of one rank, or linked traces"
        add("recording", nargs="+", help=meaning)
        add("-o", "--output", metavar="DIR", help="folder for the traces (default: the input's)")
        meaning = (
            "all: data_deps hold every dependency, for a reader of data_deps alone (default); data: what is only "
            "the order of a thread stands in ctrl_deps"
        )
        add("--deps", choices=("all", "data"), default="all", help=meaning)
        meaning = (
            "gpu: GPU and communication nodes only, with the dependencies that ran through the host, which then "
            "takes no time: ASTRA-sim says the overlap of computation and communication of such traces alone"
        )
        add("--nodes", choices=("all", "gpu"), default="all", help=meaning)
        meaning = "leave out what a thread did between its operations (default: a node for each such pause)"
        add("--no-pauses", action="store_true", help=meaning)
        meaning = (
            "write only what this simulator runs: barrier as all_reduce, gather as all_gather, scatter and reduce "
            "as reduce_scatter, what a rank does alone as a computation; and let threads and streams that ran side by "
            "side, which it runs one after the other, not take longer than they did"
        )
        add("--lower", choices=("astra-sim",), help=meaning)
        meaning = "write the process groups as a metadata node too, as Chakra's converter does: ASTRA-sim stops at it"
        add("--group-node", action="store_true", help=meaning)
        add("--strict", action="store_true", help="refuse dependencies that run in a cycle")
        add("--simulate", action="store_true", help="play all ranks and say how long they take, and why")
        meaning = "write the simulation as a trace for ui.perfetto.dev (.json or .json.gz)"
        add("--timeline", metavar="FILE", help=meaning)
        add("--keep-linked", action="store_true", help="write rank-N.linked.json.zst as well")
        add_shared(parser, "ranks", "min-match", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        inputs = _inputs(arguments.recording, arguments.ranks)
        if arguments.timeline is not None:
            _refuse_timeline(arguments.timeline)
        folder = output_folder(arguments.recording, arguments.output)
        options = Options(
            deps=arguments.deps,
            nodes=arguments.nodes,
            pauses=not arguments.no_pauses,
            lower=arguments.lower == "astra-sim",
            group_node=arguments.group_node,
            strict=arguments.strict,
        )
        convert = partial(
            convert_ranks,
            inputs.pairs,
            folder,
            options,
            fleet_of(arguments),
            keep_linked=arguments.keep_linked,
            keep_graph=arguments.simulate or arguments.timeline is not None,
        )
        results = progress("converting", len(inputs.pairs), convert)
        good = [result for result in results if result.error is None]
        group_file = write_groups(good, folder) if good else None
        apart = delay_starts(good)
        differ = disagreements(good)
        simulations = _simulate(good, arguments.timeline)
        if arguments.json:
            print_json(
                {
                    "ranks": [replace(result, converted=replace(result.converted, graph=None)) for result in results],
                    "groups": group_file,
                    "windows_by_no_clock": apart,
                    "simulations": [_figures(window, simulation) for window, simulation in simulations.items()],
                    "disagreements": differ,
                    "problems": [problem.text for problem in inputs.problems],
                }
            )
        elif good:
            _print(good, folder)
            for window in apart:
                print(f"\nclocks     of the ranks are further apart than window {window} is long; all begin at 0")
            for window, simulation in simulations.items():
                _print_simulation(window, simulation)
        complain(*(problem.text for problem in inputs.problems), *inputs.notes, *differ)
        is_whole = _complain_of_ranks(results, arguments.min_match)
        if not good:
            return 2
        return 1 if inputs.problems or differ or not is_whole else 0


def _inputs(paths: Sequence[str], ranks: set[int] | None) -> Inputs:
    if linked := _linked(paths):
        inputs = Inputs(pairs=[pair for pair in linked if ranks is None or pair.rank in ranks], problems=[])
        if not inputs.pairs:
            raise CrossrankError(f"none of the {len(paths)} linked traces is of a rank that --ranks names")
    elif len(paths) > 2:
        raise CrossrankError(f"{len(paths)} paths given; name one folder, the two files of one rank, or linked traces")
    else:
        inputs = find_inputs(paths, ranks)
    seen: dict[tuple[int | None, int], RankInput] = {}
    for pair in inputs.pairs:
        # Two inputs of one rank would write one file.
        other = seen.setdefault((pair.rank, pair.window), pair)
        if other is not pair:
            raise CrossrankError(
                f"{other.linked or other.et} and {pair.linked or pair.et} are both of rank {pair.rank}; "
                "name one of them"
            )
    return inputs


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


def _refuse_timeline(timeline: str) -> None:
    """Refuse before the work what would fail after it."""
    if not timeline.endswith((".json", ".json.gz")):
        raise CrossrankError(f"{timeline}: a timeline is a .json or .json.gz file")
    if os.path.isdir(timeline) or not os.path.isdir(os.path.dirname(timeline) or "."):
        raise CrossrankError(f"{timeline}: cannot be written; name a file in a folder that exists")


def _simulate(results: Sequence[ConvertedRank], timeline: str | None) -> dict[int, Simulation]:
    """Window -> its ranks, played together; written to `timeline` as well, later windows beside it."""
    windows: dict[int, list[RankGraph]] = {}
    for result in results:
        if result.converted.graph is not None:
            windows.setdefault(result.window, []).append(result.converted.graph)
    simulations = {window: simulate(graphs) for window, graphs in sorted(windows.items())}
    if timeline is None:
        return simulations
    for window, simulation in simulations.items():
        path = Path(timeline)
        path = path if window == 1 else path.with_name(f"w{window}.{path.name}")
        try:
            write_timeline(windows[window], simulation, path)
        except OSError as error:
            raise CrossrankError(f"{path}: cannot be written ({error.strerror}); name another file") from error
    return simulations


def _figures(window: int, simulation: Simulation) -> dict[str, object]:
    busy = [{"rank": rank, "runs_on": runs_on, "ns": ns} for (rank, runs_on), ns in simulation.busy_ns.items()]
    return {"window": window, "busy_ns": busy} | {name: getattr(simulation, name) for name in _FIGURES}


def _complain_of_ranks(results: Sequence[ConvertedRank], least: float) -> bool:
    """Whether every rank was converted whole and matched well enough; complains of those that were not."""
    for result in results:
        texts = [result.error, *result.damage, *result.converted.warnings]
        complain(*(f"{result.name}: {text}" for text in texts if text is not None))
    poor = [r for r in results if r.error is None and min(r.host_rate, r.activity_rate) < least]
    complain(*(f"{r.name}: matched less than --min-match; `crossrank link` says what and why" for r in poor))
    return not poor and not any(result.error is not None or result.damage for result in results)


def _print(results: Sequence[ConvertedRank], folder: str) -> None:
    table_of(results, _COLUMNS, limit=_SHOWN).print(f"Chakra traces in {folder}")
    for name, title in (("dependencies", "Dependencies, by kind"), ("lowered", "Lowered to what ASTRA-sim runs")):
        total = sum((Counter(getattr(result.converted, name)) for result in results), Counter[str]())
        print_counts(title, total.most_common())
    if gpu_ns := sum(result.converted.gpu_ns for result in results):
        share = sum(result.converted.counted_ns for result in results) / gpu_ns
        print(
            f"\nnum_ops    stands on what takes {percent(share)} of the computing time on GPUs (products of matrices, "
            "convolutions, attention); of the rest it is not known, and a roofline needs it of every node"
        )


_HOST, _PAUSE, _GPU = "computation on the host", "pause of the host", "computation on a GPU"


def _nodes(result: ConvertedRank, *kinds: str) -> int:
    return sum(result.converted.nodes.get(kind, 0) for kind in kinds or result.converted.nodes)


_COLUMNS: Columns[ConvertedRank] = (
    ("rank", lambda result: result.name.removeprefix("rank ")),
    ("#nodes", lambda result: f"{_nodes(result):,}"),
    ("#on the host", lambda result: f"{_nodes(result, _HOST):,}"),
    ("#pauses", lambda result: f"{_nodes(result, _PAUSE):,}"),
    ("#on GPUs", lambda result: f"{_nodes(result, _GPU):,}"),
    ("#communications", lambda result: f"{_nodes(result) - _nodes(result, _HOST, _PAUSE, _GPU):,}"),
    ("#dependencies", lambda result: f"{sum(result.converted.dependencies.values()):,}"),
    ("#implied", lambda result: f"{result.converted.implied:,}"),
    ("#size", lambda result: f"{result.size / 1e6:.2f} MB"),
)


def _print_simulation(window: int, simulation: Simulation) -> None:
    """Makespan, what the critical path consists of, and how busy every thread and stream is."""
    print(f"\nSimulation{'' if window == 1 else f' of window {window}'}")
    print(
        f"  makespan   {_ms(simulation.makespan_ns)} ms, {simulation.error:+.1%} of the measured "
        f"{_ms(simulation.measured_ns)} ms (first start to last end of all ranks)"
    )
    print(f"  joined     {simulation.joined:,} communications over several ranks, {simulation.alone:,} played alone")
    if not simulation.by_clocks:
        print("  clocks     of the ranks are further apart than the window is long; all begin at 0")
    print("  critical path")
    for category, spent in simulation.critical_ns.items():
        print(f"    {_ms(spent):>12} ms  {category}")
    whole = max(1, simulation.makespan_ns)
    columns: Columns[tuple[tuple[int, str], int]] = (
        ("rank", lambda one: one[0][0]),
        ("thread or stream", lambda one: one[0][1]),
        ("#busy ms", lambda one: _ms(one[1])),
        ("#of makespan", lambda one: f"{one[1] / whole:.1%}"),
        ("#rank waits ms", lambda one: _ms(simulation.waiting_ns[one[0][0]])),
    )
    busiest = sorted(simulation.busy_ns.items(), key=lambda one: -one[1])
    table_of(busiest, columns, limit=_BUSIEST).print("Busiest threads and streams")


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f}"
