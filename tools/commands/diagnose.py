"""`crossrank diagnose`: which rank, which group, which call."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crossrank.errors import CrossrankError
from crossrank.recording import is_folder
from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.call_history import WINDOW
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Evidence, find_candidates, read_evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.commands.options import add_shared, complain, fleet_of, write_output
from crossrank.tools.output.diagnosis.verdict import Filter, print_diagnosis


class DiagnoseCommand:
    """Match the calls of all ranks and say what is wrong, root cause first: from flight-recorder dumps (pickle or
    JSON, NCCL, gloo or any backend) or from a recording's own files. Dumps are read as data; nothing in them is run.
    Exit code 0: healthy. 1: a fault, or a rank without a usable dump. 2: nothing could be used."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("path", nargs="+", help="a recording, a folder of dumps (and all below it), or the dumps")
        add("-o", "--output", metavar="FILE", help="write the diagnosis as JSON to FILE")
        add("--html", metavar="FILE", help="write one page that works without a network")
        meaning = "write groups, memberships, collectives, calls and tracebacks as SQLite tables"
        add("--database", metavar="FILE", help=meaning)
        add("--print-entries", action="store_true", help="print every call, rank beside rank")
        add("--groups", nargs="+", metavar="NAME", help="as --ranks, of these groups, by name or description")
        meaning = "ranks without a usable dump are no fault, and are taken to be where the others are"
        add("--allow-missing", action="store_true", help=meaning)
        add("--world-size", type=int, metavar="N", help="ranks of the job, where no file says it")
        meaning = (
            f"read of every dump what is not over and the N calls before it (from {WINDOW} on: so many are looked back "
            "at), and comms files only of ranks that called since: for who waits for whom among thousands of ranks"
        )
        add("--last", type=_count, metavar="N", help=meaning)
        meaning = (
            "of the findings, notes, stragglers and entries print those of these ranks, 0-7,12, and of what they "
            "follow from; the verdict, the exit code, --json and files are of all"
        )
        add_shared(parser, "json", "ranks", ranks=meaning)

    def run(self, arguments: argparse.Namespace) -> int:
        evidence = _read(arguments)
        diagnosis, job = diagnose(evidence, world_size=arguments.world_size, allow_missing=arguments.allow_missing)
        if not any(len(one.calls) or one.dump.has_status for one in job.ranks.values()):
            raise CrossrankError(
                f"{', '.join(arguments.path)}: no dump has an entry or any progress; was TORCH_FR_BUFFER_SIZE=0, did "
                "the job not communicate, or only by sends and receives on gloo, which torch does not record "
                "(crossrank does)?"
            )
        _check_filters(job, arguments.ranks, arguments.groups)
        _write(arguments, diagnosis, job)
        if arguments.json:
            sys.stdout.write(diagnosis.to_json().decode())
        else:
            print_diagnosis(diagnosis, Filter(ranks=arguments.ranks, groups=arguments.groups))
        if arguments.print_entries:
            from crossrank.tools.output.diagnosis.call_tables import print_entries

            print_entries(job, arguments.ranks, arguments.groups)
        complain(*evidence.skipped, most=12)
        return 0 if diagnosis.verdict == "ok" else 1


def _read(arguments: argparse.Namespace) -> Evidence:
    paths: list[str] = arguments.path
    where = ", ".join(paths)
    candidates = find_candidates(paths)
    if not candidates:
        raise CrossrankError(
            f"{where}: holds neither dumps nor comms files; name the folder of the dumps or a recording"
        )
    fleet = fleet_of(arguments, sum(candidate.size for candidate in candidates))
    named = not any(is_folder(path) for path in paths)
    evidence = read_evidence(candidates, fleet, named=named, last=arguments.last)
    if not evidence.ranks:
        reasons = "; ".join(evidence.skipped[:3]) or f"none of {len(candidates)} file(s) is a dump of a known rank"
        raise CrossrankError(
            f"{where}: nothing to diagnose ({reasons}); name a folder of flight-recorder dumps or a recording"
        )
    return evidence


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and WINDOW <= int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of calls from {WINDOW} on")
    return int(text)


def _write(arguments: argparse.Namespace, diagnosis: Diagnosis, job: JobState) -> None:
    """The files that are asked for."""
    if arguments.output is not None:
        write_output(arguments.output, diagnosis.to_json())
    if arguments.html is not None:
        from crossrank.tools.output.diagnosis.diagnosis_page import diagnosis_page

        write_output(arguments.html, diagnosis_page(diagnosis).encode())
    if arguments.database is not None:
        from crossrank.tools.output.diagnosis.call_tables import write_database

        write_database(arguments.database, job, diagnosis)


def _check_filters(job: JobState, ranks: set[int] | None, groups: Sequence[str] | None) -> None:
    strange = sorted((ranks or set()) - set(job.world))
    if strange:
        raise CrossrankError(f"--ranks names {strange[0]}; the job has rank {rank_ranges(job.world)}")
    names = {name for group in job.groups for name in group.pg if name}
    for name in groups or ():
        if name not in names:
            raise CrossrankError(f"--groups names {name!r}; the groups are {', '.join(sorted(names)[:20])}")
