"""Recognizes communication kernels of GPUs by their names. One row per library; the first match counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from crossrank.comm import operation_of
from crossrank.text import plural, printable


@dataclass(frozen=True)
class KernelFamily:
    """Kernels of one library. A group `op` in the pattern is the operation, if the kernel's name has it."""

    library: str
    pattern: re.Pattern[str]
    op: str | None = None
    """The operation of all kernels of this family."""


FAMILIES = (
    # ncclKernel_AllReduce_RING_LL_Sum_float, ncclDevKernel_AllGather_RING_LL, ncclSymkDevKernel_AllReduce_RSxLD_AGxST;
    # RCCL compiles its own into ncclDevKernel_Generic and, before, ncclKernel_Generic.
    KernelFamily("nccl", re.compile(r"\bnccl(?:Dev|SymkDev|SymDev|Symk|Sym)?Kernel_(?P<op>[A-Za-z]+)")),
    # NCCL up to 2.7: ncclAllReduceRingLLKernel_sum_f32
    KernelFamily("nccl", re.compile(r"\bnccl(?P<op>[A-Z][A-Za-z]+?)(?:Ring|Tree|CollNet)\w*Kernel_")),
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
    # aiter's, FlashInfer's and others: all_reduce_2shot_kernel, allreduce_one_shot_push_kernel_bf16
    KernelFamily(
        "custom all-reduce",
        re.compile(r"\b(?:quick_)?all_?reduce_(?:\w*_)?(?:[12]_?shot|one_?shot|two_?shot|twoshot|[12]stage)\w*"),
        "all_reduce",
    ),
    KernelFamily("aiter", re.compile(r"\baiter::\w*(?P<op>all_?reduce|all_?gather|reduce_?scatter)\w*", re.IGNORECASE)),
    # Transformer Engine's user buffers: sums in place are all_reduces, unless the name ends with one half of it
    KernelFamily("userbuffers", re.compile(r"\bk?userbuffers_\w*_(?:rs|reducescatter)\b"), "reduce_scatter"),
    KernelFamily("userbuffers", re.compile(r"\bk?userbuffers_\w*_(?:ag|allgather)\b"), "all_gather"),
    KernelFamily("userbuffers", re.compile(r"\bk?userbuffers_\w*sum_inplace\w*"), "all_reduce"),
    KernelFamily("userbuffers", re.compile(r"\bk?userbuffers_\w+")),
    # DeepEP, and DeepSeek's own build of it: kernels that move tokens, and those that exchange their numbers
    KernelFamily("deep_ep", re.compile(r"\b(?:deep_ep|dpsk::ep)::\w+::(?:dispatch|combine)\b"), "all_to_all"),
    KernelFamily("deep_ep", re.compile(r"\b(?:deep_ep|dpsk::ep)::\w+::\w+")),
    # NVSHMEM's collectives on a stream (src/host/stream/coll), with the names of OpenSHMEM
    KernelFamily(
        "nvshmem",
        re.compile(
            r"\b(?:nvshmem\w*|(?:(?P<op>barrier|alltoall|broadcast|reduce)|sync|fcollect)(?:_all)?_on_stream_kernel)"
        ),
    ),
    # Huawei's HCCL, as torch_npu names its work: hcom_allReduce__428_0_1
    KernelFamily("hccl", re.compile(r"\bhcom_(?P<op>[A-Za-z]+)_")),
    KernelFamily("hccl", re.compile(r"\bhccl(?P<op>[A-Z][A-Za-z]+?)_?[Kk]ernel")),
    # MSCCL++: its kernels have any name, and channels of this namespace as arguments
    KernelFamily("mscclpp", re.compile(r"\bmscclpp::")),
)
COMPUTATION = re.compile(
    r"gemm|gemv|bmm_|multi_tensor_apply|matmul|cutlass|cublas|cudnn|conv|winograd|flash|fmha|attn|attention|softmax|norm|triton_|\bat::"
    r"|elementwise|vectorized|reduce_kernel|fbgemm|Cijk_|sm\d\d_|ampere|volta|hopper|aten::|Memset|Memcpy",
    re.IGNORECASE,
)
"""Kernels that compute: cuBLAS, cuDNN, CUTLASS, rocBLAS' Tensile, Triton as Inductor names it, ATen, FBGEMM."""
LOOKS_LIKE_COMMUNICATION = re.compile(
    r"\A(?!triton_).*(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|[nrhx]ccl|oneccl|shmem)",
    re.IGNORECASE,
)
"""Names of kernels that probably communicate, by libraries of no row."""
_EXPECTED = (LOOKS_LIKE_COMMUNICATION, COMPUTATION)
_LARGE_SHARE = 0.1
"""A kernel of an unknown library with a larger share of the device time is reported."""
_also: ContextVar[str] = ContextVar("also", default="")


@contextmanager
def also_communicate(pattern: str) -> Iterator[None]:
    """Within the block, kernels with names that match the regular expression `pattern` also communicate; empty =
    none."""
    token = _also.set(pattern)
    try:
        yield
    finally:
        _also.reset(token)


def communication_kernel(name: str) -> tuple[str, str | None] | None:
    """(library, operation) of a kernel that communicates; the operation is None if the name does not have it.

    >>> communication_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)")
    ('nccl', 'all_reduce')
    >>> communication_kernel("ncclDevKernel_SendRecv(ncclDevComm*)")
    ('nccl', None)
    >>> communication_kernel("volta_sgemm_64x64_tn")
    """
    return _known(name, _also.get())


@lru_cache(maxsize=65536)
def _known(name: str, also: str) -> tuple[str, str | None] | None:
    for family in FAMILIES:
        match = family.pattern.search(name)
        if match:
            operation = operation_of(match.groupdict().get("op") or "")
            return family.library, family.op or (operation.name if operation else None)
    return ("selected by the user", None) if also and re.search(also, name) else None


@dataclass
class KernelsOfName:
    """Kernels of one name. It is no name of a known kernel that communicates."""

    name: str
    count: int = 0
    ns: int = 0
    in_communication: int = 0
    """Kernels that were launched within a range of communication, such as `c10d::allreduce_`."""

    def add(self, count: int, ns: int, in_communication: int = 0) -> None:
        self.count += count
        self.ns += ns
        self.in_communication += in_communication


def unknown_kernels(kernels: Sequence[KernelsOfName]) -> Iterator[str]:
    """Yield the notes on kernels that count as computation and may communicate: by their name, by the range around
    all their launches, or because they take long and are of no library that computes."""
    by_name = [one for one in kernels if LOOKS_LIKE_COMMUNICATION.search(one.name)]
    others = [one for one in kernels if not any(one_of.search(one.name) for one_of in _EXPECTED)]
    by_range = [one for one in others if one.count == one.in_communication]
    rest = [one for one in others if one.count > one.in_communication]
    for found, verbs, why in (
        (by_name, ("has", "have"), "a name of communication"),
        (by_range, ("was", "were"), "launched within a range of communication"),
    ):
        if count := sum(one.count for one in found):
            names = ", ".join(printable(one.name)[:80] for one in sorted(found, key=lambda one: -one.count)[:3])
            yield (
                f"{plural(count, 'kernel')} ({names}) {verbs[count > 1]} {why} and "
                f"{'counts' if count == 1 else 'count'} as computation, because no known library has "
                f"{'it' if count == 1 else 'them'}; --communication-kernels REGEX counts them as communication"
            )
    total = sum(one.ns for one in kernels)
    for one in sorted(rest, key=lambda one: -one.ns):
        if one.ns > _LARGE_SHARE * total:
            yield (
                f"the kernel {printable(one.name)[:80]} takes more than a tenth of the device time and counts as "
                "computation; if it communicates, give its name with --communication-kernels REGEX"
            )
