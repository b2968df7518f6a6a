"""Texts of NVTX markers, kept short enough for every tool.

Nsight Systems 2022.4 shows another text in place of one of 65,535 bytes or more, and what holds the ranks of a group
or the splits of an all_to_all grows with the job. A text that would be too long says the same in fewer bytes (ranks as
`rank_runs`, see `crossrank.rank_runs`), and leaves out lists as far as it must: `left_out` says how many entries each
of them had. The record in the comms file has all of it.
"""

from __future__ import annotations

from typing import Any

import orjson

from crossrank.rank_runs import to_runs

MAX_BYTES = 60_000
"""UTF-8 bytes of a text."""
_MOST_NAME = 1000
"""Characters that are left of a name that makes the text too long."""
_CUT = "..."


def shortened(text: str) -> str:
    """The JSON of a marker, or if it has more than `MAX_BYTES` a shorter one of the same call or group."""
    if len(text) * 4 <= MAX_BYTES or len(text.encode()) <= MAX_BYTES:
        return text
    fields: dict[str, Any] = orjson.loads(text)
    part = fields.get("group", fields)
    _write_ranks_as_runs(part)
    while len(orjson.dumps(fields)) > MAX_BYTES:
        longest = max(part, key=lambda name: len(orjson.dumps(part[name])))
        value = part[longest]
        if isinstance(value, str):
            part[longest] = _CUT + value[-_MOST_NAME:]
        else:
            del part[longest]
            name, entries = ("ranks", sum(run[1] for run in value)) if longest == "rank_runs" else (longest, len(value))
            part.setdefault("left_out", {})[name] = entries
    return orjson.dumps(fields).decode()


def _write_ranks_as_runs(part: dict[str, Any]) -> None:
    for name in ("ranks", "group_ranks"):
        if part.get(name):
            part["rank_runs"] = to_runs(part.pop(name))
