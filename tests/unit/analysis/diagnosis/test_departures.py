"""A rank that raised or left while others wait for it is the culprit; those that fail because of it are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrank.tools.output.diagnosis.verdict import next_step
from tests.unit.analysis.diagnosis.moments import CLOSED, Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Groups, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of, roots

WORLD: Groups = {"0": ("default_pg", [0, 1, 2, 3])}
RAISED = "ValueError: token id 50257 is out of range"
STEP = Collective("0", inputs=((64,),))


def training_that_rank_2_leaves(steps: int = 3) -> Programs:
    """Everyone makes `steps` all_reduces, but rank 2 leaves before the last."""
    programs: Programs = [[STEP] * steps for _ in range(4)]
    programs[2] = [STEP] * (steps - 1)
    return programs


@pytest.mark.parametrize("error", [None, RAISED])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_left_before_the_others_made_their_call_is_the_culprit(
    error: str | None, backend: str, tmp_path: Path
) -> None:
    job = SimulatedJob(training_that_rank_2_leaves(), WORLD, backend=backend)
    write_moments(
        job, tmp_path, {0: Moment(), 1: Moment(), 2: Moment(reason="exit", after=0, error=error), 3: Moment()}
    )

    found = diagnosis_of(tmp_path)

    assert roots(found) == [("missing_rank", "default_pg", 3, [2], [0, 1, 3])]
    assert found.findings[0].text == f"rank 2 left the job ({error or 'exit'}) without making this call"
    assert found.findings[0].exception == error


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_ranks_whose_communication_fails_when_one_raises_wait_for_it_however_shortly(op: str, tmp_path: Path) -> None:
    programs = training_that_rank_2_leaves()
    for rank in (0, 1, 3):
        programs[rank][-1] = Collective("0", op, ((64,),))
    victim = Moment(reason="exit", after=0.02, error=CLOSED, timed_out=True)
    moments = {0: victim, 1: victim, 2: Moment(reason="exit", after=0, error=RAISED), 3: victim}
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)

    found = diagnosis_of(tmp_path)

    assert roots(found) == [("missing_rank", "default_pg", 3, [2], [0, 1, 3])]
    assert next_step(found.findings[0]) == "look at the log of rank 2: the exception there is the cause"


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGUSR1", "window", "disable"])
def test_ranks_that_are_dumped_together_in_the_middle_of_a_step_are_healthy(reason: str, tmp_path: Path) -> None:
    moment = Moment(reason=reason, after=0.005)
    write_moments(SimulatedJob(training_that_rank_2_leaves(), WORLD), tmp_path, dict.fromkeys(range(4), moment))

    found = diagnosis_of(tmp_path)

    assert found.verdict == "ok"
    assert [(one.kind, one.waiting_ranks) for one in found.advisory] == [("in_progress", [0, 1, 3])]


@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_a_clock_that_is_off_neither_makes_nor_hides_a_hang(shift: float, tmp_path: Path) -> None:
    for name, after in (("hang", 3.0), ("SIGUSR1", 0.005)):
        moments = {rank: Moment(reason=name, after=after) for rank in (0, 1, 3)}
        moments[2] = Moment(reason="exit" if name == "hang" else name, after=after + shift, host="node1")
        write_moments(SimulatedJob(training_that_rank_2_leaves(), WORLD), tmp_path / name, moments)

    assert diagnosis_of(tmp_path / "hang").suspect_ranks == [2]
    assert diagnosis_of(tmp_path / "SIGUSR1").verdict == "ok"


def test_a_rank_that_failed_because_of_others_is_not_accused(tmp_path: Path) -> None:
    programs = training_that_rank_2_leaves()
    del programs[1][-1]  # it failed in a call that no recorder notes
    failed = Moment(reason="exit", after=0.05, error=CLOSED)
    moments = {0: Moment(), 1: failed, 2: Moment(reason="exit", after=0, error=RAISED), 3: Moment()}
    write_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)

    assert diagnosis_of(tmp_path).suspect_ranks == [2]


def test_a_rank_that_raised_is_not_said_to_wait(tmp_path: Path) -> None:
    programs: Programs = [[STEP, STEP], [STEP], [STEP], [STEP]]
    killed = Moment(reason="SIGTERM", after=0.01)
    moments = dict.fromkeys((1, 2, 3), killed) | {0: Moment(reason="exit", after=0, error=RAISED)}
    write_moments(SimulatedJob(programs, WORLD), tmp_path, moments)

    found = diagnosis_of(tmp_path)

    assert [(finding.kind, finding.culprit_ranks, finding.text) for finding in found.findings] == [
        ("raised", [0], f"rank 0: {RAISED}")
    ]


def test_a_job_in_which_communication_failed_is_not_healthy_even_if_no_call_shows_it(tmp_path: Path) -> None:
    moments = dict.fromkeys(range(4), Moment(reason="exit", after=0.1, error=CLOSED))
    write_moments(SimulatedJob([[STEP]] * 4, WORLD, backend="gloo"), tmp_path, moments)

    found = diagnosis_of(tmp_path)

    assert (found.verdict, found.suspect_ranks) == ("error", [])
    assert [(finding.kind, finding.waiting_ranks) for finding in found.findings] == [("raised", [0, 1, 2, 3])]


def test_a_job_that_its_user_interrupts_is_healthy(tmp_path: Path) -> None:
    moments = dict.fromkeys(range(4), Moment(reason="SIGINT", after=0.1, error="KeyboardInterrupt: "))
    write_moments(SimulatedJob([[STEP]] * 4, WORLD), tmp_path, moments)

    assert diagnosis_of(tmp_path).verdict == "ok"


def test_a_hang_that_its_user_interrupts_is_still_a_hang(tmp_path: Path) -> None:
    moments = dict.fromkeys(range(4), Moment(reason="SIGINT", after=60, error="KeyboardInterrupt: "))
    programs = training_that_rank_2_leaves()
    programs[2].append(CpuStall())
    write_moments(SimulatedJob(programs, WORLD), tmp_path, moments)

    assert diagnosis_of(tmp_path).suspect_ranks == [2]


def test_a_thread_that_an_exception_ended_is_told_of_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    programs = training_that_rank_2_leaves()
    stuck = Moment(error="KeyError: 'loss'", thread="metrics", traceback=(("average", "/home/me/metrics.py", 12),))
    write_moments(SimulatedJob(programs, WORLD), tmp_path, dict.fromkeys((0, 1, 3), Moment()) | {2: stuck})

    (finding,) = diagnosis_of(tmp_path).findings

    assert (finding.culprit_ranks, finding.exception) == ([2], "KeyError: 'loss' (thread metrics)")
    assert finding.places[0].frames == ["average (/home/me/metrics.py:12)"]


@pytest.mark.parametrize(
    ("error", "where"),
    [
        ("RuntimeError: DataLoader timed out after 2 seconds", "/opt/torch/utils/data/dataloader.py"),
        ("RuntimeError: object store: connection refused by 10.0.0.7:9000", "train.py"),
        ("RuntimeError: cuDNN error: socket timeout in kernel", "train.py"),
    ],
)
def test_what_other_libraries_say_of_their_connections_is_no_failed_communication(
    error: str, where: str, tmp_path: Path
) -> None:
    victim = Moment(reason="exit", after=0.05, error=CLOSED, timed_out=True)
    own = Moment(reason="exit", after=0, error=error, traceback=(("fetch", where, 9), ("main", "train.py", 5)))
    job = SimulatedJob(training_that_rank_2_leaves(), WORLD, backend="gloo")
    write_moments(job, tmp_path, {0: victim, 1: victim, 2: own, 3: victim})

    found = diagnosis_of(tmp_path)

    assert (found.suspect_ranks, found.findings[0].exception) == ([2], error)


def test_ranks_that_died_while_others_raised_are_an_error(tmp_path: Path) -> None:
    moments = dict.fromkeys((0, 1), Moment(reason="exit", after=0.1, error=CLOSED))
    write_moments(SimulatedJob([[STEP]] * 4, WORLD, backend="gloo"), tmp_path, moments)

    assert diagnosis_of(tmp_path).verdict == "error"


LEFT = Moment(reason="exit", after=0, error=RAISED)
FAILED = Moment(reason="exit", after=0.3, error=CLOSED, timed_out=True)
WRAPPED = Moment(reason="exit", after=0.1, error="TrainingError: step 2 failed", causes=("KeyError: 'x'", CLOSED))


def failed_in(error: str, file: str) -> Moment:
    return Moment(reason="exit", after=0.05, error=error, timed_out=True, traceback=(("wait", file, 9),))


@pytest.mark.parametrize(
    ("backend", "left", "others"),
    [
        pytest.param("nccl", LEFT, Moment(reason="SIGTERM", after=0.02), id="the others were killed soon after"),
        pytest.param("nccl", Moment(after=-1.0), Moment(), id="it hangs elsewhere and was dumped before they waited"),
        pytest.param("gloo", Moment(reason="SIGTERM", after=0), FAILED, id="it alone was ended"),
        pytest.param("gloo", Moment(reason="SIGABRT", after=0), Moment(reason="SIGTERM", after=0.3), id="it aborted"),
        pytest.param("gloo", LEFT, WRAPPED, id="their exceptions wrap a failed communication"),
        pytest.param("gloo", Moment(reason="SIGTERM", after=0), WRAPPED, id="wrapped, and it was ended"),
        pytest.param("gloo", LEFT, failed_in("RuntimeError: Operation timed out!", "train.py"), id="in a wait"),
        pytest.param(
            "gloo", LEFT, failed_in("RuntimeError: Connection reset by peer", "/opt/torch/autograd/graph.py"), id="grad"
        ),
        pytest.param(
            "gloo", LEFT, failed_in("torch.distributed.DistBackendError: NCCL error: remote process exited", "train.py")
        ),
    ],
)
def test_the_rank_that_the_others_wait_for_is_accused_and_no_victim(
    backend: str, left: Moment, others: Moment, tmp_path: Path
) -> None:
    job = SimulatedJob(training_that_rank_2_leaves(), WORLD, backend=backend)
    write_moments(job, tmp_path, {0: FAILED if backend == "gloo" else others, 1: others, 2: left, 3: others})

    assert diagnosis_of(tmp_path).suspect_ranks == [2]


@pytest.mark.parametrize(("wait", "suspects"), [(0.01, []), (20, [2])])
def test_a_job_whose_ranks_are_cancelled_one_after_the_other_is_healthy_unless_it_hung_before(
    wait: float, suspects: list[int], tmp_path: Path
) -> None:
    failed = Moment(reason="exit", after=wait + 0.3, error=CLOSED, timed_out=True)
    # The handler of rank 3 waits for a call that does not return.
    cancelled = {2: Moment(reason="SIGTERM", after=wait), 3: Moment(reason="SIGTERM", after=wait + 1.2)}
    job = SimulatedJob(training_that_rank_2_leaves(), WORLD, backend="gloo")
    write_moments(job, tmp_path, {0: failed, 1: failed} | cancelled)

    found = diagnosis_of(tmp_path)

    assert (found.verdict, found.suspect_ranks) == ("error" if suspects else "ok", suspects)


@pytest.mark.parametrize(("wait", "accused"), [(2, [1]), (20, [3])])
def test_a_rank_on_the_way_to_its_first_call_is_not_accused_where_one_without_files_may_have_ended_the_job(
    wait: float, accused: list[int], tmp_path: Path
) -> None:
    job = SimulatedJob([[STEP], [], [STEP], []], WORLD)
    write_moments(job, tmp_path, dict.fromkeys((0, 2, 3), Moment(reason="SIGTERM", after=wait, world_size=4)))

    assert diagnosis_of(tmp_path).suspect_ranks == accused


def test_ranks_that_were_ended_just_after_another_one_was_aborted_are_not_accused_of_calls_that_they_had_not_come_to(
    tmp_path: Path,
) -> None:
    # As DDP's calls on gloo, they wait for the first when they have made the second.
    large, small = (Collective("0", "all_reduce", ((size,),), ((size,),)) for size in (512, 8))
    programs: Programs = [[STEP], [STEP, large, STEP], [STEP, small, STEP], [STEP, large, STEP], [STEP]]
    job = SimulatedJob(programs, {"0": ("default_pg", list(range(5)))})
    ended, failed = Moment(reason="SIGTERM", after=0.4), Moment(reason="SIGTERM", after=0.4, error=CLOSED)
    aborted = Moment(reason="SIGABRT", after=0.1)
    write_moments(job, tmp_path, {0: ended, 1: failed, 2: aborted, 3: failed, 4: ended})

    found = diagnosis_of(tmp_path)

    assert "size_mismatch" in {one.kind for one in found.findings}
    assert not {0, 1, 3, 4}.intersection(found.suspect_ranks)
