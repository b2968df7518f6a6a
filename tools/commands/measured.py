"""The arguments of `bandwidth` and `timeline`, and the times of all ranks that they read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from crossrank.text import rank_ranges
from crossrank.tools.commands.options import add_shared, add_source, complain, fleet_of
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.sources import open_job


def add_measured_arguments(parser: argparse.ArgumentParser, sources: Sequence[str], *shared: str) -> None:
    """Add the options that `read_measured` reads, and `shared` ones. `sources` are the choices of --source."""
    parser.add_argument("path", nargs="+", help="a recording, a folder of traces or exports, or files")
    add_source(parser, sources)
    meaning = (
        "read only these ranks, for example 0-7,12. In a group with other members, the last arrival is unknown, so its "
        "times include waiting"
    )
    add_shared(parser, "ranks", *shared, "json", ranks=meaning)


def read_measured(arguments: argparse.Namespace) -> JobTables:
    """Return the tables of the job. Raises `CrossrankError` if no file is usable."""
    wanted, source = arguments.ranks, arguments.source
    return open_job(arguments.path, fleet_of(arguments), wanted, source, arguments.communication_kernels)


def complain_of(found: JobTables, arguments: argparse.Namespace) -> int:
    """Report skipped files and missing ranks, and return the exit code. With --ranks, no rank counts as missing."""
    complain(*found.job.skipped, most=8)
    missing = found.job.missing if arguments.ranks is None else []
    if missing:
        complain(f"rank {rank_ranges(missing)} is missing: times of its groups include waiting time")
    return 1 if found.job.skipped or missing else 0
