"""The rank of a file, by its name or its content, and of several files together.

A name has a rank after a word: `rank-3`, `dump_3`. If none of several traces has one, the first of these that all have
counts: `Rank` of a `record_param_comms` in them; other numbers in their names, if they are 0, 1, 2, and so on;
coordinates in a mesh; the order of the names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from crossrank.comm import MOST_RANKS
from crossrank.recording import ReadIssues, read_chunks
from crossrank.text import plural

_SUFFIX = re.compile(r"(?:\.(?:pt|trace|json|jsonl|pickle|pkl|bin|dump|et|zst|gz|sqlite3?|nsys-rep|qdrep))+\Z", re.I)
_RANK = re.compile(r"(?P<of>[a-z]*)[-_.]?rank[-_. ]?(?P<number>\d+)", re.I)
_NOT_GLOBAL = frozenset(("tp", "pp", "dp", "cp", "ep", "mp", "sp", "node"))
"""Prefixes of ranks within a part of the job, such as `tp_rank`."""
_NUMBERED = re.compile(r"(?<![a-z])(?:worker|dump|trace|et|kineto|flight|device)[-_.]?(\d+)(?![\da-z])", re.I)
_BARE = re.compile(r"\A(\d+)\Z")
_DATE = re.compile(r"(?<!\d)20\d\d([-_.]?)[01]\d\1[0-3]\d(?!\d)")
_NUMBER = re.compile(r"(\d+)(?![\da-z])", re.I)
_COORDINATE = re.compile(r"(?<![a-z])(?P<of>tp|cp|dp|pp)[-_]?(?P<number>\d+)(?!\d)", re.I)
_MESH = ("tp", "cp", "dp", "pp")
"""Dimensions of a mesh, the one first in which the next ranks are neighbors (Megatron's default order)."""
_RANK_IN_GROUP = re.compile(rb'"Process Group Ranks"\s*:\s*"?\[(?P<ranks>[\d, ]+)\]"?[^{}]*?"Rank"\s*:\s*(?P<rank>\d+)')
_MOST_READ = 64 << 20
"""Bytes of a file that are searched for a rank."""
_PROCESS = re.compile(r"_\d+\.\d{13,}(?:\.pt\.trace\.json|\Z)")
"""End of the default file names of torch's tensorboard_trace_handler: process id and time."""


def rank_in_name(name: str) -> int | None:
    """The rank in a file name; None if it has none.

    >>> [rank_in_name(name) for name in ("host7_dump_0.json", "nccl_trace_host7_rank_3.pkl", "trace-gpu1-2.json.gz")]
    [0, 3, 2]
    >>> [rank_in_name(name) for name in ("rank2_trace_20261122.json", "gpu7_4711.1790000000000000000.pt.trace.json")]
    [2, None]
    """
    named = named_rank(name)
    return named if named is not None else numbered_rank(name)


def named_rank(name: str) -> int | None:
    """The last number that the name marks as a rank of the job."""
    found = [one["number"] for one in _RANK.finditer(name) if one["of"].lower() not in {*_NOT_GLOBAL, "local"}]
    return valid_rank(found[-1]) if found else None


def numbered_rank(name: str) -> int | None:
    """The last number after a word such as `trace`, else the last one that is not part of a word, a date or a time."""
    worded = worded_rank(name)
    return worded if worded is not None else _last_number(name, _NUMBER)


def worded_rank(name: str) -> int | None:
    """The last number after a word such as `trace`, or all of the name."""
    worded = _last_number(name, _NUMBERED)
    return worded if worded is not None else _last_number(name, _BARE)


def _last_number(name: str, pattern: re.Pattern[str]) -> int | None:
    if _PROCESS.search(name):
        return None
    stem = _RANK.sub(lambda one: " " if one["of"].lower() in _NOT_GLOBAL else one[0], _SUFFIX.sub("", name))
    ranks = [rank for rank in map(valid_rank, pattern.findall(_DATE.sub(" ", stem))) if rank is not None]
    return ranks[-1] if ranks else None


def valid_rank(text: str | bytes) -> int | None:
    return int(text) if len(text) <= 7 and int(text) < MOST_RANKS else None


def ranks_of(paths: Sequence[str]) -> tuple[Mapping[str, int], str]:
    """Return path -> rank of several files of one kind whose names and heads do not have it, and what shows it."""
    for find, what in (_BY_CONTENT, _BY_NUMBERS, _BY_MESH):
        found = find(paths)
        if len(found) == len(paths) and len(set(found.values())) == len(paths):
            return found, what
    how = "are numbered in the order of their names; for others, give a path with {rank}, such as 'DIR/*-{rank}.json'"
    in_order = dict(zip(sorted(paths), range(len(paths)), strict=True))
    return in_order, f"{plural(len(paths), 'file')} without a rank {how}"


def _by_numbers(paths: Sequence[str]) -> Mapping[str, int]:
    found = {path: rank for path in paths if (rank := numbered_rank(PurePosixPath(path).name)) is not None}
    return found if {*found.values()} == {*range(len(paths))} else {}


def _by_content(paths: Sequence[str]) -> Mapping[str, int]:
    return {path: rank for path in paths if (rank := _rank_in_content(path)) is not None}


def _rank_in_content(path: str) -> int | None:
    """Return the global rank in the first `record_param_comms` of a Kineto trace that has its group's ranks."""
    rest, read = b"", 0
    with suppress(OSError):
        for chunk in read_chunks(path, ReadIssues(path)):
            rest, read = rest[-4096:] + chunk, read + len(chunk)
            if (found := _RANK_IN_GROUP.search(rest)) is not None:
                ranks, own = found["ranks"].split(b","), int(found["rank"])
                return valid_rank(ranks[own].strip()) if own < len(ranks) else None
            if read > _MOST_READ:
                break
    return None


def _by_mesh(paths: Sequence[str]) -> Mapping[str, int]:
    """Return the ranks by coordinates such as `TP-0-PP-1`, if each combination has one file."""
    at = {
        path: {one["of"].lower(): int(one["number"]) for one in _COORDINATE.finditer(PurePosixPath(path).name)}
        for path in paths
    }
    dimensions = [name for name in _MESH if all(name in own for own in at.values())]
    sizes = [1 + max(own[name] for own in at.values()) for name in dimensions]
    if not dimensions or math.prod(sizes) != len(paths):
        return {}
    steps = [math.prod(sizes[:place]) for place in range(len(sizes))]
    return {
        path: sum(own[name] * step for name, step in zip(dimensions, steps, strict=True)) for path, own in at.items()
    }


_Rule = tuple[Callable[[Sequence[str]], Mapping[str, int]], str]
_BY_NUMBERS: _Rule = (_by_numbers, "")
_BY_CONTENT: _Rule = (_by_content, "the names of the files have no ranks: `Rank` of their record_param_comms counts")
_BY_MESH: _Rule = (_by_mesh, "the names of the files have coordinates: they count in the order tp, cp, dp, pp")
