"""`crossrank convert`: Chakra traces for simulators such as ASTRA-sim."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from crossrank.atomic_file import join
from crossrank.errors import CrossrankError
from crossrank.recording import is_url
from crossrank.text import percent, plural
from crossrank.tools.commands.converting import (
    add_growing,
    complain_of_ranks,
    find_traces,
    grow,
    growth_json,
    mixed_runs,
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
from crossrank.tools.output.console import Columns, print_counts, print_fact, print_json, table_of

_SHOWN = 16


class ConvertCommand:
    """Write one Chakra trace per rank (chakra.RANK.et) and the process groups (comm_groups.json) of a recording, which
    ASTRA-sim can read. --lower astra-sim writes only what ASTRA-sim runs. --grow-to N writes the job for N ranks. Links
    the traces first, in memory. Exit code 1: a rank failed, lost part of a file or matched less than --min-match, or
    the ranks made different collectives or are from different runs."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        meaning = "a recording, a folder of traces, the two files of one rank, or linked traces"
        add("recording", nargs="+", help=meaning)
        add("-o", "--output", metavar="DIR", help="folder for the traces (default: the folder of the input)")
        meaning = (
            "all: put every dependency into data_deps (default); data: put those that are only the order of a thread "
            "into ctrl_deps"
        )
        add("--deps", choices=("all", "data"), default="all", help=meaning)
        meaning = (
            "gpu: write only GPU and communication nodes, in the order that the host imposes, with no time for the "
            "host; ASTRA-sim reports overlap only for such traces"
        )
        add("--nodes", choices=("all", "gpu"), default="all", help=meaning)
        meaning = "skip the time between the operations of a thread (default: write a node for each such pause)"
        add("--no-pauses", action="store_true", help=meaning)
        meaning = (
            "write only what this simulator runs: barrier as all_reduce, gather as all_gather, scatter and reduce as "
            "reduce_scatter, a collective of one rank as computation; shorten nodes that overlap on a rank, because "
            "ASTRA-sim runs these one after the other"
        )
        add("--lower", choices=("astra-sim",), help=meaning)
        meaning = (
            "with --lower: prepare for ASTRA-sim's roofline, which needs num_ops: GPU nodes without num_ops become "
            "host nodes with their measured time"
        )
        add("--roofline", action="store_true", help=meaning)
        meaning = "also write the process groups as a metadata node, as Chakra's converter does; ASTRA-sim refuses it"
        add("--group-node", action="store_true", help=meaning)
        add("--strict", action="store_true", help="fail if dependencies form a cycle")
        add("--keep-linked", action="store_true", help="also write rank-N.linked.json.zst")
        meaning = "with --grow-to N: write equal files only once, as hard links; their metadata then has no rank"
        add("--dedupe", action="store_true", help=meaning)
        add_growing(parser)
        add_shared(parser, "ranks", "min-match", "json")

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
            raise CrossrankError("--roofline needs --lower astra-sim")
        fleet = fleet_of(arguments)
        grown = grow(inputs, arguments, options, fleet)
        if arguments.dedupe and grown is None:
            raise CrossrankError("--dedupe needs --grow-to N")
        if arguments.dedupe and is_url(arguments.output or arguments.recording[0]):
            raise CrossrankError("--dedupe makes hard links, so it needs a local folder: give one with -o")
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
        recorded = good if grown is None else grown.recorded
        _, apart = late_starts(recorded)
        differ = [*mixed_runs(recorded), *disagreements(recorded)]
        if arguments.json:
            shown = [replace(one, converted=replace(one.converted, communications=[])) for one in results]
            print_json(
                {
                    "ranks": shown,
                    "grown": growth_json(grown),
                    "groups": join(folder, GROUPS) if good else None,
                    "windows_by_no_clock": apart,
                    "disagreements": differ,
                    "problems": inputs.problems,
                }
            )
        elif good:
            _print(good, folder)
            if grown is not None:
                print_growth(grown)
            for window in apart:
                print_fact("clocks", f"differ by more than window {window} is long, so all ranks start at 0")
        written = (
            grown.growth.written.size if grown is not None else 1 + max((one.rank or 0 for one in good), default=0)
        )
        if older := older_files(folder, written):
            complain(
                f"{folder}: also has {older} Chakra trace(s) of other ranks, which a simulator would read; remove them"
            )
        complain(*inputs.problems, *inputs.notes, *differ)
        is_whole = complain_of_ranks(results, arguments.min_match)
        if not good:
            return 2
        return 1 if inputs.problems or differ or not is_whole else 0


def _print(results: Sequence[ConvertedRank], folder: str) -> None:
    ranks, windows = (plural(len({getattr(one, name) for one in results}), name) for name in ("rank", "window"))
    print_fact("converted", f"{ranks} and {windows}, with {sum(map(_nodes, results)):,} nodes")
    print_fact("wrote", f"{folder}/*.et and {GROUPS}; next: crossrank check, or a simulator")
    table_of(results, _COLUMNS, limit=_SHOWN).print("Chakra traces")
    for name, title in (("dependencies", "Dependencies, by kind"), ("lowered", "Lowered to what ASTRA-sim runs")):
        total = sum((Counter(getattr(result.converted, name)) for result in results), Counter[str]())
        print_counts(title, total.most_common())
    if gpu_ns := sum(result.converted.gpu_ns for result in results):
        share = sum(result.converted.counted_ns for result in results) / gpu_ns
        print()
        print_fact(
            "num_ops",
            f"FLOP counts cover {percent(share)} of GPU compute time (matrix products, convolutions, attention); a "
            "roofline needs them for every node",
        )


_HOST, _PAUSE, _GPU = "computation on the host", "pause of the host", "computation on a GPU"


def _nodes(result: ConvertedRank, *kinds: str) -> int:
    return sum(result.converted.nodes.get(kind, 0) for kind in kinds or result.converted.nodes)


_COLUMNS: Columns[ConvertedRank] = (
    ("rank", lambda result: "-" if result.rank is None else result.rank),
    ("window", lambda result: result.window),
    ("#nodes", lambda result: f"{_nodes(result):,}"),
    ("#on the\nhost", lambda result: f"{_nodes(result, _HOST):,}"),
    ("#pauses of\nthe host", lambda result: f"{_nodes(result, _PAUSE):,}"),
    ("#on GPUs", lambda result: f"{_nodes(result, _GPU):,}"),
    ("#commu-\nnications", lambda result: f"{_nodes(result) - _nodes(result, _HOST, _PAUSE, _GPU):,}"),
    ("#depen-\ndencies", lambda result: f"{sum(result.converted.dependencies.values()):,}"),
    ("#redundant\nones dropped", lambda result: f"{result.converted.implied:,}"),
    ("#size", lambda result: f"{result.size / 1e6:.2f} MB"),
)
