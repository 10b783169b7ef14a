// The counters of one device's caching allocator, as `torch.cuda.memory_stats` names them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace mybackend::caching {

struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;

  void increase(std::int64_t amount) noexcept {
    current += amount;
    peak = std::max(peak, current);
    allocated += amount;
  }
  void decrease(std::int64_t amount) noexcept {
    current -= amount;
    freed += amount;
  }
  void reset_accumulated() noexcept { allocated = freed = 0; }
  void reset_peak() noexcept { peak = current; }
};

enum StatPool : int { kAll = 0, kSmall = 1, kLarge = 2, kStatPoolCount = 3 };

using StatArray = std::array<Stat, kStatPoolCount>;

// X(name): counters kept for all blocks, for the small and for the large pools.
#define MYBACKEND_STAT_ARRAYS(X) \
  X(allocation)                  \
  X(segment) X(active) X(inactive_split) X(allocated_bytes) X(reserved_bytes) X(active_bytes) X(inactive_split_bytes) X(requested_bytes)
// X(name): one counter with a current value and a peak.
#define MYBACKEND_STAT_SINGLES(X) X(oversize_allocations) X(oversize_segments)
// X(name): events since the last reset_accumulated.
#define MYBACKEND_STAT_COUNTS(X) \
  X(num_alloc_retries) X(num_ooms) X(num_sync_all_streams) X(num_device_alloc) X(num_device_free) X(num_oom_rejections)

struct DeviceStats {
#define X(name) StatArray name;
  MYBACKEND_STAT_ARRAYS(X)
#undef X
#define X(name) Stat name;
  MYBACKEND_STAT_SINGLES(X)
#undef X
#define X(name) std::int64_t name = 0;
  MYBACKEND_STAT_COUNTS(X)
#undef X
  std::int64_t max_split_size = 0;

  void reset_accumulated() noexcept;
  void reset_peak() noexcept;
};

inline void DeviceStats::reset_accumulated() noexcept {
#define X(name) \
  for (Stat& stat : name) stat.reset_accumulated();
  MYBACKEND_STAT_ARRAYS(X)
#undef X
#define X(name) name.reset_accumulated();
  MYBACKEND_STAT_SINGLES(X)
#undef X
#define X(name) name = 0;
  MYBACKEND_STAT_COUNTS(X)
#undef X
}

inline void DeviceStats::reset_peak() noexcept {
#define X(name) \
  for (Stat& stat : name) stat.reset_peak();
  MYBACKEND_STAT_ARRAYS(X)
#undef X
#define X(name) name.reset_peak();
  MYBACKEND_STAT_SINGLES(X)
#undef X
}

// Into another program's types with the same counters: torch's Stat and DeviceStats.
template <class To>
void copy_stat(const Stat& from, To* to) {
  to->current = from.current;
  to->peak = from.peak;
  to->allocated = from.allocated;
  to->freed = from.freed;
}
template <class To>
void copy_stats(const DeviceStats& from, To* to) {
#define X(name) \
  for (int i = 0; i < kStatPoolCount; ++i) copy_stat(from.name[i], &to->name[i]);
  MYBACKEND_STAT_ARRAYS(X)
#undef X
#define X(name) copy_stat(from.name, &to->name);
  MYBACKEND_STAT_SINGLES(X)
#undef X
#define X(name) to->name = from.name;
  MYBACKEND_STAT_COUNTS(X)
#undef X
  to->max_split_size = from.max_split_size;
}

}  // namespace mybackend::caching
