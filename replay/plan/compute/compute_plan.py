"""The computation of one rank in a window: operations in the order in which they began, and their tensors.

It is data: `read_window` makes it, `run.compute_program` runs it. Operations name tensors by *slots*. Each result of an
operation has a slot, and each tensor that existed before the window.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import index
from typing import Any

import msgspec

from crossrank.comm import Count, Int
from crossrank.dtypes import DTYPES
from crossrank.tools.traces.replayed import ComputeCoverage, LeftOutOperations

_MAX_STREAMS = 1024
_MAX_THREADS = 4096
_MAX_ROWS = 1 << 46
INDICES = ("uniform", "zipf")
"""How random indices into a table are distributed over its rows."""
NO_SCHEMA = "not an operation of torch: a kernel launched without one"


class Slot(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tensor as an operation saw it."""

    shape: list[int]
    strides: list[int]
    dtype: str
    """torch's name."""
    device: str = "cpu"
    """As recorded: cpu, cuda:0, …"""
    block: int = -1
    """Its block of memory if it existed before the window; -1 if an operation makes it."""
    offset: int = 0
    """In its block, in elements."""


class Block(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Memory that existed before the window: parameters, optimizer state, buckets, input."""

    bytes: Int
    dtype: str
    device: str = "cpu"
    low: int = 0
    high: int = 0
    """Its integers are from `low` to `high`: by the trace, or by the tables that they index."""
    is_number: bool = False
    """It holds one number that is used as such: a factor, a rate, a step count."""
    is_index: bool = False
    """Its integers choose rows of a table, for example of an embedding."""


class ComputeOperation(msgspec.Struct, gc=False, omit_defaults=True, kw_only=True):
    """One operation that runs again, a call, or a placeholder for something that cannot run."""

    node: Int = 0
    """Id in the execution trace; 0 if the replay added it."""
    name: str = ""
    """`aten::addmm`; for a call, the c10d op."""
    schema: int = -1
    """Index into `ComputePlan.schemas`; -1 if nothing runs."""
    arguments: list[Any] = []
    """In the order of the schema: numbers, strings, None, lists. `{"slot": n}` is a tensor, `{"device": "cpu"}` a
    device, `{"number": "-inf"}` a float that JSON lacks."""
    beyond: list[tuple[Int, Int]] = []
    """(slot, rows) of indices computed from numbers that are not in the trace. They are taken modulo `rows`."""
    filled: list[tuple[Int, Int]] = []
    """(slot, highest value) of integers that the operation leaves unset and the program then wrote itself, such as
    loaded data. They are filled after it. -1: not used as indices; each becomes 1, a neutral factor."""
    results: list[Any] = []
    """Slots of its results, None where a result is not used; a list for a result that is a list."""
    frees: list[int] = []
    """Slots that no later operation uses."""
    call: int = -1
    """Id of the record of the call that is launched here; its tensors are `inputs` and `outputs`."""
    inputs: list[int] = []
    outputs: list[int] = []
    waits: list[int] = []
    """Ids of the calls that are waited for before it."""
    gap_ns: Count = 0
    """Recorded host time before it without an operation and without a wait for communication. It contains the
    profiler's overhead."""
    ranges: Count = 0
    """Nodes of the trace without a schema that began in the gap. Each has profiler overhead."""
    split: Count = 0
    """Operations that began in the gap and are replaced by the operations inside them. Each has profiler overhead like
    one that runs."""
    took_ns: Count = 0
    """Recorded time under the profiler: on the device if it used one."""
    on_device: bool = False
    """`took_ns` is device time."""
    stream: int = -1
    """On a GPU: its stream. 0: the stream with most operations; -1: the stream of the previous operation."""
    after: list[int] = []
    """Positions of earlier operations on other streams for which its stream waits."""
    reason: str = ""
    """Why nothing runs."""

    @property
    def runs(self) -> bool:
        return self.schema >= 0


class ComputePlan(msgspec.Struct, kw_only=True):
    """One rank's computation."""

    operations: list[ComputeOperation]
    schemas: list[str]
    """As torch writes them: `aten::add_.Tensor(Tensor(a!) self, …)`."""
    slots: list[Slot]
    blocks: list[Block]
    range_ns: Count = 0
    """The least profiler overhead of a node without a schema between operations."""
    last_waits: list[int] = []
    """Ids of the calls that are waited for at the end."""
    steps: list[int] = []
    """Positions in `operations` at which a step begins; the first is 0."""
    bytes: Count = 0
    """The most bytes that its tensors need at once: blocks and results of operations."""
    threads: Count = 1
    """Threads of torch on the CPU."""
    unprofiled_ns: list[int] = []
    """Durations of the rank's steps that made the same calls without a profiler."""
    own_ns: Count | None = None
    """Median duration of these steps without waits for communication. None if it is unknown, or if operations ran on a
    device (it is host time)."""
    other_steps: Count = 0
    """The number of steps that made other calls."""
    profiled_ns: list[int] = []
    """Durations of the steps of the window."""
    exposed_ns: Count = 0
    """Recorded time in the window in which the host waited for communication."""


def contradictions(compute: ComputePlan) -> Iterator[str]:
    """Yield the contradictions in a plan, which a user may have written by hand."""
    for position, one in enumerate(compute.operations):
        try:
            slots = [*slots_in(one.arguments), *one.inputs, *one.outputs, *one.frees, *flat_results(one.results)]
            slots += [slot for slot, _ in (*one.beyond, *one.filled)]
        except (TypeError, ValueError):
            yield f"operation {one.node} has a tensor that is not a number"
            return
        if not all(0 <= slot < len(compute.slots) for slot in slots) or one.schema >= len(compute.schemas):
            yield f"operation {one.node} uses a tensor or a schema that does not exist"
            return
        rows = [*(rows for _, rows in one.beyond), *(max(high, 0) + 1 for _, high in one.filled)]
        if not all(0 < one < _MAX_ROWS for one in rows):
            yield f"operation {one.node} has indices into a table of an impossible number of rows"
            return
        if not -1 <= one.stream < _MAX_STREAMS or not all(0 <= at < position for at in one.after):
            yield f"operation {one.node} is on a stream that does not exist, or waits for a later operation"
            return
    if not all(one.block < len(compute.blocks) for one in compute.slots):
        yield "a tensor is in memory that does not exist"
        return
    yield from _wrong_memory(compute)
    if not 0 < compute.threads <= _MAX_THREADS:
        yield f"{compute.threads} threads are impossible (1 to {_MAX_THREADS})"
    if not all(0 <= at < max(1, len(compute.operations)) for at in compute.steps):
        yield "a step begins at an operation that does not exist"


def _wrong_memory(compute: ComputePlan) -> Iterator[str]:
    """Yield which memory, and which tensor in it, torch cannot make."""
    for number, block in enumerate(compute.blocks):
        if block.dtype not in DTYPES or block.bytes < 0 or block.low > block.high:
            yield f"memory {number} has an impossible type, size or range of values"
            return
    for number, one in enumerate(compute.slots):
        is_negative = min([*one.shape, *one.strides], default=0) < 0
        if is_negative or len(one.strides) != len(one.shape) or math.prod(one.shape) >= _MAX_ROWS:
            yield f"tensor {number} has impossible sizes"
            return
        if one.block < 0:
            continue
        known = DTYPES.get(one.dtype)
        last = one.offset + sum((extent - 1) * stride for extent, stride in zip(one.shape, one.strides, strict=True))
        is_within = known is not None and one.offset >= 0 and (last + 1) * known.size <= compute.blocks[one.block].bytes
        if 0 not in one.shape and not is_within:
            yield f"tensor {number} is not within its memory"
            return


def slots_in(value: Any) -> list[int]:
    """Return the slots that an argument names. Raises `TypeError` for a slot that is no number."""
    if isinstance(value, list):
        return [slot for each in value for slot in slots_in(each)]
    return [index(value["slot"])] if isinstance(value, dict) and "slot" in value else []


def flat_results(results: list[Any]) -> list[int]:
    """Return the slots of results, which may be nested in lists. Raises `TypeError` for a slot that is no number."""
    flat: list[int] = []
    for one in results:
        flat += flat_results(one) if isinstance(one, list) else [index(one)] if one is not None else []
    return flat


def coverage_of(computes: Iterable[ComputePlan], failed: Iterable[tuple[str, str, int]] = ()) -> ComputeCoverage:
    """Return how much of the recorded ranks' computation runs again. `failed` has the operations that failed in a
    replay: (name, reason, recorded ns)."""
    recorded = [one for compute in computes for one in compute.operations if one.node and one.call < 0]
    left_out = [(one.name, one.reason, one.took_ns) for one in recorded if not one.runs]
    left_out += failed
    count: Counter[tuple[str, str]] = Counter()
    lost_ns: Counter[tuple[str, str]] = Counter()
    for name, reason, took_ns in left_out:
        count[name, reason] += 1
        lost_ns[name, reason] += took_ns
    recorded_ns = sum(one.took_ns for one in recorded)
    rows = [
        LeftOutOperations(name=name, reason=reason, operations=count[name, reason], ns=took_ns)
        for (name, reason), took_ns in lost_ns.most_common()
    ]
    return ComputeCoverage(
        operations=len(recorded) - len(left_out),
        recorded_operations=len(recorded),
        ns=recorded_ns - lost_ns.total(),
        recorded_ns=recorded_ns,
        left_out=rows,
    )
