"""Tracebacks in a log: their exceptions, and whether these ended the process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from crossrank.text import writable
from crossrank.tools.traces.logs.prefixes import Origin

FRAME = re.compile(r'\A\s*File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>\S+)')
RAISED = re.compile(
    r"\A(?:[\w.]+\.)?(?P<type>[A-Za-z_]\w*(?P<end>Error|Exception|Interrupt|Exit|Warning|Timeout|Failed|Killed))\b(?::|\Z)"
)
LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_LAST_LINES, _LAST_MARKED_LINES = 2, 8
"""Lines that a script prints at most while an exception ends it, or one that torch has marked with the rank."""
_MODULE = re.compile(r"\A(?:[A-Za-z_]\w*\.)+(?=[A-Z])")
"""The module in front of the type of an exception."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_OF_TORCH = re.compile(r"\b[EWIF]\d{3,4} \d\d:[\d:.]+ .*\b(?:c10d|cpp|elastic)\b")
"""A line that torch logs, as it may long after the last step."""
_LONGEST_ERROR = 500
_OF_RAY = re.compile(r"RayTaskError\(\w+\): .*\(pid=(?P<process>\d+), ip=")
"""An exception with which Ray passes on that of a process, whose traceback comes after it."""
LAST_ERROR = "Last error:"
"""The next line has NCCL's own text of what failed."""
_MARGIN = re.compile(r" +[|+](?: |[-+]+(?: \d+ -+)?\Z)?")
"""Start of the lines of an exception group."""
BEGINS = ("Traceback (most recent", "╭─")
"""Starts of the first line of a traceback: of Python's, and of the box that rich draws around one."""
_BOX = ("│", "╭", "╰")
_IN_BOX = re.compile(r"│ (?P<text>\S.*?) *│?\Z")
"""A line in a box of rich (rich/traceback.py) that is not indented: a frame. A long path continues in the next line."""
_FRAME_IN_BOX = re.compile(r"(?P<file>.+):(?P<line>\d+) in (?P<name>\S+)\Z")
_STEPS = 6
"""Lines of steps from which on a job has continued."""


class StepLines:
    """Counts lines that differ from one before them in numbers alone, as the lines of steps do."""

    def __init__(self) -> None:
        self._forms: dict[str, str] = {}
        """Line without its numbers -> the last line of this form."""
        self.count = 0

    def note(self, text: str) -> bool:
        """Note a line; return whether there were many steps."""
        if _OF_TORCH.search(text):
            return self.are_many
        form = _NUMBER.sub("0", text)
        self.count += self._forms.get(form, text) != text  # several ranks may print one line
        self._forms[form] = text
        return self.are_many

    @property
    def are_many(self) -> bool:
        return self.count >= _STEPS


@dataclass(frozen=True)
class Quote:
    """A line of a log."""

    path: str
    number: int
    """From 1."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.text}"


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
    continued: int = 0
    """Times that the job has made many steps after an exception, before this one."""
    is_outlived: bool = False
    """The job made many steps after it."""
    followed: int = 0
    """Lines of the script after it, from the same place."""
    steps: StepLines = field(default_factory=StepLines)
    """Steps in these lines."""
    goes_on: bool = False
    """The process continued: two of these lines differ in numbers alone, it raised another exception, or Python ignored
    this one."""

    def note(self, text: str) -> None:
        """Note a line of the script after it."""
        self.followed += 1
        self.steps.note(text)
        self.goes_on |= self.steps.count > 0

    @property
    def may_be_shown(self) -> bool:
        """Whether the lines after it may still belong to the end of its process."""
        return self.followed <= _LAST_MARKED_LINES

    def repeats(self, before: Traceback) -> bool:
        """Return whether its process survived the same exception before, and said something after this one."""
        same = (self.origin, self.frames[:1], self.error.split(":")[0])
        return (
            self.followed > 0
            and before.goes_on
            and same == (before.origin, before.frames[:1], before.error.split(":")[0])
        )

    def was_survived(self, later: Traceback) -> bool:
        """Return whether the job made many steps after it, before another rank raised `later`. Its own process said
        something more: what other processes print may come late."""
        return (
            self.followed > 0
            and later.quote.path == self.quote.path
            and later.continued > self.continued
            and later.origin != self.origin
        )

    @property
    def ended_process(self) -> bool:
        """Whether it ended its process: the script did not go on."""
        return not self.goes_on and self.followed <= (_LAST_MARKED_LINES if self.is_marked else _LAST_LINES)


class TracebackLines:
    """The lines of a traceback that is being read."""

    def __init__(
        self, quote: Quote, origin: Origin, is_marked: bool, attempt: int, continued: int = 0, is_ignored: bool = False
    ) -> None:
        self._quote, self._origin, self._is_marked, self._attempt = quote, origin, is_marked, attempt
        self._continued, self._is_ignored = continued, is_ignored
        self._frames: list[tuple[str, str, int]] = []
        self._errors: list[str] = []
        self._is_over = self._is_linked = self._takes_last_error = False
        self._process = self._path_in_box = ""
        self._is_group = "Exception Group" in quote.text

    def add(self, text: str) -> bool:
        """Take a line; return whether it belongs to the traceback."""
        if self._is_group:
            if (margin := _MARGIN.match(text)) is None:
                return False
            text, self._is_linked = text[margin.end() :], True
        if self._is_over:
            return self._add_to_the_end(text)
        if text.startswith(_BOX):
            return self._add_in_box(text)
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

    def _add_in_box(self, text: str) -> bool:
        """Take a line of the box that rich draws around a traceback."""
        line = _IN_BOX.match(text)
        path = self._path_in_box + line["text"] if line is not None else ""
        if (frame := _FRAME_IN_BOX.match(path)) is not None:
            self._frames.append((frame["name"], frame["file"], int(frame["line"])))
            path = ""
        self._path_in_box = path
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
        self._takes_last_error = text.startswith(LAST_ERROR)
        self._is_linked |= text.startswith(LINKS)
        if self._is_linked and (text.startswith(BEGINS) or RAISED.match(text)):
            self._frames, self._is_over = [], False
            return text.startswith(BEGINS) or self.add(text)
        return not text.strip() or self._is_linked or text.startswith(("ncclR", "ncclI", "ncclS", "ncclU", LAST_ERROR))

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
            self._continued,
            goes_on=self._is_ignored,
        )
