"""Finds the kind and rank of the files at a path, in one way for every command.

File names of a recording have both (`rank-3.w2.kineto.json.zst`). For files of other tools, the first bytes show the
kind. Their rank is the number after `rank` in the name, else that in the first bytes, else another number in the name.

Folders are searched with all subfolders, because many jobs write one folder per node. Hidden folders are skipped. So
are other jobs: earlier recordings (`earlier-K`), and those of processes that ranks started (`spawned-K`).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError, one_line
from crossrank.recording import (
    COMMS,
    EXECUTION_TRACE,
    FLIGHT,
    KINETO,
    LINKED,
    RANK_FOLDER,
    SEEN,
    ReadIssues,
    is_folder,
    list_recording,
    rank_of,
    read_chunks,
)
from crossrank.tools.traces.file_ranks import named_rank, numbered_rank, rank_in_name, ranks_of, valid_rank, worded_rank

PLAN = "plan"
TIMELINE = "timeline"
"""Output of `convert --timeline`; it looks like a Kineto trace."""
INSPECTOR = "inspector"
"""Output of NCCL Inspector: one process, of an unknown rank."""
NSIGHT = "nsight"
"""An export of Nsight Systems: not a record of calls, but it has their times."""
REPORT = "report"
"""A report of Nsight Systems; it must be exported first."""
LOG = "log"
"""What processes printed: of a launcher, with the lines of all ranks, or of one rank."""
DATABASE = "database"
"""Output of `crossrank diagnose --database`."""

WHAT = {
    COMMS: "a comms file",
    LINKED: "a linked trace",
    EXECUTION_TRACE: "an execution trace",
    KINETO: "a Kineto trace",
    FLIGHT: "a flight-recorder dump",
    SEEN: "what a rank saw of another one",
    INSPECTOR: "a log of NCCL Inspector",
    PLAN: "a plan of crossrank replay",
    TIMELINE: "a timeline of crossrank",
    NSIGHT: "an export of Nsight Systems",
    REPORT: "a report of Nsight Systems",
    DATABASE: "a database of crossrank diagnose",
    LOG: "a log",
    "": "a file of unknown type",
}

_OF_CALLS = ("report", "export", "anonymize")
COMMANDS: dict[str, tuple[str, ...]] = {
    COMMS: ("diagnose", "bandwidth", "timeline", "replay", "watch", "minimize", *_OF_CALLS),
    LINKED: ("bandwidth", "timeline", "replay", "convert", "simulate", *_OF_CALLS),
    EXECUTION_TRACE: ("link with a Kineto trace", "replay", "anonymize"),
    KINETO: ("bandwidth", "timeline", "link with an execution trace", *_OF_CALLS),
    FLIGHT: ("diagnose", "bandwidth if it has times", "replay", *_OF_CALLS),
    SEEN: ("diagnose",),
    INSPECTOR: ("bandwidth", "timeline", "report", "export"),
    PLAN: ("replay", "probe"),
    TIMELINE: ("ui.perfetto.dev",),
    NSIGHT: ("bandwidth", "timeline", "report", "export"),
    REPORT: ("nsys export",),
    LOG: ("diagnose", "anonymize"),
}
"""Kind -> what can use such files: commands of crossrank, or other tools."""

_OF_RANKS = (COMMS, LINKED, EXECUTION_TRACE, KINETO, FLIGHT, SEEN)
"""Kinds with one file per rank and window."""
_IN_SETS = (EXECUTION_TRACE, KINETO)
"""Kinds of other tools: a number in the name of a file says its rank only together with those of the other files."""
_HEAD = 1 << 16
_SIGNS: tuple[tuple[str, tuple[bytes, ...]], ...] = (
    (FLIGHT, (rb"\A\x80",)),
    (DATABASE, (rb"\ASQLite format 3\x00", rb"CREATE TABLE findings \(position INTEGER, role TEXT")),
    (NSIGHT, (rb"\ASQLite format 3\x00",)),
    (PLAN, (rb'"schema"\s*:\s*"crossrank-plan ',)),
    (INSPECTOR, (rb'\A\s*\{"header"', rb'"inspector_output_format_version"')),
    (COMMS, (rb'\A\s*\{"header"',)),
    (TIMELINE, (rb'"metadata"\s*:\s*\{"crossrank"',)),
    (KINETO, (rb'"traceEvents"',)),
    (KINETO, (rb'\A\s*\[\s*\{[^}]*"ph"',)),
    (LINKED, (rb'"crossrank"\s*:\s*\{"version"',)),
    (EXECUTION_TRACE, (rb'"nodes"\s*:', rb'"schema"|"ctrl_deps"|"rf_id"')),
    (FLIGHT, (rb"\A\s*\{", rb'"pg_config"\s*:')),
    (FLIGHT, (rb"\A\s*\{", rb'"entries"\s*:')),
    (FLIGHT, (rb"\A\s*\{", rb'"pg_status"\s*:')),
)
"""(kind, patterns that the first bytes must all match). The first matching row decides. Patterns start with plain text
or at the first byte, because there may be thousands of files."""
_COMPILED = tuple((kind, tuple(map(re.compile, signs))) for kind, signs in _SIGNS)
_BY_NAME = {".sqlite": NSIGHT, ".sqlite3": NSIGHT, ".nsys-rep": REPORT, ".qdrep": REPORT}
"""Kinds that the first bytes may not show: reports, and exports that are cut off."""

_FEW_NULS = 20
"""Fewest bytes of a text for each NUL in it."""
_LOG_NAME = re.compile(r"\.(?:log|out|err)(?:[.-]?\d+)?(?:\.gz|\.zst)?\Z|(?:\A|/)(?:std(?:out|err)|log)\Z", re.I)
_LOG_SIGN = re.compile(
    rb"^(?:\[rank\d+\]|\[\w+\d+\]:|Traceback \(most recent|[ \w.:-]*NCCL (?:INFO|WARN)|\s+Reason:\s+OOMKilled"
    rb"|Thread \d+ \([a-z+]+\): \"MainThread\")|ProcessGroupNCCL",
    re.M,
)
"""Names of logs, and lines that only logs have."""
_RANK_IN_HEAD = {
    KINETO: re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)'),
    COMMS: re.compile(rb'\A\s*\{"header"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)'),
}
RANK = "{rank}"
"""In a path, it is the rank of each file."""
_OTHER_JOBS = re.compile(r"(earlier|spawned)-\d+")
_DEEPEST = 8


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """One file at a path."""

    path: str
    kind: str
    """Empty = unknown type."""
    rank: int | None
    window: int = 1
    size: int = 0
    """Bytes on disk."""
    depth: int = 0
    """Number of folders between the given path and the file, without a recording's own folders for a few ranks each."""
    problem: str = ""
    """Why it cannot be used."""
    partial: bool = False
    """It was cut off during writing."""
    is_text: bool = False
    """Its first bytes are a text, and not an object of JSON."""
    left_out: bool = False
    """It can be used, but another file is nearer to the given path."""
    ranked_by: str = ""
    """What shows the rank, if neither the name of the file nor its head does."""
    shown: str = ""
    """What messages call it; empty = its path."""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def look(path: str) -> FoundFile:
    """Find kind and rank of a file from its first bytes and its name. A file that cannot be read has a `problem`."""
    name = PurePosixPath(path).name
    issues = ReadIssues(path)
    head = b""
    try:
        for chunk in read_chunks(path, issues, _HEAD):
            head += chunk
            if len(head) >= _HEAD:
                break
    except OSError as error:
        issues.problems.append(f"cannot be read ({one_line(error)})")
    head = head[:_HEAD]
    kind = next((kind for kind, signs in _COMPILED if all(sign.search(head) for sign in signs)), "")
    kind = kind or next((kind for suffix, kind in _BY_NAME.items() if name.endswith(suffix)), "")
    is_text = bool(head) and _FEW_NULS * head.count(b"\0") <= len(head)  # a full disk leaves some in a log
    if not kind and is_text and (_LOG_NAME.search(name) or _LOG_SIGN.search(head)):
        kind = LOG
    rank = named_rank(name)
    if rank is None and kind in _RANK_IN_HEAD and (found := _RANK_IN_HEAD[kind].search(head)):
        rank = valid_rank(found[1])
    if rank is None and kind not in (INSPECTOR, LOG):  # names of its files have a process id
        rank = worded_rank(name) if kind in _IN_SETS else numbered_rank(name)
    problem = "" if head else [*issues.problems, "is empty"][0]
    return FoundFile(
        path=path, kind=kind, rank=rank, problem=problem, is_text=is_text and not head.lstrip().startswith(b"{")
    )


def discover(paths: Iterable[str]) -> list[FoundFile]:
    """Every file at `paths` (folders with all subfolders, files, URLs, or patterns with `{rank}`), sorted by path.

    Raises `CrossrankError` if there is nothing at a path.
    """
    found: dict[str, FoundFile] = {}
    paths = list(paths)
    for path in paths:
        for file in _matching(path) if RANK in path else _walk(path, 0):
            found.setdefault(file.path, file)
    if not found and not any(list_recording(path).folders for path in paths):
        raise CrossrankError(
            f"{', '.join(paths)}: the folder is empty; give a recording (the folder TRACING_DIR), traces or dumps"
        )
    return _without_doubles(_adopted(_ranked(sorted(found.values(), key=lambda file: file.path))))


def _matching(pattern: str) -> Iterator[FoundFile]:
    """Yield the files that a pattern names, with the number at `{rank}` as their rank; `*` is any text without `/`."""
    parts = pattern.split("/")
    first = next(place for place, part in enumerate(parts) if RANK in part or "*" in part)
    folder = "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")
    wanted = "/".join(parts[first:])
    texts = [re.escape(text).replace(r"\*", "[^/]*") for text in wanted.split(RANK)]
    named = re.compile(r"(\d{1,7})".join([texts[0], texts[1]]) + "".join(rf"\1{text}" for text in texts[2:]))
    count = 0
    for file in _walk(folder, 0):
        match = named.fullmatch(file.path.removeprefix("./" if folder == "." else f"{folder.rstrip('/')}/"))
        if match is not None and (rank := valid_rank(match[1])) is not None:
            count += 1
            yield replace(file, rank=rank, depth=0)
    if not count:
        raise CrossrankError(f"{pattern}: no file has such a name; {RANK} is a number, and * any text without /")


def _walk(path: str, depth: int, level: int = 0) -> Iterator[FoundFile]:
    try:
        listing = list_recording(path)
    except CrossrankError as error:
        if level == 0:
            raise
        yield FoundFile(path=path, kind="", rank=None, problem=str(error).removeprefix(f"{path}: "))
        return
    folder = f"{path.rstrip('/')}/"
    for file in listing.files:
        valid = file.rank < MOST_RANKS
        yield FoundFile(
            path=file.path,
            kind=file.kind,
            rank=file.rank if valid else None,
            window=file.window,
            size=file.size,
            depth=depth,
            problem="" if valid else f"invalid rank {file.rank}; a job has at most {MOST_RANKS} ranks",
        )
    for name in listing.unrecognized:
        whole = folder + name if is_folder(path) else path
        yield replace(look(whole), size=os.path.getsize(whole) if os.path.isfile(whole) else 0, depth=depth)
    useless = FoundFile(path="", kind="", rank=None, depth=depth, problem="is neither a file nor a folder")
    partial = replace(useless, problem="was cut off during writing", partial=True)
    for name in listing.partial:
        yield replace(partial, path=folder + name, rank=rank_of(name))
    for name in listing.special:
        yield replace(useless, path=folder + name, rank=rank_in_name(name))
    if level < _DEEPEST:
        for name in listing.folders:
            if not _OTHER_JOBS.fullmatch(name) and not name.startswith("."):
                yield from _walk(folder + name, depth + (not RANK_FOLDER.fullmatch(name)), level + 1)


def _ranked(files: list[FoundFile]) -> list[FoundFile]:
    """Set the ranks of the files of a kind, if there are several, and no file has a rank."""
    for kind in _IN_SETS if all(file.rank is None for file in files if file.kind and not file.problem) else ():
        those = [file for file in files if file.kind == kind and not file.problem]
        if len(those) > 1 and all(file.rank is None for file in those):
            ranks, how = ranks_of([file.path for file in those])
            files = [replace(file, rank=ranks[file.path], ranked_by=how) if file in those else file for file in files]
    return files


def _adopted(files: list[FoundFile]) -> list[FoundFile]:
    """Set the rank of files without one, if the others are of one rank and no two files have one kind and window."""
    known = {file.rank for file in files if file.kind and file.rank is not None}
    unnamed = [file for file in files if file.kind and file.rank is None and not file.problem]
    kinds = [(file.kind, file.window) for file in files if file.kind and not file.problem]
    if len(known) != 1 or not unnamed or len(set(kinds)) < len(kinds):
        return files
    (rank,) = known
    return [replace(file, rank=rank) if file in unnamed else file for file in files]


def _without_doubles(files: list[FoundFile]) -> list[FoundFile]:
    """Skip a file if another one of the same kind, rank and window is nearer to the given path: a command may have
    written it into a subfolder of the recording."""
    best: dict[tuple[str, int | None, int], FoundFile] = {}
    for file in sorted(files, key=lambda file: (file.depth, file.path)):
        if file.kind in _OF_RANKS and file.rank is not None and not file.problem:
            best.setdefault((file.kind, file.rank, file.window), file)
    found = []
    for file in files:
        nearest = best.get((file.kind, file.rank, file.window), file)
        if file.problem or nearest.depth == file.depth:
            found.append(file)
        elif file.kind != LINKED:  # `link` and `convert --keep-linked` write these there
            text = f"is of rank {file.rank}, as {nearest.path} is, and was skipped"
            found.append(replace(file, problem=text, left_out=True))
    return found


def ranked_by(files: Iterable[FoundFile]) -> list[str]:
    """Return what shows the ranks of files whose names and heads do not have them."""
    return list(dict.fromkeys(file.ranked_by for file in files if file.ranked_by))


def other_jobs(path: str) -> list[str]:
    """Names of the folders at a path with recordings of other jobs."""
    return [name for name in list_recording(path).folders if _OTHER_JOBS.fullmatch(name)]


Files = dict[str, list[FoundFile]]
"""Kind -> files, ordered by window."""


def files_by_rank(files: Iterable[FoundFile], kinds: Collection[str]) -> dict[int | None, Files]:
    """The usable files of these kinds by rank, in ascending order; files without a rank are last.

    Raises `CrossrankError` if two files have the same kind, rank and window.
    """
    found: dict[int | None, Files] = defaultdict(dict)
    usable = [file for file in files if file.kind in kinds and not file.problem]
    for file in sorted(usable, key=lambda one: (one.rank is None, one.rank or 0, one.window, one.path)):
        same = found[file.rank].setdefault(file.kind, [])
        same.append(file)
        if len(same) > 1 and same[-2].window == file.window:
            names = " and ".join(one.path for one in same[-2:])
            of = f"of rank {file.rank}" if file.rank is not None else "without a rank in their names"
            raise CrossrankError(f"{names} are both {of}; give the right one, or the folder of one run")
    return dict(found)
