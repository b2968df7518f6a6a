// A ring without a lock: many threads put rows in, and any thread takes them out.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace crossrank {

// D. Vyukov's bounded queue: a place is free for the n-th row when its turn says n, and taken when it says n + 1.
template <typename Row>
class Ring {
 public:
  explicit Ring(size_t capacity) : capacity_(capacity) {
    while (size_ < capacity) size_ *= 2;
    places_ = std::make_unique<Place[]>(size_);
    for (size_t i = 0; i < size_; i++) places_[i].turn.store(i, std::memory_order_relaxed);
  }

  // Prefetches the place of the next row, which may be in no cache, while its row is being made.
  void expect_row() const {
    __builtin_prefetch(&places_[put_.load(std::memory_order_relaxed) & (size_ - 1)], 1);
  }

  bool put(Row &&row) {
    // As many places as rows may wait need no look at what was taken, which another core has changed.
    if (capacity_ != size_ && length() >= capacity_) return false;
    size_t at = put_.load(std::memory_order_relaxed);
    for (;;) {
      Place &place = places_[at & (size_ - 1)];
      auto behind = static_cast<intptr_t>(place.turn.load(std::memory_order_acquire) - at);
      if (behind < 0) return false;
      if (behind == 0 && put_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
        place.row = std::move(row);
        place.turn.store(at + 1, std::memory_order_release);
        return true;
      }
      if (behind > 0) at = put_.load(std::memory_order_relaxed);
    }
  }

  bool take(Row &row) {
    size_t at = taken_.load(std::memory_order_relaxed);
    for (;;) {
      Place &place = places_[at & (size_ - 1)];
      auto behind = static_cast<intptr_t>(place.turn.load(std::memory_order_acquire) - (at + 1));
      if (behind < 0) return false;
      if (behind == 0 && taken_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
        row = std::move(place.row);
        place.turn.store(at + size_, std::memory_order_release);
        return true;
      }
      if (behind > 0) at = taken_.load(std::memory_order_relaxed);
    }
  }

  size_t capacity() const { return capacity_; }

  size_t length() const {
    size_t taken = taken_.load(std::memory_order_relaxed);
    return put_.load(std::memory_order_relaxed) - taken;
  }

 private:
  struct Place {
    std::atomic<size_t> turn;
    Row row;
  };
  // The data for putting a row, in one cache line.
  alignas(64) std::atomic<size_t> put_{0};
  size_t capacity_, size_ = 2;
  std::unique_ptr<Place[]> places_;
  alignas(64) std::atomic<size_t> taken_{0};
};

}  // namespace crossrank
