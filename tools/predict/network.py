"""How long communication takes on a network that is described by two numbers for each locality.

The alpha-beta model (Hockney 1994; Thakur, Rabenseifner, Gropp 2005 for collectives): a collective takes

    steps * latency + bus bytes / rate

where the steps are the messages that follow one another in its algorithm, and bus bytes = S * bus factor of nccl-tests,
what the busiest link carries; so the rate is a bus bandwidth, as `crossrank bandwidth` shows it. A group has the
locality of its slowest link. Nothing shares a link with anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, isinf, log2
from typing import Literal, get_args

from crossrank.comm import OPERATIONS, Locality, crosses_nodes
from crossrank.tools.analysis.bandwidth import gb_per_s

Algorithm = Literal["ring", "tree", "direct"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_THERE_AND_BACK = ("all_reduce", "barrier")


def _depth(n: int) -> int:
    return ceil(log2(n)) if n > 1 else 0


_STEPS: dict[Algorithm, Callable[[int], int]] = {"ring": lambda n: n - 1, "tree": _depth, "direct": lambda n: 1}
"""Algorithm -> messages that follow one another until each of n members has its part. A ring passes everything around;
a tree halves (recursive doubling, binomial trees); direct sends to all at once."""
_CROSSING: dict[Algorithm, Callable[[int, int], float]] = {
    "ring": lambda n, nodes: nodes / n,
    "tree": lambda n, nodes: _depth(nodes) / _depth(n),
    "direct": lambda n, nodes: 1.0,
}
"""Algorithm -> share of its steps that cross nodes, of a group of n: what is passed around a ring leaves each node once
(as NCCL's tuning counts it), and a tree halves inside nodes first."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects two ranks."""

    rate: float
    """Bytes/ns, which is GB/s of 1e9 bytes."""
    latency_ns: float = 0.0

    def __str__(self) -> str:
        rate = "rate not told by the sizes there" if isinf(self.rate) else f"{self.rate:.4g} GB/s"
        return f"{rate}, {self.latency_ns / 1000:.4g} us"


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links by locality, and by operation where they were measured for it."""

    links: Mapping[Locality, Link]
    algorithm: Algorithm = "ring"
    of_operations: Mapping[tuple[str, Locality], tuple[Link, Algorithm]] = field(default_factory=dict)
    is_measured: bool = False
    """The links were found from times."""

    def duration_ns(
        self, op: str, size: int, bus_bytes: float, locality: Locality, nodes: int | None = None
    ) -> float | None:
        """How long `op` takes in a group of `size` on so many nodes; None where nothing is known of its links.

        Where the nodes are known, the steps that stay inside one have the latency of `intra_node`; a measured latency
        is the mean of all steps already."""
        op = "send" if op == "recv" else op
        measured = self.of_operations.get((op, locality))
        link, algorithm = measured if measured is not None else (self.link(locality), self.algorithm)
        if link is None or op not in OPERATIONS:
            return None
        latency, inside = link.latency_ns, self.link("intra_node")
        if nodes is not None and nodes > 1 and inside is not None and not self.is_measured:
            crossing = _CROSSING[algorithm](size, nodes)
            latency = crossing * latency + (1 - crossing) * inside.latency_ns
        return steps(op, size, algorithm) * latency + bus_bytes / link.rate

    def link(self, locality: Locality) -> Link | None:
        """Of a locality; that of the nearest kind where it has none of its own, and of an unknown one the slowest."""
        across = crosses_nodes(locality)
        return self.links.get(locality) or next(
            (link for other, link in self.links.items() if crosses_nodes(other) == across), None
        )


def steps(op: str, size: int, algorithm: Algorithm) -> int:
    """Messages that follow one another.

    >>> [steps("all_reduce", 8, algorithm) for algorithm in ALGORITHMS]
    [14, 6, 2]
    """
    if op in ("send", "recv"):
        return 1
    if size < 2:
        return 0
    # Every member sends to every other one: a tree does it in turns, as a ring.
    one_way = _STEPS["ring" if (op, algorithm) == ("all_to_all", "tree") else algorithm](size)
    return 2 * one_way if op in _THERE_AND_BACK else one_way


def bus_bytes(op: str, size: int, payload: int) -> float:
    """Bytes on the busiest link of a group of `size`, with S of nccl-tests.

    >>> bus_bytes("all_reduce", 4, 1000), bus_bytes("barrier", 4, 0)
    (1500.0, 0.0)
    """
    row = OPERATIONS.get(op)
    if row is None or row.bus_factor is None or (size < 2 and not row.p2p):
        return 0.0
    return row.bus_factor(size) * payload


_LATENCY = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>ns|us|µs|ms)")
_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6}


def link_of(text: str) -> Link:
    """A link from `RATE[,LATENCY]`. Raises `ValueError` for anything else.

    >>> str(link_of("300GB/s,2us")), str(link_of("400Gbps"))
    ('300 GB/s, 2 us', '50 GB/s, 0 us')
    """
    first, comma, second = text.partition(",")
    rate, latency = gb_per_s(first), _LATENCY.fullmatch(second.strip())
    if not rate or bool(comma) != bool(latency):
        raise ValueError(f"{text!r} is not RATE[,LATENCY], for example 300GB/s,2us or 400Gbps")
    return Link(rate=rate, latency_ns=float(latency["number"]) * _NS[latency["unit"]] if latency else 0.0)
