"""Finds which files belong together: the execution trace, Kineto trace and comms file of each rank and window.

A command returns a `RankOutput` for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from crossrank.errors import CrossrankError, one_line
from crossrank.recording import COMMS, EXECUTION_TRACE, KINETO, is_folder
from crossrank.tools.traces.discover import RANK, WHAT, FoundFile, discover, look, ranked_by


@dataclass(frozen=True, kw_only=True)
class RankInput:
    """The files of one rank and window."""

    rank: int | None
    window: int
    et: str
    kineto: str
    comms: str | None = None
    linked: str | None = None
    """A linked trace of this window. It replaces the other files, if it is of them or there are none."""


@dataclass(kw_only=True)
class RankOutput:
    """The result for one rank and window."""

    rank: int | None
    window: int
    output: str | None = None
    error: str | None = None
    """Why there is no output."""

    @property
    def name(self) -> str:
        rank = "one pair" if self.rank is None else f"rank {self.rank}"
        return rank if self.window == 1 else f"{rank}, window {self.window}"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What can be linked, and what cannot."""

    pairs: list[RankInput]
    problems: list[str]
    """Why the rest cannot be linked."""
    notes: list[str] = field(default_factory=list)
    """Files that were found and skipped, with the reason."""


def find_inputs(paths: Sequence[str], ranks: Collection[int] | None = None) -> Inputs:
    """Return the pairs among `paths`: one folder, or the two files of one rank in either order.

    `ranks` selects ranks, if given. Raise `CrossrankError` if there is nothing to link.
    """
    if len(paths) == 2 and not any(RANK in path for path in paths):
        if ranks is not None:
            raise CrossrankError("--ranks needs a folder; two files are one rank")
        return Inputs(pairs=[_pair_two_files(paths[0], paths[1])], problems=[])
    files = discover(paths)
    if not is_folder(paths[0]) and RANK not in paths[0]:
        raise CrossrankError(
            f"{paths[0]} is one file; give the execution trace and the Kineto trace of a rank, or the folder of both"
        )
    if ranks is not None:
        files = [file for file in files if file.rank is None or file.rank in ranks]
    inputs = pairs_of(files)
    traced = {file.rank for file in files if file.kind in (EXECUTION_TRACE, KINETO) or (file.problem and not file.kind)}
    for rank in sorted(set(ranks or ()) - traced, reverse=True):
        inputs.problems.insert(0, f"rank {rank} has no pair of traces in {paths[0]}")
    if not inputs.pairs:
        raise CrossrankError(
            f"{paths[0]}: has no execution trace with its Kineto trace"
            + "".join(f"; {problem}" for problem in inputs.problems[:4])
            + "; record a window (TRACING_WINDOW=START:STOP), or give the two files of a rank"
        )
    return inputs


def pairs_of(files: Sequence[FoundFile]) -> Inputs:
    """Return the pairs among the files that were found, and what cannot be linked."""
    problems = [
        f"{file.path}: cannot be linked, it {file.problem}; remove it or record again"
        for file in files
        if file.problem and not file.left_out
        if file.kind in (EXECUTION_TRACE, KINETO) or (not file.kind and _may_be_trace(file))
    ]
    notes = [
        f"{file.path}: {file.problem}" for file in files if file.left_out and file.kind in (EXECUTION_TRACE, KINETO)
    ]
    notes += ranked_by(files)
    windows: dict[tuple[bool, int, int], dict[str, list[FoundFile]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(files, key=lambda file: file.path):
        if not file.problem:
            windows[file.rank is None, file.rank or 0, file.window][file.kind].append(file)
    pairs: list[RankInput] = []
    for key, kinds in sorted(windows.items()):
        ets, kinetos = kinds[EXECUTION_TRACE], kinds[KINETO]
        if len(ets) == len(kinetos) == 1:
            comms = windows.get((*key[:2], 1), {}).get(COMMS)
            et, kineto, rank = ets[0].path, kinetos[0].path, ets[0].rank
            pairs.append(
                RankInput(rank=rank, window=key[2], et=et, kineto=kineto, comms=comms[0].path if comms else None)
            )
        elif ets or kinetos:
            problems.append(_explain_missing_pair(ets, kinetos))
    return Inputs(pairs=pairs, problems=problems, notes=notes)


def _may_be_trace(file: FoundFile) -> bool:
    """Return whether a file could be a trace, by its name."""
    cut_off = f".{EXECUTION_TRACE}." in file.name or f".{KINETO}." in file.name
    return cut_off if file.partial else file.name.endswith((".json", ".gz", ".zst"))


def _explain_missing_pair(ets: list[FoundFile], kinetos: list[FoundFile]) -> str:
    first = (ets + kinetos)[0]
    who = f"rank {first.rank}" if first.rank is not None else "files without a rank in their names"
    who += "" if first.window == 1 else f", window {first.window}"
    if not ets or not kinetos:
        lacks = "Kineto trace" if ets else "execution trace"
        return f"{who}: no {lacks} beside {first.path}"
    names = ", ".join(file.path.rpartition("/")[2] for file in (ets + kinetos)[:4])
    return f"{who}: {len(ets)} execution traces and {len(kinetos)} Kineto traces ({names}); give the two files to link"


def _pair_two_files(first: str, second: str) -> RankInput:
    found = [look(path) for path in (first, second)]
    by_kind = {file.kind: file for file in found}
    if EXECUTION_TRACE not in by_kind or KINETO not in by_kind:
        given = ", ".join(f"{file.path} {file.problem or 'is ' + WHAT[file.kind]}" for file in found)
        raise CrossrankError(f"need one execution trace and one Kineto trace, but {given}")
    rank = next((file.rank for file in found if file.rank is not None), None)
    return RankInput(rank=rank, window=1, et=by_kind[EXECUTION_TRACE].path, kineto=by_kind[KINETO].path)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn an error of the disk into a `CrossrankError` that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise CrossrankError(f"{path}: cannot be written ({reason}); choose another folder with -o") from error
