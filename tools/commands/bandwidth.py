"""`crossrank bandwidth`: how fast each collective really was, and who waited for whom."""

from __future__ import annotations

import argparse

from crossrank.errors import CrossrankError
from crossrank.tools.analysis.bandwidth import BY, KEYS, Bandwidth, bandwidth, line_rates
from crossrank.tools.commands.measured import add_measured_arguments, complain_of, read_measured
from crossrank.tools.commands.options import write_output
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.from_replay import is_replay, read_replay
from crossrank.tools.job.launches import LEFT_OUT
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.bandwidth import print_bandwidth
from crossrank.tools.output.console import as_json


class BandwidthCommand:
    """Time, algbw, busbw and waiting of every collective, by operation, group, size and locality. From Nsight Systems
    exports (.sqlite), Kineto traces (linked or not), flight-recorder dumps with timing, logs of NCCL Inspector, a
    recording that holds any of them, or the folder of a replay. The time of a collective runs from the last arrival;
    rates follow nccl-tests. Says what could not be attributed. Exit code 1: ranks are missing, or a file could not be
    used."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        meaning = f"what rows are grouped by, of {','.join(KEYS)} (default {','.join(BY)})"
        parser.add_argument("--by", default=",".join(BY), metavar="KEYS", help=meaning)
        add_measured_arguments(parser, [one for one in CHOICES if one != "comms"], "line-rate")
        parser.add_argument("-o", "--output", metavar="FILE", help="write the result as JSON to FILE (bandwidth.json)")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.path
        by = [name for name in arguments.by.split(",") if name]
        if not by or not set(by) <= set(KEYS):
            raise CrossrankError(f"--by {arguments.by!r}: choose among {', '.join(KEYS)}")
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
    """A replay has been read by its own ranks: there is no work to share, and nothing to choose."""
    for name in ("ranks", "source", "cluster"):
        if getattr(arguments, name) is not None:
            raise CrossrankError(f"{arguments.path[0]}: is a replay, which --{name} is not for; leave it out")
    return read_replay(arguments.path[0])


def _why_none(result: Bandwidth, found: JobTables) -> str:
    """Why no call has a time, and what to do about it."""
    if not result.calls:
        hidden = result.unattributed.get(LEFT_OUT)
        return (
            f"0 calls, and {hidden:,} {LEFT_OUT}"
            if hidden
            else ("holds no communication; name the traces of a job that has some")
        )
    step = "record with TRACING_TIMING=1 or a window (TRACING_WINDOW=START:STOP), or a report of Nsight Systems"
    if all(one.source == "nsight" for one in found.job.ranks.values()):
        step = "name a recording with a window (TRACING_WINDOW=START:STOP); beside exports: --source kineto"
    why = "".join(f" ({note})" for note in result.notes[:2])
    return f"{result.calls:,} calls, but nothing says how long one took{why}; {step}"
