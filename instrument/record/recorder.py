"""The base of both kernels, which record a call between the dispatcher and its launch.

`Recorder` makes markers and ranges around a launch, and counts failures. A kernel puts a row into a ring for each call
and each wait; the writer thread does the remaining work. A wait is identified by the Work that the launch returned:
both kernels keep the addresses of the latest Works.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Protocol

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
from crossrank.instrument.unpatched import threading
from crossrank.instrument.write.nvtx_markers import NvtxMarkers, classic_text
from crossrank.recording import RANGE, WAITED_IN, Ran, Wait

BATCH_CODE = dist.batch_isend_irecv.__code__

# (range of the profiler, whether an NVTX range is open)
Token = tuple[Any, bool]
# (descriptor, id, sequence number, time, step, batch, tag, thread)
Call = tuple[Descriptor, int, int, int, int, int | None, int | None, int]

NO_CALL = -1
"""Id of an unknown call."""


class CurrentWait(NamedTuple):
    """A wait that has not ended."""

    call: int
    """Id of the call; `NO_CALL` = unknown."""
    thread: int
    limited: bool
    """The script gave this wait a timeout."""


def span_of(record_id: int, begin: int, end: int, thread: int, of: int, raised: bool) -> Wait | Ran:
    """Return a time span of a call from a kernel's row; `of` is an index into `recording.WAITED_IN`, or its length."""
    if of == len(WAITED_IN):
        return Ran(id=record_id, t=begin, took=end - begin, raised=raised)
    call = None if record_id == NO_CALL else record_id
    return Wait(t=begin, took=end - begin, thread=thread, id=call, waited_in=WAITED_IN[of], raised=raised)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class CallCounts:
    """Counts of the calls of this process."""

    calls: int = 0
    """Calls with an id."""
    dropped: int = 0
    """Lost because the ring was full."""
    spans_dropped: int = 0
    """Waits and durations lost because the ring was full."""
    errors: int = 0
    """Failures inside the recorder; the calls themselves were made."""


class Recorded(Protocol):
    """The part of a session that a recorder uses."""

    facts: Facts
    gpu: RankGpu
    groups: GroupTable
    nvtx: NvtxMarkers | None

    @property
    def writer(self) -> object | None:
        """None if calls are not written: without a folder, or before there is a process group."""

    def first_call(self, group: dist.ProcessGroup, /) -> GroupState:
        """Return the state of a group at its first call; start the files if they have not started."""


class Recorder(ABC):
    """Records the calls of one session, on any thread."""

    kernel: str
    """Name of the kernel, and why it is used, as text for the header."""

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
        self.follows_waits = False  # whether all waits for a Work or a Future are recorded

    @abstractmethod
    def counts(self) -> CallCounts:
        """Return the counts of calls so far."""

    def calls(self) -> int:
        """Return how many calls have an id."""
        return self.counts().calls

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of calls that `take` has not taken yet."""

    @abstractmethod
    def take(self, most: int) -> list[Call]:
        """Take up to `most` calls, in about the order in which they were made."""

    @abstractmethod
    def take_spans(self, most: int) -> list[Wait | Ran]:
        """Take up to `most` waits and durations."""

    @abstractmethod
    def watch_backward(self, code: CodeType) -> None:
        """Record the waits of backward passes. `code` is the function in which Python starts a backward pass.

        C++, such as DDP's reducer, made a call if this function is its innermost frame, or if it has no frame. The
        reducer waits in C++ at the end of the pass, so callbacks of autograd's engine record the wait."""

    @abstractmethod
    def waits_under_way(self) -> list[CurrentWait]:
        """Return the current waits of all threads."""

    @abstractmethod
    def answer_for_python(self, asked: Path | None, answer: Path, rank: int) -> None:
        """From now on, answer for this rank while its Python does not run, where the kernel can do that.

        `asked` changes when a rank asks; None ends it. `answer` is the file to write.
        """

    @abstractmethod
    def beat(self) -> None:
        """Note that Python runs."""

    @abstractmethod
    def note_answer(self, asked_at: int) -> None:
        """Note that this rank has answered the question that was asked at this time, in ns since 1970."""

    def nccl_recorder(self) -> bytes:
        """Return torch's flight recorder of NCCL calls as JSON; empty if this torch has none."""
        dump = nccl_dump()
        return b"" if dump is None else dump(True, False)

    @abstractmethod
    def recording_wait(self, original: Callable[..., Any]) -> object:
        """Return a replacement for the method `original` of `Work`, which calls it and records the wait."""

    @abstractmethod
    def noting_wait(self, original: Callable[..., Any]) -> object:
        """Return a replacement for the method `original` of `Future`, which calls it and notes the current wait."""

    @abstractmethod
    def note_work(self, work: dist.Work, record_id: int) -> None:
        """Note that waits for `work` are waits for this call."""

    @abstractmethod
    def start_coalescing(self) -> None:
        """Start a batch: the calls of this thread until `end_coalescing` become one launch."""

    @abstractmethod
    def end_coalescing(self) -> int | None:
        """End a batch before its launch. Return the id of its first call, -1 if it has no calls."""

    def after(self, token: Token) -> None:
        """Close the ranges that `before` opened on this thread."""
        handle, pushed = token
        try:
            if pushed and self._nvtx is not None:
                self._nvtx.pop()
            if handle is not None:
                torch.autograd._record_function_with_args_exit(handle)
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Count a failure of the recorder and report the first one. The call itself continues. An exception of the
        script is raised again."""
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
        """Open the ranges around a launch: for an attached tool, and in a window."""
        topology = self._session.facts.topology
        assert topology is not None  # created before the first group
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
        """Open the range of a call for an attached tool; return whether there is one to close."""
        if self._ranges and self._nvtx is not None:
            self._nvtx.push(descriptor, record_id, topology)
            return True
        return False

    def _wants(self, descriptor: Descriptor, topology: Topology) -> bool:
        """Return whether calls like this one get markers."""
        wanted = descriptor.emitted
        if wanted is None:
            wanted = self._config.emit == "ALL" or crosses_nodes(descriptor.locality(topology))
            if topology.settled.is_set():
                descriptor.emitted = wanted
        return wanted

    def open_batch(self, group: dist.ProcessGroup, batch: int) -> Token | None:
        """Open the ranges around the launch of a batch; return the token for `after`."""
        if batch >= 0 and self._ranges and self._nvtx is not None:
            state = self._session.groups.by_id(id(group))
            self._nvtx.push_batch(group.group_name, 0 if state is None else state.group.epoch, batch)
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
