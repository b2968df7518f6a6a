"""What the files at a path are, by their names or their first bytes, and whose: everybody's traces of communication."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError
from crossrank.recording import (
    COMMS,
    EXECUTION_TRACE,
    FLIGHT,
    KINETO,
    LINKED,
    Damage,
    is_folder,
    list_recording,
    read_chunks,
)
from crossrank.tools.calls.rank_calls import Input
from crossrank.tools.linking.inputs import rank_said
from crossrank.tools.shards import is_part

BASIC = "basic"
"""PARAM's own format: a list of calls."""
PLAN = "plan"
TIMELINE = "timeline"
"""What `crossrank timeline` and `convert --timeline` write, which looks like a Kineto trace."""
NSIGHT = "nsight"
"""An export of Nsight Systems, which is no record of calls but has their times."""


_HEAD = 1 << 16
_SIGNS = (
    (NSIGHT, re.compile(rb"\ASQLite format 3\x00")),
    (PLAN, re.compile(rb'"schema"\s*:\s*"crossrank-plan ')),
    (COMMS, re.compile(rb'\A\s*\{"header"')),
    (TIMELINE, re.compile(rb'"metadata"\s*:\s*\{"crossrank"')),
    (KINETO, re.compile(rb'"traceEvents"|\A\s*\[\s*\{[^}]*"ph"')),
    (LINKED, re.compile(rb'"crossrank"\s*:\s*\{"version"')),
    (EXECUTION_TRACE, re.compile(rb'"nodes"\s*:')),
    (FLIGHT, re.compile(rb'\A\x80|"pg_config"|"entries"')),
    (BASIC, re.compile(rb'\A\s*\[[^\]]*"(?:comms|compute|startTime_ns|in_msg_size)"')),
)


_CALLS = (COMMS, LINKED, EXECUTION_TRACE, KINETO, FLIGHT, BASIC)
"""Kinds that say what was communicated."""


def kind_of_file(path: str) -> tuple[str | None, int | None]:
    """(kind, rank) of a file by its first bytes and its name; None where it does not say."""
    damage = Damage(path)
    head = b""
    try:
        for chunk in read_chunks(path, damage):
            head += chunk
            if len(head) >= _HEAD:
                break
    except OSError as error:
        raise CrossrankError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not head and damage.problems:
        raise CrossrankError(f"{path}: {damage.problems[0]}")
    head = head[:_HEAD]
    kind = next((kind for kind, sign in _SIGNS if sign.search(head)), None)
    return kind, rank_said(PurePosixPath(path).name, head)


def files_at(path: str, skipped: list[str]) -> list[tuple[str, Input]]:
    """(kind, file) of what is at a path; `skipped` gets what cannot be read."""
    listing = list_recording(path)
    found = [
        (file.kind, Input(path=file.path, rank=file.rank, window=file.window))
        for file in listing.files
        if file.rank < MOST_RANKS
    ]
    one_file = not is_folder(path)
    for name in listing.foreign:
        if is_part(name):
            continue
        whole = path if one_file else f"{path.rstrip('/')}/{name}"
        try:
            kind, rank = kind_of_file(whole)
        except CrossrankError as error:
            skipped.append(str(error))
            continue
        if kind in _CALLS or kind == NSIGHT:
            found.append((kind, Input(path=whole, rank=rank)))
        elif one_file:
            skipped.append(f"{name} is none of them")
    for name in listing.torn:
        skipped.append(f"{name} was cut off while it was written")
    return found
