"""`crossrank convert`: Chakra traces for simulators such as ASTRA-sim."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from crossrank.atomic_file import join
from crossrank.errors import CrossrankError
from crossrank.recording import is_url
from crossrank.text import percent
from crossrank.tools.commands.converting import (
    add_growing,
    complain_of_ranks,
    find_traces,
    grow,
    growth_json,
    print_growth,
)
from crossrank.tools.commands.options import add_shared, complain, fleet_of, output_folder
from crossrank.tools.graph.chakra.chakra_graph import Options
from crossrank.tools.graph.chakra.convert_ranks import (
    GROUPS,
    ConvertedRank,
    convert_ranks,
    disagreements,
    late_starts,
    older_files,
)
from crossrank.tools.output.console import Columns, print_counts, print_json, table_of

_SHOWN = 16


class ConvertCommand:
    """Write one Chakra trace per rank (chakra.RANK.et) and the communicator groups (comm_groups.json) from a
    recording, in a form that ASTRA-sim's feeders accept; with --lower astra-sim only of what ASTRA-sim runs; with
    --ranks N of the job as it would be with so many. Links first, in memory. Exit code 1: a rank failed or lost part of
    a file, matched less than --min-match, or the ranks of a group disagree on their collectives."""

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
        meaning = (
            "with --lower: for its roofline, which needs num_ops of every computation on a GPU; what has none is "
            "written as one of the host, which keeps its measured time"
        )
        add("--roofline", action="store_true", help=meaning)
        meaning = "write the process groups as a metadata node too, as Chakra's converter does: ASTRA-sim stops at it"
        add("--group-node", action="store_true", help=meaning)
        add("--strict", action="store_true", help="refuse dependencies that run in a cycle")
        add("--keep-linked", action="store_true", help="write rank-N.linked.json.zst as well")
        meaning = "with --ranks N: write files that are equal once, with hard links; none then says its rank"
        add("--dedupe", action="store_true", help=meaning)
        add_growing(parser)
        add_shared(parser, "min-match", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        inputs = find_traces(arguments)
        options = Options(
            deps=arguments.deps,
            nodes=arguments.nodes,
            pauses=not arguments.no_pauses,
            lower=arguments.lower == "astra-sim",
            roofline=arguments.roofline,
            group_node=arguments.group_node,
            strict=arguments.strict,
        )
        if options.roofline and not options.lower:
            raise CrossrankError("--roofline is about what ASTRA-sim runs; give --lower astra-sim with it")
        fleet = fleet_of(arguments)
        grown = grow(inputs, arguments, options, fleet)
        if arguments.dedupe and grown is None:
            raise CrossrankError("--dedupe is for ranks that do the same; give --ranks N with it")
        if arguments.dedupe and is_url(arguments.output or arguments.recording[0]):
            raise CrossrankError("--dedupe makes hard links, which are of local files; name a local folder with -o")
        folder = output_folder(arguments.recording, arguments.output)
        results = convert_ranks(
            inputs.pairs,
            folder,
            options,
            fleet,
            keep_linked=arguments.keep_linked,
            grown=grown,
            dedupe=arguments.dedupe,
        )
        good = [result for result in results if result.error is None]
        _, apart = late_starts(good if grown is None else grown.recorded)
        differ = disagreements(good if grown is None else grown.recorded)
        if arguments.json:
            shown = [replace(one, converted=replace(one.converted, communications=[])) for one in results]
            print_json(
                {
                    "ranks": shown,
                    "grown": growth_json(grown),
                    "groups": join(folder, GROUPS) if good else None,
                    "windows_by_no_clock": apart,
                    "disagreements": differ,
                    "problems": [problem.text for problem in inputs.problems],
                }
            )
        elif good:
            _print(good, folder)
            if grown is not None:
                print_growth(grown)
            for window in apart:
                print(f"\nclocks     of the ranks are further apart than window {window} is long; all begin at 0")
        written = (
            grown.growth.written.size if grown is not None else 1 + max((one.rank or 0 for one in good), default=0)
        )
        if older := older_files(folder, written):
            complain(
                f"{folder}: has {older} Chakra trace(s) of other ranks too, which a simulator would count; remove them"
            )
        complain(*(problem.text for problem in inputs.problems), *inputs.notes, *differ)
        is_whole = complain_of_ranks(results, arguments.min_match)
        if not good:
            return 2
        return 1 if inputs.problems or differ or not is_whole else 0


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
