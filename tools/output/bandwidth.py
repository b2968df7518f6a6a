"""The table of `crossrank bandwidth`, for the console and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossrank.text import amount, microseconds, percent, plural, significant, size_text
from crossrank.tools.analysis.bandwidth import Bandwidth
from crossrank.tools.analysis.diagnosis.findings import group_text
from crossrank.tools.job.clocks import Clocks
from crossrank.tools.job.launches import TIMED_BY
from crossrank.tools.output.console import Table, print_counts, print_fact, print_notes, table_of
from crossrank.tools.tables import Row

_SHOWN = 24
BOUNDS = (
    "upper bounds may include waiting time: ranks are missing, members are unknown, calls shared a launch, only a wait "
    "shows the end, or the clocks differ by more"
)


def _group_of(row: Row) -> str:
    name = (row["pg"] or "", row["desc"] or "")
    return group_text(name) if any(name) else "unknown"


Column = tuple[str, Callable[[Row], object]]
KEYS: dict[str, Column] = {
    "op": ("operation", lambda row: row["op"]),
    "group": ("group", _group_of),
    "size": ("size", lambda row: size_text(row["size_to"])),
    "locality": ("locality", lambda row: row["locality"]),
    "source": ("source", lambda row: row["source"] or "(C++)"),
}


def bandwidth_table(
    result: Bandwidth, keys: Sequence[Column], limit: int, *, more: str, id: str = "", choices: int = 0
) -> Table:
    """Return the table: rows with most time first, columns `keys` first. Columns without a value are left
    out. See `Table` for the other arguments."""
    known = [one for one in _MEASURED if any(one[1](row) not in ("", "-") for row in result.rows)]
    columns = [*keys, *known]
    return table_of(result.rows, columns, limit=limit, more=more, id=id, choices=choices)


def alignment_text(clocks: Clocks) -> str:
    """Return how the clocks of the ranks were aligned, and the remaining difference."""
    residual = clocks.residual_us
    if residual is None or (clocks.count > 1 and not clocks.collectives):
        return clocks.note
    far = f"{microseconds(residual['p50'])} us (p50), {microseconds(residual['max'])} us (max)"
    if clocks.count > 1:
        return f"{clocks.note}; remaining difference {far}"
    return f"{clocks.note}; as a check: ranks end the same collective {far} apart"


def print_bandwidth(result: Bandwidth) -> None:
    """Print the time per rank and the table, then how the times were measured and what was not matched."""
    print_fact(
        "total",
        f"{result.total_ms:,.3f} ms in {result.timed_collectives:,} timed collectives and transfers "
        f"({result.timed_calls:,} of {result.calls:,} calls have a measured time)",
    )
    if (overlap := result.overlap) is not None:
        print_fact("time", overlap.text)
        ranks = "1 rank" if overlap.of_ranks == 1 else f"all {overlap.of_ranks:,} ranks together"
        of = f"of {plural(overlap.windows, 'traced step or window', 'traced steps or windows')}, {ranks}"
        print_fact("", f"{of}, measured on the {' and the '.join(overlap.measured_on)}")
        if overlap.outside_ms:
            print_fact("", f"{overlap.outside_ms:,.3f} ms of communication, summed over ranks, is outside of these")
    table = bandwidth_table(result, [KEYS[name] for name in result.by], _SHOWN, more="--json shows all")
    table.print("Collectives and transfers, most time first")
    if any(row["upper_bounds"] for row in result.rows):
        print(f"  {BOUNDS}")
    if result.openings:
        left_out = plural(result.openings, "collective")
        print(f"  waiting leaves out {left_out} at the start of profiler windows: ranks wait there for other profilers")
    lacking = f", {len(result.missing_ranks)} missing" if result.missing_ranks else ""
    print()
    print_fact("ranks", f"{len(result.ranks)} of {result.world_size}{lacking}")
    for source, count in result.sources.items():
        print_fact("measured", f"{TIMED_BY[source]}; {plural(count, 'rank')}")
    print_fact("clocks", alignment_text(result.clocks))
    print_counts("Measured times with a known operation, by source", result.attributed.items())
    print_counts("Launches matched across ranks (batches are not), by", result.matched.items())
    print_counts("Skipped, or not fully known, by reason", result.unattributed.items())
    print_counts("Not compared across ranks", result.not_compared.items())
    if result.unattributed_ms:
        print(f"  {result.unattributed_ms:,.3f} ms of communication kernels without a call")
    print_notes(result.notes)


def _of(column: str, name: str, text: Callable[[float | None], str]) -> Callable[[Row], object]:
    return lambda row: text((row[column] or {}).get(name))


_MEASURED: tuple[Column, ...] = (
    ("#ranks", lambda row: row["ranks"] or "-"),
    ("#collectives", lambda row: f"{row['collectives']:,}"),
    ("#upper\nbounds", lambda row: row["upper_bounds"] or ""),
    ("#total\nbytes", lambda row: amount(row["bytes"], row["unsized"])),
    ("#time\np50 us", _of("time_us", "p50", microseconds)),
    ("#time\np95 us", _of("time_us", "p95", microseconds)),
    ("#time\nmax us", _of("time_us", "max", microseconds)),
    ("#waiting\np50 us", _of("waiting_us", "p50", microseconds)),
    ("#waiting\np95 us", _of("waiting_us", "p95", microseconds)),
    ("#algbw\np50 GB/s", _of("algbw_gb_per_s", "p50", significant)),
    ("#busbw\np50 GB/s", _of("busbw_gb_per_s", "p50", significant)),
    ("#busbw\np5 GB/s", _of("busbw_gb_per_s", "p5", significant)),
    ("#share of\nline rate", _of("line_rate_share", "p50", percent)),
)
