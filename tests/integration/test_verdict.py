"""The verdict of a hang stands in the training log while the job hangs."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import msgspec
import pytest

from crossrank.instrument.hang.answers import EXIT_CODE
from crossrank.recording import CommsFile
from tests.integration import jobs
from tests.integration.jobs import Scripts

pytestmark = pytest.mark.touches("tools/analysis/diagnosis")

JOB = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import crossrank

dist.init_process_group("gloo")
rank = dist.get_rank()
crossrank.enable(node=f"node-{rank % int(os.environ['NODES'])}")

def train_step():
    dist.all_reduce(torch.ones(8))

def look_elsewhere():
    until = time.monotonic() + 60
    while not os.path.exists("release") and time.monotonic() < until:
        time.sleep(0.05)

for _ in range(3):
    train_step()
"""
ABSENT = """
if rank == {absent}:
    {instead}
train_step()
dist.barrier()
sys.stdout.write(f"rank {{rank}} trained\\n")
"""


def run(folder: Path, source: str, **variables: str) -> jobs.EndedRanks:
    """Run two ranks; those that hang are released once there is a verdict."""
    recording = folder / "recording"

    def release() -> None:
        until = time.monotonic() + 60
        while not (recording / "verdict.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)  # what was found is printed
        (folder / "release").touch()

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    script = jobs.write_script(folder, JOB + source)
    variables = {"TRACING_DIR": str(recording), "TRACING_HANG_SECONDS": "1.5", "NODES": "1"} | variables
    result = jobs.ranks(folder, script, **variables)
    thread.join()
    return result


def verdict_of(folder: Path) -> tuple[str, list[int]]:
    found = msgspec.json.decode((folder / "recording" / "verdict.json").read_bytes())
    return found["verdict"], found["suspect_ranks"]


@pytest.mark.parametrize("buffer", ["2000", "0"], ids=["", "without torch's recorder"])
def test_the_log_reports_the_late_rank_and_training_recovers(buffer: str, tmp_path: Path) -> None:
    source = ABSENT.format(absent=1, instead="look_elsewhere()")
    source += "for _ in range(40):\n    train_step()\n    time.sleep(0.05)\n"
    ended = run(tmp_path, source, TORCH_FR_BUFFER_SIZE=buffer)
    assert ended.codes == [0, 0], ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 trained", "rank 1 trained"]
    late = r"crossrank: rank 0 waits in all_reduce #4 for rank 1, which wakes up now and then in look_elsewhere "
    late += r"\(\S+\), with \S+ % of a CPU: "
    late += r"no communication on rank 0 for (\d+\.?\d*) s\. Verdict \((\S+)\):\n"
    seconds, verdict, text = re.split(late, ended.stderr)[1:]
    assert 1.5 <= float(seconds) < 10
    assert verdict == f"{tmp_path}/recording/verdict.json"
    assert "missing_rank: a rank has not made a collective, and other ranks wait in it" in text
    assert "culprit      rank 1\n" in text
    assert "waiting      rank 0\n" in text
    assert "all_reduce #4 of group default_pg [0] (rank 0-1)" in text
    assert "the job hangs" not in ended.stderr
    assert verdict_of(tmp_path) == ("over", [1])
    assert ended.stderr.count("crossrank: communication continues, so the verdict above no longer applies") == 1


RESUME = """
def resume():
    look_elsewhere()
    with open("rank-0") as process:
        os.kill(int(process.read()), signal.SIGCONT)

if rank == 1:
    threading.Thread(target=resume).start()
else:
    with open("rank-0", "w") as process:
        process.write(str(os.getpid()))
"""


def test_another_rank_reports_if_rank_0_is_silent(tmp_path: Path) -> None:
    source = RESUME + ABSENT.format(absent=0, instead="os.kill(os.getpid(), signal.SIGSTOP)")
    ended = run(tmp_path, source)
    assert ended.codes == [0, 0], ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 trained", "rank 1 trained"]
    assert ended.stderr.count("crossrank: rank 1 waits in all_reduce #4 for rank 0, which is stopped (process ") == 1
    assert "no communication on rank 1 for " in ended.stderr
    assert verdict_of(tmp_path) == ("over", [0])


def test_abort_ends_a_hung_job_after_the_verdict_so_the_launcher_restarts_it(tmp_path: Path) -> None:
    receive = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.recv(torch.empty(8), 0)'
    source = ABSENT.format(absent=1, instead=receive)
    # A gloo group finds the addresses of the last attempt in the launcher's own store.
    own_store = "init_method=f\"file://{os.getcwd()}/store-{os.environ['TORCHELASTIC_RESTART_COUNT']}\", "
    own_store += 'rank=int(os.environ["RANK"]), world_size=2'
    script = jobs.write_script(tmp_path, JOB.replace('"gloo")', f'"gloo", {own_store})') + source)
    variables = {"TRACING_HANG_SECONDS": "1.5", "TRACING_ON_HANG": "abort", "TRACING_DIR": "recording", "NODES": "1"}
    result = jobs.torchrun(tmp_path, script, "--max-restarts=1", ranks=2, **variables)
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall("rank . trained", result.stdout)) == ["rank 0 trained", "rank 1 trained"]
    hang, end = (result.stderr.index(text) for text in ("the job hangs", f"rank 0 ends with exit code {EXIT_CODE}"))
    assert hang < result.stderr.index("rank 1 waits for 0 in default_pg [0] recv #1") < end
    assert f"failed (exitcode: {EXIT_CODE})" in result.stderr
    for rank in (0, 1):
        file = CommsFile(str(tmp_path / "recording" / "earlier-1" / f"rank-{rank}.comms.jsonl.zst"))
        assert len(list(file.records())) == 4
        assert file.end is not None
        assert file.end["reason"] == "abort"
    assert (tmp_path / "recording" / "earlier-1" / "verdict.json").exists()


RELEASED = """
import subprocess
from concurrent.futures import ThreadPoolExecutor

def release():
    \"\"\"Wait in a lock for a thread without a line of this script, as if no other thread could end the wait.\"\"\"
    looks = subprocess.Popen(["sh", "-c", "until test -e release; do sleep 0.05; done"])
    ThreadPoolExecutor().submit(looks.wait).result()
    dist.send(torch.ones(8), 1)

if rank == 0:
    threading.Thread(target=release).start()
else:
    dist.recv(torch.empty(8), 0)
train_step()
sys.stdout.write(f"rank {rank} trained\\n")
time.sleep(5)
"""


def test_a_rank_that_moves_before_the_end_withdraws_the_decision(tmp_path: Path) -> None:
    ended = run(tmp_path, RELEASED, TRACING_ON_HANG="abort")
    assert ended.codes == [0, 0], ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 trained", "rank 1 trained"]
    for rank in (0, 1):
        assert f"rank {rank} ends with exit code {EXIT_CODE} because the job hangs" in ended.stderr
        assert f"rank {rank} does not end: a rank of the hang moves again" in ended.stderr


def test_a_late_rank_ends_no_job_at_the_limit(tmp_path: Path) -> None:
    ended = run(tmp_path, ABSENT.format(absent=1, instead="look_elsewhere()"), TRACING_ON_HANG="abort")
    assert ended.codes == [0, 0], ended.stderr
    assert "ends with exit code" not in ended.stderr


def test_a_rank_that_does_nothing_ends_the_job_after_the_late_seconds(tmp_path: Path) -> None:
    source = ABSENT.format(absent=1, instead="time.sleep(60)")
    ended = run(tmp_path, source, TRACING_ON_HANG="abort", TRACING_LATE_SECONDS="4")
    assert ended.codes == [EXIT_CODE, EXIT_CODE], ended.stderr
    why = "rank 0 waits in all_reduce #4 for rank 1, which is blocked in nanosleep() in <module> "
    assert f"rank 1 ends with exit code {EXIT_CODE} because {why}" in ended.stderr


EARLY_RECEIVE = """
receive = dist.irecv(torch.empty(8), 1 - rank)
look_elsewhere()
send = dist.isend(torch.ones(8), 1 - rank)
receive.wait()
send.wait()
"""
BESIDE_COMPUTATION = """
work = dist.all_reduce(torch.ones(8), async_op=True) if rank == 0 else None
look_elsewhere()
work.wait() if work is not None else train_step()
"""


@pytest.mark.parametrize("kernel", ["compiled", "python"])
@pytest.mark.parametrize(
    "silence",
    ["look_elsewhere()\n", EARLY_RECEIVE, BESIDE_COMPUTATION],
    ids=["idle", "early receive", "asynchronous"],
)
def test_silence_without_a_wait_is_not_a_hang_and_ends_no_rank(silence: str, kernel: str, tmp_path: Path) -> None:
    source = f"{silence}train_step()\nsys.stdout.write('trained\\n')\n"
    ended = run(tmp_path, source, TRACING_ON_HANG="abort", TRACING_RECORDER=kernel)
    assert (ended.codes, ended.stdout.count("trained\n")) == ([0, 0], 2), ended.stderr
    assert "the job hangs" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("crossrank: no communication")]
    assert len(lines) == 1
    assert lines[0].endswith("has the last calls of every rank (verdict: ok)")


@pytest.mark.parametrize("kernel", ["compiled", "python"])
def test_a_rank_that_waits_on_its_own_work_waits_for_the_sender(kernel: str, tmp_path: Path) -> None:
    source = """
receive = dist.irecv(torch.empty(8), 0) if rank == 1 else None
receive.wait() if receive is not None else look_elsewhere()
if rank == 0:
    dist.send(torch.ones(8), 1)
"""
    ended = run(tmp_path, source, TRACING_RECORDER=kernel)
    assert ended.codes == [0, 0], ended.stderr
    assert (
        ended.stderr.count(
            "crossrank: rank 1 waits in recv #1 for rank 0, which wakes up now and then in look_elsewhere ("
        )
        == 1
    )
    assert re.search(r"p2p_unmatched.*culprit +rank 0\n +waiting +rank 1\n", ended.stderr, re.DOTALL), ended.stderr


def test_a_rank_that_polls_its_work_runs(tmp_path: Path) -> None:
    source = """
if rank == 0:
    look_elsewhere()
work = dist.all_reduce(torch.ones(8), async_op=True)
while not work.is_completed():
    time.sleep(0.01)
"""
    ended = run(tmp_path, source, TRACING_ON_HANG="abort")
    assert ended.codes == [0, 0], ended.stderr
    assert verdict_of(tmp_path) == ("ok", [])


def test_ranks_without_a_shared_folder_are_not_accused(tmp_path: Path) -> None:
    job = JOB.replace("crossrank.enable(", 'crossrank.enable(directory=f"recording/{rank}", ')
    script = jobs.write_script(tmp_path, job + ABSENT.format(absent=1, instead="time.sleep(5)"))
    variables = {"TRACING_HANG_SECONDS": "1", "TRACING_ON_HANG": "abort", "NODES": "2"}
    result = jobs.ranks(tmp_path, script, **variables)
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("crossrank: no communication"))
    assert f"{tmp_path}/recording/0 has no files of rank 1: copy the files of the other nodes" in line
    assert "the job hangs" not in result.stderr


def test_a_failed_diagnosis_prints_one_line(tmp_path: Path) -> None:
    job = JOB + "sys.executable = '/nowhere/python'\n" + ABSENT.format(absent=1, instead="time.sleep(6)")
    script = jobs.write_script(tmp_path, job)
    result = jobs.ranks(tmp_path, script, TRACING_HANG_SECONDS="1", NODES="1")
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("crossrank: no communication"))
    assert "crossrank could not diagnose it here (FileNotFoundError: " in line
    assert "`crossrank diagnose " in line


def test_on_hang_accepts_only_warn_and_abort(scripts: Scripts) -> None:
    result = scripts(TRACING_ON_HANG="kill").python("crossrank.enable()")
    assert result.stderr == "crossrank: tracing is off: TRACING_ON_HANG='kill' is not one of warn, abort\n"
