"""The settings of the recorder: `SETTINGS` has one row per setting, and `load` parses them into a frozen `Config`.

docs/reference/variables.md documents each variable. An argument of `enable()` overrides its variable. An invalid value
raises `CrossrankError` with the variable, the value and the allowed values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from crossrank.errors import CrossrankError
from crossrank.recording import is_url


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps [start, stop), repeated every `every` steps if that is set."""

    start: int
    stop: int
    every: int | None = None

    def holds(self, step: int) -> bool:
        """Return whether a window contains `step`.

        >>> [step for step in range(12) if Window(start=2, stop=4, every=5).holds(step)]
        [2, 3, 7, 8]
        """
        return step >= self.start and self._offset(step) < self.stop - self.start

    def continues(self, step: int) -> bool:
        """Return whether the window that contains `step` also contains the next step.

        >>> Window(start=2, stop=4, every=2).continues(2), Window(start=2, stop=4, every=2).continues(3)
        (True, False)
        """
        return self._offset(step) + 1 < self.stop - self.start

    def _offset(self, step: int) -> int:
        return (step - self.start) % self.every if self.every is not None else step - self.start


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one recording."""

    emit: Literal["CROSSNODE", "ALL", "NONE"] = "CROSSNODE"
    directory: str = "crossrank-recording"
    window: Window | None = None
    nvtx: Literal["1", "0", "classic"] = "1"
    print_calls: bool = False
    flight: bool = True
    hang_seconds: float = 300.0
    on_hang: Literal["warn", "abort"] = "warn"
    late_seconds: float = 0.0
    """With `abort`, seconds after which a job ends whose ranks wait for one that does nothing; 0 = by the timeout."""
    timing: bool = False
    exception_texts: bool = True
    nsys: bool = False
    recorder: Literal["auto", "compiled", "python"] = "auto"
    node: str | None = None
    ring: int = 32_768
    """Largest number of calls that wait for the writer thread; further calls are dropped."""
    gpu_serial: str | None = None
    vm_id: str | None = None


_LARGEST_RING = 1 << 20
"""Calls; about 180 MB."""
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 10_000_000
_DIGITS = 15
"""Largest number of digits of a step; a longer number is a mistake."""


def load(arguments: Mapping[str, object], environment: Mapping[str, str]) -> Config:
    """Return the settings from the arguments of `enable()` (None = not given) and the environment.

    Raises `CrossrankError` for an invalid value.
    """
    values: dict[str, Any] = {}
    for field, (parse, variables) in SETTINGS.items():
        argument = "tracing" if field == "emit" else field
        given = arguments.get(argument)
        found = [(name, text) for name in variables if (text := environment.get(name, "").strip())]
        if given is not None:
            text = ":".join(map(str, given)) if isinstance(given, tuple | list) else str(given)
            found = [(f"enable({argument}=)", text)]
        if found:
            where, text = found[0]
            try:
                values[field] = parse(text)
            except ValueError as error:
                raise CrossrankError(f"{where}={text!r}{error}") from None
    return Config(**values)


def parse_window(text: str) -> Window:
    """Parse `START:STOP[:EVERY]` with 0 <= START < STOP and EVERY >= STOP - START.

    >>> parse_window("10:12:100")
    Window(start=10, stop=12, every=100)
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(p.isascii() and p.isdigit() and len(p) <= _DIGITS for p in parts):
        raise ValueError(" is not START:STOP or START:STOP:EVERY in steps, for example 10:12 or 10:12:1000")
    start, stop = int(parts[0]), int(parts[1])
    every = int(parts[2]) if len(parts) == 3 else None
    if stop <= start:
        raise ValueError(f": STOP must be greater than START, for example {start}:{start + 2}")
    if every is not None and every < stop - start:
        raise ValueError(f": EVERY counts from START to the next START and must be at least {stop - start}")
    return Window(start=start, stop=stop, every=every)


def _one_of(*allowed: str) -> Callable[[str], str]:
    """Return a parser for one of these words, in any case, with `true` for `1` and `false` for `0`."""

    def parse(text: str) -> str:
        word = {"true": "1", "false": "0"}.get(text.lower(), text.lower())
        for spelling in allowed:
            if word == spelling.lower():
                return spelling
        raise ValueError(f" is not one of {', '.join(allowed)}")

    return parse


def _on_off(text: str) -> bool:
    return _one_of("1", "0")(text) == "1"


def _folder(text: str) -> str:
    if is_url(text):
        raise ValueError(" is a URL; give a folder, and copy it after the job")
    return text


def _ring(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < _DIGITS and 0 < (calls := int(text)) <= _LARGEST_RING:
        return calls
    raise ValueError(f" is not a whole number from 1 to {_LARGEST_RING:,}")


def _seconds(zero: str) -> Callable[[str], float]:
    """Return a parser of seconds; `zero` says what 0 does."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            seconds = float(text)
            if seconds == 0 or _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
                return seconds
        raise ValueError(f" is not a number of seconds from {_LEAST_SECONDS:g} to {_MOST_SECONDS:,}; 0 {zero}")

    return parse


# Field of `Config` -> its parser, which raises `ValueError` with the reason; its variable, and the variable of the
# older shim, which job scripts still use.
SETTINGS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "emit": (_one_of("CROSSNODE", "ALL", "NONE"), ("TRACING", "TORCH_DISTRIBUTED_TRACING")),
    "directory": (_folder, ("TRACING_DIR",)),
    "window": (parse_window, ("TRACING_WINDOW",)),
    "nvtx": (_one_of("1", "0", "classic"), ("TRACING_NVTX",)),
    "print_calls": (_on_off, ("TRACING_PRINT", "TORCH_DISTRIBUTED_TRACING_PRINT")),
    "flight": (_on_off, ("TRACING_FLIGHT",)),
    "hang_seconds": (_seconds("turns the hang watch off"), ("TRACING_HANG_SECONDS",)),
    "on_hang": (_one_of("warn", "abort"), ("TRACING_ON_HANG",)),
    "late_seconds": (_seconds("waits for the timeouts of the groups"), ("TRACING_LATE_SECONDS",)),
    "timing": (_on_off, ("TRACING_TIMING",)),
    "exception_texts": (_on_off, ("TRACING_EXCEPTION_TEXTS",)),
    "nsys": (_on_off, ("TRACING_NSYS",)),
    "recorder": (_one_of("auto", "compiled", "python"), ("TRACING_RECORDER",)),
    "node": (str, ("TRACING_NODE",)),
    "ring": (_ring, ("TRACING_RING",)),
    "gpu_serial": (str, ("GPU_SERIAL",)),
    "vm_id": (str, ("VM_ID",)),
}
