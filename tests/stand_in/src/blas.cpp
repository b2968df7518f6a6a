// cuBLAS without arithmetic: a matrix product is a kernel that takes its time. Arguments behind the handle are not
// read, and C's calling convention lets them be.
#include <cuda_runtime_api.h>
#include <cupti.h>

#include "device.h"

namespace stand_in {
void launch_kernel(const std::string& name, const dim3& grid, const dim3& block, std::size_t shared_bytes,
                   Stream* stream, std::uint32_t correlation, void** arguments);
}
using namespace stand_in;

namespace {

struct Handle {
  void* stream = nullptr;
  int math_mode = 0, pointer_mode = 0;
};

int product(Handle* handle, const char* name) {
  Call call(CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000);
  launch_kernel(name, dim3(16, 8, 1), dim3(128, 1, 1), 0, stream_of(handle->stream), call.correlation(), nullptr);
  return 0;
}

}  // namespace

#define PRODUCT(function, kernel) \
  int function(Handle* handle) { return product(handle, kernel); }

extern "C" {

int cublasCreate_v2(Handle** made) {
  *made = new Handle;
  return 0;
}
int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}
int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}
int cublasSetWorkspace_v2(Handle*, void*, std::size_t) { return 0; }
int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}
int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return 0;
}
int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}
int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return 0;
}
int cublasSetSmCountTarget(Handle*, int) { return 0; }

PRODUCT(cublasSgemm_v2, "sm90_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_kernel")
PRODUCT(cublasSgemmStridedBatched, "sm90_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x32_batched_kernel")
PRODUCT(cublasSgemmEx, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_kernel")
PRODUCT(cublasGemmEx, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_kernel")
PRODUCT(cublasGemmStridedBatchedEx, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize64x64x64_batched_kernel")
PRODUCT(cublasDgemm_v2, "sm90_xmma_gemm_f64f64_f64f64_f64_tn_n_tilesize64x64x16_kernel")
PRODUCT(cublasSgemv_v2, "gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>")
PRODUCT(cublasSdot_v2, "dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>")
PRODUCT(cublasDotEx, "dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>")

// cuBLASLt. Its descriptors are not read either.

std::size_t cublasLtGetVersion() { return 130000; }
#define MAKES(function) \
  int function(void** made) { \
    *made = new std::uint64_t[64](); \
    return 0; \
  }
#define DOES_NOTHING(function) \
  int function() { return 0; }
MAKES(cublasLtCreate)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatrixLayoutCreate)
MAKES(cublasLtMatmulPreferenceCreate)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
int cublasLtDestroy(std::uint64_t* made) {
  delete[] made;
  return 0;
}
int cublasLtMatmulDescDestroy(std::uint64_t* made) { return cublasLtDestroy(made); }
int cublasLtMatrixLayoutDestroy(std::uint64_t* made) { return cublasLtDestroy(made); }
int cublasLtMatmulPreferenceDestroy(std::uint64_t* made) { return cublasLtDestroy(made); }

struct HeuristicResult {
  std::uint64_t algorithm[8];
  std::size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int asked, HeuristicResult* results,
                                   int* found) {
  *found = asked > 0;
  if (*found) results[0] = {};
  return 0;
}
int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                   std::size_t, void* stream) {
  Handle handle;
  handle.stream = stream;
  return product(&handle, "nvjet_sm90_hsh_128x128_64x4_1x2_h_bz_coopA_TNT");
}

}  // extern "C"
