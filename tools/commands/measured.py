"""What `bandwidth` and `timeline` begin with: the times of all ranks at the paths that the user names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from crossrank.errors import CrossrankError
from crossrank.text import rank_ranges
from crossrank.tools.commands.options import add_shared, add_source, complain, fleet_of
from crossrank.tools.job.collectives import Collectives, match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.sources import find, read
from crossrank.tools.traces.rank_trace import RankTrace


@dataclass
class Measured:
    """The times of a run."""

    ranks: list[RankTrace]
    together: Collectives
    skipped: list[str]
    """Files that could not be used, and why."""
    chosen: bool
    """The user asked for some ranks only."""

    @property
    def notes(self) -> list[str]:
        """What files say about themselves, each once."""
        return list(dict.fromkeys(note for one in self.ranks for note in one.notes))

    def complain(self) -> int:
        """Report what is missing; the exit code that follows."""
        complain(*self.skipped, most=8)
        missing = sorted(set(range(self.together.world_size)) - set(self.together.ranks))
        if missing and not self.chosen:
            complain(f"rank {rank_ranges(missing)} is not there: times of its groups include waiting for it")
        return 1 if self.skipped or (missing and not self.chosen) else 0


def add_measured_arguments(parser: argparse.ArgumentParser, sources: Sequence[str], *shared: str) -> None:
    """The options that `read_measured` reads, and others; `sources` are what the user may choose among."""
    parser.add_argument("path", nargs="+", help="a recording, a folder of traces or exports, or the files")
    add_source(parser, sources)
    meaning = "read only these, for example 0-7,12; times of groups with others then include waiting for them"
    add_shared(parser, "ranks", *shared, "json", ranks=meaning)


def read_measured(arguments: argparse.Namespace) -> Measured:
    """Raises `CrossrankError` where nothing can be used."""
    found = find(arguments.path, arguments.ranks, arguments.source, also=arguments.communication_kernels)
    ranks = read(found, fleet_of(arguments))
    if arguments.ranks is not None:
        ranks = [one for one in ranks if one.rank in arguments.ranks]
    if not ranks:
        raise CrossrankError(f"{', '.join(arguments.path)}: holds none of the ranks that --ranks names")
    return Measured(ranks, match_collectives(Job.match(ranks)), found.skipped, arguments.ranks is not None)
