"""`crossrank timeline`: all ranks on one Perfetto timeline."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import get_args

import msgspec

from crossrank.atomic_file import compressed, join
from crossrank.text import amount, plural
from crossrank.tools.commands.options import add_measured_arguments, complain_of, folder_of, output_file, read_measured
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.bandwidth import alignment_text
from crossrank.tools.output.console import print_fact, print_json, print_notes
from crossrank.tools.output.timeline.build import Flows, Written, write_timeline


class TimelineCommand:
    """Write all ranks to one timeline for ui.perfetto.dev, on one clock. Each rank has its calls, its communication on
    the device, and its steps. Arrows go from the first to the last rank that arrives at a collective. Counters show
    bytes in flight and bus bandwidth. Reads recordings, Nsight exports, Kineto traces and flight-recorder dumps. A call
    without a time on the device is drawn where the host made it. Exit code 1: ranks are missing, or a file is not
    usable."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        meaning = "output file (default: timeline.pftrace in the folder of the input); .gz compresses it"
        parser.add_argument("-o", "--output", metavar="FILE", help=meaning)
        meaning = (
            "arrows of a collective: from the first to the last rank to arrive (default), through all ranks, or none"
        )
        parser.add_argument("--flows", choices=get_args(Flows), default="first-last", help=meaning)
        add_measured_arguments(parser, CHOICES)

    def run(self, arguments: argparse.Namespace) -> int:
        output = arguments.output or join(folder_of(arguments.path[0]), "timeline.pftrace")
        found = read_measured(arguments)
        with output_file(output) as temporary:
            with temporary.open("wb") as plain, ExitStack() as stack:
                file = stack.enter_context(compressed(plain, output))
                written = write_timeline(found, file, flows=arguments.flows)
            size = temporary.stat().st_size
        if arguments.json:
            read = {"clocks": found.clocks, "notes": found.job.notes, "skipped": found.job.skipped}
            print_json({"output": output, "bytes": size} | msgspec.structs.asdict(written) | read)
        else:
            _print(output, size, written, found)
        return complain_of(found, arguments)


def _print(output: str, size: int, written: Written, found: JobTables) -> None:
    print_fact("timeline", f"{output}, {amount(size)}")
    print_fact("next", "open it at https://ui.perfetto.dev, in a browser on your computer")
    steps = "no known steps" if written.steps is None else f"{written.steps:,} complete steps, counted on each rank"
    calls = f"{written.duration_ms:,.1f} ms from the first call to the last"
    print_fact("contents", f"{plural(written.ranks, 'rank')}, {steps}, {calls}")
    print_fact("", f"{written.calls:,} calls or batches, {written.activities:,} with a measured start and end")
    print_fact("", f"{written.arrows:,} arrows from the first rank of a collective or transfer to the last")
    print_fact("clocks", alignment_text(found.clocks))
    print_notes(found.job.notes)
