"""The tables of a job, all ranks matched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import polars as pl

from crossrank.text import printable, rank_ranges
from crossrank.tools.analysis.overlap import overlap_frame
from crossrank.tools.analysis.waiting import arrivals
from crossrank.tools.job.collectives import Collectives, match_collectives
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import SEND_RECV
from crossrank.tools.output.frames.columns import TABLES


class Matched(NamedTuple):
    """All ranks."""

    job: Job
    found: Collectives


def match(job: Job) -> Matched:
    return Matched(job, match_collectives(job))


def groups(matched: Matched) -> pl.DataFrame:
    """The table `groups`."""
    job = matched.job
    calls, size = Counter[int](), Counter[int]()
    for rank, trace in job.ranks.items():
        own = job.group_of[rank]
        alike = Counter(zip(trace.calls.group, trace.calls.signature, strict=True))
        for (local, signature), count in alike.items():
            calls[own[local]] += count
            size[own[local]] += count * max(0, job.signatures[signature].bytes)
    rows = [
        (*_name(one), printable(one.desc), one.size, one.backend, one.locality, calls[one.index], size[one.index])
        for one in job.groups
    ]
    return pl.DataFrame(rows, schema=TABLES["groups"].schema, orient="row")


def ranks(matched: Matched) -> pl.DataFrame:
    """The table `ranks`."""
    rows = [
        (
            *(rank, *map(printable, (one.host, one.node, one.path)), one.timed_by, len(one), len(one.steps)),
            *(matched.found.shift.get(rank, 0), printable(one.ending.reason) or None, len(one.problems)),
        )
        for rank, one in matched.job.ranks.items()
    ]
    return pl.DataFrame(rows, schema=TABLES["ranks"].schema, orient="row")


def collectives(matched: Matched) -> pl.DataFrame:
    """The table `collectives`."""
    return TABLES["collectives"].select(_measured(matched, p2p=False))


def transfers(matched: Matched) -> pl.DataFrame:
    """The table `transfers`."""
    if any(one.op == SEND_RECV for one in matched.found.kinds):
        matched = Matched(matched.job, match_collectives(matched.job, batches_apart=True))
    return TABLES["transfers"].select(_measured(matched, p2p=True))


def overlap(matched: Matched) -> pl.DataFrame:
    """The table `overlap`."""
    return overlap_frame(list(matched.job.ranks.values()), matched.found)


def stragglers(matched: Matched) -> pl.DataFrame:
    """The table `stragglers`."""
    return arrivals(matched.found)


OF_JOB: dict[str, Callable[[Matched], pl.DataFrame]] = {
    "overlap": overlap,
    "collectives": collectives,
    "transfers": transfers,
    "groups": groups,
    "ranks": ranks,
    "stragglers": stragglers,
}
"""Table -> what makes it."""


def _name(group: ProcessGroup) -> tuple[str, str]:
    return printable(group.name), rank_ranges(group.ranks)


def _measured(matched: Matched, *, p2p: bool) -> pl.DataFrame:
    """One row per collective or transfer with the columns of both tables."""
    found = matched.found
    kinds = pl.DataFrame(
        [
            (
                *_name(matched.job.groups[one.group]),
                *(one.op, one.root, one.is_p2p, one.locality),
                None if one.source is None else printable(one.source),
                *(one.ends or (None, None)),
            )
            for one in found.kinds
        ],
        schema=_KINDS,
        orient="row",
    )
    positive = [pl.when(pl.col(name) > 0).then(name).alias(name) for name in ("number", "called", "began", "ended")]
    launches = (
        pl.DataFrame(
            {
                "collective": found.collective,
                "number": found.number,
                "step": found.step,
                "called": found.called,
                "began": found.began,
                "ended": found.ended,
                "waiting": found.waiting,
                "calls": np.maximum(found.calls, found.together),
            }
        )
        .with_columns(*positive, pl.when(pl.col("waiting") >= 0).then("waiting").alias("waiting"))
        .group_by("collective", maintain_order=True)
        .agg(
            pl.first("number", "step"),
            pl.max("calls"),
            called_ns=pl.min("called"),
            arrived_ns=pl.max("began"),
            ended_ns=pl.max("ended"),
            longest_wait_ns=pl.max("waiting"),
        )
        .sort("collective")
    )
    known = found.collectives_frame().select("bytes", time_ns="time", algbw_gb_per_s="algbw", busbw_gb_per_s="busbw")
    whole = pl.DataFrame(
        {
            "ranks": found.seen,
            "expected": found.expected,
            "is_upper_bound": found.bound & found.timed,
            "last_rank": found.last_rank,
        }
    ).with_columns(pl.when(pl.col("last_rank") >= 0).then("last_rank").alias("last_rank"))
    frame = pl.concat([kinds[found.of_kind], launches, known, whole], how="horizontal")
    return frame.filter(pl.col("p2p") == p2p)


_KINDS = {
    "pg": pl.String,
    "members": pl.String,
    "op": pl.String,
    "root": pl.Int64,
    "p2p": pl.Boolean,
    "locality": pl.String,
    "source": pl.String,
    "source_rank": pl.Int64,
    "destination_rank": pl.Int64,
}
