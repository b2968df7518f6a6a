"""Add a traced window to its rank: steps, and the spans of computation, communication and copies.

On a GPU these are the kernels and copies, with the times of their launches. Without any, they are the operations of the
host and the Works of its backend.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from crossrank.tools.graph.linking.communications import COMMUNICATING
from crossrank.tools.graph.linking.linked_trace import LinkedTrace
from crossrank.tools.graph.linking.nesting import is_work
from crossrank.tools.traces.busy import Spans, difference, spans_of, union
from crossrank.tools.traces.kernels import KernelsOfName, communication_kernel, unknown_kernels
from crossrank.tools.traces.kineto import DeviceEvent, KinetoTrace, profiler_iterations
from crossrank.tools.traces.param_comms import from_kineto
from crossrank.tools.traces.rank_trace import RankTrace

_OPERATION = re.compile(r"[a-z_]\w*::\w+")
"""An operation such as `aten::mm`; not a range of the program such as `FSDP::pre_forward`."""
_NO_OPERATIONS = ("autograd::", "torch::", *COMMUNICATING)
"""Names of ranges around operations, which include the time between them; and of communication."""

_HostRange = tuple[str, int | str | None, int, int]
"""(name, thread, begin, end)"""
_Activity = tuple[str, str, bool, object, int | None, int, int]
"""(name, category, communicates, stream, launched, begin, end)"""


def take_linked(trace: RankTrace, window: LinkedTrace) -> None:
    """Add a linked window to `trace`."""
    communicating = {number for one in window.communications for number in one.activities}
    host_of = {op.id: op for op in window.host}
    activities: list[_Activity] = []
    for one in window.activities:
        launcher = host_of.get(one.host) if one.host is not None else None
        launched = launcher.start_ns if launcher is not None else None
        span = one.start_ns, one.start_ns + one.duration_ns
        stream = one.device, one.stream
        activities.append((one.name, one.category, one.id in communicating, stream, launched, *span))
    hosts: list[_HostRange] = [
        (op.name, op.tid, op.start_ns, op.end_ns) for op in window.host if op.start_ns is not None
    ]
    # Older linked files have no steps, but the profiler's marks are among their operations.
    iterations = window.iterations or profiler_iterations((name, begin, end) for name, _, begin, end in hosts)
    _add_window(trace, window.base_ns, activities, hosts, iterations)


def take_kineto(trace: RankTrace, kineto: KinetoTrace) -> None:
    """Add a Kineto trace to `trace`."""
    launched = {call.correlation: call.start for call in kineto.calls}
    activities: list[_Activity] = []
    for one in kineto.device:
        communicates = one.category == "kernel" and _communicates(one)
        at = launched.get(one.correlation) if one.correlation is not None else None
        stream = one.device, one.stream
        activities.append((one.name, one.category, communicates, stream, at, one.start, one.end))
    hosts: list[_HostRange] = [(one.name, one.tid, one.start, one.end) for one in kineto.host]
    _add_window(trace, kineto.base_ns, activities, hosts, kineto.iterations)


def _communicates(kernel: DeviceEvent) -> bool:
    return communication_kernel(kernel.name) is not None or from_kineto(kernel.args) is not None


def _computing(activities: Iterable[_Activity], hosts: Iterable[_HostRange]) -> list[KernelsOfName]:
    """Return the kernels that count as computation, by name."""
    ranges = union(spans_of((begin, end) for name, _, begin, end in hosts if name.startswith(COMMUNICATING)))
    begins, ends = ranges.T.tolist()
    found: dict[str, KernelsOfName] = {}
    for name, category, communicates, _, launched, begin, end in activities:
        if category == "kernel" and not communicates:
            of_name = found.setdefault(name, KernelsOfName(name))
            place = -1 if launched is None else bisect_right(begins, launched) - 1
            is_within = launched is not None and place >= 0 and launched < ends[place]
            of_name.add(1, end - begin, in_communication=int(is_within))
    return list(found.values())


def _add_window(
    trace: RankTrace,
    base_ns: int,
    activities: list[_Activity],
    hosts: list[_HostRange],
    iterations: Sequence[tuple[int, int]],
) -> None:
    if not trace.steps:
        trace.steps = [(number, begin + base_ns) for number, begin in iterations]
    if not activities:
        computation, communication = _host_spans(hosts)
        trace.busy.add("host", base_ns, computation, communication, spans_of(), trace.steps, spans_of())
        return
    kinds: dict[str, list[tuple[int, int]]] = {"computation": [], "communication": [], "memory": []}
    computed: Counter[object] = Counter()
    trace.notes += unknown_kernels(_computing(activities, hosts))
    for _, category, communicates, stream, _, begin, end in activities:
        kind = "communication" if communicates else "computation" if category == "kernel" else "memory"
        kinds[kind].append((begin, end))
        computed[stream] += end - begin if kind == "computation" else 0
    # Work of another stream, such as an early copy of the input, does not start the step on the device.
    main = computed.most_common(1)[0][0]
    if not kinds["communication"]:
        # A backend without kernels: its Works have the times of communication.
        kinds["communication"] = [(begin, end) for name, _, begin, end in hosts if is_work(name)]
    kernels = [
        (stream, at, begin) for _, kind, _, stream, at, begin, _ in activities if kind == "kernel" and at is not None
    ]
    launches = spans_of((at, begin) for _, at, begin in kernels)
    of_main = spans_of((at, begin) for stream, at, begin in kernels if stream == main)
    computation, communication, memory = map(spans_of, kinds.values())
    copies = spans_of((at, begin) for _, kind, *_, at, begin, _ in activities if kind != "kernel" and at is not None)
    trace.busy.add("device", base_ns, computation, communication, memory, trace.steps, launches, of_main, copies)


def _host_spans(hosts: Iterable[_HostRange]) -> tuple[Spans, Spans]:
    """Return (computation, communication): operations of all threads without the communication in them; Works."""
    operations: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
    calls: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
    works: list[tuple[int, int]] = []
    for name, thread, begin, end in hosts:
        if is_work(name):
            works.append((begin, end))
        elif name.startswith(COMMUNICATING):
            calls[thread].append((begin, end))
        elif _OPERATION.fullmatch(name) and not name.startswith(_NO_OPERATIONS):
            operations[thread].append((begin, end))
    computed = [difference(spans_of(own), spans_of(calls[thread])) for thread, own in operations.items()]
    return union(*computed), union(spans_of(works))
