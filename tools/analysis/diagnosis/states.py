"""What a rank does that does not wait in a call, by evidence: it runs, is idle, stopped or gone, or this is unknown.

A rank's answer has the CPU time of each of its threads between two looks. A thread that is blocked uses none, one that
works or polls uses some. The thread that decides is the one that made the rank's last calls on the group: training may
run in a thread, and a main thread in `join()` shows nothing. If it is blocked in what another thread or a child process
can end, these decide. A rank that does not answer was looked at by another rank of its node.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from crossrank.recording import ANSWERS, C_SLEEPS, POLLS, PYTHON_SLEEPS, SLEEPS, STORE
from crossrank.text import plural
from crossrank.tools.analysis.diagnosis.findings import LateRank, error_text
from crossrank.tools.analysis.diagnosis.main_threads import (
    is_timer,
    is_users,
    main_stack,
    runs_event_loop,
    waits_for_threads,
)
from crossrank.tools.traces.activity import RankActivity, ThreadActivity
from crossrank.tools.traces.ending import CUT_SHORT, LEFT, MAIN_THREAD, Ending
from crossrank.tools.traces.flight.dump import Frame, OwnStack
from crossrank.tools.traces.rank_trace import GLOO, RankTrace
from crossrank.tools.traces.seen import Seen

RUNS, IDLE, STOPPED, NATIVE, GONE, SILENT = "runs", "idle", "stopped", "native", "gone", "silent"
MOVING = (RUNS, NATIVE)
"""States in which a rank may come to the call without help."""

_BY_THREADS = ("futex", "poll", "select", "epoll_wait", "read", "wait4", "waitid", "")
"""System calls that another thread or a child process can end; empty: unknown."""
_BY_SOCKET = ("poll", "select", "epoll_wait", "recvfrom", "recvmsg", STORE)
"""System calls in which a thread waits for data of a socket."""
_BY_LOCK = ("flock", "fcntl")
"""System calls in which a thread waits for a file lock."""
_LOCK_NAME = re.compile(r"lock|acquire", re.IGNORECASE)
"""Names of files and functions that wait for a lock."""
_INNER_FRAMES = 3
_BACKGROUND = (
    "crossrank",
    "pt_nccl_",
    "pt_gloo_",
    "gloo_",
    "pt_tcpstore",
    "cuda-",
    "pt_elastic",
    "pt_autograd_idle",
    "tqdm",
)
"""First parts of the names of threads that use CPU time all the time."""
_LEAST_NS = 10_000
"""CPU time from which the thread itself counts as running."""
_SHARE = 0.005
"""Share of a CPU from which another thread, or a child process, counts as working."""
_LEAST_OF_PROCESS = 0.05
"""Share of a CPU from which a process works: threads that ask for the interpreter's lock use some."""
_NS = 1e9
_UNKNOWN = "does not wait in another one"


def worker_of(ending: Ending, pg: str | None = None) -> OwnStack | None:
    """Return the thread that made the last call of a rank on a group, or its last call; else the main thread. If the
    script has ended on this thread, return the one that the end of the process waits for."""
    number = ending.callers.get(pg or "") or next(reversed(ending.callers.values()), None)
    of_number = (stack for stack in ending.stacks if number is not None and stack.number == number)
    found = next(of_number, None) or main_stack(ending)
    if found is None or not any(map(_ends_threads, found.frames)):
        return found
    return next((one for one in ending.stacks if one is not found and any(map(is_users, one.frames))), found)


def _ends_threads(frame: Frame) -> bool:
    """Return whether it is the function of Python that waits for threads when the script has ended."""
    return frame.name == "_shutdown" and frame.filename.endswith("threading.py")


def place_text(frames: Sequence[Frame]) -> str:
    """Return the user's innermost line, as `function (file:line)`; empty without one."""
    frame = next(filter(is_users, frames), None)
    return "" if frame is None else f"{frame.name} ({frame.filename}:{frame.line})"


def state_of(trace: RankTrace, pg: str | None = None) -> LateRank:
    """Return what a rank does that has not made a call on a group."""
    ending = trace.ending
    seen = _seen(ending.seen)
    state, text, cpu = (seen if ending.reason in CUT_SHORT else None) or _gone(ending) or seen or _active(ending, pg)
    stack = worker_of(ending, pg)
    place = place_text(stack.waits_at) if stack is not None else ""
    if place and ending.vanished:
        text += f", after it was seen in {place}"
    elif place and ending.seen is not None and ending.seen.frames:
        text += f" in {place}"
    return LateRank(rank=trace.rank or 0, state=state, text=text, cpu=cpu, place=place, host=trace.host)


State = tuple[str, str, "float | None"]
"""Name of a state, what the rank does, share of a CPU"""


def _gone(ending: Ending) -> State | None:
    if ending.reason in LEFT or ending.ended:
        why = error_text(ending.error) or ending.reason or "its recording ended"
        return GONE, f"has left the job ({why})", None
    if ending.vanished:
        return GONE, "has ended without an error message", None
    if ending.error is None:
        return None
    return GONE, f"has {'raised' if ending.reason in ANSWERS else 'ended'} ({error_text(ending.error)})", None


def _seen(seen: Seen | None) -> State | None:
    if seen is None:
        return None
    process = f"process {seen.process}"
    if seen.state == "X":
        return GONE, f"has ended without an error message ({process})", None
    if seen.frozen or seen.state in "Tt":
        return STOPPED, f"is stopped ({process} is {'frozen' if seen.frozen else 'in state T'})", None
    cpu = _share(seen.cpu_ns, seen)
    if cpu >= _LEAST_OF_PROCESS:
        return NATIVE, f"runs C code that keeps the interpreter's lock ({process})", cpu
    return IDLE, f"does not answer ({process} is alive and does nothing)", None


def _active(ending: Ending, pg: str | None) -> State:
    activity = ending.activity
    if activity is None:
        return SILENT, "shows no sign of life" if ending.unseen else _UNKNOWN, None
    stack = worker_of(ending, pg) if pg else first_thread(ending)
    thread = ending.activity_of(stack)
    calls = f"makes {plural(activity.calls, 'other call')} in {activity.seconds:.1f} s" if activity.calls > 0 else ""
    if thread is None:
        return (RUNS, calls or "finishes calls", None) if activity.has_communicated else (SILENT, _UNKNOWN, None)
    place = place_text(stack.waits_at) if stack is not None else ""
    at = f" in {place}" if place else ""
    if thread.cpu_ns > _LEAST_NS:
        share = _share(thread.cpu_ns, activity)
        text = f"{'runs' if share >= _SHARE or calls else 'wakes up now and then'}{at}"
        return RUNS, f"{text} and {calls}" if calls else text, share
    if (helper := _helper(thread, activity)) is not None:
        return RUNS, f"waits{at} for {helper[0]}", helper[1]
    if thread.blocked_in == STORE:
        return IDLE, f"waits for a key of the store{at}", None
    where = f" in {thread.blocked_in}()" if thread.blocked_in else ""
    return IDLE, f"is blocked{where}{at}", None


def _helper(thread: ThreadActivity, activity: RankActivity) -> tuple[str, float] | None:
    """Return what works while a thread is blocked that may wait for it, and its share of a CPU."""
    least = _SHARE * activity.seconds * _NS
    working = [(child.cpu_ns, f"process {child.id} ({child.name})") for child in activity.children]
    others = (one for one in activity.threads if one.id != thread.id and not one.name.startswith(_BACKGROUND))
    working += [(other.cpu_ns, f"thread {other.name}") for other in others]
    cpu_ns, name = max(working, default=(0, ""))
    is_helped = thread.blocked_in in _BY_THREADS and cpu_ns > least
    return (name, _share(cpu_ns, activity)) if is_helped else None


def _share(cpu_ns: int, looks: RankActivity | Seen | None) -> float:
    """Return the share of a CPU that was used between two looks."""
    return 0.0 if looks is None else min(cpu_ns / _NS / max(looks.seconds, 0.01), 1.0)


def is_moving(trace: RankTrace) -> bool:
    """Return whether a rank was in no call for the whole time between the two looks of its answer, because it worked.

    A host that waits for its GPU may use CPU time, and a thread that launches NCCL's calls does. So there only calls
    that were made or finished in between count.
    """
    ending, activity = trace.ending, trace.ending.activity
    if activity is None or ending.reason not in ANSWERS or ending.vanished:
        return False
    if trace.backend != GLOO:
        return activity.has_communicated
    first = first_thread(ending)
    if first is not None and any(wait.thread == first.number for wait in activity.held):
        return False
    # Not every kernel counts the time of threads.
    return _active(ending, None)[0] == RUNS or ending.activity_of(first) is None


def may_wait_for_others(ranks: Mapping[int, RankTrace], those: Collection[int]) -> bool:
    """Return whether some ranks are all at one line where they poll, or wait for data of a socket: they may wait for
    other ranks there, in a way that is not recorded."""
    states = [state_of(ranks[rank]) for rank in those]
    waits = (_may_wait_for_another(ranks[rank].ending) for rank in those)
    return len({one.place for one in states}) == 1 and bool(states[0].place) and all(waits)


def that_may_wait_for_the_rest(ranks: Mapping[int, RankTrace], late: Collection[int]) -> set[int]:
    """Return the late ranks that wait for data of a socket, or poll: another late rank may release them. Empty if there
    is no other, or if all of them do so at one line."""
    found = {rank for rank in late if _may_wait_for_another(ranks[rank].ending)}
    places = {state_of(ranks[rank]).place for rank in found}
    return found if len(late) > 1 and (found != set(late) or len(places) > 1) else set()


def waits_for_key(ending: Ending) -> bool:
    """Return whether a rank waits for a key of the store, which another rank has to set."""
    return _blocked_in(ending) == STORE


def accepts(ending: Ending) -> bool:
    """Return whether a rank waits for a connection: somebody else has to make it."""
    return _blocked_in(ending) == "accept"


def _may_wait_for_another(ending: Ending) -> bool:
    """Return whether a rank polls, or waits for data of a socket."""
    return polls_only(ending) or _blocked_in(ending) in _BY_SOCKET


def way_out(ending: Ending) -> str:
    """Return the thread of a rank that waits for others that may still make a call, as text; empty if none is known.

    It is a thread that works and has made no call so far, the main thread if another one waits, or a timer. A thread
    that has made calls is known by its groups.
    """
    waiting = {one.number for one in ending.waits or ()}
    for stack in ending.stacks:
        thread, is_main = ending.activity_of(stack), stack.thread == MAIN_THREAD
        works = thread is not None and _share(thread.cpu_ns, ending.activity) >= _SHARE and not is_main
        works &= stack.number not in ending.callers.values()
        if stack.number in waiting or not (is_timer(stack) or any(map(is_users, stack.frames))):
            continue
        is_free = is_main and bool(waiting) and (runs_event_loop(stack) or not waits_for_threads(stack))
        if works or is_timer(stack) or is_free:
            place = place_text(stack.waits_at)
            return f"its {'main thread' if is_main else f'thread {stack.thread}'}{f' in {place}' if place else ''}"
    return ""


def may_wake(ending: Ending) -> str:
    """Return the thread of a rank that waits for others that something outside of the process may wake, as text: it
    sleeps, or waits for data, a process or some time. Such a thread with the user's code may make a call then. Empty
    without one: a thread that waits in a lock can be woken by another thread of the process alone."""
    waiting = {one.number for one in ending.waits or ()}
    for stack in ending.stacks:
        thread, made_calls = ending.activity_of(stack), stack.number in ending.callers.values()
        wakes = thread is not None and (thread.timed or thread.blocked_in != "futex")
        if thread is None or not wakes or made_calls or stack.number in waiting:
            continue
        if stack.thread != MAIN_THREAD and any(map(is_users, stack.frames)):
            where = f" in {thread.blocked_in}()" if thread.blocked_in else ""
            return f"its thread {stack.thread} is blocked{where} in {place_text(stack.waits_at)}"
    return ""


def _blocked_in(ending: Ending) -> str:
    thread = ending.activity_of(first_thread(ending))
    return "" if thread is None else thread.blocked_in


def waits_for_thread(ending: Ending) -> bool:
    """Return whether the thread that a rank's progress depends on is blocked in what another thread can end."""
    return _blocked_in(ending) in _BY_THREADS


def released_by(ending: Ending, pg: str) -> Sequence[int]:
    """Return the processes that can end what the thread waits for that calls on a group; empty if that is unknown. A
    thread that sleeps waits for a file lock only if C code sleeps, such as SQLite's, or its function or file is named
    after locks."""
    stack = worker_of(ending, pg)
    thread = ending.activity_of(stack)
    if thread is None or stack is None:
        return []
    if thread.blocked_in in SLEEPS:
        tries = thread.blocked_in == C_SLEEPS or _locks(stack)
        return thread.released_by if tries and _share(thread.cpu_ns, ending.activity) < POLLS else []
    return [] if thread.cpu_ns > _LEAST_NS else thread.released_by


def may_try_a_lock_of(ending: Ending, pg: str) -> Sequence[int]:
    """Return the processes that have locked a file which the rank has open, if Python sleeps in the thread that calls
    on a group: it may try to lock the file."""
    thread = ending.activity_of(worker_of(ending, pg))
    return thread.released_by if thread is not None and thread.blocked_in == PYTHON_SLEEPS else []


def waits_for_lock(ending: Ending, pg: str) -> bool:
    """Return whether the thread that calls on a group waits for a file lock."""
    thread = ending.activity_of(worker_of(ending, pg))
    return thread is not None and thread.blocked_in in (*_BY_LOCK, *SLEEPS)


def _locks(stack: OwnStack) -> bool:
    return any(_LOCK_NAME.search(f"{frame.filename}:{frame.name}") for frame in stack.frames[:_INNER_FRAMES])


def members_in_making(ending: Ending) -> list[int] | None:
    """Return the members of the group that a rank is making, empty for all; None if it makes none."""
    return next((stack.makes_group for stack in ending.stacks if stack.makes_group is not None), None)


def name_in_making(ending: Ending) -> str:
    """Return the name of the group that a rank is making; empty if it makes none, or the name is unknown."""
    return next((stack.makes_name for stack in ending.stacks if stack.makes_group is not None), "")


def polls_only(ending: Ending) -> bool:
    """Return whether a rank that runs uses so little CPU time that it only looks for something now and then."""
    thread, activity = ending.activity_of(first_thread(ending)), ending.activity
    if thread is None or activity is None:
        return False
    return thread.cpu_ns > _LEAST_NS and _share(thread.cpu_ns, activity) < POLLS


def first_thread(ending: Ending) -> OwnStack | None:
    """Return the thread that a rank's progress depends on: the main thread if it has made calls, else the last that
    has."""
    main = main_stack(ending)
    trains = main is not None and main.number in ending.callers.values() and not any(map(_ends_threads, main.frames))
    return main if trains else worker_of(ending)
