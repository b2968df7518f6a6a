"""The recorder in Python.

`before` identifies the call, gives it its numbers and puts a tuple into a ring. `launched` notes the Work that a launch
returned. They cost about 4 us, in addition to the dispatcher's cost of a call to Python.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from crossrank.instrument.record.call_site import CallSites
from crossrank.instrument.record.descriptor import Descriptor
from crossrank.instrument.record.op_schema import Reader
from crossrank.instrument.record.recorder import (
    BATCH_CODE,
    NO_CALL,
    Call,
    CallCounts,
    CurrentWait,
    Recorded,
    Recorder,
    Token,
    span_of,
)
from crossrank.instrument.record.reductions import ReductionReader
from crossrank.instrument.torch_private import has
from crossrank.instrument.unpatched import threading
from crossrank.recording import WAITED_IN, Ran, Wait

get_native_id = threading.get_native_id

# (id, time, what to close after the launch)
Launch = tuple[int, int, Token | None]

_IN_WORK, _IN_TENSOR, _IN_LAUNCH, _IN_BACKWARD = range(len(WAITED_IN))
_LONG_LAUNCH = 1_000_000
"""A launch that takes longer, in ns, has waited: for a new communicator or for the other ranks."""
_MOST_WORKS = 2048


class PythonRecorder(Recorder):
    """The recorder in Python."""

    def __init__(self, session: Recorded, why: str = "") -> None:
        """`why` there is no compiled recorder, if the settings did not ask for this one."""
        super().__init__(session)
        self.kernel = f"python ({why})" if why else "python"
        self._calls: deque[Call] = deque()
        self._capacity = self._config.ring
        self._ids = itertools.count()
        self._find_site = CallSites().find
        self._reductions = ReductionReader()
        self._read_reduction = self._reductions.read
        self._state_of = session.groups.by_id
        self._coalescing = 0  # threads that collect a batch; changed under the lock
        self._dropped = self._spans_dropped = 0  # changed under the lock
        self._waits: deque[tuple[int, int, int, int, int, bool]] = deque()
        self._under_way: dict[int, CurrentWait] = {}  # of each thread
        self._last_of_pass: dict[int, int] = {}  # current backward pass -> the last call that C++ made in it
        self._backward_code: CodeType | None = None
        self._call_of_work = _CallOf()
        self._call_of_storage = _CallOf()  # of a functional collective's result
        self._unbox_work: Callable[[Any], dist.Work] = dist.Work.unbox
        self._thread = threading.local()

    def before(self, reader: Reader, args: Sequence[Any]) -> Launch | None:
        """Record the call before its launch. Frame 1 is the kernel, frame 2 its caller."""
        session = self._session
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(args[reader.group])
        state = self._state_of(id(group))
        if state is None:
            state = session.first_call(group)
        key = reader.key(args)
        if key is None:
            return None
        try:
            frame: FrameType | None = sys._getframe(2)
        except ValueError:  # a thread of C++: no Python frame above the kernel
            frame = None
        site, api_frame = self._find_site(frame, reader.direct_api)
        reduce = self._read_reduction(frame, args[reader.reduce]) if reader.reduce >= 0 else None
        full_key = (reader, site, key, reduce)
        descriptor = state.descriptors.get(full_key) or state.descriptors.recall(full_key)
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
        self._thread.last = record_id
        now = monotonic_ns()
        if self._backward_code is not None and (frame is None or frame.f_code is self._backward_code):
            self._follow_backward(record_id)
        if session.writer is not None:  # None if the folder cannot be written: then only markers
            if len(self._calls) < self._capacity:
                self._calls.append((descriptor, record_id, seq, now, self.step, batch, tag, get_native_id()))
            else:
                with self._lock:
                    self._dropped += 1
        token = None
        if self._emits or self.window_open:
            token = self._open(descriptor, record_id, lambda: reader.device(args))
        return record_id, now, token

    def launched(self, launch: Launch, reader: Reader, result: Any) -> None:
        """Note the Work that a launch returned. An op that returns none waits in the launch."""
        record_id, began, _ = launch
        if reader.gives_work:
            work = result[-1] if type(result) is tuple else result
            if work is not None:
                self.note_work(self._unbox_work(work), record_id)
            if monotonic_ns() - began <= _LONG_LAUNCH:
                return
        self._waited(record_id, began, _IN_LAUNCH, False)

    def watch_backward(self, code: CodeType) -> None:
        if has("waits of backward passes"):
            self._backward_code = code

    def _follow_backward(self, record_id: int) -> None:
        """Record the wait at the end of the backward pass that made this call. See `follow_backward` of the compiled
        kernel."""
        number = torch._C._current_graph_task_id()
        if number < 0:
            return
        is_new = number not in self._last_of_pass
        self._last_of_pass[number] = record_id
        if is_new:
            queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

            def computed() -> None:
                call, begin = self._last_of_pass.pop(number, NO_CALL), monotonic_ns()
                if self.active and call != NO_CALL:
                    with suppress(RuntimeError):
                        queue(_EndOfPass(self, call, begin))

            with suppress(RuntimeError):  # no callback can be queued here: the wait is not recorded
                queue(computed)

    def note_work(self, work: dist.Work, record_id: int) -> None:
        self._call_of_work.note(_address(work), record_id)

    def _waited(self, record_id: int, begin: int, waited_in: int, raised: bool) -> None:
        if self._session.writer is not None:
            if len(self._waits) < self._capacity:
                self._waits.append((record_id, begin, monotonic_ns(), get_native_id(), waited_in, raised))
            else:
                with self._lock:
                    self._spans_dropped += 1

    def recording_wait(self, original: Callable[..., Any]) -> object:
        @functools.wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(work, *args, **kwargs)
            record_id = NO_CALL
            try:
                record_id = self._call_of_work.find(_address(work))
            except Exception as error:
                self.failed(error)
            return self._record_wait(record_id, _IN_WORK, original, work, *args, **kwargs)

        return wait

    def noting_wait(self, original: Callable[..., Any]) -> object:
        @functools.wraps(original)
        def wait(future: torch._C.Future[Any], *args: Any, **kwargs: Any) -> Any:
            before = self._begin_wait(NO_CALL, limited=False)
            try:
                return original(future, *args, **kwargs)
            finally:
                self._end_wait(before)

        return wait

    def _record_wait(self, record_id: int, waited_in: int, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin, raised = monotonic_ns(), True
        # The only argument of `Work.wait` is a timeout. A timedelta of 0, which is false, is none.
        limited = waited_in == _IN_WORK and any((*args[1:], *kwargs.values()))
        before = self._begin_wait(record_id, limited=limited)
        try:
            result = wait(*args, **kwargs)
            raised = False
            return result
        finally:
            try:
                self.end_wait(before)
                self._waited(record_id, begin, waited_in, raised)
            except Exception as error:
                self.failed(error)

    def _begin_wait(self, record_id: int, *, limited: bool) -> CurrentWait | None:
        try:
            return self.begin_wait(record_id, limited=limited)
        except Exception as error:
            self.failed(error)
            return None

    def _end_wait(self, before: CurrentWait | None) -> None:
        try:
            self.end_wait(before)
        except Exception as error:
            self.failed(error)

    def begin_wait(self, record_id: int, *, limited: bool = False) -> CurrentWait | None:
        """Note that this thread waits for a call until `end_wait`. Return the previous wait, for `end_wait`. `limited`:
        the script gave this wait a timeout."""
        thread = get_native_id()
        before = self._under_way.get(thread)
        self._under_way[thread] = CurrentWait(record_id, thread, limited)
        return before

    def end_wait(self, before: CurrentWait | None) -> None:
        if before is None:
            self._under_way.pop(get_native_id(), None)
        else:
            self._under_way[get_native_id()] = before

    def functional(self, redispatch: Callable[..., Any], *args: Any) -> Any:
        """Call a functional collective, and note the call of its result tensors."""
        thread = self._thread
        thread.last = None
        result = redispatch(*args)
        try:
            if self.active and thread.last is not None:
                for tensor in result if isinstance(result, (list, tuple)) else (result,):
                    self._call_of_storage.note(_storage(tensor), thread.last)
        except Exception as error:
            self.failed(error)
        return result

    def wait_tensor(self, redispatch: Callable[..., Any], keys: Any, tensor: torch.Tensor) -> Any:
        """Call `wait_tensor`. Without a call of the tensor it returns at once, and is not a wait."""
        record_id = NO_CALL
        try:
            if self.active:
                record_id = self._call_of_storage.take(_storage(tensor))
        except Exception as error:
            self.failed(error)
        if record_id == NO_CALL:
            return redispatch(keys, tensor)
        return self._record_wait(record_id, _IN_TENSOR, redispatch, keys, tensor)

    def answer_for_python(self, asked: Path | None, answer: Path, rank: int) -> None:
        """Do nothing: this kernel does not run without the interpreter's lock."""

    def beat(self) -> None: ...

    def note_answer(self, asked_at: int) -> None: ...

    def waits_under_way(self) -> list[CurrentWait]:
        return list(self._under_way.values())

    def counts(self) -> CallCounts:
        # Read from the counter's repr: `next` would use an id up.
        calls = int(repr(self._ids).removeprefix("count(").removesuffix(")"))
        return CallCounts(calls=calls, dropped=self._dropped, spans_dropped=self._spans_dropped, errors=self._errors)

    @property
    def waiting(self) -> int:
        return len(self._calls)

    def take(self, most: int) -> list[Call]:
        calls = self._calls
        return [calls.popleft() for _ in range(min(len(calls), most))]

    def take_spans(self, most: int) -> list[Wait | Ran]:
        waits = self._waits
        return [span_of(*waits.popleft()) for _ in range(min(len(waits), most))]

    def _p2p_batch(self, frame: FrameType, record_id: int) -> int:
        """Return the batch id of a call of `batch_isend_irecv` on a backend without coalescing (gloo).

        That function collects its requests in its local `reqs`: it is empty at the first call of the batch.
        """
        requests = frame.f_locals.get("reqs")
        current: int | None = getattr(self._thread, "p2p_batch", None)
        if current is None or not requests:
            current = self._thread.p2p_batch = record_id
        return current

    def start_coalescing(self) -> None:
        if getattr(self._thread, "batch", None) is None:  # no batch is left over from an exception
            with self._lock:
                self._coalescing += 1
        self._thread.batch = -1

    def end_coalescing(self) -> int | None:
        batch: int | None = getattr(self._thread, "batch", None)
        if batch is not None:
            self._thread.batch = None
            with self._lock:
                self._coalescing -= 1
        return batch

    def _coalesced_batch(self, record_id: int, batch: int | None) -> int | None:
        current: int | None = getattr(self._thread, "batch", None)
        if current is None:  # another thread is coalescing
            return batch
        if current < 0:
            current = self._thread.batch = record_id
        return current


class _CallOf:
    """The calls of the latest C++ objects, by address."""

    def __init__(self) -> None:
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def note(self, address: int, record_id: int) -> None:
        """Note the call of an object. A new object at the same address must be noted again."""
        if address < 0:
            return
        self._new[address] = record_id
        if len(self._new) > _MOST_WORKS:
            self._old, self._new = self._new, {}

    def find(self, address: int) -> int:
        found = self._new.get(address)
        return self._old.get(address, NO_CALL) if found is None else found

    def take(self, address: int) -> int:
        found = self.find(address)
        self._new.pop(address, None)
        self._old.pop(address, None)
        return found


_HEAD = object.__basicsize__


def _address(work: dist.Work) -> int:
    """Return the address of a Work of C++, which pybind11 stores after the head of its object.

    With another layout, the number would match no known Work, and the wait would be for an unknown call.
    """
    return ctypes.c_void_p.from_address(id(work) + _HEAD).value or 0


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage in C++; -1 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -1


class _EndOfPass:
    """The last callback of a backward pass; a wait ends when it runs, or is destroyed because the reducer raises."""

    def __init__(self, recorder: PythonRecorder, call: int, begin: int) -> None:
        self._recorder, self._call, self._begin = recorder, call, begin
        self._before = recorder.begin_wait(call)

    def __call__(self) -> None:
        try:
            self._recorder._waited(self._call, self._begin, _IN_BACKWARD, False)
        except Exception as error:
            self._recorder.failed(error)

    def __del__(self) -> None:
        self._recorder.end_wait(self._before)
