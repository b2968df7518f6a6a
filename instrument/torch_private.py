"""Every private name of torch that the recorder uses, and what is lost if torch does not have it.

Such names change between versions, so the recorder does not import them. A part of it calls `has(part)` before it uses
its names. If a name is missing, only that part is skipped, with one warning. `interception` is the exception: without
it nothing can be recorded, and `enable()` says so.
"""

from __future__ import annotations

import functools
import pkgutil

import torch

from crossrank.errors import CrossrankError
from crossrank.instrument.log import log


class Part:
    """A part of the recorder: what is lost without it, and the names it needs, each as `module:path`."""

    def __init__(self, lost: str, *needed: str) -> None:
        self.lost = lost
        by_module = (names.partition(": ") for names in needed)
        self.names = tuple(f"{module}:{name}" for module, _, names in by_module for name in names.split())


PARTS = {
    "interception": Part(
        "nothing can be recorded",
        "torch._C: _dispatch_keyset_full_after _dispatch_get_all_op_names DispatchKey.BackendSelect",
        "torch.library: Library._destroy",
        "torch.distributed: ProcessGroup.unbox",
    ),
    "coalescing": Part(
        "the calls of one launch share no batch id",
        "torch.distributed: ProcessGroup._start_coalescing ProcessGroup._end_coalescing",
    ),
    "waits": Part("when calls are waited for is not recorded", "torch.distributed: Work.unbox"),
    "tensor subclasses": Part(
        "calls on traced and fake tensors are recorded as real ones",
        "torch._subclasses.fake_tensor: FakeTensor",
        "torch._subclasses.functional_tensor: FunctionalTensor",
        "torch: _is_functional_tensor",
    ),
    "process groups": Part(
        "groups that have not communicated are missing",
        "torch.distributed.distributed_c10d: _world _World.pg_map _World.pg_group_ranks _World.pg_names",
        "torch.distributed.distributed_c10d: _World.pg_config_info",
    ),
    "default group": Part(
        "groups that are made again count as the earlier ones",
        "torch.distributed.distributed_c10d: _update_default_pg",
    ),
    "store": Part("localities are unknown", "torch.distributed.distributed_c10d: _get_default_store"),
    "ranges": Part(
        "windows have no ranges around the calls",
        "torch.autograd: _record_function_with_args_enter _record_function_with_args_exit",
    ),
    "execution trace": Part(
        "windows have no execution trace",
        "torch._C._profiler: _add_execution_trace_observer _enable_execution_trace_observer",
        "torch._C._profiler: _disable_execution_trace_observer _remove_execution_trace_observer",
    ),
    "Kineto": Part(
        "windows have no Kineto trace",
        "torch._C._profiler: _ExperimentalConfig",
        "torch.autograd: _profiler_enabled _enable_profiler _disable_profiler _add_metadata_json",
        "torch.autograd.profiler: _is_profiler_enabled _prepare_profiler _run_on_profiler_stop",
        "torch.autograd.profiler: profile._prepare_trace profile._start_trace",
    ),
    "Kineto's groups": Part(
        "Kineto traces do not name the process groups", "torch.distributed.distributed_c10d: _get_all_pg_configs"
    ),
    "backends": Part(
        "the hang watch knows neither the groups' timeouts nor whether their communicators have failed",
        "torch.distributed: ProcessGroup._get_backend ProcessGroup._device_types",
    ),
    "timing": Part(
        "TRACING_TIMING does not make NCCL measure; set TORCH_NCCL_ENABLE_TIMING=1",
        "torch.distributed: ProcessGroup._enable_collectives_timing",
    ),
    "backward passes": Part(
        "every optimizer step counts as following a backward pass",
        "torch.autograd: Variable._execution_engine.run_backward",
    ),
    "waits of backward passes": Part(
        "with the Python recorder the waits of DDP's reducer are not seen",
        "torch._C: _current_graph_task_id",
    ),
    "flight recorder": Part(
        "dumps hold only what crossrank recorded, without torch's flight recorder",
        "torch._C._distributed_c10d: _dump_fr_trace _dump_fr_trace_json",
    ),
}


def require(part: str) -> None:
    """Raise `CrossrankError` if this torch lacks a name that a part needs."""
    if names := _missing(part):
        raise CrossrankError(
            f"torch {torch.__version__} has no {', '.join(names)}, which recording needs; "
            "crossrank is tested with torch 2.8 to 2.15"
        )


@functools.cache
def has(part: str) -> bool:
    """Return whether this torch has all names that a part needs. If not, log what is lost."""
    names = _missing(part)
    if names:
        log.warning("crossrank: torch %s has no %s: %s", torch.__version__, ", ".join(names), PARTS[part].lost)
    return not names


def _missing(part: str) -> list[str]:
    """Return the names of a part that this torch lacks."""
    return [name.replace(":", ".") for name in PARTS[part].names if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
