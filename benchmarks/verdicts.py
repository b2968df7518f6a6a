"""How often the diagnosis is right about jobs that it was not tuned to.

    python -m benchmarks.verdicts FOLDER -o RESULTS [NAME …] [--jobs 2] [--limit 3] [--busy 2]

FOLDER has a script `NAME.py` and its truth `NAME.json` for each job. Each script runs under torchrun and crossrank,
`--jobs` of them at a time, next to `--busy` processes that only use a CPU. A job with a fault is diagnosed while it
hangs, else when it is over; then once more without the files of one innocent rank. A healthy job runs with
`TRACING_ON_HANG=abort`, and has to end well. A truth has

    healthy      whether the job ends well by itself
    ranks        how many the job has
    culprits     ranks that have the fault
    also_right   other sets of ranks that may be named
    line         a part of the source line that has to be shown, or null
    hangs        whether a job with a fault has to be ended from outside

RESULTS keeps for each job its recording, its log and the diagnoses.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossrank.recording import DIAGNOSING, VERDICT

BEGIN_SECONDS = 90
"""How long a job may take until it hangs."""
ANSWERS = ("exact", "useful", "nobody", "innocent", "ok", "no recording")


@dataclass(frozen=True)
class Task:
    script: Path
    truth: dict[str, Any]
    results: Path
    limit: float

    @property
    def name(self) -> str:
        return self.script.stem

    @property
    def recording(self) -> Path:
        return self.results / "recording"


@dataclass(frozen=True)
class Result:
    task: Task
    answer: str
    """One of `ANSWERS`, or of a healthy job `well`, `ended` or `failed`."""
    said: str
    line: bool | None = None
    """Whether the line of the truth is shown; None if it has none."""
    without_files: str | None = None
    """The answer without the files of one innocent rank."""
    called_a_hang: bool = False

    @property
    def is_odd(self) -> bool:
        """Whether it is worth a line."""
        if self.task.truth["healthy"]:
            return self.answer != "well" or self.called_a_hang or not self.said.endswith("ok")
        right = {self.answer, self.without_files or "exact"} == {"exact"}
        return not right or self.line is False or self.said.startswith("when")


def start(task: Task) -> subprocess.Popen[bytes]:
    shutil.rmtree(task.results, ignore_errors=True)
    task.results.mkdir(parents=True)
    environment = os.environ | {
        "TRACING": "ALL",
        "TRACING_DIR": str(task.recording),
        "TRACING_HANG_SECONDS": f"{task.limit:g}",
        "OMP_NUM_THREADS": "1",
    }
    if task.truth["healthy"]:
        environment["TRACING_ON_HANG"] = "abort"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={task.truth['ranks']}",
    ]
    with Path(task.results, "log").open("wb") as log:
        return subprocess.Popen(
            [*torchrun, "-m", "crossrank.instrument", str(task.script)],
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=task.results,
        )


def end(job: subprocess.Popen[bytes]) -> None:
    """As a user would: torchrun is terminated, and what is left after that is killed."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            pass
    members = subprocess.run(["pgrep", "-s", str(job.pid)], capture_output=True, text=True, check=False).stdout.split()
    for pid in map(int, members):
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
    job.wait()


def has_verdict(task: Task) -> bool:
    """Whether the job has said what it finds of itself."""
    return Path(task.recording, VERDICT).exists()


def wait_for_verdict(task: Task, job: subprocess.Popen[bytes]) -> bool:
    """Whether the job hangs, and says so; False if it is over, or says nothing for long."""
    begin = time.monotonic()
    while time.monotonic() < begin + BEGIN_SECONDS and job.poll() is None:
        if has_verdict(task):
            # A rank that wakes up later may change it: a user looks after some seconds.
            time.sleep(2 * task.limit)
            return job.poll() is None
        time.sleep(0.2)
    return job.poll() is None


def diagnose(recording: Path, said: Path) -> dict[str, Any] | None:
    """The diagnosis of a recording; its text is kept in `said`."""
    command = [sys.executable, "-m", "crossrank", "diagnose", str(recording)]
    text = subprocess.run(command, capture_output=True, text=True, check=False)
    said.write_text(text.stdout + text.stderr)
    diagnosis = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False).stdout
    said.with_suffix(".json").write_text(diagnosis)
    try:
        found: dict[str, Any] = json.loads(diagnosis)
    except ValueError:
        return None
    return found


def judged(truth: dict[str, Any], diagnosis: dict[str, Any] | None, missing: int | None = None) -> str:
    """One of `ANSWERS`. A rank whose files are missing is named as such, which is no accusation."""
    if diagnosis is None:
        return "no recording"
    named = set(diagnosis["suspect_ranks"]) - {missing}
    right = [set(truth["culprits"]), *map(set, truth.get("also_right", []))]
    if named in right and (named or diagnosis["verdict"] != "ok"):
        return "exact"
    if diagnosis["verdict"] == "ok":
        return "ok"
    if not named:
        return "nobody"
    return "useful" if any(named <= ranks for ranks in right) else "innocent"


def shows_line(task: Task, text: str) -> bool | None:
    wanted = task.truth.get("line")
    if not wanted:
        return None
    lines = task.script.read_text().splitlines()
    places = [f"{task.script.name}:{number}" for number, line in enumerate(lines, 1) if wanted in line]
    return any(re.search(re.escape(place) + r"\b", text) for place in places)


def faulty(task: Task) -> Result:
    job = start(task)
    text, said = task.results / "said.txt", ""
    diagnosis: dict[str, Any] | None = None
    answer = None
    if task.truth.get("hangs", True) and wait_for_verdict(task, job):
        diagnosis = diagnose(task.recording, text)
        answer = judged(task.truth, diagnosis)
    else:
        try:
            job.wait(BEGIN_SECONDS)
        except subprocess.TimeoutExpired:
            said = "does not end; "
    end(job)
    afterwards = diagnose(task.recording, task.results / "afterwards.txt")
    if answer is None:
        answer, diagnosis, text = judged(task.truth, afterwards), afterwards, task.results / "afterwards.txt"
    elif (then := judged(task.truth, afterwards)) != answer:
        said = f"when it is dead {then}; "
    verdict = diagnosis and f"{diagnosis['verdict']} {diagnosis['proof']} {diagnosis['suspect_ranks']}"
    return Result(
        task,
        answer,
        f"{said}{verdict}, true {task.truth['culprits']}",
        shows_line(task, text.read_text()),
        without_one(task),
    )


def without_one(task: Task) -> str | None:
    """What is said without the files of one rank that did nothing wrong."""
    named = {*task.truth["culprits"], *(rank for ranks in task.truth.get("also_right", []) for rank in ranks)}
    innocent = sorted(set(range(task.truth["ranks"])) - named)
    if not innocent or not task.truth["culprits"]:
        return None
    part = task.results / "without-one"
    missing = innocent[len(task.name) % len(innocent)]
    shutil.copytree(task.recording, part, ignore=shutil.ignore_patterns(f"rank-{missing}.*", f"{DIAGNOSING}*", VERDICT))
    return judged(task.truth, diagnose(part, task.results / "without.txt"), missing)


def healthy(task: Task) -> Result:
    job = start(task)
    try:
        code = job.wait(4 * BEGIN_SECONDS)
    except subprocess.TimeoutExpired:
        code = -1
    end(job)
    log = Path(task.results, "log").read_text(errors="replace")
    diagnosis = diagnose(task.recording, task.results / "said.txt")
    verdict = "no recording" if diagnosis is None else str(diagnosis["verdict"])
    called = "the job hangs" in log
    by_crossrank = "exit code 79" in log or "exitcode  : 79" in log
    answer = "well" if code == 0 else "ended" if by_crossrank else "failed"
    return Result(task, answer, f"code {code}, verdict afterwards {verdict}", called_a_hang=called)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that only use a CPU."""
    loops = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def _loop() -> None:
    while True:
        pass


def table(results: list[Result]) -> str:
    faults = [result for result in results if not result.task.truth["healthy"]]
    well = [result for result in results if result.task.truth["healthy"]]
    lines = []
    if faults:
        count = Counter(result.answer for result in faults)
        without = Counter(result.without_files for result in faults if result.without_files)
        shown = Counter(result.line for result in faults if result.line is not None)
        head = "| | jobs | " + " | ".join(ANSWERS) + " |"
        lines += [head, "|---" * (len(ANSWERS) + 2) + "|"]
        for name, counts in (("faults", count), ("without the files of one innocent rank", without)):
            lines.append(
                f"| {name} | {sum(counts.values())} | " + " | ".join(str(counts[one]) for one in ANSWERS) + " |"
            )
        lines.append(f"\nline of the culprit shown: {shown[True]} of {sum(shown.values())}")
    if well:
        count = Counter(result.answer for result in well)
        called = sum(result.called_a_hang for result in well)
        odd = sum(not result.said.endswith("afterwards ok") for result in well)
        lines.append(
            f"healthy jobs: {len(well)}, ended by crossrank {count['ended']}, failed otherwise {count['failed']}, "
            f"called a hang {called}, verdict afterwards not ok {odd}"
        )
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("names", nargs="*")
    options.add_argument("-o", "--output", type=Path, required=True)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--limit", type=float, default=3.0)
    options.add_argument("--busy", type=int, default=0)
    given = options.parse_args()
    tasks = [
        Task(script.resolve(), truth, given.output.resolve() / script.stem, given.limit)
        for script in sorted(given.folder.glob("*.py"))
        if script.with_suffix(".json").exists() and (not given.names or script.stem in given.names)
        for truth in [json.loads(script.with_suffix(".json").read_text())]
    ]
    results = []
    with busy(given.busy), ThreadPoolExecutor(given.jobs) as pool:
        for result in pool.map(lambda task: healthy(task) if task.truth["healthy"] else faulty(task), tasks):
            results.append(result)
            line = {None: "", True: ", line shown", False: ", line not shown"}[result.line]
            without = result.without_files and f", without one {result.without_files}"
            if result.is_odd:
                print(f"{result.answer:9} {result.task.name}: {result.said}{line}{without or ''}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
