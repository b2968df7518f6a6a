"""Reads the lines of a log, in constant memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import PurePosixPath

from crossrank.recording import ReadIssues, read_chunks
from crossrank.tools.traces.file_ranks import named_rank
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.prefixes import COLORS

_LONGEST_LINE = 1 << 16
"""Characters of a line that are read: the rest says nothing more."""
SAMPLE = 400
"""Lines at the start of a file that show which labels it has."""
CUT = "ends within a line; what came after it is missing"
_ENVIRONMENT = re.compile(r"\b(?:RANK=(?=\d+,? WORLD_SIZE=\d)|SLURM_PROCID=)(\d{1,7})\b")
"""A line in which a process prints its own rank."""
_TASK = re.compile(r"(?:\A|[._-])(?:(?:out|err|log|task|stdout|stderr)[._-]?)?(?P<rank>\d{1,5})(?:\.[a-z]+)*\Z")
"""End of the name of a file that a scheduler writes for each of its tasks."""
_NAMED_TASK = re.compile(r"(?:\A|[._-])(?:task|proc)[._-]?(?P<rank>\d{1,5})(?=[._-])")
"""The same in front of the name of a node."""
_MARKED = re.compile(r"\[rank(\d{1,7})\]:")


def lines_of(path: str, issues: ReadIssues) -> Iterator[tuple[int, str, bool]]:
    """Yield (number, line without colors, whether it has one of the literals of formats) of a file. To find these in a
    chunk at once takes a twentieth of the time that it takes line by line."""
    number, rest = 0, b""
    for piece in chain(read_chunks(path, issues), (None,)):
        if piece is None and rest:
            issues.problems.append(CUT)
        data = rest + (b"\n" if piece is None else piece)
        cut = data.rfind(b"\n") + 1
        rest = data[cut:][:_LONGEST_LINE] if piece is not None else b""
        text = data[:cut].decode(errors="replace")
        if "\x1b" in text or "\r" in text:
            text = COLORS.sub("", text)
        places = iter(sorted(place for literal in formats.LITERALS for place in _places(text, literal)))
        place, end = next(places, len(text)), 0
        for line in text.split("\n")[:-1]:
            end += len(line) + 1
            number += 1
            may_say = place < end
            while place < end:
                place = next(places, len(text) + 1)
            if line or piece is not None:
                yield number, line[:_LONGEST_LINE], may_say


def _places(text: str, literal: str) -> Iterator[int]:
    place = text.find(literal)
    while place >= 0:
        yield place
        place = text.find(literal, place + len(literal))


def ranks_of_files(paths: Sequence[str]) -> Mapping[str, int]:
    """Return the rank of each file that is the log of one rank.

    Its name has it, or the process prints it, or all files of the job have the number of a task in their names."""
    found = {path: rank for path in paths if (rank := named_rank(PurePosixPath(path).name)) is not None}
    if len(paths) < 2 or found:
        return found
    printed: dict[str, set[int]] = {}
    marked: dict[str, set[int]] = {}
    for path in paths:
        with suppress(OSError):
            text = [line for _, line, _ in islice(lines_of(path, ReadIssues(path)), SAMPLE)]
            printed[path] = {int(one[1]) for line in text if (one := _ENVIRONMENT.search(line))}
            marked[path] = {int(one[1]) for line in text if (one := _MARKED.match(line))}
    said = {path: ranks for path, ranks in printed.items() if ranks}
    numbers = _numbers(paths)
    agree = all(numbers.get(path) == ranks for path, ranks in said.items())
    for ranks in (numbers, said) if agree else (said, numbers):
        one_each = {path: min(those) for path, those in ranks.items() if len(those) == 1}
        if (
            len(one_each) == len(ranks) > 1
            and len({*one_each.values()}) == len(ranks)
            and all(marked.get(path, set()) <= {rank} for path, rank in one_each.items())
        ):
            return one_each
    return found


def _numbers(paths: Sequence[str]) -> dict[str, set[int]]:
    """Return the number of the task of each file, if every file has one."""
    names = {path: PurePosixPath(path).name for path in paths}
    tasks = {path: _NAMED_TASK.search(name) or _TASK.search(name) for path, name in names.items()}
    found = {path: {int(one["rank"])} for path, one in tasks.items() if one is not None}
    return found if len(found) == len(paths) else {}
