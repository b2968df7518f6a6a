// Ranges for an attached tool, if the kernel is built with NVTX's headers.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#ifdef CROSSRANK_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace crossrank {

#ifdef CROSSRANK_NVTX
inline nvtxDomainHandle_t domain() {
  static nvtxDomainHandle_t made = nvtxDomainCreateA("crossrank");
  return made;
}

inline void push_range(const void *message, int64_t id) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
  attributes.payload.llValue = id;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = static_cast<nvtxStringHandle_t>(const_cast<void *>(message));
  nvtxDomainRangePushEx(domain(), &attributes);
}

inline void pop_range() { nvtxDomainRangePop(domain()); }

// Registers each text once: a tool keeps registered texts.
inline const void *registered(const std::string &text) {
  static auto &lock = *new std::mutex;  // a separate lock: a tool may do anything, even fork
  static auto &known = *new std::unordered_map<std::string, const void *>;
  std::lock_guard<std::mutex> guard(lock);
  auto &handle = known[text];
  if (handle == nullptr) handle = nvtxDomainRegisterStringA(domain(), text.c_str());
  return handle;
}
#else
inline void push_range(const void *, int64_t) {}
inline void pop_range() {}
inline const void *registered(const std::string &) { return nullptr; }
#endif

}  // namespace crossrank
