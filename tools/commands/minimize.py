"""`crossrank minimize`: a few steps of a long recording, to share."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from crossrank.recording import COMMS
from crossrank.text import amount, rank_ranges
from crossrank.tools.commands.options import add_shared, complain, fleet_of, iterations
from crossrank.tools.output.console import Columns, print_json, table_of
from crossrank.tools.sharing.minimize import Minimized, MinimizedRank, minimize
from crossrank.tools.traces.discover import discover

_ROWS = 16


class MinimizeCommand:
    """Copy the steps A to B - 1 of a recording to a new recording: the calls of all ranks with waits and times, and the
    windows inside these steps with their traces. If the run ends there, also copy the flight-recorder dumps. Names of
    hosts, files and functions stay: `crossrank anonymize` removes them. Exit code 1: a part of a file cannot be
    read."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("recording", help="the recording: the folder TRACING_DIR, or its fsspec URL")
        meaning = "the first step, and the first step after the part"
        add("--steps", type=iterations, required=True, metavar="A:B", help=meaning)
        add("-o", "--output", required=True, metavar="DIR", help="a new folder")
        add_shared(parser, "json")

    def run(self, arguments: argparse.Namespace) -> int:
        steps: tuple[int, int] = arguments.steps
        comms = [file for file in discover([arguments.recording]) if file.kind == COMMS]
        fleet = fleet_of(arguments, sum(file.size for file in comms))
        result = minimize(arguments.recording, arguments.output, steps, fleet)
        if arguments.json:
            print_json(result)
        else:
            table_of(result.ranks, _RANKS, limit=_ROWS).print(f"Steps {steps[0]}:{steps[1]} in {arguments.output}")
            if result.dumps:
                print(f"\ndumps      {result.dumps} copied unchanged")
            for line in _notes(result):
                print(f"\nskipped    {line}")
        problems = [problem for rank in result.ranks for problem in rank.problems]
        complain(*problems)
        return 1 if problems or result.without_comms else 0


def _notes(result: Minimized) -> Iterator[str]:
    windows: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for rank in result.ranks:
        for window, (first, last) in rank.cut_windows.items():
            windows.setdefault((window, (first, last)), []).append(rank.rank)
    for (window, (first, last)), ranks in windows.items():
        yield (
            f"window {window} of rank {rank_ranges(ranks)} (steps {first} to {last}): only part of it is in the part"
        )
    for what, count in sum((Counter(rank.left_out) for rank in result.ranks), Counter[str]()).items():
        yield f"{count:,} {what}"
    if result.dumps_left_out:
        yield f"{result.dumps_left_out} flight-recorder dump(s), because every rank continued after these steps"
    if result.without_comms:
        yield f"the files of rank {rank_ranges(result.without_comms)}, which has no comms file"


_RANKS: Columns[MinimizedRank] = (
    ("rank", lambda rank: rank.rank),
    ("#calls", lambda rank: f"{rank.calls:,}"),
    ("#of", lambda rank: f"{rank.of_calls:,}"),
    ("#windows", lambda rank: len(rank.windows)),
    ("ends", lambda rank: "with the part" if rank.goes_on else "with the recording" if rank.folder else "not read"),
    ("#size", lambda rank: amount(rank.size)),
    ("#of", lambda rank: amount(rank.of_size)),
)
