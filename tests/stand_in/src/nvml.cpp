// NVML, which has no header in the wheels: the functions and structures that are asked for, as its documentation has them.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "device.h"

using namespace stand_in;

namespace {

enum { success = 0, not_supported = 3, not_found = 6, timed_out = 10 };
constexpr unsigned long long xid_event = 8;

struct PciInfo {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
};

struct FieldValue {
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  unsigned valueType;
  int nvmlReturn;
  union {
    double d;
    unsigned long long ull;
  } value;
};

struct EventData {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

int index_of(void* device) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(device)) - 1; }

std::string uuid_of(int device) {
  char text[48];
  unsigned char bytes[16];
  for (int index = 0; index < 16; ++index) bytes[index] = static_cast<unsigned char>(0xA0 + device * 7 + index);
  int used = std::snprintf(text, sizeof text, "GPU-");
  for (int index = 0; index < 16; ++index) {
    const bool dash = index == 4 || index == 6 || index == 8 || index == 10;
    used += std::snprintf(text + used, sizeof text - static_cast<std::size_t>(used), dash ? "-%02x" : "%02x", bytes[index]);
  }
  return text;
}

// STAND_IN_COUNTERS is a file of lines `device what value`, which is read anew each time. What: the number of a field, or
// one of the words below.
std::map<std::string, unsigned long long> counters_of(int device) {
  std::map<std::string, unsigned long long> found;
  std::ifstream file(text_from_environment("STAND_IN_COUNTERS"));
  int whose;
  std::string what;
  for (unsigned long long value; file >> whose >> what >> value;) {
    if (whose == device) found[what] = value;
  }
  return found;
}

unsigned long long counter_of(void* device, const std::string& what, unsigned long long otherwise) {
  const auto known = counters_of(index_of(device));
  const auto found = known.find(what);
  return found == known.end() ? otherwise : found->second;
}

// The Xid that each registered device had when it was last asked about.
struct EventSet {
  std::map<void*, unsigned long long> xids;
};

int write_text(char* target, unsigned size, const std::string& text) {
  std::snprintf(target, size, "%s", text.c_str());
  return success;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return success; }
int nvmlInitWithFlags(unsigned) { return success; }
int nvmlShutdown() { return success; }
const char* nvmlErrorString(int error) { return error == success ? "Success" : "Not Supported"; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(all_devices());
  return success;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1);
  return static_cast<int>(index) < all_devices() ? success : not_found;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (int index = 0; index < all_devices(); ++index) {
    if (uuid_of(index) == uuid) return nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(index), device);
  }
  return not_found;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  unsigned domain = 0, bus = 0;
  if (std::sscanf(id, "%x:%x", &domain, &bus) != 2 || bus < 0x10) return not_found;
  return nvmlDeviceGetHandleByIndex_v2(bus - 0x10, device);
}
int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = static_cast<unsigned>(index_of(device));
  return success;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned size) { return write_text(text, size, uuid_of(index_of(device))); }
int nvmlDeviceGetName(void*, char* text, unsigned size) { return write_text(text, size, "NVIDIA Stand-in H100"); }
int nvmlDeviceGetSerial(void* device, char* text, unsigned size) {
  return write_text(text, size, "165" + std::to_string(1000000000 + index_of(device)));
}
int nvmlSystemGetDriverVersion(char* text, unsigned size) { return write_text(text, size, "580.95.05"); }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return success;
}
int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* found) {
  *found = {};
  found->bus = static_cast<unsigned>(0x10 + index_of(device));
  std::snprintf(found->busIdLegacy, sizeof found->busIdLegacy, "0000:%02X:00.0", found->bus);
  std::snprintf(found->busId, sizeof found->busId, "00000000:%02X:00.0", found->bus);
  return success;
}
int nvmlDeviceGetFieldValues(void* device, int count, FieldValue* values) {
  for (int index = 0; index < count; ++index) {
    values[index].valueType = 3;  // unsigned long long
    values[index].value.ull = counter_of(device, std::to_string(values[index].fieldId), 0);
    values[index].nvmlReturn = success;
  }
  return success;
}
int nvmlDeviceGetClockInfo(void* device, int type, unsigned* mhz) {
  static const char* const names[] = {"graphics_mhz", "sm_mhz", "memory_mhz", "video_mhz"};
  if (type < 0 || type > 3) return not_supported;
  *mhz = static_cast<unsigned>(counter_of(device, names[type], type == 2 ? 2619 : 1980));
  return success;
}
int nvmlDeviceGetCurrentClocksEventReasons(void* device, unsigned long long* reasons) {
  *reasons = counter_of(device, "throttle_reasons", 0);
  return success;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}
int nvmlEventSetCreate(EventSet** set) {
  *set = new EventSet;
  return success;
}
int nvmlEventSetFree(EventSet* set) {
  delete set;
  return success;
}
int nvmlDeviceRegisterEvents(void* device, unsigned long long types, EventSet* set) {
  if (types != xid_event) return not_supported;
  set->xids[device] = counter_of(device, "xid", 0);
  return success;
}
int nvmlEventSetWait_v2(EventSet* set, EventData* found, unsigned milliseconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (true) {
    for (auto& [device, before] : set->xids) {
      const unsigned long long xid = counter_of(device, "xid", 0);
      if (xid == before) continue;
      before = xid;
      *found = {device, xid_event, xid, ~0u, ~0u};
      return success;
    }
    if (std::chrono::steady_clock::now() > deadline) return timed_out;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return success;
}

}  // extern "C"
