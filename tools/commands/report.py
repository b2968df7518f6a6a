"""`crossrank report`: one page of all of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crossrank.atomic_file import join
from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, FLIGHT, list_recording
from crossrank.text import amount, milliseconds, percent, plural, printable
from crossrank.tools.analysis.bandwidth import line_rates
from crossrank.tools.analysis.diagnosis import evidence as diagnosis_inputs
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.commands.options import (
    add_shared,
    add_source,
    complain,
    fleet_of,
    folder_of,
    progress,
    write_output,
)
from crossrank.tools.job import sources
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.read_rank import RankSources
from crossrank.tools.output.console import print_json
from crossrank.tools.parallel import map_ranks
from crossrank.tools.traces.discover import FoundFile, discover
from crossrank.tools.traces.rank_trace import RankTrace
from crossrank.tools.traces.replayed import JSON, ReplayReport, read_report

if TYPE_CHECKING:
    from crossrank.tools.analysis.figures import Figures


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
        add_source(parser, sources.CHOICES)
        add_shared(parser, "line-rate", "json")

    def run(self, arguments: argparse.Namespace) -> int:
        from crossrank.tools.output.report import report_page

        output = arguments.output or join(folder_of(arguments.path[0]), "report.html")
        found = _figures(arguments)
        content = report_page(found).encode()
        write_output(output, content)
        if arguments.json:
            print_json(found)
        else:
            _print(output, len(content), found)
        complain(*found.skipped, most=8)
        if found.missing_ranks:
            complain(f"rank {found.missing_ranks} is not there")
        faulty = found.diagnosis is not None and found.diagnosis.verdict != "ok"
        return 1 if faulty or found.skipped or found.missing_ranks else 0


def _figures(arguments: argparse.Namespace) -> Figures:
    """All figures of the files that the arguments name. A rank's times and the evidence for the diagnosis are read by
    the same workers."""
    from crossrank.tools.analysis.figures import figures

    paths: list[str] = arguments.path
    rates = line_rates(arguments.line_rate)
    files = discover(paths)
    times = sources.find(paths, None, arguments.source, files, arguments.communication_kernels)
    candidates = [one for one in diagnosis_inputs.find_candidates(paths, files) if one.kind in (COMMS, FLIGHT)]
    replay = _replay(paths, arguments.replay)  # a wrong one is reported before the work on the ranks
    fleet = fleet_of(arguments)
    items: list[RankSources | FoundFile] = [*times.tasks, *candidates]
    results = progress("reading", len(items), lambda done: map_ranks(_read, items, fleet, failed=_failed, done=done))
    count = len(times.tasks)
    ranks = sources.settle(results[:count], times)
    diagnosis, problem = _diagnose(candidates, results[count:])
    return figures(
        ranks,
        match_collectives(Job.match(ranks)),
        inputs=paths,
        rates=rates,
        diagnosis=diagnosis,
        diagnosis_problem=problem,
        replay=replay,
        skipped=times.skipped,
    )


def _replay(paths: Sequence[str], folder: str | None) -> ReplayReport | None:
    """The replay in `folder`, or in that of the recording."""
    folder = folder or next((path for path in paths if JSON in list_recording(path).unrecognized), None)
    return read_report(folder) if folder is not None else None


def _read(item: RankSources | FoundFile) -> Any:
    return diagnosis_inputs.read_candidate(item) if isinstance(item, FoundFile) else sources.read_task(item)


def _failed(item: RankSources | FoundFile, error: CrossrankError) -> Any:
    return diagnosis_inputs.failed(item, error) if isinstance(item, FoundFile) else sources.failed(item, error)


def _diagnose(
    candidates: list[FoundFile], results: list[RankTrace | diagnosis_inputs.Failure]
) -> tuple[Diagnosis | None, str]:
    """The diagnosis, or why there is none."""
    if not candidates:
        return None, "there is neither a comms file nor a flight-recorder dump"
    try:
        evidence = diagnosis_inputs.put_together(candidates, results)
        if not evidence.ranks:
            return None, "; ".join(evidence.skipped[:3]) or "no file could be used"
        return diagnose(evidence)[0], ""
    except CrossrankError as error:
        return None, str(error)


def _print(output: str, size: int, found: Figures) -> None:
    print(f"report     {printable(output)}, {amount(size)}")
    print(
        f"holds      {found.ranks} of {found.world_size} rank(s), {found.calls:,} calls, "
        f"{found.bandwidth.timed_calls:,} of them with times; bytes in all: {amount(found.bytes, found.unsized)}"
    )
    if (exposed := found.exposed) is not None:
        shown = plural(exposed.waits, "wait")
        if exposed.steps:
            median = milliseconds(exposed.per_step_ms)
            least = "at least " if exposed.calls_without else ""
            shown = f"{least}{percent(exposed.share)} of the iterations, {median} of each at the median"
        print(f"exposed    {shown}, on the hosts; {plural(exposed.calls_without, 'call')} without a recorded wait")
    verdict = found.diagnosis.verdict if found.diagnosis else f"none: {found.diagnosis_problem}"
    print(f"diagnosis  {printable(verdict)}")
