"""The Python part of the compiled recorder: handles new groups and source lines, opens markers, takes the calls.

The kernel calls Python through torch operations in the namespace `crossrank`, which are invisible to users' modes:

* `group(process group) -> number`: the first call of a group.
* `site(number of the op, device) -> number`: the first call of a source line, or new code above the kernel.
* `mark(kind) -> 0 or 1`: whether an attached tool gets a marker, until `set_marker` makes this final.
* `open(kind, id) -> 0 or 1`, `close() -> 0`: around a launch, for ranges that only Python can open.

-1 means a failure, which is counted here. An exception of a script's signal handler passes through.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from crossrank.dtypes import dtype_of
from crossrank.errors import one_line
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.record.call_site import USER, CallSites, Site
from crossrank.instrument.record.descriptor import Descriptor, GroupState
from crossrank.instrument.record.op_schema import LONG, CallKey, Reader
from crossrank.instrument.record.recorder import Call, CallCounts, CurrentWait, Recorded, Recorder, Token, span_of
from crossrank.instrument.record.reductions import name_of_code
from crossrank.instrument.script_errors import raised_by_script
from crossrank.instrument.unpatched import threading
from crossrank.recording import Ran, Wait

_END_OF_ARGUMENT = -1
_MOST_AT_ONCE = 256


class CompiledRecorder(Recorder):
    """The recorder in C++."""

    kernel = "compiled"

    def __init__(self, session: Recorded, native: ModuleType) -> None:
        self.native = native
        self._installed = self._active = self._window_open = False
        self._step = 0
        super().__init__(session)
        self._sites = CallSites(on_forget=native.forget_code, on_clear=native.clear_sites)
        self._marks = self._ranges and native.has_nvtx()
        self.readers: Sequence[Reader] = ()
        self._dtypes = [_dtype(name) for name in native.scalar_types()]

    # The kernel reads these three at each call.

    @property
    def active(self) -> bool:
        return self._active

    @active.setter
    def active(self, value: bool) -> None:
        self._active = value
        self._tell()

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        self._tell()

    @property
    def window_open(self) -> bool:
        return self._window_open

    @window_open.setter
    def window_open(self, value: bool) -> None:
        self._window_open = value
        self._tell()

    def begin(self, readers: Sequence[Reader]) -> None:
        """Make the kernels use this recorder."""
        self.readers = readers
        self._installed = True
        self.native.begin(self._config.ring)
        self._tell()

    def _tell(self) -> None:
        if self._installed:
            opens = self._window_open or self._texts or (self._ranges and not self._marks)
            self.native.set(self._active, self._marks, opens, self._config.timing, self._step)

    def counts(self) -> CallCounts:
        state = self.native.state()
        errors = state["errors"] + self._errors
        return CallCounts(
            calls=state["calls"], dropped=state["dropped"], spans_dropped=state["spans_dropped"], errors=errors
        )

    @property
    def waiting(self) -> int:
        waiting: int = self.native.state()["waiting"]
        return waiting

    def take(self, most: int) -> list[Call]:
        state = self.native.state()
        calls: list[Call] = []
        for left in range(min(state["waiting"], most), 0, -_MOST_AT_ONCE):  # lets training run in between
            calls += self.native.take(min(left, _MOST_AT_ONCE))
        if state["errors"]:
            self.complain(" ".join(state["first_error"].split()))
        described = [call for call in calls if call[0] is not None]
        self._count_failures(len(calls) - len(described))
        return described

    def take_spans(self, most: int) -> list[Wait | Ran]:
        return [span_of(*span) for span in self.native.take_spans(most)]

    def waits_under_way(self) -> list[CurrentWait]:
        return [CurrentWait(*wait) for wait in self.native.waits()]

    def answer_for_python(self, asked: Path | None, answer: Path, rank: int) -> None:
        paths = (b"" if asked is None else os.fsencode(asked), os.fsencode(answer))
        main = threading.main_thread().ident or 0
        self.native.answer_for(*paths, f'{{"rank":{rank},"by":{rank}', main)

    def beat(self) -> None:
        self.native.beat()

    def note_answer(self, asked_at: int) -> None:
        self.native.note_answer(asked_at)

    def nccl_recorder(self) -> bytes:
        content: bytes = self.native.nccl_recorder()  # without the interpreter's lock
        return content

    def recording_wait(self, original: Callable[..., Any]) -> object:
        method: object = self.native.recording_wait(dist.Work, original)
        return method

    def noting_wait(self, original: Callable[..., Any]) -> object:
        method: object = self.native.noting_wait(torch._C.Future, original)
        return method

    def note_work(self, work: dist.Work, record_id: int) -> None:
        self.native.note_work(work, record_id)

    def watch_backward(self, code: CodeType) -> None:
        self.native.watch_backward(code)

    def start_coalescing(self) -> None:
        self.native.start_coalescing()

    def end_coalescing(self) -> int | None:
        batch: int | None = self.native.end_coalescing()
        return batch

    # Methods that the kernel calls.

    def group(self, boxed: Any) -> int:
        """Return the kernel's number of a group's state."""
        group = dist.ProcessGroup.unbox(boxed)
        number: int = self.native.add_group(self._session.first_call(group))
        weakref.finalize(group, self.native.forget_group, number).atexit = False
        return number

    def site(self, op: int, device: str | None, frame: FrameType | None) -> int:
        """Return the number of the site of a call by `frame`, and tell the kernel the kinds of code above it."""
        if self._session.gpu.is_open:
            self._session.gpu.settle(device)
        with self._lock:  # no code may be forgotten in between
            site, _ = self._sites.find(frame, self.readers[op].direct_api)
            for code, kind in _codes_above(self._sites, frame):
                self.native.know_code(code, kind)
        number: int = self.native.add_site(site)
        return number

    def describe(
        self,
        op: int,
        state: GroupState,
        site: Site,
        device: str | None,
        reduce: int | None,
        words: Sequence[int | None],
    ) -> Descriptor | None:
        """Return the descriptor of a call. `words` are its arguments in the order of its `Reader`."""
        try:
            if self._session.gpu.is_open:  # later calls of a site may use other devices
                self._session.gpu.settle(device)
            reader, reduction = self.readers[op], None if reduce is None else name_of_code(reduce)
            return Descriptor(reader, state, site, _key(reader, words, self._dtypes), reduction)
        except Exception as error:
            if raised_by_script(error):
                raise
            self.complain(one_line(error))  # `take` counts calls without a descriptor
            return None

    def open(self, kind: int, record_id: int) -> Token | None:
        """Open the ranges around a launch that only Python can open; return the token for `after`."""
        descriptor: Descriptor | None = self.native.descriptor(kind)
        if descriptor is None:
            return None
        return self._open(descriptor, record_id, lambda: self.native.device(kind))

    def mark(self, kind: int) -> int:
        """Tell the kernel how to mark the calls of a kind. Return 1 if they are marked, else 0."""
        descriptor: Descriptor | None = self.native.descriptor(kind)
        topology = self._session.facts.topology
        if descriptor is None or topology is None or self._nvtx is None:
            return 0
        is_final = topology.settled.is_set()
        text = self._nvtx.message(descriptor, topology) if self._wants(descriptor, topology) else None
        self.native.set_marker(kind, text, is_final)
        return int(text is not None)

    def _push(self, descriptor: Descriptor, record_id: int, topology: Topology) -> bool:
        return not self._marks and super()._push(descriptor, record_id, topology)


def layout(reader: Reader) -> tuple[Any, ...]:
    """Return the positions of the arguments of an op, as the kernel's `Op` has them."""
    places = (
        reader.group,
        reader.reduce,
        reader.peer,
        reader.tag,
        reader.in_split,
        reader.out_split,
        reader.dummy,
    )
    name, count = f"c10d::{reader.c10d}", reader.arguments
    return name, count, reader.is_p2p, reader.op == "send", places, reader.keyed, reader.tensors_at


def _codes_above(sites: CallSites, frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        kind = sites.kind_of(frame.f_code)
        yield frame.f_code, kind
        if kind == USER:
            return
        frame = frame.f_back


def _key(reader: Reader, words: Sequence[int | None], dtypes: Sequence[torch.dtype]) -> CallKey:
    """Return the key of a call, equal to that of `Reader.key`, from the kernel's words."""
    given = iter(words)
    key: list[Any] = [LONG]
    for is_bool in reader.keyed_bools:
        value = next(given)
        key.append(bool(value) if is_bool and value is not None else value)
    for _ in reader.tensors_at:
        while (head := next(given)) != _END_OF_ARGUMENT:
            assert head is not None
            key += [tuple(next(given) for _ in range(head & 0xFFFFFFFF)), dtypes[head >> 32]]
        key.append(None)
    if reader.in_split >= 0:
        key += [tuple(next(given) for _ in range(next(given) or 0)) for _ in range(2)]
    return tuple(key)


def _dtype(name: str) -> Any:
    """Return torch's dtype for the ScalarType `name` of C++."""
    known = dtype_of(name)
    return getattr(torch, known.name if known is not None else name.lower(), None)
