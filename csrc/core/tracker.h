// MemoryTracker: how many bytes are live on a device, exactly, at any moment, from any thread.
//
//   current  bytes asked for and not yet freed (requested bytes, not what was rounded up)
//   peak     the largest value that `current` ever had since the last reset_peak()
//   total    bytes and calls since the process (or reset_totals()) began
//
// `current` and `peak` are exact under threads: `peak` is raised by the very addition that
// made it. A free of more than is live is a bug of the caller and is refused, so `current` is
// never negative.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mybackend {

struct TrackerStats {
  std::int64_t current_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_allocated_bytes = 0;
  std::int64_t total_freed_bytes = 0;
  std::int64_t allocation_count = 0;
  std::int64_t free_count = 0;
};

class MemoryTracker {
 public:
  void track_alloc(std::size_t bytes) noexcept {
    const auto amount = static_cast<std::int64_t>(bytes);
    const std::int64_t now = current_.fetch_add(amount, std::memory_order_relaxed) + amount;
    std::int64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
    allocated_.fetch_add(amount, std::memory_order_relaxed);
    allocation_count_.fetch_add(1, std::memory_order_relaxed);
  }

  // False, and nothing counted, when fewer than `bytes` are live.
  bool track_free(std::size_t bytes) noexcept {
    const auto amount = static_cast<std::int64_t>(bytes);
    if (current_.fetch_sub(amount, std::memory_order_relaxed) < amount) {
      current_.fetch_add(amount, std::memory_order_relaxed);
      return false;
    }
    free_count_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  TrackerStats stats() const noexcept {
    TrackerStats s;
    s.current_bytes = current_.load(std::memory_order_relaxed);
    s.peak_bytes = peak_.load(std::memory_order_relaxed);
    s.total_allocated_bytes = allocated_.load(std::memory_order_relaxed);
    s.total_freed_bytes = s.total_allocated_bytes - s.current_bytes + base_.load(std::memory_order_relaxed);
    s.allocation_count = allocation_count_.load(std::memory_order_relaxed);
    s.free_count = free_count_.load(std::memory_order_relaxed);
    return s;
  }

  void reset_peak() noexcept { peak_.store(current_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

  void reset_totals() noexcept {
    base_.store(current_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    allocated_.store(0, std::memory_order_relaxed);
    allocation_count_.store(0, std::memory_order_relaxed);
    free_count_.store(0, std::memory_order_relaxed);
  }

 private:
  alignas(64) std::atomic<std::int64_t> current_{0};
  std::atomic<std::int64_t> peak_{0};
  std::atomic<std::int64_t> allocated_{0};  // since reset_totals(); freed follows from it
  std::atomic<std::int64_t> base_{0};       // live bytes at reset_totals()
  std::atomic<std::int64_t> allocation_count_{0};
  std::atomic<std::int64_t> free_count_{0};
};

}  // namespace mybackend
