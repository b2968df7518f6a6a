"""`crossrank bandwidth`: how fast each collective really was, and who waited for whom."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from crossrank.errors import CrossrankError
from crossrank.text import amount, printable
from crossrank.tools.analysis.bandwidth import BY, KEYS, Bandwidth, Row, bandwidth, line_rates, summary_lines
from crossrank.tools.analysis.buckets import size_text
from crossrank.tools.commands.measured import Measured, add_measured_arguments, read_measured
from crossrank.tools.commands.options import add_json_argument, add_line_rate_argument, write_output
from crossrank.tools.job.from_replay import is_replay, read_replay
from crossrank.tools.job.launches import LEFT_OUT
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.console import as_json, print_counts, print_rows

_SHOWN = 24
_NOTES = 8


class BandwidthCommand:
    """Time, algbw, busbw and waiting of every collective, by operation, group, size and locality. From Nsight Systems
    exports (.sqlite), Kineto traces (linked or not), flight-recorder dumps with timing, a recording that holds any of
    them, or the folder of a replay. The time of a collective runs from the last arrival; rates follow nccl-tests. Says
    what could not be attributed. Exit code 1: ranks are missing, or a file could not be used."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_measured_arguments(parser, CHOICES[:-1])
        parser.add_argument(
            "--by",
            default=",".join(BY),
            metavar="KEYS",
            help=f"what rows are grouped by, of {','.join(KEYS)} (default {','.join(BY)})",
        )
        add_line_rate_argument(parser)
        add_json_argument(parser)
        parser.add_argument("-o", "--output", metavar="FILE", help="write the result as JSON to FILE (bandwidth.json)")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.path
        by = [name for name in arguments.by.split(",") if name]
        if not by or not set(by) <= set(KEYS):
            raise CrossrankError(f"--by {arguments.by!r}: choose among {', '.join(KEYS)}")
        rates = line_rates(arguments.line_rate)
        measured = _of_replay(arguments) if is_replay(paths[0]) and len(paths) == 1 else read_measured(arguments)
        result = bandwidth(
            measured.ranks, measured.together, inputs=paths, by=by, rates=rates, skipped=measured.skipped
        )
        if not result.timed_calls:
            raise CrossrankError(f"{', '.join(paths)}: {_why_none(result, measured)}")
        content = as_json(result)
        if arguments.output is not None:
            write_output(arguments.output, content.encode())
        if arguments.json:
            print(content, end="")
        else:
            _print(result)
        return measured.complain()


def _of_replay(arguments: argparse.Namespace) -> Measured:
    """A replay has been read by its own ranks: there is no work to share, and nothing to choose."""
    for name in ("ranks", "source", "cluster"):
        if getattr(arguments, name) is not None:
            raise CrossrankError(f"{arguments.path[0]}: is a replay, which --{name} is not for; leave it out")
    ranks, together = read_replay(arguments.path[0])
    return Measured(ranks, together, [], False)


def _why_none(result: Bandwidth, measured: Measured) -> str:
    """Why no call has a time, and what to do about it."""
    if not result.calls:
        hidden = result.unattributed.get(LEFT_OUT)
        return (
            f"0 calls, and {hidden:,} {LEFT_OUT}"
            if hidden
            else ("holds no communication; name the traces of a job that has some")
        )
    step = (
        "record a window (TRACING_WINDOW=START:STOP), or a report of Nsight Systems, or set TORCH_NCCL_ENABLE_TIMING=1"
    )
    if all(one.source == "nsight" for one in measured.ranks):
        step = "name a recording with a window (TRACING_WINDOW=START:STOP); beside exports: --source kineto"
    why = "".join(f" ({note})" for note in result.notes[:2])
    return f"{result.calls:,} calls, but nothing says how long one took{why}; {step}"


def _print(result: Bandwidth) -> None:
    for line in summary_lines(result):
        print(printable(line))
    print_counts("Kernels and other activities, by how they found their call", result.attributed.items())
    print_counts("Not attributed", result.unattributed.items())
    print_counts("Not compared across ranks", result.not_compared.items())
    if result.unattributed_ms:
        print(f"  {result.unattributed_ms:,.3f} ms of communication kernels belong to no known call")
    bounds = any(row.upper_bounds for row in result.rows)
    columns = [*(_KEY_COLUMNS[name] for name in result.by), *_COLUMNS]
    if any(row.line_rate_share for row in result.rows):
        columns.append(("#of line rate", lambda row: _share(row.line_rate_share)))
    if bounds:
        columns.append(("#upper bounds", lambda row: row.upper_bounds or ""))
    title = "Collectives and transfers, those that took longest in all first"
    print_rows(title, columns, result.rows, most=_SHOWN)
    if bounds:
        print("  upper bounds: not all members were seen, several calls shared a launch, or only a wait shows the end")
    notes = list(dict.fromkeys(result.notes))
    for note in notes[:_NOTES]:
        print(f"\nnote       {printable(note)}")
    if len(notes) > _NOTES:
        print(f"\n… and {len(notes) - _NOTES} more notes: --json has all")


def _group(row: Row) -> str:
    name = f"{row.pg} {row.desc or ''}".strip()
    return "-" if row.pg is None else f"{name} ({row.ranks})" if name else "unknown"


def _microseconds(figures: dict[str, float] | None, name: str) -> str:
    return f"{figures[name]:,.1f}" if figures else "-"


def _rate(figures: dict[str, float] | None, name: str) -> str:
    """In GB/s with three digits."""
    return f"{figures[name]:.3g}" if figures else "-"


def _share(figures: dict[str, float] | None) -> str:
    return f"{figures['p50']:.1%}" if figures else "-"


_Column = tuple[str, Callable[[Row], object]]
_KEY_COLUMNS: dict[str, _Column] = {
    "op": ("operation", lambda row: row.op),
    "group": ("group", _group),
    "size": ("size", lambda row: size_text(row.size_to)),
    "locality": ("locality", lambda row: row.locality),
    "source": ("source", lambda row: row.source or "(C++)"),
}
_COLUMNS: Sequence[_Column] = (
    ("#collectives", lambda row: f"{row.collectives:,}"),
    ("#S in all", lambda row: amount(row.bytes, row.unsized)),
    ("#time p50", lambda row: _microseconds(row.time_us, "p50")),
    ("#p95", lambda row: _microseconds(row.time_us, "p95")),
    ("#max us", lambda row: _microseconds(row.time_us, "max")),
    ("#waiting p50", lambda row: _microseconds(row.waiting_us, "p50")),
    ("#p95 us", lambda row: _microseconds(row.waiting_us, "p95")),
    ("#algbw p50", lambda row: _rate(row.algbw_gb_per_s, "p50")),
    ("#busbw p50", lambda row: _rate(row.busbw_gb_per_s, "p50")),
    ("#p5 GB/s", lambda row: _rate(row.busbw_gb_per_s, "p5")),
)
