"""Reads logs of one job: what their lines say of each rank, with the lines themselves.

Files are read line by line. If the launcher restarted the job, the last attempt counts, and what ended each earlier one
is noted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar

from crossrank.recording import ReadIssues
from crossrank.text import writable
from crossrank.tools.traces.file_ranks import named_rank
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.lines import CUT, SAMPLE, lines_of, ranks_of_files
from crossrank.tools.traces.logs.prefixes import Origin, labels_of, split
from crossrank.tools.traces.logs.tracebacks import BEGINS, LAST_ERROR, Quote, StepLines, Traceback, TracebackLines

_QUOTED = 200
"""Characters of a line that are quoted."""
_STACK_FRAMES = (
    re.compile(r"#\d+ (?P<name>\S+) from (?P<file>.+):(?P<line>\d+)\Z"),
    re.compile(r" {4}(?P<name>\S.*?) \((?P<file>[^()]+):(?P<line>\d+)\)\Z"),
    re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)\Z'),
)
"""Frames below a line that begins a stack: of torch (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp), of py-spy,
and of Python's faulthandler. The innermost comes first."""
ATTEMPT = re.compile(r"attempt_(?P<attempt>\d{1,5})/(?P<local>\d{1,5})/std(?:out|err)\.log\Z")
"""End of the path of a file that `torchrun --log-dir` writes."""
_RESTARTED = 8
"""Lines of the script after a failure from which on the launcher has started the job again."""
SUMMARY = re.compile(
    r"\[\d+\]:|-+(?:Begin|End) global rank|Global rank \d+ \(PID|"
    r".*\bFAILED\b|.*Killing subprocess|Failures:|Root Cause|\s*<NO_OTHER|"
    r"\s*(?:time|host|rank|exitcode|error_file|traceback)\s*:"
)
"""Lines in which launchers say how they end a job."""
GLUED = re.compile(r"(?=\[rank\d+\]:(?:\[[EWIF]\d| ?Traceback \(most recent))")
"""Where another process has begun to print within a line."""
MARK = "[rank"
"""With it torch begins the lines that it prints itself, and those of an exception that ends the process."""
_LONGEST_MARK, _LONGEST_PREFIX = 14, 80
_BEGUN = "Traceback (most recent"
_WORD = re.compile(r"\w")
_MOST_PREFIXES = 64
_OF_TESTS = "E  "
"""Start of the lines in which pytest shows an exception."""
_OF_LAUNCHER = ("ChildFailedError", "SignalException", "ProcessExitedException", "ProcessRaisedException")
"""Exceptions of launchers, which say that a process has failed."""
_NAMED = re.compile(r"\b[Rr]ank[ =:#_-]{0,2}(?P<rank>\d{1,7})\b")
_FAILED = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|Exception|exception|failed|crashed)\b")
ENDS = re.compile(
    r"\A(?:\s*\Z|\s*#\d+ |frame #|Exception raised from|terminate called|  what\(\)|\s+[\w.~^]|\[?[IWEF]\d{3,4} |"
    r"CUDA kernel errors might|For debugging consider|Compile with `TORCH_USE|Search for `cuda|"  # c10/cuda
    r"MPI_ABORT was|with errorcode|NOTE: invoking MPI_ABORT|You may or may not see|exactly when Open MPI|"
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


_Placed = TypeVar("_Placed", Fact, Traceback)


@dataclass
class Attempt:
    """One start of the job's processes."""

    facts: list[Fact] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    lines_of: Counter[int] = field(default_factory=Counter)
    """Rank -> its lines."""
    unplaced: int = 0
    """Lines that belong to no rank."""
    by_label: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(Path, rank) -> those of its lines that a label alone gives to it."""
    labelled: dict[int, set[int]] = field(default_factory=dict)
    """Number of a label -> ranks of the lines behind it that torch has marked."""
    labels_are_nodes: bool = False
    """The labels in front of the lines of a file are of launchers, one for each node."""
    processes: dict[str, int] = field(default_factory=dict)
    """Number of a process, where Ray says it -> its rank, from the lines that torch has marked."""
    hosts: dict[str, set[int]] = field(default_factory=dict)
    """Host -> ranks of the lines that have it, without those that a label alone gives a rank."""
    passed: set[str] = field(default_factory=set)
    """Paths of runs of tests that all passed."""
    nccl_failed: bool = False
    """torch's NCCL backend printed an error: it ends processes by SIGABRT."""


@dataclass
class JobLog:
    """What the logs of a job say."""

    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])
    problems: list[str] = field(default_factory=list)
    of_launchers: set[str] = field(default_factory=set)
    """Paths whose labels, or names, are of launchers: torchrun prints there, or torch marks lines with other ranks."""
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

    def take_ranks_of_launchers(self) -> None:
        """Take the ranks from what labels alone gave to one, in files whose labels are of launchers."""
        for attempt in self.attempts if self.of_launchers else ():
            attempt.labels_are_nodes = True
            for (path, rank), count in attempt.by_label.items():
                if path in self.of_launchers:
                    attempt.lines_of[rank] -= count
                    attempt.unplaced += count
            attempt.lines_of = +attempt.lines_of
            attempt.facts = [self._without_label(one) for one in attempt.facts]
            attempt.tracebacks = [self._without_label(one) for one in attempt.tracebacks]

    def _without_label(self, one: _Placed) -> _Placed:
        if not one.origin.is_by_label or one.quote.path not in self.of_launchers:
            return one
        return replace(one, origin=replace(one.origin, rank=None, is_by_label=False))

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
    job.take_ranks_of_launchers()
    job.join_summary()
    return job


class _File:
    """Reads one file into a job."""

    def __init__(self, path: str, job: JobLog, name: str, rank: int | None) -> None:
        self._path, self._name, self._job = path, writable(name), job
        self._issues = ReadIssues(path)
        found = ATTEMPT.search(path)
        self._attempt = int(found["attempt"]) if found else 0
        self._origin = (
            Origin(local=int(found["local"])) if found else Origin(rank=rank, label=rank, is_by_label=rank is not None)
        )
        self._marked = set[int]()
        """Ranks of lines that have a mark alone: one line of each shows all that their prefixes do."""
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
        self._spawned: str | None = None
        """The process that the next traceback is of."""
        self._previous = ""
        """The line before."""
        self._begun: dict[str, tuple[int, str]] = {}
        """What is in front of a traceback -> number and text of its first line, until a line of it comes."""
        self._learned: dict[str, Origin] = {}
        """Prefixes of no known form: what is in front of a traceback, and of the line after it -> their origin."""
        self._ignored: Origin | None = None
        """Origin of an exception that Python ignored: its traceback comes next."""

    def read(self) -> None:
        lines = lines_of(self._path, self._issues)
        first = list(islice(lines, SAMPLE))
        labels = labels_of(line for _, line, _ in first)
        for number, line, may_say in chain(first, lines):
            if self._begun and (begun := self._learns(line, labels)) is not None:
                self._take(*begun, labels, may_say=True)
            if may_say and _BEGUN in line:
                self._note_begun(number, line, labels)
            is_learned = bool(self._learned) and line.startswith(tuple(self._learned))
            if may_say or self._open or self._latest or self._steps or is_learned or self._waits_for_more:
                self._take(number, line, labels, may_say)
            elif line.startswith(MARK) and (marked := line[len(MARK) : line.find("]", 0, _LONGEST_MARK)]).isdecimal():
                self._count_marked(int(marked))  # the mark is the last prefix, and most lines of a log have it
            else:
                self._count(split(line, self._origin, labels)[0])
            self._previous = line
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

    def _count_marked(self, rank: int) -> None:
        if rank in self._marked:
            self._now.lines_of[rank] += 1
            return
        self._marked.add(rank)
        self._count(replace(self._origin, rank=rank, is_by_label=False))

    def _count(self, origin: Origin) -> None:
        rank, now = origin.rank, self._now
        if rank is None:
            now.unplaced += origin.local is None
            return
        now.lines_of[rank] += 1
        if origin.is_by_label:
            now.by_label[self._name, rank] += 1
            return
        if origin.host:
            now.hosts.setdefault(origin.host, set()).add(rank)
        if origin.process:
            now.processes[origin.process] = rank
        if origin.label is not None:
            now.labelled.setdefault(origin.label, set()).add(rank)
            if origin.label != rank:
                self._job.of_launchers.add(self._name)

    def _note_begun(self, number: int, line: str, labels: frozenset[str]) -> None:
        """Note the first line of a traceback behind a prefix of no known form. A log may have many, and each its own
        time in front, so few are kept."""
        before, text = line[: line.index(_BEGUN)], split(line, self._origin, labels)[1]
        if len(before) <= _LONGEST_PREFIX and _WORD.search(text[: text.index(_BEGUN)]):
            self._begun[before] = number, line
            _keep_last(self._begun)

    def _learns(self, line: str, labels: frozenset[str]) -> tuple[int, str] | None:
        """Learn the prefix of a traceback that has no known form, if this line has it too. Return the number and the
        text of the first line of the traceback."""
        before = next((one for one in self._begun if line.startswith(f'{one}  File "')), None)
        if before is None:
            return None
        number, first = self._begun.pop(before)
        origin = split(first, self._origin, labels)[0]
        named = _only_rank_in(before)
        rank = int(named) if named is not None and origin.rank is None else origin.rank
        self._learned[before] = replace(origin, rank=rank, process=before.strip())
        _keep_last(self._learned)
        self._now.unplaced -= origin.rank is None and origin.local is None
        return number, first

    def _take(self, number: int, line: str, labels: frozenset[str], may_say: bool) -> None:
        base = self._origin
        if before := next(filter(line.startswith, self._learned), ""):
            base, line = self._learned[before], line[len(before) :]
        if MARK in line and ("]:[" in line or "]: Traceback" in line):
            text = split(line, base, labels)[1]
            first, *others = GLUED.split(text)
            if others:
                self._take_part(number, line[: len(line) - len(text)] + first, base, labels, may_say)
                for part in others:
                    self._take_part(number, part, base, labels, may_say)
                return
        self._take_part(number, line, base, labels, may_say)

    def _take_part(self, number: int, line: str, base: Origin, labels: frozenset[str], may_say: bool) -> None:
        origin, text = split(line, base, labels)
        self._count(origin)
        if self._frames is not None:
            if (frame := next(filter(None, (one.match(text) for one in _STACK_FRAMES)), None)) is not None:
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
                    raised_by = match.groupdict().get("rank") or self._named_before(origin, labels)
                    raised_by = self._spawned if self._spawned is not None else raised_by
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
            elif one.kind == formats.PROCESS_SHOWN:
                named = match.groupdict().get("rank")
                if (rank := int(named) if named else self._rank_before(origin, labels)) is not None:
                    self._now.processes.setdefault(match["process"], rank)
            elif one.kind == formats.PASSED:
                self._now.passed.add(self._name)
            elif one.kind == formats.IGNORED:
                self._ignored = origin
            elif one.kind == formats.RESTART:
                self._attempt, self._since_failure = self._attempt + 1, None
            elif one.kind == formats.SECTION:
                found = match.groupdict()
                own = found.get("rank") if "path" not in found else named_rank(PurePosixPath(match["path"]).name)
                self._origin = Origin(rank=None if own is None else int(own))
                self._steps = None  # the next lines were not printed after these
            elif one.kind == formats.SPAWNED:
                self._spawned = match["rank"]
            else:
                if one.kind == formats.FAILED:
                    self._since_failure = 0
                if one.kind in formats.OF_LAUNCHER:
                    self._job.of_launchers.add(self._name)
                values = {name: value for name, value in match.groupdict().items() if value is not None}
                values.setdefault("why", one.why)
                self._now.facts.append(fact := Fact(one.kind, values, quote, origin))
                if one.kind in (formats.CALL_STACK, formats.STACK):
                    self._frames = fact.frames
            return

    def _rank_before(self, origin: Origin, labels: frozenset[str]) -> int | None:
        """Return the rank of a line; if its prefixes do not say it, the only one that the line before names."""
        if origin.rank is not None:
            return origin.rank
        named = _only_rank_in(split(self._previous, self._origin, labels)[1])
        return None if named is None else int(named)

    def _named_before(self, origin: Origin, labels: frozenset[str]) -> str | None:
        """Return the rank that the line before an exception names, if no prefix does: scripts log what failed first."""
        before, text = split(self._previous, self._origin, labels)
        is_of_it = before == origin == Origin() and _FAILED.search(text) is not None
        return _only_rank_in(text) if is_of_it else None

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
        if self._since_failure is not None and LAST_ERROR not in self._previous:
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


def _only_rank_in(text: str) -> str | None:
    """Return the rank that a text names, if it names only one."""
    named = {one["rank"] for one in _NAMED.finditer(text)}
    return named.pop() if len(named) == 1 else None


def _keep_last(kept: dict[str, Any]) -> None:
    """Drop what came first until few are left."""
    while len(kept) > _MOST_PREFIXES:
        del kept[next(iter(kept))]
