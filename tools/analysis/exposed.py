"""Exposed communication: the time during which the host waited for communication, by call.

The recording measures it on the host: from start to end of `Work.wait`, `wait_tensor`, or a launch that blocks. In a
backward pass in which C++ made calls, it counts from the end of the computation to the end of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import polars as pl

from crossrank.recording import READ_WAITS
from crossrank.text import plural, printable
from crossrank.tools.analysis.waiting import Steps, covered, in_ms, over_ranks, profiler_steps, with_most
from crossrank.tools.tables import ANSWERS, Row
from crossrank.tools.traces.rank_trace import RankTrace

_MOST_LINES = 20


class Exposed(msgspec.Struct, kw_only=True):
    """How long the ranks waited for communication."""

    waits: int
    of_no_call: int
    """Waits whose call is unknown."""
    calls_without: int
    """Calls of these ranks without a recorded wait: C++ waits for them, or no thread does. If there are any, the times
    are lower bounds."""
    per_step_ms: float | None
    """Median over ranks and steps in which no profiler started or stopped; None without such steps, or if kernels of
    GPUs measure it. So are the next two."""
    share: float | None
    """Exposed time of these steps of all ranks, divided by their duration."""
    steps: Steps | None
    """Waits of several threads at the same time count once. The last step has no end and is skipped."""
    ranks: list[Row]
    """The ranks with most exposed time."""
    lines: list[Row]
    """The source lines with most exposed time."""
    notes: list[str]


def exposed_of(ranks: Sequence[RankTrace]) -> Exposed | None:
    """Return the exposed communication of a job; None if no waits are recorded."""
    recorded = [one for one in ranks if len(one.host_waits)]
    if not recorded:
        return None
    waits = pl.concat(map(_waits, recorded))
    lines = _lines(waits)
    steps = _by_step(waits, pl.concat(map(_iterations, recorded)))
    undisturbed = steps.filter(~pl.col("step").is_in(profiler_steps(ranks)))
    share = pl.sum("ms") / pl.sum("of_ms")
    # On a GPU the host's waits return at once; `overlap` measures it with the kernels of a window.
    has_steps = bool(len(undisturbed)) and not any(one.busy.where == "device" for one in recorded)
    return Exposed(
        waits=len(waits),
        of_no_call=len(waits.filter(pl.col("source") == _NOT_KNOWN)),
        calls_without=sum(map(_calls_without, recorded)),
        per_step_ms=round(undisturbed.select(pl.median("ms")).item(), 3) if has_steps else None,
        share=round(undisturbed.select(share).item(), 4) if has_steps else None,
        steps=over_ranks(steps) if has_steps else None,
        ranks=ANSWERS["exposed_ranks"].rows(
            with_most(covered(waits.lazy(), ["rank"], pl.col("begin"), pl.col("end")), "ns")
            .with_columns(exposed_ms=in_ms("ns"))
            .join(undisturbed.group_by("rank").agg(share=share.round(4)), on="rank", how="left", maintain_order="left")
        ),
        lines=[
            row | {"source": printable(row["source"])} for row in ANSWERS["exposed_lines"].rows(lines.head(_MOST_LINES))
        ],
        notes=[
            *_notes(ranks, recorded),
            *([f"the {_MOST_LINES} of {len(lines):,} source lines with most time"] if len(lines) > _MOST_LINES else ()),
        ],
    )


_NOT_KNOWN = "(not known)"
_BACKWARD = READ_WAITS.index("backward")


def _calls_without(one: RankTrace) -> int:
    """Return the number of calls without a recorded wait.

    The end of a backward pass waits for all calls that C++ made in it, and the recording names the last of them. It
    also covers earlier calls of its step with the same operation and group."""
    rows, waited_in = np.frombuffer(one.host_waits.row, np.int64), np.frombuffer(one.host_waits.waited_in, np.uint8)
    has_wait = np.zeros(len(one), bool)
    has_wait[rows[rows >= 0]] = True
    by_cpp = np.array([signature.api is None for signature in one.signatures], bool)
    kind = np.frombuffer(one.calls.signature, np.uint32)
    by_cpp = by_cpp[kind]
    steps = one.call_steps
    ends = np.unique(rows[(waited_in == _BACKWARD) & (rows >= 0)])
    # For each call, the next call with which a backward pass ended; -1 after the last.
    following = np.append(ends, -1)[np.searchsorted(ends, np.arange(len(one)))]
    ops = np.unique([signature.op for signature in one.signatures] or [""], return_inverse=True)[1]
    columns = steps, np.frombuffer(one.calls.group, np.uint32), ops[kind]
    alike = np.logical_and.reduce([column == column[following] for column in columns])
    covered = by_cpp & (following >= 0) & alike
    return int((~has_wait & ~covered).sum())


def _waits(one: RankTrace) -> pl.DataFrame:
    host, calls = one.host_waits, one.calls
    rows = np.frombuffer(host.row, np.int64)
    sources = [signature.source or "(C++)" for signature in one.signatures] + [_NOT_KNOWN]
    ops = [signature.op for signature in one.signatures] + [""]
    kinds = np.full(len(rows), len(one.signatures))
    kinds[rows >= 0] = np.frombuffer(calls.signature, np.uint32)[rows[rows >= 0]]
    return pl.DataFrame(
        {
            "rank": np.full(len(rows), one.rank or 0),
            "begin": np.frombuffer(host.began, np.int64),
            "end": np.frombuffer(host.ended, np.int64),
            "source": pl.Series(sources, dtype=pl.String).gather(kinds),
            "op": pl.Series(ops, dtype=pl.String).gather(kinds),
            "waited_in": pl.Series(READ_WAITS).gather(np.frombuffer(host.waited_in, np.uint8)),
        }
    )


def _iterations(one: RankTrace) -> pl.DataFrame:
    rows = [(step, begin, end) for step, begin, end in one.step_spans if end > begin]
    schema = {"step": pl.Int64, "from": pl.Int64, "until": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(rank=pl.lit(one.rank or 0, pl.Int64))


def _by_step(waits: pl.DataFrame, iterations: pl.DataFrame) -> pl.DataFrame:
    """Return rank, step, exposed `ms`, and `of_ms`, the step's duration. A wait belongs to the step it starts in."""
    of_step = (
        waits.sort("begin")
        .join_asof(iterations.sort("from"), left_on="begin", right_on="from", by="rank", check_sortedness=False)
        .filter(pl.col("begin") < pl.col("until"))
    )
    exposed = covered(of_step.lazy(), ["rank", "from"], pl.col("begin"), pl.min_horizontal("end", "until"))
    return iterations.join(exposed, on=("rank", "from"), how="left").select(
        *("rank", "step"), ms=pl.col("ns").fill_null(0) / 1e6, of_ms=(pl.col("until") - pl.col("from")) / 1e6
    )


def _lines(waits: pl.DataFrame) -> pl.DataFrame:
    """Return the source lines, those with most time first."""
    took = (pl.col("end") - pl.col("begin")) / 1e6
    line = ("source", "op", "waited_in")
    found = waits.group_by(line).agg(waits=pl.len(), exposed_ms=took.sum().round(3), longest_ms=took.max().round(3))
    return found.sort("exposed_ms", *line, descending=[True, False, False, False])


def _notes(ranks: Sequence[RankTrace], recorded: Sequence[RankTrace]) -> Iterator[str]:
    yield (
        "measured on the host: in Python's Work.wait, in wait_tensor, in launches, and at the end of a backward pass "
        "for calls that C++ made in it; other waits inside C++ are not recorded"
    )
    if any("gloo" not in one.backend or "nccl" in one.backend for one in recorded):
        yield (
            "on a GPU most waits make only the stream wait and return at once; the kernels of a window show the "
            "exposed communication there"
        )
    if left_out := {step for one in ranks for step, _ in one.steps[:-1]} & profiler_steps(ranks):
        yield (
            f"{plural(len(left_out), 'step')}, in which a profiler started or stopped, "
            f"{'counts' if len(left_out) == 1 else 'count'} neither in the time per step nor in the shares"
        )
    if len(recorded) < len(ranks):
        yield f"{plural(len(ranks) - len(recorded), 'rank')} of {len(ranks):,} recorded no waits"
