"""Runs ASTRA-sim's analytical backend on converted traces, with the network of a prediction.

The network has one dimension of links, or two if the ranks of a node are known: inside a node and between nodes.
Without a network, ASTRA-sim plays each communication for its measured time. Its exit code is 0 even if ranks do not
finish, so crossrank counts the finished ranks.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crossrank.errors import CrossrankError
from crossrank.tools.predict.network import Algorithm, Link, Network

_IMPLEMENTATIONS: dict[Algorithm, dict[str, str]] = {
    "ring": dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), "ring") | {"all-to-all": "direct1"},
    "tree": dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), "halvingDoubling")
    | {"all-to-all": "direct1"},
    "direct": dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter", "all-to-all"), "direct"),
}
"""Algorithm -> ASTRA-sim's name for each collective. `direct1` exchanges with one rank after the other."""
_ASTRA_GB = 1e9 / 2**30
"""crossrank's GB (1e9 B) in ASTRA-sim's (2^30 B)."""
_UNKNOWN_RATE = 1e6
"""GB/s of a link whose rate is unknown."""
_ENDPOINT_NS = 10
_FINISHED = re.compile(r"finished, (\d+) cycles")
_TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class AstraRun:
    """ASTRA-sim's result for a window."""

    window: int
    ranks: int
    finished: int
    last_ns: int
    """When the last of the finished ranks ended. A cycle is 1 ns."""
    network: str
    """The simulated network: the links of each dimension, the innermost first."""
    why: str = ""
    """Why ASTRA-sim stopped, if it did."""


def run_astra_sim(
    binary: str, prefix: Path, window: int, ranks: int, network: Network | None, per_node: int | None
) -> AstraRun:
    """Run ASTRA-sim on the files `prefix`.RANK.et. Write its configuration next to them and to comm_groups.json.

    Raise `CrossrankError` if it cannot run. If it runs and stops, the result has its message."""
    folder = prefix.parent
    dimensions = _find_dimensions(network, ranks, per_node)
    algorithm = network.algorithm if network is not None else "ring"
    # Its links have no congestion: the links of a rank that sends to all at once share the rank's rate. A message
    # through a switch uses two links.
    direct = algorithm == "direct"
    topology, hops = ("FullyConnected", 1) if direct else ("Switch", 2)
    system = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": _ENDPOINT_NS,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 1,
        **{f"{op}-implementation": [how] * len(dimensions) for op, how in _IMPLEMENTATIONS[algorithm].items()},
        "collective-optimization": "localBWAware",
        "local-mem-bw": 1600,
        "boost-mode": 0,
        "roofline-enabled": 0,
        "peak-perf": 900,
        "replay-only": int(network is None),
    }
    (folder / "system.json").write_text(json.dumps(system))
    (folder / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
    listed: dict[str, Sequence[object]] = {
        "topology": [topology] * len(dimensions),
        "npus_count": [count for count, _ in dimensions],
        "bandwidth": [
            min(link.rate, _UNKNOWN_RATE) * _ASTRA_GB / (max(1, count - 1) if direct else 1)
            for count, link in dimensions
        ],
        "latency": [link.latency_ns / hops for _, link in dimensions],
    }
    (folder / "network.yml").write_text(
        "".join(f"{name}: [ {_join_values(values)} ]\n" for name, values in listed.items())
    )
    command = [
        binary,
        f"--workload-configuration={prefix}",
        f"--comm-group-configuration={folder / 'comm_groups.json'}",
        f"--system-configuration={folder / 'system.json'}",
        f"--network-configuration={folder / 'network.yml'}",
        f"--remote-memory-configuration={folder / 'memory.json'}",
        f"--logging-folder={folder / 'log'}",
    ]
    given = "as measured" if network is None else " and ".join(f"{count} x {link}" for count, link in dimensions)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise CrossrankError(
            f"{binary}: cannot be run ({error.strerror}); give the path of AstraSim_Analytical_Congestion_Unaware"
        ) from error
    except subprocess.TimeoutExpired:
        return AstraRun(window=window, ranks=ranks, finished=0, last_ns=0, network=given, why=f"ran for {_TIMEOUT_S} s")
    cycles = [int(found) for found in _FINISHED.findall((done.stdout + done.stderr).decode(errors="replace"))]
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode and not (done.stdout or done.stderr):
        raise CrossrankError(
            f"{binary}: ended with {done.returncode} without a message; give the path of "
            "AstraSim_Analytical_Congestion_Unaware"
        )
    return AstraRun(
        window=window,
        ranks=ranks,
        finished=len(cycles),
        last_ns=max(cycles, default=0),
        network=given,
        why=f"ended with {done.returncode}: {last[-200:] or 'it said nothing'}" if done.returncode else "",
    )


def _find_dimensions(network: Network | None, ranks: int, per_node: int | None) -> list[tuple[int, Link]]:
    """Return the number of ranks along each dimension of the network and its links, the innermost first."""
    if network is None:
        return [(ranks, Link(rate=50.0))]
    intra, inter = network.link("intra_node"), network.link("cross_node")
    if per_node is not None and 1 < per_node < ranks and not ranks % per_node and intra and inter:
        return [(per_node, intra), (ranks // per_node, inter)]
    link = (intra if per_node is not None and per_node >= ranks else inter) or intra or inter
    if link is None:
        raise CrossrankError("the links of the network are unknown; give them with --intra and --inter")
    return [(ranks, link)]


def _join_values(values: Sequence[object]) -> str:
    return ", ".join(f"{one:.6f}" if isinstance(one, float) else str(one) for one in values)
