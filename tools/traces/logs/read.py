"""Reads logs of one job: what their lines say of each rank, with the lines themselves.

Files are read line by line. If the launcher restarted the job, the last attempt counts, and what ended each earlier one
is noted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType

from crossrank.recording import ReadIssues
from crossrank.text import writable
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.lines import CUT, SAMPLE, lines_of, ranks_of_files
from crossrank.tools.traces.logs.prefixes import Origin, labels_of, split
from crossrank.tools.traces.logs.tracebacks import BEGINS, Quote, StepLines, Traceback, TracebackLines

_QUOTED = 200
"""Characters of a line that are quoted."""
CALL_FRAME = re.compile(r"#\d+ (?P<name>\S+) from (?P<file>.+):(?P<line>\d+)\Z")
"""A frame below a line of `formats.CALL_STACK` (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp)."""
ATTEMPT = re.compile(r"attempt_(?P<attempt>\d{1,5})/(?P<local>\d{1,5})/std(?:out|err)\.log\Z")
"""End of the path of a file that `torchrun --log-dir` writes."""
_RESTARTED = 8
"""Lines of the script after a failure from which on the launcher has started the job again."""
SUMMARY = re.compile(
    r"\[\d+\]:|.*\bFAILED\b|.*Killing subprocess|Failures:|Root Cause|\s*<NO_OTHER|"
    r"\s*(?:time|host|rank|exitcode|error_file|traceback)\s*:"
)
"""Lines in which launchers say how they end a job."""
GLUED = re.compile(r"(?=\[rank\d+\]:(?:\[[EWIF]\d| ?Traceback \(most recent))")
"""Where another process has begun to print within a line."""
MARK = "[rank"
"""With it torch begins the lines that it prints itself, and those of an exception that ends the process."""
_LONGEST_MARK = 14
_OF_TESTS = "E  "
"""Start of the lines in which pytest shows an exception."""
_OF_LAUNCHER = ("ChildFailedError", "SignalException", "ProcessExitedException", "ProcessRaisedException")
"""Exceptions of launchers, which say that a process has failed."""
ENDS = re.compile(
    r"\A(?:\s*\Z|\s*#\d+ |frame #|Exception raised from|terminate called|  what\(\)|\s+[\w.~^]|\[?[IWEF]\d{3,4} |"
    r"[\w.]*(?:Error|Warning)\b|ncclRemoteError|Last error|srun|slurmstepd|=+\s*\Z|-+\s*\Z|Fatal Python|\[rank|"
    r"Traceback )"
)
"""Lines that libraries and launchers print at the end of a process."""


@dataclass(frozen=True)
class Fact:
    """What one line says."""

    kind: str
    values: dict[str, str]
    quote: Quote
    origin: Origin
    frames: list[tuple[str, str, int]] = field(default_factory=list)
    """(function, file, line) of the call that it is about, innermost first, from the lines after it."""

    def number(self, name: str) -> int:
        return int(self.values[name])


@dataclass
class Attempt:
    """One start of the job's processes."""

    facts: list[Fact] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    lines_of: Counter[int] = field(default_factory=Counter)
    """Rank -> its lines."""
    unplaced: int = 0
    """Lines that belong to no rank."""
    nccl_failed: bool = False
    """torch's NCCL backend printed an error: it ends processes by SIGABRT."""


@dataclass
class JobLog:
    """What the logs of a job say."""

    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])
    problems: list[str] = field(default_factory=list)
    is_cut: bool = False
    """A file ends within a line, so the lines of some ranks may be missing."""

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    def join_summary(self) -> None:
        """Give the launcher's summary of failures, if it is all that the last attempt has, to the one before."""
        last = self.last
        only_summary = bool(last.facts) and all(one.kind in formats.OF_LAUNCHER for one in last.facts)
        if len(self.attempts) > 1 and only_summary and not last.tracebacks:
            self.attempts.pop()
            self.last.facts += last.facts
            self.last.lines_of.update(last.lines_of)

    def attempt(self, number: int) -> Attempt:
        """Return an attempt by its number, from 0."""
        while len(self.attempts) <= number:
            self.attempts.append(Attempt())
        return self.attempts[number]


def read_logs(paths: Iterable[str], names: Mapping[str, str] = MappingProxyType({})) -> JobLog:
    """Read the logs of one job. `names`: path -> what quotes call the file, if not by its path."""
    job, paths = JobLog(), list(paths)
    ranks = ranks_of_files([path for path in paths if not ATTEMPT.search(path)])
    for path in paths:
        _File(path, job, names.get(path, path), ranks.get(path)).read()
    job.join_summary()
    return job


class _File:
    """Reads one file into a job."""

    def __init__(self, path: str, job: JobLog, name: str, rank: int | None) -> None:
        self._path, self._name, self._job = path, writable(name), job
        self._issues = ReadIssues(path)
        found = ATTEMPT.search(path)
        self._attempt = int(found["attempt"]) if found else 0
        self._origin = Origin(local=int(found["local"])) if found else Origin(rank=rank)
        self._open: dict[Origin, TracebackLines] = {}
        """Origin -> the traceback that its lines are in."""
        self._frames: list[tuple[str, str, int]] | None = None
        """Frames of the call whose stack the file shows just now; their lines have no label of torch."""
        self._steps_of_ranks = StepLines()
        """Steps of ranks after an exception of an unknown one."""
        self._steps: StepLines | None = None
        """Steps of the job after the last exception, until they show that it continued."""
        self._continued = 0
        """Times that they did."""
        self._bare: Origin | None = None
        """Origin of the last traceback that began behind other words: its next lines may have no prefix."""
        self._latest: dict[Origin, Traceback] = {}
        """Origin -> its last traceback."""
        self._since_failure: int | None = None
        """Lines of the script since the launcher noticed a failure."""
        self._spawned: int | None = None
        """The process that the next traceback is of."""
        self._ignored: Origin | None = None
        """Origin of an exception that Python ignored: its traceback comes next."""

    def read(self) -> None:
        lines = lines_of(self._path, self._issues)
        first = list(islice(lines, SAMPLE))
        labels = labels_of(line for _, line, _ in first)
        for number, line, may_say in chain(first, lines):
            if may_say or self._open or self._latest or self._steps or self._waits_for_more:
                self._take(number, line, labels, may_say)
            elif line.startswith(MARK) and (marked := line[len(MARK) : line.find("]", 0, _LONGEST_MARK)]).isdecimal():
                self._now.lines_of[int(marked)] += 1  # the mark is the last prefix, and most lines of a log have it
            else:
                self._count(split(line, self._origin, labels)[0])
        for opened in self._open.values():
            self._close(opened)
        self._job.is_cut |= CUT in self._issues.problems
        self._job.problems += [f"{self._name}: {problem}" for problem in self._issues.problems]

    @property
    def _waits_for_more(self) -> bool:
        return self._frames is not None or self._since_failure is not None

    @property
    def _now(self) -> Attempt:
        return self._job.attempt(self._attempt)

    def _count(self, origin: Origin) -> None:
        if origin.rank is None and origin.local is None:
            self._now.unplaced += 1
        elif origin.rank is not None:
            self._now.lines_of[origin.rank] += 1

    def _take(self, number: int, line: str, labels: frozenset[str], may_say: bool) -> None:
        if MARK in line and ("]:[" in line or "]: Traceback" in line):
            text = split(line, self._origin, labels)[1]
            first, *others = GLUED.split(text)
            if others:
                self._take_part(number, line[: len(line) - len(text)] + first, labels, may_say)
                for part in others:
                    self._take_part(number, part, labels, may_say)
                return
        self._take_part(number, line, labels, may_say)

    def _take_part(self, number: int, line: str, labels: frozenset[str], may_say: bool) -> None:
        origin, text = split(line, self._origin, labels)
        self._count(origin)
        if self._frames is not None:
            if (frame := CALL_FRAME.match(text)) is not None:
                self._frames.append((frame["name"], frame["file"], int(frame["line"])))
                return
            self._frames = None
        if origin == self._origin and origin not in self._open and self._bare in self._open:
            origin = self._bare or origin
        opened = self._open.get(origin)
        if opened is not None and not opened.add(text):
            self._close(self._open.pop(origin))
            opened = None
        if opened is None and not ENDS.match(text) and not SUMMARY.match(text):
            self._note_line(origin, text)
            if MARK not in line:
                self._note_work()
        if not may_say or text.startswith(_OF_TESTS):
            return
        quote = Quote(self._name, number, writable(text[:_QUOTED]))
        for one in formats.FORMATS:
            match = one.pattern.search(text)
            if match is None:
                continue
            if one.kind == formats.TRACEBACK:
                if origin not in self._open:
                    raised_by = match.groupdict().get("rank") or self._spawned
                    of = origin if raised_by is None else Origin(rank=int(raised_by))
                    if origin == Origin():
                        self._steps_of_ranks = StepLines()
                    self._bare = origin if not text.startswith(BEGINS) else None
                    is_ignored, self._ignored = self._ignored == origin, None
                    begun = TracebackLines(quote, of, MARK in line, self._attempt, self._continued, is_ignored)
                    self._open[origin] = begun
                    self._steps = StepLines()
                    self._spawned = None
            elif one.kind == formats.NCCL_FAILED:
                self._now.nccl_failed = True
            elif one.kind == formats.IGNORED:
                self._ignored = origin
            elif one.kind == formats.RESTART:
                self._attempt, self._since_failure = self._attempt + 1, None
            elif one.kind == formats.SPAWNED:
                self._spawned = int(match["rank"])
            else:
                if one.kind == formats.FAILED:
                    self._since_failure = 0
                values = {name: value for name, value in match.groupdict().items() if value is not None}
                values.setdefault("why", one.why)
                self._now.facts.append(fact := Fact(one.kind, values, quote, origin))
                if one.kind == formats.CALL_STACK:
                    self._frames = fact.frames
            return

    def _note_line(self, origin: Origin, text: str) -> None:
        """Note a line of the script: what it shows of the exceptions before it."""
        if self._steps is not None and self._steps.note(text):
            self._continued, self._steps = self._continued + 1, None
            for one in self._now.tracebacks:
                one.is_outlived |= one.quote.path == self._name
        unknown = Origin()
        if origin != unknown and (unknown in self._open or unknown in self._latest) and self._steps_of_ranks.note(text):
            if (opened := self._open.pop(unknown, None)) is not None:
                self._close(opened)
            if (latest := self._latest.pop(unknown, None)) is not None:
                latest.goes_on = True
        if (latest := self._latest.get(origin)) is not None:
            latest.note(text)
            if not latest.may_be_shown:
                del self._latest[origin]

    def _note_work(self) -> None:
        """Note a line of the script: many after a failure are those of the next attempt."""
        if self._since_failure is not None:
            self._since_failure += 1
            if self._since_failure >= _RESTARTED:
                self._attempt, self._since_failure = self._attempt + 1, None

    def _close(self, opened: TracebackLines) -> None:
        if (found := opened.traceback()) is not None and not found.error.startswith(_OF_LAUNCHER):
            before = self._latest.get(found.origin)
            if before is not None and before.followed and found.origin != Origin():
                before.goes_on = True
            found.goes_on |= found.origin == Origin() and self._steps_of_ranks.are_many
            found.is_outlived = self._continued > found.continued
            self._job.attempt(found.attempt).tracebacks.append(found)
            self._latest[found.origin] = found
