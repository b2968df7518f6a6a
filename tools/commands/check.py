"""`crossrank check`: whether ASTRA-sim can read and run a Chakra trace."""

from __future__ import annotations

import argparse
import os
from collections import Counter

import msgspec

from crossrank.errors import CrossrankError
from crossrank.recording import is_folder
from crossrank.tools.commands.options import SHARED, complain
from crossrank.tools.graph.chakra.convert_ranks import GROUPS
from crossrank.tools.graph.chakra.feeder_contract import Checked, check, compare
from crossrank.tools.output.console import Columns, print_counts, print_json, table_of


class CheckCommand:
    """Check that ASTRA-sim can read and run Chakra traces of any tool. Every dependency must be a node of the file,
    cycles are not allowed, communication nodes need the required attributes, and each group must be an integer that the
    group file has. With several files, also check that the ranks of a group have the same sizes in its collectives.
    Exit code 1: a trace breaks a rule. 2: a file cannot be read to its end."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("traces", nargs="+", metavar="FILE.et", help="Chakra traces, plain, gzip or zstd")
        meaning = f"the file of process groups (default: {GROUPS} in the folder of the first trace)"
        parser.add_argument("--groups", metavar="FILE", help=meaning)
        parser.add_argument("--json", **SHARED["json"])

    def run(self, arguments: argparse.Namespace) -> int:
        groups = _groups(arguments.groups, arguments.traces[0])
        results: list[Checked] = []
        for path in arguments.traces:
            try:
                if is_folder(path):
                    raise CrossrankError(
                        f"{path}: is a folder, not a Chakra trace; give the .et files that crossrank convert wrote"
                    )
                results.append(check(path, groups))
            except CrossrankError as error:
                complain(str(error))
        compare(results)
        if arguments.json:
            print_json(results)
        elif results:
            table_of(results, _COLUMNS).print("Chakra traces")
            notes = sum((result.notes for result in results), Counter[str]())
            print_counts("Notes", sorted(notes.items()))
        for result in results:
            for what, count in result.faults.items():
                complain(f"{result.path}: {what}: {count}, first {result.first[what]}")
        if len(results) < len(arguments.traces):
            return 2
        return 1 if any(result.faults for result in results) else 0


def _groups(given: str | None, first: str) -> dict[str, list[int]] | None:
    path = given or os.path.join(os.path.dirname(first), GROUPS)
    if given is None and not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, list[int]])
    except (OSError, msgspec.MsgspecError) as error:
        raise CrossrankError(f"{path}: is not a group file ({error}); choose another one with --groups") from error


def _communications(result: Checked) -> int:
    return sum(count for kind, count in result.types.items() if kind.startswith("COMM_"))


_COLUMNS: Columns[Checked] = (
    ("file", lambda result: result.path),
    ("#nodes", lambda result: f"{result.nodes:,}"),
    ("#communications", lambda result: f"{_communications(result):,}"),
    ("result", lambda result: "faults" if result.faults else "ok"),
)
