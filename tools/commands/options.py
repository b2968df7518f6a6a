"""Options, progress bars, output files and warnings that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossrank.atomic_file import make_folder, whole_file
from crossrank.errors import CrossrankError, one_line
from crossrank.rank_runs import ranks_in
from crossrank.recording import is_folder
from crossrank.text import printable
from crossrank.tools.output.console import terminal
from crossrank.tools.parallel import Fleet

if TYPE_CHECKING:
    from crossrank.tools.job.collectives import JobTables

_DIGITS = 18
_WORTH_PROCESSES = 8_000_000
"""Bytes of comms files or dumps. Below this, starting processes takes longer than reading."""


def rank_list(text: str) -> set[int]:
    try:
        return ranks_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def iterations(text: str) -> tuple[int, int]:
    """Return the first step, and the first step after the range.

    >>> iterations("100:102")
    (100, 102)
    """
    first, colon, stop = text.partition(":")
    known = colon and first.isdecimal() and stop.isdecimal() and len(stop) < _DIGITS
    if not (known and int(first) < int(stop)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range START:STOP with START < STOP")
    return int(first), int(stop)


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


SHARED: dict[str, dict[str, Any]] = {
    "ranks": {"type": rank_list, "metavar": "LIST", "help": "read only these ranks, for example 0-7,12"},
    "json": {"action": "store_true", "help": "print the result as JSON"},
    "line-rate": {
        "action": "append",
        "default": [],
        "metavar": "[LOCALITY=]RATE",
        "help": "show busbw as a share of this rate: 400Gbps, 50GB/s, intra_node=450GB/s; can be repeated",
    },
    "min-match": {
        "type": share,
        "default": 0.95,
        "metavar": "SHARE",
        "help": "exit with 1 if a smaller share of host operations or GPU activities is matched (default 0.95)",
    },
    "jobs": {"type": int, "default": 0, "metavar": "N", "help": "number of processes (default: one per core)"},
    "cluster": {
        "metavar": "ADDRESS",
        "help": "address of a Dask scheduler, or `local` to start one with --jobs processes",
    },
}
"""Options that have the same meaning in every command."""


def add_shared(parser: argparse.ArgumentParser, *names: str, **meanings: str) -> None:
    """Add options of `SHARED`, and the options that `fleet_of` reads. `meanings` replaces help texts."""
    workers = parser.add_argument_group("many ranks")
    for name in (*names, "jobs", "cluster"):
        options = SHARED[name] | ({"help": meanings[name]} if name in meanings else {})
        (parser if name in names else workers).add_argument(f"--{name}", **options)


def add_source(parser: argparse.ArgumentParser, choices: Sequence[str]) -> None:
    """Add the options that select the source of times and the kernels that communicate."""
    parser.add_argument("--source", choices=choices, help="the source of times (default: the best one found)")
    parser.add_argument(
        "--communication-kernels",
        metavar="REGEX",
        default="",
        help="count kernels with a matching name as communication too; kernels of NCCL, RCCL, NVSHMEM, DeepEP and "
        "others always count",
    )


def fleet_of(arguments: argparse.Namespace, size: int | None = None) -> Fleet:
    """Return the workers that the options select. One process reads a small input: `size` bytes."""
    if arguments.jobs < 0:
        raise CrossrankError(f"--jobs {arguments.jobs} is not a number of processes")
    is_small = size is not None and size <= _WORTH_PROCESSES and arguments.cluster is None
    jobs = arguments.jobs or (1 if is_small else os.cpu_count() or 1)
    return Fleet(jobs=jobs, cluster=arguments.cluster, bar=progress)


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
    from crossrank.tools.job.sources import open_job  # not needed by most commands

    wanted, source = arguments.ranks, arguments.source
    return open_job(arguments.path, fleet_of(arguments), wanted, source, arguments.communication_kernels)


def complain_of(found: JobTables, arguments: argparse.Namespace) -> int:
    """Report skipped files and missing ranks, and return the exit code. With --ranks, no rank counts as missing."""
    complain(*found.job.skipped, most=8)
    if arguments.json:  # else they are among the notes
        complain(*found.job.ranked_by)
    missing = found.job.missing_text if arguments.ranks is None else ""
    if missing:
        complain(missing)
    return 1 if found.job.skipped or missing else 0


def output_folder(paths: Sequence[str], output: str | None) -> str:
    """Return the folder or URL for the results, and create it. The default is the folder of the input."""
    folder = folder_of(paths[0]) if output is None else output
    make_folder(folder)
    return folder


def folder_of(path: str) -> str:
    """Return the default folder or URL for results about `path`: `path` itself, or its parent."""
    return path if is_folder(path) else path.rpartition("/")[0] or "."


@contextmanager
def progress(what: str, count: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal. The block calls the yielded function after each of `count` files."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("files"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=terminal(sys.stderr)), transient=True) as shown:
        # The progress within one file is unknown.
        bar = shown.add_task(what, total=count if count > 1 else None)
        yield lambda: shown.advance(bar)


@contextmanager
def output_file(name: str) -> Iterator[Path]:
    """Yield a local path. What the block writes there becomes `name` (a path or URL), completely or not at all."""
    try:
        with whole_file(name) as temporary:
            yield temporary
    except OSError as error:
        why = error.strerror or one_line(error)  # some libraries raise it with a text alone
        raise CrossrankError(f"{name}: cannot be written ({why}); choose another file") from error


def write_output(name: str, content: bytes) -> None:
    with output_file(name) as temporary:
        temporary.write_bytes(content)


def complain(*texts: str, most: int = sys.maxsize) -> None:
    """Print the first `most` texts to stderr, and the number of the others."""
    more = [f"… and {len(texts) - most} more (--json shows all)"] if len(texts) > most else []
    for text in (*texts[:most], *more):
        print(f"crossrank: {printable(text)}", file=sys.stderr)
