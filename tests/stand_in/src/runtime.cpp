// The CUDA runtime: what PyTorch calls of it. What is not here is made by build.py and returns "not supported".
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <thread>

#include "device.h"

using namespace stand_in;

#define RUNTIME(name)                            \
  if (is_lost()) return cudaErrorLaunchFailure; \
  Call call(CUPTI_RUNTIME_TRACE_CBID_##name)

namespace {

using EventHandle = std::shared_ptr<Event>;

EventHandle& event_of(cudaEvent_t handle) { return *reinterpret_cast<EventHandle*>(handle); }

std::shared_ptr<Graph>& graph_of(cudaGraph_t handle) { return *reinterpret_cast<std::shared_ptr<Graph>*>(handle); }

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last_error = error; }

struct Capture {
  std::shared_ptr<Graph> graph;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
};
std::mutex captures_lock;
std::vector<Capture> captures;  // that are under way
unsigned long long next_capture = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// A call that is unsafe while a graph is captured is refused, and the capture is broken: one of this thread that was not
// begun as relaxed, or a global one of any thread. What this thread has set narrows that
// (cudaThreadExchangeStreamCaptureMode in NVIDIA's manual of the runtime).
bool breaks_a_capture() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return false;
  bool breaks = false;
  std::lock_guard guard(captures_lock);
  for (const Capture& one : captures) {
    const bool is_own = one.thread == std::this_thread::get_id() && one.mode != cudaStreamCaptureModeRelaxed;
    const bool is_global = one.mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (is_own || is_global) breaks = one.graph->is_broken = true;
  }
  return breaks;
}

bool is_broken(const std::shared_ptr<Graph>& capture) { return capture && capture->is_broken; }

cudaStreamCaptureStatus status_of(const std::shared_ptr<Graph>& capture) {
  if (!capture) return cudaStreamCaptureStatusNone;
  return capture->is_broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

std::mutex kernels_lock;
std::map<const void*, std::string>& kernels() {  // host function -> name
  static auto* all = new std::map<const void*, std::string>;
  return *all;
}

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<LaunchConfiguration> configurations;

std::uint8_t memory_kind(const void* pointer) {
  const auto found = find_allocation(pointer);
  if (!found) return CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
  return found->device < 0 ? CUPTI_ACTIVITY_MEMORY_KIND_PINNED : CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
}

cudaMemcpyKind copy_kind_of(const void* target, const void* source) {
  const bool from_device = memory_kind(source) == CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  const bool to_device = memory_kind(target) == CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  if (from_device) return to_device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost;
  return to_device ? cudaMemcpyHostToDevice : cudaMemcpyHostToHost;
}

void copy(void* target, const void* source, size_t bytes, Stream* stream, std::uint32_t correlation, bool waits,
          size_t rows = 1, size_t target_pitch = 0, size_t source_pitch = 0) {
  const cudaMemcpyKind kind = copy_kind_of(target, source);
  Activity activity;
  activity.kind = Kind::copy;
  static const char* names[] = {"Memcpy HtoH", "Memcpy HtoD", "Memcpy DtoH", "Memcpy DtoD"};
  activity.name = names[kind];
  activity.bytes = bytes * rows;
  activity.correlation = correlation;
  activity.copy_kind = kind;
  activity.source_memory = memory_kind(source);
  activity.target_memory = memory_kind(target);
  std::shared_ptr<std::vector<char>> staged;
  if (activity.source_memory == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE && rows == 1 && !stream->capture) {
    // The call returns when pageable memory was read: the program may change it at once.
    const auto* first = static_cast<const char*>(source);
    staged = std::make_shared<std::vector<char>>(first, first + bytes);
  }
  stream->enqueue({activity, [=](Nanoseconds begin) {
                     for (size_t row = 0; row < rows; ++row) {
                       const char* from = staged ? staged->data() : static_cast<const char*>(source) + row * source_pitch;
                       std::memmove(static_cast<char*>(target) + row * target_pitch, from, bytes);
                     }
                     return begin + copy_time(bytes * rows, kind);
                   }});
  if (waits || activity.target_memory == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE) {
    if (!stream->capture) stream->wait_until_idle();
  }
}

void set(void* target, int value, size_t bytes, Stream* stream, std::uint32_t correlation) {
  Activity activity;
  activity.kind = Kind::set;
  activity.name = "Memset (Device)";
  activity.bytes = bytes;
  activity.correlation = correlation;
  activity.value = static_cast<std::uint32_t>(value);
  activity.target_memory = memory_kind(target);
  stream->enqueue({activity, [=](Nanoseconds begin) {
                     std::memset(target, value, bytes);
                     return begin + copy_time(bytes, cudaMemcpyDeviceToDevice);
                   }});
}

// PyTorch's kernel that fills a tensor, the only one that does what it should: so that a test can tell what was
// communicated. Its name is mangled; its arguments are the number of elements, the value, and where they are.
std::function<void()> fill_of(const std::string& name, void** arguments) {
  static const std::pair<const char*, size_t> types[] = {
      {"FillFunctorIfE", 4}, {"FillFunctorIdE", 8}, {"FillFunctorIlE", 8}, {"FillFunctorIiE", 4},
      {"FillFunctorIsE", 2}, {"FillFunctorIhE", 1}, {"FillFunctorIaE", 1}, {"FillFunctorIbE", 1},
      {"FillFunctorIN3c108BFloat16EE", 2}, {"FillFunctorIN3c104HalfEE", 2}};
  if (arguments && name.find("vectorized_elementwise_kernel") != std::string::npos) {
    for (const auto& [type, size] : types) {
      if (name.find(type) == std::string::npos) continue;
      const auto count = static_cast<size_t>(*static_cast<int*>(arguments[0]));
      const auto* value = static_cast<const char*>(arguments[1]);
      char* target = *static_cast<char**>(arguments[2]);
      return [count, target, pattern = std::string(value, size)] {
        for (size_t index = 0; index < count; ++index) std::memcpy(target + index * pattern.size(), pattern.data(), pattern.size());
      };
    }
  }
  return [] {};
}

}  // namespace

namespace stand_in {

void launch_kernel(const std::string& name, const dim3& grid, const dim3& block, size_t shared_bytes, Stream* stream,
                   std::uint32_t correlation, void** arguments) {
  Activity activity;
  activity.name = name;
  activity.correlation = correlation;
  activity.grid[0] = grid.x, activity.grid[1] = grid.y, activity.grid[2] = grid.z;
  activity.block[0] = block.x, activity.block[1] = block.y, activity.block[2] = block.z;
  activity.shared_bytes = static_cast<std::uint32_t>(shared_bytes);
  const Nanoseconds time = kernel_time(name);
  stream->enqueue({activity, [time, loses = loses_device(name), fill = fill_of(name, arguments)](Nanoseconds begin) {
                     if (loses) lose_device();
                     fill();
                     if (time >= 0) return begin + time;
                     while (true) sleep_until(now() + 1'000'000'000);  // one that never ends
                   }});
}

}  // namespace stand_in

extern "C" {

// --- what nvcc's code calls ------------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard guard(kernels_lock);
  kernels()[host] = name;
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return failed(cudaErrorInvalidConfiguration);
  const LaunchConfiguration& found = configurations.back();
  *grid = found.grid, *block = found.block, *shared_bytes = found.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = found.stream;
  configurations.pop_back();
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  RUNTIME(cudaLaunchKernel_v7000);
  std::string name = "unknown";
  {
    std::lock_guard guard(kernels_lock);
    if (const auto found = kernels().find(function); found != kernels().end()) name = found->second;
  }
  if (is_broken(stream_of(stream)->capture)) return failed(cudaErrorStreamCaptureInvalidated);
  launch_kernel(name, grid, block, shared_bytes, stream_of(stream), call.correlation(), arguments);
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                          config->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  found->maxDynamicSharedSizeBytes = 227 * 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* found, const void*, int block, size_t) {
  *found = block > 0 ? std::max(1, 2048 / block) : 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* found, const void* function, int block,
                                                                   size_t bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(found, function, block, bytes);
}
cudaError_t cudaGetSymbolAddress(void** found, const void* symbol) {
  static std::mutex lock;
  static std::map<const void*, void*> addresses;
  std::lock_guard guard(lock);
  void*& address = addresses[symbol];
  if (!address) address = allocate(65536, current_device());
  *found = address;
  return cudaSuccess;
}

// --- devices ---------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  *found = {};
  std::snprintf(found->name, sizeof found->name, "NVIDIA Stand-in H100");
  for (int index = 0; index < 16; ++index) found->uuid.bytes[index] = static_cast<char>(0xA0 + number_of(device) * 7 + index);
  found->totalGlobalMem = memory_of_device;
  found->sharedMemPerBlock = 48 * 1024;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->totalConstMem = 65536;
  found->major = 9, found->minor = 0;
  found->multiProcessorCount = 132;
  found->concurrentKernels = 1;
  found->pciBusID = 0x10 + number_of(device);
  found->asyncEngineCount = 3;
  found->unifiedAddressing = 1;
  found->memoryBusWidth = 5120;
  found->l2CacheSize = 50 << 20;
  found->maxThreadsPerMultiProcessor = 2048;
  found->sharedMemPerMultiprocessor = 228 * 1024;
  found->managedMemory = found->concurrentManagedAccess = 1;
  found->cooperativeLaunch = 1;
  found->sharedMemPerBlockOptin = 227 * 1024;
  found->maxBlocksPerMultiProcessor = 32;
  found->memoryPoolsSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp found;
  if (const cudaError_t error = cudaGetDeviceProperties(&found, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 * 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrPciBusId: *value = found.pciBusID; break;
    case cudaDevAttrPciDeviceId: case cudaDevAttrPciDomainId: *value = 0; break;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory:
    case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<size_t>(size), "00000000:%02X:00.0", 0x10 + number_of(device));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  RUNTIME(cudaDeviceSynchronize_v3020);
  if (breaks_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  const Nanoseconds begin = now();
  wait_for_device(current_device());
  trace_synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE, call.correlation(), 0, nullptr, begin, now());
  return is_lost() ? cudaErrorLaunchFailure : cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t found = is_lost() ? cudaErrorLaunchFailure : last_error;
  last_error = cudaSuccess;
  return found;
}
cudaError_t cudaPeekAtLastError() { return is_lost() ? cudaErrorLaunchFailure : last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    default: return "unknown error";
  }
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static void* own = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&cudaGetDriverEntryPointByVersion), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  *function = dlsym(own, (std::string(symbol) + "_v2").c_str());  // the newest version, as the driver does
  if (!*function) *function = dlsym(own, symbol);
  if (!*function) log_missing(symbol);
  if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// --- memory ----------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t size) {
  RUNTIME(cudaMalloc_v3020);
  if (breaks_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  *pointer = allocate(size, current_device());
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  RUNTIME(cudaFree_v3020);
  if (const auto found = find_allocation(pointer); found && found->device >= 0) wait_for_device(found->device);
  return release(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  stream_of(stream)->enqueue({std::nullopt, [pointer](Nanoseconds begin) {
                                release(pointer);
                                return begin;
                              }});
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  RUNTIME(cudaHostAlloc_v3020);
  *pointer = allocate(size, -1);
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* pointer) { return release(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue); }
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  note_host_memory(pointer, size);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  return forget_host_memory(pointer) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = memory_of_device;
  *free = memory_of_device - allocated_on(current_device());
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  *found = {};
  const auto allocation = find_allocation(pointer);
  found->type = !allocation ? cudaMemoryTypeUnregistered : allocation->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->device = allocation && allocation->device >= 0 ? allocation->device : -2;
  if (allocation && allocation->device < 0) found->device = 0;
  found->devicePointer = allocation ? const_cast<void*>(pointer) : nullptr;
  found->hostPointer = allocation && allocation->device >= 0 ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  RUNTIME(cudaMemcpy_v3020);
  copy(target, source, bytes, stream_of(nullptr), call.correlation(), true);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  RUNTIME(cudaMemcpyAsync_v3020);
  copy(target, source, bytes, stream_of(stream), call.correlation(), false);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t stream) {
  RUNTIME(cudaMemcpyPeerAsync_v4000);
  copy(target, source, bytes, stream_of(stream), call.correlation(), false);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  RUNTIME(cudaMemcpy2DAsync_v3020);
  copy(target, source, width, stream_of(stream), call.correlation(), false, height, target_pitch, source_pitch);
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  RUNTIME(cudaMemset_v3020);
  set(target, value, bytes, stream_of(nullptr), call.correlation());
  stream_of(nullptr)->wait_until_idle();
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  RUNTIME(cudaMemsetAsync_v3020);
  set(target, value, bytes, stream_of(stream), call.correlation());
  return cudaSuccess;
}

// --- streams ---------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(create_stream(current_device(), flags, priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  destroy_stream(stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream)->is_idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  RUNTIME(cudaStreamSynchronize_v3020);
  Stream* stream = stream_of(handle);
  if (stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
  const Nanoseconds begin = now();
  stream->wait_until_idle();
  trace_synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE, call.correlation(), stream->id, nullptr,
                        begin, now());
  return is_lost() ? cudaErrorLaunchFailure : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  RUNTIME(cudaStreamWaitEvent_v3020);
  Stream* stream = stream_of(handle);
  const Nanoseconds begin = now();
  wait_in_stream(event_of(event), *stream);
  trace_synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT, call.correlation(), stream->id,
                        event_of(event).get(), begin, now());
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  RUNTIME(cudaLaunchHostFunc_v10000);
  stream_of(stream)->enqueue({std::nullopt, [=](Nanoseconds begin) {
                                function(data);
                                return std::max(begin, now());
                              }});
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  stream_of(handle)->enqueue({std::nullopt, [=](Nanoseconds begin) {
                                function(handle, cudaSuccess, data);
                                return std::max(begin, now());
                              }});
  return cudaSuccess;
}

// --- events ----------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  static std::atomic<std::uint32_t> next{0};
  auto* found = new EventHandle(std::make_shared<Event>());
  (*found)->has_time = !(flags & cudaEventDisableTiming);
  (*found)->id = ++next;
  *event = reinterpret_cast<cudaEvent_t>(found);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RUNTIME(cudaEventRecord_v3020);
  record(event_of(event), *stream_of(stream));
  trace_event(*event_of(event), *stream_of(stream), call.correlation());
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (breaks_a_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (is_lost()) return cudaErrorLaunchFailure;
  if (is_complete(*event_of(event))) return cudaSuccess;
  // torch's watchdog asks without a pause while its group is destroyed: on few cores the ranks of a hang take all CPU.
  static const auto pause = static_cast<Nanoseconds>(number_from_environment("STAND_IN_QUERY_US", 0) * 1e3);
  if (pause > 0) sleep_until(now() + pause);
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RUNTIME(cudaEventSynchronize_v3020);
  const Nanoseconds begin = now();
  wait_on_host(*event_of(event));
  trace_synchronization(CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE, call.correlation(), 0,
                        event_of(event).get(), begin, now());
  return is_lost() ? cudaErrorLaunchFailure : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Event &first = *event_of(start), &second = *event_of(end);
  if (!first.has_time || !second.has_time || !first.recorded || !second.recorded) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (!is_complete(first) || !is_complete(second)) return failed(cudaErrorNotReady);
  *milliseconds = static_cast<float>(second.time - first.time) / 1e6f;
  return cudaSuccess;
}

// --- graphs ----------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Stream* stream = stream_of(handle);
  if (stream->capture) return failed(cudaErrorIllegalState);
  stream->capture = std::make_shared<Graph>();
  stream->capture->origin = stream;
  stream->capture->streams.push_back(stream);
  std::lock_guard guard(captures_lock);
  stream->capture->id = ++next_capture;
  captures.push_back({stream->capture, mode, std::this_thread::get_id()});
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Stream* stream = stream_of(handle);
  if (!stream->capture || stream->capture->origin != stream) return failed(cudaErrorIllegalState);
  const std::shared_ptr<Graph> found = stream->capture;
  for (Stream* one : found->streams) one->capture.reset();
  {
    std::lock_guard guard(captures_lock);
    captures.erase(std::find_if(captures.begin(), captures.end(), [&](const Capture& one) { return one.graph == found; }));
  }
  if (found->is_broken) return failed(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(found));
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = status_of(stream_of(stream)->capture);
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t* graph, const cudaGraphNode_t** dependencies, size_t* count) {
  const void** edges = nullptr;
#endif
  std::shared_ptr<Graph>& found = stream_of(handle)->capture;
  *status = status_of(found);
  if (id) *id = found ? found->id : 0;
  if (graph) *graph = found ? reinterpret_cast<cudaGraph_t>(&found) : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
  return cudaSuccess;
}
#endif
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Graph>(graph_of(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  RUNTIME(cudaGraphLaunch_v10000);
  Stream* stream = stream_of(handle);
  for (const auto& node : (*reinterpret_cast<std::shared_ptr<Graph>*>(executable))->nodes) {
    Operation operation = node->operation.launch_again ? node->operation.launch_again() : node->operation;
    if (operation.activity) operation.activity->correlation = call.correlation();
    stream->enqueue(std::move(operation));
  }
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  const auto& all = graph_of(graph)->nodes;
  for (size_t index = 0; nodes && index < *count && index < all.size(); ++index) {
    nodes[index] = reinterpret_cast<cudaGraphNode_t>(all[index].get());
  }
  *count = all.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &graph_of(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<std::shared_ptr<Graph>*>(executable);
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* handle, void* object, cudaHostFn_t destroy, unsigned references,
                                 unsigned) {
  *handle = reinterpret_cast<cudaUserObject_t>(new UserObject{object, destroy, {static_cast<long>(references)}});
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
  reinterpret_cast<UserObject*>(handle)->let_go(count);
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle, unsigned count, unsigned flags) {
  UserObject* object = reinterpret_cast<UserObject*>(handle);
  if (flags != cudaGraphUserObjectMove) object->references += count;
  graph_of(graph)->retained.insert(graph_of(graph)->retained.end(), count, object);
  return cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

}  // extern "C"
