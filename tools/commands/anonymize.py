"""`crossrank anonymize`: traces without names, to share."""

from __future__ import annotations

import argparse
from collections import Counter

from crossrank.text import plural, rank_ranges
from crossrank.tools.commands.options import add_shared, complain, fleet_of
from crossrank.tools.output.console import Columns, print_counts, print_json, table_of
from crossrank.tools.sharing.anonymize import Anonymous, anonymize, searched, verify
from crossrank.tools.traces.discover import WHAT, discover

_SHOWN = 12


class AnonymizeCommand:
    """Copy a recording or traces and replace what identifies the user or the model: hosts, paths, functions, modules,
    descriptions, serial numbers and ids. Times of day are shifted. The same text gets the same new name on all ranks;
    the key that makes the names is not stored. Commands give the same results for the copy, except for names. Fields
    and files without a rule are skipped and counted. Exit code 1: a file cannot be read, or --verify found a replaced
    text."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("path", nargs="+", help="a recording, a folder of traces, or files")
        add("-o", "--output", required=True, metavar="DIR", help="a new folder")
        meaning = "round tensor sizes and bytes to powers of two, which hides the real sizes"
        add("--coarse", action="store_true", help=meaning)
        add("--verify", action="store_true", help="search the result for every replaced text")
        add_shared(parser, "json")

    def run(self, arguments: argparse.Namespace) -> int:
        files = discover(arguments.path)
        fleet = fleet_of(arguments, sum(file.size for file in files))
        result = anonymize(arguments.path, arguments.output, fleet, coarse=arguments.coarse)
        found = verify(result) if arguments.verify else None
        left_out = [file for file in result.files if file.output is None]
        if arguments.json:
            print_json(_answer(result, found))
        else:
            _print(result, arguments.output)
            if found is not None:
                looked_for = plural(len(searched(result)), "replaced text")
                print(f"\nverified   {len(found)} of {looked_for} with at least 4 characters found in the result")
        complain(*(f"{file.why}; skipped" for file in left_out), most=_SHOWN)
        # The text itself stays out of logs.
        complain(
            *(
                f"{path}: still has a text that is {result.replaced[text]} elsewhere"
                for text, path in (found or {}).items()
            ),
            most=_SHOWN,
        )
        damage = [text for file in result.files for text in file.damage]
        complain(*damage, most=_SHOWN)
        return 1 if result.lost or damage or found else 0


Row = tuple[str, list[int], int, int]


def _rows(result: Anonymous) -> list[Row]:
    """Return rows (kind, ranks, files written, files skipped)."""
    kinds = dict.fromkeys(file.kind for file in result.files)
    rows = []
    for kind in kinds:
        of_kind = [file for file in result.files if file.kind == kind]
        written = [file for file in of_kind if file.output is not None]
        ranks = sorted({file.rank for file in written if file.rank is not None})
        rows.append((WHAT.get(kind, kind), ranks, len(written), len(of_kind) - len(written)))
    return rows


_COLUMNS: Columns[Row] = (
    ("kind", lambda row: row[0].partition(" ")[2]),
    ("ranks", lambda row: rank_ranges(row[1]) if row[1] else "-"),
    ("#files", lambda row: row[2]),
    ("#skipped", lambda row: row[3]),
)


def _print(result: Anonymous, folder: str) -> None:
    table_of(_rows(result), _COLUMNS).print(f"Anonymous files in {folder}")
    total = sum((Counter(file.left_out) for file in result.files), Counter[str]())
    if total:
        print_counts("Skipped fields, which have no rule", total.most_common(_SHOWN))
        if len(total) > _SHOWN:
            print(f"  … and {len(total) - _SHOWN} more (--json shows all)")
    print(f"\nreplaced   {plural(len(result.replaced), 'text')}, and every time of day")


def _answer(result: Anonymous, found: dict[str, str] | None) -> dict[str, object]:
    """Return what `--json` prints, without the replaced texts."""
    return {
        "files": [
            {"kind": one.kind, "rank": one.rank, "output": one.output, "why": one.why, "left_out": one.left_out}
            for one in result.files
        ],
        "replaced": len(result.replaced),
        "found": None if found is None else {result.replaced[text]: path for text, path in found.items()},
    }
