"""Duration of communication on a network with two numbers for each locality: latency and rate.

The alpha-beta model (Hockney 1994; Thakur, Rabenseifner, Gropp 2005 for collectives): a collective takes

    rounds * latency + bus bytes / rate

Rounds are the messages that follow one another in its algorithm. Bus bytes = S * bus factor of nccl-tests are the bytes
on the busiest link. So the rate is a bus bandwidth, as in `crossrank bandwidth`. A group has the locality of its
slowest link. Links are not shared with other traffic.
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
_TWO_WAY = ("all_reduce", "barrier")


def _depth(n: int) -> int:
    return ceil(log2(n)) if n > 1 else 0


_ONE_WAY_ROUNDS: dict[Algorithm, Callable[[int], int]] = {
    "ring": lambda n: n - 1,
    "tree": _depth,
    "direct": lambda n: 1,
}
"""Algorithm -> rounds until each of n members has its part. A ring passes everything around. A tree halves (recursive
doubling, binomial trees). direct sends to all at once."""
_CROSSING_SHARE: dict[Algorithm, Callable[[int, int], float]] = {
    "ring": lambda n, nodes: nodes / n,
    "tree": lambda n, nodes: _depth(nodes) / _depth(n),
    "direct": lambda n, nodes: 1.0,
}
"""Algorithm -> share of the rounds of a group of n that cross nodes. Data in a ring leaves each node once (as in NCCL's
tuning). A tree halves inside nodes first."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection of two ranks."""

    rate: float
    """Bytes/ns, which is GB/s of 1e9 bytes."""
    latency_ns: float = 0.0

    def __str__(self) -> str:
        rate = "rate unknown: too few sizes" if isinf(self.rate) else f"{self.rate:.4g} GB/s"
        return f"{rate}, {self.latency_ns / 1000:.4g} us"


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links by locality, and by operation if they were measured for it."""

    links: Mapping[Locality, Link]
    algorithm: Algorithm = "ring"
    of_operations: Mapping[tuple[str, Locality], tuple[Link, Algorithm]] = field(default_factory=dict)
    is_measured: bool = False
    """Whether the links come from measured times."""

    def duration_ns(
        self, op: str, size: int, bus_bytes: float, locality: Locality, nodes: int | None = None
    ) -> float | None:
        """Return the duration of `op` in a group of `size` on `nodes` nodes; None if its links are unknown.

        With `nodes`, rounds inside a node have the latency of `intra_node`. A measured latency is already the mean of
        all rounds."""
        op = "send" if op == "recv" else op
        measured = self.of_operations.get((op, locality))
        link, algorithm = measured if measured is not None else (self.link(locality), self.algorithm)
        if link is None or op not in OPERATIONS:
            return None
        latency, inside = link.latency_ns, self.link("intra_node")
        if nodes is not None and nodes > 1 and inside is not None and not self.is_measured:
            crossing = _CROSSING_SHARE[algorithm](size, nodes)
            latency = crossing * latency + (1 - crossing) * inside.latency_ns
        return steps(op, size, algorithm) * latency + bus_bytes / link.rate

    def link(self, locality: Locality) -> Link | None:
        """Return the link of a locality, or of a similar one if it has none; for unknown, the one between nodes."""
        across = crosses_nodes(locality)
        return self.links.get(locality) or next(
            (link for other, link in self.links.items() if crosses_nodes(other) == across), None
        )


def steps(op: str, size: int, algorithm: Algorithm) -> int:
    """Return the number of rounds: messages that follow one another.

    >>> [steps("all_reduce", 8, algorithm) for algorithm in ALGORITHMS]
    [14, 6, 2]
    """
    if op in ("send", "recv"):
        return 1
    if size < 2:
        return 0
    # Each member sends to each other one. A tree does so in turns, like a ring.
    rounds = _ONE_WAY_ROUNDS["ring" if (op, algorithm) == ("all_to_all", "tree") else algorithm](size)
    return 2 * rounds if op in _TWO_WAY else rounds


def bus_bytes(op: str, size: int, payload: int) -> float:
    """Return the bytes on the busiest link of a group of `size`. `payload` is S of nccl-tests.

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
    """Parse a link from `RATE[,LATENCY]`. Raise `ValueError` for anything else.

    >>> str(link_of("300GB/s,2us")), str(link_of("400Gbps"))
    ('300 GB/s, 2 us', '50 GB/s, 0 us')
    """
    first, comma, second = text.partition(",")
    rate, latency = gb_per_s(first), _LATENCY.fullmatch(second.strip())
    if not rate or bool(comma) != bool(latency):
        raise ValueError(f"{text!r} is not RATE[,LATENCY], for example 300GB/s,2us or 400Gbps")
    return Link(rate=rate, latency_ns=float(latency["number"]) * _NS[latency["unit"]] if latency else 0.0)
