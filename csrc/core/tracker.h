// MemoryTracker: how many bytes are live on a device, exactly, at any moment, from any thread.
//
//   current  bytes asked for and not yet freed (requested bytes, not what was rounded up)
//   peak     the largest value that `current` ever had since the last reset_peak()
//   total    bytes and calls since the process (or reset_totals()) began
//
// `current` and `peak` are exact under threads: `peak` is raised by the very addition that made
// it. The totals are counted per thread, without sharing, and summed when they are read. A free
// of more than is live is a bug of the caller and is refused, so `current` is never negative.
//
// Trackers live as long as the process: there are at most kMaxTrackers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if __has_include(<sys/single_threaded.h>)
#include <sys/single_threaded.h>
#endif

#include "base/thread_local.h"

namespace mybackend {

struct TrackerStats {
  std::int64_t current_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_allocated_bytes = 0;
  std::int64_t total_freed_bytes = 0;
  std::int64_t allocation_count = 0;
  std::int64_t free_count = 0;
};

namespace tracker_detail {

inline constexpr int kMaxTrackers = 96;

// Written by one thread, read by others.
struct Totals {
  std::atomic<std::int64_t> allocated_bytes{0}, allocation_count{0}, free_count{0};
};

struct ThreadTotals {
  Totals of[kMaxTrackers];
  ThreadTotals* next = nullptr;
  ThreadTotals* previous = nullptr;
};

extern MYBACKEND_HOT_THREAD_LOCAL ThreadTotals* t_totals;
// This thread's totals, or (during the thread's exit) shared ones.
ThreadTotals& make_thread_totals() noexcept;
// Around fork(): the list of threads must not be locked by another thread then.
void lock_for_fork();
void unlock_after_fork();

// Whether no other thread was ever started. Then a locked instruction would only cost time.
inline bool is_single_threaded() noexcept {
#if __has_include(<sys/single_threaded.h>)
  return __libc_single_threaded != 0;
#else
  return false;
#endif
}

// Returns the new value.
inline std::int64_t add_shared(std::atomic<std::int64_t>& counter, std::int64_t amount) noexcept {
  if (is_single_threaded()) {
    const std::int64_t now = counter.load(std::memory_order_relaxed) + amount;
    counter.store(now, std::memory_order_relaxed);
    return now;
  }
  return counter.fetch_add(amount, std::memory_order_relaxed) + amount;
}

inline void add(std::atomic<std::int64_t>& counter, std::int64_t amount, bool is_own) noexcept {
  if (is_own)
    counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  else
    counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace tracker_detail

class MemoryTracker {
 public:
  MemoryTracker();
  ~MemoryTracker();
  MemoryTracker(const MemoryTracker&) = delete;
  MemoryTracker& operator=(const MemoryTracker&) = delete;

  void track_alloc(std::size_t bytes) noexcept {
    const auto amount = static_cast<std::int64_t>(bytes);
    const std::int64_t now = tracker_detail::add_shared(current_, amount);
    std::int64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
    tracker_detail::ThreadTotals* own = tracker_detail::t_totals;
    tracker_detail::Totals& totals = (own != nullptr ? *own : tracker_detail::make_thread_totals()).of[id_];
    const bool is_own = tracker_detail::t_totals != nullptr;
    tracker_detail::add(totals.allocated_bytes, amount, is_own);
    tracker_detail::add(totals.allocation_count, 1, is_own);
  }

  // False, and nothing counted, when fewer than `bytes` are live.
  bool track_free(std::size_t bytes) noexcept {
    const auto amount = static_cast<std::int64_t>(bytes);
    if (tracker_detail::add_shared(current_, -amount) < 0) {
      tracker_detail::add_shared(current_, amount);
      return false;
    }
    tracker_detail::ThreadTotals* own = tracker_detail::t_totals;
    tracker_detail::Totals& totals = (own != nullptr ? *own : tracker_detail::make_thread_totals()).of[id_];
    tracker_detail::add(totals.free_count, 1, tracker_detail::t_totals != nullptr);
    return true;
  }

  TrackerStats stats() const noexcept;
  void reset_peak() noexcept { peak_.store(current_.load(std::memory_order_relaxed), std::memory_order_relaxed); }
  void reset_totals() noexcept;

 private:
  alignas(64) std::atomic<std::int64_t> current_{0};
  std::atomic<std::int64_t> peak_{0};
  int id_;
  TrackerStats base_;  // the totals at reset_totals()
};

}  // namespace mybackend
