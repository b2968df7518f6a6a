"""Writes the log of a job without names: what torch, NCCL and launchers print stays, with the numbers that count.

Each line stays a line, so that quotes have the same numbers. A line of the script becomes `x`: it shows only that the
script continued. Words that are not in anyone's logs become `x` too, and all other numbers 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import chain, islice

from crossrank.recording import ReadIssues
from crossrank.tools.sharing.pseudonyms import Pseudonyms
from crossrank.tools.sharing.rules import Scrubber
from crossrank.tools.sharing.vocabulary import WORDS, is_public
from crossrank.tools.traces.discover import FoundFile
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.lines import CUT, SAMPLE, lines_of
from crossrank.tools.traces.logs.prefixes import Origin, labels_of, split
from crossrank.tools.traces.logs.read import ENDS, GLUED, MARK, SUMMARY
from crossrank.tools.traces.logs.tracebacks import FRAME, LINKS, RAISED

_WORD = re.compile(r"[A-Za-z_]+|\d+|[^\x00-\x7f]")
_NAMES = {"group": "group", "desc": "group", "host": "host", "file": "file"}
"""Field of a format -> the kind of name that it is. All other fields are numbers, and words of torch."""
_NUMBER_AT_END = re.compile(r"-(?P<rank>\d+)\Z")
_TEXTS = ("why",)
"""Fields of a format that are free texts."""


def scrub_log(file: FoundFile, scrubber: Scrubber) -> Iterator[bytes]:
    """Yield the lines of a log without names."""
    issues = ReadIssues(file.path)
    lines = lines_of(file.path, issues)
    first = list(islice(lines, SAMPLE))
    labels = labels_of(line for _, line, _ in first)
    last = ""
    for number, line, may_say in chain(first, lines):
        made = []
        for part in GLUED.split(line) if line else [line]:
            origin, text = split(part, Origin(), labels)
            prefix = _prefix(origin, marked=MARK in part[: len(part) - len(text)])
            shown = _scrub(text, may_say, scrubber.names)
            made.append(prefix + ("" if not prefix.endswith(":") or shown.startswith("[") else " ") + shown)
        if number > 1:
            yield f"{last}\n".encode()
        last = "".join(made)
    yield last.encode() if CUT in issues.problems else f"{last}\n".encode()
    scrubber.damage += [f"{file.path}: {problem}" for problem in issues.problems if problem != CUT]


def _prefix(origin: Origin, *, marked: bool) -> str:
    """Return the rank of a line, in a form that the reader knows, and that says as much as the one in the log."""
    label = f"{origin.label}: " if origin.label is not None else ""
    if origin.rank is None or origin.is_by_label:
        return label or ("" if origin.local is None else f"[default{origin.local}]: ")
    return label + (f"[rank{origin.rank}]:" if marked else f"[1,{origin.rank}]<stderr>: ")


def _scrub(text: str, may_say: bool, names: Pseudonyms) -> str:
    if not text.strip() or text.startswith(LINKS):
        return text
    margin, inner = _margin(text)
    if (frame := FRAME.match(inner)) is not None:
        name = names.function(frame["name"], frame["file"])
        return f'{margin}  File "{names.path(frame["file"])}", line {frame["line"]}, in {name}'
    for one in formats.FORMATS if may_say else ():
        if (match := one.pattern.search(text)) is not None:
            return text if one.kind == formats.TRACEBACK else _line_of(one, match, names)
    if (raised := RAISED.match(inner)) is not None:
        kind = raised["type"]
        kind = kind if kind in WORDS or is_public(kind) else f"Other{raised['end']}"
        return f"{margin}{kind}{_message(inner[raised.end('type') :], frozenset())}"
    if ENDS.match(text) or SUMMARY.match(text):
        return _message(text, _words_of(ENDS) | _words_of(SUMMARY))
    return "x"


def _margin(text: str) -> tuple[str, str]:
    """Return the margin of a line of an exception group, and the rest."""
    inner = re.sub(r"\A +\| ", "", text)
    return text[: len(text) - len(inner)], inner


def _line_of(one: formats.Format, match: re.Match[str], names: Pseudonyms) -> str:
    """Return a line of a format, with its fields."""
    known, made, end = _words_of(one.pattern), [], 0
    fields = sorted((match.span(name), name) for name, value in match.groupdict().items() if value is not None)
    for (begin, stop), name in fields:
        if begin < end:
            continue
        value = match[name]
        made.append(_message(match.string[end:begin], known))
        if name in _TEXTS and one.kind != formats.TASK_KILLED:  # Slurm and others have few such texts
            made.append(_message(value, known))
        elif name in _NAMES and not value.isdecimal():
            kind = _NAMES[name]
            made.append(names.text(kind, value) if kind == "group" else names.name(kind, value))
            if (within := _NUMBER_AT_END.search(value)) and match.groupdict().get("rank") == within["rank"]:
                made.append(within[0])  # the name of a pod has the rank
        else:
            made.append(value)
        end = stop
    return "".join([*made, _message(match.string[end:], known)])


@cache
def _words_of(pattern: re.Pattern[str]) -> frozenset[str]:
    return frozenset(_WORD.findall(re.sub(r"\(\?P<\w+>|\\[a-zA-Z]", " ", pattern.pattern)))


def _message(text: str, known: frozenset[str]) -> str:
    def word(match: re.Match[str]) -> str:
        found = match[0]
        if found.isdecimal():
            return "0"
        return found if found in WORDS or found in known else "x"

    return _WORD.sub(word, text)
