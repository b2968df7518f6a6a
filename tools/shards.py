"""A share of the ranks' work, for a Slurm array: each job does its share and keeps the results, the last merges.

A part is data, as `part_file` writes it: nothing in it says what is to be loaded or called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import zstandard

import crossrank
from crossrank.atomic_file import join, whole_file
from crossrank.budget import VALUES
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import Damage, list_recording, read_chunks
from crossrank.tools import part_file

_NAME = re.compile(r"crossrank-(?P<command>\w+)-(?P<shard>\d+)-of-(?P<shards>\d+)\.part")


def is_part(name: str) -> bool:
    """Whether a file of this name is what a share left for the others."""
    return _NAME.fullmatch(name) is not None


class ShardDone(Exception):
    """The share is done; what the command would print needs the others."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all shares must have in common."""

    command: str
    inputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    """What else of the command line decides what is read, and how."""
    version: str = crossrank.__version__


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Share `index` of `count`, counted from 0."""

    job: Job
    index: int
    count: int
    folder: str

    def of(self, items: int) -> range:
        """The items of this share, dealt out like cards so that shares are alike."""
        return range(self.index, items, self.count)

    def keep(self, results: Sequence[object], items: int) -> ShardDone:
        """Write the results of this share into the folder."""
        name = join(self.folder, f"crossrank-{self.job.command}-{self.index}-of-{self.count}.part")
        content = part_file.encode((self.job, items, list(results)))
        try:
            with whole_file(name) as temporary:
                temporary.write_bytes(zstandard.ZstdCompressor(level=3).compress(content))
        except OSError as error:
            raise CrossrankError(f"{name}: cannot be written ({error.strerror}); name another --parts") from error
        return ShardDone(
            f"shard {self.index} of {self.count}: {len(results)} of {items} ranks' files are done, {name}; "
            f"when all are: crossrank {self.job.command} {' '.join(self.job.inputs)} … --merge {self.folder}"
        )


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The results of all shares in a folder."""

    job: Job
    folder: str

    def results(self, items: int, function: Callable[..., Any]) -> list[Any]:
        """The results that `function` gave for all `items`.

        Raises `CrossrankError` where a share lacks or was made of other inputs.
        """
        names = [match for name in list_recording(self.folder).foreign if (match := _NAME.fullmatch(name))]
        names = [name for name in names if name["command"] == self.job.command]
        counts = {int(name["shards"]) for name in names}
        if len(counts) != 1:
            what = f"shards of {sorted(counts)}" if counts else f"no part of `crossrank {self.job.command}`"
            raise CrossrankError(f"{self.folder}: holds {what}; run each --shard I/N with --parts {self.folder} first")
        (count,) = counts
        there = {int(name["shard"]) for name in names}
        lacking = sorted(set(range(count)) - there)
        if lacking:
            more = f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
            raise CrossrankError(
                f"{self.folder}: shard {', '.join(map(str, lacking[:8]))}{more} of {count} is not there; run it with "
                f"--shard {lacking[0]}/{count} --parts {self.folder}"
            )
        slots: list[Any] = [None] * items
        for name in names:
            path = join(self.folder, name.string)
            job, of, results = _load(path, function)
            if job != self.job or of != items:
                raise CrossrankError(
                    f"{path}: was made by crossrank {job.version} of {of} file(s) of {_told(job)}, not by "
                    f"{self.job.version} of {items} of {_told(self.job)}; run the shards anew"
                )
            if len(results) != len(range(int(name["shard"]), items, count)):
                raise CrossrankError(
                    f"{path}: holds {len(results)} results, which are not those of its shard; run it anew"
                )
            slots[int(name["shard"]) :: count] = results
        return slots


def _told(job: Job) -> str:
    options = f" with {' '.join(job.options)}" if job.options else ""
    return f"{', '.join(job.inputs)}{options}"


def _load(path: str, function: Callable[..., Any]) -> tuple[Job, int, list[Any]]:
    damage = Damage(path)
    content = b"".join(read_chunks(path, damage))
    damage.budget.spend(VALUES, content.count(b",") + content.count(b"[") + content.count(b"{"))
    try:
        if damage.problems:
            raise ValueError(damage.problems[0])
        of_one = get_type_hints(function)["return"]
        job, items, results = part_file.decode(content, tuple[Job, int, list[of_one]])  # type: ignore[valid-type]
    except BROKEN as error:
        raise CrossrankError(f"{path}: is no part of crossrank ({one_line(error)}); run its shard anew") from error
    return job, items, results
