"""What a rank does that others wait for follows from the CPU time of its threads, its neighbours and its end; and what
that proves."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.recording import C_SLEEPS, PYTHON_SLEEPS, STORE
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis, LateRank, late_text
from crossrank.tools.analysis.diagnosis.states import state_of
from crossrank.tools.traces.activity import ChildActivity, HeldWait, RankActivity, ThreadActivity
from crossrank.tools.traces.flight.dump import Frame, OwnStack, WaitUnderWay
from crossrank.tools.traces.rank_trace import RETIRED, SCHEDULED, RankTrace
from crossrank.tools.traces.seen import Seen
from tests.unit.analysis.diagnosis.ranks import call, rank, world

MAIN, OTHER, SECOND = 100, 101, 10**9
LINE = Frame("evaluate", "/job/eval.py", 29)
AT = "evaluate (/job/eval.py:29)"


def thread(number: int = MAIN, cpu_ns: int = 0, blocked_in: str = "", **facts: Any) -> ThreadActivity:
    return ThreadActivity(id=number, cpu_ns=cpu_ns, blocked_in=blocked_in, **facts)


def stack(number: int = MAIN, frame: Frame = LINE, **facts: Any) -> OwnStack:
    name = "MainThread" if number == MAIN else f"thread-{number}"
    return OwnStack(thread=name, number=number, frames=[frame], **facts)


def answer(*threads: ThreadActivity, **facts: Any) -> dict[str, Any]:
    """The ending of a rank that answered two looks, a second apart."""
    names = {
        name: facts.pop(name) for name in ("stacks", "callers", "waits", "process", "groups_made") if name in facts
    }
    activity = RankActivity(seconds=1.0, threads=list(threads), **facts)
    return {"reason": "hang", "taken_at": 100 * SECOND, "activity": activity, "stacks": [stack()], "waits": []} | names


def seen(state: str, cpu_ns: int = 0, **facts: Any) -> dict[str, Any]:
    what = Seen(rank=0, by=1, time_ns=0, seconds=1.0, process=7, state=state, cpu_ns=cpu_ns, **facts)
    return {"unseen": True, "seen": what}


CHILD = ChildActivity(id=8, name="gzip", cpu_ns=SECOND // 2)


@pytest.mark.parametrize(
    ("ending", "state", "text", "cpu"),
    [
        pytest.param(answer(thread(cpu_ns=SECOND // 2)), "runs", f"runs in {AT}", 0.5, id="computes"),
        pytest.param(answer(thread(cpu_ns=20_000)), "runs", f"wakes up now and then in {AT}", 2e-5, id="polls"),
        pytest.param(
            answer(thread(cpu_ns=SECOND), calls=3),
            "runs",
            f"runs in {AT} and makes 3 other calls in 1.0 s",
            1.0,
            id="calls",
        ),
        pytest.param(
            answer(thread(blocked_in="read")), "idle", f"is blocked in read() in {AT}", None, id="blocked in a read"
        ),
        pytest.param(answer(thread()), "idle", f"is blocked in {AT}", None, id="blocked, the system call is unknown"),
        pytest.param(
            answer(thread(blocked_in="wait4"), children=[CHILD]),
            *("runs", f"waits in {AT} for process 8 (gzip)", 0.5),
            id="waits for a process that works",
        ),
        pytest.param(
            answer(thread(blocked_in="futex"), thread(OTHER, cpu_ns=SECOND // 4, name="saver")),
            *("runs", f"waits in {AT} for thread saver", 0.25),
            id="waits for a thread that works",
        ),
        pytest.param(
            answer(thread(blocked_in="open"), thread(OTHER, cpu_ns=SECOND)),
            *("idle", f"is blocked in open() in {AT}", None),
            id="another thread cannot end a system call of the disk",
        ),
        pytest.param(
            answer(thread(blocked_in="futex"), thread(OTHER, cpu_ns=SECOND, name="pt_nccl_watchdg")),
            *("idle", f"is blocked in futex() in {AT}", None),
            id="torch's own threads are no work of the rank",
        ),
        pytest.param(
            answer(
                thread(blocked_in="futex"),
                thread(OTHER, cpu_ns=SECOND),
                stacks=[stack(frame=Frame("join", "/job/main.py", 1)), stack(OTHER)],
                callers={"0": OTHER},
            ),
            *("runs", f"runs in {AT}", 1.0),
            id="trains in a thread",
        ),
        pytest.param(seen("T"), "stopped", "is stopped (process 7 is in state T)", None, id="stopped"),
        pytest.param(seen("S", frozen=True), "stopped", "is stopped (process 7 is frozen)", None, id="frozen"),
        pytest.param(seen("X"), "gone", "has ended without an error message (process 7)", None, id="killed"),
        pytest.param(
            seen("R", SECOND // 2), "native", "runs C code that keeps the interpreter's lock (process 7)", 0.5, id="GIL"
        ),
        pytest.param(
            seen("R", SECOND // 100),
            "idle",
            "does not answer (process 7 is alive and does nothing)",
            None,
            id="GIL, idle",
        ),
        pytest.param({"unseen": True}, "silent", "shows no sign of life", None, id="no sign of life"),
        pytest.param({"reason": "exit"}, "gone", "has left the job (exit)", None, id="has ended"),
        pytest.param({}, "silent", "does not wait in another one", None, id="a dump of torch"),
    ],
)
def test_a_rank_is_in_the_state_that_the_evidence_shows(
    ending: dict[str, Any], state: str, text: str, cpu: float | None
) -> None:
    found = state_of(rank(0, ending=ending), "0")
    assert (found.state, found.text, found.cpu) == (state, text, cpu)


def test_ranks_that_do_one_thing_share_a_sentence() -> None:
    late = [LateRank(rank=number, state="idle", text="is blocked in f (a.py:3)") for number in (1, 2, 3)]
    late.append(LateRank(rank=5, state="gone", text="has left the job (exit)"))
    assert late_text(late) == "ranks 1-3, which are blocked in f (a.py:3); rank 5, which has left the job (exit)"


# --- what it proves --------------------------------------------------------------------------------------------------


def waiting(number: int, *, size: int = 2, **facts: Any) -> RankTrace:
    """A rank that has waited in all_reduce #2 between two looks."""
    ending = answer(thread(blocked_in="futex"), held=[HeldWait(1, MAIN)], callers={"0": MAIN}, **facts)
    ending["waits"] = [WaitUnderWay(id=1, thread="MainThread", number=MAIN)]
    calls = (
        call(number=1, state=RETIRED, id=0, called=SECOND),
        call(number=2, state=SCHEDULED, id=1, called=2 * SECOND),
    )
    trace = rank(number, *calls, groups=(world(size),), ending=ending, backend="gloo", host="node7")
    trace.awaited = {1}
    return trace


def absent(number: int, ending: dict[str, Any], *, size: int = 2) -> RankTrace:
    made = call(number=1, state=RETIRED, id=0, called=SECOND)
    return rank(number, made, groups=(world(size),), ending=ending, backend="gloo", host="node7")


def diagnosed(*ranks: RankTrace) -> Diagnosis:
    return diagnose(Evidence(ranks=list(ranks)))[0]


@pytest.mark.parametrize(
    ("ending", "verdict", "proof"),
    [
        (answer(thread(cpu_ns=SECOND)), "slow", "late"),
        (answer(thread(blocked_in="read")), "error", "late"),
        (seen("T"), "error", "late"),
        (seen("R", SECOND), "slow", "late"),
        (seen("X"), "error", "gone"),
        ({"reason": "exit", "ended": True, "error": "ValueError: x"}, "error", "gone"),
    ],
)
def test_a_verdict_says_whether_the_awaited_rank_may_still_come(
    ending: dict[str, Any], verdict: str, proof: str
) -> None:
    found = diagnosed(waiting(0), absent(1, ending))
    assert (found.verdict, found.proof, found.suspect_ranks) == (verdict, proof, [1])
    assert found.hosts == {"1": "node7"}


def test_one_rank_that_came_first_is_not_accused() -> None:
    reads = answer(thread(blocked_in="read"))
    found = diagnosed(waiting(0, size=3), *(absent(number, reads, size=3) for number in (1, 2)))
    assert found.summary == f"rank 0 waits in all_reduce #2 for ranks 1-2, which are blocked in read() in {AT}"
    assert found.suspect_ranks == [1, 2]


def test_a_rank_alone_in_a_call_is_named_if_all_others_wait_for_data_of_a_socket_at_one_line() -> None:
    polls = answer(thread(blocked_in="poll"))
    found = diagnosed(waiting(0, size=3), *(absent(number, polls, size=3) for number in (1, 2)))
    assert (found.suspect_ranks, found.proof) == ([0], "late")
    assert [one.rank for one in found.findings[0].late_ranks] == [1, 2]
    assert found.findings[0].text.endswith(
        "; all of them wait there, and may wait for what rank 0 was to do, for example through the store or a file"
    )


def test_a_rank_that_waits_for_a_connection_is_not_named() -> None:
    accepts = answer(thread(blocked_in="accept"))
    found = diagnosed(waiting(0, size=3), waiting(1, size=3), absent(2, accepts, size=3))
    assert found.suspect_ranks == []
    assert found.findings[0].text.endswith("; another rank may be the one that was to connect")


def test_a_rank_that_moves_in_its_wait_is_not_stuck() -> None:
    training = waiting(0)
    assert training.ending.activity is not None
    training.ending.activity = RankActivity(seconds=1.0, calls=4, threads=[thread(cpu_ns=SECOND)])
    assert diagnosed(training, absent(1, answer(thread(blocked_in="read")))).findings == []


def test_the_file_lock_of_a_waiting_rank_is_named_and_proves_no_deadlock() -> None:
    """Another thread of it may release the lock."""
    locked = answer(thread(blocked_in="flock", released_by=[50]), callers={"0": MAIN})
    found = diagnosed(waiting(0, process=50), absent(1, locked))
    (finding,) = found.findings
    assert (finding.kind, finding.proof, finding.culprit_ranks, finding.waiting_ranks) == (
        "holds_lock",
        "late",
        [0],
        [1],
    )


def test_c_code_that_sleeps_with_an_open_file_waits_for_the_one_that_has_locked_it() -> None:
    tries = answer(thread(blocked_in=C_SLEEPS, released_by=[50]), callers={"0": MAIN})
    (finding,) = diagnosed(waiting(0, process=50), absent(1, tries)).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("holds_lock", [0], [1])


def test_python_that_sleeps_with_an_open_file_may_wait_for_the_one_that_has_locked_it() -> None:
    sleeps = answer(thread(blocked_in=PYTHON_SLEEPS, released_by=[50]), callers={"0": MAIN})
    (finding,) = diagnosed(waiting(0, process=50), absent(1, sleeps)).findings
    assert finding.culprit_ranks == []
    assert finding.text.endswith("rank 0 has locked a file that is open there, and it may try to lock it")


def test_ranks_that_read_a_pipe_which_all_have_opened_wait_for_the_one_that_reads_nothing() -> None:
    readers = [absent(one, reads_from_all_but(one), size=4) for one in (1, 2, 3)]
    (finding,) = diagnosed(waiting(0, process=50, size=4), *readers).findings
    assert (finding.kind, finding.culprit_ranks) == ("owes_data", [0])


def reads_from_all_but(rank: int) -> dict[str, Any]:
    others = [50 + one for one in range(4) if one != rank]
    return answer(thread(blocked_in="read", released_by=others), callers={"0": MAIN}, process=50 + rank)


@pytest.mark.parametrize(("lines", "is_noted"), [((29,) * 4, True), ((29, 29, 29, 31), False)])
def test_a_note_says_that_all_ranks_may_wait_at_one_line(lines: tuple[int, ...], is_noted: bool) -> None:
    polls = [answer(thread(cpu_ns=20_000), callers={"0": MAIN}) for _ in lines]
    for ending, line in zip(polls, lines, strict=True):
        ending["stacks"] = [stack(frame=Frame("evaluate", "/job/eval.py", line))]
    found = diagnosed(*(absent(one, ending, size=4) for one, ending in enumerate(polls)))
    note = f"all ranks wake up now and then at one line, {AT}: they may wait there for something"
    assert (found.verdict, note in found.notes) == ("ok", is_noted)


def reads_from(writer: int, **facts: Any) -> dict[str, Any]:
    return answer(thread(blocked_in="recvfrom", released_by=[writer]), **facts)


def test_a_rank_whose_data_others_wait_for_while_it_waits_for_them_is_named() -> None:
    found = diagnosed(waiting(0, process=50, size=3), waiting(1, process=51, size=3), absent(2, reads_from(50), size=3))
    (finding,) = found.findings
    assert (finding.kind, finding.proof, finding.culprit_ranks) == ("owes_data", "late", [0])
    assert finding.text == f"rank 2 waits for data of a pipe or socket that rank 0 has the other end of, in {AT}"


def test_a_rank_without_files_does_not_clear_the_one_that_owes_data() -> None:
    ranks = waiting(0, process=50, size=4), waiting(1, process=51, size=4), absent(2, reads_from(50), size=4)
    found = diagnosed(*ranks)  # rank 3 left nothing
    assert (found.findings[0].kind, found.findings[0].culprit_ranks) == ("owes_data", [0])


def test_a_late_rank_that_waits_for_data_of_another_late_one_is_not_accused() -> None:
    asleep = answer(thread(blocked_in=PYTHON_SLEEPS), process=52)
    chain = (reads_from(52, process=51), asleep)
    found = diagnosed(waiting(0, size=3), *(absent(rank, how, size=3) for rank, how in enumerate(chain, 1)))
    assert found.suspect_ranks == [2]
    assert "it waits for rank 2" in found.findings[0].text


def test_a_late_rank_that_waits_for_a_process_outside_of_the_job_is_named() -> None:
    chain = (reads_from(7, process=51), reads_from(51, process=52))
    found = diagnosed(waiting(0, size=3), *(absent(rank, how, size=3) for rank, how in enumerate(chain, 1)))
    assert found.suspect_ranks == [1]


def test_ranks_that_do_nothing_while_others_poll_are_named() -> None:
    polls = answer(thread(cpu_ns=50_000))
    found = diagnosed(
        *(absent(number, polls, size=3) for number in (0, 1)), absent(2, answer(thread(blocked_in="read")), size=3)
    )
    (finding,) = found.findings
    assert (found.verdict, finding.kind, finding.culprit_ranks) == ("error", "no_progress", [2])


def test_a_silent_job_whose_ranks_all_run_is_healthy() -> None:
    runs = answer(thread(cpu_ns=SECOND))
    assert diagnosed(absent(0, runs), absent(1, runs)).verdict == "ok"


def test_a_silent_job_whose_ranks_all_do_nothing_is_incomplete_and_names_no_rank() -> None:
    sleeps = answer(thread(blocked_in=PYTHON_SLEEPS))
    found = diagnosed(absent(0, sleeps), absent(1, sleeps))
    assert (found.verdict, found.proof, found.suspect_ranks) == ("incomplete", "not_known", [])
    assert found.summary == f"ranks 0-1 are blocked in nanosleep() in {AT}"


def making(number: int, *members: int, made: int | None = None, size: int = 3) -> RankTrace:
    """A rank that makes a group of these members after `made` others."""
    c10d = Frame("new_group", "/opt/torch/distributed/distributed_c10d.py", 5)
    frames = OwnStack(thread="MainThread", number=MAIN, frames=[c10d, LINE], makes_group=list(members))
    return absent(number, answer(thread(blocked_in="poll"), stacks=[frames], groups_made=made), size=size)


def test_a_rank_that_makes_another_group_than_the_others_is_named() -> None:
    found = diagnosed(making(0, 0, 1), making(1, 0, 1), making(2, 1, 2))
    (finding,) = found.findings
    assert (finding.kind, finding.proof, finding.culprit_ranks) == ("opposite_order", "mismatch", [2])
    assert finding.text == "rank 0-1 makes a group of rank 0-1; rank 2 makes a group of rank 1-2"


def waits_in_barrier(number: int, size: int) -> RankTrace:
    made = call("barrier", 2, SCHEDULED, id=1, called=SECOND)
    waits = [WaitUnderWay(id=1, thread="MainThread", number=MAIN)]
    ending = answer(thread(blocked_in="futex"), held=[HeldWait(1, MAIN)], waits=waits, callers={"0": MAIN})
    trace = rank(number, made, groups=(world(size),), ending=ending, backend="gloo", host="node7")
    trace.awaited = {0}
    return trace


def test_ranks_that_make_groups_of_others_that_wait_for_them_in_a_call_are_a_deadlock() -> None:
    makers = [making(0, 0, 2, made=2, size=4), making(1, 1, 3, made=3, size=4)]
    found = diagnosed(*makers, *(waits_in_barrier(number, 4) for number in (2, 3)))
    (finding,) = found.findings
    assert (finding.kind, finding.proof, finding.culprit_ranks) == ("opposite_order", "deadlock", [])
    assert finding.text == (
        "rank 0 makes a group of rank 0,2 (no. 3 on these ranks); "
        "rank 1 makes a group of rank 1,3 (no. 4 on these ranks); rank 2-3 waits in barrier #2"
    )


def test_a_member_that_waits_in_a_call_where_most_members_make_their_group_is_named() -> None:
    """Rank 3 is no member, and has nothing to make."""
    makers = [making(number, 0, 1, 2, made=2, size=4) for number in (0, 1)]
    found = diagnosed(*makers, *(waits_in_barrier(number, 4) for number in (2, 3)))
    (finding,) = found.findings
    assert (finding.kind, finding.proof, finding.culprit_ranks) == ("opposite_order", "deadlock", [2])
    assert finding.text.endswith("; rank 2 made another call where most ranks make this group")


def test_a_rank_outside_of_the_group_that_is_made_is_not_said_to_be_awaited() -> None:
    runs = [absent(number, answer(thread(cpu_ns=SECOND)), size=3) for number in (1, 2)]
    found = diagnosed(making(0, 0, 1, made=2), *runs)
    (finding,) = found.findings
    assert (finding.kind, finding.culprit_ranks) == ("missing_rank", [1])
    assert finding.text == "rank 0 makes a group of rank 0-1 (no. 3 on these ranks); rank 1 does not wait"


WAITS_FOR_KEY = answer(thread(blocked_in=STORE), callers={"0": MAIN})


@pytest.mark.parametrize(
    ("in_calls", "named"), [((0, 3), []), ((0,), [0]), ((0, 1, 2), [3])], ids=["half", "one went past", "one alone"]
)
def test_ranks_that_wait_for_a_key_of_the_store_wait_for_others(in_calls: tuple[int, ...], named: list[int]) -> None:
    ranks = [waiting(one, size=4) if one in in_calls else absent(one, WAITS_FOR_KEY, size=4) for one in range(4)]
    found = diagnosed(*ranks)
    assert (found.verdict == "ok", found.suspect_ranks) == (False, named)
    assert "for a key of the store" in found.findings[0].text


def test_the_rank_that_waits_for_nothing_is_named_where_others_wait_for_a_key_of_the_store() -> None:
    reads = absent(2, answer(thread(blocked_in="read"), callers={"0": MAIN}), size=4)
    others = [absent(one, WAITS_FOR_KEY, size=4) for one in (0, 1, 3)]
    assert diagnosed(*others[:2], reads, others[2]).suspect_ranks == [2]
