// Which call a Work or a tensor is of that somebody waits for.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

namespace crossrank {

// The calls of the objects that were made last, by their addresses. An object must be noted again where another one is
// made at its address: it cannot be held, not even weakly, for its tensors would then live longer.
class CallOf {
 public:
  static constexpr int64_t kNoCall = -1;

  void note(const void *object, int64_t id) {
    std::lock_guard<std::mutex> guard(lock);
    auto &set = set_of(object);
    Entry *place = &set[0];
    for (Entry &entry : set) {
      if (entry.object == object) {
        place = &entry;
        break;
      }
      if (entry.id < place->id) place = &entry;
    }
    *place = {object, id};
  }

  int64_t find(const void *object) {
    std::lock_guard<std::mutex> guard(lock);
    const Entry *entry = entry_of(object);
    return entry == nullptr ? kNoCall : entry->id;
  }

  int64_t take(const void *object) {
    std::lock_guard<std::mutex> guard(lock);
    Entry *entry = entry_of(object);
    if (entry == nullptr) return kNoCall;
    int64_t id = entry->id;
    *entry = {};
    return id;
  }

  void clear() {
    std::lock_guard<std::mutex> guard(lock);
    for (auto &set : sets_) set.fill({});
  }

  std::mutex lock;

 private:
  struct Entry {
    const void *object = nullptr;
    int64_t id = kNoCall;
  };
  using Set = std::array<Entry, 8>;

  Set &set_of(const void *object) {
    return sets_[(reinterpret_cast<uintptr_t>(object) >> 4) * 0x9e3779b97f4a7c15u >> 55];
  }

  Entry *entry_of(const void *object) {
    for (Entry &entry : set_of(object))
      if (entry.object == object && object != nullptr) return &entry;
    return nullptr;
  }

  std::array<Set, 512> sets_;
};

// Never destroyed, as all that threads may still use while the process exits.
inline CallOf &call_of_work = *new CallOf;
inline CallOf &call_of_storage = *new CallOf;

}  // namespace crossrank
