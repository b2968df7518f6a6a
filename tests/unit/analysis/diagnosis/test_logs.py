"""A hang is diagnosed from the log of the job's launcher alone."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from crossrank.errors import CrossrankError
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.parallel import Fleet
from tests.unit.analysis.diagnosis.simulated_jobs import Collective, CpuStall, Programs, SimulatedJob
from tests.unit.analysis.diagnosis.verdicts import diagnose_job, diagnosis_of, roots
from tests.unit.traces.logs.lines import monitor, traceback, watchdog


def diagnosed(folder: Path, *lines: str) -> Diagnosis:
    folder.mkdir(exist_ok=True)
    (folder / "train.log").write_text("\n".join(lines) + "\n")
    return diagnosis_of(folder)


def test_the_rank_that_never_came_is_named_with_the_lines_that_show_it(tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 3) for line in watchdog(rank, 412, enqueued=415)]
    found = diagnosed(tmp_path, *lines, monitor(2, 411, 411))
    assert roots(found) == [("missing_rank", "default_pg", 412, [2], [0, 1, 3])]
    assert [line.split(":")[1] for line in found.findings[0].lines] == ["7", "1", "2", "3", "4"]


def test_ranks_of_a_group_are_not_those_of_the_job(tmp_path: Path) -> None:
    """`[Rank 1]` of the group is rank 3 of the job; the members are equally spaced, so rank 5 is one too."""
    lines = [
        line
        for member, rank in ((0, 1), (1, 3), (3, 7))
        for line in watchdog(rank, 4, member=member, group="6", desc="data")
    ]
    assert roots(diagnosed(tmp_path, *lines)) == [("log_missing", "data", 4, [5], [1, 3, 7])]


def test_a_rank_in_another_call_is_named(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in watchdog(rank, 9, op="BROADCAST" if rank == 1 else "ALLREDUCE")]
    assert roots(diagnosed(tmp_path, *lines)) == [("type_mismatch", "default_pg", 9, [1], [0, 2, 3])]


def test_a_silent_majority_is_not_accused(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, *watchdog(3, 655))
    assert (found.verdict, found.suspect_ranks) == ("incomplete", [])


def test_a_rank_that_raised_is_named_and_those_that_lost_it_are_not(tmp_path: Path) -> None:
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21141"
    lines = [*traceback("ValueError: no batch", "[rank2]: ")]
    lines += [line for rank in (0, 1) for line in traceback(closed, f"[rank{rank}]: ")]
    found = diagnosed(tmp_path, *lines)
    assert (found.suspect_ranks, found.findings[0].kind) == ([2], "raised")


def test_a_task_that_the_kernel_killed_is_named_with_its_host(tmp_path: Path) -> None:
    lines = [f" {rank}: step 1" for rank in range(4)] + ["srun: error: gpu-b: task 3: Out Of Memory"]
    found = diagnosed(tmp_path, *(lines[:4] * 4), lines[4])
    assert (found.suspect_ranks, found.hosts) == ([3], {"3": "gpu-b"})


def test_ranks_that_never_came_to_the_store_are_named(tmp_path: Path) -> None:
    waits = "torch.distributed.DistStoreError: Timed out after 7 seconds waiting for clients. 3/4 clients joined."
    lines = [f"[rank{rank}]: starts" for rank in range(3)] + traceback(waits, "[rank0]: ")
    found = diagnosed(tmp_path, *lines)
    assert (found.findings[0].kind, found.suspect_ranks) == ("never_joined", [3])


def test_a_log_in_the_folder_of_a_recording_counts_only_if_it_is_named(tmp_path: Path) -> None:
    """A job that waits diagnoses its own folder: what its ranks printed before must not end it."""
    programs: Programs = [[Collective("0")] * 2, [Collective("0")] * 2, [Collective("0"), CpuStall()]]
    diagnose_job(SimulatedJob(programs, {"0": ("default_pg", [0, 1, 2])}, backend="gloo"), tmp_path)
    log = tmp_path / "train.log"
    log.write_text("\n".join(traceback("ValueError: handled", "[rank2]: ")))
    assert [one.exception for one in diagnosis_of(tmp_path).findings] == [None]
    evidence = read_evidence(find_candidates([str(tmp_path), str(log)]), Fleet())
    assert [one.exception for one in diagnose(evidence)[0].findings] == ["ValueError: handled"]


def test_a_log_never_proves_a_job_healthy(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, *(f"[rank0]: step {step} loss 1.0" for step in range(9)))
    assert (found.verdict, found.findings) == ("incomplete", [])


def test_a_verdict_that_crossrank_printed_in_the_job_counts_until_it_withdraws_it(tmp_path: Path) -> None:
    waits = "ranks 0-1 wait in all_reduce #7 for rank 2, which is blocked in futex() in load (train.py:7)"
    lines = [
        f"crossrank: {waits}: no communication on rank 0 for 3 s. Verdict (/job/verdict.json):",
        "culprit    rank 2",
    ]
    found = diagnosed(tmp_path, "[rank0]: step 1", *lines)
    assert (found.suspect_ranks, found.findings[0].kind) == ([2], "printed_verdict")
    assert waits in found.findings[0].text
    withdrawn = (
        "crossrank: communication continues, so the verdict above no longer applies; /job/verdict.json is updated"
    )
    assert diagnosed(tmp_path, "[rank0]: step 1", *lines, withdrawn).findings == []


def test_the_rank_whose_communicator_id_others_wait_for_is_named(tmp_path: Path) -> None:
    error = "DistBackendError: [{}] is setting up NCCL communicator and retrieving ncclUniqueId from [0]: wait timeout"
    lines = [line for rank in (1, 2, 3) for line in traceback(error.format(rank), f"[rank{rank}]: ")]
    found = diagnosed(tmp_path, "[rank0]: builds its index", *lines)
    assert (found.suspect_ranks, found.findings[0].text) == ([0], "rank 0 has not made the id of a new communicator")


def test_types_in_fingerprints_are_compared(tmp_path: Path) -> None:
    def fingerprint(dtype: str) -> str:
        return f"CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE, TensorShape=[32], TensorDtypes={dtype})"

    start = "RuntimeError: Detected mismatch between collectives on ranks."
    lines = [
        f"[rank{rank}]: {start} Rank {rank} is running collective: {fingerprint('Float')}, but Rank 3 is running "
        f"collective: {fingerprint('Double')}."
        for rank in range(3)
    ]
    assert roots(diagnosed(tmp_path, *lines)) == [("dtype_mismatch", "default_pg", 4, [3], [0, 1, 2])]


def test_a_rank_whose_progress_the_log_lacks_waits_in_the_call_that_timed_out(tmp_path: Path) -> None:
    """The log is cut before the second line of rank 2, and before all of rank 1, so neither is accused."""
    lines = [*watchdog(0, 219), watchdog(2, 219)[0], "[rank2]:[E1126 10:00:00.004 ProcessGroupNCCL.cpp:22"]
    (tmp_path / "train.log").write_text("\n".join(lines))
    assert diagnosis_of(tmp_path).suspect_ranks == []


@pytest.mark.parametrize("lines", [slice(1), slice(None)], ids=["without a group", "as its watchdog ends"])
def test_a_rank_whose_call_ended_on_all_others_is_not_said_to_be_in_none(lines: slice, tmp_path: Path) -> None:
    ends = ["[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: " + line
            for line in watchdog(0, 41)[:1]]  # fmt: skip
    text = [line for rank in (1, 2, 3) for line in watchdog(rank, 42)] + (watchdog(0, 41)[:1] + ends)[lines]
    found = diagnosed(tmp_path, *text)
    assert found.suspect_ranks == [0]
    assert "its call before does not end on it, and has ended on other ranks" in found.findings[0].text


def test_a_process_that_mpirun_saw_killed_is_named(tmp_path: Path) -> None:
    lines = [
        "[1,0]<stdout>:step 3",
        "mpirun noticed that process rank 3 with PID 7 on node n2 exited on signal 9 (Killed).",
    ]
    found = diagnosed(tmp_path, *lines)
    assert (found.suspect_ranks, found.hosts) == ([3], {"3": "n2"})


def test_logs_of_two_jobs_are_refused(tmp_path: Path) -> None:
    for job, seq in (("job-1", 412), ("job-2", 88)):
        lines = [line for rank in range(4) for line in watchdog(rank, seq)]
        (tmp_path / f"{job}.log").write_text("\n".join(lines) + "\n")
    with pytest.raises(CrossrankError, match=r"rank 0 timed out in call 412 \(.*job-1.log\) and 88 \(.*job-2.log\)"):
        diagnosis_of(tmp_path)


def test_two_files_may_have_the_lines_of_one_rank(tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 3) for line in watchdog(rank, 412)] + [monitor(2, 411, 411)]
    for name in ("console.log", "copy.log"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    assert diagnosis_of(tmp_path).suspect_ranks == [2]


def test_the_notes_name_a_log_that_contradicts_a_dump(tmp_path: Path) -> None:
    programs: Programs = [[Collective("0")] * 3, [Collective("0")] * 3, [Collective("0"), CpuStall()]]
    diagnose_job(SimulatedJob(programs, {"0": ("default_pg", [0, 1, 2])}), tmp_path)
    log = tmp_path / "train.log"
    log.write_text("\n".join(watchdog(0, 412)) + "\n")
    notes = diagnose(read_evidence(find_candidates([str(tmp_path), str(log)]), Fleet()))[0].notes
    assert [note for note in notes if "its log says" in note] == [
        f"rank 0: its log says that it finished call 411 of group 0, and {tmp_path}/rank_0 has 3 as its last one; they "
        "may be of two runs of the job"
    ]


def test_the_stack_that_torch_prints_of_a_call_shows_its_line(tmp_path: Path) -> None:
    stack = ["[rank0]:[E1126 10:00:00.000000000 ProcessGroupNCCL.cpp:667] Stack trace of the failed collective: "]
    stack += [
        "#0 all_reduce from /opt/site-packages/torch/distributed/distributed_c10d.py:2810",
        "#1 step from /job/train.py:41",
    ]
    others = [line for rank in (1, 3) for line in watchdog(rank, 412)]
    found = diagnosed(tmp_path, *watchdog(0, 412), *stack, "", *others, monitor(2, 411, 411))
    (place,) = [place for place in found.findings[0].places if place.rank == 0]
    assert place.frames[0] == "step (/job/train.py:41)"


CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.5]:1"
)


def test_the_only_rank_that_says_nothing_while_all_others_lose_a_connection_is_named(tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 3) for line in traceback(CLOSED, f"[rank{rank}]: ")]
    found = diagnosed(tmp_path / "one", *lines)
    assert (found.verdict, found.suspect_ranks) == ("error", [2])
    assert found.findings[0].text == "rank 0-1,3 lost a connection, and rank 2 says nothing of its end"
    # Of two, the launcher may have ended one before it noticed.
    assert diagnosed(tmp_path / "two", *lines[:-6], "[rank3]: step 1").suspect_ranks == []


def test_the_rank_that_waited_for_none_when_the_user_ended_the_job_is_named(tmp_path: Path) -> None:
    def stopped(rank: int, *, where: str) -> list[str]:
        lines = ["Traceback (most recent call last):", f'  File "{where}", line 7, in wait', "KeyboardInterrupt"]
        return [f"[rank{rank}]: {line}" for line in lines]

    waiting = [line for rank in (0, 1, 3) for line in stopped(rank, where="/opt/torch/distributed/distributed_c10d.py")]
    found = diagnosed(tmp_path, *waiting, *stopped(2, where="/job/shards.py"))
    assert (found.suspect_ranks, found.proof) == ([2], "late")
    assert found.findings[0].text.endswith("and rank 2 did not, in wait (/job/shards.py:7)")


def test_a_rank_that_raised_is_named_and_not_those_whose_receives_time_out(tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 2) for line in watchdog(rank, 8 + rank, op="RECV", group="7", desc="pipeline")]
    found = diagnosed(tmp_path, *traceback("AssertionError: NaN", "[rank3]: "), *lines)
    assert (found.suspect_ranks, found.findings[0].kind) == ([3], "raised")


def test_numbers_within_a_node_are_ranks_only_on_the_first_node(tmp_path: Path) -> None:
    lines = [
        f"[default{rank - 8}]:{line}" for rank in range(8, 16) for line in watchdog(rank, 60, op="_REDUCE_SCATTER_BASE")
    ]
    lines += ["failed (exitcode: -6) local_rank: 0 (pid: 40) of binary: python"]
    assert diagnosed(tmp_path, *lines).suspect_ranks == []


def test_a_pod_that_the_kernel_killed_is_named_by_the_rank_of_its_environment(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    described = [
        "Name: job-worker-1",
        "  State: Terminated",
        "    Reason:    OOMKilled",
        "  Environment:",
        "    RANK: 2",
    ]
    (folder / "describe.txt").write_text("\n".join(described) + "\n")
    assert diagnosed(folder, *(f"[rank{rank}]: step 1" for rank in range(4))).suspect_ranks == [2]


WORKERS = [
    f"(Trainer pid=1) - (node_id=a, ip=10.0.0.{rank}, pid={90 + rank}) world_rank={rank}, local_rank=0"
    for rank in range(4)
]


def test_a_worker_that_ray_killed_is_named_by_its_process(tmp_path: Path) -> None:
    died = ["ray.exceptions.ActorDiedError: The actor died.", "\tpid: 92", "Worker exit type: NODE_OUT_OF_MEMORY"]
    assert diagnosed(tmp_path, *WORKERS, *died).suspect_ranks == [2]


def test_an_exception_that_ray_passes_on_is_of_the_process_that_raised_it(tmp_path: Path) -> None:
    passed_on = [
        "Traceback (most recent call last):",
        '  File "/opt/ray/worker.py", line 28, in get',
        "ray.exceptions.RayTaskError(ZeroDivisionError): \x1b[36mray::train()\x1b[39m (pid=1, ip=10.0.0.4, actor_id=0)",
        '  File "/opt/ray/utils.py", line 57, in check',
        "ray.exceptions.RayTaskError(ZeroDivisionError): ray::next() (pid=93, ip=10.0.0.3, actor_id=7)",
        '  File "/job/train.py", line 88, in train',
        "    acc = correct / total",
        "ZeroDivisionError: division by zero",
    ]
    found = diagnosed(tmp_path, *WORKERS, *passed_on)
    assert (found.suspect_ranks, found.findings[0].exception) == ([3], "ZeroDivisionError: division by zero")


def test_a_job_that_somebody_ended_accuses_no_rank(tmp_path: Path) -> None:
    found = diagnosed(
        tmp_path, "[rank0]: step 1", "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT noon DUE TO TIME LIMIT ***"
    )
    assert (found.verdict, found.suspect_ranks) == ("incomplete", [])
    assert any("ended from outside: JOB 7 ON n1 CANCELLED AT noon" in note for note in found.notes)


def test_a_watchdog_that_ends_its_process_after_an_error_of_the_network_accuses_no_rank(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in watchdog(rank, 77)[1:]]
    lines += ["failed (exitcode: -6) local_rank: 2 (pid: 503) of binary: python"]
    assert diagnosed(tmp_path, *lines).suspect_ranks == []


def test_the_rank_that_a_checkpoint_names_counts_if_all_ranks_raise_for_it(tmp_path: Path) -> None:
    error = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([2])"
    lines = [line for rank in range(4) for line in traceback(error, f"[rank{rank}]: ")]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [2]


def test_an_exception_that_all_ranks_raised_names_none(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in traceback("PermissionError: /data", f"[rank{rank}]: ")]
    found = diagnosed(tmp_path, *lines)
    assert (found.verdict, found.suspect_ranks, found.findings[0].kind) == ("error", [], "raised")


def test_the_rank_with_another_version_of_nccl_than_most_is_named(tmp_path: Path) -> None:
    warning = "NCCL WARN Mismatched NCCL version detected : rank 3 version 21903 rank {} version 22005"
    assert diagnosed(tmp_path, *(warning.format(rank) for rank in range(3))).suspect_ranks == [3]


def test_a_batch_of_sends_and_receives_that_times_out_accuses_no_rank(tmp_path: Path) -> None:
    lines = [
        line for rank in range(3) for line in watchdog(rank, 81 - rank, op="COALESCED", size=0, group="5", desc="pp")
    ]
    found = diagnosed(tmp_path, *traceback("RuntimeError: The size of tensor a", "[rank3]: "), *lines)
    assert found.suspect_ranks == [3]


def test_sizes_of_an_all_gather_are_compared_by_the_side_that_a_line_shows(tmp_path: Path) -> None:
    calls = [
        f"running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=ALLGATHER, TensorShape=[{size}], "
        for size in (128, 64, 128, 128)
    ]
    lines = []
    for rank, other in ((0, 1), (1, 0), (2, 1), (3, 1)):
        compared = f"Rank {rank} is {calls[rank]}, but Rank {other} is {calls[other]}"
        error = f"RuntimeError: Detected mismatch between collectives on ranks. {compared}"
        lines += traceback(error, f"[rank{rank}]: ")
    assert roots(diagnosed(tmp_path, *lines)) == [("size_mismatch", "default_pg", 9, [1], [])]


def test_the_only_silent_rank_is_not_named_if_the_log_is_cut_off(tmp_path: Path) -> None:
    lines = [line for rank in (0, 1, 3) for line in traceback(CLOSED, f"[rank{rank}]: ")]
    (tmp_path / "train.log").write_text("\n".join([*lines, "[rank2]: Trace"]))
    assert diagnosis_of(tmp_path).suspect_ranks == []


STEPS = [f"{{'loss': {1 / step:.4f}, 'epoch': {step / 10:.2f}}}" for step in range(1, 20)]
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."


def test_an_exception_that_python_ignored_ended_no_rank(tmp_path: Path) -> None:
    ignored = ["Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f21>"]
    ignored += traceback("AssertionError: can only test a child process")
    assert diagnosed(tmp_path, *(f"[rank2]: {line}" for line in ignored)).suspect_ranks == []


def test_an_exception_after_which_the_job_made_steps_did_not_end_it(tmp_path: Path) -> None:
    lines = traceback("botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL", "[rank1]: ")
    lines += ["[rank1]: WARNING fetch failed (attempt 1/5), retrying", *STEPS, *traceback(OUT_OF_MEMORY, "[rank5]: ")]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [5]


def test_steps_that_are_printed_late_do_not_clear_the_rank_that_raised(tmp_path: Path) -> None:
    """A process may print what it has kept only when it ends."""
    closed = traceback(CLOSED, "[rank0]: ")
    assert diagnosed(tmp_path, *traceback("ValueError: no batch", "[rank2]: "), *STEPS, *closed).suspect_ranks == [2]


def test_ranks_that_a_comparison_of_calls_does_not_name_are_not_accused(tmp_path: Path) -> None:
    call = "running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=ALLREDUCE, TensorShape=[{}], "
    calls = [call.format(10 if rank == 3 else 64) for rank in range(4)]
    lines = [f"[rank{rank}]: starts" for rank in range(4)]
    for rank, other in ((0, 3), (1, 3), (3, 0)):  # nothing of rank 2
        compared = f"Rank {rank} is {calls[rank]}, but Rank {other} is {calls[other]}"
        error = f"RuntimeError: Detected mismatch between collectives on ranks. {compared}"
        lines += traceback(error, f"[rank{rank}]: ")
    assert diagnosed(tmp_path, *lines).suspect_ranks == [3]


def test_a_rank_whose_call_has_another_number_than_those_of_most_ranks_is_named(tmp_path: Path) -> None:
    call = "running collective: CollectiveFingerPrint(SequenceNumber={}OpType=BARRIER)"
    lines = []
    for rank, other in ((0, 1), (1, 0), (2, 1), (3, 1)):
        mine, theirs = (call.format(56 if one == 1 else 57) for one in (rank, other))
        compared = f"Rank {rank} is {mine}, but Rank {other} is {theirs}."
        error = f"RuntimeError: Detected mismatch between collectives on ranks. {compared}"
        lines += traceback(error, f"[rank{rank}]: ")
    found = diagnosed(tmp_path, *lines)
    assert found.suspect_ranks == [1]
    assert found.findings[0].text == "rank 1 made BARRIER #56, and most ranks made BARRIER #57"


def test_steps_after_an_exception_are_not_lines_that_torch_logs(tmp_path: Path) -> None:
    api = "torch/distributed/elastic/multiprocessing/api.py:900]"
    ended = [f"[node-0] W0603 02:32:5{number}.642000 2144 {api} Sending process 22{number}4" for number in range(8)]
    raised = traceback("AssertionError: found NaN before the communication collective", "[rank6]: ")
    aborted = "E0603 02:32:59.454000 2144 {} failed (exitcode: -6) local_rank: 1 (pid: 2212) of binary: python"
    found = diagnosed(tmp_path, *raised, *watchdog(0, 9), *watchdog(1, 9), *ended, aborted.format(api))
    assert found.suspect_ranks == [6]


def test_sums_of_an_all_to_all_are_not_compared_where_members_of_the_group_may_be_missing(tmp_path: Path) -> None:
    """Ranks 8 to 10 of a group whose last member prints nothing send other sums than they expect."""
    call: dict[str, Any] = {"seq": 16, "op": "ALLTOALL_BASE", "group": "119", "desc": "expert"}
    lines = [line for rank in (8, 9, 10) for line in watchdog(rank, **call, size=64 + rank, member=rank - 8)]
    lines = [line.replace("NumelOut=72", "NumelOut=70") for line in lines]
    found = diagnosed(tmp_path, *lines)
    assert [one.kind for one in found.findings] == ["all_joined_not_completed"]
    assert found.findings[0].text.startswith("all known ranks of this group made the call; the group may have other")


def test_a_process_that_its_watchdog_aborted_before_torch_2_1_is_not_accused(tmp_path: Path) -> None:
    """These lines have no time, no sizes, and no rank in front."""
    work = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=1800000)"
    lines = [f"[E ProcessGroupNCCL.cpp:455] [Rank {rank}] {work} ran for 1800062 milliseconds" for rank in (1, 2, 3)]
    lines += ["[E ProcessGroupNCCL.cpp:460] To avoid data inconsistency, we are taking the entire process down."]
    failed = (
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) local_rank: 1 (pid: 12) of binary"
    )
    assert diagnosed(tmp_path, *lines, f"{failed}: python").suspect_ranks == []


@pytest.mark.parametrize(
    "line",
    ["Fatal Python error: Segmentation fault", "[n9:61:0:62] Caught signal 11 (Segmentation fault: address 0x10)"],
)
def test_a_process_that_prints_its_crash_is_named(line: str, tmp_path: Path) -> None:
    lines = [f"[1,{rank}]<stdout>: step 1" for rank in range(4)]
    assert diagnosed(tmp_path, *lines, f"[1,2]<stderr>: {line}").suspect_ranks == [2]


def test_a_rank_that_only_compared_gradients_is_not_accused(tmp_path: Path) -> None:
    error = "FloatingPointError: Fatal error: gradients are inconsistent between workers. Try --ddp-backend=legacy_ddp"
    assert diagnosed(tmp_path, "[rank3]: step", *traceback(error, "[rank6]: ")).suspect_ranks == []


def test_a_rank_that_failed_by_itself_is_named_if_most_ranks_show_no_call(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]: step 1" for rank in range(16)] + traceback("IndexError: index 7", "[rank13]: ")
    found = diagnosed(tmp_path, *lines, *watchdog(0, 66), *watchdog(4, 66))
    assert (found.suspect_ranks, found.proof) == ([13], "gone")


def test_the_number_of_a_task_in_the_names_of_all_files_is_the_rank(tmp_path: Path) -> None:
    waits = "torch.distributed.DistStoreError: Timed out after 7 seconds waiting for clients. 3/4 clients joined."
    for task in range(4):
        lines = ["CondaLock: waiting for a lock"] if task == 2 else traceback(waits)
        (tmp_path / f"out.{task}.txt").write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / f"out.{task}.txt") for task in range(4)]
    assert diagnose(read_evidence(find_candidates(files), Fleet()))[0].suspect_ranks == [2]


def test_a_file_is_of_the_rank_whose_environment_it_shows(tmp_path: Path) -> None:
    """Workers of Kubernetes are numbered apart from the master, which is rank 0."""
    for rank, name in enumerate(("master-0", "worker-0", "worker-1", "worker-2")):
        lines = [f"RANK={rank} WORLD_SIZE=4 MASTER_ADDR=llm-master-0", *([] if rank == 3 else watchdog(rank, 12))]
        (tmp_path / f"llm-{name}.log").write_text("\n".join(lines) + "\n")
    assert diagnosis_of(tmp_path).suspect_ranks == [3]


def summary(*ends: tuple[int, int]) -> list[str]:
    """The summary of torchrun: rank and exit code of each process, a second apart."""
    lines: list[str] = []
    for second, (rank, code) in enumerate(ends):
        lines += [f"  time      : 2025-07-30_20:00:{second:02}", "  host      : n2"]
        lines += [f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : {code} (pid: {4000 + rank})"]
    return lines


@pytest.mark.parametrize(
    ("ends", "named"),
    [([(1, -9), (0, -15), (2, -15)], [1]), ([(0, -15), (2, -15), (1, -9)], []), ([(1, 1), (0, -6), (2, -6)], [])],
    ids=["killed first", "killed after the others had ended", "failed first"],
)
def test_the_summary_shows_a_rank_that_was_killed_before_torchrun_ended_others(
    ends: list[tuple[int, int]], named: list[int], tmp_path: Path
) -> None:
    assert diagnosed(tmp_path, *summary(*ends)).suspect_ranks == named


def test_a_process_of_ray_has_the_rank_that_it_prints(tmp_path: Path) -> None:
    workers = [
        f"(RayTrainWorker pid={90 + rank}) Setting up process group for: env:// [rank={rank}, world_size=4]"
        for rank in range(4)
    ]
    killed = "Memory on the node (IP: 10.0.0.3, ID: 3b) where the task (name=Worker.__init__, pid=93, memory used=9GB)"
    assert diagnosed(tmp_path, *workers, killed).suspect_ranks == [3]
    of_verl = [f"(WorkerDict pid={90 + rank}) [Rank {rank}] memory allocated (GB): 3.0" for rank in range(4)]
    raised = [f"(WorkerDict pid=92) {line}" for line in traceback(OUT_OF_MEMORY)]
    assert diagnosed(tmp_path, *of_verl, *raised).suspect_ranks == [2]


def test_a_rank_that_cannot_open_its_port_is_named_by_the_label_of_its_lines(tmp_path: Path) -> None:
    in_use = "torch.distributed.DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE"
    lines = [f"[{rank}] init" for rank in range(4)] + traceback(in_use, "[0] ")
    for rank in (1, 2, 3):
        lines += traceback("torch.distributed.DistStoreError: wait timeout after 60000ms, keys: /rank_0", f"[{rank}] ")
    assert diagnosed(tmp_path, *lines).suspect_ranks == [0]


def test_a_number_of_a_line_is_not_a_rank(tmp_path: Path) -> None:
    lines = [f"[{number}] step" for number in range(30)] + [f"[30] {line}" for line in traceback("KeyError: 'x'")]
    assert diagnosed(tmp_path, *lines).suspect_ranks == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[rank: 2] Child process with PID 4177 terminated with code -9. Forcefully terminating all others", 2),
        ("(EngineCore_DP0 pid=43) ERROR 11-08 11:01:29 [x.py:154] Worker proc VllmWorker-3 died unexpectedly", 3),
        ("pytorchjob-vit-worker-1 pytorch [default1]:[rank5]: KeyError: 5", 5),
        ("nemo-ft3/0 [default1]:[rank1]: KeyError: 5", 1),
    ],
)
def test_a_process_that_failed_is_named_by_the_line_of_its_launcher(line: str, named: int, tmp_path: Path) -> None:
    before = line.replace("KeyError: 5", "Traceback (most recent call last):")
    frame = line.replace("KeyError: 5", '  File "/job/train.py", line 12, in main')
    others = [line[: line.find("[default1]")].replace("-1 ", f"-{one} ") + f"[rank{one}]: step 1" for one in range(6)]
    lines = [before, frame, line] if before != line else [line]
    assert diagnosed(tmp_path, *(others * 4 if before != line else []), *lines).suspect_ranks == [named]


def test_members_that_wait_for_the_id_of_a_communicator_show_who_makes_it(tmp_path: Path) -> None:
    """The group has ranks 4 to 7; its members count from 0."""
    asks = (
        "[{}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store, but got {}"
    )
    errors = [f"DistBackendError: {asks.format(member, 'wait timeout after 600000ms')}" for member in (1, 2, 3)]
    lines = [line for rank, error in enumerate(errors, 5) for line in traceback(error, f"[rank{rank}]: ")]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [4]


def test_the_rank_in_the_traceback_of_a_checkpoint_is_the_one_that_raised(tmp_path: Path) -> None:
    """Each rank prints it, behind its own exception."""
    lines = []
    for rank in (0, 3, 6):
        error = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([6])"
        lines += traceback(error, f"[rank{rank}]: ")
        inner = traceback("FileNotFoundError: [Errno 2] No such file or directory", f"[rank{rank}]: ")
        lines += [inner[0] + " (RANK 6)", *inner[1:]]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [6]


def test_a_process_that_its_watchdog_aborted_is_not_accused(tmp_path: Path) -> None:
    """The terminal has broken the line of the timeout, so it says nothing."""
    head = (
        "[rank27]:[E212 22:10:00.000000000 ProcessGroupNCCL.cpp:632] [Rank 27] Watchdog caught collective operation tim"
    )
    lines = [head, "eout: WorkNCCL(SeqNum=88123", "failed (exitcode: -6) local_rank: 3 (pid: 771) of binary: python"]
    assert diagnosed(tmp_path, *lines).suspect_ranks == []


def test_processes_of_two_nodes_may_have_one_number(tmp_path: Path) -> None:
    (tmp_path / "node0.log").write_text("[rank0]: step 1\nSending process 21 closing signal SIGTERM\n")
    failed = "failed (exitcode: -11) local_rank: 1 (pid: 21) of binary: python"
    (tmp_path / "node1.log").write_text(
        "\n".join([failed, *summary((9, -11))[:3], "  exitcode  : -11 (pid: 21)"]) + "\n"
    )
    assert diagnosis_of(tmp_path).suspect_ranks == [9]


def test_a_timeout_in_a_pipeline_does_not_hide_the_stage_that_raised(tmp_path: Path) -> None:
    lines = traceback("AssertionError: token id out of range", "[rank1]: ")
    for rank, seq, op in ((0, 991, "COALESCED"), (2, 990, "RECV"), (3, 989, "RECV")):
        lines += watchdog(rank, seq, op=op, group="20", desc="PIPELINE_MODEL_PARALLEL_GROUP")
    assert diagnosed(tmp_path, *lines).suspect_ranks == [1]


def test_stages_that_receive_along_a_pipeline_wait_for_the_only_one_that_does_not(tmp_path: Path) -> None:
    """The lines have no peers: rank 4 has not come to its group, and the stages wait in numbers of their own."""
    lines = [
        line
        for member, rank, seq in ((0, 0, 45), (1, 2, 90), (3, 6, 93))
        for line in watchdog(rank, seq, op="RECV", member=member, group="9", desc="pipeline")
    ]
    tensor = watchdog(5, 154, member=1, group="7", desc="tensor") + watchdog(1, 153, member=1, group="6", desc="tensor")
    found = diagnosed(tmp_path, *lines, *tensor[:2], "[rank4]: step 3")
    assert found.suspect_ranks == [4]


def test_a_rank_that_printed_an_earlier_call_is_named_although_most_ranks_print_nothing(tmp_path: Path) -> None:
    steps = [f"[rank{rank}]: wrote its part" for rank in range(16)]
    lines = [line for rank in (0, 4, 8) for line in watchdog(rank, 977)]
    assert diagnosed(tmp_path, *steps, *lines).suspect_ranks == []
    assert diagnosed(tmp_path / "more", *steps, *lines, monitor(5, 976, 976)).suspect_ranks == [5]


def test_the_only_rank_that_did_not_time_out_is_named(tmp_path: Path) -> None:
    lines = [
        line
        for rank in (1, 2, 3)
        for line in watchdog(rank, 577, op="RECV", member=1, group=f"1{rank}", desc=f"p2p_{rank}")
    ]
    assert diagnosed(tmp_path, "[rank0]: step 1", *lines).suspect_ranks == [0]
    assert diagnosed(tmp_path / "more", "[rank0]: step 1", "[rank4]: step 1", *lines).suspect_ranks == []


def test_labels_of_tasks_that_are_launchers_are_not_ranks(tmp_path: Path) -> None:
    """srun numbers the tasks, and each task starts two ranks."""
    steps = [f"{node}: [rank{2 * node + local}]: step 1" for node in range(3) for local in range(2)] * 3
    ended = ["1: " + line for line in traceback("ValueError: no batch")] + ["srun: error: gpu-b: task 1: Killed"]
    found = diagnosed(tmp_path, *steps, *ended)
    assert found.suspect_ranks == []
    same = [f"{rank}: [rank{rank}]: step 1" for rank in range(3)] * 3
    assert diagnosed(tmp_path / "same", *same, *ended[:-1]).suspect_ranks == [1]


def test_the_ranks_of_a_node_that_failed_are_named(tmp_path: Path) -> None:
    steps = [f"{node}: [rank{2 * node + local}]: step 1" for node in (0, 2, 3) for local in range(2)] * 3
    failed = ["srun: error: Node failure on gpu-b", "srun: error: gpu-b: task 1: Killed"]
    assert diagnosed(tmp_path, *steps, *failed).suspect_ranks == [2, 3]


def test_a_process_that_the_kernel_killed_is_known_by_its_number(tmp_path: Path) -> None:
    started = [
        f"[INFO] [launch.py:256:main] process {4200 + rank} spawned with command: ['python', '--local_rank={rank}']"
        for rank in range(4)
    ]
    killed = "[Sun Jan 19 2025] Out of memory: Killed process 4202 (python) total-vm:1kB"
    assert diagnosed(tmp_path, *started, killed).suspect_ranks == [2]
    assert diagnosed(tmp_path / "other", *started, killed.replace("4202", "99")).suspect_ranks == []


def test_a_process_of_ray_has_the_rank_of_the_lines_that_torch_marked(tmp_path: Path) -> None:
    marked = [f"(WorkerDict pid={70 + rank}) [rank{rank}]:[W1] using GPU {rank}" for rank in range(4)]
    of_actor = [
        *traceback("RayTaskError(OutOfMemoryError): ray::TaskRunner.run() (pid=12, ip=10.0.0.1)"),
        '  File "/job/dp_actor.py", line 9, in fit',
        "RayTaskError(OutOfMemoryError): ray::WorkerDict.update() (pid=73, ip=10.0.0.1)",
        '  File "/job/dp_actor.py", line 461, in update_policy',
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    assert diagnosed(tmp_path, *marked, *of_actor).suspect_ranks == [3]


def test_members_that_have_not_begun_to_make_a_communicator_are_named(tmp_path: Path) -> None:
    def begun(rank: int, state: str = "START") -> str:
        comm = (
            f"ncclCommInitRank comm 0x4f{rank} rank {rank} nranks 8 cudaDev 0 busId d8000 commId 0x77ad - Init {state}"
        )
        return f"node-a:15{rank}:15{rank} [{rank}] NCCL INFO {comm}"

    lines = [begun(rank) for rank in range(8) if rank != 5]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [5]
    assert diagnosed(tmp_path / "made", *lines, begun(0, "COMPLETE")).suspect_ranks == []
    assert diagnosed(tmp_path / "few", *lines[:3]).suspect_ranks == []


def test_an_exception_without_a_rank_is_of_the_only_process_that_failed(tmp_path: Path) -> None:
    def launcher(code: int) -> list[str]:
        return [
            "W1 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 51 closing signal SIGTERM",
            f"E1 torch/distributed/elastic/multiprocessing/api.py:8] failed (exitcode: {code}) local_rank: 6 (pid: 57)",
        ]

    assert diagnosed(tmp_path, *traceback("ValueError: x"), *launcher(1)).suspect_ranks == [6]
    closed = traceback("RuntimeError: Connection closed by peer [127.0.0.1]:21141")
    assert diagnosed(tmp_path / "closed", *traceback("ValueError: x"), *closed, *launcher(1)).suspect_ranks == []


def test_the_line_before_an_exception_may_name_its_rank(tmp_path: Path) -> None:
    raised = traceback("RuntimeError: shape is invalid")
    assert diagnosed(tmp_path, "10:05:40 ERROR rank 2: local update failed", *raised).suspect_ranks == [2]
    assert diagnosed(tmp_path / "step", "10:05:40 INFO rank 2: step 5", *raised).suspect_ranks == []


def test_processes_of_two_nodes_with_the_same_number_are_apart(tmp_path: Path) -> None:
    api = "torch/distributed/elastic/multiprocessing/api.py:9]"
    lines = [
        f"job-worker-1 pytorch W1 {api} Sending process 83 closing signal SIGTERM",
        f"job-worker-1 pytorch E1 {api} failed (exitcode: -9) local_rank: 1 (pid: 84) of binary: python",
        "job-worker-1 pytorch   rank      : 3 (local_rank: 1)",
        "job-worker-1 pytorch   exitcode  : -9 (pid: 84)",
        f"job-master-0 pytorch W1 {api} Sending process 84 closing signal SIGTERM",
    ]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [3]


def test_tests_that_all_passed_hang_no_rank(tmp_path: Path) -> None:
    barrier = "[rank0]:[E4 ProcessGroupGloo.cpp:67] [Rank 0]: Rank 2 failed to pass monitoredBarrier in 1000 ms"
    assert diagnosed(tmp_path, barrier).suspect_ranks == [2]
    assert diagnosed(tmp_path / "passed", barrier, "=== 4 passed, 1 warning in 88.15s ===").suspect_ranks == []


def test_a_file_whose_name_has_a_rank_may_have_the_lines_of_all(tmp_path: Path) -> None:
    (tmp_path / "upload_rank0.log").write_text("\n".join([*watchdog(1, 7), *watchdog(2, 7), monitor(0, 6, 6)]) + "\n")
    assert diagnosis_of(tmp_path).suspect_ranks == [0]


def test_a_rank_whose_line_has_no_peer_waits_and_is_not_accused(tmp_path: Path) -> None:
    """Ranks 2, 4 and 6 wait for rank 0, which waits in another group; rank 1 is silent."""
    data = [
        line
        for member, rank in ((1, 2), (2, 4), (3, 6))
        for line in watchdog(rank, 10, member=member, group="3", desc="data")
    ]
    stage = watchdog(0, 81, op="RECV", member=0, group="40", desc="pipeline")
    others = [line for rank in (3, 5, 7) for line in watchdog(rank, 10, member=rank, group="4", desc="other")]
    assert diagnosed(tmp_path, *data, *stage, *others, "[rank1]: step 1").suspect_ranks == [1]


@pytest.mark.parametrize(("raising", "culprits"), [((1, 2, 3), [0]), ((3,), [3])])
def test_ranks_with_another_model_than_most_are_named(
    raising: tuple[int, ...], culprits: list[int], tmp_path: Path
) -> None:
    why = "params[0] in this process with sizes [768] appears not to match sizes of the same param in process 0."
    lines = [line for rank in raising for line in traceback(f"RuntimeError: [{rank}]: {why}", f"[rank{rank}]: ")]
    assert diagnosed(tmp_path, *(f"[rank{rank}]: begins" for rank in range(4)), *lines).suspect_ranks == culprits


def test_the_size_of_a_group_is_that_of_its_gather(tmp_path: Path) -> None:
    """Only members 0 to 2 of 4 have lines: the last one has not come."""
    work = "OpType=_ALLGATHER_BASE, NumelIn=8, NumelOut=8"
    lines = [
        line.replace(work, work[:-1] + "32")
        for rank in range(3)
        for line in watchdog(rank, 5, op="_ALLGATHER_BASE", group="1", desc="shards")
    ]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [3]


def test_workers_of_a_job_with_a_master_are_numbered_apart(tmp_path: Path) -> None:
    lines = ["[pod/job-master-0/pytorch] [rank0]: step 1", "[pod/job-worker-0/pytorch] [rank1]: step 1"]
    killed = "job-worker-2    Warning   OOMKilled   container pytorch terminated"
    assert diagnosed(tmp_path, *lines, killed).suspect_ranks == [3]


def shown_by_py_spy(rank: int, place: str) -> list[str]:
    frames = [place, "backward (torch/_tensor.py:581)", "main (train.py:141)", "<module> (train.py:170)"]
    head = [f"===== rank {rank} =====", f"Process {8812 + rank}: python -u train.py", "Python v3.11.10", ""]
    thread = [f'Thread {8812 + rank} (active): "MainThread"', *(f"    {frame}" for frame in frames)]
    return [*head, *thread, f'Thread {9000 + rank} (idle): "Thread-5"', "    wait (threading.py:331)", ""]


def test_a_rank_whose_stack_is_elsewhere_than_those_of_most_is_named(tmp_path: Path) -> None:
    in_backward = "_engine_run_backward (torch/autograd/graph.py:825)"
    lines = [
        line
        for rank in range(4)
        for line in shown_by_py_spy(rank, "acquire (filelock/_api.py:341)" if rank == 2 else in_backward)
    ]
    found = diagnosed(tmp_path, *lines)
    assert found.suspect_ranks == [2]
    assert found.findings[0].text == (
        "when the user looked at its stacks, rank 0-1,3 waited in torch, and rank 2 did not, in "
        "acquire (filelock/_api.py:341)"
    )
    few = [line for rank in (1, 2) for line in shown_by_py_spy(rank, "step (train.py:5)" if rank == 2 else in_backward)]
    assert diagnosed(tmp_path / "few", *few).suspect_ranks == []


def test_stacks_that_faulthandler_prints_are_read(tmp_path: Path) -> None:
    def shown(rank: int, file: str) -> list[str]:
        frames = [f'  File "{file}", line 5 in wait', '  File "/job/train.py", line 203 in <module>']
        lines = ["Timeout (0:09:00)!", "Thread 0x00007f13a8f2d740 (most recent call first):", *frames]
        return [f"[rank{rank}]: {line}" for line in lines]

    lines = [line for rank in range(4) for line in shown(rank, "/opt/torch/cuda/__init__.py" if rank else "/job/io.py")]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [0]


def test_the_process_that_spawn_names_raised_the_exception_also_if_it_is_the_first(tmp_path: Path) -> None:
    lines = ["-- Process 0 terminated with the following error:", *traceback("ValueError: x")]
    assert diagnosed(tmp_path, "10:05 ERROR rank 2: failed", *lines, "rank=3 world_size=4").suspect_ranks == [0]


def test_a_silent_majority_with_lines_of_its_own_is_not_accused(tmp_path: Path) -> None:
    wrote = [f"[rank{rank}]:[E303 01:21:02.0 FlightRecorder.cpp:44] Finished writing" for rank in range(8)]
    lines = [line for rank in (0, 5) for line in watchdog(rank, 44)]
    found = diagnosed(tmp_path, *lines, *wrote)
    assert (found.suspect_ranks, found.findings[0].proof) == ([], "not_known")


def test_torchfrtrace_names_the_missing_rank(tmp_path: Path) -> None:
    lines = [line for rank in (0, 5) for line in watchdog(rank, 44)]
    wrote = [f"[rank{rank}]:[E303 01:21:02.0 FlightRecorder.cpp:44] Finished writing" for rank in range(8)]
    assert diagnosed(tmp_path, *lines, *wrote, "missing ranks: {6}").suspect_ranks == [6]


def test_a_watchdog_that_is_stuck_after_its_timeout_is_a_consequence(tmp_path: Path) -> None:
    stuck = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    lines = [line for rank in range(4) for line in watchdog(rank, 9)]
    assert diagnosed(tmp_path / "after", *lines, f"[rank1]:[E626 16:26:20.0 P.cpp:1743] {stuck}").suspect_ranks == []
    lines = [line for rank in (0, 2, 3) for line in watchdog(rank, 9)]
    assert diagnosed(tmp_path / "alone", f"[rank1]:[E626 16:26:20.0 P.cpp:1743] {stuck}", *lines).suspect_ranks == [1]


def test_one_rank_in_a_log_does_not_show_that_all_made_the_call(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, *watchdog(0, 165))
    assert "all ranks made the call" not in found.findings[0].text


def test_dump_signals_show_the_call_if_no_rank_has_a_line_of_its_own(tmp_path: Path) -> None:
    lines = [monitor(rank, 631 - (rank == 2), 630) for rank in range(8)]
    assert roots(diagnosed(tmp_path, *lines)) == [("missing_rank", "default_pg", 631, [2], [0, 1, 3, 4, 5, 6, 7])]


@pytest.mark.parametrize(("sizes", "named"), [((16, 8, 16, 16), [1]), ((16, 16, 16, 16), []), ((8, 16, 8, 16), [])])
def test_sends_and_receives_of_one_other_size_name_its_rank(
    sizes: tuple[int, ...], named: list[int], tmp_path: Path
) -> None:
    lines = []
    for rank, size in enumerate(sizes):
        lines += watchdog(rank, rank + 1, op="SEND" if rank == 1 else "RECV", group="3", desc="pp", size=size)
    found = diagnosed(tmp_path, *lines)
    assert (found.suspect_ranks, [one.kind for one in found.findings]) == (named, ["p2p_unmatched"])


def test_lines_after_an_exception_of_cuda_are_part_of_its_end(tmp_path: Path) -> None:
    cuda = traceback("torch.AcceleratorError: CUDA error: unspecified launch failure", "3: ")
    cuda += ["3: CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below"]
    cuda += ["3: For debugging consider passing CUDA_LAUNCH_BLOCKING=1"]
    cuda += ["3: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.", "3: "]
    steps = [f"{rank}: step {step} loss 2.{step}" for step in range(20) for rank in range(4)]
    assert diagnosed(tmp_path, *steps, *cuda).suspect_ranks == [3]


def test_the_driver_names_the_process_whose_gpu_failed(tmp_path: Path) -> None:
    made = [
        f"n1:51{rank:02}:53{rank:02} [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0 rank {rank} nranks 4 cudaDev 0 "
        "nvmlDev 0 busId 9b000 commId 0x5a - Init COMPLETE"
        for rank in range(4)
    ]
    for error, named in ((79, [2]), (45, [])):  # 45: the driver cleans up after a process that ended
        xid = f"NVRM: Xid (PCI:0000:9b:00): {error}, pid=5102, name=python, GPU has fallen off the bus."
        assert diagnosed(tmp_path / str(error), *made, xid).suspect_ranks == named


def test_ray_names_the_process_that_died_by_its_number_or_its_name(tmp_path: Path) -> None:
    died = ["ray.exceptions.ActorDiedError: The actor died", "\tpid: 16424", "\tname: wd6rCqWorkerDict_0:5"]
    died += ["The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail"]
    assert diagnosed(tmp_path / "name", *died).suspect_ranks == [5]
    said = "(RayWorkerWrapper pid=16424, ip=10.0.0.12) rank 7 in world size 8 is assigned as DP rank 0, PP rank 1"
    assert diagnosed(tmp_path / "number", said, *died).suspect_ranks == [7]


def test_time_stamps_behind_the_names_of_pods_are_labels(tmp_path: Path) -> None:
    def of_pod(number: int, second: int, text: str) -> str:
        return f"[pod/ft-worker-{number}/pytorch] 2025-11-02T07:11:{second:02}.147002577Z {text}"

    lines = [of_pod(2, 1, line) for line in traceback("ValueError: no batch", "[rank7]: ")]
    lines += [of_pod(2, 2, "failed (exitcode: 1) local_rank: 1 (pid: 62) of binary: python")]
    lines += [of_pod(0, 3, line) for line in traceback("ChildFailedError: ")] + [of_pod(0, 3, "x.py FAILED")]
    lines += [of_pod(0, 3, line) for line in summary((0, 1), (1, 1), (2, 1))]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [7]


@pytest.mark.parametrize(
    "prefix",
    ["[1,mpirank:3,algo-2]<stderr>:", "[2026-09-09T09:13:43.863000Z] 3f1c77d0 [rank=3] || "],
    ids=["sagemaker", "determined"],
)
def test_prefixes_with_the_rank_name_it(prefix: str, tmp_path: Path) -> None:
    def of_rank(rank: int, text: str) -> str:
        return prefix.replace("3]", f"{rank}]").replace("mpirank:3", f"mpirank:{rank}") + text

    steps = [of_rank(step % 4, f"step {step} loss 2.{step}") for step in range(20)]
    assert diagnosed(tmp_path, *steps, *traceback("ValueError: no batch", prefix)).suspect_ranks == [3]


def test_the_rank_in_a_prefix_of_a_node_is_not_that_of_its_processes(tmp_path: Path) -> None:
    node = "(worker1, rank=1, pid=4410, ip=10.164.0.31) "
    lines = [f"{node}[rank{rank}]: node 1 up" for rank in range(8, 16)]
    assert diagnosed(tmp_path, *lines, *traceback("ValueError: x", f"{node}[rank10]: ")).suspect_ranks == [10]


def test_a_mark_of_torch_counts_behind_a_prefix_of_no_known_form(tmp_path: Path) -> None:
    lines = [f"<pod-3> 12:00:{second:02} {line}" for second, line in enumerate(traceback("ValueError: x", "[rank3]: "))]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [3]


def test_files_that_tail_or_composer_shows_one_after_the_other_are_of_their_ranks(tmp_path: Path) -> None:
    begin, end = ("----------{} global rank {} STDERR----------".format(edge, "{}") for edge in ("Begin", "End"))
    shown = [line for rank in (4, 5) for line in (begin.format(rank), "Initializing", end.format(rank))]
    shown[4:5] = traceback("IndexError: corrupt shard")
    assert diagnosed(tmp_path / "composer", *shown).suspect_ranks == [5]
    tail = ["==> logs/rank_1.log <==", "step 1", "==> logs/rank_2.log <==", *traceback("ValueError: x")]
    assert diagnosed(tmp_path / "tail", *tail).suspect_ranks == [2]


def test_mpi_abort_names_its_rank_unless_it_had_lost_another_one(tmp_path: Path) -> None:
    abort = "6: MPI_ABORT was invoked on rank 6 in communicator MPI_COMM_WORLD"
    ready = [f"{rank}: ready" for rank in range(8)] * 3
    assert diagnosed(tmp_path / "own", *ready, abort).suspect_ranks == [6]
    lost = traceback("RuntimeError: NCCL error: remote process exited or there was a network error", "6: ")
    assert diagnosed(tmp_path / "lost", *ready, *lost, abort).suspect_ranks == []


def test_the_mapping_of_deepspeed_gives_the_rank_of_a_process_on_another_node(tmp_path: Path) -> None:
    mapping = "global_rank_mapping=defaultdict(<class 'list'>, {'w-0': [0, 1], 'w-1': [2, 3]})"
    lines = [f"w-1: [launch.py:163:main] {mapping}"] * 3
    for node in (0, 1):
        lines += [
            f"w-{node}: process {100 * node + local} spawned with command: ['python', '--local_rank={local}']"
            for local in (0, 1)
        ]
    killed = "[Wed May 20 21:22:07 2026] Out of memory: Killed process 101 (python) total-vm:412882104kB"
    assert diagnosed(tmp_path / "mapped", *lines, killed).suspect_ranks == [3]
    assert diagnosed(tmp_path / "unknown", *lines[3:], killed).suspect_ranks == []


def test_the_ranks_of_a_node_that_the_cloud_took_are_named(tmp_path: Path) -> None:
    lines = [f"[spot-{rank // 2}] rank={rank} local_rank={rank % 2}" for rank in range(8)]
    lines += ["[spot-3] node-termination-handler: Received preemption notice from metadata server"]
    assert diagnosed(tmp_path, *lines).suspect_ranks == [6, 7]


def test_an_exception_that_its_rank_survived_before_is_handled(tmp_path: Path) -> None:
    caught = [*traceback("LibError: bad sample", "[rank3] "), "[rank3] (handled, next sample used)"]
    steps = [f"step {step} loss 1.{step}" for step in range(20)]
    assert diagnosed(tmp_path, *caught, *steps, *caught, *steps, *caught, "finished: 40 steps").suspect_ranks == []


def test_a_mismatch_in_the_first_call_of_a_wrapper_names_the_odd_rank(tmp_path: Path) -> None:
    """The wrapper counts from 0."""

    def said(rank: int, other: int) -> str:
        def call(of: int) -> str:
            size = 1436 if of == 2 else 1435
            return f"CollectiveFingerPrint(SequenceNumber=0, OpType=_ALLGATHER_BASE, TensorShape=[{size}, 16])"

        text = f"Rank {rank} is running collective: {call(rank)}, but Rank {other} is running collective: {call(other)}"
        return f"[rank{rank}]: RuntimeError: Detected mismatch between collectives on ranks. {text}."

    assert diagnosed(tmp_path, *(said(rank, 0 if rank == 2 else 2) for rank in range(4))).suspect_ranks == [2]


def test_the_task_in_front_of_the_node_in_the_names_of_files_is_the_rank(tmp_path: Path) -> None:
    clients = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined."
    (tmp_path / "task_0_c101.log").write_text(f"SLURM_PROCID=0 SLURM_NTASKS=4\n{clients}\n")
    for rank in (1, 2):
        (tmp_path / f"task_{rank}_c10{rank}.log").write_text(f"SLURM_PROCID={rank} SLURM_NTASKS=4\nimporting\n")
    (tmp_path / "task_3_c103.log").write_text("slurmstepd: error: couldn't start container\n")
    assert diagnosis_of(tmp_path).suspect_ranks == [3]


@pytest.mark.parametrize(("code", "named"), [(-6, []), (-9, [1])])
def test_a_child_of_lightning_that_torch_aborted_is_not_accused(code: int, named: list[int], tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in watchdog(rank, 21877)]
    child = f"[rank: 1] Child process with PID 88123 terminated with code {code}. Forcefully terminating all others"
    assert diagnosed(tmp_path, *lines, child).suspect_ranks == named


def test_the_stack_of_a_process_is_of_the_rank_in_its_variables(tmp_path: Path) -> None:
    def stack(rank: int, file: str) -> list[str]:
        lines = [f"Process 7011{rank}: python -u train.py (RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=4)"]
        lines += ["Python v3.11.11 (/usr/bin/python3.11)", f'Thread 7011{rank} (active): "MainThread"']
        return [*lines, f"    wait ({file}:2632)", "    main (train.py:122)", "    <module> (train.py:141)"]

    files = ["data/loader.py" if rank == 2 else "torch/distributed/distributed_c10d.py" for rank in range(4)]
    assert diagnosed(tmp_path, *(line for rank in range(4) for line in stack(rank, files[rank]))).suspect_ranks == [2]


def test_the_only_node_without_a_line_is_the_one_that_failed(tmp_path: Path) -> None:
    marked = [f"{rank // 2}: [rank{rank}]: step 1" for rank in (0, 1, 3, 2, 6, 7)]
    ended = [f"srun: error: c{node}: task {node}: Terminated" for node in (0, 1, 3)]
    torchrun = "0: failed (exitcode: 1) local_rank: 0 (pid: 62) of binary: python"
    assert diagnosed(tmp_path, *marked, torchrun, "srun: error: Node failure on c2", *ended).suspect_ranks == [4, 5]


@pytest.mark.parametrize("end", ["", "x1e30, OpType=ALLREDUCE)", "-7)"])
def test_a_rank_whose_line_is_cut_is_not_silent(tmp_path: Path, end: str) -> None:
    """The status line after it says that its watchdog ended it, too."""
    lines = [watchdog(rank, 9, op="BROADCAST" if rank == 2 else "ALLREDUCE") for rank in range(3)]
    lines[1][0] = lines[1][0].partition("9, OpType")[0] + end
    assert 1 not in diagnosed(tmp_path, *chain(*lines)).suspect_ranks


def test_a_log_with_some_nul_bytes_is_read(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in watchdog(rank, 9, op="BROADCAST" if rank == 1 else "ALLREDUCE")]
    lines.insert(2, "step 5 \0\0\0 loss 0.3")
    assert diagnosed(tmp_path, *lines).suspect_ranks == [1]
