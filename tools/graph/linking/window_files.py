"""Which files belong together: the execution trace, the Kineto trace and the comms file of each rank and window.

What a command makes of them, and writes, is a `RankOutput`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from crossrank.errors import CrossrankError, one_line
from crossrank.recording import COMMS, EXECUTION_TRACE, KINETO, is_folder
from crossrank.tools.traces.discover import WHAT, FoundFile, discover, look


@dataclass(frozen=True, kw_only=True)
class RankInput:
    """The files of one rank and window."""

    rank: int | None
    window: int
    et: str
    kineto: str
    comms: str | None = None
    linked: str | None = None
    """A linked trace, which takes the place of the others."""


@dataclass(kw_only=True)
class RankOutput:
    """What became of one rank and window."""

    rank: int | None
    window: int
    output: str | None = None
    error: str | None = None
    """Why there is no output."""

    @property
    def name(self) -> str:
        rank = "one pair" if self.rank is None else f"rank {self.rank}"
        return rank if self.window == 1 else f"{rank}, window {self.window}"


@dataclass(frozen=True)
class Problem:
    """What cannot be linked."""

    rank: int | None
    """None where it is not known."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What can be linked, and what cannot."""

    pairs: list[RankInput]
    problems: list[Problem]
    notes: list[str] = field(default_factory=list)
    """What else was found and left out."""


def find_inputs(paths: Sequence[str], ranks: Collection[int] | None = None) -> Inputs:
    """The pairs among `paths`: one folder, or the two files of one rank in either order.

    Only `ranks` are looked for, where they are given. Raises `CrossrankError` where there is nothing to link.
    """
    if len(paths) == 2:
        if ranks is not None:
            raise CrossrankError("--ranks chooses from a folder; two files are one rank")
        return Inputs(pairs=[_two_files(paths[0], paths[1])], problems=[])
    files = discover(paths)
    if not is_folder(paths[0]):
        raise CrossrankError(f"{paths[0]} is one file; name its other half beside it, or the folder of both")
    inputs = pairs_of(files)
    if ranks is not None:
        found = {problem.rank for problem in inputs.problems} | {pair.rank for pair in inputs.pairs}
        lacking = [
            Problem(rank, f"rank {rank} has no pair of traces in {paths[0]}") for rank in sorted(set(ranks) - found)
        ]
        inputs = replace(
            inputs,
            pairs=[pair for pair in inputs.pairs if pair.rank in ranks],
            problems=lacking + [p for p in inputs.problems if p.rank is None or p.rank in ranks],
        )
    if not inputs.pairs:
        raise CrossrankError(
            f"{paths[0]}: no execution trace with its Kineto trace in it"
            + "".join(f"; {problem.text}" for problem in inputs.problems[:4])
            + "; record a window (TRACING_WINDOW=START:STOP), or name the two files of a rank"
        )
    return inputs


def pairs_of(files: Sequence[FoundFile]) -> Inputs:
    """The pairs among files that were found, and what cannot be linked."""
    problems = [
        Problem(file.rank, f"{file.path}: cannot be linked, it {file.problem}; remove it or record it anew")
        for file in files
        if file.problem and not file.left_out
        if file.kind in (EXECUTION_TRACE, KINETO) or (not file.kind and _may_be_trace(file))
    ]
    notes = [
        f"{file.path}: {file.problem}" for file in files if file.left_out and file.kind in (EXECUTION_TRACE, KINETO)
    ]
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
            problems.append(_no_pair(ets, kinetos))
    return Inputs(pairs=pairs, problems=problems, notes=notes)


def _may_be_trace(file: FoundFile) -> bool:
    """Whether what a file is called lets one miss it."""
    cut_off = f".{EXECUTION_TRACE}." in file.name or f".{KINETO}." in file.name
    return cut_off if file.partial else file.name.endswith((".json", ".gz", ".zst"))


def _no_pair(ets: list[FoundFile], kinetos: list[FoundFile]) -> Problem:
    first = (ets + kinetos)[0]
    who = f"rank {first.rank}" if first.rank is not None else "files without a rank in their names"
    who += "" if first.window == 1 else f", window {first.window}"
    if not ets or not kinetos:
        lacks = "Kineto trace" if ets else "execution trace"
        return Problem(first.rank, f"{who}: no {lacks} beside {first.path}")
    names = ", ".join(file.path.rpartition("/")[2] for file in (ets + kinetos)[:4])
    return Problem(
        first.rank,
        f"{who}: {len(ets)} execution traces and {len(kinetos)} Kineto traces ({names}); name the two files to link",
    )


def _two_files(first: str, second: str) -> RankInput:
    found = [look(path) for path in (first, second)]
    by_kind = {file.kind: file for file in found}
    if EXECUTION_TRACE not in by_kind or KINETO not in by_kind:
        given = ", ".join(f"{file.path} {file.problem or 'is ' + WHAT[file.kind]}" for file in found)
        raise CrossrankError(f"need one execution trace and one Kineto trace, but {given}")
    rank = next((file.rank for file in found if file.rank is not None), None)
    return RankInput(rank=rank, window=1, et=by_kind[EXECUTION_TRACE].path, kineto=by_kind[KINETO].path)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn what goes wrong with the disk into a `CrossrankError` that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise CrossrankError(f"{path}: cannot be written ({reason}); name another folder with -o") from error
