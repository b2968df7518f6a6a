"""Two ranks that wait for each other are no deadlock if another thread of one of them can go on."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.traces.activity import HeldWait, RankActivity, ThreadActivity
from crossrank.tools.traces.flight.dump import Frame, OwnStack, WaitUnderWay
from crossrank.tools.traces.rank_trace import RETIRED, SCHEDULED, RankTrace
from tests.unit.analysis.diagnosis.ranks import call, group, rank, world

MAIN, HELPER, SECOND = 100, 101, 10**9
THREADING = "/usr/lib/python3.12/threading.py"
SLEEPS = (Frame("serve", "/job/serve.py", 7),)
TIMER = tuple(Frame(name, THREADING, line) for name, line in (("wait", 355), ("wait", 655), ("run", 1431)))
POOL = (Frame("_worker", "/usr/lib/python3.12/concurrent/futures/thread.py", 90),)


def waiting(
    number: int,
    made: str,
    due: str,
    *,
    helper: tuple[Frame, ...] = (),
    cpu_ns: int = 0,
    serves: str = "",
    helper_waits_in: str = "",
    helper_blocked_in: str = "futex",
    timed: bool = False,
    limited: bool = False,
    limited_groups: frozenset[str] = frozenset(),
) -> RankTrace:
    """A rank whose main thread waits in its second call on group `due`, after a call on `made`. `helper`: frames of
    another thread, which makes the calls on group `serves`, and may wait in one. `limited`: the wait has a timeout."""
    calls = [
        call(pg=made, number=1, state=RETIRED, id=0, called=SECOND),
        call(pg=due, number=1, state=RETIRED, id=1, called=SECOND + 1),
        call(pg=due, number=2, state=SCHEDULED, id=2, called=3 * SECOND),
    ]
    waits = [WaitUnderWay(id=2, thread="MainThread", number=MAIN, limited=limited)]
    if helper_waits_in:
        calls.append(call(pg=helper_waits_in, number=1, state=SCHEDULED, id=3, called=4 * SECOND))
        waits.append(WaitUnderWay(id=3, thread="helper", number=HELPER))
    stacks = [OwnStack(thread="MainThread", number=MAIN, frames=[Frame("train", "/job/train.py", 5)])]
    stacks += [OwnStack(thread="helper", number=HELPER, frames=list(helper))] if helper else []
    callers = {"1": MAIN, "2": MAIN} | ({serves: HELPER} if serves else {})
    threads = [ThreadActivity(id=MAIN, blocked_in="futex"), _helper(cpu_ns, helper_blocked_in, timed)]
    ending: dict[str, Any] = {
        "reason": "hang",
        "taken_at": 100 * SECOND,
        "activity": RankActivity(seconds=1.0, threads=threads, held=[HeldWait(2, MAIN)]),
        "stacks": stacks,
        "waits": waits,
        "callers": callers,
        "collective_callers": callers,
        "limited_groups": limited_groups,
    }
    groups = (world(3), group("1", 0, 1), group("2", 0, 1), group("3", 0, 2))
    trace = rank(number, *calls, groups=groups, ending=ending, backend="gloo")
    trace.awaited = {2}
    trace.row_of_thread = {MAIN: 2} | ({HELPER: 3} if helper_waits_in else {})
    return trace


def _helper(cpu_ns: int, blocked_in: str, timed: bool) -> ThreadActivity:
    return ThreadActivity(id=HELPER, cpu_ns=cpu_ns, blocked_in=blocked_in, timed=timed)


def supplier(frame: Frame) -> RankTrace:
    """Rank 2, which has made no call on group 3."""
    stack = OwnStack(thread="MainThread", number=MAIN, frames=[frame])
    ending = {"reason": "asked", "taken_at": 100 * SECOND, "stacks": [stack], "waits": []}
    activity = RankActivity(seconds=1.0, threads=[ThreadActivity(id=MAIN, blocked_in="read")])
    calls = call(number=1, state=RETIRED, called=SECOND)
    return rank(2, calls, groups=(world(3), group("3", 0, 2)), ending=ending | {"activity": activity}, backend="gloo")


def diagnosed(*ranks: RankTrace) -> Diagnosis:
    return diagnose(Evidence(ranks=list(ranks)), world_size=3, allow_missing=True)[0]


def test_two_ranks_whose_only_threads_wait_are_a_deadlock() -> None:
    found = diagnosed(waiting(0, "2", "1"), waiting(1, "1", "2"))
    assert [(one.kind, one.proof) for one in found.findings] == [("opposite_order", "deadlock")]


def test_a_rank_is_late_whose_other_thread_makes_the_calls_on_the_group() -> None:
    found = diagnosed(waiting(0, "2", "1", helper=SLEEPS, serves="2"), waiting(1, "1", "2"))
    (finding,) = found.findings
    assert (finding.kind, finding.proof, finding.pg[0], finding.culprit_ranks) == ("missing_rank", "late", "2", [0])
    assert [one.place for one in finding.late_ranks] == ["serve (/job/serve.py:7)"]
    assert [(one.pg[0], one.waiting_ranks) for one in found.consequences] == [("1", [0])]


def test_the_rank_is_named_that_this_thread_waits_for() -> None:
    reads = Frame("load", "/job/data.py", 3)
    serving = waiting(0, "2", "1", helper=SLEEPS, serves="2", helper_waits_in="3")
    found = diagnosed(serving, waiting(1, "1", "2"), supplier(reads))
    (finding,) = found.findings
    assert (finding.pg[0], finding.proof, finding.culprit_ranks) == ("3", "late", [2])
    assert [one.place for one in finding.late_ranks] == ["load (/job/data.py:3)"]


@pytest.mark.parametrize(
    ("helper", "cpu_ns", "way_out"),
    [
        (SLEEPS, SECOND // 2, "its thread helper in serve (/job/serve.py:7)"),
        (TIMER, 0, "its thread helper"),
        (SLEEPS, 0, ""),  # it never made a call
        (POOL, SECOND // 2, ""),
    ],
)
def test_a_thread_that_may_make_its_first_call_leaves_it_open(
    helper: tuple[Frame, ...], cpu_ns: int, way_out: str
) -> None:
    found = diagnosed(waiting(0, "2", "1", helper=helper, cpu_ns=cpu_ns), waiting(1, "1", "2"))
    (finding,) = found.findings
    assert finding.proof == ("not_known" if way_out else "deadlock")
    assert finding.text.endswith(f"; rank 0 may still go on: {way_out}") == bool(way_out)
    assert finding.culprit_ranks == []


@pytest.mark.parametrize(
    ("blocked_in", "timed", "proof"),
    [
        ("futex", False, "deadlock"),  # only another thread of the process can wake it
        ("futex", True, "late"),
        ("nanosleep", True, "late"),
        ("recvfrom", False, "late"),
        ("", False, "late"),  # unknown
    ],
)
def test_a_thread_that_wakes_without_the_others_may_make_its_first_call(
    blocked_in: str, timed: bool, proof: str
) -> None:
    helper: dict[str, Any] = {"helper": SLEEPS, "helper_blocked_in": blocked_in, "timed": timed}
    (finding,) = diagnosed(waiting(0, "2", "1", **helper), waiting(1, "1", "2")).findings
    assert finding.proof == proof
    assert ("rank 0 may go on if its other thread does: its thread helper is blocked" in finding.text) == (
        proof == "late"
    )


@pytest.mark.parametrize(
    ("how", "way_out"),
    [
        ({"limited": True}, "; rank 0 may still go on: its wait has a timeout"),
        ({"limited_groups": frozenset("1")}, "; rank 0 may still go on: its wait has a timeout"),
        ({"limited_groups": frozenset("2")}, ""),  # the other group
    ],
)
def test_a_wait_to_which_the_script_gave_a_timeout_ends_by_itself(how: dict[str, Any], way_out: str) -> None:
    found = diagnosed(waiting(0, "2", "1", **how), waiting(1, "1", "2"))
    (finding,) = found.findings
    assert finding.proof == ("not_known" if way_out else "deadlock")
    assert finding.text.endswith(way_out)
    assert ("may still go on" in finding.text) == bool(way_out)


def test_a_thread_that_makes_other_calls_leaves_nothing_open() -> None:
    """As a heartbeat, which is no part of the training."""
    found = diagnosed(waiting(0, "2", "1", helper=SLEEPS, cpu_ns=SECOND, serves="3"), waiting(1, "1", "2"))
    assert [one.proof for one in found.findings] == ["deadlock"]


def test_with_nccl_a_thread_without_an_unfinished_call_may_still_make_the_call_of_its_group() -> None:
    """Hosts do not wait there, so no wait is known."""
    ranks = [waiting(0, "2", "1", helper=SLEEPS, serves="2"), waiting(1, "1", "2")]
    for one in ranks:
        one.backend, one.ending.waits, one.awaited, one.row_of_thread = "nccl", [], set(), {}
    (finding,) = diagnosed(*ranks).findings
    assert (finding.kind, finding.proof, finding.culprit_ranks) == ("missing_rank", "late", [0])
