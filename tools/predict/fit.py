"""Fits a network to the times of a recording's collectives, and measures how well it predicts other collectives.

Each operation and locality has its own `Link`. Its two numbers minimize the squares of the relative errors of the
median times per size. An operation with only one size uses the link that fits all operations of its locality.
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
    """Mean bytes on the busiest link. In an uneven all_to_all, those of the busiest rank, which vary by call."""
    count: int
    time_ns: float
    """Median, from the last arrival."""
    predicted_ns: float | None = None
    """Prediction from all other kinds; None if no other kind has this locality."""

    @property
    def error(self) -> float | None:
        """Share by which the predicted time differs from the measured one."""
        return None if self.predicted_ns is None else self.predicted_ns / self.time_ns - 1


def measured_kinds(tables: JobTables) -> list[MeasuredKind]:
    """Return the times of a job's collectives, except those with an unknown time or size, or an upper bound."""
    frame = tables.about(tables.timed.filter(~pl.col("is_upper_bound")), "label", "group", "locality")
    times: dict[tuple[str, int, Locality, int], list[tuple[float, float]]] = defaultdict(list)
    columns = ("label", "group", "locality", "bytes", "time_ns", "busbw_gb_per_s")
    for op, group, locality, size, time, busbw in frame.select(columns).iter_rows():
        name = "send" if op == SEND_RECV else op
        if time and size is not None and name in OPERATIONS and tables.job.groups[group].size > 1:
            times[name, tables.job.groups[group].size, locality, size].append((time, (busbw or 0.0) * time))
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
    """Return the network on which collectives of `algorithm` take their measured times."""
    of_operations: dict[tuple[str, Locality], list[MeasuredKind]] = defaultdict(list)
    of_localities: dict[Locality, list[MeasuredKind]] = defaultdict(list)
    for kind in kinds:
        of_operations[kind.op, kind.locality].append(kind)
        of_localities[kind.locality].append(kind)
    return Network(
        is_measured=True,
        links={locality: _fit_link(tables, algorithm) for locality, tables in of_localities.items()},
        algorithm=algorithm,
        of_operations={
            key: (_fit_link(tables, algorithm), algorithm)
            for key, tables in of_operations.items()
            if len({kind.bus_bytes for kind in tables}) > 1
        },
    )


def _fit_link(kinds: Sequence[MeasuredKind], algorithm: Algorithm) -> Link:
    """Return the link with the least squares of relative errors. Latency and time per byte are not below 0."""
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
    """Return each kind with the prediction of the network that fits all other kinds."""
    tables = []
    for place, kind in enumerate(kinds):
        network = fit_network([*kinds[:place], *kinds[place + 1 :]], algorithm)
        predicted_ns = network.duration_ns(kind.op, kind.size, kind.bus_bytes, kind.locality)
        tables.append(replace(kind, predicted_ns=predicted_ns))
    return tables
