"""The tables of a job, all ranks matched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
import polars as pl

from crossrank.text import printable, rank_ranges
from crossrank.tools.analysis.overlap import overlap_frame
from crossrank.tools.analysis.waiting import arrivals, lateness
from crossrank.tools.job.collectives import Collectives, match_collectives
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import SEND_RECV
from crossrank.tools.tables import KEYS, TABLES

_KINDS = {
    **TABLES["collectives"].part("group", "pg", "members", "op", "root"),
    "p2p": pl.Boolean,
    **TABLES["transfers"].part("locality", "source", "source_rank", "destination_rank"),
}


class Matched:
    """All ranks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.found = match_collectives(job)

    @cached_property
    def transfers(self) -> Collectives:
        """Sends and receives of batches one by one; the same object where there are no batches."""
        if any(one.op == SEND_RECV for one in self.found.kinds):
            return match_collectives(self.job, batches_apart=True)
        return self.found

    def of(self, p2p: bool) -> tuple[Collectives, int]:
        """What the transfers, or the collectives, are found in, and what their numbers are counted from."""
        if p2p and self.transfers is not self.found:
            return self.transfers, len(self.found.of_kind)
        return self.found, 0


def groups(matched: Matched) -> pl.DataFrame:
    """The table `groups`."""
    job = matched.job
    calls, size, unsized = Counter[int](), Counter[int](), set[int]()
    for rank, trace in job.ranks.items():
        own = job.group_of[rank]
        alike = Counter(zip(trace.calls.group, trace.calls.signature, strict=True))
        for (local, signature), count in alike.items():
            record = job.signatures[signature]
            calls[own[local]] += count
            size[own[local]] += count * max(0, record.bytes)
            if not trace.knows_size(record):
                unsized.add(own[local])
    rows = [
        (one.index, *_name(one), printable(one.desc), None if one.guessed else one.size, one.backend, one.locality)
        + (calls[one.index], None if one.index in unsized else size[one.index])
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
    return TABLES["transfers"].select(_measured(matched, p2p=True))


def with_keys(matched: Matched, calls: Iterable[pl.DataFrame]) -> list[pl.DataFrame]:
    """The tables `calls` of ranks with the columns `KEYS`: the numbers of each call's group, and of the collective or
    transfer that it is part of. Both are null for ranks that do not belong to the job."""
    launches = _launches(matched).partition_by("rank", as_dict=True, include_key=False)
    none = pl.DataFrame(schema={"row": pl.Int64, **{name: one.dtype for name, one in KEYS.items()}})
    row, result = pl.col("row"), []
    for frame in calls:
        known = launches.get((frame["rank"][0],), none) if len(frame) else none
        # A batch is one launch, with the row of its first call.
        first = pl.when(pl.col("batch").is_not_null()).then(row.min().over("batch")).otherwise(row)
        rows = frame.select(pl.int_range(pl.len()).alias("row"), "batch").with_columns(first=first)
        own = rows.join(known, on="row", how="left", maintain_order="left")
        of_first = rows.join(known, left_on="first", right_on="row", how="left", maintain_order="left")
        result.append(frame.with_columns(own[name].fill_null(of_first[name]) for name in KEYS))
    return result


def _launches(matched: Matched) -> pl.DataFrame:
    """Rank and row of the first call of each launch, with `KEYS`."""
    return pl.concat(_launches_of(matched, p2p=p2p).filter(p2p=p2p).drop("p2p") for p2p in (False, True))


def _launches_of(matched: Matched, *, p2p: bool) -> pl.DataFrame:
    """All launches of what collectives, or transfers, are found in."""
    found, first = matched.of(p2p)
    rows = [(one.group, one.is_p2p) for one in found.kinds]
    kinds = pl.DataFrame(rows, schema={"group": pl.Int64, "p2p": pl.Boolean}, orient="row")
    launches = pl.DataFrame({"rank": found.rank, "row": found.row, "collective": found.collective + first})
    return pl.concat([launches, kinds[found.kind]], how="horizontal")


def overlap(matched: Matched) -> pl.DataFrame:
    """The table `overlap`."""
    return overlap_frame(list(matched.job.ranks.values()), matched.found)


def stragglers(matched: Matched) -> pl.DataFrame:
    """The table `stragglers`."""
    return arrivals(matched.found)


def arrivals_by_call(matched: Matched) -> pl.DataFrame:
    """The table `arrivals`."""
    ranks = matched.job.ranks
    numbers = np.concatenate([np.zeros(0, np.int64), *(trace.numbers for trace in ranks.values())])
    first_of = np.cumsum([0, *map(len, ranks.values())])
    parts = []
    for p2p in (False, True):
        found, _ = matched.of(p2p)
        if not any(one.is_p2p == p2p for one in found.kinds):
            continue
        ops = pl.Series([one.op for one in found.kinds], dtype=pl.String).gather(found.kind)
        call = numbers[first_of[np.searchsorted(list(ranks), found.rank)] + found.row]
        columns = pl.DataFrame({"op": ops, "step": found.step, "call": call})
        launches = pl.concat([_launches_of(matched, p2p=p2p), columns, lateness(found)], how="horizontal")
        parts.append(launches.filter(p2p=p2p))
    return TABLES["arrivals"].select(pl.concat(parts)) if parts else pl.DataFrame(schema=TABLES["arrivals"].schema)


OF_JOB: dict[str, Callable[[Matched], pl.DataFrame]] = {
    "overlap": overlap,
    "collectives": collectives,
    "transfers": transfers,
    "groups": groups,
    "ranks": ranks,
    "arrivals": arrivals_by_call,
    "stragglers": stragglers,
}
"""Table -> what makes it."""


def _name(group: ProcessGroup) -> tuple[str, str]:
    return printable(group.name), "" if group.guessed else rank_ranges(group.ranks)


def _measured(matched: Matched, *, p2p: bool) -> pl.DataFrame:
    """One row per collective or transfer with the columns of both tables."""
    found, first = matched.of(p2p)
    kinds = pl.DataFrame(
        [
            (
                one.group,
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
    frame = pl.concat([kinds[found.of_kind], launches.drop("collective"), known, whole], how="horizontal")
    return frame.with_row_index("place").filter(p2p=p2p).with_columns(collective=pl.col("place") + first)
