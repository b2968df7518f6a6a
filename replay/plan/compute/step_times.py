"""What a rank's comms file knows beside the calls of a window: how long its steps took, and when it waited."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from crossrank.recording import CommsFile
from crossrank.tools.traces.comms import WallClock

_MOST_THREADS = 4096
_LONGEST = 1000
"""Steps of a window: a profiler keeps no more in memory."""


@dataclass(kw_only=True)
class StepTimes:
    """Durations in ns."""

    profiled_ns: list[int] = field(default_factory=list)
    """Of the steps of the window."""
    unprofiled_ns: list[int] = field(default_factory=list)
    """Of steps outside all windows that made the calls that a step of this window made."""
    others: int = 0
    """Steps outside windows that made other calls: they are not compared with."""
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
    calls: dict[int, int] = {}
    """Step -> what tells its calls from those of another."""
    for record in file.records():
        calls[record.step] = hash((calls.get(record.step, 0), record.op, record.pg, record.bytes, record.dtype))
    clock = WallClock([file.header.clock, *file.clocks] if file.header is not None else file.clocks)
    for wait in file.waits:
        if wait.id is not None and wait.stood != "launch":
            found.waits.setdefault(wait.id, clock.at(wait.t) - base_ns)
    found.threads = max((line["threads"] for line in file.windows if _is_count(line.get("threads"))), default=1)
    windows = _windows(file)
    own = windows.get(number, range(0))
    # The profiler is made ready in the step before, and writes its files in the one after.
    touched = {step for one in windows.values() for step in range(one.start - 1, one.stop + 1)}
    alike: set[int] = set()
    free: list[tuple[int, int]] = []
    for (begin, step), (end, _) in pairwise(sorted((line["t"], line["step"]) for line in file.steps if _is_mark(line))):
        if step in own:
            found.profiled_ns.append(end - begin)
            alike.add(calls.get(step, 0))
        elif step not in touched:
            free.append((step, end - begin))
    found.unprofiled_ns = [ns for step, ns in free if calls.get(step, 0) in alike]
    found.others = len(free) - len(found.unprofiled_ns)
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
