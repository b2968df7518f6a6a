"""Kernels at torch's dispatcher, which this module and `compiled_kernel` alone touch.

Every collective and P2P call, whoever makes it (a user, DDP's C++ reducer, FSDP, DTensor, compiled code), passes
the dispatcher as a `c10d::*` op. A kernel at its `BackendSelect` key on each of these ops, found when tracing is
enabled, records the call and passes it on to the kernel that would have run without it. No name in
`torch.distributed` is replaced, so references taken earlier, `is` checks and signatures stay as they are.

There are two kernels: a compiled one (`crossrank.instrument.compiled`), and one in Python for where that cannot be had,
whose inner edge is `PythonRecorder.before(reader, args)` and `after(token)`.

Where a coalesced launch begins and ends the dispatcher does not say: two methods of ProcessGroup are replaced for that.

What does not pass the dispatcher is not seen: methods called on a Backend object, subclasses of ProcessGroup
written in Python, torchcomms, symmetric memory, and replays of a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.compiled import build
from crossrank.instrument.compiled.recorder import CompiledRecorder
from crossrank.instrument.hooks import compiled_kernel
from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.log import log
from crossrank.instrument.record.op_schema import Reader
from crossrank.instrument.record.recorder import PythonRecorder, Recorder
from crossrank.instrument.script_errors import raised_by_script
from crossrank.instrument.torch_private import has, require

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

_NAMESPACE = "c10d"
_KEY = "BackendSelect"


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Kernels in the dispatcher of this process."""

    readers: list[Reader]
    kind: type[Recorder]
    record_to: Callable[[Any], None]
    """Makes the kernels those of another recorder of the kind."""
    remove: Callable[[], None]


_kernels: _Kernels | None = None
_patches = Patches()


def ops() -> list[str]:
    """Names of the ops that are recorded."""
    return [reader.c10d for reader in _kernels.readers] if _kernels is not None else []


def install(session: Session) -> None:
    """Put the kernels in place. Raises `CrossrankError`, with nothing installed, if torch lacks a part."""
    global _kernels
    require("interception")
    recorder = session.recorder
    if _kernels is not None and _kernels.kind is not type(recorder):
        uninstall()
    if _kernels is not None:
        _kernels.record_to(recorder)
    else:
        try:
            _kernels = _install_kernels(session)
        except Exception as error:
            raise CrossrankError(
                f"torch {torch.__version__} does not let its c10d ops be recorded ({one_line(error)}); "
                "crossrank is tested with torch 2.13"
            ) from error
    if has("coalescing"):
        _follow_coalescing(session.recorder)


def make_recorder(session: Session) -> Recorder:
    """The recorder of a session: with the compiled kernel, or in Python where that is asked for or all there is."""
    if session.config.kernel == "python":
        return PythonRecorder(session)
    try:
        return CompiledRecorder(session, build.load())
    except Exception as error:
        return _python_instead(session, error)


def _python_instead(session: Session, error: Exception) -> PythonRecorder:
    why = one_line(error) if not isinstance(error, CrossrankError) else str(error)
    log.warning("crossrank: calls are recorded in Python, at more cost: %s; TRACING_KERNEL=python mutes this", why)
    return PythonRecorder(session, why)


def _install_kernels(session: Session) -> _Kernels:
    readers = [Reader(name, getattr(torch.ops.c10d, name).default._schema) for name in _c10d_ops()]
    if isinstance(session.recorder, CompiledRecorder):
        try:
            remove = compiled_kernel.install(session.recorder, readers)
            take_over = functools.partial(compiled_kernel.record_to, readers=readers)
            return _Kernels(readers=readers, kind=CompiledRecorder, record_to=take_over, remove=remove)
        except Exception as error:
            session.recorder = _python_instead(session, error)
    assert isinstance(session.recorder, PythonRecorder)
    record_to, remove = _register(session.recorder, readers)
    return _Kernels(readers=readers, kind=PythonRecorder, record_to=record_to, remove=remove)


def uninstall() -> None:
    """Take them away again: no kernel is left and calls cost what they did."""
    global _kernels
    _patches.undo()
    kernels, _kernels = _kernels, None
    if kernels is not None:
        kernels.remove()


def leave_to_next_install() -> None:
    """In a forked child: the kernels stay, and record nothing until the next `install` takes them over.

    Taking them away needs the dispatcher's lock, which a thread that does not exist in this process may hold.
    """
    _patches.undo()


def _register(
    recorder: PythonRecorder, readers: Sequence[Reader]
) -> tuple[Callable[[PythonRecorder], None], Callable[[], None]]:
    """A kernel for every op. They share the variables of this function, because reading these costs least."""
    mask = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    before, after = recorder.before, recorder.after

    def make_kernel(reader: Reader) -> Callable[..., Any]:
        redispatch = getattr(torch.ops.c10d, reader.c10d).default._handle.redispatch_boxed

        def kernel(keyset: Any, *args: Any) -> Any:
            token = None
            if recorder.active:
                try:
                    token = before(reader, args)
                except Exception as error:
                    if raised_by_script(error):
                        raise
                    recorder.failed(error)
            if token is None:
                return redispatch(keyset & mask, *args)
            try:
                return redispatch(keyset & mask, *args)
            finally:
                after(token)

        return kernel

    def record_to(other: PythonRecorder) -> None:
        nonlocal recorder, before, after
        recorder, before, after = other, other.before, other.after

    library = torch.library.Library(_NAMESPACE, "IMPL", _KEY)
    try:
        for reader in readers:
            library.impl(reader.c10d, make_kernel(reader), with_keyset=True)
    except Exception:
        library._destroy()
        raise
    return record_to, library._destroy


def _c10d_ops() -> list[str]:
    """Names of all c10d ops of this torch that communicate, which are those with a group, without the namespace."""
    prefix = _NAMESPACE + "::"
    names = (name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix))
    return sorted(
        name
        for name in names
        if "." not in name
        and any(
            argument.name == "process_group" for argument in getattr(torch.ops.c10d, name).default._schema.arguments
        )
    )


def _follow_coalescing(recorder: Recorder) -> None:
    group_class = dist.ProcessGroup
    start, end = group_class._start_coalescing, group_class._end_coalescing

    def _start_coalescing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        result = start(group, *args, **kwargs)  # a backend that cannot coalesce raises here
        if recorder.active:
            recorder.start_coalescing()
        return result

    def _end_coalescing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        token = None
        if recorder.active:
            try:
                token = recorder.end_coalescing(group)
            except Exception as error:
                recorder.failed(error)
        try:
            return end(group, *args, **kwargs)
        finally:
            if token is not None:
                recorder.after(token)

    _patches.replace(group_class, "_start_coalescing", _start_coalescing)
    _patches.replace(group_class, "_end_coalescing", _end_coalescing)
