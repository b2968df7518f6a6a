"""What `crossrank convert --simulate` plays and prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crossrank.errors import CrossrankError
from crossrank.tools.graph.chakra.convert_ranks import ConvertedRank
from crossrank.tools.graph.chakra.simulate import RankGraph, Simulation, simulate
from crossrank.tools.graph.chakra.simulation_timeline import write_timeline
from crossrank.tools.output.console import print_table

_SHOWN = 12
_FIGURES = (
    "makespan_ns",
    "measured_ns",
    "by_clocks",
    "error",
    "critical_ns",
    "waiting_ns",
    "joined",
    "alone",
)


def simulate_windows(results: Sequence[ConvertedRank], timeline: str | None) -> list[tuple[int, Simulation]]:
    """The ranks of every window, played together; written to `timeline` as well, later windows beside it."""
    windows: dict[int, list[RankGraph]] = {}
    for result in results:
        if result.converted.graph is not None:
            windows.setdefault(result.window, []).append(result.converted.graph)
    simulations = []
    for window, graphs in sorted(windows.items()):
        simulation = simulate(graphs)
        simulations.append((window, simulation))
        if timeline is not None:
            path = Path(timeline)
            path = path if window == 1 else path.with_name(f"w{window}.{path.name}")
            try:
                write_timeline(graphs, simulation, path)
            except OSError as error:
                raise CrossrankError(f"{path}: cannot be written ({error.strerror}); name another file") from error
    return simulations


def as_builtins(window: int, simulation: Simulation) -> dict[str, object]:
    """The figures of a simulation for `--json`, without the times of every node."""
    busy = [{"rank": rank, "lane": lane, "ns": ns} for (rank, lane), ns in simulation.busy_ns.items()]
    return {"window": window, "busy_ns": busy} | {name: getattr(simulation, name) for name in _FIGURES}


def print_simulation(window: int, simulation: Simulation) -> None:
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
    print_table(
        "Busiest threads and streams",
        ("rank", "thread or stream", "#busy ms", "#of makespan", "#rank waits ms"),
        [
            (rank, lane, _ms(busy), f"{busy / max(1, simulation.makespan_ns):.1%}", _ms(simulation.waiting_ns[rank]))
            for (rank, lane), busy in sorted(simulation.busy_ns.items(), key=lambda item: -item[1])
        ],
        most=_SHOWN,
    )


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f}"
