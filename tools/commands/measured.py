"""What `bandwidth` and `timeline` begin with: the times of all ranks at the paths that the user names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from crossrank.text import rank_ranges
from crossrank.tools.commands.options import add_shared, add_source, complain, fleet_of
from crossrank.tools.job.collectives import JobTables
from crossrank.tools.job.sources import open_job


def add_measured_arguments(parser: argparse.ArgumentParser, sources: Sequence[str], *shared: str) -> None:
    """The options that `read_measured` reads, and others; `sources` are what the user may choose among."""
    parser.add_argument("path", nargs="+", help="a recording, a folder of traces or exports, or the files")
    add_source(parser, sources)
    meaning = "read only these, for example 0-7,12; times of groups with others then include waiting for them"
    add_shared(parser, "ranks", *shared, "json", ranks=meaning)


def read_measured(arguments: argparse.Namespace) -> JobTables:
    """Raises `CrossrankError` where nothing can be used."""
    wanted, source = arguments.ranks, arguments.source
    return open_job(arguments.path, fleet_of(arguments), wanted, source, arguments.communication_kernels)


def complain_of(found: JobTables, arguments: argparse.Namespace) -> int:
    """Report what could not be used, and ranks that are missing where the user did not choose some; the exit code that
    follows."""
    complain(*found.job.skipped, most=8)
    missing = found.job.missing if arguments.ranks is None else []
    if missing:
        complain(f"rank {rank_ranges(missing)} is not there: times of its groups include waiting for it")
    return 1 if found.job.skipped or missing else 0
