"""`crossrank bandwidth`: the speed of each collective, and which rank waited for which."""

from __future__ import annotations

import argparse

from crossrank.errors import CrossrankError
from crossrank.tools.analysis.bandwidth import BY, KEYS, Bandwidth, bandwidth, line_rates
from crossrank.tools.commands.options import add_measured_arguments, complain_of, read_measured, write_output
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.from_replay import is_replay, read_replay
from crossrank.tools.job.launches import LEFT_OUT
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.bandwidth import print_bandwidth
from crossrank.tools.output.console import as_json


class BandwidthCommand:
    """Show time, algbw, busbw and waiting time of every collective, by operation, group, size and locality. Reads
    Nsight Systems exports (.sqlite), Kineto traces, flight-recorder dumps with timing, logs of NCCL Inspector, a
    recording with any of them, or the folder of a replay. The time of a collective starts at the last arrival. Rates
    follow nccl-tests. Exit code 1: ranks are missing, or a file is not usable."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        meaning = f"columns to group by: {','.join(KEYS)} (default {','.join(BY)})"
        parser.add_argument("--by", default=",".join(BY), metavar="KEYS", help=meaning)
        add_measured_arguments(parser, [one for one in CHOICES if one != "comms"], "line-rate")
        parser.add_argument("-o", "--output", metavar="FILE", help="write the result as JSON to FILE (bandwidth.json)")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.path
        by = [name for name in arguments.by.split(",") if name]
        if not by or not set(by) <= set(KEYS):
            wrong = next((name for name in by if name not in KEYS), arguments.by)
            raise CrossrankError(f"--by: {wrong!r} is not a column; choose from {', '.join(KEYS)}")
        rates = line_rates(arguments.line_rate)
        found = _of_replay(arguments) if is_replay(paths[0]) and len(paths) == 1 else read_measured(arguments)
        result = bandwidth(found, inputs=paths, by=by, rates=rates)
        if not result.timed_calls:
            raise CrossrankError(f"{', '.join(paths)}: {_why_none(result, found)}")
        content = as_json(result)
        if arguments.output is not None:
            write_output(arguments.output, content.encode())
        if arguments.json:
            print(content, end="")
        else:
            print_bandwidth(result)
        return complain_of(found, arguments)


def _of_replay(arguments: argparse.Namespace) -> JobTables:
    """Read a replay. It has one file, so no option about ranks, sources or workers applies."""
    for name in ("ranks", "source", "cluster"):
        if getattr(arguments, name) is not None:
            raise CrossrankError(f"{arguments.path[0]}: is a replay; remove --{name}")
    return read_replay(arguments.path[0])


def _why_none(result: Bandwidth, found: JobTables) -> str:
    """Return why no call has a time, and the next step."""
    if not result.calls:
        if hidden := result.unattributed.get(LEFT_OUT):
            return f"0 calls, and {hidden:,} {LEFT_OUT}"
        notes = "".join(f" ({note})" for note in result.notes[:1])
        return f"has no calls that communicate{notes}; give the traces of a job that communicates"
    step = "record with TRACING_TIMING=1 or a window (TRACING_WINDOW=START:STOP), or with Nsight Systems"
    if all(one.source == "nsight" for one in found.job.ranks.values()):
        step = "give a recording with a window (TRACING_WINDOW=START:STOP), with --source kineto"
    why = "".join(f" ({note})" for note in result.notes[:2])
    return f"{result.calls:,} calls, but none has a measured time{why}; {step}"
