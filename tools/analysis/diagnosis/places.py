"""Where in their code the ranks of a finding are: a culprit and one that waits, side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from crossrank.tools.analysis.diagnosis.findings import Finding, Place, call_text, group_text
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.waiting import Waiting
from crossrank.tools.traces.ending import RECORDER
from crossrank.tools.traces.flight_recorder import Frame, OwnStack
from crossrank.tools.traces.rank_trace import RankTrace

_MOST_CULPRITS = 4
"""Places of culprits that are shown of one finding."""
_MOST_FRAMES = 12
_INNER_FRAMES = 4
"""Frames of libraries that are shown below the user's: what the user's line has called."""
_MAIN = "MainThread"
_COMMUNICATES = re.compile(r"[/\\]torch[/\\]distributed[/\\]")
_LIBRARY = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python\d[.\d]*[/\\]|^<frozen |[/\\]torch[/\\]", re.IGNORECASE
)
"""Paths of code that is not the user's: torch and other packages, and Python's own."""


def add_places(job: JobState, waiting: Waiting, findings: Sequence[Finding]) -> None:
    """Fill in `places` of every finding, as far as there are stacks: culprits in different places, one waiting rank."""
    for finding in findings:
        for role, ranks, most in (
            ("culprit", finding.culprit_ranks, _MOST_CULPRITS),
            ("waiting", finding.waiting_ranks, 1),
        ):
            shown: dict[tuple[str, ...], Place] = {}
            for rank in ranks:
                is_shown = len(shown) == most or any(place.rank == rank for place in finding.places)
                place = None if is_shown else _place(job, waiting, finding, rank, role)
                if place is not None:
                    shown.setdefault(tuple(place.frames), place)
            finding.places += shown.values()


def _place(job: JobState, waiting: Waiting, finding: Finding, rank: int, role: str) -> Place | None:
    evidence = job.ranks.get(rank)
    if evidence is None:
        return None
    if evidence.ending.has_raised and evidence.ending.traceback:
        what = f"where it raised {evidence.ending.error}"
        return Place(rank=rank, role=role, what=what, frames=frame_texts(evidence.ending.traceback))
    if role == "culprit" and evidence.ending.of_threads:
        ended = evidence.ending.of_threads[0]
        what = f"where its thread {ended.thread} raised {ended.error}"
        return Place(rank=rank, role=role, what=what, frames=frame_texts(tuple(ended.frames)))
    head = waiting.heads.get(rank)
    row = head.row if head is not None else _row_of(job, finding, rank)
    what = "the call it is stuck in" if head is not None else "its call"
    if row is None and len(evidence.calls):
        row, what = len(evidence.calls) - 1, "the last call it made"
    frames = frame_texts(job.stack(rank, row)) if row is not None else []
    main = _stack_of_culprit(evidence) if role == "culprit" else _main_stack(evidence)
    # At the end of a recording the main thread is where it ends, and not where the rank was.
    is_leaving = evidence.ending.reason in ("exit", "disable")
    lost = main is not None and bool(frames) and not any(map(_is_users, main.frames))  # reporting an exception
    if main is not None and not is_leaving and not lost and (role == "culprit" or len(frames) < 2):
        return Place(
            rank=rank, role=role, what=f"its {_name(main)} when it was dumped", frames=frame_texts(tuple(main.frames))
        )
    return place_of_call(job, rank, row, role, what) if row is not None else None


def place_of_call(job: JobState, rank: int, row: int, role: str, what: str) -> Place | None:
    """Where in its code a rank made a call; None where no stack of it was recorded."""
    frames = frame_texts(job.stack(rank, row))
    if not frames:
        return None
    call = call_text(job.signature(rank, row).op, job.ranks[rank].calls.number[row])
    group = group_text(job.group_at(rank, row).pg)
    return Place(rank=rank, role=role, what=f"{what}, {call} on {group}", frames=frames)


def _main_stack(evidence: RankTrace) -> OwnStack | None:
    return next((stack for stack in evidence.ending.stacks if stack.thread == _MAIN), None)


def _stack_of_culprit(evidence: RankTrace) -> OwnStack | None:
    """The thread that does something else than communicate: the main one, unless it communicates and another not."""
    main = _main_stack(evidence)
    if main is None or not _communicates(main):
        return main
    busy = [stack for stack in evidence.ending.stacks if any(map(_is_users, stack.frames))]
    return next((stack for stack in busy if not _communicates(stack)), main)


def _communicates(stack: OwnStack) -> bool:
    """Whether what the user's innermost line called is in torch.distributed."""
    called = takewhile(lambda frame: not _is_users(frame), stack.frames)
    return any(_COMMUNICATES.search(frame.filename) for frame in called)


def _name(stack: OwnStack) -> str:
    return "main thread" if stack.thread == _MAIN else f"thread {stack.thread}"


def _row_of(job: JobState, finding: Finding, rank: int) -> int | None:
    """The rank's row of the collective that a finding is about."""
    if finding.collective_seq_id is None:
        return None
    for group in job.groups:
        if group.pg == finding.pg and list(group.ranks) == finding.pg_ranks:
            lane = group.lanes.get(rank)
            return lane.row(finding.collective_seq_id) if lane is not None else None
    return None


def frame_texts(frames: tuple[Frame, ...]) -> list[str]:
    """`function (file:line)`: the user's frames, innermost first, then the innermost ones of what they called.

    With FSDP or DDP dozens of the frameworks' frames lie between the call and the user's line. The recorder's own
    frames are left out.
    """
    known = [frame for frame in frames if RECORDER not in frame.filename]
    users = [frame for frame in known if _is_users(frame)]
    inner = [frame for frame in known if not _is_users(frame)]
    most = _INNER_FRAMES if users else _MOST_FRAMES
    return [f"{frame.name} ({frame.filename}:{frame.line})" for frame in users[:_MOST_FRAMES] + inner[:most]]


def _is_users(frame: Frame) -> bool:
    return _LIBRARY.search(frame.filename) is None and RECORDER not in frame.filename
