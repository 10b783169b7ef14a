// The caching allocator of one device: it takes memory from the driver in segments, hands out
// blocks of them, and keeps what is freed for the next request of the same stream.
// Vocabulary: block.h. Size rules: sizing.h.
//
// Thread-safe; one mutex guards everything. A free never throws and never fails: what cannot
// be freed (a foreign pointer, a second free) is reported and changes nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "core/caching/block.h"
#include "core/caching/block_table.h"
#include "core/caching/device_stats.h"
#include "core/caching/hash_order_table.h"
#include "core/caching/history.h"
#include "core/config.h"
#include "driver/driver.h"

namespace mybackend::caching {

// Everything an out-of-memory error has to tell. Bytes, all of them.
struct OomReport {
  const char* driver_name = "";
  int device = 0;
  std::size_t requested_bytes = 0;
  std::size_t rounded_bytes = 0;
  std::size_t segment_bytes = 0;
  std::size_t free_bytes = 0;                 // of the device
  std::size_t total_bytes = 0;                // of the device
  std::size_t limit_bytes = kUnlimitedBytes;  // memory fraction
  std::size_t allocated_bytes = 0;
  std::size_t reserved_bytes = 0;
  std::size_t cached_same_stream_bytes = 0;   // free blocks that this request could have used, were one large enough
  std::size_t largest_same_stream_bytes = 0;  // the largest of them
  std::size_t cached_other_streams_bytes = 0;
  std::size_t private_pool_free_bytes = 0;
  std::size_t pending_event_bytes = 0;  // freed, another stream still uses them
  StreamHandle stream = 0;
  std::string driver_message;  // what refused: the driver's words
  bool driver_failed = false;  // an error other than out of memory
};

// The report as a message for people, with the advice that would have helped.
std::string oom_text(const OomReport& report, const Settings& settings);

struct BlockInfo {
  std::uintptr_t address;
  std::size_t bytes;
  std::size_t requested_bytes;
  bool allocated;
  bool active;
  std::int64_t age;
  Context context;
};

struct SegmentInfo {
  int device;
  std::uintptr_t address;
  std::size_t total_bytes;
  std::size_t requested_bytes;
  std::size_t allocated_bytes;
  std::size_t active_bytes;
  StreamHandle stream;
  bool is_large;
  bool is_expandable;
  PoolId pool_id;
  Context context;
  std::vector<BlockInfo> blocks;
};

// A private pool's live blocks at one moment: what a recorded graph has to find again.
struct PoolCheckpoint {
  struct LiveBlock {
    std::uintptr_t address;
    std::size_t bytes;
    std::size_t requested_bytes;
  };
  PoolId pool{0, 0};
  std::vector<LiveBlock> live;
};

struct ExpandableSize {
  StreamHandle stream;
  bool is_small;
  std::size_t mapped_bytes;
};

enum class FreeResult { kFreed, kUnknownPointer };

class CachingAllocator {
 public:
  CachingAllocator(Driver* driver, int device, const Settings& settings);
  ~CachingAllocator();  // gives every segment back
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  // nullptr for 0 bytes (no statistics) and when there is no room; then *report
  // (may be null) tells why.
  // Throws std::bad_alloc only when the host has no memory for the allocator's own records.
  void* allocate(std::size_t bytes, StreamHandle stream, std::unique_ptr<OomReport>* report);
  // *requested_bytes (may be null) receives what the allocation had asked for.
  FreeResult free(void* ptr, std::size_t* requested_bytes = nullptr) noexcept;
  // Defers the reuse of ptr's block until the work queued on `stream` now, and until the free,
  // is done. Ignores the block's own stream and unknown pointers.
  void record_stream(void* ptr, StreamHandle stream);

  // {0, 0}: everything that can be given back; else only that private pool.
  void empty_cache(PoolId pool = {0, 0});
  // In [0, 1]; kInvalidArgument otherwise. A limit exists only below 1.
  Status set_memory_fraction(double fraction);
  double memory_fraction() const;
  void apply_settings(const Settings& settings);

  // The block's start and size for a pointer into it; {nullptr, 0} when unknown.
  std::pair<void*, std::size_t> base_allocation(const void* ptr) const;
  // The start and size of the memory that the driver gave for it: a segment, or the contiguous
  // mapped pages of an expandable one. *is_expandable (may be null) tells which.
  std::pair<void*, std::size_t> driver_allocation(const void* ptr, bool* is_expandable = nullptr) const;
  bool owns(const void* ptr) const;
  // owns(), of an allocator that may have segments which its driver does not know; else false at once.
  bool owns_from_source(const void* ptr) const { return has_sources_.load(std::memory_order_acquire) && owns(ptr); }

  // --- Private pools ------------------------------------------------------------------------
  using StreamFilter = std::function<bool(StreamHandle)>;
  // Makes the pool on first use; each begin has an end. Requests of streams that pass the
  // filter go to the pool that was begun last.
  Status begin_allocate_to_pool(PoolId id, StreamFilter filter);
  Status end_allocate_to_pool(PoolId id);
  // Lowers the use count; at 0 the pool's memory can be given back.
  Status release_pool(PoolId id);
  // Makes the pool, or raises its use count. no_split holds from then on; use_on_oom makes it
  // a fall-back for other requests. A `source` holds for a pool that is made here.
  void create_or_use_pool(PoolId id, bool no_split, bool use_on_oom, std::shared_ptr<const SegmentSource> source = nullptr);
  std::int64_t pool_use_count(PoolId id) const;
  // Of a pool that exists.
  Status set_no_split(PoolId id);
  Status set_use_on_oom(PoolId id, bool use_on_oom);
  // What is handed out from the pool, by address.
  std::vector<void*> pool_live_allocations(PoolId id) const;
  // kInvalidArgument when the pool does not exist or is not in use, kNotReady while blocks of it
  // are freed but still used by other streams.
  Status checkpoint_pool(PoolId id, PoolCheckpoint* out);
  // Makes exactly the checkpoint's blocks live. `freed`: what was live before; `allocated`: what
  // is live now. On an error (its memory is gone) nothing has changed.
  Status restore_pool(const PoolCheckpoint& checkpoint, std::vector<void*>* freed, std::vector<void*>* allocated);

  // A stream capture is underway: no events are recorded until all of them have ended. (Also
  // while a graph's pool, (n, 0), is begun.)
  void begin_capture();
  void end_capture();

  // --- Statistics and history -----------------------------------------------------------------
  DeviceStats stats() const;
  // The largest free block of any pool.
  std::size_t largest_free_block_bytes() const;
  std::vector<ExpandableSize> expandable_sizes() const;
  std::vector<std::pair<PoolId, StatArray>> private_pool_reserved_bytes() const;
  void reset_peak_stats();
  void reset_accumulated_stats();

  void start_history(const HistoryOptions& options, bool clear_old = true);
  void stop_history();
  // Later events get no context, whatever the history's options say, until start_history().
  void stop_capturing() noexcept { may_capture_.store(false); }
  std::vector<TraceEntry> history() const;
  bool history_enabled() const;
  // Of a live allocation; null when none was captured.
  Context context_of(const void* ptr) const;
  // A note on a live allocation, for the history.
  void annotate(const void* ptr, std::string note);
  // Called with every event, recorded or not, while the allocator's lock is held: it must not
  // call the allocator, nor take a lock that a caller of the allocator may hold.
  void on_trace(std::function<void(const TraceEntry&)> tracker);
  std::vector<SegmentInfo> snapshot(bool mark = true);

  // Called (under no lock) before out of memory is decided; true: memory was freed, look again.
  void on_memory_pressure(std::function<bool()> callback);
  void on_oom(std::function<void(const OomReport&)> observer);
  // Of requests that throw_on_cudamalloc_oom refused without asking the driver.
  void on_rejection(std::function<void(const OomReport&)> observer);

  // Checks the whole state: every byte of every segment in exactly one block, neighbours
  // linked both ways, no two free neighbours in the same mapped state, free sets and
  // statistics equal to a recount. An empty string, or what is wrong.
  std::string check_invariants() const;

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  struct Request;
  using Lock = std::unique_lock<Mutex>;
  struct Pressure;

  // allocate.cpp
  BlockPool& pool_for(std::size_t rounded_bytes, StreamHandle stream);
  bool take_free_block(Request& r);
  Block best_fit_past_expandable(const Request& r, FreeSet::Key best, Block block) const;
  bool take_from_fallback_pools(Request& r);
  bool add_segment(Request& r, bool is_retry, Lock& lock);
  bool should_split(const BlockPool& pool, std::size_t block_bytes, std::size_t bytes) const;
  void* hand_out(Request& r);
  bool run_pressure_callbacks(Lock& lock);
  void fill_report(const Request& r, OomReport* report);

  // expandable.cpp
  Block find_expandable_space(Request& r);
  Block map_block(Block block, std::size_t bytes, Request& r);
  Block grow_expandable(Request& r);
  Block unmap_block(Block block, const Context& context);
  void drop_expandable_segment(Block block);

  // release.cpp
  Status give_back(const BlockPool& pool, void* ptr, std::size_t bytes, StreamHandle stream);
  void release_block(Block block, const Context& context);
  void release_pool_blocks(BlockPool& pool, const Context& context);
  bool release_cached_blocks(PoolId pool, const Context& context);
  bool release_available_blocks(const Request& r);
  void collect_garbage(const Context& context);
  void put_back(Block block, const Context& context);  // deferred or direct end of a free
  Block merge_neighbours(Block block);

  // events.cpp
  bool record_events(Block block);
  void record_deferred_events();
  void mark_uses(Block block);
  void put_back_passed(StreamHandle stream, const Context& context);
  void process_events(const Context& context);
  void synchronize_events(const Context& context, const PrivatePool* only);
  void finish_event(std::uintptr_t address, const Context& context);
  EventHandle take_event();

  // common
  Segment* new_segment(std::uintptr_t address, std::size_t bytes, StreamHandle stream, BlockPool* pool,
                       std::unique_ptr<ExpandableRange> expandable);
  void delete_segment(Segment* segment) noexcept;
  static FreeSet::Key key_of(Block block) noexcept { return {block.bytes(), block.address()}; }
  static void insert_free(Block block) { block.pool().free.insert(block.stream(), key_of(block)); }
  int stat_pool(const BlockPool& pool) const noexcept { return pool.is_small ? kSmall : kLarge; }
  static void add(StatArray& array, int pool, std::int64_t amount) noexcept;
  static void subtract(StatArray& array, int pool, std::int64_t amount) noexcept;
  void change_reserved(BlockPool& pool, std::int64_t bytes);
  void record(Action action, std::uintptr_t address, std::size_t bytes, StreamHandle stream, const BlockPool* pool, const Context& context);
  void record_to_all(TraceEntry entry);
  void carve(Block block, const PoolCheckpoint::LiveBlock& wanted, const Context& context);
  void record_note(Action action, std::string note);
  Context capture_context(RecordContext level) const {
    return may_capture_.load(std::memory_order_relaxed) ? capture_unlocked(level) : Context();
  }
  Context capture_unlocked(RecordContext level) const;
  PrivatePool* find_pool(PoolId id) const;

  Driver* const driver_;
  const int device_;
  std::size_t total_bytes_ = 0;

  mutable Mutex mutex_;
  Settings settings_;
  double fraction_ = 1.0;
  std::size_t allowed_bytes_ = kUnlimitedBytes;  // a limit exists when below kUnlimitedBytes
  bool collection_armed_ = false;                // a limit exists and the threshold is set
  std::size_t reserved_bytes_ = 0;

  BlockPool small_{true, nullptr};
  BlockPool large_{false, nullptr};
  BlockTable blocks_;
  std::vector<std::unique_ptr<Segment>> segments_;  // unordered

  std::vector<std::unique_ptr<PrivatePool>> private_pools_;
  std::atomic<bool> has_sources_{false};  // a private pool had a SegmentSource
  PoolIdSet freeable_pools_;
  PoolIdSet fallback_pools_;
  struct ActivePool {
    PrivatePool* pool;
    StreamFilter filter;
  };
  std::vector<ActivePool> active_pools_;  // the last one is searched first
  int capture_count_ = 0;                 // of them, graph captures: (n, 0); a program's own pool is (0, n)

  struct PendingEvent {
    EventHandle event;
    std::uintptr_t address;  // of the block
  };
  StreamTable<std::deque<PendingEvent>> pending_events_;
  std::vector<EventHandle> spare_events_;
  std::vector<std::uintptr_t> event_waiters_;  // blocks freed while a capture was underway: events come later

  DeviceStats stats_;
  std::vector<std::pair<PoolId, StatArray>> private_reserved_;
  History history_;
  std::atomic<bool> may_capture_{false};  // history is on and wants contexts
  std::vector<std::function<bool()>> pressure_callbacks_;
  std::vector<std::function<void(const OomReport&)>> oom_observers_;
  std::vector<std::function<void(const OomReport&)>> rejection_observers_;
  std::vector<std::function<void(const TraceEntry&)>> trackers_;
};

}  // namespace mybackend::caching
