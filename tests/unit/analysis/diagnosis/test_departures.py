"""A rank that raised or left while others wait for it is the culprit; those that fail because of it are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrank.tools.output.diagnosis.verdict import next_step
from tests.unit.analysis.diagnosis.moments import CLOSED, Moment, write_moments
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Groups, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.verdicts import diagnose_moments, diagnosis_of, roots

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
    found = diagnose_moments(
        job, tmp_path, {0: Moment(), 1: Moment(), 2: Moment(reason="exit", after=0, error=error), 3: Moment()}
    )
    assert roots(found) == [("missing_rank", "default_pg", 3, [2], [0, 1, 3])]
    assert found.findings[0].text == f"rank 2 left the job ({error or 'exit'}) without making this call"
    assert found.findings[0].exception == error


@pytest.mark.parametrize("error", [None, RAISED])
def test_a_rank_that_left_with_unfinished_gpu_work_is_missing(error: str | None, tmp_path: Path) -> None:
    job = SimulatedJob([[STEP] * 3] * 4, WORLD, broken={("0", 3)})
    left = Moment(reason="exit", after=0, error=error)
    found = diagnose_moments(job, tmp_path, {0: Moment(), 1: Moment(), 2: left, 3: Moment()})
    assert roots(found) == [("missing_rank", "default_pg", 3, [2], [0, 1, 3])]
    assert f"the call; rank 2 left the job ({error or 'exit'}) before it finished" in found.findings[0].text


@pytest.mark.parametrize(
    ("failed", "culprits", "text"), [((1,), [1], "1"), ((1, 2), [1, 2], "1-2"), ((0, 1, 2, 3), [], "0-3")]
)
def test_a_rank_on_which_the_communicator_failed_is_the_culprit(
    failed: tuple[int, ...], culprits: list[int], text: str, tmp_path: Path
) -> None:
    job = SimulatedJob([[STEP] * 3] * 4, WORLD, broken={("0", 3)})
    moments = {rank: Moment(failed_groups=("0",) if rank in failed else ()) for rank in range(4)}
    found = diagnose_moments(job, tmp_path, moments)
    waiting = [rank for rank in range(4) if rank not in culprits]
    assert roots(found) == [("communicator_failed", "default_pg", 3, culprits, waiting)]
    assert (found.verdict, found.proof) == ("error", "gone")
    assert found.findings[0].text == f"all ranks made the call; the communicator has failed on rank {text}"


def test_the_failed_communicator_of_another_group_explains_nothing(tmp_path: Path) -> None:
    job = SimulatedJob([[STEP] * 3] * 4, WORLD, broken={("0", 3)})
    found = diagnose_moments(job, tmp_path, {rank: Moment(failed_groups=("7",)) for rank in range(4)})
    assert roots(found) == [("all_joined_not_completed", "default_pg", 3, [], [0, 1, 2, 3])]


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_ranks_that_fail_soon_after_one_raises_are_waiting_for_it(op: str, tmp_path: Path) -> None:
    programs = training_that_rank_2_leaves()
    for rank in (0, 1, 3):
        programs[rank][-1] = Collective("0", op, ((64,),))
    victim = Moment(reason="exit", after=0.02, error=CLOSED, timed_out=True)
    moments = {0: victim, 1: victim, 2: Moment(reason="exit", after=0, error=RAISED), 3: victim}
    found = diagnose_moments(SimulatedJob(programs, WORLD, backend="gloo"), tmp_path, moments)
    assert roots(found) == [("missing_rank", "default_pg", 3, [2], [0, 1, 3])]
    assert next_step(found.findings[0]) == "read the log of rank 2: its exception is the cause"


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGUSR1", "window", "disable"])
def test_ranks_dumped_together_during_a_step_are_healthy(reason: str, tmp_path: Path) -> None:
    moment = Moment(reason=reason, after=0.005)
    found = diagnose_moments(
        SimulatedJob(training_that_rank_2_leaves(), WORLD), tmp_path, dict.fromkeys(range(4), moment)
    )
    assert found.verdict == "ok"
    assert [(one.kind, one.waiting_ranks) for one in found.advisory] == [("in_progress", [0, 1, 3])]


@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_a_clock_offset_does_not_change_the_verdict(shift: float, tmp_path: Path) -> None:
    for name, after in (("hang", 3.0), ("SIGUSR1", 0.005)):
        moments = {rank: Moment(reason=name, after=after) for rank in (0, 1, 3)}
        moments[2] = Moment(reason="exit" if name == "hang" else name, after=after + shift, host="node1")
        write_moments(SimulatedJob(training_that_rank_2_leaves(), WORLD), tmp_path / name, moments)
    assert diagnosis_of(tmp_path / "hang").suspect_ranks == [2]
    assert diagnosis_of(tmp_path / "SIGUSR1").verdict == "ok"


def test_a_rank_that_raised_is_not_waiting(tmp_path: Path) -> None:
    programs: Programs = [[STEP, STEP], [STEP], [STEP], [STEP]]
    killed = Moment(reason="SIGTERM", after=0.01)
    moments = dict.fromkeys((1, 2, 3), killed) | {0: Moment(reason="exit", after=0, error=RAISED)}
    found = diagnose_moments(SimulatedJob(programs, WORLD), tmp_path, moments)
    assert [(finding.kind, finding.culprit_ranks, finding.text) for finding in found.findings] == [
        ("raised", [0], f"rank 0: {RAISED}")
    ]


def test_a_job_with_failed_communication_is_an_error_without_a_failed_call(tmp_path: Path) -> None:
    moments = dict.fromkeys(range(4), Moment(reason="exit", after=0.1, error=CLOSED))
    found = diagnose_moments(SimulatedJob([[STEP]] * 4, WORLD, backend="gloo"), tmp_path, moments)
    assert (found.verdict, found.suspect_ranks) == ("error", [])
    assert [(finding.kind, finding.waiting_ranks) for finding in found.findings] == [("raised", [0, 1, 2, 3])]


def test_the_finding_shows_the_exception_in_a_thread_of_the_missing_rank(tmp_path: Path) -> None:
    programs = training_that_rank_2_leaves()
    stuck = Moment(error="KeyError: 'loss'", thread="metrics", traceback=(("average", "/home/me/metrics.py", 12),))
    write_moments(SimulatedJob(programs, WORLD), tmp_path, dict.fromkeys((0, 1, 3), Moment()) | {2: stuck})
    (finding,) = diagnosis_of(tmp_path).findings
    assert (finding.culprit_ranks, finding.exception) == ([2], "KeyError: 'loss' (thread metrics)")
    assert finding.places[0].frames == ["average (/home/me/metrics.py:12)"]


LEFT = Moment(reason="exit", after=0, error=RAISED)
FAILED = Moment(reason="exit", after=0.3, error=CLOSED, timed_out=True)
WRAPPED = Moment(reason="exit", after=0.1, error="TrainingError: step 2 failed", causes=("KeyError: 'x'", CLOSED))
ENDED, LATER = Moment(reason="SIGTERM", after=0), Moment(reason="SIGTERM", after=0.3)
LEAVES = training_that_rank_2_leaves()


def interrupted(after: float) -> Moment:
    return Moment(reason="SIGINT", after=after, error="KeyboardInterrupt: ")


def failed_in(error: str, file: str) -> Moment:
    return Moment(reason="exit", after=0.05, error=error, timed_out=True, traceback=(("wait", file, 9),))


def raised(error: str, file: str) -> Moment:
    return Moment(reason="exit", after=0, error=error, traceback=(("fetch", file, 9), ("main", "train.py", 5)))


def of_rank_2(left: Moment, others: Moment, first: Moment = FAILED) -> dict[int, Moment]:
    return {0: first, 1: others, 2: left, 3: others}


def cancelled(wait: float) -> dict[int, Moment]:
    """One after the other; the handler of rank 3 waits for a call that does not return."""
    failed = Moment(reason="exit", after=wait + 0.3, error=CLOSED, timed_out=True)
    ended = [Moment(reason="SIGTERM", after=after) for after in (wait, wait + 1.2)]
    return dict(enumerate((failed, failed, *ended)))


def ended_on_the_way(wait: float) -> dict[int, Moment]:
    """Without files of rank 1, which may have ended the job."""
    return dict.fromkeys((0, 2, 3), Moment(reason="SIGTERM", after=wait, world_size=4))


KILLED, HUNG = Moment(reason="SIGTERM", after=0.02), Moment()
ON_THE_WAY: Programs = [[STEP], [], [STEP], []]
STOPS: Programs = [*LEAVES[:2], [*LEAVES[2], CpuStall()], LEAVES[3]]
FAILS_UNSEEN: Programs = [LEAVES[0], LEAVES[1][:-1], *LEAVES[2:]]
"""Rank 1 failed in a call that no recorder notes."""


@pytest.mark.parametrize(
    ("backend", "programs", "moments", "suspects"),
    [
        pytest.param("nccl", LEAVES, of_rank_2(LEFT, KILLED, KILLED), [2], id="the others were killed soon after"),
        pytest.param("nccl", LEAVES, of_rank_2(Moment(after=-1.0), HUNG, HUNG), [2], id="dumped before they waited"),
        pytest.param("gloo", LEAVES, of_rank_2(ENDED, FAILED), [2], id="it alone was ended"),
        pytest.param("gloo", LEAVES, of_rank_2(Moment(reason="SIGABRT", after=0), LATER), [2], id="it aborted"),
        pytest.param("gloo", LEAVES, of_rank_2(LEFT, WRAPPED), [2], id="exceptions wrap a failed communication"),
        pytest.param("gloo", LEAVES, of_rank_2(ENDED, WRAPPED), [2], id="wrapped, and it was ended"),
        *(
            pytest.param("gloo", LEAVES, of_rank_2(LEFT, failed_in(error, file)), [2], id=error)
            for error, file in (
                ("RuntimeError: Operation timed out!", "train.py"),
                ("RuntimeError: Connection reset by peer", "/opt/torch/autograd/graph.py"),
                ("torch.distributed.DistBackendError: NCCL error: remote process exited", "train.py"),
            )
        ),
        *(  # what other libraries say of their connections is no failed communication
            pytest.param("gloo", LEAVES, of_rank_2(raised(error, file), FAILED), [2], id=error)
            for error, file in (
                ("RuntimeError: DataLoader timed out after 2 seconds", "/opt/torch/utils/data/dataloader.py"),
                ("RuntimeError: object store: connection refused by 10.0.0.7:9000", "train.py"),
                ("RuntimeError: cuDNN error: socket timeout in kernel", "train.py"),
            )
        ),
        pytest.param("gloo", FAILS_UNSEEN, {**of_rank_2(LEFT, HUNG, HUNG), 1: FAILED}, [2], id="failed unseen"),
        pytest.param("nccl", [[STEP]] * 4, dict.fromkeys(range(4), interrupted(0.1)), None, id="interrupted"),
        pytest.param("nccl", STOPS, dict.fromkeys(range(4), interrupted(60)), [2], id="a hang that is interrupted"),
        pytest.param("gloo", [[STEP]] * 4, dict.fromkeys((0, 1), FAILED), [2, 3], id="died while others failed"),
        pytest.param("gloo", LEAVES, cancelled(0.01), None, id="cancelled one after the other"),
        pytest.param("gloo", LEAVES, cancelled(20), [2], id="cancelled one after the other after a hang"),
        pytest.param("nccl", ON_THE_WAY, ended_on_the_way(2), [1], id="on the way to a first call"),
        pytest.param("nccl", ON_THE_WAY, ended_on_the_way(20), [3], id="not on the way any more"),
    ],
)
def test_the_missing_rank_is_accused_and_its_victims_are_not(
    backend: str, programs: Programs, moments: dict[int, Moment], suspects: list[int] | None, tmp_path: Path
) -> None:
    found = diagnose_moments(SimulatedJob(programs, WORLD, backend=backend), tmp_path, moments)
    assert (found.verdict == "ok", found.suspect_ranks) == (suspects is None, suspects or [])


def test_ranks_ended_just_after_an_abort_are_not_accused_of_later_calls(
    tmp_path: Path,
) -> None:
    # As DDP's calls on gloo, they wait for the first when they have made the second.
    large, small = (Collective("0", "all_reduce", ((size,),), ((size,),)) for size in (512, 8))
    programs: Programs = [[STEP], [STEP, large, STEP], [STEP, small, STEP], [STEP, large, STEP], [STEP]]
    job = SimulatedJob(programs, {"0": ("default_pg", list(range(5)))})
    ended, failed = Moment(reason="SIGTERM", after=0.4), Moment(reason="SIGTERM", after=0.4, error=CLOSED)
    aborted = Moment(reason="SIGABRT", after=0.1)
    found = diagnose_moments(job, tmp_path, {0: ended, 1: failed, 2: aborted, 3: failed, 4: ended})
    assert "size_mismatch" in {one.kind for one in found.findings}
    assert not {0, 1, 3, 4}.intersection(found.suspect_ranks)
