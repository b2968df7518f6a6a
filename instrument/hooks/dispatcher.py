"""Kernels at torch's dispatcher, which this module and `compiled_kernel` alone touch.

Every collective and P2P call, whoever makes it (a user, DDP's C++ reducer, FSDP, DTensor, compiled code), passes
the dispatcher as a `c10d::*` op. A kernel at its `BackendSelect` key on each of these ops, found when tracing is
enabled, records the call and passes it on to the kernel that would have run without it. No name in
`torch.distributed` is replaced, so references taken earlier, `is` checks and signatures stay as they are.

There are two kernels: a compiled one (`crossrank.instrument.compiled`), and one in Python for where that cannot be had,
whose inner edge is `PythonRecorder.before(reader, args)`, `after(token)` and `launched(launch, reader, result)`.

Where a coalesced launch begins and ends, and when a Work or a Future is waited for, the dispatcher does not say: two
methods of ProcessGroup and one each of Work and Future are replaced for that. Functional collectives are waited for in
an op, `wait_tensor`.

What does not pass the dispatcher is not seen: methods called on a Backend object, subclasses of ProcessGroup
written in Python, torchcomms, symmetric memory, and replays of a CUDA graph; and the waits of C++, such as those of
DDP's reducer.
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
    """A session whose recorder the kernels call: one in Python where the compiled kernel cannot be installed."""

    recorder: Recorder


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Kernels in the dispatcher of this process."""

    readers: list[Reader]
    kind: type[Recorder]
    record_to: Callable[[Any], None]
    """Makes the kernels those of another recorder of the kind."""
    remove: Callable[[], None]
    """Takes them away: only where no other thread may call them, as in a test."""


_kernels: _Kernels | None = None
_patches = Patches()
_plain_waits: dict[type, object] = {}
"""`Work.wait` and `Future.wait` as they were before the first recording of this process."""


def ops() -> list[str]:
    """Names of the ops that are recorded."""
    return [reader.c10d for reader in _kernels.readers] if _kernels is not None else []


def install(session: Dispatched) -> None:
    """Put the kernels in place. Raises `CrossrankError`, with nothing installed, if torch lacks a part."""
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
    """The recorder of a session: with the compiled kernel, or in Python where that is asked for or all there is."""
    wanted: str = session.facts.config.kernel
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
        return CompiledRecorder(session, _loaded(waits=session.facts.config.kernel == "compiled"))
    except Exception as error:
        return _python_instead(session, error)


def _loaded(*, waits: bool) -> ModuleType:
    """The compiled kernel; where there is none yet, it is built: at once where somebody `waits` for it, else for the
    next job."""
    try:
        return build.load()
    except build.NotBuiltError as error:
        if not waits:
            build.start()
            raise CrossrankError(
                f"{error}, and is being built for the next job (`crossrank build-kernel` builds it beforehand)"
            ) from None
    build.make()
    return build.load()


def _python_instead(session: Recorded, error: Exception) -> PythonRecorder:
    why = one_line(error) if not isinstance(error, CrossrankError) else str(error)
    log.warning(
        "crossrank: the Python kernel records calls, at a higher cost: %s; TRACING_KERNEL=python mutes this", why
    )
    return _in_python(session, why)


def _in_python(session: Recorded, why: str = "") -> PythonRecorder:
    if session.facts.config.timing:
        log.warning("crossrank: durations of calls on a CPU backend are not recorded: they need the compiled kernel")
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

    torch's dispatcher looks a kernel up in two steps and without a lock. A call of another thread that is between them
    when a kernel is removed raises `fallthrough_kernel was executed`, or ends the process.
    """
    _patches.undo()


def _register(
    recorder: PythonRecorder, readers: Sequence[Reader]
) -> tuple[Callable[[PythonRecorder], None], Callable[[], None]]:
    """A kernel for every op; all record to the recorder that `record_to` named last."""
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
    """Names of all c10d ops of this torch that communicate, which are those with a group, without the namespace."""
    return [
        name
        for name in _ops_in(_NAMESPACE)
        if any(argument.name == "process_group" for argument in getattr(torch.ops.c10d, name).default._schema.arguments)
    ]


def _functional_ops() -> list[str]:
    """Names of the functional collectives, that which waits for a tensor last; none where that cannot be followed."""
    names = _ops_in(_FUNCTIONAL)
    if not has("waits") or _WAIT_TENSOR not in names:
        return []
    return [*(name for name in names if name != _WAIT_TENSOR), _WAIT_TENSOR]


def _ops_in(namespace: str) -> list[str]:
    """Names of the ops of a namespace that have no overloads, without the namespace."""
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
        if _plain_waits.setdefault(owner, plain) is not plain:  # put around ours since: it would call it, and ours it
            log.warning("crossrank: waits are not recorded: %r has replaced %s.wait", plain, owner.__qualname__)
            return
        _patches.replace(owner, "wait", make(owner.wait))  # type: ignore[attr-defined]
    recorder.follows_waits = True
