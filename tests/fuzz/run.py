"""Runs mutated files through targets, and says what came of each."""

from __future__ import annotations

import contextlib
import io
import re
import resource
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from crossrank.errors import CrossrankError
from crossrank.tools.cli import main
from tests.fuzz import mutate
from tests.fuzz.targets import TARGETS, Target

MOST_BYTES = 1_000_000
"""Larger files may take longer."""
MOST_SECONDS = 10
MOST_KB = 500_000
_MOST_ADDRESSES = 6 << 30
"""Bytes that the process may reserve while it reads inputs: one allocation can be larger than the machine."""
_NO_MEMORY = ("not enough memory", "more memory than is available")
_RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")
"""Characters that steer a terminal."""
_CTRL_C = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C ended."""


@dataclass(frozen=True)
class Finding:
    """An input that did not end as it should."""

    target: Target
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.target.name} ({self.target.file}), input {self.number}: {self.what}"


@dataclass
class Outcome:
    """What came of the inputs of one target."""

    target: Target
    counts: Counter[str] = field(default_factory=Counter)
    """By exit code of a command; `read` and `refused` of a reader."""
    findings: list[Finding] = field(default_factory=list)


class _TooSlowError(BaseException):
    """An input took its time of a processor."""


@dataclass
class Fuzzer:
    """Targets in one workspace. The `number`-th input of a target depends on the seed alone."""

    folder: Path
    seed: int = 0
    targets: Sequence[Target] = TARGETS
    keep: Path | None = None
    """Where inputs go that are findings."""
    tell: Callable[[Finding], None] = lambda finding: None
    """Gets each finding at once."""
    outcomes: list[Outcome] = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = [Outcome(target) for target in self.targets]
        self._originals = {target.file: (self.folder / target.file).read_bytes() for target in self.targets}
        self._start_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(self, seconds: float, inputs: int | None = None) -> None:
        """Rounds over all targets until the time, or the number of inputs of all together, is used up."""
        end = time.monotonic() + seconds
        done = 0
        with _cpu_alarm(), _limited_memory():
            for first in range(1 << 30):
                for outcome in self.outcomes:
                    for number in range(first * outcome.target.weight, (first + 1) * outcome.target.weight):
                        if time.monotonic() > end or (inputs is not None and done >= inputs):
                            return
                        self.one(outcome, number)
                        done += 1

    def one(self, outcome: Outcome, number: int) -> None:
        """The input of that number."""
        target = outcome.target
        rng = Random(f"{self.seed} {target.name} {target.file} {number}")
        content = self._originals[target.file]
        content = mutate.any_bytes(content, rng) if rng.random() < 0.15 else target.mutation(content, rng)
        content = content[:MOST_BYTES]
        if target.is_packed:
            content = mutate.packed(content, rng)
        ended, problem = self.given(target, content)
        outcome.counts[ended] += 1
        if problem:
            finding = Finding(target, number, problem)
            outcome.findings.append(finding)
            self.tell(finding)
            if self.keep is not None:
                self.keep.mkdir(parents=True, exist_ok=True)
                (self.keep / f"{TARGETS.index(target)}-{number}-{Path(target.file).name}").write_bytes(content)

    def given(self, target: Target, content: bytes) -> tuple[str, str]:
        """(how it ended, what is wrong with that) of a target whose file has that content."""
        path = self.folder / target.file
        path.write_bytes(content)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            ended, problem = _read(target, path) if target.read else _command(target, self.folder)
        except _TooSlowError as error:
            ended, problem = "too slow", f"took more than {MOST_SECONDS} s at {_place(error)}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            ended, problem = "escaped", f"{type(error).__name__}: {str(error)[:200]} at {_place(error)}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if now > peak and now > self._start_kb + MOST_KB:
            ended, problem = "too large", f"took {(now - self._start_kb) >> 10} MiB"
        path.write_bytes(self._originals[target.file])
        return ended, problem

    def table(self) -> str:
        """Reader or command, the file, how many inputs, what came of them."""
        lines = []
        for outcome in self.outcomes:
            counts = ", ".join(f"{ended} {count:,}" for ended, count in sorted(outcome.counts.items()))
            lines.append(f"{outcome.target.name:70} {outcome.target.file:36} {outcome.counts.total():8,}  {counts}")
        total = sum(outcome.counts.total() for outcome in self.outcomes)
        findings = sum(len(outcome.findings) for outcome in self.outcomes)
        return "\n".join([*lines, f"{total:,} inputs, seed {self.seed}, {findings} findings"])


def _read(target: Target, path: Path) -> tuple[str, str]:
    assert target.read is not None
    try:
        target.read(str(path))
    except CrossrankError as error:
        if any(text in str(error) for text in _NO_MEMORY):
            return "refused", str(error)
        return "refused", "its error has several lines" if "\n" in str(error) else ""
    return "read", ""


def _command(target: Target, folder: Path) -> tuple[str, str]:
    command, *words = target.name.replace("WORKSPACE", str(folder)).split()
    words = [str(folder / word) if (folder / word).exists() or word.startswith("out") else word for word in words]
    if command != "check":
        words += ["--jobs", "1"]  # in this process
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([command, *words])
    finally:
        for left in folder.glob("out*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    if code == _CTRL_C:
        raise KeyboardInterrupt
    said = err.getvalue()
    problem = ""
    if code not in (0, 1, 2):
        problem = f"exit code {code}"
    elif code == 2 and not said.strip():
        problem = "exit code 2 without a word"
    elif "unexpected error" in said or "unexpected error" in out.getvalue():
        problem = next(line for line in (said + out.getvalue()).splitlines() if "unexpected error" in line)[-300:]
    elif any(text in said for text in _NO_MEMORY) or "Traceback" in said:
        problem = said[-300:]
    elif raw := _RAW.search(said + out.getvalue()):
        problem = f"{raw[0]!r} reaches the terminal"
    return str(code), problem


def _place(error: BaseException) -> str:
    """The last lines of ours that an error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/fuzz/" not in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-4:-1])


@contextlib.contextmanager
def _cpu_alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooSlowError

    before = signal.signal(signal.SIGPROF, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    reserved = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (reserved + _MOST_ADDRESSES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
