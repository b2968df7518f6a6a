// NVML, which has no header in the wheels: the functions and structures that are asked for, as its documentation has them.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

#include "device.h"

using namespace stand_in;

namespace {

enum { success = 0, not_supported = 3, not_found = 6 };

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

// STAND_IN_COUNTERS is a file of lines `device field value`, which is read anew each time.
std::map<unsigned, unsigned long long> counters_of(int device) {
  std::map<unsigned, unsigned long long> found;
  std::ifstream file(text_from_environment("STAND_IN_COUNTERS"));
  int whose;
  unsigned field;
  for (unsigned long long value; file >> whose >> field >> value;) {
    if (whose == device) found[field] = value;
  }
  return found;
}

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
  const auto known = counters_of(index_of(device));
  for (int index = 0; index < count; ++index) {
    const auto found = known.find(values[index].fieldId);
    values[index].valueType = 3;  // unsigned long long
    values[index].value.ull = found == known.end() ? 0 : found->second;
    values[index].nvmlReturn = success;
  }
  return success;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return success;
}

}  // extern "C"
