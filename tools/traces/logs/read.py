"""Reads logs of one job: what their lines say of each rank, with the lines themselves.

Files are read line by line. If the launcher restarted the job, the last attempt counts, and what ended each earlier one
is noted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import PurePosixPath
from types import MappingProxyType

from crossrank.recording import ReadIssues, read_chunks
from crossrank.text import writable
from crossrank.tools.traces.discover import named_rank
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.prefixes import COLORS, Origin, labels_of, split

_LONGEST_LINE = 1 << 16
"""Characters of a line that are read: the rest says nothing more."""
SAMPLE = 400
"""Lines at the start of a file that show which labels it has."""
CUT = "ends within a line; what came after it is missing"
_QUOTED = 200
"""Characters of a line that are quoted."""
CALL_FRAME = re.compile(r"#\d+ (?P<name>\S+) from (?P<file>.+):(?P<line>\d+)\Z")
"""A frame below a line of `formats.CALL_STACK` (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp)."""
ATTEMPT = re.compile(r"attempt_(?P<attempt>\d{1,5})/(?P<local>\d{1,5})/std(?:out|err)\.log\Z")
"""End of the path of a file that `torchrun --log-dir` writes."""
FRAME = re.compile(r'\A\s*File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>\S+)')
RAISED = re.compile(
    r"\A(?:[\w.]+\.)?(?P<type>[A-Za-z_]\w*(?P<end>Error|Exception|Interrupt|Exit|Warning|Timeout|Failed|Killed))\b(?::|\Z)"
)
_LAST_LINES, _LAST_MARKED_LINES = 2, 8
"""Lines that a script prints at most while an exception ends it, or one that torch has marked with the rank."""
_RESTARTED = 8
"""Lines of the script after a failure from which on the launcher has started the job again."""
SUMMARY = re.compile(
    r"\[\d+\]:|.*\bFAILED\b|Failures:|Root Cause|\s*<NO_OTHER|\s*(?:time|host|rank|exitcode|error_file|traceback)\s*:"
)
"""Lines of torchrun's summary of failures."""
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
_MODULE = re.compile(r"\A(?:[A-Za-z_]\w*\.)+(?=[A-Z])")
"""The module in front of the type of an exception."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LONGEST_ERROR = 500
_STEPS = 8
"""Lines of steps from which on a job has continued after an exception of an unknown rank."""
_OF_RAY = re.compile(r"RayTaskError\(\w+\): .*\(pid=(?P<process>\d+), ip=")
"""An exception with which Ray passes on that of a process, whose traceback comes after it."""
_LAST_ERROR = "Last error:"
"""The next line has NCCL's own text of what failed."""
_MARGIN = re.compile(r" +[|+](?: |[-+]+(?: \d+ -+)?\Z)?")
"""Start of the lines of an exception group."""
LINKS = ("During handling of the above exception", "The above exception was the direct cause")


@dataclass(frozen=True)
class Quote:
    """A line of a log."""

    path: str
    number: int
    """From 1."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.text}"


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
class Traceback:
    """An exception in a log."""

    error: str
    causes: tuple[str, ...]
    """Texts of the exceptions before it: the direct cause first."""
    frames: tuple[tuple[str, str, int], ...]
    """(function, file, line), innermost first."""
    quote: Quote
    origin: Origin
    is_marked: bool
    """torch marked its lines with the rank, which it does for an exception that ends the process."""
    attempt: int = 0
    process: str = ""
    """Number of the process that raised it, if Ray says it."""
    followed: int = 0
    """Lines of the script after it, from the same place."""
    forms: set[str] = field(default_factory=set)
    """These lines without their numbers."""
    goes_on: bool = False
    """The script still makes steps: two of these lines differ in numbers alone, or it raised another exception."""

    def note(self, text: str) -> None:
        """Note a line of the script after it."""
        self.followed += 1
        self.goes_on |= _is_step(text, self.forms)

    @property
    def ended_process(self) -> bool:
        """Whether it ended its process: the script did not go on."""
        return not self.goes_on and self.followed <= (_LAST_MARKED_LINES if self.is_marked else _LAST_LINES)


@dataclass
class Attempt:
    """One start of the job's processes."""

    facts: list[Fact] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    lines_of: Counter[int] = field(default_factory=Counter)
    """Rank -> its lines."""
    unplaced: int = 0
    """Lines that belong to no rank."""


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
    job = JobLog()
    for path in paths:
        _File(path, job, names.get(path, path)).read()
    job.join_summary()
    return job


def lines_of(path: str, issues: ReadIssues) -> Iterator[tuple[int, str, bool]]:
    """Yield (number, line without colors, whether it has one of the literals of formats) of a file. To find these in a
    chunk at once takes a twentieth of the time that it takes line by line."""
    number, rest = 0, b""
    for piece in chain(read_chunks(path, issues), (None,)):
        if piece is None and rest:
            issues.problems.append(CUT)
        data = rest + (b"\n" if piece is None else piece)
        cut = data.rfind(b"\n") + 1
        rest = data[cut:][:_LONGEST_LINE] if piece is not None else b""
        text = data[:cut].decode(errors="replace")
        if "\x1b" in text or "\r" in text:
            text = COLORS.sub("", text)
        places = iter(sorted(place for literal in formats.LITERALS for place in _places(text, literal)))
        place, end = next(places, len(text)), 0
        for line in text.split("\n")[:-1]:
            end += len(line) + 1
            number += 1
            may_say = place < end
            while place < end:
                place = next(places, len(text) + 1)
            if line or piece is not None:
                yield number, line[:_LONGEST_LINE], may_say


class _File:
    """Reads one file into a job."""

    def __init__(self, path: str, job: JobLog, name: str) -> None:
        self._path, self._name, self._job = path, writable(name), job
        self._issues = ReadIssues(path)
        found = ATTEMPT.search(path)
        self._attempt = int(found["attempt"]) if found else 0
        rank = None if found else named_rank(PurePosixPath(path).name)
        self._origin = Origin(rank=rank, local=int(found["local"]) if found else None)
        self._open: dict[Origin, _Lines] = {}
        """Origin -> the traceback that its lines are in."""
        self._frames: list[tuple[str, str, int]] | None = None
        """Frames of the call whose stack the file shows just now; their lines have no label of torch."""
        self._steps, self._forms = 0, set[str]()
        """Lines of ranks after an exception of an unknown one that differ from others in numbers alone; their forms."""
        self._bare: Origin | None = None
        """Origin of the last traceback that began behind other words: its next lines may have no prefix."""
        self._latest: dict[Origin, Traceback] = {}
        """Origin -> its last traceback."""
        self._since_failure: int | None = None
        """Lines of the script since the launcher noticed a failure."""
        self._spawned: int | None = None
        """The process that the next traceback is of."""

    def read(self) -> None:
        lines = lines_of(self._path, self._issues)
        first = list(islice(lines, SAMPLE))
        labels = labels_of(line for _, line, _ in first)
        for number, line, may_say in chain(first, lines):
            open_ones = self._open or self._latest or self._frames is not None or self._since_failure is not None
            if may_say or open_ones:
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
            if origin != Origin() and (Origin() in self._open or Origin() in self._latest):
                self._note_step(text)
            if (latest := self._latest.get(origin)) is not None:
                latest.note(text)
                if latest.followed > _LAST_MARKED_LINES:
                    del self._latest[origin]
            if MARK not in line:
                self._note_work(text)
        if not may_say or text.startswith(_OF_TESTS):
            return
        quote = Quote(self._name, number, writable(text[:_QUOTED]))
        for one in formats.FORMATS:
            match = one.pattern.search(text)
            if match is None:
                continue
            if one.kind == formats.TRACEBACK:
                if origin not in self._open:
                    of = origin if self._spawned is None else Origin(rank=self._spawned)
                    if origin == Origin():
                        self._steps, self._forms = 0, set()
                    self._bare = origin if not text.startswith("Traceback") else None
                    self._open[origin] = _Lines(quote, of, MARK in line, self._attempt)
                    self._spawned = None
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

    def _note_step(self, text: str) -> None:
        """Note a line of a rank after an exception of an unknown rank: many steps show that the job continued."""
        self._steps += _is_step(text, self._forms)
        if self._steps < _STEPS:
            return
        if (opened := self._open.pop(Origin(), None)) is not None:
            self._close(opened)
        if (latest := self._latest.pop(Origin(), None)) is not None:
            latest.goes_on = True
        self._forms.clear()

    def _note_work(self, text: str) -> None:
        """Note a line of the script: many after a failure are those of the next attempt."""
        if self._since_failure is not None:
            self._since_failure += 1
            if self._since_failure >= _RESTARTED:
                self._attempt, self._since_failure = self._attempt + 1, None

    def _close(self, opened: _Lines) -> None:
        if (found := opened.traceback()) is not None and not found.error.startswith(_OF_LAUNCHER):
            before = self._latest.get(found.origin)
            if before is not None and before.followed and found.origin != Origin():
                before.goes_on = True
            found.goes_on = found.origin == Origin() and self._steps >= _STEPS
            self._job.attempt(found.attempt).tracebacks.append(found)
            self._latest[found.origin] = found


def _places(text: str, literal: str) -> Iterator[int]:
    place = text.find(literal)
    while place >= 0:
        yield place
        place = text.find(literal, place + len(literal))


def _is_step(text: str, forms: set[str]) -> bool:
    """Return whether a line differs from one before it in numbers alone, as the lines of steps do. `forms`: those lines
    without their numbers; that of this one is added."""
    form = _NUMBER.sub("0", text)
    is_known = form in forms
    forms.add(form)
    return is_known and form != text


class _Lines:
    """The lines of a traceback that is being read."""

    def __init__(self, quote: Quote, origin: Origin, is_marked: bool, attempt: int) -> None:
        self._quote, self._origin, self._is_marked, self._attempt = quote, origin, is_marked, attempt
        self._frames: list[tuple[str, str, int]] = []
        self._errors: list[str] = []
        self._is_over = self._is_linked = self._takes_last_error = False
        self._process = ""
        self._is_group = "Exception Group" in quote.text

    def add(self, text: str) -> bool:
        """Take a line; return whether it belongs to the traceback."""
        if self._is_group:
            if (margin := _MARGIN.match(text)) is None:
                return False
            text, self._is_linked = text[margin.end() :], True
        if self._is_over:
            return self._add_to_the_end(text)
        if (frame := FRAME.match(text)) is not None:
            self._frames.append((frame["name"], frame["file"], int(frame["line"])))
            return True
        if text.startswith(" ") or not text.strip():
            return True
        if RAISED.match(text) is None and not self._frames:
            return False
        self._errors.append(writable(_MODULE.sub("", text.strip()[:_LONGEST_ERROR])))
        self._is_over, self._is_linked = True, False
        return True

    def _add_to_the_end(self, text: str) -> bool:
        """Take a line after the text of an exception: what NCCL says of it, or the link to the next exception."""
        if self._takes_last_error:
            self._errors[-1] += f" ({writable(text.strip()[:_LONGEST_ERROR])})"
            self._takes_last_error = False
            return True
        if (of_ray := _OF_RAY.match(self._errors[-1])) is not None and FRAME.match(text):
            self._process, self._frames, self._is_over = of_ray["process"], [], False
            self._errors.pop()
            return self.add(text)
        self._takes_last_error = text.startswith(_LAST_ERROR)
        self._is_linked |= text.startswith(LINKS)
        if self._is_linked and (text.startswith("Traceback (most recent") or RAISED.match(text)):
            self._frames, self._is_over = [], False
            return text.startswith("Traceback") or self.add(text)
        return not text.strip() or self._is_linked or text.startswith(("ncclR", "ncclI", "ncclS", "ncclU", _LAST_ERROR))

    def traceback(self) -> Traceback | None:
        if not self._errors:
            return None
        *causes, error = self._errors
        frames = tuple(reversed(self._frames))
        return Traceback(
            error,
            tuple(reversed(causes)),
            frames,
            self._quote,
            self._origin,
            self._is_marked,
            self._attempt,
            self._process,
        )
