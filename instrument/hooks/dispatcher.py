"""Kernels at torch's dispatcher, which only this module and `compiled_kernel` change.

Every collective and P2P call (of a user, DDP's C++ reducer, FSDP, DTensor, compiled code) passes the dispatcher as a
`c10d::*` op. When tracing starts, crossrank installs a kernel at the `BackendSelect` key of each such op. The kernel
records the call and passes it on to the kernel that would have run without it. No name in `torch.distributed` is
replaced, so earlier references, `is` checks and signatures do not change.

There are two kernels: a compiled one (`crossrank.instrument.compiled`) and a Python one as a fallback. The Python one
calls `PythonRecorder.before(reader, args)`, `after(token)` and `launched(launch, reader, result)`.

The dispatcher does not show coalesced launches or waits for a Work or a Future. So crossrank replaces two methods of
ProcessGroup, one of Work and one of Future. Functional collectives wait in an op, `wait_tensor`.

Calls that do not pass the dispatcher are not recorded: methods of a Backend object, subclasses of ProcessGroup in
Python, torchcomms, symmetric memory, and replays of a CUDA graph. Waits inside C++ are not recorded either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.compiled import build
from crossrank.instrument.compiled.recorder import CompiledRecorder
from crossrank.instrument.hooks import compiled_kernel
from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.log import log
from crossrank.instrument.record.op_schema import Reader
from crossrank.instrument.record.python_recorder import PythonRecorder
from crossrank.instrument.record.recorder import Recorded, Recorder
from crossrank.instrument.torch_private import has, require

_NAMESPACE = "c10d"
_FUNCTIONAL = "_c10d_functional"
_WAIT_TENSOR = "wait_tensor"
_KEY = "BackendSelect"


class Dispatched(Recorded, Protocol):
    """A session whose recorder the kernels call. `install` replaces a compiled recorder that does not work."""

    recorder: Recorder


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """The kernels in the dispatcher of this process."""

    readers: list[Reader]
    kind: type[Recorder]
    record_to: Callable[[Any], None]
    """Makes the kernels use another recorder of this kind."""
    remove: Callable[[], None]
    """Removes them: only if no other thread may call them, as in a test."""


_kernels: _Kernels | None = None
_patches = Patches()
_plain_waits: dict[type, object] = {}
"""`Work.wait` and `Future.wait` as they were before the first recording of this process."""


def ops() -> list[str]:
    """Return the names of the recorded ops."""
    return [reader.c10d for reader in _kernels.readers] if _kernels is not None else []


def install(session: Dispatched) -> None:
    """Install the kernels. Raises `CrossrankError`, with nothing installed, if torch lacks a part."""
    global _kernels
    require("interception")
    recorder = session.recorder
    if _kernels is not None:
        _kernels.record_to(recorder)
    else:
        try:
            _kernels = _install_kernels(session)
        except Exception as error:
            raise CrossrankError(
                f"torch {torch.__version__} does not allow crossrank to record its c10d ops ({one_line(error)}); "
                "crossrank is tested with torch 2.8 to 2.15"
            ) from error
    if has("coalescing"):
        _follow_coalescing(session.recorder)
    if has("waits"):
        _follow_waits(session.recorder)


def make_recorder(session: Recorded) -> Recorder:
    """Return the recorder of a session: compiled, or in Python if the settings ask for it or nothing else works."""
    wanted: str = session.facts.config.recorder
    if _kernels is not None:
        there = "python" if _kernels.kind is PythonRecorder else "compiled"
        if wanted not in ("auto", there):
            log.warning(
                "crossrank: calls are recorded with the %s kernel, as in the first recording of this process: another "
                "one cannot take its place while other threads may communicate",
                there,
            )
        wanted = there
    if wanted == "python":
        return _in_python(session)
    try:
        return CompiledRecorder(session, _loaded(waits=session.facts.config.recorder == "compiled"))
    except Exception as error:
        return _python_instead(session, error)


def _loaded(*, waits: bool) -> ModuleType:
    """Return the compiled recorder. If there is none yet, build it: now if `waits`, else in the background for the next
    job."""
    try:
        return build.load()
    except build.NotBuiltError as error:
        if not waits:
            build.start()
            raise CrossrankError(
                f"{error}, and is being built for the next job (`crossrank build-recorder` builds it beforehand)"
            ) from None
    build.make()
    return build.load()


def _python_instead(session: Recorded, error: Exception) -> PythonRecorder:
    why = one_line(error) if not isinstance(error, CrossrankError) else str(error)
    log.warning(
        "crossrank: calls are recorded in Python, which is slower: %s; TRACING_RECORDER=python keeps it so and hides "
        "this line",
        why,
    )
    return _in_python(session, why)


def _in_python(session: Recorded, why: str = "") -> PythonRecorder:
    if session.facts.config.timing:
        log.warning("crossrank: durations of calls on a CPU backend are not recorded: they need the compiled recorder")
    return PythonRecorder(session, why)


def _install_kernels(session: Dispatched) -> _Kernels:
    readers = [Reader(name, getattr(torch.ops.c10d, name).default._schema) for name in _c10d_ops()]
    if isinstance(session.recorder, CompiledRecorder):
        try:
            functional = [f"{_FUNCTIONAL}::{name}" for name in _functional_ops()]
            remove = compiled_kernel.install(session.recorder, readers, functional)
            take_over = functools.partial(compiled_kernel.record_to, readers=readers)
            return _Kernels(readers=readers, kind=CompiledRecorder, record_to=take_over, remove=remove)
        except Exception as error:
            session.recorder = _python_instead(session, error)
    assert isinstance(session.recorder, PythonRecorder)
    record_to, remove = _register(session.recorder, readers)
    return _Kernels(readers=readers, kind=PythonRecorder, record_to=record_to, remove=remove)


def uninstall() -> None:
    """Restore the replaced methods. The kernels stay in the dispatcher, and record nothing until the next `install`.

    torch's dispatcher looks a kernel up in two steps and without a lock. If a kernel is removed between
    the two, the call of another thread raises `fallthrough_kernel was executed` or ends the process.
    """
    _patches.undo()


def _register(
    recorder: PythonRecorder, readers: Sequence[Reader]
) -> tuple[Callable[[PythonRecorder], None], Callable[[], None]]:
    """Install a kernel for every op. Return a function that changes their recorder, and one that removes them."""
    mask = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def make_kernel(reader: Reader) -> Callable[..., Any]:
        redispatch = getattr(torch.ops.c10d, reader.c10d).default._handle.redispatch_boxed

        def kernel(keyset: Any, *args: Any) -> Any:
            launch = None
            if recorder.active:
                try:
                    launch = recorder.before(reader, args)
                except Exception as error:
                    recorder.failed(error)
            if launch is None:
                return redispatch(keyset & mask, *args)
            try:
                before_wait = None if reader.gives_work else recorder.begin_wait(launch[0])
                result = redispatch(keyset & mask, *args)
            finally:
                if not reader.gives_work:
                    recorder.end_wait(before_wait)
                if launch[2] is not None:
                    recorder.after(launch[2])
            try:
                recorder.launched(launch, reader, result)
            except Exception as error:
                recorder.failed(error)
            return result

        return kernel

    def make_functional(name: str) -> Callable[..., Any]:
        redispatch = getattr(getattr(torch.ops, _FUNCTIONAL), name).default._handle.redispatch_boxed
        if name == _WAIT_TENSOR:
            return lambda keyset, tensor: recorder.wait_tensor(redispatch, keyset & mask, tensor)
        return lambda keyset, *args: recorder.functional(redispatch, keyset & mask, *args)

    def record_to(other: PythonRecorder) -> None:
        nonlocal recorder
        recorder = other

    libraries = [torch.library.Library(name, "IMPL", _KEY) for name in (_NAMESPACE, _FUNCTIONAL)]

    def remove() -> None:
        for library in libraries:
            library._destroy()

    try:
        for reader in readers:
            libraries[0].impl(reader.c10d, make_kernel(reader), with_keyset=True)
        for name in _functional_ops():
            libraries[1].impl(name, make_functional(name), with_keyset=True)
    except Exception:
        remove()
        raise
    return record_to, remove


def _c10d_ops() -> list[str]:
    """Return the names, without namespace, of all c10d ops that communicate: those with a process group."""
    return [
        name
        for name in _ops_in(_NAMESPACE)
        if any(argument.name == "process_group" for argument in getattr(torch.ops.c10d, name).default._schema.arguments)
    ]


def _functional_ops() -> list[str]:
    """Return the names of the functional collectives, `wait_tensor` last; none if waits cannot be recorded."""
    names = _ops_in(_FUNCTIONAL)
    if not has("waits") or _WAIT_TENSOR not in names:
        return []
    return [*(name for name in names if name != _WAIT_TENSOR), _WAIT_TENSOR]


def _ops_in(namespace: str) -> list[str]:
    """Return the names, without namespace, of the ops of a namespace that have no overloads."""
    prefix = namespace + "::"
    names = (name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix))
    return sorted(name for name in names if "." not in name)


def _follow_coalescing(recorder: Recorder) -> None:
    group_class = dist.ProcessGroup
    start, end = group_class._start_coalescing, group_class._end_coalescing

    def _start_coalescing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        result = start(group, *args, **kwargs)  # a backend that cannot coalesce raises here
        try:
            if recorder.active:
                recorder.start_coalescing()
        except Exception as error:
            recorder.failed(error)
        return result

    def _end_coalescing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        batch = token = None
        if recorder.active:
            try:
                batch = recorder.end_coalescing()
                if batch is not None:
                    token = recorder.open_batch(group, batch)
            except Exception as error:
                recorder.failed(error)
        try:
            work = end(group, *args, **kwargs)
        finally:
            if token is not None:
                recorder.after(token)
        try:
            if batch is not None and batch >= 0 and isinstance(work, dist.Work):
                recorder.note_work(work, batch)
        except Exception as error:
            recorder.failed(error)
        return work

    _patches.replace(group_class, "_start_coalescing", _start_coalescing)
    _patches.replace(group_class, "_end_coalescing", _end_coalescing)


def _follow_waits(recorder: Recorder) -> None:
    around: dict[type, Callable[[Callable[..., Any]], object]] = {
        dist.Work: recorder.recording_wait,
        torch._C.Future: recorder.noting_wait,
    }
    for owner, make in around.items():
        plain = vars(owner)["wait"]
        if _plain_waits.setdefault(owner, plain) is not plain:  # a new wrapper and ours would call each other
            log.warning("crossrank: waits are not recorded: %r has replaced %s.wait", plain, owner.__qualname__)
            return
        _patches.replace(owner, "wait", make(owner.wait))  # type: ignore[attr-defined]
    recorder.follows_waits = True
