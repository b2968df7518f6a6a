"""The only module that touches torch's dispatcher.

Every collective and P2P call, whoever makes it (a user, DDP's C++ reducer, FSDP, DTensor, compiled code), passes
the dispatcher as a `c10d::*` op. A kernel at its `BackendSelect` key on each of these ops, found when tracing is
enabled, records the call and passes it on to the kernel that would have run without it. No name in
`torch.distributed` is replaced, so references taken earlier, `is` checks and signatures stay as they are.

The inner edge is `Recorder.before(reader, args)` and `after(token)`; a compiled kernel could take the place of
the Python one here without a change elsewhere.

What does not pass the dispatcher is not seen: methods called on a Backend object, subclasses of ProcessGroup
written in Python, torchcomms, symmetric memory, and replays of a CUDA graph.

`install` and `uninstall` are exact opposites: after `uninstall` no kernel is left and calls cost what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.record.op_schema import Reader
from crossrank.instrument.record.recorder import Recorder
from crossrank.instrument.script_errors import raised_by_script
from crossrank.instrument.torch_private import has, require

_NAMESPACE = "c10d"
_KEY = "BackendSelect"


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Kernels in the dispatcher of this process."""

    library: torch.library.Library
    ops: tuple[str, ...]
    record_to: Callable[[Recorder], None]
    """Makes the kernels those of another recorder."""


# A forked child inherits the parent's kernels, which cannot be taken away there and must not be registered twice.
_inherited: _Kernels | None = None


class Interception:
    """The kernels of this process. One at a time may be installed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kernels: _Kernels | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def ops(self) -> list[str]:
        """Names of the ops that are recorded."""
        return list(self._kernels.ops) if self._kernels is not None else []

    def install(self) -> None:
        """Put the kernels in place. Raises `CrossrankError`, with nothing installed, if torch lacks a part."""
        require("interception")
        try:
            self._kernels = _take_over(self._recorder) or _register(self._recorder)
            self._patch_coalescing()
        except Exception as error:
            self.uninstall()
            raise CrossrankError(
                f"torch {torch.__version__} does not let its c10d ops be recorded ({one_line(error)}); "
                "crossrank is tested with torch 2.13"
            ) from error

    def uninstall(self) -> None:
        """Take everything away again."""
        self._unpatch()
        kernels, self._kernels = self._kernels, None
        if kernels is not None:
            kernels.library._destroy()

    def abandon(self) -> None:
        """In a forked child: leave the kernels to the next `install`.

        Taking them away needs the dispatcher's lock, which a thread that does not exist in this process may hold.
        """
        global _inherited
        self._unpatch()
        if self._kernels is not None:
            _inherited, self._kernels = self._kernels, None

    def _unpatch(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _patch_coalescing(self) -> None:
        """Learn where a coalesced launch begins and ends: these two methods are no dispatcher ops.

        The originals must come from the class's own dictionary. What `getattr` returns is bound differently,
        and putting that back would break every later call.
        """
        recorder = self._recorder
        group_class = dist.ProcessGroup
        if not has("coalescing"):
            return
        start, end = group_class.__dict__["_start_coalescing"], group_class.__dict__["_end_coalescing"]
        call_start, call_end = group_class._start_coalescing, group_class._end_coalescing

        def _start_coalescing(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            result = call_start(group, *args, **kwargs)  # a backend that cannot coalesce raises here
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
                return call_end(group, *args, **kwargs)
            finally:
                if token is not None:
                    recorder.after(token)

        for name, replacement, original in (
            ("_start_coalescing", _start_coalescing, start),
            ("_end_coalescing", _end_coalescing, end),
        ):
            setattr(group_class, name, replacement)
            self._undo.append(lambda name=name, original=original: setattr(group_class, name, original))  # type: ignore[misc]


def _take_over(recorder: Recorder) -> _Kernels | None:
    """The kernels that this process has from its parent, now those of `recorder`."""
    global _inherited
    kernels, _inherited = _inherited, None
    if kernels is not None:
        kernels.record_to(recorder)
    return kernels


def _register(recorder: Recorder) -> _Kernels:
    library = torch.library.Library(_NAMESPACE, "IMPL", _KEY)
    make_kernel, record_to = _kernels_of(recorder)
    ops = tuple(_c10d_ops())
    try:
        for name in ops:
            overload = getattr(torch.ops.c10d, name).default
            library.impl(name, make_kernel(overload, Reader(name, overload._schema)), with_keyset=True)
    except Exception:
        library._destroy()
        raise
    return _Kernels(library=library, ops=ops, record_to=record_to)


def _kernels_of(
    recorder: Recorder,
) -> tuple[Callable[[Any, Reader], Callable[..., Any]], Callable[[Recorder], None]]:
    """What makes the kernel of an op, and what makes all of them record to another recorder.

    The kernels share variables instead of an object, because reading these costs least.
    """
    mask = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    before, after = recorder.before, recorder.after

    def make_kernel(overload: Any, reader: Reader) -> Callable[..., Any]:
        redispatch = overload._handle.redispatch_boxed

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

    def record_to(other: Recorder) -> None:
        nonlocal recorder, before, after
        recorder, before, after = other, other.before, other.after

    return make_kernel, record_to


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
