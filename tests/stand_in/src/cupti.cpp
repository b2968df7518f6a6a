// CUPTI's activity interface, as Kineto uses it: what ran and what was called is kept while it is asked for, and handed
// over in the buffers of the one who asked when it flushes.
#include <cupti.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <unordered_set>

#include "device.h"

namespace stand_in {

#if CUDA_VERSION >= 13000
using KernelRecord = CUpti_ActivityKernel10;
#else
using KernelRecord = CUpti_ActivityKernel9;
#endif

namespace {

std::mutex lock;
std::set<int> enabled;  // CUpti_ActivityKind
std::set<std::uint32_t> enabled_driver, enabled_runtime;
std::vector<std::vector<char>> records;
CUpti_BuffersCallbackRequestFunc request_buffer = nullptr;
CUpti_BuffersCallbackCompleteFunc complete_buffer = nullptr;
CUpti_TimestampCallbackFunc clock_of_client = nullptr;

struct Buffer {
  uint8_t* begin = nullptr;
  size_t size = 0, most_records = 0;
};
// Asked for with the first record: Kineto flushes only where a buffer was asked for.
Buffer next_buffer;

Buffer ask_for_buffer() {
  Buffer found;
  if (request_buffer) request_buffer(&found.begin, &found.size, &found.most_records);
  return found;
}
std::atomic<std::uint32_t> last_correlation{0};

thread_local std::map<int, std::vector<std::uint64_t>> external_ids;  // by CUpti_ExternalCorrelationKind

// Our clock beside that of the client, at two moments between which it goes straight.
struct Moment {
  double own = 0, theirs = 0;
};
Moment first_moment;

Moment read_clocks() {
  const Nanoseconds before = now();
  const std::uint64_t theirs = clock_of_client();
  return {static_cast<double>(before) / 2 + static_cast<double>(now()) / 2, static_cast<double>(theirs)};
}

std::uint64_t as_client(Nanoseconds moment, const Moment& last) {
  if (!clock_of_client) return static_cast<std::uint64_t>(moment);
  const double rate = (last.theirs - first_moment.theirs) / (last.own - first_moment.own);
  return static_cast<std::uint64_t>(last.theirs + (static_cast<double>(moment) - last.own) * rate);
}

const char* kept(const std::string& text) {
  static auto* all = new std::unordered_set<std::string>;
  return all->insert(text).first->c_str();
}

template <typename Record>
void keep(const Record& record) {
  const char* bytes = reinterpret_cast<const char*>(&record);
  records.emplace_back(bytes, bytes + sizeof record);
  if (!next_buffer.begin) next_buffer = ask_for_buffer();
}

bool wants(int kind) { return enabled.count(kind) > 0; }

}  // namespace

std::uint32_t next_correlation() { return ++last_correlation; }

Call::Call(std::uint32_t cbid, bool driver)
    : cbid_(cbid), correlation_(next_correlation()), driver_(driver), begin_(now()) {
  std::lock_guard guard(lock);
  if (!wants(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION)) return;
  for (const auto& [kind, ids] : external_ids) {
    if (ids.empty()) continue;
    CUpti_ActivityExternalCorrelation record{};
    record.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
    record.externalKind = static_cast<CUpti_ExternalCorrelationKind>(kind);
    record.externalId = ids.back();
    record.correlationId = correlation_;
    keep(record);
  }
}

Call::~Call() {
  std::lock_guard guard(lock);
  const int kind = driver_ ? CUPTI_ACTIVITY_KIND_DRIVER : CUPTI_ACTIVITY_KIND_RUNTIME;
  const auto& single = driver_ ? enabled_driver : enabled_runtime;
  if (!wants(kind) && !single.count(cbid_)) return;
  CUpti_ActivityAPI record{};
  record.kind = static_cast<CUpti_ActivityKind>(kind);
  record.cbid = cbid_;
  record.start = static_cast<std::uint64_t>(begin_);
  record.end = static_cast<std::uint64_t>(now());
  record.processId = static_cast<std::uint32_t>(getpid());
  record.threadId = static_cast<std::uint32_t>(pthread_self());
  record.correlationId = correlation_;
  keep(record);
}

bool is_traced(Kind kind) {
  std::lock_guard guard(lock);
  switch (kind) {
    case Kind::copy: return wants(CUPTI_ACTIVITY_KIND_MEMCPY);
    case Kind::set: return wants(CUPTI_ACTIVITY_KIND_MEMSET);
    case Kind::host: return false;
    default: return wants(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  }
}

void trace_activity(const Activity& activity, const Stream& stream, Nanoseconds begin, Nanoseconds end) {
  std::lock_guard guard(lock);
  const auto device = static_cast<std::uint32_t>(stream.device);
  if (activity.kind == Kind::copy) {
    CUpti_ActivityMemcpy6 record{};
    record.kind = CUPTI_ACTIVITY_KIND_MEMCPY;
    static const std::uint8_t kinds[] = {CUPTI_ACTIVITY_MEMCPY_KIND_HTOH, CUPTI_ACTIVITY_MEMCPY_KIND_HTOD,
                                         CUPTI_ACTIVITY_MEMCPY_KIND_DTOH, CUPTI_ACTIVITY_MEMCPY_KIND_DTOD};
    record.copyKind = kinds[activity.copy_kind];
    record.srcKind = activity.source_memory, record.dstKind = activity.target_memory;
    record.flags = CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC;
    record.bytes = activity.bytes;
    record.start = static_cast<std::uint64_t>(begin), record.end = static_cast<std::uint64_t>(end);
    record.deviceId = device, record.contextId = 1, record.streamId = stream.id;
    record.correlationId = activity.correlation;
    keep(record);
  } else if (activity.kind == Kind::set) {
    CUpti_ActivityMemset4 record{};
    record.kind = CUPTI_ACTIVITY_KIND_MEMSET;
    record.value = activity.value;
    record.bytes = activity.bytes;
    record.start = static_cast<std::uint64_t>(begin), record.end = static_cast<std::uint64_t>(end);
    record.deviceId = device, record.contextId = 1, record.streamId = stream.id;
    record.correlationId = activity.correlation;
    record.memoryKind = activity.target_memory;
    keep(record);
  } else {
    KernelRecord record{};
    record.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    record.registersPerThread = 32;
    record.start = static_cast<std::uint64_t>(begin), record.end = static_cast<std::uint64_t>(end);
    record.deviceId = device, record.contextId = 1, record.streamId = stream.id;
    record.gridX = static_cast<int>(activity.grid[0]), record.gridY = static_cast<int>(activity.grid[1]);
    record.gridZ = static_cast<int>(activity.grid[2]);
    record.blockX = static_cast<int>(activity.block[0]), record.blockY = static_cast<int>(activity.block[1]);
    record.blockZ = static_cast<int>(activity.block[2]);
    record.dynamicSharedMemory = static_cast<int>(activity.shared_bytes);
    record.correlationId = activity.correlation;
    record.name = kept(activity.name);
    keep(record);
  }
}

// Tells one record of an event from the next.
static std::uint64_t record_of(const Event& event) { return std::uint64_t{event.id} << 32 | event.recorded; }

void trace_event(const Event& event, const Stream& stream, std::uint32_t correlation) {
  std::lock_guard guard(lock);
  if (!wants(CUPTI_ACTIVITY_KIND_CUDA_EVENT)) return;
  CUpti_ActivityCudaEvent2 record{};
  record.kind = CUPTI_ACTIVITY_KIND_CUDA_EVENT;
  record.correlationId = correlation, record.contextId = 1, record.streamId = stream.id;
  record.eventId = event.id, record.deviceId = static_cast<std::uint32_t>(stream.device);
  record.cudaEventSyncId = record_of(event);
  keep(record);
}

void trace_synchronization(int kind, std::uint32_t correlation, std::uint32_t stream, const Event* event,
                           Nanoseconds begin, Nanoseconds end) {
  std::lock_guard guard(lock);
  if (!wants(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION)) return;
  CUpti_ActivitySynchronization2 record{};
  record.kind = CUPTI_ACTIVITY_KIND_SYNCHRONIZATION;
  record.type = static_cast<CUpti_ActivitySynchronizationType>(kind);
  record.start = static_cast<std::uint64_t>(begin), record.end = static_cast<std::uint64_t>(end);
  record.correlationId = correlation, record.contextId = 1;
  const auto none = static_cast<std::uint32_t>(CUPTI_SYNCHRONIZATION_INVALID_VALUE);
  record.streamId = stream ? stream : none, record.cudaEventId = event ? event->id : none;
  record.cudaEventSyncId = event ? record_of(*event) : 0;
  keep(record);
}

}  // namespace stand_in

using namespace stand_in;

namespace {

// The size of a record, by its kind.
std::size_t size_of_record(const void* record) {
  switch (*static_cast<const CUpti_ActivityKind*>(record)) {
    case CUPTI_ACTIVITY_KIND_MEMCPY: return sizeof(CUpti_ActivityMemcpy6);
    case CUPTI_ACTIVITY_KIND_MEMSET: return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return sizeof(CUpti_ActivityExternalCorrelation);
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: return sizeof(CUpti_ActivitySynchronization2);
    case CUPTI_ACTIVITY_KIND_CUDA_EVENT: return sizeof(CUpti_ActivityCudaEvent2);
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return sizeof(KernelRecord);
    default: return sizeof(CUpti_ActivityAPI);
  }
}

template <typename Record>
void translate_times(char* bytes, const Moment& last) {
  auto* record = reinterpret_cast<Record*>(bytes);
  record->start = as_client(static_cast<Nanoseconds>(record->start), last);
  record->end = as_client(static_cast<Nanoseconds>(record->end), last);
}

void translate(std::vector<char>& record, const Moment& last) {
  switch (*reinterpret_cast<CUpti_ActivityKind*>(record.data())) {
    case CUPTI_ACTIVITY_KIND_MEMCPY: return translate_times<CUpti_ActivityMemcpy6>(record.data(), last);
    case CUPTI_ACTIVITY_KIND_MEMSET: return translate_times<CUpti_ActivityMemset4>(record.data(), last);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: case CUPTI_ACTIVITY_KIND_CUDA_EVENT: return;
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: return translate_times<CUpti_ActivitySynchronization2>(record.data(), last);
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return translate_times<KernelRecord>(record.data(), last);
    default: return translate_times<CUpti_ActivityAPI>(record.data(), last);
  }
}

}  // namespace

extern "C" {

CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetResultString(CUptiResult result, const char** text) {
  *text = result == CUPTI_SUCCESS ? "CUPTI_SUCCESS" : "CUPTI_ERROR_UNKNOWN";
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                           CUpti_BuffersCallbackCompleteFunc complete) {
  std::lock_guard guard(stand_in::lock);
  request_buffer = request, complete_buffer = complete;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  std::lock_guard guard(stand_in::lock);
  clock_of_client = clock;
  if (clock) first_moment = read_clocks();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  std::lock_guard guard(stand_in::lock);
  enabled.insert(kind == CUPTI_ACTIVITY_KIND_KERNEL ? CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL : kind);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  std::lock_guard guard(stand_in::lock);
  enabled.erase(kind == CUPTI_ACTIVITY_KIND_KERNEL ? CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL : kind);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId cbid, uint8_t on) {
  std::lock_guard guard(stand_in::lock);
  on ? (void)enabled_driver.insert(cbid) : (void)enabled_driver.erase(cbid);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId cbid, uint8_t on) {
  std::lock_guard guard(stand_in::lock);
  on ? (void)enabled_runtime.insert(cbid) : (void)enabled_runtime.erase(cbid);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }

CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::vector<std::vector<char>> ready;
  Moment last;
  Buffer buffer;
  {
    std::lock_guard guard(stand_in::lock);
    ready.swap(records);
    std::swap(buffer, next_buffer);
    if (clock_of_client) last = read_clocks();
  }
  if (!request_buffer || !complete_buffer) return CUPTI_SUCCESS;
  for (std::size_t index = 0; index < ready.size(); buffer = {}) {
    if (!buffer.begin) buffer = ask_for_buffer();
    size_t used = 0;
    for (size_t count = 0; index < ready.size() && (!buffer.most_records || count < buffer.most_records); ++count) {
      std::vector<char>& record = ready[index];
      if (used + record.size() > buffer.size) break;
      translate(record, last);
      std::memcpy(buffer.begin + used, record.data(), record.size());
      used += record.size();
      ++index;
    }
    if (!used) return CUPTI_ERROR_OUT_OF_MEMORY;
    complete_buffer(nullptr, 0, buffer.begin, buffer.size, used);
  }
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, CUpti_Activity** record) {
  uint8_t* next = *record ? reinterpret_cast<uint8_t*>(*record) + size_of_record(*record) : buffer;
  if (next >= buffer + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  external_ids[kind].push_back(id);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  auto& ids = external_ids[kind];
  if (ids.empty()) return CUPTI_ERROR_QUEUE_EMPTY;
  if (last) *last = ids.back();
  ids.pop_back();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  *subscriber = reinterpret_cast<CUpti_SubscriberHandle>(&enabled);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) { return CUPTI_SUCCESS; }
CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t cbid, const char** name) {
  static const std::map<uint32_t, const char*> runtime = {
      {CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000, "cudaLaunchKernel_v7000"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020, "cudaDeviceSynchronize_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaMalloc_v3020, "cudaMalloc_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaFree_v3020, "cudaFree_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaHostAlloc_v3020, "cudaHostAlloc_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020, "cudaMemcpy_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020, "cudaMemcpyAsync_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaMemsetAsync_v3020, "cudaMemsetAsync_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020, "cudaStreamSynchronize_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaStreamWaitEvent_v3020, "cudaStreamWaitEvent_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaEventRecord_v3020, "cudaEventRecord_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaEventSynchronize_v3020, "cudaEventSynchronize_v3020"},
      {CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000, "cudaGraphLaunch_v10000"},
  };
  *name = "cuLaunchKernelEx";
  if (domain != CUPTI_CB_DOMAIN_RUNTIME_API) return CUPTI_SUCCESS;
  const auto found = runtime.find(cbid);
  *name = found == runtime.end() ? "INVALID" : found->second;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiFinalize() { return CUPTI_SUCCESS; }

}  // extern "C"
