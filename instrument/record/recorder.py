"""What happens between a call's arrival at the dispatcher and its launch.

`Recorder` is what both kernels share: markers and ranges around a launch, and the count of failures. `PythonRecorder`
is the kernel in Python: `before` reads what identifies the call, gives it its numbers and leaves a tuple in a ring; all
that can wait is done by the writer's thread. It costs about 3 us, on top of what the dispatcher needs to call Python at
all. `before` returns a token where something has to be closed after the launch (NVTX range, profiler range).
"""

from __future__ import annotations

import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from crossrank.comm import crosses_nodes
from crossrank.errors import one_line
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.log import log
from crossrank.instrument.record.call_site import CallSites
from crossrank.instrument.record.descriptor import Descriptor
from crossrank.instrument.record.op_schema import Reader
from crossrank.instrument.record.reductions import ReductionReader
from crossrank.instrument.torch_private import has
from crossrank.instrument.write.nvtx_markers import classic_text
from crossrank.recording import RANGE

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

BATCH_CODE = dist.batch_isend_irecv.__code__

_getframe: Callable[[int], FrameType] = sys._getframe

# (range of the profiler, whether an NVTX range is open)
Token = tuple[Any, bool]
# (descriptor, id, sequence number, time, step, batch, tag)
Call = tuple[Descriptor, int, int, int, int, int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class CallCounts:
    """Calls of this process."""

    calls: int = 0
    """That got an id."""
    dropped: int = 0
    """Lost because the ring was full."""
    errors: int = 0
    """Failures inside the recorder; the call itself went through."""


class Recorder(ABC):
    """Records the calls of one session, on any thread."""

    kernel: str
    """Which kernel it is, for people, and why."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._config = session.config
        self._nvtx = nvtx = session.nvtx
        self._classic = session.config.nvtx == "classic" and nvtx is not None
        self._texts = self._classic or session.config.print_calls
        self._ranges = nvtx is not None and not self._classic
        self._emits = self._texts or self._ranges
        self._errors = 0  # changed under the lock
        self._lock = threading.RLock()  # a signal handler may fail to record while its thread holds it
        self._complained = False
        self.active = True
        self.step = 0
        self.window_open = False

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
    def take(self) -> list[Call]:
        """The calls since the last time, in about the order in which they were made."""

    @property
    @abstractmethod
    def coalescing(self) -> int:
        """Threads that gather a batch."""

    @abstractmethod
    def start_coalescing(self) -> None:
        """From here to `end_coalescing` the calls of this thread become one launch."""

    @abstractmethod
    def end_coalescing(self, group: dist.ProcessGroup) -> Token | None:
        """The launch of the batch is about to happen; returns what to close after it."""

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
        """Count a failure of the recorder and report the first one. The call itself goes on."""
        self._count_failures(1)
        self.complain(one_line(error))

    def complain(self, why: str) -> None:
        """Report a failure, once."""
        if not self._complained:
            self._complained = True
            log.warning("crossrank: a call could not be recorded: %s; training goes on, further ones are counted", why)

    def _count_failures(self, count: int) -> None:
        with self._lock:
            self._errors += count

    def _open(self, descriptor: Descriptor, record_id: int, device: Callable[[], str | None]) -> Token | None:
        """Open what belongs around a launch: a range for a tool, one in a window."""
        topology = self._session.topology
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

    def _open_batch(self, group: dist.ProcessGroup, batch: int) -> Token | None:
        if batch >= 0 and self._ranges and self._nvtx is not None:
            self._nvtx.push_batch(group.group_name, batch)
            return None, True
        return None

    def _emit_text(self, descriptor: Descriptor, record_id: int, device: str | None) -> None:
        """The older shim's text: as a marker, and on stdout from the group's leader or any rank of P2P."""
        config = self._config
        text = classic_text(descriptor, record_id, self._session.rank, device, config)
        if self._classic and self._nvtx is not None:
            self._nvtx.mark(text)
        if config.print_calls and (descriptor.reader.is_p2p or descriptor.state.rank == 0):
            # One write per line, so that the lines of several ranks do not mix.
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


class PythonRecorder(Recorder):
    """The kernel in Python."""

    def __init__(self, session: Session, why: str = "") -> None:
        """`why` there is no compiled one, where that was not asked for."""
        super().__init__(session)
        self.kernel = f"python ({why})" if why else "python"
        self._calls: deque[Call] = deque()
        self._capacity = session.config.ring
        self._ids = itertools.count()
        self._find_site = CallSites().find
        self._reductions = ReductionReader()
        self._read_reduction = self._reductions.read
        self._unbox: Callable[[Any], dist.ProcessGroup] = dist.ProcessGroup.unbox
        self._state_of = session.groups.by_id
        self._coalescing = 0  # threads that gather a batch; changed under the lock
        self._dropped = 0  # so is this
        self._thread = threading.local()

    def before(self, reader: Reader, args: Sequence[Any]) -> Token | None:
        """Record the call that is about to be launched. Frame 1 is the kernel's, frame 2 whoever called it."""
        session = self._session
        group = self._unbox(args[reader.group])
        state = self._state_of(id(group))
        if state is None:
            state = session.first_call(group)
        key = reader.key(args)
        if key is None:
            return None
        try:
            frame = _getframe(2)
        except ValueError:  # a thread of C++: nothing of Python above the kernel
            frame = None
        site, api_frame = self._find_site(frame, reader.direct_api)
        reduce = self._read_reduction(frame, args[reader.reduce]) if reader.reduce >= 0 else None
        full_key = (reader, site, key, reduce)
        descriptor = state.descriptors.get(full_key)
        if descriptor is None:
            if reduce is not None:
                reduce = self._reductions.verify(reduce, args[reader.reduce])
                full_key = (reader, site, key, reduce)
            descriptor = Descriptor(reader, state, site, key, reduce)
            state.descriptors.keep(full_key, descriptor)
            if session.gpu.is_open:
                session.gpu.settle(reader.device(args))
        record_id = next(self._ids)
        batch = tag = None
        if reader.is_p2p:
            peer = args[reader.peer] if reader.peer >= 0 else None
            seq = state.next_p2p_seq(peer, reader.op)
            tag = args[reader.tag] if reader.tag >= 0 else None
            if api_frame is not None and api_frame.f_code is BATCH_CODE:
                batch = self._p2p_batch(api_frame, record_id)
        else:
            seq = next(state.seq)
        if self._coalescing:
            batch = self._coalesced_batch(record_id, batch)
        if session.writer is not None:  # None where the folder cannot be written: markers go on without it
            if len(self._calls) < self._capacity:
                self._calls.append((descriptor, record_id, seq, monotonic_ns(), self.step, batch, tag))
            else:
                with self._lock:
                    self._dropped += 1
        if self._emits or self.window_open:
            return self._open(descriptor, record_id, lambda: reader.device(args))
        return None

    def counts(self) -> CallCounts:
        # Read from the counter's repr: `next` would use an id up.
        calls = int(repr(self._ids).removeprefix("count(").removesuffix(")"))
        return CallCounts(calls=calls, dropped=self._dropped, errors=self._errors)

    @property
    def waiting(self) -> int:
        return len(self._calls)

    def take(self) -> list[Call]:
        calls = self._calls
        return [calls.popleft() for _ in range(len(calls))]

    @property
    def coalescing(self) -> int:
        return self._coalescing

    def _p2p_batch(self, frame: FrameType, record_id: int) -> int:
        """The batch id of a call made by `batch_isend_irecv` on a backend without coalescing (gloo).

        That function gathers the requests it has made so far in its local `reqs`: empty means that this is
        the first call of the batch.
        """
        requests = frame.f_locals.get("reqs")
        current: int | None = getattr(self._thread, "p2p_batch", None)
        if current is None or not requests:
            current = self._thread.p2p_batch = record_id
        return current

    def start_coalescing(self) -> None:
        if getattr(self._thread, "batch", None) is None:  # not left over from a batch that raised
            with self._lock:
                self._coalescing += 1
        self._thread.batch = -1

    def end_coalescing(self, group: dist.ProcessGroup) -> Token | None:
        batch: int | None = getattr(self._thread, "batch", None)
        if batch is None:
            return None
        self._thread.batch = None
        with self._lock:
            self._coalescing -= 1
        return self._open_batch(group, batch)

    def _coalesced_batch(self, record_id: int, batch: int | None) -> int | None:
        current: int | None = getattr(self._thread, "batch", None)
        if current is None:  # another thread is coalescing
            return batch
        if current < 0:
            current = self._thread.batch = record_id
        return current
