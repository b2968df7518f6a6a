"""What happens between a call's arrival at the dispatcher and its launch, with either kernel.

`Recorder` is what both share: markers and ranges around a launch, and the count of failures. A kernel leaves a row in a
ring for each call, and for each wait; all that can wait itself is done by the writer's thread. A wait is known by the
Work that the launch gave: both kernels keep the addresses of the latest ones.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from crossrank.comm import crosses_nodes
from crossrank.errors import one_line
from crossrank.instrument.facts import Facts
from crossrank.instrument.identity.gpu import RankGpu
from crossrank.instrument.identity.process_groups import GroupTable
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.log import log
from crossrank.instrument.record.descriptor import Descriptor, GroupState
from crossrank.instrument.script_errors import raised_by_script
from crossrank.instrument.torch_dumps import nccl_dump
from crossrank.instrument.torch_private import has
from crossrank.instrument.write.nvtx_markers import NvtxMarkers, classic_text
from crossrank.recording import RANGE, STOOD, Ran, Wait

BATCH_CODE = dist.batch_isend_irecv.__code__

# (range of the profiler, whether an NVTX range is open)
Token = tuple[Any, bool]
# (descriptor, id, sequence number, time, step, batch, tag, thread)
Call = tuple[Descriptor, int, int, int, int, int | None, int | None, int]

NO_CALL = -1
"""In the place of an id: of a call that is not known."""


def span_of(record_id: int, begin: int, end: int, thread: int, of: int, raised: bool) -> Wait | Ran:
    """A time of a call, of what a kernel leaves about it; `of` is an index into `recording.STOOD`, or one more."""
    if of == len(STOOD):
        return Ran(id=record_id, t=begin, took=end - begin, raised=raised)
    call = None if record_id == NO_CALL else record_id
    return Wait(t=begin, took=end - begin, thread=thread, id=call, stood=STOOD[of], raised=raised)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class CallCounts:
    """Calls of this process."""

    calls: int = 0
    """That got an id."""
    dropped: int = 0
    """Lost because the ring was full."""
    spans_dropped: int = 0
    """So were waits, and times of communication."""
    errors: int = 0
    """Failures inside the recorder; the call itself went through."""


class Recorded(Protocol):
    """What a recorder sees of its session."""

    facts: Facts
    gpu: RankGpu
    groups: GroupTable
    nvtx: NvtxMarkers | None

    @property
    def writer(self) -> object | None:
        """None where calls are not written: without a folder, or before there is a process group."""

    def first_call(self, group: dist.ProcessGroup, /) -> GroupState:
        """The state of a group that communicates for the first time; begins the files where that is due."""


class Recorder(ABC):
    """Records the calls of one session, on any thread."""

    kernel: str
    """Which kernel it is, for people, and why."""

    def __init__(self, session: Recorded) -> None:
        self._session = session
        self._config = config = session.facts.config
        self._nvtx = nvtx = session.nvtx
        self._classic = config.nvtx == "classic" and nvtx is not None
        self._texts = self._classic or config.print_calls
        self._ranges = nvtx is not None and not self._classic
        self._emits = self._texts or self._ranges
        self._errors = 0  # changed under the lock
        self._lock = threading.RLock()  # a signal handler may fail to record while its thread holds it
        self._complained = False
        self.active = True
        self.step = 0
        self.window_open = False
        self.follows_waits = False  # whether all waits for a Work or a Future are seen

    @abstractmethod
    def counts(self) -> CallCounts:
        """What became of the calls so far."""

    def calls(self) -> int:
        """How many calls got an id."""
        return self.counts().calls

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Calls that `take` has not taken yet."""

    @abstractmethod
    def take(self, most: int) -> list[Call]:
        """So many of the calls that were not taken yet, or all, in about the order in which they were made."""

    @abstractmethod
    def take_spans(self, most: int) -> list[Wait | Ran]:
        """So many of the waits that were not taken yet, and of the times that communication took, or all."""

    @abstractmethod
    def watch_backward(self, code: CodeType) -> None:
        """`code` is that of the function in which Python starts a backward pass: a call of which it is the innermost
        frame, or that has none, was made by C++, as DDP's reducer does. The reducer waits for its calls when all is
        computed, which Python does not see: the pass is followed by callbacks of autograd's engine."""

    @abstractmethod
    def waits_under_way(self) -> list[tuple[int, int]]:
        """What threads wait for at this moment: (id of a call, thread); -1 for a call that is not known."""

    def nccl_recorder(self) -> bytes:
        """torch's flight recorder of NCCL's calls as JSON; empty where this torch has none."""
        dump = nccl_dump()
        return b"" if dump is None else dump(True, False)

    @abstractmethod
    def recording_wait(self, original: Callable[..., Any]) -> object:
        """A method for `Work` in the place of `original`, which it calls and records."""

    @abstractmethod
    def noting_wait(self, original: Callable[..., Any]) -> object:
        """A method for `Future` in the place of `original`, which it calls and counts as a wait under way."""

    @abstractmethod
    def note_work(self, work: dist.Work, record_id: int) -> None:
        """Waits for that Work are waits for that call."""

    @abstractmethod
    def start_coalescing(self) -> None:
        """From here to `end_coalescing` the calls of this thread become one launch."""

    @abstractmethod
    def end_coalescing(self) -> int | None:
        """The launch of the batch is about to happen: the id of its first call, -1 where it has none."""

    def after(self, token: Token) -> None:
        """Close what `before` opened on this thread."""
        handle, pushed = token
        try:
            if pushed and self._nvtx is not None:
                self._nvtx.pop()
            if handle is not None:
                torch.autograd._record_function_with_args_exit(handle)
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Count a failure of the recorder and report the first one. The call itself goes on. What the script has raised
        is raised again."""
        if raised_by_script(error):
            raise error
        self._count_failures(1)
        self.complain(one_line(error))

    def complain(self, why: str) -> None:
        """Report a failure, once."""
        if not self._complained:
            self._complained = True
            log.warning(
                "crossrank: a call could not be recorded: %s; training continues, and further failures are counted", why
            )

    def _count_failures(self, count: int) -> None:
        with self._lock:
            self._errors += count

    def _open(self, descriptor: Descriptor, record_id: int, device: Callable[[], str | None]) -> Token | None:
        """Open what belongs around a launch: a range for a tool, one in a window."""
        topology = self._session.facts.topology
        assert topology is not None  # made before the first group is
        pushed = False
        if self._emits and self._wants(descriptor, topology):
            if self._texts:
                self._emit_text(descriptor, record_id, device())
            pushed = self._push(descriptor, record_id, topology)
        handle = None
        if self.window_open and has("ranges"):
            handle = torch.autograd._record_function_with_args_enter(
                f"{RANGE}{record_id}", descriptor.message(descriptor.locality(topology), sizes=True)
            )
        return (handle, pushed) if pushed or handle is not None else None

    def _push(self, descriptor: Descriptor, record_id: int, topology: Topology) -> bool:
        """Open the range of a call for an attached tool; whether there is one to close."""
        if self._ranges and self._nvtx is not None:
            self._nvtx.push(descriptor, record_id, topology)
            return True
        return False

    def _wants(self, descriptor: Descriptor, topology: Topology) -> bool:
        """Whether the user wants to see calls like this one."""
        wanted = descriptor.emitted
        if wanted is None:
            wanted = self._config.emit == "ALL" or crosses_nodes(descriptor.locality(topology))
            if topology.settled.is_set():
                descriptor.emitted = wanted
        return wanted

    def open_batch(self, group: dist.ProcessGroup, batch: int) -> Token | None:
        """Open what belongs around the launch of a batch; returns what to close after it."""
        if batch >= 0 and self._ranges and self._nvtx is not None:
            self._nvtx.push_batch(group.group_name, batch)
            return None, True
        return None

    def _emit_text(self, descriptor: Descriptor, record_id: int, device: str | None) -> None:
        """The older shim's text: as a marker, and on stdout from the group's leader or any rank of P2P."""
        config = self._config
        text = classic_text(descriptor, record_id, self._session.facts.rank, device, config)
        if self._classic and self._nvtx is not None:
            self._nvtx.mark(text)
        if config.print_calls and (descriptor.reader.is_p2p or descriptor.state.rank == 0):
            # One write per line, so that the lines of several ranks do not mix.
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
