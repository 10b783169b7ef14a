// The process-wide cache of large host memory blocks.
//
// The system gives each large block fresh pages and takes them back at the free: the next one
// pays a page fault for each page again. This cache keeps blocks instead, by size class (eight
// per power of two, so at most 12.5 % above the request), the most recently freed first.
//
//   huge pages   blocks begin at 2 MiB boundaries and ask for transparent huge pages
//   bound        at most max_cached_bytes() are kept; the least recently used go first
//   decay        what was not used for decay_ns() goes at the next allocation or free
//
// Thread-safe, one mutex: the requests are large and few.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/huge_pages.h"

namespace mybackend {

class HostCache {
 public:
  static constexpr std::size_t kAlignment = kHugePageBytes;

  explicit HostCache(ClockFn clock = &steady_now_ns) : clock_(clock) {}
  ~HostCache();
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;

  // What allocate(bytes) hands out; 0 when no block can be that large.
  static std::size_t class_bytes(std::size_t bytes) noexcept;

  // A block of class_bytes(bytes), aligned to kAlignment, not cleared; nullptr when the system
  // has none even after the cache was emptied.
  void* allocate(std::size_t bytes) noexcept;
  // The block's bytes, or 0 for a pointer that no living block starts at: then nothing changed.
  std::size_t free(void* ptr) noexcept;

  // Gives all cached blocks back; returns their bytes.
  std::size_t trim() noexcept;

  void set_max_cached_bytes(std::size_t bytes) noexcept;
  void set_decay_ns(std::int64_t decay_ns) noexcept;  // 0: never

  struct ClassStats {
    std::size_t block_bytes = 0;
    std::int64_t hits = 0, misses = 0, live_blocks = 0, cached_blocks = 0;
  };
  struct Stats {
    std::int64_t live_bytes = 0, cached_bytes = 0;
    std::int64_t hits = 0, misses = 0;
    std::int64_t evictions = 0;  // blocks given back for the bound or for their age
    std::size_t max_cached_bytes = 0;
    std::vector<ClassStats> classes;  // those that were used, by size
  };
  Stats stats() const;

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  struct FreeBlock {
    void* ptr;
    std::size_t bytes;
    std::int64_t freed_ns;
  };
  using FreeList = std::list<FreeBlock>;  // least recently used first
  struct SizeClass {
    std::deque<FreeList::iterator> free;  // the same order
    std::int64_t hits = 0, misses = 0, live = 0;
  };

  // Moves what exceeds the bound or the age to `out`, to be unmapped under no lock.
  void evict_locked(FreeList* out) noexcept;
  static void unmap_all(FreeList& blocks) noexcept;

  const ClockFn clock_;
  mutable std::mutex mutex_;
  std::map<std::size_t, SizeClass> classes_;
  std::unordered_map<void*, std::size_t> live_;
  FreeList free_;
  std::size_t max_cached_bytes_ = static_cast<std::size_t>(-1);
  std::int64_t decay_ns_ = 0;
  std::int64_t live_bytes_ = 0, cached_bytes_ = 0, evictions_ = 0;
};

}  // namespace mybackend
