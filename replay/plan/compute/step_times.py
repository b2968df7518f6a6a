"""Reads the facts about a window in a rank's comms file: how long its steps took, and when it waited."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from crossrank.recording import CommsFile
from crossrank.tools.traces.comms import WallClock

_PYTHON_WAITS = ("wait", "wait_tensor")
"""Waits that count. A launch that waits is replayed as a launch. The wait at the end of a backward pass cannot be
separated from the computation of the window."""
_MAX_THREADS = 4096
_MAX_STEPS = 1000
"""The most steps of a window: a profiler cannot hold more in memory."""


@dataclass(kw_only=True)
class StepTimes:
    """Durations in ns."""

    profiled_ns: list[int] = field(default_factory=list)
    """Durations of the steps of the window."""
    unprofiled_ns: list[int] = field(default_factory=list)
    """Durations of steps outside all windows that made the same calls as a step of this window. If some have the same
    sizes too, only these."""
    own_ns: list[int] = field(default_factory=list)
    """Durations of the same steps without recorded waits."""
    others: int = 0
    """Steps outside windows that made other calls. They are not compared."""
    has_other_sizes: bool = False
    """No step outside windows has the sizes of a step of the window, so steps with the same operations count."""
    threads: int = 1
    """Threads of torch on the CPU."""
    waits: dict[int, int] = field(default_factory=dict)
    """Id of a call -> when the rank began to wait for it, in ns on the clock of the trace."""


def step_times(path: str | None, base_ns: int, number: int) -> StepTimes:
    """Read the times of window `number` from the comms file at `path`; its trace has time 0 at `base_ns` since 1970."""
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
        if wait.id is not None and wait.waited_in in _PYTHON_WAITS:
            found.waits.setdefault(wait.id, clock.at(wait.t) - base_ns)
    found.threads = max((line["threads"] for line in file.windows if _is_count(line.get("threads"))), default=1)
    windows = _find_windows(file)
    own = windows.get(number, range(0))
    # The profiler starts in the step before the window, and writes its files in the step after it.
    touched = {step for one in windows.values() for step in range(one.start - 1, one.stop + 1)}
    own_steps: list[int] = []
    unprofiled: list[tuple[int, int, int]] = []
    waits = sorted((wait.t, wait.took) for wait in file.waits if wait.waited_in in _PYTHON_WAITS)
    for (begin, step), (end, _) in pairwise(sorted((line["t"], line["step"]) for line in file.steps if _is_mark(line))):
        if step in own:
            found.profiled_ns.append(end - begin)
            own_steps.append(step)
        elif step not in touched:
            within = waits[bisect_left(waits, (begin, 0)) : bisect_left(waits, (end, 0))]
            unprofiled.append((step, end - begin, max(0, end - begin - sum(took for _, took in within))))
    same = {step: [one for one in own_steps if operations[one] == operations[step]] for step, _, _ in unprofiled}
    alike = [one for one in unprofiled if any(sizes[one[0]] == sizes[step] for step in same[one[0]])]
    if not alike:
        alike = [one for one in unprofiled if same[one[0]]]
        found.has_other_sizes = bool(alike)
    found.unprofiled_ns = [ns for _, ns, _ in alike]
    found.own_ns = [ns for _, _, ns in alike]
    found.others = len(unprofiled) - len(alike)
    return found


def _find_windows(file: CommsFile) -> dict[int, range]:
    """Return the steps of each window. A window without an end may have the largest number of steps."""
    opened: dict[int, int] = {}
    windows: dict[int, range] = {}
    for line in file.windows:
        number, step = line.get("window"), line.get("step")
        if not isinstance(number, int) or not isinstance(step, int):
            continue
        if line.get("edge") == "open":
            opened[number] = step
            windows[number] = range(step, step + _MAX_STEPS)
        elif number in opened and step - opened[number] < _MAX_STEPS:
            windows[number] = range(opened[number], step + 1)
    return windows


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= _MAX_THREADS


def _is_mark(line: dict[str, int]) -> bool:
    return isinstance(line.get("t"), int) and isinstance(line.get("step"), int)
