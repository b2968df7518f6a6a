"""Reads the times of every rank in an export: joins kernels with the calls that launched them."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import count

import msgspec
import numpy as np

from crossrank.comm import CommRecord, operation_of
from crossrank.errors import CrossrankError
from crossrank.recording import CommsFile
from crossrank.tools.traces.busy import Spans, spans_of
from crossrank.tools.traces.nsight.device_time import device_work, take_device_work
from crossrank.tools.traces.nsight.export import (
    GRAPH_NODES,
    GRAPH_TRACE,
    KERNEL,
    NONE,
    Column,
    Export,
    at,
    open_export,
    require_tables,
)
from crossrank.tools.traces.nsight.kernel_launches import (
    Activities,
    communication_kernels,
    innermost,
    peer_copies,
    runs,
)
from crossrank.tools.traces.nsight.markers import BATCH, CALL, GROUP, NCCL, TORCH, Ranges, read_ranges
from crossrank.tools.traces.nsight.nccl import NcclRanges
from crossrank.tools.traces.nsight.rows import FILTERED, rows_of_comms, rows_of_markers
from crossrank.tools.traces.rank_trace import RankTrace, TraceBuilder, launch_of

IN_OURS = "launched inside crossrank's marker"
IN_OLD = "launched after a marker of the older shim, on its thread"
IN_NCCL = "launched inside NCCL's own range"
IN_TORCH = "launched inside NCCL's own range, inside a range of torch that names the operation"
IN_GRAPH = "nodes of a CUDA graph created inside crossrank's marker"
IN_ORDER = "matched by order: equal numbers of kernels on the stream and calls on the group"
NOT_EMITTED = "calls inside a node, without markers (TRACING=CROSSNODE)"
COPIES = "copies between GPUs, launched inside crossrank's marker"

GRAPHS = "kernels of a CUDA graph: their call was made when the graph was captured"
NO_LAUNCH = "kernels without a launch call in the export"
OUTSIDE = "kernels launched outside any marker"
NO_KERNEL = "calls without a kernel"
CAPTURED = "calls that were captured into a CUDA graph"

_SEND_RECV = "send/recv"
_SEND_RECV_KERNEL = ("send", "recv", _SEND_RECV, "all_to_all", "gather", "scatter")
"""Operations that NCCL runs with one kernel, whose name does not show the operation."""


def read_export(path: str, rank: int | None, comms: Mapping[int, str]) -> list[RankTrace]:
    """One `RankTrace` per process that communicates; if none does, per process with work on a device.

    `rank` is the rank in the name of an export of one process. `comms` has the comms files of the run by rank: these
    have whole calls, while markers only have what equal calls share. Raises `CrossrankError` if the file cannot be
    used, or if it has kernels and none of them has a call.
    """
    with open_export(path) as export:
        require_tables(export)
        ranges = read_ranges(export)
        work = device_work(export)
        kernels = communication_kernels(export)
        epoch = export.epoch_ns()
        ours = set(ranges.of(CALL, BATCH).process.tolist())
        with_nccl = {*ranges.of(NCCL).process.tolist()} & {*kernels.process.tolist()}
        communicating = ours | with_nccl
        working = set() if work is None else {*work[0].process.tolist()}
        processes = [
            _Process(export, process, ranges.take(ranges.process == process), epoch, comms)
            for process in sorted(communicating or working)
        ]
        _give_ranks(path, processes, rank)
        copies = peer_copies(export)
        found = [
            process.read(
                kernels.take(kernels.process == process.number), copies.take(copies.process == process.number), comms
            )
            for process in processes
        ]
        if communicating or not found:
            _check_attributed(export, found, len(ranges.of(CALL, BATCH)), len(kernels))
        else:
            found[0].notes.append(_no_calls(path, len(kernels)))
        if work is not None:
            of_devices, names = work
            # Other communication, such as gloo's, is not in the export: its time would count as idle.
            communicate = set(kernels.process.tolist())
            for process in processes:
                if communicating and process.number not in communicate and not len(process.copies):
                    continue
                own = of_devices.take(of_devices.process == process.number)
                take_device_work(process.times, own, names, process.copies, epoch)
        strangers = ~np.isin(kernels.process, [process.number for process in processes])
        if strangers.any():
            others = len(np.unique(kernels.process[strangers]))
            found[0].notes.append(
                f"{path}: {int(strangers.sum())} communication kernels of {others} process(es) without any marker"
            )
        found[0].notes += [f"{path}: {note}" for note in export.notes]
        return found


def _give_ranks(path: str, processes: list[_Process], named: int | None) -> None:
    """Set the ranks of processes without a marker for it: from the file's name, from NCCL, or else by their order."""
    if len(processes) == 1 and processes[0].times.rank is None:
        processes[0].times.rank = named
    for process in processes:
        times = process.times
        if times.rank is None and process.largest is not None:
            times.rank = process.largest[1]
            times.notes.append(f"{path}: rank {times.rank} by its position in the largest captured communicator")
    unknown = [process.times for process in processes if process.times.rank is None]
    if unknown and len(processes) > 1:
        taken = {process.times.rank for process in processes}
        free = (rank for rank in count() if rank not in taken)
        for one, rank in zip(unknown, free, strict=False):
            one.rank = rank
        unknown[0].notes.append(
            f"{path}: {len(unknown)} process(es) have no rank: crossrank numbers them in the order of their ids"
        )


def _check_attributed(export: Export, found: list[RankTrace], calls: int, kernels: int) -> None:
    if any(one.attributed for one in found):
        return
    path = export.path
    if not found:
        raise CrossrankError(
            f"{path}: has no work of a device and no marker of a call; record with --trace=cuda,nvtx, and "
            "crossrank.enable() in the job"
        )
    if not kernels and export.value(GRAPH_TRACE, "start") is None:
        found[0].notes.append(
            f"{path}: {calls} calls have markers, but the export has no communication kernel with times: the job "
            f"communicated on CPUs (gloo), or was recorded without cuda in --trace, or exported without {KERNEL}"
        )
        return
    reasons = sum((one.unattributed for one in found), Counter[str]())
    why = "; ".join(f"{number} {text}" for text, number in reasons.most_common())
    graphs = export.has(GRAPH_TRACE) or bool(reasons[GRAPHS])
    step = (
        "record with --cuda-graph-trace=node, or without the graph"
        if graphs
        else "record with --trace=cuda,nvtx, and export NVTX_EVENTS, CUPTI_ACTIVITY_KIND_KERNEL and _RUNTIME"
    )
    raise CrossrankError(f"{path}: none of {calls} marked calls has a kernel among {kernels} ({why}); {step}")


def _no_calls(path: str, kernels: int) -> str:
    if not kernels:
        return f"{path}: has no communication: no marker of a call and no communication kernel"
    return (
        f"{path}: has {kernels} communication kernels, but no marker of crossrank, the older shim or NCCL, so it shows "
        "no calls; record with --trace=cuda,nvtx and crossrank.enable() in the job"
    )


class _Process:
    """One process of an export."""

    def __init__(self, export: Export, number: int, ranges: Ranges, epoch: int, comms: Mapping[int, str]) -> None:
        self.number = number
        """globalPid >> 24."""
        self._export = export
        self._calls = ranges.of(CALL, BATCH)
        self._epoch = epoch
        self._meanings = [ranges.meanings[index] for index in np.unique(ranges.meaning).tolist()]
        own = ranges.of(NCCL)
        self._nccl = NcclRanges(export, own) if len(own) else None
        self._torch = ranges.of(TORCH)
        self.times = times = RankTrace(
            rank=None,
            path=export.path,
            source="nsight",
            timed_by="nsight",
            clock=export.path,
            node=str(export.value("TARGET_INFO_SYSTEM_ENV", "value", "Hostname") or ""),
            numbered=False,
        )
        self._began: Column
        """Start of each row, on the clock of the export; likewise `_ended`, 0 = no kernel."""
        self._ended: Column
        self.copies: Spans = spans_of()
        """Copies between GPUs that calls launched, on the clock of the export."""
        for meaning in self._meanings:
            if meaning.rank is not None:
                times.rank = meaning.rank
                times.world_size = meaning.world_size or times.world_size
                times.node = times.node or meaning.host
        if times.rank is None:
            times.rank = _rank_by_pid(number & 0xFFFFFF, comms)

    @property
    def largest(self) -> tuple[int, int] | None:
        """(size, rank in it) of the largest communicator whose creation was captured."""
        nccl = self._nccl
        return max(((nccl.sizes[name], rank) for name, rank in nccl.ranks.items()), default=None) if nccl else None

    def read(self, kernels: Activities, copies: Activities, comms: Mapping[int, str]) -> RankTrace:
        """Find the times of all communication of the process, whose rank is set: kernels, and copies between GPUs."""
        times, calls, epoch = self.times, self._calls, self._epoch
        unnamed = sum(meaning.what == GROUP and meaning.left_out for meaning in self._meanings)
        if unnamed:
            times.notes.append(
                f"{times.path}: {unnamed} group(s) have more members than fit into a marker; the recording has them"
            )
        builder = TraceBuilder(times, (meaning.group for meaning in self._meanings if meaning.group is not None))
        row_of = self._rows(kernels, builder, comms)
        self._began = np.full(len(times), np.iinfo(np.int64).max)
        self._ended = np.zeros(len(times), np.int64)
        row = at(row_of, self._only_fitting(innermost(calls, kernels.thread, kernels.launched), kernels))
        hidden = row == FILTERED
        if hidden.any():
            times.attributed[NOT_EMITTED] += int(hidden.sum())
            kernels, row = kernels.take(~hidden), row[~hidden]
        left = self._give(row, kernels, IN_OLD if any(meaning.old for meaning in self._meanings) else IN_OURS)
        row = at(row_of, innermost(calls, copies.thread, copies.launched))
        self.copies = np.stack([copies.start, copies.end], axis=1)[row >= 0]
        if (self._ended == 0).any():
            self._give(np.where(at(self._ended, row) == 0, row, NONE), copies, COPIES)
            left = self._in_order(left)
        known = self._ended != 0
        times.calls.began = array("q", np.where(known, self._began + epoch, 0).tobytes())
        times.calls.ended = array("q", np.where(known, self._ended + epoch, 0).tobytes())
        left, captured = self._by_graph_nodes(row_of, left)
        if self._nccl is not None:
            left = self._by_nccl(self._nccl, builder, left)
        self._count_unattributed(int((~known).sum()) - captured, captured, left)
        return times

    def _rows(self, kernels: Activities, builder: TraceBuilder, comms: Mapping[int, str]) -> Column:
        """Make the rows of all calls; return the row of each range."""
        times, calls = self.times, self._calls
        path = comms.get(times.rank) if times.rank is not None else None
        if path is not None and (calls.id != NONE).any():
            found = rows_of_comms(path, calls, builder, self._epoch)
            if found is not None:
                batches = np.array([meaning.what == BATCH for meaning in calls.meanings])[calls.meaning]
                found = np.where((found == NONE) & batches, FILTERED, found)
                lost = int((found == NONE).sum())
                if lost:
                    times.unattributed[f"markers whose id is not in {path}"] = lost
                return found
            times.notes.append(f"{path}: is not of the same run as {times.path}, and was skipped")
        return rows_of_markers(calls, kernels, builder, self._epoch)

    def _only_fitting(self, inside: Column, kernels: Activities) -> Column:
        """An instant marker reaches to the next one, so there may be other launches after it. It gets only the first
        launch that runs the kernel of its operation and is not of a graph."""
        calls = self._calls
        instant = at(calls.instant, inside) > 0
        if not instant.any():
            return inside
        marked = np.array([_kernel_of(one.record.op) for one in calls.meanings], object)
        runs_op = np.array([_kernel_of(op or _SEND_RECV) for op in kernels.ops], object)
        fits = instant & (kernels.graph_node == 0) & (runs_op[kernels.op] == marked[calls.meaning[inside]])
        order = np.flatnonzero(fits)
        order = order[np.lexsort((kernels.launched[order], inside[order]))]
        _, first, of = np.unique(inside[order], return_index=True, return_inverse=True)
        chosen = order[kernels.correlation[order] == kernels.correlation[order[first[of]]]]
        result = np.where(instant, NONE, inside)
        result[chosen] = inside[chosen]
        return result

    def _give(self, row: Column, activities: Activities, how: str) -> Activities:
        """Give calls their activities; return the activities without a row."""
        hit = np.flatnonzero((row >= 0) & (activities.start != NONE))
        np.minimum.at(self._began, row[hit], activities.start[hit])
        np.maximum.at(self._ended, row[hit], activities.end[hit])
        if len(hit):
            self.times.attributed[how] += len(hit)
        return activities.take(row < 0)

    def _in_order(self, left: Activities) -> Activities:
        """Match launches on threads of NCCL: the k-th call of a group is the k-th kernel of its stream, if the numbers
        agree and no kernel starts before its call."""
        times = self.times
        free = (left.graph_node == 0) & (left.thread != NONE) & (left.start != NONE)
        free &= ~np.isin(left.thread, np.unique(self._calls.thread))
        called = np.frombuffer(times.calls.called, np.int64) - self._epoch
        calls: dict[tuple[str, int], list[int]] = defaultdict(list)
        streams: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        idle = np.flatnonzero(self._ended == 0)
        for number in idle[np.argsort(called[idle], kind="stable")].tolist():
            one = times.signatures[times.calls.signature[number]]
            calls[_kernel_of(one.op), times.calls.group[number]].append(number)
        kernels = np.flatnonzero(free)
        for i in kernels[np.argsort(left.start[kernels], kind="stable")].tolist():
            streams[_kernel_of(left.ops[left.op[i]] or _SEND_RECV), int(left.device[i]), int(left.stream[i])].append(i)
        row = np.full(len(left), NONE, np.int64)
        rivals = Counter((name, len(rows)) for (name, _), rows in calls.items())
        for (name, _), rows in calls.items():
            fitting = [found for (other, _, _), found in streams.items() if other == name and len(found) == len(rows)]
            if len(fitting) == rivals[name, len(rows)] == 1 and (left.start[fitting[0]] >= called[rows]).all():
                row[fitting[0]] = rows
        return self._give(row, left, IN_ORDER)

    def _by_graph_nodes(self, row_of: Column, left: Activities) -> tuple[Activities, int]:
        """Match kernels of CUDA graphs, by the marker around the creation of their node.

        Every launch of the graph repeats the call and adds a row. Returns the other kernels, and how many calls were
        captured.
        """
        columns = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
        table = next((name for name in GRAPH_NODES if {*columns[:3]} <= self._export.columns(name)), None)
        if table is None:
            return left, 0
        start, thread, node, original = self._export.all(table, columns)
        mine = np.flatnonzero((thread >> 24) == self.number)
        made = dict(zip(node[mine].tolist(), mine.tolist(), strict=True))
        # An executable graph has its own nodes, with the ids of the captured ones.
        copies = zip(node[mine].tolist(), original[mine].tolist(), strict=True)
        made |= {copy: made[captured] for copy, captured in copies if captured in made}
        which = np.array([made.get(one, NONE) if one else NONE for one in left.graph_node.tolist()], np.int64)
        row = at(row_of, innermost(self._calls, at(thread, which), at(start, which)))
        times, calls = self.times, self.times.calls
        hit = np.flatnonzero(row >= 0)
        for i in hit[np.argsort(left.start[hit], kind="stable")].tolist():
            captured = int(row[i])
            calls.append(
                group=calls.group[captured],
                signature=calls.signature[captured],
                number=-1,
                id=calls.id[captured],
                step=calls.step[captured],
                called=int(left.launched[i]) + self._epoch if left.launched[i] != NONE else 0,
                began=int(left.start[i]) + self._epoch,
                ended=int(left.end[i]) + self._epoch,
            )
        if len(hit):
            times.attributed[IN_GRAPH] += len(hit)
        return left.take(row == NONE), len(np.unique(row[hit]))

    def _by_nccl(self, nccl: NcclRanges, builder: TraceBuilder, left: Activities) -> Activities:
        """Match kernels launched inside NCCL's own ranges: each range adds one row."""
        times = self.times
        inside = innermost(nccl.ranges, left.thread, left.launched)
        order = np.argsort(inside, kind="stable")
        around = innermost(self._torch, nccl.ranges.thread, nccl.ranges.start)
        taken = np.zeros(len(left), bool)
        world_size = times.world_size
        if world_size is None and self.largest is not None and self.largest[1] == times.rank:
            world_size = self.largest[0]
        for index, first, last in runs(inside[order]):
            records = nccl.members(index, times.rank, world_size) if index != NONE else []
            if not records:
                continue
            mine = order[first:last]
            taken[mine] = True
            record, how = launch_of(records), IN_NCCL
            torch_range = int(around[index])
            by_torch = None if torch_range == NONE else operation_of(self._torch.of_range(torch_range).function)
            if by_torch is not None and not any(one.bytes for one in records):
                # These sends and receives of NCCL, without sizes, are parts of torch's operation.
                record, how = CommRecord(id=NONE, op=by_torch.name, c10d="", pg=record.pg, bytes=0, t=0), IN_TORCH
            timed = mine[left.start[mine] != NONE]
            row = builder.add(
                msgspec.structs.replace(record, id=NONE),
                group=builder.define(nccl.group(record.pg)),
                called=int(nccl.ranges.start[index]) + self._epoch,
                began=int(left.start[timed].min()) + self._epoch if len(timed) else 0,
                ended=int(left.end[timed].max()) + self._epoch if len(timed) else 0,
            )
            if times.numbered:  # counted numbers do not fit to recorded ones
                times.calls.number[row] = -1
            times.attributed[how] += len(timed)
        times.unattributed.update(nccl.unknown)
        return left.take(~taken)

    def _count_unattributed(self, without: int, captured: int, left: Activities) -> None:
        """Count calls without a kernel, and kernels without a call."""
        times = self.times
        graphs = left.graph_node != 0
        no_launch = ~graphs & (left.thread == NONE)
        times.unattributed += Counter(
            {
                NO_KERNEL: without,
                CAPTURED: captured,
                GRAPHS: int(graphs.sum()),
                NO_LAUNCH: int(no_launch.sum()),
                OUTSIDE: int((~graphs & ~no_launch).sum()),
            }
        )
        times.unattributed_ns += int((left.end - left.start).sum())
        whole = len(self._export.all(GRAPH_TRACE, ("start",))[0])
        if whole:
            times.notes.append(
                f"{times.path}: {whole} launches of CUDA graphs were traced whole: their communication is not among "
                "the kernels; record with --cuda-graph-trace=node"
            )


def _kernel_of(op: str) -> str:
    """Name of NCCL's kernel for an operation; some operations share one."""
    if op in _SEND_RECV_KERNEL:
        return _SEND_RECV
    return "all_reduce" if op == "barrier" else op


def _rank_by_pid(pid: int, comms: Mapping[int, str]) -> int | None:
    """The rank whose comms file has this process id. Only its low 24 bits are known."""
    ranks = []
    for rank, path in comms.items():
        file = CommsFile(path)
        next(file.records(), None)
        if file.header is not None and file.header.pid is not None and file.header.pid & 0xFFFFFF == pid:
            ranks.append(rank)
    return ranks[0] if len(ranks) == 1 else None
