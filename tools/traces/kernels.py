"""Which GPU kernels communicate, by their names. One row per library; the first that matches is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from crossrank.comm import operation_of


@dataclass(frozen=True)
class KernelFamily:
    """Kernels of one library. A group `op` in the pattern names the operation, where the name has it."""

    library: str
    pattern: re.Pattern[str]
    op: str | None = None
    """The operation of all kernels of this family."""


FAMILIES = (
    # ncclKernel_AllReduce_RING_LL_Sum_float, ncclDevKernel_AllGather_RING_LL, ncclSymkDevKernel_AllReduce_RSxLD_AGxST;
    # RCCL compiles its own into ncclDevKernel_Generic and, before, ncclKernel_Generic.
    KernelFamily("nccl", re.compile(r"\bnccl(?:Dev|SymkDev|SymDev|Symk|Sym)?Kernel_(?P<op>[A-Za-z]+)")),
    KernelFamily("rccl", re.compile(r"\b(?:rcclGenericKernel|mscclKernel|mscclRunInterpreterKernel)")),
    # PyTorch's symmetric memory (torch.ops.symm_mem) and its older intra-node communication
    KernelFamily(
        "symmetric memory",
        re.compile(
            r"\b(?:multimem|one_shot|two_shot)_(?:one_shot_|two_shot_)?"
            r"(?P<op>all_reduce|all_gather|reduce_scatter)\w*"
        ),
    ),
    KernelFamily("symmetric memory", re.compile(r"\b(?:one|two)Shot(?P<op>AllReduce)Kernel")),
    # vLLM's and SGLang's custom all-reduce, TensorRT-LLM's and FlashInfer's fused ones
    KernelFamily("custom all-reduce", re.compile(r"\bcross_device_reduce_[12]stage"), "all_reduce"),
    KernelFamily(
        "custom all-reduce",
        re.compile(r"\b(?:allreduce_fusion_kernel|(?:one|two)ShotAllReduceKernel|lamportStyle\w*AllReduce)\w*"),
        "all_reduce",
    ),
    KernelFamily("deep_ep", re.compile(r"\bdeep_ep::\w+::(?:dispatch|combine)"), "all_to_all"),
)


@lru_cache(maxsize=65536)
def communication_kernel(name: str) -> tuple[str, str | None] | None:
    """(library, operation) of a kernel that communicates; the operation is None where its name does not say.

    >>> communication_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)")
    ('nccl', 'all_reduce')
    >>> communication_kernel("ncclDevKernel_SendRecv(ncclDevComm*)")
    ('nccl', None)
    >>> communication_kernel("volta_sgemm_64x64_tn")
    """
    for family in FAMILIES:
        match = family.pattern.search(name)
        if match:
            operation = operation_of(match["op"]) if "op" in family.pattern.groupindex else None
            return family.library, family.op or (operation.name if operation else None)
    return None
