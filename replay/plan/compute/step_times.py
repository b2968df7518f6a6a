"""What a rank's comms file knows beside the calls of a window: how long its steps took, and when it waited."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from crossrank.recording import CommsFile
from crossrank.tools.traces.comms import WallClock

_IN_PYTHON = ("wait", "wait_tensor")
"""Waits that count: a launch that waits is replayed as a launch, and in a window the wait at the end of a backward pass
is not told apart from its computation."""
_MOST_THREADS = 4096
_LONGEST = 1000
"""Steps of a window: a profiler keeps no more in memory."""


@dataclass(kw_only=True)
class StepTimes:
    """Durations in ns."""

    profiled_ns: list[int] = field(default_factory=list)
    """Of the steps of the window."""
    unprofiled_ns: list[int] = field(default_factory=list)
    """Of steps outside all windows that made the calls that a step of this window made, with the same sizes where there
    are such."""
    own_ns: list[int] = field(default_factory=list)
    """Of each of them, what was in no wait that is recorded."""
    others: int = 0
    """Steps outside windows that made other calls: they are not compared with."""
    has_other_sizes: bool = False
    """No step outside windows moved as many bytes as one of the window: those with the same operations count."""
    threads: int = 1
    """Of torch on the CPU."""
    waits: dict[int, int] = field(default_factory=dict)
    """Id of a call -> when the rank began to wait for it, in ns on the clock of the trace."""


def step_times(path: str | None, base_ns: int, number: int) -> StepTimes:
    """What the comms file at `path` says of window `number`, whose trace has time 0 at `base_ns` since 1970."""
    found = StepTimes()
    if path is None:
        return found
    file = CommsFile(path)
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    operations: defaultdict[int, list[int]] = defaultdict(list)
    for record in file.records():
        operations[record.step].append(hash((record.op, record.pg, record.dtype)))
        sizes[record.step].append(record.bytes)
    clock = WallClock([file.header.clock, *file.clocks] if file.header is not None else file.clocks)
    for wait in file.waits:
        if wait.id is not None and wait.stood in _IN_PYTHON:
            found.waits.setdefault(wait.id, clock.at(wait.t) - base_ns)
    found.threads = max((line["threads"] for line in file.windows if _is_count(line.get("threads"))), default=1)
    windows = _windows(file)
    own = windows.get(number, range(0))
    # The profiler is made ready in the step before, and writes its files in the one after.
    touched = {step for one in windows.values() for step in range(one.start - 1, one.stop + 1)}
    own_steps: list[int] = []
    free: list[tuple[int, int, int]] = []
    waits = sorted((wait.t, wait.took) for wait in file.waits if wait.stood in _IN_PYTHON)
    for (begin, step), (end, _) in pairwise(sorted((line["t"], line["step"]) for line in file.steps if _is_mark(line))):
        if step in own:
            found.profiled_ns.append(end - begin)
            own_steps.append(step)
        elif step not in touched:
            within = waits[bisect_left(waits, (begin, 0)) : bisect_left(waits, (end, 0))]
            free.append((step, end - begin, max(0, end - begin - sum(took for _, took in within))))
    same = {step: [one for one in own_steps if operations[one] == operations[step]] for step, _, _ in free}
    alike = [one for one in free if any(sizes[one[0]] == sizes[step] for step in same[one[0]])]
    if not alike:
        alike = [one for one in free if same[one[0]]]
        found.has_other_sizes = bool(alike)
    found.unprofiled_ns = [ns for _, ns, _ in alike]
    found.own_ns = [ns for _, _, ns in alike]
    found.others = len(free) - len(alike)
    return found


def _windows(file: CommsFile) -> dict[int, range]:
    """The steps of each window. One that did not end has those that any window may have."""
    opened: dict[int, int] = {}
    windows: dict[int, range] = {}
    for line in file.windows:
        number, step = line.get("window"), line.get("step")
        if not isinstance(number, int) or not isinstance(step, int):
            continue
        if line.get("edge") == "open":
            opened[number] = step
            windows[number] = range(step, step + _LONGEST)
        elif number in opened and step - opened[number] < _LONGEST:
            windows[number] = range(opened[number], step + 1)
    return windows


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= _MOST_THREADS


def _is_mark(line: dict[str, int]) -> bool:
    return isinstance(line.get("t"), int) and isinstance(line.get("step"), int)
