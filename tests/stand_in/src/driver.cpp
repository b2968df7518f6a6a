// The driver: what PyTorch asks of it beside the runtime.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "device.h"

using namespace stand_in;

namespace {
char context;  // there is one
CUcontext the_context() { return reinterpret_cast<CUcontext>(&context); }
}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device) == cudaSuccess
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  cudaDeviceProp found;
  if (cudaGetDeviceProperties(&found, device) != cudaSuccess) return CUDA_ERROR_INVALID_DEVICE;
  std::memcpy(uuid, &found.uuid, sizeof *uuid);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice) {
  *found = the_context();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = the_context();
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* found) {
  *found = the_context();
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : error == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported" : "unknown error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const auto found = find_allocation(reinterpret_cast<void*>(pointer));
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
    *static_cast<unsigned*>(data) = found->device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  } else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    *static_cast<int*>(data) = std::max(0, found->device);
  } else {
    log_missing("cuPointerGetAttribute of another attribute");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  const auto found = find_allocation(reinterpret_cast<void*>(pointer));
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = found->begin;
  if (size) *size = found->size;
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  auto wanted = static_cast<cudaStreamCaptureMode>(*mode);
  cudaThreadExchangeStreamCaptureMode(&wanted);
  *mode = static_cast<CUstreamCaptureMode>(wanted);
  return CUDA_SUCCESS;
}

}  // extern "C"
