"""Positions of ranks in their code: of the culprits and of ranks that wait."""

from __future__ import annotations

from collections.abc import Sequence

from crossrank.tools.analysis.diagnosis.findings import Finding, Place, call_text, error_text, group_text
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.main_threads import is_users, line_of
from crossrank.tools.analysis.diagnosis.states import first_thread, waits_for_thread, worker_of
from crossrank.tools.analysis.diagnosis.wait_for_graph import WaitForGraph
from crossrank.tools.traces.ending import MAIN_THREAD, RECORDER
from crossrank.tools.traces.flight.dump import Frame
from crossrank.tools.traces.rank_trace import GLOO

_MOST_CULPRITS = 4
"""Places of culprits per finding."""
_MOST_FRAMES = 12
_INNER_FRAMES = 4
"""Frames of libraries, called by the user's line, that are shown below it."""


def add_places(job: JobState, graph: WaitForGraph, findings: Sequence[Finding]) -> None:
    """Set `places` of every finding with stacks: culprits at different positions, and one waiting rank. Without a
    culprit, two waiting ranks at different positions, and one that they wait for."""
    for finding in findings:
        known = {place.rank for place in finding.places}
        culprits, waiting = finding.culprit_ranks, finding.waiting_ranks
        ops = [graph.op_of[rank] for rank in waiting if rank in graph.op_of]
        awaited = {rank for op in ops for rank in op.awaited}.difference(waiting)
        for role, ranks, most in (
            ("culprit", culprits, _MOST_CULPRITS),
            ("waiting", waiting, 1 if culprits else 2),
            ("member", [] if culprits else sorted(awaited), 1),
        ):
            shown: dict[tuple[str, ...], Place] = {}
            for rank in ranks:
                if len(shown) < most and rank not in known:
                    for place in _places(job, graph, finding, rank, role):
                        shown.setdefault(tuple(place.frames), place)
            finding.places += shown.values()
            known.update(place.rank for place in shown.values())


def _places(job: JobState, graph: WaitForGraph, finding: Finding, rank: int, role: str) -> list[Place]:
    """Return the position of a rank; if its host has continued, also the position of the call."""
    trace = job.ranks.get(rank)
    if trace is None:
        return []
    ending, is_culprit = trace.ending, role == "culprit"
    if ending.has_raised and ending.traceback:
        what = f"where it raised {error_text(ending.error)}"
        return [Place(rank=rank, role=role, what=what, frames=frame_texts(ending.traceback))]
    if is_culprit and ending.of_threads and (ending.activity is None or waits_for_thread(ending)):
        ended = ending.of_threads[0]
        what = f"where thread {ended.thread} raised {error_text(ended.error)}"
        return [Place(rank=rank, role=role, what=what, frames=frame_texts(ended.frames))]
    blocked, wrong = graph.blocked.get(rank), None
    if is_culprit and finding.proof == "mismatch":  # it may have gone on, and wait in a later call
        wrong = _row_of(job, finding, rank)
    row = blocked if wrong is None else wrong
    row = _row_of(job, finding, rank) if row is None else row
    what = "the call that it waits in" if row == blocked else "its call"
    if row is None and len(trace.calls):
        # A process that was killed or stopped had not written its calls of the last second.
        row, what = len(trace.calls) - 1, "the last call in its file" if ending.unseen else "its last call"
    frames = frame_texts(job.stack(rank, row)) if row is not None else []
    main = worker_of(ending, finding.pg[0]) if is_culprit else first_thread(ending)
    of_call = place_of_call(job, rank, row, role, what) if row is not None else None
    # At the end of a recording the main thread is in its shutdown code, or where it called `sys.exit` or `os._exit`.
    is_leaving = ending.reason in ("exit", "disable")
    if is_culprit and ending.reason == "exit" and main is not None and any(map(is_users, main.frames)):
        left = Place(rank=rank, role=role, what="where it called exit", frames=frame_texts(main.frames))
        return [left, *filter(None, [of_call])]
    lost = main is not None and bool(frames) and not any(map(is_users, main.frames))  # reporting an exception
    if main is not None and not is_leaving and not lost and (is_culprit or len(frames) < 2):
        name = "main thread" if main.thread == MAIN_THREAD else f"thread {main.thread}"
        what_of = f"a task of the event loop of its {name}" if main.tasks else f"its {name}"
        where = Place(rank=rank, role=role, what=what_of, frames=frame_texts(main.waits_at))
        # On a GPU the host continues while a call waits, and on gloo from an asynchronous call to its wait.
        may_go_on = trace.backend != GLOO or wrong is not None or row == blocked
        has_gone_on = row is not None and may_go_on and not _is_in(main.waits_at, job.stack(rank, row))
        places = [of_call, where] if of_call is not None and has_gone_on else [where]
        if is_culprit and main.handles is not None:
            what = f"where it raised {error_text(main.handles.error)}, which its {name} handles"
            places.append(Place(rank=rank, role=role, what=what, frames=frame_texts(main.handles.frames)))
        return places
    return [of_call] if of_call is not None else []


def _is_in(frames: Sequence[Frame], call: Sequence[Frame]) -> bool:
    """Return whether a thread is in a call, by the user's innermost line that made the call."""
    line = next((line_of(frame) for frame in call if is_users(frame)), None)
    return line is None or line in map(line_of, frames)


def place_of_call(job: JobState, rank: int, row: int, role: str, what: str) -> Place | None:
    """Return the position at which a rank made a call; None without a recorded stack."""
    frames = frame_texts(job.stack(rank, row))
    if not frames:
        return None
    call = call_text(job.signature(rank, row).op, job.ranks[rank].calls.number[row])
    group = group_text(job.group_at(rank, row).pg)
    return Place(rank=rank, role=role, what=f"{what}, {call} on {group}", frames=frames)


def _row_of(job: JobState, finding: Finding, rank: int) -> int | None:
    """Return the rank's row of the collective of a finding."""
    same = (group for group in job.groups if group.pg == finding.pg and list(group.ranks) == finding.pg_ranks)
    group = next(same, None) if finding.collective_seq_id is not None else None
    return dict(job.rows_of(group, finding.collective_seq_id or 0)).get(rank) if group is not None else None


def frame_texts(frames: Sequence[Frame]) -> list[str]:
    """Return frames as `function (file:line)`: the user's, innermost first, then the innermost frames they called.

    With FSDP or DDP, dozens of framework frames are between the call and the user's line. Frames of crossrank's
    recorder are skipped.
    """
    users = [frame for frame in frames if is_users(frame)]
    inner = [frame for frame in frames if not is_users(frame) and RECORDER not in frame.filename]
    most = _INNER_FRAMES if users else _MOST_FRAMES
    return [f"{frame.name} ({frame.filename}:{frame.line})" for frame in users[:_MOST_FRAMES] + inner[:most]]
