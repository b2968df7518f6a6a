"""Every variable that steers the recorder, parsed once into one frozen `Config`.

| variable | values | meaning |
|---|---|---|
| `TRACING` | `CROSSNODE` (default), `ALL`, `NONE` | which calls are marked and printed; `NONE`: nothing is recorded |
| `TRACING_DIR` | folder, default `crossrank-recording` | where the files go |
| `TRACING_WINDOW` | `START:STOP` or `START:STOP:EVERY` | iterations with execution trace and Kineto |
| `TRACING_NVTX` | `1` (default), `0`, `classic` | NVTX markers: on, off, one JSON text per call |
| `TRACING_PRINT` | `0` (default), `1` | print each call that is emitted |
| `TRACING_FLIGHT` | `1` (default), `0` | dump torch's flight recorder at window end, exit and SIGUSR1 |
| `TRACING_HANG_SECONDS` | seconds, default 300, `0` = off | dump it when no communication began or ended for so long |
| `TRACING_NSYS` | `0` (default), `1` | windows drive `nsys --capture-range=cudaProfilerApi` or `=nvtx` |
| `TRACING_NODE` | any text | the node that this rank is on, instead of asking the machine |
| `TRACING_RING` | number of records, default 65536 | calls that may wait for the writer before some are dropped |
| `GPU_SERIAL`, `VM_ID` | any text | written to the header as they stand |

`TORCH_DISTRIBUTED_TRACING` and `TORCH_DISTRIBUTED_TRACING_PRINT` are older names of `TRACING` and `TRACING_PRINT`.
An argument of `enable()` wins over its variable. A value that cannot be read raises `CrossrankError` with the
variable, the value and the allowed set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from crossrank.errors import CrossrankError
from crossrank.recording import is_url

Emit = Literal["CROSSNODE", "ALL", "NONE"]
NvtxMode = Literal["1", "0", "classic"]

TRACING = "TRACING"
TRACING_DIR = "TRACING_DIR"
TRACING_WINDOW = "TRACING_WINDOW"
TRACING_NVTX = "TRACING_NVTX"
TRACING_PRINT = "TRACING_PRINT"
TRACING_FLIGHT = "TRACING_FLIGHT"
TRACING_HANG_SECONDS = "TRACING_HANG_SECONDS"
TRACING_NSYS = "TRACING_NSYS"
TRACING_NODE = "TRACING_NODE"
TRACING_RING = "TRACING_RING"
GPU_SERIAL = "GPU_SERIAL"
VM_ID = "VM_ID"

# The names of the older shim, still in people's job scripts. The new name wins where both are set.
ALIASES = {TRACING: "TORCH_DISTRIBUTED_TRACING", TRACING_PRINT: "TORCH_DISTRIBUTED_TRACING_PRINT"}

_WORDS = {"1": "true", "0": "false"}

DEFAULT_DIR = "crossrank-recording"
DEFAULT_RING = 65_536
DEFAULT_HANG_SECONDS = 300.0

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Window:
    """Iterations [start, stop), again every `every` iterations where that is set."""

    start: int
    stop: int
    every: int | None = None

    @property
    def length(self) -> int:
        return self.stop - self.start

    def holds(self, step: int) -> bool:
        """Whether iteration `step` is recorded.

        >>> [step for step in range(12) if Window(start=2, stop=4, every=5).holds(step)]
        [2, 3, 7, 8]
        """
        if step < self.start:
            return False
        offset = step - self.start
        return (offset if self.every is None else offset % self.every) < self.length

    def continues(self, step: int) -> bool:
        """Whether the window that holds iteration `step` holds the next one as well.

        >>> Window(start=2, stop=4, every=2).continues(2), Window(start=2, stop=4, every=2).continues(3)
        (True, False)
        """
        offset = step - self.start
        return (offset if self.every is None else offset % self.every) + 1 < self.length


@dataclass(frozen=True, kw_only=True)
class Config:
    """What one `enable()` does. Field by field as in the table of the module."""

    emit: Emit = "CROSSNODE"
    directory: str = DEFAULT_DIR
    window: Window | None = None
    nvtx: NvtxMode = "1"
    print_calls: bool = False
    flight: bool = True
    hang_seconds: float = DEFAULT_HANG_SECONDS
    nsys: bool = False
    node: str | None = None
    ring: int = DEFAULT_RING
    gpu_serial: str | None = None
    vm_id: str | None = None


def load(arguments: Mapping[str, object], environment: Mapping[str, str]) -> Config:
    """The configuration from the arguments of `enable()` (None = not given) and the environment.

    Raises `CrossrankError` for a value outside its allowed set.
    """

    def value(name: str, argument: str) -> tuple[str, str] | None:
        """Where the setting was found and its text."""
        given = arguments.get(argument)
        if given is not None:
            text = ":".join(map(str, given)) if isinstance(given, tuple | list) else str(given)
            return f"enable({argument}=)", text
        for variable in (name, ALIASES.get(name)):
            if variable is not None and (text := environment.get(variable, "").strip()):
                return variable, text
        return None

    def choice(name: str, argument: str, default: _T, allowed: Mapping[str, _T]) -> _T:
        found = value(name, argument)
        if found is None:
            return default
        where, text = found
        for spelling, meaning in allowed.items():
            if text.lower() in (spelling.lower(), _WORDS.get(spelling)):
                return meaning
        raise CrossrankError(f"{where}={text!r} is not one of {', '.join(allowed)}")

    on_off = {"1": True, "0": False}
    window = value(TRACING_WINDOW, "window")
    ring = value(TRACING_RING, "ring")
    hang = value(TRACING_HANG_SECONDS, "hang_seconds")
    directory = value(TRACING_DIR, "directory")
    node = value(TRACING_NODE, "node")
    emits: dict[str, Emit] = {"CROSSNODE": "CROSSNODE", "ALL": "ALL", "NONE": "NONE"}
    modes: dict[str, NvtxMode] = {"1": "1", "0": "0", "classic": "classic"}
    return Config(
        emit=choice(TRACING, "tracing", "CROSSNODE", emits),
        directory=_folder(*directory) if directory else DEFAULT_DIR,
        window=parse_window(*window) if window else None,
        nvtx=choice(TRACING_NVTX, "nvtx", "1", modes),
        print_calls=choice(TRACING_PRINT, "print_calls", False, on_off),
        flight=choice(TRACING_FLIGHT, "flight", True, on_off),
        hang_seconds=_seconds(*hang) if hang else DEFAULT_HANG_SECONDS,
        nsys=choice(TRACING_NSYS, "nsys", False, on_off),
        node=node[1] if node else None,
        ring=_positive(*ring) if ring else DEFAULT_RING,
        gpu_serial=environment.get(GPU_SERIAL) or None,
        vm_id=environment.get(VM_ID) or None,
    )


def parse_window(where: str, text: str) -> Window:
    """`START:STOP[:EVERY]` with 0 <= START < STOP and EVERY >= STOP - START.

    >>> parse_window("TRACING_WINDOW", "10:12:100")
    Window(start=10, stop=12, every=100)
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise CrossrankError(
            f"{where}={text!r} is not START:STOP or START:STOP:EVERY in iterations, for example 10:12 or 10:12:1000"
        )
    start, stop = int(parts[0]), int(parts[1])
    every = int(parts[2]) if len(parts) == 3 else None
    if stop <= start:
        raise CrossrankError(f"{where}={text!r}: STOP must be greater than START, for example {start}:{start + 2}")
    if every is not None and every < stop - start:
        raise CrossrankError(
            f"{where}={text!r}: EVERY counts from START to the next START and must be at least {stop - start}"
        )
    return Window(start=start, stop=stop, every=every)


def _folder(where: str, text: str) -> str:
    if is_url(text):
        raise CrossrankError(f"{where}={text!r} is a URL; name a folder, and copy it when the job has ended")
    return text


def _positive(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise CrossrankError(f"{where}={text!r} is not a whole number above 0")
    return int(text)


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise CrossrankError(f"{where}={text!r} is no number of seconds; 0 switches the watch for hangs off")
    return seconds
