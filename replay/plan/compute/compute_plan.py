"""What one rank computes in a window: operations in the order in which they began, and the tensors they work on.

It is data, as the plan that it is a part of: made by `read_window`, run by `run.compute_program`. Operations name
tensors by *slots*: one for every tensor that an operation gives, and one for every tensor that was there before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import index
from typing import Any

import msgspec

from crossrank.comm import Count, Int
from crossrank.tools.traces.replayed import ComputeCoverage, LeftOutOperations

_MOST_STREAMS = 1024
_MOST_ROWS = 1 << 46
INDICES = ("uniform", "zipf")
"""How indices into a table may be spread over its rows."""
NO_SCHEMA = "no operation of torch: a kernel of its own, launched without one"


class Slot(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tensor as an operation saw it."""

    shape: list[int]
    strides: list[int]
    dtype: str
    """torch's name."""
    device: str = "cpu"
    """As recorded: cpu, cuda:0, …"""
    block: int = -1
    """The block of memory that it lies in, where it was there before the window; -1 where an operation gives it."""
    offset: int = 0
    """In its block, in elements."""


class Block(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Memory that was there before the window: parameters, the optimizer's state, buckets, input."""

    bytes: Int
    dtype: str
    device: str = "cpu"
    low: int = 0
    high: int = 0
    """Integers from `low` to `high`, as the trace or those who read them as indices say."""
    is_number: bool = False
    """It holds one number that stands for itself: a factor, a rate, a count of steps."""
    is_index: bool = False
    """Its integers choose rows of a table, such as an embedding's."""


class ComputeOperation(msgspec.Struct, gc=False, omit_defaults=True, kw_only=True):
    """One operation that runs again, a call, or what stands in for something that cannot run."""

    node: Int = 0
    """Id in the execution trace; 0 for what the replay adds."""
    name: str = ""
    """`aten::addmm`; of a call the c10d op."""
    schema: int = -1
    """Index into `ComputePlan.schemas`; -1 where nothing runs."""
    arguments: list[Any] = []
    """In the order of the schema: numbers, texts, None, lists; `{"slot": n}` is a tensor, `{"device": "cpu"}` one of
    those, `{"number": "-inf"}` a float that JSON lacks."""
    beyond: list[tuple[Int, Int]] = []
    """(slot, rows) of indices that were computed with numbers which the trace does not have: they are brought into the
    table of so many rows before they are read."""
    filled: list[tuple[Int, Int]] = []
    """(slot, highest value) of integers that it gives without a value, and that the program then wrote by itself, as
    what loads data does: they are filled after it. -1: nothing reads them as indices, and each is 1, which changes
    nothing as a factor."""
    results: list[Any] = []
    """Slots that take what it returns, None where nobody uses it; a list where it returns one."""
    frees: list[int] = []
    """Slots that nobody uses after it."""
    call: int = -1
    """Id of the record of the call that is launched here; its tensors are `inputs` and `outputs`."""
    inputs: list[int] = []
    outputs: list[int] = []
    waits: list[int] = []
    """Ids of the calls that are waited for before it."""
    gap_ns: Count = 0
    """Recorded time of the host before it in which no operation ran and no communication was waited for, with what the
    profiler took of it."""
    ranges: Count = 0
    """Nodes of the trace without a schema that began in the gap: each cost the profiler time."""
    split: Count = 0
    """Operations that began in the gap and of which those inside run: they cost it as much as one that runs."""
    took_ns: Count = 0
    """Recorded time under the profiler: on the device where it had any there."""
    on_device: bool = False
    """`took_ns` is of a device."""
    stream: int = -1
    """On a GPU: the number of the stream that it is launched on, 0 = the one with most operations; -1 = that of the
    operation before it."""
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
    """What each node without a schema between operations cost the profiler, at least."""
    last_waits: list[int] = []
    """Ids of the calls that are waited for at the end."""
    steps: list[int] = []
    """Positions in `operations` at which a step begins, the first is 0."""
    bytes: Count = 0
    """Most that its tensors take at once, in bytes: blocks and what operations give."""
    threads: Count = 1
    """Of torch on the CPU."""
    unprofiled_ns: list[int] = []
    """How long the steps of the same rank took that were not recorded under a profiler and made the same calls."""
    own_ns: Count | None = None
    """How long a typical one of them took without waits for communication; None where that is not known, and where
    operations ran on a device, for it is the host's time."""
    other_steps: Count = 0
    """Those that made other calls."""
    profiled_ns: list[int] = []
    """How long those of the window took."""
    exposed_ns: Count = 0
    """Time in the window in which the host waited for communication, as far as it is recorded."""


def contradictions(compute: ComputePlan) -> Iterator[str]:
    """What cannot be in a plan that may have been written by hand."""
    for position, one in enumerate(compute.operations):
        try:
            slots = [*slots_in(one.arguments), *one.inputs, *one.outputs, *one.frees, *flat_results(one.results)]
            slots += [slot for slot, _ in (*one.beyond, *one.filled)]
        except (TypeError, ValueError):
            yield f"operation {one.node} names a tensor that is no number"
            return
        if not all(0 <= slot < len(compute.slots) for slot in slots) or one.schema >= len(compute.schemas):
            yield f"operation {one.node} names a tensor or a schema that is not there"
            return
        rows = [*(rows for _, rows in one.beyond), *(max(high, 0) + 1 for _, high in one.filled)]
        if not all(0 < one < _MOST_ROWS for one in rows):
            yield f"operation {one.node} has indices into a table of an impossible number of rows"
            return
        if not -1 <= one.stream < _MOST_STREAMS or not all(0 <= at < position for at in one.after):
            yield f"operation {one.node} is on a stream that is not there, or waits for an operation after it"
            return
    if not all(one.block < len(compute.blocks) for one in compute.slots):
        yield "a tensor lies in memory that is not there"


def slots_in(value: Any) -> list[int]:
    """The slots that an argument names. Raises `TypeError` for one that is no number."""
    if isinstance(value, list):
        return [slot for each in value for slot in slots_in(each)]
    return [index(value["slot"])] if isinstance(value, dict) and "slot" in value else []


def flat_results(results: list[Any]) -> list[int]:
    """The slots of results, which may stand in lists. Raises `TypeError` for one that is no number."""
    flat: list[int] = []
    for one in results:
        flat += flat_results(one) if isinstance(one, list) else [index(one)] if one is not None else []
    return flat


def coverage_of(computes: Iterable[ComputePlan], failed: Iterable[tuple[str, str, int]] = ()) -> ComputeCoverage:
    """How much of the computation of recorded ranks runs again; `failed` are operations that a replay found to fail:
    (name, reason, recorded ns)."""
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
