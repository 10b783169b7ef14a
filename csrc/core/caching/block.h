// Vocabulary of the caching allocator.
//
//   segment   memory taken from the driver in one piece, or (expandable) an address range in
//             which pages are mapped as needed
//   block     a part of a segment. The blocks of a segment tile it; neighbours are linked.
//             active:  handed out, or freed while another stream still uses it
//             inactive: in its pool's free set; two free neighbours in the same mapped state
//             are always merged
//             unmapped: part of an expandable segment without memory
//   pool      small or large; the default pair, and a pair for each private pool
//   split     a block with neighbours: its segment cannot be given back
//
// All of it is guarded by the mutex of the CachingAllocator that owns it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/caching/free_set.h"
#include "driver/driver.h"

namespace mybackend::caching {

struct Block;
struct PrivatePool;
class ExpandableRange;

// (0, 0) is the default pool. As in PyTorch: first is set for graph captures, second for pools
// that a program made.
using PoolId = std::pair<std::uint64_t, std::uint64_t>;

// What a history recorder captured at an event; opaque to the allocator.
using Context = std::shared_ptr<void>;

// Of unmapped blocks: by (stream, address). A stream alone is before all its blocks.
struct UnmappedOrder {
  using is_transparent = void;
  bool operator()(const Block* a, const Block* b) const noexcept;
  bool operator()(const Block* a, StreamHandle stream) const noexcept;
};

struct BlockPool {
  explicit BlockPool(bool small, PrivatePool* owner) : is_small(small), owner(owner) {}

  const bool is_small;
  PrivatePool* const owner;                  // nullptr for the default pools
  FreeSet free;                              // inactive mapped blocks by (stream, size, address)
  std::set<Block*, UnmappedOrder> unmapped;  // by (stream, address)
  std::int64_t search_count = 0;             // searches while garbage collection is armed: the clock of ages
};

struct Segment {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;  // of an expandable segment: the whole address range
  StreamHandle stream = 0;
  BlockPool* pool = nullptr;
  Block* first = nullptr;  // the block at `address`
  std::unique_ptr<ExpandableRange> expandable;
  Context context;  // of its allocation
};

// What few blocks have.
struct BlockExtra {
  std::vector<StreamHandle> stream_uses;  // streams that record_stream named, no duplicates
  std::int64_t event_count = 0;           // outstanding events of streams that used it
  std::vector<CaptureMarker> markers;     // freed in a capture: behind its last use on each stream
  Context context;                        // of its allocation
};

// One cache line: with many live blocks, looking at a block is a memory access.
struct alignas(64) Block {
  std::uintptr_t address = 0;  // for good: BlockTable keeps it by its address
  std::size_t bytes = 0;
  std::size_t requested_bytes = 0;  // of a free block: what it was last used for
  Segment* segment = nullptr;
  Block* previous = nullptr;  // by address, in the segment
  Block* next = nullptr;
  std::unique_ptr<BlockExtra> extra;
  std::int64_t age_base : 62 = 0;  // the pool's search_count when it was inserted
  bool allocated : 1 = false;
  bool mapped : 1 = true;

  StreamHandle stream() const noexcept { return segment->stream; }
  BlockPool& pool() const noexcept { return *segment->pool; }
  bool is_split() const noexcept { return previous != nullptr || next != nullptr; }
  bool is_expandable() const noexcept { return segment->expandable != nullptr; }
  // Free to be merged or built upon: not handed out, and no stream still uses it.
  bool is_available() const noexcept { return !allocated && (extra == nullptr || (extra->event_count == 0 && extra->stream_uses.empty())); }
  std::int64_t age() const noexcept { return pool().search_count - age_base; }
  Context context() const { return extra != nullptr ? extra->context : Context(); }
  BlockExtra& need_extra() {
    if (extra == nullptr) extra = std::make_unique<BlockExtra>();
    return *extra;
  }
};
static_assert(sizeof(Block) == 64);

inline bool UnmappedOrder::operator()(const Block* a, const Block* b) const noexcept {
  return a->stream() != b->stream() ? a->stream() < b->stream() : a->address < b->address;
}
inline bool UnmappedOrder::operator()(const Block* a, StreamHandle stream) const noexcept {
  return a->stream() < stream;
}

// Where a private pool gets its segments instead of from the driver. Called under the allocator's
// mutex (allocate: without it): it must not come back to this allocator.
struct SegmentSource {
  std::function<void*(std::size_t bytes, StreamHandle stream)> allocate;  // nullptr: no memory
  std::function<void(void* ptr, std::size_t bytes, StreamHandle stream)> free;
};

// Whether this thread is in a SegmentSource's allocate.
bool in_segment_source() noexcept;

struct PrivatePool {
  explicit PrivatePool(PoolId id) : id(id) {}

  const PoolId id;
  std::int64_t use_count = 1;
  std::int64_t segment_count = 0;  // driver allocations that are still held
  bool no_split = false;
  std::shared_ptr<const SegmentSource> source;  // nullptr: the driver
  BlockPool small{true, this};
  BlockPool large{false, this};
};

}  // namespace mybackend::caching
