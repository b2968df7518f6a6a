"""Communication kernels by their names."""

from __future__ import annotations

import pytest

from crossrank.tools.traces.kernels import communication_kernel


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", ("nccl", "all_reduce")),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", ("nccl", None)),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ("nccl", "reduce_scatter")),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ("nccl", "broadcast")),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", ("nccl", None)),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs4K)", ("nccl", "all_reduce")),
        ("rcclGenericKernel_4(ncclDevKernelArgsStorage<4096ul>)", ("rccl", None)),
        ("void c10d::symmetric_memory::multimem_all_reduce_kernel<float>(int)", ("symmetric memory", "all_reduce")),
        ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16>(int)", ("symmetric memory", "all_reduce")),
        ("multimem_all_reduce_bias_rms_norm", ("symmetric memory", "all_reduce")),  # as Triton writes it
        ("void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)", ("custom all-reduce", "all_reduce")),
        ("void deep_ep::internode_ll::combine<false, 7168>(void*)", ("deep_ep", "all_to_all")),
        ("void dpsk::ep::internode::dispatch<false, 8>(int4*)", ("deep_ep", "all_to_all")),
        ("void dpsk::ep::internode::cached_notify<false>(int, int)", ("deep_ep", None)),
        ("void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)", ("nvshmem", "barrier")),
        ("nvshmemi_init_array_kernel", ("nvshmem", None)),
        ("hcom_allReduce__428_0_1", ("hccl", "all_reduce")),
        ("void allreduce7<__half>(mscclpp::MemoryChannelDeviceHandle*, __half*)", ("mscclpp", None)),
        ("volta_sgemm_64x64_tn", None),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)", None),
        ("void at::native::gather_kernel<float>(int)", None),
    ],
)
def test_a_kernel_is_known_by_its_library_and_operation(name: str, known: tuple[str, str | None] | None) -> None:
    assert communication_kernel(name) == known
