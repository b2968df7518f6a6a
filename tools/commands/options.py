"""What several commands share: options for ranks and workers, a progress bar, complaints."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from crossrank.atomic_file import make_folder, whole_file
from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError
from crossrank.recording import is_folder
from crossrank.text import printable
from crossrank.tools.output.console import terminal
from crossrank.tools.parallel import Fleet
from crossrank.tools.shards import Job, Merge, Shard

Result = TypeVar("Result")


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """The options about who does the work on the ranks; `fleet_of` reads them."""
    workers = parser.add_argument_group("many ranks")
    workers.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one per core)")
    workers.add_argument(
        "--cluster", metavar="ADDRESS", help="a Dask scheduler, or `local` for a cluster of --jobs processes here"
    )
    workers.add_argument(
        "--shard", metavar="I/N", help="do only every N-th file from the I-th on, from 0, and keep the results"
    )
    workers.add_argument("--parts", metavar="DIR", help="where --shard keeps them; all shards name the same")
    workers.add_argument("--merge", metavar="DIR", help="take the results of all shards from DIR, and go on from there")


def fleet_of(
    arguments: argparse.Namespace, inputs: Sequence[str], *, reads: Sequence[str] = (), one_process: bool = False
) -> Fleet:
    """The workers that the options name.

    `reads`: options that decide what a worker gives, which all shares must have in common. `one_process`: the inputs
    are not worth more, unless --jobs is given.
    """
    if arguments.jobs < 0:
        raise CrossrankError(f"--jobs {arguments.jobs} is no number of processes")
    jobs = arguments.jobs or (1 if one_process and arguments.cluster is None else os.cpu_count() or 1)
    given = [(name, getattr(arguments, name)) for name in reads]
    options = tuple(f"--{name} {sorted(value) if isinstance(value, set) else value}" for name, value in given if value)
    job = Job(command=arguments.command, inputs=tuple(inputs), options=options)
    part: Shard | Merge | None = None
    if arguments.shard is not None and arguments.merge is not None:
        raise CrossrankError("--shard does a share and --merge puts them together; give one of them")
    if (arguments.shard is None) != (arguments.parts is None):
        raise CrossrankError("--shard I/N and --parts DIR belong together; give both")
    if arguments.shard is not None:
        match = re.fullmatch(r"(\d{1,7})/(\d{1,7})", arguments.shard)
        if match is None or int(match[1]) >= int(match[2]):
            raise CrossrankError(f"--shard {arguments.shard!r} is not I/N with I from 0 to N - 1, for example 0/8")
        make_folder(arguments.parts)
        part = Shard(job=job, index=int(match[1]), count=int(match[2]), folder=arguments.parts)
    elif arguments.merge is not None:
        part = Merge(job=job, folder=arguments.merge)
    return Fleet(jobs=jobs, cluster=arguments.cluster, part=part)


def output_folder(paths: Sequence[str], output: str | None) -> str:
    """Folder or URL that the results go to, made where it is not there; that of the input unless one is named."""
    folder = folder_of(paths[0]) if output is None else output
    make_folder(folder)
    return folder


def folder_of(path: str) -> str:
    """The folder or URL that results about `path` go to, where none is named: itself, or the one it is in."""
    return path if is_folder(path) else path.rpartition("/")[0] or "."


def progress(what: str, count: int, work: Callable[[Callable[[], None]], Result]) -> Result:
    """`work`, with a bar on a terminal; it calls what it is given after each of `count` files."""
    if not sys.stderr.isatty():
        return work(lambda: None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("files"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=terminal(sys.stderr)), transient=True) as shown:
        # Of one file it is not known how far it has come.
        bar = shown.add_task(what, total=count if count > 1 else None)
        return work(lambda: shown.advance(bar))


def write_output(name: str, content: bytes) -> None:
    """Write a file, local or at a URL, whole or not at all."""
    try:
        with whole_file(name) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise CrossrankError(f"{name}: cannot be written ({error.strerror}); name another file") from error


def complain(text: str) -> None:
    print(f"crossrank: {printable(text)}", file=sys.stderr)


def rank_list(text: str) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks; write it as 0-7,12")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{text!r} names a rank above {MOST_RANKS - 1}")
        ranks.update(range(first, last + 1))
    return ranks


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return number
