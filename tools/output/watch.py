"""A running job as text, and as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from crossrank.text import amount, milliseconds, percent, plural, printable, rank_ranges, significant
from crossrank.tools.analysis.diagnosis.findings import Diagnosis, rank_text
from crossrank.tools.analysis.live import Snapshot
from crossrank.tools.output.console import Columns, Table, table_of
from crossrank.tools.output.diagnosis.verdict import finding_call

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from crossrank.tools.tables import Row

SILENT = 5.0
"""Seconds without a call, or without a write to its file, after which a rank is shown as silent."""
_ENDED = {"exit": "the process exited", "disable": "it called disable()"}
"""Reason in the file of a rank -> text."""

_GROUPS: Columns[Row] = (
    ("group", lambda row: row["pg"]),
    ("description", lambda row: row["desc"]),
    ("#size", lambda row: row["size"]),
    ("#calls", lambda row: f"{row['calls']:,}"),
    ("#bytes", lambda row: amount(row["bytes"])),
    ("#calls/s", lambda row: significant(row["calls_per_s"])),
    ("#bytes/s", lambda row: "-" if row["bytes_per_s"] is None else amount(row["bytes_per_s"])),
    ("#busbw GB/s", lambda row: significant(row["busbw_gb_per_s"])),
    ("#last rank", lambda row: "-" if row["last_rank"] is None else f"rank {row['last_rank']}"),
    ("#share", lambda row: percent(row["last_share"])),
    ("#wait p50", lambda row: milliseconds(row["late_ms"])),
)
_RANKS: Columns[Row] = (
    ("#rank", lambda row: row["rank"]),
    ("node", lambda row: row["node"][:8]),
    ("#step", lambda row: "-" if row["step"] is None else row["step"]),
    ("#step time", lambda row: milliseconds(row["step_ms"])),
    ("#exposed", lambda row: percent(row["exposed_share"])),
    ("#calls", lambda row: f"{row['calls']:,}"),
    ("#last call", lambda row: "-" if row["silent_s"] is None else f"{row['silent_s']:,.1f} s ago"),
    ("state", lambda row: state_of(row)),
)

_METRICS = {
    "step": ("live_ranks", "step"),
    "step_seconds": ("live_ranks", "step_ms"),
    "exposed_ratio": ("live_ranks", "exposed_share"),
    "silent_seconds": ("live_ranks", "silent_s"),
    "unheard_seconds": ("live_ranks", "unheard_s"),
    "calls": ("live_groups", "calls"),
    "bytes": ("live_groups", "bytes"),
    "busbw_bytes_per_second": ("live_groups", "busbw_gb_per_s"),
    "late_seconds": ("live_groups", "late_ms"),
}
"""Name of a metric -> its table and column."""
_COUNTERS = ("calls", "bytes")
_IN_BASE_UNIT = {"ms": 1e-3, "GB/s": 1e9}
_LABELS = {"live_ranks": {"rank": "rank"}, "live_groups": {"group": "pg", "description": "desc"}}
"""Table -> label of its metrics -> column."""


def state_of(rank: Row) -> str:
    """Return the state of a rank, as its file shows it."""
    if rank["ended"]:
        return f"ended: {_ENDED.get(rank['ended'], rank['ended'])}"
    if rank["unheard_s"] is not None and rank["unheard_s"] > SILENT:
        return f"no data for {rank['unheard_s']:,.0f} s"
    if rank["silent_s"] is not None and rank["silent_s"] > SILENT:
        return "silent"
    return "running"


def heading(snapshot: Snapshot) -> Iterator[str]:
    """Yield lines about the whole job."""
    size = snapshot.world_size
    yield f"recording  {snapshot.recording}"
    known = f"{len(snapshot.ranks):,} of {size:,}" if size is not None else f"{len(snapshot.ranks):,}"
    missing = f", rank {rank_ranges(snapshot.missing_ranks)} without a file" if snapshot.missing_ranks else ""
    states = [state_of(one).split(":")[0].split(" for ")[0] for one in snapshot.ranks]
    yield f"ranks      {known}{missing}; " + ", ".join(f"{states.count(one):,} {one}" for one in sorted(set(states)))
    if snapshot.step is not None:
        low, high = snapshot.step
        step = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        yield f"step       {step}, {milliseconds(snapshot.step_ms)} each"
    if snapshot.exposed_share is not None:
        share = percent(snapshot.exposed_share)
        yield f"exposed    {share} of the time, in waits on the host"
    if snapshot.hang:
        yield f"hang       {snapshot.hang}"
    for note in snapshot.notes:
        yield f"note       {note}"


def tables(snapshot: Snapshot, most: int) -> list[tuple[str, Table]]:
    """Return (title, table) of the groups and of the most conspicuous ranks."""
    ranks = sorted(snapshot.ranks, key=_oddity)
    title = "Ranks" if len(ranks) <= most else f"Most conspicuous of {len(ranks):,} ranks"
    return [
        ("Process groups", table_of(snapshot.groups, _GROUPS, limit=most)),
        (title, table_of(sorted(ranks[:most], key=lambda row: row["rank"]), _RANKS)),
    ]


def _oddity(rank: Row) -> tuple[float, ...]:
    """Sort key: ranks without data first, then ranks that are behind, then slow ranks."""
    unheard = rank["unheard_s"] if rank["unheard_s"] is not None and rank["unheard_s"] > SILENT else 0.0
    return -unheard, rank["step"] if rank["step"] is not None else -1, -(rank["step_ms"] or 0.0), rank["rank"]


def as_text(snapshot: Snapshot, most: int) -> str:
    """Return the state of the job as plain text."""
    lines = [printable(line) for line in heading(snapshot)]
    for title, table in tables(snapshot, most):
        lines += ["", title, *table.lines()]
    return "\n".join(lines) + "\n"


class Metrics:
    """The latest state, in the form that Prometheus reads."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def registry(self) -> CollectorRegistry:
        """Return what the library serves or writes. Raises `ImportError` if it is not installed."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the library calls this."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from crossrank.tools.tables import ANSWERS  # imports polars, which is slow

        found = self.snapshot
        if found is None:
            return

        yield GaugeMetricFamily("crossrank_ranks", "ranks with a file", value=len(found.ranks))
        yield GaugeMetricFamily("crossrank_missing_ranks", "ranks without a file", value=len(found.missing_ranks))
        yield GaugeMetricFamily("crossrank_hang", "1 if the last verdict of the job is a hang", value=bool(found.hang))
        rows = {"live_ranks": found.ranks, "live_groups": found.groups}
        for name, (table, column) in _METRICS.items():
            about, labels = ANSWERS[table].columns[column], _LABELS[table]
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            family = kind(f"crossrank_{name}", about.meaning, labels=list(labels))
            for row in rows[table]:
                if row[column] is not None:
                    of_row = [str(row[label]) for label in labels.values()]
                    family.add_metric(of_row, row[column] * _IN_BASE_UNIT.get(about.unit, 1))
            yield family


def hang_text(found: Diagnosis) -> str:
    """Return the verdict on a hang as one line; empty if no rank waits for another."""
    for finding in found.findings:
        if finding.waiting_ranks:
            who = rank_text(finding.culprit_ranks) if finding.culprit_ranks else "nobody in particular"
            waiting = plural(len(finding.waiting_ranks), "rank")
            return f"{finding.kind}: {waiting} wait in {finding_call(finding)} for {who}"
    return ""
