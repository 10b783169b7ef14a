// Pinned host memory: page-locked, known by address, cached.
//
//   class      requests are rounded up to a size class (eight per power of two, whole pages: at
//              most 12.5 % or a page more); above `round_threshold_bytes` to whole pages only.
//              A block only ever serves requests of its class: none gets one smaller than itself
//   cache      a freed block waits for the events of the streams that used it, and is kept for
//              the next request of its class, unless it is above `block_cached_bytes`; all that
//              is kept stays below `total_cached_bytes`, the least recently used goes first
//   segment    with `reserve_segment_bytes`, one pinned piece of that size is made first and
//              requests are cut from it while they fit
//   locking    by the driver, where it copies between host and device (set_registrar); else
//              mlock, where the process's limit allows it. A block that could not be locked
//              works all the same; `unlocked_bytes` tells how much that is
//
// Thread-safe. What the system is asked for (mapping, locking) happens under no lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/units.h"
#include "driver/driver.h"

namespace mybackend {

struct PinnedSettings {
  std::size_t round_threshold_bytes = kUnlimitedBytes;
  std::size_t block_cached_bytes = kUnlimitedBytes;
  std::size_t total_cached_bytes = kUnlimitedBytes;
  std::size_t reserve_segment_bytes = 0;
  bool register_memory = false;  // touch ordinary pages with several threads first, then lock them
  int register_threads = 1;
  bool background_thread = false;  // completes deferred frees, so that an allocation need not
  bool ignore_unknown_frees = false;
};

struct PinnedCounter {
  std::int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void increase(std::int64_t amount) noexcept;
  void decrease(std::int64_t amount) noexcept;
};
struct PinnedDuration {  // microseconds
  std::int64_t total = 0, max = 0, min = 0, count = 0;
  void add(std::int64_t us) noexcept;
};

struct PinnedStats {
  PinnedCounter active_requests, active_bytes;  // handed out, or waiting for events
  PinnedCounter requested_bytes;                // the same, as asked
  PinnedCounter segments, reserved_bytes;       // what is pinned: active and cached
  PinnedDuration host_alloc_us, host_free_us;   // in the system
  std::int64_t hits = 0, misses = 0, evictions = 0;
  std::int64_t cached_bytes = 0;
  std::int64_t unlocked_bytes = 0;  // of reserved_bytes: what the system did not let us lock
  std::int64_t unknown_frees = 0;
};

class PinnedCache {
 public:
  PinnedCache() = default;
  ~PinnedCache();
  PinnedCache(const PinnedCache&) = delete;
  PinnedCache& operator=(const PinnedCache&) = delete;

  void apply_settings(const PinnedSettings& settings);
  // From now on this driver locks what is pinned, also what is pinned already. `driver` lives on.
  void set_registrar(Driver* driver);
  PinnedSettings settings() const;

  // What a request of `bytes` pins.
  static std::size_t block_bytes(std::size_t bytes, const PinnedSettings& settings) noexcept;

  // nullptr when the system has no memory, even after the cache was emptied. pre: bytes > 0.
  void* allocate(std::size_t bytes);
  // False for a pointer that is not a block's start. The block is reused only after the work
  // that is queued now on the streams that record_use() named.
  bool free(void* ptr) noexcept;
  // A stream of `driver` uses the block that the byte at ptr lies in, from now on. False when
  // there is none.
  bool record_use(const void* ptr, Driver* driver, int device, StreamHandle stream);
  // Whether the byte at ptr lies in a block that is handed out; interior pointers too.
  bool contains(const void* ptr) const noexcept;

  // Gives cached blocks back, and an unused reserved segment. Waits for no stream.
  void empty_cache();

  PinnedStats stats() const;
  void reset_peak();
  void reset_accumulated();
  // Allocations of the system per size: (bytes, how many were made), by size.
  std::vector<std::pair<std::size_t, std::int64_t>> class_counts() const;

  void lock_for_fork();
  void unlock_after_fork(bool in_child);

 private:
  struct Use {
    Driver* driver;
    int device;
    StreamHandle stream;
    bool operator==(const Use&) const = default;
  };
  struct PendingEvent {
    Driver* driver;
    int device;
    EventHandle event;
  };
  struct Block {
    std::uintptr_t address = 0;
    std::size_t bytes = 0;
    std::size_t requested_bytes = 0;
    bool locked = false;
    bool registered = false;  // the driver locked it
    bool in_segment = false;
    std::vector<Use> uses;
    std::vector<PendingEvent> events;
  };
  using BlockList = std::list<Block>;

  bool pin(std::size_t bytes, const PinnedSettings& settings, Block* out);
  void register_locked(Block& block, Driver& driver) noexcept;
  void unpin(const Block& block) noexcept;
  void process_events_locked(BlockList* out) noexcept;
  void cache_or_release_locked(BlockList& from, BlockList::iterator block, BlockList* out) noexcept;
  void evict_locked(BlockList* out) noexcept;
  void release_all(BlockList& blocks) noexcept;
  bool take_from_segment_locked(std::size_t bytes, Block* out);
  void return_to_segment_locked(const Block& block);
  void start_background_thread();
  void stop_background_thread();

  mutable std::mutex mutex_;
  PinnedSettings settings_;
  std::map<std::uintptr_t, BlockList::iterator> live_;  // handed out, by address
  BlockList in_use_;
  BlockList pending_;  // freed, with events to come
  BlockList cached_;   // least recently used first
  std::map<std::size_t, std::deque<BlockList::iterator>> classes_;
  std::map<std::size_t, std::int64_t> class_counts_;
  PinnedStats stats_;

  Block segment_;                                       // bytes == 0: none
  std::map<std::uintptr_t, std::size_t> segment_free_;  // free parts, not adjacent

  std::atomic<Driver*> registrar_{nullptr};

  std::thread background_;
  bool stop_background_ = false;
  std::condition_variable wake_background_;
};

}  // namespace mybackend
