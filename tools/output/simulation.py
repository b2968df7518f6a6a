"""The output of a simulation: its time, critical path and prediction error on the terminal, and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from crossrank.atomic_file import compressed
from crossrank.text import amount, percent, plural
from crossrank.tools.graph.chakra.chakra_graph import PAUSE
from crossrank.tools.graph.chakra.simulate import RankGraph, Simulation
from crossrank.tools.output.console import Columns, print_fact, table_of
from crossrank.tools.predict.astra_sim import AstraRun
from crossrank.tools.predict.fit import MeasuredKind
from crossrank.tools.predict.network import Network

_BUSIEST = 12
_SHOWN = 24


def print_simulation(window: int, simulation: Simulation, *, changed: bool) -> None:
    """Print makespan, critical path, and busy times. `changed`: the simulated job differs from the measured one."""
    ratio = f"{simulation.makespan_ns / simulation.measured_ns:.3f} x" if simulation.measured_ns else "-"
    print(f"\nSimulation of window {window}")
    print_fact("simulated", f"{_ms(simulation.makespan_ns)} ms from the first start to the last end of all ranks")
    compared = ratio if changed else percent(simulation.error, signed=True)
    print_fact("measured", f"{_ms(simulation.measured_ns)} ms; simulated {'is ' if changed else ''}{compared}")
    matched = f"{plural(simulation.joined, 'communication')} across ranks, {simulation.alone:,} without a match"
    print_fact("matched", matched)
    if not simulation.by_clocks:
        print_fact("clocks", "differ by more than the window is long, so all ranks start at 0")
    for op, count in simulation.measured_ops.items():
        print_fact("unchanged", f"{plural(count, 'call')} of {op} keep their measured time: no network model")
    print("\nWhere the simulated time goes (the critical path)")
    for category, spent in simulation.critical_ns.items():
        print(f"  {_ms(spent):>12} ms  {category}")
    whole = simulation.makespan_ns
    columns: Columns[tuple[tuple[int, str], int]] = (
        ("rank", lambda one: one[0][0]),
        ("thread or stream", lambda one: one[0][1]),
        ("#busy ms", lambda one: _ms(one[1])),
        ("#share of time", lambda one: percent(one[1] / whole if whole else None)),
    )
    busiest = sorted(simulation.busy_ns.items(), key=lambda one: -one[1])
    table_of(busiest, columns, limit=_BUSIEST).print("Busiest threads and streams")
    waits: Columns[tuple[int, int]] = (("rank", lambda one: one[0]), ("#waiting ms", lambda one: _ms(one[1])))
    longest = sorted(simulation.waiting_ns.items(), key=lambda one: -one[1])
    table_of(longest, waits, limit=_BUSIEST).print("Waiting time of each rank in communication")


def print_beside(simulations: Mapping[int, Simulation], astra: Sequence[AstraRun]) -> None:
    columns: Columns[AstraRun] = (
        ("window", lambda one: one.window),
        ("#measured ms", lambda one: _ms(simulations[one.window].measured_ns)),
        ("#simulated ms", lambda one: _ms(simulations[one.window].makespan_ns)),
        ("#ASTRA-sim ms", lambda one: _ms(one.last_ns) if one.finished else "-"),
        ("#finished ranks", lambda one: f"{one.finished} of {one.ranks}"),
        ("its network", lambda one: one.network),
    )
    table_of(astra, columns, limit=_SHOWN).print("Comparison with ASTRA-sim")


def print_network(network: Network) -> None:
    print()
    print_fact("network", f"{network.algorithm}; bus bandwidth, and latency per round")
    for locality, link in network.links.items():
        print_fact("", f"{locality:<14} {link}")
    for (op, locality), (link, _) in network.of_operations.items():
        print_fact("", f"{locality:<14} {link}  ({op})")


def print_leave_one_out(predicted: Sequence[MeasuredKind]) -> None:
    """Print each kind of collective as predicted from all other kinds."""
    if not predicted:
        print("\nNo prediction: no collective has both a size and a time")
        return
    table_of(predicted, _PREDICTED, limit=_SHOWN).print("Prediction of each kind of collective from the others")
    errors = [abs(one.error) for one in predicted if one.error is not None]
    if errors:
        print(
            f"\nprediction error: median {percent(median(errors))}, max {percent(max(errors))} "
            f"({plural(len(errors), 'kind')} of collectives; {len(predicted) - len(errors)} without a prediction)"
        )


_PREDICTED: Columns[MeasuredKind] = (
    ("operation", lambda one: one.op),
    ("#ranks", lambda one: one.size),
    ("locality", lambda one: one.locality),
    ("#S", lambda one: amount(one.bytes)),
    ("#collectives", lambda one: f"{one.count:,}"),
    ("#measured us", lambda one: f"{one.time_ns / 1000:,.1f}"),
    ("#predicted us", lambda one: "-" if one.predicted_ns is None else f"{one.predicted_ns / 1000:,.1f}"),
    ("#error", lambda one: percent(one.error, signed=True)),
)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f}"


def write_timeline(graphs: Sequence[RankGraph], simulation: Simulation, path: Path, name: str) -> None:
    """Write a Chrome trace for ui.perfetto.dev: a process per rank, a track per thread and stream. Compressed if `name`
    ends in `.gz`."""
    with path.open("wb") as plain, compressed(plain, name) as file:
        file.write(b'{"displayTimeUnit":"ns","metadata":{"crossrank":"simulation"},"traceEvents":[')
        separator = b"\n"
        for graph in graphs:
            for event in _events(graph, simulation):
                file.write(separator + msgspec.json.encode(event))
                separator = b",\n"
        file.write(b"\n]}\n")


def _events(graph: RankGraph, simulation: Simulation) -> Iterator[dict[str, object]]:
    rank = graph.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    threads = {name: number for number, name in enumerate(dict.fromkeys(node.runs_on for node in graph.nodes))}
    for name, number in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
    for node, (begin, duration) in zip(graph.nodes, simulation.runs_ns[rank], strict=True):
        if node.category != PAUSE:
            measured = {"measured start us": node.start_ns / 1000, "measured us": node.duration_ns / 1000}
            where = {"name": node.name, "cat": node.category, "pid": rank, "tid": threads[node.runs_on]}
            yield {"ph": "X", **where, "ts": begin / 1000, "dur": duration / 1000, "args": measured}
