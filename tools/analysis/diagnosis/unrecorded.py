"""Waits that are no call: ranks that make a group, or look for a key of the store, and are there alone.

No recorder notes them. The dumps of crossrank have the stacks of the threads, and those show them.
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import PurePath

from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.traces.ending import MAIN_THREAD, RECORDER
from crossrank.tools.traces.flight_recorder import Frame
from crossrank.tools.traces.rank_trace import RankTrace

_MEETING = re.compile(r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|c10d_logger|rendezvous)\.py$")
"""Files of functions that wait for other ranks, by calls or through the store."""

_LONG = 2_000_000_000
"""ns after its last call from which a rank that was ended inside torch.distributed is taken to have waited there."""


def waits_unrecorded(job: JobState, rank: int) -> bool:
    """Whether the main thread of a rank hung inside torch.distributed in something other than its last call."""
    evidence = job.ranks[rank]
    main = next((stack for stack in evidence.ending.stacks if stack.thread == MAIN_THREAD), None)
    if main is None or not _stood_still(evidence):
        return False
    frames = [frame for frame in main.frames if RECORDER not in frame.filename]
    meeting = list(takewhile(_is_meeting, frames))
    if not meeting or len(meeting) == len(frames):
        return False
    caller = frames[len(meeting)]
    last_call = job.stack(rank, len(evidence.calls) - 1) if len(evidence.calls) else ()
    return not any(caller.line == frame.line and _is_same_file(caller, frame) for frame in last_call)


def _stood_still(evidence: RankTrace) -> bool:
    idle = (evidence.ending.taken_at or 0) - max(evidence.calls.called, default=0)
    return evidence.ending.error is None and (
        evidence.ending.reason == "hang" or (evidence.ending.was_terminated and idle > _LONG)
    )


def _is_meeting(frame: Frame) -> bool:
    return _MEETING.search(frame.filename) is not None


def _is_same_file(one: Frame, other: Frame) -> bool:
    """Whether two frames are of files of one name: a record has a path without its folders."""
    return PurePath(one.filename).name == PurePath(other.filename).name
