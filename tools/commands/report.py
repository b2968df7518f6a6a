"""`crossrank report`: one page about a job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossrank.atomic_file import join
from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, FLIGHT, list_recording
from crossrank.text import amount, milliseconds, percent, plural
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Failure, failed, find_candidates, put_together, read_candidate
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.commands.options import (
    add_shared,
    add_source,
    complain,
    fleet_of,
    folder_of,
    write_output,
)
from crossrank.tools.job import sources
from crossrank.tools.job.read_rank import RankSources
from crossrank.tools.output.console import print_fact, print_json
from crossrank.tools.parallel import map_ranks
from crossrank.tools.traces.discover import RANK, FoundFile, discover
from crossrank.tools.traces.kept import files_kept
from crossrank.tools.traces.rank_trace import RankTrace
from crossrank.tools.traces.replayed import JSON, ReplayReport, read_report
from crossrank.tools.traces.seen import Seen

if TYPE_CHECKING:
    from crossrank.tools.analysis.figures import Figures


class ReportCommand:
    """Write one HTML page about a job: traffic by operation, group, rank and source line, bandwidth, waiting time,
    overlap, steps, and the diagnosis. The page works without a network. Reads recordings, Nsight exports, Kineto traces
    and flight-recorder dumps. Exit code 1: the diagnosis found a fault, ranks are missing, or a file is not usable."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("path", nargs="+", help="a recording, a folder of traces or exports, or files")
        add("-o", "--output", metavar="FILE", help="output file (default: report.html in the folder of the input)")
        add("--replay", metavar="DIR", help="the folder that crossrank replay -o DIR wrote for this recording")
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
            complain(f"rank {found.missing_ranks} is missing")
        faulty = found.diagnosis is not None and found.diagnosis.verdict != "ok"
        return 1 if faulty or found.skipped or found.missing_ranks else 0


def _figures(arguments: argparse.Namespace) -> Figures:
    """Return all figures of the inputs. The same workers read a rank's times and its evidence for the diagnosis."""
    # Import here: workers import this module too, and do not need polars.
    from crossrank.tools.analysis.bandwidth import line_rates
    from crossrank.tools.analysis.figures import figures

    paths: list[str] = arguments.path
    rates = line_rates(arguments.line_rate)
    files = discover(paths)
    times = sources.find(paths, None, arguments.source, files, arguments.communication_kernels)
    candidates = [one for one in find_candidates(paths, files) if one.kind in (COMMS, FLIGHT)]
    replay = _replay(paths, arguments.replay)  # before the ranks, so that an error is reported at once
    items = _by_rank(times.tasks, candidates)
    results = map_ranks(_read, items, fleet_of(arguments), failed=_failed)
    read = {file.path: evidence for _, found in results for file, evidence in found}
    measured = [found for found, _ in results if found is not None]
    diagnosis, problem = _diagnose(candidates, [read[one.path] for one in candidates])
    del results, read  # frees memory: they are as large as the input of the figures
    return figures(
        sources.job_of(sources.settle(measured, times), times),
        inputs=paths,
        rates=rates,
        diagnosis=diagnosis,
        diagnosis_problem=problem,
        replay=replay,
    )


def _replay(paths: Sequence[str], folder: str | None) -> ReplayReport | None:
    """Return the replay in `folder`; by default in the folder of the recording."""
    folders = [path for path in paths if RANK not in path]
    folder = folder or next((path for path in folders if JSON in list_recording(path).unrecognized), None)
    return read_report(folder) if folder is not None else None


@dataclass(frozen=True)
class _Item:
    """The input of one worker: measurements of a rank's calls, and evidence for the diagnosis, often the same files."""

    times: RankSources | None
    evidence: list[FoundFile]


_Read = tuple[list[RankTrace] | str | None, list[tuple[FoundFile, RankTrace | Failure | Seen]]]


def _by_rank(tasks: Sequence[RankSources], candidates: Sequence[FoundFile]) -> list[_Item]:
    """Return the inputs of the workers: one worker reads all files of a rank."""
    items = [_Item(task, []) for task in tasks]
    of_path = {path: item for task, item in zip(tasks, items, strict=True) for path in (task.path, task.flight)}
    for file in candidates:
        if file.path in of_path:
            of_path[file.path].evidence.append(file)
        else:
            items.append(_Item(None, [file]))
    return items


def _read(item: _Item) -> _Read:
    """Read the files of one rank; runs in a worker."""
    with files_kept():
        return (
            None if item.times is None else sources.read_task(item.times),
            [(file, read_candidate(file)) for file in item.evidence],
        )


def _failed(item: _Item, error: CrossrankError) -> _Read:
    if item.times is None:
        return None, [(file, failed(file, error)) for file in item.evidence]
    # Files of a rank that cannot be measured may still be evidence: for example, a dump next to a broken comms file.
    return sources.failed(item.times, error), [(file, read_candidate(file)) for file in item.evidence]


def _diagnose(candidates: list[FoundFile], results: list[RankTrace | Failure | Seen]) -> tuple[Diagnosis | None, str]:
    """Return the diagnosis, or the reason why there is none."""
    if not candidates:
        return None, "there is no comms file and no flight-recorder dump"
    try:
        evidence = put_together(candidates, results)
        if not evidence.ranks:
            return None, "; ".join(evidence.skipped[:3]) or "no file is usable"
        return diagnose(evidence)[0], ""
    except CrossrankError as error:
        return None, str(error)


def _print(output: str, size: int, found: Figures) -> None:
    print_fact("report", f"{output}, {amount(size)}")
    verdict = found.diagnosis.verdict if found.diagnosis else f"none: {found.diagnosis_problem}"
    print_fact("diagnosis", verdict)
    ranks, calls = f"{found.ranks} of {plural(found.world_size, 'rank')}", f"{found.calls:,} calls"
    timed = f"{found.bandwidth.timed_calls:,} with a measured time"
    bytes = "sizes unknown" if found.bytes is None else amount(found.bytes, found.unsized)
    print_fact("contents", f"{ranks}, {calls} ({timed}), {bytes}")
    if (exposed := found.exposed) is not None:
        shown = f"{plural(exposed.waits, 'wait')} of the hosts, over the whole recording"
        if exposed.steps:
            shown = (
                f"{milliseconds(exposed.per_step_ms)} per step (median), {percent(exposed.share)} of step time: the "
                "time that hosts waited, over the steps without start or stop of a profiler"
            )
        print_fact("exposed", shown)
        if exposed.calls_without:
            print_fact("", f"a lower bound: {plural(exposed.calls_without, 'call')} without a recorded wait")
