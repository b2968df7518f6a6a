"""What a Kineto trace says of communication, read without anything of crossrank's: the control of what links say."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

_RANGE = "crossrank#"
_SIZES = {"Byte": 1, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8}


@dataclass(frozen=True)
class RawKernel:
    name: str
    duration_us: float
    args: dict[str, Any]

    @property
    def bytes(self) -> int | None:
        """What Kineto's arguments say of the larger side; None where they do not."""
        size = _SIZES.get(self.args.get("dtype", ""))
        sides = self.args.get("In msg nelems"), self.args.get("Out msg nelems")
        return None if size is None or None in sides else max(sides) * size  # type: ignore[type-var,operator]


@dataclass
class RawTrace:
    """One rank."""

    calls: set[int] = field(default_factory=set)
    """Ids of the ranges `crossrank#id`."""
    kernels: dict[int, list[RawKernel]] = field(default_factory=lambda: defaultdict(list))
    """Id of a call -> NCCL's kernels that were launched within its range."""
    alone: list[RawKernel] = field(default_factory=list)
    """Those that were launched in none, in the window."""
    launched_before: list[RawKernel] = field(default_factory=list)
    """Those that only ran in the window."""
    works: int = 0
    """Ranges of gloo's Works."""


def unpacked(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())


def read_raw(path: Path) -> RawTrace:
    events = json.loads(unpacked(path))["traceEvents"]
    whole = [one for one in events if one.get("ph") == "X"]
    trace = RawTrace()
    ranges: list[tuple[object, float, float, int]] = []
    launches: dict[object, tuple[object, float]] = {}
    for one in whole:
        name, category = one.get("name", ""), one.get("cat", "")
        if name.startswith(_RANGE):
            begin = float(one["ts"])
            ranges.append((one["tid"], begin, begin + float(one.get("dur", 0)), int(name.removeprefix(_RANGE))))
        elif category in ("cuda_runtime", "cuda_driver"):
            launches[one.get("args", {}).get("correlation")] = one["tid"], float(one["ts"])
        trace.works += name.startswith("gloo:")
    trace.calls = {number for *_, number in ranges}
    for one in whole:
        if one.get("cat") != "kernel" or "nccl" not in one["name"].lower():
            continue
        args = one.get("args") or {}
        kernel = RawKernel(one["name"], float(one["dur"]), args)
        if args.get("correlation") not in launches:
            trace.launched_before.append(kernel)
            continue
        thread, moment = launches[args["correlation"]]
        around = [
            (end - begin, number) for tid, begin, end, number in ranges if tid == thread and begin <= moment <= end
        ]
        (trace.kernels[min(around)[1]] if around else trace.alone).append(kernel)
    return trace
