"""One rank's computation, ready to run: its operations, their tensors, and each pass as Python code.

A pass is straight-line code with one line per operation, `s[7] = f3(s[1], s[2])`: `s` has the tensors by slot, `f3` is
the operation. So an operation costs as much as in a Python loop. The code contains numbers of the plan, never its
strings.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from crossrank.errors import CrossrankError, one_line
from crossrank.machine import peak_memory
from crossrank.replay.plan.compute.compute_plan import ComputeOperation, ComputePlan, flat_results, slots_in
from crossrank.replay.run.allowed_operations import find_operations, refusal
from crossrank.replay.run.compute_device import DeviceStreams, fill_blocks
from crossrank.replay.run.host_time import gaps_of, host_times, profiled, shortened, slowness
from crossrank.replay.run.messages import Computed
from crossrank.replay.run.pacing import idle, make_busy
from crossrank.replay.run.place_launches import place_launches
from crossrank.replay.run.program import Program
from crossrank.tools.traces.kineto import read_kineto

_RESHAPES = frozenset(
    f"aten::{name}_" for name in ("unsqueeze", "squeeze", "t", "transpose", "resize", "set", "as_strided", "swapaxes")
)
_MAX_LINES = 1000
"""Per function: Python compiles longer ones in more than linear time."""
_OTHER_SHAPE = "its result depends on its data and has another shape"
_CLOCK = "c(now())"
"""The line that notes the time."""
Launch = Callable[[int], None]
Wait = Callable[[Sequence[int]], None]


_Line = tuple[str, ComputeOperation | None]
"""A line of code, and the operation that it runs."""


class _Part(NamedTuple):
    """The code of some operations."""

    run: Callable[..., None]
    operations: list[ComputeOperation | None]
    """By line, after the `def`."""

    def operation_of(self, error: Exception) -> ComputeOperation | None:
        """Return the operation whose line raised the error; None if it is no operation of torch."""
        frames = traceback.walk_tb(error.__traceback__)
        line = next((number for frame, number in frames if frame.f_code is self.run.__code__), 0)
        operation = self.operations[line - 2] if line >= 2 else None
        return operation if operation is not None and operation.runs else None


class ComputeProgram:
    """Runs one rank's computation, pass after pass."""

    def __init__(
        self,
        plan: ComputePlan,
        device: torch.device,
        *,
        imports: Sequence[str] = (),
        scale: float = 1.0,
        indices: str = "uniform",
        seed: int = 0,
    ) -> None:
        """`scale` multiplies the host's time between operations. Raises `CrossrankError` if memory is too small."""
        self.plan = plan
        self.device = device
        self.host_ns = [0] * len(plan.operations)
        """Host time before each operation, without `scale`."""
        self._most_host_ns: list[int] = []
        """The same, as measured under the profiler: an upper limit."""
        self._slowness: float | None = None
        self._once_ns = 0
        """The excess of single steps, which the replay skips."""
        self._scale = scale
        self._profiled: list[list[int | None]] = []
        """Duration of each operation in passes under the profiler."""
        self.slots: list[Any] = [None] * len(plan.slots)
        self.failed: dict[int, str] = {}
        """Position of an operation that cannot run -> why."""
        self.marks: list[int] = []
        """The start of each step of the last pass, in ns."""
        self._steps = set(plan.steps)
        self._operations = find_operations(plan.schemas, imports)
        self._argument_defaults = [_argument_defaults(one.operation) for one in self._operations]
        self._blocks = fill_blocks(plan.blocks, device, indices, seed)
        self._generator = torch.Generator().manual_seed(seed)
        for number, slot in enumerate(plan.slots):
            if slot.block >= 0:
                dtype = getattr(torch, slot.dtype)
                block = self._blocks[slot.block]
                whole = block[: block.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                self.slots[number] = whole.as_strided(slot.shape, slot.strides, slot.offset)
        reshaping = {slot for one in plan.operations if one.name in _RESHAPES for slot in slots_in(one.arguments)}
        self._reshaped = [(slot, self.slots[slot]) for slot in sorted(reshaping) if plan.slots[slot].block >= 0]
        self._stream_at = [0]
        """The current stream after each operation; the first is the one before all."""
        for operation in plan.operations:
            self._stream_at.append(operation.stream if operation.stream >= 0 else self._stream_at[-1])
        self._awaited = {at for one in plan.operations for at in one.after}
        self._made_on: dict[int, int] = {}
        """Slot of a result -> its stream."""
        self.streams: DeviceStreams | None = None
        if device.type == "cuda" and max(self._stream_at) > 0:
            self.streams = DeviceStreams(device, max(self._stream_at) + 1, self._awaited)
        self._names: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._parts: list[_Part] = []
        self._clocked: list[_Part] = []

    def join(self, program: Program, launch: Launch, wait: Wait, progress: list[int]) -> None:
        """Place the launches of `program` and their waits between the operations. `progress[1]` counts operations, for
        the watch."""
        self._launches, self._waits, self._last_waits = place_launches(self.plan, program)
        self._bind(launch, wait, progress)

    def run_pass(self, *, trial: bool = False, clock: list[int] | None = None) -> None:
        """Run a pass; call `reset` before it. In a `trial`, every operation may fail. `clock` gets the time before and
        after each operation, in ns."""
        if trial:
            self._run_trial()
            return
        self.marks = []
        parts = self._parts if clock is None else self._clocked
        pass_arguments = (self.slots,) if clock is None else (self.slots, clock.append)
        # No tensor needs gradients, so autograd records nothing. But some operations return more if gradients are
        # enabled (an LSTM's workspace, which its backward takes).
        with torch.enable_grad():
            for part in parts:
                try:
                    part.run(*pass_arguments)
                except Exception as error:
                    operation = part.operation_of(error)
                    if operation is None:
                        raise  # a call raised it
                    raise CrossrankError(f"{operation.name} (node {operation.node}): {one_line(error)}") from error
            self._finish_pass()

    def reset(self) -> None:
        """Undo in-place changes of the shapes of tensors that existed before the window."""
        if self.streams is not None:
            self.streams.begin()
        for slot, tensor in self._reshaped:
            self.slots[slot] = tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _run_trial(self) -> None:
        """Run a pass in which operations may fail. Later, a failed one only idles and leaves its results empty."""
        self.marks = []
        self._names["s"] = self.slots

        def run(lines: list[str]) -> None:
            exec("\n".join(lines), self._names)

        with torch.enable_grad():  # as in `run_pass`
            for number, operation in enumerate(self.plan.operations):
                run(self._code_before(number, operation))
                if self._can_run(number):
                    try:
                        run(self._code(number, operation))
                        if self._has_other_shapes(operation):
                            self.failed[number] = _OTHER_SHAPE
                    except Exception as error:
                        self.failed[number] = one_line(error)[:120]
                if not self._can_run(number):
                    run(self._code(number, operation))
                run(self._code_after(number, operation))
            self._finish_pass()
        self._compile()

    def _can_run(self, number: int) -> bool:
        return self.plan.operations[number].runs and number not in self.failed

    def _finish_pass(self) -> None:
        """Launch the calls that belong to no operation, and wait for all unfinished calls."""
        for position in self._launches.get(-1, ()):
            self._names["launch"](position)
        self._names["wait"](self._last_waits)
        if self.streams is not None:
            self.streams.end()

    def learn_from_profiler(self, run: Callable[[], object], passes: int) -> None:
        """Run `passes` passes with `run` under torch's profiler, and estimate the recorded host time between
        operations."""
        with TemporaryDirectory(prefix="crossrank-") as folder:
            kineto = Path(folder, "kineto.json")
            profiled(lambda: [run() for _ in range(passes)], Path(folder, "et.json"), kineto)
            events = read_kineto(str(kineto)).host
        count = len(self.plan.operations)
        names = [one.name if self._can_run(number) else "" for number, one in enumerate(self.plan.operations)]
        before, took = gaps_of(names * passes, events)
        each = [slice(number * count, (number + 1) * count) for number in range(passes)]
        self._profiled = [took[one] for one in each]
        # The replay launches communication or waits for it in these gaps.
        waiting = {number + 1 for number in self._launches} | self._waits.keys()
        gaps = [[None if at in waiting else gap for at, gap in enumerate(before[one])] for one in each]
        host = host_times(self.plan, gaps)
        self.host_ns = self._most_host_ns = host.before
        self._once_ns = host.once
        self._slowness = slowness(self.plan, self._profiled)
        self._compile()

    def fit_host(self, own_ns: float) -> None:
        """Reduce the host's time to that of steps without a profiler. `own_ns` is the duration of a pass without waits
        now."""
        if self._slowness is None or self.plan.own_ns is None:
            return
        as_recorded = own_ns + (1 - self._scale) * sum(self.host_ns)
        too_long = as_recorded - self._slowness * self.plan.own_ns * len(self.plan.steps)
        self.host_ns = shortened(self._most_host_ns, round(sum(self.host_ns) - too_long))
        self._compile()

    def result(self, clock: Sequence[int]) -> Computed:
        """Return what was computed; `clock` has the times of a pass."""
        totals: dict[str, tuple[int, int, int]] = {}
        for number, operation in enumerate(self.plan.operations):
            if operation.node and self._can_run(number):
                count, ns, under_profiler = totals.get(operation.name, (0, 0, 0))
                took = [one for passed in self._profiled if (one := passed[number]) is not None]
                totals[operation.name] = (
                    count + 1,
                    ns + clock[2 * number + 1] - clock[2 * number],
                    under_profiler + (round(median(took)) if took else 0),
                )
        failed = [(self.plan.operations[number], reason) for number, reason in self.failed.items()]
        return Computed(
            operations=totals,
            failed=[(one.name, reason, one.took_ns) for one, reason in failed if one.node],
            host_ns=round(sum(self.host_ns) * self._scale),
            host_once_ns=round(self._once_ns * self._scale),
            slowness=self._slowness if self._scale == 1 else None,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_memory(),
        )

    # --- code --------------------------------------------------------------------------------------------------------

    def _bind(self, launch: Launch, wait: Wait, progress: list[int]) -> None:
        def empty(slot: int) -> Any:
            one = self.plan.slots[slot]
            made = torch.empty_strided(one.shape, one.strides, dtype=getattr(torch, one.dtype), device=self.device)
            return made if made.is_floating_point() else made.zero_()

        made_up: dict[int, torch.Tensor] = {}

        def fill(slot: int, high: int) -> None:
            if slot not in made_up:
                shape = self.slots[slot].shape
                made_up[slot] = (
                    torch.ones(shape) if high < 0 else torch.randint(high + 1, shape, generator=self._generator)
                )
            self.slots[slot].copy_(made_up[slot])

        on_gpu = self.device.type == "cuda"

        def mark() -> None:
            # The host runs ahead of a GPU, so only the whole pass shows how long its steps took.
            if not (on_gpu and self.marks):
                self.marks.append(time.monotonic_ns())

        self._names |= {
            "launch": launch,
            "wait": wait,
            "host": idle,
            "device": make_busy(self.device) if on_gpu else idle,
            "empty": empty,
            "fill": fill,
            "mark": mark,
            "p": progress,
            "now": time.monotonic_ns,
        }
        if self.streams is not None:
            self._names |= {name: getattr(self.streams, name) for name in ("on", "done", "after", "kept")}
        for number, one in enumerate(self._operations):
            if one.operation is not None:
                self._names[f"f{number}"] = one.operation._op
        for place, operation in enumerate(self.plan.operations):
            if operation.runs and (reason := refusal(self._operations[operation.schema], operation)):
                self.failed[place] = reason  # rank 0 has it and this machine lacks it, or another process sent the plan

    def _compile(self) -> None:
        self._parts, self._clocked = [], []
        operations = list(enumerate(self.plan.operations))
        for begin in range(0, len(operations), _MAX_LINES):
            lines: list[_Line] = []
            for number, operation in operations[begin : begin + _MAX_LINES]:
                own = [(line, None if line[:7] == "launch(" else operation) for line in self._code(number, operation)]
                before, after = self._code_before(number, operation), self._code_after(number, operation)
                lines += (
                    [(line, None) for line in (*before, _CLOCK)] + own + [(line, None) for line in (_CLOCK, *after)]
                )
            self._parts.append(self._compile_part([line for line in lines if line[0] != _CLOCK], "s"))
            self._clocked.append(self._compile_part(lines, "s, c"))

    def _compile_part(self, lines: list[_Line], arguments: str) -> _Part:
        body = "\n ".join(line for line, _ in lines)
        exec(f"def part({arguments}):\n {body}\n pass", self._names)
        return _Part(self._names["part"], [operation for _, operation in lines])

    def _code_before(self, number: int, operation: ComputeOperation) -> list[str]:
        """Return the code before an operation."""
        lines = []
        if number in self._steps:
            lines.append("mark()")
        if number % 16 == 0:
            lines.append(f"p[1] = {number}")
        if self.streams is not None:
            before, stream = self._stream_at[number : number + 2]
            if stream != before:
                lines.append(f"on({stream})")
            lines += [f"after({at})" for at in operation.after]
        host = round(self.host_ns[number] * self._scale)
        if waits := self._waits.get(number):
            lines.append(f"wait({waits!r})")
        if host > 0:
            lines.append(f"host({host})")
        return lines

    def _code(self, number: int, operation: ComputeOperation) -> list[str]:
        """Return the code of an operation itself."""
        launches = [f"launch({position})" for position in self._launches.get(number, ())]
        if operation.call >= 0:
            return launches
        if self._can_run(number):
            within = [f"s[{slot}] = s[{slot}].remainder({rows})" for slot, rows in operation.beyond]
            filled = [f"fill({slot}, {high})" for slot, high in operation.filled]
            return [*launches, *within, *self._call_code(operation), *filled]
        empty = [f"s[{slot}] = empty({slot})" for slot in flat_results(operation.results)]
        where = "device" if operation.on_device and self.device.type == "cuda" else "host"
        return [*launches, f"{where}({operation.took_ns})", *empty]

    def _code_after(self, number: int, operation: ComputeOperation) -> list[str]:
        """Return the code after an operation."""
        if self.streams is None:
            return _free_code(operation)
        done = [f"done({number})"] if number in self._awaited else []
        stream = self._stream_at[number + 1]
        for slot in flat_results(operation.results):
            self._made_on[slot] = stream
        taken = sorted(set(slots_in(operation.arguments)))
        kept = [f"kept(s[{slot}])" for slot in taken if self._made_on.get(slot, stream) != stream]
        return [*done, *kept, *_free_code(operation)]

    def _call_code(self, operation: ComputeOperation) -> list[str]:
        names, defaults = self._argument_defaults[operation.schema]
        given = []
        for place, value in enumerate(operation.arguments):
            name, default = (names[place], defaults[place]) if place < len(names) else ("", ())
            if name and (value,) == default:
                continue  # torch's default value
            text = self._literal(value)
            given.append(f"{name}={text}" if name else text)
        call = f"f{operation.schema}({', '.join(given)})"
        results = operation.results
        if not flat_results(results):
            return [call]
        if len(results) == 1:
            if isinstance(results[0], int):
                return [f"s[{results[0]}] = {call}"]
            results = results[0]
        return [f"r = {call}", *_assign_results("r", results)]

    def _literal(self, value: Any) -> str:
        if isinstance(value, dict):
            if "slot" in value:
                return f"s[{int(value['slot'])}]"
            if "number" in value:
                return {"inf": "inf", "-inf": "-inf"}.get(value["number"], "nan")
            return self._constant(_replay_device(str(value["device"]), self.device))
        if isinstance(value, list):
            return f"[{', '.join(map(self._literal, value))}]"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def _has_other_shapes(self, operation: ComputeOperation) -> bool:
        """Return whether a result has another shape than recorded: the operations after it could not run."""
        made = ((self.slots[slot], self.plan.slots[slot].shape) for slot in flat_results(operation.results))
        return any(isinstance(one, torch.Tensor) and list(one.shape) != shape for one, shape in made)


def _free_code(operation: ComputeOperation) -> list[str]:
    return ["".join(f"s[{slot}] = " for slot in operation.frees) + "None"] if operation.frees else []


def _argument_defaults(operation: Any) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return, by argument, the name if it is keyword-only, and its default value."""
    if operation is None:
        return [], []
    arguments = operation._schema.arguments
    names = [one.name if one.kwarg_only else "" for one in arguments]
    return names, [(one.default_value,) if one.has_default_value() else () for one in arguments]


def _assign_results(source: str, results: Sequence[Any]) -> list[str]:
    lines = []
    for place, one in enumerate(results):
        if isinstance(one, list):
            lines += _assign_results(f"{source}[{place}]", one)
        elif one is not None:
            lines.append(f"s[{one}] = {source}[{place}]")
    return lines


def _replay_device(recorded: str, device: torch.device) -> torch.device:
    """Return the device of a tensor in the replay: the CPU if it was there, otherwise the replay's device."""
    return torch.device("cpu") if recorded.startswith("cpu") else device
