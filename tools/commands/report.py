"""`crossrank report`: one page of all of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from crossrank.atomic_file import join
from crossrank.text import amount, printable
from crossrank.tools.analysis.bandwidth import line_rates
from crossrank.tools.analysis.gather import gather, plan
from crossrank.tools.commands.options import add_shared, complain, fleet_of, folder_of, progress, write_output
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.console import print_json

if TYPE_CHECKING:
    from crossrank.tools.analysis.figures import Figures

_COMPLAINTS = 8


class ReportCommand:
    """Write one HTML page that works from disk without a network: what the job communicates by operation and group,
    who sends to whom, source lines, bandwidth by size, who waits for whom over time, iterations, the diagnosis, and how
    much of it was matched. From recordings, Nsight exports, Kineto traces and flight-recorder dumps. Exit code 1: the
    diagnosis found a fault, ranks are missing, or a file could not be used."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("path", nargs="+", help="a recording, a folder of traces or exports, or the files")
        add("-o", "--output", metavar="FILE", help="where to (default: report.html in the folder of the input)")
        add("--replay", metavar="DIR", help="what crossrank replay -o DIR wrote about this recording")
        add("--source", choices=CHOICES, help="what to take times from (default: what says most)")
        add_shared(parser, "line-rate", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        from crossrank.tools.analysis.figures import figures
        from crossrank.tools.output.report import report_page

        rates = line_rates(arguments.line_rate)
        output = arguments.output or join(folder_of(arguments.path[0]), "report.html")
        planned = plan(arguments.path, arguments.replay, arguments.source)
        fleet = fleet_of(arguments)
        material = progress("reading", len(planned.items), lambda done: gather(planned, fleet, done))
        found = figures(material, rates)
        content = report_page(found).encode()
        write_output(output, content)
        if arguments.json:
            print_json(found)
        else:
            _print(output, len(content), found)
        complain(*found.skipped[:_COMPLAINTS])
        if found.missing_ranks:
            complain(f"rank {found.missing_ranks} is not there")
        faulty = found.diagnosis is not None and found.diagnosis.verdict != "ok"
        return 1 if faulty or found.skipped or found.missing_ranks else 0


def _print(output: str, size: int, found: Figures) -> None:
    print(f"report     {printable(output)}, {amount(size)}")
    print(
        f"holds      {found.ranks} of {found.world_size} rank(s), {found.calls:,} calls, "
        f"{found.bandwidth.timed_calls:,} of them with times; bytes in all: {amount(found.bytes, found.unsized)}"
    )
    verdict = found.diagnosis.verdict if found.diagnosis else f"none: {found.diagnosis_problem}"
    print(f"diagnosis  {printable(verdict)}")
