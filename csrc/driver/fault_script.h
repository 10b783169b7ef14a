// Scripted faults for drivers that run on the host: "the n-th call from now of this primitive
// fails with this code". One script belongs to one driver; all calls are thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/status.h"

namespace mybackend {

enum class Primitive : int {
  kMemoryAllocate,
  kMemoryFree,
  kAddressReserve,
  kPhysicalCreate,
  kMemoryMap,
  kMemoryUnmap,
  kStreamCreate,
  kStreamEnqueue,
  kStreamSynchronize,
  kEventCreate,
  kEventRecord,
  kEventQuery,
  kPrepareFork,
  kCount,
};

inline constexpr const char* kPrimitiveNames[] = {
    "memory_allocate", "memory_free",        "address_reserve", "physical_create", "memory_map",  "memory_unmap", "stream_create",
    "stream_enqueue",  "stream_synchronize", "event_create",    "event_record",    "event_query", "prepare_fork"};

class FaultScript {
 public:
  // The call number `calls_from_now` (1 = the next) and the `repeat - 1` after it fail.
  void fail(Primitive primitive, std::int64_t calls_from_now, StatusCode code, std::int64_t repeat = 1) {
    Entry& entry = entries_[static_cast<int>(primitive)];
    entry.code.store(code, std::memory_order_relaxed);
    entry.repeat.store(repeat, std::memory_order_relaxed);
    entry.countdown.store(calls_from_now, std::memory_order_release);
    armed_.store(true, std::memory_order_release);
  }

  void clear() {
    for (Entry& entry : entries_) entry.countdown.store(0);
    armed_.store(false);
  }

  // What the primitive must answer now: ok, or the scripted fault.
  Status check(Primitive primitive) noexcept {
    if (!armed_.load(std::memory_order_acquire)) return {};
    Entry& entry = entries_[static_cast<int>(primitive)];
    // Counts down to 1, fails there, and stays there until `repeat` failures were given.
    std::int64_t left = entry.countdown.load(std::memory_order_acquire);
    while (left > 1 && !entry.countdown.compare_exchange_weak(left, left - 1)) {
    }
    if (left != 1) return {};
    if (entry.repeat.fetch_sub(1) <= 1) entry.countdown.store(0);
    const StatusCode code = entry.code.load(std::memory_order_relaxed);
    return {code, std::string(kPrimitiveNames[static_cast<int>(primitive)]) + ": scripted fault (" + status_code_name(code) + ")"};
  }

 private:
  struct Entry {
    std::atomic<std::int64_t> countdown{0};
    std::atomic<std::int64_t> repeat{1};
    std::atomic<StatusCode> code{StatusCode::kFailed};
  };
  std::array<Entry, static_cast<int>(Primitive::kCount)> entries_;
  std::atomic<bool> armed_{false};
};

}  // namespace mybackend
