"""Jobs with the faults that users make are diagnosed while they hang, and from what they leave."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from crossrank.recording import DIAGNOSING, FLIGHT, file_name
from tests.integration import forked_jobs, jobs
from tests.integration.commands import Commands
from tests.integration.fork_server import ROOT
from tests.integration.forked_jobs import Job, wait_until
from tests.integration.live_fault import DEVICE, Fault
from tests.integration.live_faults import BY_NAME, FAULTS, LATE, LONG_EVALUATION, SLOW_RANK
from tests.integration.traces import load

pytestmark = pytest.mark.touches("tools", traced=False)


def start(fault: Fault, folder: Path, delay: float = 0.0) -> Job:
    return forked_jobs.start("tests.integration.live_faults", fault.name, folder, fault.ranks, delay=delay)


@contextmanager
def running(fault: Fault, folder: Path, delay: float = 0.0) -> Iterator[Job]:
    job = start(fault, folder, delay)
    try:
        yield job
    finally:
        job.kill()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_diagnosed(fault: Fault, tmp_path: Path, command: Commands) -> None:
    wrong = {}
    with ExitStack() as stack:
        attempts = [stack.enter_context(running(fault, tmp_path / f"{delay}", delay)) for delay in fault.delays]
        for delay, job in zip(fault.delays, attempts, strict=True):
            for moment in moments_to_look(job, fault):
                wrong[moment, delay] = complaints(fault, job, command)
                if DEVICE == "cuda":
                    wrong[moment, delay] += complaints_about_parts(fault, job, tmp_path / f"{delay} {moment}", command)
    assert not any(wrong.values()), "\n".join(
        f"{moment}, terminated after {delay} s: {line}" for (moment, delay), lines in wrong.items() for line in lines
    )


def moments_to_look(job: Job, fault: Fault) -> Iterator[str]:
    """When a user asks what is wrong: while the job hangs, where it does, and when it is dead."""
    if fault.gives_up_after is not None:
        wait_until(lambda: trains(job, fault), "the job records no calls")
        time.sleep(fault.gives_up_after)
        job.terminate()
    elif fault.hangs:
        wait_until(lambda: job.is_over() or hangs(job, fault), "the job neither ends nor notices that it hangs")
        if not job.is_over():
            yield "while it hangs"
            job.terminate()
    job.wait_until_over()
    yield "when it is dead"


def test_a_fault_under_torchrun_itself_is_diagnosed(tmp_path: Path, command: Commands) -> None:
    fault = BY_NAME["raises_between_collectives"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={fault.ranks}"]
    ended = jobs.run([*torchrun, "-m", "tests.integration.live_faults", fault.name, tmp_path], ROOT)
    assert ended.returncode == 1
    assert complaints(fault, Job(tmp_path), command) == []


def test_a_late_rank_is_reported_until_it_arrives(tmp_path: Path, command: Commands) -> None:
    with running(LATE, tmp_path) as job:
        wait_until(lambda: hangs(job, LATE), "the job does not notice that it hangs")
        assert complaints(LATE, job, command) == []
        job.go_on()
        job.wait_until_over()
        command("diagnose", job.recording)


def test_ranks_that_compute_for_long_are_healthy(tmp_path: Path, command: Commands) -> None:
    with running(LONG_EVALUATION, tmp_path) as job:
        wait_until(lambda: hangs(job, LONG_EVALUATION), "no rank notices that it does not communicate")
        command("diagnose", job.recording)
        job.go_on()
        job.wait_until_over()
        command("diagnose", job.recording)


def test_a_job_with_a_slow_rank_is_healthy(tmp_path: Path, command: Commands) -> None:
    with running(SLOW_RANK, tmp_path) as job:
        wait_until(lambda: trains(job, SLOW_RANK), "the job records no calls")
        # Its comms files are all there is of a job that trains, and may end at different calls.
        command("diagnose", job.recording)
        job.go_on()
        job.wait_until_over()
        command("diagnose", job.recording)
        assert not any("no communication" in log for log in job.logs())


def test_no_rank_is_accused_if_a_healthy_job_is_cancelled(tmp_path: Path, command: Commands) -> None:
    with running(SLOW_RANK, tmp_path, 3) as job:
        wait_until(lambda: trains(job, SLOW_RANK), "the job records no calls")
        job.terminate()
        job.wait_until_over()
        assert json.loads(command.ended("diagnose", job.recording, "--json")[1])["suspect_ranks"] == []


def trains(job: Job, fault: Fault) -> bool:
    return all(len(job.recorded(rank)) >= 3 for rank in range(fault.ranks))


def hangs(job: Job, fault: Fault) -> bool:
    """Whether every rank that still runs has written down where it is."""
    running = [rank for rank, code in enumerate(job.codes()) if code is None]
    return all(rank in fault.cannot_dump or job.has_noticed_a_hang(rank) for rank in running)


def complaints(fault: Fault, job: Job, command: Commands) -> list[str]:
    """What `crossrank diagnose` says of the job that is not true, or leaves out."""
    code, text, _ = command.ended("diagnose", job.recording)
    diagnosis = json.loads(command.ended("diagnose", job.recording, "--json")[1])
    found = [] if code == 1 else [f"exit code {code}, verdict {diagnosis['verdict']}"]
    without_dump = {rank for rank in range(fault.ranks) if not job.dump(rank).exists()}
    owed = () if fault.by_majority and not most_came_to_their_last_call(fault, job) else fault.culprits
    return found + list(untrue(fault, diagnosis, without_dump, owed)) + list(not_shown(fault, diagnosis, text))


def accused_by_logs(fault: Fault, job: Job, command: Commands) -> list[str]:
    """What `crossrank diagnose` says of an innocent rank from what the ranks have printed alone."""
    logs = [log for log in sorted(job.folder.glob("rank-*.log")) if log.stat().st_size]
    if not logs:
        return []
    diagnosis = json.loads(command.ended("diagnose", *logs, "--json")[1])
    innocent = sorted(set(diagnosis["suspect_ranks"]) & fault.innocent)
    found = [f"the logs accuse rank {innocent}: {diagnosis['findings']}"] if innocent else []
    return found + ["the logs prove that all is well"] * (diagnosis["verdict"] == "ok")


def complaints_about_parts(fault: Fault, job: Job, folder: Path, command: Commands) -> list[str]:
    """What `crossrank diagnose` says that is not true where it has torch's dumps alone, our records alone, or nothing
    of one rank. It may say less than it says of all files, but never that nothing is wrong."""
    found = []
    for name, part in parts_of(job, fault, folder):
        code, said, _ = command.ended("diagnose", part, "--json")
        if code == 2 and name == "torch's dumps":  # they hold nothing: nobody came to a first call
            continue
        diagnosis = json.loads(said)
        without_dump = {rank for rank in range(fault.ranks) if not (part / file_name(FLIGHT, rank)).exists()}
        if innocent := sorted(accused(roots_of(diagnosis), without_dump) & fault.innocent):
            found.append(f"{name}: accuses rank {innocent}, who are innocent: {diagnosis['findings']}")
        if code != 1 and not (name == "torch's dumps" and "communicator" in str(diagnosis["notes"])):
            found.append(f"{name}: exit code {code}, verdict {diagnosis['verdict']}")
    return found


def parts_of(job: Job, fault: Fault, folder: Path) -> Iterator[tuple[str, Path]]:
    """Copies of a recording that lack something, and what they have."""
    ranks = [rank for rank in range(fault.ranks) if job.dump(rank).exists()]
    dumps = {job.dump(rank).name: load(job.recording, FLIGHT, rank) for rank in ranks}
    # torch writes its own in a hang. Of ranks that are ended while they train, the first that is dumped lacks a call.
    if all(dump["crossrank"]["reason"] == "hang" for dump in dumps.values()):
        for name, dump in dumps.items():
            write_json(folder / "torch" / name, {key: value for key, value in dump.items() if key != "crossrank"})
        yield "torch's dumps", folder / "torch"
    shutil.copytree(job.recording, folder / "ours", ignore=shutil.ignore_patterns("*.part", f"{DIAGNOSING}*"))
    for name, dump in dumps.items():
        write_json(folder / "ours" / name, {"version": dump["version"], "entries": [], "crossrank": dump["crossrank"]})
    yield "our records", folder / "ours"
    for rank in {*fault.culprits[:1], *sorted(fault.innocent)[-1:]}:
        part = folder / f"without {rank}"
        others = shutil.ignore_patterns("*.part", f"{DIAGNOSING}*", f"rank-{rank}.*", "verdict.json")
        shutil.copytree(job.recording, part, ignore=others)
        yield f"without rank {rank}", part


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress(json.dumps(content).encode()))


def roots_of(diagnosis: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Kind and culprits of each root finding."""
    return sorted({(finding["kind"], *finding["culprit_ranks"]) for finding in diagnosis["findings"]})


def accused(roots: list[tuple[Any, ...]], without_dump: set[int]) -> set[int]:
    """That a rank left no dump is a fact where it left none, not an accusation."""
    return {rank for kind, *ranks in roots for rank in ranks if kind != "dump_missing" or rank not in without_dump}


def most_came_to_their_last_call(fault: Fault, job: Job) -> bool:
    calls = [len(job.recorded(rank)) for rank in range(fault.ranks) if rank not in fault.culprits]
    return calls.count(max(calls)) > fault.ranks / 2


def untrue(fault: Fault, diagnosis: dict[str, Any], without_dump: set[int], owed: tuple[int, ...]) -> Iterator[str]:
    """What is not true, and which of the culprits that the recording can show, `owed`, is not named."""
    roots = roots_of(diagnosis)
    named = {rank for kind, *ranks in roots if kind in fault.kinds for rank in ranks}
    standing = {
        rank
        for finding in diagnosis["findings"]
        for rank in finding["culprit_ranks"] + finding["waiting_ranks"] + [place["rank"] for place in finding["places"]]
    }
    if innocent := sorted(accused(roots, without_dump) & fault.innocent):
        yield f"accuses rank {innocent}, who are innocent: {roots}"
    if missed := sorted(set(owed) - named):
        yield f"does not name rank {missed} for {' or '.join(fault.kinds)}: {roots}"
    if overlooked := sorted(set(fault.involved) - standing):
        yield f"says nothing of rank {overlooked}: {roots}"
    if strange := sorted({kind for kind, *_ in roots} - set(fault.kinds)):
        said = [finding["text"] for finding in diagnosis["findings"] if finding["kind"] in strange]
        yield f"finds {', '.join(strange)}, which it is not: {said}"


def not_shown(fault: Fault, diagnosis: dict[str, Any], text: str) -> Iterator[str]:
    if DEVICE == "cuda" and not fault.line_with_nccl:
        return
    places = json.dumps([diagnosis["findings"], diagnosis["notes"]])
    for lines in fault.lines():
        for where, shown in (("text", text), ("JSON", places)):
            if lines and not any(line in shown for line in lines):
                yield f"the {where} does not show {' or '.join(lines)}"
