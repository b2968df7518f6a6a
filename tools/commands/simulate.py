"""`crossrank simulate`: the time of the windows of a recording, here or on another machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from crossrank.comm import Locality
from crossrank.errors import CrossrankError
from crossrank.tools.commands.converting import (
    add_growing,
    complain_of_ranks,
    find_traces,
    grow,
    growth_json,
    mixed_runs,
    print_growth,
)
from crossrank.tools.commands.options import add_shared, complain, fleet_of, output_file
from crossrank.tools.graph.chakra.chakra_graph import Options
from crossrank.tools.graph.chakra.convert_ranks import (
    ConvertedRank,
    Grown,
    convert_ranks,
    disagreements,
)
from crossrank.tools.graph.chakra.simulate import Cost, RankGraph, Simulation, Transfer, simulate
from crossrank.tools.graph.chakra.write import chakra_name
from crossrank.tools.graph.linking.window_files import Inputs
from crossrank.tools.job.sources import open_job
from crossrank.tools.output.console import print_fact, print_json
from crossrank.tools.output.simulation import (
    print_beside,
    print_leave_one_out,
    print_network,
    print_simulation,
    write_timeline,
)
from crossrank.tools.parallel import Fleet
from crossrank.tools.predict.astra_sim import AstraRun, run_astra_sim
from crossrank.tools.predict.fit import MeasuredKind, fit_network, leave_one_out, measured_kinds
from crossrank.tools.predict.network import ALGORITHMS, Algorithm, Link, Network, bus_bytes, link_of

_FIGURES = ("makespan_ns", "measured_ns", "by_clocks", "error", "critical_ns", "waiting_ns", "joined", "alone")
"""Fields of a simulation in `--json`, besides busy times."""
T = TypeVar("T")


class SimulateCommand:
    """Simulate the windows of a recording: when each operation runs if only its dependencies delay it, how long the
    window takes, and why. A communication takes its measured time, or the time of a modelled network (--network,
    --intra, --inter). --compute scales computation. --grow-to N simulates the job with N ranks. Exit code 1: a rank
    failed, lost part of a file or matched less than --min-match, or the ranks made different collectives or are from
    different runs."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        meaning = "a recording, a folder of traces, the two files of one rank, or linked traces"
        parser.add_argument("recording", nargs="+", help=meaning)
        add = parser.add_argument_group("another machine").add_argument
        meaning = (
            "measured: use measured times (default); fitted: use latency and bandwidth per operation, fitted to the "
            "collectives of the recording (default with --grow-to N)"
        )
        add("--network", choices=("measured", "fitted"), help=meaning)
        meaning = "bus bandwidth, and latency per round, inside a node: 300GB/s,2us"
        add("--intra", type=_link, metavar="RATE[,LATENCY]", help=meaning)
        add("--inter", type=_link, metavar="RATE[,LATENCY]", help="the same between nodes: 400Gbps,8us")
        meaning = "ranks per node (default: groups stay inside a node or cross nodes as recorded)"
        add("--per-node", type=_positive(int), metavar="N", help=meaning)
        meaning = "algorithm of collectives, which sets the number of rounds (default ring)"
        add("--algorithm", choices=ALGORITHMS, help=meaning)
        meaning = "multiply the time of computation on GPUs by FACTOR; in a job without GPUs, of operations (default 1)"
        add("--compute", type=_positive(float), default=1.0, metavar="FACTOR", help=meaning)
        meaning = "predict each kind of collective from the others, and print the error"
        parser.add_argument("--leave-one-out", action="store_true", help=meaning)
        meaning = "also run ASTRA-sim's analytical backend, and print both results (default BINARY: variable ASTRA_SIM)"
        parser.add_argument(
            "--astra-sim", nargs="?", const=os.environ.get("ASTRA_SIM", ""), metavar="BINARY", help=meaning
        )
        meaning = "write the simulation as a trace for ui.perfetto.dev (.json or .json.gz)"
        parser.add_argument("--timeline", metavar="FILE", help=meaning)
        add_growing(parser)
        add_shared(parser, "ranks", "min-match", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.timeline is not None:
            _refuse_timeline(arguments.timeline)
        if arguments.astra_sim == "":
            raise CrossrankError(
                "--astra-sim needs the path of AstraSim_Analytical_Congestion_Unaware; give it, or set ASTRA_SIM"
            )
        if arguments.astra_sim is not None and arguments.ranks is not None:
            raise CrossrankError("--astra-sim simulates all ranks of a job; remove --ranks")
        if arguments.astra_sim is not None and arguments.compute != 1:
            raise CrossrankError("--astra-sim uses measured computation; remove --compute")
        fleet = fleet_of(arguments)
        network, kinds = _network(arguments, fleet)
        predicted = leave_one_out(kinds, arguments.algorithm or "ring") if arguments.leave_one_out else []
        inputs = find_traces(arguments)
        grown = grow(inputs, arguments, Options(), fleet)
        results = convert_ranks(inputs.pairs, None, Options(), fleet, keep_graph=True, grown=grown)
        good = [result for result in results if result.error is None]
        recorded = good if grown is None else grown.recorded
        differ = [*mixed_runs(recorded), *disagreements(recorded)]
        cost = None if network is None else _cost(network, arguments.per_node)
        simulations = _simulate(good, cost, arguments)
        beside = (
            _astra_sim(arguments, inputs, grown, network, fleet) if arguments.astra_sim is not None and good else []
        )
        failed = [one for one in beside if one.why or one.finished < one.ranks]
        if arguments.json:
            print_json(_answer(simulations, network, predicted, grown, beside, differ, inputs.problems))
        else:
            if grown is not None:
                print_growth(grown)
                if arguments.per_node is None:
                    print_fact("", "groups are inside a node, or cross nodes, as recorded; --per-node N changes this")
            if network is not None:
                print_network(network)
            changed = cost is not None or arguments.compute != 1 or grown is not None
            for window, simulation in simulations.items():
                print_simulation(window, simulation, changed=changed)
            if grown is not None and cost is None:
                print(f"\ncommunication takes the time measured on {grown.growth.recorded.size} ranks")
            if beside:
                print_beside(simulations, beside)
            if arguments.leave_one_out:
                print_leave_one_out(predicted)
        complain(*inputs.problems, *inputs.notes, *differ)
        complain(*(f"ASTRA-sim, window {one.window}: {one.why or 'not all ranks finished'}" for one in failed))
        is_whole = complain_of_ranks(results, arguments.min_match)
        if not good:
            return 2
        return 1 if inputs.problems or differ or failed or not is_whole else 0


def _link(text: str) -> Link:
    try:
        return link_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(kind: Callable[[str], T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            number = kind(text)
        except ValueError:
            number = kind("0")
        if not 0 < float(str(number)) < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return number

    return parse


def _measured(paths: Sequence[str], fleet: Fleet) -> list[MeasuredKind]:
    """Return the measured times of the collectives of the recording."""
    return measured_kinds(open_job(paths, fleet))


def _network(arguments: argparse.Namespace, fleet: Fleet) -> tuple[Network | None, list[MeasuredKind]]:
    """Return the modelled network, None with measured times; and the times of collectives, if an option needs them."""
    algorithm: Algorithm = arguments.algorithm or "ring"
    given: dict[Locality, Link | None] = {"intra_node": arguments.intra, "cross_node": arguments.inter}
    links = {locality: link for locality, link in given.items() if link is not None}
    if links and arguments.network is not None:
        raise CrossrankError(
            f"--network {arguments.network} sets the time of communications; remove --intra and --inter"
        )
    grows = arguments.grow_to is not None and arguments.network is None and not links
    recorded = arguments.network == "fitted" or grows
    kinds = _measured(arguments.recording, fleet) if recorded or arguments.leave_one_out else []
    if links:
        return Network(links=links, algorithm=algorithm), kinds
    if recorded:
        network = fit_network(kinds, algorithm)
        if not network.links:
            raise CrossrankError(
                f"{arguments.recording[0]}: no collective of several ranks has both a size and a time, so its "
                "network is unknown; give --intra and --inter, or --network measured"
            )
        return network, kinds
    if arguments.per_node is not None or (arguments.algorithm is not None and not arguments.leave_one_out):
        raise CrossrankError(
            "--per-node and --algorithm need a modelled network: give --intra and --inter, or --network fitted"
        )
    return None, kinds


def _cost(network: Network, per_node: int | None) -> Cost:
    """Return a function that gives the time of a communication on the network."""

    def cost(one: Transfer) -> float | None:
        locality, nodes = one.locality, None
        if per_node is not None:
            nodes = len({rank // per_node for rank in one.members})
            locality = "intra_node" if nodes == 1 else "cross_node"
        size = len(one.members)
        return network.duration_ns(one.op, size, bus_bytes(one.op, size, one.bytes), locality, nodes)

    return cost


def _refuse_timeline(timeline: str) -> None:
    """Check the output file before the work."""
    if not timeline.endswith((".json", ".json.gz")):
        raise CrossrankError(f"{timeline}: a timeline must end in .json or .json.gz")
    if os.path.isdir(timeline) or not os.path.isdir(os.path.dirname(timeline) or "."):
        raise CrossrankError(f"{timeline}: cannot be written; choose a file in an existing folder")


def _simulate(
    results: Sequence[ConvertedRank], cost: Cost | None, arguments: argparse.Namespace
) -> dict[int, Simulation]:
    """Simulate each window, and write its timeline. Timelines of later windows are named w2.NAME and so on."""
    windows: dict[int, list[RankGraph]] = {}
    for result in results:
        if result.converted.graph is not None:
            windows.setdefault(result.window, []).append(result.converted.graph)
    simulations = {window: simulate(graphs, cost, arguments.compute) for window, graphs in sorted(windows.items())}
    if arguments.timeline is None:
        return simulations
    for window, simulation in simulations.items():
        path = Path(arguments.timeline)
        path = path if window == 1 else path.with_name(f"w{window}.{path.name}")
        with output_file(str(path)) as temporary:
            write_timeline(windows[window], simulation, temporary, path.name)
    return simulations


def _astra_sim(
    arguments: argparse.Namespace, inputs: Inputs, grown: Grown | None, network: Network | None, fleet: Fleet
) -> list[AstraRun]:
    """Run ASTRA-sim on each window."""
    with TemporaryDirectory(prefix="crossrank-") as folder:
        results = convert_ranks(inputs.pairs, folder, Options(lower=True), fleet, grown=grown)
        found = []
        for window in sorted({result.window for result in results}):
            prefix = Path(folder, chakra_name(0, window).removesuffix(".0.et"))
            ranks = len(list(prefix.parent.glob(f"{prefix.name}.*.et")))
            found.append(run_astra_sim(arguments.astra_sim, prefix, window, ranks, network, arguments.per_node))
    return found


def _answer(
    simulations: Mapping[int, Simulation],
    network: Network | None,
    predicted: Sequence[MeasuredKind],
    grown: Grown | None,
    beside: Sequence[AstraRun],
    differ: Sequence[str],
    problems: Sequence[str],
) -> dict[str, object]:
    """Return what `--json` prints."""
    return {
        "simulations": [_figures(window, simulation) for window, simulation in simulations.items()],
        "network": None
        if network is None
        else {
            "algorithm": network.algorithm,
            "links": {locality: _link_json(link) for locality, link in network.links.items()},
            "operations": [
                {"op": op, "locality": locality} | _link_json(link)
                for (op, locality), (link, _) in network.of_operations.items()
            ],
        },
        "leave_one_out": [
            {"op": one.op, "ranks": one.size, "locality": one.locality, "bytes": one.bytes}
            | {"collectives": one.count, "measured_ns": one.time_ns, "predicted_ns": one.predicted_ns}
            for one in predicted
        ],
        "grown": growth_json(grown),
        "astra_sim": [asdict(one) for one in beside],
        "disagreements": list(differ),
        "problems": list(problems),
    }


def _link_json(link: Link) -> dict[str, object]:
    return {"gb_per_s": link.rate if link.rate != float("inf") else None, "latency_us": link.latency_ns / 1000}


def _figures(window: int, simulation: Simulation) -> dict[str, object]:
    busy = [{"rank": rank, "runs_on": runs_on, "ns": ns} for (rank, runs_on), ns in simulation.busy_ns.items()]
    figures = {name: getattr(simulation, name) for name in (*_FIGURES, "measured_ops")}
    return {"window": window, "busy_ns": busy} | figures
