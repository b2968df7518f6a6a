"""What a person is shown of a finding: the user's own lines, where an exception was raised, what to look at next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Evidence
from crossrank.tools.analysis.diagnosis.findings import Finding
from crossrank.tools.analysis.diagnosis.stacks import frame_texts
from crossrank.tools.output.diagnosis.verdict import next_step
from crossrank.tools.traces.flight.dump import Frame, OwnStack, Raised
from tests.unit.analysis.diagnosis.moments import CLOSED, Moment, write_moments
from tests.unit.analysis.diagnosis.ranks import call, group, job, rank, world
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, Groups, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of

WORLD: Groups = {"0": ("default_pg", [0, 1, 2, 3])}
PACKAGES = "/venv/lib/python3.11/site-packages"


def frames(*files: str) -> tuple[Frame, ...]:
    """Frames innermost first, each on the line that is its place in the stack."""
    return tuple(Frame(name="f", filename=name, line=line) for line, name in enumerate(files, start=1))


def test_user_frames_come_first_and_few_library_frames_follow() -> None:
    inside = [f"{PACKAGES}/torch/distributed/fsdp/{number}.py" for number in range(30)]
    stack = frames(*inside, "/home/me/model.py", f"{PACKAGES}/torch/nn/modules/module.py", "train.py", "<frozen runpy>")
    texts = frame_texts(stack)
    assert texts[:2] == ["f (/home/me/model.py:31)", "f (train.py:33)"]
    assert texts[2:] == [f"f ({inside[number]}:{number + 1})" for number in range(4)]


@pytest.mark.parametrize(
    "library",
    [
        f"{PACKAGES}/lightning/pytorch/loops/fit_loop.py",
        "/usr/lib/python3/dist-packages/apex/parallel/distributed.py",
        "/usr/lib/python3.11/threading.py",
        "/usr/lib/python3.12/selectors.py",
        "/opt/pytorch/torch/distributed/distributed_c10d.py",
        "C:\\Python311\\Lib\\site-packages\\torch\\autograd\\graph.py",
        "<frozen runpy>",
    ],
)
def test_frames_of_packages_torch_and_python_are_not_user_frames(library: str) -> None:
    assert frame_texts(frames(library, "/home/me/torchtitan/train.py"))[0] == "f (/home/me/torchtitan/train.py:2)"


def test_a_stack_without_user_frames_shows_library_frames() -> None:
    assert len(frame_texts(frames(*[f"{PACKAGES}/torch/{number}.py" for number in range(30)]))) == 12


def left_by_rank_2(folder: Path, left: Moment, others: Moment, backend: str = "gloo") -> list[Finding]:
    programs: Programs = [[Collective("0")] * 2 for _ in range(4)]
    del programs[2][-1]
    moments = dict.fromkeys((0, 1, 3), others) | {2: left}
    write_moments(SimulatedJob(programs, WORLD, backend=backend), folder, moments)
    return diagnosis_of(folder).findings


def test_a_culprit_is_shown_at_the_line_that_raised(tmp_path: Path) -> None:
    raised = (("check", "/home/me/data.py", 126), ("main", "/home/me/train.py", 40))
    left = Moment(reason="exit", after=0, error="ValueError: bad token", traceback=raised)
    (finding,) = left_by_rank_2(tmp_path, left, Moment())
    culprit = next(place for place in finding.places if place.role == "culprit")
    assert (culprit.rank, culprit.what) == (2, "where it raised ValueError: bad token")
    assert culprit.frames == ["check (/home/me/data.py:126)", "main (/home/me/train.py:40)"]


def test_a_killed_rank_is_shown_at_the_line_of_its_main_thread(tmp_path: Path) -> None:
    stack = ("MainThread", (("sleep", "/usr/lib/python3.11/time.py", 1), ("load", "/home/me/data.py", 7)))
    left = Moment(reason="SIGTERM", after=60, stacks=(stack,))
    (finding,) = left_by_rank_2(tmp_path, left, Moment())
    assert finding.places[0].frames[0] == "load (/home/me/data.py:7)"


def test_a_main_thread_that_only_reports_an_exception_does_not_hide_the_call(tmp_path: Path) -> None:
    stack = ("MainThread", (("hook", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 1928),))
    others = Moment(reason="SIGTERM", after=0.1, error=CLOSED, timed_out=True, stacks=(stack,), source="train.py:9")
    left = Moment(reason="exit", after=0, error="ValueError: bad token")
    (finding,) = left_by_rank_2(tmp_path, left, others)
    assert [place.frames for place in finding.places if place.role == "waiting"] == [["all_reduce (train.py:9)"]]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("error", [None, "ValueError: bad token"])
def test_gpus_are_suspected_only_on_nccl_without_an_exception(backend: str, error: str | None, tmp_path: Path) -> None:
    left = Moment(reason="exit" if error else "hang", after=0 if error else 3, error=error)
    (finding,) = left_by_rank_2(tmp_path, left, Moment(), backend)
    assert ("Xid" in next_step(finding)) == (backend == "nccl" and error is None)


def test_culprits_with_errors_in_different_places_are_all_shown(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0")] * (2 if rank in (0, 1) else 1) for rank in range(4)]
    moments = {0: Moment(), 1: Moment()}
    for culprit, error in ((2, "ValueError: a"), (3, "KeyError: b")):
        moments[culprit] = Moment(reason="exit", after=0, error=error, traceback=(("f", "train.py", culprit),))
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)
    (finding,) = diagnosis_of(tmp_path).findings
    culprits = [place.frames for place in finding.places if place.role == "culprit"]
    assert culprits == [["f (train.py:2)"], ["f (train.py:3)"]]


C10D = ("wait", "/opt/torch/distributed/distributed_c10d.py", 5)
MAIN = ("main", "/home/me/train.py", 7)
RECORDS = ("record", "/opt/crossrank/instrument/hooks.py", 3)
SECOND = 10**9


@pytest.mark.parametrize(
    ("reason", "after", "stack", "ending", "line", "waits"),
    [
        ("hang", 0, (C10D, MAIN), {}, 6, True),
        ("SIGTERM", 2 * SECOND + 1, (C10D, MAIN), {}, 6, True),
        ("SIGTERM", 2 * SECOND, (C10D, MAIN), {}, 6, False),
        ("exit", 9 * SECOND, (C10D, MAIN), {}, 6, False),
        ("hang", 0, (RECORDS, C10D, MAIN), {}, 6, True),
        ("hang", 0, (C10D, MAIN), {"error": "ValueError: x"}, 6, False),
        ("hang", 0, (C10D, MAIN), {}, 7, False),
        ("hang", 0, (C10D, MAIN), {}, None, True),
        ("hang", 0, (MAIN,), {}, 6, False),
        ("hang", 0, (C10D, C10D), {}, 6, False),
        ("hang", 0, (), {}, 6, False),
    ],
)
def test_a_rank_hangs_in_an_unrecorded_wait_inside_torch_distributed(
    reason: str, after: int, stack: tuple[Any, ...], ending: dict[str, str], line: int | None, waits: bool
) -> None:
    own = [Frame(name=name, filename=file, line=at) for name, file, at in stack]
    made = (Frame(name="main", filename="train.py", line=line or 0),)
    calls = [call(called=1), call(number=2, called=SECOND, stack=made)]
    facts = {"reason": reason, "taken_at": SECOND + after, "stacks": [OwnStack(thread="MainThread", frames=own)]}
    assert job(rank(0, *(calls if line else []), ending=facts | ending)).waits_unrecorded(0) == waits


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_lines_of_call_and_thread_are_shown_if_the_host_has_continued(backend: str) -> None:
    made = (Frame(name="all_reduce", filename="train.py", line=10),)
    later = [Frame(name="main", filename="/home/me/train.py", line=12)]
    hung = {"reason": "hang", "taken_at": 9 * 10**9, "stacks": [OwnStack(thread="MainThread", frames=later)]}
    ranks = [
        rank(one, call(inputs=[[size]], state=0, stack=made), groups=(world(3),), ending=dict(hung), backend=backend)
        for one, size in enumerate((8, 9, 8))
    ]
    (finding,) = diagnose(Evidence(ranks))[0].findings
    texts = [place.frames for place in finding.places if place.role == "culprit"]
    assert texts == [["all_reduce (train.py:10)"], ["main (/home/me/train.py:12)"]]


def test_a_culprit_that_has_continued_is_shown_with_its_call_on_the_group() -> None:
    first, second, last = ((Frame(name="main", filename="train.py", line=line),) for line in (5, 10, 20))
    groups = group("a", 0, 1, 2), group("b", 0, 1, 2)
    ranks = []
    for one, size in enumerate((8, 9, 8)):
        calls = call(pg="a", stack=first), call(pg="b", inputs=[[size]], stack=second), call("barrier", 2, stack=last)
        ranks.append(rank(one, *calls, groups=groups))
    (finding,) = diagnose(Evidence(ranks))[0].findings
    culprit = next(place for place in finding.places if place.role == "culprit")
    assert (culprit.what, culprit.frames) == ("its call, all_reduce #1 on b", ["main (train.py:10)"])


def test_a_culprit_is_shown_where_it_raised_the_exception_it_handles() -> None:
    raised = Raised(error="ValueError: bad", frames=[Frame(name="read", filename="/home/me/data.py", line=3)])
    frame = Frame(name="main", filename="/home/me/train.py", line=9)
    own = OwnStack(thread="MainThread", frames=[frame], handles=raised)
    hung: dict[str, Any] = {"reason": "hang", "taken_at": 9 * 10**9}
    ranks = [rank(0, call(), ending=hung | {"stacks": [own]}), rank(1, call(), call(number=2, state=0), ending=hung)]
    (finding,) = diagnose(Evidence(ranks))[0].findings
    assert finding.culprit_ranks == [0]
    given = [(place.what, place.frames) for place in finding.places if place.role == "culprit"][-1]
    assert given == ("where it raised ValueError: bad, which its main thread handles", ["read (/home/me/data.py:3)"])


def test_without_a_culprit_the_lines_of_both_sides_are_shown() -> None:
    first, second, third = ((Frame(name="main", filename="train.py", line=line),) for line in (5, 10, 20))
    calls = [call("send", 1, 0, peer=1, stack=first), call(state=0, stack=second), call(state=0, stack=third)]
    ranks = [rank(one, of_rank, groups=(world(3),), backend="nccl") for one, of_rank in enumerate(calls)]
    (finding,) = diagnose(Evidence(ranks))[0].findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p_unmatched", [])
    shown = [(place.rank, place.role, place.frames) for place in finding.places]
    assert shown == [(0, "waiting", ["main (train.py:5)"]), (1, "member", ["main (train.py:10)"])]


def test_the_line_where_a_rank_called_exit_is_shown_before_its_last_call() -> None:
    left = [Frame(name="stop", filename="/home/me/train.py", line=30)]
    made = (Frame(name="main", filename="train.py", line=10),)
    stacks = [OwnStack(thread="MainThread", number=7, frames=left)]
    gone = {"reason": "exit", "taken_at": SECOND, "stacks": stacks, "callers": {"0": 7}}
    hung = {"reason": "hang", "taken_at": 9 * SECOND}
    ranks = [
        rank(0, *calls_at(made, 2), groups=(world(2),), ending=hung, backend="gloo"),
        rank(1, *calls_at(made, 1), groups=(world(2),), ending=gone, backend="gloo"),
    ]
    (finding,) = diagnose(Evidence(ranks))[0].findings
    shown = [(place.what, place.frames) for place in finding.places if place.role == "culprit"]
    assert shown == [
        ("where it called exit", ["stop (/home/me/train.py:30)"]),
        ("its last call, all_reduce #1 on default_pg [0]", ["main (train.py:10)"]),
    ]


def calls_at(stack: tuple[Frame, ...], number: int) -> list[Any]:
    """The first calls of a rank, the last of two unfinished."""
    return [call(number=one, state=0 if one == 2 else 2, called=one, stack=stack) for one in range(1, number + 1)]
