"""The tables of a job with matched ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from crossrank.text import printable, rank_ranges
from crossrank.tools.analysis.overlap import overlap_frame
from crossrank.tools.analysis.waiting import count_arrivals, measure_lateness
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.groups import ProcessGroup
from crossrank.tools.tables import KEYS, TABLES


def groups(found: JobTables) -> pl.DataFrame:
    """Return the table `groups`."""
    job = found.job
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
    # Calls whose group is unknown may be of a group that has none.
    is_unknown = any(calls[one.index] and (one.guessed or not one.name) for one in job.groups)
    idle = {one.index for one in job.groups if not calls[one.index]} if is_unknown else set()
    rows = [
        (one.index, *_name(one), printable(one.desc), one.known_size, one.backend, job.locality_of(one))
        + (None if one.index in idle else calls[one.index], None if one.index in unsized | idle else size[one.index])
        for one in job.groups
    ]
    return TABLES["groups"].select(pl.DataFrame(rows, schema=TABLES["groups"].schema, orient="row"))


def ranks(found: JobTables) -> pl.DataFrame:
    """Return the table `ranks`."""
    rows = [
        (
            *(rank, *map(printable, (one.host, one.node, one.path)), found.timed_by.get(rank), len(one)),
            one.ended_steps if one.steps or one.records_steps else None,
            *(found.shift.get(rank), printable(one.ending.reason) or None, len(one.problems)),
        )
        for rank, one in found.job.ranks.items()
    ]
    return TABLES["ranks"].select(pl.DataFrame(rows, schema=TABLES["ranks"].schema, orient="row"))


def with_keys(found: JobTables, calls: Iterable[pl.DataFrame]) -> list[pl.DataFrame]:
    """Return the tables `calls` of ranks with the columns `KEYS`: the number of each call's group, and of its
    collective or transfer. Both are null for ranks outside the job."""
    keys = [pl.col(name).cast(one.dtype) for name, one in KEYS.items()]
    none = pl.DataFrame(schema={"rank": pl.Int32, "row": pl.UInt32} | {name: one.dtype for name, one in KEYS.items()})
    launches = pl.concat([none, *(calls.select("rank", "row", *keys) for calls in _calls(found))])
    of_rank = launches.partition_by("rank", as_dict=True, include_key=False)
    row, result = pl.col("row"), []
    for frame in calls:
        known = of_rank.get((frame["rank"][0],), launches.clear().drop("rank")) if len(frame) else launches.clear()
        # A batch is one launch with the row of its first call.
        first = pl.when(pl.col("batch").is_not_null()).then(row.min().over("batch")).otherwise(row)
        rows = frame.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"), "batch").with_columns(first=first)
        own = rows.join(known, on="row", how="left", maintain_order="left")
        of_first = rows.join(known, left_on="first", right_on="row", how="left", maintain_order="left")
        result.append(frame.with_columns(own[name].fill_null(of_first[name]) for name in KEYS))
    return result


def _of(found: JobTables, p2p: bool) -> tuple[JobTables, int]:
    """Return the tables with the transfers, or the collectives, and the offset of their numbers."""
    if p2p and found.batches_apart is not found:
        return found.batches_apart, len(found.collectives)
    return found, 0


def _calls(found: JobTables) -> Iterator[pl.DataFrame]:
    """Yield the launches of collectives, then of transfers, with `KEYS` and waiting columns. In parts, because the
    whole table is several times as large as the result."""
    for p2p in (False, True):
        source, first = _of(found, p2p)
        if any(one.is_p2p == p2p for one in source.kinds):
            launches = source.calls.select("rank", "row", "step", "kind", pl.col("collective") + first)
            for part in launches.hstack(measure_lateness(source)).iter_slices(1 << 17):
                yield source.about(part, "group", "op", "is_p2p").filter(is_p2p=p2p).drop("kind", "is_p2p")


def arrivals_by_call(found: JobTables) -> pl.LazyFrame:
    """Return the table `arrivals`. It is as large as all calls, so its parts are made when it is read. It can only be
    read as a whole."""
    ranks, table = found.job.ranks, TABLES["arrivals"]
    first_of = dict(zip(ranks, accumulate(map(len, ranks.values()), initial=0), strict=False))
    place = pl.col("rank").replace_strict(first_of, return_dtype=pl.UInt32) + pl.col("row")
    numbers = pl.lit(pl.Series(np.concatenate([np.zeros(0, np.int64), *(trace.numbers for trace in ranks.values())])))

    def parts(*_: object) -> Iterator[pl.DataFrame]:
        for calls in _calls(found):
            yield table.select(calls.with_columns(call=numbers.gather(place)))

    return register_io_source(parts, schema=table.schema)


def measured(found: JobTables, *, p2p: bool) -> pl.DataFrame:
    """Return the table `collectives`, or `transfers` with `p2p`."""
    table = TABLES["transfers" if p2p else "collectives"]
    source, first = _of(found, p2p)
    groups = [(one.index, *_name(one)) for one in found.job.groups]
    names = pl.DataFrame(groups, schema=table.part("group", "pg", "members"), orient="row")
    lines = pl.lit(pl.Series([one.source and printable(one.source) for one in source.kinds], dtype=pl.String))
    facts = ("op", "group", "root", "locality", "source_rank", "destination_rank", "is_p2p", "participants", "guessed")
    is_batch = pl.col("is_p2p") & pl.col("source_rank").is_null()
    return table.select(
        source.about(source.collectives.drop("expected").with_row_index("collective"), *facts)
        .with_columns(expected=pl.when(~pl.col("guessed") & ~is_batch).then("participants"))
        .filter(is_p2p=p2p)
        .join(names, on="group", maintain_order="left")
        .with_columns(pl.col("collective") + first, source=lines.gather(pl.col("kind")))
    )


OF_JOB: dict[str, Callable[[JobTables], pl.DataFrame | pl.LazyFrame]] = {
    "overlap": overlap_frame,
    "collectives": lambda found: measured(found, p2p=False),
    "transfers": lambda found: measured(found, p2p=True),
    "groups": groups,
    "ranks": ranks,
    "arrivals": arrivals_by_call,
    "stragglers": count_arrivals,
}
"""Table -> function that returns it."""


def _name(group: ProcessGroup) -> tuple[str, str]:
    return printable(group.name), "" if group.guessed else rank_ranges(group.ranks)
