"""The tables of one rank."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import orjson
import polars as pl

from crossrank.comm import UNKNOWN_STEP
from crossrank.recording import READ_WAITS
from crossrank.text import printable, rank_ranges
from crossrank.tools.tables import KEYS, TABLES
from crossrank.tools.traces.rank_trace import STATES, RankTrace

_CALLS = TABLES["calls"]
_DTYPE = {"q": np.int64, "i": np.int32, "I": np.uint32, "B": np.uint8}


def calls(trace: RankTrace) -> pl.DataFrame:
    """Return the table `calls` of a rank."""
    of = trace.calls
    # Matched ranks share one list of signatures.
    used, kind = np.unique(_column(of.signature), return_inverse=True)
    kinds = pl.DataFrame(
        [
            (
                *(one.op, one.api, one.peer, one.root),
                one.bytes if trace.knows_size(one) else None,
                *(one.dtype, one.reduce),
                *(
                    orjson.dumps(shapes).decode() if shapes and one.op not in trace.sizes_of_others else None
                    for shapes in (one.inputs, one.outputs)
                ),
                *(one.locality, one.source),
            )
            for one in map(trace.signatures.__getitem__, used.tolist())
        ],
        schema=_CALLS.part(
            *("op", "api", "peer", "root", "bytes", "dtype", "reduce", "inputs", "outputs", "locality", "source")
        ),
        orient="row",
    ).with_columns(pl.selectors.string().map_elements(printable, return_dtype=pl.String))
    groups = _groups(trace)
    took = pl.Series(_column(of.took))
    frame = pl.DataFrame(
        {
            "rank": np.full(len(trace), trace.rank or 0),
            "call": trace.numbers,
            "number": _column(of.number),
            "batch": _column(of.batch),
            "step": trace.call_steps,
            "thread": _column(of.thread),
            "state": pl.Series(STATES).gather(_column(of.state)),
            "called_ns": _column(of.called) * trace.timed,
            "began_ns": _column(of.began),
            "ended_ns": _column(of.ended),
        }
    )
    began, ended = pl.col("began_ns"), pl.col("ended_ns")
    measured = pl.when(took > 0).then(took).when((began > 0) & (ended > began)).then(ended - began)
    return _CALLS.select(
        pl.concat([frame, kinds[kind], groups[_column(of.group)]], how="horizontal")
        .with_columns(duration_ns=measured)
        .with_columns(
            *(pl.when(pl.col(name) > 0).then(name) for name in ("number", "thread", "called_ns", "began_ns")),
            pl.when(ended > 0).then(ended),
            pl.when(pl.col("batch") >= 0).then("batch"),
            pl.when(pl.col("step") != UNKNOWN_STEP).then("step"),
            timed_by=pl.when(pl.col("duration_ns").is_not_null()).then(pl.lit(trace.timed_by)),
        )
    )


def durations(_: RankTrace, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the table `durations` of a rank from its table `calls`."""
    return TABLES["durations"].select(calls.drop_nulls("duration_ns"))


def waits(trace: RankTrace, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the table `waits` of a rank; `calls` is its table `calls`."""
    host = trace.host_waits
    made = calls.select("call", "op", "source", *(name for name in KEYS if name in calls.columns)).with_row_index("row")
    return TABLES["waits"].select(
        pl.DataFrame(
            {
                "rank": np.full(len(host), trace.rank or 0),
                "row": _column(host.row),
                "waited_in": pl.Series(READ_WAITS).gather(_column(host.waited_in)),
                "began_ns": _column(host.began),
                "ended_ns": _column(host.ended),
            }
        )
        .join(made.with_columns(pl.col("row").cast(pl.Int64)), on="row", how="left", maintain_order="left")
        .with_columns(duration_ns=pl.col("ended_ns") - pl.col("began_ns"))
    )


def steps(trace: RankTrace, _: pl.DataFrame) -> pl.DataFrame:
    """Return the table `steps` of a rank."""
    profiler = None if trace.profiler_steps is None else pl.col("step").is_in(trace.profiler_steps)
    return TABLES["steps"].select(
        pl.DataFrame(trace.steps, schema={"step": pl.Int64, "began_ns": pl.Int64}, orient="row")
        .with_columns(
            rank=pl.lit(trace.rank or 0),
            ended_ns=pl.when(pl.col("step").shift(-1) == pl.col("step") + 1).then(pl.col("began_ns").shift(-1)),
            profiler=profiler,
        )
        .with_columns(duration_ns=pl.col("ended_ns") - pl.col("began_ns"))
    )


OF_RANK: dict[str, Callable[[RankTrace, pl.DataFrame], pl.DataFrame]] = {
    "calls": lambda _, calls: calls,
    "durations": durations,
    "waits": waits,
    "steps": steps,
}
"""Table -> function that returns a rank's part from its trace and its table `calls`."""


def _column(values: array[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.frombuffer(values, _DTYPE[values.typecode]).astype(np.int64)


def _groups(trace: RankTrace) -> pl.DataFrame:
    rows = [
        (printable(one.group.pg), rank_ranges(one.group.ranks or ()), printable(one.group.desc)) for one in trace.groups
    ]
    return pl.DataFrame(rows, schema=_CALLS.part("pg", "members", "desc"), orient="row")
