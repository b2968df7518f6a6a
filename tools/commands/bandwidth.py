"""`crossrank bandwidth`: how fast each collective really was, and who waited for whom."""

from __future__ import annotations

import argparse
import sys

import msgspec

from crossrank.errors import CrossrankError
from crossrank.text import amount, printable
from crossrank.tools.analysis.bandwidth import BY, KEYS, Bandwidth, Row, bandwidth, line_rates, summary_lines
from crossrank.tools.analysis.buckets import size_text
from crossrank.tools.commands.measured import Measured, add_measured_arguments, read_measured
from crossrank.tools.commands.options import write_output
from crossrank.tools.job.from_replay import is_replay, read_replay
from crossrank.tools.job.launches import LEFT_OUT
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.console import print_table

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
        parser.add_argument(
            "--line-rate",
            action="append",
            default=[],
            metavar="[LOCALITY=]RATE",
            help="show the share of it that busbw reaches: 400Gbps, 50GB/s, intra_node=450GB/s; may be given again",
        )
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.add_argument("-o", "--output", metavar="FILE", help="write the result as JSON to FILE (bandwidth.json)")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.path
        by = [name for name in arguments.by.split(",") if name]
        strange = [name for name in by if name not in KEYS]
        if strange or not by:
            raise CrossrankError(f"--by {arguments.by!r}: choose among {', '.join(KEYS)}")
        rates = line_rates(arguments.line_rate)
        measured = _of_replay(arguments) if is_replay(paths[0]) and len(paths) == 1 else read_measured(arguments)
        result = bandwidth(
            measured.ranks, measured.together, inputs=paths, by=by, rates=rates, skipped=measured.skipped
        )
        if not result.timed_calls:
            hidden = result.unattributed.get(LEFT_OUT)
            if hidden and not result.calls:
                raise CrossrankError(f"{', '.join(paths)}: 0 calls, and {hidden:,} {LEFT_OUT}")
            if not result.calls:
                raise CrossrankError(
                    f"{', '.join(paths)}: holds no communication; name the traces of a job that has some"
                )
            why = "".join(f" ({note})" for note in result.notes[:2])
            step = (
                "record a window (TRACING_WINDOW=START:STOP), or a report of Nsight Systems, or set "
                "TORCH_NCCL_ENABLE_TIMING=1"
            )
            if all(one.source == "nsight" for one in measured.ranks):
                step = "name a recording with a window (TRACING_WINDOW=START:STOP); beside exports: --source kineto"
            raise CrossrankError(
                f"{', '.join(paths)}: {result.calls:,} calls, but nothing says how long one took{why}; {step}"
            )
        content = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
        if arguments.output is not None:
            write_output(arguments.output, content)
        if arguments.json:
            sys.stdout.write(content.decode())
        else:
            _print(result)
        return measured.complain()


def _of_replay(arguments: argparse.Namespace) -> Measured:
    """A replay has been read by its own ranks: there is no work to share, and nothing to choose."""
    for name in ("ranks", "source", "shard", "merge", "cluster"):
        if getattr(arguments, name) is not None:
            raise CrossrankError(f"{arguments.path[0]}: is a replay, which --{name} is not for; leave it out")
    ranks, together = read_replay(arguments.path[0])
    return Measured(ranks, together, [], False)


def _print(result: Bandwidth) -> None:
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
    shared = any(row.line_rate_share for row in result.rows)
    bounds = any(row.upper_bounds for row in result.rows)
    columns = [
        *(_TITLES[name] for name in result.by),
        "#collectives",
        "#S in all",
        "#time p50",
        "#p95",
        "#max us",
        "#waiting p50",
        "#p95 us",
        "#algbw p50",
        "#busbw p50",
        "#p5 GB/s",
    ]
    columns += ["#of line rate"] if shared else []
    columns += ["#upper bounds"] if bounds else []
    rows = [_cells(row, result.by, shared=shared, bounds=bounds) for row in result.rows[:_SHOWN]]
    print_table("Collectives and transfers, those that took longest in all first", columns, rows)
    if len(result.rows) > _SHOWN:
        print(f"  … and {len(result.rows) - _SHOWN} more: --json has all")
    if bounds:
        print("  upper bounds: not all members were seen, several calls shared a launch, or only a wait told the end")
    notes = list(dict.fromkeys(result.notes))
    for note in notes[:_NOTES]:
        print(f"\nnote       {printable(note)}")
    if len(notes) > _NOTES:
        print(f"\n… and {len(notes) - _NOTES} more notes: --json has all")


_TITLES = {"op": "operation", "group": "group", "size": "size", "locality": "locality", "source": "source"}


def _cells(row: Row, by: list[str], *, shared: bool, bounds: bool) -> list[object]:
    name = f"{row.pg} {row.desc or ''}".strip()
    group = f"{name} ({row.ranks})" if name else "unknown"
    said: dict[str, object] = {
        "op": row.op,
        "group": group if row.pg is not None else "-",
        "size": size_text(row.size_to),
        "locality": row.locality,
        "source": row.source or "(C++)",
    }
    cells: list[object] = [said[name] for name in by]
    waiting = row.waiting_us or {}
    cells += [f"{row.collectives:,}", amount(row.bytes, row.unsized)]
    cells += [microseconds(row.time_us[name]) for name in ("p50", "p95", "max")]
    cells += [microseconds(waiting.get(name)) for name in ("p50", "p95")]
    cells += [rate(row.algbw_gb_per_s, "p50"), rate(row.busbw_gb_per_s, "p50"), rate(row.busbw_gb_per_s, "p5")]
    if shared:
        cells.append(f"{row.line_rate_share['p50']:.1%}" if row.line_rate_share else "-")
    if bounds:
        cells.append(row.upper_bounds or "")
    return cells


def microseconds(value: float | None) -> str:
    """A time in us, or a dash where there is none."""
    return "-" if value is None else f"{value:,.1f}"


def rate(figures: dict[str, float] | None, name: str) -> str:
    """A rate in GB/s with three digits, or a dash where there is none."""
    return "-" if figures is None else f"{figures[name]:.3g}"
