"""The table of `crossrank bandwidth`, for the console and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crossrank.text import amount, microseconds, percent, printable, significant, size_text
from crossrank.tools.analysis.bandwidth import Bandwidth, BandwidthRow, summary_lines
from crossrank.tools.output.console import Table, table_of

_SHOWN = 24
_NOTES = 8
BOUNDS = "upper bounds: not all members were seen, several calls shared a launch, or the end is known only from a wait"


Column = Callable[[BandwidthRow], object]


def group_text(row: BandwidthRow) -> str:
    name = f"{row.pg} {row.desc or ''}".strip()
    return "-" if row.pg is None else f"{name} ({row.ranks})" if name else "unknown"


KEYS: dict[str, tuple[str, Column]] = {
    "op": ("operation", lambda row: row.op),
    "group": ("group", group_text),
    "size": ("size", lambda row: size_text(row.size_to)),
    "locality": ("locality", lambda row: row.locality),
    "source": ("source", lambda row: row.source or "(C++)"),
}


def bandwidth_table(
    result: Bandwidth, keys: Sequence[tuple[str, Column]], limit: int, *, more: str, id: str = "", choices: int = 0
) -> Table:
    """Rows that took longest first, `keys` before what was measured; see `Table` for the others."""
    columns = [*keys, *_MEASURED]
    if any(row.line_rate_share for row in result.rows):
        columns.append(("#of line rate", _of("line_rate_share", "p50", percent)))
    if any(row.upper_bounds for row in result.rows):
        columns.append(("#upper bounds", lambda row: row.upper_bounds or ""))
    return table_of(result.rows, columns, limit=limit, more=more, id=id, choices=choices)


def print_bandwidth(result: Bandwidth) -> None:
    for line in summary_lines(result):
        print(printable(line))
    for title, counts in (
        ("Kernels and other activities, by how they found their call", result.attributed),
        ("Not attributed", result.unattributed),
        ("Not compared across ranks", result.not_compared),
    ):
        if counts:
            print(f"\n{title}")
            for text, count in counts.items():
                print(f"  {count:>9,}  {printable(text)}")
    if result.unattributed_ms:
        print(f"  {result.unattributed_ms:,.3f} ms of communication kernels belong to no known call")
    table = bandwidth_table(result, [KEYS[name] for name in result.by], _SHOWN, more="--json has all")
    table.print("Collectives and transfers, those that took longest in all first")
    if any(row.upper_bounds for row in result.rows):
        print(f"  {BOUNDS}")
    notes = list(dict.fromkeys(result.notes))
    for note in notes[:_NOTES]:
        print(f"\nnote       {printable(note)}")
    if len(notes) > _NOTES:
        print(f"\n… and {len(notes) - _NOTES} more notes: --json has all")


def _of(column: str, name: str, text: Callable[[float | None], str]) -> Column:
    return lambda row: text((getattr(row, column) or {}).get(name))


_MEASURED: tuple[tuple[str, Column], ...] = (
    ("#collectives", lambda row: f"{row.collectives:,}"),
    ("#S in all", lambda row: amount(row.bytes, row.unsized)),
    ("#time p50", _of("time_us", "p50", microseconds)),
    ("#p95", _of("time_us", "p95", microseconds)),
    ("#max us", _of("time_us", "max", microseconds)),
    ("#waiting p50", _of("waiting_us", "p50", microseconds)),
    ("#p95 us", _of("waiting_us", "p95", microseconds)),
    ("#algbw p50", _of("algbw_gb_per_s", "p50", significant)),
    ("#busbw p50", _of("busbw_gb_per_s", "p50", significant)),
    ("#p5 GB/s", _of("busbw_gb_per_s", "p5", significant)),
)
