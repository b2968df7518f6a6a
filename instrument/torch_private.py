"""Every private name of torch that the recorder stands on, and what is lost in a torch that lacks one.

Such names come and go between versions. So nothing of the recorder imports one: a part asks `has(part)` before it uses
its names, and where one is missing that part alone is left out, with one line. `interception` is the exception: without
it nothing can be recorded, which `enable()` says.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from crossrank.errors import CrossrankError

log = logging.getLogger("crossrank")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the recorder: the names it needs, each as a path from a module, and what is lost without them."""

    lost: str
    names: tuple[str, ...]


def _in(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names)


_C10D = "torch.distributed.distributed_c10d"
_PROFILER = "torch._C._profiler"

PARTS: dict[str, Part] = {
    "interception": Part(
        lost="nothing can be recorded",
        names=(
            *_in("torch._C", "_dispatch_keyset_full_after", "_dispatch_get_all_op_names", "DispatchKey.BackendSelect"),
            *_in("torch.library", "Library._destroy"),
            *_in("torch.distributed", "ProcessGroup.unbox"),
        ),
    ),
    "coalescing": Part(
        lost="the calls of one launch have no batch in common",
        names=_in("torch.distributed", "ProcessGroup._start_coalescing", "ProcessGroup._end_coalescing"),
    ),
    "tensor subclasses": Part(
        lost="traced and fake tensors are taken for real ones",
        names=(
            "torch._subclasses.fake_tensor:FakeTensor",
            "torch._subclasses.functional_tensor:FunctionalTensor",
            "torch:_is_functional_tensor",
        ),
    ),
    "process groups": Part(
        lost="groups that do not communicate are missing",
        names=_in(
            _C10D, "_world", "_World.pg_map", "_World.pg_group_ranks", "_World.pg_names", "_World.pg_config_info"
        ),
    ),
    "store": Part(lost="localities are unknown", names=_in(_C10D, "_get_default_store")),
    "ranges": Part(
        lost="windows have no ranges around the calls",
        names=_in("torch.autograd", "_record_function_with_args_enter", "_record_function_with_args_exit"),
    ),
    "execution trace": Part(
        lost="windows have no execution trace",
        names=tuple(f"{_PROFILER}:_{verb}_execution_trace_observer" for verb in ("add", "enable", "disable", "remove")),
    ),
    "Kineto": Part(
        lost="windows have no Kineto trace",
        names=(
            *_in(_PROFILER, "_ExperimentalConfig"),
            *_in("torch.autograd", "_profiler_enabled", "_enable_profiler", "_disable_profiler", "_add_metadata_json"),
            *_in("torch.autograd.profiler", "_is_profiler_enabled", "_prepare_profiler", "_run_on_profiler_stop"),
            *_in("torch.autograd.profiler", "profile._prepare_trace", "profile._start_trace"),
        ),
    ),
    "Kineto's groups": Part(
        lost="Kineto traces do not name the process groups", names=_in(_C10D, "_get_all_pg_configs")
    ),
    "timeouts": Part(
        lost="hangs are watched for without regard to the groups' timeouts",
        names=_in("torch.distributed", "ProcessGroup._get_backend", "ProcessGroup._device_types"),
    ),
    "backward passes": Part(
        lost="every optimizer step counts as one after a backward pass",
        names=_in("torch.autograd", "Variable._execution_engine.run_backward"),
    ),
    "flight recorder": Part(
        lost="dumps hold what crossrank knows itself, and nothing of torch's flight recorder",
        names=_in("torch._C._distributed_c10d", "_dump_fr_trace", "_dump_fr_trace_json"),
    ),
}


def require(part: str) -> None:
    """Raise `CrossrankError` if this torch lacks something that a part needs."""
    if names := _missing(part):
        raise CrossrankError(
            f"torch {torch.__version__} has no {', '.join(names)}, which recording needs; "
            "crossrank is tested with torch 2.13"
        )


@functools.cache
def has(part: str) -> bool:
    """Whether this torch has all that a part needs. If not, one line says what is lost."""
    names = _missing(part)
    if names:
        log.warning("crossrank: torch %s has no %s: %s", torch.__version__, ", ".join(names), PARTS[part].lost)
    return not names


def _missing(part: str) -> list[str]:
    """The names of a part that this torch lacks."""
    return [name.replace(":", ".") for name in PARTS[part].names if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError):
        return False
    return True
