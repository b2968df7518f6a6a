"""The network of a recording, from the times of its own collectives; and how well it predicts one that it has not seen.

For each operation and locality the two numbers of `Link` are those with which the median times of its sizes are off
least, by the squares of the relative errors; an operation of one size alone takes what all operations of its locality
give together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import polars as pl

from crossrank.comm import OPERATIONS, Locality
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.launches import SEND_RECV
from crossrank.tools.predict.network import Algorithm, Link, Network, steps


@dataclass(frozen=True, kw_only=True)
class MeasuredKind:
    """Collectives of one operation and size, in groups of one size and locality."""

    op: str
    size: int
    """Members of the group."""
    locality: Locality
    bytes: int
    """S of nccl-tests."""
    bus_bytes: float
    """Mean of them: of an uneven all_to_all those of the busiest rank, which differ."""
    count: int
    time_ns: float
    """The median, from the last arrival."""
    predicted_ns: float | None = None
    """What all other kinds say that it takes; None where they say nothing: there is no other one of its locality."""

    @property
    def error(self) -> float | None:
        """Share by which the predicted time differs from the measured one."""
        return None if self.predicted_ns is None else self.predicted_ns / self.time_ns - 1


def measured_kinds(found: JobTables) -> list[MeasuredKind]:
    """What the collectives of a job took, those left out whose time or size is not known or an upper bound."""
    frame = found.about(found.timed.filter(~pl.col("is_upper_bound")), "label", "group", "locality")
    times: dict[tuple[str, int, Locality, int], list[tuple[float, float]]] = defaultdict(list)
    columns = ("label", "group", "locality", "bytes", "time_ns", "busbw_gb_per_s")
    for op, group, locality, size, time, busbw in frame.select(columns).iter_rows():
        name = "send" if op == SEND_RECV else op
        if time and size is not None and name in OPERATIONS and found.job.groups[group].size > 1:
            times[name, found.job.groups[group].size, locality, size].append((time, (busbw or 0.0) * time))
    return [
        MeasuredKind(
            op=op,
            size=size,
            locality=locality,
            bytes=amount,
            bus_bytes=sum(carried for _, carried in samples) / len(samples),
            count=len(samples),
            time_ns=median(time for time, _ in samples),
        )
        for (op, size, locality, amount), samples in times.items()
    ]


def fit_network(kinds: Iterable[MeasuredKind], algorithm: Algorithm) -> Network:
    """The network on which the collectives take what they took, if they were made by `algorithm`."""
    of_operations: dict[tuple[str, Locality], list[MeasuredKind]] = defaultdict(list)
    of_localities: dict[Locality, list[MeasuredKind]] = defaultdict(list)
    for kind in kinds:
        of_operations[kind.op, kind.locality].append(kind)
        of_localities[kind.locality].append(kind)
    return Network(
        is_measured=True,
        links={locality: _fit(found, algorithm) for locality, found in of_localities.items()},
        algorithm=algorithm,
        of_operations={
            key: (_fit(found, algorithm), algorithm)
            for key, found in of_operations.items()
            if len({kind.bus_bytes for kind in found}) > 1
        },
    )


def _fit(kinds: Sequence[MeasuredKind], algorithm: Algorithm) -> Link:
    """The latency and the time per byte, neither below 0, with the least squares of relative errors."""
    rows = [(steps(k.op, k.size, algorithm) / k.time_ns, k.bus_bytes / k.time_ns, k.count) for k in kinds]
    ss = sum(w * s * s for s, _, w in rows)
    sb = sum(w * s * b for s, b, w in rows)
    bb = sum(w * b * b for _, b, w in rows)
    s1 = sum(w * s for s, _, w in rows)
    b1 = sum(w * b for _, b, w in rows)
    determinant = ss * bb - sb * sb
    latency, per_byte = 0.0, b1 / bb if bb else 0.0
    if determinant > 1e-9 * ss * bb:
        latency, per_byte = (s1 * bb - b1 * sb) / determinant, (b1 * ss - s1 * sb) / determinant
    if latency < 0 or not bb:
        latency, per_byte = (0.0, b1 / bb) if bb else (s1 / ss if ss else 0.0, 0.0)
    if per_byte < 0:
        latency, per_byte = s1 / ss if ss else 0.0, 0.0
    return Link(rate=1 / per_byte if per_byte else float("inf"), latency_ns=latency)


def leave_one_out(kinds: Sequence[MeasuredKind], algorithm: Algorithm) -> list[MeasuredKind]:
    """Each kind, predicted by the network that fits all the others."""
    found = []
    for place, kind in enumerate(kinds):
        network = fit_network([*kinds[:place], *kinds[place + 1 :]], algorithm)
        predicted_ns = network.duration_ns(kind.op, kind.size, kind.bus_bytes, kind.locality)
        found.append(replace(kind, predicted_ns=predicted_ns))
    return found
