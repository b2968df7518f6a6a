// Finds the call of a Work or a tensor that a thread waits for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace crossrank {

// The calls of the latest objects, by address. A new object at the same address must be noted again: the table has no
// reference to the object, not even a weak one, because its tensors would then live longer.
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

// Never destroyed, like all data that threads may use while the process exits.
inline CallOf &call_of_work = *new CallOf;
inline CallOf &call_of_storage = *new CallOf;

// The calls that threads wait for now.
struct WaitOfThread {
  static constexpr int64_t kFree = INT64_MIN;

  std::atomic<int64_t> call{kFree}, thread{0};
  std::atomic<bool> limited{false};
};
inline auto &waits_under_way = *new std::array<WaitOfThread, 64>;

// Notes that a thread waits for a call (CallOf::kNoCall if unknown) until the guard goes out of scope. `limited`: the
// script gave this wait a timeout.
class WaitUnderWay {
 public:
  WaitUnderWay(int64_t call, int64_t thread, bool limited = false) {
    for (auto &place : waits_under_way) {
      int64_t expected = WaitOfThread::kFree;
      if (place.call.load(std::memory_order_relaxed) != expected || !place.call.compare_exchange_strong(expected, call))
        continue;
      place.thread.store(thread, std::memory_order_relaxed);
      place.limited.store(limited, std::memory_order_relaxed);
      place_ = &place;
      return;
    }
  }
  ~WaitUnderWay() {
    if (place_ != nullptr) place_->call.store(WaitOfThread::kFree, std::memory_order_relaxed);
  }
  WaitUnderWay(const WaitUnderWay &) = delete;
  WaitUnderWay &operator=(const WaitUnderWay &) = delete;

 private:
  WaitOfThread *place_ = nullptr;  // null if more threads wait than there are places
};

}  // namespace crossrank
