"""Finds the rank and the host of a line of a log, by the prefixes that launchers add to it.

A line may have several prefixes: Slurm's in front of torchrun's. torch's own `[rank3]:` has the global rank.
`[default3]:` of torchrun, and its folders, have the number within a node. A number, a host or a time in front of the
text is a label only if most lines of the file have it there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")
"""Control sequences of terminals (ECMA-48), and carriage returns of progress bars."""

_TIME = r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
_SYSLOG_TIME = r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)"


@dataclass(frozen=True)
class Prefix:
    """One form of prefix. The named groups of its pattern are fields of `Origin`."""

    launcher: str
    pattern: re.Pattern[str]
    is_label: bool = False
    """It counts only if most lines of the file have it."""
    repeats: bool = False
    """A number in it counts only if it comes again: the script may number its lines."""


PREFIXES = (
    Prefix("torch", re.compile(r"\[rank ?(?P<rank>\d{1,7})\]:? ?")),
    Prefix("torchrun", re.compile(r"\[[A-Za-z_]\w*?(?P<local>\d{1,5})\]: ?")),
    Prefix("mpirun", re.compile(r"\[\d+,(?P<rank>\d{1,7})\](?:<std(?:out|err)>)?: ?")),
    Prefix("vllm", re.compile(r"\([\w-]*Worker[\w-]*?(?:[ _]rank=|[ _]TP|_?)(?P<rank>\d{1,7})(?:_\w+)? pid=\d+\) ?")),
    Prefix(
        "vllm", re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[[^\]]+\] ?")
    ),
    Prefix("ray", re.compile(r"\([\w.:<>-]+ pid=(?P<process>\d+)(?:, ip=(?P<host>[\w.:-]+))?\) ?")),
    Prefix("nccl", re.compile(r"(?P<host>[\w.-]+):(?P<process>\d+):\d+ \[\d*\] (?=(?:\S+:\d+ )?NCCL (?:INFO|WARN))")),
    Prefix("sglang", re.compile(rf"\[{_TIME}(?: [DP]P\d+)* TP(?P<rank>\d{{1,7}})(?: EP\d+)?\] ")),
    Prefix("kubernetes", re.compile(r"\[(?!Rank \d)(?:pod/)?(?P<host>[\w.-]+)(?:/[\w.-]+| [\w.-]+)\] ?")),
    Prefix("torchx", re.compile(r"[\w.-]+/\d+ (?=\[(?:default|rank)\d)")),
    Prefix("torchrun", re.compile(r"(?P<host>[A-Za-z][\w.-]*\d) (?=\[(?:default|rank)\d+\]:)")),
    Prefix("time", re.compile(rf"{_TIME} (?=\[rank\d|\[[a-z]+\d+\]:)")),
    Prefix("srun", re.compile(r" {0,6}(?P<label>\d{1,7}): (?=\[rank\d)")),
    Prefix("srun", re.compile(r" {0,6}(?P<label>\d{1,7}): "), is_label=True),
    Prefix("mpiexec", re.compile(r"\[(?P<label>\d{1,7})\] "), is_label=True, repeats=True),
    Prefix("pdsh", re.compile(r"(?P<host>[a-z][\w.-]*\d[\w.-]*): "), is_label=True),
    Prefix("stern", re.compile(r"(?P<host>[a-z0-9][\w.-]*-\d+) [\w.-]+ (?:\| )?"), is_label=True),
    Prefix("compose", re.compile(r"(?P<host>[\w.-]+) *\| "), is_label=True),
    Prefix("sagemaker", re.compile(r"\[\d+,mpirank:(?P<label>\d{1,7}),(?P<host>[\w.-]+)\]<std(?:out|err)>: ?")),
    Prefix(
        "determined",
        re.compile(rf"\[{_TIME}\] [0-9a-f]{{8}} (?:\[rank=(?P<label>\d{{1,7}})\] )?\|\| (?:[A-Z]+: \[\d+\] )?"),
    ),
    Prefix("skypilot", re.compile(r"\((?P<host>[\w.-]+), rank=(?P<label>\d{1,7}), pid=\d+(?:, ip=[\w.:]+)?\) ?")),
    Prefix("host", re.compile(r"\[(?P<host>[A-Za-z][\w.-]*\d)\] "), is_label=True),
    Prefix("syslog", re.compile(rf"(?:{_SYSLOG_TIME}|{_TIME}) (?P<host>\S+) [\w./-]+\[\d+\]: "), is_label=True),
    Prefix("container", re.compile(rf"{_TIME} std(?:out|err) [FP] "), is_label=True),
    Prefix("stamp", re.compile(rf"(?:\[{_TIME}\]|{_TIME}) "), is_label=True),
    Prefix("any", re.compile(r"(?:(?:\[[^\]]*\]|\([^)]*\)|[A-Za-z]*[^A-Za-z\s]\S*) ){1,4}(?=\[rank\d{1,7}\]:)")),
)
"""Row by row, until none matches: a later prefix is nearer to the text, and knows the rank better."""

_OF_SCHEDULER = ("srun: ", "slurmstepd: ")
"""Lines that a scheduler prints itself: they have no label."""
_LABELLED = 0.8
"""Share of the lines, from the first labelled one to the last, from which a label counts as one."""


@dataclass(frozen=True)
class Origin:
    """Where a line comes from; None or empty = its prefixes do not say it."""

    rank: int | None = None
    local: int | None = None
    """Number of the process within its node."""
    host: str = ""
    process: str = ""
    """Its number, where Ray or NCCL says it."""
    label: int | None = field(default=None, compare=False)
    """The number that the scheduler's label, or the name of the file, has. If a process is started for each rank, that
    is the rank, and else the node."""
    is_by_label: bool = field(default=False, compare=False)
    """The rank is taken from the label."""


def labels_of(lines: Iterable[str]) -> frozenset[str]:
    """Return the launchers whose labels most of these lines have, also behind other prefixes."""
    given = [line for line in lines if line.strip() and not line.startswith(_OF_SCHEDULER)]
    labels: frozenset[str] = frozenset()
    while given:
        texts = [[line, *_behind_prefixes(line, labels)] for line in given]
        for one in PREFIXES:
            if one.is_label and one.launcher not in labels and _is_usual(one, texts):
                labels |= {one.launcher}
                break
        else:
            break
    return labels


def _behind_prefixes(line: str, labels: frozenset[str]) -> Iterator[str]:
    """Yield what is behind the first prefix of a line, behind the second one, and so on."""
    pattern, start = _pattern(labels), 0
    while (match := pattern.match(line, start)) is not None and match.end() > start:
        start = match.end()
        yield line[start:]


def _is_usual(prefix: Prefix, texts: Sequence[Sequence[str]]) -> bool:
    found = [next(filter(None, map(prefix.pattern.match, forms)), None) for forms in texts]
    places = [place for place, one in enumerate(found) if one is not None]
    labels = [one[0] for one in found if one is not None]
    if len(labels) * 2 < len(texts) or (prefix.repeats and len({*labels}) * 2 > len(labels)):
        return False
    return len(labels) >= _LABELLED * (places[-1] - places[0] + 1)  # the launcher prints lines before and after them


@cache
def _pattern(labels: frozenset[str]) -> re.Pattern[str]:
    """Return one pattern for all prefixes: a log has many lines. The n-th prefix is in the group `pn`, and its fields
    have its number behind their names."""
    parts = []
    for number, one in enumerate(PREFIXES):
        if not one.is_label or one.launcher in labels:
            numbered = _FIELD.sub(rf"(?P<\g<1>{number}>", one.pattern.pattern)
            parts.append(f"(?P<p{number}>{numbered})")
    return re.compile("|".join(parts))


_FIELD = re.compile(r"\(\?P<(\w+)>")
_FIELDS = [list(one.pattern.groupindex) for one in PREFIXES]


def split(line: str, origin: Origin, labels: frozenset[str]) -> tuple[Origin, str]:
    """Return where a line comes from, and its text without prefixes. `origin` is that of its file."""
    rank, local, host, process, start = origin.rank, origin.local, origin.host, origin.process, 0
    label, is_by_label = origin.label, origin.is_by_label
    pattern = _pattern(labels)
    while (match := pattern.match(line, start)) is not None and match.end() > start:
        prefix = int((match.lastgroup or "p0")[1:])
        for name in _FIELDS[prefix]:
            if value := match[f"{name}{prefix}"]:
                if name == "rank":
                    rank, is_by_label = int(value), False
                elif name == "label":
                    label = int(value)
                    if rank is None or is_by_label:
                        rank, is_by_label = label, True
                elif name == "local":
                    local = int(value)
                elif name == "process":
                    process = value
                else:
                    host = value
        start = match.end()
    return (_origin(rank, local, host, process, label, is_by_label), line[start:]) if start else (origin, line)


_origin = cache(Origin)
