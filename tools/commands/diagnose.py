"""`crossrank diagnose`: the rank, group and call that caused a hang."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from crossrank.errors import CrossrankError
from crossrank.recording import is_folder
from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.call_history import WINDOW
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Evidence, find_candidates, read_evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.commands.options import add_shared, complain, fleet_of, write_output
from crossrank.tools.commands.standard_input import STANDARD_INPUT, kept_input
from crossrank.tools.output.diagnosis.verdict import Filter, print_diagnosis
from crossrank.tools.traces.discover import LOG, FoundFile


class DiagnoseCommand:
    """Match the calls of all ranks and show the faults, root cause first. Reads flight-recorder dumps (pickle or JSON,
    of NCCL, gloo or any backend) or a recording. Runs no code from a dump. Exit code 1: a fault, or a rank without a
    usable dump."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        meaning = (
            "a recording, a folder of dumps or logs with its subfolders, dumps, or logs; - reads a log from the input"
        )
        add("path", nargs="+", help=meaning)
        add("-o", "--output", metavar="FILE", help="write the diagnosis as JSON to FILE")
        add("--html", metavar="FILE", help="write the diagnosis as an HTML page that works without a network")
        meaning = "write groups, memberships, collectives, calls and tracebacks as SQLite tables"
        add("--database", metavar="FILE", help=meaning)
        add("--print-entries", action="store_true", help="print every call, with one column per rank")
        add(
            "--groups",
            nargs="+",
            metavar="NAME",
            help="print only findings and calls of these groups (name or description)",
        )
        meaning = "accept ranks without a usable dump, and assume that they made every call"
        add("--allow-missing", action="store_true", help=meaning)
        add("--world-size", type=int, metavar="N", help="number of ranks of the job, if no file has it")
        meaning = (
            "faster for thousands of ranks: read the unfinished calls of each dump and the N calls before them "
            f"({WINDOW} or more). With it, the comms file of a rank is skipped unless it has calls after the dump"
        )
        add("--last", type=_count, metavar="N", help=meaning)
        meaning = (
            "print only findings, notes, stragglers and calls of these ranks, for example 0-7,12, with their root "
            "causes; verdict, exit code, --json and files still cover all ranks"
        )
        add_shared(parser, "json", "ranks", ranks=meaning)

    def run(self, arguments: argparse.Namespace) -> int:
        with kept_input(arguments.path) as logs:
            evidence = _read(arguments, logs)
        diagnosis, job = diagnose(evidence, world_size=arguments.world_size, allow_missing=arguments.allow_missing)
        if not evidence.logs_only and not any(len(one.calls) or one.dump.has_status for one in job.ranks.values()):
            raise CrossrankError(
                f"{', '.join(arguments.path)}: no dump has a call. Possible reasons: TORCH_FR_BUFFER_SIZE=0, a job "
                "without communication, or only sends and receives on gloo, which torch does not record (crossrank "
                "does)"
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


_NO_LOGS = (".csv", ".tsv", ".json", ".yaml", ".yml", ".toml", ".ini", ".md", ".rst", ".py", ".sh", ".html", ".xml")
"""Ends of names of texts that a process wrote or read, but did not print. In a folder they are not taken as logs."""


def _as_log(one: FoundFile, left_out: tuple[str, ...]) -> FoundFile:
    is_log = one.is_text and not one.kind and not one.path.lower().endswith(left_out)
    return replace(one, kind=LOG) if is_log else one


def _read(arguments: argparse.Namespace, logs: Sequence[FoundFile]) -> Evidence:
    paths: list[str] = arguments.path
    where = ", ".join(paths)
    others = [path for path in paths if path != STANDARD_INPUT]
    candidates = [*logs, *(find_candidates(others) if others else ())]
    named = not any(is_folder(path) for path in others)
    # A text of an unknown kind is what a process printed, also if a folder has nothing else.
    if named or not any(one.kind for one in candidates):
        left_out = () if named else _NO_LOGS
        candidates = [_as_log(one, left_out) for one in candidates]
    if not candidates:
        raise CrossrankError(f"{where}: has no dumps and no comms files; give the folder of the dumps or a recording")
    fleet = fleet_of(arguments, sum(candidate.size for candidate in candidates))
    evidence = read_evidence(candidates, fleet, named=named, last=arguments.last)
    says_nothing = evidence.logs_only and not evidence.told and not named
    if not evidence.ranks and (says_nothing or not evidence.logs_only):
        none = f"none of {len(candidates)} file(s) is a dump with a known rank, or a log that has one"
        reasons = "; ".join(evidence.skipped[:3]) or none
        for one in logs:
            reasons = reasons.replace(one.path, one.shown)
        raise CrossrankError(
            f"{where}: nothing to diagnose ({reasons}); give a folder of flight-recorder dumps, a recording or logs"
        )
    return evidence


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and WINDOW <= int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of calls; give {WINDOW} or more")
    return int(text)


def _write(arguments: argparse.Namespace, diagnosis: Diagnosis, job: JobState) -> None:
    """Write the files that the options name."""
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
        raise CrossrankError(f"--ranks: the job has no rank {strange[0]}; it has rank {rank_ranges(job.world)}")
    names = {name for group in job.groups for name in group.pg if name}
    for name in groups or ():
        if name not in names:
            raise CrossrankError(f"--groups: the job has no group {name!r}; it has {', '.join(sorted(names)[:20])}")
