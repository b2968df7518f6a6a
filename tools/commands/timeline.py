"""`crossrank timeline`: all ranks on one Perfetto timeline."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import get_args

import msgspec

from crossrank.atomic_file import gzip_writer, join
from crossrank.text import amount, printable
from crossrank.tools.commands.measured import add_measured_arguments, complain_of, read_measured
from crossrank.tools.commands.options import folder_of, output_file
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.bandwidth import alignment_text
from crossrank.tools.output.console import print_json, print_notes
from crossrank.tools.output.timeline.build import Flows, Written, write_timeline


class TimelineCommand:
    """Lay all ranks on one timeline, on one clock, for ui.perfetto.dev: a track per rank for its calls, one for its
    communication on the device, steps, arrows from the first to the last arriver of each collective, and counters of
    bytes in flight and bus bandwidth. From recordings, Nsight exports, Kineto traces and flight-recorder dumps; calls
    without times of the device stand where the host made them. Exit code 1: ranks are missing, or a file could not be
    used."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        meaning = "where to (default: timeline.pftrace in the folder of the input); .gz compresses"
        parser.add_argument("-o", "--output", metavar="FILE", help=meaning)
        meaning = "arrows between the ranks of a collective: first to last arriver (default), through all, or none"
        parser.add_argument("--flows", choices=get_args(Flows), default="first-last", help=meaning)
        add_measured_arguments(parser, CHOICES)

    def run(self, arguments: argparse.Namespace) -> int:
        output = arguments.output or join(folder_of(arguments.path[0]), "timeline.pftrace")
        found = read_measured(arguments)
        with output_file(output) as temporary:
            with temporary.open("wb") as plain, ExitStack() as stack:
                file = stack.enter_context(gzip_writer(plain)) if output.endswith(".gz") else plain
                written = write_timeline(found, file, flows=arguments.flows)
            size = temporary.stat().st_size
        if arguments.json:
            read = {"clocks": found.clocks, "notes": found.job.notes, "skipped": found.job.skipped}
            print_json({"output": output, "bytes": size} | msgspec.structs.asdict(written) | read)
        else:
            _print(output, size, written, found)
        return complain_of(found, arguments)


def _print(output: str, size: int, written: Written, found: JobTables) -> None:
    print(f"timeline   {printable(output)}, {amount(size)}")
    print(
        f"holds      {written.calls:,} calls (a batch is one), {written.activities:,} measured times, "
        f"{written.steps:,} steps, of {written.ranks} rank(s); {written.arrows:,} arrows; {written.duration_ms:,.1f} ms"
    )
    print(f"clocks     {alignment_text(found.clocks)}")
    print("open it in ui.perfetto.dev")
    print_notes(found.job.notes)
