"""Ranks that really wait for each other, and the flight-recorder dumps they leave behind.

A fault is put into the program of a rank and the job is run, so that who waits for whom follows from the run and
not from what the author of a test believes. Every rank has a CPU, which enqueues calls, and a GPU, which runs them.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collective:
    """A collective; with `members` a coalesced one: one launch, an entry per member and a closing one named `op`."""

    group: str
    op: str = "all_reduce"
    inputs: Sizes = ((256,),)
    outputs: Sizes | None = None
    """None: as the inputs."""
    dtype: str = "Float"
    line: int = 10
    members: tuple[Collective, ...] = ()

    @property
    def output_sizes(self) -> Sizes:
        return self.inputs if self.outputs is None else self.outputs


@dataclass(frozen=True)
class _Transfer:
    group: str
    peer: int
    """Global rank."""
    size: tuple[int, ...] = (64,)
    dtype: str = "Float"
    line: int = 10


class Send(_Transfer):
    """To the peer."""


class Recv(_Transfer):
    """From the peer."""


@dataclass(frozen=True)
class Batch:
    """batch_isend_irecv: one launch, all operations in one group."""

    ops: tuple[Send | Recv, ...]


@dataclass(frozen=True)
class CpuStall:
    """The CPU of this rank never gets past here."""


@dataclass(frozen=True)
class GpuStall:
    """The CPU goes on, but the GPU of this rank runs nothing that is enqueued after here."""


@dataclass(frozen=True)
class StaleWatchdog:
    """Once the CPU is here, no start and no completion is noticed on this rank any more; CPU and GPU go on."""


Call = Collective | Send | Recv | Batch | CpuStall | GpuStall | StaleWatchdog
Programs = list[list[Call]]
Groups = dict[str, tuple[str, list[int]]]

_FIRST_NS = 1_795_000_000_000_000_000


_Half = tuple[bool, str, int, int, int]
"""One end of a transfer: whether it is the sending one, group, source, target, and the how-manieth it is of these."""


@dataclass
class _Launch:
    """What one call put on the GPU queue of its rank."""

    call: Collective | Send | Recv | Batch
    group: str
    sequence: int
    """Of its kind (collective or point-to-point) in the group."""
    halves: dict[_Half, tuple[int, str]]
    """Element count and dtype of each end; empty for a collective."""
    status_sequence: int
    """What the status of the group says when this is the last launch."""
    entry: dict[str, Any] | None
    """The record that tells the state; None where the backend records nothing."""
    never_runs: bool
    joined: bool = False


@dataclass
class _Rank:
    pg_ids: dict[str, int]
    position: int = 0
    gpu_stalled: bool = False
    watchdog_stale: bool = False
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    entries: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, dict[str, int]] = field(default_factory=dict)
    queues: dict[str, deque[_Launch]] = field(default_factory=dict)


class SimulatedJob:
    """One program per rank, run until nothing moves any more or, for a snapshot, for a number of events.

    The GPU of a rank runs one call at a time in program order (with `concurrent_groups` one per group). A collective
    completes when every member has joined the one with its number in the group and all agree on it, a transfer when
    both ends have joined with equal element count and dtype. With `blocking`, and on gloo, the CPU waits for every
    call. Without a seed the ranks take turns; with one the order of every round is drawn. The `broken` collectives
    (group, sequence number) never complete, even if all have joined: a fault of the fabric.
    """

    def __init__(
        self,
        programs: Programs,
        groups: Groups,
        *,
        backend: str = "nccl",
        timing: bool = True,
        blocking: bool = False,
        concurrent_groups: bool = False,
        seed: int | None = None,
        broken: Collection[tuple[str, int]] = (),
    ) -> None:
        self._programs, self._groups, self._backend = programs, groups, backend
        self._gloo = backend == "gloo"
        self._timing = timing and not self._gloo
        self._blocking = blocking or self._gloo
        self._concurrent_groups, self._broken = concurrent_groups, broken
        self._clock = _FIRST_NS
        self._joined: dict[tuple[str, int], dict[int, Collective]] = {}
        self._agreed: dict[tuple[str, int], bool] = {}
        self._joined_halves: dict[_Half, tuple[int, str]] = {}
        self._ranks: list[_Rank] = []
        for rank, program in enumerate(programs):
            own = [name for name, (_, ranks) in groups.items() if rank in ranks]
            self._ranks.append(_Rank({name: pg_id for pg_id, name in enumerate(own)}))
            for call in program:
                self._check(rank, call)
        self._schedule = self._events(None if seed is None else random.Random(seed))

    @property
    def world_size(self) -> int:
        return len(self._programs)

    @property
    def first_ns(self) -> int:
        """When the job began, in ns since 1970."""
        return _FIRST_NS

    def described(self, rank: int) -> list[dict[str, Any]]:
        """The groups of a rank as crossrank's dumps describe them."""
        return [
            {"pg": name, "size": len(ranks), "ranks": ranks, "desc": desc}
            for name, (desc, ranks) in self._groups.items()
            if rank in ranks
        ]

    def run(self, most_events: int | None = None) -> None:
        """Go on, for so many events at most; one event is a CPU's next call, or a GPU's next start or completion."""
        for _ in islice(self._schedule, most_events):
            pass

    def finished(self) -> bool:
        """Whether every call of every rank is complete, noticed or not."""
        return all(
            state.position == len(program) and not any(state.queues.values())
            for state, program in zip(self._ranks, self._programs, strict=True)
        )

    def stuck_in(self, rank: int) -> str:
        """The first calls of a rank that are not over, and what its CPU came to; empty where it is through."""
        state, program = self._ranks[rank], self._programs[rank]
        launches = [queue[0] for queue in state.queues.values() if queue]
        stuck = [f"{getattr(one.call, 'op', 'transfer')} #{one.sequence} of {one.group}" for one in launches]
        if state.position < len(program) and isinstance(program[state.position], CpuStall):
            stuck.append("stopped")
        return ", ".join(stuck) or ("on its way" if state.position < len(program) else "")

    def dump(
        self, rank: int, *, ring: int = 2000, active_only: bool = False, frames: bool = True, version: str = "2.10"
    ) -> dict[str, Any]:
        """What the recorder of this rank holds now, as unpickling its dump gives it."""
        state = self._ranks[rank]
        kept = [e for e in state.entries[-ring:] if not (active_only and e["state"] == "completed")]
        left_out = None if frames else "frames"
        config = {
            name: {"name": name, "desc": self._groups[name][0], "ranks": str(self._groups[name][1])}
            for name in state.pg_ids
        }
        library = "comm_lib_version" if tuple(map(int, version.split("."))) >= (2, 10) else "nccl_version"
        return {
            "version": version,
            "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}} if self._gloo else config,
            library: "" if self._gloo else "2.27.7",
            "pg_status": {
                str(pg): dict(state.status[name]) for name, pg in state.pg_ids.items() if name in state.status
            },
            "entries": [
                {k: copy.deepcopy(v) for k, v in entry.items() if k != left_out and (k, v) != ("duration_ms", None)}
                for entry in kept
            ],
        }

    def write(
        self,
        folder: Path,
        *,
        ranks: Iterable[int] | None = None,
        form: Literal["pickle", "json"] = "pickle",
        prefix: str = "rank_",
        **options: Any,
    ) -> None:
        """Write one dump per rank, of all ranks unless told; `options` are those of `dump`."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(len(self._ranks)) if ranks is None else ranks:
            dump = self.dump(rank, **options)
            content = pickle.dumps(dump, protocol=2) if form == "pickle" else as_json(dump)
            (folder / f"{prefix}{rank}").write_bytes(content)

    def _check(self, rank: int, call: Call) -> None:
        """A slip in a test must not look like a hang."""
        if isinstance(call, CpuStall | GpuStall | StaleWatchdog):
            return
        parts = call.ops if isinstance(call, Batch) else (call,)
        if not parts or len({part.group for part in parts}) != 1:
            raise ValueError(f"rank {rank}: {call} needs operations of one group")
        ranks = self._groups[parts[0].group][1]
        others = {part.peer for part in parts if not isinstance(part, Collective)}
        if not {rank, *others} <= set(ranks) or rank in others:
            raise ValueError(f"rank {rank}: {call} does not fit its group of ranks {ranks}")
        if self._gloo and isinstance(call, Collective) and call.members:
            raise ValueError("gloo has no coalesced collectives")

    def _events(self, shuffle: random.Random | None) -> Iterator[None]:
        order = list(range(len(self._ranks)))
        moved = True
        while moved:
            moved = False
            for rank in order:
                for act in (self._enqueue, self._execute):
                    self._clock += 1_000 + 700 * (rank % 3)
                    if act(rank):
                        moved = True
                        yield
            if shuffle is None:
                order = order[1:] + order[:1]
            else:
                shuffle.shuffle(order)

    def _enqueue(self, rank: int) -> bool:
        """The next event of the CPU, if there is one."""
        state, program = self._ranks[rank], self._programs[rank]
        if state.position == len(program) or (self._blocking and any(state.queues.values())):
            return False
        call = program[state.position]
        if isinstance(call, CpuStall):
            return False
        state.position += 1
        if isinstance(call, GpuStall):
            state.gpu_stalled = True
        elif isinstance(call, StaleWatchdog):
            state.watchdog_stale = True
        else:
            launch = self._launch(rank, call)
            queue = launch.group if self._concurrent_groups else ""
            state.queues.setdefault(queue, deque()).append(launch)
        return True

    def _launch(self, rank: int, call: Collective | Send | Recv | Batch) -> _Launch:
        """Number and record a call."""
        state = self._ranks[rank]
        ops = call.ops if isinstance(call, Batch) else () if isinstance(call, Collective) else (call,)
        parts = call.members if isinstance(call, Collective) else ops if isinstance(call, Batch) else ()
        group = ops[0].group if isinstance(call, Batch) else call.group
        kind = "p2p" if ops else "collective"
        recorded = not (self._gloo and ops)
        state.counts[group, kind] += 1
        for part in parts:
            state.counts[group, "op"] += 1
            if recorded:
                self._record(rank, group, part)
        if not parts:
            state.counts[group, "op"] += 1
        entry = self._record(rank, group, call) if recorded else None
        halves: dict[_Half, tuple[int, str]] = {}
        for op in ops:
            sends = isinstance(op, Send)
            source, target = (rank, op.peer) if sends else (op.peer, rank)
            state.counts[group, source, target] += 1
            halves[sends, group, source, target, state.counts[group, source, target]] = (math.prod(op.size), op.dtype)
        sequence = state.counts[group, kind]
        status = state.counts[group, "op"] if self._gloo else sequence
        if recorded:
            state.status[group]["last_enqueued_collective"] = status
        return _Launch(call, group, sequence, halves, status, entry, state.gpu_stalled)

    def _record(self, rank: int, group: str, call: Collective | Send | Recv | Batch) -> dict[str, Any]:
        """A new entry; that of a batch, or of a coalesced collective, is the closing one, which has no tensors."""
        state, (desc, ranks) = self._ranks[rank], self._groups[group]
        inputs: Sizes = ()
        outputs: Sizes = ()
        if isinstance(call, Batch):
            name, function, line, dtype = "coalesced", "batch_isend_irecv", call.ops[0].line, ""
        elif isinstance(call, Collective):
            name, function, line, dtype = call.op, call.op.lstrip("_"), call.line, call.dtype
            if not call.members:
                inputs, outputs = call.inputs, call.output_sizes
        else:
            kind, arrow = ("send", "->") if isinstance(call, Send) else ("recv", "<-")
            name = f"{kind} {ranks.index(rank)}{arrow}{ranks.index(call.peer)}"
            function, line, dtype = f"i{kind}", call.line, call.dtype
            inputs = outputs = (call.size,)
        entry: dict[str, Any] = {
            "frames": [
                {"name": function, "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 3007},
                {"name": "train_step", "filename": "train.py", "line": line},
            ],
            "record_id": len(state.entries),
            "pg_id": state.pg_ids[group],
            "process_group": (group, desc),
            "thread_name": "pt_main_thread",
            "thread_id": str(140_000_000_000_000 + rank),
            "collective_seq_id": state.counts[group, "collective"],
            "p2p_seq_id": 0 if self._gloo else state.counts[group, "p2p"],
            "op_id": state.counts[group, "op"],
            "profiling_name": f"{self._backend}:{name}",
            "time_created_ns": self._clock,
            "duration_ms": None,
            "input_sizes": [list(size) for size in inputs],
            "input_dtypes": [dtype] * len(inputs),
            "output_sizes": [list(size) for size in outputs],
            "output_dtypes": [dtype] * len(outputs),
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": 600_000,
            "is_p2p": not isinstance(call, Collective),
        }
        state.entries.append(entry)
        state.status.setdefault(group, {f"last_{what}_collective": -1 for what in ("enqueued", "started", "completed")})
        return entry

    def _execute(self, rank: int) -> bool:
        """The next event of the GPU, if there is one: the call at the head of a queue starts or completes."""
        for queue in self._ranks[rank].queues.values():
            if not queue or queue[0].never_runs:
                continue
            launch = queue[0]
            if not launch.joined:
                launch.joined = True
                self._joined_halves.update(launch.halves)
                if isinstance(launch.call, Collective):
                    self._joined.setdefault((launch.group, launch.sequence), {})[rank] = launch.call
                self._notice_start(self._ranks[rank], launch)
                return True
            if self._is_complete(launch):
                queue.popleft()
                self._notice_completion(self._ranks[rank], launch)
                return True
        return False

    def _is_complete(self, launch: _Launch) -> bool:
        if launch.halves:
            return all(
                self._joined_halves.get((not half[0], *half[1:])) == what for half, what in launch.halves.items()
            )
        key = (launch.group, launch.sequence)
        if key not in self._agreed and len(self._joined[key]) == len(self._groups[launch.group][1]):
            self._agreed[key] = key not in self._broken and _agree([*self._joined[key].values()])
        return self._agreed.get(key, False)

    def _notice_start(self, state: _Rank, launch: _Launch) -> None:
        """Only start events, which exist with timing, tell that a kernel has started."""
        if self._timing and launch.entry is not None and not state.watchdog_stale:
            launch.entry.update(state="started", time_discovered_started_ns=self._clock)
            status = state.status[launch.group]
            # Unlike the other two it never goes back when collectives and transfers alternate.
            status["last_started_collective"] = max(status["last_started_collective"], launch.status_sequence)

    def _notice_completion(self, state: _Rank, launch: _Launch) -> None:
        entry = launch.entry
        if entry is None or state.watchdog_stale:
            return
        entry["retired"] = True
        state.status[launch.group]["last_completed_collective"] = launch.status_sequence
        if not self._gloo:
            entry.update(state="completed", time_discovered_completed_ns=self._clock)
        if self._timing:
            entry["duration_ms"] = (self._clock - entry["time_discovered_started_ns"]) / 1e6


def _agree(calls: list[Collective]) -> bool:
    """Whether these calls, one of every member, are the same collective: kernels count elements and know no shapes.

    Sizes may differ in an all-to-all as long as as much arrives as leaves, and at the root of a gather or scatter.
    The members of a coalesced collective have to agree one by one; among each other they may differ.
    """
    if len({(call.op, call.dtype, len(call.members)) for call in calls}) != 1:
        return False
    if calls[0].members:
        return all(_agree(list(same)) for same in zip(*(call.members for call in calls), strict=True))
    inputs = [[math.prod(size) for size in call.inputs] for call in calls]
    outputs = [[math.prod(size) for size in call.output_sizes] for call in calls]
    if calls[0].op in ("all_to_all", "alltoall", "alltoall_base"):
        return sum(map(sum, inputs)) == sum(map(sum, outputs))
    compared = {"gather": [inputs], "scatter": [outputs]}.get(calls[0].op, [inputs, outputs])
    return all(sizes == side[0] for side in compared for sizes in side)


def as_json(dump: dict[str, Any]) -> bytes:
    """The JSON form has no frames, zero for an unknown time, strings in the status, and no empty list of entries."""
    entries = [{k: 0 if v is None else v for k, v in e.items() if k != "frames"} for e in dump["entries"]]
    status = {pg: {key: str(value) for key, value in values.items()} for pg, values in dump["pg_status"].items()}
    result = {**dump, "entries": entries, "pg_status": status, "nccl_comm_state": {}}
    if not entries:
        del result["entries"]
    return json.dumps(result, sort_keys=True, separators=(",", ":")).encode()
